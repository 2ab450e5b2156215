"""The table of losses. A new one stands in the table of its own module."""

from __future__ import annotations

from calibrant._core.messages import resolve_name
from calibrant.losses.base import Loss, brier, ce, mean_of
from calibrant.losses.focal import FOCAL_LOSSES
from calibrant.losses.regularisers import REGULARISERS
from calibrant.losses.smoothing import FEDLAS, SMOOTHING_LOSSES

LOSSES: dict[str, Loss] = {
    "ce": mean_of(ce, aliases=("cross_entropy", "nll")),
    "brier": mean_of(brier, "Brier 1950", aliases=("brier_score",)),
    **SMOOTHING_LOSSES,
    **FOCAL_LOSSES,
    **REGULARISERS,
    **FEDLAS,
}
"""Every loss by its name: call it with its options for a module."""

_ALIASES = {alias: name for name, loss in LOSSES.items() for alias in loss.aliases}


def loss_name(name: str) -> str:
    """Return the name in :data:`LOSSES` for a name as typed: any case, or an alias.

    >>> loss_name("Label smoothing")
    'ls'
    """
    return resolve_name("loss", name, LOSSES, _ALIASES)
