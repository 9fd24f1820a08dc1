"""How a recurrent state goes back over refused tokens: nothing can be cut off its end, so an older one is put in its place.

Two ways. Some graphs keep the states after each of the last tokens of a decode (llama_context_params.n_rs_seq): going back
within them costs nothing. Everywhere else the state before a block is copied out, and put back where tokens of the block
are refused; those that were kept have to be decoded once more.

    tokens        ... P  d0 d1 d2    d0 kept, d1 refused
    kept states     s0 s1 s2 s3      s1, after d0, counts from now on
    snapshot      s                  s is put back; P and d0 are decoded again

Either reaches back over the last decode only. llama.cpp itself would go back further, into states of other tokens.
"""

from __future__ import annotations

import ctypes
from typing import Any

from localspec import native
from localspec.errors import NativeError

#: LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: of a hybrid, only what can't be trimmed
_PARTIAL = 1


class RecurrentStates:
    """The states of one context, by sequence. `n_kept`: how many tokens llama.cpp itself can go back; 0: snapshots."""

    def __init__(self, handle: Any, n_sequences: int, n_kept: int):
        lib = native.lib()
        self._handle, self._memory, self.n_kept = handle, lib.llama_get_memory(handle), n_kept
        self._undo = [0] * n_sequences  # tokens that llama.cpp can go back now
        self._at = [-1] * n_sequences  # tokens before the snapshot's block; -1: there is none that counts
        self._data: list[Any] = [None] * n_sequences
        self._size = [0] * n_sequences

    def before(self, seq: int, held: int, n: int, keep: bool) -> None:
        """`n` tokens come after the `held` ones; `keep`: some of them may have to go again. Raises NativeError."""
        self._at[seq], self._undo[seq] = -1, 0
        if not keep or n < 2:
            return
        if self.n_kept:
            self._undo[seq] = min(n - 1, self.n_kept)
        else:
            if held:
                self._save(seq)
            self._at[seq] = held

    def _save(self, seq: int) -> None:
        lib = native.lib()
        size = int(lib.llama_state_seq_get_size_ext(self._handle, seq, _PARTIAL))
        if self._data[seq] is None or len(self._data[seq]) < size:
            self._data[seq] = (ctypes.c_uint8 * size)()
        self._size[seq] = int(lib.llama_state_seq_get_data_ext(self._handle, self._data[seq], size, seq, _PARTIAL))
        if not self._size[seq]:
            raise NativeError(f"llama.cpp gave no state to go back to {native.last_log_error()}".rstrip())

    def back(self, seq: int, held: int, n_keep: int) -> int:
        """Go back from `held` tokens to `n_keep`, or as little further as can be. Returns of how many tokens the state is
        now; -1 where there was none to go back to, and the sequence is empty."""
        lib = native.lib()
        undo, at = self._undo[seq], self._at[seq]
        self._undo[seq] = 0
        if n_keep > 0 and held - n_keep <= undo and lib.llama_memory_seq_rm(self._memory, seq, n_keep, -1):
            return n_keep
        if 0 <= at <= n_keep and self._restore(seq, at):  # the snapshot stays good: once more may be gone back
            return at
        self._at[seq] = -1
        lib.llama_memory_seq_rm(self._memory, seq, 0, -1)
        return -1

    def _restore(self, seq: int, at: int) -> bool:
        lib = native.lib()
        if at:
            native.clear_log()
            args = self._handle, self._data[seq], self._size[seq], seq, _PARTIAL
            if not lib.llama_state_seq_set_data_ext(*args):
                return False
        return bool(lib.llama_memory_seq_rm(self._memory, seq, at, -1))
