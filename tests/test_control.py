"""The controller, by simulation: it never sees a clock."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from localspec.blocks import Controller, FixedBlock, Look, Outcome, Passes, one_pass
from localspec.control import Adaptive
from localspec.costs import DecodeCost
from localspec.passes import rows_of

FLAT = {n: 1 + 0.05 * (n - 1) for n in range(1, 65)}
STEEP = {n: 0.3 + 0.7 * n for n in range(1, 65)}
CLIFFS = {n: (1.0, 1.1, 1.2, 1.3, 1.9, 2.0, 2.05, 1.6)[min(n, 8) - 1] + 0.1 * max(0, n - 8) for n in range(1, 65)}


@dataclass
class World:
    """A machine and a text. `chance(j, at)`: of the j-th drafted token at this place of the text. `tells`: how much the
    draft's confidence says about whether its token is right (0: nothing)."""

    cost: dict[int, float]
    chance: Callable[[int, int], float]
    draft_cost: float = 0.05
    tells: float = 0.0
    stalls: float = 0.0  # share of steps that take twenty times as long
    stalled_first: int = 0  # steps at the beginning that do
    change: float = 0.0  # what another number of rows than in the pass before costs
    passes: Passes = one_pass
    seed: int = 0
    gained: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    verified: int = 0
    rows: int = 0  # of the last pass

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def run(self, controller: Controller, n_tokens: int, n: int = 1, may_cut: bool = True) -> float:
        """Seconds per token."""
        done = 0
        start = len(self.seconds)
        while done < n_tokens * n:
            looks = [Look(i, 64, may_cut) for i in range(n)]
            ks = controller.choose(looks, self.passes)
            floor = controller.floor()
            drafts: list[list[tuple[float, bool]]] = []
            tried = 0
            for k in ks:
                draft: list[tuple[float, bool]] = []
                for j in range(k):
                    p = self.chance(j, done // n)
                    right = self.random.random() < p
                    confidence = (1 - self.tells) * p + self.tells * (0.9 if right else 0.1)
                    tried += 1
                    if confidence < floor:
                        break
                    draft.append((confidence, right))
                drafts.append(draft)
            proposed = sum(map(len, drafts)) if any(ks) else -1
            confidences = [[c for c, _ in d] for d in drafts]
            kept = controller.cut(looks, confidences) if proposed > 0 else [len(d) for d in drafts]
            outcomes = []
            for look, draft, m in zip(looks, drafts, kept):
                accepted = 0
                while accepted < m and draft[accepted][1]:
                    accepted += 1
                outcomes.append(Outcome(look.key, [c for c, _ in draft[:m]], accepted, accepted + 1))
            stalled = self.random.random() < self.stalls or len(self.seconds) < self.stalled_first
            noise = self.random.uniform(0.97, 1.03) * (20 if stalled else 1)
            passes = self.passes(tuple((i, 1 + m) for i, m in enumerate(kept)))
            decode = sum(self.cost[rows] for rows in passes)
            decode += self.change * sum(a != b for a, b in zip((self.rows, *passes), passes))
            self.rows = passes[-1]
            rest = decode * noise
            drafting = self.draft_cost * tried
            controller.record(outcomes, proposed, drafting, rest)
            self.verified += sum(kept)
            self.gained.append(sum(o.gained for o in outcomes))
            # what the system took away is the same for all, so it is left out of what is compared
            self.seconds.append(decode + drafting)
            done += self.gained[-1]
        return sum(self.seconds[start:]) / sum(self.gained[start:])

    def worst_window(self, plain: float, size: int = 256) -> float:
        """The most that any run of steps of at least `size` tokens took, against plain decoding."""
        worst, first, tokens, seconds = 0.0, 0, 0, 0.0
        for gained, took in zip(self.gained, self.seconds):
            tokens, seconds = tokens + gained, seconds + took
            while tokens - self.gained[first] >= size:
                tokens, seconds = tokens - self.gained[first], seconds - self.seconds[first]
                first += 1
            if tokens >= size:
                worst = max(worst, seconds / (tokens * plain))
        return worst


def constant(p: float) -> Callable[[int, int], float]:
    return lambda j, at: p


def test_fixed_block_always_drafts() -> None:
    fixed = FixedBlock(5)
    assert fixed.choose([Look(0, 64), Look(1, 2)]) == [5, 2]
    assert fixed.cut([Look(0, 64)], [[0.1, 0.2]]) == [2]


@pytest.mark.parametrize("cost", [FLAT, STEEP, CLIFFS], ids=["flat", "steep", "cliffs"])
@pytest.mark.parametrize(
    "chance",
    [constant(0.0), constant(0.1), lambda j, at: 0.9 if at % 700 < 60 else 0.02, lambda j, at: 0.3 / (1 + j)],
    ids=["never", "rarely", "stale", "falling"],
)
@pytest.mark.parametrize(("stalls", "change"), [(0.0, 0.0), (0.05, 0.0), (0.0, 0.12)], ids=["quiet", "noisy", "graphs"])
def test_no_window_is_slower_than_plain_by_more_than_three_percent(
    cost: dict[int, float], chance: Callable[[int, int], float], stalls: float, change: float
) -> None:
    for seed in range(3):
        world = World(cost, chance, draft_cost=0.15, stalls=stalls, change=change, seed=seed)
        world.run(Adaptive(), 4000)
        assert world.worst_window(cost[1]) < 1.03


@pytest.mark.parametrize("cost", [FLAT, STEEP, CLIFFS], ids=["flat", "steep", "cliffs"])
@pytest.mark.parametrize("p", [0.3, 0.6, 0.8, 0.95])
def test_a_steady_draft_is_used_as_well_as_by_the_best_fixed_number(cost: dict[int, float], p: float) -> None:
    best = min(World(cost, constant(p), seed=1).run(FixedBlock(k), 4000) for k in range(9))
    assert World(cost, constant(p), seed=1).run(_warm(cost, p), 4000) < 1.03 * best


def _warm(cost: dict[int, float], p: float) -> Adaptive:
    controller = Adaptive()
    World(cost, constant(p), seed=2).run(controller, 500)
    return controller


def test_a_cliff_is_jumped_over() -> None:
    """8 rows cost less than 5: where drafts are good, 7 are asked for though the 4th does not pay."""
    world = World(CLIFFS, constant(0.93))
    world.run(_warm(CLIFFS, 0.93), 1000)
    assert world.verified / len(world.seconds) > 6


def test_confidence_that_tells_something_beats_any_fixed_number() -> None:
    cost, chance = STEEP, constant(0.6)
    best = min(World(cost, chance, tells=0.9, draft_cost=0.02, seed=1).run(FixedBlock(k), 4000) for k in range(9))
    world = World(cost, chance, tells=0.9, draft_cost=0.02, seed=1)
    world.run(Adaptive(), 6000)
    assert sum(world.seconds) / sum(world.gained) < 0.97 * best


def test_what_changes_is_noticed() -> None:
    controller = Adaptive()
    World(FLAT, constant(0.0), seed=1).run(controller, 2000)
    again = World(FLAT, constant(0.9), seed=1).run(controller, 3000)
    assert again < 0.4


def test_interruptions_do_not_stop_it() -> None:
    quiet = sum(World(FLAT, constant(0.8), seed=seed).run(Adaptive(), 3000) for seed in range(6))
    noisy = sum(World(FLAT, constant(0.8), seed=seed, stalls=0.05).run(Adaptive(), 3000) for seed in range(6))
    assert noisy < 1.1 * quiet


def test_plain_steps_that_were_stretched_do_not_make_everything_pay() -> None:
    for stalled, most in ((1, 1.03), (2, 1.03), (3, 1.06)):
        world = World(STEEP, constant(0.1), stalled_first=stalled, seed=stalled)
        world.run(Adaptive(), 4000)
        assert world.worst_window(STEEP[1]) < most


def test_noise_does_not_move_what_is_known_of_sizes_seen_rarely() -> None:
    """Times differ upwards only; two sizes are measured 3,000 times, the others were at the beginning."""
    noise = random.Random(0)
    decode = DecodeCost()

    def record(rows: int) -> None:
        decode.record(rows, FLAT[rows] * (1 + abs(noise.gauss(0, 0.1))))

    for rows in range(1, 10):
        for _ in range(3):
            record(rows)
    for _ in range(3000):
        record(noise.choice((1, 4)))
    for rows in range(2, 10):
        assert decode.seconds(rows) / decode.seconds(1) == pytest.approx(FLAT[rows], rel=0.15)


def test_a_machine_that_slows_down_does_so_for_all_sizes() -> None:
    decode = DecodeCost()
    for rows in (1, 2, 4, 8) * 3:
        decode.record(rows, FLAT[rows])
    for _ in range(20):
        decode.record(1, 2 * FLAT[1])
    assert decode.seconds(8) == pytest.approx(2 * FLAT[8], rel=0.05)


def test_a_first_time_that_was_interrupted_does_not_stand_for_its_size() -> None:
    decode = DecodeCost()
    for rows in (1, 2, 3) * 3:
        decode.record(rows, FLAT[rows])
    decode.record(4, 20 * FLAT[4])
    assert decode.seconds(4) == pytest.approx(FLAT[4], rel=0.05)
    decode.record(4, 20 * FLAT[4])  # twice of two is what it takes
    assert decode.seconds(4) == pytest.approx(20 * FLAT[4])


def test_interruptions_are_not_the_speed_of_the_machine() -> None:
    decode = DecodeCost()
    for rows in (1, 4) * 9:
        decode.record(rows, FLAT[rows])
    for stalled in (1, 20, 1, 20, 1, 20, 1, 20):  # half of the last ones
        decode.record(4, stalled * FLAT[4])
    assert decode.seconds(1) == pytest.approx(FLAT[1])


def test_what_another_number_of_rows_costs_is_told_from_what_the_rows_cost() -> None:
    decode = DecodeCost()
    before = 0
    for rows in [1, 1, 1, 1] + [3, 1, 4, 4, 1, 3, 3] * 10:
        decode.record(rows, FLAT[rows] + 0.12 * (rows != before))
        before = rows
    for rows in (1, 3, 4):
        assert decode.seconds(rows) == pytest.approx(FLAT[rows])
    assert decode.of((4,), after=3) == pytest.approx(FLAT[4] + 0.12)
    assert decode.of((3, 4, 4), after=3) == pytest.approx(FLAT[3] + 2 * FLAT[4] + 0.12)


def test_drafts_of_several_texts_are_judged_by_the_passes_that_they_take() -> None:
    """Passes are dear, rows cheap, as on a large model: one draft more than the others' is another pass."""
    cost = {n: 1 + 0.01 * n for n in range(1, 200)}
    world = World(cost, constant(0.5), passes=rows_of, draft_cost=0.001, seed=1)
    controller = Adaptive()
    world.run(controller, 1500, n=6)
    assert world.worst_window(cost[6] / 6, 256 * 6) < 1.03
    assert sum(world.seconds) / sum(world.gained) < 0.75 * cost[6] / 6
    # Times of several passes are not taken for times of their sum.
    assert controller.decode.seconds(6) == pytest.approx(cost[6], rel=0.1)
    assert controller.decode.seconds(12) == pytest.approx(cost[12], rel=0.1)


def test_many_sequences_share_a_steep_curve() -> None:
    """With 16 sequences a decode is near what the machine can do: hardly anything is drafted. With one, it is."""
    cost = {n: max(1.0, 0.25 * n) for n in range(1, 200)}
    one = World(cost, constant(0.6), seed=1)
    one.run(Adaptive(), 1000)
    many = World(cost, constant(0.6), seed=1)
    many.run(Adaptive(), 1000, n=16)
    assert one.verified / len(one.seconds) > 2
    assert many.verified / len(many.seconds) / 16 < 0.1
    assert many.worst_window(cost[16] / 16, 256 * 16) < 1.03


def test_the_sequence_that_promises_most_is_extended() -> None:
    """Of two drafts at hand, the unsure one is cut first."""
    controller = Adaptive()
    for confidence, kept in ((0.95, True), (0.15, False)):
        for _ in range(40):
            controller.calibration.record(confidence, kept)
    for rows in (2, 3, 4, 5, 6):
        for _ in range(3):
            controller.decode.record(rows, 1 + 0.2 * (rows - 2))
    looks = [Look(0, 8), Look(1, 8)]
    assert controller.cut(looks, [[0.95, 0.95], [0.15, 0.15]]) == [2, 0]


def test_without_a_look_at_the_tokens_nothing_is_cut() -> None:
    """Rejection sampling: what was drawn must be judged."""
    controller = Adaptive()
    World(STEEP, constant(0.1), seed=1).run(controller, 500)
    assert controller.cut([Look(0, 8, may_cut=False)], [[0.01, 0.01, 0.01]]) == [3]
    controller.choose([Look(0, 8, may_cut=False)])
    assert controller.floor() == 0.0


def test_n_max_zero_and_no_room_never_draft() -> None:
    for controller, room in ((Adaptive(0), 64), (Adaptive(), 0)):
        for _ in range(50):
            assert controller.choose([Look(0, room)]) == [0]
            controller.record([Outcome(0, [], 0, 1)], -1, 0.0, 1.0)


def test_a_drafter_with_nothing_to_say_is_asked_again() -> None:
    controller = Adaptive()
    asked = 0
    for _ in range(200):
        ks = controller.choose([Look(0, 64)])
        asked += ks[0] > 0
        controller.record([Outcome(0, [], 0, 1)], 0 if ks[0] else -1, 0.0, 1.0)
    assert asked > 150


def _drafted(controller: Adaptive, n_accepted: int) -> None:
    """A step of one sequence as the controller wants it, on a flat curve."""
    looks = [Look(0, 64)]
    (k,) = controller.choose(looks)
    if not k:
        controller.record([Outcome(0, [], 0, 1)], -1, 0.0, 1.0)
        return
    (k,) = controller.cut(looks, [[0.7] * k])
    kept = min(k, n_accepted)
    controller.record([Outcome(0, [0.7] * k, kept, kept + 1)], k, 0.02 * k, FLAT[1 + k])


def test_a_decision_stands_for_no_more_steps_than_could_all_be_refused() -> None:
    controller = _warm(FLAT, 0.9)
    for _ in range(40):  # all at once nothing is kept any more
        before = controller.choose([Look(0, 64)])
        if not before[0]:
            break
        (k,) = controller.cut([Look(0, 64)], [[0.9] * before[0]])
        controller.record([Outcome(0, [0.9] * k, 0, 1)], k, 0.05 * k, FLAT[1 + k])
    assert before == [0]
    controller.settle()
    assert controller._budget(1.0) > -0.1


def test_what_waits_to_be_learnt_from_is_learnt_from_when_asked_for() -> None:
    held, at_once = _warm(FLAT, 0.8), _warm(FLAT, 0.8)
    for controller in (held, at_once):
        controller.settle()
        for step in range(20):
            _drafted(controller, step % 3)
            if controller is at_once:
                controller.settle()
    assert held._finished
    assert not at_once._finished
    steps = held.steps
    known = held.learnt()
    assert held.steps > steps
    assert not held._finished
    other = at_once.learnt()
    assert known is not None
    assert other is not None
    assert known.kept == pytest.approx(other.kept, abs=0.1)


def test_a_text_that_was_often_refused_of_late_is_drafted_less_for() -> None:
    controller = _warm({n: 1 + 0.12 * (n - 1) for n in range(1, 10)}, 0.8)

    def drafted() -> int:
        controller.settle()
        controller._since_plain = controller._since_look = 0  # neither is due
        return controller.choose([Look(0, 64)])[0]

    usual = drafted()
    assert usual > 1
    for _ in range(5):
        controller._feel(Outcome(0, [0.8] * usual, 0, 1))
    assert drafted() < usual
    for _ in range(12):
        controller._feel(Outcome(0, [0.8] * usual, usual, usual + 1))
    assert drafted() == usual


def test_a_text_is_not_charged_for_what_another_lost() -> None:
    """A draft that is worth much in every other text; what is bounded is a text's own loss."""
    controller, best = Adaptive(), FixedBlock(4)
    mine = theirs = 0.0
    for text in range(40):
        world = World(FLAT, constant(0.85 if text % 2 else 0.05), draft_cost=0.1, seed=text)
        copied = copy.deepcopy(world)
        controller.begins()
        mine += world.run(controller, 200)
        theirs += min(copy.deepcopy(copied).run(best, 200), copied.run(FixedBlock(0), 200))
        assert world.worst_window(1.0, 128) < 1.06
    assert mine < 1.1 * theirs


@pytest.mark.parametrize(
    ("gained", "hopeless"), [([-0.3] * 8, True), ([-0.6] * 6 + [1.2] * 2, False), ([-0.6] * 60 + [1.2] * 12, True)]
)
def test_what_chance_explains_does_not_close_a_draft(gained: list[float], hopeless: bool) -> None:
    controller = Adaptive()
    random.Random(1).shuffle(gained)
    for each in gained:
        controller._judge(each)
    assert controller.advantage < -0.05
    assert controller.pays(best=1) is not hopeless


def test_a_size_is_looked_at_for_some_steps_in_a_row() -> None:
    world, controller, chosen = World(FLAT, constant(0.7), seed=2), Adaptive(), list[int]()
    choose = controller.choose

    def watched(looks: Sequence[Look], passes: Passes = one_pass) -> list[int]:
        ks = choose(looks, passes)
        chosen.append(ks[0] if controller._whole else -1)
        return ks

    controller.choose = watched  # type: ignore[method-assign]
    world.run(controller, 600)
    looks = [(k, len(list(run))) for k, run in itertools.groupby(chosen) if k >= 0]
    assert sum(length >= 4 for _, length in looks) >= 3  # a plain step that is due may cut one short


def test_a_machine_that_is_a_little_slower_is_so_for_all_sizes() -> None:
    decode = DecodeCost()
    for _ in range(30):
        for rows in (1, 4):
            decode.record(rows, FLAT[rows])
    for _ in range(200):
        decode.record(4, 1.12 * FLAT[4])
    assert decode.seconds(1) == pytest.approx(1.12 * FLAT[1], rel=0.03)


@pytest.mark.parametrize("slow", [1.3, 2.0])
def test_a_machine_that_changes_its_speed_often_does_not_bend_the_curve(slow: float) -> None:
    chance, cost, speed, worst = random.Random(1), DecodeCost(), 1.0, 0.0
    for step in range(4000):
        if chance.random() < 1 / 100:
            speed = slow if speed == 1.0 else 1.0
        rows = chance.choices([1, 2, 3, 4], [0.1, 0.3, 0.3, 0.3])[0] if step // 300 % 3 else 1
        cost.record(rows, FLAT[rows] * speed * chance.uniform(0.97, 1.09) * (3 if chance.random() < 0.02 else 1))
        if step > 200:
            worst = max(worst, *(abs(ratio / FLAT[n] - 1) for n, ratio in cost.curve(3).items()))
    assert worst < 0.3


def test_stalled_steps_weigh_no_more_than_they_happen() -> None:
    """Plain steps that are like those before are not learnt from one by one, those that are not like them are."""
    for seed in range(6):
        controller = _warm(FLAT, 0.0)
        chance = random.Random(seed)
        for _ in range(3000):
            (k,) = controller.choose([Look(0, 64)])
            stall = 9 if chance.random() < 0.06 else 1
            controller.record([Outcome(0, [0.5] * k, 0, 1)], k or -1, 0.1 * k, FLAT[1 + k] * stall)
            assert controller.decode.seconds(1) < 1.5


def test_what_an_earlier_run_knew_saves_looks_and_first_tries() -> None:
    taught = _warm(FLAT, 0.9)
    known = taught.learnt()
    assert known is not None
    assert known.cost == pytest.approx((0.0, 0.05), abs=0.02)
    per_token = {}
    for name, controller in (("new", Adaptive()), ("taught", Adaptive(8, taught.decode.curve(3), known))):
        worlds = [World(FLAT, constant(0.9), seed=seed) for seed in range(40)]
        per_token[name] = sum(world.run(copy.deepcopy(controller), 200) for world in worlds)
    assert per_token["taught"] < per_token["new"]


def test_an_earlier_run_that_is_contradicted_is_not_relied_on() -> None:
    cost = DecodeCost({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.3})
    cost.record(1, 1.0)
    assert cost.prior_holds
    for _ in range(3):
        cost.record(4, 2.5)
    assert not cost.prior_holds
    assert not DecodeCost().prior_holds


def test_a_decision_that_may_cut_does_not_stand_for_a_text_that_may_not() -> None:
    """A token that is dropped after a look at it makes `reject` another distribution."""
    controller = _warm(FLAT, 0.9)
    for _ in range(20):
        controller.choose([Look(0, 64)])
        if controller._held and controller.floor() > 0:
            break
        controller.record([Outcome(0, [0.9] * 3, 3, 4)], 3, 0.1, FLAT[4])
    assert controller._held
    assert controller.floor() > 0
    (k,) = controller.choose([Look(0, 64, may_cut=False)])
    assert k > 0
    assert controller.floor() == 0
    assert controller.cut([Look(0, 64, may_cut=False)], [[0.01] * k]) == [k]


def test_what_many_texts_lose_says_nothing_about_one() -> None:
    """A server that wrote sixteen texts, for which drafts did not pay, writes one, for which they do."""
    cost = {n: 1 + 0.05 * (n - 1) if n <= 16 else 1.75 + n - 16 for n in range(1, 200)}
    controller = _warm(cost, 0.7)
    alone = World(cost, constant(0.7), seed=5).run(controller, 400)
    World(cost, constant(0.7), seed=6).run(controller, 100, n=16)
    assert World(cost, constant(0.7), seed=5).run(controller, 400) < 1.05 * alone


def test_sizes_that_were_dear_beside_other_texts_are_tried_again() -> None:
    """Few rows were seen while texts ended, on a machine that everyone wanted: so dear that no trial would verify any."""
    quiet = {n: 1 + 0.05 * (n - 1) for n in range(1, 200)}
    busy = {n: quiet[n] * (4.0 if 1 < n < 12 else 1.0) for n in quiet}
    alone = World(quiet, constant(0.7), tells=0.5, seed=5).run(_warm(quiet, 0.7), 400)
    controller = Adaptive()
    for n in (16, 8, 4, 3):
        World(busy, constant(0.7), tells=0.5, seed=n).run(controller, 100, n=n)
    World(quiet, constant(0.7), tells=0.5, seed=6).run(controller, 300)
    assert World(quiet, constant(0.7), tells=0.5, seed=5).run(controller, 400) < 1.15 * alone


def test_a_dear_size_that_is_not_seen_for_long_is_forgotten_and_a_cheap_one_kept() -> None:
    decode = DecodeCost()
    for rows, seconds in ((1, 1.0), (2, 3.0), (4, 1.1)) * 5:
        decode.record(rows, seconds)
    for _ in range(900):
        decode.record(1, 1.0)
    assert decode.seconds(2) == pytest.approx(3.0, rel=0.1)
    decode.pass_over(2000)
    assert decode.samples(2) == 0
    assert decode.seconds(2) < 1.2
    assert decode.seconds(4) == pytest.approx(1.1, rel=0.05)


def test_what_is_lost_counts_in_plain_steps_whatever_these_take() -> None:
    """In a slow minute, or with many texts, a lost step takes more seconds, and is one step all the same."""
    cost = {n: 1 + 0.5 * (n - 1) for n in range(1, 65)}
    slow = {n: 5 * seconds for n, seconds in cost.items()}
    controller = Adaptive()
    World(cost, constant(0.0), seed=3).run(controller, 300)
    risen = controller._ledger.rise
    assert risen > 0.5
    World(slow, constant(0.0), seed=4).run(controller, 200)
    World(cost, constant(0.0), seed=5).run(controller, 40)
    assert controller._ledger.rise < 0.021 * 256


def test_a_rest_asks_nothing_and_counts_as_the_same_steps() -> None:
    """Whether the engine asks `rests` first or `choose` alone, the decisions are the same."""
    said = []
    for asks in (False, True):
        controller, steps = Adaptive(), []
        for _ in range(1500):
            rests = asks and controller.rests(1)
            (k,) = [0] if rests else controller.choose([Look(0, 64)])
            steps.append((k, rests))
            confidence = [0.3] * controller.cut([Look(0, 64)], [[0.3] * k])[0] if k else []
            controller.record([Outcome(0, confidence, 0, 1)], k or -1, 0.1 * k, 1 + 0.3 * len(confidence))
        said.append([k for k, _ in steps])
    assert said[0] == said[1]
    assert sum(rests for _, rests in steps) > 700
    assert sum(map(bool, said[0])) > 5


class Watched(Adaptive):
    """Writes down whether it slept in each step, and whether it drafted."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[bool] = []
        self.drafted: list[bool] = []

    def choose(self, looks: Sequence[Look], passes: Passes = one_pass) -> list[int]:
        ks = super().choose(looks, passes)
        self.slept.append(self.asleep)
        self.drafted.append(any(ks))
        return ks


@pytest.mark.parametrize("n", [1, 8])
def test_where_nothing_pays_for_long_it_sleeps_and_wakes_before_it_tries_again(n: int) -> None:
    controller = Watched()
    machine = World(FLAT, constant(0.02))
    machine.run(controller, 4000, n)
    late = controller.slept[1500:]
    assert sum(late) > 0.6 * len(late)
    tries = [i for i, drafted in enumerate(controller.drafted) if drafted and i > 1500]
    assert len(tries) > 5
    for i in tries:
        assert not any(controller.slept[i - 16 : i + 1])
    assert any(controller.slept[i - 17] for i in tries)


def test_where_drafts_pay_it_does_not_sleep() -> None:
    controller = Watched()
    World(FLAT, lambda j, at: 0.02 if 1000 < at < 4000 else 0.8).run(controller, 9000)
    changes = [i for i, (a, b) in enumerate(zip(controller.slept, controller.slept[1:])) if a != b]
    assert changes, "it sleeps in the middle"
    assert not any(controller.slept[:300])
    assert not any(controller.slept[-500:])
