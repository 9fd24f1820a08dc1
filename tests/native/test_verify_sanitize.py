"""The accept core under the address, undefined-behaviour and thread sanitizers, by a driver that knows no Python."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent.parent / "native" / "verify"
CORE = ["test_core.cpp", "accept.cpp", "filter.cpp", "pool.cpp", "kernels.cpp", "kernels_portable.cpp"]
BY_FLAGS = {"kernels_avx2.cpp": ["-mavx2"], "kernels_avx512.cpp": ["-mavx512f", "-mavx512dq", "-mavx512vl"]}
FLAGS = ["-std=c++17", "-O1", "-g", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"]


def compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if found is None:
        pytest.fail("no C++ compiler: the package can't have been built here either")
    return found


def build(folder: Path, sanitizers: str) -> Path:
    flags = [*FLAGS, f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    sources = [(name, [] if not x86 else ["-DLOCALSPEC_X86_KERNELS"]) for name in CORE]
    if x86:
        sources += BY_FLAGS.items()
    objects = []
    for name, more in sources:
        objects.append(folder / f"{name}.o")
        subprocess.run([compiler(), *flags, *more, "-c", SOURCE / name, "-o", objects[-1]], check=True)
    driver = folder / "test_core"
    subprocess.run([compiler(), *flags, *objects, "-pthread", "-o", driver], check=True)
    return driver


@pytest.mark.parametrize(("sanitizers", "n_calls"), [("address,undefined", 300), ("thread", 60)])
def test_the_core_is_clean(sanitizers: str, n_calls: int, tmp_path: Path) -> None:
    driver = build(tmp_path, sanitizers)
    command: list[str | Path] = [driver, str(n_calls)]
    if sanitizers == "thread" and shutil.which("setarch"):
        command = ["setarch", "-R", *command]  # older thread sanitizers can't cope with much address randomisation
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{n_calls} calls" in done.stdout
