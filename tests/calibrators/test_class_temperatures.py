"""Class temperatures against the search as a slow loop."""

import itertools

import numpy as np
import pytest
import torch

import calibrant as cal
from calibrant._core.chunks import examples
from calibrant.calibrators import affine_fit as affine, class_temperatures as classwise
from calibrant.calibrators.class_temperatures import ClassTemperatures
from calibrant.calibrators.scaling import TemperatureScaling
from tests.support.simulate import drawn


def centred(logits):
    return logits - logits.mean(-1, keepdims=True)


def error_of(fitted):
    assert fitted.solution_ is not None
    return fitted.solution_.value


def skewed(rng, n, temperatures, scale=2.0):
    """Logits, and labels drawn after each class was divided by a temperature of its own."""
    logits, _ = drawn(rng, n, len(temperatures), scale=scale)
    truth = centred(logits) / temperatures
    return logits, (truth + rng.gumbel(size=truth.shape)).argmax(-1)


def greedy(logits, labels, weight, passes):
    """Class temperatures by definition: the whole softmax for every temperature that is tried."""
    z = centred(logits)
    common = float(TemperatureScaling().fit(logits, labels, sample_weight=weight).temperature_)
    temperatures = np.full(z.shape[1], common)

    def measured(temperatures):
        scaled = z / temperatures
        probs = torch.from_numpy(scaled).softmax(-1).numpy()
        right = scaled.argmax(-1) == labels
        accuracy = np.average(right, weights=weight)
        return cal.ece(
            confidence=probs.max(-1).clip(max=1), outcome=right, sample_weight=weight
        ), accuracy

    now = measured(temperatures)
    for _, k in itertools.product(range(passes), sorted(set(labels.tolist()))):
        best, chosen = now, temperatures[k]
        for factor in classwise._FACTORS:
            tried = temperatures.copy()
            tried[k] = common * factor
            error, accuracy = measured(tried)
            if error < best[0] - 1e-9 and accuracy >= now[1] - 1e-9:
                best, chosen = (error, accuracy), tried[k]
        now, temperatures[k] = best, chosen
    return temperatures, now[0]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.filterwarnings("ignore:.*keeps predictions")
def test_class_temperatures_are_those_of_the_slow_search(seed):
    rng = np.random.default_rng(seed)
    logits, labels = skewed(rng, 150, [1.0, 3.0, 0.7, 1.5], scale=3)
    weight = rng.uniform(0.5, 2, 150) if seed % 2 else None
    fitted = ClassTemperatures(passes=2).fit(logits, labels, sample_weight=weight)
    expected, error = greedy(logits, labels, weight, 2)
    np.testing.assert_allclose(fitted.temperatures_, expected, rtol=1e-5)
    assert error_of(fitted) == pytest.approx(error, abs=1e-6)
    assert len(set(expected)) > 1


def test_class_temperatures_hold_with_confident_rows(rng):
    """The sum without the leading class is exact where that class is nearly all of it."""
    logits, labels = drawn(rng, 150, 3, 1.0, scale=40)
    labels[:15] = 0
    fitted = ClassTemperatures(passes=1).fit(logits, labels)
    expected, error = greedy(logits, labels, None, 1)
    np.testing.assert_allclose(fitted.temperatures_, expected, rtol=1e-5)
    assert error_of(fitted) == pytest.approx(error, abs=1e-6)


def test_changes_keep_the_sums_and_leaders_of_a_fresh_start(rng):
    """Rounded logits have ties, and some changes are large enough to bring up any class."""
    logits = np.round(drawn(rng, 300, 5, scale=2)[0])
    labels = rng.integers(0, 5, 300)
    held = affine._gather(examples(logits, labels), affine._centred)
    rows = classwise._Scaled(held)
    for k, temperature in zip(rng.permutation(20) % 5, rng.choice([0.3, 1, 2, 5], 20), strict=True):
        others = rows.without(k)
        expected = rows.quality_with(k, temperature, others)
        rows.change(k, temperature, others)
        scaled = centred(logits) / rows.temperatures
        order = np.argsort(-scaled, axis=-1, kind="stable")[:, :2]
        np.testing.assert_array_equal(rows.leader, order)
        np.testing.assert_allclose(rows.best, np.take_along_axis(scaled, order, -1))
        probs = torch.from_numpy(scaled).softmax(-1).numpy()
        right = order[:, 0] == labels
        assert rows.quality() == pytest.approx(
            (cal.ece(confidence=probs.max(-1), outcome=right), right.mean())
        )
        assert expected == pytest.approx(rows.quality())


@pytest.mark.filterwarnings("ignore:.*keeps predictions")
def test_class_temperatures_never_raise_the_error_or_lower_the_accuracy(rng):
    logits, labels = skewed(rng, 2000, rng.uniform(0.5, 3, 10))
    common = TemperatureScaling().fit(logits, labels)
    fitted = ClassTemperatures().fit(logits, labels)
    before, after = (
        cal.evaluate(c(torch.from_numpy(logits)), labels, level=None) for c in (common, fitted)
    )
    assert after["ece"].value < before["ece"].value
    assert after["accuracy"].value >= before["accuracy"].value
    assert error_of(fitted) == pytest.approx(after["ece"].value, abs=1e-5)


@pytest.mark.filterwarnings("ignore:.*keeps predictions")
def test_absent_class_keeps_the_common_temperature(rng):
    logits, labels = skewed(rng, 800, [1.0, 2.0, 3.0, 1.0])
    labels[labels == 1] = 2
    logits[:, 1] += 2  # another temperature for class 1 would help
    with pytest.warns(UserWarning, match="keep the temperature"):
        fitted = ClassTemperatures().fit(logits, labels)
    common = TemperatureScaling().fit(logits, labels).temperature_
    assert float(fitted.temperatures_[1]) == pytest.approx(float(common), rel=1e-5)
    assert len(set(fitted.temperatures_.tolist())) > 1
