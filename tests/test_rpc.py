"""Layers on other machines: what is checked before llama.cpp hears of a server, and, where this llama.cpp has its RPC
backend (or LOCALSPEC_GGML_RPC names the plug-in), a real server on this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from localspec import native, rpc
from localspec.data.shards import Shards
from localspec.errors import NativeError, UsageError
from tests import gguf_maker
from tests.conftest import Cli

_HELLO = struct.pack("<BQ", 14, 24) + bytes(24)


@contextlib.contextmanager
def listening(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """The address of a server that treats one client with `answer`."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError), server.accept()[0] as client:
                answer(client)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def reply(major: int, minor: int, size: int = 28, end: int = 36) -> Callable[[socket.socket], object]:
    def answer(client: socket.socket) -> None:
        assert client.recv(len(_HELLO), socket.MSG_WAITALL) == _HELLO
        client.sendall((struct.pack("<Q4B", size, major, minor, 0, 0) + bytes(24))[:end])

    return answer


@pytest.mark.parametrize(
    ("value", "parts"),
    [("a:1", ("a:1",)), ("a:1, b-2.c:65535,a:1", ("a:1", "b-2.c:65535"))],
)
def test_addresses(value: str, parts: tuple[str, ...]) -> None:
    assert rpc.parse(value) == parts


@pytest.mark.parametrize("value", ["", "a", "a:", ":1", "a:1,", "a:0", "a:65536", "::1:5", "http://a:1", "a:1x", "a b:1",
                                   ",".join(f"a:{i}" for i in range(1, 18))])  # fmt: skip
def test_what_is_no_address_is_said(value: str) -> None:
    with pytest.raises(UsageError, match="--rpc"):
        rpc.parse(value)


def test_a_server_of_our_protocol_is_greeted() -> None:
    with listening(reply(*rpc.PROTOCOL)) as address:
        rpc.greet(address)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (reply(6, 0), r"its protocol is 6\.0, ours 7\.0"),
        (reply(7, 1), r"its protocol is 7\.1"),
        (reply(7, 0, size=3), "that is no rpc-server"),
        (reply(7, 0, end=20), "that is no rpc-server"),
        (lambda client: client.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n"), "that is no rpc-server"),
        (lambda client: client.recv(len(_HELLO), socket.MSG_WAITALL), "that is no rpc-server"),
        (lambda client: time.sleep(1), r"no answer within 0\.3 s .*busy"),
    ],
)
def test_another_server_is_named_before_llama_cpp_aborts(answer: Callable[[socket.socket], object], says: str) -> None:
    with listening(answer) as address, pytest.raises(NativeError, match=says) as error:
        rpc.greet(address, 0.3)
    assert address in str(error.value)


def test_nobody_there_is_named() -> None:
    with pytest.raises(NativeError, match=r"--rpc 127\.0\.0\.1:9: Connection refused: start llama\.cpp's rpc-server"):
        rpc.greet("127.0.0.1:9")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_maker.tiny_llama(tmp_path_factory.mktemp("m") / "tiny.gguf", n_layer=4)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rpc", "nowhere"], "give host:port"),
        (["--rpc", "127.0.0.1:9", "-ngl", "0"], "leave one of them out"),
        (["--rpc", "127.0.0.1:9", "--kernels", "localspec"], "leave it out, or --rpc"),
        (["--rpc", "127.0.0.1:9"], "Connection refused" if native.has_rpc() else "CMAKE_ARGS=-DGGML_RPC=ON pip install"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(cli: Cli, path: Path, arguments: list[str], says: str) -> None:
    done = cli("run", "-m", path, "-p", "the cat", "-n", "4", *arguments, env=_plugin())
    assert (done.rc, says in done.stderr, done.stderr.count("\n")) == (2, True, 1)


# -- with a real one --------------------------------------------------------------------------------------------------------

_SERVER = """
import ctypes, sys
from localspec import native
shared = native.lib()._lib
find = shared.ggml_backend_reg_get_proc_address
find.argtypes, find.restype = [ctypes.c_void_p, ctypes.c_char_p], ctypes.c_void_p
assert native.has_rpc()
kind = shared.ggml_backend_dev_by_type
kind.argtypes, kind.restype = [ctypes.c_int], ctypes.c_void_p
devices = (ctypes.c_void_p * 1)(kind(0))  # the CPU
types = ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p
start = ctypes.CFUNCTYPE(None, *types)(find(native._rpc_registry(), b"ggml_backend_rpc_start_server"))
start(sys.argv[1].encode(), None, 1, 1, devices)
"""


def _plugin() -> dict[str, str]:
    """The variable that `cli` takes away."""
    return {name: os.environ[name] for name in ("LOCALSPEC_GGML_RPC",) if name in os.environ}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    if not native.has_rpc():
        pytest.skip("this llama.cpp was built without GGML_RPC")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER, address], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=native.unbound,
    )  # fmt: skip
    try:
        end = time.monotonic() + 60
        while True:
            assert process.poll() is None, "the server ended"
            try:
                rpc.greet(address)
                break
            except NativeError:
                assert time.monotonic() < end
                time.sleep(0.1)
        yield address
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("more", [[], ["-ngl", "2"], ["--spec-type", "ngram", "--temp", "0.8", "-s", "3"]])
def test_the_text_is_that_of_the_same_kernels_here(cli: Cli, path: Path, server: str, more: list[str]) -> None:
    base = ["run", "-m", path, "-p", "the cat sat on the mat and the cat", "-n", "24", "-t", "1", "--temp", "0", *more]
    here = cli(*[a for a in base if a not in ("-ngl", "2")], "--kernels", "stock")
    there = cli(*base, "--rpc", server, env=_plugin())
    assert there.rc == here.rc == 0, there.stderr
    assert there.stdout == here.stdout
    assert here.stdout.strip()


def test_states_come_from_there_too(cli: Cli, path: Path, server: str, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "the cat"}\n{"prompt": "the rain fell"}\n')
    options = ["data", "-m", path, "-f", prompts, "--max-tokens", "8", "-t", "1", "-np", "2", "--taps", "1,2,3", "--states",
               "f16"]  # fmt: skip
    there = cli(*options, "-o", tmp_path / "a", "--rpc", server, env=_plugin())
    here = cli(*options, "-o", tmp_path / "b", "--kernels", "stock")
    assert there.rc == here.rc == 0, there.stderr + here.stderr
    a, b = Shards.open(tmp_path / "a"), Shards.open(tmp_path / "b")
    assert a.keys() == b.keys()
    for i in range(len(a)):
        assert a.sample(i).tokens.tolist() == b.sample(i).tokens.tolist()
        np.testing.assert_allclose(a.sample(i).taps, b.sample(i).taps, rtol=1e-3, atol=1e-3)
