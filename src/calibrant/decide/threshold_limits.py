"""Thresholds of probabilities with guaranteed errors, precision, recall or costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from calibrant._core.checks import BoolArray, FloatArray, as_float64, as_scores
from calibrant._core.class_names import as_array
from calibrant.decide.probabilities import check_share
from calibrant.decide.threshold_results import LimitName, Threshold
from calibrant.decide.threshold_search import (
    Counts,
    best_passing,
    level_shares,
    threshold_grid,
)
from calibrant.metrics.reductions import (
    FORMS,
    Data,
    Input,
    answers_from,
    keywords,
    one_vs_rest,
    pairs_from,
    positive_class,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

RARE_REACH = 14
"""Log-odds below zero down to which thresholds of events are tried: these may be rare."""
_OPTIONS: dict[str, LimitName] = {
    **{"max_error": "error", "precision": "precision", "recall": "recall"},
    **{"max_fpr": "fpr", "max_fnr": "fnr", "max_cost": "cost"},
}
"""Limits by the argument that asks for them."""
_EXAMPLES = {
    "max_error": "0.05 allows 5 % of wrong answers",
    "precision": "0.9 means 90 %",
    "recall": "0.95 means 95 %",
    "max_fpr": "0.01 allows 1 % of false alarms",
    "max_fnr": "0.05 allows 5 % of misses",
}


class _Limits(Data, total=False):
    """What a threshold is to keep, and the examples."""

    max_error: float | None
    precision: float | None
    recall: float | None
    max_fpr: float | None
    max_fnr: float | None
    max_cost: float | None
    cost: ArrayLike | None


@keywords(_Limits)
def threshold(
    logits: Input = None,
    labels: Input = None,
    *,
    positive: int | None = None,
    certainty: float = 0.95,
    **options: Unpack[_Limits],
) -> Threshold:
    r"""Threshold of a probability that keeps limits with a guaranteed certainty.

    ``max_error`` limits the share of wrong answers among those whose confidence, the probability of
    the predicted class, is at least the threshold. The other limits are about one class, whose
    probability decides: precision, recall, the rates of false positives and false negatives, and
    the mean cost of the decisions. They may be combined. With :math:`R_i(t)` the share of failures,
    such as :math:`P(\text{wrong} \mid \text{confidence} \ge t)`, its limit :math:`\alpha_i`,
    and the threshold :math:`\hat t` that comes back,

    .. math:: P\left(R_i(\hat t) \le \alpha_i \text{ for all } i\right) \ge \mathtt{certainty}

    over the draw of the examples, for any number of them, calibrated or not. They must be
    independent, from the population to which the threshold will be applied, and not those on
    which the model or its calibrator was fitted. The guarantee is about all examples together, not
    about a subgroup among them, for which there is :func:`thresholds`.

    Each threshold is a hypothesis, with an exact binomial p-value, or that of Hoeffding and
    Bentkus for costs (Learn then Test, Angelopoulos et al. 2021). Recall and the rate of false
    negatives only get worse with a rising threshold, that of false positives with a falling one:
    thresholds are tested from the safe end on until the first failure, each at the whole
    :math:`1 - \mathtt{certainty}`. Error, precision and cost are tested on a fixed grid, from high
    to low. Each test has the error probability of the one before, if that one passed (the fallback
    procedure of Wiens and Dmitrienko 2005), and half of it enters next to ``1 - max_error``, where
    calibrated probabilities are safe. Several limits share it equally.

    Of all thresholds that pass, the lowest is returned; if only misses are limited, the highest; if
    there is a ``cost``, that with the lowest mean cost in these examples.

    Parameters
    ----------
    logits : (..., classes), or (n,) log-odds, calibrated
    labels : (...) integers, -100 ignored
    positive : int, optional
        Class that is to be found, against all others; 1 by default if there are two classes. For
        a tag pass its column of logits and labels.
    certainty : float in (0, 1)
    max_error : float in (0, 1), optional
        Largest share of wrong answers among the accepted.
    precision : float in (0, 1), optional
        Least share of positive examples among those that are flagged.
    recall : float in (0, 1), optional
        Least share of the positive examples that are flagged.
    max_fpr, max_fnr : float in (0, 1), optional
        Largest share of negative examples that are flagged, and of positive ones that are not.
    cost : (2, 2) array, optional
        Costs of true negatives and false positives, then of false negatives and true positives, in
        the order of :func:`sklearn.metrics.confusion_matrix`.
    max_cost : float, optional
        Largest mean cost of an example.
    probs, or confidence and outcome
        In place of logits, as for :func:`calibrant.ece`. With pairs, the limits are about the
        outcome. Weights are not supported.

    Returns
    -------
    Threshold
        Where the examples do not suffice, its threshold is inf, or 0 if only misses are limited,
        with a warning that says about how many more labels are needed.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> confidence = rng.uniform(0.5, 1, 4000)
    >>> right = rng.random(4000) < confidence
    >>> limit = threshold(confidence=confidence, outcome=right, max_error=0.1)
    >>> round(limit.threshold, 2), round(limit.coverage, 2), round(limit.error, 2)
    (0.84, 0.32, 0.08)
    >>> log_odds = 2 * rng.normal(size=4000)
    >>> ill = (log_odds + rng.logistic(size=4000) > 0).astype(int)
    >>> print(threshold(log_odds, ill, recall=0.9).promise())
    With 95 % certainty, at least 90 % of the positive ones are found.
    """
    data: dict[str, Any] = {name: options.get(name) for name in Data.__annotations__}
    if data["sample_weight"] is not None:
        raise TypeError("threshold takes no sample_weight: its guarantee counts examples")
    asked, costs = _checked_wishes(options)
    check_share(certainty, "certainty", "0.95 means 95 %")
    if "error" in asked and (len(asked) > 1 or positive is not None or costs is not None):
        raise TypeError(
            "max_error is about accepted answers and stands alone: precision=, recall= and the "
            "others are about one class"
        )
    claimed, happened = _event(logits, labels, positive, data, answers="error" in asked)
    grid, shares = _candidates(asked, costs, claimed)
    grid = _as_held(grid, data["confidence"])
    order = np.argsort(-claimed)
    flagged = np.searchsorted(-claimed[order], -grid, side="right")
    false = np.append(0, np.cumsum(happened[order] == 0))[flagged]
    counts = Counts(claimed.size, int((happened != 0).sum()), flagged, false)
    limits = [counts.trials(name, value, costs) for name, value in asked.items()]
    return best_passing(grid, shares, limits, counts, certainty=certainty, costs=costs)


def thresholds(
    logits: Input = None,
    labels: Input = None,
    *,
    by: ArrayLike | None = None,
    certainty: float = 0.95,
    together: bool = True,
    **options: Any,
) -> dict[Any, Threshold]:
    """Find a threshold for each group, or for each class or tag.

    Parameters
    ----------
    logits, labels, **options
        As for :func:`threshold`. Labels of the shape of the logits are those of tags.
    by : (...), optional
        Group of each example; each gets a threshold of its own, and so does each tag in it, if
        ``by`` is ``(n,)`` and the labels are those of tags. Without it, each class or tag does.
    certainty : float in (0, 1)
        Probability that the limits of all thresholds hold; of each by itself, unless ``together``.
    together : bool
        Share the error probability among the thresholds (Bonferroni).

    Returns
    -------
    dict
        Thresholds by the name of the group, by the number of the class or tag, or by both.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> logits = 2 * rng.normal(size=(4000, 2))
    >>> tags = (logits + rng.logistic(size=logits.shape) > [0, 2]).astype(int)
    >>> found = thresholds(logits, tags, recall=0.9)
    >>> {tag: one.limits[0].name for tag, one in found.items()}
    {0: 'recall', 1: 'recall'}
    """
    data = {"logits": logits, "labels": labels}
    data |= {name: options.pop(name, None) for name in ("probs", "confidence", "outcome")}
    given = {name: as_array(values) for name, values in data.items() if values is not None}
    scores = given.get("logits", given.get("probs"))
    if by is not None:
        group, of = as_array(by), given.get("labels", given.get("outcome"))
        shape = as_array(of).shape
        tags = scores is not None and scores.shape == shape and group.shape == shape[:-1] != ()
        if group.shape != shape and not tags:
            raise ValueError(f"by must have the shape {shape} of the labels, got {group.shape}")
        names = np.unique(group)
        parts = {name.item(): {k: v[group == name] for k, v in given.items()} for name in names}
        if tags:
            parts = {(k, tag): v for k, part in parts.items() for tag, v in _tags(part).items()}
    elif scores is None or "labels" not in given or scores.ndim < 2:
        raise TypeError("without by=, thresholds are those of classes or tags: pass their logits")
    elif scores.shape == given["labels"].shape:  # tags
        parts = _tags(given)
    else:
        parts = {k: {**given, "positive": k} for k in range(scores.shape[-1])}
    each = 1 - (1 - certainty) / len(parts) if together else certainty
    return {name: threshold(**part, certainty=each, **options) for name, part in parts.items()}


def _tags(given: Mapping[str, NDArray[Any]]) -> dict[int, dict[str, Any]]:
    """Return the examples of each tag."""
    tags = given["labels"].shape[-1]
    return {k: {name: values[..., k] for name, values in given.items()} for k in range(tags)}


def _checked_wishes(
    options: Mapping[str, Any],
) -> tuple[dict[LimitName, float], FloatArray | None]:
    """Return the limits by their names, and the costs."""
    asked = {name: options[name] for name in _OPTIONS if options.get(name) is not None}
    for name, value in asked.items():
        if name != "max_cost":
            check_share(value, name, _EXAMPLES[name])
    if not asked:
        raise TypeError(f"name a limit, one of {', '.join(_OPTIONS)}")
    if options.get("cost") is None:
        if "max_cost" in asked:
            raise TypeError("max_cost= needs the costs of decisions: pass cost= with 2 x 2 of them")
        costs = None
    else:
        costs = as_float64(options["cost"])
        wanted = "cost must be [[true negative, false positive], [false negative, true positive]]"
        if costs.shape != (2, 2) or not np.isfinite(costs).all():
            raise ValueError(f"{wanted}, got {options['cost']!r:.100}")
        if costs[0, 1] <= costs[0, 0] or costs[1, 0] <= costs[1, 1]:
            raise ValueError(f"{wanted}, and mistakes must cost more, got {costs.tolist()}")
        if "max_cost" in asked and not costs.min() < asked["max_cost"] < costs.max():
            ends = f"{costs.min():g} and {costs.max():g}"
            raise ValueError(f"max_cost must be between {ends}, got {asked['max_cost']}")
    return {_OPTIONS[name]: float(value) for name, value in asked.items()}, costs


def _event(
    logits: Input, labels: Input, positive: int | None, data: Mapping[str, Any], *, answers: bool
) -> tuple[FloatArray, FloatArray | BoolArray]:
    """Return the probability of the event of each example, and whether it happened."""
    if answers:
        return answers_from(logits, labels, **data)[:2]
    if data["confidence"] is not None or data["outcome"] is not None:
        if positive is not None:
            raise TypeError("positive= is a class: confidence= and outcome= have none")
        return pairs_from(logits, labels, **data)[:2]
    probs = data["probs"]
    values, name = (logits, "logits") if probs is None else (probs, "probs")
    if values is None:
        raise TypeError(f"nothing to find a threshold for: pass {FORMS}")
    scores = as_scores(values, name)
    two = scores.ndim == 1 or scores.shape[-1] == 2
    if positive is None and not two:
        raise TypeError(
            f"of {scores.shape[-1]} classes, name the one to find: positive=0, say; or find "
            "thresholds(...) for all of them"
        )
    if two and positive in (None, 1):
        return positive_class(logits, labels, probs=probs)
    if scores.ndim == 1:
        raise ValueError(f"one logit has class 1 for positive, got positive={positive}")
    return one_vs_rest(logits, labels, k=positive, probs=probs)  # type: ignore[arg-type]


def _candidates(
    asked: Mapping[LimitName, float], costs: FloatArray | None, claimed: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the thresholds to try, from high to low, and shares of the error probability.

    They must not depend on the examples, unless all limits hold up to, or from, some threshold on.
    """
    if "error" in asked:
        return threshold_grid(asked["error"]), level_shares(asked["error"])
    middle = None if "precision" not in asked else 1 - asked["precision"]
    if middle is None and "cost" in asked:
        assert costs is not None
        alarm, miss = costs[0, 1] - costs[0, 0], costs[1, 0] - costs[1, 1]
        middle = float(miss / (alarm + miss))  # flagging pays from 1 - this on
    if middle is not None:
        return threshold_grid(middle, RARE_REACH), level_shares(middle, RARE_REACH)
    scores = np.unique(claimed)[::-1]
    # halfway between two scores, so that their last digits do not decide
    grid = np.append(scores[1:] + (scores[:-1] - scores[1:]) / 2, 0.0)
    return grid, np.ones(len(grid))


def _as_held(grid: FloatArray, values: Input) -> FloatArray:
    """Thresholds in the dtype of the confidences, to which ``confidence >= t`` rounds them."""
    if values is None:
        return grid
    confidence = as_scores(values, "confidence")
    if isinstance(confidence, Tensor):
        return as_float64(torch.from_numpy(grid).to(confidence.dtype))
    return as_float64(grid.astype(confidence.dtype))
