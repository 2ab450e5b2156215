"""Prediction files of every format."""

import numpy as np
import pytest

from calibrant.data import save_predictions

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError:
    pa = pq = None

needs_pyarrow = pytest.mark.skipif(pa is None, reason="needs pyarrow")
FORMATS = [
    "npy",
    "npz",
    "deflated.npz",
    "safetensors",
    pytest.param("parquet", marks=needs_pyarrow),
    pytest.param("lists.parquet", marks=needs_pyarrow),
]


def arrays_in(path):
    with np.load(path) as file:
        return dict(file)


def write_npy_folder(folder, arrays):
    folder.mkdir()
    for key, values in arrays.items():
        np.save(folder / f"{key}.npy", values)


def write_lists(path, arrays):
    """Write as other programs do: lists of any length, in row groups of odd size."""
    columns = {
        key: pa.array(list(values), pa.list_(pa.from_numpy_dtype(values.dtype)))
        if values.ndim == 2
        else pa.array(values)
        for key, values in arrays.items()
    }
    pq.write_table(pa.table(columns), path, row_group_size=3)


def write(folder, form, arrays):
    """Write ``arrays`` as ``form`` and return the path to open."""
    path = folder / ("arrays" if form == "npy" else f"predictions.{form}")
    if form == "npy":
        write_npy_folder(path, arrays)
    elif form == "deflated.npz":
        np.savez_compressed(path, **arrays)
    elif form == "lists.parquet":
        write_lists(path, arrays)
    else:
        save_predictions(path, arrays)
    return path


def predictions(rows=23, classes=4, seed=0, dtype="float32"):
    rng = np.random.default_rng(seed)
    return {
        "logits": rng.normal(size=(rows, classes)).astype(dtype),
        "labels": rng.integers(classes, size=rows),
    }


def under(name, arrays):
    return {f"{name}_{key}": values for key, values in arrays.items()}


def joined(*shards):
    return {key: np.concatenate([shard[key] for shard in shards]) for key in shards[0]}


def assert_holds(split, arrays):
    for key, values in arrays.items():
        found = split.read(key)
        assert found.dtype == values.dtype
        np.testing.assert_array_equal(found, values)


def tiny(path, **arrays):
    np.savez(path, **arrays)
    return path


def largest_file(path):
    return max(path.iterdir(), key=lambda file: file.stat().st_size) if path.is_dir() else path
