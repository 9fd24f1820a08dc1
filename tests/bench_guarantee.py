"""Is drafting ever slower than plain decoding, and is the adaptive block as good as the best fixed one? On real models.

    python -m tests.bench_guarantee MODEL DRAFT... --prompts FILE [--limit 4 -n 512 --repeats 5 --temp 0 --threads 1]
    python -m tests.bench_guarantee MODEL DRAFT... --prompts FILE --fixed 1,2,3,4,5,6,8

A DRAFT is `ngram`, `shipped`, a draft's file, `scrambled:FILE` (the blocks of its weights in another order: a draft that is
wrong nearly always and costs what it always cost), or `plain`, which shows the noise of the measurement. Every text is
written in turn by plain decoding, in a context of its own that reads nothing for a draft, and by each of the others, with
a controller that begins without knowing anything. `--repeat-prompt N` makes prompts of about N tokens.

Without --fixed the seconds of every stretch of 256 tokens of a text are held against plain decoding's, each the median of
the repeats: `worst` is the largest ratio, above 1 is slower. With it: tokens per second of each block size and of the
adaptive one, over plain decoding's. One JSON line for each draft.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from localspec import native
from localspec.accept import Sampling
from localspec.bench import encode_prompts
from localspec.control import ADAPTIVE_N_MAX, Adaptive, Controller, FixedBlock
from localspec.drafters import DrafterSettings, load, taps
from localspec.engine import Engine, Request
from localspec.gguf_file import GGUFFile
from localspec.gguf_format import TENSOR_TYPES
from localspec.model import Model
from localspec.pairing import drafter_for
from localspec.prompts import read_prompts
from localspec.shipped import shipped_draft
from localspec.target import SessionSettings, TargetSession

WINDOW = 256
_BLOCK_BYTES = {name: size for name, _, size in TENSOR_TYPES.values()}


def scrambled(path: Path, to: Path) -> Path:
    """A copy of a draft whose matrices have their blocks in another order; everything else stays."""
    gguf = GGUFFile.open(path, "draft")
    data = bytearray(path.read_bytes())
    rng = np.random.default_rng(0)
    for tensor in gguf.tensors.values():
        if len(tensor.shape) > 1:
            part = np.frombuffer(data, np.uint8, tensor.nbytes, tensor.offset).reshape(-1, _BLOCK_BYTES[tensor.type])
            part[:] = part[rng.permutation(len(part))]
    to.write_bytes(data)
    return to


@dataclass
class Text:
    """One text as it was written: its tokens, and the seconds at which each was there; `n_verify` decodes."""

    tokens: list[int]
    at: np.ndarray
    n_verify: int

    def windows(self) -> np.ndarray:
        """Seconds of every stretch of WINDOW tokens, f64[n - WINDOW]; of the whole where it is shorter, f64[1]."""
        return self.at[WINDOW:] - self.at[:-WINDOW] if len(self.at) > WINDOW + 1 else self.at[-1:] - self.at[0]


def write(engine: Engine, prompt: list[int], n: int, sampling: Sampling) -> Text:
    slot = engine.start(Request(prompt, sampling, n))
    began = time.perf_counter()
    counts, seconds = [0], [0.0]
    while True:
        step = engine.step()[0]
        counts.append(counts[-1] + sum(piece.token >= 0 for piece in step.pieces))
        seconds.append(time.perf_counter() - began)
        if step.stop is not None:
            break
    tokens = engine.tokens(slot)[len(prompt) :]
    stats = engine.finish(slot)
    engine.session.rollback(0, 0)
    return Text(tokens, np.interp(np.arange(len(tokens) + 1), counts, seconds), stats.n_verify)


def engine_for(model: Model, name: str, args: argparse.Namespace, folder: Path) -> Engine:
    """A context of its own with the draft `name`."""
    settings = SessionSettings(n_ctx=args.ctx_size, n_threads=args.threads)
    if name == "plain":
        return Engine(TargetSession(model, settings))
    kind, path = "ngram", None
    if name != "ngram":
        path = shipped_draft(model.gguf) if name == "shipped" else Path(name.removeprefix("scrambled:"))
        assert path is not None, "no draft is shipped for this target"
        path = scrambled(path, folder / f"{path.stem}.scrambled.gguf") if name.startswith("scrambled:") else path
        kind = drafter_for(GGUFFile.open(path, "draft"))
    draft = DrafterSettings(path, n_threads=args.threads)
    session = TargetSession(model, replace(settings, taps=taps(kind, model.gguf, draft)))
    return Engine(session, load(kind, session, draft))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("drafts", nargs="+")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--source", help="only prompts of this source")
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("-n", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ctx-size", type=int, default=4096)
    parser.add_argument("--repeat-prompt", type=int, default=0)
    parser.add_argument("--fixed", default="")
    args = parser.parse_args()
    native.use_kernels("auto")
    model = Model(args.model)
    chosen = [p for p in read_prompts(args.prompts) if args.source in (None, p.source)]
    random.Random(0).shuffle(chosen)
    prompts = encode_prompts(model, args.ctx_size, chosen[: args.limit])
    if args.repeat_prompt:
        prompts = [(p * (1 + args.repeat_prompt // len(p)))[: args.repeat_prompt] + p for p in prompts]
    sampling = Sampling(temperature=args.temp, seed=7)
    plain = Engine(TargetSession(model, SessionSettings(n_ctx=args.ctx_size, n_threads=args.threads)))
    with tempfile.TemporaryDirectory() as folder:
        for name in args.drafts:
            engine = engine_for(model, name, args, Path(folder))
            report = best_fixed if args.fixed else guarantee
            found = report(plain, engine, prompts, sampling, args)
            print(json.dumps({"draft": name, "temp": args.temp, **found}), flush=True)


def guarantee(
    plain: Engine, engine: Engine, prompts: list[list[int]], sampling: Sampling, args: argparse.Namespace
) -> dict[str, Any]:
    ratios: list[float] = []
    base = mine = 0.0
    n_tokens = n_verify = 0
    identical = True
    for prompt in prompts:
        pairs = []
        for repeat in range(args.repeats):
            engine.controller = Adaptive()
            pair = {}
            for e in (plain, engine) if repeat % 2 else (engine, plain):
                pair[e is engine] = write(e, prompt, args.n, sampling)
            identical &= pair[True].tokens == pair[False].tokens
            pairs.append(pair)
        of = {side: np.median([pair[side].windows() for pair in pairs], 0) for side in (False, True)}
        ratios += (of[True] / of[False]).tolist()
        base += statistics.median(pair[False].at[-1] for pair in pairs)
        mine += statistics.median(pair[True].at[-1] for pair in pairs)
        n_tokens += sum(len(pair[True].tokens) for pair in pairs)
        n_verify += sum(pair[True].n_verify for pair in pairs)
    return {
        "windows": len(ratios), "worst": round(max(ratios), 4), "p95": round(float(np.quantile(ratios, 0.95)), 4),
        "median": round(statistics.median(ratios), 4), "speedup": round(base / mine, 3),
        "tokens_per_verify": round(n_tokens / n_verify, 3), "identical": identical,
    }  # fmt: skip


def best_fixed(
    plain: Engine, engine: Engine, prompts: list[list[int]], sampling: Sampling, args: argparse.Namespace
) -> dict[str, Any]:
    ways: dict[str, int] = {"adaptive": -1} | {str(k): k for k in map(int, args.fixed.split(","))}
    seconds = {way: 0.0 for way in ("plain", *ways)}
    identical = True
    for prompt in prompts:
        took: dict[str, list[float]] = {way: [] for way in seconds}
        for repeat in range(args.repeats):
            texts = []
            order = list(seconds)
            random.Random(repeat).shuffle(order)
            for way in order:
                controller: Controller = Adaptive(ADAPTIVE_N_MAX) if way == "adaptive" else FixedBlock(ways.get(way, 0))
                e = plain if way == "plain" else engine
                e.controller = controller
                text = write(e, prompt, args.n, sampling)
                took[way].append(float(text.at[-1]))
                texts.append(text.tokens)
            identical &= all(tokens == texts[0] for tokens in texts)
        for way, values in took.items():
            seconds[way] += statistics.median(values)
    speedups = {way: round(seconds["plain"] / value, 3) for way, value in seconds.items() if way != "plain"}
    best = max((way for way in speedups if way != "adaptive"), key=lambda way: speedups[way])
    return {"speedup": speedups, "best": best, "adaptive_over_best": round(speedups["adaptive"] / speedups[best], 3),
            "identical": identical}  # fmt: skip


if __name__ == "__main__":
    main()
