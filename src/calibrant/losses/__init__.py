"""Losses that calibrate while a model is trained.

Each loss is a function of ``logits (..., classes)`` and ``labels (...)``, and a module that gives
the mean of a batch: ``LOSSES["focal"](gamma=2.0)(logits, labels)``. All modules can be called with
``loss(logits, labels, features, indices)``; they take what they need.
"""

from calibrant._core.options import Registry, tables
from calibrant.losses.entries import (
    Loss as Loss,
    MeanLoss as MeanLoss,
    RegularisedLoss as RegularisedLoss,
    brier as brier,
    ce as ce,
)
from calibrant.losses.fedlas import FeDLaS as FeDLaS
from calibrant.losses.focal import (
    AdaFocal as AdaFocal,
    dual_focal as dual_focal,
    flsd as flsd,
    focal as focal,
)
from calibrant.losses.regularisers import (
    CRL as CRL,
    avuc as avuc,
    mdca as mdca,
    mmce as mmce,
    soft_ece as soft_ece,
)
from calibrant.losses.smoothing import (
    acls as acls,
    cpc as cpc,
    ecp as ecp,
    ls as ls,
    mbls as mbls,
)

_ORDER = ("entries", "smoothing", "focal", "regularisers", "fedlas")
LOSSES: Registry[Loss] = Registry(
    "loss", {name: loss for table in tables(__name__, _ORDER) for name, loss in table.items()}
)
"""Every loss by its name: call it with its options for a module."""
