"""`localspec convert` and `localspec quantize`: export to GGUF, and GGUF to GGUF."""

from __future__ import annotations

import json
from pathlib import Path

import click

from localspec.cli.convert_target import DEFAULT_TARGET_QUANT, convert_target_cmd, fetched, is_target_source
from localspec.cli.loading import fetched_default_model, say
from localspec.convert.draft import DRAFT_QUANTS
from localspec.convert.quantize import QUANTS, quantize, size_remark
from localspec.errors import PairingError, UsageError

#: --quant where none is given: of a copy of a model, and of a draft out of a checkpoint
DEFAULT_QUANT, DEFAULT_DRAFT_QUANT = "Q4_0", "q8_0"
_HUB = "hf://"
#: layers, hidden size and vocabulary of the default model: another need not be fetched to be told from it
_DEFAULT_SHAPE = (30, 576, 49152)


@click.command("convert")
@click.argument("source", metavar="SOURCE")
@click.option("-o", "--output", required=True, metavar="FILE", help="The file to write; with --to, the directory.")
@click.option("--to", "kind", type=click.Choice(["gguf", "speculators"]), default="gguf", show_default=True,
              help="Write a draft as GGUF, or as a checkpoint of vLLM's speculators.")
@click.option("--verifier", metavar="NAME", help="With --to speculators: the target's repository or folder, for vLLM.")
@click.option("--allow-pickle", is_flag=True,
              help="Of a checkpoint: read PyTorch's pickles too, their tensors and nothing else.")
@click.option(
    "--quant",
    metavar="TYPE",
    help=f"Of a GGUF or a target: one of {', '.join(QUANTS)} [default: {DEFAULT_QUANT}; of a target "
    f"{DEFAULT_TARGET_QUANT}]. Of a checkpoint: one of {', '.join(DRAFT_QUANTS)} [default: {DEFAULT_DRAFT_QUANT}].",
)
@click.option("-m", "--target", metavar="FILE", help="Of a checkpoint: its target  [default: the one it was trained with]")
@click.option("--data", metavar="DIR", help="Of a checkpoint: states to compare on  [default: the run's, or new ones]")
@click.option("--parity/--no-parity", default=True, help="Of a checkpoint: compare what was written with PyTorch's draft.")
@click.option("--as-llama", is_flag=True, help="Rewrite a qwen2 file as a llama file, values untouched.")
@click.option("--force", is_flag=True, help="Replace the output if it exists.")
def convert_cmd(
    source: str,
    output: str,
    quant: str | None,
    target: str | None,
    data: str | None,
    parity: bool,
    as_llama: bool,
    force: bool,
    kind: str,
    verifier: str | None,
    allow_pickle: bool,
) -> None:
    """Write a GGUF: of a trained draft's checkpoint, of a target in Hugging Face's layout, or of another GGUF.

    SOURCE is a directory that holds a draft's checkpoint, ours or of SpecForge, vLLM's speculators or EAGLE's authors; a
    directory that holds a model of the families llama, qwen2, qwen3, gemma3 and gemma4; either of them on the hub, as
    hf://USER/REPO or hf://USER/REPO@REVISION; or a GGUF file, which is written in another quantisation: a smaller copy of
    the target is the simplest draft for it.

    With --to speculators, a draft, GGUF or checkpoint, becomes a directory that vLLM loads.
    """
    if verifier and kind != "speculators":
        raise UsageError("--verifier is for --to speculators")
    name = None
    if source.startswith(_HUB):
        from localspec.convert.output import check_output

        if kind != "speculators":
            check_output(Path(output), force)  # before a long download
        name = source.removeprefix(_HUB).partition("@")[0].rpartition("/")[2]
        source = str(fetched(source.removeprefix(_HUB)))
    if kind == "speculators":
        if quant or data or as_llama:
            raise UsageError("--to speculators writes f32 values: --quant, --data and --as-llama are for GGUF")
        _to_speculators(Path(source), Path(output), target, verifier, force, allow_pickle)
        return
    if is_target_source(Path(source)):
        if as_llama or target or data:
            raise UsageError(f"{source} is a target: --as-llama, --target and --data are for other sources")
        convert_target_cmd(Path(source), Path(output), quant, force, name)
        return
    if Path(source).is_dir():
        if as_llama:
            raise UsageError("--as-llama rewrites a GGUF file, not a checkpoint")
        _checkpoint(Path(source), Path(output), quant or DEFAULT_DRAFT_QUANT, target, data, parity, force, allow_pickle)
        return
    if target or data:
        raise UsageError(f"{source} is no checkpoint's directory: --target and --data are for those")
    if as_llama:
        if quant:
            raise UsageError("--as-llama leaves the values as they are: quantise in a second step")
        from localspec.convert.as_llama import as_llama as rewrite

        size = rewrite(Path(source), Path(output), overwrite=force)
        say(f"{output}: {source} as a llama file, {size / 1e6:.1f} MB, values untouched")
        return
    _quantize(Path(source), Path(output), quant or _default_quant(Path(source)), force)


@click.command("quantize")
@click.argument("source", metavar="IN")
@click.argument("output", metavar="OUT")
@click.argument("quant", metavar="TYPE")
@click.option("--force", is_flag=True, help="Replace the output if it exists.")
def quantize_cmd(source: str, output: str, quant: str, force: bool) -> None:
    """Write the GGUF file IN to OUT in another quantisation, by llama.cpp's own quantiser."""
    _quantize(Path(source), Path(output), quant, force)


def _default_quant(source: Path) -> str:
    """DEFAULT_QUANT. Raises UsageError for a file that is in it, and for a draft head of so few bits: llama.cpp's recipe
    keeps a head's largest matrix in Q6_K, so the copy would be the larger one."""
    from localspec.gguf_file import GGUFFile
    from localspec.llama_arch import DRAFT_HEADS

    gguf = GGUFFile.open(source, "model")
    label = gguf.quant_label
    if label == DEFAULT_QUANT or (gguf.architecture in DRAFT_HEADS and label.startswith(("Q2", "Q3", "Q4"))):
        raise UsageError(f"{source} is in {label}, so the default, {DEFAULT_QUANT}, makes it no smaller: say which --quant")
    return DEFAULT_QUANT


def _quantize(source: Path, output: Path, quant: str, force: bool) -> None:
    before = source.stat().st_size if source.is_file() else 0
    size = quantize(source, output, quant, overwrite=force)
    say(f"{output}: {quant.upper()}, {size / 1e6:.1f} MB (from {before / 1e6:.1f} MB)")
    remark = size_remark(before, size, quant.upper())
    if remark is not None:
        say(f"warning: {remark}")


def _to_speculators(
    source: Path, output: Path, target: str | None, verifier: str | None, force: bool, allow_pickle: bool
) -> None:
    from localspec.convert.checkpoint import weights
    from localspec.convert.speculators import export

    model = Path(target) if target else None
    if source.is_dir():
        source = _best_of(source)
        weights(source, allow_pickle)
        model = model or _target_of(source, _run_of(source))
    done = export(source, output, model, verifier, force, allow_pickle)
    say(f"{output}: {done.title} draft for {done.config.target.name or 'its target'} as a checkpoint of vLLM's speculators, "
        f"{done.size / 1e6:.1f} MB")  # fmt: skip
    if verifier is None:
        say("vLLM finds the target by its name: give it with --verifier, or as --model beside this draft")


def _best_of(source: Path) -> Path:
    """A run's best checkpoint; any other directory as it is."""
    if not (source / "model.safetensors").is_file() and (source / "best" / "model.safetensors").is_file():
        say(f"{source} is a training run: its best checkpoint is taken")
        return source / "best"
    return source


def _checkpoint(
    source: Path, output: Path, quant: str, target: str | None, data: str | None, parity: bool, force: bool,
    allow_pickle: bool,
) -> None:  # fmt: skip
    from localspec.convert.checkpoint import weights
    from localspec.convert.draft import convert

    source = _best_of(source)
    weights(source, allow_pickle)  # before a target is looked for: there may be no checkpoint
    run = _run_of(source)
    model = Path(target) if target else _target_of(source, run)
    if data is None and (Path(run.get("data") or "none") / "manifest.json").is_file():
        data = run["data"]
    summary = ""

    def gate(written: Path) -> None:
        nonlocal summary
        if parity:
            from localspec.convert.parity import check

            summary = check(source, written, model, Path(data) if data else None, output, allow_pickle).summary()

    done = convert(source, model, output, quant, force, gate, allow_pickle)
    config = done.config
    n_vocab = config.target.n_vocab
    vocabulary = f"{config.draft_vocab:,} of {n_vocab:,}" if config.draft_vocab else f"all {n_vocab:,}"
    say(
        f"{output}: {done.title} draft for {config.target.name or model.name}, {done.quant}, {done.size / 1e6:.1f} MB, "
        f"{done.n_params / 1e6:.1f} M parameters, {vocabulary} tokens"
    )
    if summary:
        say(summary)
    say(f"run it: localspec run --target {model} --draft {output}")


def _run_of(checkpoint: Path) -> dict[str, str | None]:
    """What the training run that wrote this checkpoint says of its files: ``target_file`` and ``data``."""
    try:
        said = json.loads((checkpoint.parent / "run.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return {key: said.get(key) for key in ("target_file", "data")} if isinstance(said, dict) else {}


def _target_of(checkpoint: Path, run: dict[str, str | None]) -> Path:
    """The target that a checkpoint of ours was trained for: the run's file, or the default model where that is it."""
    from localspec.gguf_file import GGUFFile
    from localspec.speculator import CHECKPOINT_FILE, SpeculatorConfig, TargetIdentity

    if not (checkpoint / CHECKPOINT_FILE).is_file():
        raise UsageError(f"{checkpoint} does not say for which target it was trained: give --target FILE")
    wanted = SpeculatorConfig.load(checkpoint).target
    named = Path(run.get("target_file") or "none")
    if named.is_file() and wanted.difference(TargetIdentity.of(GGUFFile.open(named, "target"))) is None:
        return named
    if (wanted.n_layer, wanted.n_embd, wanted.n_vocab) == _DEFAULT_SHAPE:
        path = fetched_default_model()
        if wanted.difference(TargetIdentity.of(GGUFFile.open(path, "target"))) is None:
            return path
    raise PairingError(f"{checkpoint} was trained for {wanted.name}: give that model as --target FILE")
