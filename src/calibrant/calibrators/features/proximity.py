"""Confidence by how close the features of an example are to those of others."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np
import torch
from scipy.special import expit
from torch import Tensor

from calibrant._core.checks import BoolArray, FloatArray, warn
from calibrant._core.chunks import Examples
from calibrant._core.options import Count, Seed
from calibrant._core.solve import minimise_within
from calibrant.calibrators import top_label
from calibrant.calibrators.base import Calibrator, Context
from calibrant.calibrators.features.group_calibration import _with_prior
from calibrant.calibrators.fit_inputs import _warn_of_constant
from calibrant.calibrators.logpartition import Records, tabulate
from calibrant.calibrators.piecewise import _place
from calibrant.calibrators.scaling import best_sharpness

ProximityMethod = Literal["bin_mean_shift", "density_ratio"]

_MAX_REFERENCE = 5000  # examples at most among which neighbours are searched
_DISTANCES_AT_A_TIME = 1 << 22  # distances that are computed at a time
_CELLS = 128  # cells of the grid of densities, along each side
_PRIOR_EXAMPLES = 10.0  # examples at the confidence as it was that are added to the densities
_MIN_DOUBT = 1e-4  # their confidence is taken to be no nearer to 0 or 1 than this


class ProCal(Calibrator):
    r"""Confidence by proximity to other examples (proximity calibration, Xiong et al. 2023).

    An example far from all others tends to be over-confident. Its proximity is :math:`\exp(-\bar d
    / s)`, where :math:`\bar d` is its mean distance to the nearest other examples of the fit and
    :math:`s` the mean of :math:`\bar d`. Logits are divided by the best single temperature, then
    the top class gets a new confidence and the others keep their proportions.

    ``bin_mean_shift`` cuts the examples into bins of equal size by proximity and maps the log-odds
    of the top class in each by a rising line of its own; each bin also counts all examples with the
    weight of 50. ``density_ratio`` estimates densities :math:`f_1`, :math:`f_0` of (confidence,
    proximity) for right and wrong examples, by Gaussian kernels of width
    :math:`1.06\,\sigma n^{-1/6}` on a grid of 128 x 128 cells:

    .. math:: c' = \frac{n_1 f_1}{n_1 f_1 + n_0 f_0}

    with ten more examples at the confidence as it was everywhere. Neighbours are searched among up
    to 5000 examples of the fit, which are part of the artifact: 10 MB for 512 features. An example
    of the fit is a neighbour of itself when it is predicted.

    Parameters
    ----------
    method : {"bin_mean_shift", "density_ratio"}
        The first had the lower negative log-likelihood on both of our models with features.
    neighbours, bins : int
        The bins are those of ``bin_mean_shift``.
    seed : int
        Of the choice among more than 5000 examples.
    keep_argmax : bool
        Hold other classes below the top one, where its new confidence is lower than theirs.

    Attributes
    ----------
    temperature_, unit_ : scalar Tensor
        The temperature, and the mean distance :math:`s`.
    centre_, reference_ : (width,) and (n, width) Tensor
        Features, minus ``centre_``, among which neighbours are searched.
    learned_ : scalar Tensor
        0 where all examples were right, or all wrong: nothing is changed then.
    masses_, corner_, span_ : Tensors
        Right and wrong examples on the grid ``(2, 129, 129)``, its corner and its size; of
        ``density_ratio``.
    edges_, lines_ : Tensors
        Mean distances between the bins, slopes and offsets ``(bins, 2)``; of ``bin_mean_shift``.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> truth, far = 2 * rng.normal(size=(4000, 5)), rng.random(4000) < 0.3
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> features = rng.normal(size=(4000, 3)) * np.where(far, 9, 1)[:, None]
    >>> logits = truth * np.where(far, 3, 1)[:, None]  # too sure where examples are rare
    >>> fitted = ProCal().fit(logits, labels, features=features)
    >>> near, away = fitted.predict_proba([[2.0, 0, 0, 0, 0]] * 2, [[0.0] * 3, [20.0] * 3])
    >>> bool(near[0] > away[0] + 0.1)
    True
    """

    name = "procal"
    aliases = ("proximity_calibration",)
    summary = "looks at confidence and at how near the known features are"
    keeps_argmax = True
    monotone = True
    needs_features = True
    LIMIT: ClassVar[float] = 5.0  # largest slope and offset of a line
    learned_shapes = "centre_ width; reference_ neighbours width; masses_ = side side"
    positive = (*Calibrator.positive, "unit_", "span_")
    temperature_: Tensor
    unit_: Tensor
    centre_: Tensor
    reference_: Tensor
    learned_: Tensor
    masses_: Tensor
    corner_: Tensor
    span_: Tensor
    edges_: Tensor
    lines_: Tensor

    def __init__(
        self,
        *,
        method: ProximityMethod = "bin_mean_shift",
        neighbours: Count = 10,
        bins: Count = 10,
        seed: Seed = 0,
        keep_argmax: bool = True,
    ) -> None:
        super().__init__()
        self.method = method
        self.neighbours = neighbours
        self.bins = bins
        self.seed = seed
        self.keep_argmax = keep_argmax
        self.keeps_argmax = self.monotone = keep_argmax
        self._forget()

    def _forget(self) -> None:
        """Leave every confidence as it is."""
        self._store(temperature_=1.0, unit_=1.0, learned_=torch.tensor(0))
        self._store(centre_=torch.zeros(0), reference_=torch.zeros(0, 0))
        if self.method == "density_ratio":
            corner, span = torch.zeros(2), torch.ones(2)
            self._store(masses_=torch.zeros(2, 1, 1), corner_=corner, span_=span)
        else:
            lines = torch.tensor([1.0, 0.0]).repeat(self.bins, 1)
            self._store(edges_=torch.zeros(self.bins - 1), lines_=lines)

    def size(self, classes: int) -> int:
        """Widths of the kernels, or lines; and the temperature."""
        return 5 if self.method == "density_ratio" else 2 * self.bins + 1

    def _fit(self, examples: Examples, context: Context) -> None:
        records = tabulate(examples)
        features = self._labelled_features(examples, context)
        self._forget()
        distance = self._distances(features)
        if records.correct.all() or not records.correct.any():
            which = "right" if records.correct[0] else "wrong"
            warn(f"ProCal: all {len(records):,} examples are {which}: nothing is changed")
            return
        _warn_of_constant(type(self).__name__, features)
        sharpness = float(np.exp(best_sharpness(records, warns=True).x[0]))
        unit = float(records.weight @ distance / records.weight.sum()) or 1.0
        self._store(temperature_=1 / sharpness, unit_=unit, learned_=torch.tensor(1))
        odds = top_label.record_odds(records, sharpness)
        if self.method == "density_ratio":
            points = expit(odds), np.exp(-distance / unit)
            axes = _axis(points[0]), _axis(points[1])
            self._store(
                masses_=_density_masses(points, records.correct, records.weight, axes),
                corner_=np.array([axis[0] for axis in axes]),
                span_=np.array([axis[-1] - axis[0] for axis in axes]),
            )
        else:
            self._fit_lines(odds, distance, records)

    def _distances(self, features: Tensor) -> FloatArray:
        """Mean distances of the examples to their neighbours ``(n,)``; learns the reference."""
        centre, count = features.mean(0), len(features)
        features, chosen = features - centre, np.arange(count)
        if count > _MAX_REFERENCE:
            rng = np.random.default_rng(self.seed)
            chosen = np.sort(rng.choice(count, _MAX_REFERENCE, replace=False))
        self._store(centre_=centre, reference_=features[chosen])
        if count == 1:
            return np.zeros(1)
        own = torch.full((count,), -1)
        own[chosen] = torch.arange(len(chosen))
        result = _mean_distances(features, features[chosen], self.neighbours, own)
        return np.asarray(result.double().cpu().numpy())

    def _fit_lines(self, odds: FloatArray, distance: FloatArray, records: Records) -> None:
        order = np.argsort(distance, kind="stable")
        mass = np.cumsum(records.weight[order])
        cuts = mass[-1] * np.arange(1, self.bins) / self.bins
        last = np.searchsorted(mass, cuts * (1 - 1e-12))  # last example of each bin
        edges = torch.from_numpy(distance[order][last]).float()
        bins = _place(torch.from_numpy(distance).float(), edges).numpy()
        inputs, lines = np.stack([odds, np.ones_like(odds)], axis=1), []
        for i in range(self.bins):
            weight = _with_prior(records.weight, bins == i)
            share = weight / weight.sum()
            objective = top_label._confidence_objective(inputs, records.correct, share, 0.0)
            bounds = [(0.0, self.LIMIT), (-self.LIMIT, self.LIMIT)]
            self.solution_ = minimise_within(objective, np.array([1.0, 0.0]), bounds)
            lines.append(self.solution_.x)
        self._store(edges_=edges, lines_=np.stack(lines))

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        assert features is not None
        rows = (features.to(self.centre_.dtype) - self.centre_).reshape(-1, self._width)
        distance = _mean_distances(rows, self.reference_, self.neighbours)
        distance = distance.reshape(*features.shape[:-1], 1)
        tempered = logits / self.temperature_.to(logits.dtype)
        before = top_label._top_odds(tempered)
        odds = torch.where(self.learned_ > 0, self._odds(before, distance), before)
        return top_label._with_log_odds(tempered, odds.to(logits.dtype))

    def _odds(self, before: Tensor, distance: Tensor) -> Tensor:
        """New log-odds ``(..., 1)`` of the top class."""
        if self.method == "density_ratio":
            proximity = torch.exp(-distance / self.unit_).to(before.dtype)
            at = (torch.cat([before.sigmoid(), proximity], -1) - self.corner_) / self.span_
            right, wrong = (_on_grid(mass, at)[..., None] for mass in self.masses_.to(before.dtype))
            return _mixed_odds(right, wrong, before)
        slope, offset = self.lines_[_place(distance, self.edges_)].to(before.dtype).unbind(-1)
        return slope * before + offset


def _mean_distances(rows: Tensor, others: Tensor, count: int, own: Tensor | None = None) -> Tensor:
    """Mean Euclidean distance of each row ``(n, width)`` to its nearest others, ``(n,)``.

    They come from products, so equal rows may be 1e-3 of their length apart. ``own`` is the
    number of a row among the others; -1 for none.
    """
    squares = others.square().sum(-1)
    kept = min(count, max(len(others) - (own is not None), 1))
    # an exported or traced graph has no loop: its blocks are those of the caller
    tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    whole = torch.compiler.is_compiling() or tracing
    result, step = [], max(1, _DISTANCES_AT_A_TIME // len(others))
    for i, part in enumerate((rows,) if whole else rows.split(step)):
        gaps = torch.addmm(squares, part, others.T, alpha=-2)
        if own is not None:
            here = own[i * step : (i + 1) * step].to(gaps.device)
            known = (here >= 0).nonzero()[:, 0]
            gaps[known, here[known]] = torch.inf
        nearest = gaps.topk(kept, largest=False, sorted=False).values
        square = nearest + part.square().sum(-1, keepdim=True)
        result.append(square.clamp(min=0).sqrt().mean(-1))
    return torch.cat(result)


def _density_masses(
    points: tuple[FloatArray, ...],
    correct: BoolArray,
    weight: FloatArray,
    axes: tuple[FloatArray, ...],
) -> FloatArray:
    """Numbers of right and of wrong examples around each point of a grid, ``(2, a, b)``.

    These are :math:`n_1 f_1` and :math:`n_0 f_0`, times an area that makes one example count one
    at its place. Kernels are products over the axes, none narrower than a step of the grid.
    """
    scaled = weight / weight.mean()
    result, areas = [], []
    for which in (correct, ~correct):
        widths = [
            max(_reference_width(values[which], scaled[which]), axis[1] - axis[0])
            for values, axis in zip(points, axes, strict=True)
        ]
        first, second = (
            np.exp(-0.5 * ((axis[:, None] - values[which]) / width) ** 2)
            for values, axis, width in zip(points, axes, widths, strict=True)
        )
        areas.append(math.prod(widths))
        result.append((first * scaled[which]) @ second.T / areas[-1])
    return np.stack(result) * math.sqrt(math.prod(areas))


def _mixed_odds(right: Tensor, wrong: Tensor, before: Tensor) -> Tensor:
    """Log-odds of being right among examples around a place and some at the odds as they were."""
    certain = math.log(1 / _MIN_DOUBT - 1)
    before = before.clamp(-certain, certain)
    right, wrong = (
        right + _PRIOR_EXAMPLES * before.sigmoid(),
        wrong + _PRIOR_EXAMPLES * (-before).sigmoid(),
    )
    return right.log() - wrong.log()


def _reference_width(values: FloatArray, weight: FloatArray) -> float:
    r"""Width of kernels in two dimensions, :math:`1.06\,\sigma n^{-1/6}` (normal reference)."""
    share = weight / weight.sum()
    count = weight.sum() ** 2 / (weight**2).sum()
    spread = math.sqrt(share @ (values - share @ values) ** 2)
    return float(1.06 * spread * count ** (-1 / 6))


def _axis(values: FloatArray) -> FloatArray:
    low = float(values.min())
    return np.linspace(low, max(float(values.max()), low + 1e-3), _CELLS + 1)


def _on_grid(table: Tensor, at: Tensor) -> Tensor:
    """Bilinear interpolation in a square table at ``(..., 2)``, from 0 to 1 along each side."""
    side = table.shape[0]
    where = (at * (side - 1)).clamp(0, max(side - 1, 0))
    cell = where.floor().clamp(max=max(side - 2, 0))
    share = (where - cell).unbind(-1)
    row, column = cell.long().unbind(-1)
    flat, start = table.reshape(-1), row * side + column
    right, down = min(1, side - 1), side if side > 1 else 0
    above = torch.lerp(flat[start], flat[start + right], share[1])
    below = torch.lerp(flat[start + down], flat[start + down + right], share[1])
    return torch.lerp(above, below, share[0])
