"""MaC-Cal on prediction files that have the features of the training set."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from calibrant._core.messages import comma_separated
from calibrant.data import Dataset, Split, as_dataset
from calibrant.data.formats import Array
from calibrant.retrain.maccal import MaCCal


def retrain_file(
    path: str | os.PathLike[str] | Dataset,
    *,
    train: str | os.PathLike[str] | None = None,
    options: Mapping[str, Any] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> MaCCal:
    """Train a new head on the ``train`` split of a prediction file.

    Parameters
    ----------
    path : path
        A prediction file, a folder, or a glob. Where it has a split ``val`` with features, the
        control of the keep-rate looks at that; otherwise at the training set.
    train : path, optional
        Another file with ``train_features`` and ``train_labels``; by default ``path`` itself.
    options : dict, optional
        Arguments of :class:`MaCCal`.
    checkpoint, progress
        As for :meth:`MaCCal.fit`.

    Returns
    -------
    MaCCal
        Fitted.

    Examples
    --------
    >>> import numpy as np, pathlib, tempfile
    >>> from calibrant.data import save_predictions
    >>> labels = np.arange(300) % 3
    >>> features = 2 * np.eye(3)[labels]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "predictions.npz"
    ...     save_predictions(path, {"train_features": features, "train_labels": labels})
    ...     head = retrain_file(path, options={"epochs": 3, "step": 0.0, "batch_size": 10})
    >>> head.predict_proba(features[:5]).shape, len(head.history)
    ((5, 3), 3)
    """
    module = MaCCal(**(options or {}))
    file = as_dataset(path)
    learned = file if train is None else as_dataset(train)
    if "train" not in learned.splits:
        raise ValueError(
            f"MaC-Cal needs the features of the training set: {learned.path} has no "
            f"train_features, only the splits {comma_separated(map(repr, learned.splits))}; save "
            "the inputs of the last layer under that name, or name another file (train=, --train)"
        )
    held_out = None
    if "val" in file.splits and "features" in set(file.split("val").keys):
        held_out = _arrays(file.split("val"))
    return module.fit(
        *_arrays(learned.split("train")),
        held_out=held_out,
        classes=_classes(file),
        checkpoint=checkpoint,
        progress=progress,
    )


def _arrays(split: Split) -> tuple[Array, Array]:
    return split.read("features"), split.read("labels")


def _classes(file: Dataset) -> int | None:
    """Number of classes, where something besides the labels tells it."""
    layer = file.head
    if layer is not None:
        return len(layer[0])
    known = [file.split(name) for name in file.splits]
    return next((split.classes for split in known if "logits" in split.keys), None)
