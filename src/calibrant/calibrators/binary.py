"""Maps of P(y = 1), for two classes only: logistic regressions of the log-odds, and Venn-Abers."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calibrant._core.checks import BoolArray, FloatArray, Values
from calibrant._core.solve import check_time
from calibrant.calibrators.confidence_maps import MAX_SLOPE, _fit_logistic
from calibrant.calibrators.logpartition import LARGEST_GAP
from calibrant.calibrators.piecewise import BEYOND, _at_place, _place
from calibrant.calibrators.top_label import TopLabelMap

_Point: TypeAlias = tuple[float, float]

_MAX_SQUARED_ODDS = 10.0  # log-odds at which the square is cut: a chance of 1 in 22,000
_VENN_ABERS_SIZE = 10
"""Parameters that Venn-Abers counts for; in truth its steps grow with the examples."""


class QuadraticScaling(TopLabelMap):
    r"""A quadratic for the log-odds of class 1: :math:`x' = a x^2 + b x + c`.

    It is right where the log-odds of both classes are normal, with different variances. The mean
    negative log-likelihood has a ridge towards :math:`(0, 1, 0)`,

    .. math:: \frac1n \left(100\, a^2 + (b - 1)^2\right),

    one example's worth at :math:`x = 10`, where log-odds are cut: forests and naive Bayes are as
    sure as that without a reason, and a square would let these examples decide the fit. The curve
    falls on one side of its vertex. For two classes only.

    Attributes
    ----------
    line_ : (3,) Tensor
        :math:`a`, :math:`b` and :math:`c`.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> odds = 2 * rng.normal(size=20_000)
    >>> truth = 0.2 * odds**2 + odds - 1
    >>> labels = (rng.random(20_000) < 1 / (1 + np.exp(-truth))).astype(int)
    >>> QuadraticScaling().fit(odds, labels).line_.numpy().round(1)
    array([ 0.2,  1. , -1. ], dtype=float32)
    """

    name = "quadratic"
    aliases = ("quadratic_scaling",)
    part_of_auto = True
    two_classes_only = True
    tempered = False
    parameter_count = 3
    limit = _MAX_SQUARED_ODDS

    def __init__(self) -> None:
        super().__init__(keep_argmax=False)
        self._store(line_=torch.tensor([0.0, 1.0, 0.0]))

    def _fit_map(self, odds: FloatArray, outcome: BoolArray, weight: FloatArray) -> None:
        inputs = np.stack([odds * odds, odds], -1)
        prior: Any = {
            "start": (0.0, 1.0),
            "ridge": (_MAX_SQUARED_ODDS**2, 1.0),
            "lowest": -MAX_SLOPE,
        }
        result = _fit_logistic(inputs, outcome, weight, **prior)
        self._store(line_=self._keep(result, len(odds)))

    def _map(self, odds: Tensor) -> Tensor:
        line = self.line_.to(odds.dtype)
        return torch.stack([odds * odds, odds], -1) @ line[:2] + line[2]


class RobustSigmoid(TopLabelMap):
    r"""A line for the log-odds of class 1 that bends where they are large.

    .. math:: x' = a\,(x - \operatorname{asinh} x) + b \operatorname{asinh} x + c

    with :math:`a, b \ge 0`: the slope is :math:`b` at :math:`x = 0` and approaches :math:`a` for
    large :math:`|x|`, where :math:`\operatorname{asinh} x` grows like a logarithm. With
    :math:`a = b` it is :class:`SigmoidScaling`, whose one slope must serve both the middle and the
    saturated scores of forests, boosting and naive Bayes. The mean negative log-likelihood has a
    ridge :math:`\frac1n ((a - 1)^2 + (b - 1)^2)`, one example's worth. For two classes only. This
    is calibrant's own method.

    Attributes
    ----------
    line_ : (3,) Tensor
        :math:`a`, :math:`b` and :math:`c`.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> truth = 2 * rng.normal(size=20_000)
    >>> labels = (rng.random(20_000) < 1 / (1 + np.exp(-truth))).astype(int)
    >>> fitted = RobustSigmoid().fit(np.sinh(truth), labels)  # too sure, the more so the surer
    >>> fitted.line_
    tensor([ 0.01...,  0.99..., -0.00...])
    """

    name = "robust_sigmoid"
    aliases = ("robust_platt",)
    part_of_auto = True
    two_classes_only = True
    tempered = False
    parameter_count = 3

    def __init__(self) -> None:
        super().__init__(keep_argmax=False)
        self._store(line_=torch.tensor([1.0, 1.0, 0.0]))

    def _fit_map(self, odds: FloatArray, outcome: BoolArray, weight: FloatArray) -> None:
        inputs = self._inputs(torch.from_numpy(odds)).numpy()
        result = _fit_logistic(inputs, outcome, weight, ridge=(1.0, 1.0))
        self._store(line_=self._keep(result, len(odds)))

    def _map(self, odds: Tensor) -> Tensor:
        line = self.line_.to(odds.dtype)
        return self._inputs(odds) @ line[:2] + line[2]

    def _inputs(self, odds: Tensor) -> Tensor:
        bent = torch.asinh(odds)
        return torch.stack([odds - bent, bent], -1)


class VennAbers(TopLabelMap):
    r"""Inductive Venn-Abers prediction (Vovk, Petej and Fedorova 2015).

    An isotonic regression is fitted with the new example labelled 0, and one with it labelled 1.
    Their values at the new example are :math:`p_0 \le p_1`, and

    .. math:: p = \frac{p_1}{1 - p_0 + p_1}.

    If the examples are exchangeable, the one of :math:`p_0` and :math:`p_1` that belongs to the
    true label is calibrated, whatever the model. Unlike isotonic regression it never claims 0
    or 1. Log-odds are compared in single precision. A new example weighs as much as the mean
    example of the fit. For two classes only.

    Attributes
    ----------
    edges_, levels_ : (2, m) and (2, m + 1) Tensor
        Log-odds between steps, and :math:`1 - p_0` (first row, of the log-odds of class 0) and
        :math:`p_1` there.

    Examples
    --------
    >>> odds = np.linspace(-2, 2, 60)
    >>> labels = np.array([0] * 20 + [0, 1] * 10 + [1] * 20)
    >>> fitted = VennAbers().fit(odds, labels)
    >>> low, high = fitted.predict_bounds(np.array([-2.0, 0.0, 2.0]))
    >>> low.round(2), high.round(2)
    (array([0.  , 0.45, 0.95]), array([0.05, 0.55, 1.  ]))
    >>> fitted.predict_proba(np.array([-2.0, 0.0, 2.0])).round(2)
    array([0.04, 0.5 , 0.96])
    """

    name = "venn_abers"
    aliases = ("ivap", "vennabers")
    summary = "isotonic fits with a new example in either class (Venn-Abers)"
    two_classes_only = True
    tempered = False
    parameter_count = _VENN_ABERS_SIZE
    limit = LARGEST_GAP
    learned_shapes = "edges_ classes cuts; levels_ classes cuts+1"
    positive = (*TopLabelMap.positive, "levels_")

    def __init__(self) -> None:
        super().__init__(keep_argmax=False)
        self._store(edges_=torch.zeros(2, 0), levels_=torch.full((2, 1), 0.5))

    def predict_bounds(self, logits: Values) -> tuple[Any, Any]:
        """The probabilities :math:`p_0` and :math:`p_1` of class 1, each of the rows' shape."""
        scores = self._checked(logits)
        rows = self._wide(scores)
        with torch.no_grad():
            miss, hit = self._levels(rows[..., 1] - rows[..., 0]).unbind(-1)
        if isinstance(logits, Tensor):
            return 1 - miss, hit
        return (1 - miss).cpu().numpy(), hit.cpu().numpy()

    def _fit_map(self, odds: FloatArray, outcome: BoolArray, weight: FloatArray) -> None:
        weight, single = weight / weight.mean(), odds.astype(np.float32)
        curves = [
            _venn_abers_steps(-single, ~outcome, weight),
            _venn_abers_steps(single, outcome, weight),
        ]
        width = max(len(edges) for edges, _ in curves)
        edges, levels = zip(*curves, strict=True)
        self._store(
            edges_=np.stack([_widened(x, width, BEYOND) for x in edges]),
            levels_=np.stack([_widened(x, width + 1, 1.0) for x in levels]),
        )
        self.solution_ = None

    def _levels(self, odds: Tensor) -> Tensor:
        """``(...) -> (..., 2)``: :math:`1 - p_0` and :math:`p_1`."""
        both = torch.stack([-odds, odds], -1).float()  # as in the fit
        return _at_place(self.levels_.to(odds.dtype), _place(both, self.edges_))

    def _map(self, odds: Tensor) -> Tensor:
        miss, hit = self._levels(odds).log().unbind(-1)
        return hit - miss


def _venn_abers_steps(
    odds: NDArray[np.float32], outcome: BoolArray, weight: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """The value :math:`p_1` of a new example as a function of its log-odds.

    Returns edges ``(m,)`` and levels ``(m + 1,)`` of steps ``(low, high]``: between two log-odds of
    the fit it is that of the upper one, since a 1 in between joins the same steps, and 1 above all.
    """
    value, group = np.unique(odds, return_inverse=True)
    mass, hits = (np.bincount(group, w).astype(np.float64) for w in (weight, weight * outcome))
    level = np.append(_labelled_one(hits, mass), 1.0)
    last = np.append(np.diff(level) > 0, True)  # of equal levels
    return value[last[:-1]].astype(np.float64), level[last]


def _labelled_one(hits: FloatArray, mass: FloatArray) -> FloatArray:
    r"""Isotonic regression at each of ``(m,)`` groups, had it one more example, with outcome 1.

    The regression is the slope of the lower convex hull of the points :math:`P_i`, cumulated
    masses and hits. One more hit in group :math:`i` moves all points before it by :math:`(-1, -1)`,
    relative to the others. From group to group one point more is moved. The slope that is wanted,
    that of the edge over the group, never falls, so the left end of this edge only changes to the
    point moved last, and each point enters and leaves the hull once (after Vovk et al. 2015).
    """
    points = list(zip(np.cumsum(mass).tolist(), np.cumsum(hits).tolist(), strict=True))
    hull: list[_Point] = []  # from right to left
    for point in [*reversed(points), (-1.0, -1.0)]:
        _push(hull, point)
    result = np.empty(len(points))
    for i, (x, y) in enumerate(points):
        if i % 4096 == 0:
            check_time()
        (x0, y0), (x1, y1) = hull[-1], hull[-2]
        result[i] = (y1 - y0) / (x1 - x0)
        moved = x - 1, y - 1
        if _turn(hull[-1], hull[-2], moved) < 0:  # below the edge, or its right end was moved
            hull.pop()
            _push(hull, moved)
    return result


def _push(hull: list[_Point], point: _Point) -> None:
    """Add a point to the left of a lower hull, and drop those that are above it now."""
    while len(hull) > 1 and _turn(point, hull[-1], hull[-2]) <= 0:
        hull.pop()
    hull.append(point)


def _turn(a: _Point, b: _Point, c: _Point) -> float:
    """Positive where c is above the line from a to b."""
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def _widened(row: FloatArray, width: int, value: float) -> FloatArray:
    return np.pad(row, (0, width - len(row)), constant_values=value)
