"""Seeded folds for cross-validation."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrant._core.checks import IntArray


def folds(
    labels: IntArray, count: int, *, groups: NDArray[Any] | None = None, seed: int = 0
) -> list[IntArray]:
    """Split examples into parts of nearly equal size, each with its share of every class.

    Returns the sorted indices of each part; fewer parts than ``count`` where there are fewer
    examples or groups. Examples of one group stay together; classes are then left to chance.
    """
    rng = np.random.default_rng(seed)
    if groups is None:
        # Dealing out the examples class by class gives each part its share of every class.
        order = np.lexsort((rng.random(len(labels)), labels))
        part = np.empty(len(labels), dtype=np.int64)
        part[order] = np.arange(len(labels)) % count
    else:
        names, member = np.unique(groups, return_inverse=True)
        part = (rng.permutation(len(names)) % count)[member]
    parts = [np.flatnonzero(part == i) for i in range(count)]
    return [indices for indices in parts if len(indices)]
