r"""Calibration errors that are functions of sums per bin.

Of two classes P(y = 1) is measured, of more the top label; pairs may come from any reduction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from calibrant._core.binning import Bins, uniform_edges
from calibrant._core.checks import FloatArray, check_some
from calibrant.metrics import gaps, reductions
from calibrant.metrics.classwise import Average, ClassBins, classwise_estimate
from calibrant.metrics.reductions import (
    EventData,
    Input,
    ScoreData,
    _examples_of_caller,
    pairs_from,
)
from calibrant.metrics.summary import Metric

if TYPE_CHECKING:
    from typing_extensions import Unpack


def binned_pairs(
    logits: Input = None, labels: Input = None, *, bins: int = 15, **data: Unpack[EventData]
) -> Bins:
    """Sums of pairs in ``bins`` equal-width bins.

    >>> binned_pairs(confidence=[0.95, 1.0], outcome=[1, 0], bins=10).accuracy[-1]
    np.float64(0.5)
    """
    return pairs_from(logits, labels, **data).filled(uniform_edges(bins))


@reductions.keywords(EventData)
def ece(
    logits: Input = None, labels: Input = None, *, bins: int = 15, **data: Unpack[EventData]
) -> float:
    r"""Expected calibration error with equal-width bins.

    .. math:: \mathrm{ECE} = \sum_b \frac{n_b}{n} \, | \bar{y_b} - \bar{p_b} |

    with mean outcome :math:`\bar{y_b}` and mean confidence :math:`\bar{p_b}` of the :math:`n_b`
    examples in a bin (Guo et al. 2017, eq. 3). The examples come as ``ece(logits, labels)``,
    ``ece(probs=..., labels=...)``, or as pairs: ``ece(confidence=..., outcome=...)``.

    Parameters
    ----------
    logits : (..., classes), or (n,) log-odds of two classes
    labels : (...) integers, -100 ignored
    bins : int
        Number of equal-width bins (lo, hi], the first one closed.
    probs : (..., classes), or (n,) for P(y = 1)
    confidence : (...) in [0, 1]
    outcome : (...) 0 or 1
    sample_weight : (...), optional
        Example weights; 0 excludes.
    class_dim : int, optional
        Dimension of the classes where it is not the last, as 1 for ``(n, classes, height, width)``.
    ignore_index : int, optional
        Label of ignored examples beside -100, such as 255.
    estimand : {"auto", "top_label", "binary", "multilabel"}
        Which probability of logits or probs is compared with which event. "auto" is P(y = 1) for
        two classes and the largest probability for more.

    Examples
    --------
    >>> ece([[2.0, 0.0, 0.0], [1.0, 0.0, 0.0]], [0, 1])  # the largest: 0.79 and 0.58
    0.395
    >>> ece([1.0, -1.0], [1, 1])  # P(y = 1): 0.73 and 0.27
    0.5
    >>> ece([1.0, -1.0], [1, 1], estimand="top_label")  # 0.73 twice, of which one is right
    0.231
    >>> ece(confidence=[0.95, 1.0], outcome=[1, 0], bins=10)
    0.475
    """
    return float(gaps.total(binned_pairs(logits, labels, bins=bins, **data).gap))


@reductions.keywords(EventData)
def debiased_ece(
    logits: Input = None, labels: Input = None, *, bins: int = 15, **data: Unpack[EventData]
) -> float:
    r"""ECE without the part that sampling noise adds.

    The gaps :math:`\hat g_b = \frac{n_b}{n} (\bar{p_b} - \bar{y_b})` have noise of deviation
    :math:`\sigma_b`, which does not cancel inside the absolute value. The debiased value is
    :math:`s \sum_b |d_b|`, where :math:`d_b` are the gaps of a curve through the observed ones
    (smooth where that explains them), and :math:`s` is such that the observed sum is its mean
    under that noise,

    .. math:: \sum_b E\,| s d_b + \sigma_b \varepsilon | = \sum_b |\hat g_b|, \quad
        \varepsilon \sim N(0, 1),

    and 0 where noise alone explains the sum. Subtracting one estimate of the bias (Kumar et al.
    2019) leaves about 60 % of it when the model is calibrated. Input as for :func:`ece`.

    >>> debiased_ece(confidence=[0.7] * 100, outcome=[1] * 66 + [0] * 34)
    0.0
    """
    return gaps.debiased(binned_pairs(logits, labels, bins=bins, **data))


@reductions.keywords(EventData)
def ada_ece(
    logits: Input = None, labels: Input = None, *, bins: int = 15, **data: Unpack[EventData]
) -> float:
    """Adaptive calibration error: ECE with bins of equal mass.

    Equal confidences are never separated, so ties leave fewer bins. Input as for :func:`ece`.

    >>> ada_ece(confidence=[0.7] * 1000, outcome=[1] * 700 + [0] * 300)
    0.0
    """
    pairs = pairs_from(logits, labels, **data)
    return float(gaps.total(pairs.filled(pairs.equal_mass_edges(bins)).gap))


@reductions.keywords(ScoreData)
def classwise_ece(
    logits: Input = None,
    labels: Input = None,
    *,
    bins: int = 15,
    average: Average = "mean",
    threshold: float = 0.0,
    **data: Unpack[ScoreData],
) -> float:
    r"""Average over the classes of the one-vs-rest ECE.

    .. math:: \frac{1}{K} \sum_k \sum_b \frac{n_{kb}}{n_k} | \bar{y_{kb}} - \bar{p_{kb}} |

    With many classes almost every probability is near zero and right. ``average="prevalence"``
    weighs each class by its share of the labels; ``threshold`` leaves out probabilities at or below
    it, so that a class is judged by the examples in which it was at stake (0.01 is a usual choice
    at 1000 classes).

    Parameters
    ----------
    logits, probs : (..., classes)
    labels : (...) integers, -100 ignored
    bins : int
        Number of equal-width bins of each class.
    average : {"mean", "prevalence"}
    threshold : float
    sample_weight : (...) or fewer leading dimensions, optional

    Examples
    --------
    >>> round(classwise_ece([[2.0, 0.0], [2.0, 0.0]], [0, 1]), 3)
    0.381
    """
    return _class_bins(logits, labels, bins, threshold, **data).average(average)


@reductions.keywords(ScoreData)
def per_class_ece(
    logits: Input = None,
    labels: Input = None,
    *,
    bins: int = 15,
    threshold: float = 0.0,
    **data: Unpack[ScoreData],
) -> FloatArray:
    """One-vs-rest ECE of each class, ``(classes,)``; NaN for a class with nothing to count.

    >>> per_class_ece([[2.0, 0.0], [2.0, 0.0]], [0, 1]).round(3)
    array([0.381, 0.381])
    """
    return _class_bins(logits, labels, bins, threshold, **data).errors()


@reductions.keywords(EventData)
def mce(
    logits: Input = None,
    labels: Input = None,
    *,
    bins: int = 15,
    min_count: int | None = None,
    **data: Unpack[EventData],
) -> float:
    r"""Maximum calibration error over bins with enough examples.

    .. math:: \mathrm{MCE} = \max_{b:\, n_b \ge m} | \bar{y_b} - \bar{p_b} |

    The default ``min_count`` is 1 % of the examples and at least 10, since small bins are far off
    by chance. NaN when no bin has that many. Input as for :func:`ece`.

    >>> mce(confidence=[0.9] * 50 + [0.2], outcome=[1] * 40 + [0] * 10 + [1])
    0.1
    """
    filled = binned_pairs(logits, labels, bins=bins, **data)
    return float(gaps._worst(filled, min_count)(filled.gap))


@reductions.keywords(EventData)
def over_ece(
    logits: Input = None, labels: Input = None, *, bins: int = 15, **data: Unpack[EventData]
) -> float:
    r"""Part of ECE from bins with too much confidence.

    .. math:: \sum_b \frac{n_b}{n} \max(\bar{p_b} - \bar{y_b}, 0)

    ``over_ece + under_ece == ece`` for the same bins. Input as for :func:`ece`.

    >>> over_ece(confidence=[0.9, 0.9, 0.5, 0.5], outcome=[1, 0, 1, 1], bins=10)
    0.2
    """
    return float(gaps._over(binned_pairs(logits, labels, bins=bins, **data).gap))


@reductions.keywords(EventData)
def under_ece(
    logits: Input = None, labels: Input = None, *, bins: int = 15, **data: Unpack[EventData]
) -> float:
    r"""Part of ECE from bins with too little confidence.

    .. math:: \sum_b \frac{n_b}{n} \max(\bar{y_b} - \bar{p_b}, 0)

    Input as for :func:`ece`.

    >>> under_ece(confidence=[0.9, 0.9, 0.5, 0.5], outcome=[1, 0, 1, 1], bins=10)
    0.25
    """
    return float(gaps._under(binned_pairs(logits, labels, bins=bins, **data).gap))


def _class_bins(
    logits: Input, labels: Input, bins: int, threshold: float, **data: Unpack[ScoreData]
) -> ClassBins:
    examples, _ = _examples_of_caller(logits, labels, **data)
    sums = ClassBins.empty(examples.columns, bins, threshold=threshold)
    check_some(reductions.reduce_examples(examples, sums).nll.size)
    return sums


TABLE = (
    Metric(
        "ECE",
        ece,
        lambda s: s.error(gaps.total),
        "Guo et al. 2017",
        ("expected_calibration_error",),
        by_groups=True,
    ),
    Metric(
        "ECE, debiased",
        debiased_ece,
        lambda s: s.error(gaps.total, value=gaps.debiased(s.bins)),
        by_groups=True,
    ),
    Metric(
        "ECE, equal mass",
        ada_ece,
        lambda s: s.error(gaps.total, lambda: s.equal_mass),
        "Nguyen and O'Connor 2015",
        ("adaptive_ece", "adaece", "aece", "equal_mass_ece"),
        needs_pairs=True,
    ),
    Metric(
        "ECE, class-wise",
        classwise_ece,
        lambda s: classwise_estimate(s.classwise, s.level),
        "Nixon et al. 2019, Kull et al. 2019",
        ("cw_ece", "cwece", "class_wise_ece", "static_calibration_error"),
    ),
    Metric(
        "maximum error",
        mce,
        lambda s: s.error(gaps._worst(s.bins)),
        "Guo et al. 2017",
        ("maximum_calibration_error", "max_ece"),
        by_groups=True,
    ),
    Metric("ECE, over-confident", over_ece, lambda s: s.error(gaps._over), by_groups=True),
    Metric("ECE, under-confident", under_ece, lambda s: s.error(gaps._under), by_groups=True),
)
