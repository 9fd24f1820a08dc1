"""A small language model with the target's tokenizer, made of the target's own embedding, head and a few of its layers.

It reads no states, so it fits every target; its file is an ordinary llama, which any program of llama.cpp takes as a draft.
Like the distilled models that drop a share of their teacher's layers (Sanh et al., arXiv 1910.01108, section 3) it starts
from layers that already work together, and learns what the target thought at every token that it wrote.

The head of a large vocabulary would cost as much as all layers. A step computes the logits of the tokens that count, and of
a sample of the others: the frequent tokens, all that the teacher names in this batch, and some drawn evenly from the rest,
each of which stands for its share of it. The sum of exponentials is then right on average (Horvitz and Thompson, 1952;
Jean et al., arXiv 1412.2007, section 3, train so with a proposal of their own).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localspec import __version__
from localspec.data.shards import Sample
from localspec.errors import TrainError
from localspec.speculator import SpeculatorConfig
from localspec.train import llama_parts, vocab
from localspec.train.attention import blocks, chain_attention
from localspec.train.batches import Batch, collate
from localspec.train.draft_parts import positions
from localspec.train.kinds.small import Settings
from localspec.train.losses import best_tokens, head_loss
from localspec.train.models import DataFacts, LossParts, Rollout
from localspec.train.target_weights import TargetWeights

#: The first logits have about this spread (a target's have 3 to 4): what comes out of few layers means little at first, and
#: at the target's own scale the loss begins at 16 to 20, where knowing nothing is 11. `scale` brings it back: AdamW's steps
#: would take thousands to double a norm.
_FIRST_LOGITS = 2.0
_SCALE_SPEED = 10.0

_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
#: the same by Hugging Face's names
_NAMES = {
    "attn_norm": "input_layernorm.weight", "ffn_norm": "post_attention_layernorm.weight",
    **{n: f"self_attn.{n}_proj.weight" for n in "qkvo"}, **{f"{n}_bias": f"self_attn.{n}_proj.bias" for n in "qkv"},
    **{n: f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")},
}  # fmt: skip


class _Layer(nn.Module):
    """One decoder layer's parameters. q and k rows lie in Hugging Face's order."""

    def __init__(self, shape: SpeculatorConfig):
        super().__init__()
        sizes = shape.n_embd, shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim, shape.n_ff
        for name, size in llama_parts.layer_shapes(*sizes).items():
            if name not in llama_parts.BIASES:
                self.register_parameter(name, nn.Parameter(torch.ones(size) if "norm" in name else torch.empty(size)))
            elif shape.extra.get(llama_parts.BIAS):
                self.register_parameter(name, nn.Parameter(torch.zeros(size)))


Pair = tuple[Tensor, Tensor]


class Model(nn.Module):
    """The small llama. `head` is the table that makes logits, and the embedding, too, where the target has but one."""

    METHOD: ClassVar[str] = "small"
    NEEDS_TAPS: ClassVar[bool] = False
    Settings: ClassVar[Any] = Settings

    frequent: Tensor
    embedding: Tensor | None

    def __init__(self, shape: SpeculatorConfig, settings: Settings):
        super().__init__()
        self.shape, self.settings = shape, settings
        self.depth = settings.depth
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.n_layer))
        self.norm = nn.Parameter(torch.ones(shape.n_embd))
        self.scale = nn.Parameter(torch.zeros(()))  # of the norm, see _last_norm
        kept = torch.float32 if settings.train_head else torch.float16
        table = torch.empty(shape.target.n_vocab, shape.n_embd, dtype=kept)
        self.head = nn.Parameter(table, requires_grad=settings.train_head)
        self.register_buffer("embedding", None, persistent=False)  # the target's where it has two tables
        self.remarked: list[str] = []

    @classmethod
    def shape_of(cls, settings: Settings, target: TargetWeights, taps: tuple[int, ...]) -> SpeculatorConfig:
        identity = target.identity
        layers, why = llama_parts.origin(settings.layers, target)
        n_head, n_kv, size, n_ff = llama_parts.sizes(target)
        bias = not why and f"blk.{layers[0]}.{llama_parts.BIASES['q_bias']}" in target.gguf.tensors
        return SpeculatorConfig(
            method=cls.METHOD, architecture="llama", target=identity, taps=(), n_embd=identity.n_embd, n_head=n_head,
            n_head_kv=n_kv, head_dim=size, n_ff=n_ff, n_layer=len(layers), rms_eps=target.rms_eps,
            rope_base=target.rope_base, depth=settings.depth, n_ctx_train=target.gguf.n_ctx_train,
            extra={llama_parts.BIAS: True} if bias else {}, provenance={} if why else {"target_layers": list(layers)},
        )  # fmt: skip

    @classmethod
    def new(cls, settings: Settings, target: TargetWeights, facts: DataFacts, seed: int) -> Self:
        model = cls(cls.shape_of(settings, target, facts.taps), settings)
        with torch.no_grad():
            model._initialise(target, facts, seed)
        return model

    def _initialise(self, target: TargetWeights, facts: DataFacts, seed: int) -> None:
        tied = "output.weight" not in target.gguf.tensors
        self.head.copy_(target.tensor("token_embd.weight" if tied else "output.weight", self.head.dtype))
        if not tied:
            self.embedding = target.embedding(torch.float16)
        self.norm.copy_(target.output_norm())
        where = llama_parts.origin(self.settings.layers, target)
        if where.why_random:
            self._at_random(seed)
        else:
            for layer, number in zip(self.layers, where.layers):
                for name, parameter in layer.named_parameters():
                    parameter.copy_(llama_parts.layer_parameter(target, number, name))
        if where.why_random or len(where.layers) < target.identity.n_layer:
            random = torch.Generator().manual_seed(seed)
            head = self.head[:: max(1, len(self.head) // 1024)].float()
            probe = torch.randn(256, self.shape.n_embd, generator=random) * self.norm
            self.norm.mul_(_FIRST_LOGITS / float((probe @ head.t()).std()))
        n_vocab = self.shape.target.n_vocab
        size = min(self.settings.frequent or n_vocab, n_vocab)
        self.register_buffer("frequent", torch.from_numpy(vocab.choose(facts.counts, size)), persistent=False)
        self.remarked = self._about(target, where, tied)

    def _at_random(self, seed: int) -> None:
        """What each layer adds is small beside the embedding."""
        random = torch.Generator().manual_seed(seed)
        table = self._table()[:: max(1, len(self.head) // 1024)].float()
        small = 0.5 * float(table.square().mean().sqrt())
        for layer in self.layers:
            for name in _MATRICES:
                weight = layer.get_parameter(name)
                weight.normal_(0.0, weight.shape[1] ** -0.5 * (small if name in ("o", "down") else 1.0), generator=random)

    def _about(self, target: TargetWeights, where: llama_parts.Origin, tied: bool) -> list[str]:
        trained = sum(p.numel() for p in self.parameters() if p.requires_grad)
        of = f"the target's {', '.join(map(str, where.layers))}"
        if where.why_random:
            of = f"random at first: {where.why_random}, so only embedding and head are the target's"
        lines = [f"small draft of {self.shape.n_layer} layers ({of}), {trained / 1e6:.1f} M parameters trained, "
                 f"{self.head.numel() * (1 if tied else 2) / 1e6:.1f} M in the vocabulary's tables"]  # fmt: skip
        kind = target.gguf.arch("rope.scaling.type", "none")
        if kind != "none" or any(name.startswith("rope_f") for name in target.gguf.tensors):
            lines.append("the target's rope is stretched for long texts, the draft's is not: it learns without")
        return lines

    def matrices(self) -> list[str]:
        return [f"layers.{i}.{name}" for i in range(len(self.layers)) for name in _MATRICES]

    def remarks(self) -> list[str]:
        return self.remarked

    def vocabulary(self) -> npt.NDArray[np.int64]:
        return np.arange(self.shape.target.n_vocab)

    def batch(self, samples: Sequence[Sample], max_len: int, dtype: torch.dtype) -> Batch:
        return collate([replace(s, taps=s.taps[:, :0]) for s in samples], max_len, None, dtype)

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Start from a checkpoint's weights (Hugging Face's names). A head that isn't trained stays the target's. Raises
        TrainError for a model of another shape."""
        names = self._stored_names()
        if not self.settings.train_head:
            names.pop("head")
        own = dict(self.named_parameters())
        with torch.no_grad():
            for name, place in names.items():
                found = tensors.get(place)
                if found is None or found.shape != own[name].shape:
                    shown = "lacks" if found is None else f"has {tuple(found.shape)}, not {tuple(own[name].shape)}, as"
                    raise TrainError(f"the checkpoint to start from {shown} {place}: give one of this shape")
                own[name].copy_(found)
            self.scale.zero_()

    # -- forward ----------------------------------------------------------------------------------------------------

    def _table(self) -> Tensor:
        """[V, H]: the embedding."""
        return self.head if self.embedding is None else self.embedding

    def _embedded(self, tokens: Tensor) -> Tensor:
        """f32 [R, H]. The residual stream stays in f32: some states are thousands of times larger than the others."""
        return F.embedding(tokens, self._table()).float()

    def _low(self, dtype: torch.dtype) -> list[dict[str, Tensor]]:
        """The layers' parameters, those of products in the type that products are made in; cast once for all steps."""
        return [{n: p if "norm" in n else p.to(dtype) for n, p in layer.named_parameters()} for layer in self.layers]

    def _norm(self, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.shape.rms_eps).to(dtype)

    def _last_norm(self) -> Tensor:
        return self.norm * (_SCALE_SPEED * self.scale).exp()

    def _turns(self, positions: Tensor, dtype: torch.dtype) -> Pair:
        """(cos, sin) [R, 1, d / 2] of each position."""
        half = self.shape.head_dim // 2
        speeds = self.shape.rope_base ** (torch.arange(half, device=positions.device) / -half)
        angle = positions[:, None, None].float() * speeds
        return angle.cos().to(dtype), angle.sin().to(dtype)

    @staticmethod
    def _rotated(x: Tensor, turns: Pair) -> Tensor:
        """Halves of a head belong together: x [R, heads, d]."""
        a, b = x.chunk(2, -1)
        cos, sin = turns
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def _qkv(self, low: Mapping[str, Tensor], x: Tensor, turns: Pair) -> tuple[Tensor, Tensor, Tensor]:
        """q [R, heads, d], k and v [R, kv, d] of the residual stream [R, H]."""
        y = self._norm(x, low["attn_norm"], low["q"].dtype)
        q, k, v = (F.linear(y, low[n], low.get(f"{n}_bias")).view(len(x), -1, self.shape.head_dim) for n in "qkv")
        return self._rotated(q, turns), self._rotated(k, turns), v

    def _after(self, low: Mapping[str, Tensor], x: Tensor, attended: Tensor) -> Tensor:
        x = x + F.linear(attended.reshape(len(x), -1), low["o"])
        y = self._norm(x, low["ffn_norm"], low["q"].dtype)
        return x + F.linear(F.silu(F.linear(y, low["gate"])) * F.linear(y, low["up"]), low["down"])

    def _forward(self, low: list[dict[str, Tensor]], batch: Batch, rows: Tensor) -> tuple[Tensor, list[Pair]]:
        """(states before the last norm f32[R, H] at `rows`, each layer's keys and values at all positions)."""
        dtype = low[0]["q"].dtype
        turns = self._turns(torch.from_numpy(positions(batch)).to(batch.tokens.device), dtype)
        x, known = self._embedded(batch.tokens), []
        for i, layer in enumerate(low):
            q, k, v = self._qkv(layer, x, turns)
            known.append((k, v))
            attended = _causal(q, k, v, batch.starts)
            if i == len(low) - 1:  # nobody reads the other rows
                x, attended = x[rows], attended[rows]
            x = self._after(layer, x, attended)
        return x, known

    # -- training ---------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> LossParts:
        device, dtype = batch.taps.device, batch.taps.dtype
        told = _told(batch)
        if not len(told):  # samples that were cut before anything counts
            nothing = 0.0 * torch.stack([p.sum() for p in self.parameters() if p.requires_grad]).sum()
            return LossParts(nothing, 0, [], [], [])
        x, _ = self._forward(self._low(dtype), batch, torch.from_numpy(told - 1).to(device))
        guess = torch.from_numpy(batch.teacher_of[told]).to(device)
        ids, wanted = batch.teacher_ids[guess], batch.tokens[torch.from_numpy(told).to(device)]
        chosen, bias, place = self._chosen(batch, ids, wanted)
        head = self.head[chosen]
        h = self._norm(x, self._last_norm(), dtype)
        bias = bias if bias is None else bias.to(dtype)
        result = head_loss(h, head, head.detach().to(dtype), place[ids], batch.teacher_p[guess], place[wanted], bias=bias)
        right = int(result.right.sum())
        return LossParts(result.loss, len(told), [float(result.loss.detach())], [len(told)], [right])

    def _chosen(self, batch: Batch, ids: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """(i64[S] the tokens whose logits this batch computes, f32[S] what is added to them or None, i64[V] where a token
        stands among them or -1). The sample is a function of the batch, so that a resumed run draws the same."""
        certain = np.zeros(self.shape.target.n_vocab, bool)
        for tokens in (self.frequent, ids, wanted):
            certain[tokens.cpu().numpy().ravel()] = True
        sure, rest = np.flatnonzero(certain), np.flatnonzero(~certain)
        place = np.full(len(certain), -1, np.int64)
        n = min(self.settings.sampled, len(rest))
        places = torch.arange(batch.n_tokens, device=batch.tokens.device)
        random = np.random.default_rng(int((batch.tokens * places).sum()))
        chosen = np.concatenate([sure, random.choice(rest, n, replace=False, shuffle=False)])
        place[chosen] = np.arange(len(chosen))
        device = batch.tokens.device
        bias = None
        if n < len(rest):
            bias = torch.zeros(len(chosen), device=device)
            bias[len(sure) :] = float(np.log(len(rest) / n))
        return torch.from_numpy(chosen).to(device), bias, torch.from_numpy(place).to(device)

    # -- as run time drafts -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def rollout(self, batch: Batch, n_max: int) -> Rollout:
        device, dtype = batch.taps.device, batch.taps.dtype
        rows = starts = _told(batch) - 1
        accepted = np.zeros(len(rows), np.int64)
        if not len(rows):
            return Rollout(starts, accepted)
        low, head = self._low(dtype), self.head.to(dtype)
        position = positions(batch)
        end = np.repeat(batch.starts[1:], np.diff(batch.starts))
        tokens = batch.tokens.cpu().numpy()
        x, known = self._forward(low, batch, torch.from_numpy(rows).to(device))
        chains: list[list[Pair]] = [[] for _ in low]
        alive = np.arange(len(rows))
        for step in range(n_max):
            drafted = best_tokens(self._norm(x, self._last_norm(), dtype), head)
            told = np.minimum(rows + 1 + step, len(tokens) - 1)
            right = (drafted.cpu().numpy() == tokens[told]) & (rows + 1 + step < end[rows]) & batch.mask[told]
            rows, alive = rows[right], alive[right]
            accepted[alive] += 1
            if not len(rows) or step == n_max - 1:
                break
            # chains that were right so far go on; what the others would draft, nobody sees
            index = torch.from_numpy(np.flatnonzero(right)).to(device)
            chains = [[(k[index], v[index]) for k, v in chain] for chain in chains]
            turns = self._turns(torch.from_numpy(position[rows] + 1 + step).to(device), dtype)
            work = blocks(rows, batch.starts, 0, step + 1, device)
            x = self._embedded(drafted[index])
            for layer, (keys, values), chain in zip(low, known, chains):
                q, k, v = self._qkv(layer, x, turns)
                chain.append((k, v))
                x = self._after(layer, x, chain_attention(work, q, keys, values, chain))
        return Rollout(starts, accepted)

    # -- what is kept -----------------------------------------------------------------------------------------------

    def config(self, provenance: Mapping[str, Any]) -> SpeculatorConfig:
        return replace(self.shape, provenance={"localspec": __version__, **self.shape.provenance, **provenance})

    def _stored_names(self) -> dict[str, str]:
        """Hugging Face's names by ours."""
        names = {name: f"model.layers.{name.split('.')[1]}.{_NAMES[name.split('.')[2]]}"
                 for name, _ in self.named_parameters() if name.startswith("layers.")}  # fmt: skip
        table = "model.embed_tokens.weight" if self.embedding is None else "lm_head.weight"
        return names | {"norm": "model.norm.weight", "head": table}

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tables that aren't trained stay F16: they were quantised to less."""
        names = self._stored_names()
        own = {n: p.detach() for n, p in self.named_parameters()} | {"norm": self._last_norm().detach()}
        tensors = {place: own[n] for n, place in names.items()}
        if self.embedding is not None:
            tensors["model.embed_tokens.weight"] = self.embedding
        if self.shape.extra.get(llama_parts.BIAS):  # its llama has one for all four or for none
            for i in range(len(self.layers)):
                tensors[f"model.layers.{i}.self_attn.o_proj.bias"] = torch.zeros(self.shape.n_embd)
        return {n: t.cpu().contiguous() for n, t in tensors.items()}, llama_config(self.shape, self.embedding is None)


def _causal(q: Tensor, k: Tensor, v: Tensor, starts: npt.NDArray[np.int64]) -> Tensor:
    """Attention [N, heads, d] of each sample over its own positions so far. q [N, heads, d]; k and v [N, kv, d]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    parts = []
    for a, b in pairwise(starts.tolist()):
        own_q, own_k, own_v = (x[a:b].transpose(0, 1)[None] for x in (q, k, v))
        parts.append(F.scaled_dot_product_attention(own_q, own_k, own_v, is_causal=True)[0].transpose(0, 1))
    return torch.cat(parts)


def _told(batch: Batch) -> npt.NDArray[np.int64]:
    """Places of tokens that the assistant said and that another one of the sample stands before."""
    told = np.flatnonzero(batch.mask)
    return told[~np.isin(told, batch.starts[:-1])]


def llama_config(shape: SpeculatorConfig, tied: bool) -> dict[str, Any]:
    """config.json of a llama as Hugging Face's transformers reads it."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": shape.target.n_vocab,
        "hidden_size": shape.n_embd, "intermediate_size": shape.n_ff, "num_hidden_layers": shape.n_layer,
        "num_attention_heads": shape.n_head, "num_key_value_heads": shape.n_head_kv, "head_dim": shape.head_dim,
        "hidden_act": "silu", "max_position_embeddings": shape.n_ctx_train, "rms_norm_eps": shape.rms_eps,
        "attention_bias": bool(shape.extra.get(llama_parts.BIAS)), "mlp_bias": False, "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_base}, "rope_theta": shape.rope_base,
        "torch_dtype": "float32",
    }  # fmt: skip
