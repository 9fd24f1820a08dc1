"""How many tokens to draft here, as a table and in words: what the controller knows after some text, laid open.

Pure arithmetic over a controller's state, for one sequence. What it expects of k drafted tokens does not count that unsure
tokens are dropped after a look at them: what drafting gained when it was done says that, and has the last word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from localspec.control import Adaptive


@dataclass(frozen=True, slots=True)
class Cost:
    """A decode of n tokens: milliseconds, t(n) / t(1), n over that (what a free, perfect draft would give), and how often it
    was seen while text was written."""

    n: int
    ms: float
    ratio: float
    ceiling: float
    seen: int


@dataclass(frozen=True, slots=True)
class Choice:
    """k drafted tokens: tokens that a step is expected to gain, milliseconds that it takes (`draft_ms` of them for
    drafting), and what comes of that."""

    k: int
    tokens: float
    ms: float
    draft_ms: float
    tok_s: float
    speedup: float


@dataclass(frozen=True, slots=True)
class Advice:
    """`k` is what would be drafted, 0 where nothing pays; `speedup` what is expected of it against plain decoding.

    `chances[j]`: of drafted token j, those before it kept. `survival[j]`: that it is kept. `calibration`: (the draft's
    confidence, share kept, tokens seen). `gained`: of a step with drafts, in plain steps, against plain ones, as measured;
    None where too few were made.
    """

    costs: tuple[Cost, ...]
    chances: tuple[float, ...]
    survival: tuple[float, ...]
    calibration: tuple[tuple[float, float, int], ...]
    choices: tuple[Choice, ...]
    k: int
    speedup: float
    reason: str
    gained: float | None

    @property
    def ceiling(self) -> Cost:
        """The block that a free, perfect draft would gain most with."""
        return max(self.costs, key=lambda cost: cost.ceiling)

    def as_json(self) -> dict[str, Any]:
        """Everything, numbers rounded to what they are worth."""
        rounded: dict[str, Any] = _rounded(asdict(self))
        return {"k": self.k, "speedup": rounded["speedup"], **rounded}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, Mapping):
        return {name: _rounded(v) for name, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list | tuple) else value


def advise(controller: Adaptive) -> Advice | None:
    """What the controller would do next for one sequence, and why. None while it has not seen a decode."""
    controller.settle()
    decode, draft = controller.decode, controller.draft
    if not decode.known:
        return None
    plain = decode.seconds(1)
    costs = tuple(
        Cost(n, 1e3 * decode.seconds(n), decode.seconds(n) / plain, n * plain / decode.seconds(n), decode.samples(n))
        for n in range(1, controller.n_max + 2)
    )
    chances = tuple(controller.position.chance(j) for j in range(controller.n_max))
    survival: list[float] = []
    for chance in chances:
        survival.append((survival[-1] if survival else 1.0) * chance)
    choices = []
    for k in range(controller.n_max + 1):
        tokens = 1 + sum(survival[:k])
        drafting = draft.seconds(k) if k else 0.0
        seconds = decode.seconds(1 + k) + drafting
        choices.append(Choice(k, tokens, 1e3 * seconds, 1e3 * drafting, tokens / seconds, tokens * plain / seconds))
    k, reason = _choose(controller, choices)
    return Advice(
        costs,
        chances,
        tuple(survival),
        tuple((c, share, n) for c, share, n in controller.calibration.table() if n),
        tuple(choices),
        k,
        choices[k].speedup,
        reason,
        controller.advantage if controller.judged else None,
    )


def _choose(controller: Adaptive, choices: list[Choice]) -> tuple[int, str]:
    best = max(choices, key=lambda choice: choice.tok_s).k
    if len(choices) == 1:
        return 0, "drafting is off: --spec-draft-n-max 0"
    pays, gained = controller.pays(best), f"{controller.advantage:+.2f} plain decodes a step"
    if best == 0:
        first = max(choices[1:], key=lambda choice: choice.tok_s)
        # What a step with k tokens takes beyond a plain one has to come back as tokens.
        needed = first.ms / choices[0].ms - 1
        why = (
            f"no block pays: the best, of {first.k}, would give {first.speedup:.2f}x: it takes {needed:.2f} plain decodes "
            f"more than one, and {first.tokens - 1:.2f} of its drafted tokens are kept"
        )
        if pays:
            return first.k, f"{why}; but with unsure tokens dropped drafting gained {gained} where it was done"
        return 0, why
    top = choices[best]
    why = f"{top.tokens:.2f} tokens in {top.ms:.2f} ms are the most per second"
    if not pays:
        return 0, f"{why}, it was expected; but where it was done drafting came to {gained}"
    if best < len(choices) - 1:
        more = choices[best + 1]
        why += (
            f"; one more would bring {more.tokens - top.tokens:.2f} tokens and take {more.ms - top.ms:.2f} ms, in which "
            f"this block makes {top.tok_s * (more.ms - top.ms) / 1e3:.2f}"
        )
    else:
        why += f"; more than {best} were not looked at (--spec-draft-n-max)"
    return best, why
