"""Training objectives of temperature heads, from the records of tokens.

As in :mod:`calibrant.calibrators.objectives`, an objective takes records and the log-sharpness
``(n,)``, and returns its mean with the gradient ``(n,)``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from scipy.special import expit
from torch import Tensor

from calibrant._core.checks import check_choice
from calibrant._core.options import Options, options_of
from calibrant.calibrators.logpartition import Records
from calibrant.calibrators.objectives import LogSharpness, Measured, Objective, nll, soft_ece
from calibrant.llm.heads.ats import _selective


def _bce(records: Records, u: LogSharpness) -> Measured:
    r"""Log-loss of the confidence p that the top token is right.

    With :math:`R = \log((1 - p) / p)`: the mean of :math:`\log(1 + e^{\pm R})`.
    """
    rest, slope = records.log_rest(np.exp(u))
    sign, share = np.where(records.correct, 1.0, -1.0), records.share
    value = share @ np.logaddexp(0, sign * rest)
    return Measured(float(value), share * sign * expit(sign * rest) * slope)


def _brier_correct(records: Records, u: LogSharpness) -> Measured:
    r"""Brier score of the confidence: the mean of :math:`(p - [\text{top token right}])^2`."""
    rest, slope = records.log_rest(np.exp(u))
    confidence, share = expit(-rest), records.share
    gap = confidence - records.correct
    return Measured(float(share @ gap**2), share * 2 * gap * -confidence * expit(rest) * slope)


OBJECTIVES: dict[str, Callable[..., Measured]] = {
    "nll": nll,
    "selective": _selective,
    "bce": _bce,
    "brier": _brier_correct,
    "smart": partial(soft_ece, delta=1e-3),  # with SMART's Charbonnier penalty, over a batch
}
"""Objectives by name; the Brier score is that of the confidence."""
INNER = ("records", "u", "curve", "alpha")
"""Arguments of objectives that are no options; ``alpha`` is one of :func:`fit_head` itself."""


def _objective_options(name: str) -> Options:
    """Return the options of an objective."""
    check_choice("objective", name, tuple(OBJECTIVES))
    known = options_of(OBJECTIVES[name])
    return {option: known[option] for option in known if option not in INNER}


def loss(objective: Objective, records: Records, u: Tensor) -> Tensor:
    """An objective as a scalar of torch's graph, with its exact gradient by ``u`` ``(n,)``."""
    return cast(Tensor, _FromRecords.apply(u, objective, records))  # type: ignore[no-untyped-call]


class _FromRecords(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, objective: Objective, records: Records) -> Tensor:
        value, gradient = objective(records, u.detach().cpu().double().numpy())
        ctx.save_for_backward(torch.from_numpy(gradient).to(u))
        return u.new_tensor(value)

    @staticmethod
    def backward(ctx: Any, *outside: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return outside[0] * gradient, None, None
