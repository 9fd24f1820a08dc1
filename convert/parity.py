"""Whether a converted draft is the one that was trained: the same texts through PyTorch's reading of the checkpoint and
through the file as `localspec run` reads it.

Two things are compared. The logits after every pair, which find a tensor that was mixed up, a rotation of the wrong kind, a
flag that was lost. And how many drafted tokens the text would keep, which finds a quantisation that costs too much. The
texts are a trainer's shards, or, without, a few that the target writes here and now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from localspec import native
from localspec.accept import Sampling
from localspec.convert import methods
from localspec.convert.checkpoint import Checkpoint
from localspec.convert.methods import Text
from localspec.data.shards import Shards
from localspec.engine import Engine, Request
from localspec.errors import ModelFileError, UsageError
from localspec.gguf_file import GGUFFile
from localspec.model import Model
from localspec.speculator import SpeculatorConfig, TargetIdentity
from localspec.target import SessionSettings, TargetSession
from localspec.template import ChatTemplate

#: relative error of a row of logits that rounding explains, by the types of the matrices; the median over rows is held to
#: it. A trained draft of SmolLM2 has 0.0001 in F16, 0.011 in Q8_0, 0.077 in Q4_0. Mixed up on purpose in Q4_0: 0.47
#: and 0.49 with the rotary order of q or k lost, 0.77 with the head a row off, 0.20 with gate and up exchanged (found by its
#: acceptance), and 0.09 with the two input norms exchanged, which are alike: that is 0.05 in F16 and Q8_0, found only there.
LOOSE = {"F32": 0.01, "F16": 0.01, "Q8_0": 0.04}
LOOSE_BELOW = 0.35  # 4 to 6 bits; Q4_0 of random weights has 0.24
#: how far acceptance may be from the simulated one: 2 points
MOST_POINTS = 0.02
N_TOKENS = 6000
N_CHAINS = 1500
#: logits of one text at once, in numbers: half a gigabyte on either side
N_LOGITS = 1 << 27
N_WRITTEN = 100
PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number, then explain it.",
    "Tell me about the water cycle in five sentences.",
    "A train travels 60 miles in 1.5 hours. How far does it go in 4 hours? Think step by step.",
    "Write a short story about a lighthouse keeper and a storm.",
    "List ten things to pack for a camping trip and say why each is useful.",
    "Write a polite email that asks a colleague to move a meeting to Friday.",
)


@dataclass(frozen=True, slots=True)
class Parity:
    """What was found. `error` is the median relative error of a row of logits, `same` the share of rows with the same
    likeliest token; acceptances are kept / drafted over `n_chains` chains of `depth` tokens."""

    n_rows: int
    n_chains: int
    depth: int
    error: float
    same: float
    simulated: float
    real: float

    def summary(self) -> str:
        """One line."""
        return (
            f"parity: logits differ by {self.error:.2%} (median of {self.n_rows} rows), same first choice in "
            f"{self.same:.1%}; "
            f"acceptance {self.real:.1%}, simulated {self.simulated:.1%} ({self.n_chains} drafts of {self.depth})"
        )


def check(
    checkpoint: Path, draft: Path, target: Path, data: Path | None = None, name: Path | None = None,
    allow_pickle: bool = False,
) -> Parity:
    """Compare the draft in `checkpoint` with its file `draft`, which messages call `name`. Raises ModelFileError where they
    differ by more than rounding explains, UsageError where there is nothing to compare on."""
    name = name or draft
    found = measure(checkpoint, draft, target, data, allow_pickle)
    file = GGUFFile.open(draft, "draft")
    kind = file.tensors[methods.find(SpeculatorConfig.from_gguf(file).method).MAIN_TENSOR].type
    loose = LOOSE.get(kind, LOOSE_BELOW)
    if not found.error <= loose:
        raise ModelFileError(
            f"{name} would not be the draft in {checkpoint}: its logits differ by {found.error:.1%}, where {kind} explains "
            f"{loose:.0%} ({found.summary()})"
        )
    if not abs(found.real - found.simulated) <= MOST_POINTS:
        raise ModelFileError(
            f"{name} would draft otherwise than {checkpoint}: acceptance {found.real:.1%}, simulated {found.simulated:.1%}; "
            f"convert it to another type than {kind}, such as q8_0 ({found.summary()})"
        )
    return found


def measure(
    checkpoint: Path, draft: Path, target: Path, data: Path | None = None, allow_pickle: bool = False
) -> Parity:
    """The comparison without its judgement."""
    theirs, ours = GGUFFile.open(target, "target"), GGUFFile.open(draft, "draft")
    source = Checkpoint.open(checkpoint, allow_pickle)
    config = source.config(theirs)
    method = methods.find(config.method)
    texts = from_shards(data, theirs) if data is not None else written_here(target, config.taps)
    if data is not None and getattr(method, "EXACT_STATES", False):
        texts = read_again(target, config.taps, texts)
    depth = max(1, min(config.depth, 4))
    errors: list[float] = []
    same: list[bool] = []
    kept = {"torch": 0, "file": 0}
    n_chains = 0
    reads = SpeculatorConfig.from_gguf(ours).taps
    if set(reads) != set(config.taps):
        raise ModelFileError(f"{draft} reads the taps {list(reads)}, {checkpoint} {list(config.taps)}; convert it again")
    trained = method.trained(source, config, theirs)
    written = method.written(ours, theirs)
    for text in texts:
        starts = chain_starts(text)
        starts = starts[:: 1 + len(starts) * (config.draft_vocab or config.target.n_vocab) // N_LOGITS]
        if n_chains >= N_CHAINS or not len(starts):
            continue
        n_chains += len(starts)
        wanted, accepted = trained.roll_out(in_order(text, config.taps), starts, depth)
        kept["torch"] += int(accepted.sum())
        logits, accepted = written.roll_out(in_order(text, reads), starts, depth)
        kept["file"] += int(accepted.sum())
        errors.extend(np.linalg.norm(logits - wanted, axis=1) / np.linalg.norm(wanted, axis=1))
        same.extend(logits.argmax(1) == wanted.argmax(1))
    written.close()
    trained.close()
    if not n_chains:
        raise UsageError(f"{data or 'the texts written here'}: nothing that the target said, so nothing to compare on")
    drafted = n_chains * depth
    return Parity(
        len(errors), n_chains, depth, float(np.median(errors)), float(np.mean(same)), kept["torch"] / drafted,
        kept["file"] / drafted,
    )  # fmt: skip


def in_order(text: Text, taps: Sequence[int]) -> Text:
    """The text with its states, which ascend by tap, in the order in which a draft reads them."""
    order = [sorted(taps).index(tap) for tap in taps]
    if order == sorted(order):
        return text
    n = len(text.taps)
    return replace(text, taps=text.taps.reshape(n, len(order), -1)[:, order].reshape(n, -1))


def chain_starts(text: Text) -> npt.NDArray[np.int64]:
    """Places of known tokens, the second one or later, whose next token the target chose."""
    starts: npt.NDArray[np.int64] = np.flatnonzero(text.said) - 1
    return starts[starts >= 1]


def _with_states(session: TargetSession, slot: int, tokens: list[int], n_prompt: int) -> Text:
    rows: list[npt.NDArray[np.float32]] = []

    def keep(_first: int, piece: npt.NDArray[np.float32]) -> None:
        rows.append(piece.reshape(len(piece), -1).copy())

    if session.settings.taps:
        session.prefill(slot, tokens, tapped=keep)
    taps = np.concatenate(rows) if rows else np.zeros((len(tokens), 0), np.float32)
    return Text(np.array(tokens, np.int32), taps, np.arange(len(tokens)) >= n_prompt)


def from_shards(folder: Path, target: GGUFFile) -> list[Text]:
    """Texts of training data, those held out of training first. Raises DataError for another target's."""
    shards = Shards.open(folder, TargetIdentity.of(target))
    texts, n = [], 0
    for i in range(len(shards) - 1, -1, -1):
        sample = shards.sample(i)
        texts.append(Text(sample.tokens, sample.taps.reshape(len(sample.tokens), -1), sample.mask > 0))
        n += len(sample.tokens)
        if n >= N_TOKENS:
            break
    return texts


def read_again(target: Path, taps: Sequence[int], texts: Sequence[Text]) -> list[Text]:
    """The texts with states as the target gives them, not as the shards keep them, which is rounded."""
    native.use_kernels("auto")
    with Model(target) as model:
        n_ctx = max(len(text.tokens) for text in texts)
        with TargetSession(model, SessionSettings(n_ctx, 1, n_threads=1, taps=tuple(taps))) as session:
            found = []
            for text in texts:
                session.rollback(0, 0)
                found.append(replace(_with_states(session, 0, text.tokens.tolist(), 0), said=text.said))
    return found


def written_here(target: Path, taps: Sequence[int]) -> list[Text]:
    """What the target answers to a few prompts, greedily, with its states."""
    native.use_kernels("auto")
    texts: list[Text] = []
    with Model(target) as model:
        # One thread: on a machine that trains meanwhile, two spend their time waiting for each other.
        settings = SessionSettings(min(512, model.n_ctx_train or 512), len(PROMPTS), n_threads=1, taps=tuple(taps))
        with TargetSession(model, settings) as session:
            template = ChatTemplate.of(model)
            engine = Engine(session)
            starts: dict[int, int] = {}
            for prompt in PROMPTS:
                asked = [{"role": "user", "content": prompt}]
                start = template.encode(asked) if template else model.tokenizer.encode(prompt)
                starts[engine.start(Request(start, Sampling(temperature=0), N_WRITTEN))] = len(start)
            written: dict[int, list[int]] = {}
            while len(written) < len(starts):
                for step in engine.step():
                    if step.stop is not None:
                        written[step.slot] = engine.tokens(step.slot)
                        engine.finish(step.slot)
            for slot, tokens in written.items():
                session.rollback(slot, 0)
                texts.append(_with_states(session, slot, tokens, starts[slot]))
    return texts

