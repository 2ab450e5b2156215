"""Losses that calibrate while a model is trained.

Each loss is a function of ``logits (..., classes)`` and ``labels (...)``, and a module that gives
the mean of a batch: ``LOSSES["focal"](gamma=2.0)(logits, labels)``. All modules can be called with
``loss(logits, labels, features, indices)``; they take what they need.
"""

from __future__ import annotations

from calibrant.losses.fedlas import FeDLaS
from calibrant.losses.focal import AdaFocal, dual_focal, flsd, focal
from calibrant.losses.proper import brier, ce
from calibrant.losses.registry import LOSSES, PER_EXAMPLE, STATISTICS, Loss
from calibrant.losses.regularisers import CRL, avuc, mdca, mmce, soft_ece
from calibrant.losses.smoothing import acls, cpc, ecp, ls, mbls

__all__ = [
    "CRL",
    "LOSSES",
    "PER_EXAMPLE",
    "STATISTICS",
    "AdaFocal",
    "FeDLaS",
    "Loss",
    "acls",
    "avuc",
    "brier",
    "ce",
    "cpc",
    "dual_focal",
    "ecp",
    "flsd",
    "focal",
    "ls",
    "mbls",
    "mdca",
    "mmce",
    "soft_ece",
]
