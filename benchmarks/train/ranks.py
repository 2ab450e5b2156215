"""Training with several processes under ``torchrun``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, distributed

from calibrant.losses.entries import summed_over_ranks


class Ranks(NamedTuple):
    """Number of this process, and of all processes."""

    rank: int
    size: int


def ranks() -> Ranks:
    """Return the rank of this process and the number of processes in its group."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return Ranks(0, 1)
    return Ranks(distributed.get_rank(), distributed.get_world_size())


@contextmanager
def joining(device: str | None = None) -> Iterator[Ranks]:
    """Join the processes that ``torchrun`` started; by default each has its own GPU if possible."""
    if int(os.environ.get("WORLD_SIZE", "1")) == ranks().size:
        yield ranks()
        return
    on_gpu = torch.cuda.is_available() and (device is None or device.startswith("cuda"))
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield ranks()
    finally:
        distributed.destroy_process_group()


def average_gradients(parameters: Iterable[Tensor]) -> None:
    """Replace gradients by their mean over all processes."""
    for parameter in parameters:
        if parameter.grad is not None:
            summed_over_ranks(parameter.grad).div_(ranks().size)


def share_buffers(module: torch.nn.Module) -> None:
    """Copy the buffers of the first process to all others."""
    if ranks().size > 1:
        for buffer in module.buffers():
            distributed.broadcast(buffer, 0)
