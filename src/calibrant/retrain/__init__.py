"""Classifiers that are trained anew on the features of a network that stays as it is."""

from calibrant.retrain.backbone import replace_head
from calibrant.retrain.maccal import Epoch, KeepRate, MaCCal
from calibrant.retrain.masked_classifier import MaskedClassifier, masked_step

__all__ = [
    "Epoch",
    "KeepRate",
    "MaCCal",
    "MaskedClassifier",
    "masked_step",
    "replace_head",
]
