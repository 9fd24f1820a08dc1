"""Is it faster on this machine, and is the text the same? Plain and speculative decoding on the same prompts.

Both run in one process on one loaded target, prompt by prompt and in alternating order, so that a machine that slows
down slows both. Where the texts differ, the token and how close the target's two best logits were there are reported:
stock llama.cpp computes a row a little differently in blocks of different sizes, and near-ties then fall either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from localspec.accept import Sampling
from localspec.engine import Engine, Request, Stats
from localspec.errors import ContextFullError, LocalspecError, UsageError
from localspec.model import Model
from localspec.prompts import Prompt
from localspec.report import rate
from localspec.target import TargetSession
from localspec.template import ChatTemplate


@dataclass(slots=True)
class Difference:
    """Where two texts of one prompt part: index into the generated tokens, and the margin of the logits there."""

    prompt: int
    token: int
    margin: float


@dataclass(slots=True)
class Side:
    """One way of decoding, summed over prompts."""

    stats: Stats = field(default_factory=Stats)

    def tok_per_s(self) -> float:
        """Generated tokens per second of decoding, prompts not counted."""
        return rate(self.stats.n_generated, self.stats.t_generate)


@dataclass(slots=True)
class Group:
    """The prompts of one source."""

    n: int = 0
    plain: Side = field(default_factory=Side)
    spec: Side = field(default_factory=Side)
    differences: list[Difference] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        """Speculative over plain rate."""
        plain = self.plain.tok_per_s()
        return self.spec.tok_per_s() / plain if plain else 0.0

    def as_json(self) -> dict[str, Any]:
        """The group's part of the JSON line."""
        s = self.spec.stats
        return {
            "prompts": self.n,
            "plain": {"tok_per_s": self.plain.tok_per_s(), "n_generated": self.plain.stats.n_generated},
            "spec": {
                "tok_per_s": self.spec.tok_per_s(),
                "n_generated": s.n_generated,
                "acceptance": s.acceptance,
                "tokens_per_verify": s.tokens_per_verify,
                "acceptance_by_position": s.acceptance_by_position,
            },
            "speedup": self.speedup,
            "identical": not self.differences,
        }


@dataclass(slots=True)
class Result:
    """What a bench run found."""

    total: Group = field(default_factory=Group)
    by_source: dict[str, Group] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Everything but the settings."""
        differences = [{"prompt": d.prompt, "token": d.token, "margin": d.margin} for d in self.total.differences]
        return {
            **self.total.as_json(),
            "differences": differences,
            "by_source": {name: group.as_json() for name, group in self.by_source.items()},
        }


def encode_prompt(model: Model, template: ChatTemplate | None, turns: Sequence[str]) -> list[int]:
    """Token ids of a prompt's first turn, through the chat template where the model has one."""
    if template is None:
        return model.tokenizer.encode(turns[0])
    return template.encode([{"role": "user", "content": turns[0]}])


def encode_prompts(model: Model, n_ctx: int, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of every prompt. Raises UsageError that names the one which can't be used: before hours have gone into
    the others."""
    template = ChatTemplate.of(model)
    encoded = []
    for prompt in prompts:
        try:
            model.tokenizer.check_length(prompt.turns[0].strip(), n_ctx)
            tokens = encode_prompt(model, template, prompt.turns)
            if len(tokens) > n_ctx:
                raise ContextFullError(f"{len(tokens)} tokens, the context holds {n_ctx}: give a larger --ctx-size")
        except LocalspecError as error:
            start = " ".join(prompt.turns[0][:60].split())[:40]
            raise UsageError(f"the prompt '{start}...' ({prompt.source}): {error}") from error
        encoded.append(tokens)
    return encoded


def run_bench(
    plain: Engine,
    spec: Engine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    n_predict: int,
    progress: Callable[[Result], None] = lambda result: None,
    beside: Callable[[list[int], list[int]], None] = lambda tokens, text: None,
    result: Result | None = None,
) -> Result:
    """Measure both engines, which share one session, on each prompt; `progress(result)` after each.

    `beside(prompt ids, plain ids)` is called after each prompt, for another program to be measured in the same minutes.
    `result` is filled, prompt by prompt, so that the caller has what was measured before an error or Ctrl-C.
    """
    session = plain.session
    result = Result() if result is None else result
    encoded = encode_prompts(session.model, session.n_ctx, prompts)
    _warm_up(plain, spec)
    for number, (prompt, tokens) in enumerate(zip(prompts, encoded)):
        request = Request(tokens, sampling, n_predict, key=number)
        order = [plain, spec] if number % 2 == 0 else [spec, plain]
        texts: dict[bool, list[int]] = {}
        stats: dict[bool, Stats] = {}
        for engine in order:
            session.rollback(0, 0)
            for _ in engine.generate(request):
                pass
            texts[engine is spec] = engine.tokens(0)[len(tokens) :]
            stats[engine is spec] = engine.finish(0)
        difference = compare(session, tokens, texts[False], texts[True], number)
        beside(tokens, texts[False])
        for into in (result.by_source.setdefault(prompt.source, Group()), result.total):
            into.n += 1
            into.plain.stats.add(stats[False])
            into.spec.stats.add(stats[True])
            if difference is not None:
                into.differences.append(difference)
        progress(result)
    return result


def _warm_up(plain: Engine, spec: Engine) -> None:
    """A few tokens each: pages of a mapped file are read, thread pools started, before anything is timed."""
    token = max(0, plain.session.model.tokenizer.bos)
    for engine in (plain, spec):
        for _ in engine.generate(Request([token, token], Sampling(temperature=0), 4)):
            pass
        engine.finish(0)


def compare(session: TargetSession, prompt: list[int], plain: list[int], spec: list[int], number: int) -> Difference | None:
    """None where the texts are equal, else where they part and by how little the target preferred the one token."""
    if plain == spec:
        return None
    at = next((i for i, (a, b) in enumerate(zip(plain, spec)) if a != b), min(len(plain), len(spec)))
    if at >= min(len(plain), len(spec)):
        return Difference(number, at, 0.0)
    before = prompt + plain[:at]
    session.prefill(0, before[:-1])
    row = np.array(session.decode([(0, before[-1:])]).logits[0])
    return Difference(number, at, float(abs(row[plain[at]] - row[spec[at]])))
