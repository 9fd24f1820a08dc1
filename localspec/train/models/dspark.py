"""DSpark (DeepSeek-AI, DeepSpec, 2026) as llama.cpp runs it: DFlash with two heads on top.

Here every row of a block predicts, the anchor's own the token behind it: a block of n rows drafts n tokens. With a block of
three whose anchor is t5, row 0 (t5) predicts t6, row 1 (mask) t7, row 2 (mask) t8. With h_i the states behind the last norm:

    logits_i     = head h_i + W2 W1[x_i]            x_i: the token drafted (or known) before the one that row i predicts
    confidence_i = sigmoid(c . [h_i; W1[x_i]] + b)  whether it will be kept if those before it are

The Markov head (W1 [V, r], W2 [Vd, r], of low rank r) gives back what rows can't know when all are made at once: which
token the one before has become. It is trained on the text's own tokens, and at run time the rows are read one by one. The
confidence head is trained on the rows whose block is right so far, on whether the draft's first choice is the text's token;
nothing before it learns from that.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localspec.speculator import KeyValue, SpeculatorConfig
from localspec.train.kinds.dspark import Settings
from localspec.train.losses import HeadLoss, Weigh, best_tokens, head_loss
from localspec.train.models import dflash
from localspec.train.models.dflash import Low


class Model(dflash.Model):
    METHOD: ClassVar[str] = "dspark"
    TITLE: ClassVar[str] = "DSpark"
    FIRST: ClassVar[int] = 0
    Settings: ClassVar[Any] = Settings
    settings: Settings

    def __init__(self, shape: SpeculatorConfig, settings: Settings):
        super().__init__(shape, settings)
        n, rank = shape.n_embd, settings.markov_rank
        self.w1 = nn.Parameter(torch.empty(shape.target.n_vocab, rank))
        self.w2 = nn.Parameter(torch.zeros(len(self.head), rank))
        if settings.confidence:
            self.sure = nn.Parameter(torch.zeros(1, n + rank))
            self.sure_bias = nn.Parameter(torch.zeros(1))

    @classmethod
    def own_keys(cls, settings: Settings) -> dict[str, KeyValue]:
        return {"sample_from_anchor": True, "has_confidence_head": settings.confidence > 0}

    def begin(self, random: torch.Generator) -> None:
        with torch.no_grad():
            self.w1.normal_(0.0, self.w1.shape[1] ** -0.5, generator=random)

    def names(self) -> dict[str, str]:
        own = {"w1": "markov_head.markov_w1.weight", "w2": "markov_head.markov_w2.weight"}
        if self.settings.confidence:
            own |= {"sure": "confidence_head.proj.weight", "sure_bias": "confidence_head.proj.bias"}
        return super().names() | own

    def said_by_rows(self) -> tuple[str, ...]:
        return (*super().said_by_rows(), "w2")

    def own_config(self) -> dict[str, Any]:
        on = self.settings.confidence > 0
        return {"markov_rank": self.settings.markov_rank, "markov_head_type": "vanilla", "enable_confidence_head": on,
                "confidence_head_with_markov": on}  # fmt: skip

    # The Markov head's product is one with the head's: [h; W1[x]] against [head, W2].

    def low_head(self, dtype: torch.dtype) -> Tensor:
        return torch.cat([self.head, self.w2], 1).detach().to(dtype)

    def _features(self, states: Tensor, before: Tensor) -> Tensor:
        """[R, H + r]"""
        return torch.cat([states, F.embedding(before, self.w1).to(states.dtype)], -1)

    def head_loss(
        self, low: Low, states: Tensor, before: Tensor, ids: Tensor, p: Tensor, wanted: Tensor, weigh: Weigh, ends: list[int]
    ) -> HeadLoss:
        whole = torch.cat([self.head, self.w2], 1)
        return head_loss(self._features(states, before), whole, low.head, ids, p, wanted, weigh, ends)

    def also(
        self, states: Tensor, before: Tensor, right: Tensor, depth: npt.NDArray[np.int64], block: npt.NDArray[np.int64]
    ) -> Tensor:
        if not self.settings.confidence:
            return super().also(states, before, right, depth, block)
        rows = torch.from_numpy(right_so_far(right.cpu().numpy(), depth, block)).to(states.device)
        logits = self.confidence_logits(states[rows].detach(), before[rows])
        kept = right[rows].to(logits.dtype)
        return self.settings.confidence * F.binary_cross_entropy_with_logits(logits, kept, reduction="sum")

    def confidence_logits(self, states: Tensor, before: Tensor) -> Tensor:
        """f32[R]; W1 doesn't learn from them."""
        features = torch.cat([states.float(), F.embedding(before, self.w1.detach())], -1)
        return F.linear(features, self.sure, self.sure_bias)[:, 0]

    def say(self, low: Low, states: Tensor, before: Tensor) -> Tensor:
        said = []
        for row in states.unbind(1):
            before = self.draft_ids[best_tokens(self._features(row, before), low.head)]
            said.append(before)
        return torch.stack(said, 1)


def right_so_far(
    right: npt.NDArray[np.bool_], depth: npt.NDArray[np.int64], block: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The rows before which all of their block are `right`; a block's rows lie one after another, `depth` 0 first."""
    wrong = np.concatenate([[0], np.cumsum(~right)])[:-1]  # before each row
    first = np.flatnonzero(depth == 0)
    at_first = wrong[first][np.searchsorted(first, np.arange(len(depth)), "right") - 1]
    return np.flatnonzero(wrong == at_first)
