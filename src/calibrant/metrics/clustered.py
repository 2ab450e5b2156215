r"""Calibration of tokens that come in documents, with intervals that allow for these.

Tokens of one document are correlated: a hard text is hard for many tokens in a row, and intervals
that assume independent tokens are far too narrow. Here whole documents are left out in turn (the
jackknife), from sums per document. AUROC has the standard error of clustered data (Obuchowski
1997). For ECE, gaps are drawn with the covariance of the documents (a bootstrap with normal
multipliers), and the interval holds the errors of those true gaps that agree with what was
observed, by :func:`calibrant.metrics.gaps.error_interval`. The degrees of freedom are those of
the effective number of documents, :math:`(\sum_d n_d)^2 / \sum_d n_d^2 - 1`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from calibrant._core.binning import Bins, bin_index, fill, uniform_edges
from calibrant._core.checks import FloatArray, IntArray, Values, as_float64, as_pairs, check_level
from calibrant.metrics import gaps, intervals, ranking
from calibrant.metrics.evaluation import Evaluation
from calibrant.metrics.gaps import GapCells
from calibrant.metrics.intervals import Estimate
from calibrant.metrics.ranking import RiskCoverage
from calibrant.metrics.reliability import Reliability

_MIN_DOCUMENTS = 1.5
"""Effective number of documents that intervals need."""
_TOKEN_METRICS = ("accuracy", "ece", "debiased_ece", "nll", "brier", "auroc")


@dataclass(frozen=True, eq=False, repr=False)
class ConfidenceEvaluation(Evaluation):
    r"""An :class:`Evaluation` of the confidences of tokens or answers.

    ``accuracy`` is the share that is right, ``brier`` the mean of
    :math:`(\text{confidence} - \text{right})^2`, from 0 to 1.

    ``documents`` counts the documents of tokens, or the questions that several answers belong to;
    0 for independent answers. ``risk_coverage`` is the error rate among the most confident, at some
    of the thresholds; of answers with intervals. ``unit`` says what was measured.
    """

    documents: int = 0
    risk_coverage: RiskCoverage | None = None
    unit: Literal["tokens", "answers"] = "tokens"

    def reliability(self) -> Reliability:
        """Return the numbers of a reliability diagram; bins of tokens have no intervals.

        Tokens of a document are not independent: intervals by their number would be too narrow.
        """
        curve = super().reliability()._replace(probability="")  # accuracy, not frequency of y = 1
        if not self.documents:
            return curve
        unknown = np.full_like(curve.accuracy, np.nan)
        return curve._replace(low=unknown, high=unknown, level=math.nan)

    @property
    def probability(self) -> str:
        """Empty: the event is that the answer or the token is right, see :meth:`describe`."""
        return ""

    def describe(self) -> str:
        """Describe in one line what was measured."""
        counted, event = f"{self.n:,} answers", "the answer is right"
        if self.documents and self.unit == "answers":
            counted = f"{self.n:,} answers in {self.documents:,} groups"
        elif self.documents:
            counted = f"{self.n:,} tokens of {self.documents:,} documents"
            event = "the likeliest token comes next"
        return f"{counted}; confidence that {event}; {self.binning}"


def evaluate_tokens(
    confidence: Values,
    correct: Values,
    documents: Values,
    *,
    nll: Values | None = None,
    bins: int = 15,
    level: float | None = 0.9,
    replicates: int = 1000,
    seed: int = 0,
) -> ConfidenceEvaluation:
    """Measure the calibration of tokens, with intervals for tokens that come in documents.

    The metrics are accuracy, ECE, debiased ECE, NLL, Brier score and AUROC. There are no intervals
    with one document, nor if one holds most tokens (four in five, with two).

    Parameters
    ----------
    confidence : (n,) in [0, 1]
        Probability of the likeliest token.
    correct : (n,) 0 or 1
        1 if it was the next token.
    documents : (n,)
        Document of each token. Documents are independent, tokens within one are not.
    nll : (n,), optional
        Negative log-likelihood of the next token.
    bins : int
        Number of equal-width bins.
    level : float, optional
        Coverage of the intervals; None for none.
    replicates, seed : int
        Random seed for the interval of ECE.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> documents = np.repeat(np.arange(200), 50)
    >>> confidence = rng.random(10_000)
    >>> hard = np.repeat(0.2 * rng.normal(size=200), 50)  # for all tokens of a document
    >>> result = evaluate_tokens(confidence, rng.random(10_000) < confidence + hard, documents)
    >>> [round(x, 3) for x in result["accuracy"]]
    [0.484, 0.463, 0.505]
    """
    claimed, outcome, _ = as_pairs(confidence, correct)
    scores = {"accuracy": outcome, "brier": (claimed - outcome) ** 2}
    if nll is not None:
        scores["nll"] = as_float64(nll).reshape(-1)
        if scores["nll"].shape != claimed.shape or not np.isfinite(scores["nll"]).all():
            raise ValueError(
                f"nll must be finite, one value for each of {claimed.size} tokens, got shape "
                f"{np.shape(nll)}: a masked token cannot be the label"
            )
    names = np.asarray(documents).reshape(-1)
    if names.size != claimed.size:
        raise ValueError(f"documents must have {claimed.size} entries, got {names.size}")
    unique, number = np.unique(names, return_inverse=True)
    filled = fill(claimed, outcome, uniform_edges(bins))
    auroc = _clustered_auroc(claimed, outcome, number)
    if level is None or _effective_documents(number) < _MIN_DOCUMENTS:
        level = None
        estimates = {name: Estimate(float(x.mean())) for name, x in scores.items()}
        estimates["auroc"] = Estimate(auroc.value)
        estimates["ece"] = Estimate(float(gaps.total(filled.gap)))
        estimates["debiased_ece"] = Estimate(gaps.debiased(filled))
    else:
        check_level(level)
        estimates = _clustered_intervals(
            claimed, number, filled, scores, level=level, replicates=replicates, seed=seed
        )
        estimates["auroc"] = intervals.logit_interval(*auroc, level)
    curve = ranking.risk_coverage(confidence=claimed, outcome=outcome)
    return ConfidenceEvaluation(
        {name: estimates[name] for name in _TOKEN_METRICS if name in estimates},
        n=len(outcome),
        classes=2,
        estimand="top_label",
        bins=filled,
        level=level,
        documents=unique.size,
        risk_coverage=curve.thinned().without_intervals(),
    )


class Gain(NamedTuple):
    """Mean improvement of one head over another, with its standard error."""

    mean: float
    error: float
    documents: int


Evaluations: TypeAlias = dict[str, ConfidenceEvaluation]
"""Evaluations by the name of what was done to the predictions, ``before`` for nothing."""


def paired_gain(
    before: FloatArray, after: FloatArray, documents: IntArray, weight: FloatArray
) -> Gain:
    """Mean difference of the scores of tokens, with documents as the sampling unit.

    Tokens of one text are correlated, so the error is the jackknife's over documents; it is
    infinite if one document holds all the weight.
    """
    _, member = np.unique(documents, return_inverse=True)
    total = np.bincount(member, weight * (before - after))
    mass = np.bincount(member, weight)
    mean, count = float(total.sum() / mass.sum()), len(total)
    if not (mass < mass.sum()).all():
        return Gain(mean, math.inf, count)
    error = np.linalg.norm(_jackknife_influence(np.column_stack([mass, total])))
    return Gain(mean, float(error), count)


def _influence(
    claimed: FloatArray, number: IntArray, edges: FloatArray, scores: Mapping[str, FloatArray]
) -> FloatArray:
    """Influence of each document on scores and gaps, ``(documents, scores + bins)``."""
    documents, bins = int(number.max()) + 1, len(edges) - 1
    sums = [np.bincount(number, x, documents) for x in (np.ones(len(number)), *scores.values())]
    cell, off = number * bins + bin_index(claimed, edges), claimed - scores["accuracy"]
    off_in_bins = np.bincount(cell, off, documents * bins).reshape(documents, bins)
    return _jackknife_influence(np.column_stack([*sums, off_in_bins]))


def _clustered_intervals(
    claimed: FloatArray,
    number: IntArray,
    filled: Bins,
    scores: Mapping[str, FloatArray],
    *,
    level: float,
    replicates: int,
    seed: int,
) -> dict[str, Estimate]:
    """Estimate means of scores, and ECE, with the influence of documents."""
    influence = _influence(claimed, number, filled.edges, scores)
    freedom = _effective_documents(number) - 1
    deviations = np.linalg.norm(influence, axis=0).tolist()
    reach = float(stdtrit(freedom, (1 + level) / 2))
    estimates = {}
    for (name, score), deviation in zip(scores.items(), deviations, strict=False):
        value = float(score.mean())
        estimates[name] = Estimate(value, value - reach * deviation, value + reach * deviation)
    accuracy = estimates["accuracy"].value
    estimates["accuracy"] = intervals.logit_interval(accuracy, deviations[0], freedom, level)
    noise = gaps._group_noise(influence[:, len(scores) :], replicates, seed)
    thinned = _thinned(filled, noise)
    # factors that turn normal noise into Student's
    squares = np.random.default_rng([seed, 1]).chisquare(freedom, (replicates, 1))
    cells = _cells(thinned, noise * np.sqrt(freedom / squares), accuracy)
    errors = {"ece": float(gaps.total(filled.gap)), "debiased_ece": gaps.debiased(thinned)}
    for name, value in errors.items():
        estimates[name] = gaps.error_interval(value, gaps.total, cells, level)
    return estimates


def _effective_documents(number: IntArray) -> float:
    """Return the number of equally long documents that would carry as much information."""
    tokens = np.bincount(number)
    return float(tokens.sum() ** 2 / (tokens.astype(np.float64) ** 2).sum())


def _jackknife_influence(sums: FloatArray) -> FloatArray:
    """Influence of each document on means, ``(documents, k)``, from sums ``(documents, 1 + k)``.

    The first column counts. The root of the sum of squares is the jackknife standard error.
    """
    tokens, totals = sums[:, :1], sums[:, 1:]
    whole, documents = tokens.sum(), len(sums)
    off = (totals - tokens * totals.sum(0) / whole) / (whole - tokens)
    return np.asarray(math.sqrt((documents - 1) / documents) * off)


def _thinned(filled: Bins, noise: FloatArray) -> Bins:
    """Return bins of as many independent tokens as would have this noise."""
    deviation, alone = noise.std(0, ddof=1), gaps.gap_deviation(filled)
    ratio = np.divide(deviation, alone, out=np.ones_like(alone), where=alone > 0)
    squares = filled.squares * np.maximum(ratio, 0.1) ** 2
    spread = (deviation * filled.total) ** 2 + filled.gap**2 * squares.sum()
    return replace(filled, squares=squares, spread=spread)


def _cells(filled: Bins, noise: NDArray[Any], accuracy: float) -> GapCells:
    """Cells whose noise is that of documents, ``(replicates, cells)``."""
    share = filled.weight / filled.total
    claimed = np.clip(np.where(filled.weight > 0, filled.confidence, 0.0), 0, 1)
    # number of independent tokens that would give the overall gap the same variance
    variance = max(float(noise.sum(1).var(ddof=1)), 1e-12)
    worth = max(accuracy * (1 - accuracy) / variance, 1.0)
    size = np.ceil(share * worth).astype(np.int64)

    def sampled(right: FloatArray) -> FloatArray:
        return np.asarray(share * (claimed - right) + noise)

    return GapCells(filled.gap, share, claimed, gaps.gap_curve(filled)(claimed), size, sampled)


def _clustered_auroc(
    confidence: FloatArray, outcome: FloatArray, number: IntArray
) -> ranking.Influenced:
    """AUROC with the standard error of Obuchowski (1997), for tokens in documents."""
    from scipy.stats import rankdata

    right = outcome == 1
    yes, no = int(right.sum()), int((~right).sum())
    if not yes or not no:
        return ranking.Influenced(math.nan, math.nan, 0.0)
    rank = rankdata(confidence)
    # share of the other side that each token is ranked above, or below; ties count half
    above = (rank[right] - rankdata(confidence[right])) / no
    below = 1 - (rank[~right] - rankdata(confidence[~right])) / yes
    value, documents = float(above.mean()), int(number.max()) + 1
    if documents < 2:
        return ranking.Influenced(value, math.nan, 0.0)
    influence = np.empty_like(confidence)
    influence[right], influence[~right] = (above - value) / yes, (below - value) / no
    columns = (np.bincount(number, each, documents) for each in (None, number.size * influence))
    deviation = float(np.linalg.norm(_jackknife_influence(np.column_stack([*columns]))))
    effective = min(_effective_documents(number[side]) for side in (right, ~right))
    return ranking.Influenced(value, deviation, effective - 1)
