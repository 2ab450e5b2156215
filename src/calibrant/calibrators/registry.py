"""Calibrators by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from calibrant._core.messages import comma_separated
from calibrant.calibrators.affine import DirichletCalibration, MatrixScaling, VectorScaling
from calibrant.calibrators.auto import Auto
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.binning import BBQ, HistogramBinning, HistogramOneVsRest, ScalingBinning
from calibrant.calibrators.class_temperatures import ClassTemperatures
from calibrant.calibrators.confidence_maps import BetaCalibration, SigmoidScaling, SplineCalibration
from calibrant.calibrators.features import FeatureClipping, GroupCalibration, ProCal
from calibrant.calibrators.isotonic import IsotonicCalibration, IsotonicOneVsRest
from calibrant.calibrators.network import SMART, ParametrizedTemperatureScaling
from calibrant.calibrators.scaling import EnsembleTemperatureScaling, Identity, TemperatureScaling
from calibrant.calibrators.top_label import Blend, OddsScaling

CALIBRATORS: dict[str, type[Calibrator]] = {
    "none": Identity,
    "ts": TemperatureScaling,
    "ets": EnsembleTemperatureScaling,
    "vector": VectorScaling,
    "matrix": MatrixScaling,
    "dirichlet": DirichletCalibration,
    "cts": ClassTemperatures,
    "pts": ParametrizedTemperatureScaling,
    "smart": SMART,
    "sigmoid": SigmoidScaling,
    "beta": BetaCalibration,
    "histogram": HistogramBinning,
    "histogram_ovr": HistogramOneVsRest,
    "isotonic": IsotonicCalibration,
    "isotonic_ovr": IsotonicOneVsRest,
    "bbq": BBQ,
    "scaling_binning": ScalingBinning,
    "spline": SplineCalibration,
    "gc": GroupCalibration,
    "procal": ProCal,
    "fc": FeatureClipping,
    "odds": OddsScaling,
    "blend": Blend,
    "auto": Auto,
}
"""Every calibrator by its name on the command line and in saved files."""


# Calibrators by name.


def make_calibrator(
    method: str | Calibrator, options: Mapping[str, Any] | None = None
) -> Calibrator:
    """Return an unfitted calibrator by its name and the arguments of its constructor.

    >>> make_calibrator("ts", {"objective": "brier"})
    TemperatureScaling(objective='brier', not fitted)
    """
    if isinstance(method, Calibrator):
        if options:
            raise TypeError(
                f"options go with the name of a method, got {comma_separated(options)} beside a "
                f"{type(method).__name__}: pass them to its constructor"
            )
        return method
    if method not in CALIBRATORS:
        near = difflib.get_close_matches(str(method), CALIBRATORS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(
            f"unknown method {method!r}: {hint}choose from {comma_separated(CALIBRATORS)}"
        )
    _check_options(method, options or {})
    return CALIBRATORS[method](**(options or {}))


def _check_options(method: str, options: Mapping[str, Any]) -> None:
    known = inspect.signature(CALIBRATORS[method]).parameters
    unknown = [name for name in options if name not in known]
    if unknown:
        choices = [f"{name} (default {known[name].default!r})" for name in known]
        has = f"its options are {comma_separated(choices)}" if choices else "it has none"
        raise ValueError(f"{method} has no option {unknown[0]!r}: {has}")
