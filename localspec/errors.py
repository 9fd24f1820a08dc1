"""Every exception that localspec raises on purpose.

One small tree: code below ``cli/`` raises these and never prints; ``cli/`` alone turns them into one line on standard
error and exit code 2. A message says what is wrong, where, and what to do about it.
"""

from __future__ import annotations


class LocalspecError(Exception):
    """Base of all errors that a person can do something about. ``str(error)`` is one line."""


class ModelFileError(LocalspecError):
    """A file that can't be used as a model: missing, truncated, not GGUF, an adapter, an unknown architecture."""


class PairingError(LocalspecError):
    """Two models that can't work together, or a draft of a kind that has no drafter yet."""


class UsageError(LocalspecError):
    """A setting out of range, or settings that contradict each other."""


class FetchError(LocalspecError):
    """A file that could not be fetched from the hub or the package index."""


class ContextFullError(LocalspecError):
    """The prompt alone does not fit into the context."""


class NativeError(LocalspecError):
    """A native library is missing, of the wrong version, or refused the work."""


class DataError(LocalspecError):
    """Training data that is missing, damaged, made for another target, or empty where it must not be."""


class TrainError(LocalspecError):
    """Training that can't start or go on: a setting out of range, a loss that is not finite, a checkpoint that misfits."""
