"""Prediction sets with a guaranteed coverage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, get_args, overload

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from calibrant._core import checks
from calibrant._core.checks import (
    BoolArray,
    FloatArray,
    IntArray,
    Logits,
    check_choice,
    warn,
)
from calibrant._core.class_names import as_array, class_names_of, class_order, numbered
from calibrant._core.messages import comma_separated
from calibrant._core.showing import as_axes, as_html, frame, one_line
from calibrant.decide.probabilities import _in_form_of, check_share, probabilities
from calibrant.metrics.reductions import Input

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from typing_extensions import Unpack

Score = Literal["lac", "aps", "raps", "ordered"]
"""Nonconformity of an example and a class.

- ``lac``: minus the probability of the class;
- ``aps``: the probability of all classes before it, from the most probable on, and a random part
  of its own (Romano et al. 2020), less one;
- ``raps``: as ``aps``, and 0.01 for each rank after the fifth (Angelopoulos et al. 2021);
- ``ordered``: as ``aps``, for classes with an order: from the most probable one on, the set grows
  by the more probable of its two neighbours, so that no class between two others is missing (Lu et
  al. 2022).

The papers' scores are larger by one. They cannot tell 1 - 1e-17 from 1, and with probabilities
that are surer than that every set would hold all classes.
"""
PENALTY, FREE_RANKS = 0.01, 5
_EACH = {"class": "classes", "group": "groups"}
SLACK = 1e-6
"""Part of a limit by which a score may exceed it: the last digits of probabilities depend on the
precision and on the batch, and must not decide where many of them are alike."""
CELLS = 50
"""Probabilities per unit of their logarithm that the random part tells apart."""
FLOOR = 1e-30
"""Below this it does not; float32 may have rounded them to zero."""


class SetSizes(NamedTuple):
    """Prediction sets by their size, each ``(sizes,)``."""

    size: IntArray
    share: FloatArray
    """Share of the examples."""
    covered: FloatArray
    """Share of the examples whose set holds the true class; NaN without labels."""
    promised: float

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the shares as by :func:`calibrant.show.figures.set_size_plot`."""
        return as_axes(self, ax)


@dataclass(frozen=True)
class ConformalSets:
    """Prediction sets with the coverage asked for; made by :func:`conformal`.

    Attributes
    ----------
    limit : float
        A class is in the set when its score is at most this; inf for all classes. With limits for
        each class or group, the least of them.
    score : {"lac", "aps", "raps", "ordered"}
    coverage : float
    n, classes : int
        Number of examples behind it, and of their classes.
    seed : int
    mean_size : float
        Mean number of classes in the sets of these examples.
    by : {None, "class", "group"}
        What the coverage holds for, beside all examples together.
    limits : dict
        Limits by the class, its number as text if it has no name, or by the group.
    weighted : pair of tuples, optional
        With weights, the scores of the examples in rising order, and the sums of their weights up
        to each.
    """

    limit: float
    score: Score
    coverage: float
    n: int
    classes: int
    seed: int
    mean_size: float
    by: Literal["class", "group"] | None = None
    limits: dict[str, float] = field(default_factory=dict)
    weighted: tuple[tuple[float, ...], tuple[float, ...]] | None = None

    def __repr__(self) -> str:
        limit = f"score {self.score}, limit {self.limit:.4g}"
        if self.by is not None:
            limit = f"score {self.score}, a limit for each of {len(self.limits)} {_EACH[self.by]}"
        size = f"mean size {self.mean_size:.2f}"
        counted = f"{self.n:,} examples of {self.classes} classes"
        return one_line(self, f"coverage {100 * self.coverage:g} %", limit, size, counted)

    def promise(self) -> str:
        """Return what is guaranteed, in words."""
        share = f"{100 * self.coverage:g} %"
        each = "" if self.by is None else f", for each {self.by}"
        return f"The set of a new example holds its true class in at least {share} of cases{each}."

    _repr_html_ = as_html

    @property
    def fewest(self) -> int:
        """Number of examples from which on sets are smaller than all classes."""
        return math.ceil(self.coverage / (1 - self.coverage) - 1e-9)

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with a row for each limit. Needs pandas."""
        row = {k: v for k, v in asdict(self).items() if k not in ("limits", "weighted")}
        return frame([row | {"of": k, "limit": v} for k, v in self.limits.items()] or [row])

    def state(self) -> dict[str, Any]:
        """Return the attributes for JSON: None stands for a limit of infinity."""
        limits = {name: _finite(limit) for name, limit in self.limits.items()}
        return {**asdict(self), "limit": _finite(self.limit), "limits": limits}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ConformalSets:
        """Make sets of what :meth:`state` returned."""
        names = [field.name for field in fields(cls)]
        if not isinstance(state, Mapping) or set(state) != set(names):
            raise ValueError(f"sets have the attributes {', '.join(names)}, got {state!r:.200}")
        check_choice("score", state["score"], get_args(Score))
        check_share(state["coverage"], "coverage", "0.9 means 90 %")
        for name, least in (("n", 1), ("classes", 1), ("seed", 0)):
            checks.check_whole(name, state[name], least)
        limits = {"limit": state["limit"], **state["limits"]}
        limits = {name: math.inf if limit is None else limit for name, limit in limits.items()}
        for limit in limits.values():
            if not isinstance(limit, (int, float)) or math.isnan(limit):
                raise ValueError(f"limit must be a number or None, got {limit!r:.60}")
        size = state["mean_size"]
        if not isinstance(size, (int, float)) or not 0 <= size <= state["classes"]:
            raise ValueError(f"mean_size must be from 0 to classes, got {size!r:.60}")
        if state["by"] not in (None, "class", "group"):
            raise ValueError(f"by must be None, class or group, got {state['by']!r:.60}")
        weighted = state["weighted"]
        if weighted is not None:
            scores, sums = (tuple(map(float, values)) for values in weighted)
            if len(scores) != len(sums):
                raise ValueError("weighted must have as many scores as sums of weights")
            weighted = scores, sums
        lowest = limits.pop("limit")
        return cls(**{**state, "limit": lowest, "limits": limits, "weighted": weighted})

    @overload
    def sets(self, logits: Tensor, **options: Unpack[_Options]) -> Tensor: ...
    @overload
    def sets(self, logits: ArrayLike, **options: Unpack[_Options]) -> BoolArray: ...
    @overload
    def sets(self, *, probs: Tensor, **options: Unpack[_Options]) -> Tensor: ...
    @overload
    def sets(self, *, probs: ArrayLike, **options: Unpack[_Options]) -> BoolArray: ...
    def sets(
        self,
        logits: Input = None,
        *,
        probs: Input = None,
        group: ArrayLike | None = None,
        weight: ArrayLike | None = None,
        nonempty: bool = False,
    ) -> Tensor | BoolArray:
        """Membership of each class in the set of each row, ``(..., classes)`` of bool.

        Input as for :func:`conformal`; a tensor for a tensor. Of sets by group, ``group`` ``(...)``
        has those of the rows; of weighted sets, ``weight`` ``(...)`` has the same ratio of
        densities for the rows as for the examples of the fit. ``nonempty`` puts the most probable
        class into sets that are empty: this can only raise the coverage.
        """
        rows, scores = probabilities(logits, probs)
        if rows.shape[-1] != self.classes:
            raise ValueError(f"conformal had {self.classes} classes, got {rows.shape[-1]}")
        least = 0.0
        if logits is None:  # a stored 0, or 1 for its complement, may be as large as this
            info = checks.float_info(scores)
            least = float(info.eps if scores.ndim == 1 else info.tiny * info.eps)
        limit = self._limits(rows.shape[:-1], group, weight)
        if self.by == "class":  # in the order of the columns of a data frame
            names = class_names_of(logits if probs is None else probs)
            places = class_order(list(self.limits), names, "the data frame")
            limit = limit if places is None else limit[np.argsort(places)]
        limit = _loosened(limit, scores)
        members = _class_scores(rows, self.score, self.seed, least) <= limit
        if nonempty:  # every other set holds the most probable class already
            np.put_along_axis(members, rows.argmax(-1)[..., None], True, -1)
        return _in_form_of(scores, members)

    def _limits(
        self, shape: tuple[int, ...], group: ArrayLike | None, weight: ArrayLike | None
    ) -> FloatArray:
        """Return limits that go with scores ``(..., classes)``."""
        for name, values, wanted in (
            ("group", group, self.by == "group"),
            ("weight", weight, self.weighted is not None),
        ):
            if (values is not None) != wanted:
                raise TypeError(f"{name}= is {'missing' if wanted else 'for other sets'}")
        if self.by == "class":
            return np.array(list(self.limits.values()))
        if group is not None:
            cells = checks.spread(as_array(group).astype(str), shape, "group")
            names, at = np.unique(cells, return_inverse=True)
            if unknown := [name for name in names if name not in self.limits]:
                known = comma_separated(list(self.limits))
                raise ValueError(f"there is no limit for the group {unknown[0]}; known are {known}")
            return np.array([self.limits[name] for name in names])[at.reshape(shape)][..., None]
        if self.weighted is not None:
            ratios = _ratios(weight, shape)
            return _weighted_limits(self.weighted, ratios, self.coverage)[..., None]
        return np.asarray(self.limit)

    def sizes(
        self,
        logits: Input = None,
        labels: Input = None,
        *,
        probs: Input = None,
        **options: Unpack[_Options],
    ) -> SetSizes:
        """Return how many sets have which size, and with labels how many hold the true class.

        Input as for :func:`conformal`, and options of :meth:`sets`; labels of -100 leave their
        example out.
        """
        examples: dict[str, Any] = {"logits": logits} if probs is None else {"probs": probs}
        examples |= options
        members = np.asarray(torch.as_tensor(self.sets(**examples)).cpu())
        members = members.reshape(-1, self.classes)
        right = np.full(len(members), math.nan)
        if labels is not None:
            targets = checks.as_labels(numbered(labels, logits, probs)).reshape(-1)
            checks.check_labels(targets, self.classes)
            kept = targets != checks.IGNORED
            members, targets = members[kept], targets[kept]
            right = np.take_along_axis(members, targets[:, None], -1)[:, 0].astype(np.float64)
        checks.check_some(len(members))
        number = members.sum(-1)
        every = np.arange(number.min(), number.max() + 1)
        share, covered = (
            np.bincount(number - every[0], x, len(every)) / len(members)
            for x in (np.ones(len(members)), right)
        )
        return SetSizes(every, share, covered, self.coverage)

    def plot(
        self,
        logits: Input = None,
        labels: Input = None,
        *,
        probs: Input = None,
        ax: Axes | None = None,
        **options: Unpack[_Options],
    ) -> Axes:
        """Draw the sizes of the sets of some examples, and with labels how many miss their class.

        Input as for :meth:`sizes`. Needs matplotlib.
        """
        return self.sizes(logits, labels, probs=probs, **options).plot(ax)


@checks.warnings_at_caller()
def conformal(
    logits: Input = None,
    labels: Input = None,
    *,
    probs: Input = None,
    coverage: float = 0.9,
    score: Score = "aps",
    by: ArrayLike | Literal["class"] | None = None,
    weight: ArrayLike | None = None,
    seed: int = 0,
) -> ConformalSets:
    r"""Prediction sets with a guaranteed coverage, by split conformal prediction.

    Of the scores :math:`s_i` of the n examples with their own labels, the set takes the classes
    whose score is at most the :math:`\lceil (n + 1)(1 - \alpha) \rceil`-th smallest, with
    :math:`1 - \alpha` the coverage. For a new example that is exchangeable with them

    .. math:: 1 - \alpha \le P(y \in \text{set}) \le 1 - \alpha + \frac{1}{n + 1} ,

    the upper side where no two scores are equal; with many equal scores, as of calibrators that
    give few different values, the coverage may be well above. The lower side holds for any
    probabilities: better calibrated ones give smaller sets, not truer ones. It is an average over
    examples and over draws of the n examples, which must not be those on which the model or its
    calibrator was fitted.

    The average is over all examples. With ``by`` it holds for the examples of each class, or of
    each group, by a limit of their own (Mondrian prediction, Vovk et al. 2005). With weights
    :math:`w_i`, the ratio of the densities of inputs where the sets are used and where the examples
    come from, it holds there (Tibshirani et al. 2019): the limit of a new example of weight w is
    the score at which the weights of the examples add up to :math:`(1 - \alpha)(\sum_i w_i + w)`.

    Parameters
    ----------
    logits : (..., classes), or (n,) log-odds, of held-out examples
    labels : (...) integers, -100 ignored
    probs : (..., classes), or (n,) for P(y = 1), in place of logits
    coverage : float in (0, 1)
    score : {"lac", "aps", "raps", "ordered"}
        ``lac`` for the smallest sets, of which those of hard examples are too small or empty;
        ``aps`` for sizes that follow the difficulty; ``raps`` for many classes; ``ordered`` for
        grades, whose sets have no gap.
    by : "class" or (...) groups, optional
        What the coverage is to hold for. Groups and weights may also be one for each row.
    weight : (...), optional
        Ratio of densities of each example, for a change of the inputs; any scale will do.
    seed : int
        Of the random part of ``aps`` and ``raps``. The same row always gets the same set.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> logits = 2 * rng.normal(size=(3000, 10))
    >>> labels = (logits + rng.gumbel(size=logits.shape)).argmax(-1)
    >>> fitted = conformal(logits[:1000], labels[:1000], coverage=0.9)
    >>> sets = fitted.sets(logits[1000:])
    >>> print(sets[np.arange(2000), labels[1000:]].mean().round(1))
    0.9
    """
    check_share(coverage, "coverage", "0.9 means 90 %")
    check_choice("score", score, get_args(Score))
    if labels is None:
        raise TypeError("labels are missing: pass (logits, labels) or (probs=..., labels=...)")
    (rows, scores) = probabilities(logits, probs)
    targets = checks.as_labels(numbered(labels, logits, probs))
    checks.check_shapes(rows, targets, "logits" if probs is None else "probs")
    checks.check_labels(targets, rows.shape[-1])
    kept = targets != checks.IGNORED
    checks.check_some(int(kept.sum()))
    of_classes, truth = _class_scores(rows[kept], score, seed), targets[kept]
    own = np.take_along_axis(of_classes, truth[:, None], -1)[:, 0]
    made = ConformalSets(math.inf, score, coverage, len(own), rows.shape[-1], seed, 0.0)
    group = ratio = None
    if by is not None and weight is not None:
        raise TypeError("pass by= or weight=, not both")
    if weight is not None:
        ratio = _ratios(weight, targets.shape)[kept]
        made = _with_weights(made, _loosened(own, scores), ratio)
    else:
        names, cells = [""], np.full(len(own), "")
        if isinstance(by, str):
            if by != "class":
                raise ValueError(f'by must be "class", or the group of each example, got {by!r}')
            columns = class_names_of(logits if probs is None else probs)
            names = columns or [str(k) for k in range(rows.shape[-1])]
            cells = np.array(names)[truth]
        elif by is not None:
            group = cells = checks.spread(as_array(by), targets.shape, "by")[kept].astype(str)
            names = np.unique(cells).tolist()
        limits = {name: _limit(own[cells == name], coverage) for name in names}
        _warn_of_few({k: int((cells == k).sum()) for k, v in limits.items() if v == math.inf}, made)
        limits = {name: float(_loosened(limit, scores)) for name, limit in limits.items()}
        made = replace(made, limit=min(limits.values()))
        if by is not None:
            made = replace(made, by="class" if group is None else "group", limits=limits)
    members = of_classes <= _loosened(made._limits((len(own),), group, ratio), scores)
    return replace(made, mean_size=float(members.sum(-1).mean()))


def _with_weights(sets: ConformalSets, scores: FloatArray, ratio: FloatArray) -> ConformalSets:
    """Return sets with the table of scores and weights from which limits of new examples follow."""
    if not ratio.any():
        raise ValueError("weight must not be 0 for all labelled examples")
    order = np.argsort(scores)
    table = tuple(scores[order].tolist()), tuple(np.cumsum(ratio[order]).tolist())
    limit = float(_weighted_limits(table, float(ratio.mean()), sets.coverage))
    _warn_of_few({"": len(scores)} if limit == math.inf else {}, sets)
    return replace(sets, limit=limit, weighted=table)


class _Options(TypedDict, total=False):
    group: ArrayLike | None
    weight: ArrayLike | None
    nonempty: bool


def _finite(limit: float) -> float | None:
    return limit if math.isfinite(limit) else None


def _ratios(weight: Any, shape: tuple[int, ...]) -> FloatArray:
    values = checks.as_float64(weight)
    if not (np.isfinite(values) & (values >= 0)).all():
        raise ValueError("weight must be ratios of densities, finite and not negative")
    return checks.spread(values, shape, "weight")


def _limit(scores: FloatArray, coverage: float) -> float:
    n = len(scores)
    rank = math.ceil((n + 1) * coverage - 1e-9)  # 100 * 0.55 is a little more than 55
    return math.inf if rank > n else float(np.partition(scores, rank - 1)[rank - 1])


def _weighted_limits(
    table: tuple[tuple[float, ...], tuple[float, ...]], weight: FloatArray | float, coverage: float
) -> FloatArray:
    """Return the limit for new examples of each weight."""
    scores, sums = map(np.asarray, table)
    wanted = coverage * (sums[-1] + weight) * (1 - 1e-12)
    return np.asarray(np.append(scores, math.inf)[np.searchsorted(sums, wanted)])


def _warn_of_few(cells: Mapping[str, int], sets: ConformalSets) -> None:
    """Warn of cells with too few examples; of all examples by an empty name."""
    if not cells:
        return
    if "" in cells:
        what, effect = f"{cells['']:,} examples", "every set holds all classes"
    else:
        names = comma_separated([f"{name} ({n:,})" for name, n in [*cells.items()][:5]])
        what = f"the examples of {len(cells):,} classes or groups, {names},"
        effect = "their class is in every set, or the sets of their group hold all classes"
    warn(
        f"{what} cannot show a coverage of {sets.coverage:g}; {effect}: use at least "
        f"{sets.fewest:,} examples"
    )


def _loosened(limit: Any, scores: Logits) -> Any:
    """Raise limits by the rounding of scores in the precision of the input."""
    eps = float(checks.float_info(scores).eps)  # a NumPy number would round the limit to its dtype
    return limit + max(SLACK, eps) * abs(limit)


def _class_scores(rows: FloatArray, score: Score, seed: int, least: float = 0.0) -> FloatArray:
    """Score of every class of every row, ``(..., classes)``, with zeros taken for ``least``."""
    probs = np.maximum(rows, least)
    if score == "lac":
        return -probs
    order = _outwards(probs) if score == "ordered" else np.argsort(-probs, axis=-1, kind="stable")
    ranked = np.take_along_axis(probs, order, -1)
    # what is left after a class, summed from the least on, keeps its digits where 1 - sum would not
    left = np.cumsum(ranked[..., ::-1], -1)[..., ::-1] - _uniform(rows, seed)[..., None] * ranked
    ranked_scores = -left
    if score == "raps":
        ranked_scores += PENALTY * np.maximum(np.arange(1, rows.shape[-1] + 1) - FREE_RANKS, 0)
    scores = np.empty_like(rows)
    np.put_along_axis(scores, order, ranked_scores, -1)
    return scores


def _uniform(rows: FloatArray, seed: int) -> FloatArray:
    """A number in [0, 1) for each row, hashed from the first digits of its values and the seed.

    A stream of random numbers would give each row that comes alone the same first number. Coverage
    does not depend on the quality of the hash, which only makes the sets small. Rows that differ in
    their last digits, by another precision or batch, must get the same number; rows of a very sure
    model, which differ in the tails only, must not. So the logarithms are rounded.
    """
    odd = np.random.default_rng(seed).integers(2**63, size=rows.shape[-1], dtype=np.uint64) * 2 + 1
    cells = np.round(-CELLS * np.log(np.clip(rows, FLOOR, 1))).astype(np.uint64)
    mixed = (cells * odd).sum(-1, dtype=np.uint64)
    return np.asarray((mixed >> np.uint64(11)) * 2.0**-53)


def _outwards(probs: FloatArray) -> IntArray:
    """Return classes from the most probable on, each time the more probable neighbour of those."""
    classes = probs.shape[-1]
    rows = np.pad(probs.reshape(-1, classes), ((0, 0), (1, 1)), constant_values=-1.0)
    each, order = np.arange(len(rows)), np.empty((len(rows), classes), np.int64)
    low = high = rows.argmax(-1)
    order[:, 0] = low
    for step in range(1, classes):
        down = rows[each, low - 1] >= rows[each, high + 1]
        low, high = low - down, high + ~down
        order[:, step] = np.where(down, low, high)
    return order.reshape(probs.shape) - 1
