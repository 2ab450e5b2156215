r"""A few subgroups that explain the many that are miscalibrated.

If ``site = B`` is too sure, so are most of its parts, and much of what overlaps with it. Subgroups
are chosen one by one, by the score test of a logistic model that has those already chosen:

.. math:: U_s = \sum_i w_i a_{is} (y_i - p_i), \qquad
          I_{st} = \sum_i w_i a_{is} a_{it} p_i (1 - p_i), \qquad
          z_s = \frac{U_s - I_{sA} I_{AA}^{-1} U_A}{\sqrt{I_{ss} - I_{sA} I_{AA}^{-1} I_{As}}}

with :math:`a_{is}` 1 for members, or -1 where the answer is right if y = 0, and A the chosen ones.
The deviation in the denominator is that of unit weights; in general it follows from the covariance
of the scores, which has :math:`w_i^2`, so that the scale of the weights does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from calibrant._core.checks import BoolArray, FloatArray, IntArray
from calibrant.data.metadata import Condition
from calibrant.metrics.intervals import Estimate
from calibrant.slices.examples import Outcomes
from calibrant.slices.search import Candidates, Family

PER_COMBINATION = 3
"""Subgroups of a combination of columns that may be chosen, so that many combinations are seen."""
MOST_CANDIDATES = 300
RUN = 8192
"""Examples whose memberships are held at one time."""
NEW = 0.05
"""Share of its information that a subgroup must add to those already chosen."""
SIMPLER = 0.97
"""Share of its strength that a further condition costs: of two alike, the simpler is chosen."""


class Candidate(NamedTuple):
    """One subgroup, with the gap of one estimand and its interval."""

    conditions: tuple[Condition, ...]
    estimand: str
    n: int
    weight: float
    claimed: float
    happened: float
    gap: Estimate
    strength: float  # standard deviations by which the gap is off


def _strongest(
    candidates: Candidates, family: Family, low: FloatArray, high: FloatArray
) -> list[Candidate]:
    """Return the strongest subgroups of a combination that are miscalibrated."""
    strength = np.abs(candidates.gap) / candidates.deviation
    shown = np.flatnonzero((low > 0) | (high < 0))
    best = shown[np.argsort(-strength[shown], kind="stable")[:PER_COMBINATION]]
    return [_one_candidate(candidates, family, i, low, high) for i in best.tolist()]


def _one_candidate(
    candidates: Candidates, family: Family, i: int, low: FloatArray, high: FloatArray
) -> Candidate:
    """Return the subgroup with the number ``i``; ``low`` and ``high`` are ends of intervals."""
    conditions = family.conditions(candidates.columns)
    chosen = zip(conditions, candidates.place[i].tolist(), strict=True)
    gap = float(candidates.gap[i])
    return Candidate(
        conditions=tuple(of_column[place] for of_column, place in chosen),
        estimand=candidates.estimand,
        n=round(float(candidates.number[i])),
        weight=float(candidates.weight[i]),
        claimed=float(candidates.claimed[i]),
        happened=float(candidates.happened[i]),
        gap=Estimate(gap, float(low[i]), float(high[i])),
        strength=abs(gap) / float(candidates.deviation[i]),
    )


def _members(conditions: Sequence[Condition], codes: IntArray) -> BoolArray:
    """Return True for the rows of codes ``(n, columns)`` that all conditions hold for."""
    inside = np.ones(len(codes), bool)
    for condition in conditions:
        inside &= condition.holds(codes)
    return inside


class Overlap(NamedTuple):
    """Scores ``(candidates,)``, their information and covariance ``(candidates, candidates)``."""

    score: FloatArray
    information: FloatArray
    covariance: FloatArray

    @classmethod
    def empty(cls, size: int) -> Overlap:
        """Sums over no examples."""
        return cls(np.zeros(size), np.zeros((size, size)), np.zeros((size, size)))

    def plus(self, other: Overlap) -> Overlap:
        """Return the sums over both sets of examples."""
        return Overlap(*(ours + theirs for ours, theirs in zip(self, other, strict=True)))


def overlap(candidates: Sequence[Candidate], outcomes: Outcomes, codes: IntArray) -> Overlap:
    """Return scores and information of some examples."""
    total = Overlap.empty(len(candidates))
    for start in range(0, len(codes), RUN):
        part, rows = outcomes.take(np.arange(start, min(start + RUN, len(codes)))), codes[start:]
        total = total.plus(_overlap(candidates, part, rows[:RUN]))
    return total


def _overlap(candidates: Sequence[Candidate], outcomes: Outcomes, codes: IntArray) -> Overlap:
    inside = np.stack([_members(c.conditions, codes) for c in candidates], 1).astype(np.float64)
    flipped = [c.estimand == "top_label" for c in candidates]
    inside[:, flipped] *= outcomes.sign[:, None]
    residual = outcomes.weight * (outcomes.happened - outcomes.claimed)
    information = outcomes.weight * outcomes.variance
    matrices = (information, outcomes.weight * information)
    return Overlap(residual @ inside, *(inside.T @ (each[:, None] * inside) for each in matrices))


def select(
    candidates: Sequence[Candidate], sums: Overlap, critical: float, most: int
) -> list[Candidate]:
    """Return the subgroups that the ones chosen before do not explain, at most ``most``.

    Each of the candidates is off by its own interval, so that at least one is returned.
    """
    score, information, covariance = sums
    own = np.sign(score)
    simple = SIMPLER ** np.array([len(candidate.conditions) for candidate in candidates])
    chosen: list[int] = []
    while len(chosen) < most:
        part = information[:, chosen]
        solved = np.linalg.lstsq(part[chosen], np.c_[score[chosen], part.T], rcond=None)[0]
        left = score - part @ solved[:, 0]
        added = np.diag(information) - np.einsum("ij,ji->i", part, solved[:, 1:])
        new = added > NEW * np.diag(information)
        others = np.zeros_like(information)
        others[:, chosen] = solved[:, 1:].T
        rest = np.eye(len(score)) - others
        variance = np.einsum("ij,jk,ik->i", rest, covariance, rest, optimize=True)
        strength = np.where(new, left * own / np.sqrt(np.where(new, variance, 1)), 0)
        strength[chosen] = 0
        if chosen:
            strength[strength <= critical] = 0
        best = int((strength * simple).argmax())
        if not strength[best]:
            break
        chosen.append(best)
    return [candidates[i] for i in chosen]
