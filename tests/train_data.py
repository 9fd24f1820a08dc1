"""Small shards for tests of training: texts with a rule that a tiny draft can learn in seconds, and states to learn from."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np

from localspec.data.shards import Manifest, Sample
from localspec.data.writer import ShardWriter
from localspec.gguf_file import GGUFFile
from localspec.speculator import TargetIdentity
from tests import gguf_maker

TAPS = (0, 1, 2)
K = 4
WORDS = 40  # tokens 100 to 139 follow each other by a fixed rule; now and then a random one


def target(folder: Path) -> Path:
    """A two-layer llama of width 64 with 320 tokens."""
    return gguf_maker.tiny_llama(folder / "target.gguf")


def sample(rng: np.random.Generator, rule: np.ndarray, states: np.ndarray, n: int, source: str) -> Sample:
    """`n` tokens, the first eight of them a prompt. States are fixed vectors of the token and the one before."""
    tokens = [100 + int(rng.integers(WORDS))]
    while len(tokens) < n:
        odd = rng.random() < 0.1
        tokens.append(100 + int(rng.integers(WORDS) if odd else rule[tokens[-1] - 100]))
    text = np.array(tokens, np.int32)
    mask = np.zeros(n, np.uint8)
    mask[8:] = 1
    before = np.concatenate([[100], text[:-1]])
    taps = np.concatenate([states[0][text - 100], states[1][before - 100], rng.normal(size=(n, states.shape[2]))], 1)
    taps[0] *= 1000  # as the first token's state is in real models
    rows = np.flatnonzero(mask)
    others = 140 + np.argsort(rng.random((len(rows), 100)), 1)[:, : K - 1]
    ids = np.concatenate([text[rows, None], others], 1).astype(np.int32)
    logits = np.log(np.tile([0.9, 0.03, 0.02, 0.01], (len(rows), 1))).astype(np.float32)
    taps = taps.reshape(n, len(TAPS), -1).astype(np.float32)
    return Sample(text, mask, taps, rows - 1, ids, logits, np.zeros(len(rows), np.float32), source)


def shards(folder: Path, target_file: Path, n_samples: int = 60, seed: int = 0, states: str = "f16") -> Path:
    """A directory of `n_samples` samples of 24 to 56 tokens, from two sources, two answers to each prompt."""
    gguf = GGUFFile.open(target_file)
    fixed = np.random.default_rng(5)
    rule, vectors = fixed.permutation(WORDS), fixed.normal(size=(2, WORDS, gguf.n_embd))
    rng = np.random.default_rng(seed)
    manifest = Manifest(asdict(TargetIdentity.of(gguf)) | {"file_hash": "0" * 64}, list(TAPS), states, K)
    writer = ShardWriter(folder, manifest, shard_tokens=1000)
    start = len(writer.done)
    for i in range(start, start + n_samples):
        made = sample(rng, rule, vectors, int(rng.integers(24, 56)), ("letters", "numbers")[i // 2 % 2])
        writer.add(made, f"prompt-{i // 2}#{i % 2}")
    writer.flush()
    return folder
