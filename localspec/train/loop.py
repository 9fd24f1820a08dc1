"""The training loop, one for all speculators."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import nn

from localspec.data.shards import Shards
from localspec.data.writer import locked
from localspec.errors import TrainError
from localspec.train import batches, checkpoint, evaluate, models, optim, vocab
from localspec.train.batches import Batch
from localspec.train.distributed import World
from localspec.train.feed import Feed
from localspec.train.live import LiveSettings, Memory
from localspec.train.metrics import Metrics
from localspec.train.settings import TrainSettings, check
from localspec.train.target_weights import TargetWeights

RUN = "run.json"
#: Settings that may change when a run goes on; any other would make the curve another one.
FREE = ("epochs", "steps", "eval_every", "eval_tokens", "save_every", "threads", "device", "decay", "verifier")
_RMS_TOKENS = 16384
_FIRST = 4  # a text's first tokens are far out (attention sinks): they say nothing about the scale of the others


@dataclass(frozen=True)
class Run:
    """What is trained, on what, and where to. `start_from`: a checkpoint whose weights are taken first. `live`: the target
    writes meanwhile, into `data`, or nowhere if that is None."""

    method: str
    target: Path
    data: Path | None
    out: Path
    settings: TrainSettings
    model_settings: Any
    start_from: Path | None = None
    eval_data: Path | None = None
    live: LiveSettings | None = None


def train(run: Run, say: Callable[[str], None], show: Callable[[dict[str, Any]], None]) -> evaluate.Report:
    """Train to the end, from the last checkpoint on if there is one; returns the best evaluation.

    `say` gets lines for a person, `show` each step's and each evaluation's numbers as they go into metrics.jsonl, with
    `total`, the steps there will be. Raises TrainError, DataError, PairingError, ModelFileError.
    """
    check(run.settings)
    check(run.model_settings)
    if run.settings.threads:
        torch.set_num_threads(run.settings.threads)
    world = World.join(_device(run.settings.device))
    trainer = _Trainer(run, world, say if world.first else _silent, show if world.first else _silent)
    try:
        report = trainer.run()
    finally:
        trainer.close()
    world.leave()
    return report


def _silent(_: Any) -> None:
    pass


class _Trainer:
    def __init__(self, run: Run, world: World, say: Callable[[str], None], show: Callable[[dict[str, Any]], None]):
        self.setup, self.settings, self.world, self.say, self.show = run, run.settings, world, say, show
        self.device = _device(run.settings.device)
        self.dtype = _dtype(run.settings.dtype, self.device)
        self.metrics: Metrics | None = None
        self._lock: IO[bytes] | None = None
        self.target = TargetWeights(run.target)
        self.kind = models.find(run.method)
        live = run.live
        if live is not None and self.kind.NEEDS_TAPS and not live.taps:
            live = replace(live, taps=models.taps_of(self.kind, self.target.gguf))
        self.feed = Feed(self.target, run.data, run.eval_data, live, self.settings, world)
        try:
            if self.kind.NEEDS_TAPS and not self.feed.shards.manifest.taps:
                raise TrainError(f"{run.data} has no hidden states (--states none), which {run.method} reads: make it again")
            self._make_model()
            self.optimizers = optim.make(self.model, self.model.matrices(), self.settings)
            self.step = self.epoch = self.at = self.n_tokens = 0
            self.best = -math.inf
            self.best_report: dict[str, Any] | None = None
            self.total = self._total()
            self._resume()
            self._introduce()
            if world.first:
                self.metrics = Metrics(run.out, self.step)
        except BaseException:
            self.close()
            raise

    def _make_model(self) -> None:
        feed = self.feed
        counts = vocab.expected_counts(feed.shards, feed.training, self.target.identity.n_vocab)
        rms = tap_rms(feed.shards, feed.training) if self.kind.NEEDS_TAPS else np.ones(0, np.float32)
        facts = models.DataFacts(tuple(feed.shards.manifest.taps), rms, counts)
        self.model: Any = self.kind.new(self.setup.model_settings, self.target, facts, self.settings.seed)
        if self.setup.start_from is not None:
            self.model.take(checkpoint.load_weights(self.setup.start_from))
        self.model.to(self.device)

    def _introduce(self) -> None:
        for line in self.model.remarks():
            self.say(line)
        ids = self.model.vocabulary()
        covered = []
        feed = self.feed
        for shards, samples in ((feed.shards, feed.training), (feed.eval_shards, feed.evaluated)):
            said = vocab.token_counts(shards, samples, self.target.identity.n_vocab)
            covered.append(vocab.coverage(said, ids))
        more = " (aim above 97%: more data, or a larger --draft-vocab)" if covered[1] < 0.97 else ""
        self.say(f"training on {len(feed.training)} samples, evaluating on {len(feed.evaluated)} others")
        self.say(f"the draft can say {covered[0]:.1%} and {covered[1]:.1%} of their tokens{more}")

    def _resolved(self) -> dict[str, Any]:
        return {
            "method": self.setup.method,
            "settings": asdict(self.settings) | {"dtype": str(self.dtype).removeprefix("torch.")},
            "model": asdict(self.setup.model_settings),
            "target": asdict(self.target.identity),
            "target_file": str(self.setup.target),
            "data": str(self.setup.data),
            "processes": self.world.size,
        }

    # -- going on -----------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        if self.world.first:  # two runs would write over each other's checkpoints
            self._lock = _only_one(self.setup.out)
        last = checkpoint.settled(self.setup.out / "last")
        resolved = self._resolved()
        if last is None:
            if self.world.first:
                checkpoint.write_json(self.setup.out / RUN, resolved)
            return
        state = checkpoint.load_trainer(last, self.device)
        try:
            n_samples = self._restore(state, resolved)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
            raise checkpoint.damaged(last) from None
        grown = ""
        if n_samples != len(self.feed.shards):
            self.epoch, self.at = self.epoch + bool(self.at), 0
            counted = f"{n_samples} samples then, {len(self.feed.shards)} now"
            grown = f"; the data has changed ({counted}): a new epoch begins"
        self.total = self._total()
        self.say(f"going on after step {self.step}{grown}")

    def _restore(self, state: dict[str, Any], resolved: dict[str, Any]) -> int:
        """Take up a checkpoint's state, of any kind of damage; returns how many samples there were."""
        _same_settings(state["run"], resolved, self.setup.out)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.epoch, self.at, self.n_tokens = (int(state[n]) for n in ("step", "epoch", "at", "n_tokens"))
        self.best, self.best_report = float(state["best"]), state["best_report"]
        return int(state["n_samples"])

    def _total(self) -> int:
        """Steps that there will be, those done included."""
        if self.settings.steps:
            return self.settings.steps
        left = -float(self.at)  # batches; epochs differ a little, by how samples fit together
        for epoch in range(self.epoch, math.ceil(self.settings.epochs)):
            left += min(1.0, self.settings.epochs - epoch) * len(self.feed.plan(epoch))
        return self.step + math.ceil(max(0.0, left) / (self.settings.accumulate * self.world.size))

    def _save(self, provenance: dict[str, Any]) -> None:
        if not self.world.first:
            return
        state = {
            "run": self._resolved(),
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step, "epoch": self.epoch, "at": self.at, "n_tokens": self.n_tokens,
            "n_samples": len(self.feed.shards), "best": self.best, "best_report": self.best_report,
        }  # fmt: skip
        checkpoint.save(self.setup.out / "last", self.model, provenance, state)

    def _provenance(self, report: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "steps": self.step, "tokens_seen": self.n_tokens, "data_tokens": int(self.feed.lengths.sum()),
            "data_samples": len(self.feed.training), "optimizer": self.settings.optimizer, "lr": self.settings.peak_lr,
            "evaluation": report,
        }  # fmt: skip

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> evaluate.Report:
        report: evaluate.Report | None = None
        stream = self._stream()
        started = time.monotonic()
        try:
            while self.step < self.total:
                line = self._step(stream)
                now = time.monotonic()
                line |= {"tok_s": round(line["tokens"] / (now - started), 1), "seconds": round(now - started, 3)}
                self._tell(line)
                last = self.step == self.total
                if last or self.step % self.settings.eval_every == 0:
                    report = self._evaluate()
                if last or self.step % self.settings.save_every == 0:
                    self._save(self._provenance(report.as_json() if report else self.best_report))
                started = time.monotonic()
        finally:
            stream.close()
        return report or self._evaluate()

    def _stream(self) -> Generator[tuple[Batch, int, int], None, None]:
        """This process's batches, with the place (epoch, number) after each step's last one."""
        group = self.settings.accumulate * self.world.size

        def places() -> Iterator[tuple[list[int], int, int]]:
            n, epoch, at = 0, self.epoch, self.at
            while True:
                for i, chosen in enumerate(self.feed.plan(epoch)):
                    if i < at:
                        continue
                    if n % self.world.size == self.world.rank:
                        yield chosen, epoch, i + 1
                    n = (n + 1) % group
                epoch, at = epoch + 1, 0

        def make(place: tuple[list[int], int, int]) -> tuple[Batch, int, int]:
            chosen, epoch, at = place
            samples = [self.feed.shards.sample(i) for i in chosen]
            return self.model.batch(samples, self.settings.max_len, self.dtype), epoch, at

        return batches.ahead(places(), make)

    def _step(self, stream: Iterator[tuple[Batch, int, int]]) -> dict[str, Any]:
        """One optimiser step. Raises TrainError where the loss or a gradient is not finite; weights are then untouched."""
        lr = optim.rate(self.step, self.total, self.settings)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        depth = self.model.depth
        sums = [0.0] * (4 + 3 * depth)  # loss, rows, tokens, batches; then losses, rows, right by depth
        for _ in range(self.settings.accumulate):
            batch, epoch, at = next(stream)
            batch = batch.to(self.device)
            parts = self.model.loss(batch)
            parts.loss.backward()
            got = [float(parts.loss.detach()), parts.n_rows, batch.n_tokens, 1]
            for values in (parts.losses, parts.rows, parts.right):
                got += list(values) + [0] * (depth - len(values))
            sums = [a + b for a, b in zip(sums, got)]
        sums = self.world.add(sums)
        loss = sums[0] / max(sums[1], 1)
        if not math.isfinite(loss):
            raise self._diverged(f"the loss is {loss}")
        self.world.add_gradients(self.model.parameters())
        with torch.no_grad():
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad /= max(sums[1], 1)
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip or math.inf))
        if not math.isfinite(norm):
            raise self._diverged(f"the gradient's norm is {norm}")
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        self.step += 1
        self.epoch, self.at = self._last_place(epoch, at)
        if self.at == len(self.feed.plan(self.epoch)):
            self.epoch, self.at = self.epoch + 1, 0
        self.n_tokens += int(sums[2])
        losses, rows, right = (sums[4 + i * depth : 4 + (i + 1) * depth] for i in range(3))
        return {
            "step": self.step, "epoch": self.epoch, "loss": round(loss, 6),
            "loss_by_depth": [round(a / n, 5) if n else None for a, n in zip(losses, rows)],
            "right_by_depth": [round(a / n, 4) if n else None for a, n in zip(right, rows)],
            "lr": round(lr, 8), "norm": round(norm, 5), "rows": int(sum(rows)), "tokens": int(sums[2]),
        }  # fmt: skip

    def _last_place(self, epoch: int, at: int) -> tuple[int, int]:
        """The place of the last process, which has the last batch of a step."""
        values = self.world.add([float(epoch), float(at)] if self.world.rank == self.world.size - 1 else [0.0, 0.0])
        return int(values[0]), int(values[1])

    def _diverged(self, what: str) -> TrainError:
        kept = "no checkpoint had been written yet"
        if checkpoint.settled(self.setup.out / "last") is not None:
            kept = f"the last good checkpoint stays in {self.setup.out / 'last'}"
        return TrainError(f"step {self.step + 1}: {what}: stopped, {kept}; lower --lr (it is {self.settings.peak_lr:g})")

    def _tell(self, line: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(line)
        self.show(line | {"total": self.total})

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def _evaluate(self) -> evaluate.Report:
        """Roll out on the held-out samples, the processes sharing nothing: the first one does it alone."""
        report = None
        if self.world.first:
            report = evaluate.evaluate(self.model, self._held_out(), self.model.depth)
            if not report.total[report.n_max].verifies:
                raise TrainError("nothing can be drafted in the samples held out: their answers are too short, or begin "
                                 f"after --max-len {self.settings.max_len}")  # fmt: skip
            self._tell({"step": self.step, "eval": report.as_json()})
            if report.score > self.best:
                self.best, self.best_report = report.score, report.as_json()
                checkpoint.save(self.setup.out / "best", self.model, self._provenance(self.best_report), None)
        shared: evaluate.Report = self.world.share(report)
        return shared

    def _held_out(self) -> Iterator[Batch]:
        shards = self.feed.eval_shards
        lengths, order = shards.lengths(), sorted(self.feed.evaluated)
        while order:
            chosen: list[int] = []
            room = self.settings.batch_tokens
            while order and (not chosen or lengths[order[0]] <= room):
                chosen.append(order.pop(0))
                room -= int(lengths[chosen[-1]])
            samples = [shards.sample(i) for i in chosen]
            yield self.model.batch(samples, self.settings.max_len, self.dtype).to(self.device)

    def close(self) -> None:
        self.feed.close()
        if self.metrics is not None:
            self.metrics.close()
        if self._lock is not None:
            self._lock.close()


def _only_one(out: Path) -> IO[bytes]:
    """The lock of a run's directory, held until it is closed. Raises DataError where another process has it, TrainError
    where the directory can't be written to."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        return locked(out / ".lock")
    except OSError as error:
        raise TrainError(f"{out} can't be written to: {error.strerror or error}") from None


def tap_rms(shards: Shards | Memory, samples: list[int]) -> Any:
    """f32[T * H]: the root mean square of each dimension of the taps, over the first samples' tokens without
    those that each begins with."""
    total, n = None, 0
    for i in samples:
        taps = shards.sample(i).taps[_FIRST:]
        flat = taps.reshape(len(taps), -1).astype(np.float64)
        total = (flat**2).sum(0) + (0 if total is None else total)
        n += len(flat)
        if n >= _RMS_TOKENS:
            break
    if total is None or n == 0:
        raise TrainError("the samples are too short to train on")
    return np.sqrt(total / n).astype(np.float32)


def _same_settings(then: dict[str, Any], now: dict[str, Any], out: Path) -> None:
    """Raise TrainError where a run can't go on with other settings than it was begun with."""
    pairs = {**{(n, n): (then[n], now[n]) for n in ("method", "target", "processes")}}
    for part in ("settings", "model"):
        for name in now[part]:
            if name not in FREE:
                pairs[(part, name)] = (then[part].get(name), now[part][name])
    for (_, name), (old, new) in pairs.items():
        if old != new:
            flag = name.replace("_", "-")
            raise TrainError(f"{out} was begun with another {flag} ({old}, now {new}): give it again, or another -o")


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if (name == "cuda" and not torch.cuda.is_available()) or (name == "mps" and not torch.backends.mps.is_available()):
        raise TrainError(f"--device {name}: PyTorch sees no such device here")
    return torch.device(name)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """bf16 where products are faster in it: CUDA, and CPUs with instructions for it."""
    if name == "auto":
        fast = device.type == "cuda" or (device.type == "cpu" and _cpu_multiplies_bf16())
        name = "bf16" if fast else "fp32"
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[name]


def _cpu_multiplies_bf16() -> bool:
    """Whether the CPU has AVX512_BF16, AMX or the like."""
    flags: set[str] = set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags = set(line.split(":", 1)[1].split())
                break
    except OSError:
        return False
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


