"""`localspec convert` of a target: a model in Hugging Face's layout, in a directory or on the hub."""

from __future__ import annotations

from pathlib import Path

from localspec.cli.loading import say

_HUB = "hf://"
#: --quant where none is given: small, and close to the whole model
DEFAULT_TARGET_QUANT = "Q4_K_M"


def is_target_source(source: str) -> bool:
    """Whether `source` names a model, on the hub or in a directory, and not a draft's checkpoint or a GGUF."""
    if source.startswith(_HUB):
        return True
    if not Path(source).is_dir():
        return False
    from localspec.convert.target import is_target

    return is_target(Path(source))


def convert_target_cmd(source: str, output: Path, quant: str | None, force: bool) -> None:
    """Fetch `source` where it is on the hub, write its GGUF and say what came out."""
    from localspec.cli.progress import download
    from localspec.convert.output import check_output
    from localspec.convert.target import check_family, check_quant, convert_target

    check_quant(quant or DEFAULT_TARGET_QUANT)
    check_output(output, force)
    folder, name = Path(source), None
    if source.startswith(_HUB):
        from localspec.hub import snapshot

        name = source.removeprefix(_HUB)
        with download(say) as progress:
            folder = snapshot(name, check_family, progress)
        name = name.rpartition("/")[2]
    with download(say, "reading") as progress:
        done = convert_target(folder, output, quant or DEFAULT_TARGET_QUANT, force, name, progress)
    say(
        f"{output}: {done.architecture}, {done.quant}, {done.size / 1e6:.1f} MB, {done.n_params / 1e6:.1f} M parameters, "
        "tokenizer included"
    )
    say(f"run it: localspec run --target {output}")
