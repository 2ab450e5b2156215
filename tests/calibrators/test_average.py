"""Averages of calibrators."""

import numpy as np
import pytest
import torch

from calibrant._core.chunks import examples
from calibrant.calibrators.affine import VectorScaling
from calibrant.calibrators.average import Average
from calibrant.calibrators.confidence_maps import SigmoidScaling
from calibrant.calibrators.logpartition import tabulate
from calibrant.calibrators.scaling import Identity, TemperatureScaling
from tests.support.simulate import drawn


@pytest.fixture(scope="module")
def data():
    return drawn(np.random.default_rng(3), 400, 4, 2.0)


def test_probabilities_are_averaged(data):
    members = [kind().fit(*data) for kind in (Identity, TemperatureScaling, VectorScaling)]
    found = Average(members, [1, 2, 5])
    shares = zip((0.125, 0.25, 0.625), members, strict=True)
    expected = sum(share * member.predict_proba(data[0]) for share, member in shares)
    np.testing.assert_allclose(found.predict_proba(data[0]), expected, rtol=1e-6)
    equal = sum(member.predict_proba(data[0]) for member in members) / 3
    np.testing.assert_allclose(Average(members).predict_proba(data[0]), equal, rtol=1e-6)
    assert found.size(4) == 0 + 1 + 8 + 2
    assert found.classes == 4


def test_it_keeps_what_all_members_keep(data):
    plain, tempered, vector = (
        k().fit(*data) for k in (Identity, TemperatureScaling, VectorScaling)
    )
    kept, changed = Average([plain, tempered]), Average([plain, vector])
    assert kept.keeps_argmax
    assert kept.monotone
    assert kept.accepts_masked
    assert not changed.keeps_argmax
    assert not changed.monotone
    assert not changed.accepts_masked


def test_records_are_averaged_as_the_logits_are(data):
    fitted = Average([kind().fit(*data) for kind in (Identity, TemperatureScaling)], [0.3, 0.7])
    probs = fitted.predict_proba(data[0])
    confidence, nll = fitted.predict_records(tabulate(examples(*data)))
    np.testing.assert_allclose(confidence, probs.max(-1), atol=1e-4)
    np.testing.assert_allclose(nll, -np.log(probs[np.arange(400), data[1]]), atol=2e-3)


def test_log_odds_stay_log_odds(rng):
    pairs, labels = drawn(rng, 300, 2, 2.0)
    odds = pairs[:, 1] - pairs[:, 0]
    members = [kind().fit(odds, labels) for kind in (Identity, SigmoidScaling)]
    expected = (members[0].predict_proba(odds) + members[1].predict_proba(odds)) / 2
    found = Average(members)
    assert found.transform(odds).shape == (300,)
    np.testing.assert_allclose(found.predict_proba(odds), expected, rtol=1e-5)


def test_extreme_logits_stay_finite(data):
    fitted = Average([kind().fit(*data) for kind in (Identity, TemperatureScaling)])
    out = fitted(torch.tensor([[1e4, 0.0, -1e4, 0.0], [0.0, -torch.inf, 0.0, 0.0]]))
    assert not out.isnan().any()
    assert torch.isneginf(out[1]).tolist() == [False, True, False, False]


def test_it_says_what_it_averages(data):
    fitted = Average([kind().fit(*data) for kind in (Identity, TemperatureScaling)], [1, 3])
    assert fitted.describe().startswith("0.25 Identity")
    assert "0.75 TemperatureScaling" in fitted.describe()
    assert fitted.learned()["ts"]["weight"] == 0.75
