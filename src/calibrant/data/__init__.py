"""Prediction files: saved logits and labels, found by name and read in blocks of rows.

A file holds ``logits`` and ``labels``, or ``NAME_logits`` and ``NAME_labels`` for each split,
with ``probs`` in place of logits, ``features``, the last linear layer ``weight`` and ``bias``,
and any further columns. Opening one reads headers only. The rows come later, a block at a time,
so that the size of a file is not limited by memory:

>>> import os, tempfile
>>> import numpy as np
>>> with tempfile.TemporaryDirectory() as folder:
...     path = os.path.join(folder, "predictions.npz")
...     save_predictions(path, {"val_logits": np.zeros((5, 3)), "val_labels": np.arange(5)})
...     val = open_predictions(path).split("val")
...     [labels.tolist() for logits, labels in val.parts[0].blocks(2, ["logits", "labels"])]
[[0, 1], [2, 3], [4]]
"""

from calibrant.data.files import (
    Part,
    PredictionFile,
    Split,
    open_predictions,
    sample_path,
    save_predictions,
)
from calibrant.data.formats import Stored

__all__ = [
    "Part",
    "PredictionFile",
    "Split",
    "Stored",
    "open_predictions",
    "sample_path",
    "save_predictions",
]
