"""TargetSession: one llama.cpp context with its KV cache, and everything that must be checked before it is called.

llama.cpp aborts the process on broken preconditions, so positions, ids, space and slots are checked here, in Python. The
same class serves a draft model that is an ordinary language model: it, too, needs a context with rollback.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from localspec import native
from localspec.errors import ContextFullError, LocalspecError, NativeError, UsageError
from localspec.llama_arch import BOUNDED_ROLLBACK
from localspec.memory import available_memory, memory_needed, recurrent_state
from localspec.model import Model
from localspec.passes import Blocks, padded, rows_of, with_room
from localspec.snapshot import RecurrentStates
from localspec.taps import Taps
from localspec.threads import ThreadCount

#: ggml's cache types that a user may name with -ctk/-ctv, as llama.cpp does.
CACHE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30,
}  # fmt: skip
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
#: Larger decodes, a prompt's, use the cores otherwise and take long enough to outlast another's time slice.
_FEW_ROWS = 32
#: What rounding makes of a row of logits at most, of its largest: it is below 0.001 in tests.
_ALIKE = 0.1


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
    # Tokens that a recurrent state shall be able to go back without a copy, where llama.cpp can do that: see snapshot.py.
    n_rollback: int = 0
    n_branches: int = 0  # further sequence ids, for the branches of draft trees; they share the one text's cells

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
        if self.n_branches < 0 or (self.n_branches > 0 and self.n_sequences != 1):
            raise UsageError("draft trees serve one text at a time: --spec-tree off, or one sequence")
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

    def take(self, which: Sequence[int]) -> Rows:
        """These rows, in this order: a copy."""
        index = np.asarray(which)
        return Rows(self.logits[index], None if self.taps is None else self.taps[index])


class TargetSession:
    """Owns one context. `tokens[seq]` is what the cache of a sequence holds, in order, from position 0."""

    def __init__(self, model: Model, settings: SessionSettings | None = None):
        settings = settings or SessionSettings()
        lib = native.lib()
        self.model = model
        self.settings = settings
        n_ctx = settings.n_ctx or min(4096, model.n_ctx_train or 4096)
        self.n_threads = settings.n_threads or native.default_threads()
        n_ids = settings.n_sequences + settings.n_branches
        if settings.n_sequences < 1 or n_ids > lib.llama_max_parallel_sequences():
            raise UsageError(f"{n_ids} sequences: llama.cpp allows {lib.llama_max_parallel_sequences()}")
        n_rollback = self._check_memory(n_ctx)
        params = lib.llama_context_default_params()
        params.n_ctx = n_ctx * settings.n_sequences
        params.n_batch = params.n_ubatch = settings.n_batch
        params.n_seq_max = n_ids
        if settings.n_branches:  # ids that share cells: `fork` copies no keys
            params.kv_unified = True
        params.n_threads = params.n_threads_batch = self.n_threads
        params.type_k = CACHE_TYPES[settings.type_k]
        params.type_v = CACHE_TYPES[settings.type_v]
        params.flash_attn_type = FLASH_ATTENTION[settings.flash_attention]
        params.no_perf = True
        # A window's cache keeps n_swa + n_batch cells. Rolling back within the last block is always safe there: a cell is
        # reused only once it lies outside the window of a token that is kept for good.
        params.swa_full = False
        params.n_rs_seq = n_rollback
        self.taps = Taps(model, settings.taps, settings.n_batch) if settings.taps else None
        #: whether `decode` reads the taps; without, its rows have none
        self.reads_taps = True
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
        self._states: RecurrentStates | None = None
        if model.is_recurrent:
            self._states = RecurrentStates(self.handle, settings.n_sequences, int(lib.llama_n_rs_seq(self.handle)))
        #: tokens that one sequence can hold; llama.cpp rounds up, a user's own limit is kept
        self.n_ctx = min(n_ctx, int(lib.llama_n_ctx_seq(self.handle)))
        self.n_batch = int(lib.llama_n_batch(self.handle))
        self.tokens: list[list[int]] = [[] for _ in range(n_ids)]
        self._missing = [0] * n_ids  # of these, at the end, what llama.cpp must decode again: see `settle`
        self._make_batch(self.n_batch)
        self._can_roll_back: bool | None = None
        # Stock kernels add up long rows of attention by thread: there the text would depend on who else is at work. And
        # a number that a person asked for is kept.
        chosen = settings.n_threads == 0 and native.kernels_in_use() == "localspec" and model.n_gpu_layers == 0
        self._thread_count = ThreadCount(self.n_threads) if chosen else None
        self._threads_set = self.n_threads

    def _check_memory(self, n_ctx: int) -> int:
        """Refuse a cache that can't fit: the system would grant it, and kill something when it is filled. Returns how many
        states llama.cpp shall keep to go back to."""
        s = self.settings
        # States of several sequences may change places between two pieces of a decode, and what was kept would not follow.
        # And llama.cpp aborts where a batch can't hold them all.
        wanted = s.n_rollback if s.n_sequences == 1 and s.n_rollback + 2 < s.n_batch else 0
        wanted = wanted if self.model.gguf.architecture in BOUNDED_ROLLBACK else 0
        free = available_memory()
        if free is None or self.model.n_gpu_layers != 0:
            return wanted
        needed = memory_needed(self.model.gguf, n_ctx, s.type_k, s.type_v, s.n_sequences, s.n_batch)
        need = needed.kv + needed.compute
        if need > free:
            raise UsageError(
                f"{self.model.path}: a context of {n_ctx} tokens needs {need / 1e9:.1f} GB beside the weights, "
                f"{free / 1e9:.1f} GB are free: give a smaller --ctx-size, or -ctk q8_0 -ctv q8_0"
            )
        return wanted if need + wanted * recurrent_state(self.model.gguf) <= free else 0

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
        self.settle()
        padded = self._padded(blocks)
        if padded is not None:
            return self._decode_padded(dict(blocks), padded)
        n = self._fill(blocks)
        self._want[:n] = 1
        self._keep_states(blocks, True)
        self._run(n)
        for seq, tokens in blocks:
            self.tokens[seq].extend(int(t) for t in tokens)
        taps = self._read_taps([(seq, len(tokens)) for seq, tokens in blocks])
        return Rows(native.logits(self.handle, n, self.model.n_vocab), taps)

    def _read_taps(self, blocks: Sequence[tuple[int, int]]) -> np.ndarray | None:
        return None if self.taps is None or not self.reads_taps else self.taps.read(blocks)

    @property
    def n_branches(self) -> int:
        """Branches that a draft tree may have beside its first: 0 where the model's cache does not allow any."""
        return self.settings.n_branches if self.model.n_swa == 0 and not self.model.is_recurrent else 0

    def decode_tree(self, seq: int, tokens: Sequence[int] | np.ndarray, parents: Sequence[int] | np.ndarray) -> Rows:
        """One decode of tokens that branch behind `seq`; logits and taps for every one of them.

        parents[i] < i: the token before token i, -1 for what the cache holds. The line of first children, which must come
        first, stays in the cache as after `decode`. All other cells are given back at once: a token's row depends on the
        place of its keys, and one kept there would say something else than where plain decoding puts it.

        Raises UsageError for more branches than the session has ids, ContextFullError as `decode` does.
        """
        lines = tree_lines(parents)
        if len(lines) - 1 > self.n_branches:
            raise UsageError(f"a draft tree of {len(lines)} branches; this session has room for {self.n_branches + 1}")
        n, held, lib = len(tokens), len(self.tokens[seq]), native.lib()
        self._fill([(seq, tokens)])
        ids = [seq, *range(self.settings.n_sequences, self.settings.n_sequences + len(lines) - 1)]
        through: list[list[int]] = [[] for _ in range(n)]
        for branch, line in zip(ids, lines):
            for i in line:
                through[i].append(branch)
                self._pos[i] = held + line.index(i)
        for branch in ids[1:]:
            self._remove(branch, 0)
            lib.llama_memory_seq_cp(self._memory, seq, branch, -1, -1)
            self.tokens[branch] = []
        flat = np.array([branch for each in through for branch in each], np.int32)
        pointer, at = ctypes.POINTER(ctypes.c_int32), flat.ctypes.data
        for i, each in enumerate(through):
            self._n_seq[i] = len(each)
            self._seq_pointers[i] = ctypes.cast(at, pointer)
            at += 4 * len(each)
        self._want[:n] = 1
        try:
            self._run(n)
        finally:
            for i in range(n):
                self._n_seq[i] = 1
                self._seq_pointers[i] = ctypes.cast(self._seq.ctypes.data + 4 * i, pointer)
            for branch in ids[1:]:
                self._remove(branch, 0)
        self.tokens[seq].extend(int(tokens[i]) for i in lines[0])
        taps = self._read_taps([(seq, n)])
        return Rows(native.logits(self.handle, n, self.model.n_vocab), taps)

    def fork(self, seq: int, branch: int) -> None:
        """The sequence `branch` becomes what `seq` is: no key is copied."""
        self._remove(branch, 0)
        native.lib().llama_memory_seq_cp(self._memory, seq, branch, -1, -1)
        self.tokens[branch] = list(self.tokens[seq])
    def passes(self, blocks: Blocks) -> tuple[int, ...]:
        """Rows of each pass over the weights that `decode` takes for blocks (seq, tokens), by ascending seq."""
        return (blocks[0][1],) if len(blocks) == 1 else self._cut(blocks)[1]

    def _cut(self, blocks: Blocks) -> tuple[Blocks, tuple[int, ...]]:
        """(seq, rows) that are decoded for `blocks`, so that it takes fewer passes (passes.py), and the rows of each."""
        if self.model.is_recurrent or (self.taps is not None and self.taps.needs_every_row):
            return blocks, rows_of(blocks)
        longest = max([n for _, n in blocks])
        if max([len(self.tokens[seq]) for seq in range(blocks[0][0], blocks[-1][0] + 1)]) + longest <= self.n_ctx:
            return with_room(blocks, self.n_batch)
        more = padded(blocks, lambda seq: self.n_ctx - len(self.tokens[seq]), self.n_batch)
        return tuple(more), rows_of(more)

    def _padded(self, blocks: Sequence[tuple[int, Sequence[int] | np.ndarray]]) -> Blocks | None:
        """(seq, rows) of a decode that takes fewer passes than `blocks`; None where there is none."""
        if len(blocks) < 2:
            return None
        lengths = tuple([(seq, len(tokens)) for seq, tokens in blocks])
        if any(a >= b for (a, _), (b, _) in pairwise(lengths)) or any(n == 0 for _, n in lengths):
            return None
        more, _ = self._cut(lengths)
        return None if more == lengths else more

    def _decode_padded(self, blocks: dict[int, Sequence[int] | np.ndarray], padded: Blocks) -> Rows:
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
        taps = self._read_taps(padded)
        taps = None if taps is None else taps[wanted]
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
        self.settle()
        for start in range(keep, len(tokens), self.n_batch):
            if stopped():
                return start - keep
            piece = tokens[start : start + self.n_batch]
            n = self._fill([(seq, piece)])
            self._keep_states([(seq, piece)], False)
            self._want[:n] = self.taps is not None and self.taps.needs_every_row
            self._run(n, tapped is not None)
            self.tokens[seq].extend(piece)
            if tapped is not None and self.taps is not None:
                tapped(start, self.taps.read([(seq, n)]))
        return len(tokens) - keep

    def settle(self) -> None:
        """Decode again what a refusal left without a state; nothing where there is no such thing. Its time is part of the
        step's that drafted: the engine asks for it at the step's end. Rows of the last decode are not valid any more."""
        blocks = [(seq, self.tokens[seq][-n:]) for seq, n in enumerate(self._missing) if n]
        if not blocks:
            return
        for seq, tokens in blocks:
            del self.tokens[seq][-len(tokens) :]
        n = self._fill(blocks)
        self._want[:n] = 0
        self._keep_states(blocks, False)
        self._missing = [0] * len(self._missing)
        self._run(n)
        for seq, tokens in blocks:
            self.tokens[seq].extend(tokens)

    def _keep_states(self, blocks: Sequence[tuple[int, Sequence[int] | np.ndarray]], keep: bool) -> None:
        if self._states is not None:
            for seq, tokens in blocks:
                self._states.before(seq, len(self.tokens[seq]), len(tokens), keep)

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

    def _run(self, n: int, reads: bool | None = None) -> None:
        """`reads`: whether the taps of this decode are; None: as `reads_taps` says."""
        native.clear_log()
        if self.taps is not None:
            self.taps.clear()
            self.taps.on = self.reads_taps if reads is None else reads
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
            if self._states is None or int(native.lib().llama_memory_seq_pos_max(self._memory, seq)) < len(held):
                self._remove(seq, len(held))
            else:  # a state that has gone on can't be used
                self.rollback(seq, 0)

    # -- rollback ------------------------------------------------------------------------------------------------------

    def rollback(self, seq: int, n_keep: int) -> int:
        """Keep the first `n_keep` tokens of `seq`; returns how many are really kept.

        Fewer (0) where they can't be kept: a recurrent state of earlier decodes, or a window whose older keys are gone.
        Within the last block the answer is always n_keep on a model for which `can_roll_back` holds and a block of at most
        `max_draft` drafted tokens behind a first one.
        """
        held = len(self.tokens[seq])
        if n_keep >= held:
            return held
        if self._states is not None:
            return self._go_back(seq, max(0, n_keep))
        if n_keep <= 0 or not self._remove(seq, n_keep) or not self._window_intact(seq, n_keep):
            self._remove(seq, 0)
            n_keep = 0
        del self.tokens[seq][n_keep:]
        return n_keep

    def _go_back(self, seq: int, n_keep: int) -> int:
        """The same with a recurrent state."""
        assert self._states is not None
        done = len(self.tokens[seq]) - self._missing[seq]  # tokens that the state has seen
        if n_keep < done:
            done = self._states.back(seq, done, n_keep)
        n_keep, done = (n_keep, done) if done >= 0 else (0, 0)
        self._missing[seq] = n_keep - done
        del self.tokens[seq][n_keep:]
        return n_keep

    @property
    def max_draft(self) -> int:
        """Tokens of a block behind its first that may be refused, where a recurrent state sets a limit; else all."""
        kept = 0 if self._states is None else self._states.n_kept
        return kept or self.n_batch

    def _remove(self, seq: int, start: int) -> bool:
        return bool(native.lib().llama_memory_seq_rm(self._memory, seq, start, -1))

    def _window_intact(self, seq: int, n_keep: int) -> bool:
        if not self.model.n_swa:
            return True
        first = int(native.lib().llama_memory_seq_pos_min(self._memory, seq))
        return 0 <= first <= max(0, n_keep - self.model.n_swa)

    @property
    def can_roll_back(self) -> bool:
        """Whether refused tokens of a block can be taken back, found out once by trying on an empty sequence.

        A cache is trimmed. A recurrent state is brought back (snapshot.py), and what follows it must be what followed it the
        first time. A context of one token has no room to try, and none for a draft.
        """
        if self._can_roll_back is None:
            if self.n_ctx < (2 if self._states is None else 4):
                self._can_roll_back = self._states is None
            else:
                free = next((i for i, held in enumerate(self.tokens) if not held), None)
                if free is None:
                    return True
                with contextlib.suppress(NativeError):  # it noticed by itself that something is missing
                    self._can_roll_back = self._try_to_roll_back(free)
                self._can_roll_back = bool(self._can_roll_back)
                self.rollback(free, 0)
        return self._can_roll_back

    def _try_to_roll_back(self, free: int) -> bool:
        first = max(0, self.model.tokenizer.bos)
        if self._states is None:
            self.decode([(free, [first, first])])
            return self.rollback(free, 1) == 1
        other = [(first + i * (self.model.n_vocab // 3)) % self.model.n_vocab for i in (1, 2)]
        self.decode([(free, [first])])
        want = self.decode([(free, [first, *other])]).logits[1].copy()
        if self.rollback(free, 2) != 2:
            return False
        got = self.decode([(free, other[:1])]).logits[0]
        # rows of blocks of other sizes may be rounded otherwise; another state's row is far off
        return bool(np.abs(got - want).max() <= _ALIKE * np.abs(want).max())

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


def tree_lines(parents: Sequence[int] | np.ndarray) -> list[list[int]]:
    """The ways from the root of a tree to each leaf, that along first children first. Raises LocalspecError where that one
    is not 0, 1, 2, ... or a parent does not come before its child."""
    above = [int(parent) for parent in parents]
    if any(not -1 <= parent < i for i, parent in enumerate(above)):
        raise LocalspecError("a tree's parents must come before their children")
    lines = []
    for leaf in sorted(set(range(len(above))) - set(above)):
        line = [leaf]
        while above[line[-1]] >= 0:
            line.append(above[line[-1]])
        lines.append(line[::-1])
    if lines[0] != list(range(len(lines[0]))):
        raise LocalspecError("a tree's first tokens must be its line of first children")
    return lines
