"""What torch computes while a test looks on."""

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
