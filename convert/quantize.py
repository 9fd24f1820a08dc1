"""GGUF to GGUF of another quantisation, by llama.cpp's own quantiser.

A smaller copy of a model is the simplest draft for it: it shares the tokenizer and mostly agrees.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from localspec import native
from localspec.convert.output import check_output, partial
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

#: A copy is a draft that can pay while it is smaller than this share of its target.
SMALL_ENOUGH = 0.7


def quantize(source: Path, target: Path, quant: str, overwrite: bool = False) -> int:
    """Write `source` as `quant` to `target`; returns its size in bytes.

    Quantised sources are requantised, which loses a little more than quantising the original. The result appears under
    its name only when it is complete. Raises ModelFileError for a bad source, UsageError for an unknown type or a target
    that exists.
    """
    name = quant.upper()
    if name not in QUANTS:
        raise UsageError(f"{quant} is no quantisation known here; one of {', '.join(QUANTS)}")
    gguf = GGUFFile.open(source, "model")
    require_model(gguf, "model")
    check_output(target, overwrite, source)
    with partial(target) as path:
        quantize_file(source, path, name, shown=target)
    return target.stat().st_size


def quantize_file(source: Path, path: Path, name: str, shown: Path | None = None) -> None:
    """The work of `quantize` without its checks: `name` is a key of QUANTS, messages name `shown` in place of `path`."""
    lib = native.lib()
    params = lib.llama_model_quantize_default_params()
    params.ftype = getattr(lib, QUANTS[name])
    params.allow_requantize = True
    params.nthread = native.default_threads()
    native.clear_log()
    path.touch()  # llama.cpp would not say why it can't
    status = _in_thread(lambda: lib.llama_model_quantize(os.fsencode(source), os.fsencode(path), ctypes.byref(params)), path)
    if status != 0:
        reason = native.last_log_error() or str(status)
        if "iostream" in reason:
            raise LocalspecError(f"{shown or path}: writing failed: is the disk full, or the size of files limited?")
        raise ModelFileError(f"{source}: llama.cpp can't write it as {name}: {reason}")
    GGUFFile.open(path, "result")


def size_remark(n_source: int, n_result: int, quant: str) -> str | None:
    """What to say to somebody who wanted a smaller copy, as a draft, and did not get one: sizes in bytes; None if they did.

    A draft is read once per drafted token: at SMALL_ENOUGH of its target's size or more it costs nearly what it saves.
    """
    if n_result < SMALL_ENOUGH * n_source:
        return None
    size = "larger than its source" if n_result > n_source else f"{100 * n_result / n_source:.0f} % of its source"
    return (
        f"the {quant} copy is {size}: too large to gain time as a draft for it; take a smaller type, or a source of "
        "higher precision"
    )


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
