"""``.safetensors`` files that cannot be mapped into memory, such as objects of a store."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from calibrant.data.formats import SAFETENSORS_DTYPES, Array, Header, Reader, damaged, reading

LONGEST_HEADER = 100_000_000
"""Bytes, as in the library of the format."""


class SafetensorsStream(Reader):
    """A ``.safetensors`` file whose rows are read through a stream."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._lock, self.headers = threading.Lock(), {}
        self._places: dict[str, tuple[int, np.dtype[Any]]] = {}  # start and stored dtype
        length = int.from_bytes(self.stream.read(8), "little")
        size = self.fingerprint[1]
        if length > min(LONGEST_HEADER, size - 8):
            raise damaged(path, f"a header of {length} bytes")
        with reading(path, ValueError, KeyError, TypeError, AttributeError):
            content = json.loads(self.stream.read(length))
            for key, entry in content.items():
                if key != "__metadata__":
                    self._add(key, entry, 8 + length, size)

    def _add(self, key: str, entry: dict[str, Any], start: int, size: int) -> None:
        dtype, shape = str(entry["dtype"]), tuple(map(int, entry["shape"]))
        if dtype not in SAFETENSORS_DTYPES:
            raise ValueError(f"{key} is {dtype}; save it again as float32")
        begin, end = map(int, entry["data_offsets"])
        stored = np.dtype("uint16" if dtype == "BF16" else SAFETENSORS_DTYPES[dtype])
        needed = math.prod(shape) * stored.itemsize
        if min(shape, default=0) < 0 or not 0 <= begin <= end <= size - start:
            raise ValueError(f"{key} lies outside of the file")
        if end - begin != needed:
            raise ValueError(f"{key} has {end - begin} bytes of {needed}")
        self.headers[key] = Header(shape, np.dtype(SAFETENSORS_DTYPES[dtype]))
        self._places[key] = start + begin, stored.newbyteorder("<")

    def chunks(self, key: str, rows: int) -> Iterator[Array]:
        """Yield ``rows`` rows of an array at a time."""
        header, (place, stored) = self.headers[key], self._places[key]
        width = math.prod(header.shape[1:]) * stored.itemsize
        for start in range(0, header.rows, rows):
            count = min(rows, header.rows - start)
            with self._lock:
                self.stream.seek(place + start * width)
                raw = bytearray(self.stream.read(count * width))
            with reading(self.path, TypeError):  # the buffer is too small
                shape = (count, *header.shape[1:]) if header.shape else ()
                values: Array = np.ndarray(shape, stored, raw)
            # bfloat16 is the upper half of float32
            wide = stored.itemsize < header.dtype.itemsize
            yield (values.astype(np.uint32) << 16).view(np.float32) if wide else values
