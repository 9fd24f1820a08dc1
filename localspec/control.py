"""As many tokens drafted as pay, for all sequences together, and none where none does. Pure arithmetic over measured times:
no llama.cpp, no clock of its own.

A block of S sequences with m drafted tokens gains S tokens for certain and the sum of the tokens' chances to survive, each
the product of the chances along its sequence; it costs one decode of S + m rows and the drafting. The rate of that has a
highest point, found by trying all sizes: t(n) has steps, so the first that does not pay need not be the last one that
does.

A decode of several sequences is cut into passes over the weights (passes.py): blocks of one length take one, others take
several, and each costs what its own rows cost. So before drafting all sequences get one length, as far as each has room,
and afterwards, when drafts differ in how sure they are, a few ways to cut them are held against each other. Chances fall
along a sequence, so taking the likeliest tokens first never takes a token without the one before it.

Two decisions are made. Before drafting: how many tokens of each sequence. After it, when the draft has said how sure it is
of each: how many of them to verify. Dropping a token after a look at it is lossless where the text is the target's own
whatever was drafted (greedy, and `match`). Under `reject` it is not: a token drawn from q that is dropped because it looked
unlikely would be replaced by one drawn from p instead of from the residual. There the first decision, which has not seen
any token, is the only one (`Look.may_cut`).

What it may cost is bounded by a ledger: whatever a step took beyond what plain decoding would have taken for the same
tokens is counted, in plain steps, as these take another time in a slower minute or with other texts beside. A draft is made
only if, were all of it refused, no stretch of the last 256 tokens would have lost more than `_LOSS` of its plain time, less
what the ledger can't see.

After a decode nothing of Python is in the processor's caches, and thinking about a step took 4 % of a small model's. So
where drafting pays a decision stands for some steps, as many as could all be refused, and where it does not some steps
are plain without a thought; what came of them is learnt at once afterwards (`settle`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localspec.blocks import ADAPTIVE_N_MAX, Look, Outcome, Passes, one_pass
from localspec.costs import DecodeCost, DraftCost
from localspec.cuts import survival, ways_to_cut
from localspec.ledger import Ledger
from localspec.prior import DraftPrior
from localspec.survival import ByPosition, Calibration, Mood

_WINDOW = 256  # tokens of a sequence over which a loss is bounded
_LOSS = 0.021  # of a window's plain time, at most; 3 % is promised
_LOSS_OF_GOOD = 0.028  # the same of drafts that have paid: as far as what is left of the window is likely to win it back
_TRUSTED = 0.25  # of what they have gained, when that is worked out
_UNSEEN = 14e-6  # seconds of a step that plain decoding has not and that the ledger does not see: reading taps, choosing
_FIRST_PLAIN = 3  # plain steps at the start: what drafting has to beat
_EARLY = 16  # tokens until the first ones after those: what begins is easily interrupted
_REFRESH = 192  # tokens of a sequence between plain steps that keep its cost current
_USUAL = 1.3  # times what plain steps took, that another one may differ by
_USED_TO = 16  # plain steps, after which only every _EACH-th is learnt from: Python's part of a step is what plain decoding
_EACH = 16  # would not have, and after a decode nothing of it is in the processor's caches
_AGAIN = 4  # plain steps in a row because of that, at most
_STALLED = 2.0  # a step that took so many times what was expected was interrupted; what it took beyond says nothing
_SURE = 3  # times of a size, before one that takes longer is held to be interrupted
_PROMISE = 1.05  # times the best rate known, that another size must be able to reach to be looked at
_RISKED = 0.9  # of the loss that is left: what a step may risk, so that smaller blocks are left to win it back
_RISKED_OF_GOOD = 0.33  # where drafting pays: an allowance that chance has used up stops it for a window,
_PATIENCE = 16  # but for a step that risks the rest of it, after so many: what it wins is there to go on with
_OF_LOOKS = 0.4  # of the loss allowed: what is spent to learn must leave something to draft with
_CURIOUS = (8, 192)  # steps between looks at another number of rows: while one is unknown, and afterwards
_LOOKS = 5  # steps that a look at another number of rows takes: the first ones alone tell of a change and cold caches
_SETTLED = 4  # times of a size, after which looks at it are rare
_GAPS = (4, 64)  # steps between trials while nothing pays: after one that helped, and at most
_GAP_NEW = 16  # where a text begins, at most
_GAP_MANY = 4  # times that, with so many texts or more: a trial tells of each
_ASLEEP = 32  # a gap from which on drafts are not held ready,
_AWAKE = 16  # but for so many steps before the next trial
_FREE = 0.01  # of a plain step
_FOLLOW = 0.03  # of the moving averages
_REMEMBERED = 2 / _FOLLOW - 1  # steps that such an average is as good as the mean of
_DOUBT = 0.05  # of a plain step: what is as good as nothing
_JUDGED = 8  # drafted steps before what they gained is believed
_ANEW = 8  # steps with another number of texts, after which what was learnt with the former one is doubted
_HELD = 8  # steps of one text that a decision stands for where drafting pays: Python's part of a step again


@dataclass(slots=True)
class _Size:
    """Tokens to draft for each sequence, m together, and what is expected of them: tokens gained, the decode's passes and
    seconds, and the drafter's seconds."""

    ks: list[int]
    m: int
    gain: float
    passes: tuple[int, ...]
    decode: float
    draft: float

    @property
    def rate(self) -> float:
        return self.gain / max(1e-9, self.decode + self.draft)


@dataclass(slots=True)
class _Standing:
    """What drafting has been worth with so many sequences (within a factor of two): one alone gains where sixteen lose."""

    advantage: float = 0.0  # of a step with drafts over plain steps, in plain steps, a moving average
    spread: float = 0.0  # its variance
    drafted: int = 0
    steps: int = 0
    tokens: float = 0.0  # of a step of late, moving averages
    seconds: float = 0.0
    gap: int = _GAPS[0]  # steps between trials
    since_trial: int = 0
    trials: int = 0

    @property
    def judged(self) -> bool:
        """Whether enough was drafted for `advantage` to be believed."""
        return self.drafted >= _JUDGED

    @property
    def error(self) -> float:
        """Of `advantage`, by chance."""
        return math.sqrt(self.spread / min(_REMEMBERED, max(1, self.drafted)))

    @property
    def hopeless(self) -> bool:
        """Whether drafting loses, and chance does not explain it."""
        return self.judged and self.advantage + self.error <= -_DOUBT


_NONE = _Size([], 0, 0.0, (), 0.0, 0.0)


class Adaptive:
    """As many tokens as pay. `prior`: ratios t(n) / t(1) of an earlier run on this machine with this target; `known`: what
    it learnt of the draft."""

    def __init__(
        self, n_max: int = ADAPTIVE_N_MAX, prior: Mapping[int, float] | None = None, known: DraftPrior | None = None
    ):  # fmt: skip
        self.n_max = n_max
        self.decode = DecodeCost(prior)
        self._prior = prior or {}
        self.draft = DraftCost(self.decode, known.cost if known else None)
        self.position = ByPosition.begun(known.kept if known else ())
        self.calibration = Calibration(known.sure if known else ())
        self._steps = 0
        self._standings: dict[int, _Standing] = {}
        self._now, self._texts = self._standing(1), 1
        self._anew = (self._now, 0, 0)  # the standing of the last steps, how many those are, and passes before them
        self._ledger = Ledger()
        self._plain_seen = 0
        self._since_plain = 0  # tokens of a sequence
        self._asked_again = 0  # plain steps in a row that surprised
        self._trial = False
        self._since_look = self._looks = 0
        self._drafting = False  # whether the last step drafted, too
        self._idle = 0  # steps without a draft in a row, because of what it could lose
        self._looking = (0, 0)  # tokens drafted in the look that is being taken, and steps that it is still to take
        self._whole = False
        self._floor = 0.0
        self._mood = Mood()  # of one sequence
        self._held = 0  # steps that the last decision still stands for
        self._size = _NONE  # that was decided on
        self._asked = 0  # tokens, of all sequences, in the last decision
        self._may_cut = True  # and whether it was of a text whose drafts may be cut
        self._worth: list[float] = []  # of one sequence: tokens that a decode with k drafted ones must gain, by k
        self._staying = 0.0  # and what of them one with as many rows as the last decode need not
        self._rows = 0  # of that
        self._finished: list[tuple[Sequence[Outcome], int, float, float]] = []  # steps that are still to be learnt from
        self._passes: Passes = one_pass  # of the session in use
        self._usual = (0, 0.0)  # sequences of a plain step, and its seconds
        self._rests = 0  # plain steps that are still to be made without a thought
        self._resting = self._waits = False  # whether this step is one, and the reason that nothing pays
        self._rested, self._rested_seconds = 0, 0.0  # plain steps that were passed over
        self._passed_over = 0  # those before the one that is learnt from
        self._last: dict[str, Any] = {}
        self._brief: tuple[int, int, float] | None = None  # rows, tokens and seconds of a step that is not learnt from yet

    @property
    def steps(self) -> int:
        """Steps seen so far."""
        return self._steps

    @property
    def judged(self) -> bool:
        """Whether enough was drafted for `advantage` to be believed."""
        return self._now.judged

    @property
    def advantage(self) -> float:
        """Of a step with drafts over plain steps, in plain steps, with as many sequences as in the last step."""
        return self._now.advantage

    @advantage.setter
    def advantage(self, value: float) -> None:
        self._now.advantage = value

    @property
    def asleep(self) -> bool:
        now = self._now
        waits = now.gap >= _ASLEEP and now.gap - now.since_trial > _AWAKE and not self._trial
        return waits and now.hopeless

    def _standing(self, n: int) -> _Standing:
        return self._standings.setdefault(n.bit_length(), _Standing())

    def learnt(self) -> DraftPrior | None:
        """What a later run may know of the draft; None before enough was drafted."""
        self.settle()
        if sum(standing.drafted for standing in self._standings.values()) < _JUDGED:
            return None
        return DraftPrior(self.draft.line(), tuple(self.position.values()), self.calibration.known())

    @property
    def _rate(self) -> float:
        """Tokens per second of late."""
        return self._now.tokens / self._now.seconds if self._now.seconds else 0.0

    def _plain_is_due(self, rate: float) -> bool:
        """Whether plain decoding's cost, which makes so many tokens a second, has to be looked at again."""
        gap = min(_REFRESH, _EARLY << min(8, max(0, self._plain_seen - _FIRST_PLAIN)))
        return self._asked_again > 0 or self._since_plain >= gap * max(1.0, self._rate / rate)

    def _budget(self, plain: float, share: float = 1.0) -> float:
        """Seconds that a step may lose, of a share of what is allowed; `plain`: those of a plain one."""
        unseen = _UNSEEN / plain
        most = max(0.0, _LOSS - unseen) * _WINDOW
        now = self._now
        if share == 1.0 and now.judged and now.advantage > now.error:
            steps = self._ledger.left(_WINDOW) * self._texts / max(1.0, now.tokens)
            most += min((_LOSS_OF_GOOD - _LOSS) * _WINDOW, _TRUSTED * (now.advantage - now.error) * steps)
        return plain * (share * most - self._ledger.rise)

    # -- steps of another kind, for one sequence (control_tree.py) -------------------------------------------------------

    @property
    def to_beat(self) -> float:
        """Tokens per second, of late or of plain decoding, that another kind of step must surpass; 0 before chains have
        been judged."""
        return max(self._rate, 1 / self.decode.at_most((1,))) if self.judged else 0.0

    def allows(self, seconds: float) -> bool:
        """Whether a step of another kind may take so long and gain one token only: no plain step is due, and no window
        would lose more than it may."""
        self.settle()
        plain = self.decode.at_most((1,))
        due = self._plain_seen < _FIRST_PLAIN or self._plain_is_due(1 / plain)
        return not due and seconds - plain <= self._budget(plain)

    def record_other(self, rows: int, gained: int, draft: float, rest: float) -> float:
        """A finished step of another kind. Returns its seconds, without what the system took away."""
        self.settle()
        self._steps += 1
        self.decode.record(rows, rest)
        self._since_plain += max(1, gained)
        took = min(draft + rest, _STALLED * (self.decode.seconds(rows) + draft))
        self._ledger.add(gained, took / self.decode.at_most((1,)) - gained, _WINDOW)
        self._follow(gained, took)
        return took

    # -- before drafting -----------------------------------------------------------------------------------------------

    def begins(self) -> None:
        """The loss that is allowed is that of a text: what others lost is not this one's. And where nothing paid in them, it
        is asked soon whether it does in this one."""
        self.settle()
        self._ledger, self._mood = Ledger(), Mood()
        self.decode.last = 0  # a prompt was read since
        alone = self._standing(1)
        alone.gap = min(alone.gap, _GAP_NEW)
        alone.drafted = min(alone.drafted, _JUDGED)

    def rests(self, n: int) -> bool:
        if not self._rests or n != self._usual[0]:
            return False
        self._rests -= 1
        self._resting = True
        self._now.since_trial += self._waits
        self._say([0] * n, self._last["why"])
        return True

    def choose(self, looks: Sequence[Look], passes: Passes = one_pass) -> list[int]:
        if self._held and len(looks) == 1 and self._stands_for(looks[0]) and passes == self._passes:
            self._held -= 1
            self._since_look += 1
            return self._say(self._size.ks, "pays, as decided before")
        none = [0] * len(looks)
        if self.rests(len(looks)):
            return none
        self.settle()
        self._floor, self._trial, self._whole, self._passes = 0.0, False, False, passes
        if not looks or self.n_max == 0:
            return self._say(none, "off")
        self._now, self._texts = self._standing(len(looks)), len(looks)
        if self._plain_seen < _FIRST_PLAIN:
            return self._say(none, "plain steps first")
        waits = self._now.hopeless and self._now.since_trial + 1 < self._now.gap
        if waits and not self._since_plain and not self._asked_again:
            self._now.since_trial += 1
            self._rest(True)
            return self._say(none, "nothing pays")
        step = self._plain([look.key for look in looks])
        plain = len(looks) / step
        if self._plain_is_due(plain):
            return self._say(none, "plain cost is due")
        if waits:
            self._now.since_trial += 1
            return self._say(none, "nothing pays", predicted=plain)
        if self._budget(step) <= 0:
            self._rest(False)
            return self._say(none, "the loss allowed is used up", predicted=plain)
        sizes = self._sizes(looks)
        if len(sizes) == 1:
            return self._say(none, "no room", predicted=plain)
        can_cut = all(look.may_cut for look in looks)
        best = max(sizes, key=lambda size: size.rate)
        pays = self.pays(best.m)
        if best.m == 0:
            best = max(sizes[1:], key=lambda size: size.rate)
        if not pays:
            self._now.since_trial += 1
            if self._now.since_trial < self._now.gap:
                self._rest(True)
                return self._say(none, "nothing pays", predicted=plain)
            self._trial = True
            self._now.trials += 1
            self._whole = can_cut and self._now.trials % 2 == 1  # every other one shows what unsure tokens are worth, too
            size = best
        else:
            size = self._other(best, sizes)
        size = self._allowed(size, sizes, _OF_LOOKS if self._whole else 1.0)
        if size.m == 0:
            self._rest(False)
            self._idle += 1 + self._rests
            return self._say(none, "the loss allowed is used up", predicted=plain)
        self._idle = 0
        if self._trial:
            self._now.since_trial = 0
        # By the rate that was reached: the one expected is that of tokens as sure as those verified so far.
        rate = max(self._rate, plain)
        if can_cut and not (self._trial or self._whole):
            self._floor = self._stop_below(size, sizes, rate)
        if len(looks) == 1:
            self._may_cut = can_cut
            self._hold(size, sizes, rate)
        return self._say(size.ks, "a trial" if self._trial else "pays", predicted=best.rate)

    def _rest(self, waits: bool) -> None:
        """After this plain step some more without a thought, `waits` for the next trial or for a loss to be forgotten: of
        usual ones all that is to be known is known."""
        self._waits = waits
        if self._plain_seen >= _USED_TO and not self._since_plain and not self._asked_again:
            self._rests = max(0, min(_EACH, self._now.gap - self._now.since_trial if waits else _EACH) - 1)

    def _hold(self, size: _Size, sizes: Sequence[_Size], rate: float) -> None:
        """Work out what a block of one sequence must gain, and how many steps this decision stands for: so many that all of
        them could be refused."""
        self._size = size
        change = rate * self.decode.change
        self._worth = [rate * each.decode + change for each in sizes]
        self._staying = change
        if self._trial or not (self._seen(size) if self._whole else self.judged and self.advantage > _DOUBT):
            return
        most = 1 + self._looking[1] if self._whole else _HELD
        risk = size.decode + size.draft + self.decode.change - sizes[0].decode
        budget = _RISKED * self._budget(sizes[0].decode, _OF_LOOKS if self._whole else 1.0)
        self._held = max(0, (most if risk * most <= budget else int(budget / risk)) - 1)
        self._looking = (size.m, max(0, self._looking[1] - self._held))

    def _stands_for(self, look: Look) -> bool:
        """Whether the last decision may stand for this one, too. What a look at the tokens may decide differs by text."""
        return look.room >= self._size.m and look.may_cut == self._may_cut

    def pays(self, best: int) -> bool:
        """Whether drafts are made where the block that looks best has so many tokens. What is known by position says
        whether to begin. What came of it, drafts cut by confidence and all, can say no to that, and yes where it said no."""
        if not self.judged:
            return best > 0
        return not self._now.hopeless if best > 0 else self.advantage > 0

    def _sizes(self, looks: Sequence[Look]) -> list[_Size]:
        """What may be drafted: for every sequence so many tokens, or as many as it has room for. The first size is none."""
        keys, rooms = [look.key for look in looks], [look.room for look in looks]
        gain, alive, sizes = float(len(looks)), self._mood.factor if len(looks) == 1 else 1.0, []
        for level in range(max(0, min(self.n_max, max(rooms))) + 1):
            if level:
                alive *= self.position.chance(level - 1)
                gain += alive * sum(room >= level for room in rooms)
            ks = [max(0, min(level, room)) for room in rooms]
            passes = self._passes_of(keys, ks)
            m = sum(ks)
            decode = self.decode.of(passes) if m else self._plain(keys)
            sizes.append(_Size(ks, m, gain, passes, decode, self.draft.seconds(m) if m else 0.0))
        return sizes

    def _passes_of(self, keys: Sequence[int], ks: Sequence[int]) -> tuple[int, ...]:
        """Rows of each pass of a decode of pending tokens with so many drafted ones behind them."""
        return self._passes(tuple([(key, 1 + k) for key, k in zip(keys, ks)]))

    def _plain(self, keys: Sequence[int]) -> float:
        """Seconds of a step without drafts."""
        return self.decode.at_most(self._passes_of(keys, [0] * len(keys)))

    def _other(self, best: _Size, sizes: Sequence[_Size]) -> _Size:
        """Now and then another size than the best one known, if it could be better were its decode as cheap as a smaller
        one's: a step downwards in t(n) is only found by trying."""
        self._since_look += 1
        if self._since_look < _CURIOUS[0] and not self._looking[1]:
            return best
        budget = self._budget(sizes[0].decode, _OF_LOOKS)
        hopeful = []
        for level, size in enumerate(sizes[1:], 1):
            cheap = min(size.decode, sizes[level - 1].decode, best.decode) + size.draft
            affordable = size.decode + size.draft - sizes[0].decode <= budget
            if size is not best and affordable and size.gain > _PROMISE * best.rate * cheap:
                if self._looking[1] and size.m == self._looking[0]:
                    return self._look(size, self._looking[1] - 1)
                hopeful.append(size)
        self._looking = (0, 0)
        if not hopeful:
            return best
        unknown = min(hopeful, key=lambda size: (min(_SETTLED, self._seen(size)), abs(size.m - best.m)))
        settled = self._seen(unknown) >= _SETTLED
        if settled and self._since_look < _CURIOUS[1]:
            return best
        if self._since_look < _CURIOUS[0]:
            return best
        self._looks += 1
        return self._look(hopeful[self._looks % len(hopeful)] if settled else unknown, _LOOKS - 1)

    def _look(self, size: _Size, further: int) -> _Size:
        self._since_look, self._whole, self._looking = 0, True, (size.m, further)
        return size

    def _seen(self, size: _Size) -> int:
        """How often; what an earlier run saw counts while nothing contradicts it."""
        if self.decode.prior_holds and all(rows in self._prior for rows in size.passes):
            return _SETTLED
        return min(self.decode.samples(rows) for rows in size.passes)

    def _allowed(self, size: _Size, sizes: Sequence[_Size], share: float) -> _Size:
        """The largest size up to this one whose tokens could all be refused without a loss beyond a share of what is
        allowed."""
        plain = sizes[0].decode
        good = self.judged and self.advantage > 0 and not (self._whole or self._trial) and self._idle < _PATIENCE
        budget = (_RISKED_OF_GOOD if good else _RISKED) * self._budget(plain, share)
        fit = [s for s in sizes if s.m <= size.m and s.decode + s.draft - plain <= budget]
        return fit[-1] if fit else sizes[0]

    def _stop_below(self, size: _Size, sizes: Sequence[_Size], rate: float) -> float:
        """Confidence that a token must have to be worth its row and the next one's drafting. Without it the decode is of
        another size than the one before."""
        row = (size.decode - sizes[0].decode) / size.m - self.decode.change
        more = max(0.0, self.draft.seconds(size.m) - self.draft.seconds(max(1, size.m - 1))) if size.m > 1 else 0.0
        return min(0.95, self.calibration.threshold(min(1.0, rate * max(0.0, row + more))))

    def floor(self) -> float:
        return self._floor

    # -- after drafting ------------------------------------------------------------------------------------------------

    def cut(self, looks: Sequence[Look], confidences: Sequence[Sequence[float]]) -> list[int]:
        lengths = [len(c) for c in confidences]
        if self._whole or not all(look.may_cut for look in looks):
            return lengths
        if len(looks) == 1:
            kept_of_one = self._cut_one(confidences[0])
            self._last |= {"proposed": lengths, "verified": [kept_of_one]}
            return [kept_of_one]
        keys = [look.key for look in looks]
        alive = [survival([self.calibration.chance(value) for value in values]) for values in confidences]
        plain = self._plain(keys)
        rate = max(self._rate, len(looks) / plain)
        kept, top = [0] * len(looks), -rate * plain
        for ks in ways_to_cut(alive):
            gain = sum(sum(chances[:k]) for chances, k in zip(alive, ks))
            worth = gain - rate * self.decode.of(self._passes_of(keys, ks))
            if worth > top:
                kept, top = ks, worth
        self._last |= {"proposed": lengths, "verified": kept}
        return kept

    def _cut_one(self, confidence: Sequence[float]) -> int:
        alive, gain, kept, top = self._mood.factor, 0.0, 0, -self._worth[0] + self._staying * (self._rows == 1)
        for k, value in enumerate(confidence, 1):
            alive *= self.calibration.chance(value)
            gain += alive
            worth = gain - self._worth[k]
            if k + 1 == self._rows:
                worth += self._staying
            if worth > top:
                kept, top = k, worth
        return kept

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def record(self, outcomes: Sequence[Outcome], proposed: int, draft: float, rest: float) -> None:
        n = len(outcomes)
        if not n:
            return
        if n == 1:
            if proposed > 0:
                self._feel(outcomes[0])
            self._rows = 1 + len(outcomes[0].confidence) + outcomes[0].again
            if self._held and proposed >= 0:
                self._finished.append((outcomes, proposed, draft, rest))
                self._brief = self._rows, outcomes[0].gained, draft + rest
                return
        if self._resting:
            self._resting = False
            if proposed < 0 and n == self._usual[0] and self._like_usual(rest):
                self._rested += 1
                self._rested_seconds += draft + rest
                self._brief = n, n, draft + rest
                return
        if self._rested or self._finished:
            self.settle()
        self._brief = None
        self._learn(outcomes, proposed, draft, rest)

    def _feel(self, outcome: Outcome) -> None:
        first = self.calibration.chance(outcome.confidence[0]) if len(outcome.confidence) else 0.0
        self._mood.record(first, outcome.n_accepted > 0)

    def settle(self) -> None:
        """Learn from the steps that wait for it: all at once, which takes a fraction of the time."""
        self._held = self._rests = 0
        self._passed_over, self._rested = self._rested, 0
        if self._passed_over:
            n = self._usual[0]
            self._ledger.add(self._passed_over, 0.0, _WINDOW)
            self.decode.pass_over(self._passed_over)
            for _ in range(self._passed_over):
                self._steps += 1
                self._follow(n, self._rested_seconds / self._passed_over)
            self._rested_seconds = 0.0
        if self._finished:
            finished, self._finished, last = self._finished, [], self._last
            for step in finished:
                self._learn(*step)
            self._last = last

    def _learn(self, outcomes: Sequence[Outcome], proposed: int, draft: float, rest: float) -> None:
        n = len(outcomes)
        self._steps += 1
        self._doubt(n)
        passes = self._passes(tuple([(o.key, 1 + len(o.confidence) + o.again) for o in outcomes]))
        rows = sum(passes)
        gained = sum(o.gained for o in outcomes)
        before = self.decode.last
        usual = self.decode.of(passes, before)
        known = self.decode.samples(max(passes)) >= _SURE
        if proposed < 0 and n == self._usual[0] and not self._like_usual(rest):
            for _ in range(self._passed_over):  # else what is unusual would be learnt from more often than it happens
                self.decode.record_passes(passes, self._usual[1])
        self.decode.record_passes(passes, rest)
        made = min(self._asked, proposed + n)  # where a chain ended early, a token was drafted that was not proposed
        if proposed > 0 and (self._drafting or not self.draft.known):  # else it had to read what came meanwhile
            self.draft.record(made, draft)
        self._drafting = proposed > 0
        if proposed < 0 and not any(o.again for o in outcomes):
            self._plain_seen += 1
            self._since_plain = self._passed_over = 0
            # One that took another time than those before it: which of them were stretched, more of them tell.
            surprise = usual > 0 and not 1 / _USUAL < rest / usual < _USUAL
            self._asked_again = self._asked_again + 1 if surprise and self._asked_again < _AGAIN else 0
            self._usual = (n, rest) if surprise or not usual else (n, usual)
        else:
            self._since_plain += max(1, gained // n)
        for outcome in outcomes:
            if not len(outcome.confidence):
                continue
            self.position.record(len(outcome.confidence), outcome.n_accepted)
            for j, value in enumerate(outcome.confidence[: outcome.n_accepted + 1]):
                self.calibration.record(value, j < outcome.n_accepted)
        # What the system takes away from a step says nothing about drafting, and plain decoding's cost is a median: so a
        # decode counts as what such decodes take. Drafting may have had to read what came since it was asked last.
        plain = self._plain([o.key for o in outcomes])
        decode = self.decode.of(passes, before)
        drafting = self.draft.seconds(made) if proposed > 0 else 0.0
        expected = decode + drafting
        took = (decode if known else min(rest, _STALLED * decode)) + min(draft, _STALLED * drafting + plain)
        lost = took - plain * gained / n
        if proposed == 0 and draft < _FREE * plain:  # a look for nothing that cost nothing: no draft, no judgement
            lost = 0.0
            self._now.since_trial = max(self._now.since_trial, self._now.gap if self._trial else 0)
        elif proposed >= 0:
            if not self._whole:  # those are made to learn from
                self._judge(-lost / plain)
            if self._trial:
                self._now.gap = _GAPS[0] if lost < 0 else min(2 * self._now.gap, _GAPS[1] * min(n, _GAP_MANY))
        else:
            lost = 0.0  # plain decoding is what it is compared with
        self._ledger.add(gained / n, lost / plain, _WINDOW)
        self._follow(gained, took)
        self._last |= {
            "rows": rows, "gained": gained, "ms": round(1e3 * (draft + rest), 3), "expected_ms": round(1e3 * expected, 3),
            "advantage": round(self.advantage, 3), "loss": round(self._ledger.rise, 2),
        }  # fmt: skip

    def _doubt(self, n: int) -> None:
        """Where another number of texts is written than before: sizes seen with those may cost something else now."""
        last, steps, passes = self._anew
        standing = self._standing(n)
        if standing is not last:
            self._anew = (standing, 1, self.decode.passes)
            return
        if steps == _ANEW:
            self.decode.doubt(passes, cheap=True)
        if steps <= _ANEW:
            self._anew = (standing, steps + 1, passes)

    def _like_usual(self, rest: float) -> bool:
        return 1 / _USUAL < rest / self._usual[1] < _USUAL

    def _follow(self, gained: int, took: float) -> None:
        now = self._now
        now.steps += 1
        follow = max(_FOLLOW, 1 / now.steps)
        now.tokens += follow * (gained - now.tokens)
        now.seconds += follow * (took - now.seconds)

    def _judge(self, advantage: float) -> None:
        """A step for which drafts were made gained so many plain steps."""
        self._now.drafted += 1
        follow = max(_FOLLOW, 1 / self._now.drafted)
        off = advantage - self._now.advantage
        self._now.advantage += follow * off
        self._now.spread = (1 - follow) * (self._now.spread + follow * off * off)

    def _say(self, ks: list[int], why: str, predicted: float = 0.0) -> list[int]:
        self._asked = sum(ks)
        self._last = {"k": ks, "why": why}
        if predicted:
            self._last["predicted_tok_s"] = round(predicted, 1)
        return ks

    def trace(self) -> dict[str, Any]:
        if self._brief is None:
            return self._last
        rows, gained, seconds = self._brief
        return self._last | {"rows": rows, "gained": gained, "ms": round(1e3 * seconds, 3)}
