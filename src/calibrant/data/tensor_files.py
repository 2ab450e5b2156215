"""Files of tensors: ``.safetensors``, and what ``torch.save`` wrote."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from calibrant._core.messages import comma_separated
from calibrant.data.formats import (
    Array,
    ArrayHeader,
    Reader,
    _changed,
    _damaged,
    _fingerprint,
    _reading,
    is_remote,
)
from calibrant.data.shards import CLASS_NAMES, _split_names

# NumPy has no bfloat16: it is widened, which loses nothing.
_DTYPES = {
    **{"BOOL": "bool", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64"},
    **{"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"},
    **{"BF16": "float32", "F16": "float16", "F32": "float32", "F64": "float64"},
}


_HEADER_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
_MAX_HEADER_BYTES = 100_000_000
"""As in the library of the format."""


class SafetensorsReader(Reader):
    """A ``.safetensors`` file, of this machine or an object of a store.

    The library of the format maps files of this machine by their names; here rows are read through
    the handle that is open.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.headers = {}
        self._places: dict[str, tuple[int, np.dtype[Any]]] = {}  # start and stored dtype
        length, size = int.from_bytes(self.stream.read(8), "little"), self.fingerprint[1]
        first = end = 8 + length
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise _damaged(path, f"a header of {length} bytes")
        with _reading(path, *_HEADER_DAMAGE):
            content = json.loads(self.stream.read(length))
            content.pop("__metadata__", None)
            for key, entry in sorted(content.items()):
                if entry["dtype"] in _DTYPES:
                    self._add(key, entry, first, size)
                end = max(end, first + int(entry["data_offsets"][1]))
            if end != size:
                raise ValueError(f"{size} bytes of {end}")
        for key, entry in content.items():
            if key not in self.headers:
                raise ValueError(f"{path}: {key} is {entry['dtype']}; save it again as float32")

    def _add(self, key: str, entry: dict[str, Any], first: int, size: int) -> None:
        dtype, shape = entry["dtype"], tuple(map(int, entry["shape"]))
        begin, end = map(int, entry["data_offsets"])
        stored = np.dtype("uint16" if dtype == "BF16" else _DTYPES[dtype])
        needed = math.prod(shape) * stored.itemsize
        if min(shape, default=0) < 0 or not 0 <= begin <= end <= size - first:
            raise ValueError(f"{key} lies outside of the file")
        if end - begin != needed:
            raise ValueError(f"{key} has {end - begin} bytes of {needed}")
        self.headers[key] = ArrayHeader(shape, np.dtype(_DTYPES[dtype]))
        self._places[key] = first + begin, stored.newbyteorder("<")

    def chunks(self, key: str, rows: int) -> Iterator[Array]:
        """Yield ``rows`` rows of an array at a time."""
        header, (place, stored) = self.headers[key], self._places[key]
        width = math.prod(header.shape[1:]) * stored.itemsize
        for start in range(0, header.rows, rows):
            count = min(rows, header.rows - start)
            with self.lock:
                self.stream.seek(place + start * width)
                raw = bytearray(self.stream.read(count * width))
            with _reading(self.path, TypeError):  # the buffer is too small
                shape = (count, *header.shape[1:]) if header.shape else ()
                values: Array = np.ndarray(shape, stored, raw)
            # bfloat16 is the upper half of float32
            wide = stored.itemsize < header.dtype.itemsize
            yield (values.astype(np.uint32) << 16).view(np.float32) if wide else values


def write_safetensors(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays as a ``.safetensors`` file."""
    from safetensors.numpy import save_file

    for key, values in arrays.items():
        if values.dtype.name not in _DTYPES.values():
            kind = values.dtype.name
            raise ValueError(f".safetensors cannot hold {key}, which is {kind}; write .npz")
    save_file(dict(arrays), path)


_ZIP_START = b"PK\x03\x04"
_HOW_TO_SAVE = "torch.save({'logits': ..., 'labels': ...}, path)"


class TorchReader(Reader):
    """A ``.pt`` or ``.pth`` file, mapped into memory; pickled objects other than tensors never."""

    def __init__(self, path: str) -> None:
        if is_remote(path):
            raise ValueError(f"{path} cannot be mapped into memory: copy it, or save .safetensors")
        super().__init__(path)
        content = self._loaded()
        if not isinstance(content, Mapping):
            kind = type(content).__name__
            raise ValueError(f"{path} holds a {kind}, a dictionary is wanted: {_HOW_TO_SAVE}")
        tensors = {str(key): v for key, v in content.items() if isinstance(v, Tensor)}
        if not _split_names(tensors):
            names = comma_separated(str(key)[:40] for key in list(content)[:8])
            more = " ..." if len(content) > 8 else ""
            raise ValueError(
                f"{path} holds no predictions, only {names}{more}: if these are the parameters of "
                f"a model, run it and save what it says, {_HOW_TO_SAVE}"
            )
        self._tensors = {key: self._checked(key, tensor) for key, tensor in tensors.items()}
        self._names = _texts(content.get(CLASS_NAMES))
        self.headers = {
            key: ArrayHeader(tuple(tensor.shape), _array(tensor.new_empty(0)).dtype)
            for key, tensor in self._tensors.items()
        }
        if self._names is not None:
            self.headers[CLASS_NAMES] = ArrayHeader(self._names.shape, self._names.dtype)

    def _loaded(self) -> object:
        if self.stream.read(len(_ZIP_START)) != _ZIP_START:
            raise ValueError(
                f"{self.path} was not written by torch.save, or by torch before 1.6: {_HOW_TO_SAVE}"
            )
        try:
            content: object = torch.load(
                self.path, map_location="cpu", weights_only=True, mmap=True
            )
        except pickle.UnpicklingError as problem:
            raise ValueError(
                f"{self.path} holds more than tensors, which is never loaded since it could run "
                f"any code; save plain tensors: {_HOW_TO_SAVE}"
            ) from problem
        except Exception as problem:  # of many kinds, from the depths of torch
            raise _damaged(self.path, problem) from problem
        # torch opens by name: make sure that it mapped the file that we hold
        if _fingerprint(self.path) != self.fingerprint:
            raise _changed(self.path)
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
