"""Datasets: saved logits and labels, read in chunks of rows.

A prediction file holds ``logits`` and ``labels``, or ``NAME_logits`` and ``NAME_labels`` for each
split, with ``probs`` in place of logits, ``features``, the last linear layer ``head_weight`` and
``head_bias``, ``class_names``, and any further columns. Opening one reads headers only; rows are
read a chunk at a time, so that the size of a file is not limited by memory:

>>> import os, tempfile
>>> import numpy as np
>>> with tempfile.TemporaryDirectory() as folder:
...     path = os.path.join(folder, "predictions.npz")
...     save_predictions(path, {"val_logits": np.zeros((5, 3)), "val_labels": np.arange(5)})
...     val = open_dataset(path).split("val")
...     list(val.map(lambda chunk: chunk["labels"].tolist(), "labels", rows=2))
[[0, 1], [2, 3], [4]]
"""

from calibrant.data.dataset import Dataset, Split
from calibrant.data.files import as_dataset, open_dataset, sample_path, save_predictions
from calibrant.data.shards import Chunk, Column, Shard

__all__ = [
    "Chunk",
    "Column",
    "Dataset",
    "Shard",
    "Split",
    "as_dataset",
    "open_dataset",
    "sample_path",
    "save_predictions",
]
