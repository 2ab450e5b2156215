"""Retrain the classifier on prediction files that hold features of the training set."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from calibrant._core.chunks import EstimandChoice
from calibrant._core.class_names import kept_names
from calibrant._core.engines import silently
from calibrant._core.messages import comma_separated
from calibrant.calibrators.maccal import MaCCal
from calibrant.data.dataset import Dataset
from calibrant.data.files import Data, as_dataset
from calibrant.workflows.effect import effect
from calibrant.workflows.fit import Fit


def retrain(
    data: Data,
    *,
    train: Data | None = None,
    options: Mapping[str, Any] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> MaCCal:
    """Fit MaC-Cal on the ``train`` split of a dataset.

    Parameters
    ----------
    data : path, mapping or Dataset
        A split ``val`` with features controls q; without one, the training set does.
    train : path, mapping or Dataset, optional
        Another dataset with ``train_features`` and ``train_labels``; by default ``data`` itself.
    options : dict, optional
        Arguments of :class:`~calibrant.MaCCal`.
    checkpoint
        As in its ``fit``.

    Examples
    --------
    >>> import numpy as np
    >>> labels = np.arange(300) % 3
    >>> data = {"train_features": 2 * np.eye(3)[labels], "train_labels": labels}
    >>> fitted = retrain(data, options={"epochs": 3, "step": 0.0, "batch_size": 10})
    >>> fitted.predict_proba(np.eye(3)).shape, len(fitted.history)
    ((3, 3), 3)
    """
    calibrator = MaCCal(**(options or {}))
    dataset = as_dataset(data)
    training = dataset if train is None else as_dataset(train).in_order(dataset.class_names)
    if "train" not in training.splits:
        raise ValueError(
            f"{training.path} has no train_features, only the splits "
            f"{comma_separated(map(repr, training.splits))}; save the inputs of the last layer "
            "on the training set under that name, or name another file (train=, --train)"
        )
    fit_on = training.split("train")
    val = dataset.split("val") if dataset.find("val") is not None else None
    calibrator.fit(
        fit_on.read("features"),
        fit_on.read("labels"),
        held_out=(val.features, val.read("labels")) if val and val.has_features else None,
        classes=_classes(dataset),
        checkpoint=checkpoint,
    )
    calibrator.class_names_ = kept_names(dataset.class_names or training.class_names)
    return calibrator


def retrain_and_measure(
    data: Data,
    *,
    train: Data | None = None,
    options: Mapping[str, Any] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    estimand: EstimandChoice = "auto",
    metrics: Sequence[str] | None = None,
) -> Fit:
    """Fit as :func:`retrain` does, and measure the val split before and after."""
    dataset = as_dataset(data)
    val = dataset.split("val")
    if not val.has_features:
        problem = f"{dataset.path} has no {val.name}_features, the inputs of the last layer"
        raise ValueError(f"{problem}: save them too, since maccal is measured by them")
    calibrator = retrain(dataset, train=train, options=options, checkpoint=checkpoint)
    measured: dict[str, Any] = {"estimand": estimand, "metrics": metrics, "level": None}
    with silently():
        after = effect(calibrator, dataset, split=val.name, **measured)
    return Fit(calibrator, after, val.name)


def _classes(dataset: Dataset) -> int | None:
    """Return the number of classes if the head or the logits of a split tell it."""
    if dataset.head is not None:
        return len(dataset.head[0])
    splits = map(dataset.split, dataset.splits)
    return next((split.classes for split in splits if "logits" in split.keys), None)
