"""Several processes on one training run: torchrun starts them, each takes its share of every step's batches.

Gradients are sums over rows; they and the numbers of rows are added up over all processes, so that n processes with a batch
each take exactly the step that one process takes with n batches accumulated.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class World:
    """This process's number and how many there are."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, device: torch.device) -> World:
        """Meet the other processes if torchrun started this one."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1 or "RANK" not in os.environ:
            return cls()
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return cls(dist.get_rank(), size)

    @staticmethod
    def is_first() -> bool:
        """Whether this process is the first of those that torchrun started, or the only one; known before they meet."""
        return os.environ.get("RANK", "0") == "0"

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    def add(self, values: list[float]) -> list[float]:
        """Their sums over all processes."""
        if self.size == 1:
            return values
        together = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(together)
        return [float(v) for v in together]

    def add_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Add up each parameter's gradient over all processes."""
        if self.size == 1:
            return
        wanted = [p for p in parameters if p.requires_grad]
        for p in wanted:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        flat = torch.cat([p.grad.view(-1) for p in wanted if p.grad is not None])
        dist.all_reduce(flat)
        at = 0
        for p in wanted:
            p.grad = flat[at : at + p.numel()].view_as(p)
            at += p.numel()

    def share(self, value: Any) -> Any:
        """The first process's value, for all of them."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def leave(self) -> None:
        """Part from the others, once all have come so far. Not after an error: the others would be waited for in vain."""
        if self.size > 1:
            dist.barrier()
            dist.destroy_process_group()
