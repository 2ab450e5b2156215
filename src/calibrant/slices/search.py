r"""Sums of all subgroups, their gaps with intervals that hold for all, and the few that are named.

The gap of a subgroup is its mean claim :math:`\bar p` less the share :math:`\bar y` of events. If
the claims are right, the events vary by :math:`V = \sum_i w_i^2 p_i (1 - p_i)`, less than those of
equal probabilities: as much as in a subgroup of

.. math:: n_\mathrm{eff} = \Bigl(\sum_i w_i\Bigr)^2 \bar p (1 - \bar p) / V

examples that are all alike. An interval is that of Clopper and Pearson for the share of events
among so many; if the residuals scatter by more than V, :math:`n_\mathrm{eff}` follows from their
scatter. Its level is that of a critical value for the largest of all standardised gaps: a quantile
over draws of normal noise on a sample of the examples, which overlap as the subgroups do.

Sums of k columns are tables over their codes, of which ranges add up to the subgroups. Tables of
chunks, shards and workers add up as well.

If ``site = B`` is too sure, so are most of its parts, and much of what overlaps with it. The few
that explain the others are chosen one by one, by the score test of a logistic model that has those
already chosen:

.. math:: U_s = \sum_i w_i a_{is} (y_i - p_i), \qquad
          I_{st} = \sum_i w_i a_{is} a_{it} p_i (1 - p_i), \qquad
          z_s = \frac{U_s - I_{sA} I_{AA}^{-1} U_A}{\sqrt{I_{ss} - I_{sA} I_{AA}^{-1} I_{As}}}

with :math:`a_{is}` 1 for members, or -1 where the answer is right if y = 0, and A the chosen ones.
The deviation in the denominator is that of unit weights; in general it follows from the covariance
of the scores, which has :math:`w_i^2`, so that the scale of the weights does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array
from scipy.special import ndtr

from calibrant._core.checks import BoolArray, FloatArray, IntArray
from calibrant.data.metadata import Condition, MetadataColumn
from calibrant.metrics.intervals import Estimate, clopper_pearson
from calibrant.slices.examples import _Outcomes

DRAWS = 400
SHARED = ("count", "weight", "square", "variance", "scatter")
OF_ESTIMAND = ("claimed", "happened")
PER_COMBINATION = 3
"""Subgroups of a combination of columns that may be chosen, so that many combinations are seen."""
MOST_CANDIDATES = 300
RUN = 8192
"""Examples whose memberships are held at one time."""
NEW = 0.05
"""Share of its information that a subgroup must add to those already chosen."""
SIMPLER = 0.97
"""Share of its strength that a further condition costs: of two alike, the simpler is chosen."""


@dataclass
class _Tables:
    """Sums by codes, ``(sums, codes of the columns...)`` for each combination of columns."""

    sizes: tuple[int, ...]
    estimands: tuple[str, ...]
    sums: dict[tuple[int, ...], FloatArray]

    @classmethod
    def empty(
        cls, columns: Sequence[MetadataColumn], estimands: tuple[str, ...], depth: int
    ) -> _Tables:
        """Tables of no examples, for all combinations of at most ``depth`` columns."""
        sizes = tuple(column.size for column in columns)
        count = len(SHARED) + len(OF_ESTIMAND) * len(estimands)
        chosen = [c for k in range(depth + 1) for c in combinations(range(len(sizes)), k)]
        sums = {c: np.zeros((count, *(sizes[i] for i in c))) for c in chosen}
        return cls(sizes, estimands, sums)

    def add(self, outcomes: _Outcomes, codes: IntArray) -> None:
        """Add examples with codes ``(n, columns)``."""
        weight, variance = outcomes.weight, outcomes.variance
        square, residual = weight**2, outcomes.happened - outcomes.claimed
        values = [np.ones_like(weight), weight, square, square * variance, square * residual**2]
        for estimand in self.estimands:
            claimed, happened = outcomes.pairs(estimand)
            values += [weight * claimed, weight * happened]
        for chosen, total in self.sums.items():
            cell = _flat_codes(codes, chosen, self.sizes)
            width = math.prod(total.shape[1:])
            parts = [np.bincount(cell, each, width) for each in values]
            total += np.reshape(parts, total.shape)

    def merge(self, other: _Tables) -> None:
        """Add the sums of other examples."""
        for chosen, total in self.sums.items():
            total += other.sums[chosen]


def _flat_codes(codes: IntArray, chosen: tuple[int, ...], sizes: Sequence[int]) -> IntArray:
    """Return the cell of each example in the table of some columns."""
    if not chosen:
        return np.zeros(len(codes), np.int64)
    shape = tuple(sizes[i] for i in chosen)
    return np.asarray(np.ravel_multi_index(tuple(codes[:, i] for i in chosen), shape))


class _Candidates(NamedTuple):
    """Subgroups of one combination of columns and one estimand; arrays are ``(subgroups,)``."""

    columns: tuple[int, ...]
    estimand: str
    place: IntArray  # (subgroups, columns): the condition of each column
    number: FloatArray  # of examples
    weight: FloatArray
    claimed: FloatArray  # mean claim
    happened: FloatArray  # share of events
    deviation: FloatArray  # standard deviation of the gap
    size: FloatArray  # examples that are all alike, of which the events would vary as much

    @property
    def gap(self) -> FloatArray:
        """Mean claim less the share of events: positive where claims are too high."""
        return self.claimed - self.happened

    def take(self, chosen: IntArray | BoolArray) -> _Candidates:
        """Return some of the subgroups."""
        values: Any = [column[chosen] for column in self[2:]]
        return _Candidates(self.columns, self.estimand, *values)

    def intervals(self, critical: float) -> tuple[FloatArray, FloatArray]:
        """Return both ends of the intervals of the gaps."""
        low, high = clopper_pearson(self.happened * self.size, self.size, float(ndtr(-critical)))
        return self.claimed - high, self.claimed - low


@dataclass(frozen=True, eq=False)
class _Family:
    """All subgroups that are searched: ranges of codes of every combination of columns.

    ``alone`` and ``together`` have the conditions on each column, where it is the only one of a
    subgroup and where it is one of several.
    """

    alone: list[list[Condition]]
    together: list[list[Condition]]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, columns: Sequence[MetadataColumn]) -> _Family:
        """Return the subgroups that columns form."""
        alone = [column.conditions(i, between=True) for i, column in enumerate(columns)]
        together = [column.conditions(i) for i, column in enumerate(columns)]
        return cls(alone, together, tuple(column.size for column in columns))

    def conditions(self, chosen: tuple[int, ...]) -> list[list[Condition]]:
        """Return the conditions on each column of a combination."""
        return [(self.alone if len(chosen) == 1 else self.together)[i] for i in chosen]

    def sums(self, table: FloatArray, chosen: tuple[int, ...]) -> FloatArray:
        """Return sums of subgroups ``(sums, subgroups)`` from those by code."""
        for conditions, column in zip(self.conditions(chosen), chosen, strict=True):
            code = np.arange(self.sizes[column])
            member = np.array([(code >= c.low) & (code < c.high) for c in conditions], np.float64)
            table = np.tensordot(table, member, (1, 1))  # the new axis comes last
        return table.reshape(len(table), -1)

    def places(self, chosen: tuple[int, ...]) -> IntArray:
        """Return the numbers of the conditions of each subgroup, ``(subgroups, columns)``."""
        shape = tuple(len(conditions) for conditions in self.conditions(chosen))
        return np.indices(shape).reshape(len(shape), math.prod(shape)).T.astype(np.int64)


def _all_candidates(tables: _Tables, family: _Family, min_size: int) -> Iterator[_Candidates]:
    """Yield the subgroups of at least ``min_size`` examples; the first is that of all examples."""
    everyone = float(tables.sums[()][0])
    for chosen, table in tables.sums.items():
        sums = family.sums(table, chosen)
        place = family.places(chosen)
        fits = (sums[0] >= min_size) & (sums[0] < everyone) if chosen else np.ones(1, bool)
        for number, estimand in enumerate(tables.estimands):
            yield _gaps_of(chosen, estimand, place[fits], sums[:, fits], number)


def _gaps_of(
    chosen: tuple[int, ...], estimand: str, place: IntArray, sums: FloatArray, number: int
) -> _Candidates:
    """Return the gaps of subgroups with these sums, of the estimand with this number."""
    count, weight, square, variance, scatter = sums[: len(SHARED)]
    start = len(SHARED) + number * len(OF_ESTIMAND)
    claimed, happened = sums[start : start + len(OF_ESTIMAND)] / weight
    # around their mean, as far as weights and residuals have nothing to do with each other
    scatter = np.maximum(scatter - (claimed - happened) ** 2 * square, 0)
    size = np.minimum(
        _alike(claimed, variance, weight, otherwise=weight**2 / square),
        _alike(happened, scatter, weight, otherwise=np.full_like(weight, np.inf)),
    )
    deviation = np.sqrt(np.maximum(variance, scatter)) / weight
    return _Candidates(chosen, estimand, place, count, weight, claimed, happened, deviation, size)


def _alike(
    share: FloatArray, variance: FloatArray, weight: FloatArray, *, otherwise: FloatArray
) -> FloatArray:
    """Return the number of examples of one probability whose events vary by a variance."""
    scaled = weight**2 * share * (1 - share)
    return np.divide(scaled, variance, out=otherwise, where=(variance > 0) & (scaled > 0))


def _critical_value(
    tables: _Tables,
    family: _Family,
    sample: tuple[_Outcomes, IntArray],
    *,
    min_size: int,
    level: float,
    seed: int,
) -> float:
    """Return the standard deviations within which all gaps stay with probability ``level``.

    It is the quantile of the largest of all standardised sums of normal noise, on a ``sample`` of
    outcomes and codes that stands for all examples.
    """
    outcomes, codes = sample
    rng = np.random.default_rng(seed)
    scale = outcomes.weight * np.sqrt(outcomes.variance)
    noise = rng.standard_normal((scale.size, DRAWS)) * scale[:, None]
    signs = [np.ones_like(scale), outcomes.sign][: len(tables.estimands)]
    largest = np.zeros(DRAWS)
    for chosen, table in tables.sums.items():
        cell, width = _flat_codes(codes, chosen, tables.sizes), math.prod(table.shape[1:])
        variance = np.bincount(cell, scale**2, width).astype(np.float64)
        deviation = np.sqrt(family.sums(variance.reshape(1, *table.shape[1:]), chosen)[0])
        enough = family.sums(table[:1], chosen)[0] >= (min_size if chosen else 1)
        fits = enough & (deviation > 0)
        for sign in signs if fits.any() else []:
            by_cell: Any = csr_array((sign, (cell, np.arange(cell.size))), (width, cell.size))
            sums = family.sums((by_cell @ noise).T.reshape(DRAWS, *table.shape[1:]), chosen)
            standard = np.abs(sums[:, fits]) / deviation[fits]
            largest = np.maximum(largest, standard.max(1))
    return float(np.quantile(largest, level))


class _Candidate(NamedTuple):
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
    candidates: _Candidates, family: _Family, low: FloatArray, high: FloatArray
) -> list[_Candidate]:
    """Return the strongest subgroups of a combination that are miscalibrated."""
    strength = np.abs(candidates.gap) / candidates.deviation
    shown = np.flatnonzero((low > 0) | (high < 0))
    best = shown[np.argsort(-strength[shown], kind="stable")[:PER_COMBINATION]]
    return [_one_candidate(candidates, family, i, low, high) for i in best.tolist()]


def _one_candidate(
    candidates: _Candidates, family: _Family, i: int, low: FloatArray, high: FloatArray
) -> _Candidate:
    """Return the subgroup with the number ``i``; ``low`` and ``high`` are ends of intervals."""
    conditions = family.conditions(candidates.columns)
    chosen = zip(conditions, candidates.place[i].tolist(), strict=True)
    gap = float(candidates.gap[i])
    return _Candidate(
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


class _Overlap(NamedTuple):
    """Scores ``(candidates,)``, their information and covariance ``(candidates, candidates)``."""

    score: FloatArray
    information: FloatArray
    covariance: FloatArray

    @classmethod
    def empty(cls, size: int) -> _Overlap:
        """Sums over no examples."""
        return cls(np.zeros(size), np.zeros((size, size)), np.zeros((size, size)))

    def plus(self, other: _Overlap) -> _Overlap:
        """Return the sums over both sets of examples."""
        return _Overlap(*(ours + theirs for ours, theirs in zip(self, other, strict=True)))


def overlap(candidates: Sequence[_Candidate], outcomes: _Outcomes, codes: IntArray) -> _Overlap:
    """Return scores and information of some examples."""
    total = _Overlap.empty(len(candidates))
    flipped = [c.estimand == "top_label" for c in candidates]
    for start in range(0, len(codes), RUN):
        rows = codes[start : start + RUN]
        part = outcomes.take(np.arange(start, start + len(rows)))
        inside = np.stack([_members(c.conditions, rows) for c in candidates], 1).astype(np.float64)
        inside[:, flipped] *= part.sign[:, None]
        residual = part.weight * (part.happened - part.claimed)
        information = part.weight * part.variance
        matrices = (information, part.weight * information)
        products = (inside.T @ (each[:, None] * inside) for each in matrices)
        total = total.plus(_Overlap(residual @ inside, *products))
    return total


def select(
    candidates: Sequence[_Candidate], sums: _Overlap, critical: float, most: int
) -> list[_Candidate]:
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
