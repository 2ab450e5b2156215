"""Every refusal says what was wanted, what came, and the remedy; and nothing is half done."""

import math
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import calibrant as cal
from calibrant._core import checks as _checks
from calibrant._core.checks import (
    as_float64,
    as_labels,
    as_pairs,
    as_scores,
    as_values,
    as_weight,
    look_like_probs,
)
from tests.support.calibrators import EVERY_METHOD
from tests.support.metrics import ANY_CLASSES
from tests.support.simulate import drawn

INF = math.inf
OK = np.zeros((4, 3))
YES = [0, 1, 2, 0]


def with_row(*row):
    logits = OK.copy()
    logits[2] = row
    return logits


# Logits and labels

SHAPES = r"logits must be \(\.\.\., classes\) and labels \(\.\.\.\), got "

LOGITS: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "NaN": (
        *(with_row(0, math.nan, 0), YES, ValueError),
        r"logits must be finite, or -inf for masked classes; row 2 has NaN: "
        "find the layer or the example that overflowed",
    ),
    "+inf": (
        *(with_row(0, 0, INF), YES, ValueError),
        r"row 2 has \+inf: clip the logits, or pass log-probabilities",
    ),
    "+inf and NaN": (with_row(INF, math.nan, 0), YES, ValueError, "row 2 has NaN"),
    "all -inf": (
        *(with_row(-INF, -INF, -INF), YES, ValueError),
        "row 2 has -inf in every class: at least one class must be possible",
    ),
    "label masked": (
        *(with_row(0, 0, -INF), YES, ValueError),
        "row 2 has -inf at its own label 2: a masked class cannot be the answer: "
        "correct the mask or the label, or pass probabilities as probs, not as their logarithms",
    ),
    "too few labels": (
        *(OK, [0, 1, 2], ValueError),
        SHAPES + r"\(4, 3\) and \(3,\): one row of logits is wanted for each label",
    ),
    "a column of labels": (
        *(OK, [[0], [1], [2], [0]], ValueError),
        SHAPES + r"\(4, 3\) and \(4, 1\): for a column of labels",
    ),
    "one-hot labels": (
        *(OK, np.eye(3, dtype=int)[YES], ValueError),
        SHAPES + r"\(4, 3\) and \(4, 3\): for one-hot labels pass labels.argmax\(-1\); if every "
        r'column is a tag of its own, estimand="multilabel" \(--multilabel\)',
    ),
    "classes second": (
        *(np.zeros((4, 3, 7)), np.zeros((4, 7), int), ValueError),
        SHAPES
        + r"\(4, 3, 7\) and \(4, 7\): classes come last: pass class_dim=1, or logits.movedim",
    ),
    "one number": (0.5, 0, ValueError, SHAPES + r"\(\) and \(\): one row"),
    "label too large": (
        *(OK, [0, 3, 2, 0], ValueError),
        r"labels must be in \[0, 3\) or -100 \(ignored\), got 3 at row 1: "
        "the logits have 3 classes",
    ),
    "label negative": (OK, [0, 1, -1, 0], ValueError, "got -1 at row 2"),
    "label in a sequence": (
        *(np.zeros((2, 2, 3)), [[0, 1], [5, 0]], ValueError),
        r"got 5 at position \(1, 0\): the logits have 3 classes",
    ),
    "float labels": (
        *(OK, [0.0, 1.0, 2.0, 0.0], TypeError),
        "labels must be integers, got float64: class indices with -100 for ignored examples are "
        r"wanted; convert whole numbers with .astype\(int\) or .long\(\)",
    ),
    "float tensor labels": (
        *(torch.zeros(4, 3), torch.zeros(4), TypeError),
        "labels must be integers, got float32",
    ),
    "labels of text": (
        OK,
        ["a", "b", "c", "a"],
        TypeError,
        "labels must be integers, got names such as 'a'",
    ),
    "no labels": (OK, None, TypeError, "labels are missing"),
    "integer logits": (
        *(np.zeros((4, 3), int), YES, TypeError),
        r"logits must be floating point, got int64: convert with .astype\(float\) or .float\(\)",
    ),
    "integer tensor": (
        *(torch.zeros(4, 3, dtype=torch.int32), YES, TypeError),
        "logits must be floating point, got int32",
    ),
    "bfloat16 array": (
        *(OK.astype(ml_dtypes.bfloat16), YES, TypeError),
        r"logits must be floating point, got bfloat16: convert with .astype\(float\)",
    ),
    "boolean logits": (OK > 0, YES, TypeError, "logits must be floating point, got bool"),
    "complex logits": (OK + 0j, YES, TypeError, "logits must be floating point, got complex128"),
    "text": ([["a", "b"]], [0], TypeError, "logits must be floating point, got str32"),
    "objects": (
        *(np.array([[1.0, None]], dtype=object), [0], TypeError),
        "logits must be floating point, got object: rows of different lengths or Python objects "
        "are not an array of numbers",
    ),
    "no rows": (
        *(np.zeros((0, 3)), np.zeros(0, int), ValueError),
        r"nothing to measure: there are no examples .* or every label is -100 \(ignored\) or every "
        "weight 0",
    ),
    "no rows in a batch": (
        *(np.zeros((2, 0, 3)), np.zeros((2, 0), int), ValueError),
        "nothing to measure",
    ),
    "all ignored": (OK, [-100] * 4, ValueError, "nothing to measure"),
    "no classes": (
        *(np.zeros((4, 0)), YES, ValueError),
        r"logits must have at least two classes, got \(4, 0\): one column of log-odds goes in as "
        r"logits.squeeze\(-1\)",
    ),
    "one class": (
        *(np.zeros((4, 1)), [0] * 4, ValueError),
        r"logits must have at least two classes, got \(4, 1\)",
    ),
}


@pytest.mark.parametrize("case", LOGITS)
def test_logits_and_labels_are_refused_with_reason_and_remedy(case):
    logits, labels, kind, message = LOGITS[case]
    with pytest.raises(kind, match=message):
        cal.evaluate(logits, labels)


DIRECT: dict[str, Any] = {
    **{name: cal.METRICS[name].compute for name in ANY_CLASSES},
    "per_class_ece": cal.metrics.per_class_ece,
    "top_label": cal.top_label,
    "one_vs_rest": lambda logits, labels: cal.metrics.one_vs_rest(logits, labels, k=0),
    "margin_groups": cal.metrics.reliability_by_margin,
    "update": lambda logits, labels: cal.Accumulator().update(logits, labels).compute(),
}


@pytest.mark.parametrize("function", DIRECT)
@pytest.mark.parametrize(
    "case",
    [
        "NaN",
        "+inf",
        "all -inf",
        "label masked",
        "too few labels",
        "one-hot labels",
        "label too large",
        "no rows",
        "all ignored",
    ],
)
def test_every_function_of_logits_refuses_alike(function, case):
    logits, labels, kind, message = LOGITS[case]
    with pytest.raises(kind, match=message):
        DIRECT[function](logits, labels)


def test_lists_of_different_lengths_are_refused_with_the_name_of_the_argument():
    message = "logits must be floating point, got object: rows of different lengths"
    with pytest.raises(TypeError, match=message):
        cal.evaluate([[0.0, 1.0], [0.0]], [0, 0])
    with pytest.raises((TypeError, ValueError), match="labels must be"):
        cal.evaluate(OK, [[0], [1, 2]])


def test_logits_without_classes_are_refused_even_if_all_is_ignored():
    with pytest.raises(ValueError, match="logits must have at least two classes"):
        cal.evaluate(np.zeros((4, 0)), [-100] * 4)


# Other estimands


@pytest.mark.parametrize(
    ("logits", "labels", "estimand", "message"),
    [
        (OK, YES, "top", r"estimand must be one of top_label, binary, .* got 'top'"),
        (
            OK,
            [0, 1, 0, 1],
            "binary",
            r"binary estimand needs \(n,\) or \(n, 2\) logits, got \(4, 3\): use calibrant.metrics"
            r".one_vs_rest\(logits, labels, k=...\) for one class of several",
        ),
        (
            *(np.zeros(3), [0, 1, 0], "multilabel"),
            r"must be \(..., tags\), got \(3,\): one logit per example is estimand=\"binary\"",
        ),
        (
            OK,
            YES,
            "multilabel",
            r"got \(4, 3\) and \(4,\): each tag of a row has a label",
        ),
        (
            np.zeros(3),
            [0, 1],
            "binary",
            r"must have the same shape, got \(3,\) and \(2,\): the",
        ),
        (
            np.zeros(3),
            [[0], [1], [0]],
            "top_label",
            r"\(n,\) logits are log-odds, and have",
        ),
        (np.zeros(3), [0, 1, 2], "binary", r"labels must be in \[0, 2\).*got 2 at row 2"),
        (OK, np.full((4, 3), 2), "multilabel", r"labels must be in \[0, 2\).*position \(0, 0\)"),
        (np.zeros((3, 2)), [0, 1, 2], "binary", r"labels must be in \[0, 2\)"),
    ],
)
def test_estimands_refuse_what_does_not_fit_them(logits, labels, estimand, message):
    with pytest.raises(ValueError, match=message):
        cal.evaluate(logits, labels, estimand=estimand)


# Probabilities


@pytest.mark.parametrize(
    ("probs", "kind", "message"),
    [
        (
            [[0.5, 0.6]],
            ValueError,
            "probs must sum to one in each row, got 1.1 at row 0: normalise",
        ),
        ([[[0.5, 0.5], [0.5, 0.4]]], ValueError, r"got 0.9 at position \(0, 1\): normalise them"),
        ([[0.2, 0.2, 0.2]], ValueError, "or pass the scores as logits"),
        (
            [[-0.5, 1.5]],
            ValueError,
            r"probs must be in \[0, 1\], got -0.5 at row 0: pass logarithms, and other scores that",
        ),
        ([[-1e-9, 1.0]], ValueError, "got -1e-09 at row 0"),
        ([[0.5, 0.5], [math.nan, 1.0]], ValueError, "got NaN at row 1: leave out examples without"),
        ([[INF, 0.0]], ValueError, "got inf at row 0: divide percentages by 100, and pass other"),
        ([[0, 1]], TypeError, "probs must be floating point, got int64"),
        ([1.2], ValueError, r"probs must be in \[0, 1\]"),
    ],
)
def test_what_is_no_distribution_is_refused(probs, kind, message):
    labels = np.zeros(np.shape(probs)[:-1] or (1,), dtype=int)
    with pytest.raises(kind, match=message):
        cal.evaluate(probs=probs, labels=labels)


P = [[0.3], [0.9], [0.2], [0.6]]
DOORS = {
    "metric": lambda p: cal.nll(probs=p, labels=YES),
    "evaluate": lambda p: cal.evaluate({"probs": p, "labels": YES}),
    "fit": lambda p: cal.fit({"probs": p, "labels": YES}, method="ts"),
    "compare": lambda p: cal.compare({"probs": p, "labels": YES}, methods=["none"]),
    "threshold": lambda p: cal.threshold(probs=p, labels=YES, max_error=0.5),
    "conformal": lambda p: cal.conformal(probs=p, labels=YES, coverage=0.5),
    "monitor": lambda p: cal.Monitor().update(probs=p, labels=YES),
    "estimate": lambda p: cal.estimate_performance(probs=p),
    "slices": lambda p: cal.find_slices(probs=p, labels=YES),
}


@pytest.mark.parametrize("door", DOORS)
def test_one_column_of_probabilities_as_a_matrix_is_told_apart(door):
    with pytest.raises(ValueError, match=r"column of P\(y = 1\) goes in as probs.squeeze\(-1\)"):
        DOORS[door](np.array(P))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rounding_of_probabilities_is_forgiven_in_their_own_precision(rng, dtype):
    probs = torch.tensor(rng.dirichlet(np.ones(5), 50)).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = cal.evaluate(probs=probs, labels=np.zeros(50, int), level=None)
    assert math.isfinite(found["ece"].value)
    with pytest.raises(ValueError, match="probs must sum to one"):
        cal.evaluate(probs=probs * 0.9, labels=np.zeros(50, int))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_of_probabilities_may_be_off_in_the_fourth_decimal_only(dtype):
    near, far = (np.array([[0.3, 0.7 + off]], dtype) for off in (9e-5, 2e-4))
    assert cal.nll(probs=near, labels=[1]) == pytest.approx(-math.log(0.7), abs=2e-4)
    with pytest.raises(ValueError, match=r"probs must sum to one .* got 1\.0002 at row 0"):
        cal.nll(probs=far, labels=[1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("digits", "classes"), [(2, 2), (3, 3), (3, 20), (4, 100)])
def test_probabilities_that_were_printed_with_few_digits_are_taken_as_stated(
    rng, digits, classes, dtype
):
    exact = rng.dirichlet(np.ones(classes), 300)
    printed = np.array([[float(f"{p:.{digits}f}") for p in row] for row in exact], dtype)
    labels = exact.argmax(-1)
    stated = -np.log(printed[np.arange(300), labels].astype(float))
    assert cal.nll(probs=printed, labels=labels) == pytest.approx(stated.mean(), rel=1e-6)


@pytest.mark.parametrize(
    "row",
    [
        [0.333, 0.333, 0.332],  # three roundings of half a thousandth: 0.0015 at most
        [0.3333, 0.333, 0.3327],  # four digits allow less
        [0.33, 0.33, 0.32],
        [0.1] * 9 + [0.08],  # more than a hundredth may be a class that is missing
        [0.5, 0.4],
    ],
)
def test_sums_beyond_the_rounding_of_printed_digits_are_refused(row):
    good = np.full(len(row), 1 / len(row))
    with pytest.raises(ValueError, match=r"probs must sum to one in each row, got .* at row 1"):
        cal.nll(probs=np.array([good, row]), labels=[0, 0])


def test_float16_is_too_coarse_to_tell_printed_digits():
    row = np.array([[0.25, 0.25, 0.25, 0.2441]], np.float16)  # off by 0.006
    with pytest.raises(ValueError, match="probs must sum to one"):
        cal.nll(probs=row, labels=[0])


# Pairs

PAIRS = [
    ([1.5], [1], ValueError, r"confidence must be in \[0, 1\], got 1.5: reduce logits with"),
    (
        [-0.1],
        [1],
        ValueError,
        r"got -0.1: reduce logits with calibrant.top_label\(logits, labels\)",
    ),
    ([math.nan], [1], ValueError, r"confidence must be in \[0, 1\], got nan"),
    ([INF], [1], ValueError, r"confidence must be in \[0, 1\], got inf"),
    ([1], [1], TypeError, "confidence must be floating point, got int64"),
    (
        [0.5],
        [2],
        ValueError,
        r"outcome must be 0 or 1 \(did it happen\?\), got 2: class labels are",
    ),
    ([0.5], [0.5], ValueError, r"outcome must be 0 or 1 \(did it happen\?\), got 0.5"),
    ([0.5], [math.nan], ValueError, "outcome must be 0 or 1"),
    (
        [0.5, 0.5],
        [1],
        ValueError,
        r"confidence and outcome must have equal shapes, got \(2,\) and \(1,\)",
    ),
    (np.zeros(0), [], ValueError, "nothing to measure"),
]

OF_PAIRS: list[Any] = [
    *(cal.ece, cal.ada_ece, cal.debiased_ece, cal.mce, cal.over_ece, cal.under_ece),
    *(cal.ks, cal.smooth_ece, cal.smce, cal.auroc, cal.aurc, cal.metrics.risk_coverage),
    *(
        cal.metrics.calibration_test,
        cal.metrics.reliability,
        cal.metrics.smooth_reliability,
        cal.metrics.confidence_histogram,
    ),
]


@pytest.mark.parametrize(
    ("function", "confidence", "outcome", "kind", "message"),
    [(f, *PAIRS[i % len(PAIRS)]) for i, f in enumerate(OF_PAIRS)]
    + [(cal.ece, *case) for case in PAIRS],
)
def test_pairs_are_refused_alike_by_every_function(function, confidence, outcome, kind, message):
    with pytest.raises(kind, match=message):
        function(confidence=confidence, outcome=outcome)


def test_pairs_of_equal_size_and_different_shape_are_refused():
    with pytest.raises(ValueError, match=r"must have equal shapes, got \(2, 3\) and \(3, 2\)"):
        cal.ece(confidence=np.full((2, 3), 0.5), outcome=np.ones((3, 2)))


@pytest.mark.parametrize(
    "function", [f for f in OF_PAIRS if f is not cal.metrics.confidence_histogram]
)
@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ([1.0], r"weight must have one value per example or per row, got \(1,\) for \(2,\)"),
        (
            [1.0, 2.0, 3.0],
            r"weight must have one value per example or per row, got \(3,\) for \(2,\)",
        ),
        ([1.0, -2.0], r"weight must be 0 \(leaves out\) or in \(1e-100, 1e100\), got -2.0"),
        ([1.0, 1e-101], r"weight must be 0 \(leaves out\) or in .* got 1e-101"),
        ([1.0, 1e100], r"weight must be 0 \(leaves out\) or in .* got 1e\+100"),
        ([1.0, math.nan], r"weight must be 0 \(leaves out\) or in .* got nan"),
        ([INF, 1.0], r"weight must be 0 \(leaves out\) or in .* got inf"),
        ([0.0, 0.0], "nothing to measure: .* or every weight 0"),
    ],
)
def test_weights_are_refused_alike_by_every_function(function, weight, message):
    with pytest.raises(ValueError, match=message):
        function(confidence=[0.5, 0.7], outcome=[1, 0], sample_weight=weight)


@pytest.mark.parametrize(
    "function", [cal.evaluate, cal.nll, cal.classwise_ece, cal.metrics.per_class_ece]
)
def test_weights_of_logits_are_one_per_label(function):
    with pytest.raises(ValueError, match=r"weight must have one value .* got \(3,\) for \(4,\)"):
        function(OK, YES, sample_weight=[1, 1, 1])
    with pytest.raises(ValueError, match=r"weight must be 0 \(leaves out\) or in"):
        function(OK, YES, sample_weight=[1, 1, 1, -1])
    with pytest.raises(ValueError, match="nothing to measure"):
        function(OK, YES, sample_weight=[0, 0, 0, 0])


@pytest.mark.parametrize("function", [cal.metrics.ood_auroc, cal.metrics.fpr95])
def test_scores_of_novelty_are_numbers(function):
    with pytest.raises(ValueError, match="inside must not hold NaN: drop or repair"):
        function([math.nan], [1.0])
    with pytest.raises(ValueError, match="outside must not hold NaN: drop or repair"):
        function([1.0], [math.nan])
    with pytest.raises(ValueError, match="nothing to measure"):
        function([], [1.0])


# Options


@pytest.mark.parametrize("bins", [0, -3, 2.5, "15", None])
def test_bins_are_a_positive_whole_number(bins):
    for call in (
        lambda: cal.evaluate(OK, YES, bins=bins),
        lambda: cal.Accumulator(bins=bins),
        lambda: cal.metrics.reliability(confidence=[0.5], outcome=[1], bins=bins),
        lambda: cal.metrics.reliability(confidence=[0.5], outcome=[1], bins=bins, equal_mass=True),
        lambda: cal.metrics.confidence_histogram(confidence=[0.5], outcome=[1], bins=bins),
        lambda: cal.classwise_ece(OK, YES, bins=bins),
    ):
        with pytest.raises(ValueError, match=f"bins must be a positive whole number, got {bins!r}"):
            call()


def test_an_unknown_metric_is_answered_with_the_list():
    with pytest.raises(
        ValueError,
        match=r"unknown metric 'eec': did you mean ece\? choose from accuracy, ece, debia",
    ):
        cal.evaluate(OK, YES, metrics=["nll", "eec"])


def test_metrics_that_need_pairs_are_refused_by_a_stream_without():
    with pytest.raises(ValueError, match="ks, auroc need all pairs: pass pairs=True"):
        cal.Accumulator(metrics=["ece", "ks", "auroc"])


def test_level_zero_leaves_intervals_out():
    evaluation = cal.evaluate(OK, YES, level=0)
    assert evaluation.level is None
    assert evaluation.to_dict() == cal.evaluate(OK, YES, level=None).to_dict()


@pytest.mark.parametrize("level", [0.995, 1, -0.5, 90, math.nan])
def test_a_level_is_above_zero_and_at_most_99_percent(level):
    message = f"level must be above 0 and at most 0.99, got {level}: 0.9 means 90 %"
    with pytest.raises(ValueError, match=message):
        cal.evaluate(OK, YES, level=level)
    for curve in (cal.metrics.reliability, cal.metrics.smooth_reliability):
        with pytest.raises(ValueError, match=message):
            curve(confidence=[0.5, 0.7], outcome=[1, 0], level=level)


def test_level_zero_leaves_out_the_intervals_of_bars_but_a_band_needs_one():
    bars = cal.metrics.reliability(confidence=[0.5, 0.7], outcome=[1, 0], level=0)
    assert np.isnan(bars.low).all()
    with pytest.raises(ValueError, match=r"level must be above 0 and at most 0\.99, got 0"):
        cal.metrics.smooth_reliability(confidence=[0.5, 0.7], outcome=[1, 0], level=0)


@pytest.mark.parametrize("threshold", [-0.1, 1.0, 2])
def test_a_threshold_leaves_something_to_count(threshold):
    with pytest.raises(ValueError, match=rf"threshold must be in \[0, 1\), got {threshold}"):
        cal.classwise_ece(OK, YES, threshold=threshold)


def test_an_average_is_by_class_or_by_prevalence():
    with pytest.raises(ValueError, match="average must be one of mean, prevalence, got 'sum'"):
        cal.classwise_ece(OK, YES, average="sum")  # type: ignore[arg-type]


# A stream that refuses a batch

BATCH = np.random.default_rng(5).normal(size=(4, 3))

REFUSED: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "NaN": (with_row(0, math.nan, 0), YES, {}, "row 2 has NaN"),
    "last row": (np.vstack([BATCH, [[INF] * 3]]), [*YES, 0], {}, r"row 4 has \+inf"),
    "shape": (BATCH, [0, 1], {}, "one row of logits is wanted for each label"),
    "label": (BATCH, [0, 1, 2, 3], {}, "labels must be in"),
    "float labels": (BATCH, np.zeros(4), {}, "labels must be integers"),
    "classes": (
        np.zeros((4, 5)),
        YES,
        {},
        "every batch must have the same classes: 3 so far, now 5",
    ),
    "weight": (BATCH, YES, {"sample_weight": [1, 2, 3, -1]}, "weight must be"),
    "weights": (
        BATCH,
        YES,
        {"sample_weight": [1, 2]},
        "weight must have one value per example or per row",
    ),
}

GROUPS: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "groups": (
        BATCH,
        YES,
        {"by": ["a", "b"]},
        "by must have one value per example or per row",
    ),
    "mixed groups": (
        *(BATCH, YES, {"by": np.array(["a", None, 1, "b"], dtype=object)}),
        "by must be|not supported between",
    ),
}


def streams(pairs):
    """With pairs without intervals, for speed, and without pairs with them."""
    return cal.Accumulator(pairs=pairs, level=None if pairs else 0.8)


def bits(stream):
    """Everything that a result holds, to the last digit."""
    found = stream.compute()
    sums = [getattr(found.bins, name).tobytes() for name in ("count", "claimed", "spread")]
    return found.to_dict(), sums


def refuse(stream, case):
    logits, labels, options, message = case
    with pytest.raises((TypeError, ValueError), match=message):
        stream.update(logits, labels, **options)


@pytest.mark.parametrize("pairs", [False, True])
def test_refused_batches_leave_a_stream_as_it_was(rng, pairs):
    first, second = drawn(rng, 50, 3), drawn(rng, 40, 3)
    groups = {"by": np.arange(50) % 2}
    expected = streams(pairs).update(*first, **groups).update(*second)
    stream = streams(pairs).update(*first, **groups)
    before = bits(stream)
    for case in REFUSED.values():
        refuse(stream, case)
    assert bits(stream) == before
    assert bits(stream.update(*second)) == bits(expected)


@pytest.mark.parametrize("case", GROUPS)
def test_refused_groups_leave_a_stream_as_it_was(rng, case):
    stream = streams(True).update(*drawn(rng, 50, 3), by=np.arange(50) % 2)
    before = bits(stream)
    if case == "groups":
        refuse(stream, GROUPS[case])
        assert bits(stream) == before
        return
    try:  # names of several kinds may be refused or taken, but not half
        stream.update(*GROUPS[case][:2], **GROUPS[case][2])
    except (TypeError, ValueError):
        assert bits(stream) == before
    else:
        assert sum(part.n for part in stream.compute().by.values()) == 54


@pytest.mark.parametrize("case", [name for name in REFUSED if name != "classes"])
def test_a_refused_first_batch_does_not_fix_the_number_of_classes(rng, case):
    stream = streams(True)
    refuse(stream, REFUSED[case])
    with pytest.raises(ValueError, match="nothing to measure"):
        stream.compute()
    other = drawn(rng, 50, 7)
    assert bits(stream.update(*other)) == bits(streams(True).update(*other))


def test_a_refused_batch_on_several_threads_leaves_a_stream_as_it_was(rng, monkeypatch):
    from calibrant._core import chunks as _walk

    monkeypatch.setitem(_walk.CHUNK_SIZE, "cpu", 30)
    logits, labels = drawn(rng, 400, 3)
    stream = cal.Accumulator(level=None).update(logits, labels)
    before = bits(stream)
    logits[399, 0] = math.nan
    with pytest.raises(ValueError, match="row 399 has NaN"):
        stream.update(logits, labels)
    assert bits(stream) == before


def test_a_refused_merge_leaves_a_stream_as_it_was(rng):
    stream = streams(True).update(*drawn(rng, 50, 3))
    before = bits(stream)
    others = {
        "bins": cal.Accumulator(bins=10, pairs=True, level=None),
        "pairs": cal.Accumulator(level=None),
        "level": cal.Accumulator(pairs=True, level=0.8),
        "metrics": cal.Accumulator(pairs=True, level=None, metrics=["ece"]),
        "estimand": cal.Accumulator(pairs=True, level=None, estimand="binary"),
    }
    for other in others.values():
        with pytest.raises(ValueError, match="accumulators must have the same form to merge"):
            stream.merge(other)
        assert bits(stream) == before


def test_streams_of_different_classes_do_not_merge(rng):
    stream = streams(True).update(*drawn(rng, 50, 3))
    before = bits(stream)
    with pytest.raises(ValueError, match="same classes: 3 so far, now 5"):
        stream.merge(streams(True).update(*drawn(rng, 50, 5)))
    assert bits(stream) == before


# The checks themselves


def test_checks_do_not_copy_what_is_right():
    tensor, array, labels = torch.zeros(4, 3), np.zeros((4, 3)), np.zeros(4, dtype=np.int64)
    assert as_scores(tensor) is tensor
    assert as_scores(array) is array
    assert as_labels(labels) is labels
    confidence, outcome = np.full(4, 0.5), np.ones(4)
    found = as_pairs(confidence, outcome)
    assert np.shares_memory(found[0], confidence)
    assert np.shares_memory(found[1], outcome)


def test_pairs_of_weight_zero_are_dropped_before_they_are_judged():
    confidence, outcome, weight = as_pairs([0.5, 7.0, 0.2], [1, 9, 0], [1, 0, 2])
    np.testing.assert_array_equal(confidence, [0.5, 0.2])
    np.testing.assert_array_equal(outcome, [1, 0])
    np.testing.assert_array_equal(weight, [1, 2])


def test_a_weight_per_row_serves_the_row_and_nothing_else():
    np.testing.assert_array_equal(as_weight([2, 3], (2, 3)), [2, 2, 2, 3, 3, 3])
    for weight in (np.ones(6), np.ones(3), np.ones((2, 1)), np.ones((2, 3, 1))):
        with pytest.raises(ValueError, match=r"weight must have one value .* for \(2, 3\)"):
            as_weight(weight, (2, 3))


def test_values_and_weights_are_flat_float64():
    for found in (as_weight(torch.ones(2, 3), (2, 3)), as_values([[1, 2, 3], [4, 5, 6]], "inside")):
        assert found.dtype == np.float64
        assert found.shape == (6,)


# Logits that are probabilities


KINDS: dict[str, Any] = {
    "float64": lambda p: p,
    "float16": lambda p: p.astype(np.float16),
    "bfloat16": lambda p: torch.tensor(p).bfloat16(),
    "float32 tensor": lambda p: torch.tensor(p).float(),
    "tokens": lambda p: p.reshape(30, 40, -1),
    "every second column": lambda p: np.repeat(p, 2, axis=-1)[:, ::2],
    "one-hot": lambda p: np.eye(p.shape[-1])[p.argmax(-1)],
    "one of two classes": lambda p: p[:, 0],
    "rounded to three digits": lambda p: np.round(p[:, :2] / p[:, :2].sum(-1, keepdims=True), 3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_among_the_logits_are_recognised(rng, kind):
    probs = rng.dirichlet(np.ones(5), 1200)
    assert look_like_probs(KINDS[kind](probs))


@pytest.mark.parametrize(
    "change",
    [
        *(np.log, lambda p: p + np.eye(5)[0] - np.eye(5)[1], lambda p: 1.01 * p),
        *(lambda p: p[:, 0] - 0.1, lambda p: 0 * p[:, 0], lambda p: p[:9, 0]),
        *(lambda p: p[:9], lambda p: p[:0], lambda p: np.where(p == p[40], math.nan, p)),
    ],
    ids=[
        *("logarithms", "negative", "sum", "one logit", "equal logits", "few logits"),
        *("few", "none", "NaN"),
    ],
)
def test_other_logits_are_not_taken_for_probabilities(rng, change):
    assert not look_like_probs(change(rng.dirichlet(np.ones(5), 1200)))


@pytest.mark.parametrize("shape", [(1200, 5), (30, 40, 5)])
@pytest.mark.parametrize(("row", "told"), [(999, False), (1000, True)])
def test_a_thousand_rows_tell(rng, shape, row, told):
    probs = rng.dirichlet(np.ones(5), 1200)
    probs[row] -= 1
    assert bool(look_like_probs(probs.reshape(shape))) == told


def test_the_look_at_logits_costs_little(rng, monkeypatch):
    read = []

    def spy(values):
        read.append(math.prod(values.shape))
        return as_float64(values)

    monkeypatch.setattr(_checks, "as_float64", spy)
    probs = rng.dirichlet(np.ones(3), 40_000)
    for shape in ((40_000, 3), (400, 100, 3), (2, 20_000, 3)):
        assert look_like_probs(probs.reshape(shape))
        assert look_like_probs(torch.tensor(probs.reshape(shape)))
    assert read == [3000] * 6


def test_a_batch_of_sure_predictions_is_not_suspected(rng):
    """All of class 1 and barely so, as a selection may be; a hundred of them hardly are."""
    odds, seen = rng.uniform(0.1, 0.9, 200), 4 * rng.normal(size=200)
    labels = (seen > rng.logistic(size=200)).astype(int)
    fitted, sets = cal.TemperatureScaling().fit(seen, labels), cal.conformal(seen, labels)
    for call in (fitted.predict_proba, fitted.transform, fitted.temperature, sets.sets):
        call(odds[:99])  # a warning would be an error
        with pytest.warns(UserWarning, match="every number is between 0 and 1"):
            call(odds[:100])
    with pytest.warns(UserWarning, match="every number is between 0 and 1"):
        cal.evaluate(odds[:10], np.arange(10) % 2)


@pytest.mark.parametrize("method", ["ts", "vector", "auto", "blend", "isotonic"])
def test_a_fit_on_probabilities_warns_once_at_the_line_of_the_caller(rng, method):
    truth = rng.dirichlet(np.ones(3), 300)
    labels = (np.log(truth) + rng.gumbel(size=truth.shape)).argmax(-1)
    options: dict[str, Any] = {"candidates": ["none", "ts"]} if method == "auto" else {}
    calibrator = EVERY_METHOD[method](**options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        calibrator.fit(truth, labels)
        found = [w for w in told if "look like probabilities" in str(w.message)]
        calibrator.fit(np.log(truth), labels)
        later = [w for w in told if "look like probabilities" in str(w.message)]
    assert len(found) == len(later) == 1
    assert found[0].category is UserWarning
    assert found[0].filename == __file__
    assert 'calibrant.fit({"probs": ..., "labels": ...}) takes them' in str(found[0].message)


@pytest.mark.parametrize("wrong", [np.zeros((2, 3)), torch.zeros(4, 2, 3), np.zeros(3)])
def test_logits_of_other_classes_than_the_fit_are_refused_with_both_numbers(rng, wrong):
    fitted = cal.TemperatureScaling().fit(rng.normal(size=(50, 5)), rng.integers(5, size=50))
    for use in (fitted.predict_proba, fitted.temperature):
        with pytest.raises(ValueError, match=r"^fitted for 5 classes, got 3: logits must be "):
            use(wrong)


@pytest.mark.parametrize("groups", [None, np.arange(300) % 3])
def test_measuring_probabilities_as_logits_warns_once(rng, groups):
    probs, labels = rng.dirichlet(np.ones(3), 300), rng.integers(3, size=300)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        cal.evaluate(probs, labels, by=groups, level=None)
        cal.evaluate(np.log(probs), labels, by=groups, level=None)
        cal.evaluate(probs=probs, labels=labels, by=groups, level=None)
        cal.evaluate(probs, np.eye(3, dtype=int)[labels], estimand="multilabel", level=None)
    assert [(w.category, w.filename) for w in told] == [(UserWarning, __file__)]
    assert "pass them as probs=" in str(told[0].message)


def test_labels_that_are_only_too_large_do_not_count_from_one():
    with pytest.raises(ValueError, match=r"the logits have 3 classes$"):
        cal.evaluate(np.eye(3), [0, 1, 3])
