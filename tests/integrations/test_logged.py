import math

import numpy as np
import pytest

import calibrant as cal
from calibrant.integrations.logged import BIN_COLUMNS, bin_rows, reliability_figure, scalars
from tests.support.evaluations import FEW, check_scalars, predictions


def test_scalars_are_the_values_of_the_evaluation(rng):
    logits, labels = predictions(rng)
    check_scalars(scalars(cal.evaluate(logits, labels, metrics=FEW)), logits, labels, metrics=FEW)


def test_undefined_values_are_left_out():
    result = cal.evaluate([[2.0, 0.0, 0.0]], [0], metrics=["ece", "auroc"])
    assert math.isnan(result["auroc"].value)
    assert {*scalars(result, "")} == {"n", "ece", "ece_low", "ece_high", "p_value"}


def test_rows_of_the_bins_add_up_to_the_error(rng):
    logits, labels = predictions(rng, n=300)
    result = cal.evaluate(logits, labels, metrics=FEW)
    rows = [dict(zip(BIN_COLUMNS, row, strict=True)) for row in bin_rows(result)]
    assert sum(row["examples"] for row in rows) == result.n == (labels != -100).sum()
    gaps = [row["examples"] * abs(row["confidence"] - row["accuracy"]) for row in rows]
    assert sum(gaps) / result.n == pytest.approx(result["ece"].value, rel=1e-12)
    for row in rows:
        assert row["from"] < row["confidence"] <= row["to"]
        assert row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"]
    confidence = np.exp(logits - np.logaddexp.reduce(logits, -1)[:, None]).max(-1)
    last = [c > 14 / 15 for c in confidence[labels != -100]]
    assert rows[-1]["examples"] == sum(last)


def test_figures_are_closed_also_after_an_error(rng):
    plt = pytest.importorskip("matplotlib.pyplot")
    result = cal.evaluate(*predictions(rng), metrics=FEW)

    def fail():
        with reliability_figure(result) as figure:
            assert figure is not None
            assert figure.number in plt.get_fignums()
            raise KeyError

    before = plt.get_fignums()
    with pytest.raises(KeyError):
        fail()
    assert plt.get_fignums() == before


def test_without_matplotlib_there_is_no_figure(rng, monkeypatch):
    monkeypatch.setattr("calibrant.integrations.logged.find_spec", lambda name: None)
    with reliability_figure(cal.evaluate(*predictions(rng), metrics=FEW)) as figure:
        assert figure is None
