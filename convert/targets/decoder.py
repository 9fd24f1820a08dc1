"""What the decoders of these families have in common: names, shapes, attention's keys, rope, the output head."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from localspec.convert.targets.config import Config, Tensor
from localspec.convert.weights import Weights

_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
#: settings of YaRN that llama.cpp takes, and their keys there
_YARN = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
_ROPE_SETTINGS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", *_YARN},
}
_ALWAYS = {"rope_type", "type", "rope_theta"}


#: norms of one layer of Gemma 3 and 4: their names in GGUF -> in the checkpoint
GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def is_beside_the_text(name: str) -> bool:
    """Whether a tensor of a model that sees or hears as well belongs to that, not to the text."""
    name = name.removeprefix("model.")
    return name.startswith(("vision_tower.", "audio_tower.", "multi_modal_projector.", "embed_vision.", "embed_audio."))


class Decoder:
    """The sizes of a model, and its tensors one by one. Attributes are named as in GGUF's keys."""

    def __init__(self, config: Config, weights: Weights, head_dim: int | None = None):
        self.config = config
        self.n_layer = config.integer("num_hidden_layers")
        self.n_embd = config.integer("hidden_size")
        self.n_ff = config.integer("intermediate_size")
        self.n_head = config.integer("num_attention_heads")
        self.n_head_kv = config.integer("num_key_value_heads", self.n_head)
        self.n_vocab = config.integer("vocab_size")
        self.head_dim = head_dim or config.integer("head_dim", self.n_embd // self.n_head)
        if self.n_head % self.n_head_kv:
            raise config.error(f"has {self.n_head} heads for {self.n_head_kv} key-value heads, which don't divide them")
        named = [prefix for prefix in _PREFIXES if f"{prefix}embed_tokens.weight" in weights.stored]
        if not named:
            raise config.error("has no embed_tokens.weight among its tensors: not the weights of a whole model")
        self.prefix = named[0]
        heads = [name for name in _HEADS if name in weights.stored]
        self._head = heads[0] if heads else None
        self.is_tied = bool(config.get("tie_word_embeddings", False))
        if self._head is None and not self.is_tied:
            raise config.error("has no lm_head.weight, and its embeddings are not tied (tie_word_embeddings)")

    def keys(self) -> dict[str, Any]:
        """The sizes, as keys of GGUF."""
        return {
            "block_count": self.n_layer,
            "context_length": self.config.integer("max_position_embeddings"),
            "embedding_length": self.n_embd,
            "feed_forward_length": self.n_ff,
            "attention.head_count": self.n_head,
            "attention.head_count_kv": self.n_head_kv,
            "attention.layer_norm_rms_epsilon": self.config.number("rms_norm_eps"),
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
        }

    def outer(self, norm_change: Any = None) -> list[Tensor]:
        """Embeddings, final norm and, where it is one of its own, the output head."""
        tensors = [
            Tensor("token_embd.weight", f"{self.prefix}embed_tokens.weight", (self.n_vocab, self.n_embd)),
            Tensor("output_norm.weight", f"{self.prefix}norm.weight", (self.n_embd,), norm_change),
        ]
        if self._head is not None and not self.is_tied:
            tensors.append(Tensor("output.weight", self._head, (self.n_vocab, self.n_embd)))
        return tensors

    def is_ignored(self, name: str) -> bool:
        """A tied head that is stored all the same, and tables of rope, which are computed anew."""
        return (name == self._head and self.is_tied) or name.endswith("rotary_emb.inv_freq")

    def layer(self, index: int, name: str) -> str:
        """The name of a tensor of a layer in the checkpoint."""
        return f"{self.prefix}layers.{index}.{name}"

    def matrices(
        self, index: int, head_dim: int | None = None, n_head_kv: int | None = None, n_ff: int | None = None
    ) -> list[Tensor]:
        """The matrices of one layer's attention and gated feed-forward network; sizes only where the layers differ."""
        n_q, n_kv = (heads * (head_dim or self.head_dim) for heads in (self.n_head, n_head_kv or self.n_head_kv))
        n_ff = n_ff or self.n_ff
        shapes = {
            ("attn_q", "self_attn.q_proj"): (n_q, self.n_embd),
            ("attn_k", "self_attn.k_proj"): (n_kv, self.n_embd),
            ("attn_v", "self_attn.v_proj"): (n_kv, self.n_embd),
            ("attn_output", "self_attn.o_proj"): (self.n_embd, n_q),
            ("ffn_gate", "mlp.gate_proj"): (n_ff, self.n_embd),
            ("ffn_up", "mlp.up_proj"): (n_ff, self.n_embd),
            ("ffn_down", "mlp.down_proj"): (self.n_embd, n_ff),
        }
        return [
            Tensor(f"blk.{index}.{name}.weight", self.layer(index, f"{source}.weight"), shape)
            for (name, source), shape in shapes.items()
        ]

    def norms(self, index: int, names: dict[str, str], change: Any = None, head_dim: int | None = None) -> list[Tensor]:
        """Norms of one layer: their names in GGUF -> in the checkpoint. Those of queries and keys are as long as a head."""
        return [
            Tensor(
                f"blk.{index}.{name}.weight",
                self.layer(index, f"{source}.weight"),
                (head_dim or self.head_dim if source.startswith("self_attn.") else self.n_embd,),
                change,
            )
            for name, source in names.items()
        ]

    def biases(self, index: int, names: tuple[str, ...]) -> list[Tensor]:
        """Biases of those of a layer's matrices that are named here as in GGUF."""
        return [
            Tensor(m.name.replace(".weight", ".bias"), m.source.replace(".weight", ".bias"), m.shape[:1])
            for m in self.matrices(index)
            if m.name.split(".")[2] in names
        ]

    def rope_keys(self) -> dict[str, Any]:
        """The keys of rope of layers with full attention. Raises ModelFileError for what llama.cpp can't do."""
        rope = self.config.rope()
        kind = rope["rope_type"]
        if kind not in _ROPE_SETTINGS:
            raise self.config.unsupported(f"scales its rope by {kind!r}")
        known = _ALWAYS | _ROPE_SETTINGS[kind]
        for name, value in rope.items():
            if value is not None and name not in known and (name, value) != ("partial_rotary_factor", 1):
                raise self.config.unsupported(f"has {name} {value!r} in its rope settings")
        keys: dict[str, Any] = {"rope.freq_base": self.rope_base(rope)}
        if kind in ("linear", "yarn"):
            keys |= {"rope.scaling.type": kind, "rope.scaling.factor": self.rope_number(rope, "factor")}
        if kind == "yarn":
            trained = self.config.integer("max_position_embeddings")
            original = self.rope_number(rope, "original_max_position_embeddings", trained)
            keys["rope.scaling.original_context_length"] = int(original)
            keys |= {key: self.rope_number(rope, name) for name, key in _YARN.items() if rope.get(name) is not None}
        return keys

    def rope_base(self, rope: dict[str, Any]) -> float:
        """The base of rope's frequencies."""
        return self.rope_number(rope, "rope_theta", self.config.get("rope_theta", 10000.0))

    def rope_number(self, rope: dict[str, Any], name: str, default: float | None = None) -> float:
        """A positive number of rope's settings. Raises ModelFileError."""
        value = rope.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.config.error(f"has no usable {name} in its rope settings: {value!r}")
        return float(value)

    def rope_factors(self) -> dict[str, np.ndarray]:
        """The divisors of rope's frequencies that Llama 3.1 brought, as the tensor that llama.cpp wants; else nothing.

        Wavelengths up to ``original / high_freq_factor`` stay, from ``original / low_freq_factor`` on they are stretched
        by ``factor``; between the two the frequency is interpolated linearly in ``original / wavelength``.
        """
        rope = self.config.rope()
        if rope["rope_type"] != "llama3":
            return {}
        factor = self.rope_number(rope, "factor")
        low, high = self.rope_number(rope, "low_freq_factor"), self.rope_number(rope, "high_freq_factor")
        original = self.rope_number(rope, "original_max_position_embeddings")
        if high <= low:
            raise self.config.error(f"has a high_freq_factor of {high:g}, not above its low_freq_factor of {low:g}")
        base = self.rope_base(rope)
        wavelength = 2 * math.pi * base ** (np.arange(0, self.head_dim, 2) / self.head_dim)  # f64[head_dim / 2]
        share = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)  # of the frequency as it is
        return {"rope_freqs.weight": (1.0 / (share + (1.0 - share) / factor)).astype(np.float32)}
