"""What a speculative step costs outside llama.cpp and the extension: `python tests/bench_overhead.py MODEL [kernels]`.

Times every call into llama.cpp and into the accept extension, and the whole steps around them; prints one JSON line.
The drafter is ngram on a text that repeats itself, n_max 3: its whole time counts as ours.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from localspec import accept, native
from localspec.accept import Sampling
from localspec.blocks import FixedBlock
from localspec.drafters.ngram import NgramDrafter
from localspec.engine import Engine, Request
from localspec.model import Model
from localspec.target import SessionSettings, TargetSession

PROMPT = "List the days of the week, then list them again in the same order. Monday, Tuesday, Wednesday. Monday, Tuesday,"


class Clock:
    """Sums the time spent inside the functions it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def main(path: str, kernels: str) -> None:
    native.use_kernels(kernels)
    model = Model(path)
    session = TargetSession(model, SessionSettings(n_ctx=512))
    engine = Engine(session, NgramDrafter(), FixedBlock(3))
    prompt = model.tokenizer.encode(PROMPT)
    for _ in engine.generate(Request(prompt, Sampling(temperature=0), 100)):
        pass
    engine.finish(0)
    session.rollback(0, 0)
    clock = Clock()
    lib = native.lib()
    for name in ("llama_decode", "llama_get_logits", "llama_memory_seq_rm"):
        setattr(lib, name, clock.wrap(getattr(lib, name)))
    accept._native = clock.wrap(accept._native)
    slot = engine.start(Request(prompt, Sampling(temperature=0), 400))
    clock.seconds = 0.0
    while engine.step()[0].stop is None:
        pass
    stats = engine.finish(slot)
    share = 1 - clock.seconds / stats.t_step
    ms = 1e3 * stats.t_step / stats.n_verify
    result = {
        "kernels": native.kernels_in_use(), "steps": stats.n_verify, "tokens_per_verify": stats.tokens_per_verify,
        "ms_per_step": ms, "ms_outside": ms * share, "share_outside": share,
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "auto")
