"""`localspec backend-path`: for GGML_BACKEND_PATH of any llama.cpp program of the same commit."""

from __future__ import annotations

import click

from localspec import native


@click.command("backend-path")
def backend_cmd() -> None:
    """Print the path of our ggml plug-in.

    GGML_BACKEND_PATH=$(localspec backend-path) makes an unpatched llama.cpp program of the same commit load it.
    """
    click.echo(native.backend_path())
