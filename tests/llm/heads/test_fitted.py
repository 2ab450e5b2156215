"""Saved temperature heads, and their predictions for the tokens of a table."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

import calibrant as cal
from calibrant.llm.heads.fitted import HEADS, FittedHead, TokenPredictions, _make_head
from tests.llm.heads.test_modules import inputs_of
from tests.support.definitions import slow_ece
from tests.support.language_models import TINY, random_head


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
