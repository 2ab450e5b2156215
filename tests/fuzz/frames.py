"""Data frames give the figures of their columns, or an error that names what is no score."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

import calibrant as cal
from calibrant._core.class_names import class_names_of
from tests.fuzz.class_names import random_names
from tests.fuzz.decisions import quiet

FURTHER: dict[str, Any] = {
    "id": lambda rng, n: np.arange(n),
    "index": lambda rng, n: rng.permutation(n),
    "weight": lambda rng, n: rng.integers(1, 5, n),
    "site": lambda rng, n: rng.choice(["north", "south"], n),
    "when": lambda rng, n: pd.date_range("2026-01-01", periods=n),
    "seen": lambda rng, n: rng.random(n) < 0.5,
}


def check(rng: np.random.Generator) -> None:
    """Measure a frame of scores, with a further column now and then."""
    n, classes = int(rng.integers(2, 30)), int(rng.integers(2, 6))
    names = [name for name in random_names(rng, classes) if name not in FURTHER]
    if len(names) < classes:
        return
    logits, labels = rng.normal(size=(n, classes)), rng.integers(classes, size=n)
    prefixed = rng.random() < 0.5
    columns = [f"logit_{name}" for name in names] if prefixed else names
    frame = pd.DataFrame(logits, columns=columns)
    if not prefixed and not plain(columns):
        return
    expected = quiet(cal.evaluate, logits, labels, level=None).to_dict()
    named = np.array(names)[labels]
    if rng.random() < 0.5:
        assert quiet(cal.evaluate, frame, named, level=None).to_dict() == expected
        return
    name = str(rng.choice(list(FURTHER)))
    wide = frame.assign(**{name: FURTHER[name](rng, n)})
    wide = wide[[wide.columns[k] for k in rng.permutation(wide.shape[1])]]
    with pytest.raises(ValueError, match=name):
        quiet(cal.evaluate, wide, named, level=None)


def plain(columns: list[str]) -> bool:
    """Return True for names that say neither logit nor prob."""
    try:
        return class_names_of(pd.DataFrame([[0.5] * len(columns)], columns=columns)) == columns
    except ValueError:
        return False
