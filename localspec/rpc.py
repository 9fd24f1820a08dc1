"""Layers on other machines, by llama.cpp's own RPC backend: `--rpc host:port,...`.

llama.cpp aborts the process where a server can't be reached or speaks another version. So every address is checked, and
greeted as llama.cpp will greet it, before llama.cpp hears of it. The protocol has neither a key nor encryption.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
from collections.abc import Sequence

from localspec import native
from localspec.errors import NativeError, UsageError

#: RPC_PROTO_MAJOR_VERSION and the highest minor one of the llama.cpp that we are pinned to (ggml-rpc.h).
PROTOCOL = 7, 0
#: GGML_RPC_MAX_SERVERS
MOST_SERVERS = 16
_HELLO = 14  # the command's number, "always 14"
_CAPS = 24  # bytes of capabilities in a greeting; zeros: plain TCP
_PATIENCE = 5.0

BUILD_IT = ("CMAKE_ARGS=-DGGML_RPC=ON pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python "
            "llama-cpp-python==0.3.36")  # fmt: skip


def parse(value: str) -> tuple[str, ...]:
    """ "host:port,host:port" as its parts, each once. Raises UsageError that names the part."""
    parts = tuple(dict.fromkeys(part.strip() for part in value.split(",")))
    for part in parts:
        host, colon, port = part.partition(":")
        # llama.cpp cuts at the first colon, so IPv6 addresses need a name.
        if not (colon and re.fullmatch(r"[A-Za-z0-9._-]+", host) and re.fullmatch(r"[0-9]{1,5}", port)):
            raise UsageError(f"--rpc '{part}': give host:port, several with commas between them")
        if not 1 <= int(port) <= 65535:
            raise UsageError(f"--rpc '{part}': a port is a number from 1 to 65535")
    if len(parts) > MOST_SERVERS:
        raise UsageError(f"--rpc: {len(parts)} servers; llama.cpp takes {MOST_SERVERS}")
    return parts


def use(servers: Sequence[str]) -> None:
    """Register the devices of these servers, for the life of the process; call it before a model is loaded.

    Raises NativeError where this llama.cpp has no RPC, or a server can't be used.
    """
    if not native.has_rpc():
        raise NativeError(f"--rpc: this build of llama.cpp has no RPC backend; install one that has: {BUILD_IT}")
    new = [server for server in servers if server not in native.rpc_servers()]  # the others are busy with us
    for server in new:
        greet(server)
    for server in new:
        if not native.add_rpc_server(server):
            raise NativeError(f"--rpc {server}: the server offers no device")


def greet(server: str, patience: float = _PATIENCE) -> None:
    """Raise NativeError unless an RPC server of our version answers there within `patience` seconds."""
    host, _, port = server.partition(":")
    try:
        # llama.cpp's own client looks names up as IPv4 only.
        address = socket.gethostbyname(host)
        with contextlib.closing(socket.create_connection((address, int(port)), patience)) as sock:
            sock.settimeout(patience)
            sock.sendall(struct.pack("<BQ", _HELLO, _CAPS) + bytes(_CAPS))
            answer = _receive(sock, 8 + 4 + _CAPS)
    except TimeoutError:
        raise NativeError(f"--rpc {server}: no answer within {patience:g} s (an rpc-server works for one client at a time: "
                          "is it busy?)") from None  # fmt: skip
    except OSError as error:
        raise NativeError(f"--rpc {server}: {error.strerror or error}: start llama.cpp's rpc-server there") from None
    size, major, minor = struct.unpack_from("<QBB", answer) if len(answer) >= 10 else (0, 0, 0)
    if size != 4 + _CAPS or len(answer) < 8 + size:
        raise NativeError(f"--rpc {server}: that is no rpc-server of llama.cpp's protocol {PROTOCOL[0]}")
    if major != PROTOCOL[0] or minor > PROTOCOL[1]:
        raise NativeError(f"--rpc {server}: its protocol is {major}.{minor}, ours {PROTOCOL[0]}.{PROTOCOL[1]}: build the "
                          f"rpc-server from llama.cpp's commit {native.LLAMA_COMMIT}")  # fmt: skip


def _receive(sock: socket.socket, n: int) -> bytes:
    """`n` bytes, fewer where the other side closes."""
    data = b""
    while len(data) < n and (piece := sock.recv(n - len(data))):
        data += piece
    return data
