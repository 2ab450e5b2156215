"""The monitor: its e-value is what the definition says, alarms are rare without drift and come soon
with it, and nothing is lost between workers, files and restarts."""

import csv
import itertools
import json
import math
import pickle
import runpy
import warnings
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import expit, logit
from scipy.stats import binom

import calibrant as cal
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.data import sample_path, save_predictions
from calibrant.monitor import TILTS, Monitor
from tests.support.simulate import drawn, drawn_pairs

ROOT = Path(__file__).parents[2]


def claims(rng, n):
    """Confidences of a classifier of moderate skill."""
    return np.minimum(expit(rng.gamma(2.0, 1.6, n) - 0.5), 1 - 1e-9)


def outcomes(rng, truth):
    return rng.random(truth.size) < truth


# The e-value.


def defined(pairs, *, tolerance, bins, horizon):
    """The e-value as a sum over beginnings, runs and tilts of products over examples.

    ``pairs`` are (position of the window, confidence, outcome); beginnings after the last window
    keep their stake, whose sum up to infinity is 1 / (horizon + 1).
    """
    edges = [i / bins for i in range(bins + 1)]
    runs = [(i, j) for i in range(bins) for j in range(i + 1, bins + 1)]
    total = 1 / (horizon + 1)
    for start in range(1, horizon + 1):
        for low, high in runs:
            share = 0.5 if (low, high) == (0, bins) else 0.5 / (len(runs) - 1)
            for sign, size in itertools.product((1, -1), range(7)):
                tilt = sign * 0.05 * 2**size
                stake = share / 14 / (start * (start + 1))
                for window, c, y in pairs:
                    inside = edges[low] < c <= edges[high] or (c == 0 and low == 0)
                    if window < start or not inside:
                        continue
                    q = min(max(c + sign * tolerance, 0), 1)
                    stake *= math.exp(tilt * y) / (1 - q + q * math.exp(tilt))
                total += stake
    return total


@pytest.mark.parametrize("tolerance", [0.0, 0.02, 0.3])
def test_e_value_is_the_sum_of_the_definition(rng, tolerance):
    # windows 2 and 5 have no examples; confidences lie on edges and at both ends too
    windows = np.array([1, 1, 1, 3, 3, 4, 6, 6, 6, 6])
    confidence = np.array([0.0, 1.0, 1 / 3, 0.5, 2 / 3, 0.9, 0.99, 0.7, 0.34, 1.0])
    outcome = np.array([0, 1, 1, 0, 1, 0, 1, 0, 0, 0])
    watch = Monitor(bins=3, tolerance=tolerance, first=1)
    for k in range(1, 7):
        mine = windows == k
        if mine.any():
            watch.observe(confidence[mine], outcome[mine], window=k)
        pairs = list(zip(windows, confidence, outcome, strict=True))
        past = [pair for pair in pairs if pair[0] <= k]
        horizon = max(pair[0] for pair in past)
        wanted = defined(past, tolerance=tolerance, bins=3, horizon=horizon)
        assert watch.e_value == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("shift", [-0.05, 0.0, 0.05, "by turns", "after a mistake"])
def test_mean_of_the_e_value_is_at_most_one_within_the_tolerance(shift):
    """Exactly, over all outcomes of eight examples; the last ones come late, to old windows."""
    confidence = np.array([0.6, 0.9, 0.97, 0.2, 0.75, 0.99, 0.5, 0.85])
    arrives = [1, 1, 2, 3, 4, 4, 2, 1]
    mean = 0.0
    for outcome in itertools.product((0, 1), repeat=8):
        watch, chance = Monitor(bins=4, tolerance=0.05, first=1), 1.0
        for i, (c, y, window) in enumerate(zip(confidence, outcome, arrives, strict=True)):
            moved = shift if isinstance(shift, float) else 0.05 * (-1) ** i
            if shift == "after a mistake":
                moved = -0.05 if i and not outcome[i - 1] else 0.05
            p = min(max(c + moved, 0), 1)
            chance *= p if y else 1 - p
            watch.observe([c], [y], window=window)
        mean += chance * watch.e_value
    assert mean <= 1 + 1e-12
    assert mean > 0.8  # or the test would have no power


def test_mean_of_the_e_value_is_one_without_tolerance():
    confidence = [0.6, 0.9, 0.3, 0.95, 0.7]
    mean = 0.0
    for outcome in itertools.product((0, 1), repeat=5):
        watch = Monitor(bins=2, tolerance=0.0, window=2).observe(confidence, outcome)
        chance = np.prod([c if y else 1 - c for c, y in zip(confidence, outcome, strict=True)])
        mean += float(chance) * watch.e_value
    assert mean == pytest.approx(1, abs=1e-12)


def test_nothing_seen_is_no_evidence():
    watch = Monitor()
    assert watch.e_value == 1.0
    found = watch.report()
    assert (found.n, found.alarm, found.windows, found.limit) == (0, None, [], 20.0)
    assert "No drift shown" in str(found)


def test_extreme_confidences_stay_finite():
    watch = Monitor(tolerance=0.0, window=100)
    watch.observe(np.ones(500), np.zeros(500)).observe(np.zeros(500), np.ones(500))
    found = watch.report()
    assert math.isfinite(found.e_value)
    assert found.e_value > 1e200
    json.dumps(found.to_dict(), allow_nan=False)


# False alarms and drifts.


def alarms(truth, streams, *, windows=40, size=250, **settings):
    """Share of streams that raise an alarm, and the examples until then."""
    taken = []
    for seed in range(streams):
        rng = np.random.default_rng([7, seed])
        watch = Monitor(window=size, **settings)
        for k in range(windows):
            c = claims(rng, size)
            watch.observe(c, outcomes(rng, truth(c, k)))
            if watch.alarm:
                taken.append(watch.alarm.examples)
                break
    return len(taken) / streams, taken


@pytest.mark.slow
@pytest.mark.parametrize(
    ("truth", "tolerance"),
    [
        (lambda c, k: c, 0.0),
        (lambda c, k: c - 0.02, 0.02),
        (lambda c, k: c + 0.02, 0.02),
        (lambda c, k: c + np.where(c > 0.8, -0.02, 0.02) * (-1) ** k, 0.02),
    ],
)
def test_false_alarms_over_the_whole_stream_are_as_rare_as_stated(truth, tolerance):
    # at 20 %, where a wrong test shows in fewer streams
    share, _ = alarms(truth, 150, tolerance=tolerance, false_alarms=0.2)
    assert share <= binom.ppf(0.999, 150, 0.2) / 150


@pytest.mark.slow
def test_a_departure_beyond_the_tolerance_is_found():
    share, _ = alarms(lambda c, k: c - 0.06, 20, tolerance=0.02)
    assert share == 1.0
    share, _ = alarms(lambda c, k: c - 0.06, 20, tolerance=0.06)
    assert share <= 0.2


@pytest.mark.parametrize(
    ("drift", "direction", "inside"),
    [
        (lambda c: c - 0.15, "over", 0.95),
        (lambda c: np.where(c < 0.8, c + 0.2, c), "under", 0.7),
        (lambda c: np.where(c > 0.9, c - 0.15, c), "over", 0.97),
        (lambda c: np.where(c < 0.7, c - 0.2, c), "over", 0.6),
    ],
)
def test_a_late_drift_is_found_with_its_direction_place_and_beginning(
    rng, drift, direction, inside
):
    watch = Monitor(window=500)
    for k in range(30):
        c = claims(rng, 500)
        watch.observe(c, outcomes(rng, c if k < 20 else drift(c)))
        assert k >= 20 or watch.alarm is None
    found = watch.report()
    assert found.alarm is not None
    assert found.drift is not None
    assert found.drift.direction == direction
    assert abs(int(found.drift.since) - 21) <= 1
    assert found.drift.low < inside <= found.drift.high
    assert 10_500 <= found.alarm.examples <= 13_000
    gaps = [b["confidence"] - b["accuracy"] for b in found.bins]
    assert gaps
    assert all((gap > 0) == (direction == "over") for gap in gaps)
    assert f"{direction}-confident since window {found.drift.since}" in found.advice()
    assert found.advice().startswith("Recommend a refit")


def test_bins_are_named_that_are_off_by_more_than_tolerance_and_chance():
    # (confidence, examples, right): within the tolerance, off, off by chance, too few, off below
    cells = [(0.9, 4000, 3520), (0.7, 1000, 500), (0.5, 100, 43), (0.3, 9, 0), (0.1, 500, 150)]
    watch = Monitor(window=10_000, bins=10)
    for confidence, n, right in cells:
        watch.observe(np.full(n, confidence - 0.05), np.arange(n) < right - 0.05 * n)
    found = watch.report()
    assert found.alarm is not None
    shown = [(round(b["low"], 1), b["n"], round(b["accuracy"], 2)) for b in found.bins]
    assert shown == [(0.0, 500, 0.25), (0.6, 1000, 0.45)]


def test_an_alarm_is_remembered_when_the_drift_is_over(rng):
    watch = Monitor(window=500)
    c = claims(rng, 1500)
    watch.observe(c, outcomes(rng, c - 0.2))
    raised = watch.alarm
    assert raised is not None
    c = claims(rng, 200_000)
    watch.observe(c, outcomes(rng, c + 0.015))
    assert watch.alarm == raised
    assert watch.report().alarm == raised
    assert watch.e_value < raised.e_value


# Windows.


def test_windows_hold_what_evaluate_finds(rng):
    logits, labels = drawn(rng, 2500, 6, 1.5)
    found = Monitor(window=1000).update(logits, labels).report()
    assert [row["n"] for row in found.windows] == [1000, 1000, 500]
    for row, start in zip(found.windows, (0, 1000, 2000), strict=True):
        part = slice(start, start + 1000)
        wanted = cal.evaluate(logits[part], labels[part], level=None)
        assert row["ece"] == pytest.approx(wanted["ece"].value, abs=1e-12)
        assert row["accuracy"] == pytest.approx(wanted["accuracy"].value, abs=1e-12)
        confidence = cal.top_label(logits[part], labels[part]).confidence.mean()
        assert row["confidence"] == pytest.approx(confidence, abs=1e-12)
        assert row["gap"] == pytest.approx(confidence - row["accuracy"], abs=1e-12)


@pytest.mark.parametrize("size", [1, 7, 300, 1999])
def test_batches_add_up_to_the_whole(rng, size):
    confidence, outcome = drawn_pairs(rng, 2000, 0.05)
    whole, parts = Monitor(window=300), Monitor(window=300)
    whole.observe(confidence, outcome)
    for start in range(0, 2000, size):
        parts.observe(confidence[start : start + size], outcome[start : start + size])
    assert same(whole, parts)


def test_logits_probs_tensors_and_pairs_are_the_same(rng):
    logits, labels = drawn(rng, 900, 4)
    probs = torch.softmax(torch.from_numpy(logits), -1)
    first = Monitor(window=200).update(logits, labels)
    assert same(first, Monitor(window=200).update(torch.from_numpy(logits), labels.tolist()))
    assert same(first, Monitor(window=200).update(probs=probs, labels=labels))
    assert same(first, Monitor(window=200).observe(*cal.top_label(logits, labels)))


def same(one, other):
    """Whether two monitors hold the same sums and say the same."""
    assert sorted(one.windows) == sorted(other.windows)
    for number, window in one.windows.items():
        for key in ("count", "right", "claimed", "cumulant"):
            np.testing.assert_allclose(
                getattr(window, key), getattr(other.windows[number], key), rtol=1e-9, atol=1e-9
            )
    return one.e_value == pytest.approx(other.e_value, rel=1e-9)


def test_windows_by_date_have_names(rng):
    confidence, outcome = drawn_pairs(rng, 50)
    watch = Monitor(first=date(2026, 11, 1))
    for day in (3, 1, 3):
        watch.observe(confidence, outcome, window=date(2026, 11, day))
    found = watch.report().windows
    assert [row["window"] for row in found] == ["2026-11-01", "2026-11-03"]
    assert [row["n"] for row in found] == [50, 100]
    with pytest.raises(ValueError, match="is before the first"):
        watch.observe(confidence, outcome, window=date(2026, 10, 31))


def test_windows_without_names_take_the_dates_after_the_last(rng, tmp_path):
    confidence, outcome = drawn_pairs(rng, 50)
    watch = Monitor(window=20, first=date(2026, 12, 30))
    for each in (watch, watch.like(), Monitor(window=20).merge(watch)):
        cal.save(each, tmp_path / "state.json")
        again = cal.load(tmp_path / "state.json").observe(confidence, outcome)
        names = [row["window"] for row in again.report().windows]
        assert names == ["2026-12-30", "2026-12-31", "2027-01-01"]
    with pytest.raises(ValueError, match="window 2026-12-29 is before the first, 2026-12-30"):
        again.observe(confidence, outcome, window=date(2026, 12, 29))
    again = Monitor(window=50).observe(confidence, outcome, window=datetime(2026, 1, 4, 12))
    names = [row["window"] for row in again.observe([0.5], [1]).report().windows]
    assert names == ["2026-01-04", "2026-01-05"]


def test_empty_batches_are_taken():
    watch = Monitor()
    empty: list[Any] = [[], (), np.zeros(0), np.zeros(0, int), torch.zeros(0)]
    for nothing in empty:
        assert watch.observe(nothing, nothing) is watch
        assert watch.labelled([], nothing) == 0
        assert watch.update(np.zeros((0, 3)), nothing) is watch
        assert watch.update([], nothing) is watch
        watch.predicted([], [])
    assert (watch.seen, watch.windows) == (0, {})
    watch.update([[1.0, 0.0, 0.0]], [0])  # an empty list was not one of log-odds
    assert watch.labelled([], [], window=2) == 0
    assert [row["n"] for row in watch.report().windows] == [1, 0]
    with pytest.raises(ValueError, match="equal shapes"):
        watch.observe([], [1])
    with pytest.raises(ValueError, match="one label per id"):
        watch.labelled([], [1])


def test_order_of_arrival_does_not_matter(rng):
    parts = [(k, *drawn_pairs(rng, 40, 0.1)) for k in (1, 2, 2, 5, 9)]
    watches = []
    for order in ([0, 1, 2, 3, 4], [4, 0, 2, 3, 1], [2, 4, 1, 0, 3]):
        watch = Monitor(first=1)
        for i in order:
            number, confidence, outcome = parts[i]
            watch.observe(confidence, outcome, window=number)
        watches.append(watch)
    assert same(watches[0], watches[1])
    assert same(watches[0], watches[2])


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_windows_that_are_summed_up_still_count(rng, keep):
    confidence, outcome = drawn_pairs(rng, 1000, 0.03)
    whole, short = Monitor(window=100), Monitor(window=100, keep=keep)
    for start in range(0, 1000, 50):
        part = slice(start, start + 50)
        whole.observe(confidence[part], outcome[part])
        short.observe(confidence[part], outcome[part])
        assert short.e_value == pytest.approx(whole.e_value, rel=1e-9)
    assert len(short.windows) == keep
    assert short.seen == whole.seen == 1000
    assert short.report().e_value == pytest.approx(whole.e_value, rel=1e-9)
    with pytest.raises(ValueError, match="was summed up"):
        short.observe([0.5], [1], window=1)
    with pytest.raises(ValueError, match="cannot be merged"):
        whole.merge(short)


def test_a_window_without_labels_is_shown_as_empty():
    watch = Monitor().observe([0.9], [1], window=1)
    watch.update([[1.0, 0.0]], [-100], window=2)
    found = watch.report()
    assert [row["n"] for row in found.windows] == [1, 0]
    assert math.isnan(found.windows[1]["ece"])
    assert found.to_dict()["windows"][1]["ece"] is None
    assert found.table()[2][2:6] == ("-",) * 4
    assert found.counts["ignored"] == 1


# Workers.


def test_workers_add_up_in_any_order(rng):
    base = Monitor(first=1)
    workers, whole = [base.like() for _ in range(3)], base.like()
    for k in range(1, 6):
        for i, worker in enumerate(workers):
            if (i, k) == (1, 3):
                continue  # a worker may miss a window
            pairs = drawn_pairs(rng, 30 + 10 * i, 0.1)
            worker.observe(*pairs, window=k)
            whole.observe(*pairs, window=k)
    a, b, c = workers
    totals = [
        base.like().merge(a).merge(b).merge(c),
        base.like().merge(c).merge(base.like().merge(b).merge(a)),
        base.like().merge(base.like().merge(a).merge(c)).merge(b),
    ]
    assert all(same(whole, total) for total in totals)


def test_the_alarm_of_a_worker_is_its_own(rng):
    c = claims(rng, 1000)
    bad = Monitor().observe(c, outcomes(rng, c - 0.3))
    assert bad.alarm is not None
    c = claims(rng, 100_000)
    total = Monitor(window=100_000).observe(c, outcomes(rng, c))
    total.merge(bad)
    assert total.alarm is None
    assert total.seen == 101_000


def test_merging_takes_waiting_predictions_and_counts_along():
    one, two = Monitor(pending=3), Monitor(pending=3)
    row = [[1.0, 0.0]]
    one.predicted(["a", "b"], row * 2)
    two.predicted(["b", "c", "d"], row * 3)
    one.labelled(["unheard"], [0])
    two.labelled(["unheard", "of"], [0, 1])
    one.update(row, [-100])
    two.update(row, [-100])
    counts = one.merge(two).report().counts
    assert counts == {"pending": 3, "dropped": 1, "repeated": 1, "unknown": 3, "ignored": 2}
    assert one.labelled(["a", "b", "c", "d"], [0, 0, 0, 0]) == 3  # a was the oldest
    with pytest.raises(ValueError, match="same classes: 2 so far"):
        Monitor().merge(two).update([[1.0, 0.0, 0.0]], [0])


def test_merging_keeps_windows_in_order_when_some_are_summed_up(rng):
    late, early = Monitor(first=1, keep=3), Monitor(first=1)
    whole = Monitor(first=1)
    for k in (2, 4, 6, 5, 3, 1):
        pairs = drawn_pairs(rng, 20)
        (early if k % 2 else late).observe(*pairs, window=k)
        whole.observe(*pairs, window=k)
    late.merge(early)
    assert sorted(late.windows) == [4, 5, 6]
    assert late.e_value == pytest.approx(whole.e_value, rel=1e-9)


def test_monitors_of_different_form_do_not_merge():
    for other in (Monitor(bins=10), Monitor(tolerance=0.01), Monitor(false_alarms=0.01)):
        with pytest.raises(ValueError, match="different form"):
            Monitor().merge(other)


# Late labels.


def test_late_labels_give_what_labels_at_hand_give(rng):
    logits, labels = drawn(rng, 700, 5, 2.0)
    at_hand = Monitor(window=100).update(logits, labels)
    late = Monitor(window=100)
    for start in range(0, 700, 70):
        late.predicted(np.arange(start, start + 70), logits[start : start + 70])
    for start in range(0, 700, 35):
        ids = torch.arange(start, start + 35)
        assert late.labelled(ids, torch.from_numpy(labels[start : start + 35])) == 35
    assert same(at_hand, late)
    assert late.report().counts["pending"] == 0


def test_one_logit_is_that_of_class_one(rng):
    logits = rng.normal(size=300)
    labels = rng.integers(2, size=300)
    watch = Monitor()
    watch.predicted(range(300), logits)
    watch.labelled(range(300), labels)
    assert same(watch, Monitor().update(logits, labels))


def test_ids_that_do_not_match_are_counted():
    watch = Monitor(pending=3)
    logits = [[2.0, 0.0], [0.0, 2.0]]
    watch.predicted(["a", "b"], logits)
    watch.predicted(["b", 3], logits)  # b again: class 0 now
    watch.predicted(["c", "d"], logits)  # a and then b are dropped
    assert watch.labelled(["a", "zzz", 3], [0, 0, 1]) == 1
    assert watch.labelled([3, "c"], [1, -100]) == 0
    found = watch.report()
    assert found.counts == {"pending": 1, "dropped": 2, "repeated": 1, "unknown": 3, "ignored": 1}
    assert found.n == 1
    told = "\n".join(found.remarks())
    for words in ("label came (pending sets how many may wait): 2", "is not waiting: 3"):
        assert words in told


def test_the_last_of_repeated_predictions_counts():
    watch = Monitor()
    watch.predicted(["a", "a"], [[2.0, 0.0], [0.0, 4.0]])
    watch.labelled(["a"], [1])
    assert same(watch, Monitor().update([[0.0, 4.0]], [1]))
    assert watch.report().counts["repeated"] == 1


def test_waiting_predictions_are_bounded_and_the_oldest_go_first():
    watch = Monitor(pending=10)
    watch.predicted(range(25), np.tile([1.0, 0.0, 0.0], (25, 1)))
    assert watch.report().counts["pending"] == 10
    assert watch.report().counts["dropped"] == 15
    assert watch.labelled(range(25), np.zeros(25, int)) == 10


# Calibrator.


def test_logits_are_calibrated_first(rng):
    logits, labels = drawn(rng, 3000, 5, 2.0)
    calibrator = TemperatureScaling().fit(logits[:1500], labels[:1500])
    watch = Monitor(calibrator).update(logits[1500:], labels[1500:])
    probs = calibrator.predict_proba(logits[1500:])
    plain = Monitor().observe(probs.max(-1), probs.argmax(-1) == labels[1500:])
    assert same(watch, plain)
    late = Monitor(calibrator)
    late.predicted(range(1500), logits[1500:])
    late.labelled(range(1500), labels[1500:])
    assert same(late, plain)
    assert Monitor().update(logits[1500:], labels[1500:]).alarm is not None
    assert watch.alarm is None


def test_ignored_rows_may_hold_anything_with_a_calibrator_too(rng):
    logits, labels = drawn(rng, 400, 3)
    calibrator = TemperatureScaling().fit(logits, labels)
    spoilt, marked = logits.copy(), labels.copy()
    spoilt[::4], marked[::4] = np.nan, -100
    kept = np.arange(400) % 4 > 0
    wanted = Monitor(calibrator).update(logits[kept], labels[kept])
    found = Monitor(calibrator).update(spoilt.reshape(20, 20, 3), marked.reshape(20, 20))
    assert same(wanted, found)
    assert same(wanted, Monitor(calibrator).update(torch.from_numpy(spoilt), marked))
    assert found.report().counts["ignored"] == 100


# Reference.


def test_limits_of_the_reference_are_those_of_clopper_and_pearson(rng):
    confidence, outcome = drawn_pairs(rng, 3000, 0.1, 0.6, 1.0)
    low, high = Monitor(bins=10, reference=(confidence, outcome)).known
    for b in range(6, 10):
        inside = (confidence > b / 10) & (confidence <= (b + 1) / 10)
        n, k, mean = inside.sum(), outcome[inside].sum(), confidence[inside].mean()
        tail = 0.025 / 2 / 4  # half of 5 %, two sides, four bins with examples
        assert binom.sf(k - 1, n, low[b] + mean) == pytest.approx(tail, rel=1e-6)
        assert binom.cdf(k, n, high[b] + mean) == pytest.approx(tail, rel=1e-6)
    assert (low[:6] == -1).all()  # without examples anything may be
    assert (high[:6] == 1).all()


def test_a_small_bin_of_a_reference_has_wide_limits_of_its_own():
    confidence = np.repeat([0.95, 0.85, 0.15], [950, 3, 1])
    outcome = np.repeat([1, 0, 1, 1, 0], [900, 50, 2, 1, 1])
    low, high = Monitor(bins=10, reference=(confidence, outcome)).known
    tail = 0.025 / 2 / 3
    assert 900 / 950 - 0.95 - 0.03 < low[9] < high[9] < 900 / 950 - 0.95 + 0.03
    assert low[8] == pytest.approx(tail ** (1 / 3) - 0.85)  # three of three were right
    assert high[1] == pytest.approx(1 - tail - 0.15)  # the one was wrong
    assert high[8] == 1  # no limit where all were right, none was, or nothing is known
    assert (low[[0, 1, 2, 7]] == -1).all()


def test_limits_of_a_reference_hold_for_all_bins_at_once():
    """The share of references whose limits miss the truth anywhere, at 40 %: at most half of it."""
    share, gap = 0.4, -0.1
    missed = 0
    for seed in range(400):
        rng = np.random.default_rng([8, seed])
        c = rng.uniform(0.5, 1, 600)
        low, high = Monitor(
            bins=20, false_alarms=share, reference=(c, outcomes(rng, c + gap))
        ).known
        missed += bool(((low > gap) | (high < gap)).any())
    assert missed <= binom.ppf(0.999, 400, share / 2)
    assert missed >= 20  # or the limits would be too wide


def mixed(rng, n):
    """Confidences of 80 to 93 %, and a few below 50 %."""
    return np.where(rng.random(n) < 0.97, rng.uniform(0.8, 0.93, n), rng.uniform(0.2, 0.5, n))


def clear(rng, n):
    return np.maximum(expit(rng.normal(6, 2, n)), 0.1)


@pytest.mark.parametrize(
    ("draw", "curve"),
    [
        (mixed, lambda c: np.where(c > 0.8, c - 0.25, c)),
        (clear, lambda c: expit(logit(np.minimum(c, 1 - 1e-12)) / 2.5)),
    ],
)
def test_gaps_that_differ_between_bins_are_no_drift(draw, curve):
    """Few examples lie in the low bins, and their gap is not that of the others."""
    for seed in range(6):
        rng = np.random.default_rng([9, seed])
        c = draw(rng, 1000)
        watch = Monitor(window=500, reference=(c, outcomes(rng, curve(c))))
        c = draw(rng, 50_000)
        assert watch.observe(c, outcomes(rng, curve(c))).alarm is None


def test_a_model_that_was_never_calibrated_raises_no_alarm_against_its_reference(rng):
    def curve(c):
        return expit(logit(c) / 1.6)

    c = claims(rng, 5000)
    known = c, outcomes(rng, curve(c))
    plain, watch = Monitor(window=500), Monitor(window=500, reference=known)
    for _ in range(20):
        c = claims(rng, 500)
        y = outcomes(rng, curve(c))
        plain.observe(c, y)
        watch.observe(c, y)
    assert plain.alarm is not None
    assert watch.alarm is None
    assert "of its reference" in watch.report().describe()
    for _ in range(20):
        c = claims(rng, 500)
        watch.observe(c, outcomes(rng, curve(c) - 0.12))
    assert watch.alarm is not None
    assert watch.report().drift.direction == "over"
    assert watch.report().limit == 40  # half of the false alarms went into the limits


# To and from a file.


def test_a_state_goes_on_as_if_it_had_never_been_saved(rng, tmp_path):
    logits, labels = drawn(rng, 600, 4, 1.4)
    reference = drawn_pairs(rng, 500)
    whole, saved = (
        Monitor(window=50, tolerance=0.01, keep=4, bins=12, reference=reference) for _ in range(2)
    )
    for watch in (whole, saved):
        watch.update(logits[:300], labels[:300])
        watch.predicted([1, "1", "x"], logits[:3])
    cal.save(saved, tmp_path / "state.json")
    saved = pickle.loads(pickle.dumps(cal.load(tmp_path / "state.json")))
    assert saved.report().to_dict() == whole.report().to_dict()
    for watch in (whole, saved):
        watch.labelled(["1", "y"], labels[1:3])
        watch.update(logits[300:], labels[300:])
    assert saved.report().to_dict() == whole.report().to_dict()
    assert saved._form() == whole._form()
    assert saved.state() == whole.state()


def test_the_state_remembers_its_calibrator(rng, tmp_path):
    logits, labels = drawn(rng, 500, 3, 1.5)
    fitted = TemperatureScaling().fit(logits, labels)
    path = tmp_path / "state.json"
    cal.save(Monitor(fitted).update(logits, labels), path)
    again = cal.load(path).resume(fitted).update(logits, labels)
    assert again.seen == 1000
    alone = cal.load(path)
    assert alone.report().n == 500
    alone.observe([0.5], [1])
    with pytest.raises(ValueError, match="this stream is of TemperatureScaling"):
        alone.update(logits, labels)
    with pytest.raises(ValueError, match="this stream is of TemperatureScaling"):
        alone.predicted([1], logits[:1])
    other = TemperatureScaling().fit(2 * logits, labels)
    with pytest.raises(ValueError, match="begin a new stream after a new fit"):
        cal.load(path).resume(other)
    with pytest.raises(ValueError, match="collected with no calibrator"):
        Monitor().resume(fitted)
    with pytest.raises(ValueError, match="different form"):
        Monitor(fitted).merge(Monitor(other))


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.update(kind="report"),
        lambda state: state.pop("windows"),
        lambda state: state["settings"].update(unknown=1),
        lambda state: state["settings"].update(bins=3),
        lambda state: state["windows"][0].update(count=[1, 2]),
        lambda state: state["windows"][0].update(bins=[99]),
        lambda state: state.update(alarm={"window": "1"}),
        lambda state: state.update(files=[1]),
    ],
)
def test_a_damaged_state_is_refused(rng, tmp_path, damage):
    state = Monitor(window=5).observe(*drawn_pairs(rng, 20)).state()
    damage(state)
    path = tmp_path / "state.json"
    path.write_text(json.dumps({"format": 1, "kind": "monitor", **state}))
    with pytest.raises(ValueError, match=r"not the state of a Monitor|unknown kind 'report'"):
        cal.load(path)


# Files.


def test_a_file_is_a_window(rng, tmp_path, monkeypatch, small_blocks):
    monkeypatch.setattr("calibrant.data.dataset.CHUNK", 40)
    logits, labels = drawn(rng, 90, 4)
    labels[5] = -100
    probs = torch.softmax(torch.from_numpy(logits), -1).numpy()
    save_predictions(tmp_path / "a.npz", {"logits": logits, "labels": labels})
    save_predictions(tmp_path / "b.npz", {"test_probs": probs, "test_labels": labels})
    done = []
    watch = Monitor().update_file(tmp_path / "a.npz", progress=lambda *at: done.append(at))
    watch.update_file(tmp_path / "b.npz", split="test", name="b")
    wanted = Monitor()
    for k in (1, 2):
        wanted.update(logits, labels, window=k)
    assert same(watch, wanted)
    assert done[-1] == (90, 90)
    found = watch.report()
    assert [row["window"] for row in found.windows] == [str(tmp_path / "a.npz"), "b"]
    assert found.counts["ignored"] == 2


def test_a_file_that_was_given_twice_counts_once(rng, tmp_path):
    logits, labels = drawn(rng, 90, 4)
    path = tmp_path / "today.npz"
    save_predictions(path, {"logits": logits, "labels": labels})
    watch = Monitor().update_file(path)
    with pytest.warns(UserWarning, match=r"today\.npz is in the stream already"):
        watch.update_file(path)
    assert watch.seen == 90
    save_predictions(path, {"logits": 2 * logits, "labels": labels})  # the next day
    watch.update_file(path)
    assert (watch.seen, sorted(watch.windows)) == (180, [1, 2])


def day_file(rng, path):
    logits, labels = drawn(rng, 90, 4)
    save_predictions(path, {"logits": logits, "labels": labels})
    return path


def test_a_file_counts_once_when_its_window_is_summed_up(rng, tmp_path):
    files = [day_file(rng, tmp_path / f"{day}.npz") for day in range(5)]
    watch, state = Monitor(keep=2), tmp_path / "state.json"
    for file in files:
        watch.update_file(file)
    before = watch.e_value
    for file in files:
        cal.save(watch, state)
        watch = cal.load(state)
        with pytest.warns(UserWarning, match="is in the stream already"):
            watch.update_file(file)
    assert (watch.seen, watch.e_value) == (450, before)
    day_file(rng, files[0])  # the same name, another day
    assert watch.update_file(files[0]).seen == 540


def test_a_file_counts_once_when_its_window_holds_more(rng, tmp_path):
    file = day_file(rng, tmp_path / "a.npz")
    watch = Monitor().update_file(file).observe([0.9], [1])
    total = watch.like().merge(watch)
    for seen in (watch, total):
        with pytest.warns(UserWarning, match="is in the stream already"):
            assert seen.update_file(file).seen == 91


def test_files_with_equal_counts_are_told_apart_by_their_confidence(tmp_path):
    file, watch = tmp_path / "today.npz", Monitor()
    for day, odds in enumerate((3.0, 3.0001, 3.0002), 1):
        save_predictions(file, {"logits": [[odds, 0.0]], "labels": [0]})
        assert watch.update_file(file).seen == day
    with pytest.warns(UserWarning, match="is in the stream already"):
        watch.update_file(file)


def test_rounding_does_not_make_another_file(rng, tmp_path):
    file = day_file(rng, tmp_path / "a.npz")
    watch = Monitor().update_file(file)
    for totals in watch._files.totals.values():
        totals[0] *= 1 + 1e-13  # as another machine adds up
    with pytest.warns(UserWarning, match="is in the stream already"):
        assert watch.update_file(file).seen == 90


def test_a_state_without_a_list_of_files_knows_those_of_its_windows(rng, tmp_path):
    files = [day_file(rng, tmp_path / f"{day}.npz") for day in range(3)]
    watch = Monitor(keep=2)
    for file in files:
        watch.update_file(file)
    state = watch.state()
    del state["files"], state["dated"]
    old = Monitor.from_state(json.loads(json.dumps(state)))
    assert old.report().to_dict() == watch.report().to_dict()
    for file in files[1:]:
        with pytest.warns(UserWarning, match="is in the stream already"):
            old.update_file(file)
    assert old.seen == 270


def test_a_file_without_labels_is_an_empty_window(rng, tmp_path):
    save_predictions(tmp_path / "a.npz", {"logits": np.zeros((3, 2)), "labels": [-100] * 3})
    with pytest.warns(UserWarning, match="has no labelled examples"):
        watch = Monitor().update_file(tmp_path / "a.npz")
    assert [row["n"] for row in watch.report().windows] == [0]


def test_a_refused_file_leaves_no_trace(rng, tmp_path, monkeypatch):
    monkeypatch.setattr("calibrant.data.dataset.CHUNK", 40)
    logits, labels = drawn(rng, 90, 4)
    logits[80] = np.nan
    save_predictions(tmp_path / "bad.npz", {"logits": logits, "labels": labels})
    watch = Monitor()
    with pytest.raises(ValueError, match=r"bad\.npz, counting from row 80: .* row 0 has NaN"):
        watch.update_file(tmp_path / "bad.npz")
    assert (watch.seen, watch.windows) == (0, {})
    watch.update(*drawn(rng, 10, 7))


# Refused.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 0}, "window must be a whole number"),
        ({"pending": 0.5}, "pending must be a whole number"),
        ({"keep": 0}, "keep must be a whole number"),
        ({"bins": 0}, "bins must be a positive whole number"),
        ({"bins": 101}, "bins must be at most 100"),
        ({"false_alarms": 0}, "false_alarms must be between 0 and 1"),
        ({"false_alarms": 1}, "false_alarms must be between 0 and 1"),
        ({"tolerance": -0.1}, "tolerance must be at least 0"),
        ({"tolerance": 2}, "tolerance must be at least 0 and below 0.5"),
        ({"reference": ([1.5], [1])}, r"confidence must be in \[0, 1\]"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Monitor(**settings)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda w: w.update([[1.0, 0.0]]), TypeError, "labels are missing"),
        (lambda w: w.update(labels=[0]), TypeError, "either logits or probs"),
        (lambda w: w.update([[1.0, 0.0]], [0], probs=[[1.0, 0.0]]), TypeError, "either logits or"),
        (lambda w: w.update([[1.0, 0.0]], [2]), ValueError, r"labels must be in \[0, 2\)"),
        (lambda w: w.update([[1.0, np.nan]], [0]), ValueError, "row 0 has NaN"),
        (lambda w: w.update([[1.0, 0.0]], [0, 1]), ValueError, "one row of logits is wanted"),
        (lambda w: w.update([[1.0, 0.0, 0.0]], [0]), ValueError, "same classes: 2 so far, now 3"),
        (lambda w: w.update([[1.0, 0.0]], [0], window=1.5), TypeError, "whole number or a date"),
        (lambda w: w.update([[1.0, 0.0]], [0], window=-3), ValueError, "is before the first"),
        (lambda w: w.observe([0.5], [2]), ValueError, "outcome must be 0 or 1"),
        (lambda w: w.predicted(["p"], [[1.0, np.inf]]), ValueError, r"row 0 has \+inf"),
        (lambda w: w.predicted(["p"], [[-np.inf, -np.inf]]), ValueError, "-inf in every class"),
        (lambda w: w.predicted(["p", "q"], [[1.0, 0.0]]), ValueError, "one row of logits for each"),
        (lambda w: w.predicted(["p"], [[[1.0, 0.0]]]), ValueError, "one row of logits for each"),
        (lambda w: w.predicted("p", [[1.0, 0.0]]), TypeError, "ids must be a list"),
        (lambda w: w.predicted([1.5], [[1.0, 0.0]]), TypeError, "ids must be whole numbers or"),
        (lambda w: w.predicted(["p"], [[1.0, 0.0, 2.0]]), ValueError, "same classes"),
        (lambda w: w.labelled(["waits"], [5]), ValueError, r"labels must be in \[0, 2\)"),
        (lambda w: w.labelled(["waits"], [0.0]), TypeError, "labels must be integers"),
        (lambda w: w.labelled(["waits"], [0, 1]), ValueError, "one label per id"),
        (lambda w: w.labelled(["waits"], [0], window=-3), ValueError, "is before the first"),
    ],
)
def test_bad_input_is_refused_and_leaves_no_trace(call, kind, message):
    watch = Monitor().update([[2.0, 0.0], [0.0, 1.0]], [0, 0])
    watch.predicted(["waits"], [[1.0, 0.0]])
    before = json.dumps(watch.state())
    with pytest.raises(kind, match=message):
        call(watch)
    assert json.dumps(watch.state()) == before


def test_masked_classes_are_taken(rng):
    logits, labels = drawn(rng, 100, 4)
    logits[:, 3], labels = -np.inf, np.minimum(labels, 2)
    watch = Monitor()
    watch.predicted(range(100), logits)
    watch.labelled(range(100), labels)
    assert same(watch, Monitor().update(logits, labels))


def test_tilts_are_symmetric_and_double():
    assert (TILTS[:7] == -TILTS[7:]).all()
    assert (TILTS[1:7] == 2 * TILTS[:6]).all()


# The command line.


@pytest.fixture
def days(rng, tmp_path, monkeypatch):
    """Twelve files, the last four of a model that has become over-confident."""
    monkeypatch.chdir(tmp_path)
    for day in range(1, 13):
        logits, labels = drawn(rng, 500, 5, 1.0 if day <= 8 else 2.5)
        save_predictions(f"day{day}.npz", {"logits": logits, "labels": labels})
    return [f"day{day}.npz" for day in range(1, 13)]


def test_command_reports_and_recommends(run, days):
    code, out, err = run("monitor", *days)
    assert (code, err) == (0, "")
    assert "Recommend a refit: over-confident since window day9.npz" in " ".join(out.split())
    assert out.count("day") >= 12
    code, out, err = run("monitor", *days[:8])
    assert code == 0
    assert "No drift shown" in out
    assert run("monitor", *days, "--fail")[0] == 1
    assert run("monitor", *days[:8], "--fail")[0] == 0


def test_command_writes_json(run, days):
    code, out, err = run("monitor", *days, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["drift"]["direction"] == "over"
    assert found["drift"]["since"] == "day9.npz"
    assert [row["window"] for row in found["windows"]] == days
    assert found["n"] == 6000
    assert found["alarm"]["examples"] <= 5500


def test_command_takes_a_pattern_in_natural_order(run, days):
    code, out, err = run("monitor", "day*.npz", "--json")
    assert (code, err) == (0, "")
    assert [row["window"] for row in json.loads(out)["windows"]] == days
    code, out, err = run("monitor", *sorted(days), "--json")  # as a shell expands it
    assert code == 0
    assert [row["window"] for row in json.loads(out)["windows"]] == sorted(days)
    assert "day12.npz comes before day2.npz" in err


def test_command_goes_on_from_its_state(run, days):
    assert run("monitor", *days, "--json", "--state", "whole.json")[0] == 0
    for day in days:
        code, out, err = run("monitor", day, "--json", "--state", "s.json", "--tolerance", 0.02)
        assert (code, err) == (0, "")
    assert Path("s.json").read_bytes() == Path("whole.json").read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, again, err = run("monitor", days[-1], "--json", "--state", "s.json")
    assert (code, again) == (0, out)
    assert "day12.npz is in the stream already" in err
    code, out, err = run("monitor", days[0], "--state", "s.json", "--tolerance", 0.03)
    assert code == 2
    assert "tolerance" in err
    assert Path("s.json").read_bytes() == Path("whole.json").read_bytes()


def test_command_reports_on_a_state_alone(run, days):
    run("monitor", *days, "--state", "s.json")
    before = Path("s.json").read_bytes()
    code, out, _ = run("monitor", "--state", "s.json", "--json")
    assert code == 0
    assert json.loads(out)["n"] == 6000
    assert Path("s.json").read_bytes() == before
    assert run("monitor")[0] == 2
    assert run("monitor", "--state", "none.json")[0] == 2


def test_command_writes_nothing_when_a_file_is_refused(run, days):
    run("monitor", days[0], "--state", "s.json")
    before = Path("s.json").read_bytes()
    np.savez("bad.npz", logits=np.full((5, 5), np.nan), labels=np.zeros(5, int))
    code, out, err = run("monitor", days[1], "bad.npz", "--state", "s.json")
    assert (code, out) == (2, "")
    assert "bad.npz" in err
    assert Path("s.json").read_bytes() == before
    assert run("monitor", "nothing*.npz")[0] == 2


def test_command_applies_a_calibrator_to_splits(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("fit", sample_path(), "--method", "ts", "-o", "ts")[0] == 0
    given = ("monitor", sample_path(), "--json")
    code, out, _ = run(*given, "--calibrator", "ts", "--split", "val", "--split", "test")
    assert code == 0
    calibrated = json.loads(out)
    assert [row["n"] for row in calibrated["windows"]] == [5000, 10000]
    assert [row["window"].rpartition(", ")[2] for row in calibrated["windows"]] == ["val", "test"]
    assert calibrated["alarm"] is None
    code, out, _ = run(*given)
    raw = json.loads(out)
    assert raw["drift"]["direction"] == "over"
    assert raw["windows"][0]["ece"] == pytest.approx(0.0424, abs=5e-5)
    code, out, _ = run(*given, "--reference", sample_path(), "--reference-split", "val")
    assert json.loads(out)["alarm"] is None
    run(*given, "--calibrator", "ts", "--state", "s.json")
    code, _, err = run(*given, "--state", "s.json")
    assert code == 2
    assert "--calibrator" in err


def test_command_keeps_to_the_reference_of_its_state(run, days):
    known = ("--reference", days[0])
    assert run("monitor", days[1], *known, "--state", "s.json")[0] == 0
    code, out, _ = run("monitor", days[2], *known, "--state", "s.json", "--json")
    assert code == 0
    assert json.loads(out)["n"] == 1000
    assert json.loads(out)["reference"] is True
    code, _, err = run("monitor", days[3], "--reference", days[4], "--state", "s.json")
    assert code == 2
    assert "begun with another reference" in err
    save_predictions("probs.npz", {"probs": np.full((5, 5), 0.2), "labels": np.zeros(5, int)})
    code, _, err = run("monitor", days[1], "--reference", "probs.npz")
    assert code == 2
    assert "a reference wants logits" in err


# The documentation.


def test_tables_of_the_page_are_those_of_the_study():
    study = runpy.run_path(str(ROOT / "benchmarks" / "studies" / "monitor.py"))
    with (ROOT / "docs" / "data" / "monitor.csv").open(newline="") as file:
        tables = study["tables"](list(csv.DictReader(file)))
    page = (ROOT / "docs" / "monitor.md").read_text("utf-8")
    for name, lines in tables.items():
        assert lines, name
        for line in lines:
            assert line in page


def test_calibrators_that_need_features_are_watched_too(rng, tmp_path, run):
    features = rng.normal(size=(900, 4))
    logits, labels = drawn(rng, 900, 3)
    groups = cal.calibrators.GroupCalibration(partitions=2).fit(logits, labels, features=features)
    probs = groups.predict_proba(logits, features)
    expected = Monitor().update(probs=probs, labels=labels).report()
    found = Monitor(groups).update(logits, labels, features=features).report()
    assert found.n == 900
    assert found.to_dict()["windows"][0]["confidence"] == pytest.approx(
        expected.to_dict()["windows"][0]["confidence"], rel=1e-5
    )
    waiting = Monitor(groups)
    waiting.predicted(range(900), logits, features=features)
    assert waiting.labelled(range(900), labels) == 900
    path = tmp_path / "day.npz"
    save_predictions(path, {"logits": logits, "labels": labels, "features": features})
    cal.save(groups, tmp_path / "groups")
    from_file = Monitor(groups).update_file(path).report()
    assert from_file.n == 900
    code, _, err = run("monitor", str(path), "--calibrator", str(tmp_path / "groups"))
    assert code == 0, err
    with pytest.raises(ValueError, match="needs features"):
        Monitor(groups).update(logits, labels)
