"""Small predictions, and the kinds of files that hold them."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from calibrant._core.checks import IGNORED
from calibrant.data import save_predictions

try:
    import pyarrow
except ImportError:
    pyarrow = None

needs_pyarrow = pytest.mark.skipif(pyarrow is None, reason="needs pyarrow")
REGIONS = np.array(["north", "south-west", "east"])


def predictions(rows=600, classes=5, seed=0):
    """Over-confident predictions, with ties, ignored labels and columns for weights and groups."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, classes)).astype(np.float16).astype(np.float32)
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(1)
    labels[::17] = -100
    return {
        "logits": 2 * logits,
        "labels": labels,
        "importance": rng.uniform(0.1, 3, rows),
        "region": REGIONS[rng.integers(3, size=rows)],
        "site": rng.integers(3, size=rows),
    }


def cut(arrays, *places):
    """Cut every array at ``places``, into shards of uneven size."""
    bounds = [0, *places, len(arrays["labels"])]
    return [{key: values[a:b] for key, values in arrays.items()} for a, b in pairwise(bounds)]


def write_shards(folder, suffix, arrays):
    folder.mkdir()
    for number, shard in enumerate(cut(arrays, 7, 9, 250)):
        save_predictions(folder / f"part{number}{suffix}", shard)
    return folder


def without_text(arrays):
    return {key: values for key, values in arrays.items() if values.dtype.kind != "U"}


def write_npy(folder, arrays, prefix="X_"):
    folder.mkdir()
    for key, values in arrays.items():
        np.save(folder / f"{prefix}{key}.npy", values)
    return folder


def numbered_npy(folder, arrays):
    folder.mkdir()
    for number, shard in enumerate(cut(arrays, 7, 9, 250)):
        for key, values in shard.items():
            np.save(folder / f"{number}_{key}.npy", values)
    return folder


def as_npz(folder, arrays):
    np.savez(folder / "p.npz", **arrays)
    return folder / "p.npz"


def as_deflated(folder, arrays):
    np.savez_compressed(folder / "p.npz", **arrays)
    return folder / "p.npz"


def as_safetensors(folder, arrays):
    save_predictions(folder / "p.safetensors", without_text(arrays))
    return folder / "p.safetensors"


def as_parquet(folder, arrays):
    save_predictions(folder / "p.parquet", arrays)
    return folder / "p.parquet"


def as_pair(folder, arrays):
    return write_npy(folder / "pair", arrays) / "X_logits.npy"


def as_npz_folder(folder, arrays):
    return write_shards(folder / "shards", ".npz", arrays)


def as_npz_glob(folder, arrays):
    return str(write_shards(folder / "shards", ".npz", arrays) / "part*.npz")


def as_safetensors_glob(folder, arrays):
    shards = write_shards(folder / "shards", ".safetensors", without_text(arrays))
    return str(shards / "*.safetensors")


def as_parquet_folder(folder, arrays):
    return write_shards(folder / "shards", ".parquet", arrays)


def as_npy_folder(folder, arrays):
    return numbered_npy(folder / "shards", arrays)


def as_npy_glob(folder, arrays):
    return str(numbered_npy(folder / "shards", arrays) / "*_logits.npy")


FORMS = [
    *(as_npz, as_deflated, as_safetensors, as_pair),
    pytest.param(as_parquet, marks=needs_pyarrow),
    *(as_npz_folder, as_npz_glob, as_safetensors_glob, as_npy_folder, as_npy_glob),
    pytest.param(as_parquet_folder, marks=needs_pyarrow),
]


def splits(**named):
    """The arrays of several splits under the keys that they have in one file."""
    return {
        f"{name}_{key}" if name else key: values
        for name, arrays in named.items()
        for key, values in arrays.items()
    }


def labelled(arrays):
    kept = arrays["labels"] != IGNORED
    return {key: values[kept] for key, values in arrays.items()}


def out_of(calibrator, logits, *rest):
    """Calibrated logits, as the module gives them."""
    with torch.no_grad():
        return calibrator(torch.as_tensor(logits), *map(torch.as_tensor, rest)).numpy()
