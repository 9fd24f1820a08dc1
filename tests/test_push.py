"""`localspec push` against a hub on loopback: what it sends, that a killed one goes on, what it says of troubles."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localspec.data.shards import Shards
from localspec.share.push import Told
from tests import fake_hub, share_things
from tests.conftest import Cli, CliResult
from tests.fake_hub import FakeHub, Repo
from tests.terminal import Terminal

Push = Callable[..., CliResult]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub.running() as hub:
        yield hub


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return share_things.draft(tmp_path / "draft.gguf", share_things.target(tmp_path))


@pytest.fixture
def push(cli: Cli, hub: FakeHub) -> Push:
    """``push(SOURCE, REPO, ..., env=)``: whatever happens, the token is never shown and nothing looks like a traceback."""

    def run(*args: object, env: dict[str, str] | None = None) -> CliResult:
        settings = share_things.hub_env(hub) | (env or {})
        done = cli("push", *args, env=settings)
        shown = done.stdout + done.stderr
        assert not settings["HF_TOKEN"] or settings["HF_TOKEN"] not in shown
        assert "Bearer" not in shown
        assert "Traceback" not in shown
        if done.rc:
            assert (done.rc, done.stdout) == (2, "")
            assert done.stderr.splitlines()[-1].startswith("localspec: error: ")
            assert done.stderr.count("\n") <= 2, "at most what was being sent, and why it was not"
        return done

    return run


def sent(hub: FakeHub) -> list[str]:
    """The large files that were sent."""
    return [request for request in hub.requests if request.startswith("PUT")]


def test_a_draft_its_card_and_a_second_time(hub: FakeHub, push: Push, draft: Path) -> None:
    done = push(draft, "user/repo")
    assert (done.rc, done.stdout) == (0, f"{hub.url}/user/repo\n")
    assert "names no licence" in done.stderr
    repo = hub.repos["user/repo"]
    assert (set(repo.files), repo.private) == ({"README.md", "draft.gguf"}, False)
    assert repo.files["draft.gguf"] == draft.read_bytes()
    assert fake_hub.card_data(repo)["localspec"]["file"] == "draft.gguf"
    assert len([request for request in hub.requests if "/commit/" in request]) == 1

    hub.requests.clear()
    again = push(draft, "user/repo")
    assert "everything was there already" in again.stderr
    assert not sent(hub)
    assert not [request for request in hub.requests if "/commit/" in request]

    with_licence = push(draft, "user/repo", "--license", "mit", "--base-model", "org/base")
    assert with_licence.rc == 0
    assert "licence" not in with_licence.stderr
    assert fake_hub.card_data(repo)["license"] == "mit"
    assert fake_hub.card_data(repo)["base_model"] == "org/base"
    assert not sent(hub)


def test_shards_and_a_checkpoint(hub: FakeHub, push: Push, tmp_path: Path) -> None:
    target = share_things.target(tmp_path)
    data = share_things.shards(tmp_path / "data", target)
    assert push(data, "user/both", "--private", "--target", target).rc == 0
    repo = hub.repos["datasets/user/both"]
    assert repo.private
    assert len(repo.files) == len(Shards.open(data).manifest.shards) + 2
    assert push(share_things.checkpoint(tmp_path / "run" / "best", target), "user/both").rc == 0
    assert set(hub.repos["user/both"].files) == {"README.md", "config.json", "model.safetensors", "localspec.json"}


def test_a_card_by_hand_stays(hub: FakeHub, push: Push, draft: Path) -> None:
    hub.repos["user/repo"] = Repo({"README.md": b"# By hand\n"})
    done = push(draft, "user/repo")
    assert done.rc == 0
    assert "the card there was written by hand and stays (--force replaces it)" in done.stderr
    assert "localspec-target-" in done.stderr
    assert hub.repos["user/repo"].files["README.md"] == b"# By hand\n"
    assert "draft.gguf" in hub.repos["user/repo"].files
    assert push(draft, "user/repo", "--force").rc == 0
    assert b"localspec push" in hub.repos["user/repo"].files["README.md"]


def test_private_is_not_taken_lightly(hub: FakeHub, push: Push, draft: Path) -> None:
    hub.repos["user/repo"] = Repo({})
    done = push(draft, "user/repo", "--private")
    assert "user/repo exists and is public" in done.stderr
    assert not hub.repos["user/repo"].files
    assert not sent(hub)


def test_dry_run_needs_no_hub_and_no_token(hub: FakeHub, push: Push, draft: Path) -> None:
    done = push(draft, "user/repo", "--dry-run", env={"HF_HUB_OFFLINE": "1", "HF_TOKEN": ""})
    assert done.rc == 0
    assert done.stdout.startswith("---\ntags:\n")
    assert f"{draft.stat().st_size:,}  draft.gguf" in done.stdout
    assert not hub.requests


def test_a_killed_push_goes_on(hub: FakeHub, push: Push, cli_env: dict[str, str], tmp_path: Path) -> None:
    data = share_things.shards(tmp_path / "data", share_things.target(tmp_path))
    names = [str(shard["file"]) for shard in Shards.open(data).manifest.shards]
    assert len(names) == 3
    size = (data / names[2]).stat().st_size
    hub.hold_upload_after = size  # the third is the smallest: the first two pass when they are let go
    command = [sys.executable, "-m", "localspec", "push", str(data), "user/data"]
    with subprocess.Popen(command, env=cli_env | share_things.hub_env(hub), cwd=tmp_path, stderr=subprocess.PIPE) as process:
        assert hub.holding.wait(60)
        hub.holding.clear()
        hub.hold_upload_after = 1000  # what is held now goes on, and the next one is held
        hub.go_on.set()
        hub.go_on.clear()
        assert hub.holding.wait(60)
        os.kill(process.pid, signal.SIGKILL)
    hub.hold_upload_after = None
    hub.go_on.set()
    end = time.monotonic() + 60
    while hub.requests.count("end of PUT") < len(sent(hub)) and time.monotonic() < end:
        time.sleep(0.05)  # what was on its way when the sender died may be whole
    n_stored = len(hub.objects)
    assert n_stored in (1, 2)
    assert not hub.repos["datasets/user/data"].files, "half a data set is not shown"
    hub.requests.clear()
    assert push(data, "user/data").rc == 0
    assert len(sent(hub)) == 3 - n_stored, "what had arrived is not sent again"
    files = hub.repos["datasets/user/data"].files
    for name in names:
        assert files[name] == (data / name).read_bytes()


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_bar_on_a_terminal(hub: FakeHub, cli_env: dict[str, str], draft: Path, tmp_path: Path, interrupted: bool) -> None:
    # More than what the sockets between us hold.
    draft.write_bytes(draft.read_bytes() + bytes(30_000_000))
    hub.hold_upload_after = 15_000_000
    env = cli_env | share_things.hub_env(hub)
    terminal = Terminal("push", draft, "user/repo", "--license", "mit", env=env, cwd=tmp_path)
    try:
        terminal.until(lambda: hub.holding.is_set() and "/30.4 MB" in terminal.text)
        first, bar = terminal.text.splitlines()
        assert first == f"localspec: sending to user/repo at {hub.url} (30 MB)"
        assert 10 <= float(bar.split("/")[0].split()[-1]) < 30, bar
        if interrupted:
            terminal.send("\x03")
        else:
            hub.go_on.set()
        assert terminal.wait() == (130 if interrupted else 0)
        assert ("interrupted" in terminal.text) is interrupted
        assert "MB/s" not in terminal.text, "the bar goes"
        assert ("draft.gguf" in hub.repos["user/repo"].files) is not interrupted
    finally:
        terminal.close()


@pytest.mark.parametrize(
    ("broken", "at", "said"),
    [
        (500, "", "answers HTTP 500; nothing has changed there, and the same command goes on"),
        (429, "/create", "too many requests to the hub: wait a few minutes"),
        (404, "/commit", "answers HTTP 404"),
        (413, "/commit", "answers HTTP 413"),
        (502, "/commit", "answers HTTP 502; nothing has changed there"),
        ("login-page", "", "does not answer as a hub does; check HF_ENDPOINT"),
        ("login-page", "/commit", "does not answer as a hub does"),
        (403, "/store", "may not write there"),
    ],
)
def test_a_hub_in_trouble(hub: FakeHub, push: Push, draft: Path, broken: int | str, at: str, said: str) -> None:
    hub.broken, hub.broken_at = broken, at
    done = push(draft, "user/repo", env={"HF_DEBUG": "1"} if at == "/create" else None)
    assert said in done.stderr
    assert "draft.gguf" not in hub.repos.get("user/repo", Repo({})).files


def test_who_may_write(hub: FakeHub, push: Push, draft: Path) -> None:
    hub.repos["user/repo"] = Repo({})
    for token, said in (
        (hub.read_only, "user/repo: your token may not write there"),
        ("hf_wrong", "the hub refuses the token: renew it"),
        ("", "pushing needs a token that may write: log in with `hf auth login` or set HF_TOKEN"),
        ("hf_sécret", "holds characters that no token has"),
        ("hf_a\x07b", "holds characters that no token has"),
    ):
        done = push(draft, "user/repo", env={"HF_TOKEN": token})
        assert (done.rc, said in done.stderr) == (2, True), done.stderr
    assert not hub.repos["user/repo"].files


def test_a_licence_that_the_hub_does_not_know(hub: FakeHub, push: Push, draft: Path) -> None:
    said = push(draft, "user/repo", "--license", "nonsense").stderr
    assert "the hub refuses it as malformed (HTTP 400): check --license and --base-model" in said
    assert not hub.repos["user/repo"].files


def test_no_hub(hub: FakeHub, push: Push, draft: Path) -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        nobody = f"http://someone:secret@127.0.0.1:{taken.getsockname()[1]}"
        done = push(draft, "user/repo", env={"HF_ENDPOINT": nobody})
    assert "can't be reached; nothing has changed there, and the same command goes on" in done.stderr
    assert "secret" not in done.stderr
    assert "HF_HUB_OFFLINE is set" in push(draft, "user/repo", env={"HF_HUB_OFFLINE": "1"}).stderr
    assert not hub.requests


def test_a_hub_without_a_store_for_xet(hub: FakeHub, push: Push, draft: Path) -> None:
    pytest.importorskip("hf_xet")
    done = push(draft, "user/repo", env={"HF_HUB_DISABLE_XET": "0"})
    assert done.rc == 2
    assert "draft.gguf" in done.stderr or "user/repo" in done.stderr
    assert "draft.gguf" not in hub.repos["user/repo"].files


def test_what_is_sent_has_a_length_for_requests_too(draft: Path) -> None:
    """huggingface-hub 0.x sends by requests, and a store takes nothing of unknown length."""
    utils = pytest.importorskip("requests.utils")
    told: list[int] = []
    with draft.open("rb") as file:
        reading = Told(file, told.append)
        assert utils.super_len(reading) == draft.stat().st_size
        assert reading.read(1000) + reading.read() == draft.read_bytes()
        assert told == [1000, draft.stat().st_size]
        assert reading.seek(0) == reading.tell() == 0


def test_a_file_that_the_repository_ignores(hub: FakeHub, push: Push, draft: Path) -> None:
    hub.ignored.add("draft.gguf")
    assert "leaves out draft.gguf: look at its .gitignore" in push(draft, "user/repo").stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("user",), "expected USER/REPO"),
        (("user/repo:Q8_0",), "expected USER/REPO"),
        (("user/repo", "--license", "All rights, mine"), "give it as the hub names it"),
        (("user/repo", "--base-model", "x"), "expected USER/REPO"),
        (("user/repo", "--target", "none.gguf"), "none.gguf does not exist"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_sent(
    hub: FakeHub, push: Push, draft: Path, args: tuple[str, ...], said: str
) -> None:
    assert said in push(draft, *args).stderr
    assert not hub.requests
