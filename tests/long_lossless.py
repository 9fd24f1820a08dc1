"""Is greedy speculation exactly lossless over a long run? Outside the suite: it takes minutes on a laptop.

    python tests/long_lossless.py TARGET DRAFT PROMPTS.jsonl [--tokens 10000] [--n-predict 128] [--seconds S] [--start N]

Every prompt is written plainly and with the draft, n_max 1 to 8 in turn, until so many drafted-for tokens are compared;
prints one JSON line and ends with 1 if a text differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from localspec import native
from localspec.accept import Sampling
from localspec.bench import encode_prompt
from localspec.blocks import FixedBlock
from localspec.drafters import DrafterSettings, load
from localspec.engine import Engine, Request
from localspec.model import Model
from localspec.prompts import read_prompts, spread
from localspec.target import SessionSettings, TargetSession
from localspec.template import ChatTemplate


def write(engine: Engine, prompt: list[int], n: int) -> tuple[list[int], int]:
    """(generated ids, accepted drafts), from an empty cache."""
    engine.session.rollback(0, 0)
    for _ in engine.generate(Request(prompt, Sampling(temperature=0), n)):
        pass
    ids = engine.tokens(0)[len(prompt) :]
    return ids, engine.finish(0).n_accepted


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first token in which two texts differ; None if they are the same."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def run(options: argparse.Namespace) -> dict[str, Any]:
    native.use_kernels(options.kernels)
    prompts = spread(read_prompts(options.prompts), 0)
    ended = time.monotonic() + options.seconds
    n_tokens = n_accepted = 0
    turn = options.start
    difference: dict[str, int] | None = None
    with Model(options.target) as model, TargetSession(model, SessionSettings(n_ctx=2048)) as session:
        template = ChatTemplate.of(model)
        drafter = load("lm", session, DrafterSettings(options.draft))
        plain, block = Engine(session), FixedBlock(1)
        engine = Engine(session, drafter, block)
        while n_tokens < options.tokens and time.monotonic() < ended:
            prompt = encode_prompt(model, template, prompts[turn % len(prompts)].turns)
            # The second time through the prompts each meets another block size.
            block.n_max = 1 + (turn + turn // len(prompts)) % 8
            expected, _ = write(plain, prompt, options.n_predict)
            text, accepted = write(engine, prompt, options.n_predict)
            at = first_difference(expected, text)
            if at is not None and difference is None:
                difference = {"prompt": turn % len(prompts), "n_max": block.n_max, "token": at}
            n_tokens += len(text)
            n_accepted += accepted
            turn += 1
        drafter.close()
    return {
        "tokens": n_tokens, "prompts": turn - options.start, "identical": difference is None, "first_difference": difference,
        "accepted": n_accepted, "kernels": native.kernels_in_use(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--n-predict", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after the prompt during which these pass")
    parser.add_argument("--start", type=int, default=0, help="begin with this prompt: to go on where a run ended")
    parser.add_argument("--kernels", choices=native.KERNELS, default="localspec")
    result = run(parser.parse_args())
    print(json.dumps(result))
    sys.exit(0 if result["identical"] else 1)


if __name__ == "__main__":
    main()
