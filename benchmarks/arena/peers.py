"""Calibrators of other libraries, behind ``fit(probs, labels)`` and ``predict_proba(probs)``."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from calibrant._core.checks import FloatArray, IntArray
from calibrant._core.messages import comma_separated


class Peer(NamedTuple):
    """A library whose methods take part as ``library:method``."""

    package: str
    make: Callable[..., Any]


class ScikitLearn:
    """Platt scaling, isotonic regression or a temperature, as CalibratedClassifierCV fits them.

    The first two take each class against the rest, on the log-odds of its probability, and
    normalise then; the temperature (scikit-learn 1.8) divides log-probabilities.
    """

    def __init__(self, method: str) -> None:
        if method not in ("sigmoid", "isotonic", "temperature"):
            known = "sigmoid, isotonic and temperature"
            raise ValueError(f"scikit-learn has {known}, got {method!r}")
        _imported("sklearn.calibration", "scikit-learn")
        self.method = method

    def fit(self, probs: FloatArray, labels: IntArray) -> None:
        from sklearn.calibration import CalibratedClassifierCV

        everything = np.arange(len(labels))  # the model is the same in every fold: have one
        fit_in: dict[str, Any] = {"cv": [(everything, everything)], "ensemble": False}
        model = _decided_classifier(probs.shape[1])
        self.calibrated = CalibratedClassifierCV(model, method=self.method, **fit_in)
        self.calibrated.fit(self._decisions(probs), labels)

    def predict_proba(self, probs: FloatArray) -> Any:
        return self.calibrated.predict_proba(self._decisions(probs))

    def _decisions(self, probs: FloatArray) -> FloatArray:
        inside = np.clip(probs, np.finfo(np.float64).tiny, 1 - np.finfo(np.float64).epsneg)
        if self.method == "temperature" and probs.shape[1] > 2:
            return np.asarray(np.log(inside))
        return np.asarray(np.log(inside) - np.log1p(-inside))


def _decided_classifier(classes: int) -> Any:
    """Return a classifier that learns nothing and takes its input for its decision function."""
    from sklearn.base import BaseEstimator, ClassifierMixin

    class DecidedClassifier(ClassifierMixin, BaseEstimator):
        classes_ = np.arange(classes)

        def fit(self, X: FloatArray, y: IntArray) -> DecidedClassifier:
            return self

        def decision_function(self, X: FloatArray) -> FloatArray:
            return X[:, 1] if classes == 2 else X

        def predict(self, X: FloatArray) -> IntArray:
            return np.asarray(X.argmax(1))

    return DecidedClassifier()


class NetCal:
    """A calibrator of ``netcal.scaling`` or ``netcal.binning``, by the name of its class."""

    def __init__(self, method: str, **options: Any) -> None:
        modules = [_imported(f"netcal.{name}", "netcal") for name in ("scaling", "binning")]
        kinds = [getattr(module, method) for module in modules if hasattr(module, method)]
        if not kinds:
            known = comma_separated(n for m in modules for n in dir(m) if n[0].isupper())
            raise ValueError(f"netcal has no {method!r}: choose from {known}")
        self.calibrator = kinds[0](**options)

    def fit(self, probs: FloatArray, labels: IntArray) -> None:
        self.calibrator.fit(_positive_or_all(probs), labels)

    def predict_proba(self, probs: FloatArray) -> Any:
        return self.calibrator.transform(_positive_or_all(probs))


def _positive_or_all(probs: FloatArray) -> FloatArray:
    return probs[:, 1] if probs.shape[1] == 2 else probs


class VennAbers:
    """Inductive Venn-Abers of the package venn-abers; with more classes, each pair of them."""

    def __init__(self, method: str = "inductive") -> None:
        if method != "inductive":
            raise ValueError(f"venn-abers has inductive, got {method!r}")
        self.calibrator = _imported("venn_abers", "venn-abers").VennAbersCalibrator()

    def fit(self, probs: FloatArray, labels: IntArray) -> None:
        self.examples = {"p_cal": probs, "y_cal": labels}  # the package fits when it predicts

    def predict_proba(self, probs: FloatArray) -> Any:
        return self.calibrator.predict_proba(p_test=probs, **self.examples)


def _probmetrics(method: str, **options: Any) -> Any:
    return _imported("probmetrics.calibrators", "probmetrics").get_calibrator(method, **options)


def _imported(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"{package} is not installed ({error}): pip install {package}") from error


PEERS = {
    "sklearn": Peer("scikit-learn", ScikitLearn),
    "probmetrics": Peer("probmetrics", _probmetrics),
    "netcal": Peer("netcal", NetCal),
    "venn_abers": Peer("venn-abers", VennAbers),
}
"""Libraries by the first part of ``library:method``."""
