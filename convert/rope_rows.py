"""Rows of q and k for the two ways to rotate a head: its halves against each other (NEOX, Hugging Face's order), or its
neighbours (NORM, llama.cpp's order for llama and EAGLE-3)."""

from __future__ import annotations

import numpy as np

from localspec.errors import ModelFileError


def pairs_from_halves(weight: np.ndarray, n_head: int) -> np.ndarray:
    """Rows of q or k for rotations of neighbours (NORM), out of rows for rotations of halves (NEOX): within each head, row i
    of the first half and row i of the second become neighbours."""
    rows = weight.shape[0]
    if rows % (2 * n_head):
        raise ModelFileError(f"{rows} rows can't be {n_head} heads of an even size")
    return np.ascontiguousarray(
        weight.reshape(n_head, 2, rows // n_head // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def halves_from_pairs(weight: np.ndarray, n_head: int) -> np.ndarray:
    """The way back."""
    return np.ascontiguousarray(
        weight.reshape(n_head, len(weight) // n_head // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )
