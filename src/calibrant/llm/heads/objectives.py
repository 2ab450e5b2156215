"""Training objectives of temperature heads, from the records of tokens.

As in :mod:`calibrant.calibrators.objectives`, an objective takes records and the log-sharpness
``(n,)``, and returns its mean with the gradient ``(n,)``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from scipy.special import expit
from torch import Tensor

from calibrant._core.checks import FloatArray, check_choice
from calibrant._core.logpartition import TOP, Records
from calibrant._core.options import Options, options_of
from calibrant.calibrators.objectives import LogSharpness, Measured, Objective, nll, soft_ece

Weighting = Literal["paper", "official"]


def selective(
    records: Records,
    u: LogSharpness,
    *,
    alpha: float = 0.5,
    over: Literal["vocabulary"] | int = "vocabulary",
    weighting: Weighting = "paper",
) -> Measured:
    r"""Selective smoothing (Xie et al. 2024): likelihood if the model is right, else smoothing.

    .. math::
        \ell = \begin{cases}
            (1 - \alpha) \, [b d_y + A(b)] & \text{top token right} \\
            \alpha \, [b \bar d + A(b)] & \text{wrong}
        \end{cases}

    The second line is the cross-entropy of a uniform distribution over the vocabulary. The loss is
    not proper: no single alpha makes the confidence at the minimum right for every token. With the
    paper's alpha = 0.5, real models end far under-confident.

    Parameters
    ----------
    over : "vocabulary" or int
        Tokens that the uniform distribution covers: all, or this many of the likeliest, up to 10.
    weighting : {"paper", "official"}
        ``official`` is that of the authors' code: means over the right and the wrong tokens of a
        batch, weighted by the count of the *other* group,

        .. math::
            \frac{(1-\alpha) n_- \overline{\ell_+} + \alpha n_+ \overline{\ell_-}}
                 {(1-\alpha) n_- + \alpha n_+},

        so that the meaning of alpha changes with the accuracy of the batch. It is 0 if one group
        is empty. Masked positions, which that code counts as wrong ones with a loss of 0, do not
        count here.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be between 0 and 1, got {alpha}")
    if over != "vocabulary" and not (isinstance(over, int) and 1 <= over <= TOP):
        raise ValueError(f"over must be 'vocabulary' or a number from 1 to {TOP}, got {over!r}")
    check_choice("weighting", weighting, get_args(Weighting))
    b = np.exp(u)
    value, slope = records.log_partition(b)
    flat = records.mean_gap  # of the tokens that the uniform target covers
    if over != "vocabulary":
        gaps = records.gaps[:, :over].astype(np.float64)
        there = np.isfinite(gaps)
        flat = np.where(there, gaps, 0).sum(-1) / there.sum(-1)
    linear = b * np.where(records.correct, records.own_gap, flat)
    if weighting == "paper":
        pull = np.where(records.correct, 1 - alpha, alpha)
        weight = records.weight * pull / records.weight.sum()
    else:
        weight = _official(records, alpha)
    return Measured(float(weight @ (linear + value)), weight * (linear + slope))


def _official(records: Records, alpha: float) -> FloatArray:
    right = records.weight * records.correct
    wrong = records.weight - right
    count = right.sum(), wrong.sum()
    total = (1 - alpha) * count[1] + alpha * count[0]
    if not min(count) or not total:
        return np.zeros(len(records))
    pull = right * ((1 - alpha) * count[1] / count[0]) + wrong * (alpha * count[0] / count[1])
    return np.asarray(pull / total)


def bce(records: Records, u: LogSharpness) -> Measured:
    r"""Log-loss of the confidence p that the top token is right.

    With :math:`R = \log((1 - p) / p)`: the mean of :math:`\log(1 + e^{\pm R})`.
    """
    rest, slope = records.log_rest(np.exp(u))
    sign, share = np.where(records.correct, 1.0, -1.0), records.share
    value = share @ np.logaddexp(0, sign * rest)
    return Measured(float(value), share * sign * expit(sign * rest) * slope)


def brier_correct(records: Records, u: LogSharpness) -> Measured:
    r"""Brier score of the confidence: the mean of :math:`(p - [\text{top token right}])^2`."""
    rest, slope = records.log_rest(np.exp(u))
    confidence, share = expit(-rest), records.share
    gap = confidence - records.correct
    return Measured(float(share @ gap**2), share * 2 * gap * -confidence * expit(rest) * slope)


OBJECTIVES: dict[str, Callable[..., Measured]] = {
    "nll": nll,
    "selective": selective,
    "bce": bce,
    "brier": brier_correct,
    "smart": partial(soft_ece, delta=1e-3),  # with SMART's Charbonnier penalty, over a batch
}
"""Objectives by name; the Brier score is that of the confidence."""
INNER = ("records", "u", "curve", "alpha")
"""Arguments of objectives that are no options; ``alpha`` is one of :func:`fit_head` itself."""


def objective_options(name: str) -> Options:
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
