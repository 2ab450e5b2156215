"""Prediction sets with a guaranteed coverage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, overload

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
from calibrant._core.class_names import numbered
from calibrant._core.showing import as_axes, as_html, frame, one_line
from calibrant.decide.probabilities import check_share, in_form_of, probabilities
from calibrant.metrics.reductions import Input

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

Score = Literal["lac", "aps", "raps"]
"""Nonconformity of an example and a class.

- ``lac``: minus the probability of the class;
- ``aps``: the probability of all classes before it, from the most probable on, and a random part
  of its own (Romano et al. 2020), less one;
- ``raps``: as ``aps``, and 0.01 for each rank after the fifth (Angelopoulos et al. 2021).

The papers' scores are larger by one. They cannot tell 1 - 1e-17 from 1, and with probabilities
that are surer than that every set would hold all classes.
"""
PENALTY, FREE_RANKS = 0.01, 5
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
        A class is in the set when its score is at most this; inf for all classes.
    score : {"lac", "aps", "raps"}
    coverage : float
    n, classes : int
        Number of examples behind it, and of their classes.
    seed : int
    mean_size : float
        Mean number of classes in the sets of these examples.
    """

    limit: float
    score: Score
    coverage: float
    n: int
    classes: int
    seed: int
    mean_size: float

    def __repr__(self) -> str:
        limit = f"score {self.score}, limit {self.limit:.4g}"
        size = f"mean size {self.mean_size:.2f}"
        counted = f"{self.n:,} examples of {self.classes} classes"
        return one_line(self, f"coverage {100 * self.coverage:g} %", limit, size, counted)

    def promise(self) -> str:
        """Return what is guaranteed, in words."""
        share = f"{100 * self.coverage:g} %"
        return f"The set of a new example holds its true class in at least {share} of cases."

    def _repr_html_(self) -> str:
        return as_html(self)

    def to_frame(self) -> pd.DataFrame:
        """Return a frame of one row with all attributes. Needs pandas."""
        return frame([asdict(self)])

    def state(self) -> dict[str, Any]:
        """Return the attributes for JSON: None stands for a limit of infinity."""
        return {**asdict(self), "limit": self.limit if math.isfinite(self.limit) else None}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ConformalSets:
        """Make sets of what :meth:`state` returned."""
        names = [field.name for field in fields(cls)]
        if not isinstance(state, Mapping) or set(state) != set(names):
            raise ValueError(f"sets have the attributes {', '.join(names)}, got {state!r:.200}")
        limit = math.inf if state["limit"] is None else state["limit"]
        check_choice("score", state["score"], get_args(Score))
        check_share(state["coverage"], "coverage", "0.9 means 90 %")
        for name, least in (("n", 1), ("classes", 1), ("seed", 0)):
            checks.check_whole(name, state[name], least)
        if not isinstance(limit, (int, float)) or math.isnan(limit):
            raise ValueError(f"limit must be a number or None, got {limit!r:.60}")
        size = state["mean_size"]
        if not isinstance(size, (int, float)) or not 0 <= size <= state["classes"]:
            raise ValueError(f"mean_size must be from 0 to classes, got {size!r:.60}")
        return cls(**{**state, "limit": limit})

    @overload
    def sets(self, logits: Tensor, *, nonempty: bool = False) -> Tensor: ...
    @overload
    def sets(self, logits: ArrayLike, *, nonempty: bool = False) -> BoolArray: ...
    @overload
    def sets(self, *, probs: Tensor, nonempty: bool = False) -> Tensor: ...
    @overload
    def sets(self, *, probs: ArrayLike, nonempty: bool = False) -> BoolArray: ...
    def sets(
        self, logits: Input = None, *, probs: Input = None, nonempty: bool = False
    ) -> Tensor | BoolArray:
        """Membership of each class in the set of each row, ``(..., classes)`` of bool.

        Input as for :func:`conformal`; a tensor for a tensor. ``nonempty`` puts the most probable
        class into sets that are empty: this can only raise the coverage.
        """
        rows, scores = probabilities(logits, probs)
        if rows.shape[-1] != self.classes:
            raise ValueError(f"conformal had {self.classes} classes, got {rows.shape[-1]}")
        least = 0.0
        if logits is None:  # a stored 0, or 1 for its complement, may be as large as this
            info = checks.float_info(scores)
            least = float(info.eps if scores.ndim == 1 else info.tiny * info.eps)
        limit = _loosened(self.limit, scores)
        members = _class_scores(rows, self.score, self.seed, least) <= limit
        if nonempty:  # every other set holds the most probable class already
            np.put_along_axis(members, rows.argmax(-1)[..., None], True, -1)
        return in_form_of(scores, members)

    def sizes(self, logits: Input = None, labels: Input = None, *, probs: Input = None) -> SetSizes:
        """Return how many sets have which size, and with labels how many hold the true class.

        Input as for :func:`conformal`; labels of -100 leave their example out.
        """
        examples: dict[str, Any] = {"logits": logits} if probs is None else {"probs": probs}
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
    ) -> Axes:
        """Draw the sizes of the sets of some examples, and with labels how many miss their class.

        Input as for :meth:`sizes`. Needs matplotlib.
        """
        return self.sizes(logits, labels, probs=probs).plot(ax)


def conformal(
    logits: Input = None,
    labels: Input = None,
    *,
    probs: Input = None,
    coverage: float = 0.9,
    score: Score = "aps",
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
    examples and over draws of the n examples, not a guarantee for each class or each kind of input,
    and the n examples must not be those on which the model or its calibrator was fitted.

    Parameters
    ----------
    logits : (..., classes), or (n,) log-odds, of held-out examples
    labels : (...) integers, -100 ignored
    probs : (..., classes), or (n,) for P(y = 1), in place of logits
    coverage : float in (0, 1)
    score : {"lac", "aps", "raps"}
        ``lac`` for the smallest sets, of which those of hard examples are too small or empty;
        ``aps`` for sizes that follow the difficulty; ``raps`` for many classes.
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
    checks.check_shapes(rows, targets)
    checks.check_labels(targets, rows.shape[-1])
    kept = targets != checks.IGNORED
    checks.check_some(int(kept.sum()))
    of_classes = _class_scores(rows[kept], score, seed)
    own = np.take_along_axis(of_classes, targets[kept][:, None], -1)[:, 0]
    limit = _loosened(_limit(own, coverage), scores)
    size = float((of_classes <= _loosened(limit, scores)).sum(-1).mean())
    return ConformalSets(limit, score, coverage, len(own), rows.shape[-1], seed, size)


def _limit(scores: FloatArray, coverage: float) -> float:
    n = len(scores)
    rank = math.ceil((n + 1) * coverage - 1e-9)  # 100 * 0.55 is a little more than 55
    if rank > n:
        warn(
            f"{n:,} examples cannot show a coverage of {coverage:g}; every set holds all classes: "
            f"use at least {math.ceil(coverage / (1 - coverage) - 1e-9):,} examples",
            stacklevel=4,
        )
        return math.inf
    return float(np.partition(scores, rank - 1)[rank - 1])


def _loosened(limit: float, scores: Logits) -> float:
    """Raise the limit by the rounding of scores in the precision of the input."""
    eps = float(checks.float_info(scores).eps)  # a NumPy number would round the limit to its dtype
    return limit + max(SLACK, eps) * abs(limit)


def _class_scores(rows: FloatArray, score: Score, seed: int, least: float = 0.0) -> FloatArray:
    """Score of every class of every row, ``(..., classes)``, with zeros taken for ``least``."""
    probs = np.maximum(rows, least)
    if score == "lac":
        return -probs
    order = np.argsort(-probs, axis=-1, kind="stable")
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
