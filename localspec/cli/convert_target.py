"""`localspec convert` of a target: a model in Hugging Face's layout, in a directory or on the hub."""

from __future__ import annotations

from pathlib import Path

from localspec.cli.loading import say

#: --quant where none is given: small, and close to the whole model
DEFAULT_TARGET_QUANT = "Q4_K_M"


def fetched(repo: str) -> Path:
    """The folder of a model or of a draft's checkpoint on the hub: configuration, tokenizer and safetensors files. A target
    of a family that can't be converted is refused before it is downloaded."""
    from localspec.cli.progress import download
    from localspec.convert.target import check_family, is_target
    from localspec.hub import snapshot

    def check(folder: Path) -> None:
        if is_target(folder):
            check_family(folder)

    with download(say) as progress:
        return snapshot(repo, check, progress)


def is_target_source(source: Path) -> bool:
    """Whether `source` is a directory of a model, and not a draft's checkpoint or a GGUF."""
    if not source.is_dir():
        return False
    from localspec.convert.target import is_target

    return is_target(source)


def convert_target_cmd(source: Path, output: Path, quant: str | None, force: bool, name: str | None) -> None:
    """Write the GGUF of `source`, which the file calls `name`, and say what came out."""
    from localspec.cli.progress import download
    from localspec.convert.target import convert_target

    with download(say, "reading") as progress:
        done = convert_target(source, output, quant or DEFAULT_TARGET_QUANT, force, name, progress)
    say(
        f"{output}: {done.architecture}, {done.quant}, {done.size / 1e6:.1f} MB, {done.n_params / 1e6:.1f} M parameters, "
        "tokenizer included"
    )
    say(f"run it: localspec run --target {output}")
