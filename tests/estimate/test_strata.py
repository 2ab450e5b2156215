"""Strata of labelled examples, and the intervals that are drawn from them."""

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import binom

from calibrant.estimate.cells import Cells, event_cell, fill_cells, reduce_rows
from calibrant.estimate.interval import Batch, estimate_metrics
from calibrant.estimate.strata import fill_strata, make_strata, pooled


def cells_of(positive, labels=None, weight=None):
    rows = reduce_rows(np.stack([1 - positive, positive], 1), labels)
    weight = np.ones(positive.size) if weight is None else weight
    return fill_cells(rows, event_cell(rows, 2.0), weight)


def test_adjusted_probabilities_have_the_share_of_each_stratum(rng):
    positive = expit(rng.normal(0, 2, 2000))
    labels = (rng.random(2000) < positive**1.3).astype(int)
    cells = cells_of(positive, labels)
    strata = fill_strata(make_strata(cells), cells)
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
    strata = fill_strata(make_strata(cells), cells)
    assert strata.size.size > 3
    assert strata.size.max() > 9000  # sure answers are one stratum
    few = cells_of(rng.uniform(size=60))
    assert fill_strata(make_strata(few), few).size.size == 1


def test_pooling_equals_filling_with_both(rng):
    positive = rng.uniform(size=1000)
    labels = (rng.random(1000) < positive).astype(int)
    first = np.arange(1000) < 300
    stratum = make_strata(cells_of(positive))
    parts = [fill_strata(stratum, cells_of(positive[h], labels[h])) for h in (first, ~first)]
    both, whole = pooled(*parts), fill_strata(stratum, cells_of(positive, labels))
    for name in ("size", "claimed", "share", "score_gap"):
        np.testing.assert_allclose(getattr(both, name), getattr(whole, name), err_msg=name)


def test_intervals_of_equal_probabilities_are_binomial():
    batch = Batch(cells_of(np.full(400, 0.8)), Cells.empty(), two_classes=True)
    accuracy = estimate_metrics(batch, None, widening=0.0, level=0.9, seed=0)["accuracy"]
    assert accuracy.value == pytest.approx(0.8)
    ends = [float(binom.ppf(q, 400, 0.8)) / 400 for q in (0.05, 0.95)]
    assert list(accuracy[1:]) == pytest.approx(ends, abs=0.006)


def test_a_widening_moves_the_ends_by_as_much():
    batch = Batch(cells_of(np.full(40_000, 0.7)), Cells.empty(), two_classes=True)
    plain, wide = (
        estimate_metrics(batch, None, widening=w, level=0.9, seed=0)["accuracy"]
        for w in (0.0, 0.05)
    )
    assert wide.value == plain.value
    assert plain.low - wide.low == pytest.approx(0.05, abs=0.003)
    assert wide.high - plain.high == pytest.approx(0.05, abs=0.003)


def test_known_labels_leave_nothing_to_draw():
    labels = np.repeat([0, 1], [30, 70])
    batch = Batch(Cells.empty(), cells_of(np.full(100, 0.8), labels), two_classes=True)
    accuracy = estimate_metrics(batch, None, widening=0.0, level=0.9, seed=0)["accuracy"]
    assert tuple(accuracy) == pytest.approx((0.7, 0.7, 0.7))


def test_few_references_without_errors_leave_doubt():
    """A hundred answers without an error do not prove that there are none in ten thousand."""
    labelled = cells_of(np.full(100, 0.9999), np.ones(100, int))
    strata = fill_strata(make_strata(labelled), labelled)
    batch = Batch(cells_of(np.full(10_000, 0.9999)), Cells.empty(), two_classes=True)
    low = estimate_metrics(batch, strata, widening=0.0, level=0.9, seed=0)["accuracy"].low
    assert 0.98 < low < 0.9995
