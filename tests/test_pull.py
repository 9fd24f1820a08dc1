"""`localspec pull` against a hub on loopback: by name and for a target, resumed, checked, and nothing half under a name."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from localspec.data.shards import Shards
from localspec.gguf_file import GGUFFile
from localspec.share import card
from localspec.share.artefact import read
from localspec.share.find import Candidate, candidate, none_found
from localspec.speculator import TargetIdentity
from tests import fake_hub, gguf_maker, share_things
from tests.conftest import Cli, CliResult
from tests.fake_hub import FakeHub, Repo
from tests.terminal import Terminal

Pull = Callable[..., CliResult]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub.running() as hub:
        yield hub


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return share_things.target(tmp_path)


@pytest.fixture
def pull(cli: Cli, hub: FakeHub) -> Pull:
    """``pull(..., env=)``: whatever happens, the token is never shown, and an error is one line behind what was fetched."""

    def run(*args: object, env: dict[str, str] | None = None) -> CliResult:
        settings = share_things.hub_env(hub) | (env or {})
        done = cli("pull", *args, env=settings)
        shown = done.stdout + done.stderr
        assert not settings["HF_TOKEN"] or settings["HF_TOKEN"] not in shown
        assert "Bearer" not in shown
        assert "Traceback" not in shown
        if done.rc:
            assert (done.rc, done.stdout) == (2, "")
            *before, last = done.stderr.splitlines()
            assert last.startswith("localspec: error: ")
            assert not [line for line in before if not line.startswith(("localspec: fetching", "localspec: 3 drafts", "  "))]
        return done

    return run


def shared(hub: FakeHub, repo: str, source: Path, downloads: int = 0, **more: object) -> Repo:
    """What `localspec push` makes of `source`, put where `hub` has it."""
    artefact = read(source)
    files = {item.name: item.content or item.path.read_bytes() for item in artefact.items}
    files[card.CARD] = card.card(artefact, repo).encode()
    kind = artefact.repo_kind
    hub.repos[f"datasets/{repo}" if kind == "dataset" else repo] = made = Repo(files, kind=kind, downloads=downloads)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def got(hub: FakeHub) -> list[str]:
    """The files that were fetched."""
    return [request for request in hub.requests if request.startswith("GET") and "/resolve/" in request]


def left(folder: Path) -> set[str]:
    """Every file below a folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# -- by name -----------------------------------------------------------------------------------------------------------


def test_a_draft_into_the_cache_and_into_a_folder(hub: FakeHub, pull: Pull, target: Path, tmp_path: Path) -> None:
    draft = share_things.draft(tmp_path / "draft.gguf", target)
    shared(hub, "user/repo", draft)
    done = pull("user/repo")
    path = Path(done.stdout.strip())
    assert done.rc == 0
    assert path.read_bytes() == draft.read_bytes()
    assert f"run it: localspec run --target TARGET.gguf --draft {path}" in done.stderr
    hub.requests.clear()
    assert pull("user/repo:draft.gguf", "--for", target).stdout == done.stdout
    assert not got(hub)

    into = pull("user/repo", "-o", tmp_path / "new" / "folder", "--for", target)
    assert into.stdout == f"{tmp_path}/new/folder/draft.gguf\n"
    assert f"--target {target}" in into.stderr
    assert left(tmp_path / "new") == {"folder/draft.gguf"}
    hub.requests.clear()
    assert pull("user/repo", "-o", tmp_path / "new" / "folder").rc == 0
    assert not got(hub)

    for env in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        assert pull("user/repo", env=env).stdout == done.stdout, "without the hub the cache serves"
        offline = pull("user/repo", "-o", tmp_path / "new" / "folder", env=env)
        assert "user/repo can't be fetched" in offline.stderr
        assert "user/other can't be fetched" in pull("user/other", env=env).stderr


def test_what_hfd_fetched_serves_without_the_hub(hub: FakeHub, pull: Pull, cli: Cli, target: Path, tmp_path: Path) -> None:
    draft = share_things.draft(tmp_path / "draft.gguf", target)
    shared(hub, "user/repo", draft)
    cli("run", "-m", target, "-hfd", "user/repo", "-p", "x", "-n", "1", env=share_things.hub_env(hub))
    done = pull("user/repo", env={"HF_HUB_OFFLINE": "1"})
    assert (done.rc, done.stderr.count("\n")) == (0, 1)
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "home" / "huggingface")


def test_a_checkpoint_and_shards(hub: FakeHub, pull: Pull, target: Path, tmp_path: Path) -> None:
    data, run = share_things.shards(tmp_path / "data", target), share_things.checkpoint(tmp_path / "run", target)
    shared(hub, "user/run", run)
    shared(hub, "user/data", data)
    shared(hub, "user/run", data)  # a model and a data set of one name
    done = pull("user/run", "-o", "run2", "--for", target)
    assert done.stdout == "run2\n"
    assert "localspec convert run2 --target" in done.stderr
    assert left(tmp_path / "run2") == {"config.json", "model.safetensors", "localspec.json"}

    done = pull("user/data", "-o", "data2", "--for", target)
    assert done.stdout == "data2\n"
    assert "localspec train eagle3 --target" in done.stderr
    assert left(tmp_path / "data2") == left(data) - {".lock"}
    Shards.open(tmp_path / "data2").verify()
    assert len(Shards.open(Path(pull("user/run", "--data").stdout.strip()))) == 60, "in the cache"

    other = share_things.target(tmp_path, "other.gguf", n_layer=3)
    for repo in ("user/run", "user/data"):
        assert "has 3 layers, not 2" in pull(repo, "-o", "wrong", "--for", other).stderr
        assert not (tmp_path / "wrong").exists()


def test_what_is_there_with_another_content_stays(hub: FakeHub, pull: Pull, target: Path, tmp_path: Path) -> None:
    draft = share_things.draft(tmp_path / "draft.gguf", target)
    shared(hub, "user/repo", draft)
    there = tmp_path / "out" / "draft.gguf"
    there.parent.mkdir()
    there.write_text("mine")
    assert "draft.gguf exists with another content: choose another folder" in pull("user/repo", "-o", "out").stderr
    assert there.read_text() == "mine"
    assert pull("user/repo", "-o", "out", "--force").rc == 0
    assert there.read_bytes() == draft.read_bytes()
    assert "-o draft.gguf: that is a file" in pull("user/repo", "-o", "draft.gguf").stderr


@pytest.mark.parametrize("into_folder", [True, False])
def test_a_killed_pull_goes_on(
    hub: FakeHub, pull: Pull, cli_env: dict[str, str], target: Path, tmp_path: Path, into_folder: bool
) -> None:
    # More than the pieces of 10 MiB that huggingface-hub writes.
    draft = share_things.draft(tmp_path / "draft.gguf", target)
    draft.write_bytes(draft.read_bytes() + bytes(range(256)) * 100_000)
    shared(hub, "user/repo", draft)
    hub.hold_after = 22_000_000
    options = ("-o", "out") if into_folder else ()
    place = tmp_path / "out" if into_folder else tmp_path / "home" / "localspec"

    def unfinished() -> int:
        return max((path.stat().st_size for path in place.rglob("*.part")), default=0)

    command = [sys.executable, "-m", "localspec", "pull", "user/repo", *options]
    with subprocess.Popen(command, env=cli_env | share_things.hub_env(hub), cwd=tmp_path, stderr=subprocess.PIPE) as process:
        end = time.monotonic() + 60
        while unfinished() < 10_000_000 and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
    assert unfinished() >= 10_000_000
    assert not list(place.rglob("draft.gguf"))
    hub.hold_after = None
    hub.go_on.set()
    hub.ranges.clear()
    done = pull("user/repo", *options)
    assert (tmp_path / done.stdout.strip()).read_bytes() == draft.read_bytes()
    assert [start >= 10_000_000 for start in hub.ranges] == [True], "what had arrived is not fetched again"
    if into_folder:
        assert left(tmp_path / "out") == {"draft.gguf"}


@pytest.mark.parametrize("into_folder", [True, False])
def test_what_is_not_what_the_hub_says(hub: FakeHub, pull: Pull, target: Path, tmp_path: Path, into_folder: bool) -> None:
    draft = share_things.draft(tmp_path / "draft.gguf", target)
    repo = shared(hub, "user/repo", draft, lie="0" * 64)
    options = ("-o", "out") if into_folder else ()
    place = tmp_path / "out" if into_folder else tmp_path / "home" / "localspec"
    said = pull("user/repo", *options).stderr
    assert "draft.gguf arrived damaged (SHA " in said
    assert not [path for path in place.rglob("*") if path.is_file() and path.stat().st_size == draft.stat().st_size]
    repo.lie = ""
    assert pull("user/repo", *options).rc == 0


def test_what_is_of_no_use(hub: FakeHub, pull: Pull, target: Path, tmp_path: Path) -> None:
    draft = share_things.draft(tmp_path / "draft.gguf", target)
    other = share_things.target(tmp_path, "other.gguf", n_layer=3)
    shared(hub, "user/repo", draft)
    hub.repos["user/text"] = Repo({"x.gguf": b"this is no model, whatever its name says"}, kind="model")
    hub.repos["user/empty"] = Repo({"README.md": b""}, kind="model")
    hub.repos["user/half"] = Repo({"model.safetensors": b"1", "localspec.json": b"{}"}, kind="model")
    hub.repos["user/set"] = Repo({"train.jsonl": b"{}"}, kind="dataset")
    for args, words in (
        (("user/repo", "--for", other), "draft.gguf can't draft for other.gguf"),
        (("user/text",), "is not a GGUF file"),
        (("user/empty",), "it holds no GGUF file at all"),
        (("user/half",), "holds a checkpoint without config.json"),
        (("user/set",), "no shards of localspec data"),
        (("user/repo:Q9_9",), "no GGUF model of quantisation Q9_9; it has draft.gguf"),
        (("user/none",), "user/none does not exist"),
        (("user/repo", "--data"), "user/repo does not exist"),
        (("user",), "expected USER/REPO"),
        ((), "name a repository"),
        (("user/repo", "--choose"), "are for a search"),
        (("--for", target, "--data"), "--data needs a name"),
        (("user/repo", "--for", "none.gguf"), "none.gguf does not exist"),
    ):
        assert words in pull(*args, *(("-o", "out") if args else ())).stderr, args
        assert not (tmp_path / "out").exists(), args


def test_a_manifest_of_other_shards(hub: FakeHub, pull: Pull, target: Path, tmp_path: Path) -> None:
    repo = shared(hub, "user/data", share_things.shards(tmp_path / "data", target))
    repo.files["shard-00001.safetensors"] += b"changed"
    assert "shard-00001.safetensors there is not the shard that manifest.json names" in pull("user/data", "-o", "out").stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("broken", "at", "said"),
    [
        (500, "", "can't be fetched, "),
        (429, "", "too many requests to the hub: wait a few minutes"),
        (403, "/resolve/", "the hub forbids access"),
        (404, "/api/", "answers HTTP 404"),
        ("login-page", "", "does not answer as a hub does; check HF_ENDPOINT"),
        ("odd-names", "/user/repo", "does not answer as a hub does; check HF_ENDPOINT"),
    ],
)
def test_a_hub_in_trouble(
    hub: FakeHub, pull: Pull, target: Path, tmp_path: Path, broken: int | str, at: str, said: str
) -> None:
    shared(hub, "user/repo", share_things.draft(tmp_path / "draft.gguf", target))
    hub.broken, hub.broken_at = broken, at
    for args in (("user/repo", "-o", "out"), ("--for", target, "-o", "out")):
        done = pull(*args, env={"HF_DEBUG": "1"} if broken == 429 else None)
        assert (done.rc, left(tmp_path / "out")) == (2, set())
        assert said in done.stderr or (broken == 500 and "answers HTTP 500" in done.stderr)


def test_who_may_read(hub: FakeHub, pull: Pull, target: Path, tmp_path: Path) -> None:
    draft = share_things.draft(tmp_path / "draft.gguf", target)
    shared(hub, "user/private", draft, private=True)
    shared(hub, "user/gated", draft, gated=True)
    assert pull("user/private").rc == 0
    for token, said in (("", "user/private does not exist"), ("hf_wrong", "refuses the token"), ("hf_\xe9", "no token has")):
        assert said in pull("user/private", "-o", "out", env={"HF_TOKEN": token}).stderr
    assert (
        f"user/gated is gated: accept its terms at {hub.url}/user/gated" in pull("user/gated", env={"HF_TOKEN": ""}).stderr
    )


def test_a_folder_that_cannot_be_written(hub: FakeHub, pull: Pull, target: Path, tmp_path: Path) -> None:
    shared(hub, "user/repo", share_things.draft(tmp_path / "draft.gguf", target))
    said = pull("user/repo", "-o", "/proc/nothing/here").stderr
    assert "can't be written" in said
    assert "choose another folder with -o" in said


def test_a_name_that_lies_elsewhere(hub: FakeHub, pull: Pull, target: Path, tmp_path: Path) -> None:
    draft = share_things.draft(tmp_path / "draft.gguf", target)
    hub.repos["user/repo"] = Repo({"../escaped.gguf": draft.read_bytes()}, kind="model")
    assert "a name that would lie elsewhere" in pull("user/repo", "-o", "out").stderr
    hub.repos["user/repo"] = Repo({"sub/inside.gguf": draft.read_bytes()}, kind="model")
    assert pull("user/repo", "-o", "out").rc == 0
    assert left(tmp_path / "out") == {"inside.gguf"}
    assert not (tmp_path / "escaped.gguf").exists()


# -- for a target ------------------------------------------------------------------------------------------------------


def test_drafts_for_a_target(hub: FakeHub, pull: Pull, target: Path, tmp_path: Path) -> None:
    said = pull("--for", target).stderr
    assert "the hub has no draft for tiny llama (localspec-target-" in said
    assert f"localspec train eagle3 --target {target} --data data" in said

    slow = share_things.draft(tmp_path / "slow.gguf", target, seed=1, per_verify=1.5)
    fast = share_things.draft(tmp_path / "fast.gguf", target, seed=2, per_verify=3.0)
    other = share_things.target(tmp_path, "other.gguf", n_layer=3)
    shared(hub, "anna/slow", slow, downloads=9000)
    shared(hub, "user/other", share_things.draft(tmp_path / "o.gguf", other, per_verify=9.0))
    done = pull("--for", target)
    assert Path(done.stdout.strip()).read_bytes() == slow.read_bytes()
    assert "drafts for" not in done.stderr, "there was no choice"

    shared(hub, "bert/fast", fast, downloads=7)
    shared(hub, "carl/small", gguf_maker.tiny_llama(tmp_path / "small.gguf", n_layer=1, seed=3))
    listed = pull("--for", target, "--list").stdout.splitlines()
    assert [line.split()[:3] for line in listed[1:]] == [
        ["1", "bert/fast:fast.gguf", "eagle3"], ["2", "anna/slow:slow.gguf", "eagle3"], ["3", "carl/small:small.gguf", "lm"],
    ]  # fmt: skip
    assert listed[1].split()[3:] == ["0.4", "MB", "3.00", "7"]
    assert listed[3].split()[-2:] == ["?", "0"]
    done = pull("--for", target, "-o", "out")
    assert done.stdout == "out/fast.gguf\n"
    assert "3 drafts for tiny llama" in done.stderr
    assert "--choose asks in a terminal" in pull("--for", target, "--choose").stderr.splitlines()[-1]
    assert "HF_HUB_OFFLINE is set: the hub can't be searched" in pull("--for", target, env={"HF_HUB_OFFLINE": "1"}).stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = {"HF_ENDPOINT": f"http://me:secret@127.0.0.1:{taken.getsockname()[1]}"}
        said = pull("--for", target, env=nobody).stderr
    assert "can't be reached" in said
    assert "secret" not in said


def test_the_person_chooses(hub: FakeHub, cli_env: dict[str, str], target: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        shared(hub, f"user/r{number}", share_things.draft(tmp_path / f"d{number}.gguf", target, number, 3.0 - number))
    env = cli_env | share_things.hub_env(hub)
    terminal = Terminal("pull", "--for", target, "--choose", "-o", "out", env=env, cwd=tmp_path, columns=120)
    try:
        terminal.until("which [1]:")
        assert "2  user/r2:d2.gguf" in terminal.text
        terminal.send("2\r")
        assert terminal.wait() == 0
    finally:
        terminal.close()
    assert left(tmp_path / "out") == {"d2.gguf"}


def test_cards_are_not_believed(hub: FakeHub, pull: Pull, target: Path, tmp_path: Path) -> None:
    """A card that claims another's target is found out when the draft is here; one in no known form is passed over."""
    other = share_things.target(tmp_path, "other.gguf", n_layer=3)
    liar = shared(hub, "user/liar", share_things.draft(tmp_path / "liar.gguf", other))
    true = card.card(read(share_things.draft(tmp_path / "true.gguf", target)), "user/liar")
    liar.files[card.CARD] = true.replace('file: "true.gguf"', 'file: "liar.gguf"').encode()
    said = pull("--for", target, "-o", "out").stderr
    assert "liar.gguf can't draft for target.gguf" in said
    assert not (tmp_path / "out").exists()


def test_cards_in_no_known_form(target: Path, tmp_path: Path) -> None:
    identity = TargetIdentity.of(GGUFFile.open(target))
    keys = card.metadata(read(share_things.draft(tmp_path / "true.gguf", target)))
    about = keys[card.KEY]

    def seen(value: object, repo: str = "user/repo", downloads: object = 5) -> Candidate | None:
        return candidate(SimpleNamespace(id=repo, card_data={card.KEY: value}, downloads=downloads), identity)

    assert seen(about) == Candidate("user/repo", "true.gguf", "eagle3", about["bytes"], 2.25, 5)
    for wrong in (
        None, 3, [], {}, {"kind": "draft"}, about | {"kind": "data"}, about | {"method": [1]}, about | {"method": "../../x"},
        about | {"target": 7}, about | {"target": about["target"] | {"layers": 3}},
        about | {"target": about["target"] | {"tokenizer": "0" * 64}},
    ):  # fmt: skip
        assert seen(wrong) is None, wrong
    assert seen(about, repo="user/re po\x1b[31m") is None
    strange = about | {"file": "../\x1b[31m.gguf", "bytes": -3, "tokens_per_verify": "many"}
    assert seen(strange, downloads=None) == Candidate("user/repo", "", "eagle3", 0, 0.0, 0)
    assert candidate(SimpleNamespace(id="user/repo", card_data=None, downloads=1), identity) is None
    assert none_found(GGUFFile.open(target), "t.gguf", shipped=True).args[0].endswith("localspec run --target t.gguf")
