"""What drafts that read the target's taps have in common: how they begin, what they hold of the target, how they are kept.

Such a draft has `fc`, which fuses the taps, and `head` over a vocabulary that may be reduced. It holds the target's
embedding, one scale for each dimension of the taps, and which tokens its vocabulary is. At export the scales go into fc,
and the rest gets the names of vLLM's speculators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localspec import __version__
from localspec.convert.speculators import described
from localspec.data.shards import Sample
from localspec.errors import TrainError
from localspec.speculator import SpeculatorConfig
from localspec.train import vocab
from localspec.train.batches import Batch, collate
from localspec.train.models import DataFacts
from localspec.train.target_weights import TargetWeights

_FIRST_LOGITS = 1.0  # the head's initial logits have about this spread: the target's own would start at a loss of 47

Turn = tuple[Tensor, Tensor]


class TapDraft(nn.Module):
    """A subclass makes its parameters, `fc` and `head` among them, and says what they are called in a checkpoint."""

    NEEDS_TAPS: ClassVar[bool] = True

    shape: SpeculatorConfig
    fc: nn.Parameter
    head: nn.Parameter
    embedding: Tensor  # bf16 [V, H], the target's
    tap_scale: Tensor  # f32 [T * H]
    draft_ids: Tensor  # i64 [Vd]: the target's tokens that the draft can say
    draft_of: Tensor  # i64 [V]: each token's place among those, or -1

    def __init__(self, shape: SpeculatorConfig):
        super().__init__()
        self.shape = shape

    def names(self) -> dict[str, str]:
        """Each parameter's name in a checkpoint."""
        raise NotImplementedError

    def matrices(self) -> list[str]:
        """Names of the parameters that Muon may train."""
        raise NotImplementedError

    # -- beginning --------------------------------------------------------------------------------------------------

    def initialise(self, target: TargetWeights, facts: DataFacts, seed: int, halved: Sequence[str]) -> torch.Generator:
        """Random matrices, those `halved` smaller; the target's head and norm, scaled down; and what is held. Returns the
        generator of random numbers, for more."""
        random = torch.Generator().manual_seed(seed)
        own = dict(self.named_parameters())
        with torch.no_grad():
            for name in self.matrices():
                own[name].normal_(0.0, own[name].shape[1] ** -0.5, generator=random)
            for name in halved:
                own[name].mul_(0.5)
            ids = vocab.choose(facts.counts, len(self.head))
            head = target.head()[torch.from_numpy(ids)] * target.output_norm()
            probe = torch.randn(256, head.shape[1], generator=random)
            self.head.copy_(head * (_FIRST_LOGITS / (probe @ head.t()).std()))
        scale = 1.0 / np.maximum(facts.tap_rms, 1e-6)
        self._hold(target, scale.astype(np.float32), ids)
        return random

    def _hold(self, target: TargetWeights, scale: npt.NDArray[np.float32], ids: npt.NDArray[np.int64]) -> None:
        self.register_buffer("embedding", target.embedding(torch.bfloat16), persistent=False)
        self.register_buffer("tap_scale", torch.from_numpy(scale))
        self.register_buffer("draft_ids", torch.from_numpy(ids))
        table = np.full(self.shape.target.n_vocab, -1, np.int64)
        table[ids] = np.arange(len(ids))
        self.register_buffer("draft_of", torch.from_numpy(table))

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Start from a checkpoint's weights (speculators' names). The taps' scales and the vocabulary stay this data's:
        tokens that the checkpoint couldn't say begin as the target's. Raises TrainError for a draft of another shape."""
        own = dict(self.named_parameters())
        said = self.said_by_rows()
        with torch.no_grad():
            for name, place in self.names().items():
                found = tensors.get(place)
                if name in said and found is not None and found.shape[1:] == own[name].shape[1:]:
                    offsets = tensors.get("d2t", torch.zeros(len(found), dtype=torch.int64))
                    mine = self.draft_of[offsets + torch.arange(len(found))]
                    own[name][mine[mine >= 0]] = found[mine >= 0]
                    continue
                if found is None or found.shape != own[name].shape:
                    shown = "lacks" if found is None else f"has {tuple(found.shape)}, not {tuple(own[name].shape)}, as"
                    raise TrainError(f"the checkpoint to start from {shown} {place}: give one of this shape")
                own[name].copy_(found / self.tap_scale if name == "fc" else found)

    def said_by_rows(self) -> tuple[str, ...]:
        """Parameters with a row for each token that the draft can say."""
        return ("head",)

    # -- meanwhile --------------------------------------------------------------------------------------------------

    def vocabulary(self) -> npt.NDArray[np.int64]:
        ids: npt.NDArray[np.int64] = self.draft_ids.cpu().numpy()
        return ids

    def batch(self, samples: Sequence[Sample], max_len: int, dtype: torch.dtype) -> Batch:
        return collate(samples, max_len, self.tap_scale.cpu().numpy(), dtype)

    def norm_of(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), self.shape.rms_eps)

    def nothing(self) -> Tensor:
        """A loss of 0 with gradients of 0, for a batch in which nothing counts."""
        return 0.0 * torch.stack([p.sum() for p in self.parameters() if p.requires_grad]).sum()

    # -- what is kept -----------------------------------------------------------------------------------------------

    def config(self, provenance: Mapping[str, Any]) -> SpeculatorConfig:
        return replace(self.shape, provenance={"localspec": __version__, **provenance})

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds: f32, the taps' scales folded into fc, `d2t` as offsets."""
        names = self.names()
        found = {names[n]: p.detach().float() for n, p in self.named_parameters()}
        found["fc.weight"] = (self.fc.detach() * self.tap_scale).float()
        if self.shape.draft_vocab:
            found["d2t"] = self.draft_ids - torch.arange(len(self.draft_ids), device=self.draft_ids.device)
            found["t2d"] = self.draft_of >= 0
        return {n: t.cpu().contiguous() for n, t in found.items()}


def positions_of(starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """i64[N]: each token's place in its sample, of samples with these bounds (Batch.starts)."""
    return np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))


def positions(batch: Batch) -> npt.NDArray[np.int64]:
    """The same of a batch."""
    return positions_of(batch.starts)


def draft_starts(batch: Batch) -> npt.NDArray[np.int64]:
    """Places from which a draft may begin: of tokens, not a sample's first, before one that the assistant said."""
    starts = np.flatnonzero(batch.mask) - 1
    first = np.repeat(batch.starts[:-1], np.diff(batch.starts))
    return starts[(starts >= 1) & (starts > first[starts + 1])]


def goes_on(
    batch: Batch, ends: npt.NDArray[np.int64], rows: npt.NDArray[np.int64], right: npt.NDArray[np.bool_], chains: str,
    step: int,
) -> npt.NDArray[np.bool_]:  # fmt: skip
    """bool[R]: which chains that began at places `rows` have a step after this one (`--chains`): those right so far, or all,
    whose next token the assistant said. `ends` i64[N]: where each place's sample ends."""
    on = np.ones(len(rows), bool) if chains == "all" else right
    told = rows + 3 + step
    result: npt.NDArray[np.bool_] = on & (told < ends[rows]) & batch.mask[np.minimum(told, len(batch.mask) - 1)]
    return result


def disturbed(batch: Batch, noise: float) -> Batch:
    """The batch with noise on its taps: against learning few texts by heart (EAGLE, Li et al., arXiv 2401.15077, section
    4.1). The noise is a function of the batch, so that a resumed run sees the same."""
    if not noise:
        return batch
    random = torch.Generator(batch.taps.device).manual_seed(fingerprint(batch))
    more = torch.empty_like(batch.taps, dtype=torch.float32).normal_(0.0, noise, generator=random)
    return replace(batch, taps=batch.taps + more.to(batch.taps.dtype))


def fingerprint(batch: Batch) -> int:
    """A number that depends on the batch's tokens and their order: samples that meet in another batch give another."""
    places = torch.arange(batch.n_tokens, device=batch.tokens.device)
    return int((batch.tokens * places).sum())


def turn(at: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> Turn:
    """Cosines and sines [R, 1, head_dim / 2] of rotary positions `at` [R]."""
    half = head_dim // 2
    speeds = base ** (torch.arange(half, device=at.device) / -half)
    angle = at[:, None, None].float() * speeds
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, by: Turn) -> Tensor:
    """x [R, heads, d], turned; halves of a head belong together."""
    cos, sin = by
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def base_shape(target: TargetWeights, method: str, taps: tuple[int, ...], **own: Any) -> SpeculatorConfig:
    """A draft's config with the target's widths and heads. `n_ff` 0 is the target's, `draft_vocab` 0 all tokens."""
    identity, gguf = target.identity, target.gguf
    n_head, n_kv = target.layer_int("attention.head_count", 1), target.layer_int("attention.head_count_kv", 1)
    size = min(own.pop("draft_vocab") or identity.n_vocab, identity.n_vocab)
    n_ff = own.pop("n_ff") or target.layer_int("feed_forward_length", 4 * identity.n_embd)
    return SpeculatorConfig(
        method=method, target=identity, taps=taps, n_embd=identity.n_embd, n_head=n_head, n_head_kv=n_kv or n_head,
        head_dim=gguf.key_length, n_ff=n_ff, rms_eps=target.rms_eps, rope_base=target.rope_base,
        draft_vocab=0 if size == identity.n_vocab else size, n_ctx_train=gguf.n_ctx_train, **own,
    )  # fmt: skip


def speculators_config(
    shape: SpeculatorConfig, verifier: str, architecture: str, layer: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, Any]:
    """config.json of a draft as vLLM's speculators (0.9) reads it, with what is a method's `own`. That package loads a draft
    only together with its target's Hugging Face files, the `verifier`; a GGUF doesn't say where those are."""
    said = described(shape, architecture, {"target_hidden_size": shape.target.n_embd, **own}, layer)
    said["speculators_config"]["verifier"]["name_or_path"] = verifier or None
    return said
