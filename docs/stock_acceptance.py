"""Whether stock llama.cpp accepts as much of a draft's tokens as localspec does: `llama-server -m T -md D --spec-type ...`.

    python docs/stock_acceptance.py --llama-server PATH --target T.gguf --draft D.gguf --prompts dev.jsonl --limit 8

Both decode the same prompts greedily with the same fixed number of drafted tokens, localspec on llama.cpp's own kernels.
Texts part all the same, where two tokens are nearly as likely: rows of other batches round otherwise. Acceptance is then
another text's, so both answer again, only up to where they parted, and what is compared is acceptance on equal text; that
of the whole answers is shown beside it. Prints a table by source and a line of JSON; exit code 1 where the two are more
than 2 points apart, 2 where something is missing. PATH is a llama-server of the pinned llama.cpp, built from the sdist of
llama-cpp-python.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.accept import Sampling
from localspec.bench import encode_prompts
from localspec.cli.loading import Loaded, open_engine
from localspec.cli.options import ModelChoice
from localspec.engine import Request
from localspec.errors import LocalspecError, UsageError
from localspec.gguf_file import GGUFFile
from localspec.llama_arch import SPEC_TYPES
from localspec.pairing import drafter_for
from localspec.peer import LlamaServer, draft_arguments, server_arguments
from localspec.prompts import BUILT_IN, read_prompts, spread
from localspec.target import SessionSettings

MOST_POINTS = 2.0
#: tokens of an answer that say something
SHORTEST = 8


@dataclass
class Count:
    """Drafted tokens and how many of them were kept, of both programs, over `n` answers of `n_tokens` tokens in all."""

    n: int = 0
    n_tokens: int = 0
    ours_drafted: int = 0
    ours_kept: int = 0
    theirs_drafted: int = 0
    theirs_kept: int = 0

    def add(self, other: Count) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def ours(self) -> float:
        """Acceptance in percent."""
        return 100 * self.ours_kept / max(1, self.ours_drafted)

    @property
    def theirs(self) -> float:
        return 100 * self.theirs_kept / max(1, self.theirs_drafted)

    @property
    def points(self) -> float:
        """How much more the server keeps, in points."""
        return self.theirs - self.ours

    def row(self, name: str) -> str:
        return (
            f"{name:<26} {self.n:>7} {self.n_tokens:>7} {self.ours:>9.2f} % {self.ours_drafted:>8} {self.theirs:>9.2f} % "
            f"{self.theirs_drafted:>8} {self.points:>+8.2f}"
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--llama-server", required=True, type=Path, metavar="PATH")
    parser.add_argument("--target", required=True, type=Path, metavar="FILE")
    parser.add_argument("--draft", type=Path, metavar="FILE", help="without one: n-grams of the text")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines [six of localspec's own]")
    parser.add_argument("--limit", type=int, default=8, metavar="N", help="prompts, spread over the sources [%(default)s]")
    parser.add_argument("-n", "--n-predict", type=int, default=128, metavar="N", help="tokens of each answer [%(default)s]")
    parser.add_argument("--n-max", type=int, default=3, metavar="N", help="tokens drafted each time [%(default)s]")
    parser.add_argument("-t", "--threads", type=int, default=1, metavar="N", help="[%(default)s]")
    parser.add_argument("-c", "--ctx-size", type=int, default=2048, metavar="N", help="[%(default)s]")
    parser.add_argument("--kernels", default="stock", choices=("stock", "auto"), help="localspec's [%(default)s]")
    return parser.parse_args()


def settings(loaded: Loaded, args: argparse.Namespace) -> dict[str, Any]:
    """What localspec.peer makes the server's flags of."""
    assert loaded.drafter is not None
    session = loaded.session
    return {
        "target": str(args.target), "draft": str(args.draft) if args.draft else None, "spec_type": loaded.drafter.name,
        "n_max": args.n_max, "p_min": 0.0, "adapt": False, "n_ctx": session.n_ctx, "n_batch": session.n_batch,
        "threads": args.threads, "n_gpu_layers": 0, "n_gpu_layers_draft": 0,
        "flash_attention": session.settings.flash_attention,
        "type_k": session.settings.type_k, "type_v": session.settings.type_v,
    }  # fmt: skip


def answered(loaded: Loaded, server: LlamaServer, tokens: list[int], n_predict: int, key: int) -> tuple[Count, int]:
    """One prompt through both, and how many tokens their answers have in common: all, or up to where they part."""
    greedy = Sampling(temperature=0)
    loaded.session.rollback(0, 0)
    for _ in loaded.engine.generate(Request(tokens, greedy, n_predict, key=key)):
        pass
    text = loaded.engine.tokens(0)[len(tokens) :]
    ours = loaded.engine.finish(0)
    answer = server.complete(tokens, greedy, n_predict)
    timings, theirs = answer["timings"], answer.get("tokens", [])
    drafted, kept = (int(timings.get(name, 0)) for name in ("draft_n", "draft_n_accepted"))
    count = Count(1, len(text), ours.n_drafted, ours.n_accepted, drafted, kept)
    if theirs in (text, text[:-1]):  # the server leaves the token out that ended it
        return count, len(text)
    return count, next((i for i, (a, b) in enumerate(zip(text, theirs)) if a != b), min(len(text), len(theirs)))


def measure(loaded: Loaded, server: LlamaServer, tokens: list[int], n_predict: int, key: int) -> tuple[Count, Count]:
    """One prompt: whole answers, and equal ones (nothing where they part early)."""
    whole, common = answered(loaded, server, tokens, n_predict, key)
    if common == whole.n_tokens:
        return whole, whole
    if common >= SHORTEST:
        equal, again = answered(loaded, server, tokens, common, key)
        if again == equal.n_tokens:
            return whole, equal
    return whole, Count()


def compare(args: argparse.Namespace) -> int:
    """The exit code."""
    for file in (args.llama_server, args.target, args.draft, args.prompts):
        if file is not None and not file.is_file():
            raise UsageError(f"{file}: no such file")
    prompts = spread(read_prompts(args.prompts) if args.prompts else list(BUILT_IN), args.limit)
    # The draft alone: `auto` would look back in the text first.
    kind = drafter_for(GGUFFile.open(args.draft, "draft")) if args.draft else "ngram"
    choice = ModelChoice(
        str(args.target), None, SessionSettings(args.ctx_size, n_threads=args.threads), 0, kernels=args.kernels,
        draft=str(args.draft) if args.draft else None, spec_type=kind, n_max=args.n_max,
        adapt=False,
    )  # fmt: skip
    loaded = open_engine(choice)
    try:
        if loaded.drafter is None:
            raise UsageError(f"{args.target} can't be drafted for")
        if loaded.drafter.name not in SPEC_TYPES:
            raise UsageError(f"llama-server has no --spec-type for {loaded.drafter.name} drafts")
        encoded = encode_prompts(loaded.model, loaded.session.n_ctx, prompts)
        flags = settings(loaded, args)
        print(f"localspec: {loaded.drafter.name}, {args.n_max} drafted, {loaded.kernels} kernels")
        print(f"llama-server: {' '.join(draft_arguments(flags))}")
        total, equal = Count(), Count()
        groups: dict[str, Count] = {}
        server = LlamaServer(args.llama_server.absolute(), server_arguments(flags) + draft_arguments(flags))
        try:
            for key, (prompt, tokens) in enumerate(zip(prompts, encoded)):
                whole, same = measure(loaded, server, tokens, args.n_predict, key)
                groups.setdefault(prompt.source, Count()).add(same)
                equal.add(same)
                total.add(whole)
        finally:
            server.close()
    finally:
        loaded.close()
    head = f"{'localspec':>11} {'drafted':>8} {'server':>11} {'drafted':>8} {'points':>8}"
    print(f"{'':<26} {'answers':>7} {'tokens':>7} {head}")
    for name, group in groups.items():
        print(group.row(name))
    print(equal.row("all, equal text"))
    print(total.row("all, whole answers"))
    near = abs(equal.points) <= MOST_POINTS
    print(
        json.dumps(
            {
                "localspec": equal.ours, "llama_server": equal.theirs, "points": equal.points, "within": near,
                "prompts": total.n, "tokens": equal.n_tokens, "n_predict": args.n_predict,
                "whole_answers": {"localspec": total.ours, "llama_server": total.theirs, "tokens": total.n_tokens}, **flags,
            }
        )
    )  # fmt: skip
    if not equal.ours_drafted or not equal.theirs_drafted:
        raise UsageError("nothing was drafted on equal text: longer answers (-n), more prompts, or another draft")
    return 0 if near else 1


if __name__ == "__main__":
    try:
        sys.exit(compare(arguments()))
    except LocalspecError as error:
        print(f"stock_acceptance: {error}", file=sys.stderr)
        sys.exit(2)
