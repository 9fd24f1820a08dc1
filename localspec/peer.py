"""llama-server beside us: the same files and flags, the same token ids as prompts, for `bench --peer-llama-server`."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from localspec import native
from localspec.accept import Sampling
from localspec.blocks import DEFAULT_N_MAX
from localspec.errors import LocalspecError
from localspec.gguf_file import GGUFFile
from localspec.pairing import llama_spec_type
from localspec.report import rate

_START_TIMEOUT = 180.0
_PR_SET_PDEATHSIG = 1
_PRCTL = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None


@dataclass(slots=True)
class PeerSide:
    """One llama-server, summed over prompts."""

    n_generated: int = 0
    seconds: float = 0.0
    n_drafted: int = 0
    n_accepted: int = 0
    n_equal: int = 0  # prompts whose ids equal our plain text's

    def as_json(self, n_prompts: int) -> dict[str, Any]:
        """Rate, acceptance, and whether its text is ours."""
        return {
            "tok_per_s": rate(self.n_generated, self.seconds),
            "n_generated": self.n_generated,
            "acceptance": self.n_accepted / self.n_drafted if self.n_drafted else None,
            "identical_to_ours": self.n_equal == n_prompts,
        }


class LlamaServer:
    """A llama-server process on a free port of loopback, for `n_parallel` requests at once, ended on close."""

    def __init__(self, binary: Path, arguments: Sequence[str], n_parallel: int = 1):
        self._port = _free_port()
        self._log: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        command = [str(binary), "--host", "127.0.0.1", "--port", str(self._port), "-np", str(n_parallel), *arguments]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                preexec_fn=_before_exec,
            )
        except OSError as error:
            self._log.close()
            raise LocalspecError(f"{binary}: can't be started: {error.strerror or error}") from error
        try:
            self._wait(binary)
        except BaseException:
            self.close()
            raise

    def _wait(self, binary: Path) -> None:
        deadline = time.monotonic() + _START_TIMEOUT
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise LocalspecError(f"{binary}: ended with code {self._process.returncode}: {self._last_line()}")
            try:
                if self._ask("GET", "/health", timeout=10)[0] == 200:
                    return
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.1)
        raise LocalspecError(f"{binary}: not ready after {_START_TIMEOUT:.0f} s: {self._last_line()}")

    def _last_line(self) -> str:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - (1 << 16)))
        lines = self._log.read().decode("utf-8", "replace").split("\n")
        wrong = [line for line in lines if "error" in line.lower()] or [line for line in lines if line.strip()]
        return wrong[-1].strip()[-300:] if wrong else "it printed nothing"

    def _ask(self, method: str, path: str, body: Any = None, timeout: float = 600) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout)
        try:
            data = json.dumps(body) if body is not None else None
            connection.request(method, path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def complete(self, tokens: list[int], sampling: Sampling, n_predict: int) -> dict[str, Any]:
        """The server's own answer to a prompt of token ids: `tokens`, `timings`, ..."""
        body = {
            "prompt": tokens,
            "n_predict": n_predict,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repeat_penalty": sampling.repeat_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repeat_last_n": sampling.penalty_last_n,
            "seed": sampling.seed,
            "cache_prompt": False,
            "return_tokens": True,
        }
        try:
            status, answer = self._ask("POST", "/completion", body)
        except (OSError, http.client.HTTPException) as error:
            # From a server that dies the connection ends first.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            state = "does not answer" if self._process.poll() is None else f"ended with code {self._process.returncode}"
            reason = str(error) or type(error).__name__
            raise LocalspecError(f"llama-server {state} ({reason}); its log ends: {self._last_line()}") from error
        if status != 200:
            raise LocalspecError(f"llama-server answered {status}: {answer[:200].decode('utf-8', 'replace')}")
        try:
            result: dict[str, Any] = json.loads(answer)
            result["timings"]["predicted_n"], result["timings"]["predicted_ms"]
        except (ValueError, TypeError, KeyError) as error:
            raise LocalspecError("llama-server's answer is not its own kind of JSON; is it a llama-server?") from error
        return result

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()


def _before_exec() -> None:
    """In the child: all CPUs, and an end of its own when we are killed and can't end it (Linux only)."""
    native.unbound()
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def server_arguments(settings: dict[str, Any]) -> list[str]:
    """llama-server's flags for the bench's settings, without the draft."""
    return [
        "-m", settings["target"], "-c", str(settings["n_ctx"]), "-t", str(settings["threads"]),
        "-b", str(settings["n_batch"]), "-ub", str(settings["n_batch"]), "-ngl", str(settings["n_gpu_layers"]),
        "-fa", settings["flash_attention"], "-ctk", settings["type_k"], "-ctv", settings["type_v"],
        "--no-webui", "--fit", "off",
    ]  # fmt: skip


def draft_arguments(settings: dict[str, Any]) -> list[str]:
    """The flags that make it draft as we do; ngram-simple looks up as many tokens as our longest match."""
    draft = GGUFFile.open(Path(settings["draft"]), "draft") if settings["draft"] else None
    arguments = ["--spec-type", llama_spec_type(settings["spec_type"], draft)]
    # Where we choose the number as we go, it gets its own default, not our upper bound.
    n_max = str(min(settings["n_max"], DEFAULT_N_MAX) if settings["adapt"] else settings["n_max"])
    if settings["draft"]:
        arguments += ["-md", settings["draft"], "-ngld", str(settings["n_gpu_layers_draft"])]
        arguments += ["--spec-draft-n-max", n_max, "--spec-draft-p-min", str(settings["p_min"])]
    else:
        arguments += ["--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", n_max]
    return arguments


@dataclass
class Peers:
    """Two llama-servers, plain and drafting, asked in turn with our own two engines."""

    binary: Path
    settings: dict[str, Any]
    sampling: Sampling
    plain: PeerSide = field(default_factory=PeerSide)
    spec: PeerSide = field(default_factory=PeerSide)
    n_prompts: int = 0

    def __enter__(self) -> Peers:
        common = server_arguments(self.settings)
        self._servers = [(self.plain, LlamaServer(self.binary, common))]
        try:
            self._servers.append((self.spec, LlamaServer(self.binary, common + draft_arguments(self.settings))))
            for _, server in self._servers:  # nothing is timed cold
                server.complete([1, 1], self.sampling, 4)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        for _, server in self._servers:
            server.close()

    def measure(self, tokens: list[int], ours: list[int]) -> None:
        """Have both answer one prompt; `ours` is our plain text, to compare with."""
        answers = [server.complete(tokens, self.sampling, self.settings["n_predict"]) for _, server in self._servers]
        self.n_prompts += 1
        for (side, _), answer in zip(self._servers, answers):
            timings = answer["timings"]
            side.n_generated += int(timings["predicted_n"])
            side.seconds += float(timings["predicted_ms"]) / 1e3
            side.n_drafted += int(timings.get("draft_n", 0))
            side.n_accepted += int(timings.get("draft_n_accepted", 0))
            theirs = answer.get("tokens", [])
            # The server leaves the end-of-generation token out.
            side.n_equal += theirs == ours or theirs == ours[:-1]

    def as_json(self) -> dict[str, Any]:
        """Both sides."""
        return {
            "plain": self.plain.as_json(self.n_prompts),
            "spec": self.spec.as_json(self.n_prompts),
            "binary": str(self.binary),
        }
