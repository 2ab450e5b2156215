"""Strata of labelled examples, and the intervals that are drawn from them."""

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import binom

from calibrant.estimate.cells import (
    CELLS,
    _Cells,
    _event_cell,
    _fill_cells,
    _fill_strata,
    _make_strata,
    _reduce_rows,
    _Strata,
)
from calibrant.estimate.interval import _estimate_metrics
from calibrant.estimate.prediction_summary import _PredictionSummary


def cells_of(positive, labels=None, weight=None):
    rows = _reduce_rows(np.stack([1 - positive, positive], 1), labels)
    weight = np.ones(positive.size) if weight is None else weight
    return _fill_cells(rows, _event_cell(rows, 2.0), weight)


def batch_of(unlabelled, labelled, classes=2):
    """Sums alone, without the rows that the search for shifts needs."""
    n, none = int(unlabelled.weight.sum() + labelled.weight.sum()), np.zeros(0)
    rows = _reduce_rows(np.zeros((0, classes)))
    samples = (rows, none, none, np.zeros((0, classes)), None, none, none.astype(int))
    return _PredictionSummary(n, unlabelled, labelled, float(n), none, np.zeros(classes), *samples)


def known_share(share):
    """One stratum, whose accuracy is known."""
    mean, none = np.array([share]), np.zeros((2, 1))
    return _Strata(np.zeros(2 * CELLS, int), np.array([1e12]), mean, mean, none, none)


def test_adjusted_probabilities_have_the_share_of_each_stratum(rng):
    positive = expit(rng.normal(0, 2, 2000))
    labels = (rng.random(2000) < positive**1.3).astype(int)
    cells = cells_of(positive, labels)
    strata = _fill_strata(_make_strata(cells, two_classes=True), cells)
    used = np.flatnonzero(cells.weight)
    adjusted = strata.adjusted(cells.claimed[used] / cells.weight[used], used)
    assert 0 <= adjusted.min() <= adjusted.max() <= 1
    for k, share in enumerate(strata.share):
        inside = strata.stratum[used] == k
        assert np.average(adjusted[inside], weights=cells.weight[used][inside]) == pytest.approx(
            share
        )


def test_strata_hold_enough_examples(rng):
    cells = cells_of(np.concatenate([rng.uniform(size=400), np.full(9600, 0.9999)]))
    strata = _fill_strata(_make_strata(cells, two_classes=True), cells)
    assert strata.size.size > 3
    assert strata.size.max() > 9000  # sure answers are one stratum
    few = cells_of(rng.uniform(size=39))
    assert _make_strata(few, two_classes=False).max() == 0


def test_no_event_among_fifty_leaves_two_percent_possible(rng):
    """A third of all samples of fifty have no event if two percent are."""
    cells = cells_of(np.full(50, 0.02), np.zeros(50, int))
    strata = _fill_strata(_make_strata(cells, two_classes=False), cells)
    assert np.quantile(strata.draw(rng, 10_000), 0.95) > 0.02


def test_one_error_among_sure_answers_shows_no_gap():
    """Of 300 answers at 99.9 %, one or more are wrong in a quarter of all references."""
    cells = cells_of(np.full(300, 0.999), np.arange(300) > 0)
    gap, p_value = _fill_strata(_make_strata(cells, two_classes=True), cells).gap()
    assert gap < 0.01
    assert p_value > 0.5


def test_strata_of_two_classes_end_at_one_half(rng):
    """Shares of events above one half are of right answers, those below of wrong ones."""
    for n in (3, 60, 5000):
        positive = expit(rng.normal(-1, 2, n))
        below, above = np.split(_make_strata(cells_of(positive), two_classes=True)[:CELLS], 2)
        assert below.max() < above.min()
    one_sided = _make_strata(cells_of(rng.uniform(0, 0.4, 200)), two_classes=True)
    strata = _fill_strata(one_sided, cells_of(rng.uniform(0, 0.4, 200)))
    assert strata.size[-1] == 0
    assert strata.draw(rng, 500)[:, -1].std() > 0.25  # nothing is known of these


def test_intervals_of_equal_probabilities_are_binomial():
    batch = batch_of(cells_of(np.full(400, 0.8)), _Cells.empty())
    metrics = _estimate_metrics(batch, known_share(0.8), widening=0.0, level=0.9, seed=0)
    accuracy = metrics["accuracy"]
    assert accuracy.value == pytest.approx(0.8)
    ends = [float(binom.ppf(q, 400, 0.8)) / 400 for q in (0.05, 0.95)]
    assert list(accuracy[1:]) == pytest.approx(ends, abs=0.006)


def test_a_widening_moves_the_ends_by_as_much():
    batch = batch_of(cells_of(np.full(40_000, 0.7)), _Cells.empty())
    plain, wide = (
        _estimate_metrics(batch, known_share(0.7), widening=w, level=0.9, seed=0)["accuracy"]
        for w in (0.0, 0.05)
    )
    assert wide.value == plain.value
    assert plain.low - wide.low == pytest.approx(0.05, abs=0.003)
    assert wide.high - plain.high == pytest.approx(0.05, abs=0.003)


def test_known_labels_leave_nothing_to_draw():
    labels = np.repeat([0, 1], [30, 70])
    batch = batch_of(_Cells.empty(), cells_of(np.full(100, 0.8), labels))
    metrics = _estimate_metrics(batch, known_share(0.8), widening=0.0, level=0.9, seed=0)
    accuracy = metrics["accuracy"]
    assert tuple(accuracy) == pytest.approx((0.7, 0.7, 0.7))


def test_scores_of_known_labels_leave_nothing_to_estimate(rng):
    probs = rng.dirichlet([1, 2, 3], 200)
    labels = (probs.cumsum(1) > rng.random((200, 1))).argmax(1)
    rows = _reduce_rows(probs, labels)
    cells = _fill_cells(rows, _event_cell(rows, 2.0), np.ones(200))
    batch = batch_of(_Cells.empty(), cells, classes=3)
    metrics = _estimate_metrics(batch, known_share(0.5), widening=0.0, level=0.9, seed=0)
    own = probs[np.arange(200), labels]
    for name, value in (
        ("brier", (1 - 2 * own + (probs**2).sum(1)).mean()),
        ("nll", -np.log(own).mean()),
    ):
        assert tuple(metrics[name]) == pytest.approx((value, value, value)), name


def test_few_references_without_errors_leave_doubt():
    """A hundred answers without an error do not prove that there are none in ten thousand."""
    labelled = cells_of(np.full(100, 0.9999), np.ones(100, int))
    strata = _fill_strata(_make_strata(labelled, two_classes=True), labelled)
    batch = batch_of(cells_of(np.full(10_000, 0.9999)), _Cells.empty())
    low = _estimate_metrics(batch, strata, widening=0.0, level=0.9, seed=0)["accuracy"].low
    assert 0.98 < low < 0.9995
