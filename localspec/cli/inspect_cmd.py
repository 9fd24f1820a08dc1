"""`localspec inspect`: what GGUF files are, whether and how they pair, what they need, and how to start them."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from localspec import native
from localspec.blocks import DEFAULT_N_MAX
from localspec.errors import PairingError, UsageError
from localspec.gguf_file import GGUFFile, require_model
from localspec.gguf_format import clip
from localspec.llama_arch import DRAFT_HEADS
from localspec.memory import MemoryNeed, memory_needed, recurrent_layers, windowed_layers
from localspec.pairing import can_draft, check_pair, drafter_for, is_dspark, llama_spec_type, own_heads, rollback_of
from localspec.shipped import shipped_draft
from localspec.speculator import SpeculatorConfig

PROMPT = "Write a haiku about rain."
RULE = "match"
MIN_COLUMNS = 50  # where two columns would be too narrow to read, lines are left to the terminal

#: what a draft's provenance may tell -> in words
_TRAINED = (("data_tokens", "tokens of data"), ("tokens_seen", "seen"), ("steps", "steps"))

Rows = list[tuple[str, str]]


@click.command("inspect")
@click.argument("target", metavar="TARGET.gguf")
@click.argument("draft", metavar="[DRAFT.gguf]", required=False)
@click.option(
    "-c",
    "--ctx-size",
    "n_ctx",
    type=int,
    default=0,
    metavar="N",
    help="Context that memory is reckoned for. [default: 4096, or what was trained if that is less]",
)
@click.option("-ctk", "--cache-type-k", "type_k", default="f16", metavar="TYPE", help="Type of cached keys.")
@click.option("-ctv", "--cache-type-v", "type_v", default="f16", metavar="TYPE", help="Type of cached values.")
@click.option("--kernels", type=click.Choice(native.KERNELS), default="auto", show_default=True, help="CPU kernels.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect_cmd(
    target: str, draft: str | None, n_ctx: int, type_k: str, type_v: str, kernels: str, as_json: bool
) -> None:
    """Say what GGUF files are, and whether DRAFT can draft for TARGET (left out: the draft of ours, if there is one).

    Reads the files only; nothing is loaded. Exit code 2 if a file can't be used or the pair doesn't fit.
    """
    for role, path in (("TARGET", target), ("DRAFT", draft)):
        if path == "":
            raise UsageError(f"{role} '': no name given (an unset variable?); name a file")
    if n_ctx < 0:
        raise UsageError(f"--ctx-size must be positive, not {n_ctx}")
    native.use_kernels(kernels)
    report = inspect_files(
        Path(target), Path(draft) if draft else None, n_ctx, type_k, type_v, native.kernels_in_use()
    )
    if as_json:
        click.echo(json.dumps(report.as_json()))
    else:
        _show(report)
    if report.pair.error is not None:
        raise PairingError(report.pair.error)


@dataclass(frozen=True)
class Pair:
    """How the two work together: ``drafter`` is what `run` takes by itself, None where there is none. ``error`` says why
    they don't; then it is about the target alone, but for ``llama_spec_type``, which may still be the pair's."""

    drafter: str | None
    llama_spec_type: str | None
    remarks: tuple[str, ...]
    error: str | None


@dataclass(frozen=True)
class Report:
    """All that `inspect` prints."""

    target: GGUFFile
    draft: GGUFFile | None
    n_ctx: int
    needs: tuple[MemoryNeed, ...]
    pair: Pair
    kernels: str

    @property
    def uses_draft(self) -> bool:
        """Whether we would load the draft."""
        return self.draft is not None and self.pair.drafter not in (None, "ngram")

    @property
    def memory(self) -> int:
        """Bytes that we would need in all: the draft's only where it is loaded."""
        return sum(need.total for need in (self.needs if self.uses_draft else self.needs[:1]))

    def commands(self) -> dict[str, str]:
        """Ready to paste, by program; none for a draft head alone, which no program runs."""
        target, pair = str(self.target.path), self.pair
        if self.target.architecture in DRAFT_HEADS:
            return {}
        ours = ["localspec", "run", "--target", target]
        theirs = ["-m", target]
        if self.draft is not None and self.uses_draft:
            ours += ["--draft", str(self.draft.path)]
        elif pair.drafter is None:
            ours += ["--spec-type", "none"]
        if pair.llama_spec_type is not None:
            with_draft = pair.llama_spec_type.startswith("draft-")
            if self.draft is not None and with_draft:
                theirs += ["-md", str(self.draft.path)]
            theirs += ["--spec-type", pair.llama_spec_type]
            if with_draft:
                theirs += ["--spec-draft-n-max", str(DEFAULT_N_MAX)]
        theirs += ["-c", str(self.n_ctx)]
        ours += ["-c", str(self.n_ctx), "-p", PROMPT]
        return {
            "localspec run": shlex.join(ours),
            "llama-server": shlex.join(["llama-server", *theirs]),
            "llama serve": shlex.join(["llama", "serve", *theirs]),
        }

    def as_json(self) -> dict[str, Any]:
        files = [f for f in (self.target, self.draft) if f is not None]
        described = [_facts(f) | {"memory": _memory_json(need)} for f, need in zip(files, self.needs)]
        return {
            "target": described[0],
            "draft": described[1] if self.draft is not None else None,
            "pair": {
                "fits": self.pair.error is None,
                "drafter": self.pair.drafter,
                "accept": RULE,
                "remarks": list(self.pair.remarks),
                "error": self.pair.error,
            },
            "n_ctx": self.n_ctx,
            "memory": self.memory,
            "kernels": self.kernels,
            "commands": self.commands(),
        }


def inspect_files(
    target_path: Path, draft_path: Path | None, n_ctx: int, type_k: str, type_v: str, kernels: str = "stock"
) -> Report:
    """Read the files and find out. Raises ModelFileError and UsageError; a pair that doesn't fit is in the report."""
    target = GGUFFile.open(target_path, "target" if draft_path else "model")
    require_model(target)
    draft = None
    if draft_path is None and target.architecture not in DRAFT_HEADS:
        draft_path = shipped_draft(target)
    if draft_path is not None:
        draft = GGUFFile.open(draft_path, "draft")
        require_model(draft)
    n_ctx = n_ctx or min(4096, target.n_ctx_train)
    needs = tuple(memory_needed(f, n_ctx, type_k, type_v) for f in (target, draft) if f is not None)
    return Report(target, draft, n_ctx, needs, _pair(target, draft, n_ctx), kernels)


def _pair(target: GGUFFile, draft: GGUFFile | None, n_ctx: int) -> Pair:
    remarks = _too_long(target, n_ctx)
    alone = Pair("ngram", llama_spec_type("ngram", None), (*remarks, "without a draft model, by looking back"), None)
    if target.architecture in DRAFT_HEADS:
        head = "a draft head: it runs only beside the model it was made for (localspec inspect TARGET HEAD)"
        alone = Pair(None, None, (*remarks, head), None)
    n_own, no_head = own_heads(target)
    if n_own:
        alone = Pair("ngram,mtp", llama_spec_type("mtp", None), (*remarks, "by the next-token head in its own file"), None)
    elif target.get(f"{target.architecture}.nextn_predict_layers", int, 0) and target.architecture not in DRAFT_HEADS:
        alone = replace(alone, remarks=(*alone.remarks, f"it {no_head}"))
    if draft is None:
        return alone
    try:
        check_pair(target, draft)
        spec_type = llama_spec_type(DRAFT_HEADS.get(draft.architecture, "lm"), draft)
    except PairingError as e:
        return replace(alone, error=str(e))
    try:
        drafter = drafter_for(draft)
    except PairingError as e:
        return replace(alone, llama_spec_type=spec_type, error=str(e))
    able, reason = can_draft(draft)
    if not able:
        return replace(alone, error=f"{clip(draft.path.name, 120)} can't draft: {reason}")
    return Pair(f"ngram,{drafter}", spec_type, (*remarks, *_too_long(draft, n_ctx)), None)


def _too_long(file: GGUFFile, n_ctx: int) -> tuple[str, ...]:
    if n_ctx <= file.n_ctx_train:
        return ()
    return (f"the {file.role} was trained on {file.n_ctx_train} tokens; beyond, it gets worse",)


def _facts(file: GGUFFile) -> dict[str, Any]:
    tokenizer, (how, in_words) = file.tokenizer, rollback_of(file)
    return {
        "path": str(file.path),
        "name": file.name,
        "size_label": file.size_label,
        "architecture": file.architecture,
        "file_size": file.size,
        "n_params": file.n_params,
        "quantization": file.quant_label,
        "tensor_bytes": file.type_bytes(),
        "n_layer": file.n_layer,
        "n_recurrent_layers": sum(recurrent_layers(file)),
        "n_windowed_layers": sum(windowed_layers(file)),
        "n_embd": file.n_embd,
        "n_head": max(file.n_head, default=0),
        "n_head_kv": max(file.n_head_kv, default=0),
        "vocab_size": file.vocab_size,
        "n_ctx_train": file.n_ctx_train,
        "sliding_window": file.sliding_window,
        "chat_template": file.chat_template is not None,
        "tokenizer": {
            "model": tokenizer.model,
            "pre": tokenizer.pre,
            "add_bos": tokenizer.add_bos,
            "bos": tokenizer.bos,
            "eos": tokenizer.eos,
            "hash": file.tokenizer_hash(),
        },
        "rollback": how,
        "rollback_reason": in_words,
    }


def _memory_json(need: MemoryNeed) -> dict[str, int]:
    return asdict(need) | {"total": need.total}


# -- for people ---------------------------------------------------------------------------------------------------------


def _file_rows(file: GGUFFile, need: MemoryNeed) -> Rows:
    facts, tokenizer = _facts(file), file.tokenizer
    total = sum(facts["tensor_bytes"].values()) or 1
    mix = ", ".join(f"{name} {100 * n / total:.0f} %" for name, n in facts["tensor_bytes"].items() if n / total >= 0.005)
    heads = f", {facts['n_head']} heads" if facts["n_head"] else ""
    if facts["n_head_kv"] != facts["n_head"]:
        heads += f" ({facts['n_head_kv']} key/value)"
    layers = "1 layer" if facts["n_layer"] == 1 else f"{facts['n_layer']} layers"
    if facts["n_recurrent_layers"]:
        layers += f" ({facts['n_recurrent_layers']} recurrent)"
    window = "no window"
    if facts["n_windowed_layers"]:
        window = f"a window of {facts['sliding_window']} in {facts['n_windowed_layers']} of {facts['n_layer']} layers"
    pre = f", pre-tokenizer {clip(tokenizer.pre)}" if tokenizer.pre else ""
    if file.architecture in DRAFT_HEADS:
        return [*_head_rows(file), ("memory", f"{_bytes(need.weights)} weights, {_bytes(need.kv)} cache")]
    return [
        ("file", clip(str(file.path), 400)),
        ("name", clip(file.name if file.size_label in file.name else f"{file.name} ({file.size_label})")),
        ("architecture", f"{file.architecture}, {layers}, hidden size {facts['n_embd']}{heads}"),
        ("parameters", f"{_count(facts['n_params'])}, {_bytes(file.size)} as {facts['quantization']} ({mix})"),
        ("vocabulary", f"{facts['vocab_size']} tokens, tokenizer {clip(tokenizer.model)}{pre}"),
        ("context", f"{facts['n_ctx_train']} tokens trained, {window}"),
        ("chat template", "yes" if facts["chat_template"] else "no"),
        ("rollback", facts["rollback_reason"]),
        ("memory", f"{_bytes(need.weights)} weights, {_bytes(need.kv)} cache, about {_bytes(need.compute)} to compute"),
    ]


def _head_rows(file: GGUFFile) -> Rows:
    """A draft head: whom it was made for, and what it is beside that."""
    head = SpeculatorConfig.from_gguf(file)
    facts, n_vocab = _facts(file), head.target.n_vocab
    made_for = f"{clip(head.target.name)}, {head.target.n_layer} layers, " if head.target.name else "a target of "
    said = head.provenance
    told = [f"{said[key]:,} {words}" for key, words in _TRAINED if isinstance(said.get(key), int)]
    rows = [
        ("file", clip(str(file.path), 400)),
        ("name", clip(file.name)),
        ("architecture", f"{file.architecture}, {_layers(head.n_layer)}, hidden size {head.n_embd}, {head.n_head} heads"),
        ("parameters", f"{_count(facts['n_params'])}, {_bytes(file.size)} as {facts['quantization']}"),
        ("made for", f"{made_for}hidden size {head.target.n_embd}, {n_vocab} tokens"),
        ("reads", "its states after " + ", ".join(map(str, head.taps)) + " layers" if head.taps else "its last states"),
        ("can say", f"{head.draft_vocab} of {n_vocab} tokens" if head.draft_vocab else "all tokens"),
        ("sees", _sight(file, head.window)),
    ]
    if file.architecture == "dflash":
        spark, sure = is_dspark(file), "conf_proj.weight" in file.tensors
        heads = ", with DSpark's Markov head" * spark + " and confidence head" * sure
        rows.append(("drafts", f"blocks of {file.arch('block_size', 16)} at once{heads}"))
    if head.depth > 1:
        rows.append(("trained", ", ".join([f"to draft {head.depth} in a row", *told])))
    return rows


def _layers(n: int) -> str:
    return "1 layer" if n == 1 else f"{n} layers"


def _sight(file: GGUFFile, window: int) -> str:
    if not window:
        return "all positions"
    windowed = windowed_layers(file) if file.architecture == "dflash" else [True]
    where = "" if all(windowed) else f" in {sum(windowed)} of {_layers(len(windowed))}"
    return f"the last {window} positions{where}"


def _pair_rows(report: Report) -> Rows:
    pair, rows = report.pair, []
    if pair.error is not None:
        rows.append(("fits", f"no: {pair.error}"))
    elif report.draft is not None:
        rows.append(("fits", "yes: " + _same_tokens(report.target, report.draft)))
    nothing = "none" if report.target.architecture in DRAFT_HEADS else "none: plain decoding"
    rows.append(("drafter", f"{pair.drafter}, accept rule {RULE}" if pair.drafter else nothing))
    rows += [("note", remark) for remark in pair.remarks]
    whose = "for the target alone" if report.draft is not None and not report.uses_draft else "in all"
    rows.append(("memory", f"about {_bytes(report.memory)} {whose} at a context of {report.n_ctx} tokens"))
    rows.append(("kernels", report.kernels))
    return rows


def _same_tokens(target: GGUFFile, draft: GGUFFile) -> str:
    if not draft.tokenizer.tokens:
        return "the draft speaks in the target's tokens"
    ours, theirs = target.tokenizer.tokens, draft.tokenizer.tokens
    if len(ours) == len(theirs) and all(a == b for a, b in zip(ours, theirs)):
        return f"the same {target.vocab_size} tokens"
    return f"the same tokens, up to padding ({target.vocab_size} and {draft.vocab_size})"


def _sections(report: Report) -> list[tuple[str, Rows]]:
    sections = [("target" if report.draft else "model", _file_rows(report.target, report.needs[0]))]
    if report.draft is not None:
        sections.append(("draft", _file_rows(report.draft, report.needs[1])))
    sections.append(("pair" if report.draft else "speculation", _pair_rows(report)))
    return sections


def _show(report: Report) -> None:
    if sys.stdout.isatty() and shutil.get_terminal_size().columns >= MIN_COLUMNS:
        _show_rich(report)
        return
    for title, rows in _sections(report):
        click.echo(title)
        for label, text in rows:
            click.echo(f"  {label:<14} {text}")
        click.echo()
    commands = report.commands()
    if commands:
        click.echo("commands")
    for command in commands.values():
        click.echo(f"  {command}")


def _show_rich(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for title, rows in _sections(report):
        console.print(Text(title, style="bold"))
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_column(min_width=16, style="cyan", no_wrap=True)
        grid.add_column(overflow="fold")
        for label, text in rows:
            bad = text.startswith("no: ")
            grid.add_row("  " + label, Text(text, style="red" if bad else ""))
        console.print(grid)
        console.print()
    commands = report.commands()
    if commands:
        console.print(Text("commands", style="bold"))
    for command in commands.values():
        # Not wrapped by us: a wrapped command can't be copied.
        console.print(Text("  " + command), soft_wrap=True)


def _bytes(n: int) -> str:
    mib = n / (1 << 20)
    return f"{mib / 1024:.2f} GiB" if mib >= 1024 else f"{mib:.0f} MiB" if mib >= 10 else f"{mib:.1f} MiB"


def _count(n: int) -> str:
    return f"{n / 1e9:.2f} billion" if n >= 1e9 else f"{n / 1e6:.1f} million"
