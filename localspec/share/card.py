"""The card of what is shared: a README.md of YAML front matter, by which the hub's search finds it, and a text for people.

Everything in it comes from the files themselves.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from localspec.blocks import DEFAULT_N_MAX
from localspec.share.artefact import CHECKPOINT_FILES, MANIFEST, Artefact, target_tag, tokenizer_tag

CARD = "README.md"
#: in every card that was written here: only such a one is replaced without being asked
MARK = "<!-- Written by localspec push, which replaces this text; remove this line to keep your own. -->"
TAG = "localspec"
#: the front matter's key for what `localspec pull --for` reads
KEY = "localspec"
_FORMAT = 1

#: what YAML takes for the name of a key, and nothing else: on, off, yes, no, null and the like are shorter or quoted
_PLAIN = re.compile(r"(?!(?:null|true|false)$)[a-z_]{4,}")

Rows = list[tuple[str, str]]


def tags(artefact: Artefact) -> list[str]:
    """The hub's tags of a thing: of localspec, of what it is, of its target, and of the target's tokenizer."""
    kind = {"draft": "draft", "checkpoint": "checkpoint", "data": "data"}[artefact.kind]
    own = [TAG, f"{TAG}-{kind}"] + ([f"{TAG}-{artefact.method}"] if artefact.method else [])
    if artefact.kind != "data":
        own.append("speculative-decoding")
    return own + ([target_tag(artefact.target)] if artefact.target.n_layer else []) + [tokenizer_tag(artefact.target)]


def metadata(artefact: Artefact, licence: str = "", base_model: str = "") -> dict[str, Any]:
    """The front matter: the hub's own keys, and under `KEY` what a search shows and compares."""
    target = artefact.target
    about: dict[str, Any] = {"format": _FORMAT, "kind": artefact.kind}
    if artefact.method:
        about["method"] = artefact.method
    if artefact.kind == "draft":
        about["file"] = artefact.items[0].name
    about["bytes"] = artefact.n_bytes
    about["target"] = {
        "name": target.name,
        "layers": target.n_layer,
        "width": target.n_embd,
        "vocabulary": target.n_vocab,
        "tokenizer": target.tokenizer_hash,
    }
    evaluation = _evaluation(artefact)
    if evaluation:
        about["tokens_per_verify"] = evaluation["tokens_per_verify"]
        about["drafted"] = evaluation.get("n_max", 0)
        about["by_source"] = {name: part["tokens_per_verify"] for name, part in _by_source(evaluation).items()}
    keys: dict[str, Any] = {"tags": tags(artefact)}
    if licence:
        keys["license"] = licence
    base_model = base_model or artefact.base_model
    if base_model and artefact.repo_kind == "model":
        keys["base_model"] = base_model
    return keys | {KEY: about}


def card(artefact: Artefact, repo: str, licence: str = "", base_model: str = "") -> str:
    """The whole README.md for ``artefact`` in the repository ``repo``."""
    body = {"draft": _draft, "checkpoint": _checkpoint, "data": _data}[artefact.kind](artefact, repo)
    licence_line = f"\nLicence: {licence}\n" if licence else ""
    return f"{front_matter(metadata(artefact, licence, base_model))}{MARK}\n\n{body}{licence_line}"


def is_ours(text: str) -> bool:
    """Whether a README was written here, and not by hand since."""
    return MARK in text


def front_matter(keys: Mapping[str, Any]) -> str:
    """Keys as a YAML block between ``---`` lines. Texts are written as JSON has them, which YAML reads as they are."""
    return "---\n" + "\n".join(_yaml(keys, "")) + "\n---\n"


def _yaml(value: Mapping[str, Any], indent: str) -> list[str]:
    lines = []
    for key, inner in value.items():
        name = key if _PLAIN.fullmatch(key) else _scalar(key)
        if isinstance(inner, Mapping) and inner:
            lines += [f"{indent}{name}:", *_yaml(inner, indent + "  ")]
        elif isinstance(inner, list) and inner:
            lines += [f"{indent}{name}:", *(f"{indent}- {_scalar(item)}" for item in inner)]
        else:
            lines.append(f"{indent}{name}: {_scalar(inner)}")
    return lines


def _scalar(value: Any) -> str:
    # Escaped only where it must be: YAML does not join the two halves in which JSON escapes what lies beyond 16 bits.
    return json.dumps(value, ensure_ascii=isinstance(value, str) and not value.isprintable())


# -- texts for people --------------------------------------------------------------------------------------------------


def _draft(artefact: Artefact, repo: str) -> str:
    name, target = artefact.items[0].name, artefact.target
    whose = _cell(target.name) or "any model with its tokenizer"
    what = "A small model as draft" if artefact.method == "lm" else f"A draft ({artefact.method})"
    rows: Rows = [
        ("file", f"`{name}`, {artefact.n_bytes:,} bytes, {artefact.quant}, {_millions(artefact.n_params)} parameters"),
        *_identity_rows(artefact),
        *_shape_rows(artefact),
        *_training_rows(artefact),
    ]
    spec_type = "draft-simple" if artefact.method == "lm" else f"draft-{artefact.method}"
    return "\n".join([
        f"# {name.removesuffix('.gguf')}",
        "",
        f"{what} for {whose}, for speculative decoding with localspec or llama.cpp. It can only make that model faster, "
        "never change what it writes: every token is checked by the target.",
        "",
        *_table(rows),
        *_acceptance(artefact),
        *_commands(
            ["localspec", "run", "--target", "TARGET.gguf", "-hfd", f"{repo}:{name}", "-p", "Hello"],
            ["localspec", "pull", f"{repo}:{name}", "-o", "."],
            ["llama-server", "-m", "TARGET.gguf", "-md", name, "--spec-type", spec_type,
             "--spec-draft-n-max", str(DEFAULT_N_MAX)],
        ),
        "",
        "`localspec pull --for TARGET.gguf` finds it by that file's identity.",
        "",
    ])  # fmt: skip


def _checkpoint(artefact: Artefact, repo: str) -> str:
    folder = repo.split("/")[-1]
    rows: Rows = [
        ("files", ", ".join(f"`{name}`" for name in CHECKPOINT_FILES) + f", {artefact.n_bytes:,} bytes"),
        *_identity_rows(artefact),
        *_shape_rows(artefact),
        *_training_rows(artefact),
    ]
    return "\n".join([
        f"# {folder}",
        "",
        f"The checkpoint of a draft ({artefact.method}) for {_cell(artefact.target.name) or 'the model below'}, in the "
        "format of vLLM's speculators. A GGUF of it runs in localspec and llama.cpp.",
        "",
        *_table(rows),
        *_acceptance(artefact),
        *_commands(
            ["localspec", "pull", repo, "-o", folder],
            ["localspec", "convert", folder, "--target", "TARGET.gguf", "-o", f"{folder}.gguf"],
            ["localspec", "run", "--target", "TARGET.gguf", "--draft", f"{folder}.gguf", "-p", "Hello"],
        ),
        "",
    ])  # fmt: skip


def _data(artefact: Artefact, repo: str) -> str:
    folder, manifest = repo.split("/")[-1], artefact.manifest
    assert manifest is not None
    states = "none" if manifest.states == "none" else f"after layers {_list(manifest.taps)}, stored as {manifest.states}"
    shown = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "max_tokens", "thinking", "seed", "localspec")
    how = ", ".join(f"{key} {_cell(str(manifest.settings[key]))}" for key in shown if key in manifest.settings)
    rows: Rows = [
        ("size", f"{manifest.n_samples:,} samples, {manifest.n_tokens:,} tokens, {manifest.n_masked:,} of them the "
                 f"assistant's, {artefact.n_bytes:,} bytes in {len(manifest.shards)} shards"),
        *_identity_rows(artefact),
        ("target's file", f"SHA-256 `{_cell(str(manifest.target['file_hash']))}`"),
        ("states", states),
        ("teacher", f"the {manifest.teacher_k} likeliest tokens at every position"),
        ("settings", how),
    ]  # fmt: skip
    return "\n".join([
        f"# {folder}",
        "",
        f"Training data for a draft for {_cell(artefact.target.name) or 'the model below'}, with the target's hidden states "
        f"and likeliest tokens, as `localspec train` reads them ({MANIFEST} and shards as safetensors).",
        "",
        *_table(rows),
        "",
        "| source | samples |",
        "|---|---|",
        *(f"| {_cell(name)} | {n:,} |" for name, n in sorted(artefact.sources.items())),
        *_commands(
            ["localspec", "pull", repo, "--data", "-o", folder],
            ["localspec", "train", "eagle3", "--target", "TARGET.gguf", "--data", folder, "-o", f"{folder}-draft"],
        ),
        "",
    ])  # fmt: skip


def _identity_rows(artefact: Artefact) -> Rows:
    target = artefact.target
    tokenizer = f"tokenizer `{target.tokenizer_hash[:16]}`"
    if not target.n_layer:
        return [("target", f"any with its {target.n_vocab:,} tokens, {tokenizer}")]
    name = f"{_cell(target.name)}: " if target.name else ""
    return [("target", f"{name}{target.n_layer} layers of width {target.n_embd}, {target.n_vocab:,} tokens, {tokenizer}")]


def _shape_rows(artefact: Artefact) -> Rows:
    config = artefact.config
    if config is None:
        return []
    said = f"says {config.draft_vocab:,} of {config.target.n_vocab:,} tokens" if config.draft_vocab else "says all tokens"
    window = f", sees {config.window:,} positions" if config.window else ""
    layers = "one layer" if config.n_layer == 1 else f"{config.n_layer} layers"
    shape = f"{layers} of width {config.n_embd}, {config.n_head} heads ({config.n_head_kv} for keys){window}; {said}"
    rows = [("reads", f"the target's states after layers {_list(config.taps)}")] if config.taps else []
    return [*rows, ("shape", shape)]


#: provenance -> its words; what is not listed is shown under its own name
_SAID = {"data_tokens": "tokens of data", "data_samples": "samples", "tokens_seen": "tokens seen", "steps": "steps"}


def _training_rows(artefact: Artefact) -> Rows:
    said = artefact.config.provenance if artefact.config is not None else {}
    plain = {k: v for k, v in said.items() if isinstance(v, int | float | str) and not isinstance(v, bool)}

    def row(title: str, keys: Sequence[str]) -> Rows:
        told = [f"{plain[k]:,} {_SAID[k]}" for k in keys if isinstance(plain.get(k), int | float)]
        return [(title, ", ".join(told))] if told else []

    others = ", ".join(f"{_cell(k)} {_cell(str(v))}" for k, v in plain.items() if k not in _SAID and k != "localspec")
    depth = artefact.config.depth if artefact.config is not None else 1
    rows = row("data", ("data_tokens", "data_samples")) + row("training", ("steps", "tokens_seen"))
    if depth > 1:
        rows.append(("drafts", f"up to {depth} tokens in a row, as it was trained"))
    rows += [("settings", others)] if others else []
    return rows + ([("made with", f"localspec {_cell(str(plain['localspec']))}")] if "localspec" in plain else [])


def _evaluation(artefact: Artefact) -> Mapping[str, Any] | None:
    """What training measured on texts that it had held out, where the file tells it in the form we know."""
    said = artefact.config.provenance.get("evaluation") if artefact.config is not None else None
    good = isinstance(said, Mapping) and _number(said.get("tokens_per_verify"))
    return said if good else None


def _by_source(evaluation: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    parts = evaluation.get("by_source")
    found = parts.items() if isinstance(parts, Mapping) else ()
    return {str(k): v for k, v in found if isinstance(v, Mapping) and _number(v.get("tokens_per_verify"))}


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _acceptance(artefact: Artefact) -> list[str]:
    evaluation = _evaluation(artefact)
    if evaluation is None:
        return []
    parts = {**dict(sorted(_by_source(evaluation).items())), "all": evaluation}
    lines = []
    for name, part in parts.items():
        kept = part.get("acceptance")
        each = " ".join(f"{100 * a:.0f} %" for a in kept if _number(a)) if isinstance(kept, list) else ""
        lines.append(f"| {_cell(name)} | {part['tokens_per_verify']:.2f} | {each} |")
    n_max = evaluation.get("n_max")
    drafted = f", {n_max} drafted" if isinstance(n_max, int) else ""
    return [
        "",
        f"Acceptance on texts that training had held out{drafted}, measured by the trainer:",
        "",
        "| source | tokens per verify | kept, of the first, second, ... drafted token |",
        "|---|---|---|",
        *lines,
    ]


def _commands(*commands: Sequence[str]) -> list[str]:
    return ["", "```sh", *(shlex.join(command) for command in commands), "```"]


def _table(rows: Rows) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {title} | {text} |" for title, text in rows if text)]


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _millions(n: int) -> str:
    return f"{n / 1e6:.1f} M" if n >= 1e5 else f"{n:,}"


def _cell(text: str) -> str:
    """A text out of a file, as part of a table: on one line, and without what Markdown or HTML would take for its own."""
    flat = " ".join(text.split())
    for sign in "\\|`<>[]*_":
        flat = flat.replace(sign, f"\\{sign}" if sign not in "<>" else {"<": "&lt;", ">": "&gt;"}[sign])
    return flat
