"""GGUF to GGUF of another quantisation, by llama.cpp's own quantiser.

A smaller copy of a model is the simplest draft for it: it shares the tokenizer and mostly agrees.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from localspec import native
from localspec.errors import LocalspecError, ModelFileError, UsageError
from localspec.gguf_file import GGUFFile, require_model

#: names of llama.cpp's file types -> the binding's constant
QUANTS = {
    "F32": "LLAMA_FTYPE_ALL_F32",
    "F16": "LLAMA_FTYPE_MOSTLY_F16",
    "BF16": "LLAMA_FTYPE_MOSTLY_BF16",
    "Q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0",
    "Q6_K": "LLAMA_FTYPE_MOSTLY_Q6_K",
    "Q5_K_M": "LLAMA_FTYPE_MOSTLY_Q5_K_M",
    "Q5_0": "LLAMA_FTYPE_MOSTLY_Q5_0",
    "Q5_1": "LLAMA_FTYPE_MOSTLY_Q5_1",
    "Q4_K_M": "LLAMA_FTYPE_MOSTLY_Q4_K_M",
    "Q4_K_S": "LLAMA_FTYPE_MOSTLY_Q4_K_S",
    "Q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0",
    "Q4_1": "LLAMA_FTYPE_MOSTLY_Q4_1",
    "Q3_K_M": "LLAMA_FTYPE_MOSTLY_Q3_K_M",
    "Q2_K": "LLAMA_FTYPE_MOSTLY_Q2_K",
}


def quantize(source: Path, target: Path, quant: str, overwrite: bool = False) -> int:
    """Write `source` as `quant` to `target`; returns its size in bytes.

    Quantised sources are requantised, which loses a little more than quantising the original. The result appears under
    its name only when it is complete. Raises ModelFileError for a bad source, UsageError for an unknown type or a target
    that exists.
    """
    name = quant.upper()
    if name not in QUANTS:
        raise UsageError(f"--quant {quant}: unknown; one of {', '.join(QUANTS)}")
    gguf = GGUFFile.open(source, "model")
    require_model(gguf, "model")
    if not target.name or (target.exists() and not target.is_file()):
        raise UsageError(f"{target}: not a regular file; name the .gguf file to write")
    if target.exists() and (not overwrite or target.samefile(source)):
        raise UsageError(f"{target} exists: name another file" + ("" if overwrite else " or give --force"))
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent}: no such directory")
    lib = native.lib()
    params = lib.llama_model_quantize_default_params()
    params.ftype = getattr(lib, QUANTS[name])
    params.allow_requantize = True
    params.nthread = native.default_threads()
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    native.clear_log()
    try:
        _remove_leftovers(target)
        partial.touch()  # llama.cpp would not say why it can't
        status = _in_thread(
            lambda: lib.llama_model_quantize(os.fsencode(source), os.fsencode(partial), ctypes.byref(params)), partial
        )
        if status != 0:
            reason = native.last_log_error() or str(status)
            if "iostream" in reason:
                raise LocalspecError(f"{target}: writing failed: is the disk full, or the size of files limited?")
            raise ModelFileError(f"{source}: llama.cpp can't write it as {name}: {reason}")
        GGUFFile.open(partial, "result")
        os.replace(partial, target)
    except OSError as error:
        raise LocalspecError(f"{target}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    return target.stat().st_size


def _in_thread(work: Callable[[], int], output: Path) -> int:
    """The result of `work`, which writes `output`. Ctrl-C ends the wait; inside of llama.cpp's log it would be lost.

    The wait goes on until the file is begun: removed before, it would be made again by the thread.
    """
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.1)
    except KeyboardInterrupt:
        deadline = time.monotonic() + 10
        while thread.is_alive() and output.stat().st_size == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        raise
    return results[0] if results else -1


def _remove_leftovers(target: Path) -> None:
    """Unfinished files of conversions to `target` that were killed."""
    for path in target.parent.iterdir():
        pid = path.name.removeprefix(f".{target.name}.").removesuffix(".part")
        if path.name == f".{target.name}.{pid}.part" and pid.isdigit() and not _is_alive(int(pid)):
            path.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # somebody else's
    return True
