"""Several processes that train one network, as ``torchrun`` starts them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, distributed

from calibrant._core.torch_models import unusable
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
def joining(device: str | None = None) -> Iterator[Ranks]:
    """Join the processes that ``torchrun`` started; alone where it started none.

    ``device`` is what they will compute on; by default each has a GPU, or none has.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
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


def chosen_device(name: str | None = None) -> torch.device:
    """The device of a name; by default, and for ``cuda``, the GPU of this process.

    >>> chosen_device("cpu")
    device(type='cpu')
    """
    if name in (None, "cuda") and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    reason = unusable(name or "cpu")
    if reason:
        raise ValueError(f"there is no device {name!r} here: {reason}")
    return torch.device(name or "cpu")


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
