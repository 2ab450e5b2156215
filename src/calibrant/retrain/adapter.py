"""Retrained classifiers in the place of calibrators."""

from __future__ import annotations

from torch import Tensor

from calibrant._core.chunks import Examples
from calibrant.calibrators.base import Calibrator, Context
from calibrant.retrain.maccal import MaCCal


class RetrainedClassifier(Calibrator):
    """A retrained classifier as a calibrator: logits are ignored, features are classified.

    It goes wherever a fitted calibrator with features goes: behind a model, onto prediction
    files, into an export. Predicted classes are those of the new classifier.

    Parameters
    ----------
    retrained : MaCCal
        Fitted.
    """

    needs_features = True

    def __init__(self, retrained: MaCCal) -> None:
        super().__init__()
        self.retrained = retrained
        if retrained.classes:
            self._width = retrained.width
            self._fitted(retrained.classes)

    def size(self, classes: int) -> int:
        """Return the number of trained weights."""
        return self.retrained.size

    def _fit(self, given: Examples, context: Context) -> None:
        raise TypeError("a retrained classifier is fitted by MaCCal.fit(features, labels)")

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        transformed: Tensor = self.retrained(features)
        return transformed


def as_calibrator(module: Calibrator | MaCCal) -> Calibrator:
    """Return a calibrator as it is, and a retrained classifier as a calibrator.

    >>> as_calibrator(MaCCal())
    Traceback (most recent call last):
    ...
    ValueError: this MaCCal is not fitted: call fit(features, labels) first
    """
    if isinstance(module, Calibrator):
        return module
    if not isinstance(module, MaCCal):
        raise TypeError(f"expected a calibrator or a MaCCal, got {type(module).__name__}")
    if not module.classes:
        raise ValueError("this MaCCal is not fitted: call fit(features, labels) first")
    return RetrainedClassifier(module)
