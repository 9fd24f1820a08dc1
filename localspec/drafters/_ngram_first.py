"""Two drafters in one: prompt lookup where the text repeats itself, another drafter elsewhere (`--spec-type ngram,eagle3`).

Looking back costs nothing, so it is done at every step, and what it found is held against the text that came, used or not:
its chance is always current. The other drafter is asked where nothing was found, or where tokens found by so long a match
were kept less often than its own are. Which of the two it is hangs on the past alone, never on a token that was drawn: the
text stays the target's under both accept rules.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from localspec.accept import Draft
from localspec.drafters import Drafter, Sequence, Stoppable, TapReader
from localspec.drafters.ngram import NgramDrafter
from localspec.survival import Calibration, Rate
from localspec.target import Rows

_OTHER = 0.6  # of the other's tokens are kept, before anything is known


@dataclass(slots=True)
class _Told:
    """What was said of a text of `held` tokens; `other` is empty where the other drafter was not asked."""

    held: int
    found: Draft
    other: Draft


class NgramFirst:
    """Owns both. `n_drafts` counts whose drafts were handed on, by name."""

    def __init__(self, other: Drafter, p_min: float = 0.0):
        self.name = f"ngram,{other.name}"
        self.n_drafts = {"ngram": 0, other.name: 0}
        self.other = other
        self.ngram = NgramDrafter()  # p_min goes by the chance that its matches turn out to have
        self._p_min = p_min
        self._found = Calibration()
        self._kept = Rate(_OTHER)
        self._told: dict[int, _Told] = {}

    @property
    def p_min(self) -> float:
        """Of both: see Stoppable."""
        return self._p_min

    @p_min.setter
    def p_min(self, value: float) -> None:
        self._p_min = value
        if isinstance(self.other, Stoppable):
            self.other.p_min = value

    def begin(self, seq: Sequence) -> None:
        self._told.pop(seq.slot, None)
        self.ngram.begin(seq)
        self.other.begin(seq)

    def propose(self, seqs: Seq[Sequence], ks: Seq[int]) -> list[Draft]:
        found = self.ngram.propose(seqs, ks)
        drafts = [self._worth_it(draft) for draft in found]
        asked = [i for i, (draft, k) in enumerate(zip(drafts, ks)) if k > 0 and draft is None]
        others = self.other.propose([seqs[i] for i in asked], [ks[i] for i in asked]) if asked else []
        from_other = dict(zip(asked, others))
        result = []
        for i, (seq, draft) in enumerate(zip(seqs, drafts)):
            other = from_other.get(i, Draft.empty())
            self._told[seq.slot] = _Told(len(seq.tokens), found[i], other)
            chosen = other if draft is None else draft
            if len(chosen.tokens):
                self.n_drafts["ngram" if draft is not None else self.other.name] += 1
            result.append(chosen)
        return result

    def _worth_it(self, found: Draft) -> Draft | None:
        """What was found, with the chance that it has in place of the length of its match; None where the other's tokens
        are likelier to be kept."""
        if not len(found.tokens):
            return None
        chance = self._found.chance(float(found.confidence[0]))
        if chance < max(self._kept.value, self._p_min):
            return None
        return Draft(found.tokens, np.full(len(found.tokens), chance, np.float32))

    def commit(self, seq: Sequence, rows: Rows) -> None:
        told = self._told.pop(seq.slot, None)
        if told is not None:
            came = seq.tokens[told.held :]
            for confidence, kept in _judged(told.found, came):
                self._found.record(confidence, kept)
            for _, kept in _judged(told.other, came):
                self._kept.add(kept)
        self.ngram.commit(seq, rows)
        self.other.commit(seq, rows)

    def rewind(self, seq: Sequence, n_keep: int) -> None:
        self._told.pop(seq.slot, None)
        self.ngram.rewind(seq, n_keep)
        self.other.rewind(seq, n_keep)

    def close(self) -> None:
        self.ngram.close()
        self.other.close()


class _ReadsTaps(NgramFirst):
    """With another that reads the target's states."""

    def __init__(self, other: Drafter, reader: TapReader, p_min: float):
        super().__init__(other, p_min)
        self._reader, self.may_skip = reader, reader.may_skip

    def keep(self, seq: Sequence) -> int:
        return self._reader.keep(seq)

    def read(self, seq: Sequence, first: int, taps: np.ndarray) -> None:
        self._reader.read(seq, first, taps)

    def skip(self, seq: Sequence) -> None:
        self._reader.skip(seq)


def ngram_first(other: Drafter, p_min: float = 0.0) -> NgramFirst:
    """Looking back first, then `other`, which it owns from now on."""
    return _ReadsTaps(other, other, p_min) if isinstance(other, TapReader) else NgramFirst(other, p_min)


def _judged(draft: Draft, came: list[int]) -> list[tuple[float, bool]]:
    """(confidence, whether it came) of each token up to the first one that did not."""
    judged = []
    for token, confidence, now in zip(draft.tokens.tolist(), draft.confidence.tolist(), came):
        judged.append((confidence, token == now))
        if token != now:
            break
    return judged
