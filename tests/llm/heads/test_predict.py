"""Predictions of temperature heads for the tokens of a table."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from calibrant.llm.heads.predict import TokenPredictions
from tests.support.named_predictions import slow_ece


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
