"""What a decode of n tokens costs: stock kernels against this plug-in, interleaved.

Two child processes load the same model, one of them with the plug-in; the parent lets them measure in turns, so that both
see the same machine. Prints medians in milliseconds, ratios to one token, and the plug-in's time against stock's.

    python tests/native/bench_matmul.py --library <libggml-localspec.so> MODEL.gguf [MODEL.gguf ...]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any


def load(model: str, library: str | None, threads: int, context: int, flash: int) -> tuple[Any, Any, Any]:
    """The llama_cpp module, and a model with a context of its own; the plug-in is loaded first when there is one."""
    import ctypes

    import llama_cpp

    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    load.keep = quiet  # type: ignore[attr-defined]
    llama_cpp.llama_backend_init()
    if library:
        function = llama_cpp.llama_cpp._lib.ggml_backend_load
        function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
        if not function(library.encode()):
            raise SystemExit(f"{library} could not be loaded")
    mp = llama_cpp.llama_model_default_params()
    loaded = llama_cpp.llama_model_load_from_file(model.encode(), mp)
    cp = llama_cpp.llama_context_default_params()
    cp.n_ctx, cp.n_batch, cp.n_ubatch = context, 512, 512
    cp.n_threads = cp.n_threads_batch = threads
    cp.flash_attn_type = flash
    return llama_cpp, loaded, llama_cpp.llama_init_from_model(loaded, cp)


class Decoder:
    """Decodes made-up tokens at chosen positions, every row (or the last `n_logits`) with logits."""

    def __init__(self, llama: Any, model: Any, context: Any) -> None:
        self.llama, self.context = llama, context
        self.n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self.batch = llama.llama_batch_init(512, 0, 1)

    def __call__(self, start: int, n: int, n_logits: int = 512) -> float:
        """Decodes n tokens from position `start` on, forgetting what was there; returns milliseconds."""
        memory = self.llama.llama_get_memory(self.context)
        self.llama.llama_memory_seq_rm(memory, 0, start, -1)
        self.batch.n_tokens = n
        for i in range(n):
            self.batch.token[i] = 1000 + (start + i) * 7919 % min(self.n_vocab - 1000, 30000)
            self.batch.pos[i] = start + i
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = 0
            self.batch.logits[i] = i >= n - n_logits
        before = time.perf_counter()
        if self.llama.llama_decode(self.context, self.batch):
            raise SystemExit("llama_decode failed")
        self.llama.llama_synchronize(self.context)
        return 1e3 * (time.perf_counter() - before)


def child(args: argparse.Namespace) -> None:
    decode = Decoder(*load(args.models[0], args.library, args.threads, args.depth + 640, args.flash))
    at = 0
    while at < args.depth:
        step = min(512, args.depth - at)
        decode(at, step)
        at += step
    print("ready", flush=True)
    for line in sys.stdin:
        n, repeat = map(int, line.split())
        decode(args.depth, n)
        print(json.dumps([decode(args.depth, n) for _ in range(repeat)]), flush=True)


def measure(model: str, args: argparse.Namespace) -> dict[str, Any]:
    common = [sys.executable, os.path.abspath(__file__), "--child", "--threads", str(args.threads)]
    common += ["--depth", str(args.depth), "--flash", str(args.flash), model]
    kinds = {"stock": common, "localspec": [*common, "--library", args.library]}
    if args.only:
        kinds = {args.only: kinds[args.only]}
    run = {k: subprocess.Popen(c, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for k, c in kinds.items()}
    times: dict[str, dict[int, list[float]]] = {k: {n: [] for n in args.n} for k in run}
    for process in run.values():
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise SystemExit(f"{model}: the child process failed")
    for _ in range(args.rounds):
        for n in args.n:
            for k, process in run.items():
                assert process.stdin is not None
                assert process.stdout is not None
                print(n, max(1, min(6, 24 // n)), file=process.stdin, flush=True)
                times[k][n] += json.loads(process.stdout.readline())
    for process in run.values():
        process.communicate()
    pick = min if args.best else statistics.median
    return {k: {n: pick(v) for n, v in t.items()} for k, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--library", help="path of libggml-localspec")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--depth", type=int, default=128, help="tokens of context before the measured ones")
    parser.add_argument("--flash", type=int, default=1, help="flash attention: -1 auto, 0 off, 1 on")
    parser.add_argument("--n", type=lambda s: [int(x) for x in s.split(",")], default=[1, 2, 4, 8, 16, 128])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--best", action="store_true", help="minima instead of medians, for a busy machine")
    parser.add_argument("--only", choices=["stock", "localspec"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args)
    for model in args.models:
        result = measure(model, args)
        if args.json:
            print(json.dumps({"model": os.path.basename(model), **result}))
            continue
        print(f"{os.path.basename(model)}, {args.threads} threads, {args.depth} tokens of context, ms")
        for n in args.n:
            row = f"  n={n:<4}"
            for k, t in result.items():
                row += f" {k} {t[n]:8.2f} ({t[n] / t[args.n[0]]:5.2f}x)"
            if len(result) == 2:
                row += f"   localspec/stock {result['localspec'][n] / result['stock'][n]:.3f}"
            print(row, flush=True)


if __name__ == "__main__":
    main()
