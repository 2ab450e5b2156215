"""Windows: sums, names, order, and limits of a reference."""

import math
from datetime import date, datetime

import numpy as np
import pytest
from scipy.special import expit, logit
from scipy.stats import binom

import calibrant as cal
from calibrant.monitor import Monitor
from tests.support.simulate import drawn, drawn_pairs
from tests.support.streams import confidences, outcomes, same


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


@pytest.mark.parametrize("size", [1, 7, 300, 1999])
def test_batches_add_up(rng, size):
    confidence, outcome = drawn_pairs(rng, 2000, 0.05)
    whole, parts = Monitor(window=300), Monitor(window=300)
    whole.observe(confidence, outcome)
    for start in range(0, 2000, size):
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
    assert found.table()[2][2:6] == ("-",) * 4
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
