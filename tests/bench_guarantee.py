"""Is drafting ever slower than plain decoding, and is the adaptive block as good as the best fixed one? On real models.

    python -m tests.bench_guarantee MODEL DRAFT... --prompts FILE [--limit 4 -n 512 --repeats 5 --temp 0 --threads 1]
    python -m tests.bench_guarantee MODEL DRAFT... --prompts FILE --fixed 1,2,3,4,5,6,8

A DRAFT is `ngram`, `shipped`, a draft's file, `scrambled:FILE` (the blocks of its weights in another order: a draft that is
wrong nearly always and costs what it always cost), or `plain`, which shows the noise of the measurement. Plain decoding, in
a context of its own that reads nothing for a draft, and each of the others write every text side by side, 16 tokens at a
time, as a machine's speed changes by more than what is measured. Each controller begins without knowing anything; with
`--profile` knowing what two texts to other prompts taught, as in a user's second run. `--repeat-prompt N` makes prompts of
about N tokens.

Without --fixed the seconds of every stretch of 256 tokens of a text are held against plain decoding's, the median of the
repeats: `worst` is the largest ratio, above 1 is slower. With it: tokens per second of each block size and of the
adaptive one, over plain decoding's. One JSON line for each draft.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from localspec import native
from localspec.accept import Sampling
from localspec.bench import encode_prompts
from localspec.blocks import ADAPTIVE_N_MAX, FixedBlock
from localspec.control import Adaptive
from localspec.drafters import DrafterSettings, load, taps
from localspec.engine import Engine, Request
from localspec.gguf_file import GGUFFile
from localspec.gguf_format import TENSOR_TYPES
from localspec.model import Model
from localspec.pairing import drafter_for
from localspec.profile import ENOUGH_SAMPLES
from localspec.prompts import read_prompts
from localspec.shipped import shipped_draft
from localspec.target import SessionSettings, TargetSession

WINDOW = 256
_TAUGHT_BY = 2  # texts
TURN = 16  # tokens that one writes before the next does
_BLOCK_BYTES = {name: size for name, _, size in TENSOR_TYPES.values()}


def scrambled(path: Path, to: Path) -> Path:
    """A copy of a draft whose matrices have their blocks in another order; everything else stays."""
    gguf = GGUFFile.open(path, "draft")
    data = bytearray(path.read_bytes())
    rng = np.random.default_rng(0)
    for tensor in gguf.tensors.values():
        if len(tensor.shape) > 1:
            part = np.frombuffer(data, np.uint8, tensor.nbytes, tensor.offset).reshape(-1, _BLOCK_BYTES[tensor.type])
            part[:] = part[rng.permutation(len(part))]
    to.write_bytes(data)
    return to


@dataclass
class Text:
    """One text as it was written: its tokens, and the seconds at which each was there; `n_verify` decodes."""

    tokens: list[int]
    at: np.ndarray
    n_verify: int

    def windows(self) -> np.ndarray:
        """Seconds of every stretch of WINDOW tokens, f64[n - WINDOW]; of the whole where it is shorter, f64[1]."""
        return self.at[WINDOW:] - self.at[:-WINDOW] if len(self.at) > WINDOW + 1 else self.at[-1:] - self.at[0]


class Writer:
    """Writes one text with one engine, a stretch at a time."""

    def __init__(self, engine: Engine, prompt: list[int], n: int, sampling: Sampling):
        self.engine = engine
        self._n_prompt = len(prompt)
        self._slot = engine.start(Request(prompt, sampling, n))
        self._counts, self._seconds = [0], [0.0]
        self.text: Text | None = None

    def go(self) -> None:
        """Some TURN tokens more. At the end there is `text`."""
        start, began, before = self._counts[-1], time.perf_counter(), self._seconds[-1]
        while self.text is None and self._counts[-1] - start < TURN:
            step = self.engine.step()[0]
            self._counts.append(self._counts[-1] + sum(piece.token >= 0 for piece in step.pieces))
            self._seconds.append(before + time.perf_counter() - began)
            if step.stop is not None:
                self._finish()

    def _finish(self) -> None:
        tokens = self.engine.tokens(self._slot)[self._n_prompt :]
        stats = self.engine.finish(self._slot)
        self.engine.session.rollback(0, 0)
        self.text = Text(tokens, np.interp(np.arange(len(tokens) + 1), self._counts, self._seconds), stats.n_verify)


def write(engines: Sequence[Engine], prompt: list[int], n: int, sampling: Sampling) -> list[Text]:
    """The same text with each engine. They take turns, so what the machine does to one it does to all."""
    writers = [Writer(engine, prompt, n, sampling) for engine in engines]
    while any(writer.text is None for writer in writers):
        for writer in writers:
            writer.go()
    return [writer.text for writer in writers if writer.text is not None]


def scrambled_in(folder: Path, name: str) -> str:
    """The name of a draft whose file is there."""
    if not name.startswith("scrambled:"):
        return name
    path = Path(name.removeprefix("scrambled:"))
    return str(scrambled(path, folder / f"{path.stem}.scrambled.gguf"))


def engine_for(model: Model, name: str, args: argparse.Namespace) -> Engine:
    """A context of its own with the draft `name`."""
    settings = SessionSettings(n_ctx=args.ctx_size, n_threads=args.threads)
    if name == "plain":
        return Engine(TargetSession(model, settings))
    kind, path = "ngram", None
    if name != "ngram":
        path = shipped_draft(model.gguf) if name == "shipped" else Path(name)
        assert path is not None, "no draft is shipped for this target"
        kind = drafter_for(GGUFFile.open(path, "draft"))
    draft = DrafterSettings(path, n_threads=args.threads)
    session = TargetSession(model, replace(settings, taps=taps(kind, model.gguf, draft)))
    return Engine(session, load(kind, session, draft))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("drafts", nargs="+")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--source", help="only prompts of this source")
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("-n", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ctx-size", type=int, default=4096)
    parser.add_argument("--repeat-prompt", type=int, default=0)
    parser.add_argument("--fixed", default="")
    parser.add_argument("--long", action="store_true", help="only prompts whose text reaches -n tokens")
    parser.add_argument("--profile", action="store_true", help="controllers begin with what two other texts taught")
    args = parser.parse_args()
    native.use_kernels("auto")
    model = Model(args.model)
    chosen = [p for p in read_prompts(args.prompts) if args.source in (None, p.source)]
    random.Random(0).shuffle(chosen)
    prompts = encode_prompts(model, args.ctx_size, chosen if args.long else chosen[: args.limit + _TAUGHT_BY * args.profile])
    if args.repeat_prompt:
        prompts = [(p * (1 + args.repeat_prompt // len(p)))[: args.repeat_prompt] + p for p in prompts]
    sampling = Sampling(temperature=args.temp, seed=7)
    plain = Engine(TargetSession(model, SessionSettings(n_ctx=args.ctx_size, n_threads=args.threads)))
    if args.long:
        reach = (prompt for prompt in prompts if len(write([plain], prompt, args.n, sampling)[0].tokens) == args.n)
        prompts = list(itertools.islice(reach, args.limit + _TAUGHT_BY * args.profile))
    teachers, prompts = prompts[args.limit :], prompts[: args.limit]
    with tempfile.TemporaryDirectory() as folder:
        for name in args.drafts:
            ways: dict[str, int] = {"adaptive": -1}
            ways |= {k: int(k) for k in args.fixed.split(",") if k}
            draft = scrambled_in(Path(folder), name)
            prior = taught(model, draft, teachers, sampling, args)
            texts = [written(model, draft, ways, prompt, sampling, args, prior) for prompt in prompts]
            report = best_fixed(texts) if args.fixed else guarantee(texts)
            same = all(text.tokens == of["plain"][0].tokens for of in texts for way in of for text in of[way])
            print(json.dumps({"draft": name, "temp": args.temp, **report, "identical": same}), flush=True)


def taught(
    model: Model, draft: str, prompts: list[list[int]], sampling: Sampling, args: argparse.Namespace
) -> Adaptive:  # fmt: skip
    """A controller that has written answers to these prompts."""
    engine, controller = engine_for(model, draft, args), Adaptive(ADAPTIVE_N_MAX)
    engine.controller = controller
    for prompt in prompts:
        write([engine], prompt, args.n, sampling)
    close(engine)
    return controller


def close(engine: Engine) -> None:
    if engine.drafter is not None:
        engine.drafter.close()
    engine.session.close()


def written(
    model: Model, draft: str, ways: dict[str, int], prompt: list[int], sampling: Sampling, args: argparse.Namespace,
    prior: Adaptive,
) -> dict[str, list[Text]]:
    """The repeats of a text, written in every way, each time in new contexts: where one lies in memory makes 1 %."""
    texts: dict[str, list[Text]] = {way: [] for way in ("plain", *ways)}
    for repeat in range(args.repeats):
        order = list(texts)
        random.Random(repeat).shuffle(order)
        engines = []
        for way in order:
            engines.append(engine_for(model, "plain" if way == "plain" else draft, args))
            k = ways.get(way, 0)
            begun = Adaptive(ADAPTIVE_N_MAX, prior.decode.curve(ENOUGH_SAMPLES), prior.learnt())
            engines[-1].controller = begun if k < 0 else FixedBlock(k)
        for way, text in zip(order, write(engines, prompt, args.n, sampling)):
            texts[way].append(text)
        for engine in engines:
            close(engine)
    return texts


def seconds(texts: list[dict[str, list[Text]]], way: str) -> float:
    """Of all texts, each the median of its repeats."""
    return sum(statistics.median(float(text.at[-1]) for text in of[way]) for of in texts)


def guarantee(texts: list[dict[str, list[Text]]]) -> dict[str, Any]:
    ratios: list[float] = []
    for of in texts:
        pairs = [mine.windows() / plain.windows() for mine, plain in zip(of["adaptive"], of["plain"])]
        ratios += np.median(pairs, 0).tolist()
    first = [of["adaptive"][0] for of in texts]
    return {
        "windows": len(ratios), "worst": round(max(ratios), 4), "p95": round(float(np.quantile(ratios, 0.95)), 4),
        "median": round(statistics.median(ratios), 4),
        "speedup": round(seconds(texts, "plain") / seconds(texts, "adaptive"), 3),
        "tokens_per_verify": round(sum(len(t.tokens) for t in first) / sum(t.n_verify for t in first), 3),
    }  # fmt: skip


def best_fixed(texts: list[dict[str, list[Text]]]) -> dict[str, Any]:
    base = seconds(texts, "plain")
    speedups = {way: round(base / seconds(texts, way), 3) for way in texts[0] if way != "plain"}
    best = max((way for way in speedups if way != "adaptive"), key=lambda way: speedups[way])
    return {"speedup": speedups, "best": best, "adaptive_over_best": round(speedups["adaptive"] / speedups[best], 3)}


if __name__ == "__main__":
    main()
