"""Optimisers and the learning rate's course."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from localspec.train.settings import TrainSettings


def make(model: nn.Module, matrices: list[str], settings: TrainSettings) -> list[Optimizer]:
    """Muon (Jordan et al., 2024) for the named matrices and AdamW for the rest, or AdamW for all. Muon's steps are scaled to
    the size of AdamW's (Liu et al., arXiv 2502.16982), so that one learning rate serves both."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    inner = [p for n, p in named.items() if n in matrices]
    outer = [p for n, p in named.items() if n not in matrices]
    lr, decay = settings.peak_lr, settings.weight_decay
    # betas: the second moment forgets in 50 steps, not 1,000: runs here are short
    adam: dict[str, Any] = {"lr": lr, "betas": (0.9, 0.98), "eps": 1e-10, "fused": True}
    if settings.optimizer == "adamw":
        groups = [{"params": inner, "weight_decay": decay}, {"params": outer, "weight_decay": 0.0}]
        return [torch.optim.AdamW(groups, **adam)]
    muon = torch.optim.Muon(inner, lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(outer, weight_decay=0.0, **adam)]


def rate(step: int, total: int, settings: TrainSettings) -> float:
    """The learning rate of step `step` (0 the first) of `total`: up over the warm-up, level, then down to nothing in a
    line."""
    up = min(1.0, (step + 1) / (settings.warmup + 1))
    falling = settings.decay * total
    down = min(1.0, (total - step) / falling) if falling > 0 else 1.0
    return settings.peak_lr * min(up, down)
