"""`localspec pull`: a draft, a checkpoint or training data from the Hugging Face Hub, by name or for a target."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localspec.cli.loading import say
from localspec.cli.progress import transfer
from localspec.errors import UsageError

if TYPE_CHECKING:
    from localspec.gguf_file import GGUFFile
    from localspec.share.find import Candidate


@click.command("pull")
@click.argument("repo", metavar="[USER/REPO[:QUANT]]", required=False)
@click.option("--for", "target", metavar="TARGET.gguf", help="Find a draft for this model, or check the one that is named.")
@click.option("-o", "--output", metavar="DIR", help="Where it goes  [default: localspec's own cache]")
@click.option("--list", "only_list", is_flag=True, help="Only print the drafts that --for finds.")
@click.option("--choose", is_flag=True, help="Ask which of the drafts that --for finds.")
@click.option("--data", is_flag=True, help="Take the training data of that name, though there is a model of it, too.")
@click.option("--force", is_flag=True, help="Replace files of the same name and another content.")
def pull_cmd(
    repo: str | None, target: str | None, output: str | None, only_list: bool, choose: bool, data: bool, force: bool
) -> None:
    """Fetch what localspec push has sent, resumed and checked, and print its path.

    Without USER/REPO, --for TARGET.gguf searches the hub for drafts made for that file.
    """
    from localspec.gguf_file import GGUFFile
    from localspec.share.pull import pull

    if repo is None and target is None:
        raise UsageError("name a repository (USER/REPO), or --for TARGET.gguf to find a draft for that model")
    if (only_list or choose) and (repo is not None or target is None):
        raise UsageError("--list and --choose are for a search: give --for TARGET.gguf, and no USER/REPO")
    if data and repo is None:
        raise UsageError("--data needs a name: USER/REPO")
    gguf = GGUFFile.open(target, "target") if target is not None else None
    if repo is None and gguf is not None and target is not None:
        found = _search(gguf, target, only_list)
        if only_list:
            return
        repo = (_ask(found) if choose else found[0]).spec
    assert repo is not None
    folder = Path(output) if output is not None else None
    with transfer(say, "fetching") as progress:
        done = pull(repo, folder, gguf, data, force, progress)
    click.echo(done.path)
    _say_next(done.kind, done.path, target)


def _say_next(kind: str, path: Path, target: str | None) -> None:
    model = target or "TARGET.gguf"
    if kind == "draft":
        say("run it: " + shlex.join(["localspec", "run", "--target", model, "--draft", str(path)]))
    elif kind == "checkpoint":
        say("make a GGUF of it: " + shlex.join(["localspec", "convert", str(path), "--target", model, "-o", "draft.gguf"]))
    else:
        command = ["localspec", "train", "eagle3", "--target", model, "--data", str(path), "-o", "run"]
        say("train on it: " + shlex.join(command))


def _search(gguf: GGUFFile, target: str, only_list: bool) -> list[Candidate]:
    """The hub's drafts for a target, listed for the person where there is a choice, or where the list is all they want."""
    from localspec.share.find import find, none_found
    from localspec.shipped import shipped_draft

    found = find(gguf)
    if not found:
        raise none_found(gguf, target, shipped_draft(gguf) is not None)
    lines = _table(found)
    if only_list:
        click.echo("\n".join(lines))
    elif len(found) > 1:
        say(f"{len(found)} drafts for {gguf.name}, as their authors describe them:")
        click.echo("\n".join(f"  {line}" for line in lines), err=True)
    return found


def _table(found: list[Candidate]) -> list[str]:
    rows = [("", "draft", "method", "size", "tokens per verify", "downloads")]
    for number, one in enumerate(found, 1):
        size = f"{one.n_bytes / 1e6:.1f} MB" if one.n_bytes else "?"
        per_verify = f"{one.tokens_per_verify:.2f}" if one.tokens_per_verify else "?"
        rows.append((str(number), one.spec, one.method, size, per_verify, f"{one.downloads:,}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    aligned = (str.rjust, str.ljust, str.ljust, str.rjust, str.rjust, str.rjust)
    return ["  ".join(align(cell, w) for align, cell, w in zip(aligned, row, widths)) for row in rows]


def _ask(found: list[Candidate]) -> Candidate:
    if len(found) == 1:
        return found[0]
    if not sys.stdin.isatty():
        raise UsageError("--choose asks in a terminal; here give the draft's name, as --list prints it")
    number: int = click.prompt("which", type=click.IntRange(1, len(found)), default=1, err=True)
    return found[number - 1]
