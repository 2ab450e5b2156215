"""Cross-fitting: the loop over folds, written out here."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch

import calibrant
from calibrant._core.checks import IGNORED
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.workflows.cross_fit import cross_fit
from tests.support.calibrators import Shift
from tests.support.predictions import as_npz, as_npz_folder, labelled, out_of, predictions, splits


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("kind", "write"), [(TemperatureScaling, as_npz_folder), (Shift, as_npz)])
def test_cross_fit_is_the_loop_over_folds(tmp_path, kind, write):
    arrays = predictions()
    arrays["importance"][::11] = 0  # as if they were not there
    found = cross_fit(
        write(tmp_path, arrays), kind(), folds=4, sample_weight="importance", metrics=["ece", "nll"]
    )
    kept, fold = labelled(arrays), found.folds[arrays["labels"] != IGNORED]
    after = np.zeros_like(kept["logits"])
    for i in range(4):
        seen = {key: values[fold != i] for key, values in kept.items()}
        fitted = kind().fit(seen["logits"], seen["labels"], sample_weight=seen["importance"])
        after[fold == i] = out_of(fitted, kept["logits"][fold == i])
    expected = calibrant.evaluate(
        after, kept["labels"], sample_weight=kept["importance"], metrics=["ece", "nll"]
    )
    for name in ("ece", "nll"):
        assert found.effect.after[name].value == pytest.approx(expected[name].value, abs=1e-5)
        assert found.effect.after[name].low == pytest.approx(expected[name].low, abs=1e-3)
    whole = kind().fit(arrays["logits"], arrays["labels"], sample_weight=arrays["importance"])
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(found.calibrator.state_dict()[name], value, rtol=1e-5, atol=0)
    assert len(found.calibrators) == 4
    assert found.effect.before.n == (kept["importance"] > 0).sum() == (found.folds >= 0).sum()


def test_folds_have_equal_shares_and_are_seeded(tmp_path):
    arrays = predictions()
    path = as_npz(tmp_path, arrays)
    options: dict[str, Any] = {"metrics": ["accuracy"], "level": None}
    first, again, other = (cross_fit(path, "ts", seed=s, **options).folds for s in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    np.testing.assert_array_equal(first == -1, arrays["labels"] == IGNORED)
    for label in range(5):
        counts = np.bincount(first[arrays["labels"] == label], minlength=5)
        assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("kind", [TemperatureScaling, Shift])
def test_groups_stay_in_one_fold(tmp_path, rng, kind):
    arrays = predictions() | {"patient": np.sort(rng.integers(40, size=600))}
    arrays["labels"][arrays["patient"] == 0] = IGNORED
    found = cross_fit(
        as_npz(tmp_path, arrays), kind(), groups="patient", metrics=["accuracy"], level=None
    )
    for patient in np.unique(arrays["patient"]):
        rows = (arrays["patient"] == patient) & (arrays["labels"] != IGNORED)
        assert len(np.unique(found.folds[rows])) == (patient != 0)
    assert set(found.folds[arrays["labels"] != IGNORED]) == set(range(5))


def test_cross_fit_takes_arrays_and_tokens(rng):
    logits = rng.normal(size=(30, 4, 3))
    labels = rng.integers(3, size=(30, 4))
    labels[::7] = IGNORED
    arrays = {"logits": torch.tensor(logits), "labels": torch.tensor(labels)}
    found = cross_fit(arrays, Shift(), folds=3, metrics=["nll"], level=None)
    after = np.empty_like(logits)
    for i in range(3):
        seen = found.folds != i
        fitted = Shift().fit(logits[seen], labels[seen])
        after[~seen] = out_of(fitted, logits[~seen])
    expected = calibrant.evaluate(after, labels, metrics=["nll"], level=None)
    assert found.effect.after["nll"].value == pytest.approx(expected["nll"].value)


def test_warning_of_every_fold_is_given_once(tmp_path):
    class Telling(Shift):
        def _fit(self, examples, context):
            super()._fit(examples, context)
            warnings.warn(f"{(examples.labels >= 0).sum()} samples", stacklevel=2)

    with pytest.warns(UserWarning, match="^564 samples") as told:
        cross_fit(as_npz(tmp_path, predictions()), Telling(), metrics=["ece"], level=None)
    assert len(told) == 1


@pytest.mark.parametrize(
    ("names", "used"), [(["test"], "test"), (["test", "val"], "val"), (["test", ""], "")]
)
def test_split_of_a_cross_fit(tmp_path, names, used):
    path = as_npz(tmp_path, splits(**{name: predictions(rows=60) for name in names}))
    assert cross_fit(path, "ts", metrics=["accuracy"], level=None).split == used


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folds": 1}, "folds must be from 2 to the number of labelled rows, 564, got 1"),
        ({"folds": 565}, "folds must be from 2 to the number of labelled rows, 564, got 565"),
        ({"groups": "site"}, "folds must be from 2 to the number of values of site, 3, got 5"),
        ({"split": "test"}, "no split 'test', only plain arrays"),
    ],
)
def test_impossible_folds(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        cross_fit(as_npz(tmp_path, predictions()), "ts", **options)
