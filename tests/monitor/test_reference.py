"""A reference is read in chunks, and its sums are those of all pairs."""

import numpy as np
import pytest

import calibrant as cal
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.data import Split
from calibrant.monitor import Monitor
from calibrant.monitor.reference import reference_bins
from tests.support.predictions import cut, predictions

ARRAYS = predictions(rows=300, classes=4)


@pytest.mark.parametrize("calibrated", [False, True])
def test_sums_of_shards_are_those_of_pairs(tmp_path, monkeypatch, calibrated):
    for i, shard in enumerate(cut(ARRAYS, 40, 200)):
        np.savez(tmp_path / f"{i}.npz", **shard)
    calibrator = TemperatureScaling().fit(ARRAYS["logits"], ARRAYS["labels"])
    logits = calibrator.transform(ARRAYS["logits"]) if calibrated else ARRAYS["logits"]
    expected = Monitor(bins=10, reference=cal.top_label(logits, ARRAYS["labels"])).tolerated

    def refused(self, column):
        raise AssertionError(f"{column} is read whole")

    monkeypatch.setattr(Split, "read", refused)
    found = reference_bins(tmp_path, calibrator if calibrated else None, bins=10)
    np.testing.assert_allclose(Monitor(bins=10, reference=found).tolerated.gaps, expected.gaps)


def test_bins_must_agree():
    with pytest.raises(ValueError, match="the bins of the monitor, 15, got 10: pass the same"):
        Monitor(reference=reference_bins(ARRAYS, bins=10))
    with pytest.raises(ValueError, match="nothing to measure"):
        reference_bins({"logits": np.zeros((3, 2)), "labels": np.full(3, -100)})
