"""What can be shared: a draft as GGUF, a checkpoint, or shards of training data; read and checked before it is sent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from localspec import llama_arch
from localspec.data.shards import MANIFEST, Manifest, Shards
from localspec.errors import ModelFileError, UsageError
from localspec.gguf_file import GGUFFile, require_model
from localspec.pairing import check_pair, drafter_for
from localspec.speculator import CHECKPOINT_FILE, JSON_KEY, SpeculatorConfig, TargetIdentity

WEIGHTS = "model.safetensors"
#: a checkpoint's files; how a run is gone on with (trainer.pt) stays at home
CHECKPOINT_FILES = ("config.json", WEIGHTS, CHECKPOINT_FILE)
#: what localspec data --self needs to go on with a directory
SELF_PROMPTS = "prompts-self.jsonl"


@dataclass(frozen=True)
class Item:
    """One file to send: ``content`` where what is sent is not what lies at ``path``."""

    name: str
    path: Path
    content: bytes | None = None

    @property
    def n_bytes(self) -> int:
        return self.path.stat().st_size if self.content is None else len(self.content)


@dataclass(frozen=True)
class Artefact:
    """What is shared, and what its card tells.

    ``kind`` is "draft" (one GGUF), "checkpoint" or "data". ``method`` is the drafter that runs a draft ("lm" for an ordinary
    model), "" for data. ``target`` has n_layer 0 where any target with the same tokenizer will do. ``base_model`` is the
    hub's name of the target where a file tells it.
    """

    kind: str
    items: tuple[Item, ...]
    method: str
    target: TargetIdentity
    config: SpeculatorConfig | None = None
    quant: str = ""
    n_params: int = 0
    manifest: Manifest | None = None
    sources: Mapping[str, int] = field(default_factory=dict)
    base_model: str = ""

    @property
    def n_bytes(self) -> int:
        return sum(item.n_bytes for item in self.items)

    @property
    def repo_kind(self) -> str:
        """The hub's kind of repository for it."""
        return "dataset" if self.kind == "data" else "model"


def read(path: Path, target: GGUFFile | None = None) -> Artefact:
    """Find out what lies at ``path``, and whether it is whole. With ``target`` it must also fit that model, which then tells
    what a draft of somebody else's making does not.

    Raises UsageError, ModelFileError, DataError or PairingError.
    """
    if path.is_dir():
        if (path / MANIFEST).is_file():
            return _data(path, target)
        if not (path / WEIGHTS).is_file() and (path / "best" / WEIGHTS).is_file():
            path = path / "best"
        if (path / CHECKPOINT_FILE).is_file():
            return _checkpoint(path, target)
        inside = sorted(p.name for p in path.glob("*.gguf"))
        hint = f"; give a file in it, such as {inside[0]}" if inside else ""
        raise UsageError(
            f"{path} holds neither a checkpoint ({CHECKPOINT_FILE}) nor shards of localspec data ({MANIFEST}){hint}"
        )
    return _draft(path, target)


def _draft(path: Path, target: GGUFFile | None) -> Artefact:
    gguf = GGUFFile.open(path, "draft")
    require_model(gguf, "draft")
    method = drafter_for(gguf)
    if target is not None:
        require_model(target, "target")
        check_pair(target, gguf)
    items = (Item(path.name if path.name.lower().endswith(".gguf") else f"{path.name}.gguf", path),)
    facts: dict[str, Any] = {"quant": gguf.quant_label, "n_params": gguf.n_params, "base_model": _base_model(target)}
    if gguf.architecture not in llama_arch.DRAFT_HEADS:
        identity = TargetIdentity(target.name if target else "", "", 0, 0, gguf.vocab_size, gguf.tokenizer_hash())
        return Artefact("draft", items, method, identity, **facts)
    config = SpeculatorConfig.from_gguf(gguf)
    if JSON_KEY not in gguf.metadata:
        if target is None:
            raise UsageError(f"{path} does not say for which model it was made: give that as --target FILE")
        config = replace(config, target=TargetIdentity.of(target))
    return Artefact("draft", items, method, config.target, config, **facts)


def _checkpoint(folder: Path, target: GGUFFile | None) -> Artefact:
    for name in CHECKPOINT_FILES:
        if not (folder / name).is_file():
            raise ModelFileError(f"{folder} has no {name}: give a whole checkpoint's directory")
    config = SpeculatorConfig.load(folder)
    if target is not None:
        config.target.require(TargetIdentity.of(target), f"the checkpoint {folder}")
    items = tuple(Item(name, folder / name) for name in CHECKPOINT_FILES)
    return Artefact("checkpoint", items, config.method, config.target, config, base_model=_base_model(target))


def _data(folder: Path, target: GGUFFile | None) -> Artefact:
    shards = Shards.open(folder, TargetIdentity.of(target) if target is not None else None)
    shards.verify()
    manifest = shards.manifest
    sources: dict[str, int] = {}
    for source in shards.sources():
        sources[source] = sources.get(source, 0) + 1
    items = [Item(str(shard["file"]), folder / str(shard["file"])) for shard in manifest.shards]
    for item in items:
        if item.name != PurePath(item.name).name:
            raise UsageError(f"{folder / MANIFEST} names {item.name!r}, which lies elsewhere: make the data again")
    if (folder / SELF_PROMPTS).is_file():
        items.append(Item(SELF_PROMPTS, folder / SELF_PROMPTS))
    items.append(Item(MANIFEST, folder / MANIFEST, _public_manifest(manifest)))
    return Artefact(
        "data", tuple(items), "", manifest.identity, manifest=manifest, sources=sources, base_model=_base_model(target)
    )


def _public_manifest(manifest: Manifest) -> bytes:
    """The manifest without the folders of the machine that it was written on."""
    settings = dict(manifest.settings)
    if isinstance(settings.get("target_file"), str):
        settings["target_file"] = PurePath(settings["target_file"]).name
    return (json.dumps(asdict(replace(manifest, settings=settings)), indent=1) + "\n").encode()


def _base_model(target: GGUFFile | None) -> str:
    """The hub's name of the model that a GGUF was converted from, where the file tells it."""
    if target is None:
        return ""
    for key in ("general.source.huggingface.repository", "general.source.repo_url", "general.base_model.0.repo_url"):
        value = target.metadata.get(key)
        if isinstance(value, str):
            name = value.removeprefix("https://huggingface.co/").strip("/")
            if name.count("/") == 1 and ":" not in name:
                return name
    return ""


def target_tag(identity: TargetIdentity) -> str:
    """The tag by which what was made for one target is found: of its layers, width, vocabulary and tokenizer."""
    text = f"{identity.n_layer} {identity.n_embd} {identity.n_vocab} {identity.tokenizer_hash}"
    return "localspec-target-" + hashlib.sha256(text.encode()).hexdigest()[:16]


def tokenizer_tag(identity: TargetIdentity) -> str:
    """The tag of everything that speaks in the tokens of one tokenizer: by it small models are found, which draft for any
    target of their family."""
    return "localspec-tokenizer-" + identity.tokenizer_hash[:16]


def require_fit(target: GGUFFile, draft: Path) -> None:
    """Raise PairingError or ModelFileError unless the GGUF at ``draft`` can draft for ``target``, by a drafter of ours."""
    gguf = GGUFFile.open(draft, "draft")
    require_model(gguf, "draft")
    drafter_for(gguf)
    check_pair(target, gguf)
