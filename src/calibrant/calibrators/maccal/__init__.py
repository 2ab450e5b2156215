"""MaC-Cal: retraining of the classifier on the frozen features of a network."""

from calibrant.calibrators.maccal.frozen import replace_head
from calibrant.calibrators.maccal.maccal import MaCCal
from calibrant.calibrators.maccal.masked import Epoch, KeepRate, MaskedClassifier, masked_step

__all__ = ["Epoch", "KeepRate", "MaCCal", "MaskedClassifier", "masked_step", "replace_head"]
