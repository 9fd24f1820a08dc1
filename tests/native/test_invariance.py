"""A row's logits are the same bits, however the tokens before it and around it were cut into decodes, on 1 and 2 threads.

Each case is a process of its own, because the plug-in registers itself for a whole process. It reads the same 4,000 tokens
twice, in pieces of 512 by 2 threads and in pieces of 173 by 1 thread (the last 3,000 by 2, to save time), and stops at
several depths to decode the next five tokens one by one and in other ways, with blocks of 1 to 8 and 13 tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec import native

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bench_matmul
from test_backend_model import counters

DEPTHS = (1, 100, 1000, 4000)
#: Ways to decode the tokens from a depth on; rows beyond the fifth are not looked at.
SPLITS = ((2, 3), (3, 2), (1, 4), (5,), (6,), (7,), (8,), (13,))
N_ROWS = 5


def check(library: Path, model: Path, flash: int, timeout: float) -> None:
    command = [sys.executable, __file__, str(library), str(model), str(flash)]
    environment = native.OPENMP_SETTINGS | dict(os.environ)  # else a busy machine takes ten times as long
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=environment,
                          preexec_fn=native.unbound)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["different"] == []
    assert result["compared"] == 2 * len(DEPTHS) * (len(SPLITS) + 1)
    assert result["rows"] == len(DEPTHS) * N_ROWS, "rows that should differ are equal"
    assert result["multiplications"] > 1000
    assert (result["attentions"] > 0) == (flash == 1)


@pytest.mark.parametrize("flash", [0, 1])
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_rows_are_the_same_bits(name: str, flash: int, backend_library: Path, request: pytest.FixtureRequest) -> None:
    check(backend_library, request.getfixturevalue(name), flash, timeout=600)


@pytest.mark.big
@pytest.mark.parametrize("flash", [0, 1])
@pytest.mark.parametrize("name", ["qwen05", "qwen15"])
def test_rows_are_the_same_bits_in_big_models(
    name: str, flash: int, backend_library: Path, request: pytest.FixtureRequest
) -> None:
    check(backend_library, request.getfixturevalue(name), flash, timeout=1800)


# --- the program


def main() -> None:
    library, model, flash = sys.argv[1:]
    llama, loaded, context = bench_matmul.load(model, library, 2, max(DEPTHS) + 64, int(flash))
    decode = bench_matmul.Decoder(llama, loaded, context)

    def rows(start: int, n: int) -> np.ndarray[Any, Any]:
        decode(start, n)
        return np.ctypeslib.as_array(llama.llama_get_logits(context), (n, decode.n_vocab)).copy()

    expected: dict[int, np.ndarray[Any, Any]] = {}  # f32[N_ROWS, V] per depth
    different, compared = [], 0

    def compare(depth: int, what: str, got: np.ndarray[Any, Any]) -> None:
        nonlocal compared
        compared += 1
        if got.view(np.uint32).tobytes() != expected.setdefault(depth, got).view(np.uint32).tobytes():
            different.append(f"{what} at {depth}")

    for threads, piece in ((2, 512), (1, 173)):
        at = 0
        for depth in DEPTHS:
            reading = 2 if depth == DEPTHS[-1] else threads
            llama.llama_set_n_threads(context, reading, reading)
            while at < depth:
                decode(at, min(piece, depth - at), 1)
                at += min(piece, depth - at)
            llama.llama_set_n_threads(context, threads, threads)
            single = np.concatenate([rows(depth + i, 1) for i in range(N_ROWS)])
            compare(depth, f"{threads} threads, one by one", single)
            for split in SPLITS:
                start, parts = depth, []
                for n in split:
                    parts.append(rows(start, n))
                    start += n
                compare(depth, f"{threads} threads, {split}", np.concatenate(parts)[:N_ROWS])
    result: dict[str, Any] = {"different": different, "compared": compared}
    result["rows"] = len({hashlib.sha256(row.tobytes()).digest() for block in expected.values() for row in block})
    result["multiplications"], result["attentions"] = counters(llama)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
