"""Retrain the classifier on prediction files that hold features of the training set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from calibrant._core.chunks import Progress
from calibrant._core.messages import listed
from calibrant.data import PredictionFile, Split, open_predictions
from calibrant.data.formats import Array
from calibrant.retrain.maccal import MaCCal


def retrain(
    path: str | os.PathLike[str],
    *,
    train: str | os.PathLike[str] | None = None,
    options: Mapping[str, Any] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> MaCCal:
    """Fit MaC-Cal on the ``train`` split of a prediction file.

    Parameters
    ----------
    path : path
        A prediction file, a folder, or a glob. If it has a split ``val`` with features, q is
        controlled by that, otherwise by the training set.
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
    ...     fitted = retrain(path, options={"epochs": 3, "step": 0.0, "batch_size": 10})
    >>> fitted.predict_proba(features[:5]).shape, len(fitted.history)
    ((5, 3), 3)
    """
    module = MaCCal(**(options or {}))
    file = open_predictions(path)
    training = file if train is None else open_predictions(train)
    if "train" not in training.splits:
        raise ValueError(
            f"MaC-Cal needs the features of the training set: {training.path} has no "
            f"train_features, only the splits {listed(map(repr, training.splits))}; save the "
            "inputs of the last layer under that name, or name another file (train=, --train)"
        )
    held_out = None
    if "val" in file.splits and "features" in file.split("val").keys:
        held_out = _arrays(file.split("val"))
    return module.fit(
        *_arrays(training.split("train")),
        held_out=held_out,
        classes=_classes(file),
        checkpoint=checkpoint,
        progress=progress,
    )


def _arrays(split: Split) -> tuple[Array, Array]:
    return split.read("features"), split.read("labels")


def _classes(file: PredictionFile) -> int | None:
    """Return the number of classes if the head or the logits of a split tell it."""
    head = file.last_layer()
    if head is not None:
        return len(head[0])
    splits = map(file.split, file.splits)
    return next((split.classes for split in splits if "logits" in split.keys), None)
