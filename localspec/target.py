"""TargetSession: one llama.cpp context with its KV cache, and everything that must be checked before it is called.

llama.cpp aborts the process on broken preconditions, so positions, ids, space and slots are checked here, in Python. The
same class serves a draft model that is an ordinary language model: it, too, needs a context with rollback.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from localspec import native
from localspec.errors import ContextFullError, LocalspecError, NativeError, UsageError
from localspec.memory import available_memory, memory_needed
from localspec.model import Model
from localspec.passes import padded
from localspec.taps import Taps
from localspec.threads import ThreadCount

#: ggml's cache types that a user may name with -ctk/-ctv, as llama.cpp does.
CACHE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30,
}  # fmt: skip
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
#: Larger decodes, a prompt's, use the cores otherwise and take long enough to outlast another's time slice.
_FEW_ROWS = 32


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """How a context is made. `n_ctx` is per sequence, in tokens; 0 asks for the smaller of 4096 and what was trained."""

    n_ctx: int = 0
    n_sequences: int = 1
    n_batch: int = 512
    n_threads: int = 0  # 0: native.default_threads()
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attention: str = "auto"
    taps: tuple[int, ...] = ()  # hidden states to read in every decode, see taps.py

    def __post_init__(self) -> None:
        if self.n_ctx < 0 or self.n_ctx > 1 << 24:
            raise UsageError(f"--ctx-size must be between 0 (automatic) and {1 << 24}, not {self.n_ctx}")
        if not 0 <= self.n_threads <= 512:
            raise UsageError(f"--threads must be between 1 and 512 (0: automatic), not {self.n_threads}")
        for flag, value in (("-ctk", self.type_k), ("-ctv", self.type_v)):
            if value not in CACHE_TYPES:
                raise UsageError(f"{flag} {value}: unknown cache type; one of {', '.join(CACHE_TYPES)}")
        if self.flash_attention not in FLASH_ATTENTION:
            raise UsageError(f"-fa {self.flash_attention}: one of {', '.join(FLASH_ATTENTION)}")
        if self.flash_attention == "off" and self.type_v not in ("f32", "f16", "bf16"):
            raise UsageError(f"-ctv {self.type_v} needs flash attention: use -fa on")


@dataclass(slots=True)
class Rows:
    """What one decode gave, one row per token asked for: logits f32[m, V], taps f32[m, n_taps, H] where the session has
    taps. Views, valid until the next call."""

    logits: np.ndarray
    taps: np.ndarray | None = None

    def slice(self, start: int, end: int) -> Rows:
        """Rows start to end."""
        return Rows(self.logits[start:end], None if self.taps is None else self.taps[start:end])


class TargetSession:
    """Owns one context. `tokens[seq]` is what the cache of a sequence holds, in order, from position 0."""

    def __init__(self, model: Model, settings: SessionSettings | None = None):
        settings = settings or SessionSettings()
        lib = native.lib()
        self.model = model
        self.settings = settings
        n_ctx = settings.n_ctx or min(4096, model.n_ctx_train or 4096)
        self.n_threads = settings.n_threads or native.default_threads()
        if settings.n_sequences < 1 or settings.n_sequences > lib.llama_max_parallel_sequences():
            raise UsageError(f"{settings.n_sequences} sequences: llama.cpp allows {lib.llama_max_parallel_sequences()}")
        self._check_memory(n_ctx)
        params = lib.llama_context_default_params()
        params.n_ctx = n_ctx * settings.n_sequences
        params.n_batch = params.n_ubatch = settings.n_batch
        params.n_seq_max = settings.n_sequences
        params.n_threads = params.n_threads_batch = self.n_threads
        params.type_k = CACHE_TYPES[settings.type_k]
        params.type_v = CACHE_TYPES[settings.type_v]
        params.flash_attn_type = FLASH_ATTENTION[settings.flash_attention]
        params.no_perf = True
        # A window's cache keeps n_swa + n_batch cells. Rolling back within the last block is always safe there: a cell is
        # reused only once it lies outside the window of a token that is kept for good.
        params.swa_full = False
        self.taps = Taps(model, settings.taps, settings.n_batch) if settings.taps else None
        if self.taps is not None:
            self.taps.prepare(params)
        native.clear_log()
        self.handle = lib.llama_init_from_model(model.handle, params)
        if not self.handle:
            reason = native.last_log_error() or "not enough memory?"
            raise NativeError(f"{model.path}: no context of {n_ctx} tokens: {reason}; try a smaller --ctx-size")
        if self.taps is not None:
            self.taps.attach(self.handle)
        self._memory = lib.llama_get_memory(self.handle)
        #: tokens that one sequence can hold; llama.cpp rounds up, a user's own limit is kept
        self.n_ctx = min(n_ctx, int(lib.llama_n_ctx_seq(self.handle)))
        self.n_batch = int(lib.llama_n_batch(self.handle))
        self.tokens: list[list[int]] = [[] for _ in range(settings.n_sequences)]
        self._make_batch(self.n_batch)
        self._can_roll_back: bool | None = None
        # Stock kernels add up long rows of attention by thread: there the text would depend on who else is at work. And
        # a number that a person asked for is kept.
        chosen = settings.n_threads == 0 and native.kernels_in_use() == "localspec" and model.n_gpu_layers == 0
        self._thread_count = ThreadCount(self.n_threads) if chosen else None
        self._threads_set = self.n_threads

    def _check_memory(self, n_ctx: int) -> None:
        """Refuse a cache that can't fit: the system would grant it, and kill something when it is filled."""
        free = available_memory()
        if free is None or self.model.n_gpu_layers != 0:
            return
        s = self.settings
        needed = memory_needed(self.model.gguf, n_ctx, s.type_k, s.type_v, s.n_sequences, s.n_batch)
        need = needed.kv + needed.compute
        if need > free:
            raise UsageError(
                f"{self.model.path}: a context of {n_ctx} tokens needs {need / 1e9:.1f} GB beside the weights, "
                f"{free / 1e9:.1f} GB are free: give a smaller --ctx-size, or -ctk q8_0 -ctv q8_0"
            )

    def _make_batch(self, n: int) -> None:
        """Buffers of one llama_batch, filled in place for every decode: no allocation in a step."""
        lib = native.lib()
        self._token = np.zeros(n, np.int32)
        self._pos = np.zeros(n, np.int32)
        self._n_seq = np.ones(n, np.int32)
        self._seq = np.zeros(n, np.int32)
        self._want = np.zeros(n, np.int8)
        start = self._seq.ctypes.data
        pointer = ctypes.POINTER(ctypes.c_int32)
        self._seq_pointers = (pointer * n)(*[ctypes.cast(start + 4 * i, pointer) for i in range(n)])
        batch = lib.llama_batch()
        batch.token = self._token.ctypes.data_as(pointer)
        batch.pos = self._pos.ctypes.data_as(pointer)
        batch.n_seq_id = self._n_seq.ctypes.data_as(pointer)
        batch.seq_id = ctypes.cast(self._seq_pointers, ctypes.POINTER(pointer))
        batch.logits = self._want.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        self._batch = batch

    # -- decoding ------------------------------------------------------------------------------------------------------

    def decode(self, blocks: Sequence[tuple[int, Sequence[int] | np.ndarray]]) -> Rows:
        """One decode of several blocks (seq, tokens), each appended to its sequence; logits and taps for every token.

        Raises ContextFullError before anything is computed when a sequence has no room.
        """
        padded = self._padded(blocks)
        if padded is not None:
            return self._decode_padded(dict(blocks), padded)
        n = self._fill(blocks)
        self._want[:n] = 1
        self._run(n)
        for seq, tokens in blocks:
            self.tokens[seq].extend(int(t) for t in tokens)
        taps = None if self.taps is None else self.taps.read([(seq, len(tokens)) for seq, tokens in blocks])
        return Rows(native.logits(self.handle, n, self.model.n_vocab), taps)

    def _padded(self, blocks: Sequence[tuple[int, Sequence[int] | np.ndarray]]) -> list[tuple[int, int]] | None:
        """(seq, rows) of a decode that takes fewer passes (passes.py) than `blocks`; None where there is none."""
        if len(blocks) < 2 or self.model.is_recurrent or (self.taps is not None and self.taps.needs_every_row):
            return None
        lengths = [(seq, len(tokens)) for seq, tokens in blocks]
        if any(a >= b for (a, _), (b, _) in pairwise(lengths)) or any(n == 0 for _, n in lengths):
            return None
        more = padded(lengths, lambda seq: self.n_ctx - len(self.tokens[seq]), self.n_batch)
        return None if more == lengths else more

    def _decode_padded(self, blocks: dict[int, Sequence[int] | np.ndarray], padded: list[tuple[int, int]]) -> Rows:
        """`decode` with rows that nobody asked for; of what it gives, those asked for."""
        own = [(seq, [int(t) for t in blocks.get(seq, ())], n) for seq, n in padded]
        n = self._fill([(seq, tokens + [0] * (n - len(tokens))) for seq, tokens, n in own])
        wanted = np.concatenate([np.arange(n) < len(tokens) for _, tokens, n in own])
        self._want[:n] = wanted
        self._run(n)
        for seq, tokens, rows in own:
            self.tokens[seq].extend(tokens)
            if rows > len(tokens):
                self._remove(seq, len(self.tokens[seq]))
        taps = None if self.taps is None else self.taps.read(padded)[wanted]
        return Rows(native.logits(self.handle, int(wanted.sum()), self.model.n_vocab), taps)

    def prefill(
        self,
        seq: int,
        tokens: Sequence[int],
        stopped: Callable[[], bool] = lambda: False,
        tapped: Callable[[int, np.ndarray], None] | None = None,
    ) -> int:
        """Bring the cache of `seq` to exactly `tokens`, keeping the beginning that it already holds.

        Returns how many tokens had to be computed. Works in pieces of n_batch, so an interrupt gets through; what was
        done until then stays usable. `stopped` is asked before each piece; True leaves the rest out. `tapped` gets the
        position of each piece's first token and its taps f32[n, n_taps, H], valid until it returns; what the cache held
        already is not among them.
        """
        keep = self.rollback(seq, common_start(self.tokens[seq], tokens))
        for start in range(keep, len(tokens), self.n_batch):
            if stopped():
                return start - keep
            piece = tokens[start : start + self.n_batch]
            n = self._fill([(seq, piece)])
            self._want[:n] = self.taps is not None and self.taps.needs_every_row
            self._run(n)
            self.tokens[seq].extend(piece)
            if tapped is not None and self.taps is not None:
                tapped(start, self.taps.read([(seq, n)]))
        return len(tokens) - keep

    def _fill(self, blocks: Sequence[tuple[int, Sequence[int] | np.ndarray]]) -> int:
        at = 0
        for seq, tokens in blocks:
            n = len(tokens)
            held = len(self.tokens[seq])
            if held + n > self.n_ctx:
                raise ContextFullError(f"the context of {self.n_ctx} tokens is full: give a larger --ctx-size")
            if at + n > self.n_batch:
                raise UsageError(f"{at + n} tokens in one decode, the batch holds {self.n_batch}")
            self._token[at : at + n] = tokens
            self._pos[at : at + n] = range(held, held + n)
            self._seq[at : at + n] = seq
            at += n
        if at == 0:
            raise LocalspecError("nothing to decode")
        self.model.check_tokens(self._token[:at])
        self._batch.n_tokens = at
        return at

    def _run(self, n: int) -> None:
        native.clear_log()
        if self.taps is not None:
            self.taps.clear()
        count = self._thread_count
        if count is None or n > _FEW_ROWS:
            status = native.lib().llama_decode(self.handle, self._batch)
        else:
            began = time.perf_counter()
            status = native.lib().llama_decode(self.handle, self._batch)
            count.record(n, time.perf_counter() - began)
            if count.now != self._threads_set:
                self._threads_set = count.now
                native.lib().llama_set_n_threads(self.handle, count.now, self.n_threads)
        if status != 0:
            self._recover()
            reason = native.last_log_error() or {1: "no room in the cache", 2: "aborted"}.get(status, "")
            raise NativeError(f"llama.cpp could not decode {n} tokens (status {status}) {reason}".rstrip())

    def _recover(self) -> None:
        """After a failed decode: drop what it may have left behind, so that `tokens` is true again."""
        for seq, held in enumerate(self.tokens):
            self._remove(seq, len(held))

    # -- rollback ------------------------------------------------------------------------------------------------------

    def rollback(self, seq: int, n_keep: int) -> int:
        """Keep the first `n_keep` tokens of `seq`; returns how many are really kept.

        Fewer (0) where they can't be kept: a recurrent state, or a window whose older keys are gone. Within the last
        block the answer is always n_keep on a model for which `can_roll_back` holds.
        """
        held = len(self.tokens[seq])
        if n_keep >= held:
            return held
        if n_keep <= 0 or not self._remove(seq, n_keep) or not self._window_intact(seq, n_keep):
            self._remove(seq, 0)
            n_keep = 0
        del self.tokens[seq][n_keep:]
        return n_keep

    def _remove(self, seq: int, start: int) -> bool:
        return bool(native.lib().llama_memory_seq_rm(self._memory, seq, start, -1))

    def _window_intact(self, seq: int, n_keep: int) -> bool:
        if not self.model.n_swa:
            return True
        first = int(native.lib().llama_memory_seq_pos_min(self._memory, seq))
        return 0 <= first <= max(0, n_keep - self.model.n_swa)

    @property
    def can_roll_back(self) -> bool:
        """Whether this model's cache can be trimmed, found out once by trying on an empty sequence.

        Recurrent and hybrid models keep one state per sequence: it can't be trimmed. A context of one token has no room
        to try, and none for a draft.
        """
        if self._can_roll_back is None:
            if self.model.is_recurrent or self.n_ctx < 2:
                self._can_roll_back = not self.model.is_recurrent
            else:
                free = next((i for i, held in enumerate(self.tokens) if not held), None)
                if free is None:
                    return True
                token = max(0, self.model.tokenizer.bos)
                self.decode([(free, [token, token])])
                self._can_roll_back = self.rollback(free, 1) == 1
                self.rollback(free, 0)
        return self._can_roll_back

    def close(self) -> None:
        """Free the context."""
        if self.handle:
            native.lib().llama_free(self.handle)
            self.handle = None

    def __enter__(self) -> TargetSession:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def common_start(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return min(len(a), len(b))
