"""What a run trains and evaluates on, and in which order; from shards, or from a target that writes meanwhile."""

from __future__ import annotations

from pathlib import Path

from localspec.data.shards import Shards
from localspec.errors import TrainError
from localspec.train import batches, evaluate
from localspec.train.distributed import World
from localspec.train.live import Hybrid, LiveSettings, Memory, Online
from localspec.train.settings import TrainSettings
from localspec.train.target_weights import TargetWeights


class Feed:
    """`shards` and which of their samples are for `training`; `eval_shards` and the `evaluated` ones of those."""

    def __init__(
        self, target: TargetWeights, data: Path | None, eval_data: Path | None, live: LiveSettings | None,
        settings: TrainSettings, world: World,
    ):  # fmt: skip
        self._settings = settings
        self._target = target
        self._live: Online | Hybrid | None = None
        self._plans: dict[int, list[list[int]]] = {}
        if live is not None:
            if world.size > 1:
                raise TrainError("beside a target that writes, one process trains: without torchrun, or --states offline")
            if not settings.steps:
                raise TrainError("what the target will write is not known beforehand: give --steps")
            self._live = Hybrid(target.path, live, data) if data is not None else Online(target.path, live)
        try:
            self.shards: Shards | Memory = self._first(data, world)
            self._split()
            self._choose(eval_data)
        except BaseException:
            self.close()
            raise

    def _first(self, data: Path | None, world: World) -> Shards | Memory:
        if self._live is not None:
            return self._live.refresh()
        if data is None:
            raise TrainError("no data: give --data, or --states online with --prompts")
        shards = Shards.open(data, self._target.identity)
        # data may grow while the processes open it: all take what the first one saw
        return Shards(data, world.share(shards.manifest))

    def _split(self) -> None:
        self.training, self._held_out = batches.split(self.shards, self._settings.held_out)
        self.lengths = self.shards.lengths()

    def _choose(self, eval_data: Path | None) -> None:
        self.eval_shards: Shards | Memory = self.shards
        held_out = self._held_out
        if eval_data is not None:
            self.eval_shards = Shards.open(eval_data, self._target.identity)
            mine, theirs = self.shards.manifest.taps, self.eval_shards.manifest.taps
            if mine != theirs:
                raise TrainError(f"{eval_data} has the taps {theirs}, the data {mine}: make both with the same --taps")
            held_out = list(range(len(self.eval_shards)))
        if not held_out:
            raise TrainError("no prompt is held out for evaluation: more data, a larger --held-out, or --eval-data")
        self.evaluated = evaluate.choose(self.eval_shards, held_out, self._settings.eval_tokens)
        if isinstance(self.eval_shards, Memory):
            self.eval_shards = self.eval_shards.copy(self.evaluated)
            self.evaluated = list(range(len(self.evaluated)))

    def plan(self, epoch: int) -> list[list[int]]:
        """An epoch's batches. Beside a target that writes, they are of what is there when the epoch is first asked for."""
        if epoch not in self._plans:
            if self._live is not None and self._plans:
                self.shards = self._live.refresh()
                self._split()
            s = self._settings
            self._plans[epoch] = batches.plan(self.lengths, self.training, s.batch_tokens, s.max_len, s.seed, epoch)
        return self._plans[epoch]

    def close(self) -> None:
        if self._live is not None:
            self._live.close()
