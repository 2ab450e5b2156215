"""Damage to files and to JSON: flipped bits, cuts, wrong headers, huge numbers."""

import io
import struct
from typing import Any

import numpy as np
from numpy.lib import format as npy

HUGE = (2**31, 2**40, 2**63 - 1, 2**64, 10**30)
SHAPES = [
    *[(size, 3) for size in HUGE],
    *[(3, size) for size in HUGE],
    *[(size,) for size in HUGE],
    *[(0, size) for size in HUGE],
    *[(size, 0) for size in HUGE],
    *[(-1,), (-5, 3), (4, -3), (2**32, 2**32), (1,) * 40, (True, 3), (), (0,), (0, 0)],
]
"""Shapes that a header may declare and no file holds, or that are odd."""
DTYPES = [
    *["<f8", ">f4", "<f2", "|b1", "<i8", "|u1", "<U9", "<U0", "|S0", "|S7", "|V0", "|V8", "<c16"],
    *["|O", "<M8[s]", "<m8[D]", "<f16", "<U999999999", "f8,i4", "", "x", "<f3", "(3,)f8"],
]
PARTS = [b"(" * 300, b"[" * 5000, b"'" * 9, b"{" * 999, b"0x" + b"f" * 4000, b"\x00", b"1e999"]


def npy_header(shape: Any, dtype: Any, fortran: Any = False, version: int = 1) -> bytes:
    """The header of a ``.npy`` file, whatever it declares."""
    text = f"{{'descr': {dtype!r}, 'fortran_order': {fortran!r}, 'shape': {shape!r}, }}"
    return npy_text(text.encode("latin1", "replace"), version)


def npy_text(text: bytes, version: int = 1) -> bytes:
    size = struct.pack("<H" if version == 1 else "<I", len(text) + 1)
    return npy.MAGIC_PREFIX + bytes([version, 0]) + size + text + b"\n"


def random_header(rng: np.random.Generator) -> bytes:
    """A header with a declared shape, dtype or syntax that cannot be."""
    shape: Any = SHAPES[rng.integers(len(SHAPES))]
    dtype: Any = DTYPES[rng.integers(len(DTYPES))] if rng.random() < 0.5 else "<f8"
    if rng.random() < 0.1:
        shape = [(1.5, 2), "3", None, [3, 4], {}, 3][rng.integers(6)]
    if rng.random() < 0.1:
        dtype = [None, 3, [("a", "<f8")], [("a", "|O")], ("<f8", (2,)), {}][rng.integers(6)]
    header = npy_header(shape, dtype, rng.choice([False, True, 3]), int(rng.choice([1, 2, 3])))
    if rng.random() < 0.2:
        header = npy_text(PARTS[rng.integers(len(PARTS))])
    return header


def array_bytes(values: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values, allow_pickle=False)
    return stream.getvalue()


def damaged(rng: np.random.Generator, content: bytes) -> bytes:
    """The content with flipped bits, without its end or a part of it, or with something else."""
    data = bytearray(content)
    kind = rng.integers(7)
    at = int(rng.integers(len(data) + 1))
    if kind < 3:
        # most damage to the ends, where headers and footers are
        ends = [at % 200, len(data) - 1 - at % 200, at]
        for _ in range(int(rng.integers(1, 4))):
            place = max(0, min(len(data) - 1, ends[rng.integers(3)] + int(rng.integers(-3, 4))))
            if data:
                data[place] = (
                    int(rng.integers(256)) if kind else data[place] ^ (1 << rng.integers(8))
                )
    elif kind == 3:
        del data[at:]
    elif kind == 4:
        del data[at : at + int(rng.integers(1, 20))]
    elif kind == 5:
        data[at:at] = rng.bytes(int(rng.integers(1, 20)))
    else:
        data[at : at + 8] = struct.pack("<Q", HUGE[rng.integers(3)])
    return bytes(data)


ODD = [
    *[None, True, False, -1, 0, 1, 2, 0.5, -0.5, 1e-300, 1e300, 2**31, 2**63, 10**30, 10**400],
    *["", "x", "inf", "\x1b[2J", [], [[]], {}, {"kind": "ts", "config": {}}],
]
"""Values in place of others in JSON."""


def edited(rng: np.random.Generator, value: Any) -> Any:
    """A copy of JSON in which one value is replaced, removed, repeated or renamed."""
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.05:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and abs(value) < 1e300 and rng.random() < 0.5:
            return [value + 1, -value, value * 1000, value / 3][rng.integers(4)]
        return ODD[rng.integers(len(ODD))]
    kind = rng.integers(10)
    if isinstance(value, list):
        at = int(rng.integers(len(value)))
        if kind == 0:
            return value[:at] + value[at + 1 :]
        if kind == 1:
            return [*value[:at], value[at], *value[at:]]
        return [edited(rng, v) if i == at else v for i, v in enumerate(value)]
    key = list(value)[rng.integers(len(value))]
    if kind == 0:
        return {k: v for k, v in value.items() if k != key}
    if kind == 1:
        return {**value, str(rng.choice(["more", "kind", "", "seed"])): value[key]}
    return {**value, key: edited(rng, value[key])}
