"""Saved temperature heads, and their predictions for the tokens of a table."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

import calibrant as cal
from calibrant.llm.heads.fit import fit_head
from calibrant.llm.heads.fitted import (
    HEADS,
    FittedHead,
    TokenPredictions,
    _make_head,
    evaluate_table,
    token_predictions,
)
from tests.llm.heads.test_modules import inputs_of
from tests.support.definitions import slow_ece
from tests.support.language_models import TINY, random_head, simulated_table


@pytest.mark.parametrize("kind", HEADS)
def test_round_trip(tmp_path, kind):
    head = random_head(kind)
    figures = {"before": {"nll": 1.5, "auroc": math.nan}}
    fitted = FittedHead(head, TINY, "bce", False, "why", figures, {"seed": 3})
    cal.save(fitted, tmp_path / "head")
    again = cal.load(tmp_path / "head")
    given = inputs_of(head)
    assert torch.equal(again.head(given), head(given))
    assert type(again.head) is type(head)
    assert (again.fingerprint, again.objective, again.kept, again.reasons) == (
        TINY,
        "bce",
        False,
        "why",
    )
    assert again.settings == {"seed": 3}
    assert again.figures["before"]["nll"] == 1.5
    assert math.isnan(again.figures["before"]["auroc"])


def test_an_unfinished_head_is_not_written(tmp_path):
    head = _make_head("linear", width=16)
    head.last.bias.data.fill_(math.nan)  # type: ignore[union-attr, operator]
    with pytest.raises(ValueError, match=r"last\.bias holds NaN or infinity"):
        cal.save(FittedHead(head, TINY, "bce"), tmp_path / "head")
    assert not (tmp_path / "head").exists()


def test_a_head_beside_the_files_of_its_model(tmp_path):
    (tmp_path / "config.json").write_text("of the model")
    for temperature in (2.0, 3.0):
        fitted = FittedHead.from_temperature(temperature, TINY)
        cal.save(fitted, tmp_path)
        assert cal.load(tmp_path).head.bias == fitted.head.bias
    assert (tmp_path / "config.json").read_text() == "of the model"


def test_figures_are_weighted_metrics_of_all_tokens(rng):
    confidence, weight = rng.uniform(0.05, 1, 300), rng.uniform(0.5, 2, 300)
    correct, nll = rng.random(300) < confidence, rng.exponential(size=300)
    figures = TokenPredictions(nll, confidence, correct, weight).figures()
    assert figures["nll"] == pytest.approx(np.average(nll, weights=weight))
    brier = np.average((confidence - correct) ** 2, weights=weight)
    assert figures["brier"] == pytest.approx(brier)
    assert figures["ece"] == pytest.approx(slow_ece(confidence, correct, weight=weight))
    auroc = roc_auc_score(correct, confidence, sample_weight=weight)
    assert figures["auroc"] == pytest.approx(auroc)


def test_a_head_is_measured_beside_one_temperature():
    head = fit_head(simulated_table(), "linear", "nll", epochs=8, batch=256)
    assert head.kept
    table = simulated_table(seed=1)
    evaluations, gains = evaluate_table(table, head)
    assert list(evaluations) == ["before", "global", "head"]
    one = FittedHead.from_temperature(head.settings["temperature"], table.fingerprint)
    for name, fitted in (("before", None), ("global", one), ("head", head)):
        told = token_predictions(table, fitted).figures()
        for metric in ("nll", "brier", "ece", "auroc"):
            assert evaluations[name][metric].value == pytest.approx(told[metric])
    for score in ("nll", "brier"):
        values = {name: each[score].value for name, each in evaluations.items()}
        for name, gain in gains.items():
            assert gain[score].mean == pytest.approx(values["global"] - values[name])
            assert gain[score].documents == 120
        assert gains["head"][score].mean > 3 * gains["head"][score].error
        assert gains["before"][score].mean < 0


def test_heads_without_a_temperature_to_compare_with():
    table = simulated_table(20)
    single = FittedHead.from_temperature(2.0, table.fingerprint)
    assert list(evaluate_table(table, single, level=None)[0]) == ["before", "global"]
    assert list(evaluate_table(table, level=None)[0]) == ["before"]
    given = FittedHead(_make_head("linear", width=16), table.fingerprint, "given")
    evaluations, gains = evaluate_table(table, given, level=None)
    assert (list(evaluations), gains) == (["before", "head"], {})
