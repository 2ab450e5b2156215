"""Calibrators of multi-label logits: each tag is a binary problem with a map of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from scipy.special import expit
from torch import Tensor
from torch.nn.functional import logsigmoid

from calibrant._core import checks
from calibrant._core.checks import IGNORED, BoolArray, FloatArray
from calibrant._core.chunks import Examples
from calibrant._core.messages import comma_separated
from calibrant._core.solve import Solution, check_time
from calibrant.calibrators import fit_inputs
from calibrant.calibrators.base import Calibrator, Context
from calibrant.calibrators.confidence_maps import MAX_MEAN_ODDS, MAX_SLOPE, fit_platt
from calibrant.calibrators.fit_inputs import Passes, Sums

_PRIOR_SPREAD = 0.1  # standard deviation of lines among tags, expected before any are seen
_PRIOR_TAGS = 2.0  # tags that this expectation counts for
_POOL_VARIANCE = np.array([1.0, 9.0])  # of log-slope and shift of the common line, about 0
_MAX_PASSES, _MAX_UPDATES = 100, 100  # over the data, and of the prior between them
_TOLERANCE = 1e-6
_MAX_STEP = 1.0  # of a log-slope or shift in one pass
_LIMITS = np.array([np.log(MAX_SLOPE), MAX_MEAN_ODDS])  # of log-slopes and shifts, either way


class TagCalibrator(Calibrator):
    """A calibrator of logits ``(..., tags)``, with a label 0 or 1 for each of them.

    The logit of a tag is the log-odds that an example has it, so that probabilities are sigmoids
    and do not sum to one. A subclass writes ``_fit_cells`` and stores ``slope_`` and
    ``intercept_``: the map of every tag is a rising line, which keeps the order of the examples.
    ``classes`` is the number of tags.

    Attributes
    ----------
    slope_, intercept_ : (tags,) Tensor
        The map of each tag: ``slope_ * logits + intercept_``.
    """

    multilabel = True
    accepts_masked = False
    fits_passes = True
    learned_shapes = "slope_ classes; intercept_ classes"
    slope_: Tensor
    intercept_: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._store(slope_=torch.ones(0), intercept_=torch.zeros(0))

    def _fit_cells(self, cells: _TagCells) -> Solution:
        """Return slopes and intercepts ``(2, tags)``."""
        raise NotImplementedError

    def _fit(self, examples: Examples, context: Context) -> None:
        cells = _cells(examples)
        labelled = cells.weight > 0
        checks.check_some(int(labelled.sum()))
        if examples.weight is not None:
            scale = labelled.sum() / cells.weight.sum()
            cells = cells._replace(weight=cells.weight * scale)
        self.solution_ = self._fit_cells(cells)
        slope, intercept = self.solution_.x
        self._store(slope_=slope, intercept_=intercept)
        _warn_of_rare_tags(self, labelled.sum(0), (labelled * cells.outcome).sum(0))

    def refine(self, passes: Passes) -> None:
        """Learn from all examples, after a fit on some of them."""
        labelled, hits, *masses = passes.sums(_cell_masses)
        self.solution_ = self._refined(passes, _Masses(labelled, *masses))
        slope, intercept = self.solution_.x
        self._store(slope_=slope, intercept_=intercept)
        _warn_of_rare_tags(self, labelled, hits)

    def _refined(self, passes: Passes, masses: _Masses) -> Solution:
        """Return slopes and intercepts ``(2, tags)``, from sums over all examples."""
        raise NotImplementedError

    def forward(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        """Calibrated logits ``(..., tags)``, in float32 or wider."""
        self.check_logits(logits)
        wide = logits if logits.dtype.itemsize >= 4 else logits.float()
        if self._floor:
            pairs = self._raised(torch.stack([torch.zeros_like(wide), wide], -1))
            wide = pairs[..., 1] - pairs[..., 0]
        return self.slope_.to(wide.dtype) * wide + self.intercept_.to(wide.dtype)

    def log_probs(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        """Logarithms of the calibrated probabilities of the tags."""
        return logsigmoid(self(logits))

    def check_logits(self, logits: Tensor) -> None:
        """Raise unless the calibrator is fitted, and for this number of tags."""
        super().check_logits(logits)
        if not logits.ndim or logits.shape[-1] != self._classes:
            raise ValueError(
                f"fitted for {self._classes} tags: logits must be (..., {self._classes}), as in "
                f"fit, got {tuple(logits.shape)}"
            )

    def describe(self) -> str:
        """One sentence about the fit: tags, number of parameters, slopes."""
        if not self._classes:
            return super().describe()
        size = self.size(self._classes)
        tags = f"{self._classes:,} tag{'s' * (self._classes != 1)}"
        slopes = f"slopes from {float(self.slope_.min()):.4g} to {float(self.slope_.max()):.4g}"
        return f"{type(self).__name__} for {tags}: {size:,} parameters, {slopes}"

    def _checked(self, logits: checks.Values) -> Tensor:
        scores = self._tensor(checks.as_scores(logits))
        self.check_logits(scores)
        _check_finite(scores.reshape(-1, self._classes).isfinite().cpu().numpy(), scores)
        return scores

    def _probs(self, scores: Tensor, features: Tensor | None) -> Tensor:
        probs: Tensor = self(scores).sigmoid()
        return probs


class TagIdentity(TagCalibrator):
    """The logits of the tags as they are, to compare with.

    Examples
    --------
    >>> fitted = TagIdentity().fit([[0.0, 2.0], [1.0, -1.0]], [[0, 1], [1, 0]])
    >>> fitted.predict_proba([[0.0, 2.0]]).round(2)
    array([[0.5 , 0.88]])
    """

    name = "none"
    aliases = ("identity",)
    summary = "the logits as they are"
    parameter_count = 0

    def set_floor(self, floor: float) -> None:
        """Do nothing: probabilities of 0 stay what they are."""

    def _fit_cells(self, cells: _TagCells) -> Solution:
        return _unchanged(cells.logits.shape[1])

    def _refined(self, passes: Passes, masses: _Masses) -> Solution:
        return _unchanged(passes.classes)


class PooledTags(TagCalibrator):
    r"""One line for the logits of all tags: :math:`z' = a z + b` with :math:`a > 0`.

    Platt's map of all labels together, as if every tag were the same problem.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> logits = 2 * rng.normal(size=(5000, 4))
    >>> labels = (rng.random(logits.shape) < expit(0.5 * logits - 1)).astype(int)
    >>> fitted = PooledTags().fit(logits, labels)
    >>> fitted.slope_.numpy().round(1), fitted.intercept_.numpy().round(1)
    (array([0.5, 0.5, 0.5, 0.5], dtype=float32), array([-1., -1., -1., -1.], dtype=float32))
    """

    name = "pooled"
    aliases = ("pooled_tags", "platt")
    summary = "one straight line for all tags (Platt)"
    parameter_count = 2

    def _fit_cells(self, cells: _TagCells) -> Solution:
        line = _fit_lines(_together(cells)).solution
        return line._replace(x=np.repeat(line.x, cells.logits.shape[1], axis=1))

    def _refined(self, passes: Passes, masses: _Masses) -> Solution:
        one = _Masses(*(values.sum(keepdims=True) for values in masses))
        theta = _theta(self.slope_[:1], self.intercept_[:1], one.centre)
        line = _refined_lines(passes, one, theta, together=True).solution
        return line._replace(x=np.repeat(line.x, passes.classes, axis=1))


class TagScaling(TagCalibrator):
    r"""A line for the logit of each tag, drawn to the line that all tags have in common.

    With :math:`m_t` the mean logit of tag :math:`t` and a line that turns about it,

    .. math:: z' = m_t + b_t + e^{s_t} (z - m_t), \qquad
              (s_t, b_t) \sim \mathcal N(\mu, \Sigma),

    the log-slope :math:`s_t` and the shift :math:`b_t` of each tag are the mode of their posterior,
    and the common line :math:`\mu` and the spread :math:`\Sigma` among tags are estimated from the
    data as well, by empirical Bayes with Laplace's approximation. A tag with many labels has a line
    of its own; one with few leans on the others, the more the less the tags differ. Slopes are
    positive, so that the order of the examples is kept for each tag.

    :math:`\Sigma` starts from a standard deviation of 0.1 that counts as much as two tags, and
    :math:`\mu` has a wide normal prior about no change. This is calibrant's own combination of
    Platt's (1999) map with partial pooling (Efron and Morris 1975).

    Attributes
    ----------
    slope_, intercept_ : (tags,) Tensor
        :math:`e^{s_t}` and :math:`m_t + b_t - e^{s_t} m_t`.
    pool_ : (2,) Tensor
        Slope :math:`e^{\mu_1}` and shift :math:`\mu_2` of the common line.
    spread_ : (2,) Tensor
        Standard deviations of log-slopes and shifts among tags.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> logits = 2 * rng.normal(size=(5000, 3))
    >>> truth = logits * [0.4, 0.5, 0.6] + [1.0, 0.0, -1.0]
    >>> labels = (rng.random(logits.shape) < expit(truth)).astype(int)
    >>> labels[20:, 2] = -100  # only 20 labels of the last tag are known
    >>> fitted = TagScaling().fit(logits, labels)
    >>> fitted.slope_.numpy().round(1)
    array([0.4, 0.5, 0.5], dtype=float32)
    """

    name = "tags"
    aliases = ("auto", "tag_scaling")
    summary = "a straight line for each tag, drawn to the one that all tags have in common"

    def __init__(self) -> None:
        super().__init__()
        self._store(pool_=torch.tensor([1.0, 0.0]), spread_=torch.zeros(2))

    def size(self, classes: int) -> int:
        """A slope and an intercept for each tag."""
        return 2 * classes

    def effective_size(self, classes: int) -> int:
        """Those of the common line: tags with few labels lean on it."""
        return 2

    def _fit_cells(self, cells: _TagCells) -> Solution:
        return self._kept(_fit_lines(cells))

    def _refined(self, passes: Passes, masses: _Masses) -> Solution:
        theta = _theta(self.slope_, self.intercept_, masses.centre)
        return self._kept(_refined_lines(passes, masses, theta, together=False))

    def _kept(self, lines: _Lines) -> Solution:
        log_slope, shift = lines.pool
        self._store(pool_=np.array([np.exp(log_slope), shift]), spread_=lines.spread)
        return lines.solution


# ------------------------------------------------------------------------------------- the cells


class _TagCells(NamedTuple):
    """Each ``(n, tags)``; cells without a label have weight 0, logit 0 and outcome 0."""

    logits: FloatArray
    outcome: FloatArray
    weight: FloatArray


class _Masses(NamedTuple):
    """Sums over the labelled cells of each tag, ``(tags,)``."""

    labelled: FloatArray
    weight: FloatArray
    logits: FloatArray  # of weight times logit

    @property
    def centre(self) -> FloatArray:
        """Mean logit of each tag; without labels, that of the other tags."""
        mean = self.logits / np.where(self.weight > 0, self.weight, 1)
        return np.asarray(np.where(self.weight > 0, mean, mean[self.weight > 0].mean()))

    @property
    def scale(self) -> float:
        """Factor that makes the mean weight 1."""
        return float(self.labelled.sum() / self.weight.sum())


def _cell_masses(examples: Examples) -> Sums:
    """Return labelled cells, hits, weights and weighted logits of each tag."""
    raw = _cells(examples)
    labelled = raw.weight > 0
    hits = (labelled * raw.outcome).sum(0)
    return [labelled.sum(0), hits, raw.weight.sum(0), (raw.weight * raw.logits).sum(0)]


def _together(cells: _TagCells) -> _TagCells:
    """Return all cells as those of one tag."""
    return _TagCells(*(values.reshape(-1, 1) for values in cells))


def _cells(examples: Examples) -> _TagCells:
    """Return cells with the weights as they are."""
    tags = examples.columns
    labels = examples.labels.reshape(-1, tags)
    labelled = labels != IGNORED
    logits = checks.as_float64(examples.logits).reshape(-1, tags)
    _check_finite(np.isfinite(logits) | ~labelled, logits)
    weight = np.where(labelled, 1.0, 0.0)
    if examples.weight is not None:
        weight *= examples.weight.reshape(-1, tags)
    return _TagCells(np.where(labelled, logits, 0), np.where(labelled, labels, 0.0), weight)


def _check_finite(finite: BoolArray, logits: checks.Logits) -> None:
    if not finite.all():
        row, tag = map(int, np.argwhere(~finite)[0])
        value = float(logits.reshape(-1, finite.shape[1])[row, tag])
        raise ValueError(
            f"logits of tags must be finite, row {row} has {value} for tag {tag}: clip it, or "
            f"leave it out of a fit by the label {IGNORED}"
        )


def _warn_of_rare_tags(calibrator: TagCalibrator, labelled: FloatArray, hits: FloatArray) -> None:
    alike = np.flatnonzero((hits == 0) | (hits == labelled))
    if alike.size and calibrator.parameter_count is None:
        named = comma_separated([str(tag) for tag in alike[:5]] + ["..."] * (alike.size > 5))
        note = f"{alike.size:,} of {len(hits):,} tags have no label 0 or no label 1 ({named})"
        fit_inputs._warn_together(calibrator, [f"{note}: they lean on the line of the others"])


# -------------------------------------------------------------------------------------- the lines


class _Lines(NamedTuple):
    """Lines of the tags, and the mean and standard deviation ``(2,)`` of log-slope and shift."""

    solution: Solution  # slopes and intercepts (2, tags)
    pool: FloatArray
    spread: FloatArray


class _Prior(NamedTuple):
    mean: FloatArray  # (2,)
    covariance: FloatArray  # (2, 2)


def _fit_lines(cells: _TagCells) -> _Lines:
    """Fit the lines of cells in memory."""
    mass = cells.weight.sum(0)
    centre = _Masses(mass, mass, (cells.weight * cells.logits).sum(0)).centre
    # the search starts at the common line, which has bounds
    kept = cells.weight > 0
    odds, outcome, weight = (values[kept] for values in cells)
    slope, offset = fit_platt(odds, outcome > 0, weight).x
    slope = max(slope, 1 / MAX_SLOPE)
    shift = (slope - 1) * centre + offset
    theta = np.stack([np.full_like(shift, np.log(slope)), shift], -1)
    start = np.asarray(np.clip(theta, -_LIMITS, _LIMITS))
    return _newton(partial(_derivatives, cells, centre), centre, start)


def _refined_lines(passes: Passes, masses: _Masses, theta: FloatArray, *, together: bool) -> _Lines:
    """Fit the lines of all examples, from those of some."""
    centre, scale = masses.centre, masses.scale

    def derivatives(theta: FloatArray) -> tuple[FloatArray, FloatArray]:
        task = partial(_summed_derivatives, centre, theta, together)
        gradient, information = passes.sums(task)
        return scale * gradient, scale * information

    return _newton(derivatives, centre, theta)


def _summed_derivatives(
    centre: FloatArray, theta: FloatArray, together: bool, examples: Examples
) -> Sums:
    cells = _cells(examples)
    return _derivatives(_together(cells) if together else cells, centre, theta)


def _theta(slope: Tensor, intercept: Tensor, centre: FloatArray) -> FloatArray:
    """Return log-slopes and shifts ``(tags, 2)`` of lines."""
    steep, offset = map(checks.as_float64, (slope, intercept))
    return np.stack([np.log(steep), offset + steep * centre - centre], -1)


def _unchanged(tags: int) -> Solution:
    return Solution(np.stack([np.ones(tags), np.zeros(tags)]), 0.0, 0, True)


_Derivatives: TypeAlias = Callable[[FloatArray], tuple[FloatArray, FloatArray]]


def _newton(derivatives: _Derivatives, centre: FloatArray, theta: FloatArray) -> _Lines:
    """Fit log-slopes and shifts by Newton steps; between them the prior is estimated."""
    prior = _Prior(theta.mean(0), _PRIOR_SPREAD**2 * np.eye(2))
    passes, converged = 0, False
    while not converged and passes < _MAX_PASSES:
        check_time()
        gradient, information = derivatives(theta)
        # the likelihood about theta as a normal one, in the form that allows no information at all
        evidence = np.einsum("tij,tj->ti", information, theta) - gradient
        prior, mode = _empirical_bayes(information, evidence, prior)
        step = np.clip(mode - theta, -_MAX_STEP, _MAX_STEP)
        theta, passes = theta + step, passes + 1
        converged = bool(np.abs(step).max() < _TOLERANCE)
    slope = np.exp(theta[:, 0])
    line = np.stack([slope, centre + theta[:, 1] - slope * centre])
    spread = np.sqrt(np.diag(prior.covariance))
    return _Lines(Solution(line, np.nan, passes, converged), prior.mean, spread)


def _derivatives(
    cells: _TagCells, centre: FloatArray, theta: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return gradient ``(tags, 2)`` and expected information ``(tags, 2, 2)`` of the NLL."""
    tilt = np.exp(theta[:, 0]) * (cells.logits - centre)  # derivative by the log-slope
    probs = expit(tilt + centre + theta[:, 1])
    off, variance = cells.weight * (probs - cells.outcome), cells.weight * probs * (1 - probs)
    gradient = np.stack([(off * tilt).sum(0), off.sum(0)], -1)
    cross, flat = (variance * tilt).sum(0), variance.sum(0)
    rows = [[(variance * tilt**2).sum(0), cross], [cross, flat]]
    return gradient, np.moveaxis(np.array(rows), -1, 0)


def _empirical_bayes(
    information: FloatArray, evidence: FloatArray, prior: _Prior
) -> tuple[_Prior, FloatArray]:
    """Return the prior of normal observations, by the EM algorithm, and their posterior means.

    Tag ``t`` has the likelihood exp(-x' information[t] x / 2 + evidence[t]' x).
    """
    for _ in range(_MAX_UPDATES):
        precision = np.linalg.inv(prior.covariance)
        covariance = np.linalg.inv(information + precision)
        posterior = np.einsum("tij,tj->ti", covariance, evidence + precision @ prior.mean)
        posterior = np.clip(posterior, -_LIMITS, _LIMITS)  # for data without an optimum
        pull = len(evidence) * precision + np.diag(1 / _POOL_VARIANCE)
        mean = np.linalg.solve(pull, precision @ posterior.sum(0))
        off = posterior - mean
        scatter = _PRIOR_TAGS * _PRIOR_SPREAD**2 * np.eye(2) + off.T @ off + covariance.sum(0)
        updated = _Prior(mean, scatter / (_PRIOR_TAGS + len(evidence)))
        change = max(float(np.abs(a - b).max()) for a, b in zip(updated, prior, strict=True))
        prior = updated
        if change < _TOLERANCE / 10:
            break
    return prior, posterior
