"""EAGLE-3 (Li et al., arXiv 2503.01840) as llama.cpp runs it, and its training-time test.

At position P the pair (token[P+1], g[P]) goes in, g[P] = fc of the target's taps at P, and token[P+2] is predicted. The
next step takes (token[P+2], h), h the layer's output before the last norm. With ten tokens, a chain from P = 4 of three
steps:

    step   in: token, state     rotary position   sees first-step keys   predicts
    0      t5,  g4              4                 0..4                   t6
    1      t6,  h of step 0     5                 0..4, own step 1       t7
    2      t7,  h of step 1     6                 0..4, own steps 1, 2   t8

Chains start at all positions at once; their later steps' keys are seen by nobody else. Only the chains that are right so
far go on to the next step (`--chains kept`): at run time the others are cut off by the target, so nothing that they would
learn is ever used, and a step costs what is left of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localspec.errors import TrainError
from localspec.speculator import SpeculatorConfig
from localspec.train import draft_parts
from localspec.train.attention import blocks, chain_attention
from localspec.train.batches import Batch
from localspec.train.draft_parts import TapDraft, disturbed, draft_starts, goes_on, positions, rotate, turn
from localspec.train.kinds.eagle3 import Settings
from localspec.train.losses import best_tokens, head_loss
from localspec.train.models import DataFacts, LossParts, Rollout
from localspec.train.target_weights import TargetWeights

N_TAPS = 3  # llama.cpp's graph takes exactly so many


_NAMES = {
    "fc": "fc.weight",
    "input_norm": "layers.0.input_layernorm.weight",
    "hidden_norm": "layers.0.hidden_norm.weight",
    **{n: f"layers.0.self_attn.{n}_proj.weight" for n in "qkvo"},
    "ffn_norm": "layers.0.post_attention_layernorm.weight",
    **{n: f"layers.0.mlp.{n}_proj.weight" for n in ("gate", "up", "down")},
    "norm": "norm.weight",
    "head": "lm_head.weight",
}


class _Known(NamedTuple):
    """First-step keys, values and states of all positions."""

    k: Tensor  # [N, kv, d]
    v: Tensor
    g: Tensor  # [N, H]


class Model(TapDraft):
    """Parameters have the names of vLLM's speculators; q and k rows lie in Hugging Face's order (halves rotate)."""

    METHOD: ClassVar[str] = "eagle3"
    Settings: ClassVar[Any] = Settings

    def __init__(self, shape: SpeculatorConfig, settings: Settings):
        super().__init__(shape)
        self.settings = settings
        self.depth = settings.ttt
        n, head = shape.n_embd, shape.head_dim
        self.fc = nn.Parameter(torch.empty(n, len(shape.taps) * shape.target.n_embd))
        self.input_norm, self.hidden_norm = nn.Parameter(torch.ones(n)), nn.Parameter(torch.ones(n))
        self.q = nn.Parameter(torch.empty(shape.n_head * head, 2 * n))
        self.k = nn.Parameter(torch.empty(shape.n_head_kv * head, 2 * n))
        self.v = nn.Parameter(torch.empty(shape.n_head_kv * head, 2 * n))
        self.o = nn.Parameter(torch.empty(n, shape.n_head * head))
        self.ffn_norm = nn.Parameter(torch.ones(n))
        self.gate, self.up = nn.Parameter(torch.empty(shape.n_ff, n)), nn.Parameter(torch.empty(shape.n_ff, n))
        self.down = nn.Parameter(torch.empty(n, shape.n_ff))
        self.norm = nn.Parameter(torch.ones(n))
        size = shape.draft_vocab or shape.target.n_vocab
        self.head = nn.Parameter(torch.empty(size, n), requires_grad=settings.train_head)

    @classmethod
    def shape_of(cls, settings: Settings, target: TargetWeights, taps: tuple[int, ...]) -> SpeculatorConfig:
        if len(taps) != N_TAPS:
            raise TrainError(f"EAGLE-3 reads {N_TAPS} taps, the data has {len(taps)}: make it with --taps A,B,C")
        if 0 < settings.window < settings.ttt:
            raise TrainError(f"--window {settings.window}: a chain of --ttt {settings.ttt} steps would see nothing of the "
                             f"text; at least {settings.ttt}, or 0 for all")  # fmt: skip
        return draft_parts.base_shape(
            target, cls.METHOD, taps, n_ff=settings.n_ff, draft_vocab=settings.draft_vocab, depth=settings.ttt,
            window=settings.window,
        )  # fmt: skip

    @classmethod
    def new(cls, settings: Settings, target: TargetWeights, facts: DataFacts, seed: int) -> Self:
        model = cls(cls.shape_of(settings, target, facts.taps), settings)
        model.initialise(target, facts, seed, halved=("o", "down"))
        return model

    def names(self) -> dict[str, str]:
        return _NAMES

    def matrices(self) -> list[str]:
        return ["fc", "q", "k", "v", "o", "gate", "up", "down"]

    def remarks(self) -> list[str]:
        size = sum(p.numel() for p in self.parameters())
        return [f"EAGLE-3 draft, {size / 1e6:.1f} M parameters, taps {', '.join(map(str, self.shape.taps))}"]

    # -- forward ----------------------------------------------------------------------------------------------------

    def _rotate(self, x: Tensor, at: Tensor) -> Tensor:
        return rotate(x, turn(at, self.shape.head_dim, self.shape.rope_base, x.dtype))

    def _pair(self, tokens: Tensor, state: Tensor) -> Tensor:
        """[R, 2H]: what attention reads of (token, state)."""
        embedded = F.embedding(tokens, self.embedding).to(state.dtype)
        return torch.cat([self.norm_of(embedded, self.input_norm), self.norm_of(state, self.hidden_norm)], -1)

    def _keys(self, low: Mapping[str, Tensor], pair: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        view = (len(pair), self.shape.n_head_kv, self.shape.head_dim)
        return self._rotate(F.linear(pair, low["k"]).view(view), positions), F.linear(pair, low["v"]).view(view)

    def _layer(self, low: Mapping[str, Tensor], state: Tensor, attended: Tensor) -> Tensor:
        """The state before the last norm, [R, H]."""
        x = state + F.linear(attended.reshape(len(state), -1), low["o"])
        y = self.norm_of(x, self.ffn_norm)
        return x + F.linear(F.silu(F.linear(y, low["gate"])) * F.linear(y, low["up"]), low["down"])

    def _low(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The matrices in the type that products are made in, cast once for all steps."""
        low = {name: getattr(self, name).to(dtype) for name in self.matrices()}
        low["head"] = self.head.detach().to(dtype)
        return low

    def _known(self, low: Mapping[str, Tensor], batch: Batch, positions: Tensor) -> tuple[_Known, Tensor]:
        """All positions' first-step keys, and the pairs they are of. The last position of a sample has no next token: its
        pair is of no use, and no chain sees it."""
        g = F.linear(batch.taps.to(low["fc"].dtype), low["fc"])
        pair = self._pair(torch.roll(batch.tokens, -1), g)
        k, v = self._keys(low, pair, positions)
        return _Known(k, v, g), pair

    def _query(self, low: Mapping[str, Tensor], pair: Tensor, positions: Tensor) -> Tensor:
        return self._rotate(F.linear(pair, low["q"]).view(len(pair), self.shape.n_head, self.shape.head_dim), positions)

    # -- training ---------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> LossParts:
        device, dtype = batch.taps.device, batch.taps.dtype
        batch = disturbed(batch, self.settings.noise)
        low = self._low(dtype)
        position = positions(batch)
        known, pairs = self._known(low, batch, torch.from_numpy(position).to(device))
        end = np.repeat(batch.starts[1:], np.diff(batch.starts))
        rows = draft_starts(batch) - 1
        total = torch.zeros((), device=device)
        parts = LossParts(total, len(rows), [], [], [])
        if not len(rows):  # samples that were cut before anything counts
            parts.loss = self.nothing()
            return parts
        chain: list[tuple[Tensor, Tensor]] = []
        state, pair = known.g, pairs
        index = torch.from_numpy(rows).to(device)
        for step in range(self.depth):
            # the rows left, of those of the step before (of all positions at first)
            state, pair = state[index], pair[index]
            chain = [(k[index], v[index]) for k, v in chain]
            at = torch.from_numpy(position[rows] + step).to(device)
            if step:
                pair = self._pair(batch.tokens[torch.from_numpy(rows + 1 + step).to(device)], state)
                chain.append(self._keys(low, pair, at))
            work = blocks(rows, batch.starts, self.shape.window, step, device)
            attended = chain_attention(work, self._query(low, pair, at), known.k, known.v, chain)
            state = self._layer(low, state, attended)
            told = rows + 2 + step
            guess = torch.from_numpy(batch.teacher_of[told]).to(device)
            wanted = self.draft_of[batch.tokens[torch.from_numpy(told).to(device)]]
            ids = self.draft_of[batch.teacher_ids[guess]]
            result = head_loss(self.norm_of(state, self.norm), self.head, low["head"], ids, batch.teacher_p[guess], wanted)
            total = total + result.loss * self.settings.step_decay**step
            right = result.right.cpu().numpy()
            parts.add(result.loss, len(rows), int(right.sum()))
            on = goes_on(batch, end, rows, right, self.settings.chains, step)
            index = torch.from_numpy(np.flatnonzero(on)).to(device)
            rows = rows[on]
            if not len(rows):
                break
        parts.loss = total
        return parts

    # -- as run time drafts -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def rollout(self, batch: Batch, n_max: int) -> Rollout:
        device, dtype = batch.taps.device, batch.taps.dtype
        low = self._low(dtype)
        position = positions(batch)
        known, _ = self._known(low, batch, torch.from_numpy(position).to(device))
        rows = draft_starts(batch) - 1
        accepted = np.zeros(len(rows), np.int64)
        if not len(rows):
            return Rollout(rows + 1, accepted)
        end = np.repeat(batch.starts[1:], np.diff(batch.starts))[rows]
        index = torch.from_numpy(rows).to(device)
        state, drafted = known.g[index], batch.tokens[index + 1]
        chain: list[tuple[Tensor, Tensor]] = []
        alive = np.ones(len(rows), bool)
        for step in range(n_max):
            at = torch.from_numpy(position[rows] + step).to(device)
            pair = self._pair(drafted, state)
            if step:
                chain.append(self._keys(low, pair, at))
            work = blocks(rows, batch.starts, self.shape.window, step, device)
            attended = chain_attention(work, self._query(low, pair, at), known.k, known.v, chain)
            state = self._layer(low, state, attended)
            drafted = self.draft_ids[best_tokens(self.norm_of(state, self.norm), low["head"])]
            told = np.minimum(rows + 2 + step, len(batch.mask) - 1)
            same = drafted.cpu().numpy() == batch.tokens.cpu().numpy()[told]
            alive &= same & (rows + 2 + step < end) & batch.mask[told]
            accepted += alive
        return Rollout(rows + 1, accepted)

    # -- what is kept -----------------------------------------------------------------------------------------------

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return self.tensors(), _speculators_config(self.shape, self.settings.verifier)


def _speculators_config(shape: SpeculatorConfig, verifier: str) -> dict[str, Any]:
    layer: dict[str, Any] = {"model_type": "llama", "mlp_bias": False}
    if shape.window:
        layer |= {"sliding_window": shape.window, "layer_types": ["sliding_attention"]}
    own = {
        "norm_before_residual": shape.norm_before_residual, "norm_before_fc": shape.norm_before_fc,
        "eagle_aux_hidden_state_layer_ids": list(shape.taps),
    }  # fmt: skip
    return draft_parts.speculators_config(shape, verifier, "Eagle3Speculator", layer, own)
