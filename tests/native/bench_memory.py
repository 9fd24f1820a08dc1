"""What a model takes in memory and how long it loads: stock kernels against ours, with mmap and without.

    python tests/native/bench_memory.py [--rounds 3] MODEL.gguf [MODEL.gguf ...]

Each measurement is a process of its own. Resident memory is counted after a decode of 64 tokens, in MiB: what is mapped
from files, what is not, and what remains when everything is closed, beyond what was there before. Times are the shortest of
the rounds, with the file in the system's cache; CPU time counts all threads, and says more on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from localspec import native
from localspec.model import Model
from localspec.target import SessionSettings, TargetSession

ROOT = Path(__file__).resolve().parents[2]


def resident() -> dict[str, float]:
    """MiB of this process in physical memory: anonymous, and pages of files."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("RssAnon", "RssFile"):
            found[name] = int(value.split()[0]) / 1024
    return {"anonymous": found["RssAnon"], "files": found["RssFile"]}


def measure(paths: list[str], kernels: str, use_mmap: bool, n_contexts: int = 1) -> dict[str, Any]:
    """Load the models, each with n_contexts contexts that decode at the same time, and close all of it again."""
    native.use_kernels(kernels)
    with Model(paths[0]):  # what the libraries and our own reader take stays out of the count
        pass
    before = resident()
    started, cpu = time.perf_counter(), time.process_time()
    models = [Model(path, use_mmap=use_mmap) for path in paths]
    load_ms, cpu_ms = 1e3 * (time.perf_counter() - started), 1e3 * (time.process_time() - cpu)
    sessions = [TargetSession(m, SessionSettings(n_ctx=256)) for m in models for _ in range(n_contexts)]
    picked = []
    for session in sessions:
        ids = [1000 + i for i in range(64)]
        session.prefill(0, ids)
        picked.append(int(np.argmax(session.decode([(0, [7])]).logits[0])))
    open_ = resident()
    for session in sessions:
        session.close()
    for model in models:
        model.close()
    after = resident()
    more = {key: open_[key] - before[key] for key in before}
    return {
        "kernels": native.kernels_in_use(), "load_ms": load_ms, "cpu_ms": cpu_ms, "picked": picked, **more,
        "total": sum(more.values()), "left": sum(after.values()) - sum(before.values()),
    }  # fmt: skip


def child(paths: list[Path], kernels: str, use_mmap: bool, n_contexts: int = 1) -> dict[str, Any]:
    """`measure` in a process of its own."""
    options = json.dumps([[str(p) for p in paths], kernels, use_mmap, n_contexts])
    done = subprocess.run(
        [sys.executable, "-m", "tests.native.bench_memory", "--child", options],
        capture_output=True, text=True, cwd=ROOT, timeout=300, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-3000:])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(*json.loads(args.child))))
        return
    for path in args.models:
        print(f"{path.name}, {path.stat().st_size / 2**20:.0f} MiB")
        runs: dict[tuple[str, bool], list[dict[str, Any]]] = {}
        for _ in range(args.rounds):
            for kernels in ("stock", "localspec"):
                for use_mmap in (True, False):
                    runs.setdefault((kernels, use_mmap), []).append(child([path], kernels, use_mmap))
        for (kernels, use_mmap), results in runs.items():
            r = min(results, key=lambda one: float(one["load_ms"]))
            print(
                f"  {kernels:<10} {'mmap' if use_mmap else 'no mmap':<8} load {r['load_ms']:6.0f} ms "
                f"({r['cpu_ms']:.0f} of CPU)   {r['total']:6.0f} MiB "
                f"({r['anonymous']:.0f} + {r['files']:.0f} of files), {r['left']:.0f} left",
                flush=True,
            )


if __name__ == "__main__":
    main()
