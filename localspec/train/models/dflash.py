"""DFlash (Chen, Liang and Liu, arXiv 2602.06036) as llama.cpp runs it: a block of tokens in one pass.

The target's taps at position P, fused by fc, are not read as states but as keys and values of every layer. A block stands
behind the positions whose taps are known: the last token known, its anchor, then masks. A mask's row predicts the token of
its own position. With ten tokens, a block of four whose anchor is t5:

    row   in      rotary position   sees                        predicts
    0     t5      5                 taps of 0..4, rows 0 to 3   -
    1     mask    6                 the same                    t6
    2     mask    7                 the same                    t7
    3     mask    8                 the same                    t8

A pass has blocks at a random part of the places where one could stand (`--anchors`), all seeing the same known keys. Their
sizes are random, too: at run time a block has one row more than tokens are wanted, and its rows see how many masks follow.
What is drawn is a function of the batch, so that a resumed run sees the same; each epoch makes other batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localspec.errors import TrainError
from localspec.speculator import KeyValue, SpeculatorConfig
from localspec.train import block_attention, draft_parts
from localspec.train.batches import Batch
from localspec.train.block_attention import block_attention as attend
from localspec.train.draft_parts import TapDraft, disturbed, draft_starts, fingerprint, positions, rotate, turn
from localspec.train.kinds.dflash import Settings
from localspec.train.losses import HeadLoss, Weigh, best_tokens, head_loss
from localspec.train.models import DataFacts, LossParts, Rollout
from localspec.train.position_weights import weigher
from localspec.train.target_weights import TargetWeights

_ROLLED_OUT = 8192  # rows at a time
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5  # types of tokens


_LAYER = {
    "input_norm": "input_layernorm",
    **{n: f"self_attn.{n}_proj" for n in "qkvo"},
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    **{n: f"mlp.{n}_proj" for n in ("gate", "up", "down")},
}


class Layer(nn.Module):
    """One layer's parameters; q and k rows lie in Hugging Face's order (halves rotate)."""

    def __init__(self, shape: SpeculatorConfig):
        super().__init__()
        n, dim = shape.n_embd, shape.head_dim
        self.input_norm, self.ffn_norm = nn.Parameter(torch.ones(n)), nn.Parameter(torch.ones(n))
        self.q = nn.Parameter(torch.empty(shape.n_head * dim, n))
        self.k = nn.Parameter(torch.empty(shape.n_head_kv * dim, n))
        self.v = nn.Parameter(torch.empty(shape.n_head_kv * dim, n))
        self.o = nn.Parameter(torch.empty(n, shape.n_head * dim))
        self.q_norm, self.k_norm = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.ones(dim))
        self.gate, self.up = nn.Parameter(torch.empty(shape.n_ff, n)), nn.Parameter(torch.empty(shape.n_ff, n))
        self.down = nn.Parameter(torch.empty(n, shape.n_ff))


@dataclass(frozen=True)
class Low:
    """The matrices in the type that products are made in, cast once for a pass: by layer q, k and v in one, o, gate and up
    in one, and down; and the head."""

    fc: Tensor
    layers: list[tuple[Tensor, Tensor, Tensor, Tensor]]
    head: Tensor


@dataclass(frozen=True)
class Blocks:
    """Blocks laid out row by row, i64[R] each: `block` its number, `slot` its place in that, `place` in the batch (it may
    lie behind the sample's end). `anchors` i64[A], and `cut`, the groups in which they are worked on."""

    anchors: npt.NDArray[np.int64]
    cut: list[block_attention.Group]
    block: npt.NDArray[np.int64]
    slot: npt.NDArray[np.int64]
    place: npt.NDArray[np.int64]

    @classmethod
    def of(cls, anchors: npt.NDArray[np.int64], cut: list[block_attention.Group]) -> Self:
        sizes = np.concatenate([np.full(g.last - g.first, g.size) for g in cut])
        block = np.repeat(np.arange(len(anchors)), sizes)
        slot = np.arange(len(block)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return cls(anchors, cut, block, slot, anchors[block] + slot)


class Model(TapDraft):
    """Exported under the names of vLLM's speculators."""

    METHOD: ClassVar[str] = "dflash"
    TITLE: ClassVar[str] = "DFlash"
    FIRST: ClassVar[int] = 1  # the first row of a block that predicts; it predicts the token behind the anchor
    Settings: ClassVar[Any] = Settings

    def __init__(self, shape: SpeculatorConfig, settings: Settings):
        super().__init__(shape)
        self.settings = settings
        self.depth = shape.depth
        self.mask_token = int(shape.extra["mask_token_id"])  # type: ignore[arg-type]
        windowed: Any = shape.extra.get("attention.sliding_window_pattern", [0] * shape.n_layer)
        self.windows = [shape.window if on else 0 for on in windowed]
        n = shape.n_embd
        self.fc = nn.Parameter(torch.empty(n, len(shape.taps) * shape.target.n_embd))
        self.hidden_norm, self.norm = nn.Parameter(torch.ones(n)), nn.Parameter(torch.ones(n))
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.n_layer))
        size = shape.draft_vocab or shape.target.n_vocab
        self.head = nn.Parameter(torch.empty(size, n), requires_grad=settings.train_head)

    @classmethod
    def shape_of(cls, settings: Settings, target: TargetWeights, taps: tuple[int, ...]) -> SpeculatorConfig:
        if not taps:
            raise TrainError(f"{cls.TITLE} reads the target's taps, the data has none: make it again")
        depth = settings.block - cls.FIRST
        if depth < 1:
            raise TrainError(f"--block {settings.block}: its only row would be the token known; at least 2")
        full = _numbers(settings.full_layers, settings.layers)
        window = settings.window if len(full) < settings.layers else 0
        if 0 < window <= settings.block:
            raise TrainError(f"--window {window}: more than a block's {settings.block} rows, or 0 for all")
        extra: dict[str, KeyValue] = {
            "block_size": settings.block, "mask_token_id": mask_token(target, settings.mask_token), **cls.own_keys(settings),
        }  # fmt: skip
        if window:
            extra["attention.sliding_window_pattern"] = [int(i not in full) for i in range(settings.layers)]
        return draft_parts.base_shape(
            target, cls.METHOD, taps, n_layer=settings.layers, n_ff=settings.n_ff, draft_vocab=settings.draft_vocab,
            depth=depth, window=window, architecture="dflash", extra=extra,
        )  # fmt: skip

    @classmethod
    def own_keys(cls, settings: Any) -> dict[str, KeyValue]:
        """What a subclass adds to `extra`."""
        return {}

    @classmethod
    def new(cls, settings: Settings, target: TargetWeights, facts: DataFacts, seed: int) -> Self:
        model = cls(cls.shape_of(settings, target, facts.taps), settings)
        halved = [f"layers.{i}.{name}" for i in range(settings.layers) for name in ("o", "down")]
        random = model.initialise(target, facts, seed, halved)
        mask = model.embedding[model.mask_token].float()
        if settings.train_head:  # nearly all rows begin as the mask: what it alone would say is a loss of 4 more, and no use
            with torch.no_grad():
                model.head.sub_(torch.outer(model.head @ mask, mask) / (mask @ mask).clamp(min=1e-12))
        model.begin(random)
        if not bool(model.embedding[model.mask_token].any()):
            raise TrainError(f"the token {model.mask_token} has an embedding of zeros and can't be the mask: give another "
                             "--mask-token")  # fmt: skip
        return model

    def begin(self, random: torch.Generator) -> None:
        """Initialise what a subclass adds."""

    def names(self) -> dict[str, str]:
        outer = {"fc": "fc.weight", "hidden_norm": "hidden_norm.weight", "norm": "norm.weight", "head": "lm_head.weight"}
        for i in range(len(self.layers)):
            outer |= {f"layers.{i}.{n}": f"layers.{i}.{name}.weight" for n, name in _LAYER.items()}
        return outer

    def matrices(self) -> list[str]:
        inner = (*"qkvo", "gate", "up", "down")
        return ["fc", *(f"layers.{i}.{name}" for i in range(len(self.layers)) for name in inner)]

    def remarks(self) -> list[str]:
        size = sum(p.numel() for p in self.parameters())
        taps = ", ".join(map(str, self.shape.taps))
        said = f"{self.TITLE} draft, {len(self.layers)} layers, {size / 1e6:.1f} M parameters, taps {taps}"
        return [f"{said}, mask token {self.mask_token}"]

    # -- forward ----------------------------------------------------------------------------------------------------

    def _layers(self) -> list[Layer]:
        return list(self.layers)  # type: ignore[arg-type]

    def _low(self, dtype: torch.dtype) -> Low:
        made = []
        for layer in self._layers():
            pairs = ((layer.q, layer.k, layer.v), (layer.o,), (layer.gate, layer.up), (layer.down,))
            qkv, o, up, down = (torch.cat([w.to(dtype) for w in pair]) for pair in pairs)
            made.append((qkv, o, up, down))
        return Low(self.fc.to(dtype), made, self.low_head(dtype))

    def low_head(self, dtype: torch.dtype) -> Tensor:
        return self.head.detach().to(dtype)

    def _known(self, low: Low, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values [N, kv, d] of the target's taps."""
        s = self.shape
        fused = self.norm_of(F.linear(batch.taps.to(low.fc.dtype), low.fc), self.hidden_norm)
        by = turn(torch.from_numpy(positions(batch)).to(fused.device), s.head_dim, s.rope_base, fused.dtype)
        found = []
        for layer, (qkv, *_) in zip(self._layers(), low.layers):
            kv = F.linear(fused, qkv[s.n_head * s.head_dim :]).view(len(fused), 2 * s.n_head_kv, s.head_dim)
            k, v = kv.split(s.n_head_kv, 1)
            found.append((rotate(self.norm_of(k, layer.k_norm), by), v))
        return found

    def _states(
        self, low: Low, batch: Batch, known: list[tuple[Tensor, Tensor]], blocks: Blocks, kept: npt.NDArray[np.int64]
    ) -> Tensor:
        """The states [len(kept), H] behind the last norm, of the rows `kept`."""
        s, device = self.shape, batch.tokens.device
        ids = np.where(blocks.slot == 0, blocks.place, -1)
        tokens = batch.tokens[torch.from_numpy(np.maximum(ids, 0)).to(device)]
        tokens = tokens.masked_fill(torch.from_numpy(ids < 0).to(device), self.mask_token)
        x = F.embedding(tokens, self.embedding).to(low.fc.dtype)
        at = positions(batch)[blocks.anchors][blocks.block] + blocks.slot
        by = turn(torch.from_numpy(at).to(device), s.head_dim, s.rope_base, x.dtype)
        works = {w: block_attention.work(blocks.cut, blocks.anchors, w, device) for w in set(self.windows)}
        index = torch.from_numpy(kept).to(device)
        for i, (layer, (qkv, o, up, down)) in enumerate(zip(self._layers(), low.layers)):
            heads = F.linear(self.norm_of(x, layer.input_norm), qkv).view(len(x), -1, s.head_dim)
            q, k, v = heads.split([s.n_head, s.n_head_kv, s.n_head_kv], 1)
            q, k = rotate(self.norm_of(q, layer.q_norm), by), rotate(self.norm_of(k, layer.k_norm), by)
            attended = attend(works[self.windows[i]], q, *known[i], k, v).flatten(1)
            if i == len(self.layers) - 1:  # nobody reads the others any more
                x, attended = x[index], attended[index]
            x = x + F.linear(attended, o)
            gate, more = F.linear(self.norm_of(x, layer.ffn_norm), up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * more, down)
        return self.norm_of(x, self.norm)

    # -- training ---------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> LossParts:
        device = batch.taps.device
        batch = disturbed(batch, self.settings.noise)
        blocks = self._drawn(batch)
        parts = LossParts(torch.zeros((), device=device), 0, [], [], [])
        if blocks is None:
            parts.loss = self.nothing()
            return parts
        told = blocks.place + 1 - self.FIRST
        kept = np.flatnonzero((blocks.slot >= self.FIRST) & (told < _turn_ends(batch)[blocks.anchors[blocks.block] + 1]))
        depth, block = blocks.slot[kept] - self.FIRST, blocks.block[kept]
        low = self._low(batch.taps.dtype)
        states = self._states(low, batch, self._known(low, batch), blocks, kept)
        place = torch.from_numpy(told[kept]).to(device)
        guess = torch.from_numpy(batch.teacher_of[told[kept]]).to(device)
        weigh, ends = weigher(self.settings, torch.from_numpy(depth).to(device), torch.from_numpy(block).to(device))
        result = self.head_loss(
            low, states, batch.tokens[place - 1], self.draft_of[batch.teacher_ids[guess]], batch.teacher_p[guess],
            self.draft_of[batch.tokens[place]], weigh, ends,
        )  # fmt: skip
        right, each = result.right.cpu().numpy(), result.each.cpu().numpy()
        parts.loss = result.loss + self.also(states, batch.tokens[place - 1], result.right, depth, block)
        parts.n_rows = len(blocks.anchors)
        n = int(depth.max()) + 1
        parts.losses = np.bincount(depth, each, n).tolist()
        parts.rows, parts.right = np.bincount(depth, minlength=n).tolist(), np.bincount(depth[right], minlength=n).tolist()
        return parts

    def _drawn(self, batch: Batch) -> Blocks | None:
        """A random part of the places where a block may stand, and random sizes; None where it may stand nowhere."""
        places, s = draft_starts(batch), self.settings
        if not len(places):
            return None
        random = np.random.default_rng(fingerprint(batch))
        n = max(1, round(s.anchors * len(places)))
        anchors = np.sort(random.permutation(places)[:n])
        least = min(self.FIRST + 1, s.block)
        sizes = range(least, s.block + 1) if s.sizes == "random" else [s.block]
        return Blocks.of(anchors, block_attention.groups(anchors, batch.starts, sizes, random))

    def head_loss(
        self, low: Low, states: Tensor, before: Tensor, ids: Tensor, p: Tensor, wanted: Tensor, weigh: Weigh, ends: list[int]
    ) -> HeadLoss:
        """The loss of these states; `before` i64[R] are the tokens before those wanted."""
        return head_loss(states, self.head, low.head, ids, p, wanted, weigh, ends)

    def also(
        self, states: Tensor, before: Tensor, right: Tensor, depth: npt.NDArray[np.int64], block: npt.NDArray[np.int64]
    ) -> Tensor:
        """What a subclass adds to the loss. `depth` and `block` i64[R]: how far behind its anchor a row predicts, and of
        which block it is."""
        return torch.zeros((), device=states.device)

    # -- as run time drafts -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def rollout(self, batch: Batch, n_max: int) -> Rollout:
        """With more than `depth` tokens asked for, `depth` are drafted, as llama.cpp does."""
        n = min(n_max, self.depth)
        size = n + self.FIRST
        places = draft_starts(batch)
        if not len(places):
            return Rollout(places, np.zeros(0, np.int64))
        low = self._low(batch.taps.dtype)
        known, tokens = self._known(low, batch), batch.tokens.cpu().numpy()
        ends = _turn_ends(batch)
        accepted = []
        step = max(1, _ROLLED_OUT // size)
        for anchors in (places[i : i + step] for i in range(0, len(places), step)):
            cut = block_attention.groups(anchors, batch.starts, [size], np.random.default_rng(0))
            blocks = Blocks.of(anchors, cut)
            states = self._states(low, batch, known, blocks, np.flatnonzero(blocks.slot >= self.FIRST))
            said = self.say(low, states.view(len(anchors), n, -1), batch.tokens[torch.from_numpy(anchors).to(states.device)])
            told = anchors[:, None] + 1 + np.arange(n)
            right = said.cpu().numpy() == tokens[np.minimum(told, len(tokens) - 1)]
            accepted.append(np.cumprod(right & (told < ends[anchors + 1][:, None]), 1).sum(1))
        return Rollout(places, np.concatenate(accepted).astype(np.int64))

    def say(self, low: Low, states: Tensor, before: Tensor) -> Tensor:
        """i64[A, n]: the tokens drafted from states [A, n, H] behind the tokens `before` i64[A]."""
        return self.draft_ids[best_tokens(states.flatten(0, 1), low.head)].view(states.shape[:2])

    # -- what is kept -----------------------------------------------------------------------------------------------

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        s = self.shape
        layer: dict[str, Any] = {"model_type": "qwen3"}
        if s.window:
            kinds = ["sliding_attention" if w else "full_attention" for w in self.windows]
            layer |= {"use_sliding_window": True, "sliding_window": s.window, "layer_types": kinds}
        own: dict[str, Any] = {
            "aux_hidden_state_layer_ids": list(s.taps), "block_size": s.extra["block_size"],
            "mask_token_id": self.mask_token, "sample_from_anchor": self.FIRST == 0, "sliding_window_non_causal": True,
        }  # fmt: skip
        more = own | self.own_config()
        name = f"{self.TITLE}Speculator"
        return self.tensors(), draft_parts.speculators_config(s, self.settings.verifier, name, layer, more)

    def own_config(self) -> dict[str, Any]:
        """What a subclass adds to config.json."""
        return {}


def mask_token(target: TargetWeights, wanted: int = -1) -> int:
    """The token that stands for one to be found: the `wanted` one; or the target's own mask; or one that no text uses, which
    is an unused token, or the last control token without a task; or the padding. Raises TrainError for one that isn't
    there."""
    info = target.gguf.tokenizer
    n_vocab = target.identity.n_vocab
    if wanted >= n_vocab:
        raise TrainError(f"--mask-token {wanted}: the target has {n_vocab} tokens")
    if wanted >= 0:
        return wanted
    if "mask" in info.ids:
        return info.ids["mask"]
    kinds = info.token_types if info.token_types is not None else np.full(n_vocab, _NORMAL)
    unused = np.flatnonzero(kinds == _UNUSED)
    if len(unused):
        return int(unused[0])
    control = [i for i in np.flatnonzero(kinds == _CONTROL).tolist() if i not in info.ids.values()]
    if control:
        return int(control[-1])
    return info.ids.get("padding", info.ids.get("unknown", 0))


def _numbers(text: str, n_layer: int) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError:
        raise TrainError(f"--full-layers {text}: numbers of layers with commas between them, such as 0,2") from None
    if found and not 0 <= found[0] <= found[-1] < n_layer:
        raise TrainError(f"--full-layers {text}: the layers are 0 to {n_layer - 1}")
    return found


def _turn_ends(batch: Batch) -> npt.NDArray[np.int64]:
    """i64[N + 1]: for each token that the assistant said, where the run of such tokens ends; else the token's own place."""
    n = batch.n_tokens
    breaks = ~np.append(batch.mask, False)
    ends = np.where(breaks, np.arange(n + 1), n + 1)
    ends = np.minimum.accumulate(ends[::-1])[::-1]
    last = np.append(np.repeat(batch.starts[1:], np.diff(batch.starts)), n)
    return np.minimum(ends, last)
