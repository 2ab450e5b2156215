"""The e-value against its definition, its mean under calibration, and its false alarms."""

import itertools
import json
import math

import numpy as np
import pytest
from scipy.stats import binom

from calibrant.monitor import TILTS, Monitor
from tests.support.streams import confidences, outcomes


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
