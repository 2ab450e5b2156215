"""Thresholds of probabilities with guaranteed errors, precision, recall or costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from calibrant._core import checks
from calibrant._core.checks import BoolArray, FloatArray, as_float64, as_scores
from calibrant._core.class_names import (
    as_array,
    class_names_of,
    is_frame,
    kept_names,
    without_frames,
)
from calibrant._core.messages import comma_separated
from calibrant.decide.probabilities import check_share
from calibrant.decide.threshold_results import LimitName, Threshold
from calibrant.decide.threshold_search import (
    Counts,
    best_passing,
    cheapest,
    threshold_grid,
)
from calibrant.metrics.reductions import (
    FORMS,
    Data,
    Input,
    Layout,
    answers_from,
    keywords,
    one_vs_rest,
    pairs_from,
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
    positive: int | str | None = None,
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
    there is a ``cost``, that with the lowest mean cost in these examples. A ``cost`` without any
    limit tries every threshold between two scores, and guarantees nothing.

    Parameters
    ----------
    logits : (..., classes), or (n,) log-odds, calibrated
    labels : (...) integers, -100 ignored
    positive : int, or str for a data frame, optional
        Class that is to be found, against all others. Of two classes it is class 1 by default, that
        of the second column: name it, as in ``positive="yes"``, not to depend on their order. For a
        tag pass its column of logits and labels.
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
    probs, or confidence and outcome, class_dim, ignore_index
        As for :func:`calibrant.ece`. With pairs, the limits are about the outcome. Weights are not
        supported.

    Returns
    -------
    Threshold
        Where the examples do not suffice, its threshold is inf, or 0 if only misses are limited, or
        the cheapest in these examples if ``max_cost`` is what they do not show, with a warning that
        says about how many more labels are needed.

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

    If a miss costs five times as much as a false alarm, the best threshold of calibrated
    probabilities, such as these, is 1 / (1 + 5); that of the examples is close.

    >>> round(threshold(log_odds, ill, cost=[[0, 1], [5, 0]]).threshold, 2)
    0.15
    """
    return _found(certainty, logits=logits, labels=labels, positive=positive, **options)


def _found(
    certainty: float,
    of: str = "",
    names: Sequence[str] | None = None,
    *,
    logits: Input = None,
    labels: Input = None,
    positive: int | str | None = None,
    **options: Any,
) -> Threshold:
    """Return the threshold of some examples; ``of`` tells in a warning of what they are.

    ``names`` are those of classes whose scores were a data frame.
    """
    if unknown := [name for name in options if name not in _Limits.__annotations__]:
        known = ", ".join(_OPTIONS)
        raise TypeError(f"threshold takes no {unknown[0]}=: name a limit, one of {known}")
    data: dict[str, Any] = {name: options.get(name) for name in Data.__annotations__}
    if data["sample_weight"] is not None:
        raise TypeError("threshold takes no sample_weight: its guarantee counts examples")
    asked, costs = _checked_limits(options)
    check_share(certainty, "certainty", "0.95 means 95 %")
    if "error" in asked and (len(asked) > 1 or positive is not None or costs is not None):
        raise TypeError(
            "max_error is about accepted answers and stands alone: precision=, recall= and the "
            "others are about one class"
        )
    claimed, happened, name = _event(
        logits, labels, positive, data, names, answers="error" in asked
    )
    if asked:
        grid, shares = _candidates(asked, costs, claimed)
    else:
        grid = _between_scores(np.append(claimed, 1.0))  # from flagging none to flagging all
    grid = _as_held(grid, data["probs"] if data["confidence"] is None else data["confidence"])
    order = np.argsort(-claimed)
    flagged = np.searchsorted(-claimed[order], -grid, side="right")
    false = np.append(0, np.cumsum(happened[order] == 0))[flagged]
    counts = Counts(claimed.size, int((happened != 0).sum()), flagged, false)
    if not asked:
        assert costs is not None  # as was checked
        return cheapest(grid, counts, costs, certainty=certainty)._replace(positive=name)
    limits = [counts.trials(name, value, costs) for name, value in asked.items()]
    found = best_passing(grid, shares, limits, counts, certainty=certainty, costs=costs, of=of)
    return found._replace(positive=name)


@checks.warnings_at_caller()
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
    check_share(certainty, "certainty", "0.95 means 95 %")
    names = class_names_of(logits if options.get("probs") is None else options["probs"])
    given = _arrays(logits, labels, options)
    kind, parts = _parts(given, None if by is None else checks.as_keys(as_array(by)))
    each = 1 - (1 - certainty) / len(parts) if together else certainty
    for name, part in parts.items():
        if "labels" in part and (part["labels"] == checks.IGNORED).all():
            raise ValueError(f"{kind} {name} has no labelled examples: leave it out")
    return {
        name: _found(each, f" of {kind} {name}", names, **part, **options)
        for name, part in parts.items()
    }


def _arrays(logits: Input, labels: Input, options: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """Return the examples as arrays with the classes last, and take them out of the options."""
    layout = ("probs", "class_dim", "ignore_index")
    probs, class_dim, ignored = (options.pop(name, None) for name in layout)
    scores = logits if probs is None else probs
    if "positive" in options and is_frame(scores):
        names = class_names_of(scores)
        options["positive"] = class_number(options["positive"], len(names or ()), names)
    values = {name: options.pop(name, None) for name in ("confidence", "outcome")}
    if labels is not None:
        labels, logits, probs = without_frames(labels, logits, probs)
        values["labels"] = checks.with_ignored(labels, ignored)
    for name, scores in {"logits": logits, "probs": probs}.items():
        values[name] = None if scores is None else checks.classes_last(scores, class_dim)
    return {name: as_array(v) for name, v in values.items() if v is not None}


def _parts(
    given: Mapping[str, NDArray[Any]], group: NDArray[Any] | None
) -> tuple[str, dict[Any, dict[str, Any]]]:
    """Return the examples of each group, tag or class, and which of them these are."""
    scores, of = given.get("logits", given.get("probs")), given.get("labels", given.get("outcome"))
    if of is None:
        raise TypeError(f"labels are missing: pass {FORMS}")
    shape = of.shape
    if group is None:
        if scores is None or scores.ndim < 2:
            remedy = "pass their logits"
            raise TypeError(f"without by=, thresholds are those of classes or tags: {remedy}")
        if scores.shape == shape:
            return "tag", _tags(given)
        return "class", {k: {**given, "positive": k} for k in range(scores.shape[-1])}
    tags = scores is not None and scores.shape == shape and group.shape == shape[:-1] != ()
    names, at = np.unique(group, return_inverse=True)
    at = checks.spread(at.reshape(group.shape), shape[:-1] if tags else shape, "by")
    parts = {
        name: {k: v[at == i] for k, v in given.items()} for i, name in enumerate(names.tolist())
    }
    if not tags:
        return "group", parts
    return "group and tag", {
        (name, k): v for name, part in parts.items() for k, v in _tags(part).items()
    }


def _tags(given: Mapping[str, NDArray[Any]]) -> dict[int, dict[str, Any]]:
    """Return the examples of each tag."""
    tags = given["labels"].shape[-1]
    return {k: {name: values[..., k] for name, values in given.items()} for k in range(tags)}


def _checked_limits(
    options: Mapping[str, Any],
) -> tuple[dict[LimitName, float], FloatArray | None]:
    """Return the limits by their names, and the costs."""
    asked = {name: options[name] for name in _OPTIONS if options.get(name) is not None}
    for name, value in asked.items():
        if name != "max_cost":
            check_share(value, name, _EXAMPLES[name])
    if not asked and options.get("cost") is None:
        raise TypeError(f"name a limit, one of {', '.join(_OPTIONS)}, or pass cost=")
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
            ends = f"above {costs.min():g} and below {costs.max():g}, the least and largest cost"
            raise ValueError(f"max_cost must be {ends}, got {asked['max_cost']:g}")
    return {_OPTIONS[name]: float(value) for name, value in asked.items()}, costs


def _event(
    logits: Input,
    labels: Input,
    positive: int | str | None,
    data: Mapping[str, Any],
    names: Sequence[str] | None,
    *,
    answers: bool,
) -> tuple[FloatArray, FloatArray | BoolArray, str | None]:
    """Return the probability of the event of each example, whether it happened, and its name."""
    if answers:
        return *answers_from(logits, labels, **data)[:2], None
    if data["confidence"] is not None or data["outcome"] is not None:
        if positive is not None:
            raise TypeError("positive= is a class: confidence= and outcome= have none")
        return *pairs_from(logits, labels, **data)[:2], None
    values, name = (logits, "logits") if data["probs"] is None else (data["probs"], "probs")
    if values is None:
        raise TypeError(f"nothing to find a threshold for: pass {FORMS}")
    scores = as_scores(checks.classes_last(values, data["class_dim"]), name)
    classes = 2 if scores.ndim == 1 else scores.shape[-1]
    if positive is None and classes > 2:
        raise TypeError(
            f"of {classes} classes, name the one to find: positive=0 (--positive 0), say; or find "
            "thresholds(...) for all of them"
        )
    names = names or class_names_of(values)
    k: Any = 1 if positive is None else class_number(positive, classes, names)
    checks.check_whole("positive", k, 0)
    if k >= classes:
        raise ValueError(f"positive must be a class in [0, {classes}), got {k}")
    form: Any = {name: data[name] for name in ("probs", *Layout.__annotations__)}
    known = kept_names(names)
    of = known[k] if known is not None and len(known) == classes else None
    return *one_vs_rest(logits, labels, k=k, **form), of


def class_number(
    positive: int | str | None, classes: int, names: Sequence[str] | None
) -> int | None:
    """Return the number of the class to find, which may be named."""
    if not isinstance(positive, str):
        return positive
    known = list(names or map(str, range(classes)))
    if positive not in known:
        raise ValueError(
            f"positive must be a class, one of {comma_separated(known)}, got {positive!r}"
        )
    return known.index(positive)


def _candidates(
    asked: Mapping[LimitName, float], costs: FloatArray | None, claimed: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the thresholds to try, from high to low, and shares of the error probability.

    They must not depend on the examples, unless all limits hold up to, or from, some threshold on.
    """
    if "error" in asked:
        return threshold_grid(asked["error"])
    middle = None if "precision" not in asked else 1 - asked["precision"]
    if middle is None and "cost" in asked:
        assert costs is not None
        alarm, miss = costs[0, 1] - costs[0, 0], costs[1, 0] - costs[1, 1]
        middle = float(miss / (alarm + miss))  # flagging pays from 1 - this on
    if middle is not None:
        return threshold_grid(middle, RARE_REACH)
    grid = _between_scores(claimed)
    return grid, np.ones(len(grid))


def _between_scores(scores: FloatArray) -> FloatArray:
    """Return the thresholds halfway between scores, so that no last digit decides, and 0."""
    ranked = np.unique(scores)[::-1]
    return np.append(ranked[1:] + (ranked[:-1] - ranked[1:]) / 2, 0.0)


def _as_held(grid: FloatArray, values: Input) -> FloatArray:
    """Thresholds in the dtype of the confidences, to which ``confidence >= t`` rounds them."""
    if values is None:
        return grid
    confidence = as_scores(values, "confidence")
    if isinstance(confidence, Tensor):
        return as_float64(torch.from_numpy(grid).to(confidence.dtype))
    return as_float64(grid.astype(confidence.dtype))
