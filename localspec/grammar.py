"""Texts held to a grammar: what the target may say at each row of a block, by llama.cpp's own grammar sampler.

**The semantics**: grammar first, then penalties and filters. What the grammar forbids has probability 0 from the start, so
top-k, top-p and min-p choose among what it allows; a text's end is allowed where the grammar is complete. A row's
constraint follows from the text and the tokens drafted before it alone, so the accept rules keep their promises: under
`match` the text is the same with any draft and none, under `reject` it has the same distribution.

**The cost**: asking the grammar about a whole vocabulary takes milliseconds. So it is asked about the likeliest tokens
first, and only about more where a token beyond them could make a difference (`_settled`).

**What can't be gone on with**: a grammar such as `root ::= "a" root "b" | "a" root "c" | "d"` can be read in twice as many
ways after each `a`, and llama.cpp keeps them all. Once a token takes long, the next ones are taken by their bytes, and a
text whose grammar takes a third of a second for one of them has come to its end: nothing is allowed any more.

Not every token has a text that is shown: those without one (control tokens) are forbidden, but for the text's end.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from localspec import accept_reference as twin
from localspec import gbnf, native
from localspec.accept import Block, Draft, Sampling, draw
from localspec.errors import NativeError, UsageError
from localspec.model import Model
from localspec.topk import top_k

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]

_LIKELIEST = (64, 512)  # tokens asked about before all are
_SLOW = 0.0005  # processor seconds of a token, after which tokens are taken byte by byte
_HOPELESS = 0.3  # of a step, after which the grammar is given up
_FEW_BEGINNINGS = 16  # first bytes for each of which second ones are asked about
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data


class Grammar:
    """A grammar for the texts of one model. Raises UsageError where it can't be used, in one line."""

    def __init__(self, model: Model, text: str):
        self._bytes_tell = gbnf.check(text)
        self.model = model
        if not model.tokenizer.eog.any():
            raise UsageError(f"{model.path}: the vocabulary has no token for a text's end, so none can be held to a grammar")
        model.tokenizer.starts  # noqa: B018 (takes a while the first time: not in the middle of other texts)
        lib = native.lib()
        native.clear_log()
        self._sampler = lib.llama_sampler_init_grammar(model.vocab, text.encode(), b"root")
        if not self._sampler:
            raise UsageError(f"llama.cpp can't use the grammar: {native.last_log_error() or 'no reason given'}")
        _free_with(self, self._sampler)

    def begin(self) -> Constraint:
        """For a text that has not begun."""
        return Constraint(self.model, native.lib().llama_sampler_clone(self._sampler), self._bytes_tell)


class Constraint:
    """A grammar and how far one text has come in it."""

    def __init__(self, model: Model, sampler: int, bytes_tell: bool):
        self._model = model
        self._bytes_tell = bytes_tell
        self._sampler = sampler
        self._took = 0.0  # processor seconds of the last step
        _free_with(self, sampler)

    @property
    def hopeless(self) -> bool:
        """Whether the text so far can be read in more ways than can be kept."""
        return self._took > _HOPELESS

    def copy(self) -> Constraint:
        """For tokens that may not count."""
        copy = Constraint(self._model, native.lib().llama_sampler_clone(self._sampler), self._bytes_tell)
        copy._took = self._took
        return copy

    def allowed(self, ids: I32) -> npt.NDArray[np.bool_]:
        """Which of these tokens may come next: bool[n]."""
        if self.hopeless:
            return np.zeros(len(ids), np.bool_)
        lib = native.lib()
        candidates = np.zeros(len(ids), _CANDIDATE)
        candidates["id"] = ids
        array = lib.llama_token_data_array(candidates.ctypes.data_as(lib.llama_token_data_p), len(ids), -1, False)
        lib.llama_sampler_apply(self._sampler, ctypes.byref(array))
        result: npt.NDArray[np.bool_] = (candidates["logit"] == 0) & ~self._model.tokenizer.silent[ids]
        return result

    def allows(self, token: int) -> bool:
        """Whether this token may come next."""
        return bool(self.allowed(np.array([token], np.int32))[0])

    def every(self) -> I32:
        """All tokens that may come next, by id: i32[n].

        Most need not be asked about: a token can't come where its first byte, or its second after that, can't.
        """
        tokenizer = self._model.tokenizer
        starts, single = tokenizer.starts
        known = np.flatnonzero(single >= 0)
        if not self._bytes_tell:
            known = known[known < 128]
        first = np.ones(256, np.bool_)
        first[known] = self.allowed(single[known])
        asked = first[starts[:, 0]]
        begins = known[first[known] & (known < 128)]
        for byte in begins if len(begins) <= _FEW_BEGINNINGS else ():
            group = np.flatnonzero(starts[:, 0] == byte)
            after = self.copy()
            after.take(int(single[byte]))
            second = np.ones(256, np.bool_)
            second[known] = after.allowed(single[known])
            asked[group] = second[starts[group, 1]]
        ids = np.flatnonzero((asked & ~tokenizer.silent) | (tokenizer.eog != 0)).astype(np.int32)
        return ids[self.allowed(ids)]

    def take(self, token: int) -> None:
        """Go on by a token. Raises NativeError where it is not allowed: llama.cpp would end the process."""
        if self.hopeless:
            return
        if not self.allows(token):
            raise NativeError(f"token {token} does not go on with the grammar")
        for step in self._steps(token):
            began = time.thread_time()
            native.lib().llama_sampler_accept(self._sampler, step)
            self._took = time.thread_time() - began
            if self.hopeless:
                break

    def _steps(self, token: int) -> list[int]:
        """The token, or, where steps are slow, tokens of one byte each that say the same."""
        _, single = self._model.tokenizer.starts
        steps = [int(single[byte]) for byte in self._model.tokenizer.piece(token)] if self._took > _SLOW else []
        return steps if steps and min(steps) >= 0 else [token]

    def useful(self, draft: Draft, may_drop: bool) -> Draft:
        """The draft up to its first token that the grammar forbids.

        Where a drawn token must be judged (`may_drop` False: rejection sampling against a distribution, whose refusal leaves
        the residual), that token stays; those after it would never count.
        """
        now = self
        tokens = draft.tokens.tolist()
        for n, token in enumerate(tokens):
            if not now.allows(token):
                return draft.first(n if may_drop else n + 1)
            if n + 1 < len(tokens):
                now = self.copy() if now is self else now
                now.take(token)
        return draft

    def narrow(self, row: F32, sampling: Sampling, tokens: I32) -> F32:
        """A row of logits f32[V] without what the grammar forbids, and perhaps without other tokens that can't be drawn.

        `tokens` are those that penalties look at. Where nothing is allowed, a text's end is all that is left (`may_end`).
        """
        ranked = twin.penalised(row, sampling, tokens)
        n_vocab = len(row)
        for n in (*(n for n in _LIKELIEST if n < n_vocab // 2), n_vocab):
            if n == n_vocab or _unfiltered(sampling):
                ids = self.every()
                break
            tops = top_k(ranked[None], n)
            first = tops.ids[0, tops.logits[0] > -np.inf]
            ids = first[self.allowed(first)]
            if _settled(ranked, first, ids, sampling):
                break
        narrowed = np.full(n_vocab, -np.inf, np.float32)
        narrowed[ids] = row[ids]
        if not np.isfinite(narrowed).any():
            narrowed[np.flatnonzero(self._model.tokenizer.eog)[0]] = 0.0
        return narrowed

    @property
    def may_end(self) -> bool:
        """Whether the grammar is complete with the text so far."""
        return self.allows(int(np.flatnonzero(self._model.tokenizer.eog)[0]))


def _free_with(owner: object, sampler: int) -> None:
    weakref.finalize(owner, native.lib().llama_sampler_free, sampler).atexit = False


def narrowed(logits: F32, blocks: Seq[Block], constraints: Seq[Constraint | None], rule: str) -> F32:
    """The rows of a verification f32[m, V] as `verify` may see them; the given ones are not written to.

    Row i of a block is held to what may follow its text and its first i drafted tokens. Left as they are: rows that say an
    allowed token anyway and have no filters, and rows that can't count, behind a token that is refused.
    """
    result = logits
    at = 0
    for block, constraint in zip(blocks, constraints):
        s, drafted = block.sampling, block.draft.tokens.tolist()
        now = constraint
        for i in range(len(drafted) + 1):
            if now is None:
                break
            history = block.history
            if i and s.needs_history:
                history = np.concatenate([history, block.draft.tokens[:i]])
            here = slice(at + i, at + i + 1)
            known = s.greedy or (_unfiltered(s) and (rule == "match" or i == len(drafted)))
            token = _token(logits[here], block, i, history) if known else -1
            if not known or not now.allows(token):
                result = logits.copy() if result is logits else result
                result[here] = now.narrow(logits[at + i], s, history)
                token = _token(result[here], block, i, history) if known else -1
            if i == len(drafted) or (known and token != drafted[i]) or not now.allows(drafted[i]):
                break
            now = now.copy() if now is constraint else now
            now.take(drafted[i])
        at += len(drafted) + 1
    return result


def _token(row: F32, block: Block, i: int, history: I32) -> int:
    """What `verify` would make of row i, f32[1, V], without a drafted token."""
    return int(draw(row, [block.sequence], [block.position + i], [block.sampling], [history]).tokens[0])


def _unfiltered(s: Sampling) -> bool:
    return not s.greedy and s.top_k <= 0 and s.top_p >= 1.0 and s.min_p <= 0.0


def _settled(ranked: F32, first: I32, allowed: I32, s: Sampling) -> bool:
    """Whether the filters would choose the same, whatever the grammar says about tokens beyond the likeliest.

    `ranked` f32[V] is the penalised row, `first` its likeliest tokens by rank, `allowed` those of them that the grammar
    allows. Every other token has at most the last one's logit, and, where top-k is on, only so many of them can be kept that
    k are. That bounds what they add to the sum that top-p goes by, and whether min-p could keep one.
    """
    if not len(allowed):
        return False
    if s.greedy:
        return True
    limited = 0 < s.top_k < len(ranked)
    if limited and len(allowed) >= s.top_k:
        return True
    below: F64 = ranked[allowed].astype(np.float64) - float(ranked[allowed[0]])
    last = float(ranked[first[-1]]) - float(ranked[allowed[0]])
    running = np.cumsum(twin.exp(below))
    n_low = n_high = len(ranked)
    if s.top_p < 1.0:
        if limited:
            rest = (s.top_k - len(allowed)) * np.exp(last)
        else:
            others = ranked.astype(np.float64) - float(ranked[allowed[0]])
            others[first] = -np.inf
            rest = float(np.exp(others[others > -np.inf]).sum())
        total = float(running[-1])
        n_low = int(np.searchsorted(running, s.top_p * total)) + 1
        n_high = int(np.searchsorted(running, s.top_p * (total + 1.001 * rest))) + 1
    if s.min_p > 0.0 and last < np.log(s.min_p) - 1e-6:
        by_min_p = int(np.count_nonzero(below >= twin.log(np.array([s.min_p]))[0]))
        n_low, n_high = min(n_low, by_min_p), min(n_high, by_min_p)
    return n_low == n_high <= len(allowed)
