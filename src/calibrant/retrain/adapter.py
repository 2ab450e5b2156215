"""Retrained classifiers in the place of calibrators."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor, nn

from calibrant.calibrators.base import Calibrator
from calibrant.retrain.maccal import MaCCal


class RetrainedClassifier(Calibrator):
    """A fitted :class:`MaCCal` as a calibrator: logits are ignored, features are classified."""

    needs_features = True

    def __init__(self, retrained: MaCCal) -> None:
        super().__init__()
        self.to(retrained.history_.device)
        self.retrained, self._width = retrained, retrained.width
        self._store(width_=retrained.width)
        self._set_classes(retrained.classes)
        self.class_names_ = retrained.class_names_

    def size(self, classes: int) -> int:
        """Return the number of trained weights."""
        return self.retrained.size

    def describe(self) -> str:
        """Describe the classifier in a sentence."""
        return self.retrained.describe()

    def learned(self) -> dict[str, Any]:
        """Return the final keep rate."""
        return {"keep": float(self.retrained.classifier.keep_)}

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        transformed: Tensor = self.retrained(features)
        return transformed


def as_calibrator(module: nn.Module) -> Calibrator:
    """Return a calibrator as it is, and a retrained classifier as a calibrator."""
    if isinstance(module, Calibrator):
        return module
    if not isinstance(module, MaCCal):
        got, remedy = type(module).__name__, ""
        if isinstance(module, type):
            got, remedy = f"the class {module.__name__}", ": create one, and fit it"
        elif isinstance(module, (str, os.PathLike)):
            remedy = ": pass calibrant.load(path) for a saved one"
        raise TypeError(f"calibrator must be a Calibrator or a MaCCal, got {got}{remedy}")
    if not module.classes:
        raise ValueError("this MaCCal is not fitted: call fit(features, labels) first")
    return RetrainedClassifier(module)
