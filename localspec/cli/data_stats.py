"""`localspec data --stats`: what is there, and a sample with its mask in colour."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import click

from localspec.chat.screen import printable
from localspec.cli.console import colours_wanted
from localspec.cli.loading import say
from localspec.data.shards import Shards
from localspec.data.stats import data_stats
from localspec.gguf_file import GGUFFile
from localspec.model import Model
from localspec.speculator import TargetIdentity


def show_stats(folder: Path, target: Path | None) -> None:
    """Print the counts, after comparing all shards with their checksums."""
    shards = Shards.open(folder)
    shards.verify()
    m, found = shards.manifest, data_stats(shards)
    echo = click.echo
    echo(f"target:     {m.target['name']} ({m.target['architecture']}, {m.target['n_layer']} layers)")
    taps = f"taps {', '.join(map(str, m.taps))} as {m.states}" if m.taps else "no states"
    echo(f"states:     {taps}, the {m.teacher_k} likeliest tokens")
    echo(f"samples:    {found.n_samples:,} in {len(m.shards)} shards, {found.n_bytes / 1e6:.1f} MB "
         f"({found.n_bytes / found.n_tokens:.0f} bytes a token)")  # fmt: skip
    echo(f"tokens:     {found.n_tokens:,}, {found.n_masked:,} of them the assistant's "
         f"({100 * found.n_masked / found.n_tokens:.1f} %)")  # fmt: skip
    least, low, median, high, most = found.quantiles
    echo(f"lengths:    {least} to {most}, half of them between {low} and {high}, median {median}")
    told = [f"{size:,} cover {100 * share:.2f} %" for size, share in found.coverage.items() if size < found.n_distinct]
    echo(f"vocabulary: {found.n_distinct:,} different tokens said{'; the commonest ' if told else ''}{', '.join(told)}")
    for name, source in found.sources.items():
        echo(f"  {printable(name)}: {source.n_samples:,} samples, {source.n_tokens:,} tokens, {source.n_masked:,} masked")
    _show_sample(shards, target)


def _show_sample(shards: Shards, target: Path | None) -> None:
    path = target or Path(str(shards.manifest.settings.get("target_file", "")))
    if not path.is_file():
        say("give --target to see a sample: its file is not where it was")
        return
    shards.manifest.identity.require(TargetIdentity.of(GGUFFile.open(path, "target")), f"the data in {shards.folder}")
    with Model(path) as model:
        tokens, mask = shards.tokens(0)
        tint = colours_wanted()
        click.echo(f"\nsample 0 ({shards.sources()[0]}); what counts is {'green, ' if tint else ''}between [ and ]:\n")
        edges = [0, *(i for i in range(1, len(tokens)) if mask[i] != mask[i - 1]), len(tokens)]
        for start, end in pairwise(edges):
            text = printable(model.tokenizer.decode(tokens[start:end], special=True))
            text = f"[{text}]" if mask[start] else text
            if tint:
                text = click.style(text, fg="green") if mask[start] else click.style(text, dim=True)
            click.echo(text, nl=False)
        click.echo()
