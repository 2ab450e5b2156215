"""Prediction files that ``torch.save`` wrote: a dictionary of tensors."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from calibrant._core.messages import comma_separated
from calibrant.data.formats import Array, Header, Reader, changed, damaged
from calibrant.data.keys import CLASS_NAMES, split_names
from calibrant.data.storage import fingerprint_of, is_remote

ZIP = b"PK\x03\x04"
SAVE = "torch.save({'logits': ..., 'labels': ...}, path)"


class TorchReader(Reader):
    """A ``.pt`` or ``.pth`` file, mapped into memory; pickled objects other than tensors never."""

    def __init__(self, path: str) -> None:
        if is_remote(path):
            raise ValueError(f"{path} cannot be mapped into memory: copy it, or save .safetensors")
        super().__init__(path)
        content = self._loaded()
        if not isinstance(content, Mapping):
            kind = type(content).__name__
            raise ValueError(f"{path} holds a {kind}, a dictionary is wanted: {SAVE}")
        tensors = {str(key): v for key, v in content.items() if isinstance(v, Tensor)}
        if not split_names(tensors):
            names = comma_separated(str(key)[:40] for key in list(content)[:8])
            more = " ..." if len(content) > 8 else ""
            raise ValueError(
                f"{path} holds no predictions, only {names}{more}: if these are the parameters of "
                f"a model, run it and save what it says, {SAVE}"
            )
        self._tensors = {key: self._checked(key, tensor) for key, tensor in tensors.items()}
        self._names = _texts(content.get(CLASS_NAMES))
        self.headers = {
            key: Header(tuple(tensor.shape), _array(tensor.new_empty(0)).dtype)
            for key, tensor in self._tensors.items()
        }
        if self._names is not None:
            self.headers[CLASS_NAMES] = Header(self._names.shape, self._names.dtype)

    def _loaded(self) -> object:
        if self.stream.read(len(ZIP)) != ZIP:
            raise ValueError(
                f"{self.path} is no file of torch.save, or one of torch before 1.6: {SAVE}"
            )
        try:
            content: object = torch.load(
                self.path, map_location="cpu", weights_only=True, mmap=True
            )
        except pickle.UnpicklingError as problem:
            raise ValueError(
                f"{self.path} holds more than tensors, which is never loaded since it could run "
                f"any code; save plain tensors: {SAVE}"
            ) from problem
        except Exception as problem:  # of many kinds, from the depths of torch
            raise damaged(self.path, problem) from problem
        # torch opens by name: make sure that it mapped the file that we hold
        if fingerprint_of(os.stat(self.path)) != self.fingerprint:
            raise changed(self.path)
        return content

    def _checked(self, key: str, tensor: Tensor) -> Tensor:
        """Return a tensor that an array can hold; NumPy has no bfloat16, which is widened later."""
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            kind = f"{tensor.layout}".removeprefix("torch.")
            raise ValueError(f"{self.path}: {key} is {kind}; save it again as a plain tensor")
        tensor = tensor.detach()
        if tensor.is_complex():
            raise ValueError(f"{self.path}: {key} must be real numbers, got complex ones")
        stored = tensor.untyped_storage().nbytes()
        if tensor.numel() * tensor.element_size() > stored:  # a row that is repeated by its strides
            raise ValueError(
                f"{self.path}: {key} of shape {tuple(tensor.shape)} repeats {stored:,} bytes; save "
                "tensor.contiguous()"
            )
        return tensor

    def chunks(self, key: str, rows: int) -> Iterator[Array]:
        """Yield ``rows`` rows of an array at a time."""
        if key == CLASS_NAMES and self._names is not None:
            yield from (self._names[i : i + rows] for i in range(0, len(self._names), rows))
            return
        tensor = self._tensors[key]
        if not tensor.ndim:
            yield _array(tensor)
        for start in range(0, len(tensor) if tensor.ndim else 0, rows):
            yield _array(tensor[start : start + rows])


def _array(tensor: Tensor) -> Array:
    """Return a copy, which may be changed."""
    wide = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    return np.array(wide.numpy(), order="C")


def _texts(names: object) -> Array | None:
    """Return a list of names as an array."""
    is_list = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    return np.array(names) if is_list else None
