"""What a run will come to, before it starts: tokens, disk and time; and whether the disk has room."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from localspec.data import states as codec
from localspec.data.jobs import Jobs
from localspec.data.mask import Renderer
from localspec.data.shards import Manifest
from localspec.errors import UsageError

#: Tokens of an answer where nothing is known yet, if as many are allowed.
_USUAL_ANSWER = 250
_LOOKED_AT = 64  # prompts made tokens of for the estimate
_KEPT_FREE = 1 << 28  # bytes that the rest of the system may want


@dataclass(frozen=True, slots=True)
class Plan:
    """What is expected: `n_tokens` with `n_answered` of the assistant's among them, bytes on disk, seconds (0: unknown)."""

    n_answers: int
    n_tokens: int
    n_answered: int
    n_bytes: int
    seconds: float = 0.0


def plan(jobs: Jobs, renderer: Renderer, manifest: Manifest, max_tokens: int, n_tokens: int) -> Plan:
    """By the prompts' lengths and those of the answers that are there already. `n_tokens`: stop at so many, 0: never."""
    n_answers = jobs.n_left
    if not n_answers:
        return Plan(0, 0, 0, 0)
    wanting = jobs.open()
    seen = wanting[:: max(1, len(wanting) // _LOOKED_AT)]
    prompt = sum(len(renderer.tokens(renderer.text(c.asked, c, True), c)) for c in seen) / len(seen)
    turns = sum(sum(m.role == "user" for m in c.messages) for c in seen) / len(seen)
    answer = manifest.n_masked / manifest.n_samples if manifest.n_samples else min(max_tokens, _USUAL_ANSWER) * turns
    total = n_answers * (prompt + answer)
    if n_tokens:
        total = min(total, max(0.0, n_tokens - manifest.n_tokens))
    answered = total * answer / (prompt + answer)
    return Plan(n_answers, round(total), round(answered), round(bytes_of(manifest, total, answered)))


def bytes_of(manifest: Manifest, n_tokens: float, n_answered: float) -> float:
    """Bytes that so many tokens take in shards, `n_answered` of them the assistant's."""
    wide = int(manifest.target["n_vocab"]) > 1 << 16
    state = codec.bytes_per_token(manifest.states, len(manifest.taps), int(manifest.target["n_embd"]))
    return n_tokens * (state + 5) + n_answered * (manifest.teacher_k * (6 if wide else 4) + 8)


def check_disk(folder: Path, n_bytes: int) -> None:
    """Raise UsageError that says how much is missing where `n_bytes` more would fill the disk."""
    at = folder.resolve()
    while not at.exists():
        at = at.parent
    free = shutil.disk_usage(at).free - _KEPT_FREE
    if n_bytes > free:
        raise UsageError(
            f"{folder}: about {n_bytes / 1e6:.0f} MB would be written and {max(0, free) / 1e6:.0f} MB can be: "
            f"{(n_bytes - max(0, free)) / 1e6:.0f} MB are missing; give fewer prompts, a lower --tokens, --states q4, or a "
            "directory on another disk"
        )
