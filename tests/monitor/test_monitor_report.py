"""Direction, place and beginning of a drift."""

import numpy as np
import pytest

from calibrant.monitor import Monitor
from calibrant.show.monitor import _windows_table
from tests.support.streams import confidences, outcomes


@pytest.mark.parametrize(
    ("drift", "direction", "inside"),
    [
        (lambda c: c - 0.15, "over", 0.95),
        (lambda c: np.where(c < 0.8, c + 0.2, c), "under", 0.7),
        (lambda c: np.where(c > 0.9, c - 0.15, c), "over", 0.97),
        (lambda c: np.where(c < 0.7, c - 0.2, c), "over", 0.6),
    ],
)
def test_late_drift(rng, drift, direction, inside):
    watch = Monitor(window=500)
    for k in range(30):
        c = confidences(rng, 500)
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


def test_bins_off():
    # (confidence, examples, right): within the tolerance, off, off by chance, too few, off below
    cells = [(0.9, 4000, 3520), (0.7, 1000, 500), (0.5, 100, 43), (0.3, 9, 0), (0.1, 500, 150)]
    watch = Monitor(window=10_000, bins=10)
    for confidence, n, right in cells:
        watch.observe(np.full(n, confidence - 0.05), np.arange(n) < right - 0.05 * n)
    found = watch.report()
    assert found.alarm is not None
    shown = [(round(b["low"], 1), b["n"], round(b["accuracy"], 2)) for b in found.bins]
    assert shown == [(0.0, 500, 0.25), (0.6, 1000, 0.45)]


def test_alarm_outlasts_the_drift(rng):
    watch = Monitor(window=500)
    c = confidences(rng, 1500)
    watch.observe(c, outcomes(rng, c - 0.2))
    raised = watch.alarm
    assert raised is not None
    c = confidences(rng, 200_000)
    watch.observe(c, outcomes(rng, c + 0.015))
    assert watch.alarm == raised
    assert watch.report().alarm == raised
    assert watch.e_value < raised.e_value


def test_table_has_the_last_twenty_windows():
    report = Monitor(window=1).observe(np.full(25, 0.5), np.arange(25) % 2).report()
    assert [row[0] for row in _windows_table(report).rows] == [*map(str, range(6, 26))]
