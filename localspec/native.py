"""The only place that touches shared libraries and llama.cpp's unstable symbols.

llama-cpp-python is imported here, on first use, and nowhere else at module level: `localspec --help` stays quick. Three
things are arranged before the first model loads: llama.cpp's log goes into a small buffer (its last lines explain a load
that failed), its abort becomes one line and exit code 2, and its commit is compared with the one we were written for.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from localspec.errors import NativeError, UsageError
from localspec.library_file import check_whole

#: llama.cpp's commit inside llama-cpp-python 0.3.36; unstable symbols and struct layouts are those of this commit.
LLAMA_COMMIT = "0c1e570"

_LOG_KEEP = 400
_log_lines: collections.deque[tuple[int, str]] = collections.deque(maxlen=_LOG_KEEP)
_LOG_WARN, _LOG_ERROR, _LOG_CONT = 3, 4, 5
_keep_alive: list[Any] = []  # ctypes callbacks: the library calls them for as long as the process lives
_lib: Any = None


def lib() -> Any:
    """The module ``llama_cpp.llama_cpp``, ready for use. Raises NativeError when it is missing or of another version."""
    global _lib
    if _lib is None:
        _lib = _load()
    return _lib


#: What keeps ggml's spinning barriers from stalling where another process wants a core. With its threads free to move, two
#: of them land on one core, and with endless spinning a thread burns the time slice that its partner needs: a decode then
#: takes ten to forty times as long (docs/LOG.md). So threads stay where they are and spin for some ten microseconds
#: before they sleep. A person's own settings win.
OPENMP_SETTINGS = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores", "GOMP_SPINCOUNT": "10000"}
#: CPUs this process was given. OpenMP binds the calling thread to one of them when it is loaded, and what that thread
#: starts afterwards inherits the one: see `unbound`.
_ALLOWED = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def _load() -> Any:
    for name, value in OPENMP_SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import llama_cpp.llama_cpp as binding
    except ImportError as error:
        raise NativeError(f"llama-cpp-python can't be imported ({error}): pip install llama-cpp-python==0.3.36") from error
    except (OSError, RuntimeError) as error:
        raise NativeError(f"llama.cpp's library can't be loaded: {error}") from error
    shared = binding._lib
    shared.ggml_commit.restype = ctypes.c_char_p
    commit = (shared.ggml_commit() or b"?").decode()
    if not commit.startswith(LLAMA_COMMIT):
        raise NativeError(
            f"llama.cpp is commit {commit}, localspec needs {LLAMA_COMMIT}: pip install llama-cpp-python==0.3.36"
        )

    @binding.llama_log_callback
    def on_log(level: int, text: bytes, _user: Any) -> None:
        _log_lines.append((level, text.decode("utf-8", "replace")))
        if os.environ.get("LOCALSPEC_LLAMA_LOG"):
            sys.stderr.write(_log_lines[-1][1])

    @ctypes.CFUNCTYPE(None, ctypes.c_char_p)
    def on_abort(message: bytes) -> None:
        # ggml calls abort() when this returns. Nothing can be unwound through C, but a person gets a line, not a core.
        text = " ".join(message.decode("utf-8", "replace").split())
        with contextlib.suppress(Exception):  # a full or closed output must not keep us from leaving
            sys.stdout.flush()
        os.write(2, f"localspec: error: llama.cpp gave up: {text}\n".encode())
        os._exit(2)

    binding.llama_log_set(on_log, ctypes.c_void_p(0))
    shared.ggml_set_abort_callback.argtypes = [ctypes.c_void_p]
    shared.ggml_set_abort_callback.restype = ctypes.c_void_p
    shared.ggml_set_abort_callback(ctypes.cast(on_abort, ctypes.c_void_p))
    _keep_alive.extend([on_log, on_abort])
    binding.llama_backend_init()
    return binding


def clear_log() -> None:
    """Forget what llama.cpp has logged so far."""
    _log_lines.clear()


def last_log_error() -> str:
    """The errors that llama.cpp logged since `clear_log`, joined into one line; empty when there were none."""
    lines: list[str] = []
    wanted = False
    for level, text in _log_lines:
        if level != _LOG_CONT:
            wanted = level >= _LOG_ERROR
            if wanted:
                lines.append("")
        if wanted:
            lines[-1] += text
    cleaned = [" ".join(line.split()) for line in lines]
    return "; ".join(dict.fromkeys(line for line in cleaned if line))


KERNELS = ("auto", "stock", "localspec")
_PLUGIN = {"darwin": "libggml-localspec.dylib", "win32": "ggml-localspec.dll"}.get(sys.platform, "libggml-localspec.so")


def backend_path() -> Path:
    """Where our ggml plug-in lies. Raises NativeError where this installation has none."""
    try:
        import localspec._verify as extension
    except ImportError:
        raise NativeError("localspec was installed without its native part: pip install it again") from None
    path = Path(extension.__file__).parent / "lib" / _PLUGIN
    if not path.is_file():
        raise NativeError(f"{path}: this installation has no plug-in: pip install localspec again")
    return path


def use_kernels(choice: str, n_gpu_layers: int = 0) -> str | None:
    """Register our kernels with ggml, for the life of the process; call it before a model is loaded.

    ``stock`` leaves llama.cpp alone. ``auto`` uses ours where this CPU has the instructions and no layer goes to a GPU;
    ``localspec`` raises NativeError where they can't be used. Returns why stock kernels serve where ours were wanted.
    """
    if choice not in KERNELS:
        raise UsageError(f"--kernels {choice}: one of {', '.join(KERNELS)}")
    if choice == "stock" or kernels_in_use() != "stock":
        return None
    if n_gpu_layers != 0 and has_gpu():
        if choice == "localspec":
            raise NativeError("--kernels localspec serves CPUs: leave --n-gpu-layers out")
        return None
    try:
        load = lib()._lib.ggml_backend_load
        load.argtypes, load.restype = [ctypes.c_char_p], ctypes.c_void_p
        path = backend_path()
        check_whole(path)
        if load(os.fsencode(path)) is None:
            raise NativeError("ggml refused our kernels: a damaged plug-in, or a CPU without the instructions they need")
    except NativeError as error:
        if choice == "localspec":
            raise
        return str(error)
    return None


def kernels_in_use() -> str:
    """Which multiplication kernels serve the CPU: ``stock`` are llama.cpp's own, ``localspec`` ours."""
    by_name = lib()._lib.ggml_backend_reg_by_name
    by_name.argtypes, by_name.restype = [ctypes.c_char_p], ctypes.c_void_p
    return "stock" if by_name(b"LOCALSPEC") is None else "localspec"


def default_threads() -> int:
    """Threads for one model: the CPUs this process may use, at most one per physical core where that is known."""
    if _ALLOWED is None:  # macOS, Windows
        return max(1, os.cpu_count() or 1)
    cores = set()
    for cpu in _ALLOWED:
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
                cores.add(file.read().strip())
        except OSError:
            return max(1, len(_ALLOWED))
    return max(1, len(cores))


def unbound() -> None:
    """Give the calling thread all CPUs of this process again; for a child process before it runs (preexec_fn)."""
    if _ALLOWED is not None:
        os.sched_setaffinity(0, _ALLOWED)


def has_gpu() -> bool:
    """Whether this build of llama.cpp can offload layers."""
    return bool(lib().llama_supports_gpu_offload())


# -- other machines ----------------------------------------------------------------------------------------------------

_rpc_devices: dict[str, int] = {}  # of each server


def _rpc_registry() -> int | None:
    """Address of llama.cpp's registry entry of its RPC backend. Where the build has none, a plug-in is loaded that
    $LOCALSPEC_GGML_RPC names (libggml-rpc.so of the same commit)."""
    shared = lib()._lib
    by_name, load = shared.ggml_backend_reg_by_name, shared.ggml_backend_load
    by_name.argtypes, by_name.restype = [ctypes.c_char_p], ctypes.c_void_p
    load.argtypes, load.restype = [ctypes.c_char_p], ctypes.c_void_p
    plugin = os.environ.get("LOCALSPEC_GGML_RPC")
    if by_name(b"RPC") is None and plugin:
        check_whole(Path(plugin))
        if load(os.fsencode(plugin)) is None:
            raise NativeError(f"{plugin} (LOCALSPEC_GGML_RPC): ggml refused it: build it from commit {LLAMA_COMMIT}")
    found: int | None = by_name(b"RPC")
    return found


def has_rpc() -> bool:
    """Whether layers can be computed by llama.cpp's RPC servers."""
    return _rpc_registry() is not None


def add_rpc_server(address: str) -> int:
    """Register the devices of the server at ``host:port``; models loaded afterwards use them. Returns how many there are.
    Aborts the process where the server does not answer: see localspec.rpc."""
    if address in _rpc_devices:
        return _rpc_devices[address]
    shared = lib()._lib
    find = shared.ggml_backend_reg_get_proc_address
    find.argtypes, find.restype = [ctypes.c_void_p, ctypes.c_char_p], ctypes.c_void_p
    function = find(_rpc_registry(), b"ggml_backend_rpc_add_server")
    if not function:
        raise NativeError("this build of llama.cpp can't be given RPC servers")
    registry = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(function)(address.encode())
    if registry is None:
        return 0
    count = shared.ggml_backend_reg_dev_count
    count.argtypes, count.restype = [ctypes.c_void_p], ctypes.c_size_t
    shared.ggml_backend_register.argtypes, shared.ggml_backend_register.restype = [ctypes.c_void_p], None
    shared.ggml_backend_register(registry)
    _rpc_devices[address] = int(count(registry))
    return _rpc_devices[address]


def rpc_servers() -> tuple[str, ...]:
    """The servers whose devices are registered: a model uses them unless told otherwise."""
    return tuple(_rpc_devices)


# -- hidden states (llama.cpp's unstable interface, and its eval callback) ---------------------------------------------

_LAYER_INPUTS = (
    "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
    "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
)
_layer_inputs: tuple[Any, Any] | None = None


def layer_inputs() -> tuple[Any, Any] | None:
    """llama.cpp's C++ functions that ask for and give the input of a layer; None where this build does not export them."""
    global _layer_inputs
    if _layer_inputs is None:
        try:
            ask, give = (getattr(lib()._lib, name) for name in _LAYER_INPUTS)
        except AttributeError:
            return None
        ask.argtypes, ask.restype = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool], None
        give.argtypes, give.restype = [ctypes.c_void_p, ctypes.c_uint32], ctypes.c_void_p
        _layer_inputs = ask, give
    return _layer_inputs


def _layer_input_function(which: int) -> Any:
    functions = layer_inputs()
    if functions is None:
        raise NativeError("this build of llama.cpp does not give the inputs of its layers")
    return functions[which]


def ask_layer_input(context: Any, layer: int) -> None:
    """Have every decode keep the input of this layer. Aborts the process on a graph that does not mark it: check first."""
    _layer_input_function(0)(context, layer, True)


def layer_input(context: Any, layers: Sequence[int], n_rows: int, out: np.ndarray) -> None:
    """The inputs of layers in the last decode, into `out` f32[n_rows, len(layers), n_embd], in the order of the batch."""
    give, width = _layer_input_function(1), out.shape[2]
    for column, layer in enumerate(layers):
        address = give(context, layer)
        if not address:
            raise NativeError("llama.cpp gave no layer input")
        out[:, column] = _rows_at(address, n_rows, width)


_NEXTN = (
    "_Z26llama_set_embeddings_nextnP13llama_contextbb",
    "_Z26llama_get_embeddings_nextnP13llama_context",
)


@functools.cache  # asked for at every decode
def nextn_states() -> tuple[Any, Any] | None:
    """llama.cpp's C++ functions that ask for and give the states that next-token heads read; None where this build does not
    export them."""
    try:
        ask, give = (getattr(lib()._lib, name) for name in _NEXTN)
    except AttributeError:
        return None
    ask.argtypes, ask.restype = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool], None
    give.argtypes, give.restype = [ctypes.c_void_p], ctypes.POINTER(ctypes.c_float)
    return ask, give


def ask_nextn(context: Any, every_row: bool) -> None:
    """Have every decode keep these states: of each row, or of those with logits. Raises NativeError."""
    functions = nextn_states()
    if functions is None:
        raise NativeError("this build of llama.cpp does not give the states that next-token heads read")
    functions[0](context, True, not every_row)


def nextn_rows(context: Any, n_rows: int, n_embd: int) -> np.ndarray:
    """f32[n_rows, n_embd] of the last decode, a view, in the order of the batch. Raises NativeError."""
    functions = nextn_states()
    address = ctypes.cast(functions[1](context), ctypes.c_void_p).value if functions else None
    if not address:
        raise NativeError("llama.cpp gave no states for a next-token head")
    return _rows_at(address, n_rows, n_embd)


def logits(context: Any, n_rows: int, n_vocab: int) -> np.ndarray:
    """f32[n_rows, n_vocab] of the last decode, a view. Raises NativeError."""
    address = ctypes.cast(lib().llama_get_logits(context), ctypes.c_void_p).value
    if not address:
        raise NativeError("llama.cpp gave no logits")
    return _rows_at(address, n_rows, n_vocab)


@functools.lru_cache(maxsize=256)  # llama.cpp's buffers stay where they are, and making a view takes longer than a copy
def _rows_at(address: int, n_rows: int, width: int) -> np.ndarray:
    view = (ctypes.c_float * (n_rows * width)).from_address(address)
    return np.frombuffer(memoryview(view), np.float32).reshape(n_rows, width)


def eval_callback(
    wanted: Callable[[bytes], bool], take: Callable[[bytes, np.ndarray], None], stop: bool = False
) -> Any:
    """An eval callback for llama_context_params: `take(name, rows)` gets a copy, f32[rows, width], of every computed
    tensor whose name is `wanted`; with `stop` nothing behind it is computed. Keep what it returns for as long as the context
    lives."""
    shared = lib()._lib
    name_of, n_bytes, copy = shared.ggml_get_name, shared.ggml_nbytes, shared.ggml_backend_tensor_get
    name_of.argtypes, name_of.restype = [ctypes.c_void_p], ctypes.c_char_p
    n_bytes.argtypes, n_bytes.restype = [ctypes.c_void_p], ctypes.c_size_t
    copy.argtypes, copy.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t], None
    n_rows = shared.ggml_nrows
    n_rows.argtypes, n_rows.restype = [ctypes.c_void_p], ctypes.c_int64

    def on_node(tensor: int, ask: bool, _user: Any) -> bool:
        name = name_of(tensor)
        if not wanted(name):
            return not ask
        if not ask:
            rows = np.empty((n_rows(tensor), n_bytes(tensor) // 4 // max(1, n_rows(tensor))), np.float32)
            copy(tensor, rows.ctypes.data, 0, rows.nbytes)
            take(name, rows)
            return not stop
        return True

    return lib().ggml_backend_sched_eval_callback(on_node)


class _TypeTraits(ctypes.Structure):
    """The beginning of ggml_type_traits: how rows of one type become floats."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
    )


def to_float_address(type_number: int) -> int:
    """Address of ggml's ``void (const void * row, float * out, int64_t n)`` for a tensor type; 0 where it has none."""
    get = lib()._lib.ggml_get_type_traits
    get.argtypes, get.restype = [ctypes.c_int], ctypes.POINTER(_TypeTraits)
    return int(get(type_number).contents.to_float or 0)
