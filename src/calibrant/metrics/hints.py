"""Mistakes in the data that figures give away."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from scipy.special import betainc

from calibrant._core.binning import Bins
from calibrant._core.chunks import Estimand

if TYPE_CHECKING:
    from calibrant.metrics.intervals import Estimate

ENOUGH = 100  # examples, below which chance may look like anything
UNLIKELY = 0.01  # p-value of a test
HELD_OUT = (
    "use held-out examples if the model was trained on these, and the true labels if these are its "
    "own predictions"
)
ORDER = (
    "check that labels are in the order of the rows, count from 0, and number the classes in the "
    "order of the columns"
)


class Ranks(NamedTuple):
    """How P(y = 1) and the labels of two classes go together."""

    positive: float  # share of class 1
    area: float  # under the ROC curve
    spread: float  # standard deviation of P(y = 1)


class Figures(NamedTuple):
    """What tells a mistake in the data of exclusive classes."""

    n: float  # examples; weighted ones are worth fewer
    accuracy: float
    confidence: float  # mean probability of the predicted class
    chance: float  # accuracy of predictions that have nothing to do with the labels
    ranks: Ranks | None = None  # of two classes


def mistake_in(figures: Figures) -> str:
    """Return the mistake that the figures show, with its remedy; empty for sound ones.

    A training set makes everything right. Labels in another order make accuracy that of guessing:
    not better than chance, and not halfway from chance to what the confidences claim.
    """
    n, accuracy, confidence, chance, ranks = figures
    if n < ENOUGH:
        return ""
    if accuracy >= 1 - 1e-9:
        return _all_right(figures)
    if ranks is not None:
        return _mistake_in_ranks(n, ranks)
    claimed = (chance + confidence) / 2
    if _at_least(accuracy, n, chance) > UNLIKELY > 1 - _at_least(accuracy + 1 / n, n, claimed):
        guessing = f"that of guessing ({100 * chance:.1f} %), at a mean confidence"
        least = f"accuracy ({100 * accuracy:.1f} %) is no better than {guessing}"
        return f"{least} of {100 * confidence:.1f} %: {ORDER}"
    return ""


def hint_of(
    metrics: Mapping[str, Estimate], bins: Bins, classes: int, estimand: Estimand, chance: float
) -> str:
    """Return the mistake that an evaluation looks like, with its remedy; empty without one.

    ``chance`` is NaN where it was not summed.
    """
    if estimand == "multilabel" or "accuracy" not in metrics:
        return ""
    n = bins.total**2 / float(bins.squares.sum())
    accuracy, ranks = metrics["accuracy"].value, None
    if estimand == "binary":
        positive = float(bins.observed.sum()) / bins.total
        area = metrics["roc_auc"].value if "roc_auc" in metrics else math.nan
        ranks = Ranks(positive, area, _spread(bins))
    guessing = 1 / classes if math.isnan(chance) else max(chance, 1 / classes)
    figures = Figures(n, accuracy, _mean_confidence(bins, estimand), guessing, ranks)
    if n >= ENOUGH and accuracy >= 0.998 and figures.confidence >= 0.99:
        return _all_right(figures)
    return mistake_in(figures)


def _all_right(figures: Figures) -> str:
    every = figures.accuracy >= 1 - 1e-9
    which = "all" if every else f"{100 * figures.accuracy:.2f} % of the"
    at = f"at a mean confidence of {100 * figures.confidence:.1f} %"
    return f"{which} predictions are right, {at}: {HELD_OUT}"


def _mistake_in_ranks(n: float, ranks: Ranks) -> str:
    """Return the mistake that P(y = 1) does not tell two classes apart, or the wrong way round."""
    positive, area, spread = ranks
    if math.isnan(area) or not 0 < positive < 1:
        return ""
    # of the area where ranks are drawn at random
    deviation = math.sqrt((n + 1) / (12 * n * n * positive * (1 - positive)))
    shown = f"ROC AUC {100 * area:.1f} %"
    if area < min(0.3, 0.5 - 5 * deviation):
        return f"P(y = 1) is higher where y = 0 ({shown}): check that class 1 is the second column"
    if abs(area - 0.5) <= 2.5 * deviation <= 0.1 and spread >= 0.15:
        return f"P(y = 1) varies, but does not tell the classes apart ({shown}): {ORDER}"
    return ""


def _at_least(share: float, n: float, probability: float) -> float:
    """Return the probability of at least a share of n binomial events."""
    right = share * n
    return 1.0 if right <= 0 else float(betainc(right, max(n - right, 0) + 1, probability))


def _spread(bins: Bins) -> float:
    """Return the standard deviation of the probabilities, but for that within bins."""
    share, mean = bins.weight / bins.weight.sum(), bins.claimed.sum() / bins.weight.sum()
    means = bins.claimed / bins.weight.clip(min=1e-300)
    return math.sqrt(float(share @ (means - mean) ** 2))


def _mean_confidence(bins: Bins, estimand: Estimand) -> float:
    """Return the mean probability of the predicted class, from sums of P(y = 1) if need be."""
    claimed, weight = bins.claimed, bins.weight
    if estimand == "binary":
        claimed = claimed.clip(min=weight - claimed)
    return float(claimed.sum() / weight.sum())
