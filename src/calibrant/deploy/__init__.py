"""Calibrated models in production: attached, folded into a layer, exported, in scikit-learn."""

from __future__ import annotations

from collections.abc import Callable

from calibrant.deploy.attach import CalibratedModel, calibrated
from calibrant.deploy.dataframes import calibrate_table
from calibrant.deploy.export import export_onnx, export_program
from calibrant.deploy.fold import fold_into_linear
from calibrant.deploy.logits import collect, collect_shards

__all__ = [
    "EXPORTS",
    "CalibratedModel",
    "calibrate_table",
    "calibrated",
    "collect",
    "collect_shards",
    "export_onnx",
    "export_program",
    "fold_into_linear",
]

EXPORTS: dict[str, Callable[..., float]] = {".onnx": export_onnx, ".pt2": export_program}
"""Exporters by the suffix of the file."""
