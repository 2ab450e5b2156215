"""Bayesian binning into quantiles, and a Platt map cut into steps."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import expit, gammaln, logsumexp
from torch import Tensor

from calibrant._core.binning import BinCount
from calibrant._core.checks import BoolArray, FloatArray, IntArray
from calibrant._core.solve import check_time
from calibrant.calibrators import histogram
from calibrant.calibrators.confidence_maps import fit_platt
from calibrant.calibrators.histogram import (
    STEP_SHAPES,
    RankedOdds,
    as_steps,
    equal_mass,
    ranked,
    step_map,
)
from calibrant.calibrators.top_label import TopLabelMap

PRIOR_EXAMPLES = 2.0  # examples that the prior of a binning is worth, N' of Naeini et al. 2015
MIN_POSTERIOR_SHARE = 1e-6  # share of the posterior below which a binning is left out


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
    learned_shapes = STEP_SHAPES
    parameter_count = 10
    """Bins in the middle of the range for a thousand examples: they grow with the examples."""

    def __init__(self, *, keep_argmax: bool | None = None) -> None:
        super().__init__(keep_argmax=keep_argmax)
        self._store(edges_=torch.zeros(0), levels_=torch.zeros(1))

    def _fit_map(self, odds: FloatArray, outcome: BoolArray, weight: FloatArray) -> None:
        ranks = ranked(odds, outcome, weight)
        result = [score(ranks, cuts) for cuts in binnings(ranks)]
        share = np.exp([b.log_score for b in result] - logsumexp([b.log_score for b in result]))
        kept = [(b, s) for b, s in zip(result, share, strict=True) if s >= MIN_POSTERIOR_SHARE]
        cuts = np.unique(np.concatenate([b.cuts for b, _ in kept]))
        last = np.append(cuts, len(ranks.value) - 1)  # the last example of each step
        mean = sum(s * b.mean[np.searchsorted(b.cuts, last)] for b, s in kept)
        confidence = np.asarray(mean) / sum(s for _, s in kept)
        self._store(**as_steps(ranks.edge[cuts], confidence))

    def _map(self, odds: Tensor) -> Tensor:
        return step_map(self, odds)


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
    learned_shapes = STEP_SHAPES

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
        ranks = ranked(odds, outcome, weight)
        edges = ranks.edge[equal_mass(ranks, self.bins)]
        line = expit(slope * odds + offset)
        confidence = histogram.bin_means(ranks.value[ranks.group], line, edges, weight)
        self._store(**as_steps(edges, confidence))

    def _map(self, odds: Tensor) -> Tensor:
        return step_map(self, odds)


class Binning(NamedTuple):
    """A binning and what the examples say about it."""

    cuts: IntArray  # (bins - 1,) places after which a bin ends
    mean: FloatArray  # (bins,) posterior mean of the accuracy
    log_score: float


def binnings(ranks: RankedOdds) -> list[IntArray]:
    """The different binnings that are averaged over, by their cuts."""
    total = float(ranks.mass[-1])
    root = float(np.cbrt(total))
    least = max(1, math.floor(root / 10))
    most = min(math.ceil(10 * root), math.ceil(total / 5), len(ranks.value))
    result = (equal_mass(ranks, bins) for bins in range(least, max(least, most) + 1))
    return list({cuts.tobytes(): cuts for cuts in result}.values())


def score(ranks: RankedOdds, cuts: IntArray) -> Binning:
    """Marginal likelihood and posterior means under a Beta prior in each bin."""
    check_time()
    ends = np.append(cuts, len(ranks.value) - 1)
    count, right = (np.diff(sums[ends], prepend=0) for sums in (ranks.mass, ranks.right))
    strength = PRIOR_EXAMPLES / len(ends)
    alpha, beta = (strength * centre for centre in histogram.centres(ranks.edge[cuts]))
    wrong = np.maximum(count - right, 0)
    terms = gammaln(strength) - gammaln(count + strength)
    terms += gammaln(right + alpha) - gammaln(alpha) + gammaln(wrong + beta) - gammaln(beta)
    return Binning(cuts, (right + alpha) / (count + strength), float(terms.sum()))
