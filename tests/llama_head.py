"""Networks of drafts as llama.cpp runs them, for one text: the other implementation that ours are held against.

Only tests need these C++ functions of llama.cpp; the program itself runs heads by native/draft.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np

from localspec import native
from localspec.target import TargetSession

_POINTER = ctypes.c_void_p


class LlamaHead:
    """A context on a head's file, beside the target's context, whose embedding it borrows."""

    def __init__(self, head: Path, target: TargetSession, n_ctx: int = 256):
        lib = native.lib()
        self.model = lib.llama_model_load_from_file(os.fsencode(head), lib.llama_model_default_params())
        assert self.model, native.last_log_error()
        self.n_vocab = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model)))
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads, params.n_threads_batch = n_ctx, 64, 64, 1, 1
        params.ctx_other = target.handle
        params.type_k = params.type_v = 0  # f32
        self.handle = lib.llama_init_from_model(self.model, params)
        assert self.handle, native.last_log_error()
        self._states = lib._lib._Z26llama_get_embeddings_nextnP13llama_context
        self._states.argtypes, self._states.restype = [_POINTER], _POINTER
        keep = lib._lib._Z26llama_set_embeddings_nextnP13llama_contextbb
        keep.argtypes, keep.restype = [_POINTER, ctypes.c_bool, ctypes.c_bool], None
        keep(self.handle, True, True)

    def fuse(self, taps: np.ndarray) -> np.ndarray:
        """g[n, E] of taps[n, T * H]."""
        return self._read(self._run(native.lib().llama_encode, None, taps, self._next()), len(taps))

    def feed(self, tokens: list[int], g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logits over the target's vocabulary (-inf where the head can't speak) and states, of pairs that follow those
        before."""
        n = len(tokens)
        self._run(native.lib().llama_decode, tokens, g, self._next())
        return self._logits(n), self._read(None, n)

    def _logits(self, n: int) -> np.ndarray:
        address = ctypes.cast(native.lib().llama_get_logits(self.handle), _POINTER).value
        return np.ctypeslib.as_array((ctypes.c_float * (n * self.n_vocab)).from_address(address)).reshape(n, -1).copy()

    def cut(self, n: int) -> None:
        native.lib().llama_memory_seq_rm(native.lib().llama_get_memory(self.handle), 0, n, -1)

    def _next(self) -> int:
        return int(native.lib().llama_memory_seq_pos_max(native.lib().llama_get_memory(self.handle), 0)) + 1

    def _run(self, function: Any, tokens: list[int] | None, rows: np.ndarray | None, first: int) -> None:
        lib, n = native.lib(), len(rows) if rows is not None else len(tokens or ())
        rows = np.ascontiguousarray(rows, np.float32) if rows is not None else None
        ids = np.array(tokens if tokens is not None else [0] * n, np.int32)
        pos, one, zero = np.arange(first, first + n, dtype=np.int32), np.ones(n, np.int32), np.zeros(n, np.int32)
        want = np.ones(n, np.int8)
        i32 = ctypes.POINTER(ctypes.c_int32)
        batch = lib.llama_batch()
        batch.n_tokens = n
        if tokens is not None:
            batch.token = ids.ctypes.data_as(i32)
        if rows is not None:
            batch.embd = rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        batch.pos, batch.n_seq_id = pos.ctypes.data_as(i32), one.ctypes.data_as(i32)
        pointers = (i32 * n)(*[zero.ctypes.data_as(i32)] * n)
        batch.seq_id = ctypes.cast(pointers, ctypes.POINTER(i32))
        batch.logits = want.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        assert function(self.handle, batch) == 0, native.last_log_error()

    def _read(self, _done: None, n: int) -> np.ndarray:
        width = int(native.lib().llama_model_n_embd(self.model))
        address = self._states(self.handle)
        return np.ctypeslib.as_array((ctypes.c_float * (n * width)).from_address(address)).reshape(n, width).copy()

    def close(self) -> None:
        native.lib().llama_free(self.handle)
        native.lib().llama_model_free(self.model)


class LlamaBlocks(LlamaHead):
    """A DFlash or DSpark draft: rows of the target go in, blocks are drafted, as common/speculative.cpp does it."""

    def __init__(self, draft: Path, target: TargetSession, n_ctx: int = 256, causal: bool = False):
        super().__init__(draft, target, n_ctx)
        native.lib().llama_set_causal_attn(self.handle, causal)

    def inject(self, first: int, taps: np.ndarray) -> None:
        """taps[n, T * H] at positions first ...; what the cache holds there is dropped."""
        self.cut(first)
        self._run(native.lib().llama_decode, None, taps, first)

    def block(self, position: int, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Logits of all rows over the target's vocabulary, and what stands in place of a state: the confidence of a DSpark
        draft, in every column."""
        self.cut(position)
        self._run(native.lib().llama_decode, tokens, None, position)
        return self._logits(len(tokens)), self._read(None, len(tokens))
