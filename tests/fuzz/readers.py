"""Prediction files are read as they were written; damaged ones are refused, or say the same."""

import json
import struct
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from calibrant.data import open_dataset, save_predictions
from tests.fuzz import damage

try:
    import pyarrow
except ImportError:
    pyarrow = None

FORMS = [
    *["npz", "deflated", "npy", "safetensors", "folder", "csv", "pt"],
    *["parquet"] * (pyarrow is not None),
]
CHECKED = ("npz", "deflated")  # formats with a checksum of every array


def check(rng: np.random.Generator) -> None:
    """Write one dataset, perhaps damage it, and read everything."""
    form = FORMS[rng.integers(len(FORMS))]
    arrays = random_arrays(rng, form)
    with tempfile.TemporaryDirectory() as home:
        path = write(Path(home), form, arrays)
        kind = rng.integers(10)
        if kind == 0:
            assert_same(read(path), arrays, form)
            return
        files = [path] if path.is_file() else sorted(path.rglob("*.*"))
        file = files[rng.integers(len(files))]
        if kind < 4 and form not in ("parquet", "csv", "pt"):
            file.write_bytes(with_header(rng, file, arrays))
        else:
            file.write_bytes(damage.damaged(rng, file.read_bytes()))
        try:
            found = read(path)
        except ValueError:
            return
        if form in CHECKED and kind >= 4:
            for key in set(found) & set(arrays):
                np.testing.assert_array_equal(found[key], arrays[key])


def random_arrays(rng: np.random.Generator, form: str) -> dict[str, np.ndarray]:
    n, classes = int(rng.integers(1, 9)), int(rng.integers(2, 5))
    dtype = str(rng.choice(["float16", "float32", "float64", "<f4", ">f8"]))
    logits = rng.normal(size=(n, classes)).astype(dtype)
    arrays = {"logits": logits, "labels": rng.integers(classes, size=n)}
    if form == "csv":
        return arrays
    if rng.random() < 0.3 and form in ("npz", "deflated", "parquet"):
        arrays["group"] = np.array(["a", "bc", ""])[rng.integers(3, size=n)]
    if rng.random() < 0.3:
        arrays = {f"val_{key}": values for key, values in arrays.items()}
    if rng.random() < 0.2 and form not in ("parquet", "pt"):
        arrays["epoch"] = np.array(7)
    if rng.random() < 0.2 and form == "npy":
        arrays = {key: np.array(values, order="F") for key, values in arrays.items()}
    return arrays


def write(home: Path, form: str, arrays: dict[str, Any]) -> Path:
    """Write arrays in one of the forms, and return the path to open."""
    if form == "npy":
        for key, values in arrays.items():
            np.save(home / f"{key}.npy", values)
        return home
    if form == "folder":
        rows = len(next(iter(arrays.values())))
        for part, at in enumerate(np.array_split(np.arange(rows), 2 if rows > 1 else 1)):
            shard = {key: v[at] if v.ndim else v for key, v in arrays.items()}
            save_predictions(home / f"part{part}.npz", shard)
        return home
    path = home / f"predictions.{'npz' if form == 'deflated' else form}"
    if form == "deflated":
        np.savez_compressed(path, **arrays)
    elif form == "pt":
        native = {key: v.astype(v.dtype.newbyteorder("=")) for key, v in arrays.items()}
        torch.save({key: torch.from_numpy(v) for key, v in native.items()}, path)
    else:
        save_predictions(path, arrays)
    return path


def with_header(rng: np.random.Generator, file: Path, arrays: dict[str, Any]) -> bytes:
    """The file with a header that declares what it does not hold."""
    body = rng.bytes(int(rng.integers(0, 64)))
    if file.suffix == ".npy":
        return damage.random_header(rng) + body
    if file.suffix == ".safetensors":
        return safetensors(rng, body)
    with zipfile.ZipFile(file, "w", int(rng.choice([0, 8]))) as archive:
        keys = list(arrays)
        bad = keys[rng.integers(len(keys))]
        for key, values in arrays.items():
            good = damage.array_bytes(values)
            archive.writestr(f"{key}.npy", damage.random_header(rng) + body if key == bad else good)
    return file.read_bytes()


def safetensors(rng: np.random.Generator, body: bytes) -> bytes:
    """Declared dtypes, shapes and offsets that do not fit."""
    header = {
        key: {
            "dtype": str(rng.choice(["F64", "F32", "BF16", "I64", "BOOL", "F8_E4M3", "C64", "X"])),
            "shape": list(damage.SHAPES[rng.integers(len(damage.SHAPES))]),
            "data_offsets": [0, int(rng.choice([0, len(body), 2**40]))],
        }
        for key in ("logits", "labels")[: rng.integers(1, 3)]
    }
    text = json.dumps(damage.edited(rng, header) if rng.random() < 0.5 else header).encode()
    if rng.random() < 0.1:
        text = damage.PARTS[rng.integers(len(damage.PARTS))]
    size = len(text) if rng.random() < 0.8 else damage.HUGE[rng.integers(3)]
    return struct.pack("<Q", size) + text + body


def read(path: Path) -> dict[str, np.ndarray]:
    """Read every column of every split, whole and in chunks."""
    dataset = open_dataset(path)
    arrays = {}
    for name in dataset.splits:
        split = dataset.split(name)
        for key in split.keys:
            arrays[f"{name}_{key}" if name else key] = split.read(key)
        if {"logits", "labels"} <= set(split.keys):
            total = sum(split.walk(rows_of, "logits", "labels", rows=3))
            assert total == split.rows
    return arrays


def rows_of(chunks: Any) -> int:
    return sum(len(chunk["labels"]) for chunk in chunks)


def assert_same(found: dict[str, np.ndarray], arrays: dict[str, np.ndarray], form: str) -> None:
    for key, values in arrays.items():
        if values.ndim:  # single values belong to no split
            text = values.dtype.kind == "U"  # whose length may be that of the longest one
            assert text or found[key].dtype == values.dtype.newbyteorder("=") or form == "csv"
            np.testing.assert_array_equal(found[key].astype(values.dtype), values)
