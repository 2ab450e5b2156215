"""Samples of binomial variables, some of which move with the chances."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from calibrant._core.checks import FloatArray, IntArray

RARE = 3.0
"""Expected hits, or misses, up to which probabilities are added up one by one."""
CACHED = 1 << 14
"""Numbers in a block that stays in the cache through all steps."""
SINGLE = 8
"""Trials up to which it costs less to draw each of them."""


class Binomials:
    """Samples of binomial variables that move with the chances, as little as these do.

    A number that is drawn once says which quantile each variable takes. Samples of two chances
    therefore differ by what the chances differ in, not by luck, and a search over chances sees no
    noise. Quantiles are those of the expansion of Cornish and Fisher to the fourth moment, which
    is off by one hit in about one of fifty draws, and exact where hits or misses are rare.

    >>> few = Binomials(np.full((1, 3), 10.0), np.array([[0.05, 0.5, 0.95]]))
    >>> few.hits(np.full(3, 0.5))
    array([[2., 5., 8.]])
    """

    def __init__(self, trials: FloatArray, uniform: FloatArray) -> None:
        self.trials, self.uniform = trials, uniform  # (replicates, variables)
        self._normal = normal = ndtri(uniform)
        square = normal * normal
        # the terms of the expansion for skewness, kurtosis, and squared skewness
        self._terms = (square - 1) / 6, (square - 3) * normal / 24, (5 - 2 * square) * normal / 36

    def hits(self, chance: FloatArray) -> FloatArray:
        """Hits in samples with chances ``(variables,)``, ``(replicates, variables)``."""
        hits = self.trials * chance  # the means, which are overwritten block by block
        rare = np.flatnonzero((hits < RARE) | (self.trials - hits < RARE))
        if rare.size < hits.size:
            step = max(1, CACHED // chance.size)
            for start in range(0, len(hits), step):
                self._expand(hits, slice(start, start + step), chance)
        if rare.size:
            variable = rare % chance.size
            found = _added_up(
                self.uniform.ravel()[rare], self.trials.ravel()[rare], chance, variable
            )
            hits.ravel()[rare] = found
        return hits

    def _expand(self, hits: FloatArray, rows: slice, chance: FloatArray) -> None:
        """Overwrite the means in some rows of ``hits`` by quantiles of the expansion."""
        skewed, peaked, bend = (term[rows] for term in self._terms)
        mean = hits[rows]
        variance = mean * (1 - chance)
        spread = variance + 1 / 12  # of whole numbers that are smeared over the width of one
        inverse = 1 / spread
        variance *= inverse
        skewness = variance * (1 - 2 * chance)  # these are times the deviation
        kurtosis = variance * (1 - 6 * chance * (1 - chance))
        kurtosis -= inverse * (1 / 120)
        kurtosis *= peaked
        kurtosis += skewness**2 * bend
        deviation = np.sqrt(spread, out=spread)
        kurtosis *= np.multiply(deviation, inverse, out=inverse)
        deviation *= self._normal[rows]
        skewness *= skewed
        for term in (deviation, skewness, kurtosis):
            mean += term
        np.rint(mean, out=mean)
        np.minimum(mean, self.trials[rows], out=mean)
        np.maximum(mean, 0, out=mean)


def _added_up(
    uniform: FloatArray, trials: FloatArray, chance: FloatArray, variable: IntArray
) -> FloatArray:
    """Quantiles ``(n,)``: the rarer outcome is counted up to where its probabilities reach them.

    Each has its own number of trials, and the chance of a ``variable`` ``(n,)``.
    """
    flipped = chance > 0.5
    rarer = np.where(flipped, 1 - chance, chance)
    odds, flipped = (rarer / (1 - rarer))[variable], flipped[variable]
    probability = np.exp(trials * np.log1p(-rarer)[variable])
    left = np.where(flipped, 1 - uniform, uniform) - probability
    count, open_ = np.zeros_like(trials), np.arange(trials.size)
    rest = trials
    for hit in range(1, 60):
        more = np.flatnonzero(left > 0)
        if not more.size:
            break
        open_, odds, rest = open_[more], odds[more], rest[more]
        probability = probability[more] * odds * (rest - (hit - 1)) / hit
        left = left[more] - probability
        count[open_] = hit
    return np.where(flipped, trials - count, count)


def _drawn(
    rng: np.random.Generator, trials: IntArray, chance: FloatArray, replicates: int
) -> NDArray[np.integer[Any]]:
    """Draw hits of the same variables over and over, ``(variables, replicates)``."""
    if trials.max() > SINGLE:
        # draws of one variable in a row share what the generator prepares for them
        return rng.binomial(trials[:, None], chance[:, None], (trials.size, replicates))
    hits = np.zeros((trials.size, replicates), np.uint8)
    for trial in range(int(trials.max())):
        some = np.flatnonzero(trials > trial)
        uniform = rng.random((some.size, replicates), dtype=np.float32)
        hits[some] += uniform < chance[some, None].astype(np.float32)
    return hits
