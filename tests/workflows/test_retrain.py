"""MaC-Cal on prediction files with features of the training set."""

import numpy as np
import pytest

import calibrant as cal
from calibrant.calibrators.maccal import MaCCal
from calibrant.workflows.retrain import retrain
from tests.support.features import CLASSES, QUICK, WIDTH, clustered_features


def test_retraining_on_files_equals_a_fit_on_their_arrays(rng, tmp_path):
    data = clustered_features(rng)
    val = clustered_features(rng, 100)
    arrays = {"train_features": data[0], "train_labels": data[1]}
    weight = {"weight": np.zeros((CLASSES + 2, WIDTH)), "bias": np.zeros(CLASSES + 2)}
    other = {"val_features": val[0], "val_labels": val[1], "val_logits": np.zeros((100, 6))}
    cal.save_predictions(tmp_path / "one.npz", {**arrays, **other, **weight})
    cal.save_predictions(tmp_path / "train.npz", arrays)
    cal.save_predictions(tmp_path / "val.npz", {**other, **weight})
    expected = MaCCal(**QUICK).fit(*data, held_out=val, classes=CLASSES + 2)
    together = retrain(tmp_path / "one.npz", options=QUICK)
    apart = retrain(tmp_path / "val.npz", train=tmp_path / "train.npz", options=QUICK)
    alone = retrain(tmp_path / "train.npz", options=QUICK)
    assert together.history == apart.history == expected.history
    assert alone.history == MaCCal(**QUICK).fit(*data).history != expected.history
    with pytest.raises(ValueError, match=r"has no train_features, only the splits 'val'"):
        retrain(tmp_path / "val.npz")
