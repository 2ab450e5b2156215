"""Base classes of methods that are fitted on the log-partition table of the examples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from calibrant._core import checks
from calibrant._core.checks import FloatArray, Values
from calibrant._core.chunks import Examples
from calibrant._core.class_names import in_order
from calibrant._core.torch_models import full_precision
from calibrant.calibrators import data_checks
from calibrant.calibrators.base import PASS_LOGARITHM, Calibrator, Context
from calibrant.calibrators.logpartition import Records

if TYPE_CHECKING:
    from typing_extensions import Self


class RecordPredictions(NamedTuple):
    """Predictions of a fitted calibrator for the examples of a table, each ``(n,)``."""

    confidence: FloatArray
    nll: FloatArray


class RecordsCalibrator(Calibrator):
    """A calibrator that is fitted on the log-partition table, whatever the number of classes."""

    keeps_argmax = True
    monotone = True

    fits_records = True

    def _fit_records(self, records: Records) -> None:
        raise NotImplementedError

    def predict_records(self, records: Records) -> RecordPredictions:
        """Confidence and negative log-likelihood of each example after calibration."""
        raise NotImplementedError

    def _fit(self, examples: Examples, context: Context) -> None:
        self._fit_records(context.table(examples))

    def fit_records(
        self, records: Records, *, groups: NDArray[Any] | None = None, one_logit: bool = False
    ) -> Self:
        """Learn from records, such as those of all shards; of log-odds if ``one_logit``.

        ``groups`` has one value per record; only methods with folds use it.
        """
        with checks.warnings_at_caller(), full_precision():
            some = records.take(slice(checks.LOOKED_AT))
            rows = np.stack([some.top, some.mean_gap, some.margin], axis=1)
            self._warn_of_few(len(records), records.classes, data_checks._distinct_rows(rows))
            if same := data_checks._one_label(records.labels):
                checks.warn(same)
            self.set_floor(0)
            self._fit_records(records.scale_free())
            self._set_classes(1 if one_logit else records.classes)
            return self


class TemperatureCalibrator(RecordsCalibrator):
    """A calibrator that divides the logits of each row by a temperature of its own."""

    def _temperature(self, logits: Tensor, top: Tensor) -> Tensor:
        """Temperatures ``(..., 1)`` of logits ``(..., classes)`` whose largest is 0."""
        raise NotImplementedError

    def _sharpness(self, records: Records) -> float | FloatArray:
        """Inverse temperatures, one or ``(n,)``, of the examples of a table."""
        raise NotImplementedError

    def predict_records(self, records: Records) -> RecordPredictions:
        """Confidence and negative log-likelihood of each example after calibration."""
        sharpness = self._sharpness(records)
        value = records.log_partition(sharpness).value
        return RecordPredictions(np.exp(-value), sharpness * records.own_gap + value)

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        return logits / self._temperature(logits, top)

    @overload
    def temperature(self, logits: Tensor) -> Tensor: ...
    @overload
    def temperature(self, logits: ArrayLike) -> NDArray[Any]: ...
    def temperature(self, logits: Values) -> Tensor | NDArray[Any]:
        """Temperature of each row, ``(..., classes) -> (...)``."""
        _warn_of_probs(logits)
        _, top, temperature = self._row_temperatures(logits)
        result = temperature.expand_as(top)[..., 0]
        return result if isinstance(logits, Tensor) else result.cpu().numpy()

    def transform_with_temperature(self, logits: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
        """Calibrated logits as :meth:`transform` gives them, and the temperature of each row."""
        wide, top, temperature = self._row_temperatures(logits)
        result = self._narrow(self._finished(wide, top, (wide - top) / temperature))
        return result.cpu().numpy(), temperature.expand_as(top)[..., 0].cpu().numpy()

    @torch.no_grad()
    @full_precision()
    def _row_temperatures(self, logits: Values) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of two classes or more, the largest of each row, and temperatures."""
        wide = self._wide(self._checked(in_order(logits, self.class_names_)[0]))
        top = wide.amax(-1, keepdim=True)
        return wide, top, self._temperature(wide - top, top)


def _warn_of_probs(logits: Values) -> None:
    """Warn at the caller of a public method, which calls this."""
    checks.warn_of_probs(checks.as_scores(logits), PASS_LOGARITHM, checks.MANY_ODDS)
