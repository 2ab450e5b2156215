"""Expected metrics of cells, against slow definitions."""

import numpy as np
import pytest
from scipy.special import expit

from calibrant.estimate.cells import CELLS, _Cells, _event_cell, _fill_cells, _reduce_rows
from calibrant.estimate.interval import _filled_cells, _share_metrics, _two_class_metrics


def two_class_rows(rng, n=300):
    positive = expit(rng.normal(-0.5, 2, n))
    labels = (rng.random(n) < positive).astype(int)
    return np.stack([1 - positive, positive], 1), labels


def filled(rows, weight, threshold, two_classes):
    cells = _fill_cells(rows, _event_cell(rows, threshold), weight)
    return cells, _filled_cells(cells, two_classes)


def test_rows_are_reduced_by_definition(rng):
    probs = rng.dirichlet([0.5, 1, 2], 40)
    probs[0] = [1, 0, 0]
    labels = rng.integers(0, 3, 40)
    rows = _reduce_rows(probs, labels)
    for i, (p, y) in enumerate(zip(probs, labels, strict=True)):
        scores = [sum((p[k] - (k == z)) ** 2 for k in range(3)) for z in range(3)]
        mean = sum(a * b for a, b in zip(p, scores, strict=True))
        assert rows.brier[i] == pytest.approx(mean)
        logs = [-np.log(x) if x > 0 else 0.0 for x in p]
        entropy = sum(a * b for a, b in zip(p, logs, strict=True))
        assert rows.nll[i] == pytest.approx(entropy)
        assert rows.brier_gap[i] == pytest.approx(scores[y] - mean)
        if p[y] > 0:
            assert rows.nll_gap[i] == pytest.approx(-np.log(p[y]) - entropy)
        assert rows.margin[i] == pytest.approx(
            np.log(sorted(p)[-1] / max(sorted(p)[-2], np.finfo(float).tiny))
        )
        assert rows.happened[i] == (p.argmax() == y)


def test_events_of_two_classes_give_the_measured_metrics(rng):
    probs, labels = two_class_rows(rng)
    weight = rng.uniform(0.5, 2, labels.size)
    rows = _reduce_rows(probs, labels)
    cells, used = filled(rows, weight, 0.8, True)
    events = cells.happened[used.number]
    got = {**_share_metrics(events, used), **_two_class_metrics(events, used)}
    predicted, total = probs.argmax(1), weight.sum()
    right, accepted = predicted == labels, probs.max(1) >= 0.8
    hits = [weight[(predicted == a) & (labels == b)].sum() for a in (1, 0) for b in (1, 0)]
    tp, fp, fn, tn = hits
    wanted = {
        "accuracy": weight[right].sum() / total,
        "coverage": weight[accepted].sum() / total,
        "accepted_error": weight[accepted & ~right].sum() / weight[accepted].sum(),
        "precision": tp / (tp + fp),
        "recall": tp / (tp + fn),
        "f1": 2 * tp / (2 * tp + fp + fn),
        "true_positives": tp,
        "false_positives": fp,
        "false_negatives": fn,
        "true_negatives": tn,
    }
    for name, value in wanted.items():
        assert got[name] == pytest.approx(value), name
    own = probs[np.arange(labels.size), labels]
    assert got["brier"] == pytest.approx(weight @ (2 * (1 - own) ** 2) / total, abs=1e-3)
    assert got["nll"] == pytest.approx(-(weight @ np.log(own)) / total, abs=1e-3)
    score, one = probs[:, 1], labels == 1
    pairs = np.sign(score[one][:, None] - score[~one]) / 2 + 0.5
    both = weight[one][:, None] * weight[~one]
    assert got["auroc"] == pytest.approx((pairs * both).sum() / both.sum(), abs=1e-3)


def test_sums_of_two_sets_add(rng):
    probs, labels = two_class_rows(rng, 60)
    rows = _reduce_rows(probs, labels)
    cell, weight = _event_cell(rows, 0.7), rng.uniform(size=60)
    first = np.arange(60) < 20
    parts = [_fill_cells(rows.take(half), cell[half], weight[half]) for half in (first, ~first)]
    whole = _fill_cells(rows, cell, weight)
    for a, b in zip(parts[0].plus(parts[1]).plus(_Cells.empty()), whole, strict=True):
        np.testing.assert_allclose(a, b)


def test_cells_keep_the_side_of_one_half_and_of_the_threshold():
    positive = np.array([0.5, np.nextafter(0.5, 1) + 1e-9, 0.2, 0.8, 0.0, 1.0])
    cell = _event_cell(_reduce_rows(np.stack([1 - positive, positive], 1)), 0.8)
    assert (cell % CELLS >= CELLS // 2).tolist() == [False, True, False, True, False, True]
    assert (cell >= CELLS).tolist() == [False, False, True, True, True, True]


def test_metrics_without_a_denominator_are_nan():
    rows = _reduce_rows(np.array([[0.9, 0.1], [0.8, 0.2]]), np.array([0, 0]))
    cells, used = filled(rows, np.ones(2), 2.0, True)
    events = cells.happened[used.number]
    metrics = {**_share_metrics(events, used), **_two_class_metrics(events, used)}
    undefined = {name for name, value in metrics.items() if np.isnan(value)}
    assert undefined == {"accepted_error", "precision", "recall", "f1", "auroc"}
