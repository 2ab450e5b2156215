"""Classifiers that are trained anew on the features of a network that stays as it is."""

from calibrant.heads.files import retrain_file
from calibrant.heads.maccal import Epoch, KeepRate, MaCCal
from calibrant.heads.masked import MaskedClassifier, masked_step
from calibrant.heads.models import replace_head

__all__ = [
    "Epoch",
    "KeepRate",
    "MaCCal",
    "MaskedClassifier",
    "masked_step",
    "replace_head",
    "retrain_file",
]
