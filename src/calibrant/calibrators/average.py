"""The average of several calibrators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from calibrant._core.checks import FloatArray
from calibrant._core.chunks import top_class
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.logpartition import Records
from calibrant.calibrators.records import RecordPredictions, RecordsCalibrator


class Average(Calibrator):
    r"""The weighted mean of the probabilities of fitted calibrators.

    .. math:: p = \sum_m w_m p_m

    What all members keep, such as the predicted class, the average keeps as well.

    Parameters
    ----------
    members : sequence of Calibrator
    weights : sequence of float, optional
        Positive numbers; their sum does not matter. Equal by default.

    Examples
    --------
    >>> from calibrant.calibrators import Identity, TemperatureScaling
    >>> logits = np.tile([[2.0, 0.0], [0.0, 2.0]], (40, 1))
    >>> labels = np.tile([0, 1, 0, 1, 0, 1, 1, 0], 10)  # three of four are right
    >>> members = [kind().fit(logits, labels) for kind in (Identity, TemperatureScaling)]
    >>> [member.predict_proba([2.0, 0.0])[0].round(3) for member in members]
    [np.float64(0.881), np.float64(0.75)]
    >>> Average(members).predict_proba([2.0, 0.0])[0].round(3)
    np.float64(0.815)
    """

    weights_: Tensor

    def __init__(
        self, members: Sequence[Calibrator], weights: Sequence[float] | FloatArray | None = None
    ) -> None:
        super().__init__()
        share = np.ones(len(members)) if weights is None else np.asarray(weights, dtype=np.float64)
        self.to(members[0].device)
        self.members = nn.ModuleList(members)
        self._store(weights_=share / share.sum())
        self.accepts_masked = all(member.accepts_masked for member in members)
        self.needs_features = any(member.needs_features for member in members)
        self._set_classes(members[0].classes)

    @property
    def keeps_argmax(self) -> bool:  # type: ignore[override]
        """Whether no member changes the predicted class."""
        return all(member.keeps_argmax for member in self.parts)

    @property
    def monotone(self) -> bool:  # type: ignore[override]
        """Whether no member changes the order of the classes."""
        return all(member.monotone for member in self.parts)

    @property
    def parts(self) -> list[Calibrator]:
        """The members as a list."""
        return cast(list[Calibrator], list(self.members))

    def size(self, classes: int) -> int:
        """Parameters of all members, and their weights, of which one follows from the others."""
        return sum(member.size(classes) for member in self.parts) + len(self.members) - 1

    def describe(self) -> str:
        """The weights and descriptions of the members."""
        shares = zip(self.weights_.tolist(), self.parts, strict=True)
        return "; ".join(f"{share:.2f} {member.describe()}" for share, member in shares)

    def learned(self) -> dict[str, Any]:
        """The weight of each member by its name, and what it learned."""
        shares = zip(self.weights_.tolist(), self.parts, strict=True)
        return {part.name: {"weight": share, **part.learned()} for share, part in shares}

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        level = torch.zeros_like(top)  # the largest of logits
        members = [
            part._finished(logits, level, part._transform(logits, top, features))
            for part in self.parts
        ]
        log_probs = torch.stack(members).log_softmax(-1)
        shares = self.weights_.log().to(log_probs.dtype)
        mean = (log_probs + shares.reshape(-1, *[1] * logits.ndim)).logsumexp(0)
        return mean - mean.gather(-1, top_class(logits))

    def predict_records(self, records: Records) -> RecordPredictions:
        """Confidence and negative log-likelihood of each example after calibration."""
        parts = cast(list[RecordsCalibrator], self.parts)
        return _averaged([part.predict_records(records) for part in parts], self.weights_.tolist())


def _averaged(
    predictions: Sequence[RecordPredictions], weights: Sequence[float] | FloatArray
) -> RecordPredictions:
    """Predictions of the weighted mean of probabilities."""
    share = np.asarray(weights, dtype=np.float64)
    confidence = share @ np.stack([each.confidence for each in predictions])
    nll = np.stack([each.nll for each in predictions]) - np.log(share)[:, None]
    return RecordPredictions(confidence, -np.logaddexp.reduce(-nll, axis=0))
