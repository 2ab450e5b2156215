"""Estimates of a drift: its direction, range of confidence and beginning, and the bins."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from calibrant._core.binning import uniform_edges
from calibrant.monitor.e_process import TILTS, EProcess, bin_ranges
from calibrant.monitor.windows import Tolerated, Window, Windows

FEW = 10
"""Bins with fewer examples, or with less than 1 % of them, are not reported."""


class Drift(NamedTuple):
    """The most successful bet: what has changed, where and since when."""

    direction: str  # "over" or "under"
    since: str
    low: float  # ends of the range of confidence
    high: float
    n: int  # examples in that range since then
    confidence: float
    accuracy: float


def find_drift(windows: Windows, state: EProcess) -> tuple[Drift, Window]:
    """Return the most successful bet, and the sum of all windows since it began to win."""
    shares = state.log_shares()
    tilt, best = np.unravel_index(int(shares.argmax()), shares.shape)
    low, high = (int(ends[best]) for ends in bin_ranges(state.bins)[:2])
    numbers = sorted(windows.kept)
    gains = [windows.kept[k].log_factors()[tilt, low:high].sum() for k in numbers]
    positions = np.array([windows.position(k) for k in numbers], dtype=float)
    won = np.cumsum(gains[::-1])[::-1] - np.log(positions * (positions + 1))
    begin = int(won.argmax())
    total = Window.empty(state.bins, name=windows.kept[numbers[begin]].name)
    for number in numbers[begin:]:
        total += windows.kept[number]
    edges, n = uniform_edges(state.bins), int(total.count[low:high].sum())
    drift = Drift(
        "over" if TILTS[tilt] < 0 else "under",
        total.name + " or earlier" * (begin == 0 and windows.summed.position > 0),
        float(edges[low]),
        float(edges[high]),
        n,
        float(total.claimed[low:high].sum() / (n or math.nan)),
        float(total.right[low:high].sum() / (n or math.nan)),
    )
    return drift, total


def bins_off(total: Window, tolerated: Tolerated) -> list[dict[str, float]]:
    """Bins whose accuracy is outside what is tolerated by more than two standard errors."""
    off: list[dict[str, float]] = []
    edges = uniform_edges(total.count.size)
    for b in np.flatnonzero(total.count >= max(FEW, 0.01 * total.n)).tolist():
        n = int(total.count[b])
        confidence, accuracy = float(total.claimed[b] / n), float(total.right[b] / n)
        low, high = tolerated.accuracy(confidence, b)
        limit = min(max(accuracy, low), high)
        if abs(accuracy - limit) > 2 * math.sqrt(max(limit * (1 - limit), 1 / n) / n):
            ends = {"low": float(edges[b]), "high": float(edges[b + 1]), "n": n}
            off.append({**ends, "confidence": confidence, "accuracy": accuracy})
    return off
