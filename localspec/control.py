"""How many tokens to draft. Pure arithmetic over measured times: no llama.cpp, no clock of its own.

`FixedBlock` always asks for n_max. `Adaptive` asks for as many as pay, for all sequences together, and for none where
none does.

A block of S sequences with m drafted tokens gains S tokens for certain and the sum of the tokens' chances to survive, each
the product of the chances along its sequence; it costs one decode of S + m rows and the drafting. The rate of that has a
highest point in m, found by trying all: t(n) has steps, so the first m that does not pay need not be the last one that
does. Chances fall along a sequence, so taking the likeliest tokens first never takes a token without the one before it.

Two decisions are made. Before drafting: how many tokens of each sequence. After it, when the draft has said how sure it is
of each: how many of them to verify. Dropping a token after a look at it is lossless where the text is the target's own
whatever was drafted (greedy, and `match`). Under `reject` it is not: a token drawn from q that is dropped because it looked
unlikely would be replaced by one drawn from p instead of from the residual. There the first decision, which has not seen
any token, is the only one (`Look.may_cut`).

What it may cost is bounded by a ledger: whatever a step took beyond what plain decoding would have taken for the same
tokens is counted, and a draft is made only if, were all of it refused, no stretch of the last 256 tokens would have lost
more than `_LOSS` of its plain time.
"""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from localspec.costs import DecodeCost, DraftCost
from localspec.survival import ByPosition, Calibration

#: llama.cpp's default of --spec-draft-n-max, and ours of a fixed block
DEFAULT_N_MAX = 3
#: the most that is drafted where the number is chosen as the text goes
ADAPTIVE_N_MAX = 8

_WINDOW = 256  # tokens of a sequence over which a loss is bounded
_LOSS = 0.02  # of a window's plain time; 3 % is promised
_FIRST_PLAIN = 3  # plain steps at the start: what drafting has to beat
_REFRESH = 192  # tokens of a sequence between plain steps that keep its cost current
_STALLED = 2.0  # a step that took so many times what was expected was interrupted; what it took beyond says nothing
_PROMISE = 1.05  # times the best rate known, that another size must be able to reach to be looked at
_OF_LOOKS = 0.4  # of the loss allowed: what is spent to learn must leave something to draft with
_CURIOUS = (8, 192)  # steps between looks at another number of rows: while one is unknown, and afterwards
_GAPS = (4, 64)  # steps between trials while nothing pays: after one that helped, and at most
_FREE = 0.01  # of a plain step
_FOLLOW = 0.03  # of the moving averages
_DOUBT = 0.05  # of a plain step: what chance explains
_JUDGED = 8  # drafted steps before what they gained is believed


@dataclass(slots=True)
class Look:
    """A sequence before a step. `key` tells it from the others, `room` is the most that may be drafted for it, `may_cut`
    whether drafted tokens may be dropped after a look at them."""

    key: int
    room: int
    may_cut: bool = True


@dataclass(slots=True)
class Outcome:
    """What became of a sequence's block: `confidence` of the tokens that were verified, in order, and how many of them were
    kept; `gained` counts the tokens of the text."""

    key: int
    confidence: Sequence[float]
    n_accepted: int
    gained: int
    again: int = 0  # further rows: tokens kept from a side branch of a tree, which had to be read again


class Controller(Protocol):
    """Chooses a step's blocks and learns from what came of them."""

    n_max: int

    def choose(self, looks: Sequence[Look]) -> list[int]:
        """Tokens to draft for each sequence, 0 to n_max."""

    def floor(self) -> float:
        """Confidence below which a chain of drafts may end, for drafters that can stop by themselves."""

    def cut(self, looks: Sequence[Look], confidences: Sequence[Sequence[float]]) -> list[int]:
        """How many tokens of each draft to verify."""

    def record(self, outcomes: Sequence[Outcome], proposed: int, draft: float, rest: float) -> None:
        """A finished step: tokens proposed for all sequences, seconds of drafting and of everything else. `proposed` is -1
        where the drafter was not asked."""

    def trace(self) -> dict[str, Any]:
        """What was decided in the last step, and why: for --trace."""


@dataclass
class FixedBlock:
    """Always n_max tokens."""

    n_max: int = DEFAULT_N_MAX

    def choose(self, looks: Sequence[Look]) -> list[int]:
        return [max(0, min(self.n_max, look.room)) for look in looks]

    def floor(self) -> float:
        return 0.0

    def cut(self, looks: Sequence[Look], confidences: Sequence[Sequence[float]]) -> list[int]:
        return [len(c) for c in confidences]

    def record(self, outcomes: Sequence[Outcome], proposed: int, draft: float, rest: float) -> None:
        pass

    def trace(self) -> dict[str, Any]:
        return {"why": "fixed"}


@dataclass
class _Ledger:
    """What was lost against plain decoding, in seconds: its largest rise over the tokens of a window."""

    total: float = 0.0
    tokens: int = 0
    # (tokens, total) before each step of the window, only those with the lowest totals so far from their place on
    _lows: collections.deque[tuple[int, float]] = field(default_factory=collections.deque)

    def add(self, gained: int, lost: float, window: int) -> None:
        while self._lows and self._lows[-1][1] >= self.total:
            self._lows.pop()
        self._lows.append((self.tokens, self.total))
        self.tokens += gained
        self.total += lost
        while len(self._lows) > 1 and self._lows[0][0] < self.tokens - window:
            self._lows.popleft()

    @property
    def rise(self) -> float:
        return max(0.0, self.total - self._lows[0][1]) if self._lows else 0.0


class Adaptive:
    """As many tokens as pay. `prior`: ratios t(n) / t(1) of an earlier run on this machine with this target."""

    def __init__(self, n_max: int = ADAPTIVE_N_MAX, prior: Mapping[int, float] | None = None):
        self.n_max = n_max
        self.decode = DecodeCost(prior)
        self.draft = DraftCost()
        self.position = ByPosition()
        self.calibration = Calibration()
        self.advantage = 0.0  # of a step with drafts over plain steps, in plain steps, a moving average
        self._drafted_steps = 0
        self._steps = 0
        self._tokens = self._seconds = 0.0  # of a step of late, moving averages
        self._ledger = _Ledger()
        self._plain_seen = 0
        self._since_plain = 0  # tokens of a sequence
        self._gap = _GAPS[0]
        self._since_trial = 0
        self._trial = False
        self._since_look = self._looks = self._trials = 0
        self._whole = False
        self._floor = 0.0
        self._last: dict[str, Any] = {}

    @property
    def steps(self) -> int:
        """Steps seen so far."""
        return self._steps

    @property
    def judged(self) -> bool:
        """Whether enough was drafted for `advantage` to be believed."""
        return self._drafted_steps >= _JUDGED

    @property
    def _rate(self) -> float:
        """Tokens per second of late."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def _plain_is_due(self, rate: float) -> bool:
        """Whether plain decoding's cost, which makes so many tokens a second, has to be looked at again."""
        return self._since_plain >= _REFRESH * max(1.0, self._rate / rate)

    def _budget(self, plain: float, share: float = 1.0) -> float:
        """Seconds that a step may lose, of a share of what is allowed; `plain`: those of a plain one."""
        return share * _LOSS * _WINDOW * plain - self._ledger.rise

    # -- steps of another kind, for one sequence (control_tree.py) -------------------------------------------------------

    @property
    def to_beat(self) -> float:
        """Tokens per second, of late or of plain decoding, that another kind of step must surpass; 0 before chains have
        been judged."""
        return max(self._rate, 1 / self.decode.seconds(1)) if self.judged else 0.0

    def allows(self, seconds: float) -> bool:
        """Whether a step of another kind may take so long and gain one token only: no plain step is due, and no window
        would lose more than it may."""
        plain = self.decode.seconds(1)
        due = self._plain_seen < _FIRST_PLAIN or self._plain_is_due(1 / plain)
        return not due and seconds - plain <= self._budget(plain)

    def record_other(self, rows: int, gained: int, draft: float, rest: float) -> float:
        """A finished step of another kind. Returns its seconds, without what the system took away."""
        self._steps += 1
        self.decode.record(rows, rest)
        self._since_plain += max(1, gained)
        took = min(draft + rest, _STALLED * (self.decode.seconds(rows) + draft))
        self._ledger.add(gained, took - self.decode.seconds(1) * gained, _WINDOW)
        self._follow(gained, took)
        return took

    # -- before drafting -----------------------------------------------------------------------------------------------

    def choose(self, looks: Sequence[Look]) -> list[int]:
        none = [0] * len(looks)
        self._floor, self._trial, self._whole = 0.0, False, False
        if not looks or self.n_max == 0:
            return self._say(none, "off")
        if self._plain_seen < _FIRST_PLAIN:
            return self._say(none, "plain steps first")
        n = len(looks)
        plain = n / self.decode.seconds(n)
        if self._plain_is_due(plain):
            return self._say(none, "plain cost is due")
        can_cut = all(look.may_cut for look in looks)
        alive = _survival([self.position.chance(j) for j in range(self.n_max)])
        order = _likeliest([alive[: max(0, look.room)] for look in looks])
        if not order:
            return self._say(none, "no room", predicted=plain)
        best, rate = self._best(n, order)
        pays = self.pays(best)
        if best == 0:
            best, rate = self._best(n, order, least=1)
        if not pays:
            self._since_trial += 1
            if self._since_trial < self._gap:
                return self._say(none, "nothing pays", predicted=plain)
            self._trial = True
            self._trials += 1
            self._whole = can_cut and self._trials % 2 == 1  # every other one shows what unsure tokens are worth, too
        else:
            best = self._other(n, best, rate, order)
        allowed = self._allowed(n, best, _OF_LOOKS if self._whole else 1.0)
        if allowed == 0:
            return self._say(none, "the loss allowed is used up", predicted=plain)
        if self._trial:
            self._since_trial = 0
        ks = _counts(n, order[:allowed])
        if can_cut and not (self._trial or self._whole):
            self._floor = self._stop_below(n, allowed, max(rate, plain))
        return self._say(ks, "a trial" if self._trial else "pays", predicted=rate)

    def pays(self, best: int) -> bool:
        """Whether drafts are made where the block that looks best has so many tokens. What is known by position says
        whether to begin. What came of it, drafts cut by confidence and all, can say no to that, and yes where it said no."""
        if not self.judged:
            return best > 0
        return self.advantage > (-_DOUBT if best > 0 else 0.0)

    def _other(self, n: int, best: int, rate: float, order: Sequence[tuple[int, float]]) -> int:
        """Now and then another size than the best one known, if it could be better were its decode as cheap as a smaller
        one's: a step downwards in t(n) is only found by trying."""
        self._since_look += 1
        if self._since_look < _CURIOUS[0]:
            return best
        gain, hopeful = float(n), []
        for m in range(1, len(order) + 1):
            gain += order[m - 1][1]
            cheap = self.decode.seconds(n + min(m - 1, best)) + self.draft.seconds(m)
            if m != best and gain > _PROMISE * rate * cheap:
                hopeful.append(m)
        if not hopeful:
            return best
        unknown = min(hopeful, key=lambda m: (min(2, self.decode.samples(n + m)), abs(m - best)))
        settled = self.decode.samples(n + unknown) >= 2
        if settled and self._since_look < _CURIOUS[1]:
            return best
        self._since_look = 0
        self._whole = True
        self._looks += 1
        return hopeful[self._looks % len(hopeful)] if settled else unknown

    def _best(self, n: int, order: Sequence[tuple[int, float]], least: int = 0) -> tuple[int, float]:
        """(m, tokens per second) of the best block of n sequences and the first m tokens of `order`."""
        best, top, gain = 0, 0.0, float(n)
        for m in range(len(order) + 1):
            if m:
                gain += order[m - 1][1]
            rate = gain / max(1e-9, self.decode.seconds(n + m) + (self.draft.seconds(m) if m else 0.0))
            if m >= least and rate > top:
                best, top = m, rate
        return best, top

    def _allowed(self, n: int, m: int, share: float) -> int:
        """The most of m drafted tokens that could be refused, all of them, without a loss beyond a share of what is
        allowed."""
        plain = self.decode.seconds(n)
        budget = self._budget(plain, share)
        while m > 0 and self.decode.seconds(n + m) + self.draft.seconds(m) - plain > budget:
            m -= 1
        return m

    def _stop_below(self, n: int, m: int, rate: float) -> float:
        """Confidence that a token must have to be worth its row and the next one's drafting."""
        row = (self.decode.seconds(n + m) - self.decode.seconds(n)) / m
        more = max(0.0, self.draft.seconds(m) - self.draft.seconds(max(1, m - 1))) if m > 1 else 0.0
        return min(0.95, self.calibration.threshold(min(1.0, rate * (row + more))))

    def floor(self) -> float:
        return self._floor

    # -- after drafting ------------------------------------------------------------------------------------------------

    def cut(self, looks: Sequence[Look], confidences: Sequence[Sequence[float]]) -> list[int]:
        lengths = [len(c) for c in confidences]
        if self._whole or not all(look.may_cut for look in looks):
            return lengths
        order = _likeliest([_survival([self.calibration.chance(value) for value in values]) for values in confidences])
        n, gain = len(looks), float(len(looks))
        rate = max(self._rate, n / self.decode.seconds(n))
        best, top = 0, gain - rate * self.decode.seconds(n)
        for m, (_, alive) in enumerate(order, 1):
            gain += alive
            worth = gain - rate * self.decode.seconds(n + m)
            if worth > top:
                best, top = m, worth
        kept = _counts(n, order[:best])
        self._last |= {"proposed": lengths, "verified": kept}
        return kept

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def record(self, outcomes: Sequence[Outcome], proposed: int, draft: float, rest: float) -> None:
        n = len(outcomes)
        if not n:
            return
        self._steps += 1
        rows = n + sum(len(o.confidence) + o.again for o in outcomes)
        gained = sum(o.gained for o in outcomes)
        self.decode.record(rows, rest)
        if proposed > 0:
            self.draft.record(proposed, draft)
        if rows == n and proposed < 0:
            self._plain_seen += 1
            self._since_plain = 0
        else:
            self._since_plain += max(1, gained // n)
        for outcome in outcomes:
            if not len(outcome.confidence):
                continue
            self.position.record(len(outcome.confidence), outcome.n_accepted)
            for j, value in enumerate(outcome.confidence[: outcome.n_accepted + 1]):
                self.calibration.record(value, j < outcome.n_accepted)
        # A step that the system interrupted says nothing about drafting: it counts as what it should have taken, doubled.
        expected = self.decode.seconds(rows) + (self.draft.seconds(proposed) if proposed > 0 else 0.0)
        took = min(draft + rest, _STALLED * expected)
        plain = self.decode.seconds(n)
        lost = took - plain * gained / n
        if proposed == 0 and draft < _FREE * plain:  # a look for nothing that cost nothing: no draft, no judgement
            lost = 0.0
            self._since_trial = max(self._since_trial, self._gap if self._trial else 0)
        elif proposed >= 0:
            if not self._whole:  # those are made to learn from
                self._judge(-lost / plain)
            if self._trial:
                self._gap = _GAPS[0] if gained > n else min(2 * self._gap, _GAPS[1])
        else:
            lost = 0.0  # plain decoding is what it is compared with
        self._ledger.add(gained, lost, _WINDOW * n)
        self._follow(gained, took)
        self._last |= {
            "rows": rows, "gained": gained, "ms": round(1e3 * (draft + rest), 3), "expected_ms": round(1e3 * expected, 3),
            "advantage": round(self.advantage, 3), "loss": round(self._ledger.rise / plain, 2),
        }  # fmt: skip

    def _follow(self, gained: int, took: float) -> None:
        follow = max(_FOLLOW, 1 / self._steps)
        self._tokens += follow * (gained - self._tokens)
        self._seconds += follow * (took - self._seconds)

    def _judge(self, advantage: float) -> None:
        """A step for which drafts were made gained so many plain steps."""
        self._drafted_steps += 1
        follow = max(_FOLLOW, 1 / self._drafted_steps)
        self.advantage += follow * (advantage - self.advantage)

    def _say(self, ks: list[int], why: str, predicted: float = 0.0) -> list[int]:
        self._last = {"k": ks, "why": why}
        if predicted:
            self._last["predicted_tok_s"] = round(predicted, 1)
        return ks

    def trace(self) -> dict[str, Any]:
        return self._last


def _survival(chances: Sequence[float]) -> list[float]:
    """Of each token of a draft, with all those before it."""
    return list(itertools.accumulate(chances, operator.mul))


def _likeliest(alive: Sequence[Sequence[float]]) -> list[tuple[int, float]]:
    """(sequence, chance to survive) of every token, the likeliest first; `alive` by sequence."""
    found = [(i, chance) for i, chances in enumerate(alive) for chance in chances]
    return sorted(found, key=lambda item: -item[1])


def _counts(n: int, tokens: Sequence[tuple[int, float]]) -> list[int]:
    """How many of these tokens each of n sequences has."""
    counts = [0] * n
    for i, _ in tokens:
        counts[i] += 1
    return counts
