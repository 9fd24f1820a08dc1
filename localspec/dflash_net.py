"""The network of a DFlash or DSpark draft, read from a GGUF file into native/draft, with a cache for each slot.

The target's rows go in as they are accepted (`inject`): what its taps say at position P stands in the cache at P, in every
layer. A draft of k tokens for a text of n tokens is then one pass over a block: the pending token at position n - 1, the
anchor, and a mask for each further place; a mask's row predicts the token of its own position. Where a DSpark draft samples
from the anchor, every row predicts the token after it, so k rows do. (llama.cpp: src/models/dflash.cpp and
common/speculative.cpp)
"""

from __future__ import annotations

import numpy as np

from localspec.draft_net import (
    F32,
    I32,
    Matrix,
    embedding,
    extension,
    matrix,
    rope_factors,
    target_head,
    target_ids,
    threads_for,
    vector,
)  # fmt: skip
from localspec.gguf_file import GGUFFile
from localspec.gguf_format import clip
from localspec.memory import windowed_layers
from localspec.pairing import is_dspark
from localspec.speculator import SpeculatorConfig

_MATRICES = {
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
}  # fmt: skip
_NORMS = {"in": "attn_norm", "norm_q": "attn_q_norm", "norm_k": "attn_k_norm", "ffn": "ffn_norm"}
_OUTER = (
    "fc.weight", "enc.output_norm.weight", "output_norm.weight", "output.weight", "token_embd.weight", "d2t",
    "rope_freqs.weight", "blk.0.rope_freqs.weight", "markov_w1.weight", "markov_w2.weight", "conf_proj.weight",
    "conf_proj.bias",
)  # fmt: skip
#: keys that change the graph -> the value that does not
_USUAL = {
    "embedding_scale": 0.0, "attention.scale": 0.0, "attention.value_scale": 0.0, "hidden_act": "silu",
    "hyper_connection.count": 0, "selector_rank": 0,
}  # fmt: skip
_DEFAULT_BLOCK = 16  # llama.cpp's, for files that don't say


class DFlashNet:
    """One draft's weights and caches. `ids` i32[Vd] are the target's ids of the draft's vocabulary, `n_in` the width of the
    taps of one position laid one after another, in the order of `config.taps`; `n_most` is the longest draft."""

    def __init__(self, draft: GGUFFile, target: GGUFFile, n_slots: int, n_threads: int = 0):
        """`n_threads` 0: as many as the draft's size can use. Raises ModelFileError for a file that is incomplete or of a
        kind that can't be run, NativeError where localspec was installed without its native part."""
        self.config = SpeculatorConfig.from_gguf(draft)
        c = self.config
        _refuse_unknown(draft)
        if not c.taps or c.n_embd != target.n_embd:
            raise draft.error(f"reads {len(c.taps)} taps and is {c.n_embd} wide; its target is {target.n_embd} wide")
        self.n_embd = c.n_embd
        self.n_in = len(c.taps) * c.target.n_embd
        self.n_tokens = target.vocab_size
        self.ids = target_ids(draft, self.n_tokens)
        self.has_markov = is_dspark(draft)
        self.has_confidence = self.has_markov and "conf_proj.weight" in draft.tensors
        self.from_anchor = self.has_markov and self._flag(draft, "sample_from_anchor", True)
        self.block_size = int(draft.get(f"{draft.architecture}.block_size", int, _DEFAULT_BLOCK))
        self.n_most = self.block_size if self.from_anchor else self.block_size - 1
        tensors, norms = self._tensors(draft, target)
        mask = draft.get("tokenizer.ggml.mask_token_id", int)
        if mask is None or not 0 <= mask < self.n_tokens or self.n_most < 1:
            raise draft.error(
                f"says mask token {clip(str(mask))} and blocks of {self.block_size}; a draft of this kind needs a mask "
                f"(tokenizer.ggml.mask_token_id) of the target's {self.n_tokens} tokens, and blocks of 2 or more"
            )
        n_rot, factors = rope_factors(draft, c.head_dim)
        if factors is not None:
            norms["rope_factors"] = factors
        rank = tensors["markov_second"][1] if self.has_markov else 0
        shape = np.array(
            [
                c.n_embd, self.n_in, c.n_head, c.n_head_kv, c.head_dim, c.n_ff, n_rot, len(self.ids), self.n_tokens,
                c.n_layer, mask, rank, self._flag(draft, "attention.causal", False), self.from_anchor, factors is not None,
                self.has_confidence,
            ], np.int64,
        )  # fmt: skip
        if c.window and not isinstance(draft.arch("attention.sliding_window_pattern"), np.ndarray):
            raise draft.error("does not say which of its layers have its window (attention.sliding_window_pattern)")
        windows = np.array([c.window if on else 0 for on in windowed_layers(draft)], np.int64)
        n_bytes = sum(len(t[3]) for name, t in tensors.items() if name not in ("fc", "embedding", "markov_first"))
        self.n_threads = threads_for(n_bytes, n_threads)
        self._native = extension()
        self._keep = target, draft  # the embedding is read in place
        try:
            self._net = self._native.dflash(
                shape, np.array([c.rms_eps, c.rope_base], np.float32), windows, n_slots, self.n_threads, tensors, norms
            )
        except ValueError as error:
            raise draft.error(f"can't be run: {error}") from None

    @staticmethod
    def _flag(draft: GGUFFile, key: str, default: bool) -> bool:
        return bool(draft.get(f"{draft.architecture}.{key}", bool, default))

    def _tensors(self, draft: GGUFFile, target: GGUFFile) -> tuple[dict[str, Matrix], dict[str, F32]]:
        c = self.config
        tensors, norms = {"fc": matrix(draft, "fc.weight")}, {"taps": vector(draft, "enc.output_norm.weight")}
        norms["output"] = vector(draft, "output_norm.weight")
        for i in range(c.n_layer):
            tensors |= {f"{i}.{name}": matrix(draft, f"blk.{i}.{stored}.weight") for name, stored in _MATRICES.items()}
            norms |= {f"{i}.{name}": vector(draft, f"blk.{i}.{stored}.weight") for name, stored in _NORMS.items()}
        own = next((n for n in ("output.weight", "token_embd.weight") if n in draft.tensors), None)
        tensors["head"] = matrix(draft, own) if own is not None else target_head(target)
        tensors["embedding"] = embedding(draft, target, c.n_embd)
        if tensors["head"][2] != len(self.ids):
            raise draft.error(f"is damaged: its head has {tensors['head'][2]} rows, its vocabulary {len(self.ids)}")
        if self.has_markov:
            first = matrix(draft, "markov_w1.weight")
            tensors["markov_first"], tensors["markov_second"] = first, matrix(draft, "markov_w2.weight")
            if first[2] != self.n_tokens:
                raise draft.error(f"is damaged: its Markov head knows {first[2]} tokens, the target has {self.n_tokens}")
        if self.has_confidence:
            norms["sure"] = _as_vector(draft, "conf_proj.weight")
            has_bias = "conf_proj.bias" in draft.tensors
            norms["sure_bias"] = vector(draft, "conf_proj.bias") if has_bias else np.zeros(1, np.float32)
        return tensors, norms

    def inject(self, slot: int, first: int, taps: F32) -> None:
        """Keep the target's rows f32[n, n_in] (or [n, T, H]) at positions first ...: what lay there is replaced."""
        self._native.inject(self._net, slot, first, np.ascontiguousarray(taps, np.float32))

    def block(self, slots: I32, positions: I32, tokens: I32, ks: I32) -> tuple[F32, F32]:
        """One pass for the anchors `tokens` at `positions` of m slots: logits f32[sum of ks, Vd] of the drafted places,
        without the Markov head's part, and their states f32[sum of ks, E]."""
        n = int(ks.sum())
        logits, hidden = np.empty((n, len(self.ids)), np.float32), np.empty((n, self.n_embd), np.float32)
        if n:
            self._native.block(self._net, slots, positions, tokens, ks, logits, hidden)
        return logits, hidden

    def lean(self, previous: I32, hidden: F32, logits: F32) -> F32:
        """Add the Markov head's part to logits f32[n, Vd], given the tokens before; how sure the draft is, f32[n] (NaN where
        it has no head for that). Changes nothing in a draft without a Markov head."""
        sure = np.empty(len(previous), np.float32)
        self._native.lean(self._net, previous, np.ascontiguousarray(hidden), logits, sure)
        return sure

    def greedy(self, slots: I32, positions: I32, tokens: I32, ks: I32, p_min: float) -> tuple[I32, F32, I32]:
        """Up to ks[i] tokens after each anchor: target ids i32[m, k], confidences f32[m, k], counts i32[m]. The confidence
        is the head's own or, without one, the token's probability."""
        m, k = len(slots), int(ks.max(initial=0))
        out, sure, counts = np.zeros((m, k), np.int32), np.empty((m, k), np.float32), np.zeros(m, np.int32)
        if k > 0:
            self._native.greedy_block(self._net, slots, positions, tokens, ks, p_min, self.ids, out, sure, counts)
        return out, sure, counts

    def close(self) -> None:
        """Free weights and caches."""
        self._net = None


def _as_vector(file: GGUFFile, name: str) -> F32:
    """A matrix of one row, or a vector, of floats."""
    info = file.tensors[name]
    if (len(info.shape) == 2 and info.shape[1] != 1) or info.type not in ("F32", "F16"):
        raise file.error(f"has {name} of the shape {list(info.shape)}, type {info.type}; one row of F32 or F16 is expected")
    return np.frombuffer(file.tensor_bytes(name), "<f4" if info.type == "F32" else "<f2").astype(np.float32)


def _refuse_unknown(draft: GGUFFile) -> None:
    """Raise ModelFileError for a file of the architecture whose network is another: DFlash 2, DeepSeek's stages, sinks."""
    for key, usual in _USUAL.items():
        value = draft.arch(key, usual)
        if value != usual:
            raise draft.error(f"has a network that drafts here can't run ({draft.architecture}.{key} {clip(str(value))})")
    known = set(_OUTER)
    for i in range(draft.n_layer):
        known |= {f"blk.{i}.{stored}.weight" for stored in (*_MATRICES.values(), *_NORMS.values())}
    for name in draft.tensors:
        if name not in known:
            raise draft.error(f"has the tensor {clip(name)}, which drafts here can't run; use llama.cpp's own for it")
