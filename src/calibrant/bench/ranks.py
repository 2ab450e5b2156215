"""Several processes that train one network, as ``torchrun`` starts them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, distributed

from calibrant.losses.base import summed_over_ranks


class Ranks(NamedTuple):
    """Which process this is, and how many there are.

    >>> ranks()
    Ranks(rank=0, size=1)
    """

    rank: int
    size: int


def ranks() -> Ranks:
    """Rank and number of the processes; one where none were joined."""
    if not joined():
        return Ranks(0, 1)
    return Ranks(distributed.get_rank(), distributed.get_world_size())


def joined() -> bool:
    """Whether this process belongs to a group."""
    return distributed.is_available() and distributed.is_initialized()


@contextmanager
def joining() -> Iterator[Ranks]:
    """Join the processes that ``torchrun`` started; alone where it started none."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ranks()
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield ranks()
    finally:
        distributed.destroy_process_group()


def default_device() -> torch.device:
    """The GPU of this process, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def average_gradients(parameters: Iterable[Tensor]) -> None:
    """Give every process the mean of the gradients of all."""
    for parameter in parameters:
        if parameter.grad is not None:
            summed_over_ranks(parameter.grad).div_(ranks().size)


def spread_buffers(module: torch.nn.Module) -> None:
    """Give every process the buffers of the first."""
    if joined():
        for buffer in module.buffers():
            distributed.broadcast(buffer, 0)
