"""From command-line choices to a loaded engine."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import click

from localspec import native, profile, rpc
from localspec.blocks import Controller, FixedBlock
from localspec.cli.interrupt import Interrupt
from localspec.cli.options import DRAFTERS, ModelChoice
from localspec.control import Adaptive
from localspec.control_tree import FixedTree, TreeChooser, TreesThatPay
from localspec.drafters import Drafter, DrafterSettings, TreeDrafter, load, split, taps
from localspec.engine import Engine
from localspec.errors import PairingError, UsageError
from localspec.gguf_file import GGUFFile
from localspec.llama_arch import SPEC_TYPES
from localspec.model import Model
from localspec.pairing import drafter_for, is_dspark, own_heads
from localspec.prior import DraftPrior
from localspec.shipped import shipped_draft, shipped_kinds
from localspec.target import TargetSession

#: llama.cpp's --spec-type -> ours of the same kind
LLAMA_CPP_NAMES = {theirs: ours for ours, theirs in SPEC_TYPES.items()}

#: sequence ids for the branches of draft trees, which cost a little memory each
TREE_BRANCHES = 16


def say(text: str) -> None:
    """A remark for the person, on standard error: never mixed into the text or JSON."""
    click.echo(f"localspec: {text}", err=True)


@dataclass(slots=True)
class Loaded:
    """A target ready to decode, with its drafter. Close it when done."""

    model: Model
    session: TargetSession
    drafter: Drafter | None
    draft_path: Path | None
    engine: Engine
    profile_key: profile.Key | None = None  # where costs are learnt: under what they are kept

    @property
    def kernels(self) -> str:
        """Which CPU kernels serve the target."""
        return native.kernels_in_use()

    def close(self) -> None:
        """Keep what was learnt of the costs, and free everything, the drafter first."""
        self._remember()
        if self.drafter is not None:
            self.drafter.close()
        self.session.close()
        self.model.close()

    def _remember(self) -> None:
        controller = self.engine.controller
        if self.profile_key is None or not isinstance(controller, Adaptive) or controller.steps < profile.ENOUGH_STEPS:
            return
        learnt = controller.learnt()
        draft = (self._draft_name(), learnt) if learnt is not None else None
        profile.store(self.profile_key, controller.decode.curve(profile.ENOUGH_SAMPLES), profile.RUN_WEIGHT, draft)
        self.profile_key = None

    def _draft_name(self) -> str:
        return profile.draft_name(self.drafter.name if self.drafter else "none", self.draft_path)


def target_path(choice: ModelChoice) -> Path:
    """The target's file: named, from the hub, or the default model (which is fetched, and said)."""
    if choice.hf:
        return _from_hub(choice.hf, "target")
    if choice.target:
        return Path(choice.target)
    return default_target()


def default_target() -> Path:
    """The default model, for a command that was given no --target; says so."""
    path = fetched_default_model()
    say(f"no --target given, using the default model {path.name}")
    return path


def fetched_default_model() -> Path:
    """The default model's file; where it has to be fetched, the person sees how far that is."""
    from localspec.cli.progress import download
    from localspec.default_model import default_model

    with download(say) as progress:
        return default_model(progress)


def _from_hub(spec: str, role: str) -> Path:
    from localspec.cli.progress import download
    from localspec.hub import resolve

    with download(say) as progress:
        return resolve(spec, role, progress)


def draft_path(choice: ModelChoice) -> Path | None:
    """The draft's file, if one is named."""
    if choice.hfd:
        return _from_hub(choice.hfd, "draft")
    return Path(choice.draft) if choice.draft else None


def open_target(
    choice: ModelChoice, path: Path, n_sequences: int = 1, drafter: str = "none", draft: DrafterSettings | None = None
) -> tuple[Model, TargetSession]:
    """Load the target from `path` and make its context, with the kernels that were asked for, and reading the hidden states
    that `drafter` needs."""
    if choice.rpc:
        rpc.use(choice.rpc)
    if choice.n_gpu_layers != 0 and not native.has_gpu():
        say("this build of llama.cpp has no GPU: --n-gpu-layers is without effect")
    reason = native.use_kernels(choice.kernels, choice.n_gpu_layers)
    if reason is not None:
        say(f"stock kernels serve: {reason}")
    own_head = drafter.endswith("mtp") and draft is not None and draft.draft_path is None
    model = Model(path, "target", choice.n_gpu_layers, choice.use_mmap, with_heads=own_head)
    kept = choice.n_max if draft is not None else 0
    read = taps(drafter, model.gguf, draft) if draft is not None else choice.session.taps
    n_branches = draft.n_branches if draft is not None else 0
    settings = replace(choice.session, n_sequences=n_sequences, taps=read, n_rollback=kept, n_branches=n_branches)
    return model, TargetSession(model, settings)


def drafter_name(choice: ModelChoice, draft: Path | None) -> str:
    """What --spec-type comes to. Raises PairingError for a draft or type that has no drafter, UsageError where the type
    and --draft contradict each other: before any model is loaded."""
    if choice.spec_type == "auto":
        return _with_ngram(drafter_for(GGUFFile.open(draft, "draft")), choice) if draft else "ngram"
    name, last = _named(choice)
    if name in ("none", "ngram") and draft:
        raise UsageError(f"--spec-type {choice.spec_type} needs no draft model: leave --draft out")
    if last not in ("none", "ngram", "mtp") and not draft:  # mtp: the head may lie in the target's own file
        raise UsageError(f"--spec-type {choice.spec_type} needs a draft model: give --draft FILE")
    if draft and last == "dspark" and not is_dspark(GGUFFile.open(draft, "draft")):
        raise PairingError(f"--spec-type {choice.spec_type}: {draft} is no DSpark draft: use --spec-type auto")
    return name


def pick(choice: ModelChoice, draft: Path | None, target: Path) -> tuple[str, Path | None]:
    """The drafter for `target` and its draft: the one named or, where none is, the one that comes with localspec for this
    target, if it is of the kind asked for. Raises as `drafter_name` does."""
    if draft is None and choice.spec_type == "auto":
        gguf = GGUFFile.open(target, "target")
        draft = shipped_draft(gguf) if choice.n_max > 0 else None
        if draft is None and choice.n_max > 0 and own_heads(gguf)[0]:
            return _with_ngram("mtp", choice), None
    elif draft is None and _named(choice)[1] in shipped_kinds():
        draft = shipped_draft(GGUFFile.open(target, "target"), _named(choice)[1])
    return drafter_name(choice, draft), draft


def _named(choice: ModelChoice) -> tuple[str, str]:
    """(the drafter that a --spec-type other than auto names, the last of its types). Raises PairingError where there is
    no such drafter."""
    given = choice.spec_type
    types = [LLAMA_CPP_NAMES.get(part, part) for part in given.split(",")]
    if types != ["none"] and not all(part in DRAFTERS for part in types):
        hint = "; a draft of the kind small is run by lm" if "small" in types else ""
        known = ", ".join(("auto", "none", *DRAFTERS))
        raise PairingError(f"--spec-type {given}: there is no such drafter; there are {known}, and ngram,TYPE{hint}")
    if len(types) > 1:
        types.sort(key=lambda part: part != "ngram")
        return ",".join(split(",".join(DRAFTERS[part] for part in types))), types[-1]
    return DRAFTERS.get(types[0], types[0]), types[0]


def _with_ngram(name: str, choice: ModelChoice) -> str:
    """The drafter `name`, asked where looking back finds nothing that is likelier to be kept: looking costs nothing, and
    code and answers about a text repeat much. Alone where it is to draft trees, which only it can."""
    return name if choice.trees != "off" else f"ngram,{name}"


def open_engine(choice: ModelChoice, n_sequences: int = 1) -> Loaded:
    """Load the pair, for `n_sequences` texts at once. Where the target can't be drafted for, says so and goes on plainly.

    Ctrl-C ends a download at once, and gets through a load when that is done: raised while llama.cpp calls its log, it
    would be lost. A second one ends a load at once, and the process with it.
    """
    draft = draft_path(choice)
    if draft or (choice.spec_type != "auto" and _named(choice)[1] not in shipped_kinds()):
        drafter_name(choice, draft)  # what can't be is said before the target is fetched
    target = target_path(choice)
    name, draft = pick(choice, draft, target)
    with Interrupt(leave=True) as interrupted:
        loaded = _open_engine(choice, target, draft, name, n_sequences)
    if interrupted():
        loaded.close()
        raise KeyboardInterrupt
    return loaded


def _open_engine(choice: ModelChoice, target: Path, draft: Path | None, name: str, n_sequences: int) -> Loaded:
    n_branches = TREE_BRANCHES if choice.trees != "off" and n_sequences == 1 else 0
    settings = DrafterSettings(
        draft, choice.rule, choice.p_min, choice.n_gpu_layers_draft, choice.session.n_threads, choice.use_mmap, n_branches
    )
    drafting = name != "none" and choice.n_max > 0
    model, session = open_target(choice, target, n_sequences, name, settings if drafting else None)
    drafter: Drafter | None = None
    if drafting:
        if session.can_roll_back:
            drafter = load(name, session, settings)
        else:
            say(
                f"no speculation: the memory of this {model.gguf.architecture} model can't be rolled back; decoding plainly"
            )
            draft = None
    key = profile_key(choice, model.gguf, session.n_threads) if drafter is not None and choice.adapt else None
    known = profile.load_draft(key, profile.draft_name(drafter.name, draft)) if key and drafter is not None else None
    controller = make_controller(choice, profile.load(key) if key else None, known)
    if n_sequences > 1:  # what was learnt there holds for passes of many texts, which `run` has not
        key = None
    trees = make_trees(choice, controller) if drafter is not None else None
    if trees is not None and not (isinstance(drafter, TreeDrafter) and session.n_branches):
        say(f"--spec-tree {choice.trees}: {_no_trees(drafter, session)}; drafting chains")
    return Loaded(model, session, drafter, draft, Engine(session, drafter, controller, choice.rule, trees), key)


def _no_trees(drafter: Drafter | None, session: TargetSession) -> str:
    """Why no trees are drafted."""
    if not isinstance(drafter, TreeDrafter):
        return f"the drafter {drafter.name if drafter else 'none'} has none"
    if session.model.n_swa:
        return "the target's attention has a sliding window, whose cache can't be shared by branches"
    return "there are several texts at a time"


def make_trees(choice: ModelChoice, controller: Controller) -> TreeChooser | None:
    """Whether to draft trees: where they pay, which an adaptive controller knows, always, or never."""
    if choice.trees == "off":
        return None
    return TreesThatPay(controller) if choice.trees == "auto" and isinstance(controller, Adaptive) else FixedTree()


def profile_key(choice: ModelChoice, target: GGUFFile, n_threads: int, kernels: str = "") -> profile.Key | None:
    """Under what the costs of `target` are kept, with the kernels in use or those named; None where its file has gone."""
    layers = choice.n_gpu_layers if native.has_gpu() else 0
    with contextlib.suppress(OSError):
        where = "-".join(("rpc", *choice.rpc)) if choice.rpc else ""
        return profile.Key.of(target, where or kernels or native.kernels_in_use(), n_threads, layers)
    return None


def make_controller(
    choice: ModelChoice, prior: Mapping[int, float] | None = None, known: DraftPrior | None = None
) -> Controller:  # fmt: skip
    """How many tokens to draft: as many as pay, or always n_max. `prior`: a profile's ratios, `known`: what it says of the
    draft."""
    return Adaptive(choice.n_max, prior, known) if choice.adapt else FixedBlock(choice.n_max)
