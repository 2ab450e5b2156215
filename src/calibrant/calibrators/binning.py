r"""Step functions of the confidence: histograms, averages of them, and a line cut into steps.

Bins are kept as edges on the log-odds. Each is ``(low, high]``, as everywhere in this library.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import expit, gammaln, logit, logsumexp
from torch import Tensor

from calibrant._core.binning import check_bins, fill, uniform_edges
from calibrant._core.checks import IGNORED, BoolArray, FloatArray, IntArray, check_some, warn
from calibrant._core.chunks import Examples, on_threads, strips
from calibrant._core.logpartition import gap_blocks
from calibrant._core.solve import check_time
from calibrant.calibrators.affine import missing
from calibrant.calibrators.base import Calibrator, Context
from calibrant.calibrators.piecewise import BEYOND, at_place, place
from calibrant.calibrators.platt import fit_platt
from calibrant.calibrators.top_label import CERTAIN, TopLabelMap, top_odds

DIGITS = 5
"""Decimals to which log-odds are told apart: a fit sees them with an error of some 1e-6."""
SLACK = 1e-5
"""How far edges of equal width are moved up, so that a confidence which lies on an edge (of three
level classes, say) is below it in spite of that error."""
STRENGTH = 2.0
"""Samples that the prior of a binning is worth, N' of Naeini et al. 2015."""
NEGLIGIBLE = 1e-6
"""Share of the posterior below which a binning is left out."""
GROUP = 1 << 20
"""Log-odds of one-vs-rest problems that are held at a time."""


class StepMap(TopLabelMap):
    """New log-odds of the top class that are constant within bins of the old ones.

    Attributes
    ----------
    edges_ : (m,) Tensor
        Log-odds between the bins.
    levels_ : (m + 1,) Tensor
        Log-odds that the bins give.
    """

    tempered = False

    edges_: Tensor
    levels_: Tensor
    learned_shapes = "edges_ cuts; levels_ cuts+1"

    def __init__(self, *, keep_argmax: bool = True) -> None:
        super().__init__(keep_argmax=keep_argmax)
        self._learned(edges_=torch.zeros(0), levels_=torch.zeros(1))

    def _keep(self, edges: FloatArray, confidence: FloatArray) -> None:
        """Keep the edges and what the bins give, a confidence each."""
        self._learned(edges_=edges, levels_=np.clip(_logit(confidence), -CERTAIN, CERTAIN))

    def _map(self, odds: Tensor) -> Tensor:
        return at_place(self.levels_.to(odds.dtype), place(odds, self.edges_))


class HistogramBinning(StepMap):
    r"""The accuracy of each bin in place of the confidence (Zadrozny and Elkan 2001).

    Only the confidence of the top class is binned; the other classes keep their proportions. A
    bin without a sample gives its centre. A bin whose samples are all right gives a confidence
    of 1, up to the log-odds of 30 that float32 can tell from it: a wrong answer there costs a
    likelihood that few other methods would lose.

    Parameters
    ----------
    bins : int
    mass : bool
        Equally much weight in each bin, with edges halfway between neighbouring samples;
        otherwise bins of equal width in confidence. Samples whose log-odds agree to 5 decimals
        share a bin, so there may be fewer bins.
    keep_argmax : bool
        Hold the other classes below the top one.

    Attributes
    ----------
    edges_ : (m,) Tensor
        Log-odds between the bins.
    levels_ : (m + 1,) Tensor
        Log-odds that the bins give.

    Examples
    --------
    >>> logits = np.array([[0.1, 0.0], [0.3, 0.0], [2.0, 0.0], [4.0, 0.0]] * 5)
    >>> logits[:, 0] += np.arange(20) / 1000
    >>> fitted = HistogramBinning(bins=2).fit(logits, [0, 1, 0, 0] * 5)
    >>> fitted.edges_, fitted.predict_proba(logits[:4])[:, 0].round(2)
    (tensor([1.15...]), array([0.5, 0.5, 1. , 1. ]))
    """

    def __init__(self, *, bins: int = 15, mass: bool = True, keep_argmax: bool = True) -> None:
        super().__init__(keep_argmax=keep_argmax)
        check_bins(bins)
        self.bins = bins
        self.mass = mass

    def size(self, classes: int) -> int:
        """One level per bin."""
        return self.bins

    def _fit_map(self, odds: FloatArray, correct: BoolArray, weight: FloatArray) -> None:
        self._keep(*histogram(odds, correct, weight, self.bins, self.mass))


class BBQ(StepMap):
    r"""An average over many histograms: Bayesian binning into quantiles (Naeini et al. 2015).

    Binnings :math:`M` of equal mass have from :math:`B = \lfloor n^{1/3}/10 \rfloor` to
    :math:`\lceil 10\, n^{1/3} \rceil` bins, at least 1 and at most :math:`\lceil n/5 \rceil` or as
    many as there are distinct confidences; those that come out the same count once. Each is
    weighted by the likelihood of its outcomes under a Beta prior in each bin,

    .. math:: \prod_b \frac{\Gamma(N'/B)}{\Gamma(n_b + N'/B)}
        \frac{\Gamma(m_b + \alpha_b)}{\Gamma(\alpha_b)}
        \frac{\Gamma(n_b - m_b + \beta_b)}{\Gamma(\beta_b)}, \qquad
        \alpha_b = \tfrac{N'}{B} p_b,\ \beta_b = \tfrac{N'}{B} (1 - p_b),

    with :math:`n_b` samples in a bin of which :math:`m_b` are right, its centre :math:`p_b` in
    confidence and :math:`N' = 2`. The confidence is the weighted average of
    :math:`(m_b + \alpha_b) / (n_b + N'/B)`. That is a step function too, and is kept as one;
    binnings with less than a millionth of the weight are left out.

    The authors treat every class apart; here it is the top class, so that predictions stay.
    Weights count as samples, also for :math:`n`: they should not be made to sum to 1, which a
    warning says.

    Parameters
    ----------
    keep_argmax : bool
        Hold the other classes below the top one.

    Attributes
    ----------
    edges_ : (m,) Tensor
        Log-odds between the steps.
    levels_ : (m + 1,) Tensor
        Log-odds that the steps give.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> odds = rng.exponential(2, 5000)
    >>> labels = (rng.random(5000) < expit(odds)).astype(int)
    >>> fitted = BBQ().fit(3 * odds, labels)  # three times too sure
    >>> bool(np.abs(fitted.predict_proba(3 * odds) - expit(odds)).mean() < 0.03)
    True
    """

    def size(self, classes: int) -> int:
        """Ten: the bins in the middle of the range for a thousand samples.

        The number of bins grows with the samples, which are not known here.
        """
        return 10

    def _fit_map(self, odds: FloatArray, correct: BoolArray, weight: FloatArray) -> None:
        total = float(weight.sum())
        if total < len(odds) / 2:
            warn(
                f"BBQ counts weights as samples, and these sum to {total:.3g} for {len(odds):,} "
                "samples: multiply them, so that they sum to what the samples are worth"
            )
        ranks = ranked(odds, correct, weight)
        found = [score(ranks, cuts) for cuts in binnings(ranks)]
        share = np.exp([b.log_score for b in found] - logsumexp([b.log_score for b in found]))
        kept = [(b, s) for b, s in zip(found, share, strict=True) if s >= NEGLIGIBLE]
        cuts = np.unique(np.concatenate([b.cuts for b, _ in kept]))
        last = np.append(cuts, len(ranks.value) - 1)  # the last sample of each step
        mean = sum(s * b.mean[np.searchsorted(b.cuts, last)] for b, s in kept)
        self._keep(ranks.edge[cuts], np.asarray(mean) / sum(s for _, s in kept))


class ScalingBinning(StepMap):
    r"""A line through the log-odds, then the mean of it in each bin (Kumar et al. 2019).

    .. math:: c' = \operatorname{mean}_{i \in \text{bin}} \sigma(a s_i + b)

    Platt scaling :math:`\sigma(a s + b)` is fitted by the likelihood of "is the top class
    right?", with :math:`a \ge 0`. Bins of equal mass give the mean of what it says, not their
    accuracy: their calibration error can be measured, as that of a histogram, but their levels
    have only the noise of two parameters.

    The paper splits the samples into three, for the line, the edges and the means. Here, as in
    the authors' code, all of them do all three: edges and means do not look at the outcomes.

    Parameters
    ----------
    bins : int
        Samples whose log-odds agree to 5 decimals share a bin, so there may be fewer.
    keep_argmax : bool
        Hold the other classes below the top one.

    Attributes
    ----------
    edges_ : (m,) Tensor
        Log-odds between the bins.
    levels_ : (m + 1,) Tensor
        Log-odds that the bins give.
    solution_ : Solution
        Of the slope and the offset of the line.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> logits = 2 * rng.normal(size=(5000, 2))
    >>> labels = (logits + rng.gumbel(size=logits.shape)).argmax(-1)
    >>> fitted = ScalingBinning().fit(3 * logits, labels)
    >>> round(1 / float(fitted.solution_.x[0]))
    3
    """

    def __init__(self, *, bins: int = 15, keep_argmax: bool = True) -> None:
        super().__init__(keep_argmax=keep_argmax)
        check_bins(bins)
        self.bins = bins

    def size(self, classes: int) -> int:
        """The line and one level per bin."""
        return self.bins + 2

    def _fit_map(self, odds: FloatArray, correct: BoolArray, weight: FloatArray) -> None:
        self.solution_ = fit_platt(odds, correct, weight)
        if not self.solution_.converged:
            warn(
                f"{type(self).__name__} found no optimum for these {len(odds):,} samples and "
                "stopped at its bounds; are all of them right, or all wrong?"
            )
        slope, offset = self.solution_.x
        # the line rises, so bins of its outputs are bins of its inputs
        ranks = ranked(odds, correct, weight)
        edges = ranks.edge[equal_mass(ranks, self.bins)]
        self._keep(
            edges, _means(ranks.value[ranks.group], expit(slope * odds + offset), edges, weight)
        )


class HistogramOneVsRest(Calibrator):
    r"""A histogram for the probability of each class, and the rows normalised again.

    One-vs-rest, as Zadrozny and Elkan 2002 extend histogram binning to several classes: every
    class has bins of its own over all samples, and gives the share of its bin that has its
    label. Predictions may change. Where all classes of a row get 0, the row stays as it was;
    other zeros are held at :math:`e^{-30}`. Masked classes stay impossible, and are not counted
    where they are masked. A class that is masked in every sample gives the centres of bins of
    equal width, which is nearly what it gets.

    Parameters
    ----------
    bins : int
        Of each class. Samples whose log-odds agree to 5 decimals share a bin, so there may be
        fewer.
    mass : bool
        Equally much weight in each bin, otherwise equal width in probability.

    Attributes
    ----------
    edges_ : (classes, m) Tensor
        Log-odds between the bins of each class. Rows of classes with fewer bins are filled up.
    levels_ : (classes, m + 1) Tensor
        Logarithms of the probabilities that the bins give, before the rows are normalised.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> logits = 2 * rng.normal(size=(5000, 3))
    >>> labels = (logits + [2.0, 0.0, 0.0] + rng.gumbel(size=logits.shape)).argmax(-1)
    >>> fitted = HistogramOneVsRest().fit(logits, labels)
    >>> fitted.predict_proba(np.zeros((1, 3)))  # the first class is likelier than it seems
    array([[0.7, 0.1, 0.2]])
    """

    edges_: Tensor
    levels_: Tensor
    learned_shapes = "edges_ classes cuts; levels_ classes cuts+1"

    def __init__(self, *, bins: int = 15, mass: bool = True) -> None:
        super().__init__()
        check_bins(bins)
        self.bins = bins
        self.mass = mass
        self._learned(edges_=torch.zeros(1, 0), levels_=torch.zeros(1, 1))

    def size(self, classes: int) -> int:
        """One level per bin of each class."""
        return self.bins * classes

    def _fit(self, given: Examples, context: Context) -> None:
        kept = given.labels != IGNORED
        check_some(int(kept.sum()))
        labels, weight = given.labels[kept], given.labelled_weight()
        weight = np.ones(len(labels)) if weight is None else weight
        step = max(1, GROUP // len(labels))
        found: list[tuple[FloatArray, FloatArray]] = []
        for first in range(0, given.classes, step):
            check_time()
            classes = range(first, min(first + step, given.classes))
            columns = class_columns(given, classes)
            task = partial(self._histograms, columns, classes, labels, weight)
            parts = np.array_split(np.arange(len(classes)), len(strips(given)))
            found += chain.from_iterable(on_threads(task, parts))
        self._learned(
            edges_=_filled([edges for edges, _ in found], self.bins - 1, BEYOND),
            levels_=_filled([_log(shares) for _, shares in found], self.bins, -CERTAIN),
        )
        notes = missing(given, "they get a probability of 0, but for those always masked")
        if notes:
            warn(f"{type(self).__name__}: {notes[0]}")

    def _histograms(
        self,
        columns: FloatArray,
        classes: range,
        labels: IntArray,
        weight: FloatArray,
        part: IntArray,
    ) -> list[tuple[FloatArray, FloatArray]]:
        """Edges and shares of some of the columns."""
        found = []
        for i in part.tolist():
            possible = np.isfinite(columns[i])
            odds = columns[i][possible].astype(np.float64)
            own, mass = labels[possible] == classes[i], self.mass and odds.size > 0
            found.append(histogram(odds, own, weight[possible], self.bins, mass))
        return found

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        levels = at_place(self.levels_.to(logits.dtype), place(class_odds(logits), self.edges_))
        levels = torch.where(torch.isneginf(logits), -torch.inf, levels)
        return torch.where(levels.amax(-1, keepdim=True) > -CERTAIN, levels, logits)


# ----------------------------------------------------------------------------------------- bins


class Ranks(NamedTuple):
    """Samples in the order of their log-odds, those that cannot be told apart taken together."""

    value: FloatArray  # (m,) log-odds
    edge: FloatArray  # (m - 1,) halfway between neighbours
    mass: FloatArray  # (m,) weight up to here
    right: FloatArray  # (m,) weight of those up to here that are right
    group: IntArray  # (n,) place of each sample


def ranked(odds: FloatArray, correct: BoolArray, weight: FloatArray) -> Ranks:
    """Sort samples by their log-odds.

    >>> ranked(np.array([3.0, 1.0, 3.0]), np.array([True, True, False]), np.ones(3)).mass
    array([1., 3.])
    """
    value, group = np.unique(np.round(odds, DIGITS), return_inverse=True)
    mass, right = (
        np.cumsum(np.bincount(group, part).astype(np.float64, copy=False))
        for part in (weight, weight * correct)
    )
    return Ranks(value, (value[1:] + value[:-1]) / 2, mass, right, group)


def equal_mass(ranks: Ranks, bins: int) -> IntArray:
    """The last place of each bin but the last, as :func:`calibrant._core.binning.equal_mass_edges`."""
    wanted = ranks.mass[-1] * np.arange(1, bins) / bins
    cuts = np.unique(np.searchsorted(ranks.mass, wanted * (1 - 1e-12)))
    return np.asarray(cuts[cuts < len(ranks.mass) - 1])


def histogram(
    odds: FloatArray, correct: BoolArray, weight: FloatArray, bins: int, mass: bool
) -> tuple[FloatArray, FloatArray]:
    """Edges on the log-odds ``(m,)``, and the accuracy of each bin ``(m + 1,)``."""
    if mass:
        ranks = ranked(odds, correct, weight)
        cuts = equal_mass(ranks, bins)
        edges, odds = ranks.edge[cuts], ranks.value[ranks.group]
    else:
        edges = logit(uniform_edges(bins)[1:-1]) + SLACK
    return edges, _means(odds, correct.astype(np.float64), edges, weight)


def _means(
    odds: FloatArray, outcome: FloatArray, edges: FloatArray, weight: FloatArray
) -> FloatArray:
    """Mean outcome of each bin; the centre of a bin that holds nothing."""
    found = fill(odds, outcome, np.concatenate([[-np.inf], edges, [np.inf]]), weight).accuracy
    return np.where(np.isnan(found), centres(edges)[0], found)


def centres(edges: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Centre of each bin in confidence, and one minus it, exact near 1 as well."""
    low, high = np.append(-np.inf, edges), np.append(edges, np.inf)
    return (expit(low) + expit(high)) / 2, (expit(-low) + expit(-high)) / 2


def _logit(confidence: FloatArray) -> FloatArray:
    with np.errstate(divide="ignore"):
        return np.asarray(logit(confidence))


def _log(share: FloatArray) -> FloatArray:
    with np.errstate(divide="ignore"):
        return np.maximum(np.log(share), -CERTAIN)


# ------------------------------------------------------------------------------------------ BBQ


class Binning(NamedTuple):
    """A binning and what the samples say about it."""

    cuts: IntArray  # (bins - 1,) places after which a bin ends
    mean: FloatArray  # (bins,) posterior mean of the accuracy
    log_score: float


def binnings(ranks: Ranks) -> list[IntArray]:
    """The different binnings that are averaged over, by their cuts."""
    total = float(ranks.mass[-1])
    root = float(np.cbrt(total))
    least = max(1, math.floor(root / 10))
    most = min(math.ceil(10 * root), math.ceil(total / 5), len(ranks.value))
    found = (equal_mass(ranks, bins) for bins in range(least, max(least, most) + 1))
    return list({cuts.tobytes(): cuts for cuts in found}.values())


def score(ranks: Ranks, cuts: IntArray) -> Binning:
    """Marginal likelihood and posterior means under a Beta prior in each bin."""
    check_time()
    ends = np.append(cuts, len(ranks.value) - 1)
    count, right = (np.diff(sums[ends], prepend=0) for sums in (ranks.mass, ranks.right))
    strength = STRENGTH / len(ends)
    alpha, beta = (strength * centre for centre in centres(ranks.edge[cuts]))
    wrong = np.maximum(count - right, 0)
    terms = gammaln(strength) - gammaln(count + strength)
    terms += gammaln(right + alpha) - gammaln(alpha) + gammaln(wrong + beta) - gammaln(beta)
    return Binning(cuts, (right + alpha) / (count + strength), float(terms.sum()))


# ---------------------------------------------------------------------------------- one-vs-rest


def class_odds(logits: Tensor) -> Tensor:
    """Log-odds of every class, ``(..., classes)``, of logits whose largest is 0.

    Those of the top class come from the sum of the others: 1 minus its probability has no
    digits left.
    """
    log_probs = logits.log_softmax(-1)
    odds = log_probs - torch.log1p(-log_probs.exp().clamp(max=0.75))
    return odds.scatter(-1, logits.argmax(-1, keepdim=True), top_odds(logits))


def class_columns(given: Examples, classes: range) -> FloatArray:
    """Log-odds of some classes ``(classes, n)`` in float32; -inf where they are masked."""
    runs = strips(given)
    ends = np.cumsum([0, *((given.labels[a:b] != IGNORED).sum() for a, b in runs)])
    columns = np.empty((len(classes), ends[-1]), np.float32)

    def walk(strip: tuple[int, int], done: int) -> None:
        for found in gap_blocks(given, strip):
            odds = class_odds(-found.gaps)[:, classes.start : classes.stop]
            masked = torch.isneginf(found.block.logits[:, classes.start : classes.stop])
            after = done + len(odds)
            columns[:, done:after] = odds.masked_fill(masked, -torch.inf).cpu().numpy().T
            done = after

    on_threads(walk, runs, ends[:-1].tolist())
    return columns


def _filled(rows: list[FloatArray], width: int, value: float) -> FloatArray:
    """Rows of different lengths as one array, the short ones filled up with a value."""
    width = min(width, max(len(row) for row in rows))
    found = np.full((len(rows), width), value)
    for row, values in zip(found, rows, strict=True):
        row[: len(values)] = values
    return found
