"""`localspec convert`: export to quantised GGUF."""

from __future__ import annotations

from pathlib import Path

import click

from localspec.cli.loading import say
from localspec.convert.quantize import QUANTS, quantize, size_remark


@click.command("convert")
@click.argument("source", metavar="SOURCE.gguf")
@click.option("-o", "--output", required=True, metavar="FILE", help="The file to write.")
@click.option("--quant", default="Q4_0", show_default=True, metavar="TYPE", help=f"One of {', '.join(QUANTS)}.")
@click.option("--force", is_flag=True, help="Replace the output if it exists.")
def convert_cmd(source: str, output: str, quant: str, force: bool) -> None:
    """Write a GGUF in another quantisation.

    A smaller copy of the target is the simplest draft for it.
    """
    target = Path(output)
    before = Path(source).stat().st_size if Path(source).is_file() else 0
    size = quantize(Path(source), target, quant, overwrite=force)
    say(f"{target}: {quant.upper()}, {size / 1e6:.1f} MB (from {before / 1e6:.1f} MB)")
    remark = size_remark(before, size, quant.upper())
    if remark is not None:
        say(f"warning: {remark}")
