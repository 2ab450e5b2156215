"""Thresholds, prediction sets and changed class frequencies of what is on a device."""

import inspect
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

import calibrant as cal
from calibrant import decide
from calibrant.decide import DecisionRule, PriorCorrection
from calibrant.decide.conformal_sets import Score
from tests.support.simulate import drawn
from tests.support.tensors import tensors

OLD, NEW = [0.25] * 4, [0.4, 0.3, 0.2, 0.1]


@pytest.fixture
def data():
    return tensors(*drawn(np.random.default_rng(6), 1500, 4, scale=4.0))


def parts(n):
    """Groups and weights of examples, on the CPU."""
    weight = torch.from_numpy(np.random.default_rng(1).uniform(0.5, 2, n))
    return {"group": torch.arange(n) % 3, "weight": weight.float()}


COST = torch.tensor([[0.0, 1.0], [5.0, 0.5]])
SETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{score: ({"score": score}, {}) for score in get_args(Score)},
    "by class": ({"by": "class"}, {}),
    "by group": ({"by": parts(1500)["group"]}, {"group": parts(1500)["group"]}),
    "weighted": ({"weight": parts(1500)["weight"]}, {"weight": parts(1500)["weight"]}),
}
"""Options of a fit of sets, and of their use."""
THRESHOLDS: dict[str, dict[str, Any]] = {
    "max_error": {"max_error": 0.1},
    "recall": {"recall": 0.8, "positive": 2},
    "max_fpr": {"max_fpr": 0.1, "positive": 2},
    "cost": {"max_cost": 2.0, "cost": COST, "positive": 2},
}


def moved(options, device):
    """Return options with their tensors on a device."""
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}


def assert_same(found, wanted):
    """Compare thresholds, which may be halfway between probabilities: their last digits differ."""
    assert found.threshold == pytest.approx(wanted.threshold, rel=1e-9)
    assert found._replace(threshold=wanted.threshold) == wanted


@pytest.mark.parametrize("kind", THRESHOLDS)
def test_a_threshold(data, device, kind):
    options, there = THRESHOLDS[kind], [x.to(device) for x in data]
    found = decide.threshold(*there, **moved(options, device))
    assert_same(found, decide.threshold(*data, **options))


def test_a_threshold_of_pairs(data, device):
    confidence, outcome = (torch.from_numpy(x) for x in cal.top_label(*data))
    found = decide.threshold(
        confidence=confidence.float().to(device), outcome=outcome.to(device), max_error=0.1
    )
    assert found == decide.threshold(confidence=confidence.float(), outcome=outcome, max_error=0.1)


@pytest.mark.parametrize("kind", ["group", "class"])
def test_several_thresholds(data, device, kind):
    options: dict[str, Any] = {"recall": 0.8, "cost": COST}
    options |= {"by": parts(1500)["group"], "positive": 2} if kind == "group" else {}
    wanted = decide.thresholds(*data, **options)
    found = decide.thresholds(*(x.to(device) for x in data), **moved(options, device))
    assert found.keys() == wanted.keys()
    for name, one in found.items():
        assert_same(one, wanted[name])


@pytest.mark.parametrize("kind", SETS)
def test_prediction_sets(data, device, kind):
    logits, labels = data
    fit, use = SETS[kind]
    found = decide.conformal(logits.to(device), labels.to(device), **moved(fit, device))
    plain = decide.conformal(logits, labels, **fit)
    assert found.limit == pytest.approx(plain.limit)
    sets = found.sets(logits.to(device), **moved(use, device))
    assert sets.device == device
    assert torch.equal(sets.cpu(), plain.sets(logits, **use))
    counted = found.sizes(logits.to(device), labels.to(device), **moved(use, device))
    np.testing.assert_array_equal(counted.covered, plain.sizes(logits, labels, **use).covered)


def test_every_function_is_here():
    source = Path(__file__).read_text()
    functions = {name for name, value in vars(decide).items() if inspect.isfunction(value)}
    assert {name for name in functions if f"decide.{name}(" not in source} == set()
    asked = {*inspect.signature(decide.conformal).parameters}
    beside = {"logits", "labels", "probs", "coverage", "seed"}
    assert asked - beside == {name for fit, _ in SETS.values() for name in fit}


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
