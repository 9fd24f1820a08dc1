"""Which kernels serve: --kernels, backend-path, a plug-in that can't be loaded, and texts written with ours.

Registration lasts for a process, so whatever runs with our kernels runs in a process of its own: this one stays stock.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from localspec import native
from localspec.accept import Sampling
from localspec.blocks import FixedBlock
from localspec.drafters import Drafter
from localspec.drafters.ngram import NgramDrafter
from localspec.engine import Engine, Request, Stats
from localspec.errors import UsageError
from localspec.model import Model
from localspec.prompts import BUILT_IN
from localspec.target import SessionSettings, TargetSession

ROOT = Path(__file__).resolve().parent.parent
HELLO = ("--json", "--temp", "0", "-c", "256", "-n", "4", "-p", "Hi")


@pytest.mark.parametrize(("arguments", "expected"), [
    ([], "localspec"), (["--kernels", "auto"], "localspec"), (["--kernels", "localspec"], "localspec"),
    (["--kernels", "stock"], "stock"),
])  # fmt: skip
def test_json_says_which_kernels_ran(cli: Any, smollm2: Path, arguments: list[str], expected: str) -> None:
    done = cli("run", "-m", str(smollm2), *HELLO, *arguments)
    assert done.rc == 0, done.stderr
    assert json.loads(done.stdout)["kernels"] == expected


def test_unknown_kernels(cli: Any, smollm2: Path) -> None:
    done = cli("run", "-m", str(smollm2), *HELLO, "--kernels", "fast")
    assert (done.rc, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "fast" in done.stderr
    with pytest.raises(UsageError, match="fast"):
        native.use_kernels("fast")


def test_backend_path_prints_an_existing_file(cli: Any) -> None:
    done = cli("backend-path")
    assert done.rc == 0, done.stderr
    path = Path(done.stdout.removesuffix("\n"))
    assert path.is_absolute()
    assert path.is_file()
    assert path.stat().st_size > 10_000
    assert path.name.startswith(("libggml-localspec.", "ggml-localspec."))


# -- a plug-in that can't be loaded


BROKEN = ["missing", "empty", "text", "cut in the header", "cut in the code", "cut at the end", "other library"]


@pytest.fixture(params=BROKEN)
def broken(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Python source that puts something unusable in the plug-in's place."""
    if request.param == "missing":
        return "native._PLUGIN = 'libggml-nowhere.so'"
    real = native.backend_path()
    content = {
        "empty": b"",
        "text": b"not a library",
        "cut in the header": real.read_bytes()[:50],
        "cut in the code": real.read_bytes()[:500_000],
        "cut at the end": real.read_bytes()[:-1],
        "other library": Path(sys.modules["localspec._verify"].__file__ or "").read_bytes(),
    }[request.param]
    path = tmp_path / real.name
    path.write_bytes(content)
    return f"native.backend_path = lambda: Path({str(path)!r})"


@pytest.mark.parametrize("kernels", ["auto", "localspec"])
def test_a_plugin_that_cannot_be_loaded(
    broken: str, kernels: str, smollm2: Path, cli_env: dict[str, str], tmp_path: Path
) -> None:
    code = f"from pathlib import Path; from localspec import native; {broken}; from localspec.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "run", "-m", str(smollm2), *HELLO, "--kernels", kernels],
        capture_output=True, text=True, env=cli_env, cwd=tmp_path, timeout=120, check=False,
    )  # fmt: skip
    if kernels == "auto":
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["kernels"] == "stock"
        assert done.stderr.count("stock kernels serve: ") == 1
    else:
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert done.stderr.startswith("localspec: error: ")


# -- texts written with our kernels are the plain ones


def written(model: Path, **options: Any) -> dict[str, Any]:
    """What `program` below found, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_kernels", str(model), json.dumps(options)],
        capture_output=True, text=True, cwd=ROOT, env=dict(os.environ), timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["kernels"] == "localspec"
    return result


def check(result: dict[str, Any], n_prompt: int, end: int) -> None:
    assert result["n_prompt"] >= n_prompt
    assert result["n_prompt"] + result["n_generated"] >= end
    for n_max, run in result["runs"].items():
        assert run["identical"], f"n_max {n_max}: {run}"
        assert run["n_accepted"] > 0, f"n_max {n_max}: nothing kept"
    assert any(run["n_accepted"] < run["n_drafted"] for run in result["runs"].values()), "nothing refused"


# Texts that the models continue partly with words of their own, partly with ours: drafts are kept and refused.
QUESTIONS = " ".join(prompt.turns[0] for prompt in BUILT_IN)


def test_greedy_text_is_the_plain_text_beyond_256_tokens(smollm2: Path) -> None:
    check(written(smollm2, text=QUESTIONS, n=110, n_max=[*range(1, 9)]), n_prompt=180, end=290)


def test_greedy_text_is_the_plain_text_past_a_sliding_window(gemma3: Path) -> None:
    """gemma-3 looks back 512 tokens in most of its layers; the text begins before that and ends behind."""
    result = written(gemma3, text=f"{QUESTIONS}\n\nAnswers:\n{QUESTIONS}\n\nAnswers:", n=180, n_max=[1, 5, 8])
    check(result, n_prompt=380, end=560)
    assert result["n_prompt"] < 512


def test_sampled_text_is_the_plain_text_of_the_seed(smollm2: Path) -> None:
    text = f"{QUESTIONS}\n\nAnswers:\n{QUESTIONS}"
    check(written(smollm2, text=text, n=60, n_max=[2, 5, 8], temperature=0.8, seed=3), n_prompt=380, end=440)


# -- the program


def write(session: TargetSession, request: Request, drafter: Drafter | None, n_max: int) -> tuple[list[int], Stats]:
    session.rollback(0, 0)
    engine = Engine(session, drafter, FixedBlock(n_max))
    for _ in engine.generate(request):
        pass
    ids = engine.tokens(0)[len(request.prompt) :]
    return ids, engine.finish(0)


def program(path: str, options: dict[str, Any]) -> dict[str, Any]:
    native.use_kernels("localspec")
    sampling = Sampling(temperature=options.get("temperature", 0.0), seed=options.get("seed", 0))
    with Model(path) as model, TargetSession(model, SessionSettings(n_ctx=1024)) as session:
        request = Request(model.tokenizer.encode(options["text"]), sampling, options["n"])
        plain, _ = write(session, request, None, 0)
        runs = {}
        for n_max in options["n_max"]:
            text, stats = write(session, request, NgramDrafter(), n_max)
            runs[n_max] = {"identical": text == plain, "n_drafted": stats.n_drafted, "n_accepted": stats.n_accepted}
        return {
            "kernels": native.kernels_in_use(), "n_prompt": len(request.prompt), "n_generated": len(plain), "runs": runs,
        }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(program(sys.argv[1], json.loads(sys.argv[2]))))
