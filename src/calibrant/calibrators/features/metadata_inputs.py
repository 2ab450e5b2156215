"""Calibrators whose features are metadata columns of any type, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from calibrant._core import checks
from calibrant._core.checks import IGNORED, Features, FloatArray, IntArray, Logits, Values
from calibrant._core.class_names import is_frame
from calibrant._core.messages import comma_separated
from calibrant.calibrators.base import Calibrator, feature_rows
from calibrant.data.dataset import ROLES
from calibrant.data.metadata import (
    NO_METADATA,
    MetadataColumn,
    as_metadata,
    learn_column,
    learn_numbers,
)

if TYPE_CHECKING:
    from typing_extensions import Self

BINS = 32
"""Bins of a column of numbers."""
MAX_VALUES = 20
"""Values of a text that trees tell apart; rarer ones share a code."""


class MetadataCalibrator(Calibrator):
    """A calibrator whose features may be metadata columns, and may be missing (NaN).

    With ``columns``, ``features=`` of ``fit``, ``transform`` and ``predict_proba`` is a data frame,
    a mapping or an array that has them. ``forward`` takes the numbers that these become by
    :meth:`encoded`.

    Attributes
    ----------
    metadata_ : list of MetadataColumn
        What a fit learned of each column.
    """

    needs_features = True
    columns: Sequence[str | int] | None
    metadata_: list[MetadataColumn]

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns of a prediction file that it reads beside the logits."""
        return ("features",) if self.columns is None else tuple(map(str, self.columns))

    def input_features(self, columns: Mapping[str, Any], rows: Any = None) -> Any:
        """Return its ``features=`` for arrays by name, of all examples or of some rows."""
        if self.columns is None:
            return super().input_features(columns, rows)
        return feature_rows({name: columns[name] for name in self.input_columns}, rows)

    def encoded(self, features: Features) -> Logits:
        """Return features as numbers ``(n, width)``, which a tensor has already.

        Categories become their places; what is missing is NaN.
        """
        if self.columns is None or isinstance(features, Tensor):
            return super().encoded(features)
        if not self.metadata_:
            name = type(self).__name__
            raise RuntimeError(f"this {name} is not fitted: call fit(logits, labels) first")
        arrays = self.metadata_arrays(features)
        return np.stack([c.numbers(arrays[c.name]) for c in self.metadata_], axis=-1)

    def metadata_arrays(self, features: object) -> dict[str, Any]:
        """Return the metadata columns of a frame, a mapping or an array, by name."""
        columns = self.columns or ()
        if isinstance(features, Mapping) or is_frame(features):
            known = as_metadata(features)
        else:
            table = np.asarray(features)
            width = table.shape[1] if table.ndim == 2 else 0
            numbers = [c for c in columns if isinstance(c, int) and -width <= c < width]
            known = {str(c): table[:, c] for c in numbers}
        if lacking := [name for name in self.input_columns if name not in known]:
            raise ValueError(
                f"{type(self).__name__} reads the metadata columns "
                f"{comma_separated(self.input_columns)}, but features= has no "
                f"{comma_separated(lacking)}: pass a data frame or a mapping of arrays with them"
            )
        return {name: known[name] for name in self.input_columns}

    def _check_feature_values(self, features: Tensor, numbers: IntArray | None = None) -> None:
        """Accept all numbers: NaN is a missing value."""

    def fit(
        self,
        logits: Values,
        labels: Values | None = None,
        *,
        features: Features | None = None,
        head: tuple[Any, Any] | None = None,
        sample_weight: Values | None = None,
        groups: Values | None = None,
    ) -> Self:
        """Learn from held-out logits, labels and metadata, and forget any earlier fit.

        ``features`` are a data frame or a mapping of arrays ``(n,)`` with the ``columns``; without
        this option, numbers ``(..., width)``. The rest is as for other calibrators.
        """
        with checks.warnings_at_caller():
            if self.columns is not None and features is not None and labels is not None:
                self.metadata_ = self._learned_columns(features, labels, sample_weight)
            return super().fit(
                logits,
                labels,
                features=features,
                head=head,
                sample_weight=sample_weight,
                groups=groups,
            )

    def _learned_columns(
        self, features: Features, labels: Values, sample_weight: Values | None
    ) -> list[MetadataColumn]:
        """Learn the codes of metadata columns from the examples that count."""
        arrays, targets = self.metadata_arrays(features), checks.as_labels(labels)
        if targets.ndim != 1 or any(len(values) != len(targets) for values in arrays.values()):
            sizes = [f"{len(values):,} of {name}" for name, values in arrays.items()]
            raise ValueError(
                "metadata columns must have one value for each of the labels (n,), got "
                f"{comma_separated(sizes)} for labels of shape {targets.shape}"
            )
        counts = targets != IGNORED
        if sample_weight is not None:
            counts &= checks.as_weight(sample_weight, targets.shape) > 0
        learned = {
            name: learn_column(name, v[counts], bins=BINS, most=MAX_VALUES)
            for name, v in arrays.items()
        }
        return [column or untold(name) for name, column in learned.items()]


def learned_numbers(features: FloatArray) -> list[MetadataColumn]:
    """Return the columns of numbers ``(n, width)``."""
    names = [f"feature {i}" for i in range(features.shape[1])]
    found = [learn_numbers(name, v, bins=BINS) for name, v in zip(names, features.T, strict=True)]
    return [column or untold(name) for name, column in zip(names, found, strict=True)]


def untold(name: str) -> MetadataColumn:
    """Return a column that tells no examples apart, but for missing ones."""
    return MetadataColumn(name, "number")


def check_columns(columns: Sequence[str | int]) -> None:
    """Raise unless names or numbers of columns are different, and those of metadata."""
    if not columns or "" in columns or len({*map(str, columns)}) < len(columns):
        raise ValueError(
            f"columns must be different names (or numbers) of metadata columns, got {columns!r}: "
            'pass columns=["age", "site"], say'
        )
    if taken := [name for name in columns if name in (*NO_METADATA, *ROLES)]:
        raise ValueError(
            f"columns must be metadata, got {comma_separated(taken)}, which has another meaning in "
            "prediction files: leave it out, or rename the column"
        )
