"""Taps: hidden states read from the target in the pass that computes them. Tap i is the state after i layers.

Two ways. Graphs that mark their layers' inputs hand them over through llama.cpp's own (unstable) interface, i < n_layer.
Elsewhere, and after the last layer, the context's eval callback is asked for every node of the graph and copies the ones
called ``l_out-<i - 1>``; that works on nearly every architecture, from i = 1 on.

Beyond the last layer stands the state that a next-token (MTP) head reads, counted as tap n_layer + 1; llama.cpp gives it on
graphs that were made for such heads, and on Gemma 4 it is the state after the last norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec import llama_arch, native
from localspec.errors import NativeError, UsageError
from localspec.model import Model
from localspec.passes import passes

F32 = npt.NDArray[np.float32]


def default_taps(n_layer: int) -> tuple[int, ...]:
    """An early, a middle and a late one (EAGLE-3, Li et al., 2025, section 3.1): exactly three, ascending."""
    if n_layer < 3:
        raise UsageError(f"a target of {n_layer} layers has not three different taps: name them with --taps")
    low = min(2, n_layer - 3)
    high = max(n_layer - 3, low + 2)
    return low, min(max(n_layer // 2, low + 1), high - 1), high


def check_taps(taps: Sequence[int], model: Model) -> tuple[int, ...]:
    """The taps, ascending. Raises UsageError for one that the target has not."""
    wanted = tuple(sorted(set(taps)))
    if len(wanted) != len(taps):
        raise UsageError(f"--taps {','.join(map(str, taps))}: one is named twice")
    for tap in wanted:
        if tap == model.n_layer + 1 and _has_nextn(model):
            continue
        if not 0 <= tap <= model.n_layer:
            raise UsageError(f"--taps {tap}: {model.path.name} has taps 0 (embeddings) to {model.n_layer}")
        if tap == 0 and not _by_input(model, 0):
            raise UsageError(f"--taps 0: a {model.gguf.architecture} graph gives its states from tap 1 on")
    return wanted


def _by_input(model: Model, tap: int) -> bool:
    """Whether llama.cpp hands over this tap itself. On a graph that doesn't mark its inputs, asking aborts the process."""
    return tap < model.n_layer and model.gguf.architecture in llama_arch.LAYER_INPUTS and native.layer_inputs() is not None


def _has_nextn(model: Model) -> bool:
    return model.gguf.architecture in llama_arch.NEXTN_STATES and native.nextn_states() is not None


class Taps:
    """The taps of one context. Make it before the context: `prepare` its parameters, then `attach` it."""

    def __init__(self, model: Model, taps: Sequence[int], n_batch: int):
        self.taps = check_taps(taps, model)
        self._model = model
        self._by_input = [tap for tap in self.taps if _by_input(model, tap)]
        named = [tap for tap in self.taps if tap not in self._by_input and tap <= model.n_layer]
        self._by_name = {f"l_out-{tap - 1}".encode(): tap for tap in named}
        self._rows = np.empty((n_batch, len(self.taps), model.n_embd), np.float32)
        self._pieces: dict[int, list[F32]] = {tap: [] for tap in self._by_name.values()}
        self._callback: Any = None
        self._handle: Any = None
        #: whether the decodes to come are read; where they are not, the callback lets the graph run in one piece
        self.on = True

    @property
    def needs_every_row(self) -> bool:
        """Whether only rows with logits have all taps: llama.cpp drops the others inside the last layer."""
        return self._model.n_layer in self.taps

    def prepare(self, params: Any) -> None:
        """Put the callback, where one is needed, into a context's parameters."""
        if self._by_name:
            self._callback = native.eval_callback(lambda name: self.on and name in self._by_name, self._take)
            params.cb_eval = self._callback

    def attach(self, handle: Any) -> None:
        """Ask a new context for the inputs of its layers."""
        self._handle = handle
        for tap in self._by_input:
            native.ask_layer_input(handle, tap)
        if self._model.n_layer + 1 in self.taps:
            native.ask_nextn(handle, every_row=True)

    def clear(self) -> None:
        """Forget what the last decode gave; before each decode."""
        for pieces in self._pieces.values():
            pieces.clear()

    def _take(self, name: bytes, rows: F32) -> None:
        self._pieces[self._by_name[name]].append(rows)

    def read(self, blocks: Sequence[tuple[int, int]]) -> F32:
        """f32[m, T, H] of the last decode, of blocks (seq, tokens) that were all given at once. Valid until the next.

        Raises NativeError where the graph did not give a tap.
        """
        n = sum([length for _, length in blocks])
        width = self._model.n_embd
        out = self._rows[:n]
        if len(self._by_input) == len(self.taps):
            native.layer_input(self._handle, self.taps, n, out)
            return out
        order: npt.NDArray[np.int64] | None = None
        for column, tap in enumerate(self.taps):
            if tap in self._by_input:
                native.layer_input(self._handle, (tap,), n, out[:, column : column + 1])
                continue
            if tap > self._model.n_layer:
                out[:, column] = native.nextn_rows(self._handle, n, width)
                continue
            pieces = self._pieces[tap]
            if sum(map(len, pieces)) != n or any(piece.shape[1] != width for piece in pieces):
                got = [list(piece.shape) for piece in pieces]
                raise NativeError(
                    f"{self._model.path}: tap {tap} can't be read from a {self._model.gguf.architecture} graph "
                    f"(wanted {n} rows of {width}, it gave {got or 'none'})"
                )
            if len(pieces) == 1:
                out[:, column] = pieces[0]
            else:
                order = order_of(blocks) if order is None else order
                out[order, column] = np.concatenate(pieces)
        return out


def order_of(blocks: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """Where in the batch each row stands that llama.cpp computed, in its order of computing."""
    starts = np.concatenate([[0], np.cumsum([length for _, length in blocks])])
    spans = [(starts[i] + a, starts[i] + b) for one in passes(blocks) for i, a, b in one]
    return np.concatenate([np.arange(a, b) for a, b in spans])
