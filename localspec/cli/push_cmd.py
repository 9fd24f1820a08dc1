"""`localspec push`: a draft, a checkpoint or training data to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

import click

from localspec.cli.loading import say
from localspec.cli.progress import transfer


@click.command("push")
@click.argument("source", metavar="FILE|DIR")
@click.argument("repo", metavar="USER/REPO")
@click.option("-m", "--target", metavar="FILE", help="The target (GGUF), to check the pair; needed where a draft does not "
              "say for which model it was made.")  # fmt: skip
@click.option("--private", is_flag=True, help="Create the repository as a private one.")
@click.option("--license", "licence", default="", metavar="ID", help="For the card, as the hub names it: apache-2.0, mit...")
@click.option("--base-model", default="", metavar="USER/REPO", help="The target's name on the hub, for the card.")
@click.option("--force", is_flag=True, help="Replace a card that was written by hand.")
@click.option("--dry-run", is_flag=True, help="Print the card and the files; send nothing.")
def push_cmd(
    source: str, repo: str, target: str | None, private: bool, licence: str, base_model: str, force: bool, dry_run: bool
) -> None:
    """Send a draft to the Hugging Face Hub, with a card by which others find it for their target.

    FILE is a draft (GGUF); DIR a checkpoint of localspec train, or shards of localspec data. The repository is created where
    there is none. Stopped or killed, nothing has changed there, and the same command goes on.
    """
    from localspec.gguf_file import GGUFFile
    from localspec.share.artefact import read
    from localspec.share.card import card, tags
    from localspec.share.push import check_name, check_settings, push

    check_name(repo)
    check_settings(licence, base_model)
    artefact = read(Path(source), GGUFFile.open(target, "target") if target else None)
    text = card(artefact, repo, licence, base_model)
    if dry_run:
        click.echo(text)
        for name, n_bytes in [("README.md", len(text.encode())), *((item.name, item.n_bytes) for item in artefact.items)]:
            click.echo(f"{n_bytes:>14,}  {name}")
        return
    with transfer(say, "sending to") as progress:
        done = push(artefact, repo, text, private, force, progress)
    if done.kept_card:
        say(
            "the card there was written by hand and stays (--force replaces it); so that localspec pull --for finds this, "
            f"put what --dry-run shows under localspec into its front matter, and these tags: {', '.join(tags(artefact))}"
        )
    if not done.changed:
        say("everything was there already")
    if not licence and not done.kept_card:
        say("the card names no licence: give one with --license")
    click.echo(done.url)
