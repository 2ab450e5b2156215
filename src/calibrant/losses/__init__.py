"""Losses that calibrate while a model is trained.

Each loss is a function of ``logits (..., classes)`` and ``labels (...)``, and a module that gives
the mean of a batch: ``LOSSES["focal"](gamma=2.0)(logits, labels)``. All modules can be called with
``loss(logits, labels, features, indices)``; they take what they need.
"""

from calibrant.losses.base import (
    Loss as Loss,
    MeanLoss as MeanLoss,
    RegularisedLoss as RegularisedLoss,
    brier as brier,
    ce as ce,
)
from calibrant.losses.focal import (
    AdaFocal as AdaFocal,
    dual_focal as dual_focal,
    flsd as flsd,
    focal as focal,
)
from calibrant.losses.registry import LOSSES as LOSSES, loss_name as loss_name
from calibrant.losses.regularisers import (
    CRL as CRL,
    avuc as avuc,
    mdca as mdca,
    mmce as mmce,
    soft_ece as soft_ece,
)
from calibrant.losses.smoothing import (
    FeDLaS as FeDLaS,
    acls as acls,
    cpc as cpc,
    ecp as ecp,
    ls as ls,
    mbls as mbls,
)
