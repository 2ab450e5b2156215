"""Validation batches of trainers, added to an accumulator."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler

from calibrant._core.checks import IGNORED
from calibrant.metrics.accumulator import Accumulator
from calibrant.metrics.evaluation import Evaluation


def total(accumulator: Accumulator) -> Evaluation:
    """Metrics of the batches of all processes; call it in each of them, once."""
    if dist.is_available() and dist.is_initialized():
        accumulator.all_reduce()
    return accumulator.compute()


def ignore_repeated(labels: Any, loader: Any, batch_idx: int) -> Any:
    """Labels of a batch, ignored for examples that are in it to give every process as many.

    A ``DistributedSampler`` repeats examples if their number is no multiple of the number of
    processes; counted twice, they would change every metric. Labels are left alone if they are
    not one (row) for each example of the batch, since it is not known where those examples are.
    """
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None)
    # a subclass may order its batches in another way
    if type(batches) is not BatchSampler or not isinstance(sampler, DistributedSampler):
        return labels
    start, targets = batch_idx * batches.batch_size, torch.as_tensor(labels)
    if len(targets) != min(batches.batch_size, len(sampler) - start):
        return labels
    local = torch.arange(start, start + len(targets), device=targets.device)
    dataset: Any = sampler.dataset
    repeated = local * sampler.num_replicas + sampler.rank >= len(dataset)
    return _ignored(targets, repeated)


def _ignored(labels: Tensor, rows: Tensor) -> Tensor:
    return labels.masked_fill(rows.reshape(-1, *[1] * (labels.ndim - 1)), IGNORED)
