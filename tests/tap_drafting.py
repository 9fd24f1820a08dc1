"""What the tests of all drafters that read taps do with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from localspec.accept import Draft, Sampling
from localspec.blocks import FixedBlock, one_pass
from localspec.drafters import DrafterSettings, Sequence, load, taps
from localspec.engine import Engine, Request
from localspec.model import Model
from localspec.target import SessionSettings, TargetSession

GREEDY = Sampling(temperature=0)


class Watched:
    """A drafter that writes down what it was asked and what it said. `length` says how many tokens it must draft for a text
    where k are wanted; None: any number."""

    def __init__(self, inner: Any, length: Callable[[Sequence, int], int | None]):
        self.inner, self.name, self.length = inner, inner.name, length
        self.said: list[tuple[list[int], list[int]]] = []
        self.begin, self.commit, self.rewind = inner.begin, inner.commit, inner.rewind
        self.keep, self.read, self.close = inner.keep, inner.read, inner.close
        self.skip, self.may_skip = inner.skip, inner.may_skip

    def propose(self, seqs: list[Sequence], ks: list[int]) -> list[Draft]:
        drafts: list[Draft] = self.inner.propose(seqs, ks)
        for seq, k, draft in zip(seqs, ks, drafts):
            wanted = self.length(seq, k)
            if wanted is not None:
                assert len(draft.tokens) == wanted
            assert len(draft.confidence) == len(draft.tokens)
            self.said.append((list(seq.tokens), draft.tokens.tolist()))
        return drafts


class Sometimes(FixedBlock):
    """Drafts in every so-manieth step."""

    def __init__(self, every: int):
        super().__init__()
        self.every, self.step = every, 0

    def choose(self, looks: Any, passes: Any = one_pass) -> list[int]:
        self.step += 1
        return super().choose(looks) if self.step % self.every == 0 else [0] * len(looks)


class Asleep(FixedBlock):
    """Asleep for some steps, awake for some that draft nothing, then drafts in each."""

    def __init__(self, asleep: int, awake: int = 0):
        super().__init__()
        self._asleep, self._awake, self.step, self.asleep = asleep, awake, 0, True

    def choose(self, looks: Any, passes: Any = one_pass) -> list[int]:
        self.step += 1
        self.asleep = self.step <= self._asleep
        return super().choose(looks) if self.step > self._asleep + self._awake else [0] * len(looks)


def opened(
    kind: str, model: Model, draft: Path, n_sequences: int = 1, rule: str = "match", n_ctx: int = 200
) -> tuple[TargetSession, Any]:
    """A session that reads what the draft wants, and its drafter."""
    settings = DrafterSettings(draft, rule)
    read = taps(kind, model.gguf, settings)
    session = TargetSession(model, SessionSettings(n_ctx=n_ctx, n_sequences=n_sequences, n_batch=64, taps=read))
    return session, load(kind, session, settings)


def write(engine: Engine, prompt: list[int], n: int, sampling: Sampling = GREEDY, key: int = 0) -> list[int]:
    steps = list(engine.generate(Request(prompt, sampling, n, key=key)))
    assert steps[-1].stop in ("length", "eog")
    tokens = list(engine.tokens(0))
    engine.finish(0)
    return tokens
