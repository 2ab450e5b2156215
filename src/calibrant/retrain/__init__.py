"""Retraining of the classifier on the frozen features of a network: MaC-Cal."""

from calibrant.retrain.adapter import RetrainedClassifier, as_calibrator
from calibrant.retrain.features import replace_head
from calibrant.retrain.maccal import MaCCal
from calibrant.retrain.masked_classifier import Epoch, KeepRate, MaskedClassifier, masked_step

__all__ = [
    "Epoch",
    "KeepRate",
    "MaCCal",
    "MaskedClassifier",
    "RetrainedClassifier",
    "as_calibrator",
    "masked_step",
    "replace_head",
]
