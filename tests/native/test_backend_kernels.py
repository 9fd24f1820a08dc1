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
