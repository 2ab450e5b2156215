"""Classes are found by their names, wherever their columns stand."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from calibrant._core.class_names import class_order
from calibrant.calibrators.base import Calibrator
from calibrant.data import save_predictions
from calibrant.data.files import as_dataset
from calibrant.workflows.apply import apply
from tests.fuzz.decisions import quiet
from tests.support.calibrators import EVERY_METHOD

WORDS = ["cat", "Dog", "owl ", "é", "prob", "logit", "y", "a_b", "-1", "x2", "ø"]


def check(rng: np.random.Generator) -> None:
    """Look names up, or calibrate columns that stand in another order."""
    names = random_names(rng, int(rng.integers(2, 7)))
    kind = rng.random()
    if kind < 0.5:
        check_order(rng, names)
    elif kind < 0.75:
        check_dataset(rng, names)
    else:
        check_calibrator(rng, names)


def random_names(rng: np.random.Generator, count: int) -> list[str]:
    """Distinct numbers, or words, some of which mean something in columns."""
    if rng.random() < 0.2:
        return [str(number) for number in rng.choice(12, count, replace=False)]
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choice(WORDS, int(rng.integers(1, 3))))] = None
    return list(names)


def check_order(rng: np.random.Generator, names: list[str]) -> None:
    other = [names[k] for k in rng.permutation(len(names))]
    if rng.random() < 0.4:
        other = [*other[1:], *random_names(rng, 1)]
        if len(set(other)) < len(names):
            return
    numbers = [str(k) for k in range(len(names))]
    if numbers in (sorted(names), sorted(other)):
        return  # numbers of classes, which the tests of class_order have
    if set(names) != set(other):
        with pytest.raises(ValueError, match="here has other classes"):
            class_order(names, other, "here")
        return
    order = class_order(names, other, "here")
    places = range(len(names)) if order is None else order
    assert [other[k] for k in places] == names
    assert (order is None) == (names == other)


def check_dataset(rng: np.random.Generator, names: list[str]) -> None:
    """Scores and labels of a dataset in another order are those of the names."""
    logits = rng.normal(size=(12, len(names))).astype(rng.choice(["f4", "f8"]))
    labels = rng.integers(len(names), size=12)
    labels[rng.random(12) < 0.3] = -100
    data = as_dataset({"val_logits": logits, "val_labels": labels, "class_names": names})
    other = [names[k] for k in rng.permutation(len(names))]
    split = data.in_order(other).split("val")
    for k, name in enumerate(other):
        np.testing.assert_array_equal(split.logits[:, k], logits[:, names.index(name)])
    known = labels >= 0
    assert [other[k] for k in split.labels[known]] == [names[k] for k in labels[known]]
    assert (split.labels[~known] == -100).all()
    again = data.in_order(other).in_order(names).split("val")
    np.testing.assert_array_equal(again.logits, logits)
    np.testing.assert_array_equal(again.labels, labels)


def check_calibrator(rng: np.random.Generator, names: list[str]) -> None:
    """A calibrator gives the column of a name the same numbers, wherever it stands."""
    logits = 3 * rng.normal(size=(60, len(names)))
    labels = rng.integers(len(names), size=60)
    method = str(rng.choice(["ts", "vector", "histogram", "isotonic_ovr"]))
    frame = pd.DataFrame(logits, columns=[f"logit_{name}" for name in names])
    fitted = quiet(EVERY_METHOD[method]().fit, frame, [names[k] for k in labels])
    order = rng.permutation(len(names))
    expected = fitted.predict_proba(frame)[:, order]
    found = fitted.predict_proba(frame.iloc[:, order])
    np.testing.assert_allclose(found, expected, rtol=1e-12)  # sums in the order of memory
    if rng.random() < 0.3:
        with tempfile.TemporaryDirectory() as folder:
            check_file(fitted, frame.iloc[:, order], Path(folder), expected)


def check_file(fitted: Calibrator, frame: Any, folder: Path, expected: Any) -> None:
    names = [name.removeprefix("logit_") for name in frame.columns]
    save_predictions(
        folder / "in.npz", {"logits": frame.to_numpy(), "class_names": np.array(names)}
    )
    apply(fitted, folder / "in.npz", folder / "out.npz")
    with np.load(folder / "out.npz") as written:
        assert written["class_names"].tolist() == names
        exact = np.exp(written["logits"].astype(float))
    found = exact / exact.sum(1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=1e-6)
