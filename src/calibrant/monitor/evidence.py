r"""Watch a deployed model: whether its confidence is still what happens, or since when not.

Labels come later than predictions and never stop coming. A test that is repeated every day will
reject some day, however good the model is, so the monitor keeps an *e-process*: a number that
starts at 1 and, while the model is calibrated, reaches :math:`1/\alpha` with probability
:math:`\alpha` at most, **ever** (Ville's inequality), however often one looks.

The hypothesis is that each outcome :math:`y_i` happens, given its confidence :math:`c_i` and all
that came before, with a probability within ``tolerance`` of :math:`c_i`. A bet with tilt
:math:`\lambda` multiplies a stake by

.. math:: f_i(\lambda) = \frac{e^{\lambda y_i}}{1 - q_i + q_i e^\lambda}, \qquad
   q_i = \begin{cases} \min(c_i + \mathtt{tolerance}, 1) & \lambda > 0 \\
   \max(c_i - \mathtt{tolerance}, 0) & \lambda < 0, \end{cases}

the likelihood ratio of odds that are :math:`e^\lambda` times as high. Its mean is at most 1 under
the hypothesis. The logarithm of a product of such factors is
:math:`\lambda \sum y_i - \sum \log(1 - q_i + q_i e^\lambda)`: sums per bin of confidence and
window, for each tilt of a fixed grid, are all that is needed, and they add up over workers. The
stake is spread in advance over all tilts, all runs r of neighbouring bins (half of it on the
whole range), and all windows k in which the drift may begin, with weights 1 / (k (k + 1)); the
e-value is the sum of what has become of the parts,

.. math:: E_t = \sum_{r, \lambda} \pi_{r, \lambda} \sum_k \frac{1}{k (k + 1)}
   \prod_{i \in r,\; \mathrm{window}(i) \ge k} f_i(\lambda) .

The sum over k needs no list of beginnings: :math:`S_t = (S_{t-1} + w_t) \prod_{i \in t} f_i`,
the recursion of Shiryaev and Roberts with weights. On e-processes see Ramdas et al. (2023),
"Game-theoretic statistics and safe anytime-valid inference".
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from scipy.special import logsumexp

from calibrant._core.checks import FloatArray, IntArray

TILTS: FloatArray = np.outer([1, -1], 0.05 * 2.0 ** np.arange(7)).reshape(-1)
"""Changes of the log-odds that are betted on: 0.05 to 3.2 in either direction, by factors of 2.

A shift of the odds that is less than half the smallest of them, beyond the tolerance, is not found
however long the stream is: 0.6 points of accuracy at a confidence of 50 %, 0.2 at 90 %."""


@dataclass(eq=False)
class Window:
    """Sums of the labelled examples of one window, which add.

    Attributes
    ----------
    number : int
        Its place in the stream.
    name : str
        What reports call it.
    count, right : (bins,) int64, examples and those of them that were right
    claimed : (bins,) float64, sum of confidences
    cumulant : (tilts, bins) float64, sum of the logarithms in the denominators of the bets
    """

    number: int
    name: str
    count: IntArray
    right: IntArray
    claimed: FloatArray
    cumulant: FloatArray

    def __add__(self, other: Window) -> Window:
        sums = (getattr(self, key) + getattr(other, key) for key in SUMS)
        return Window(self.number, self.name, *sums)

    @property
    def n(self) -> int:
        """Number of labelled examples."""
        return int(self.count.sum())

    def figures(self) -> dict[str, float]:
        """Accuracy, mean confidence, their difference and the ECE; NaN without examples."""
        n = self.n or math.nan
        right, claimed = self.right.sum() / n, self.claimed.sum() / n
        error = np.abs(self.claimed - self.right).sum() / n
        found = {"accuracy": right, "confidence": claimed, "gap": claimed - right, "ece": error}
        return {name: float(value) for name, value in found.items()}

    def log_bets(self) -> FloatArray:
        """Logarithm of the factor of each bet, ``(tilts, bins)``."""
        return np.asarray(TILTS[:, None] * self.right - self.cumulant)


SUMS = ("count", "right", "claimed", "cumulant")


class Evidence(NamedTuple):
    """What has become of the stakes on drifts that began in windows up to a position."""

    position: int
    logs: FloatArray  # (tilts, runs)

    @classmethod
    def none(cls, bins: int) -> Evidence:
        """Before the first window."""
        return cls(0, np.full((TILTS.size, bin_runs(bins).first.size), -np.inf))

    def after(self, log_bets: FloatArray, position: int) -> Evidence:
        """Stakes on beginnings up to ``position`` join, and all are multiplied by its bets."""
        step = position - self.position
        joins = math.log(step / ((self.position + 1) * (position + 1)))
        sums = np.cumsum(np.pad(log_bets, ((0, 0), (1, 0))), axis=1)
        runs = bin_runs(log_bets.shape[1])
        gained = sums[:, runs.end] - sums[:, runs.first]
        return Evidence(position, np.logaddexp(self.logs, joins) + gained)

    def weighted(self, bins: int) -> FloatArray:
        """Logarithm of each part of the e-value, ``(tilts, runs)``."""
        return self.logs + bin_runs(bins).log_weight

    def log_e_value(self, bins: int) -> float:
        """Logarithm of the e-value: these stakes and those on beginnings yet to come."""
        return float(np.logaddexp(logsumexp(self.weighted(bins)), -math.log(self.position + 1)))


class BinRuns(NamedTuple):
    """Runs of neighbouring bins, each ``(runs,)``."""

    first: IntArray
    end: IntArray  # the bin after the last
    log_weight: FloatArray  # share of the stake, for each tilt


@cache
def bin_runs(bins: int) -> BinRuns:
    """All runs of bins, the whole range among them, which has half of the stake."""
    first, last = np.triu_indices(bins)
    whole = last - first == bins - 1
    shares = np.where(whole, 0.5, 0.5 / max(first.size - 1, 1)) if bins > 1 else np.ones(1)
    return BinRuns(first, last + 1, np.log(shares / TILTS.size))


class Files:
    """Which files are in the stream: a digest and a sum of each, also when its window is gone.

    Attributes
    ----------
    totals : dict of str to list of float
        Sums of confidences, by a digest of what rounding does not touch: the name, the counts and
        the right answers per bin.
    """

    def __init__(self) -> None:
        self.totals: dict[str, list[float]] = {}

    @classmethod
    def restored(cls, totals: dict[str, list[float]] | None, windows: Iterable[Window]) -> Files:
        """Those that were written; those of the windows, where a state has no such entry."""
        found = cls()
        if totals is None:
            for window in windows:
                found.add(window)
        else:
            found.totals = {str(key): [*map(float, sums)] for key, sums in totals.items()}
        return found

    def __contains__(self, window: Window) -> bool:
        known = self.totals.get(_digest(window), [])
        return any(math.isclose(window.claimed.sum(), total, rel_tol=1e-9) for total in known)

    def add(self, window: Window) -> None:
        """Remember the window of a file; one without examples is not a file that was counted."""
        if window.n:
            self.totals.setdefault(_digest(window), []).append(float(window.claimed.sum()))

    def merge(self, other: Files) -> None:
        """Remember the files of another stream too."""
        for key, sums in other.totals.items():
            self.totals.setdefault(key, []).extend(sums)


def _digest(window: Window) -> str:
    sums = [window.name, window.count.tolist(), window.right.tolist()]
    return hashlib.sha256(json.dumps(sums).encode()).hexdigest()[:16]


def no_sums(bins: int) -> tuple[IntArray, IntArray, FloatArray, FloatArray]:
    """Sums of no examples, in the order of :data:`SUMS`."""
    whole = np.zeros((2, bins), np.int64)
    return whole[0], whole[1], np.zeros(bins), np.zeros((TILTS.size, bins))


def pack(window: Window) -> dict[str, Any]:
    """A window as it is written: only bins that hold something."""
    held = np.flatnonzero(window.count)
    sums = {key: getattr(window, key)[..., held].tolist() for key in SUMS}
    return {"number": window.number, "name": window.name, "bins": held.tolist(), **sums}


def unpack(packed: dict[str, Any], bins: int) -> Window:
    """The window that was written."""
    found, held = Window(int(packed["number"]), str(packed["name"]), *no_sums(bins)), packed["bins"]
    for key in SUMS:
        getattr(found, key)[..., held] = packed[key]
    return found
