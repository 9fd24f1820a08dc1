"""MTP assistant for Gemma 4, as llama.cpp runs it, and its training-time test.

A few thin layers with queries only: the windowed ones look at the keys and values of the target's last windowed layer,
the full one at those of its last full layer. With tokens 0 to P + 1 known and the target's state h[P] (after its last
norm), (token[P+1], h[P]) goes in and token[P+2] is predicted. What comes out of the last norm, widened to the target's
width, is the state of the next step. Every step asks from position P + 1 and sees the keys 0 to P: no drafted token has a
key.

    step   in: token, state       asks from   sees    predicts
    0      t5,  h4 of the target  5           0..4    t6
    1      t6,  state of step 0   5           0..4    t7
    2      t7,  state of step 1   5           0..4    t8

So a chain's later steps cost no more than its first, and only those chains that are right so far go on (`--chains kept`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localspec import __version__
from localspec.data.shards import Sample
from localspec.errors import PairingError, TrainError
from localspec.gemma4 import assistant_config, layers_read, size_of, taps_read, windowed_of
from localspec.gguf_file import GGUFFile
from localspec.speculator import SpeculatorConfig
from localspec.train.attention import Block, blocks, chain_attention
from localspec.train.batches import Batch, collate
from localspec.train.draft_parts import draft_starts, goes_on, positions_of
from localspec.train.gemma4_keys import KINDS, TargetKeys, main_directions
from localspec.train.kinds.mtp import Settings
from localspec.train.losses import best_tokens, head_loss
from localspec.train.models import DataFacts, LossParts, Rollout
from localspec.train.target_weights import TargetWeights

_SMALL = 1 << 26  # an embedding of fewer numbers is kept in fp32


_LAYER = {
    "attn_norm": "input_layernorm.weight", "q": "self_attn.q_proj.weight", "q_norm": "self_attn.q_norm.weight",
    "o": "self_attn.o_proj.weight", "attn_post": "post_attention_layernorm.weight",
    "ffn_norm": "pre_feedforward_layernorm.weight", "gate": "mlp.gate_proj.weight", "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight", "ffn_post": "post_feedforward_layernorm.weight", "scale": "layer_scalar",
}  # fmt: skip
_OUTER = {"head": "model.embed_tokens.weight", "norm": "model.norm.weight", "pre": "pre_projection.weight",
          "post": "post_projection.weight"}  # fmt: skip
_MATRICES = ("q", "o", "gate", "up", "down")


def names_of(n_layer: int) -> dict[str, str]:
    """Parameter -> name in the checkpoint, which is that of Google's own drafters."""
    layers = {f"{name}_{i}": f"model.layers.{i}.{stored}" for i in range(n_layer) for name, stored in _LAYER.items()}
    return layers | _OUTER


class Model(nn.Module):
    """Parameters of layer i end in _i; checkpoint names are those of Gemma4AssistantForCausalLM."""

    METHOD: ClassVar[str] = "mtp"
    NEEDS_TAPS: ClassVar[bool] = True
    Settings: ClassVar[Any] = Settings

    embedding: Tensor
    head: Tensor
    norm: Tensor
    keys: TargetKeys

    def __init__(self, shape: SpeculatorConfig, settings: Settings):
        super().__init__()
        self.shape, self.settings, self.depth = shape, settings, settings.ttt
        self.windowed = windowed_of(shape)
        e, b = shape.n_embd, shape.target.n_embd
        sizes = {kind: size_of(shape, kind) for kind in KINDS}
        shapes: dict[str, tuple[int, ...]] = {
            "head": (shape.target.n_vocab, e), "norm": (e,), "pre": (e, 2 * b), "post": (b, e)
        }  # fmt: skip
        for i, kind in enumerate(self.windowed):
            q = shape.n_head * sizes[kind]
            own: dict[str, tuple[int, ...]] = {name: (e,) for name in ("attn_norm", "attn_post", "ffn_norm", "ffn_post")}
            own |= {"q": (q, e), "q_norm": (sizes[kind],), "o": (e, q), "scale": (1,)}
            own |= {"gate": (shape.n_ff, e), "up": (shape.n_ff, e), "down": (e, shape.n_ff)}
            shapes |= {f"{name}_{i}": size for name, size in own.items()}
        for name, size in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(size) if len(size) > 1 else torch.ones(size)))

    @staticmethod
    def taps_wanted(gguf: GGUFFile) -> tuple[int, ...]:
        """What an assistant for this target is trained on. Raises TrainError where there can be none."""
        try:
            return taps_read(gguf)
        except PairingError as error:
            raise TrainError(str(error)) from None

    @classmethod
    def shape_of(cls, settings: Settings, target: TargetWeights, taps: tuple[int, ...]) -> SpeculatorConfig:
        gguf, n_embd = target.gguf, target.identity.n_embd
        wanted = cls.taps_wanted(gguf)
        low, high = layers_read(gguf)
        if tuple(taps) != wanted:
            shown = ",".join(map(str, wanted))
            raise TrainError(f"an MTP assistant for this target reads the taps {shown}, the data has "
                             f"{','.join(map(str, taps)) or 'none'}: make it with --taps {shown}")  # fmt: skip
        width = settings.width or max(32, n_embd // 4)
        if width >= n_embd:
            raise TrainError(f"--width {width}: an assistant must be narrower than its target ({n_embd})")
        n_head = settings.heads or gguf.n_head[high]
        for layer in (low, high):
            if n_head % gguf.n_head_kv[layer]:
                raise TrainError(f"--heads {n_head}: they share {gguf.n_head_kv[layer]} heads of keys: give a multiple")
        windowed = [True] * (settings.layers - 1) + [False]
        return assistant_config(gguf, windowed, width, n_head, settings.n_ff or 8 * width, target.rms_eps, settings.ttt)

    @classmethod
    def new(cls, settings: Settings, target: TargetWeights, facts: DataFacts, seed: int) -> Self:
        model = cls(cls.shape_of(settings, target, facts.taps), settings)
        model._initialise(target, seed)
        return model

    def _initialise(self, target: TargetWeights, seed: int) -> None:
        """Random queries; the head, and both projections, from the directions in which the target's embeddings differ."""
        random = torch.Generator().manual_seed(seed)
        self.attach(target)
        e = self.shape.n_embd
        own = dict(self.named_parameters())
        with torch.no_grad():
            for name in self.matrices():
                own[name].normal_(0.0, own[name].shape[1] ** -0.5, generator=random)
            main = main_directions(self.embedding, e)
            head = target.head() @ main
            own["head"].copy_(head / head.norm(dim=-1).mean())
            unit = self.embedding[: 1 << 14].float() * self.shape.target.n_embd**0.5 @ main
            own["pre"].copy_(torch.cat([main.t() / unit.std(), main.t()], 1))
            own["post"].copy_(main)
            for i in range(self.shape.n_layer):
                own[f"attn_post_{i}"].fill_(0.3)
                own[f"ffn_post_{i}"].fill_(0.3)

    def attach(self, target: TargetWeights) -> None:
        """Take what stays as it is from the target: its embedding and the layers whose keys are read."""
        small = self.shape.target.n_vocab * self.shape.target.n_embd <= _SMALL
        self.register_buffer("embedding", target.embedding(torch.float32 if small else torch.bfloat16), persistent=False)
        self.keys = TargetKeys(target)

    def matrices(self) -> list[str]:
        return ["pre", "post", *(f"{name}_{i}" for i in range(self.shape.n_layer) for name in _MATRICES)]

    def remarks(self) -> list[str]:
        size = sum(p.numel() for p in self.parameters())
        low, high = self.shape.taps[:2]
        return [f"MTP assistant, {size / 1e6:.1f} M parameters, reads the keys and values of layers {low} and {high}"]

    def vocabulary(self) -> npt.NDArray[np.int64]:
        return np.arange(self.shape.target.n_vocab, dtype=np.int64)

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Start from a checkpoint's weights. Raises TrainError for a draft of another shape."""
        own = dict(self.named_parameters())
        with torch.no_grad():
            for name, place in names_of(self.shape.n_layer).items():
                found = tensors.get(place)
                if found is None or found.shape != own[name].shape:
                    shown = "lacks" if found is None else f"has {tuple(found.shape)}, not {tuple(own[name].shape)}, as"
                    raise TrainError(f"the checkpoint to start from {shown} {place}: give one of this shape")
                own[name].copy_(found)

    def batch(self, samples: Sequence[Sample], max_len: int, dtype: torch.dtype) -> Batch:
        return collate(samples, max_len, None, dtype)

    # -- forward ----------------------------------------------------------------------------------------------------

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), self.shape.rms_eps)

    def low(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The matrices in the type that products are made in, cast once for all steps."""
        low = {name: getattr(self, name).to(dtype) for name in self.matrices()}
        low["head"] = self.head.detach().to(dtype)
        return low

    def known(self, taps: Tensor, positions: Tensor) -> tuple[dict[bool, tuple[Tensor, Tensor]], Tensor]:
        """The target's keys and values of both kinds, and its states [N, H]; `taps` [N, 3 * H]."""
        parts = taps.split(self.shape.target.n_embd, -1)
        with torch.no_grad():
            return {kind: self.keys(kind, x, positions) for kind, x in zip(KINDS, parts)}, parts[2]

    def work(self, rows: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], device: Any) -> dict[bool, list[Block]]:
        """What rows see, one step behind the last key whatever the step."""
        return {kind: blocks(rows, starts, self.shape.window if kind else 0, 1, device) for kind in KINDS}

    def step(
        self, low: Mapping[str, Tensor], tokens: Tensor, state: Tensor, at: Tensor, work: Mapping[bool, list[Block]],
        known: Mapping[bool, tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """`tokens` [R], `state` [R, H], `at` [R] the position asked from: what the head reads [R, E], the next state."""
        shape = self.shape
        embedded = (F.embedding(tokens, self.embedding) * shape.target.n_embd**0.5).to(state.dtype)
        x = F.linear(torch.cat([embedded, state], -1), low["pre"])
        for i, kind in enumerate(self.windowed):

            def w(name: str, i: int = i) -> Tensor:
                weight: Tensor = getattr(self, f"{name}_{i}")
                return weight

            k, v = known[kind]
            q = F.linear(self._norm(x, w("attn_norm")), low[f"q_{i}"]).view(len(x), shape.n_head, k.shape[-1])
            q = self.keys.rotations[kind](self._norm(q, w("q_norm")), at)
            # the scale of these scores is 1, not one over the root of the size
            seen = chain_attention(work[kind], q * k.shape[-1] ** 0.5, k, v, []).reshape(len(x), -1)
            x = x + self._norm(F.linear(seen, low[f"o_{i}"]), w("attn_post"))
            y = self._norm(x, w("ffn_norm"))
            y = F.gelu(F.linear(y, low[f"gate_{i}"]), approximate="tanh") * F.linear(y, low[f"up_{i}"])
            y = F.linear(y, low[f"down_{i}"])
            x = (x + self._norm(y, w("ffn_post"))) * w("scale").to(x.dtype)
        x = self._norm(x, self.norm)
        return x, F.linear(x, low["post"])

    # -- training ---------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> LossParts:
        device = batch.taps.device
        low = self.low(batch.taps.dtype)
        position = positions_of(batch.starts)
        known, states = self.known(batch.taps, torch.from_numpy(position).to(device))
        end = np.repeat(batch.starts[1:], np.diff(batch.starts))
        rows = draft_starts(batch) - 1
        total = torch.zeros((), device=device)
        parts = LossParts(total, len(rows), [], [], [])
        if not len(rows):  # samples that were cut before anything counts
            parts.loss = 0.0 * torch.stack([p.sum() for p in self.parameters()]).sum()
            return parts
        state = states[torch.from_numpy(rows).to(device)]
        for step in range(self.depth):
            tokens = batch.tokens[torch.from_numpy(rows + 1 + step).to(device)]
            at = torch.from_numpy(position[rows] + 1).to(device)
            x, state = self.step(low, tokens, state, at, self.work(rows, batch.starts, device), known)
            told = rows + 2 + step
            guess = torch.from_numpy(batch.teacher_of[told]).to(device)
            wanted = batch.tokens[torch.from_numpy(told).to(device)]
            result = head_loss(x, self.head, low["head"], batch.teacher_ids[guess], batch.teacher_p[guess], wanted)
            total = total + result.loss * self.settings.step_decay**step
            right = result.right.cpu().numpy()
            parts.add(result.loss, len(rows), int(right.sum()))
            on = goes_on(batch, end, rows, right, self.settings.chains, step)
            state, rows = state[torch.from_numpy(np.flatnonzero(on)).to(device)], rows[on]
            if not len(rows):
                break
        parts.loss = total
        return parts

    # -- as run time drafts -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def rollout(self, batch: Batch, n_max: int) -> Rollout:
        rows = draft_starts(batch) - 1
        if not len(rows):
            return Rollout(rows + 1, np.zeros(0, np.int64))
        end = np.repeat(batch.starts[1:], np.diff(batch.starts))[rows]
        text = batch.tokens.cpu().numpy()
        alive, accepted = np.ones(len(rows), bool), np.zeros(len(rows), np.int64)
        low = self.low(batch.taps.dtype)
        for step, x in enumerate(self.drafts(low, batch.tokens, batch.taps, batch.starts, rows, n_max)):
            drafted = best_tokens(x, low["head"])
            told = np.minimum(rows + 2 + step, len(batch.mask) - 1)
            alive &= (drafted.cpu().numpy() == text[told]) & (rows + 2 + step < end) & batch.mask[told]
            accepted += alive
        return Rollout(rows + 1, accepted)

    def drafts(
        self, low: Mapping[str, Tensor], tokens: Tensor, taps: Tensor, starts: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64], n_max: int,
    ) -> Any:  # fmt: skip
        """What the head reads [R, E] at each step of drafts that begin behind `rows`, on their own likeliest tokens."""
        device = taps.device
        position = positions_of(starts)
        known, states = self.known(taps, torch.from_numpy(position).to(device))
        index, work = torch.from_numpy(rows).to(device), self.work(rows, starts, device)
        state, drafted = states[index], tokens[index + 1]
        at = torch.from_numpy(position[rows] + 1).to(device)
        for _ in range(n_max):
            x, state = self.step(low, drafted, state, at, work, known)
            yield x
            drafted = best_tokens(x, low["head"])

    # -- what is kept -----------------------------------------------------------------------------------------------

    def config(self, provenance: Mapping[str, Any]) -> SpeculatorConfig:
        return replace(self.shape, provenance={"localspec": __version__, **provenance})

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        own = {name: p.detach().float().cpu().contiguous() for name, p in self.named_parameters()}
        return {place: own[name] for name, place in names_of(self.shape.n_layer).items()}, google_config(self.shape)


def google_config(shape: SpeculatorConfig) -> dict[str, Any]:
    """config.json as Google's drafters have it, with the keys that llama.cpp's converter reads."""
    windowed = windowed_of(shape)
    kv = shape.extra["attention.head_count_kv"]
    n_kv = dict(zip(windowed, kv)) if isinstance(kv, list) else {}
    text = {
        "model_type": "gemma4_text", "hidden_size": shape.n_embd, "num_hidden_layers": shape.n_layer,
        "intermediate_size": shape.n_ff, "num_attention_heads": shape.n_head, "num_key_value_heads": n_kv.get(True),
        "num_global_key_value_heads": n_kv.get(False), "head_dim": shape.extra["attention.key_length_swa"],
        "global_head_dim": shape.head_dim, "num_kv_shared_layers": shape.n_layer, "sliding_window": shape.window,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in windowed],
        "vocab_size": shape.target.n_vocab, "max_position_embeddings": shape.n_ctx_train, "rms_norm_eps": shape.rms_eps,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0, "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": shape.extra["rope.freq_base_swa"]},
            "full_attention": {"rope_type": "proportional", "rope_theta": shape.rope_base},
        },
    }  # fmt: skip
    return {
        "architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant",
        "backbone_hidden_size": shape.target.n_embd, "tie_word_embeddings": True, "text_config": text,
    }  # fmt: skip
