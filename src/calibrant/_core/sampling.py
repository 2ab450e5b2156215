"""Random samples of rows that do not depend on how the rows are cut into shards and chunks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibrant._core.checks import BoolArray, FloatArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Sample(NamedTuple):
    """A share of all rows, each kept or not by its own number and a seed.

    Samples of one seed are disjoint if the ranges from ``start`` to ``start + share`` are.
    """

    share: float
    seed: int = 0
    start: float = 0.0

    def keeps(self, first: int, count: int) -> BoolArray:
        """Return which of ``count`` rows from number ``first`` on are in the sample.

        >>> sample = Sample(0.5)
        >>> whole = sample.keeps(0, 10_000)
        >>> bool((whole[300:400] == sample.keeps(300, 100)).all()), round(float(whole.mean()), 1)
        (True, 0.5)
        """
        place = uniform(self.seed, first, count)
        return np.asarray((place >= self.start) & (place < self.start + self.share))


def uniform(seed: int, first: int, count: int) -> FloatArray:
    """Return numbers in [0, 1) that belong to the rows from ``first`` on."""
    rows = np.arange(first, first + count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        start = _mixed(np.array([seed], np.uint64) + _GOLDEN)
        mixed = _mixed(start + (rows + np.uint64(1)) * _GOLDEN)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return pseudo-random numbers of consecutive ones by SplitMix64 (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
