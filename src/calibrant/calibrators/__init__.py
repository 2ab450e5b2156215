"""Post-hoc calibrators: fitted on held-out logits, they map logits to calibrated logits."""

from __future__ import annotations

from calibrant.calibrators.affine import DirichletCalibration, MatrixScaling, VectorScaling
from calibrant.calibrators.auto import Auto
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.binning import BBQ, HistogramBinning, HistogramOneVsRest, ScalingBinning
from calibrant.calibrators.class_temperatures import ClassTemperatures
from calibrant.calibrators.confidence_maps import BetaCalibration, SigmoidScaling, SplineCalibration
from calibrant.calibrators.features import FeatureClipping, GroupCalibration, ProCal
from calibrant.calibrators.isotonic import IsotonicCalibration, IsotonicOneVsRest
from calibrant.calibrators.network import SMART, ParametrizedTemperatureScaling
from calibrant.calibrators.registry import CALIBRATORS
from calibrant.calibrators.scaling import EnsembleTemperatureScaling, Identity, TemperatureScaling
from calibrant.calibrators.top_label import Blend, OddsScaling

__all__ = [
    "BBQ",
    "CALIBRATORS",
    "SMART",
    "Auto",
    "BetaCalibration",
    "Blend",
    "Calibrator",
    "ClassTemperatures",
    "DirichletCalibration",
    "EnsembleTemperatureScaling",
    "FeatureClipping",
    "GroupCalibration",
    "HistogramBinning",
    "HistogramOneVsRest",
    "Identity",
    "IsotonicCalibration",
    "IsotonicOneVsRest",
    "MatrixScaling",
    "OddsScaling",
    "ParametrizedTemperatureScaling",
    "ProCal",
    "ScalingBinning",
    "SigmoidScaling",
    "SplineCalibration",
    "TemperatureScaling",
    "VectorScaling",
]
