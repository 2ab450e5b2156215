"""Post-hoc calibrators: fitted on held-out logits, they map logits to calibrated logits."""

from __future__ import annotations

from calibrant.calibrators.adaptive import SMART, ParametrizedTemperatureScaling
from calibrant.calibrators.affine import DirichletCalibration, MatrixScaling, VectorScaling
from calibrant.calibrators.auto import Auto
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.binning import BBQ, HistogramBinning, HistogramOneVsRest, ScalingBinning
from calibrant.calibrators.classwise import ClassTemperatures
from calibrant.calibrators.features import FeatureClipping, GroupCalibration, ProCal
from calibrant.calibrators.isotonic import IsotonicCalibration, IsotonicOneVsRest
from calibrant.calibrators.scaling import (
    EnsembleTemperatureScaling,
    Identity,
    TemperatureScaling,
)
from calibrant.calibrators.smooth_maps import BetaCalibration, SigmoidScaling, SplineCalibration
from calibrant.calibrators.toplabel import Blend, OddsScaling

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
