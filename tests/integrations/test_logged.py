import math

import pytest

import calibrant as cal
from calibrant.integrations.logged import _reliability_figure, scalars
from tests.support.evaluations import FEW, check_scalars, predictions


def test_scalars_are_the_values_of_the_evaluation(rng):
    logits, labels = predictions(rng)
    check_scalars(scalars(cal.evaluate(logits, labels, metrics=FEW)), logits, labels, metrics=FEW)


def test_undefined_values_are_left_out():
    result = cal.evaluate([[2.0, 0.0, 0.0]], [0], metrics=["ece", "auroc"])
    assert math.isnan(result["auroc"].value)
    assert {*scalars(result, "")} == {"n", "ece", "ece_low", "ece_high", "p_value"}


def test_figures_are_closed_also_after_an_error(rng):
    plt = pytest.importorskip("matplotlib.pyplot")
    result = cal.evaluate(*predictions(rng), metrics=FEW)

    def fail():
        with _reliability_figure(result) as figure:
            assert figure is not None
            assert figure.number in plt.get_fignums()
            raise KeyError

    before = plt.get_fignums()
    with pytest.raises(KeyError):
        fail()
    assert plt.get_fignums() == before


def test_without_matplotlib_there_is_no_figure(rng, monkeypatch):
    monkeypatch.setattr("calibrant.integrations.logged.find_spec", lambda name: None)
    with _reliability_figure(cal.evaluate(*predictions(rng), metrics=FEW)) as figure:
        assert figure is None
