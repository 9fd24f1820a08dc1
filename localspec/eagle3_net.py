"""The network of an EAGLE-3 draft, read from a GGUF file into native/draft, with a cache of pairs for each slot.

A pair at position P is the token at P + 1 and the state g[P], which is fc(taps[P]) where the target has been, and the
layer's own output one pair before while drafting. It predicts the token at P + 2 (llama.cpp: src/models/eagle3.cpp).
Every type of weight that ggml can convert is taken; the embedding and, where the draft has none, the head are the target's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localspec.draft_net import (
    F32,
    I32,
    embedding,
    extension,
    matrix,
    rope_factors,
    target_head,
    target_ids,
    threads_for,
    vector,
)
from localspec.gguf_file import GGUFFile
from localspec.speculator import SpeculatorConfig

_MATRICES = {
    "fc": "fc.weight", "q": "blk.0.attn_q.weight", "k": "blk.0.attn_k.weight", "v": "blk.0.attn_v.weight",
    "o": "blk.0.attn_output.weight", "gate": "blk.0.ffn_gate.weight", "up": "blk.0.ffn_up.weight",
    "down": "blk.0.ffn_down.weight",
}  # fmt: skip
_NORMS = {
    "embedding": "blk.0.attn_norm.weight", "state": "blk.0.attn_norm_2.weight", "ffn": "blk.0.ffn_norm.weight",
    "output": "output_norm.weight",
}  # fmt: skip


class Eagle3Net:
    """One draft's weights and caches. `ids` i32[Vd] are the target's ids of the draft's vocabulary, `n_in` the width of the
    taps of one position laid one after another, in the order of `config.taps`."""

    def __init__(self, draft: GGUFFile, target: GGUFFile, n_slots: int, n_threads: int = 0):
        """`n_threads` 0: as many as the draft's size can use. Raises ModelFileError for a file that is incomplete or of a
        kind that can't be run, NativeError where localspec was installed without its native part."""
        self.config = SpeculatorConfig.from_gguf(draft)
        c = self.config
        if c.n_layer != 1 or not c.taps:
            raise draft.error(f"has {c.n_layer} layers and {len(c.taps)} taps; an EAGLE-3 draft has one layer and three")
        self.n_embd = c.n_embd
        self.n_in = len(c.taps) * c.target.n_embd
        self.n_tokens = target.vocab_size
        self.ids = target_ids(draft, self.n_tokens)
        tensors = {name: matrix(draft, stored) for name, stored in _MATRICES.items()}
        own = "output.weight" in draft.tensors
        tensors["head"] = matrix(draft, "output.weight") if own else target_head(target)
        tensors["embedding"] = embedding(draft, target, c.n_embd)
        if tensors["head"][2] != len(self.ids):
            raise draft.error(f"is damaged: its head has {tensors['head'][2]} rows, its vocabulary {len(self.ids)}")
        norms: dict[str, F32] = {name: vector(draft, stored) for name, stored in _NORMS.items()}
        if c.norm_before_fc:
            norms["taps"] = vector(draft, "enc.output_norm.weight")
        n_rot, factors = rope_factors(draft, c.head_dim)
        if factors is not None:
            norms["rope_factors"] = factors
        shape = np.array(
            [
                c.n_embd, self.n_in, c.n_head, c.n_head_kv, c.head_dim, c.n_ff, n_rot, len(self.ids), self.n_tokens,
                c.window, c.norm_before_residual, c.norm_before_fc, factors is not None,
            ], np.int64,
        )  # fmt: skip
        n_bytes = sum(len(t[3]) for name, t in tensors.items() if name not in ("fc", "embedding"))
        self.n_threads = threads_for(n_bytes, n_threads)
        self._native = extension()
        self._keep = target, draft  # the embedding is read in place
        try:
            self._net = self._native.eagle3(
                shape, np.array([c.rms_eps, c.rope_base], np.float32), n_slots, self.n_threads, tensors, norms
            )
        except ValueError as error:
            raise draft.error(f"can't be run: {error}") from None

    def fuse(self, taps: F32) -> F32:
        """States g f32[n, E] of taps f32[n, n_in] (or [n, T, H])."""
        g = np.empty((len(taps), self.n_embd), np.float32)
        self._native.fuse(self._net, np.ascontiguousarray(taps, np.float32), g)
        return g

    def extend(self, slot: int, first: int, tokens: Sequence[int] | I32, g: F32) -> None:
        """Keep the pairs of `tokens` and states g f32[n, E] at positions first ...: what lay there is replaced."""
        self._native.extend(self._net, slot, first, np.asarray(tokens, np.int32), np.ascontiguousarray(g))

    def step(self, slots: I32, positions: I32, tokens: I32, g: F32) -> tuple[F32, F32]:
        """Keep one pair in each of m slots; logits f32[m, Vd] and the states f32[m, E] that come out."""
        states = np.empty((len(slots), self.n_embd), np.float32)
        logits = np.empty((len(slots), len(self.ids)), np.float32)
        self._native.step(self._net, slots, positions, tokens, np.ascontiguousarray(g), states, logits)
        return logits, states

    def branch(self, slot: int, base: int, nodes: I32, parents: I32, tokens: I32, g: F32) -> tuple[F32, F32]:
        """As `step` for m places of a tree in one slot, which has its root's pair at position `base`. `nodes` i32[m] are
        numbers of the caller's, rising; `parents` i32[m] those of earlier calls, -1 for the root."""
        states = np.empty((len(nodes), self.n_embd), np.float32)
        logits = np.empty((len(nodes), len(self.ids)), np.float32)
        self._native.branch(self._net, slot, base, nodes, parents, tokens, np.ascontiguousarray(g), states, logits)
        return logits, states

    def greedy(self, slots: I32, positions: I32, tokens: I32, g: F32, ks: I32, p_min: float) -> tuple[I32, F32, I32]:
        """Up to ks[i] tokens after the pair of each slot: target ids i32[m, k], probabilities f32[m, k], counts i32[m]."""
        m, k = len(slots), int(ks.max(initial=0))
        out, probs, counts = np.empty((m, k), np.int32), np.empty((m, k), np.float32), np.zeros(m, np.int32)
        if k > 0:
            self._native.greedy(
                self._net, slots, positions, tokens, np.ascontiguousarray(g), ks, p_min, self.ids, out, probs, counts
            )
        return out, probs, counts

    def close(self) -> None:
        """Free weights and caches."""
        self._net = None
