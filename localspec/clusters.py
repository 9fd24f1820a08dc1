"""The clustered head of Gemma 4 assistants: logits of the likeliest clusters' tokens instead of the whole vocabulary's.

Each cluster of tokens has a centroid. A state is held against the centroids first, and only against the tokens of those
that fit best then (masked_embedding in Gemma4AssistantForCausalLM of transformers; there the other tokens get less than the
least of these, here they are impossible). llama.cpp's graph multiplies with the whole head, and its loader takes no such
tensors. So they lie in the metadata, and mtp_context.py ends the graph before its head.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from localspec import native
from localspec.gguf_file import GGUFFile
from localspec.gguf_format import TENSOR_TYPES

F32 = npt.NDArray[np.float32]

TOP, CENTROIDS, ORDERING = (f"localspec.clusters.{name}" for name in ("top", "centroids", "ordering"))
#: Bytes of a whole head below which our kernels read it as quickly as the clusters are found (docs/LOG.md).
WORTH = 40 << 20

_TYPE_NUMBERS = {name: number for number, (name, _, _) in TENSOR_TYPES.items()}


class Rows:
    """Rows of a matrix in a file, as floats when they are asked for."""

    def __init__(self, file: GGUFFile, name: str):
        info = file.tensors.get(name)
        if info is None or len(info.shape) != 2:
            raise file.error(f"has no matrix {name}")
        self.width, self.n = info.shape
        self._raw = np.frombuffer(file.tensor_bytes(name), np.uint8).reshape(self.n, -1)
        address = native.to_float_address(_TYPE_NUMBERS[info.type])
        if info.type != "F32" and not address:
            raise file.error(f"has {name} of the type {info.type}, which can't be read row by row")
        convert = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        self._to_float = convert(address) if address else None

    def __getitem__(self, which: npt.NDArray[np.int64] | slice) -> F32:
        raw = np.ascontiguousarray(self._raw[which])
        if self._to_float is None:
            return raw.view(np.float32)
        out = np.empty((len(raw), self.width), np.float32)
        self._to_float(raw.ctypes.data, out.ctypes.data, out.size)
        return out


class ClusteredHead:
    """Of one assistant. Raises ModelFileError where its clusters don't fit its vocabulary."""

    def __init__(self, draft: GGUFFile):
        self._tokens = Rows(draft, "token_embd.weight")
        self._wide = Rows(draft, "nextn.post_projection.weight")[:]  # f32[H, E]
        n, width = self._tokens.n, self._tokens.width
        centroids = draft.get(CENTROIDS, np.ndarray, np.zeros(0, np.float32))
        ordering = draft.get(ORDERING, np.ndarray, np.zeros(0, np.int32))
        top = draft.get(TOP, int, 0)
        n_clusters = centroids.size // width
        fits = n_clusters > 0 and centroids.size == n_clusters * width and n % n_clusters == 0 and 0 < top <= n_clusters
        if not fits or not np.array_equal(np.sort(ordering), np.arange(n)):
            raise draft.error("has clusters that don't fit its vocabulary; convert it again")
        self._centroids: F32 = centroids.astype(np.float32).reshape(n_clusters, width)
        self._members = ordering.astype(np.int64).reshape(n_clusters, -1)  # ids of each cluster
        self._top = top

    @classmethod
    def of(cls, draft: GGUFFile, worth: int | None = None) -> ClusteredHead | None:
        """The head of this file; None where it has none, or too small a vocabulary for it to pay (`worth`: bytes)."""
        info = draft.tensors.get("token_embd.weight")
        if CENTROIDS not in draft.metadata or info is None or info.nbytes < (WORTH if worth is None else worth):
            return None
        return cls(draft)

    def logits(self, states: F32) -> F32:
        """f32[m, V] for states f32[m, E] after the last norm; tokens of other clusters are impossible (-inf)."""
        out = np.full((len(states), self._tokens.n), -np.inf, np.float32)
        for row, state in zip(out, states):
            scores = self._centroids @ state
            best = np.argpartition(scores, -self._top)[-self._top :]
            ids = self._members[best].reshape(-1)
            row[ids] = self._tokens[ids] @ state
        return out

    def widened(self, states: F32) -> F32:
        """f32[m, H]: the states that the next step reads."""
        product: F32 = states @ self._wide.T
        return product
