"""The plug-in that the tests of native/backend load."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

import localspec


@pytest.fixture(scope="session")
def backend_library(request: pytest.FixtureRequest) -> Path:
    """libggml-localspec: LOCALSPEC_BACKEND_LIBRARY, else the installed one, else one that is built now."""
    if chosen := os.environ.get("LOCALSPEC_BACKEND_LIBRARY"):
        return Path(chosen)
    for folder in (Path(localspec.__file__).parent, Path(sysconfig.get_path("platlib")) / "localspec"):
        for found in (folder / "lib").glob("libggml-localspec.*"):
            return found
    from tests.native.test_backend_kernels import build

    build(Path(request.config.cache.mkdir("backend")), "ggml-localspec")  # type: ignore[union-attr]
    return next(Path(request.config.cache.mkdir("backend")).glob("libggml-localspec.*"))  # type: ignore[union-attr]
