"""Calibrated models in production: attached, folded into a layer, exported, in scikit-learn."""

from calibrant.deploy.calibrated_model import CalibratedModel, calibrated, fold_into_linear
from calibrant.deploy.dataframes import calibrate_table
from calibrant.deploy.exports import export
from calibrant.deploy.logits import collect, collect_shards

__all__ = [
    "CalibratedModel",
    "calibrate_table",
    "calibrated",
    "collect",
    "collect_shards",
    "export",
    "fold_into_linear",
]
