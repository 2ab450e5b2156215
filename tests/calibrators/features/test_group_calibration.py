"""Group calibration, against its definition and known truths."""

from functools import partial

import numpy as np
import pytest
import torch
from scipy import optimize
from scipy.special import log_softmax, softmax

from calibrant._core.chunks import examples
from calibrant.calibrators.features import GroupCalibration, group_calibration as groups
from calibrant.calibrators.logpartition import tabulate
from calibrant.calibrators.scaling import TemperatureScaling
from tests.support.simulate import drawn
from tests.support.with_features import mean_nll


def sided(rng, n, width=8):
    """The sign of a feature decides whether logits are honest or three times too large."""
    truth, features = 2 * rng.normal(size=(n, 6)), rng.normal(size=(n, width))
    labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    side = features[:, 3] > 0
    # the scale of features must not matter
    return truth * np.where(side, 3.0, 1.0)[:, None], labels, 5 + features * 100.0, truth


def test_both_temperatures_are_found_and_held_out_likelihood_is_that_of_the_truth(rng):
    logits, labels, features, _ = sided(rng, 12_000)
    module = GroupCalibration().fit(logits, labels, features=features)
    low, high = np.sort(module.temperature_.numpy(), axis=1).T
    np.testing.assert_allclose(low, 1.0, rtol=0.1)
    np.testing.assert_allclose(high, 3.0, rtol=0.1)
    logits, labels, features, truth = sided(np.random.default_rng(5), 4000)
    found = mean_nll(module.predict_proba(logits, features), labels)
    single = TemperatureScaling().fit(logits, labels)  # on the very data, and still worse
    best = mean_nll(softmax(truth, -1), labels)
    assert found < best + 0.01
    assert mean_nll(single.predict_proba(logits), labels) > best + 0.05


def test_features_that_say_nothing_cost_little_because_temperatures_see_other_samples(rng):
    logits, labels = drawn(rng, 1000, 5, temperature=2.0)
    test_logits, test_labels = drawn(rng, 20_000, 5, temperature=2.0)
    noise, test_noise = rng.normal(size=(1000, 200)), rng.normal(size=(20_000, 200))
    module = GroupCalibration().fit(logits, labels, features=noise)
    found = mean_nll(module.predict_proba(test_logits, test_noise), test_labels)
    single = TemperatureScaling().fit(logits, labels)
    assert found < mean_nll(single.predict_proba(test_logits), test_labels) + 0.003
    ratio = module.temperature_.amax(1) / module.temperature_.amin(1)
    assert ratio.median() < 1.3  # 200 features tell 500 samples apart, right from wrong


def mixture(weight, temperatures, logits, labels, features, regularisation):
    """The loss of one partition, as the paper has it."""
    parts = softmax(features @ weight.T, -1)
    total = sum(parts[:, g : g + 1] * softmax(logits / t, -1) for g, t in enumerate(temperatures))
    return mean_nll(total, labels) + regularisation * (weight**2).mean()


@pytest.mark.parametrize("shape", [(1, 2), (3, 2), (2, 3)])
def test_mixture_is_its_definition_and_its_gradient_its_slope(shape, rng):
    logits, labels = drawn(rng, 200, 5, temperature=2.0)
    features = rng.normal(size=(200, 4))
    count, sides = shape
    size = count * sides
    weight, v = rng.normal(size=(count, sides, 4)), rng.normal(size=(count, sides))
    x = np.concatenate([weight.reshape(-1), v.reshape(-1)])
    objective = groups._mixture_objective(
        tabulate(examples(logits, labels)), torch.from_numpy(features), shape, 0.7
    )
    value, gradient = objective(x)
    bound = np.log(20)
    temperatures = np.exp(-bound * np.tanh(v / bound))
    expected = sum(
        mixture(weight[i], temperatures[i], logits, labels, features, 0.7) for i in range(count)
    )
    assert value == pytest.approx(expected, abs=1e-5)
    step = 1e-3 * np.eye(len(x))  # the table is float32: smaller ones drown in its rounding
    slopes = [(objective(x + e)[0] - objective(x - e)[0]) / 2e-3 for e in step]
    np.testing.assert_allclose(gradient, slopes, atol=1e-4)
    assert np.abs(gradient[-size:]).max() > 0.02


def test_weights_of_samples_count_in_the_mixture(rng):
    logits, labels = drawn(rng, 90, 4, temperature=2.0)
    features = rng.normal(size=(90, 3))
    weight = rng.integers(1, 4, size=90)
    x = rng.normal(size=2 * 3 + 2)

    def objective(rows, weights=None):
        records = tabulate(examples(logits[rows], labels[rows], weights))
        return groups._mixture_objective(records, torch.from_numpy(features[rows]), (1, 2), 0.1)(x)

    weighted, repeated = (
        objective(np.arange(90), weight.astype(float)),
        objective(np.repeat(np.arange(90), weight)),
    )
    assert weighted[0] == pytest.approx(repeated[0], abs=1e-9)
    np.testing.assert_allclose(weighted[1], repeated[1], atol=1e-9)


def test_a_group_has_the_temperature_that_is_best_for_it_and_a_little_of_all(rng):
    logits, labels = drawn(rng, 500, 5, temperature=2.0)
    logits[:150] *= 2
    member = np.zeros((500, 1), int)
    member[150:153] = 1  # three samples: hardly a group
    member[:150] = 2
    found = groups._group_temperatures(tabulate(examples(logits, labels)), member, 4)[0]

    def loss(temperature, which):
        each = -log_softmax(logits / temperature, -1)[np.arange(500), labels]
        return each[which].sum() + 50 * each.mean()

    for g in range(4):  # nobody is in the last
        which = member[:, 0] == g
        best = optimize.minimize_scalar(
            partial(loss, which=which), bounds=(0.1, 20), method="bounded", options={"xatol": 1e-8}
        )
        assert found[g] == pytest.approx(best.x, rel=1e-3)
    single = TemperatureScaling().fit(logits, labels).temperature_
    assert found[3] == pytest.approx(float(single), rel=1e-4)
    assert found[1] == pytest.approx(float(single), rel=0.1)
    assert found[2] > 1.5 * found[0]
    # only proportions of weights count
    light = tabulate(examples(logits, labels, np.full(500, 1e-3)))
    np.testing.assert_allclose(groups._group_temperatures(light, member, 4)[0], found, rtol=1e-6)


def test_prediction_is_the_mean_over_partitions_of_the_hard_groups(rng):
    logits, labels, features, _ = sided(rng, 600)
    module = GroupCalibration(partitions=5, group_count=3).fit(logits, labels, features=features)
    centred = features.astype(np.float32) - module.centre_.numpy()
    expected = np.zeros_like(logits)
    for weight, temperatures in zip(
        module.weight_.numpy(), module.temperature_.numpy(), strict=True
    ):
        group = (centred @ weight.T).argmax(-1)
        expected += softmax(logits / temperatures[group][:, None], -1) / 5
    np.testing.assert_allclose(module.predict_proba(logits, features), expected, atol=1e-6)


def test_partitions_do_not_depend_on_the_units_of_features(rng):
    logits, labels, features, _ = sided(rng, 1000)
    changed = features * np.geomspace(1e-3, 1e3, 8)
    one, other = (
        GroupCalibration().fit(logits, labels, features=f).predict_proba(logits, f)
        for f in (features, changed)
    )
    assert np.abs(one - other).mean() < 1e-3


@pytest.fixture
def seen(monkeypatch):
    """What partitions were learned on, with how many of them, and what temperatures."""
    learned: list[tuple[set[float], int]] = []
    measured: list[set[float]] = []
    learn, measure = groups._mixture_objective, groups._group_temperatures

    def learning(records, inputs, shape, *rest):
        learned.append((set(records.top), shape[0]))
        return learn(records, inputs, shape, *rest)

    def measuring(records, *rest):
        measured.append(set(records.top))
        return measure(records, *rest)

    monkeypatch.setattr(groups, "_mixture_objective", learning)
    monkeypatch.setattr(groups, "_group_temperatures", measuring)
    return learned, measured


def test_each_half_of_the_partitions_learns_on_one_half_of_the_samples(rng, seen):
    logits, labels, features, _ = sided(rng, 400)
    kept = np.repeat(np.arange(100), 4)
    labels[:90] = -100
    GroupCalibration(partitions=5).fit(logits, labels, features=features, groups=kept)
    ((first, count), (second, other)), measured = seen
    assert (count, other) == (3, 2)
    assert measured == [second, first]
    assert not first & second
    assert len(first | second) == 310
    top = logits.max(-1)
    halves = [set(kept[np.isin(top, list(half))]) for half in (first, second)]
    assert not halves[0] & halves[1]  # samples of one group stay together


def test_samples_of_one_group_cannot_be_halved(rng):
    logits, labels, features, _ = sided(rng, 400)
    with pytest.warns(UserWarning, match="of one group.* fitted on the same examples"):
        GroupCalibration(partitions=2).fit(
            logits, labels, features=features, groups=np.zeros(400, int)
        )


def test_the_seed_decides_and_one_partition_is_enough(rng):
    logits, labels, features, _ = sided(rng, 400)
    make = partial(GroupCalibration, partitions=1)
    one, same, other = (
        make(seed=s).fit(logits, labels, features=features).weight_ for s in (0, 0, 1)
    )
    assert one.shape == (1, 2, 8)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_groups_on_constant_features_are_temperature_scaling(rng):
    logits, labels = drawn(rng, 2000, 5, temperature=2.0)
    with pytest.warns(UserWarning, match="all 2,000 examples have the same features"):
        module = GroupCalibration().fit(logits, labels, features=np.full((2000, 3), 0.1))
    single = TemperatureScaling().fit(logits, labels)
    # each half has its own best temperature
    np.testing.assert_allclose(module.temperature_.mean(), single.temperature_, rtol=0.02)
