"""The decode loop: propose, verify, commit, over one or many sequences. With no drafter it is plain decoding.

Every step is one target decode. A block is the pending token (kept, but not in the cache yet) and k drafted ones; row i
of the block judges drafted token i, and one new token is always gained, which becomes the next pending one:

    tokens so far   ... P            P pending
    block           P  d0 d1 d2
    rows            r0 r1 r2 r3      r0 judges d0, r1 judges d1, ...
    d0 kept, d1 refused              gained: d0 and the target's own token x in place of d1
    cache keeps     ... P d0         x is pending
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from localspec.accept import Block, Draft, Sampling, Verdict, verify
from localspec.control import Controller, FixedBlock, Look, Outcome
from localspec.drafters import Drafter, Sequence, Stoppable, TapReader
from localspec.errors import ContextFullError, UsageError
from localspec.target import Rows, TargetSession, common_start
from localspec.tokenizer import TextStream
from localspec.topk import top_k


@dataclass(slots=True)
class Request:
    """A text to write. `max_tokens` None: until the model ends it or the context is full. `n_probs`: how many of the
    likeliest tokens each Piece names, with its own log-probability; None: neither."""

    prompt: list[int]
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    key: int = 0  # of the random numbers; two requests with one key and seed share their noise
    n_probs: int | None = None


@dataclass(slots=True)
class Piece:
    """Text of one kept token and whether the drafter proposed it.

    Where the request asks for them: the natural logarithm of the target's probability of it, and the likeliest tokens with
    theirs. They are of the softmax over all logits, at temperature 1, before penalties and filters.
    """

    token: int
    text: str
    from_draft: bool
    logprob: float | None = None
    likeliest: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class Step:
    """What one sequence gained in one verification. `stop` is None while it goes on."""

    slot: int
    pieces: list[Piece]
    stop: str | None = None  # eog, length, stop-string, context, interrupted


@dataclass(slots=True)
class Stats:
    """Counts and times of one or many generations; times in seconds."""

    n_prompt: int = 0
    n_prompt_computed: int = 0  # prompt tokens that were not in the cache already
    n_generated: int = 0
    n_verify: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)  # verifications that drafted a token at this position of the block
    accepted_at: list[int] = field(default_factory=list)
    t_prompt: float = 0.0
    t_draft: float = 0.0
    t_verify: float = 0.0
    t_accept: float = 0.0
    t_step: float = 0.0  # whole steps: the three above and the loop around them

    @property
    def t_generate(self) -> float:
        """Time from the end of the prompt to the last token."""
        return self.t_step

    @property
    def tokens_per_verify(self) -> float:
        """Kept drafts + 1, averaged over verifications: the field's mean acceptance length."""
        return (self.n_accepted + self.n_verify) / self.n_verify if self.n_verify else 0.0

    @property
    def acceptance(self) -> float | None:
        """Share of the drafted tokens that were kept; None where nothing was drafted."""
        return self.n_accepted / self.n_drafted if self.n_drafted else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each position of a block: of the verifications that drafted there, the share in which it was kept."""
        return [a / d for a, d in zip(self.accepted_at, self.drafted_at) if d]

    def count(self, verdict: Verdict) -> None:
        """Add one verification."""
        self.n_verify += 1
        self.n_drafted += verdict.n_drafted
        self.n_accepted += verdict.n_accepted
        while len(self.drafted_at) < verdict.n_drafted:
            self.drafted_at.append(0)
            self.accepted_at.append(0)
        for i in range(verdict.n_drafted):
            self.drafted_at[i] += 1
            self.accepted_at[i] += i < verdict.n_accepted

    def add(self, other: Stats) -> None:
        """Sum up: for totals over several generations."""
        for name in ("n_prompt", "n_prompt_computed", "n_generated", "n_verify", "n_drafted", "n_accepted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("t_prompt", "t_draft", "t_verify", "t_accept", "t_step"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in ((self.drafted_at, other.drafted_at), (self.accepted_at, other.accepted_at)):
            mine.extend([0] * (len(theirs) - len(mine)))
            for i, n in enumerate(theirs):
                mine[i] += n


@dataclass(slots=True)
class _Running:
    """A sequence in work."""

    seq: Sequence
    request: Request
    text: TextStream
    n_left: int
    stats: Stats
    ready: bool = False  # its prompt is computed


class Engine:
    """Writes texts with one target and at most one drafter.

    `rule` is the accept rule (``match`` or ``reject``, see accept.py). Without a drafter each block is one token.
    """

    def __init__(
        self,
        session: TargetSession,
        drafter: Drafter | None = None,
        controller: Controller | None = None,
        rule: str = "match",
    ):
        if drafter is not None and not session.can_roll_back:
            raise UsageError(
                f"{session.model.path}: {session.model.gguf.architecture} keeps a recurrent state that can't be rolled "
                "back, so it can't be drafted for: use --spec-type none"
            )
        self.session = session
        self.drafter = drafter
        self.controller: Controller = controller or FixedBlock()
        self.rule = rule
        #: called after every step with what became of it and why it was so: for --trace
        self.on_step: Callable[[list[Outcome], dict[str, Any]], None] | None = None
        self._own_floor = drafter.p_min if isinstance(drafter, Stoppable) else None
        self._eog = session.model.tokenizer.eog
        self._running: dict[int, _Running] = {}

    # -- starting and ending -------------------------------------------------------------------------------------------

    def start(self, request: Request, slot: int | None = None, stopped: Callable[[], bool] = lambda: False) -> int:
        """Take up a request in a free slot (or the one named, keeping what its cache shares with the prompt).

        Computes the prompt but for its last token, which becomes the pending one. Returns the slot. Once `stopped` has
        said True the prompt may be in the cache in part only: no step may follow.
        """
        slot = self.begin(request, slot)
        try:
            self.read(slot, stopped=stopped)
        except BaseException:
            del self._running[slot]
            raise
        return slot

    def begin(self, request: Request, slot: int | None = None) -> int:
        """Take up a request as `start` does, but compute nothing: `read` does. Until then steps leave it out."""
        if not request.prompt:
            raise UsageError("the prompt is empty: give at least one token")
        if request.max_tokens is not None and request.max_tokens < 0:
            raise UsageError(f"--n-predict must not be negative, not {request.max_tokens}")
        if len(request.prompt) > self.session.n_ctx:
            raise ContextFullError(
                f"the prompt has {len(request.prompt)} tokens, the context holds {self.session.n_ctx}: "
                "give a larger --ctx-size or a shorter prompt"
            )
        if slot is None:
            slot = next((i for i in range(self.session.settings.n_sequences) if i not in self._running), None)
        if slot is None or slot in self._running:
            raise UsageError("every sequence of this session is busy")
        stats = Stats(n_prompt=len(request.prompt))
        began = time.perf_counter()
        seq = Sequence(slot, request.key, request.sampling, list(request.prompt), len(request.prompt))
        keep = common_start(self.session.tokens[slot], seq.tokens[:-1])
        if isinstance(self.drafter, TapReader):
            keep = min(keep, self.drafter.keep(seq))
        self.session.rollback(slot, keep)
        stats.t_prompt = time.perf_counter() - began
        n_left = request.max_tokens if request.max_tokens is not None else self.session.n_ctx
        text = TextStream(self.session.model.tokenizer, request.stop)
        self._running[slot] = _Running(seq, request, text, n_left, stats)
        return slot

    def read(self, slot: int, most: int | None = None, stopped: Callable[[], bool] = lambda: False) -> int:
        """Compute at most `most` further tokens of the prompt in `slot`, but never its last one; returns how many.

        With the rest of it (`is_ready`) the text takes part in steps. `stopped` as for `start`.
        """
        run = self._running[slot]
        if run.ready:
            return 0
        began = time.perf_counter()
        drafter, seq = self.drafter, run.seq
        held, whole = len(self.session.tokens[slot]), len(seq.tokens) - 1
        end = whole if most is None else min(whole, held + most)
        tapped = None
        if isinstance(drafter, TapReader):
            reader = drafter
            tapped = lambda first, taps: reader.read(seq, first, taps)  # noqa: E731
        n = self.session.prefill(slot, seq.tokens[:end], stopped, tapped)
        if len(self.session.tokens[slot]) == whole and not stopped():
            if drafter is not None:
                drafter.begin(seq)
            run.ready = True
        run.stats.n_prompt_computed += n
        run.stats.t_prompt += time.perf_counter() - began
        return n

    def is_ready(self, slot: int) -> bool:
        """Whether the prompt in `slot` is computed."""
        return self._running[slot].ready

    def stats(self, slot: int) -> Stats:
        """The counts of the text in `slot` so far."""
        return self._running[slot].stats

    def tokens(self, slot: int) -> list[int]:
        """Prompt and kept tokens of the text in `slot`."""
        return self._running[slot].seq.tokens

    def finish(self, slot: int) -> Stats:
        """Let go of a slot; the cache stays, for a next request that begins alike."""
        return self._running.pop(slot).stats

    # -- the loop ------------------------------------------------------------------------------------------------------

    def generate(self, request: Request, stopped: Callable[[], bool] = lambda: False) -> Iterator[Step]:
        """Write one text, step by step, in slot 0. The last step carries the stop reason.

        `stopped` is asked between pieces of the prompt and between steps; True ends the text with ``interrupted``. The
        counts are at `stats(0)` until `finish(0)` is called.
        """
        slot = self.start(request, slot=0, stopped=stopped)
        while True:
            if stopped():
                yield Step(slot, self._rest(self._running[slot]), "interrupted")
                return
            step = self.step()[0]
            yield step
            if step.stop is not None:
                return

    def step(self) -> list[Step]:
        """One verification over every sequence whose prompt is computed; each ends up with a Step."""
        began = time.perf_counter()
        steps: list[Step] = []
        active: list[_Running] = []
        # By slot: llama.cpp puts into one pass only sequences whose numbers follow one another (split_equal).
        for _, run in sorted(self._running.items()):
            if not run.ready:
                continue
            if run.n_left <= 0:
                steps.append(Step(run.seq.slot, self._rest(run), "length"))
            elif len(run.seq.tokens) > self.session.n_ctx:
                steps.append(Step(run.seq.slot, self._rest(run), "context"))
            else:
                active.append(run)
        if not active:
            return steps
        drafts, proposed, t_draft = self._draft(active)
        t1 = time.perf_counter()
        rows = self.session.decode(
            [(run.seq.slot, [run.seq.tokens[-1], *draft.tokens.tolist()]) for run, draft in zip(active, drafts)]
        )
        t2 = time.perf_counter()
        verdicts = verify(rows.logits, [self._block(r, d) for r, d in zip(active, drafts)], self.rule, self._eog)
        t3 = time.perf_counter()
        at = 0
        outcomes: list[Outcome] = []
        for run, draft, verdict in zip(active, drafts, verdicts):
            step = self._take(run, verdict, rows.slice(at, at + len(draft.tokens) + 1))
            at += len(draft.tokens) + 1
            gained = sum(piece.token >= 0 for piece in step.pieces)
            outcomes.append(Outcome(run.seq.slot, draft.confidence.tolist(), verdict.n_accepted, gained))
            steps.append(step)
        whole = time.perf_counter() - began
        for run in active:
            share = 1.0 / len(active)
            run.stats.t_draft += t_draft * share
            run.stats.t_verify += (t2 - t1) * share
            run.stats.t_accept += (t3 - t2) * share
            run.stats.t_step += whole * share
        self.controller.record(outcomes, proposed, t_draft, whole - t_draft)
        if self.on_step is not None:
            self.on_step(outcomes, self.controller.trace())
        return steps

    def _draft(self, active: list[_Running]) -> tuple[list[Draft], int, float]:
        """(a draft for each sequence, tokens proposed before any was dropped, seconds); -1 tokens where nobody was asked."""
        began = time.perf_counter()
        drafts = [Draft.empty() for _ in active]
        if self.drafter is None:
            return drafts, -1, 0.0
        looks = [self._look(run, len(active)) for run in active]
        ks = self.controller.choose(looks)
        if not any(ks):
            return drafts, -1, time.perf_counter() - began
        if self._own_floor is not None and isinstance(self.drafter, Stoppable):
            self.drafter.p_min = max(self._own_floor, self.controller.floor())
        drafts = self.drafter.propose([run.seq for run in active], ks)
        proposed = sum(len(draft.tokens) for draft in drafts)
        kept = self.controller.cut(looks, [draft.confidence.tolist() for draft in drafts])
        drafts = [draft.first(n) if n < len(draft.tokens) else draft for draft, n in zip(drafts, kept)]
        return drafts, proposed, time.perf_counter() - began

    def _look(self, run: _Running, n_active: int) -> Look:
        # One token is gained in any case, so drafting more than n_left - 1 would be for nothing.
        room = min(run.n_left - 1, self.session.n_ctx - len(run.seq.tokens), self.session.n_batch // n_active - 1)
        # Under rejection sampling a token that was drawn must be judged (control.py); greedy is one and the same.
        return Look(run.seq.slot, max(0, room), self.rule == "match" or run.seq.sampling.greedy)

    def _block(self, run: _Running, draft: Draft) -> Block:
        seq = run.seq
        history = _NO_HISTORY
        if seq.sampling.needs_history:
            n = seq.sampling.penalty_last_n
            history = np.array(seq.tokens if n < 0 else seq.tokens[-n:], np.int32)
        return Block(seq.key, len(seq.tokens), draft, seq.sampling, history)

    def _take(self, run: _Running, verdict: Verdict, rows: Rows) -> Step:
        """Keep what was accepted, up to the end of the text."""
        seq = run.seq
        held = len(seq.tokens)  # the block's first row stands at position held - 1
        pieces: list[Piece] = []
        stop: str | None = None
        tokens = verdict.tokens.tolist()
        for i, token in enumerate(tokens):
            if self._eog[token]:
                seq.tokens.append(token)
                pieces.append(Piece(token, "", i < verdict.n_accepted))
                stop = "eog"
                break
            pushed = run.text.push(token)
            seq.tokens.append(token)
            pieces.append(Piece(token, pushed.text, i < verdict.n_accepted))
            run.n_left -= 1
            if pushed.stopped:
                stop = "stop-string"
            elif run.n_left <= 0:
                stop = "length"
            if stop:
                break
        if run.request.n_probs is not None:
            _add_probabilities(pieces, rows.logits, run.request.n_probs)
        run.stats.count(verdict)
        run.stats.n_generated += len(pieces)
        if stop is None and len(seq.tokens) > self.session.n_ctx:
            stop = "context"
        # The cache keeps the pending token and the kept drafts; the token gained last is the new pending one.
        self.session.rollback(seq.slot, held + len(pieces) - 1)
        if self.drafter is not None:
            self.drafter.commit(seq, rows.slice(0, len(pieces)))
        if stop is not None and stop != "stop-string":
            pieces.extend(self._rest(run))
        return Step(seq.slot, pieces, stop)

    @staticmethod
    def _rest(run: _Running) -> list[Piece]:
        """Text held back for a stop string or an incomplete character, as a piece without a token of its own."""
        rest = run.text.finish()
        return [Piece(-1, rest, False)] if rest else []


def _add_probabilities(pieces: list[Piece], logits: np.ndarray, n: int) -> None:
    """Fill in what row i of the target's logits f32[m, V] says about pieces[i]."""
    tops = top_k(logits[: len(pieces)], max(1, n))
    for i, piece in enumerate(pieces):
        piece.logprob = float(logits[i, piece.token] - tops.lse[i])
        piece.likeliest = list(zip(tops.ids[i, :n].tolist(), (tops.logits[i, :n] - tops.lse[i]).tolist()))


_NO_HISTORY = np.zeros(0, np.int32)
