"""Histograms of the confidence: alone, averaged over many, of a fitted line, and of each class.

Bins are stored as edges on the log-odds. Each is ``(low, high]``, as everywhere in this library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit, gammaln, logit, logsumexp
from torch import Tensor

from calibrant._core.binning import BinCount, fill, uniform_edges
from calibrant._core.checks import IGNORED, BoolArray, FloatArray, IntArray, check_some
from calibrant._core.chunks import Examples, on_threads, thread_ranges
from calibrant._core.solve import check_time
from calibrant.calibrators.base import Calibrator, Context
from calibrant.calibrators.confidence_maps import fit_platt
from calibrant.calibrators.fit_inputs import _missing_classes, _warn_together
from calibrant.calibrators.logpartition import _gap_chunks
from calibrant.calibrators.piecewise import BEYOND, _at_place, _filled, _place
from calibrant.calibrators.top_label import MAX_ODDS, TopLabelMap, _top_odds

T = TypeVar("T")
_DIGITS = 5
"""Decimals to which log-odds are distinguished: a fit sees them with an error of some 1e-6."""
_EDGE_SLACK = 1e-5  # edges of equal width move up by this, to stay above confidences on the edge
_ODDS_AT_A_TIME = 1 << 20  # log-odds of one-vs-rest problems that are held at a time
_PRIOR_STRENGTH = 2.0  # examples that the prior of BBQ is worth, N' of Naeini et al. 2015
_MIN_POSTERIOR_SHARE = 1e-6  # share of the posterior below which a binning is left out
_STEP_SHAPES = "edges_ cuts; levels_ cuts+1"
"""Shapes of the learned values of step functions."""


def _as_steps(edges: FloatArray, confidence: FloatArray) -> dict[str, FloatArray]:
    """Return what a step function learns: log-odds between bins, and those that the bins give."""
    with np.errstate(divide="ignore"):
        return {"edges_": edges, "levels_": np.clip(logit(confidence), -MAX_ODDS, MAX_ODDS)}


def _step_map(calibrator: Calibrator, odds: Tensor) -> Tensor:
    """Return the learned log-odds of the bins that log-odds are in."""
    return _at_place(calibrator.levels_.to(odds.dtype), _place(odds, calibrator.edges_))


class HistogramBinning(TopLabelMap):
    """The accuracy of each bin in place of the confidence (Zadrozny and Elkan 2001).

    Only the confidence of the top class is binned; the other classes keep their proportions. For
    two classes it is the probability of class 1, and a bin gives the share of class 1. A
    bin without an example gives its centre, one whose examples are all right log-odds of 30.

    Parameters
    ----------
    bins : int
        Examples whose log-odds agree to 5 decimals share a bin, so there may be fewer.
    mass : bool
        Equally much weight in each bin; otherwise bins of equal width in confidence.
    keep_argmax : bool, optional
        Hold the other classes below the top one; by default for more than two classes. With True,
        the confidence is binned for two classes as well.

    Attributes
    ----------
    edges_, levels_ : (m,) and (m + 1,) Tensor
        Log-odds between the bins, and those that the bins give.

    Examples
    --------
    >>> odds = np.array([0.1, 0.3, 2.0, 4.0] * 5) + np.arange(20) / 1000
    >>> fitted = HistogramBinning(bins=2).fit(odds, [1, 0, 1, 1] * 5)
    >>> fitted.edges_, fitted.predict_proba(odds[:4]).round(2)
    (tensor([1.15...]), array([0.5, 0.5, 1. , 1. ]))
    """

    name = "histogram"
    aliases = ("histogram_binning",)
    summary = "the accuracy of bins of the confidence"
    tempered = False
    learned_shapes = _STEP_SHAPES

    def __init__(
        self, *, bins: BinCount = 15, mass: bool = True, keep_argmax: bool | None = None
    ) -> None:
        super().__init__(keep_argmax=keep_argmax)
        self.bins = bins
        self.mass = mass
        self._store(edges_=torch.zeros(0), levels_=torch.zeros(1))

    def size(self, classes: int) -> int:
        """One level per bin."""
        return self.bins

    def _fit_map(self, odds: FloatArray, outcome: BoolArray, weight: FloatArray) -> None:
        self._store(**_as_steps(*_edges_and_shares(odds, outcome, weight, self.bins, self.mass)))

    _map = _step_map


class BBQ(TopLabelMap):
    r"""An average over many histograms: Bayesian binning into quantiles (Naeini et al. 2015).

    Binnings of equal mass have from :math:`\lfloor n^{1/3}/10 \rfloor` to :math:`\lceil 10\,
    n^{1/3} \rceil` bins :math:`B`, at least 1 and at most :math:`\lceil n/5 \rceil` or as many as
    there are distinct confidences; equal ones count once. Each is weighted by the likelihood of its
    outcomes under a Beta prior in each bin,

    .. math:: \prod_b \frac{\Gamma(N'/B)}{\Gamma(n_b + N'/B)}
        \frac{\Gamma(m_b + \alpha_b)}{\Gamma(\alpha_b)}
        \frac{\Gamma(n_b - m_b + \beta_b)}{\Gamma(\beta_b)}, \qquad
        \alpha_b = \tfrac{N'}{B} p_b,\ \beta_b = \tfrac{N'}{B} (1 - p_b),

    with :math:`n_b` examples in a bin of which :math:`m_b` are right, its centre :math:`p_b` in
    confidence and :math:`N' = 2`. The confidence is the weighted average of
    :math:`(m_b + \alpha_b) / (n_b + N'/B)`, which is a step function too. Binnings with less than a
    millionth of the weight are left out.

    The authors treat every class apart; here it is the top class, so that predictions stay, or
    class 1 of two. Weights are scaled to 1 on average, and count as examples then.
    ``keep_argmax`` is that of :class:`HistogramBinning`.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> odds = rng.exponential(2, 5000)
    >>> labels = (rng.random(5000) < expit(odds)).astype(int)
    >>> fitted = BBQ().fit(3 * odds, labels)  # three times too sure
    >>> bool(np.abs(fitted.predict_proba(3 * odds) - expit(odds)).mean() < 0.03)
    True
    """

    name = "bbq"
    summary = "a Bayesian average over histograms"
    tempered = False
    learned_shapes = _STEP_SHAPES
    parameter_count = 10
    """Bins in the middle of the range for a thousand examples: they grow with the examples."""

    def __init__(self, *, keep_argmax: bool | None = None) -> None:
        super().__init__(keep_argmax=keep_argmax)
        self._store(edges_=torch.zeros(0), levels_=torch.zeros(1))

    def _fit_map(self, odds: FloatArray, outcome: BoolArray, weight: FloatArray) -> None:
        ranks = _ranked(odds, outcome, weight)
        result = [_score(ranks, cuts) for cuts in _binnings(ranks)]
        share = np.exp([b.log_score for b in result] - logsumexp([b.log_score for b in result]))
        kept = [(b, s) for b, s in zip(result, share, strict=True) if s >= _MIN_POSTERIOR_SHARE]
        cuts = np.unique(np.concatenate([b.cuts for b, _ in kept]))
        last = np.append(cuts, len(ranks.value) - 1)  # the last example of each step
        mean = sum(s * b.mean[np.searchsorted(b.cuts, last)] for b, s in kept)
        confidence = np.asarray(mean) / sum(s for _, s in kept)
        self._store(**_as_steps(ranks.edge[cuts], confidence))

    _map = _step_map


class ScalingBinning(TopLabelMap):
    r"""A line through the log-odds, then its mean in each bin (Kumar et al. 2019).

    .. math:: c' = \operatorname{mean}_{i \in \text{bin}} \sigma(a s_i + b)

    Platt scaling :math:`\sigma(a s + b)` with :math:`a \ge 0` is fitted, and ``bins`` of equal mass
    give the mean of its output instead of their accuracy: their calibration error can be measured,
    as that of a histogram, but their levels have only the noise of two parameters. As in the
    authors' code, all examples serve for the line, the edges and the means. ``solution_`` is that
    of the slope and the offset. ``bins`` and ``keep_argmax`` are those of
    :class:`HistogramBinning`.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> logits = 2 * rng.normal(size=(5000, 2))
    >>> labels = (logits + rng.gumbel(size=logits.shape)).argmax(-1)
    >>> fitted = ScalingBinning().fit(3 * logits, labels)
    >>> round(1 / float(fitted.solution_.x[0]))
    3
    """

    name = "scaling_binning"
    summary = "a line for the log-odds, cut into steps"
    tempered = False
    learned_shapes = _STEP_SHAPES

    def __init__(self, *, bins: BinCount = 15, keep_argmax: bool | None = None) -> None:
        super().__init__(keep_argmax=keep_argmax)
        self.bins = bins
        self._store(edges_=torch.zeros(0), levels_=torch.zeros(1))

    def size(self, classes: int) -> int:
        """The line and one level per bin."""
        return self.bins + 2

    def _fit_map(self, odds: FloatArray, outcome: BoolArray, weight: FloatArray) -> None:
        slope, offset = self._keep(fit_platt(odds, outcome, weight), len(odds))
        # the line rises, so bins of its outputs are bins of its inputs
        ranks = _ranked(odds, outcome, weight)
        edges = ranks.edge[_equal_mass(ranks, self.bins)]
        line = expit(slope * odds + offset)
        confidence = _bin_means(ranks.value[ranks.group], line, edges, weight)
        self._store(**_as_steps(edges, confidence))

    _map = _step_map


class HistogramOneVsRest(Calibrator):
    """A histogram for the probability of each class, and the rows normalised again.

    One-vs-rest, as Zadrozny and Elkan 2002 extend histogram binning to several classes: every
    class has bins of its own over all examples, and gives the share of its bin that has its
    label. Predictions may change. Where all classes of a row get 0, the row stays as it was;
    other zeros are held at :math:`e^{-30}`. Masked classes do not count where they are masked.

    ``bins``, of each class, and ``mass`` are those of :class:`HistogramBinning`.

    Attributes
    ----------
    edges_, levels_ : (classes, m) and (classes, m + 1) Tensor
        Log-odds between the bins of each class, and logarithms of the probabilities that they give.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> logits = 2 * rng.normal(size=(5000, 3))
    >>> labels = (logits + [2.0, 0.0, 0.0] + rng.gumbel(size=logits.shape)).argmax(-1)
    >>> fitted = HistogramOneVsRest().fit(logits, labels)
    >>> fitted.predict_proba(np.zeros((1, 3)))  # the first class is likelier than it seems
    array([[0.7, 0.1, 0.2]])
    """

    name = "histogram_ovr"
    summary = "a histogram for each class"
    learned_shapes = "edges_ classes cuts; levels_ classes cuts+1"
    edges_: Tensor
    levels_: Tensor

    def __init__(self, *, bins: BinCount = 15, mass: bool = True) -> None:
        super().__init__()
        self.bins = bins
        self.mass = mass
        self._store(edges_=torch.zeros(1, 0), levels_=torch.zeros(1, 1))

    def size(self, classes: int) -> int:
        """One level per bin of each class."""
        return self.bins * classes

    def _fit(self, examples: Examples, context: Context) -> None:
        kept = examples.labels != IGNORED
        check_some(int(kept.sum()))
        weight = np.ones(kept.size) if examples.weight is None else examples.weight
        held = max(1, _ODDS_AT_A_TIME // int(kept.sum()))
        chunks, task = partial(_odds_chunks, examples), partial(self._histogram, weight[kept])
        edges, levels = zip(*_by_class(examples, held, chunks, task), strict=True)
        self._store(edges_=_filled(edges, BEYOND), levels_=_filled(levels, -MAX_ODDS))
        consequence = "they get a probability of 0, but for those always masked"
        _warn_together(self, _missing_classes(examples, consequence))

    def _histogram(
        self, weight: FloatArray, column: NDArray[np.float32], own: BoolArray
    ) -> tuple[FloatArray, FloatArray]:
        """Edges and levels of a class."""
        possible = np.isfinite(column)
        odds, mass = column[possible].astype(np.float64), self.mass and bool(possible.any())
        edges, share = _edges_and_shares(odds, own[possible], weight[possible], self.bins, mass)
        with np.errstate(divide="ignore"):
            return edges, np.maximum(np.log(share), -MAX_ODDS)

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        levels = _at_place(self.levels_.to(logits.dtype), _place(_class_odds(logits), self.edges_))
        levels = torch.where(torch.isneginf(logits), -torch.inf, levels)
        return torch.where(levels.amax(-1, keepdim=True) > -MAX_ODDS, levels, logits)


class _RankedOdds(NamedTuple):
    """Examples in the order of their log-odds, those that cannot be told apart taken together."""

    value: FloatArray  # (m,) log-odds
    edge: FloatArray  # (m - 1,) halfway between neighbours
    mass: FloatArray  # (m,) weight up to here
    right: FloatArray  # (m,) weight of those up to here that are right
    group: IntArray  # (n,) place of each example


def _ranked(odds: FloatArray, correct: BoolArray, weight: FloatArray) -> _RankedOdds:
    """Sort examples by their log-odds."""
    value, group = np.unique(np.round(odds, _DIGITS), return_inverse=True)
    mass, right = (
        np.cumsum(np.bincount(group, part).astype(np.float64, copy=False))
        for part in (weight, weight * correct)
    )
    return _RankedOdds(value, (value[1:] + value[:-1]) / 2, mass, right, group)


def _equal_mass(ranks: _RankedOdds, bins: int) -> IntArray:
    """Last place of each bin but the last, by the rule of ``_core.binning.equal_mass_edges``."""
    wanted = ranks.mass[-1] * np.arange(1, bins) / bins
    cuts = np.unique(np.searchsorted(ranks.mass, wanted * (1 - 1e-12)))
    return np.asarray(cuts[cuts < len(ranks.mass) - 1])


def _edges_and_shares(
    odds: FloatArray, correct: BoolArray, weight: FloatArray, bins: int, mass: bool
) -> tuple[FloatArray, FloatArray]:
    """Edges on the log-odds ``(m,)``, and the accuracy of each bin ``(m + 1,)``."""
    if mass:
        ranks = _ranked(odds, correct, weight)
        cuts = _equal_mass(ranks, bins)
        edges, odds = ranks.edge[cuts], ranks.value[ranks.group]
    else:
        edges = logit(uniform_edges(bins)[1:-1]) + _EDGE_SLACK
    return edges, _bin_means(odds, correct.astype(np.float64), edges, weight)


def _bin_means(
    odds: FloatArray, outcome: FloatArray, edges: FloatArray, weight: FloatArray
) -> FloatArray:
    """Mean outcome of each bin; the centre of a bin that holds nothing."""
    result = fill(odds, outcome, np.concatenate([[-np.inf], edges, [np.inf]]), weight).accuracy
    return np.where(np.isnan(result), _centres(edges)[0], result)


def _centres(edges: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Centre of each bin in confidence, and one minus it, exact near 1 as well."""
    low, high = np.append(-np.inf, edges), np.append(edges, np.inf)
    return (expit(low) + expit(high)) / 2, (expit(-low) + expit(-high)) / 2


class _Binning(NamedTuple):
    """A binning and what the examples say about it."""

    cuts: IntArray  # (bins - 1,) places after which a bin ends
    mean: FloatArray  # (bins,) posterior mean of the accuracy
    log_score: float


def _binnings(ranks: _RankedOdds) -> list[IntArray]:
    """The different binnings that are averaged over, by their cuts."""
    total = float(ranks.mass[-1])
    root = float(np.cbrt(total))
    least = max(1, math.floor(root / 10))
    most = min(math.ceil(10 * root), math.ceil(total / 5), len(ranks.value))
    result = (_equal_mass(ranks, bins) for bins in range(least, max(least, most) + 1))
    return list({cuts.tobytes(): cuts for cuts in result}.values())


def _score(ranks: _RankedOdds, cuts: IntArray) -> _Binning:
    """Marginal likelihood and posterior means under a Beta prior in each bin."""
    check_time()
    ends = np.append(cuts, len(ranks.value) - 1)
    count, right = (np.diff(sums[ends], prepend=0) for sums in (ranks.mass, ranks.right))
    strength = _PRIOR_STRENGTH / len(ends)
    alpha, beta = (strength * centre for centre in _centres(ranks.edge[cuts]))
    wrong = np.maximum(count - right, 0)
    terms = gammaln(strength) - gammaln(count + strength)
    terms += gammaln(right + alpha) - gammaln(alpha) + gammaln(wrong + beta) - gammaln(beta)
    return _Binning(cuts, (right + alpha) / (count + strength), float(terms.sum()))


def _class_odds(logits: Tensor) -> Tensor:
    """Log-odds of every class, ``(..., classes)``, of logits whose largest is 0."""
    # those of the top class come from the sum of the others: 1 - p has no digits left
    log_probs = logits.log_softmax(-1)
    odds = log_probs - torch.log1p(-log_probs.exp().clamp(max=0.75))
    return odds.scatter(-1, logits.argmax(-1, keepdim=True), _top_odds(logits))


def _by_class(
    examples: Examples,
    held: int,
    chunks: Callable[[tuple[int, int]], Iterable[Tensor]],
    task: Callable[[NDArray[np.float32], BoolArray], T],
) -> list[T]:
    """Call a task for each class, with its log-odds and whether it is the label, each ``(n,)``.

    ``chunks`` yields the log-odds of all classes for a range of rows; ``held`` are in memory.
    """
    labels = examples.labels[examples.labels != IGNORED]
    ranges = thread_ranges(examples)
    starts = np.cumsum([0, *((examples.labels[a:b] != IGNORED).sum() for a, b in ranges[:-1])])

    def read(columns: NDArray[np.float32], first: int, run: tuple[int, int], done: int) -> None:
        for odds in chunks(run):
            part = odds[:, first : first + len(columns)].T.cpu().numpy()
            columns[:, done : done + len(odds)] = part
            done += len(odds)

    def work(columns: NDArray[np.float32], first: int, numbers: IntArray) -> list[T]:
        return [task(columns[k], labels == first + k) for k in numbers.tolist()]

    result: list[T] = []
    for first in range(0, examples.classes, held):
        check_time()
        columns = np.empty((min(held, examples.classes - first), len(labels)), np.float32)
        on_threads(partial(read, columns, first), ranges, starts.tolist())
        # the columns are on the CPU, wherever the logits are
        parts = np.array_split(np.arange(len(columns)), torch.get_num_threads())
        result += chain.from_iterable(on_threads(partial(work, columns, first), parts))
    return result


def _odds_chunks(examples: Examples, row_range: tuple[int, int]) -> Iterator[Tensor]:
    """Yield the log-odds of all classes; -inf where they are masked."""
    for chunk in _gap_chunks(examples, row_range):
        masked = torch.isneginf(chunk.chunk.logits)
        yield _class_odds(-chunk.gaps).masked_fill(masked, -torch.inf)
