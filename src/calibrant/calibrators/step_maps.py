"""Maps of the confidence that are constant within bins, and the bins of log-odds.

Bins are stored as edges on the log-odds. Each is ``(low, high]``, as everywhere in this library.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from scipy.special import expit, logit
from torch import Tensor

from calibrant._core.binning import fill, uniform_edges
from calibrant._core.checks import BoolArray, FloatArray, IntArray
from calibrant.calibrators.piecewise import at_place, place
from calibrant.calibrators.top_label import CERTAIN, TopLabelMap

DIGITS = 5
"""Decimals to which log-odds are distinguished: a fit sees them with an error of some 1e-6."""
SLACK = 1e-5
"""How far edges of equal width are moved up, so that a confidence which lies on an edge (of three
level classes, say) is below it in spite of that error."""


class StepMap(TopLabelMap):
    """New log-odds of the top class that are constant within bins of the old ones.

    Attributes
    ----------
    edges_ : (m,) Tensor
        Log-odds between the bins.
    levels_ : (m + 1,) Tensor
        Log-odds that the bins give.
    """

    tempered = False

    edges_: Tensor
    levels_: Tensor
    learned_shapes = "edges_ cuts; levels_ cuts+1"

    def __init__(self, *, keep_argmax: bool = True) -> None:
        super().__init__(keep_argmax=keep_argmax)
        self._store(edges_=torch.zeros(0), levels_=torch.zeros(1))

    def _keep(self, edges: FloatArray, confidence: FloatArray) -> None:
        """Keep the edges and what the bins give, a confidence each."""
        self._store(edges_=edges, levels_=np.clip(_logit(confidence), -CERTAIN, CERTAIN))

    def _map(self, odds: Tensor) -> Tensor:
        return at_place(self.levels_.to(odds.dtype), place(odds, self.edges_))


class RankedOdds(NamedTuple):
    """Examples in the order of their log-odds, those that cannot be told apart taken together."""

    value: FloatArray  # (m,) log-odds
    edge: FloatArray  # (m - 1,) halfway between neighbours
    mass: FloatArray  # (m,) weight up to here
    right: FloatArray  # (m,) weight of those up to here that are right
    group: IntArray  # (n,) place of each example


def ranked(odds: FloatArray, correct: BoolArray, weight: FloatArray) -> RankedOdds:
    """Sort examples by their log-odds.

    >>> ranked(np.array([3.0, 1.0, 3.0]), np.array([True, True, False]), np.ones(3)).mass
    array([1., 3.])
    """
    value, group = np.unique(np.round(odds, DIGITS), return_inverse=True)
    mass, right = (
        np.cumsum(np.bincount(group, part).astype(np.float64, copy=False))
        for part in (weight, weight * correct)
    )
    return RankedOdds(value, (value[1:] + value[:-1]) / 2, mass, right, group)


def equal_mass(ranks: RankedOdds, bins: int) -> IntArray:
    """Last place of each bin but the last, by the rule of ``_core.binning.equal_mass_edges``."""
    wanted = ranks.mass[-1] * np.arange(1, bins) / bins
    cuts = np.unique(np.searchsorted(ranks.mass, wanted * (1 - 1e-12)))
    return np.asarray(cuts[cuts < len(ranks.mass) - 1])


def histogram(
    odds: FloatArray, correct: BoolArray, weight: FloatArray, bins: int, mass: bool
) -> tuple[FloatArray, FloatArray]:
    """Edges on the log-odds ``(m,)``, and the accuracy of each bin ``(m + 1,)``."""
    if mass:
        ranks = ranked(odds, correct, weight)
        cuts = equal_mass(ranks, bins)
        edges, odds = ranks.edge[cuts], ranks.value[ranks.group]
    else:
        edges = logit(uniform_edges(bins)[1:-1]) + SLACK
    return edges, bin_means(odds, correct.astype(np.float64), edges, weight)


def bin_means(
    odds: FloatArray, outcome: FloatArray, edges: FloatArray, weight: FloatArray
) -> FloatArray:
    """Mean outcome of each bin; the centre of a bin that holds nothing."""
    result = fill(odds, outcome, np.concatenate([[-np.inf], edges, [np.inf]]), weight).accuracy
    return np.where(np.isnan(result), centres(edges)[0], result)


def centres(edges: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Centre of each bin in confidence, and one minus it, exact near 1 as well."""
    low, high = np.append(-np.inf, edges), np.append(edges, np.inf)
    return (expit(low) + expit(high)) / 2, (expit(-low) + expit(-high)) / 2


def _logit(confidence: FloatArray) -> FloatArray:
    with np.errstate(divide="ignore"):
        return np.asarray(logit(confidence))
