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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localspec import __version__
from localspec.data.shards import Sample
from localspec.errors import TrainError
from localspec.speculator import SpeculatorConfig
from localspec.train import vocab
from localspec.train.attention import blocks, chain_attention
from localspec.train.batches import Batch, collate
from localspec.train.losses import best_tokens, head_loss
from localspec.train.models import DataFacts, LossParts, Rollout
from localspec.train.settings import setting
from localspec.train.target_weights import TargetWeights

MAX_TTT = 64  # tokens that --spec-draft-n-max allows
N_TAPS = 3  # llama.cpp's graph takes exactly so many
_FIRST_LOGITS = 1.0  # the head's initial logits have about this spread: the target's own would start at a loss of 47


@dataclass(frozen=True)
class Settings:
    """Of EAGLE-3 alone."""

    ttt: int = setting(4, "Steps of the training-time test: tokens in a row that it learns to draft.", at_least=1,
                       at_most=MAX_TTT)  # fmt: skip
    draft_vocab: int = setting(8192, "Tokens that the draft can say, the most frequent ones; 0: all.", at_least=0)
    n_ff: int = setting(0, "Width of the feed-forward layer; 0: the target's.", at_least=0)
    window: int = setting(1024, "Positions that its attention sees; 0: all.", at_least=0)
    chains: str = setting("kept", "kept: only chains right so far go on a step; all: every chain.", ("kept", "all"))
    step_decay: float = setting(1.0, "Weight of each step's loss against the step before.", at_least=0)
    noise: float = setting(0.0, "Spread of the noise added to the inputs in training, in their own spreads.", at_least=0)
    verifier: str = setting("", "The target's name on the Hugging Face Hub, or a directory: vLLM takes its embedding.")
    train_head: bool = setting(True, "Train the head; without, the target's own stays.")


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


class Model(nn.Module):
    """Parameters have the names of vLLM's speculators; q and k rows lie in Hugging Face's order (halves rotate)."""

    METHOD: ClassVar[str] = "eagle3"
    NEEDS_TAPS: ClassVar[bool] = True
    Settings: ClassVar[Any] = Settings

    embedding: Tensor
    tap_scale: Tensor
    draft_ids: Tensor
    draft_of: Tensor

    def __init__(self, shape: SpeculatorConfig, settings: Settings):
        super().__init__()
        self.shape, self.settings = shape, settings
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
        identity, gguf = target.identity, target.gguf
        n_head, n_kv = target.layer_int("attention.head_count", 1), target.layer_int("attention.head_count_kv", 1)
        theirs = target.layer_int("feed_forward_length", 4 * identity.n_embd)
        size = min(settings.draft_vocab or identity.n_vocab, identity.n_vocab)
        return SpeculatorConfig(
            method=cls.METHOD, target=identity, taps=taps, n_embd=identity.n_embd, n_head=n_head,
            n_head_kv=n_kv or n_head, head_dim=gguf.key_length, n_ff=settings.n_ff or theirs,
            rms_eps=target.rms_eps, rope_base=target.rope_base, draft_vocab=0 if size == identity.n_vocab else size,
            depth=settings.ttt, window=settings.window, n_ctx_train=gguf.n_ctx_train,
        )  # fmt: skip

    @classmethod
    def new(cls, settings: Settings, target: TargetWeights, facts: DataFacts, seed: int) -> Self:
        model = cls(cls.shape_of(settings, target, facts.taps), settings)
        model._initialise(target, facts, seed)
        return model

    def _initialise(self, target: TargetWeights, facts: DataFacts, seed: int) -> None:
        """Random matrices, the target's head and norm (scaled down); and what stays as it is: embedding, scales, ids."""
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name in self.matrices():
                weight = getattr(self, name)
                weight.normal_(0.0, weight.shape[1] ** -0.5, generator=random)
            self.o.mul_(0.5)
            self.down.mul_(0.5)
            ids = vocab.choose(facts.counts, len(self.head))
            head = target.head()[torch.from_numpy(ids)] * target.output_norm()
            probe = torch.randn(256, head.shape[1], generator=random)
            self.head.copy_(head * (_FIRST_LOGITS / (probe @ head.t()).std()))
        scale = 1.0 / np.maximum(facts.tap_rms, 1e-6)
        self._hold(target, scale.astype(np.float32), ids)

    def _hold(self, target: TargetWeights, scale: npt.NDArray[np.float32], ids: npt.NDArray[np.int64]) -> None:
        self.register_buffer("embedding", target.embedding(torch.bfloat16), persistent=False)
        self.register_buffer("tap_scale", torch.from_numpy(scale))
        self.register_buffer("draft_ids", torch.from_numpy(ids))
        table = np.full(self.shape.target.n_vocab, -1, np.int64)
        table[ids] = np.arange(len(ids))
        self.register_buffer("draft_of", torch.from_numpy(table))

    def matrices(self) -> list[str]:
        return ["fc", "q", "k", "v", "o", "gate", "up", "down"]

    def remarks(self) -> list[str]:
        size = sum(p.numel() for p in self.parameters())
        return [f"EAGLE-3 draft, {size / 1e6:.1f} M parameters, taps {', '.join(map(str, self.shape.taps))}"]

    def vocabulary(self) -> npt.NDArray[np.int64]:
        ids: npt.NDArray[np.int64] = self.draft_ids.cpu().numpy()
        return ids

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Start from a checkpoint's weights (speculators' names). The taps' scales and the vocabulary stay this data's:
        tokens that the checkpoint couldn't say begin as the target's. Raises TrainError for a draft of another shape."""
        own = dict(self.named_parameters())
        with torch.no_grad():
            for name, place in _NAMES.items():
                found = tensors.get(place)
                if name == "head" and found is not None and found.shape[1:] == own[name].shape[1:]:
                    offsets = tensors.get("d2t", torch.zeros(len(found), dtype=torch.int64))
                    mine = self.draft_of[offsets + torch.arange(len(found))]
                    own[name][mine[mine >= 0]] = found[mine >= 0]
                    continue
                if found is None or found.shape != own[name].shape:
                    shown = "lacks" if found is None else f"has {tuple(found.shape)}, not {tuple(own[name].shape)}, as"
                    raise TrainError(f"the checkpoint to start from {shown} {place}: give one of this shape")
                own[name].copy_(found / self.tap_scale if name == "fc" else found)

    def batch(self, samples: Sequence[Sample], max_len: int, dtype: torch.dtype) -> Batch:
        return collate(samples, max_len, self.tap_scale.cpu().numpy(), dtype)

    # -- forward ----------------------------------------------------------------------------------------------------

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), self.shape.rms_eps)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary positions; halves of a head belong together. x [R, heads, d], positions [R]."""
        half = x.shape[-1] // 2
        speeds = self.shape.rope_base ** (torch.arange(half, device=x.device) / -half)
        angle = positions[:, None, None].float() * speeds
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def _pair(self, tokens: Tensor, state: Tensor) -> Tensor:
        """[R, 2H]: what attention reads of (token, state)."""
        embedded = F.embedding(tokens, self.embedding).to(state.dtype)
        return torch.cat([self._norm(embedded, self.input_norm), self._norm(state, self.hidden_norm)], -1)

    def _keys(self, low: Mapping[str, Tensor], pair: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        view = (len(pair), self.shape.n_head_kv, self.shape.head_dim)
        return self._rotate(F.linear(pair, low["k"]).view(view), positions), F.linear(pair, low["v"]).view(view)

    def _layer(self, low: Mapping[str, Tensor], state: Tensor, attended: Tensor) -> Tensor:
        """The state before the last norm, [R, H]."""
        x = state + F.linear(attended.reshape(len(state), -1), low["o"])
        y = self._norm(x, self.ffn_norm)
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
        if self.settings.noise:
            batch = self._disturbed(batch)
        low = self._low(dtype)
        position = _positions(batch)
        known, pairs = self._known(low, batch, torch.from_numpy(position).to(device))
        end = np.repeat(batch.starts[1:], np.diff(batch.starts))
        rows = _chain_starts(batch)
        total = torch.zeros((), device=device)
        parts = LossParts(total, len(rows), [], [], [])
        if not len(rows):  # samples that were cut before anything counts
            parts.loss = 0.0 * torch.stack([p.sum() for p in self.parameters() if p.requires_grad]).sum()
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
            result = head_loss(self._norm(state, self.norm), self.head, low["head"], ids, batch.teacher_p[guess], wanted)
            total = total + result.loss * self.settings.step_decay**step
            right = result.right.cpu().numpy()
            parts.losses.append(float(result.loss.detach()))
            parts.rows.append(len(rows))
            parts.right.append(int(right.sum()))
            on = np.ones(len(rows), bool) if self.settings.chains == "all" else right
            on &= (rows + 3 + step < end[rows]) & batch.mask[np.minimum(rows + 3 + step, len(batch.mask) - 1)]
            index = torch.from_numpy(np.flatnonzero(on)).to(device)
            rows = rows[on]
            if not len(rows):
                break
        parts.loss = total
        return parts

    def _disturbed(self, batch: Batch) -> Batch:
        """The batch with noise on its taps: against learning few texts by heart (EAGLE, Li et al., arXiv 2401.15077, section
        4.1). The noise is a function of the batch, so that a resumed run sees the same."""
        places = torch.arange(batch.n_tokens, device=batch.tokens.device)
        random = torch.Generator(batch.taps.device).manual_seed(int((batch.tokens * places).sum()))
        noise = torch.empty_like(batch.taps, dtype=torch.float32).normal_(0.0, self.settings.noise, generator=random)
        return replace(batch, taps=batch.taps + noise.to(batch.taps.dtype))

    # -- as run time drafts -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def rollout(self, batch: Batch, n_max: int) -> Rollout:
        device, dtype = batch.taps.device, batch.taps.dtype
        low = self._low(dtype)
        position = _positions(batch)
        known, _ = self._known(low, batch, torch.from_numpy(position).to(device))
        rows = _chain_starts(batch)
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
            drafted = self.draft_ids[best_tokens(self._norm(state, self.norm), low["head"])]
            told = np.minimum(rows + 2 + step, len(batch.mask) - 1)
            same = drafted.cpu().numpy() == batch.tokens.cpu().numpy()[told]
            alive &= same & (rows + 2 + step < end) & batch.mask[told]
            accepted += alive
        return Rollout(rows + 1, accepted)

    # -- what is kept -----------------------------------------------------------------------------------------------

    def config(self, provenance: Mapping[str, Any]) -> SpeculatorConfig:
        return replace(self.shape, provenance={"localspec": __version__, **provenance})

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {_NAMES[n]: p.detach().float() for n, p in self.named_parameters()}
        tensors["fc.weight"] = (self.fc.detach() * self.tap_scale).float()  # the inputs' scales, folded in
        if self.shape.draft_vocab:
            tensors["d2t"] = self.draft_ids - torch.arange(len(self.draft_ids), device=self.draft_ids.device)
            tensors["t2d"] = self.draft_of >= 0
        return {n: t.cpu().contiguous() for n, t in tensors.items()}, speculators_config(self.shape, self.settings.verifier)


def _positions(batch: Batch) -> npt.NDArray[np.int64]:
    """i64[N]: each token's place in its sample."""
    return np.arange(batch.n_tokens) - np.repeat(batch.starts[:-1], np.diff(batch.starts))


def _chain_starts(batch: Batch) -> npt.NDArray[np.int64]:
    """Positions P of a sample whose token P + 2 the assistant said."""
    starts = np.flatnonzero(batch.mask) - 2
    first = np.repeat(batch.starts[:-1], np.diff(batch.starts))
    return starts[(starts >= 0) & (starts >= first[starts + 2])]


def speculators_config(shape: SpeculatorConfig, verifier: str = "") -> dict[str, Any]:
    """config.json of an EAGLE-3 draft as vLLM's speculators (0.9) reads it. That package loads a draft only together with
    its target's Hugging Face files, the `verifier`; a GGUF doesn't say where those are."""
    layer: dict[str, Any] = {
        "model_type": "llama", "vocab_size": shape.target.n_vocab, "hidden_size": shape.n_embd,
        "intermediate_size": shape.n_ff, "num_hidden_layers": 1, "num_attention_heads": shape.n_head,
        "num_key_value_heads": shape.n_head_kv, "head_dim": shape.head_dim, "hidden_act": "silu",
        "max_position_embeddings": shape.n_ctx_train, "rms_norm_eps": shape.rms_eps, "attention_bias": False,
        "mlp_bias": False, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_base}, "rope_theta": shape.rope_base,
    }  # fmt: skip
    if shape.window:
        layer |= {"sliding_window": shape.window, "layer_types": ["sliding_attention"]}
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "draft_vocab_size": shape.draft_vocab or shape.target.n_vocab, "target_hidden_size": shape.target.n_embd,
        "norm_before_residual": shape.norm_before_residual, "norm_before_fc": shape.norm_before_fc,
        "eagle_aux_hidden_state_layer_ids": list(shape.taps), "transformer_layer_config": layer, "torch_dtype": "float32",
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": shape.depth}],
            "verifier": {"name_or_path": verifier or None, "architectures": []},
        },
    }  # fmt: skip


