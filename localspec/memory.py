"""How much memory a model needs at a context: weights, cache, and llama.cpp's working space, from metadata alone.

The cache follows llama.cpp's own allocation to the byte for ordinary and windowed attention. The working space is an
estimate: llama.cpp plans one buffer for the largest batch, and at its widest point it holds either the logits of every
row of that batch or one layer's activations. Measured against llama.cpp 0.3.36 on the CPU (MiB, estimate in brackets):
SmolLM2-135M 98 (98), gemma3-270m 516 (516), Qwen2.5-0.5B 301 (301), Qwen2.5-1.5B 303 (303). On a CPU llama.cpp may also
keep rearranged copies of Q4_K and similar weights (597 MiB for Qwen2.5-1.5B Q4_K_M); the mapped originals can then be
dropped by the system, so they are not counted twice here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from localspec import llama_arch
from localspec.errors import UsageError
from localspec.gguf_file import GGUFFile
from localspec.gguf_format import TENSOR_TYPES

_BYTES = {name.lower(): nbytes / block for name, block, nbytes in TENSOR_TYPES.values()}

# Every how many layers one sees everything, where the file doesn't say; a minus: the first of each group, not the last.
_WINDOW_PERIOD = {
    "gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2, "cohere2": 4, "exaone4": 4, "exaone-moe": 4, "olmo2": 4,
    "llama4": 4, "plamo3": 8, "afmoe": 4, "mellum": 4, "muse-glimmer": 4, "smallthinker": -4, "cohere2moe": -4,
    "laguna": -4,
}  # fmt: skip


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes. ``weights`` are mapped from the file; ``kv`` is the cache with any recurrent state; ``compute`` is an
    estimate of the working space, the logits included."""

    weights: int
    kv: int
    compute: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.compute


def memory_needed(
    gguf: GGUFFile, n_ctx: int, type_k: str = "f16", type_v: str = "f16", n_seq: int = 1, n_ubatch: int = 512
) -> MemoryNeed:
    """What ``n_seq`` sequences of ``n_ctx`` tokens each need, computed in batches of ``n_ubatch`` tokens.

    Raises UsageError for an unknown cache type, ModelFileError where the metadata contradicts itself.
    """
    for flag, name in (("-ctk", type_k), ("-ctv", type_v)):
        if name not in _BYTES:
            raise UsageError(f"{flag} {name!r} is no cache type; try f16, q8_0 or q4_0")
    weights = sum(t.nbytes for t in gguf.tensors.values())
    n_ctx = _pad(max(1, n_ctx))
    kv = _attention_cache(gguf, n_ctx, _BYTES[type_k], _BYTES[type_v], n_seq, n_ubatch)
    kv += recurrent_state(gguf) * n_seq
    return MemoryNeed(weights, kv, _compute(gguf, n_ctx, n_ubatch, n_seq))


def available_memory() -> int | None:
    """Bytes that this process can still take without swapping, the limit of its control group included; None where the
    system doesn't tell (only Linux does)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    try:
        group = Path("/sys/fs/cgroup")
        return min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no such group, or "max"
        return free


def windowed_layers(gguf: GGUFFile) -> list[bool]:
    """For each layer, whether it sees only the sliding window."""
    n = gguf.n_layer
    if not gguf.sliding_window:
        return [False] * n
    pattern = gguf.get(f"{gguf.architecture}.attention.sliding_window_pattern", (int, np.ndarray))
    if isinstance(pattern, np.ndarray):
        return [bool(pattern[i]) if i < len(pattern) else False for i in range(n)]
    period = pattern if pattern is not None else _WINDOW_PERIOD.get(gguf.architecture, 1)
    if period < 0:
        return [i % -period != 0 for i in range(n)]
    return [period == 0 or i % period < period - 1 for i in range(n)]


def recurrent_layers(gguf: GGUFFile) -> list[bool]:
    """For each layer, whether it keeps a state of fixed size."""
    n, arch = gguf.n_layer, gguf.architecture
    if arch in llama_arch.RECURRENT:
        return [True] * n
    if arch not in llama_arch.HYBRID:
        return [False] * n
    named = gguf.get(f"{arch}.attention.recurrent_layers", np.ndarray)
    if named is not None and len(named) >= n:
        return [bool(x) for x in named[:n]]
    heads = gguf.n_head_kv
    if 0 in heads:
        return [h == 0 for h in heads]
    interval = gguf.get(f"{arch}.full_attention_interval", int, 0)
    # Without either, layers have both kinds of memory (falcon-h1), or the file doesn't say which: count both.
    return [(i + 1) % interval != 0 for i in range(n)] if interval else [True] * n


def _pad(cells: int) -> int:
    return (cells + 255) // 256 * 256


def _attention_cache(gguf: GGUFFile, n_ctx: int, bytes_k: float, bytes_v: float, n_seq: int, n_ubatch: int) -> int:
    arch = gguf.architecture
    if arch in llama_arch.RECURRENT:
        return 0
    windowed, recurrent = windowed_layers(gguf), recurrent_layers(gguf)
    has_interval = 0 in gguf.n_head_kv or bool(gguf.arch("full_attention_interval"))
    # Latent attention (MLA) keeps one compressed row per token, keys and values in one.
    is_latent = gguf.arch("attention.key_length_mla") is not None
    n_own = gguf.n_layer - gguf.get(f"{arch}.attention.shared_kv_layers", int, 0)
    window_cells = _pad(min(n_ctx, gguf.sliding_window + n_ubatch))
    key, value = gguf.key_length, gguf.value_length
    key_window = gguf.get(f"{arch}.attention.key_length_swa", int, key)
    value_window = gguf.get(f"{arch}.attention.value_length_swa", int, value)
    total = 0.0
    for i, heads in enumerate(gguf.n_head_kv):
        if i >= n_own or (recurrent[i] and has_interval):
            continue
        k, v = (key_window, value_window) if windowed[i] else (key, value)
        row = heads * (k * bytes_k + (0 if is_latent else v * bytes_v))
        total += row * (window_cells if windowed[i] else n_ctx)
    return int(total) * n_seq


def recurrent_state(gguf: GGUFFile) -> int:
    """Bytes of state per sequence, f32. Exact for Mamba, RWKV and LFM2; about right for the others."""
    n_layers = sum(recurrent_layers(gguf))
    if not n_layers:
        return 0

    def number(key: str) -> int:
        return int(gguf.get(f"{gguf.architecture}.{key}", int, 0))

    inner, state, conv = number("ssm.inner_size"), number("ssm.state_size"), number("ssm.conv_kernel")
    heads, wkv, short = max(gguf.n_head, default=0), number("wkv.head_size"), number("shortconv.l_cache")
    kda = number("kda.head_dim")
    if wkv:
        row = gguf.n_embd * ((number("token_shift_count") or 2) + wkv)
    elif short:
        row = gguf.n_embd * (short - 1)
    elif kda:
        row = heads * kda * (3 * max(conv - 1, 3) + kda)
    elif inner:
        row = max(conv - 1, 0) * (inner + 2 * number("ssm.group_count") * state) + inner * state
    else:
        row = heads * gguf.key_length**2
    return 4 * row * n_layers


def _compute(gguf: GGUFFile, n_ctx: int, n_ubatch: int, n_seq: int) -> int:
    vocab, hidden = gguf.vocab_size, gguf.n_embd
    feed_forward = max(gguf.per_layer("feed_forward_length"), default=0)
    inner = gguf.get(f"{gguf.architecture}.ssm.inner_size", int, 0)
    logits = 4 * n_ubatch * (vocab + 2 * hidden)
    layer = 4 * n_ubatch * (4 * hidden + max(2 * feed_forward, 4 * inner)) + 2 * n_ubatch * n_ctx
    return max(logits, layer) + 4 * vocab * n_seq
