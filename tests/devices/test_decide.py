"""Thresholds, prediction sets and changed class frequencies of what is on a device."""

from typing import Any

import numpy as np
import pytest
import torch

import calibrant as cal
from calibrant import decide
from calibrant.decide import DecisionRule, PriorCorrection
from tests.support.simulate import drawn
from tests.support.tensors import tensors

OLD, NEW = [0.25] * 4, [0.4, 0.3, 0.2, 0.1]


@pytest.fixture
def data():
    return tensors(*drawn(np.random.default_rng(6), 1500, 4, scale=4.0))


def test_a_threshold(data, device):
    there = [x.to(device) for x in data]
    assert decide.threshold(*there, max_error=0.1) == decide.threshold(*data, max_error=0.1)
    confidence, outcome = (torch.from_numpy(x) for x in cal.top_label(*data))
    found = decide.threshold(
        confidence=confidence.float().to(device), outcome=outcome.to(device), max_error=0.1
    )
    assert found == decide.threshold(confidence=confidence.float(), outcome=outcome, max_error=0.1)


@pytest.mark.parametrize("score", ["lac", "aps", "raps"])
def test_prediction_sets(data, device, score):
    logits, labels = data
    found = decide.conformal(logits.to(device), labels.to(device), score=score)
    assert found.limit == pytest.approx(decide.conformal(logits, labels, score=score).limit)
    sets = found.sets(logits.to(device))
    assert sets.device == device
    assert torch.equal(sets.cpu(), found.sets(logits))


def test_priors(data, device):
    logits = data[0]
    there = logits.to(device)
    shifted = decide.shift_prior(there, old_prior=OLD, new_prior=torch.tensor(NEW).to(device))
    assert shifted.device == device
    wanted = decide.shift_prior(logits, old_prior=OLD, new_prior=NEW)
    torch.testing.assert_close(shifted.cpu(), wanted)
    prior = decide.estimate_prior(there, old_prior=torch.tensor(OLD).to(device))
    assert prior.device == device
    torch.testing.assert_close(prior.cpu(), decide.estimate_prior(logits, old_prior=OLD))


def test_a_calibrator_for_other_class_frequencies(data, device, tmp_path):
    logits, labels = data
    there = logits.to(device)
    plain = decide.label_shift(cal.TemperatureScaling().fit(*data), logits, old_prior=OLD)
    inside = cal.TemperatureScaling().fit(there, labels.to(device))
    adapted = decide.label_shift(inside, there, old_prior=OLD)
    probs = adapted.predict_proba(there)
    assert probs.device == device
    torch.testing.assert_close(probs.cpu(), plain.predict_proba(logits), rtol=1e-4, atol=1e-5)
    cal.save(adapted, tmp_path / "saved")
    again = cal.load(tmp_path / "saved", device=device)
    torch.testing.assert_close(again(there).cpu(), adapted(there).cpu())
    refitted = PriorCorrection(cal.TemperatureScaling()).fit(there, labels)
    assert {x.device for x in refitted.buffers()} == {device}
    assert refitted.set_priors(OLD, torch.tensor(NEW).to(device))(there).device == device


@pytest.mark.parametrize("kind", ["threshold", "sets"])
def test_a_rule_with_its_calibrator(data, device, kind, tmp_path):
    logits, labels = data
    there = logits.to(device)

    def made(values, targets) -> Any:
        calibrator = cal.SMART(steps=20).fit(values, targets)
        probs = calibrator(values)
        if kind == "sets":
            return DecisionRule(decide.conformal(probs, targets), 4, calibrator)
        return DecisionRule(decide.threshold(probs, targets, max_error=0.1), 4, calibrator)

    rule, plain = made(there, labels.to(device)), made(logits, labels)
    cal.save(rule, tmp_path / "rule")
    for one in (rule, cal.load(tmp_path / "rule", device=device)):
        decisions, wanted = one.decide(there), plain.decide(logits)
        assert {values.device for values in decisions.values()} == {device}
        have, want = one.tally(decisions, labels.numpy()), plain.tally(wanted, labels.numpy())
        arrays = one.decide(logits.numpy())
        if device.type == "cuda":  # the score at a limit is one of these, and rounded otherwise
            assert have == pytest.approx(want, rel=0.01)
            continue
        assert have == want
        for name, values in wanted.items():
            np.testing.assert_allclose(decisions[name].cpu(), values, atol=1e-4)
            np.testing.assert_allclose(arrays[name], values, atol=1e-4)
        with pytest.raises(ValueError, match="on cpu"):
            one.decide(logits)
