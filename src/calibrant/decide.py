"""What a calibrated probability is for: thresholds, prediction sets, and another class mix.

:func:`threshold` finds the confidence from which on answers may be accepted, :func:`conformal`
gives sets of classes that hold the true one as often as asked, and :func:`label_shift` adapts a
calibrator to data in which the classes are not as frequent as where it was fitted.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from numbers import Real
from typing import Literal, NamedTuple, TypeVar, get_args, overload

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, logit
from scipy.stats import beta, binom
from torch import Tensor

from calibrant._checks import (
    IGNORED,
    BoolArray,
    FloatArray,
    IntArray,
    Logits,
    Values,
    as_float64,
    as_labels,
    as_pairs,
    as_scores,
    check_labels,
    check_shapes,
    check_some,
    check_sums,
    float_info,
)
from calibrant._walk import Examples
from calibrant.calibrators.base import Calibrator, Context

T = TypeVar("T", bound=np.generic)

# ----------------------------------------------------------------------------------- thresholds

STEPS = 10
"""Thresholds that are tried per unit of log-odds."""
REACH = 7
"""Log-odds up to which they lie above ``1 - max_error``, and down to which below zero."""
FALL = 3.0
"""How much less of the error probability a search gets that starts one unit further away."""


class Threshold(NamedTuple):
    """From which confidence on to accept, and what is known about the examples accepted.

    Attributes
    ----------
    threshold : float
        Accept an example when its confidence is at least this; inf accepts none.
    coverage : float
        Share of the given examples that it accepts.
    error : float
        Share of wrong ones among those; NaN if there are none.
    bound : float
        Clopper-Pearson upper bound of the error at the level of the test that this threshold
        passed. It shows how close the call was. What is guaranteed is ``max_error``.
    n : int
        Number of examples given.
    """

    threshold: float
    coverage: float
    error: float
    bound: float
    n: int


def threshold(
    confidence: Values, outcome: Values, *, max_error: float, level: float = 0.95
) -> Threshold:
    r"""Lowest confidence from which on the error is shown to be at most ``max_error``.

    With :math:`R(t) = P(\text{wrong} \mid \text{confidence} \ge t)`, the error among accepted
    examples of the population, and the threshold :math:`\hat t` that comes back,

    .. math:: P\left(R(\hat t) \le \mathtt{max\_error}\right) \ge \mathtt{level}

    over the draw of the given examples, for any number of them, with ties, and whether or not
    the confidences are calibrated or in a useful order. The examples must be independent, from
    the population to which the threshold will be applied, and not those on which the model or
    its calibrator was fitted. The promise is about all accepted examples together, not about
    a class or a group among them.

    Thresholds are tried on a grid that does not depend on the data. Of m accepted examples k
    are wrong; since k is binomial given m, :math:`P(\mathrm{Bin}(m, \mathtt{max\_error}) \le k)`
    is a p-value. The tests run from high thresholds to low ones, each with the error probability
    that the one before it had, if that one passed (the fallback procedure of Wiens and Dmitrienko
    2005, here in the way of Learn then Test, Angelopoulos et al. 2021). What enters sums to
    :math:`1 - \mathtt{level}`: half of it next to ``1 - max_error``, above which calibrated
    confidences are safe, and the rest at points around it, where the search may have to start
    for uncalibrated ones.

    Parameters
    ----------
    confidence : (...) in [0, 1]
        As ``calibrant.top_label`` gives it, for calibrated logits.
    outcome : (...) 0 or 1
        Whether the answer was right.
    max_error : float in (0, 1)
    level : float in (0, 1)

    Returns
    -------
    Threshold
        With a threshold of inf, and a warning, where the examples do not suffice for any.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> confidence = rng.uniform(0.5, 1, 4000)
    >>> right = rng.random(4000) < confidence
    >>> found = threshold(confidence, right, max_error=0.1)
    >>> round(found.threshold, 2), round(found.coverage, 2), round(found.error, 2)
    (0.84, 0.32, 0.08)
    """
    claimed, happened, _ = as_pairs(confidence, outcome)
    _check_share(max_error, "max_error", "0.05 allows 5 % of wrong answers")
    _check_share(level, "level", "0.95 means 95 %")
    grid, shares = _grid(max_error)
    grid = _as_held(grid, as_scores(confidence, "confidence"))
    accepted, wrong = _accepted(claimed, happened, grid)
    p_values = np.where(accepted > 0, binom.cdf(wrong, accepted, max_error), 1.0)
    levels, passed = _fallback(p_values, (1 - level) * shares)
    if not passed.any():
        _warn_of_none(claimed.size, max_error, level, float(shares.max()))
        return Threshold(math.inf, 0.0, math.nan, math.nan, claimed.size)
    at = int(passed.nonzero()[0][-1])
    m, k = int(accepted[at]), int(wrong[at])
    bound = float(beta.ppf(1 - levels[at], k + 1, m - k))
    return Threshold(float(grid[at]), m / claimed.size, k / m, bound, claimed.size)


def _check_share(value: float, name: str, example: str) -> None:
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}: {example}")
    if not 0 < 1 - value < 1:  # 1 - 1e-17 is 1: such a share cannot be asked for
        raise ValueError(f"{name} must be between 0 and 1, got {value}: {example}")


def _grid(max_error: float) -> tuple[FloatArray, FloatArray]:
    """Thresholds from high to low, and the share of the error probability that enters at each."""
    # Half a step lower, so that 1 - max_error and other round numbers, at which confidences tie,
    # lie between two thresholds: which side such a tie is on must not hang on its last digit.
    middle = float(logit(1 - max_error)) - 0.5 / STEPS
    below = max(0, math.ceil(middle + REACH))
    step = np.arange(REACH * STEPS, -below * STEPS - 1, -1)
    shares = np.where(step % STEPS == 0, FALL ** -np.abs(step / STEPS), 0.0)
    # the last one accepts everything
    return np.append(expit(middle + step / STEPS), 0.0), np.append(shares / shares.sum(), 0.0)


def _as_held(grid: FloatArray, confidence: Logits) -> FloatArray:
    """Thresholds in the dtype of the confidences, to which ``confidence >= t`` rounds them."""
    if isinstance(confidence, Tensor):
        return as_float64(torch.from_numpy(grid).to(confidence.dtype))
    return as_float64(grid.astype(confidence.dtype))


def _accepted(
    claimed: FloatArray, happened: FloatArray, grid: FloatArray
) -> tuple[IntArray, IntArray]:
    """Number of examples at or above each threshold, and of wrong ones among them."""
    order = np.argsort(-claimed)
    wrong = np.append(0, np.cumsum(happened[order] == 0))
    accepted = np.searchsorted(-claimed[order], -grid, side="right")
    return accepted, wrong[accepted]


def _fallback(p_values: FloatArray, shares: FloatArray) -> tuple[FloatArray, BoolArray]:
    """Level of each test, and whether it passed: then its level is free for the next one."""
    levels, passed = np.empty_like(p_values), np.zeros(len(p_values), dtype=bool)
    carried = 0.0
    for i, (p, share) in enumerate(zip(p_values, shares, strict=True)):
        levels[i] = carried + share
        passed[i] = 0 < levels[i] >= p
        carried = levels[i] if passed[i] else 0.0
    return levels, passed


def _warn_of_none(n: int, max_error: float, level: float, share: float) -> None:
    # what a test next to 1 - max_error needs when nothing is wrong
    needed = math.ceil(math.log((1 - level) * share) / math.log1p(-max_error))
    warnings.warn(
        f"no threshold is shown to keep the error at {max_error:g} with {level:.0%} certainty by "
        f"these {n:,} examples: none is accepted. About {needed:,} confident ones without a "
        "mistake, or more with few, are needed: label more, calibrate first, or allow more errors",
        stacklevel=3,
    )


# ------------------------------------------------------------------------------ prediction sets

Score = Literal["lac", "aps", "raps"]
"""How unlike its class an example is.

- ``lac``: minus the probability of the class. The smallest sets on average; those of hard
  examples are too small, and may be empty.
- ``aps``: the probability of all classes before it, from the most probable on, and a random part
  of its own (Romano et al. 2020), less one. Set sizes follow the difficulty.
- ``raps``: as ``aps``, and 0.01 for each rank after the fifth (Angelopoulos et al. 2021), which
  keeps a long tail of classes out.

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


@dataclass(frozen=True)
class ConformalSets:
    """Prediction sets that hold the true class as often as asked; made by :func:`conformal`.

    Attributes
    ----------
    limit : float
        A class is in the set when its score is at most this, but for the last digits; inf if it
        always is.
    score : {"lac", "aps", "raps"}
    coverage : float
        The share that was asked for.
    n, classes : int
        Size of the examples behind it.
    seed : int
        Of the random part of ``aps`` and ``raps``.
    """

    limit: float
    score: Score
    coverage: float
    n: int
    classes: int
    seed: int

    @overload
    def sets(self, probs: Tensor, *, nonempty: bool = False) -> Tensor: ...
    @overload
    def sets(self, probs: ArrayLike, *, nonempty: bool = False) -> BoolArray: ...
    def sets(self, probs: Values, *, nonempty: bool = False) -> Tensor | BoolArray:
        """Which classes are in the set of each row.

        Parameters
        ----------
        probs : (..., classes), or (n,) for P(y = 1)
        nonempty : bool
            Put the most probable class into sets that are empty. Coverage can only rise by it,
            so that its upper limit no longer holds.

        Returns
        -------
        (..., classes) of bool
            NumPy for NumPy, a tensor for a tensor.
        """
        rows = _as_probs(probs)
        if rows.shape[-1] != self.classes:
            raise ValueError(
                f"probs must have {self.classes} classes, as in conformal, got {rows.shape[-1]}"
            )
        # a stored zero is a probability too small for its dtype: it may be that large
        scores = _class_scores(rows, self.score, self.seed, least=_least(probs))
        found = scores <= _loosened(self.limit, probs)
        if nonempty:  # every other set holds the most probable class already
            np.put_along_axis(found, rows.argmax(-1)[..., None], True, -1)
        return _as_given(found, probs)


def conformal(
    probs: Values,
    labels: Values,
    *,
    coverage: float = 0.9,
    score: Score = "aps",
    seed: int = 0,
) -> ConformalSets:
    r"""Prediction sets with a guaranteed coverage, by split conformal prediction.

    Of the scores :math:`s_i` of the n examples with their own labels, the set takes the classes
    whose score is at most the :math:`\lceil (n + 1)(1 - \alpha) \rceil`-th smallest, with
    :math:`1 - \alpha` the coverage. For a new example that is exchangeable with them

    .. math:: 1 - \alpha \le P(y \in \text{set}) \le 1 - \alpha + \frac{1}{n + 1} ,

    the upper side where no two scores are equal. If many are, as with calibrators that give few
    different values, the coverage may be well above. The lower side holds for any probabilities:
    better calibrated ones give smaller sets, not truer ones. It is an average over examples and
    over draws of the n examples, not a promise for each class or each kind of input, and the n
    examples must not be those on which the model or its calibrator was fitted.

    The random part of ``aps`` and ``raps`` is computed from the first digits of a row's
    probabilities and the seed: the same row always gets the same set, in whatever batch it comes.

    Parameters
    ----------
    probs : (..., classes), or (n,) for P(y = 1)
        Probabilities of held-out examples.
    labels : (...) integers, -100 ignored
    coverage : float in (0, 1)
    score : {"lac", "aps", "raps"}
        ``lac`` for the smallest sets, ``aps`` for sizes that follow the difficulty, ``raps`` for
        many classes.
    seed : int

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> logits = 2 * rng.normal(size=(3000, 10))
    >>> labels = (logits + rng.gumbel(size=logits.shape)).argmax(-1)
    >>> probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    >>> fitted = conformal(probs[:1000], labels[:1000], coverage=0.9)
    >>> sets = fitted.sets(probs[1000:])
    >>> print(sets[np.arange(2000), labels[1000:]].mean().round(1))
    0.9
    """
    _check_share(coverage, "coverage", "0.9 means 90 %")
    if score not in get_args(Score):
        raise ValueError(f"score must be one of {get_args(Score)}, got {score!r}")
    rows, targets = _labelled(probs, labels)
    scores = np.take_along_axis(_class_scores(rows, score, seed), targets[:, None], -1)[:, 0]
    limit = _loosened(_limit(scores, coverage), probs)
    return ConformalSets(limit, score, coverage, len(scores), rows.shape[-1], seed)


def _labelled(probs: Values, labels: Values) -> tuple[FloatArray, IntArray]:
    """Rows ``(n, classes)`` that have a label, and the labels."""
    rows, targets = _as_probs(probs), as_labels(labels)
    check_shapes(rows, targets)
    check_labels(targets, rows.shape[-1])
    kept = targets != IGNORED
    check_some(int(kept.sum()))
    return rows[kept], targets[kept]


def _limit(scores: FloatArray, coverage: float) -> float:
    n = len(scores)
    rank = math.ceil((n + 1) * coverage - 1e-9)  # 100 * 0.55 is a little more than 55
    if rank > n:
        warnings.warn(
            f"{n:,} examples cannot show a coverage of {coverage:g}: every set holds all classes; "
            f"{math.ceil(coverage / (1 - coverage) - 1e-9):,} examples or more are needed",
            stacklevel=3,
        )
        return math.inf
    return float(np.partition(scores, rank - 1)[rank - 1])


def _loosened(limit: float, probs: Values) -> float:
    """The limit for scores that are as exact as the probabilities given."""
    return limit + max(SLACK, float_info(as_scores(probs)).eps) * abs(limit)


def _least(probs: Values) -> float:
    """What a probability that is given as zero, or whose complement is given as one, may be."""
    given = as_scores(probs)
    info = float_info(given)
    return float(info.eps if given.ndim == 1 else info.tiny * info.eps)


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
    """A number in [0, 1) for each row, made from the first digits of its values and the seed.

    A stream of random numbers would give a row that comes alone the first number of the stream,
    always the same one, and the coverage of a service that answers one by one would be that of
    this number. Since the score is a function of the row, coverage does not depend on how good
    the mixing is; the mixing makes the sets small. Rows that differ in their last digits only,
    by another precision or batch, must get the same number, and rows of a very sure model, which
    differ in the tails only, must not: so it is the logarithms that are rounded.
    """
    odd = np.random.default_rng(seed).integers(2**63, size=rows.shape[-1], dtype=np.uint64) * 2 + 1
    cells = np.round(-CELLS * np.log(np.clip(rows, FLOOR, 1))).astype(np.uint64)
    mixed = (cells * odd).sum(-1, dtype=np.uint64)
    return np.asarray((mixed >> np.uint64(11)) * 2.0**-53)


# ------------------------------------------------------------------------------ another class mix

PRECISION = 0.01
"""Nats, of all examples together, by which an estimated prior may be below the best."""
ROUNDS = 5_000
"""Steps after which the search for a prior gives up."""


@overload
def shift_prior(probs: Tensor, old_prior: Values, new_prior: Values) -> Tensor: ...
@overload
def shift_prior(probs: ArrayLike, old_prior: Values, new_prior: Values) -> FloatArray: ...
def shift_prior(probs: Values, old_prior: Values, new_prior: Values) -> Tensor | FloatArray:
    r"""Probabilities as they are where the classes have other frequencies.

    .. math:: p'_k = \frac{p_k\, \pi'_k / \pi_k}{\sum_j p_j\, \pi'_j / \pi_j}

    This is Bayes' rule if only the frequencies of the classes differ, and the inputs of each
    class look as they did.

    Parameters
    ----------
    probs : (..., classes), or (n,) for P(y = 1)
        Calibrated probabilities.
    old_prior : (classes,)
        Frequencies of the classes where the probabilities are calibrated: above zero, sum 1.
    new_prior : (classes,)
        Frequencies where they will be used: zero or more, sum 1.

    Returns
    -------
    As ``probs``

    Examples
    --------
    >>> shift_prior([[0.5, 0.5], [0.9, 0.1]], [0.5, 0.5], [0.2, 0.8])
    array([[0.2       , 0.8       ],
           [0.69230769, 0.30769231]])
    """
    rows = _as_probs(probs)
    old, new = _as_priors(old_prior, new_prior, rows.shape[-1])
    shifted = rows * (new / old)
    total = shifted.sum(-1, keepdims=True)
    if not total.all():
        at = int((total == 0).reshape(-1).nonzero()[0][0])
        raise ValueError(
            f"row {at} has no probability outside the classes whose new prior is 0: give those "
            "a small share"
        )
    shifted /= total
    return _as_given(shifted if np.ndim(probs) > 1 else shifted[..., 1], probs)


@overload
def estimate_prior(probs: Tensor, old_prior: Values) -> Tensor: ...
@overload
def estimate_prior(probs: ArrayLike, old_prior: Values) -> FloatArray: ...
def estimate_prior(probs: Values, old_prior: Values) -> Tensor | FloatArray:
    r"""Frequencies of the classes in unlabelled data, from calibrated probabilities.

    The prior :math:`q` at the maximum of

    .. math:: \sum_i \log \sum_k \frac{p_{ik}\, q_k}{\pi_k} + K \sum_k \pi_k \log q_k ,

    which is concave. The first sum is the likelihood of the data (Saerens et al. 2002). The
    second counts K examples more, as many as there are classes, at the old frequencies
    :math:`\pi`: the maximum a posteriori of a Dirichlet prior. Without them a class that no
    example happens to show gets a prior of zero, and the correction then rules it out. With few
    examples for each class that is far worse than no correction; with many the second sum hardly
    counts. EM finds the maximum: shift the probabilities to the present estimate, average them
    and the K examples, repeat. It stops when no prior can be better by more than a hundredth of
    a nat, all data together.

    Only the frequencies of the classes may differ from where the probabilities were calibrated,
    and they must be calibrated class by class, not in the largest probability only: methods with
    a bias for each class (``vector``) do that.

    Parameters
    ----------
    probs : (..., classes), or (n,) for P(y = 1)
    old_prior : (classes,)
        Frequencies of the classes in the data on which the calibrator was fitted.

    Returns
    -------
    (classes,)

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> y = rng.random(5000) < 0.2
    >>> x = rng.normal(2.0 * y - 1)
    >>> balanced = 1 / (1 + np.exp(-2 * x))  # P(y = 1) where both classes are as frequent
    >>> estimate_prior(balanced, [0.5, 0.5]).round(2)
    array([0.8, 0.2])
    """
    rows = _as_probs(probs)
    old = _as_prior(old_prior, rows.shape[-1], "old_prior", least=1e-12)
    found = _likeliest(rows.reshape(-1, rows.shape[-1]) / old, old)
    return _as_given(found, probs)


def _likeliest(ratios: FloatArray, old: FloatArray) -> FloatArray:
    """Weights ``(classes,)`` at the maximum of which :func:`estimate_prior` tells."""
    check_some(len(ratios))
    added = len(old) * old  # examples of each class that are counted besides the data
    total = len(ratios) + added.sum()
    weights: FloatArray = old
    for _ in range(ROUNDS):
        gradient: FloatArray = ((1 / (ratios @ weights)) @ ratios + added / weights) / total
        # the function is concave: nowhere on the simplex is it higher by more than this
        if gradient.max() - 1 <= PRECISION / total:
            break
        weights = weights * gradient
    else:
        warnings.warn(
            f"the estimate of the prior had not settled after {ROUNDS:,} steps: classes that the "
            "probabilities hardly tell apart still have something of their old share",
            stacklevel=3,
        )
    return np.asarray(weights / weights.sum())


class PriorCorrection(Calibrator):
    r"""A calibrator, corrected for other class frequencies: :math:`f(z) + \log(\pi' / \pi)`.

    :func:`label_shift` makes one from unlabelled data. By itself, :meth:`set_priors` corrects
    between priors that are known, and ``fit`` fits the calibrator inside, takes the frequencies
    of the labels for both priors, and so corrects nothing.

    Parameters
    ----------
    calibrator : Calibrator

    Attributes
    ----------
    old_prior_, new_prior_ : (classes,) Tensor

    Examples
    --------
    >>> from calibrant.calibrators import Identity
    >>> plain = Identity().fit([[0.0, 0.0], [0.0, 1.0]], [0, 1])
    >>> PriorCorrection(plain).set_priors([0.5, 0.5], [0.2, 0.8]).predict_proba([[0.0, 0.0]])
    array([[0.2, 0.8]])
    """

    old_prior_: Tensor
    new_prior_: Tensor

    def __init__(self, calibrator: Calibrator) -> None:
        super().__init__()
        self.calibrator = calibrator
        self.needs_features = calibrator.needs_features
        self.needs_head = calibrator.needs_head
        self._learned(old_prior_=torch.zeros(0), new_prior_=torch.zeros(0))
        self.to(calibrator.classes_.device)

    def size(self, classes: int) -> int:
        """Parameters of the calibrator, and a free share for all classes but one."""
        return self.calibrator.size(classes) + classes - 1

    def set_priors(self, old_prior: Values, new_prior: Values) -> PriorCorrection:
        """Correct from one prior ``(classes,)``, above zero, to another, and return self."""
        inside = self.calibrator
        if not inside._classes:
            raise RuntimeError(
                f"this {type(inside).__name__} is not fitted: call fit(logits, labels) first"
            )
        old, new = _as_priors(old_prior, new_prior, max(inside._classes, 2))
        self._learned(old_prior_=old, new_prior_=new)
        self._fitted(inside._classes)
        return self

    def _fit(self, given: Examples, context: Context) -> None:
        self.calibrator._fit(given, context)
        self.calibrator._fitted(1 if given.logits.ndim == 1 else given.classes)
        kept = given.labels != IGNORED
        mass = np.bincount(given.labels[kept], given.labelled_weight(), minlength=given.classes)
        self._learned(old_prior_=mass / mass.sum(), new_prior_=mass / mass.sum())

    def forward(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        """Corrected logits, as those of every calibrator."""
        self._check_input(logits)
        found: Tensor = self.calibrator(logits, features)
        # At a prior of zero the logarithm is -87, not -inf: a class is out, and yet a row in
        # which only such classes are possible keeps its probabilities.
        tiny = torch.finfo(torch.float32).tiny
        new, old = (p.clamp(min=tiny).log() for p in (self.new_prior_, self.old_prior_))
        shift = (new - old).to(found.dtype)
        if self._classes == 1:
            return found + (shift[1] - shift[0])
        shifted = found + shift
        return shifted - shifted.amax(-1, keepdim=True)


def label_shift(
    calibrator: Calibrator,
    logits: Values,
    *,
    old_prior: Values,
    features: Values | None = None,
) -> PriorCorrection:
    r"""Adapt a fitted calibrator to data with other class frequencies, without labels.

    The frequencies are estimated from the calibrated probabilities of the data by
    :func:`estimate_prior`, and :class:`PriorCorrection` then shifts all probabilities to them.
    The result is a calibrator as any other: it can be applied, saved and exported.

    Parameters
    ----------
    calibrator : Calibrator
        Fitted; it is used as it is, inside the result.
    logits : (..., classes), or (n,) log-odds
        Unlabelled, from where the calibrator will be used.
    old_prior : (classes,)
        Frequencies of the classes in the labels on which it was fitted.
    features : (..., width), optional
        For calibrators that need them.

    Examples
    --------
    >>> from calibrant.calibrators import TemperatureScaling
    >>> rng = np.random.default_rng(0)
    >>> y = np.arange(2000) % 2  # as many of each class
    >>> fitted = TemperatureScaling().fit(6 * rng.normal(2 * y - 1), y)
    >>> rare = rng.random(5000) < 0.1
    >>> adapted = label_shift(fitted, 6 * rng.normal(2 * rare - 1), old_prior=[0.5, 0.5])
    >>> round(float(adapted.new_prior_[1]), 1)
    0.1
    """
    new_prior = estimate_prior(calibrator.predict_proba(logits, features), old_prior)
    return PriorCorrection(calibrator).set_priors(old_prior, new_prior)


# -------------------------------------------------------------------------------- what is passed


def _as_probs(probs: Values) -> FloatArray:
    """Probabilities ``(..., classes)`` in float64; of P(y = 1), ``(n,)``, both classes."""
    given = as_scores(probs, "probs")
    eps = float(float_info(given).eps)
    exact = as_float64(given)
    if not ((exact >= 0) & (exact <= 1 + 4 * eps)).all():
        raise ValueError(
            "probs must be in [0, 1]: NaN, negative or larger values were found; of logits take "
            "the softmax first, as calibrator.predict_proba does"
        )
    rows = np.stack([1 - exact, exact], -1) if exact.ndim == 1 else exact
    if rows.ndim < 2 or rows.shape[-1] < 2:
        raise ValueError(f"probs must be (..., classes) or (n,), got {exact.shape}")
    check_sums(rows, eps)
    return rows


def _as_priors(old_prior: Values, new_prior: Values, classes: int) -> tuple[FloatArray, FloatArray]:
    # a share of nothing cannot be scaled to something
    old = _as_prior(old_prior, classes, "old_prior", least=1e-12)
    return old, _as_prior(new_prior, classes, "new_prior", least=0.0)


def _as_prior(prior: Values, classes: int, name: str, *, least: float) -> FloatArray:
    """Frequencies of the classes, ``(classes,)``, that sum to one exactly."""
    shares = as_float64(as_scores(prior, name))
    if shares.shape != (classes,):
        raise ValueError(
            f"{name} must have one share for each of {classes} classes, got {shares.shape}"
        )
    if not (shares >= least).all():  # NaN is not
        worst = float(shares[~(shares >= least)][0])
        raise ValueError(
            f"{name} must be {least:g} or more in every class, got {worst:g}: a class that was "
            "never seen has no probability to correct"
        )
    if abs(shares.sum() - 1) > 1e-4:
        raise ValueError(
            f"{name} must sum to one, got {shares.sum():g}: divide counts by their sum"
        )
    return np.asarray(shares / shares.sum())


def _as_given(values: NDArray[T], given: Values) -> Tensor | NDArray[T]:
    """NumPy for NumPy; for a tensor one on its device, of its precision unless boolean."""
    if not isinstance(given, Tensor):
        return values
    dtype = torch.bool if values.dtype == np.bool_ else given.dtype
    return torch.from_numpy(values).to(dtype).to(given.device)  # not every device has float64
