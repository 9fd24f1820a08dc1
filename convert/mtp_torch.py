"""An assistant's checkpoint through the trainer's own model, in fp32: what the exported file is held against."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from localspec.convert.checkpoint import Checkpoint
from localspec.convert.methods import Text
from localspec.gguf_file import GGUFFile
from localspec.speculator import SpeculatorConfig
from localspec.train.losses import best_tokens
from localspec.train.models.mtp import Model, Settings, names_of
from localspec.train.target_weights import TargetWeights


class TorchDraft:
    """One checkpoint's weights."""

    def __init__(self, source: Checkpoint, config: SpeculatorConfig, target: GGUFFile):
        self.model = Model(config, Settings(ttt=max(1, config.depth)))
        own = {place: source.tensor(place.removeprefix("model.")) for place in names_of(config.n_layer).values()}
        own = {place: v.reshape(-1) if place.endswith("layer_scalar") else v for place, v in own.items()}
        self.model.take({place: torch.from_numpy(value) for place, value in own.items()})
        self.model.attach(TargetWeights(target.path))

    def roll_out(
        self, text: Text, starts: npt.NDArray[np.int64], depth: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """As methods.Reading says; the row before each start holds the last key that is seen."""
        tokens, n = torch.from_numpy(text.tokens.astype(np.int64)), len(text.tokens)
        low = self.model.low(torch.float32)
        rows, bounds = starts - 1, np.array([0, n], np.int64)
        alive, kept = np.ones(len(rows), bool), np.zeros(len(rows), np.int64)
        first = np.empty((0, 0), np.float32)
        with torch.no_grad():
            steps = self.model.drafts(low, tokens, torch.tensor(text.taps), bounds, rows, depth)
            for step, x in enumerate(steps):
                if step == 0:
                    first = torch.nn.functional.linear(x, low["head"]).numpy()
                told = rows + 2 + step
                drafted = best_tokens(x, low["head"]).numpy()
                alive &= (told < n) & (drafted == text.tokens[np.minimum(told, n - 1)])
                kept += alive
        return first, kept

    def close(self) -> None:
        """Nothing is held open."""
