"""The effect of a calibrator, before and after, on files."""

from typing import Any

import numpy as np
import pytest

import calibrant
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.workflows.effect import effect
from calibrant.workflows.fit import fit_and_measure
from tests.support.calibrators import Featured, PerRow, Shift
from tests.support.predictions import as_npz, as_npz_folder, labelled, out_of, predictions, splits


@pytest.mark.usefixtures("small_chunks", "no_whole_logits")
@pytest.mark.parametrize(
    ("kind", "write"),
    [(TemperatureScaling, as_npz), (Shift, as_npz_folder), (PerRow, as_npz_folder)],
)
def test_effect_is_that_of_the_arrays(tmp_path, kind, write):
    arrays, chosen = predictions(), ["accuracy", "ece", "nll", "auroc"]
    fitted = kind().fit(arrays["logits"], arrays["labels"])
    options: dict[str, Any] = {"metrics": chosen, "level": None}
    found = effect(fitted, write(tmp_path, arrays), sample_weight="importance", **options)
    kept = labelled(arrays)
    after = out_of(fitted, kept["logits"])
    for evaluation, logits in ((found.before, kept["logits"]), (found.after, after)):
        expected = calibrant.evaluate(
            logits, kept["labels"], sample_weight=kept["importance"], **options
        )
        assert evaluation.n == expected.n
        for name in chosen:
            assert evaluation[name].value == pytest.approx(expected[name].value, abs=1e-9)
    assert found.argmax_changed == (after.argmax(1) != kept["logits"].argmax(1)).sum()
    assert (found.argmax_changed > 0) == (kind is Shift)
    if kind is Shift:
        assert found.temperatures is None
    else:
        each = fitted.temperature(kept["logits"])
        assert found.temperatures == pytest.approx((each.min(), each.max()))


def test_effect_measures_test_and_fit_measures_what_it_fitted(tmp_path):
    val, test = predictions(rows=200, seed=1), predictions(rows=300, seed=2)
    path = as_npz(tmp_path, splits(val=val, test=test))
    found = fit_and_measure(path, method="ts", metrics=["ece"])
    assert (found.split, found.effect.before.n) == ("val", (val["labels"] >= 0).sum())
    tested = effect(found.calibrator, path, metrics=["ece"], level=None)
    assert tested.before.n == (test["labels"] >= 0).sum()
    assert found.effect.before.level is None


def test_effect_with_features(tmp_path, rng):
    arrays = labelled(predictions()) | {"features": rng.normal(size=(564, 3)).astype(np.float32)}
    found = fit_and_measure(as_npz(tmp_path, arrays), method=Featured(), metrics=["nll"])
    after = out_of(found.calibrator, arrays["logits"], arrays["features"])
    expected = calibrant.evaluate(after, arrays["labels"], metrics=["nll"], level=None)
    assert found.effect.after["nll"].value == pytest.approx(expected["nll"].value, abs=1e-9)


def test_the_temperature_network_runs_once_per_chunk(tmp_path, monkeypatch):
    """For the temperatures and the calibrated logits together."""
    calls: list[int] = []
    temperature = PerRow._temperature

    def counting(self, logits, top):
        calls.append(len(logits))
        return temperature(self, logits, top)

    fitted = PerRow().fit(predictions()["logits"], predictions()["labels"])
    monkeypatch.setattr(PerRow, "_temperature", counting)
    monkeypatch.setattr("calibrant.data.dataset.CHUNK", 6 * 200)  # 200 rows
    effect(fitted, as_npz(tmp_path, predictions()), metrics=["ece"], level=None)
    assert calls == [(predictions()["labels"][i : i + 200] >= 0).sum() for i in (0, 200, 400)]
