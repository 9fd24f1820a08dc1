"""Before hours of training: can this target be tapped and rolled back, what does verification cost here, how many tokens per
verify must a draft give before anything is gained, and is there room for the checkpoints?"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from localspec import llama_arch
from localspec.curve import Child, Curve, measure_curves
from localspec.errors import LocalspecError, TrainError
from localspec.gguf_file import GGUFFile
from localspec.pairing import rollback_of

#: A small draft step's own time beside its weights', in milliseconds: on native/draft it is little (docs/LOG.md).
STEP_OVERHEAD = 0.05
#: Bytes a quantised weight takes (Q8_0), and what each parameter takes in checkpoints: exported twice over in `last` and
#: `best`, and once with its optimiser's state, and the one being written beside the one there.
QUANTISED, ON_DISK = 1.06, 40
#: Tokens per verify of a good small draft at so many drafted tokens, here and in publications: more is not to be hoped for.
HOPE = {1: 1.7, 2: 2.2, 3: 2.6, 4: 2.9, 5: 3.1}


@dataclass
class Findings:
    """Lines for a person, and warnings among them."""

    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def needed(curve: Curve, draft_ms: float) -> dict[int, float]:
    """For each number k of drafted tokens the tokens per verify at which decoding is as fast as without a draft:
    (t(k + 1) + k * draft_ms) / t(1)."""
    return {n - 1: (ms + (n - 1) * draft_ms) / curve.ms[0] for n, ms in zip(curve.n, curve.ms) if n > 1}


def measure(target: Path, depth: int, rounds: int = 5, n_threads: int = 0) -> Curve:
    """What verifying 1 to `depth` drafted tokens costs here, in a process of its own: llama.cpp binds its threads.
    `n_threads` 0: one per core. Raises LocalspecError where it can't be measured."""
    sizes = tuple(range(1, depth + 2))
    arguments = ["curve", "-m", str(target), "--serve", "--sizes", ",".join(map(str, sizes)), "-t", str(n_threads)]
    with Child(arguments) as child:
        return measure_curves({"here": (sizes, child.round)}, rounds)["here"]


def about_target(gguf: GGUFFile, taps: Sequence[int] | None, found: Findings) -> None:
    """Taps and rolling back. `taps` None: the speculator reads none."""
    how, in_words = rollback_of(gguf)
    if how == "snapshot":
        found.warnings.append(f"refused drafts cost more than on other models: {in_words}")
    if taps is None:
        return
    beyond = gguf.architecture in llama_arch.NEXTN_STATES  # the state that a next-token head reads
    if taps and max(taps) > gguf.n_layer + beyond:
        found.warnings.append(f"tap {max(taps)} does not exist: the target has taps 0 to {gguf.n_layer}")
    direct = gguf.architecture in llama_arch.LAYER_INPUTS
    how = "by llama.cpp's own interface" if direct else "through the graph's eval callback"
    found.lines.append(f"hidden states of a {gguf.architecture} model can be read {how}")
    if not direct:
        found.warnings.append(
            f"stock llama.cpp can't tap a {gguf.architecture} graph: the draft will run in localspec only"
            + (" (localspec convert --as-llama rewrites the target)" if gguf.architecture == "qwen2" else "")
        )


def about_gain(curve: Curve, target_bytes: int, draft_parameters: int, found: Findings) -> None:
    """Costs and what must be accepted. The draft's own time is estimated by its bytes beside the target's."""
    draft_ms = curve.ms[0] * draft_parameters * QUANTISED / target_bytes + STEP_OVERHEAD
    need = needed(curve, draft_ms)
    costs = "  ".join(f"{n}: {ratio:.2f}" for n, ratio in zip(curve.n, curve.ratio) if n > 1)
    found.lines.append(f"one token takes {curve.ms[0]:.1f} ms; a verification of n tokens, in decodes of one:  {costs}")
    wanted = "  ".join(f"{k}: {value:.2f}" for k, value in need.items())
    found.lines.append(f"with a draft step of {draft_ms:.1f} ms, tokens per verify must exceed, by drafted:  {wanted}")
    best = max(need, key=lambda k: (k + 1) / need[k])
    if (best + 1) / need[best] <= 1:
        found.warnings.append("nothing can be won on this machine: even a draft that is always right would be slower")
        return
    found.lines.append(f"a perfect draft would be {(best + 1) / need[best]:.2f}x as fast, at {best} drafted")
    if all(HOPE.get(k, 3.2) <= value for k, value in need.items()):
        found.warnings.append("a gain is unlikely here: good drafts of this size give fewer tokens per verify than needed")


def about_disk(out: Path, parameters: int, found: Findings) -> None:
    """Raises TrainError where the checkpoints would not fit."""
    place = out
    while not place.exists():
        place = place.parent
    free, wanted = shutil.disk_usage(place).free, parameters * ON_DISK
    if free < wanted:
        lack = (wanted - free) / 1e6
        raise TrainError(f"{place}: checkpoints take {wanted / 1e6:,.0f} MB and {lack:,.0f} MB are missing: make room")
    found.lines.append(f"checkpoints take up to {wanted / 1e6:,.0f} MB, {free / 1e6:,.0f} MB are free")


def preflight(
    gguf: GGUFFile, taps: Sequence[int] | None, depth: int, parameters: int, out: Path | None, curve: Curve | None = None,
    n_threads: int = 0,
) -> Findings:  # fmt: skip
    """All of it for a draft of so many `parameters` that drafts up to `depth` tokens; `curve` None: measure it now, with so
    many threads."""
    found = Findings()
    about_target(gguf, taps, found)
    if out is not None:
        about_disk(out, parameters, found)
    try:
        if curve is None:
            curve = measure(gguf.path, depth, n_threads=n_threads)
    except LocalspecError as error:
        found.warnings.append(f"the cost of verification can't be measured here: {error}")
    if curve is not None:
        about_gain(curve, gguf.size, parameters, found)
    return found
