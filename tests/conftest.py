"""Fixtures for all tests: the real models, and the command line as a person starts it.

Nothing here or in a test goes to the network, except the fetching of models that are not cached yet: inside pytest a
connection to anything but this machine fails, and the commands that `cli` starts see a proxy that nobody answers.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Several workers (pytest -n) have CPUs of their own, and so have the commands that they start: decodes whose threads share
# a CPU with another's wait at every barrier. Before anything asks which CPUs there are.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
if _WORKER and hasattr(os, "sched_setaffinity"):
    _cpus = sorted(os.sched_getaffinity(0))
    _own = _cpus[int(_WORKER.removeprefix("gw")) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]
    os.sched_setaffinity(0, _own or _cpus)

# Before anything imports huggingface_hub, which reads its settings once.
os.environ["HF_HUB_OFFLINE"] = "1"

from localspec import native  # noqa: E402
from tests import models  # noqa: E402

# Started in the background of a script, we inherit an ignored SIGINT, and so would every command under test.
signal.signal(signal.SIGINT, signal.default_int_handler)

_LOOPBACK = ("127.", "::1", "localhost")


@pytest.fixture(autouse=True, scope="session")
def _no_network() -> Iterator[None]:
    """A test that forgets itself fails at once instead of depending on somebody's server."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not str(address[0]).startswith(_LOOPBACK):
            raise ConnectionRefusedError(f"tests don't use the network: {address}")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded)
        yield


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct Q4_1, the default model: llama architecture, ChatML."""
    return models.model("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """gemma-3-270m Q4_K_M: sliding window of 512, 262,144 tokens of vocabulary."""
    return models.model("gemma3")


@pytest.fixture(scope="session")
def qwen05() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct Q4_K_M, the draft of the big pair; skips unless LOCALSPEC_BIG_MODELS=1."""
    return _big("qwen05")


@pytest.fixture(scope="session")
def qwen15() -> Path:
    """Qwen2.5-Coder-1.5B-Instruct Q4_K_M, the target of the big pair; skips unless LOCALSPEC_BIG_MODELS=1."""
    return _big("qwen15")


def _big(name: str) -> Path:
    if os.environ.get("LOCALSPEC_BIG_MODELS") != "1":
        pytest.skip("needs the 1.5B + 0.5B pair (LOCALSPEC_BIG_MODELS=1)")
    return models.model(name)


@pytest.fixture(scope="session")
def default_cache(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for LOCALSPEC_CACHE in which the default model is already cached: for commands without --target."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "models").mkdir()
    (folder / "models" / models.MODELS["smollm2"].name).symlink_to(smollm2.resolve())
    return folder


@dataclass(frozen=True)
class CliResult:
    """What a command left: exit code and both streams, decoded as strict UTF-8 (half a character is an error)."""

    rc: int
    stdout: str
    stderr: str


Cli = Callable[..., CliResult]


@pytest.fixture
def cli_env(tmp_path: Path) -> dict[str, str]:
    """The environment of a command under test: offline, its caches and history below tmp_path, no colour wishes."""
    dropped = ("HF_", "HUGGING_FACE_", "LOCALSPEC_", "XDG_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    for key in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS", "LINES", "PYTHONPATH"):
        env.pop(key, None)
    for kind in ("CACHE", "CONFIG", "DATA", "STATE"):
        env[f"XDG_{kind}_HOME"] = str(tmp_path / "home" / kind.lower())
    env |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home" / "huggingface"), "PYTHONUTF8": "1"}
    env |= {"LOCALSPEC_CACHE": str(tmp_path / "home" / "localspec"), "PIP_RETRIES": "0"}
    # The discard port of this machine: nobody answers there.
    for key in ("http_proxy", "https_proxy", "all_proxy"):
        env[key] = env[key.upper()] = "http://127.0.0.1:9"
    return env | {"no_proxy": "127.0.0.1,localhost", "NO_PROXY": "127.0.0.1,localhost"}


@pytest.fixture
def cli(tmp_path: Path, cli_env: dict[str, str]) -> Cli:
    """Runs ``localspec ARGS...`` in a process of its own, in tmp_path, and returns a CliResult.

    ``cli("run", "--target", path, input="...", env={"NO_COLOR": "1"}, timeout=60)``; standard input is empty unless
    given. The exit code is returned, not checked; below 0 is the signal that ended it (-6: llama.cpp aborted).
    """

    def run(
        *args: object, input: str | bytes = b"", env: Mapping[str, str] | None = None, timeout: float = 300
    ) -> CliResult:
        done = subprocess.run(
            [sys.executable, "-m", "localspec", *map(str, args)],
            input=input.encode() if isinstance(input, str) else input,
            capture_output=True,
            env=cli_env | dict(env or {}),
            cwd=tmp_path,
            timeout=timeout,
            check=False,
            preexec_fn=native.unbound,  # models loaded in this process have bound it to one CPU
        )
        return CliResult(done.returncode, done.stdout.decode(), done.stderr.decode())

    return run
