"""Which file of a hub's repository is meant, and how it gets here: against a hub on loopback."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from localspec.errors import FetchError
from localspec.hub import Spec, choose
from tests import fake_hub
from tests.conftest import Cli
from tests.fake_hub import FakeHub, Repo
from tests.terminal import Terminal

# --- which file is meant ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("user/repo", Spec("user/repo")),
        ("user/Repo-1.5_x", Spec("user/Repo-1.5_x")),
        ("user/repo:Q8_0", Spec("user/repo", quant="Q8_0")),
        ("user/repo:q4_k_m", Spec("user/repo", quant="q4_k_m")),
        ("user/repo:model.gguf", Spec("user/repo", file="model.gguf")),
        ("user/repo:sub/model.gguf", Spec("user/repo", file="sub/model.gguf")),
        ("user/repo/sub/model.gguf", Spec("user/repo", file="sub/model.gguf")),
        ("user/repo-Q4.gguf", Spec("user/repo-Q4.gguf")),
    ],
)
def test_spec(text: str, expected: Spec) -> None:
    assert Spec.parse(text, "-hf") == expected


@pytest.mark.parametrize(
    "text",
    ["", "repo", "user/", "/repo", "user/repo:", "a/b/c", "user/re po", "../../etc", "https://x.org/a/b", "user/repo/"],
)
def test_bad_spec(text: str) -> None:
    with pytest.raises(FetchError, match="expected USER/REPO") as caught:
        Spec.parse(text, "-hfd")
    assert "-hfd" in str(caught.value)


NAMES = [
    "README.md",
    "imatrix.gguf",
    "mmproj-Q8_0.gguf",
    "model-BF16.gguf",
    "model-IQ4_XS.gguf",
    "model-Q4_K_M.gguf",
    "model-Q4_K_S.gguf",
    "model-Q8_0.gguf",
    "model-f16.gguf",
    "model-q8_0.gguf.txt",
    "mtp-model-Q6_K.gguf",
    "sub/UD-Q2_K_XL.gguf",
]


@pytest.mark.parametrize(
    ("names", "spec", "role", "expected"),
    [
        (NAMES, "u/r", "target", "model-Q4_K_M.gguf"),
        ([n for n in NAMES if "K_M" not in n], "u/r", "target", "model-Q8_0.gguf"),
        (["README.md", "b.gguf", "a-mmproj.gguf", "c.gguf"], "u/r", "target", "b.gguf"),
        (NAMES, "u/r:q8_0", "target", "model-Q8_0.gguf"),
        (NAMES, "u/r:Q4_K_S", "target", "model-Q4_K_S.gguf"),
        (NAMES, "u/r:F16", "target", "model-f16.gguf"),  # and not BF16, which comes first
        (NAMES, "u/r:Q2_K_XL", "target", "sub/UD-Q2_K_XL.gguf"),
        (NAMES, "u/r:Q6_K", "draft", "mtp-model-Q6_K.gguf"),
        (NAMES, "u/r", "draft", "model-Q4_K_M.gguf"),  # a whole model goes before a sidecar
        (["eagle3-x.gguf"], "u/r", "draft", "eagle3-x.gguf"),
        (NAMES, "u/r:mmproj-Q8_0.gguf", "target", "mmproj-Q8_0.gguf"),  # named exactly: the reader judges it
        (NAMES, "u/r/sub/UD-Q2_K_XL.gguf", "target", "sub/UD-Q2_K_XL.gguf"),
        (["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf", "n-Q8_0.gguf"], "u/r", "target", "n-Q8_0.gguf"),
    ],
)
def test_choice(names: list[str], spec: str, role: str, expected: str) -> None:
    assert choose(names, Spec.parse(spec, "-hf"), role) == expected
    assert choose(list(reversed(names)), Spec.parse(spec, "-hf"), role) == expected


@pytest.mark.parametrize(
    ("names", "spec", "role", "said"),
    [
        (NAMES, "u/r:Q5_K_M", "target", "quantisation Q5_K_M; it has imatrix.gguf, mmproj-Q8_0.gguf, model-BF16.gguf"),
        (NAMES, "u/r:Q4_K", "target", "quantisation Q4_K;"),
        (NAMES, "u/r:.*", "target", "quantisation .*;"),  # a name, not a pattern
        (NAMES, "u/r:Q6_K", "target", "quantisation Q6_K"),  # only a sidecar has it
        (NAMES, "u/r:other.gguf", "target", "u/r has no file other.gguf; it has imatrix.gguf"),
        (["config.json", "model.safetensors"], "u/r", "target", "no GGUF file at all; look for a repository whose name"),
        (["mmproj-x.gguf"], "u/r", "draft", "no GGUF model; it has mmproj-x.gguf"),
        ([f"m{i:02}.gguf" for i in range(30)], "u/r:Q8_0", "target", "m11.gguf and 18 more"),
        (["m-Q4_K_M-00001-of-00003.gguf"], "u/r", "target", "m-Q4_K_M-00001-of-00003.gguf is one of 3 splits"),
        (["m-00002-of-00003.gguf"], "u/r:m-00002-of-00003.gguf", "target", "--merge"),
    ],
)
def test_no_choice(names: list[str], spec: str, role: str, said: str) -> None:
    with pytest.raises(FetchError) as caught:
        choose(names, Spec.parse(spec, "-hf"), role)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# --- getting it: huggingface-hub reads its settings once, so each question is asked in a process of its own -----------

_ASK = """
import json, sys
import localspec.hub
from localspec.errors import FetchError
assert "huggingface_hub" not in sys.modules, "imported before it is needed"
answers = []
for spec, role in json.loads(sys.argv[1]):
    try:
        said = []
        path = localspec.hub.resolve(spec, role, lambda *args: said.append(args))
        answers.append({"path": str(path), "error": "", "said": said})
    except FetchError as error:
        answers.append({"path": "", "error": str(error), "said": said})
print(json.dumps(answers))
"""

Ask = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub.running() as hub:
        yield hub


@pytest.fixture
def ask(cli_env: dict[str, str], hub: FakeHub, tmp_path: Path) -> Ask:
    """``ask("user/repo", ..., role=, env=)`` -> one answer each, with ``path`` or ``error``; one line, no noise."""

    def run(*specs: str, role: str = "target", env: dict[str, str] | None = None) -> list[dict[str, Any]]:
        settings = cli_env | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_ETAG_TIMEOUT": "5"} | (env or {})
        command = [sys.executable, "-c", _ASK, json.dumps([(spec, role) for spec in specs])]
        done = subprocess.run(command, env=settings, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr == "", "progress bars and hints belong on a terminal only"
        answers: list[dict[str, Any]] = json.loads(done.stdout)
        for answer in answers:
            assert "\n" not in answer["error"]
        return answers

    return run


def _content(n_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(n_bytes)


def test_downloads_once_and_then_works_offline(hub: FakeHub, ask: Ask) -> None:
    small, large = _content(1000, 1), _content(300_000, 2)
    hub.repos["user/repo"] = Repo({"m-Q4_K_M.gguf": large, "m-Q8_0.gguf": small, "sub/m-F16.gguf": small})
    first = ask("user/repo", "user/repo:q8_0", "user/repo/sub/m-F16.gguf")
    assert [Path(a["path"]).name for a in first] == ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-F16.gguf"]
    assert Path(first[0]["path"]).read_bytes() == large
    assert Path(first[1]["path"]).read_bytes() == small

    assert first[0]["said"][0] == [f"user/repo/m-Q4_K_M.gguf from {hub.url}", 0, 300_000]

    hub.requests.clear()
    again = ask("user/repo")
    assert (again[0]["path"], again[0]["said"]) == (first[0]["path"], [])
    assert not [request for request in hub.requests if request.startswith("GET /user")], "it was in the cache"

    hub.requests.clear()
    offline = ask("user/repo", "user/repo:Q8_0", "user/repo:Q5_0", "user/other", env={"HF_HUB_OFFLINE": "1"})
    assert [a["path"] for a in offline[:2]] == [a["path"] for a in first[:2]]
    assert "it has m-Q4_K_M.gguf, m-Q8_0.gguf, sub/m-F16.gguf" in offline[2]["error"]
    assert "HF_HUB_OFFLINE is set" in offline[2]["error"]
    assert "user/other is not in the cache" in offline[3]["error"]
    assert "--target FILE" in offline[3]["error"]
    assert not hub.requests


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_bar_on_a_terminal(hub: FakeHub, cli_env: dict[str, str], tmp_path: Path, interrupted: bool) -> None:
    # Larger than the pieces of 10 MiB that huggingface-hub writes.
    hub.repos["user/repo"] = Repo({"m-Q4_K_M.gguf": _content(25_000_000)})
    hub.hold_after = 22_000_000
    env = cli_env | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    terminal = Terminal("run", "-hf", "user/repo", "-p", "hi", env=env, cwd=tmp_path)
    try:
        terminal.until("21.0/25.0 MB")
        first, bar = terminal.text.splitlines()
        assert first == f"localspec: fetching user/repo/m-Q4_K_M.gguf from {hub.url} (25 MB)"
        assert re.fullmatch(r"\W+ 21\.0/25\.0 MB +(\?|[\d.]+ .?B/s) +[\d:-]+", bar), "rate and time left"
        if interrupted:
            terminal.send("\x03")
        else:
            hub.go_on.set()
        code = terminal.wait()
        assert (code, "interrupted" in terminal.text) == ((130, True) if interrupted else (2, False))
        assert ("is not a GGUF file" in terminal.text) is not interrupted
        assert "25.0 MB" not in terminal.text, "the bar goes"
    finally:
        terminal.close()


def test_hub_out_of_reach(hub: FakeHub, ask: Ask) -> None:
    hub.repos["user/repo"] = Repo({"m-Q8_0.gguf": b"GGUF"})
    first = ask("user/repo")
    nobody = {"HF_ENDPOINT": "http://someone:secret@127.0.0.1:9"}
    cached, missing = ask("user/repo", "user/other", role="draft", env=nobody)
    assert cached["path"] == first[0]["path"]
    assert "user/other is not in the cache" in missing["error"]
    assert "http://127.0.0.1:9 can't be reached" in missing["error"]
    assert "--draft FILE" in missing["error"]
    assert "secret" not in missing["error"]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (500, "answers HTTP 500"),
        (429, "too many requests to the hub: wait a few minutes"),
        (404, "answers HTTP 404"),
        ("login-page", "does not answer as a hub does; check HF_ENDPOINT"),
    ],
)
def test_hub_in_trouble(hub: FakeHub, ask: Ask, broken: int | str, said: str) -> None:
    hub.broken = broken
    assert said in ask("user/repo")[0]["error"]


def test_who_may_read(hub: FakeHub, ask: Ask) -> None:
    hub.repos["user/open"] = Repo({"m.gguf": b"open"})
    hub.repos["user/private"] = Repo({"m.gguf": b"private"}, private=True)
    hub.repos["user/gated"] = Repo({"m.gguf": b"gated"}, gated=True)
    everything = ("user/open", "user/private", "user/gated", "user/absent")

    with_none = ask(*everything)
    assert Path(with_none[0]["path"]).read_bytes() == b"open"
    for answer in (with_none[1], with_none[3]):
        assert "does not exist" in answer["error"]
        assert "log in with `hf auth login` or set HF_TOKEN" in answer["error"]
    assert f"user/gated is gated: accept its terms at {hub.url}/user/gated" in with_none[2]["error"]

    with_wrong = ask(*everything[1:], env={"HF_TOKEN": "hf_wrong"})
    for answer in with_wrong:
        assert "the hub refuses the token: renew it" in answer["error"]
        assert "hf_wrong" not in answer["error"]

    with_right = ask(*everything, env={"HF_TOKEN": hub.token})
    contents = [Path(answer["path"]).read_bytes() for answer in with_right[:3]]
    assert contents == [b"open", b"private", b"gated"]
    assert "user/absent does not exist" in with_right[3]["error"]
    assert hub.token not in with_right[3]["error"]


def test_a_cut_connection_is_resumed(hub: FakeHub, ask: Ask) -> None:
    content = _content(400_000)
    hub.repos["user/repo"] = Repo({"m.gguf": content})
    hub.cuts, hub.cut_after = 1, 150_000
    answer = ask("user/repo")[0]
    if answer["error"]:  # huggingface-hub 0.x resumes only when it is asked again
        assert "try again" in answer["error"]
        answer = ask("user/repo")[0]
    assert Path(answer["path"]).read_bytes() == content
    assert hub.requests.count("cut") == 1


def test_a_download_that_breaks_off_leaves_no_file(hub: FakeHub, ask: Ask) -> None:
    content = _content(400_000)
    hub.repos["user/repo"] = Repo({"m.gguf": content})
    hub.cuts, hub.cut_after = 1000, 0
    error = ask("user/repo")[0]["error"]
    assert "the download of user/repo/m.gguf broke off; connect and try again" in error
    assert "user/repo is not in the cache" in ask("user/repo", env={"HF_HUB_OFFLINE": "1"})[0]["error"]
    hub.cuts = 0
    assert Path(ask("user/repo")[0]["path"]).read_bytes() == content


def test_a_cache_that_cannot_be_written(hub: FakeHub, ask: Ask, tmp_path: Path) -> None:
    hub.repos["user/repo"] = Repo({"m.gguf": b"GGUF"})
    (tmp_path / "file").write_text("not a folder")
    error = ask("user/repo", env={"HF_HOME": str(tmp_path / "file")})[0]["error"]
    assert "set HF_HOME to a folder that can be written to" in error


def test_command_line_says_it_in_one_line(cli: Cli) -> None:
    done = cli("run", "-hf", "user/repo", "-p", "hello")
    assert done.rc == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "user/repo is not in the cache" in done.stderr
