"""The pairs that a stream keeps for metrics that sort: each of them, or pooled if they are many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from calibrant._core.checks import FloatArray
from calibrant.metrics.pooled import PooledPairs
from calibrant.metrics.reductions import Pairs, WeightedPairs

MOST_PAIRS = 1 << 18
"""Number of labels, ignored ones included, up to which every pair is kept. Metrics take about a
hundred bytes for each, while pooling changes them by a hundredth of a standard error."""


class _Part(NamedTuple):
    """What is kept of each example of a batch."""

    pairs: Pairs
    answers: Pairs  # those that AUROC and AURC rank; the same object where they are the same
    weight: FloatArray | None


class KeptPairs:
    """Pairs of the examples of a stream, which are pooled from the first batch on that is too much.

    Whether they are pooled depends on the number of labels alone, not on batches or their order.
    """

    def __init__(self, most: float) -> None:
        self.most, self.labels = most, 0
        self._parts: list[_Part] = []
        self._sums: tuple[PooledPairs, PooledPairs] | None = None  # answers may be the pairs

    @property
    def pooled(self) -> bool:
        """True if single pairs are not kept."""
        return self._sums is not None

    def add(
        self, pairs: Pairs, answers: Pairs | None, weight: FloatArray | None, labels: int
    ) -> None:
        """Add the pairs of a batch; ``answers`` are None where they are the pairs themselves."""
        self.labels += labels
        self._parts.append(_Part(pairs, answers or pairs, weight))
        self._settle()

    def merge(self, other: KeptPairs) -> None:
        """Add what another stream has kept."""
        self.labels += other.labels
        self._parts += other._parts
        if other._sums is not None:
            self.pool()
            self._add(other._sums)
        self._settle()

    def pool(self) -> None:
        """Keep sums in place of single pairs from now on."""
        if self._sums is None:
            nothing = PooledPairs.empty()
            self._sums = (nothing, nothing)
        self._settle()

    def _settle(self) -> None:
        if self._sums is None:
            if self.labels > self.most:
                self.pool()
            return
        parts, self._parts = self._parts, []
        for part in parts:
            pairs = answers = PooledPairs.of(part.pairs, part.weight)
            if part.answers is not part.pairs:
                answers = PooledPairs.of(part.answers, part.weight)
            self._add((pairs, answers))

    def _add(self, sums: tuple[PooledPairs, PooledPairs]) -> None:
        assert self._sums is not None
        pairs = answers = self._sums[0] + sums[0]
        if self._sums[0] is not self._sums[1] or sums[0] is not sums[1]:
            answers = self._sums[1] + sums[1]
        self._sums = (pairs, answers)

    def joined(self) -> WeightedPairs:
        """Return the pairs in the order of their arrival; of pooled ones, one for each bin."""
        if self._sums is not None:
            return self._sums[0].pairs
        return self._joined([part.pairs for part in self._parts])

    def in_order(self) -> tuple[WeightedPairs | PooledPairs, WeightedPairs | PooledPairs]:
        """Return pairs and answers in order of confidence: once, for all metrics that sort."""
        if self._sums is not None:
            return self._sums
        pairs = answers = self._sorted([part.pairs for part in self._parts])
        if any(part.answers is not part.pairs for part in self._parts):
            answers = self._sorted([part.answers for part in self._parts])
        return pairs, answers

    def _sorted(self, parts: Sequence[Pairs]) -> WeightedPairs:
        confidence, outcome, weight = self._joined(parts)
        order = np.argsort(confidence, kind="stable")
        sorted_weight = None if weight is None else weight[order]
        return WeightedPairs(confidence[order], outcome[order], sorted_weight)

    def _joined(self, parts: Sequence[Pairs]) -> WeightedPairs:
        nothing = Pairs(np.zeros(0), np.zeros(0))  # type: ignore[arg-type]  # outcomes as floats
        confidence, outcome = map(np.concatenate, zip(nothing, *parts, strict=True))
        weight = None
        if any(part.weight is not None for part in self._parts):
            masses = ((part.weight, part.pairs.outcome.size) for part in self._parts)
            weight = np.concatenate([np.ones(n) if w is None else w for w, n in masses])
        return WeightedPairs(confidence, outcome, weight)
