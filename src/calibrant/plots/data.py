"""What the figures are drawn from, as protocols: any object with these attributes will do."""

# ruff: noqa: D102  # the classes that have these attributes explain them

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from calibrant._core.checks import FloatArray


class Interval(Protocol):
    """A value with an interval; NaN where undefined."""

    @property
    def value(self) -> float: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


class Band(Protocol):
    """A curve of accuracy over confidence with an interval at each point."""

    @property
    def confidence(self) -> FloatArray: ...
    @property
    def accuracy(self) -> FloatArray: ...
    @property
    def low(self) -> FloatArray: ...
    @property
    def high(self) -> FloatArray: ...
    @property
    def level(self) -> float: ...
    @property
    def probability(self) -> str: ...


class BinnedCurve(Band, Protocol):
    """Bins of a reliability diagram, as of :func:`calibrant.metrics.reliability`."""

    @property
    def edges(self) -> FloatArray: ...
    @property
    def share(self) -> FloatArray: ...
    @property
    def ece(self) -> Interval: ...


class HasReliability(Protocol):
    """A result that knows its bins, such as an Evaluation or Pairs."""

    def reliability(self) -> BinnedCurve: ...


class SmoothCurve(Band, Protocol):
    """A smooth curve, as of :func:`calibrant.metrics.smooth_reliability`."""

    @property
    def density(self) -> FloatArray: ...


class MarginGroup(Protocol):
    """Bins of the examples whose margin is in a range."""

    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...
    @property
    def reliability(self) -> BinnedCurve: ...


class ClassCurve(Protocol):
    """Bins of the probability of one class."""

    @property
    def number(self) -> int: ...
    @property
    def reliability(self) -> BinnedCurve: ...


class Shares(Protocol):
    """Shares of right and wrong answers by confidence."""

    @property
    def edges(self) -> FloatArray: ...
    @property
    def right(self) -> FloatArray: ...
    @property
    def wrong(self) -> FloatArray: ...
    @property
    def confidence(self) -> float: ...
    @property
    def accuracy(self) -> float: ...


class RiskCurve(Protocol):
    """Error among the examples at or above each threshold, and how many these are."""

    @property
    def threshold(self) -> FloatArray: ...
    @property
    def coverage(self) -> FloatArray: ...
    @property
    def risk(self) -> FloatArray: ...
    @property
    def low(self) -> FloatArray: ...
    @property
    def high(self) -> FloatArray: ...
    @property
    def level(self) -> float: ...


class Limit(Protocol):
    """A threshold that was chosen."""

    @property
    def threshold(self) -> float: ...
    @property
    def max_error(self) -> float: ...


class SetSizes(Protocol):
    """Shares of prediction sets by their size, and of those that hold the true class."""

    @property
    def size(self) -> Any: ...
    @property
    def share(self) -> FloatArray: ...
    @property
    def covered(self) -> FloatArray: ...
    @property
    def promised(self) -> float: ...


class TemperatureCurve(Protocol):
    """Temperatures by margin."""

    @property
    def margin(self) -> FloatArray: ...
    @property
    def temperature(self) -> FloatArray: ...
    @property
    def low(self) -> FloatArray: ...
    @property
    def high(self) -> FloatArray: ...


class ChangeCurve(Protocol):
    """Mean change of the confidence by margin."""

    @property
    def margin(self) -> FloatArray: ...
    @property
    def change(self) -> FloatArray: ...


class MapCurve(Protocol):
    """Confidence after calibration against that before."""

    @property
    def before(self) -> FloatArray: ...
    @property
    def after(self) -> FloatArray: ...
    @property
    def low(self) -> FloatArray: ...
    @property
    def high(self) -> FloatArray: ...
    @property
    def probability(self) -> str: ...
    @property
    def spread(self) -> str: ...


class Epoch(Protocol):
    """Figures of an epoch of MaC-Cal."""

    @property
    def keep(self) -> float: ...
    @property
    def confidence(self) -> float: ...
    @property
    def accuracy(self) -> float: ...


class DriftReport(Protocol):
    """Windows of a monitor, and its e-value."""

    @property
    def windows(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def limit(self) -> float: ...
    @property
    def alarm(self) -> Any: ...
    def accuracy_intervals(self, level: float) -> tuple[FloatArray, FloatArray]: ...


class EstimatedBatch(Protocol):
    """Estimated performance of a batch, as of :func:`calibrant.estimate_performance`."""

    @property
    def metrics(self) -> Mapping[str, Interval]: ...
    @property
    def status(self) -> str: ...
    @property
    def level(self) -> float: ...
