"""The multiplication kernels below ggml: the C++ driver's checks, plain and under the sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "native" / "backend"


def build(folder: Path, target: str, *options: str) -> Path:
    """Configures and builds one target of native/backend; what an earlier run left in `folder` is used again."""
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("needs cmake and a C++ compiler")
    steps = [
        ["cmake", "-S", str(SOURCE), "-B", str(folder), "-DLOCALSPEC_BACKEND_TESTS=ON", *options],
        ["cmake", "--build", str(folder), "--target", target, "-j2"],
    ]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / target


@pytest.mark.parametrize("sanitize", [False, True], ids=["plain", "sanitized"])
def test_driver(sanitize: bool, request: pytest.FixtureRequest) -> None:
    folder = Path(request.config.cache.mkdir("backend-asan" if sanitize else "backend"))  # type: ignore[union-attr]
    driver = build(folder, "test_backend_driver", f"-DLOCALSPEC_SANITIZE={'ON' if sanitize else 'OFF'}")
    done = subprocess.run([str(driver)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.startswith("ran: reference")


@pytest.mark.skipif(
    shutil.which("aarch64-linux-gnu-g++") is None or shutil.which("qemu-aarch64") is None,
    reason="needs a cross-compiler for 64-bit ARM and qemu-user",
)
def test_driver_on_arm(tmp_path: Path) -> None:
    """Both ARM kernels equal the plain C twin bit for bit, and each CPU is given those whose instructions it has."""
    compiler = ["aarch64-linux-gnu-g++", "-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-c"]
    by_flags = {"kernels_neon": "-march=armv8.2-a+dotprod+fp16", "kernels_neon_i8mm": "-march=armv8.2-a+dotprod+fp16+i8mm"}
    sources = [SOURCE / f"{name}.cpp" for name in ("cpu", "pack", "multiply", "kernels_ref", *by_flags)]
    sources.append(Path(__file__).parent / "test_backend_driver.cpp")
    for source in sources:
        march = by_flags.get(source.stem, "-march=armv8-a")
        subprocess.run([*compiler, march, str(source), "-o", str(tmp_path / f"{source.stem}.o")], check=True)
    objects = [str(tmp_path / f"{source.stem}.o") for source in sources]
    subprocess.run(["aarch64-linux-gnu-g++", "-static", *objects, "-o", str(tmp_path / "driver"), "-lpthread"], check=True)

    def run(cpu: str, *arguments: str) -> str:
        emulator = ["qemu-aarch64", "-cpu", cpu, str(tmp_path / "driver"), *arguments]
        done = subprocess.run(emulator, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout.splitlines()[0]

    assert run("max") == "ran: reference neon-i8mm neon"
    assert run("neoverse-n1", "--list") == "ran: reference neon"
    assert run("cortex-a72", "--list") == "ran: reference"
