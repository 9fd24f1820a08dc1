"""The context in which a next-token (MTP) head runs: llama.cpp's own graph, beside the target's context.

Two kinds of head. A Gemma 4 assistant is a file of its own without keys and values: its context's cache *is* the target's
(llama_context_params.ctx_other), so it sees what the target has computed, writes nothing, and each of its steps stands at
the position of the pending token. A NextN head lies in the target's own file behind its layers and keeps a cache of its own.

Every row that goes in is a token and a state of the target's width; what comes out are logits and the next such state.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec import native
from localspec.clusters import ClusteredHead
from localspec.errors import LocalspecError, NativeError
from localspec.taps import order_of
from localspec.target import CACHE_TYPES, FLASH_ATTENTION, TargetSession

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

_CONTEXT_TYPE_MTP = 1  # LLAMA_CONTEXT_TYPE_MTP
_NORMED = b"result_norm"  # what the graph's head and its wider state are made of
_FEW = 32  # rows of a batch at least: no fewer than the kernels like


class MtpContext:
    """Owns one context on `model` (a llama_model pointer): the assistant's, or the target's own. Close it before the
    target's session. Raises NativeError where llama.cpp makes none."""

    def __init__(
        self, model: Any, n_vocab: int, target: TargetSession, n_batch: int = 0, n_threads: int = 0,
        head: ClusteredHead | None = None,
    ):  # fmt: skip
        """`head`: what gives the logits in place of the graph's own, which is not computed then."""
        lib = native.lib()
        s = target.settings
        self.n_batch = max(n_batch, s.n_sequences, _FEW)
        self.n_vocab, self.n_embd = n_vocab, target.model.n_embd
        params = lib.llama_context_default_params()
        params.n_ctx = int(lib.llama_n_ctx(target.handle))
        params.n_batch = params.n_ubatch = self.n_batch
        params.n_seq_max = s.n_sequences
        params.n_threads = params.n_threads_batch = n_threads or target.n_threads
        # a shared cache is read as the target's context has laid it out
        params.type_k, params.type_v = CACHE_TYPES[s.type_k], CACHE_TYPES[s.type_v]
        params.flash_attn_type = FLASH_ATTENTION[s.flash_attention]
        params.swa_full = False
        params.no_perf = True
        params.ctx_type = _CONTEXT_TYPE_MTP
        params.ctx_other = target.handle
        self._head, self._pieces = head, list[F32]()
        if head is not None:
            self._callback = native.eval_callback(_NORMED.__eq__, self._take, stop=True)
            params.cb_eval = self._callback
        native.clear_log()
        self.handle = lib.llama_init_from_model(model, params)
        if not self.handle:
            reason = native.last_log_error() or "not enough memory?"
            raise NativeError(f"{target.model.path}: no context for its next-token head: {reason}")
        native.ask_nextn(self.handle, every_row=False)
        self._memory = lib.llama_get_memory(self.handle)
        self._make_batch(self.n_batch)

    def _make_batch(self, n: int) -> None:
        lib = native.lib()
        self._token, self._pos, self._seq = (np.zeros(n, np.int32) for _ in range(3))
        self._n_seq, self._want = np.ones(n, np.int32), np.zeros(n, np.int8)
        self._state = np.zeros((n, self.n_embd), np.float32)
        pointer = ctypes.POINTER(ctypes.c_int32)
        start = self._seq.ctypes.data
        self._seq_pointers = (pointer * n)(*[ctypes.cast(start + 4 * i, pointer) for i in range(n)])
        batch = lib.llama_batch()
        batch.token, batch.pos, batch.n_seq_id = (a.ctypes.data_as(pointer) for a in (self._token, self._pos, self._n_seq))
        batch.embd = self._state.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        batch.seq_id = ctypes.cast(self._seq_pointers, ctypes.POINTER(pointer))
        batch.logits = self._want.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        self._batch = batch

    def step(self, slots: I32, positions: I32, tokens: I32, states: F32) -> tuple[F32, F32]:
        """One row for each slot: (logits f32[m, V], states f32[m, H]); the logits are a view, valid until the next call.

        `states` f32[m, H]: the target's at the position before, or the last step's.
        """
        m = len(slots)
        self._pieces.clear()
        self._decode(slots, positions, tokens, states, True)
        if self._head is not None:
            normed = self._rows(slots)
            return self._head.logits(normed), self._head.widened(normed)
        return native.logits(self.handle, m, self.n_vocab), native.nextn_rows(self.handle, m, self.n_embd).copy()

    def _take(self, _name: bytes, rows: F32) -> None:
        self._pieces.append(rows)

    def _rows(self, slots: I32) -> F32:
        """What the whole head would read, f32[m, E], in the order of the batch."""
        if sum(map(len, self._pieces)) != len(slots):
            got = [list(piece.shape) for piece in self._pieces]
            raise NativeError(f"llama.cpp gave the states {got} for {len(slots)} rows of a next-token head")
        if len(self._pieces) == 1:
            return self._pieces[0]
        out = np.empty((len(slots), self._pieces[0].shape[1]), np.float32)
        out[order_of([(slot, 1) for slot in slots.tolist()])] = np.concatenate(self._pieces)
        return out

    def extend(self, slot: int, first: int, tokens: I32, states: F32) -> None:
        """Put rows first ... into the cache of a head that has its own."""
        for at in range(0, len(tokens), self.n_batch):
            piece = slice(at, min(at + self.n_batch, len(tokens)))
            n = piece.stop - at
            positions = np.arange(first + at, first + at + n, dtype=np.int32)
            self._decode(np.full(n, slot, np.int32), positions, tokens[piece], states[piece], False)

    def cut(self, slot: int, n_keep: int) -> None:
        """Keep the first rows of a cache of its own. Raises LocalspecError where they are gone."""
        if not native.lib().llama_memory_seq_rm(self._memory, slot, n_keep, -1):
            raise LocalspecError(f"the head's cache can't go back to {n_keep} rows")

    def _decode(self, slots: I32, positions: I32, tokens: I32, states: F32, want: bool) -> None:
        m = len(slots)
        if not 0 < m <= self.n_batch or not len(positions) == len(tokens) == len(states) == m:
            raise LocalspecError(f"{m} rows for a next-token head, its batch holds {self.n_batch}")
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.n_vocab:
            raise LocalspecError(f"token {int(tokens.max())} for a head of {self.n_vocab} tokens")
        self._seq[:m], self._pos[:m], self._token[:m], self._want[:m] = slots, positions, tokens, want
        self._state[:m] = states
        self._batch.n_tokens = m
        native.clear_log()
        status = native.lib().llama_decode(self.handle, self._batch)
        if status != 0:
            reason = native.last_log_error() or {1: "no room in the cache"}.get(status, "")
            raise NativeError(f"llama.cpp could not run the next-token head (status {status}) {reason}".rstrip())

    def close(self) -> None:
        """Free the context."""
        if self.handle:
            native.lib().llama_free(self.handle)
            self.handle = None
