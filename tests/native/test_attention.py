"""The attention kernels' own driver, compiled with the system's compiler: plain, sanitized, and for 64-bit Arm under qemu.

The driver (native/backend/test_attention.cpp) holds every kernel that the CPU can run to a double-precision reference and to
the same bits, whatever the number of queries, threads and hidden keys. It ends with a hash of all outputs, equal on every
machine.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

BACKEND = Path(__file__).resolve().parents[2] / "native" / "backend"
COMMON = ["-std=c++17", "-Wall", "-Wextra", "-ffp-contract=off", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
X86 = {
    "attention_avx512.cpp": [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
    "attention_avx2.cpp": AVX2,
}
SOURCES = [
    "attention.cpp",
    "attention_ref.cpp",
    "attention_portable.cpp",
    "attention_neon.cpp",
    "attention_avx512.cpp",
    "attention_avx2.cpp",
    "test_attention.cpp",
]
KERNELS = re.compile(r"^kernels: (.*)$", re.MULTILINE)
HASH = re.compile(r"^hash ([0-9a-f]{16})$", re.MULTILINE)


def run(command: list[str], what: str, **environment: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, **environment})
    assert done.returncode == 0, f"{what}: exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def build(folder: Path, compiler: str, flags: list[str], x86: bool, link: list[str]) -> Path:
    objects = []
    for source in SOURCES:
        target = folder / f"{source}.o"
        isa = X86.get(source, []) if x86 else []
        run([compiler, *COMMON, *flags, *isa, "-c", str(BACKEND / source), "-o", str(target)], f"compiling {source}")
        objects.append(str(target))
    driver = folder / "test_attention"
    run([compiler, *flags, *objects, "-pthread", *link, "-o", str(driver)], "linking")
    return driver


@pytest.fixture(scope="module")
def compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not found:
        pytest.skip("no C++ compiler on PATH")
    return found


@pytest.fixture(scope="module")
def native_output(tmp_path_factory: pytest.TempPathFactory, compiler: str) -> str:
    x86 = platform.machine().lower() in {"x86_64", "amd64"}
    driver = build(tmp_path_factory.mktemp("plain"), compiler, ["-O3"], x86, [])
    return run([str(driver), "--quick"], "the driver")


def flags_of_cpu() -> set[str]:
    path = Path("/proc/cpuinfo")
    words = path.read_text().split() if path.exists() else []
    return set(words)


def test_every_kernel_the_cpu_can_run_is_right_and_invariant(native_output: str) -> None:
    kernels = KERNELS.search(native_output)
    assert kernels
    names = kernels[1].split()
    assert names[-1] == "portable"
    cpu = flags_of_cpu()
    if {"avx2", "fma", "f16c"} <= cpu:
        assert "avx2" in names
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= cpu:
        assert names[0] == "avx512"
    assert HASH.search(native_output)


def test_address_and_undefined_behaviour_sanitizers(tmp_path: Path, compiler: str) -> None:
    flags = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    binary = str(tmp_path / "probe")
    if subprocess.run([compiler, *flags, str(probe), "-o", binary], capture_output=True).returncode != 0:
        pytest.skip(f"{compiler} has no sanitizer libraries")
    x86 = platform.machine().lower() in {"x86_64", "amd64"}
    driver = build(tmp_path, compiler, flags, x86, [])
    output = run([str(driver), "--quick"], "the sanitized driver", UBSAN_OPTIONS="print_stacktrace=1")
    assert HASH.search(output)


def test_neon_under_qemu_gives_the_same_bits(tmp_path: Path, native_output: str) -> None:
    cross = shutil.which("aarch64-linux-gnu-g++")
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if not cross or not emulator:
        pytest.skip("needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user)")
    driver = build(tmp_path, cross, ["-O3"], False, ["-static"])
    output = run([emulator, str(driver), "--quick"], "the driver under qemu")
    kernels, ours, theirs = KERNELS.search(output), HASH.search(output), HASH.search(native_output)
    assert kernels
    assert kernels[1].split()[0] == "neon"
    assert ours
    assert theirs
    assert ours[1] == theirs[1]
