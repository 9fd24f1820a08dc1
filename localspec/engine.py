"""The decode loop: propose, verify, commit, over one or many sequences. With no drafter it is plain decoding.

Every step is one target decode. A block is the pending token (kept, but not in the cache yet) and k drafted ones; row i
of the block judges drafted token i, and one new token is always gained, which becomes the next pending one:

    tokens so far   ... P            P pending
    block           P  d0 d1 d2
    rows            r0 r1 r2 r3      r0 judges d0, r1 judges d1, ...
    d0 kept, d1 refused              gained: d0 and the target's own token x in place of d1
    cache keeps     ... P d0         x is pending

With draft trees a block branches. What is kept of its first branch stays in the cache; tokens kept from another branch are
read again with the next block, in front of the pending one, and lie then where plain decoding has them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from localspec.accept import Block, Draft, Sampling, Verdict, verify
from localspec.accept_tree import verify_tree
from localspec.blocks import Controller, FixedBlock, Look, Outcome
from localspec.control_tree import TreeChooser, TreeOutcome
from localspec.drafters import Drafter, Sequence, Stoppable, TapReader, TreeDrafter
from localspec.errors import ContextFullError, UsageError
from localspec.grammar import Constraint, Grammar, narrowed
from localspec.target import Rows, TargetSession, common_start
from localspec.tokenizer import TextStream
from localspec.topk import top_k
from localspec.tree import Shape


@dataclass(slots=True)
class Request:
    """A text to write. `max_tokens` None: until the model ends it or the context is full. `n_probs`: how many of the
    likeliest tokens each Piece names, with its own log-probability; None: neither. `grammar`: what the text must be."""

    prompt: list[int]
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    key: int = 0  # of the random numbers; two requests with one key and seed share their noise
    n_probs: int | None = None
    grammar: Grammar | None = None


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
    stop: str | None = None  # eog, length, stop-string, context, interrupted, grammar (which allows no token)


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

    def count(self, verdict: Verdict, depth: int | None = None) -> None:
        """Add one verification; of a tree, `depth` is that of its line of first children."""
        self.n_verify += 1
        self.n_drafted += verdict.n_drafted
        self.n_accepted += verdict.n_accepted
        depth = verdict.n_drafted if depth is None else max(depth, verdict.n_accepted)
        while len(self.drafted_at) < depth:
            self.drafted_at.append(0)
            self.accepted_at.append(0)
        for i in range(depth):
            self.drafted_at[i] += 1
            self.accepted_at[i] += i < verdict.n_accepted

    def took(self, draft: float, verify: float, accept: float, whole: float) -> None:
        """Add a step's times."""
        self.t_draft += draft
        self.t_verify += verify
        self.t_accept += accept
        self.t_step += whole

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
    constraint: Constraint | None = None
    ready: bool = False  # its prompt is computed
    skips: bool = False  # which is not read for the draft


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
        trees: TreeChooser | None = None,
    ):
        """`trees`: which steps draft a tree, and of what shape; None: chains only."""
        if drafter is not None and not session.can_roll_back:
            raise UsageError(
                f"{session.model.path}: the memory of this {session.model.gguf.architecture} model can't be rolled "
                "back, so it can't be drafted for: use --spec-type none"
            )
        self.session = session
        self.drafter = drafter
        self.controller: Controller = controller or FixedBlock()
        self.rule = rule
        self.trees = trees if session.n_branches else None
        #: called after every step with what became of it and why it was so: for --trace
        self.on_step: Callable[[list[Outcome], dict[str, Any]], None] | None = None
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
        if not self._running:
            self.controller.begins()
        # Beside texts for which nothing pays, a prompt is not read for a draft.
        skips = len(self._running) > 0 and self._asleep()
        if isinstance(self.drafter, TapReader):
            if skips:
                self.drafter.skip(seq)
            else:
                keep = min(keep, self.drafter.keep(seq))
        self.session.rollback(slot, keep)
        stats.t_prompt = time.perf_counter() - began
        n_left = request.max_tokens if request.max_tokens is not None else self.session.n_ctx
        text = TextStream(self.session.model.tokenizer, request.stop)
        constraint = None if request.grammar is None else request.grammar.begin()
        self._running[slot] = _Running(seq, request, text, n_left, stats, constraint, skips=skips)
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
        if isinstance(drafter, TapReader) and not run.skips:
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
        again = [self._catch_up(run, len(active)) for run in active]
        free = len(active) == 1 and active[0].constraint is None  # a grammar is held against chains only
        if self.trees is not None and free and isinstance(self.drafter, TreeDrafter):
            step = self._tree_step(active[0], self.trees, self.drafter, again[0], began)
            if step is not None:
                return [*steps, step]
        drafts, proposed, t_draft = self._draft(active)
        self.session.reads_taps = not self._asleep()
        t1 = time.perf_counter()
        heads = [run.seq.tokens[-1 - n :] for run, n in zip(active, again)]
        rows = self.session.decode(
            [(run.seq.slot, [*head, *draft.tokens.tolist()]) for run, head, draft in zip(active, heads, drafts)]
        )
        if any(again):  # of one sequence alone, see _catch_up
            rows = rows.slice(again[0], len(rows.logits))
        t2 = time.perf_counter()
        blocks = [self._block(run, draft) for run, draft in zip(active, drafts)]
        logits = narrowed(rows.logits, blocks, [run.constraint for run in active], self.rule)
        verdicts = verify(logits, blocks, self.rule, self._eog)
        t3 = time.perf_counter()
        at = 0
        outcomes: list[Outcome] = []
        for run, draft, verdict, n in zip(active, drafts, verdicts, again):
            step = self._take(run, verdict, rows.slice(at, at + len(draft.tokens) + 1))
            at += len(draft.tokens) + 1
            gained = sum(piece.token >= 0 for piece in step.pieces)
            outcomes.append(Outcome(run.seq.slot, draft.confidence.tolist(), verdict.n_accepted, gained, n))
            steps.append(step)
        self.session.settle()
        whole = time.perf_counter() - began
        for run in active:
            share = 1.0 / len(active)
            run.stats.took(t_draft * share, (t2 - t1) * share, (t3 - t2) * share, whole * share)
        self.controller.record(outcomes, proposed, t_draft, whole - t_draft)
        if self.on_step is not None:
            self.on_step(outcomes, self.controller.trace())
        return steps

    def _asleep(self) -> bool:
        """Whether the draft can do without hidden states, and nobody is about to ask it."""
        return self.controller.asleep and getattr(self.drafter, "may_skip", False)

    def _catch_up(self, run: _Running, n_active: int) -> int:
        """How many tokens before the pending one have to be read again with this step's block: what was kept from a side
        branch. With other texts beside it they are read at once."""
        seq = run.seq
        n = len(seq.tokens) - 1 - len(self.session.tokens[seq.slot])
        if n > 0 and n_active > 1:
            self.session.decode([(seq.slot, seq.tokens[-1 - n : -1])])
            return 0
        return n

    def _tree_step(
        self, run: _Running, trees: TreeChooser, drafter: TreeDrafter, again: int, began: float
    ) -> Step | None:
        """One verification of a tree; None where none is drafted: then a chain is."""
        seq, look = run.seq, self._look(run, 1)
        shape = trees.choose(look, again)
        # Every token takes a cell for the time of the decode, and its place in the batch.
        room = min(self.session.n_ctx - len(seq.tokens), self.session.n_batch - 1 - again)
        if shape is None or look.room < 1 or shape.nodes > room:
            return None
        # As many rows with those to be read again as without: a decode's time has steps.
        nodes = max(1, shape.nodes - again)
        tree = drafter.propose_tree(seq, Shape(nodes, min(shape.depth, look.room), shape.width))
        if not len(tree):
            return None
        t1 = time.perf_counter()
        head = seq.tokens[-1 - again :]
        rows = self.session.decode_tree(
            seq.slot,
            [*head, *tree.tokens.tolist()],
            [*range(-1, again), *(tree.parents + len(head)).tolist()],
        )
        if again:
            rows = rows.slice(again, len(rows.logits))
        t2 = time.perf_counter()
        block = self._block(run, Draft.empty())
        judged = verify_tree(rows.logits, tree, seq.key, block.position, seq.sampling, block.history, self.rule, self._eog)
        t3 = time.perf_counter()
        way = [0, *(node + 1 for node in judged.nodes)]
        line = tree.line()
        n_cached = 1 + common_start(judged.nodes, line)
        step = self._take(run, judged.verdict, rows.take(way), n_cached, len(line))
        gained = sum(piece.token >= 0 for piece in step.pieces)
        whole = time.perf_counter() - began
        run.stats.took(t1 - began, t2 - t1, t3 - t2, whole)
        outcome = TreeOutcome(seq.slot, tree, shape, judged.nodes, gained, again)
        trees.record(outcome, t1 - began, whole - (t1 - began))
        if self.on_step is not None:
            self.on_step([Outcome(seq.slot, tree.confidence.tolist(), len(judged.nodes), gained, again)], trees.trace())
        return step

    def _draft(self, active: list[_Running]) -> tuple[list[Draft], int, float]:
        """(a draft for each sequence, tokens proposed before any was dropped, seconds); -1 tokens where nobody was asked."""
        began = time.perf_counter()
        drafts = [Draft.empty() for _ in active]
        if self.drafter is None or self.controller.rests(len(active)):
            return drafts, -1, 0.0
        looks = [self._look(run, len(active)) for run in active]
        ks = self.controller.choose(looks, self.session.passes)
        if not any(ks):
            return drafts, -1, time.perf_counter() - began
        drafts = self._propose(self.drafter, [run.seq for run in active], ks)
        proposed = sum(len(draft.tokens) for draft in drafts)
        kept = self.controller.cut(looks, [draft.confidence.tolist() for draft in drafts])
        drafts = [draft.first(n) if n < len(draft.tokens) else draft for draft, n in zip(drafts, kept)]
        for i, run in enumerate(active):
            if run.constraint is not None:
                drafts[i] = run.constraint.useful(drafts[i], looks[i].may_cut or drafts[i].q_ids is None)
        return drafts, proposed, time.perf_counter() - began

    def _propose(self, drafter: Drafter, seqs: list[Sequence], ks: list[int]) -> list[Draft]:
        """With the controller's floor for the time of the question; the drafter's own one is the person's."""
        if not isinstance(drafter, Stoppable):
            return drafter.propose(seqs, ks)
        own = drafter.p_min
        drafter.p_min = max(own, self.controller.floor())
        try:
            return drafter.propose(seqs, ks)
        finally:
            drafter.p_min = own

    def _look(self, run: _Running, n_active: int) -> Look:
        # One token is gained in any case, so drafting more than n_left - 1 would be for nothing.
        room = min(run.n_left - 1, self.session.n_ctx - len(run.seq.tokens), self.session.n_batch // n_active - 1)
        room = min(room, self.session.max_draft)
        # Under rejection sampling a token that was drawn must be judged (control.py); greedy is one and the same.
        return Look(run.seq.slot, max(0, room), self.rule == "match" or run.seq.sampling.greedy)

    def _block(self, run: _Running, draft: Draft) -> Block:
        seq = run.seq
        history = _NO_HISTORY
        if seq.sampling.needs_history:
            n = seq.sampling.penalty_last_n
            history = np.array(seq.tokens if n < 0 else seq.tokens[-n:], np.int32)
        return Block(seq.key, len(seq.tokens), draft, seq.sampling, history)

    def _take(self, run: _Running, verdict: Verdict, rows: Rows, n_cached: int = -1, depth: int | None = None) -> Step:
        """Keep what was accepted, up to the end of the text. Of a tree's rows, those kept; the first `n_cached` of them are
        in the cache, and its line of first children has `depth` tokens."""
        seq = run.seq
        held = len(seq.tokens)  # the block's first row stands at position held - 1
        pieces: list[Piece] = []
        stop: str | None = None
        tokens = verdict.tokens.tolist()
        for i, token in enumerate(tokens):
            if self._eog[token]:
                seq.tokens.append(token)
                pieces.append(Piece(token, "", i < verdict.n_accepted))
                stop = "eog" if run.constraint is None or run.constraint.may_end else "grammar"
                break
            if run.constraint is not None:
                run.constraint.take(token)
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
        run.stats.count(verdict, depth)
        run.stats.n_generated += len(pieces)
        if stop is None and len(seq.tokens) > self.session.n_ctx:
            stop = "context"
        # The cache keeps the pending token and the kept drafts; the token gained last is the new pending one.
        n_rows = len(pieces) if n_cached < 0 else min(n_cached, len(pieces))
        self.session.rollback(seq.slot, held - 1 + n_rows)
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
