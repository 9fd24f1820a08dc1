"""How long accept/reject takes, the extension against its numpy twin. Not a test: python tests/bench_accept.py

Nine rows are eight drafted tokens, all of them kept, and the one after them: the most work that a block can be.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import numpy as np

from localspec import _verify
from localspec.accept import Block, Draft, Sampling, draw, verify

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
CASES = {
    "greedy": Sampling(temperature=0),
    "top-k 40, top-p .95, min-p .05": Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
    "the same with penalties": Sampling(repeat_penalty=1.1, frequency_penalty=0.1),
    "top-p .95 alone": Sampling(top_k=0, top_p=0.95, min_p=0),
    "no filter": Sampling(temperature=1.0, **OFF),
}


def median(call: Callable[[], object], seconds: float) -> float:
    """Median of at least three calls, in microseconds."""
    call()
    took: list[float] = []
    until = time.perf_counter() + seconds
    while len(took) < 3 or time.perf_counter() < until:
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return 1e6 * float(np.median(took))


def block(logits: np.ndarray, s: Sampling) -> list[Block]:
    """One block whose drafts are all kept."""
    m = len(logits)
    history = np.arange(64, dtype=np.int32)
    tokens: list[int] = []
    for i in range(m):
        before = np.concatenate([history, np.array(tokens, np.int32)])
        tokens.append(int(draw(logits[i : i + 1], [0], [i], [s], [before]).tokens[0]))
    return [Block(0, 0, Draft(np.array(tokens[:-1], np.int32), np.ones(m - 1, np.float32)), s, history)]


def main() -> None:
    """Print a table, then one line of JSON."""
    rng = np.random.default_rng(0)
    result: dict[str, object] = {"isa": _verify.isa(), "us": {}}
    table: dict[str, dict[str, float]] = {}
    print(f"9 rows of 151,936 logits, kernels {_verify.isa()}, microseconds per call")
    print(f"{'settings':32} {'numpy':>10} {'extension':>10} {'ratio':>7}")
    logits = rng.normal(0, 3, (9, 151_936)).astype(np.float32)
    for name, s in CASES.items():
        blocks = block(logits, s)
        assert verify(logits, blocks)[0].n_accepted == 8
        slow = median(lambda b=blocks: verify(logits, b, reference=True), 0.5)
        fast = median(lambda b=blocks: verify(logits, b), 0.5)
        table[name] = {"numpy": round(slow, 1), "extension": round(fast, 1), "ratio": round(fast / slow, 4)}
        print(f"{name:32} {slow:10.0f} {fast:10.0f} {fast / slow:7.3f}")
    result["us"] = table

    small = rng.normal(0, 3, (4, 8)).astype(np.float32)  # next to no work: what is left is Python and the binding
    eog = np.zeros(8, bool)
    for name in ("greedy", "top-k 40, top-p .95, min-p .05"):
        blocks = block(small, CASES[name])
        took = round(median(lambda b=blocks: verify(small, b, eog=eog), 0.3), 1)
        result[f"overhead_us, {name}"] = took
        print(f"4 rows of 8 logits, {name}: {took:.1f}")
    rows = rng.normal(0, 3, (4, 49_152)).astype(np.float32)
    blocks = block(rows, CASES["greedy"])
    result["greedy_4x49152_us"] = took = round(median(lambda: verify(rows, blocks), 0.3), 1)
    print(f"4 rows of 49,152 logits, greedy: {took:.1f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
