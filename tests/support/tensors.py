"""Arrays as tensors, and what torch computes while a test looks on."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Largest(TorchFunctionMode):
    """Remember the number of elements of the largest tensor that any operation returns."""

    size = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(each, torch.Tensor):
                self.size = max(self.size, each.numel())
        return out


def tensors(*arrays) -> Any:
    """Arrays as tensors, floats in single precision."""
    made = (torch.from_numpy(array) for array in arrays)
    return [x.float() if x.is_floating_point() else x for x in made]
