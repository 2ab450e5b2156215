"""The e-value against its definition and under calibration; windows, and limits of a reference."""

import itertools
import json
import math
from datetime import date, datetime

import numpy as np
import pytest
from scipy.special import expit, logit
from scipy.stats import binom

import calibrant as cal
from calibrant.monitor import TILTS, Monitor
from calibrant.show.monitor import _windows_table
from tests.support.simulate import drawn, drawn_pairs
from tests.support.streams import confidences, outcomes, same


def definition(pairs, *, tolerance, bins, horizon):
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
def test_e_value_equals_its_definition(rng, tolerance):
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
        wanted = definition(past, tolerance=tolerance, bins=3, horizon=horizon)
        assert watch.e_value == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("shift", [-0.05, 0.0, 0.05, "by turns", "after a mistake"])
def test_mean_e_value_is_at_most_one_within_tolerance(shift):
    """Exactly, over all outcomes of six examples; the last ones come late, to old windows."""
    confidence = np.array([0.6, 0.97, 0.2, 0.99, 0.5, 0.85])
    arrives = [1, 2, 3, 4, 2, 1]
    mean = 0.0
    for outcome in itertools.product((0, 1), repeat=6):
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


def test_mean_e_value_is_one_without_tolerance():
    confidence = [0.6, 0.9, 0.3, 0.95, 0.7]
    mean = 0.0
    for outcome in itertools.product((0, 1), repeat=5):
        watch = Monitor(bins=2, tolerance=0.0, window=2).observe(confidence, outcome)
        chance = np.prod([c if y else 1 - c for c, y in zip(confidence, outcome, strict=True)])
        mean += float(chance) * watch.e_value
    assert mean == pytest.approx(1, abs=1e-12)


def test_empty_stream():
    watch = Monitor()
    assert watch.e_value == 1.0
    found = watch.report()
    assert (found.n, found.alarm, found.windows, found.limit) == (0, None, [], 20.0)
    assert "No drift detected" in str(found)


def test_extreme_confidences():
    watch = Monitor(tolerance=0.0, window=100)
    watch.observe(np.ones(500), np.zeros(500)).observe(np.zeros(500), np.ones(500))
    found = watch.report()
    assert math.isfinite(found.e_value)
    assert found.e_value > 1e200
    json.dumps(found.to_dict(), allow_nan=False)


def test_tilts():
    assert (TILTS[:7] == -TILTS[7:]).all()
    assert (TILTS[1:7] == 2 * TILTS[:6]).all()


def alarms(truth, streams, *, windows=40, size=250, **settings):
    """Share of streams that raise an alarm, and the examples until then."""
    taken = []
    for seed in range(streams):
        rng = np.random.default_rng([7, seed])
        watch = Monitor(window=size, **settings)
        for k in range(windows):
            c = confidences(rng, size)
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
def test_false_alarm_rate(truth, tolerance):
    # at 20 %, where a wrong test shows in fewer streams
    share, _ = alarms(truth, 75, windows=30, tolerance=tolerance, false_alarms=0.2)
    assert share <= binom.ppf(0.999, 75, 0.2) / 75


@pytest.mark.slow
def test_tolerance_decides_what_is_drift():
    share, _ = alarms(lambda c, k: c - 0.06, 20, tolerance=0.02)
    assert share == 1.0
    share, _ = alarms(lambda c, k: c - 0.06, 20, tolerance=0.06)
    assert share <= 0.2


# Windows.


def test_windows_agree_with_evaluate(rng):
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


@pytest.mark.parametrize("size", [1, 7, 100, 599])
def test_batches_add_up(rng, size):
    confidence, outcome = drawn_pairs(rng, 600, 0.05)
    whole, parts = Monitor(window=100), Monitor(window=100)
    whole.observe(confidence, outcome)
    for start in range(0, 600, size):
        parts.observe(confidence[start : start + size], outcome[start : start + size])
    assert same(whole, parts)


def test_windows_by_date(rng):
    confidence, outcome = drawn_pairs(rng, 50)
    watch = Monitor(first=date(2026, 11, 1))
    for day in (3, 1, 3):
        watch.observe(confidence, outcome, window=date(2026, 11, day))
    found = watch.report().windows
    assert [row["window"] for row in found] == ["2026-11-01", "2026-11-03"]
    assert [row["n"] for row in found] == [50, 100]
    with pytest.raises(ValueError, match="is before the first"):
        watch.observe(confidence, outcome, window=date(2026, 10, 31))


def test_unnamed_windows_continue_dates(rng, tmp_path):
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


def test_order_of_arrival(rng):
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
def test_summed_up_windows_count(rng, keep):
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


def test_window_without_labels():
    watch = Monitor().observe([0.9], [1], window=1)
    watch.update([[1.0, 0.0]], [-100], window=2)
    found = watch.report()
    assert [row["n"] for row in found.windows] == [1, 0]
    assert math.isnan(found.windows[1]["ece"])
    assert found.to_dict()["windows"][1]["ece"] is None
    assert list(_windows_table(found).rows[1][2:6]) == ["-"] * 4
    assert found.counts["ignored"] == 1


# Reference.


def test_reference_limits_are_clopper_pearson(rng):
    confidence, outcome = drawn_pairs(rng, 3000, 0.1, 0.6, 1.0)
    low, high = Monitor(bins=10, reference=(confidence, outcome)).tolerated.gaps
    for b in range(6, 10):
        inside = (confidence > b / 10) & (confidence <= (b + 1) / 10)
        n, k, mean = inside.sum(), outcome[inside].sum(), confidence[inside].mean()
        tail = 0.025 / 2 / 4  # half of 5 %, two sides, four bins with examples
        assert binom.sf(k - 1, n, low[b] + mean) == pytest.approx(tail, rel=1e-6)
        assert binom.cdf(k, n, high[b] + mean) == pytest.approx(tail, rel=1e-6)
    assert (low[:6] == -1).all()  # without examples anything may be
    assert (high[:6] == 1).all()


def test_reference_limits_of_small_bins():
    confidence = np.repeat([0.95, 0.85, 0.15], [950, 3, 1])
    outcome = np.repeat([1, 0, 1, 1, 0], [900, 50, 2, 1, 1])
    low, high = Monitor(bins=10, reference=(confidence, outcome)).tolerated.gaps
    tail = 0.025 / 2 / 3
    assert 900 / 950 - 0.95 - 0.03 < low[9] < high[9] < 900 / 950 - 0.95 + 0.03
    assert low[8] == pytest.approx(tail ** (1 / 3) - 0.85)  # three of three were right
    assert high[1] == pytest.approx(1 - tail - 0.15)  # the one was wrong
    assert high[8] == 1  # no limit where all were right, none was, or nothing is known
    assert (low[[0, 1, 2, 7]] == -1).all()


def test_reference_limits_hold_for_all_bins():
    """The share of references whose limits miss the truth anywhere, at 40 %: at most half of it."""
    share, gap = 0.4, -0.1
    missed = 0
    for seed in range(400):
        rng = np.random.default_rng([8, seed])
        c = rng.uniform(0.5, 1, 600)
        low, high = Monitor(
            bins=20, false_alarms=share, reference=(c, outcomes(rng, c + gap))
        ).tolerated.gaps
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
def test_different_gaps_between_bins(draw, curve):
    """Few examples lie in the low bins, and their gap is not that of the others."""
    for seed in range(6):
        rng = np.random.default_rng([9, seed])
        c = draw(rng, 1000)
        watch = Monitor(window=500, reference=(c, outcomes(rng, curve(c))))
        c = draw(rng, 50_000)
        assert watch.observe(c, outcomes(rng, curve(c))).alarm is None


def test_drift_from_a_reference(rng):
    def curve(c):
        return expit(logit(c) / 1.6)

    c = confidences(rng, 5000)
    known = c, outcomes(rng, curve(c))
    plain, watch = Monitor(window=500), Monitor(window=500, reference=known)
    for _ in range(20):
        c = confidences(rng, 500)
        y = outcomes(rng, curve(c))
        plain.observe(c, y)
        watch.observe(c, y)
    assert plain.alarm is not None
    assert watch.alarm is None
    assert "of its reference" in watch.report().describe()
    for _ in range(20):
        c = confidences(rng, 500)
        watch.observe(c, outcomes(rng, curve(c) - 0.12))
    assert watch.alarm is not None
    assert watch.report().drift.direction == "over"
    assert watch.report().limit == 40  # half of the false alarms went into the limits
