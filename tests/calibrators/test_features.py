"""Calibrators that look at the features, against their definitions and against known truths."""

import copy
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from scipy.interpolate import RegularGridInterpolator
from scipy.spatial.distance import cdist
from scipy.special import expit, log_softmax, logit, softmax
from torch import nn

import calibrant as cal
from calibrant import use
from calibrant._core.chunks import examples
from calibrant._core.logpartition import tabulate
from calibrant._core.solve import time_limit
from calibrant.calibrators.features import (
    FeatureClipping,
    GroupCalibration,
    ProCal,
    clipping,
    groups,
    proximity,
)
from calibrant.calibrators.registry import CALIBRATORS
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.calibrators.watch import told
from calibrant.workflows import compare as comparison
from calibrant.workflows.apply import apply
from calibrant.workflows.fit import fit
from tests.support.prediction_files import arrays_in
from tests.support.simulate import drawn

METHODS: dict[str, Any] = {
    "gc": partial(GroupCalibration, partitions=4),
    "density_ratio": partial(ProCal, method="density_ratio"),
    "bin_mean_shift": ProCal,
    "fc": FeatureClipping,
}
every = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
PROXIMITY = {name: METHODS[name] for name in ("density_ratio", "bin_mean_shift")}
every_proximity = pytest.mark.parametrize("method", PROXIMITY.values(), ids=PROXIMITY)


def linear_data(rng, n=600, classes=4, width=6, temperature=2.0):
    """Logits of a last layer, labels that it is too sure about, its inputs, and the layer."""
    features = rng.normal(size=(n, width))
    weight, bias = rng.normal(size=(classes, width)), rng.normal(size=classes)
    logits = features @ weight.T + bias
    labels = (logits / temperature + rng.gumbel(size=logits.shape)).argmax(-1)
    return logits, labels, features, (weight, bias)


def quietly(module, *data, **named) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return module.fit(*data, **named)


def fitted(module, logits, labels, features, head=None, **named) -> Any:
    return quietly(module, logits, labels, features=features, head=head, **named)


def mean_nll(probs, labels):
    return -np.log(probs[np.arange(len(labels)), labels]).mean()


def near_and_far(rng, n, classes=5):
    """Samples far from the others are over-confident by a factor of 3; also the truth."""
    truth = 2 * rng.normal(size=(n, classes))
    labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    far = rng.random(n) < 0.4
    features = rng.normal(size=(n, 4)) * np.where(far, 12.0, 1.0)[:, None]
    return truth * np.where(far, 3.0, 1.0)[:, None], labels, features, softmax(truth, -1).max(-1)


# ---------------------------------------------------------------------------------------- inputs


@every
def test_missing_and_misshapen_features_are_refused(method, rng):
    logits, labels, features, head = linear_data(rng)
    name = method().__class__.__name__
    with pytest.raises(ValueError, match=f"{name} needs features: pass features="):
        method().fit(logits, labels, head=head)
    for wrong in (features[:-1], features[:, 0], features[None], features[:, :0]):
        with pytest.raises(ValueError, match=r"features must be \(..., width\) with one row for"):
            method().fit(logits, labels, features=wrong, head=head)
    with pytest.raises(TypeError, match="features must be floating point, got int64"):
        method().fit(logits, labels, features=features.astype(int), head=head)
    labels[:9] = -100  # rows are counted with those that are ignored
    for value in (np.nan, np.inf):
        broken = features.copy()
        broken[17, 2] = value
        with pytest.raises(ValueError, match="features must be finite, row 17 has NaN or numbers"):
            method().fit(logits, labels, features=broken, head=head)


@every
def test_prediction_wants_features_of_the_width_of_the_fit(method, rng):
    logits, labels, features, head = linear_data(rng)
    module = fitted(method(), logits, labels, features, head)
    name = type(module).__name__
    again = method()
    again.load_state_dict(module.state_dict())
    for one in (module, again, copy.deepcopy(module)):
        with pytest.raises(ValueError, match=f"{name} needs features"):
            one(torch.zeros(2, 4))
        with pytest.raises(ValueError, match=f"{name} needs features"):
            one.predict_proba(logits)
        with pytest.raises(ValueError, match=r"features must be \(..., 6\), as in fit, with one"):
            one.predict_proba(logits, features[:, :5])
        with pytest.raises(ValueError, match=r"got \(600, 6\) for rows of shape \(2,\)"):
            one(torch.zeros(2, 4), torch.from_numpy(features))
        with pytest.raises(ValueError, match=r"features must be \(..., 6\)"):
            one(torch.zeros(2, 4), torch.tensor(1.0))
    broken = features.copy()
    broken[3] = np.inf
    with pytest.raises(ValueError, match="features must be finite, row 3"):
        module.predict_proba(logits, broken)


@every
def test_what_ignored_rows_hold_does_not_matter(method, rng):
    logits, labels, features, head = linear_data(rng)
    expected = fitted(method(), logits[5:], labels[5:], features[5:], head)
    labels, features = labels.copy(), features.copy()
    labels[:5], features[:5] = -100, np.nan
    found = fitted(method(), logits, labels, features, head)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=0, atol=0)


@every
def test_masked_classes_stay_impossible(method, rng):
    logits, labels, features, (weight, bias) = linear_data(rng, classes=5)
    logits = np.concatenate([logits, np.full((600, 1), -np.inf)], axis=1)
    head = np.concatenate([weight, rng.normal(size=(1, 6))]), np.append(bias, 0.0)
    module = fitted(method(), logits, labels, features, head)
    probs = module.predict_proba(logits, features)
    assert (probs[:, 5] == 0).all()
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-6)


@every
@pytest.mark.parametrize("answers", ["one class", "same features", "no features"])
def test_odd_data_give_bounded_fits_and_a_warning(method, answers, rng):
    logits, labels, features, head = linear_data(rng, n=300)
    if answers == "one class":
        labels = np.zeros(300, int)
    else:
        features = np.full((300, 6), float(answers == "same features"))
        logits = np.broadcast_to(features[:1] @ head[0].T + head[1], (300, 4)).copy()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        module = method().fit(logits, labels, features=features, head=head)
    assert told or answers == "one class" or (method is FeatureClipping)
    probs = module.predict_proba(logits, features)
    assert np.isfinite(probs).all()
    assert all(torch.isfinite(value).all() for value in module.state_dict().values())
    far = module.predict_proba(logits, features + 1e6)
    assert np.isfinite(far).all()


# ---------------------------------------------------------------------------------------- groups


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


def test_halves_depend_on_the_seed(rng, seen):
    logits, labels, features, _ = sided(rng, 400)
    for seed in (0, 0, 1):
        GroupCalibration(partitions=1, seed=seed).fit(logits, labels, features=features)
    one, same, other = (half for half, _ in seen[0])
    assert one == same
    assert one != other


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


def test_a_fit_of_groups_keeps_to_its_time(rng):
    logits, labels, features, _ = sided(rng, 2000)
    with pytest.raises(TimeoutError), time_limit(0.0):
        GroupCalibration().fit(logits, labels, features=features)


def test_groups_on_constant_features_are_temperature_scaling(rng):
    logits, labels = drawn(rng, 2000, 5, temperature=2.0)
    with pytest.warns(UserWarning, match="all 2,000 examples have the same features"):
        module = GroupCalibration().fit(logits, labels, features=np.full((2000, 3), 0.1))
    single = TemperatureScaling().fit(logits, labels)
    # each half has its own best temperature
    np.testing.assert_allclose(module.temperature_.mean(), single.temperature_, rtol=0.02)


# ------------------------------------------------------------------------------------- proximity


@pytest.mark.parametrize("block", [7, 1 << 22])
@pytest.mark.parametrize("count", [1, 3, 10, 500])
def test_neighbours_are_those_of_all_distances(block, count, rng, monkeypatch):
    monkeypatch.setattr(proximity, "_DISTANCES_AT_A_TIME", block * 40)
    reference, rows = rng.normal(size=(40, 5)), rng.normal(size=(60, 5))
    reference[7] = reference[3]  # twins are neighbours at no distance
    distances = np.sort(cdist(rows, reference), axis=1)[:, :count].mean(-1)
    given = [torch.from_numpy(x).float() for x in (rows, reference)]
    found = proximity._mean_distances(given[0], given[1], count)
    np.testing.assert_allclose(found, distances, rtol=1e-4)
    # the same samples: no one is a neighbour of itself, which others may be that are equal to it
    inside = cdist(reference, reference)
    np.fill_diagonal(inside, np.inf)
    expected = np.sort(inside, axis=1)[:, : min(count, 39)].mean(-1)
    found = proximity._mean_distances(given[1], given[1], count, torch.arange(40))
    np.testing.assert_allclose(found, expected, atol=3e-3 if count == 1 else 1e-3)
    some = torch.where(torch.arange(40) % 2 == 0, torch.arange(40), -1)
    found = proximity._mean_distances(given[1], given[1], 1, some)
    assert (found[1::2] < 3e-3).all()
    assert (found[[0, 2, 4]] > 0.1).all()


def test_widths_of_kernels_follow_the_normal_reference_rule(rng):
    values = rng.gamma(2.0, size=500)
    expected = 1.06 * values.std() * 500 ** (-1 / 6)
    assert proximity._reference_width(values, np.ones(500)) == pytest.approx(expected)
    assert proximity._reference_width(values, np.full(500, 7.0)) == pytest.approx(expected)
    doubled = proximity._reference_width(np.repeat(values, 2), np.ones(1000))
    assert doubled == pytest.approx(expected * 2 ** (-1 / 6))


def kernel_odds(points, correct, at, before):
    """The ratio of two densities as sums over all samples, and ten samples as they were."""
    mass, area = [], []
    for which in (correct, ~correct):
        n = which.sum()
        widths = [1.06 * x[which].std() * n ** (-1 / 6) for x in points]
        kernels = [
            stats.norm.pdf(a[:, None], x[which], w)
            for a, x, w in zip(at, points, widths, strict=True)
        ]
        mass.append((kernels[0] * kernels[1]).mean(-1) * n)
        area.append(2 * np.pi * widths[0] * widths[1])
    unit = np.sqrt(area[0] * area[1])
    right, wrong = mass[0] * unit + 10 * before, mass[1] * unit + 10 * (1 - before)
    return np.log(right / wrong)


def test_densities_are_those_of_direct_sums(rng):
    confidence, closeness = rng.uniform(0.3, 1.0, 300), rng.beta(2, 3, 300)
    correct = rng.random(300) < confidence
    axes = np.linspace(0.2, 1, 101), np.linspace(0, 1, 121)
    mass = proximity._density_masses((confidence, closeness), correct, np.ones(300), axes)
    where = [grid.reshape(-1) for grid in np.meshgrid(*axes, indexing="ij")]
    before = np.clip(where[0], 1e-4, 1 - 1e-4)
    expected = kernel_odds((confidence, closeness), correct, where, before)
    given = [torch.from_numpy(x.reshape(-1)) for x in (*mass, logit(before))]
    np.testing.assert_allclose(proximity._mixed_odds(*given), expected, atol=1e-8)


def test_weights_of_samples_count_in_the_densities(rng):
    confidence, closeness = rng.uniform(0.3, 1.0, 200), rng.beta(2, 3, 200)
    correct = rng.random(200) < confidence
    axes = np.linspace(0, 1, 51), np.linspace(0, 1, 51)

    def masses(rows, weight):
        points = confidence[rows], closeness[rows]
        return proximity._density_masses(points, correct[rows], weight, axes)

    plain = masses(np.arange(200), np.ones(200))
    np.testing.assert_allclose(masses(np.arange(200), np.full(200, 3.0)), plain)
    heavy = np.where(correct, 1.0, 4.0)  # as heavy as if there were four times as many wrong ones
    weighted = masses(np.arange(200), heavy) * heavy.mean()
    np.testing.assert_allclose(
        weighted / plain,
        np.broadcast_to(np.array([1.0, 4.0])[:, None, None], plain.shape),
        rtol=1e-6,
    )


def test_interpolation_on_a_grid(rng):
    table = rng.normal(size=(6, 6))
    at = rng.uniform(0, 1, size=(200, 2))
    side = np.linspace(0, 1, 6)
    expected = RegularGridInterpolator((side, side), table)(at)
    found = proximity._on_grid(torch.from_numpy(table), torch.from_numpy(at))
    np.testing.assert_allclose(found, expected, atol=1e-12)
    beyond = torch.tensor([[-1.0, -1.0], [2.0, 0.0], [0.0, 1.0], [9.0, 9.0]], dtype=torch.float64)
    found = proximity._on_grid(torch.from_numpy(table), beyond)
    np.testing.assert_array_equal(found, table[[0, 5, 0, 5], [0, 0, 5, 5]])
    one = proximity._on_grid(torch.tensor([[4.0]]), torch.tensor([[0.3, 0.7]]))
    assert one.tolist() == [4.0]


@every_proximity
def test_confidence_far_from_others_comes_close_to_the_truth(method, rng):
    logits, labels, features, _ = near_and_far(rng, 5000)
    module = method().fit(logits, labels, features=features)
    logits, labels, features, truth = near_and_far(np.random.default_rng(9), 5000)
    single = TemperatureScaling().fit(logits, labels).predict_proba(logits).max(-1)
    found = module.predict_proba(logits, features)
    before, after = (np.abs(c - truth).mean() for c in (single, found.max(-1)))
    assert before > 0.1
    assert after < 0.045
    assert mean_nll(found, labels) < mean_nll(softmax(logits, -1), labels) - 0.1
    far = np.linalg.norm(features, axis=1) > 8
    for part in (far, ~far):
        right = (logits.argmax(-1) == labels)[part].mean()
        assert found.max(-1)[part].mean() == pytest.approx(right, abs=0.025)
        assert abs(single[part].mean() - right) > 0.05


def test_density_ratio_is_that_of_direct_sums_over_the_samples(rng):
    logits, labels, features, _ = near_and_far(rng, 1500)
    module = ProCal(method="density_ratio", keep_argmax=False).fit(
        logits, labels, features=features
    )
    fresh, _, beside, _ = near_and_far(rng, 800)
    temperature = float(TemperatureScaling().fit(logits, labels).temperature_)
    assert float(module.temperature_) == pytest.approx(temperature, rel=1e-4)
    inside = cdist(features, features)
    np.fill_diagonal(inside, np.inf)
    own, other = (np.sort(x, axis=1)[:, :10].mean(-1) for x in (inside, cdist(beside, features)))
    claimed, claim = (softmax(z / temperature, -1).max(-1) for z in (logits, fresh))
    expected = kernel_odds(
        (claimed, np.exp(-own / own.mean())),
        logits.argmax(-1) == labels,
        (claim, np.exp(-other / own.mean())),
        np.clip(claim, 1e-4, 1 - 1e-4),
    )
    found = module.predict_proba(fresh, beside)
    top = found[np.arange(800), fresh.argmax(-1)]
    inner = (claim <= claimed.max()) & (claim >= claimed.min()) & (other <= own.max())
    assert inner.mean() > 0.98
    assert np.abs(top - expit(expected))[inner].max() < 0.01
    assert np.abs(top - expit(expected))[inner].mean() < 1e-3
    # the other classes keep their proportions
    rest = np.where(fresh == fresh.max(-1, keepdims=True), 0, softmax(fresh / temperature, -1))
    expected_rest = rest / rest.sum(-1, keepdims=True) * (1 - top)[:, None]
    np.testing.assert_allclose(np.where(rest == 0, 0, found), expected_rest, atol=1e-5)


def test_lines_are_the_best_of_their_bins_which_hold_equally_many(rng):
    logits, labels, features, _ = near_and_far(rng, 1200)
    module = ProCal(bins=4).fit(logits, labels, features=features)
    inside = cdist(features, features)
    np.fill_diagonal(inside, np.inf)
    distance = np.sort(inside, axis=1)[:, :10].mean(-1)
    np.testing.assert_allclose(module.edges_, np.sort(distance)[[299, 599, 899]], rtol=1e-4)
    bins = np.searchsorted(module.edges_.numpy(), distance.astype(np.float32))
    assert np.abs(np.bincount(bins) - 300).max() <= 2  # samples at an edge are rounded
    tempered = softmax(logits / float(module.temperature_), -1)
    odds, right = logit(tempered.max(-1)), logits.argmax(-1) == labels

    def loss(line, which):
        each = np.logaddexp(0, line[0] * odds + line[1]) - right * (line[0] * odds + line[1])
        return each[which].sum() + 50 * each.mean()

    for i, line in enumerate(module.lines_.numpy()):
        best = optimize.minimize(loss, [1.0, 0.0], args=(bins == i,), method="Nelder-Mead")
        np.testing.assert_allclose(line, best.x, atol=0.02)
    # samples of the fit would be neighbours of themselves
    logits, labels, features_, _ = near_and_far(rng, 1200)
    distance = np.sort(cdist(features_, features), axis=1)[:, :10].mean(-1)
    lines = module.lines_.numpy()[np.searchsorted(module.edges_.numpy(), distance)]
    tempered = softmax(logits / float(module.temperature_), -1)
    wanted = expit(lines[:, 0] * logit(tempered.max(-1)) + lines[:, 1])
    runner = np.sort(tempered, -1)[:, -2] / (1 - tempered.max(-1))
    free = wanted > runner * (1 - wanted) + 1e-6  # no other class had to be held below
    assert free.mean() > 0.9
    found = module.predict_proba(logits, features_).max(-1)
    off = np.abs(found - wanted)[free]
    assert np.quantile(off, 0.99) < 1e-4  # at an edge rounding may decide otherwise


def test_bins_hold_equal_weight(rng):
    logits, labels, features, _ = near_and_far(rng, 600)
    weight = rng.integers(1, 6, size=600)
    inside = cdist(features, features)
    np.fill_diagonal(inside, np.inf)
    distance = np.sort(np.repeat(np.sort(inside, axis=1)[:, :10].mean(-1), weight))
    last = np.ceil(weight.sum() * np.arange(1, 5) / 5).astype(int) - 1
    module = fitted(ProCal(bins=5), logits, labels, features, sample_weight=weight)
    np.testing.assert_allclose(module.edges_, distance[last], rtol=1e-4)


@every_proximity
def test_of_many_samples_some_are_kept(method, rng, monkeypatch):
    logits, labels, features, _ = near_and_far(rng, 3000)
    whole = method().fit(logits, labels, features=features)
    assert whole.reference_.shape == (3000, 4)
    monkeypatch.setattr(proximity, "_MAX_REFERENCE", 600)
    module = method().fit(logits, labels, features=features)
    assert module.reference_.shape == (600, 4)
    distance = cdist(module.reference_ + module.centre_, features)
    assert distance.min(1).max() < 1e-4  # all of them are samples,
    assert len(set(distance.argmin(1))) == 600  # and none twice
    to_others = np.where(distance.T < 1e-4, np.inf, distance.T)  # no one is its own neighbour
    expected = np.sort(to_others, axis=1)[:, :10].mean()
    assert float(module.unit_) == pytest.approx(expected, rel=1e-4)
    assert not torch.equal(
        module.reference_, method(seed=1).fit(logits, labels, features=features).reference_
    )
    logits, labels, features, truth = near_and_far(np.random.default_rng(9), 3000)
    errors = [
        np.abs(one.predict_proba(logits, features).max(-1) - truth).mean()
        for one in (whole, module)
    ]
    assert errors[1] < errors[0] + 0.01


@every_proximity
def test_units_of_features_do_not_matter(method, rng):
    logits, labels, features, _ = near_and_far(rng, 1000)
    one, other = (
        method().fit(logits, labels, features=f).predict_proba(logits, f)
        for f in (features, 1000 * features + 70_000)
    )
    np.testing.assert_allclose(one, other, atol=0.02)


@every_proximity
@pytest.mark.parametrize("answers", ["right", "wrong"])
def test_without_both_right_and_wrong_samples_nothing_changes(method, answers, rng):
    logits, _ = drawn(rng, 200, 4)
    labels = logits.argmax(-1) if answers == "right" else logits.argmin(-1)
    features = rng.normal(size=(200, 3))
    with (
        told(),
        pytest.warns(UserWarning, match=f"all 200 examples are {answers}: nothing is changed"),
    ):
        module = method().fit(logits, labels, features=features)
    np.testing.assert_allclose(
        module.predict_proba(logits, features), softmax(logits, -1), atol=1e-6
    )
    sure = torch.tensor([[20.0, 0.0, 0.0, -5.0]], dtype=torch.float64)
    torch.testing.assert_close(module(sure, torch.zeros(1, 3)), sure - 20)
    # also where an earlier fit had changed something
    again = fitted(method(), *drawn(rng, 200, 4, temperature=3.0), features)
    assert again.learned_ == 1
    fitted(again, logits, labels, features)
    torch.testing.assert_close(again(sure, torch.zeros(1, 3)), sure - 20)


@every_proximity
def test_one_wrong_sample_is_enough(method, rng):
    logits, _ = drawn(rng, 300, 4)
    labels = logits.argmax(-1)
    labels[0] = logits[0].argmin()
    features = rng.normal(size=(300, 3))
    module = fitted(method(), logits, labels, features)
    assert np.isfinite(module.predict_proba(logits, features)).all()
    assert module.learned_ == 1


@every_proximity
def test_equal_points_are_neighbours_at_no_distance(method, rng):
    logits, labels = drawn(rng, 400, 4, temperature=2.0)
    places = rng.normal(size=(20, 3)) * 10
    features = places[np.arange(400) % 20]  # twenty of each
    module = fitted(method(), logits, labels, features)
    assert np.isfinite(module.predict_proba(logits, features)).all()
    away = module.predict_proba(logits, features + 30)
    assert np.isfinite(away).all()


@every_proximity
def test_constant_features_leave_a_map_of_the_confidence_and_weight_two_is_a_row_twice(method, rng):
    logits, labels = drawn(rng, 1500, 5, temperature=2.0)
    features = np.full((1500, 3), 0.1)
    with pytest.warns(UserWarning, match="all 1,500 examples have the same features"):
        module = method().fit(logits, labels, features=features)
    fresh, answers = drawn(rng, 10_000, 5, temperature=2.0)
    probs = module.predict_proba(fresh, np.full((10_000, 3), 0.1))
    assert cal.evaluate(np.log(probs), answers, level=None)["ece"].value < 0.025
    # at one place a sample that is there twice is no nearer to itself
    twice = np.concatenate([np.arange(1500), np.arange(500)])
    weight = np.where(np.arange(1500) < 500, 2.0, 1.0)
    doubled = fitted(method(), logits[twice], labels[twice], features[twice])
    weighted = fitted(method(), logits, labels, features, sample_weight=weight)
    one, other = (m.predict_proba(logits, features) for m in (doubled, weighted))
    np.testing.assert_allclose(one, other, atol=0.01)
    assert np.abs(one - module.predict_proba(logits, features)).max() > 0.01


@every_proximity
def test_the_top_class_stays_where_asked(method, rng):
    logits, labels, features, _ = near_and_far(rng, 1500, classes=3)
    labels = np.where(np.linalg.norm(features, axis=1) > 8, logits.argmin(-1), labels)
    kept = fitted(method(), logits, labels, features)
    free = fitted(method(keep_argmax=False), logits, labels, features)
    assert kept.keeps_argmax
    assert not free.keeps_argmax
    top = logits.argmax(-1)
    assert (kept.predict_proba(logits, features).argmax(-1) == top).all()
    assert (free.predict_proba(logits, features).argmax(-1) != top).mean() > 0.1


# -------------------------------------------------------------------------------------- clipping


def clipped_data(rng, n=4000, classes=6, width=30, clip=1.5):
    """Labels of a model that cut its features at ``clip``; also its honest logits."""
    features = rng.exponential(size=(n, width)) * np.where(rng.random((n, width)) < 0.5, -1, 1)
    weight, bias = 0.5 * rng.normal(size=(classes, width)), rng.normal(size=classes)
    honest = features.clip(-clip, clip) @ weight.T + bias
    labels = (honest + rng.gumbel(size=honest.shape)).argmax(-1)
    return features @ weight.T + bias, labels, features, (weight, bias), honest


@pytest.mark.parametrize("temperature", [True, False])
def test_the_clipping_value_is_found(temperature, rng):
    logits, labels, features, head, honest = clipped_data(rng, n=6000)
    module = FeatureClipping(max_accuracy_loss=1.0, temperature=temperature)
    module.fit(logits, labels, features=features, head=head)
    assert float(module.clip_) == pytest.approx(1.5, abs=0.3)
    assert float(module.temperature_) == pytest.approx(1.0, abs=0.1)
    error = np.abs(module.predict_proba(logits, features) - softmax(honest, -1)).mean()
    assert error < 0.3 * np.abs(softmax(logits, -1) - softmax(honest, -1)).mean()


@pytest.mark.parametrize("temperature", [True, False])
def test_it_is_a_network_with_clipped_features(temperature, rng):
    torch.manual_seed(0)
    body, layer = nn.Sequential(nn.Linear(8, 20), nn.ReLU()), nn.Linear(20, 5)
    with torch.no_grad():
        layer.weight *= 8
        inputs = 3 * torch.randn(3000, 8)
        features = body(inputs)
        logits, honest = layer(features), layer(features.clamp(max=1.0))
        labels = (honest - torch.empty_like(logits).exponential_().log()).argmax(-1)
    module = FeatureClipping(max_accuracy_loss=1.0, temperature=temperature)
    module.fit(logits, labels, features=features, head=(layer.weight, layer.bias))
    clip = float(module.clip_)
    assert 0 < clip < features.max()  # else nothing is tested
    with torch.no_grad():
        by_hand = layer(body(inputs).clamp(-clip, clip))
        expected = by_hand
        if temperature:
            single = TemperatureScaling().fit(by_hand, labels).temperature_
            assert float(module.temperature_) == pytest.approx(float(single), rel=1e-4)
            expected = by_hand / single
        else:
            assert module.temperature_ == 1
    torch.testing.assert_close(
        module.predict_proba(logits, features), expected.softmax(-1), atol=1e-5, rtol=1e-4
    )


def too_sure(rng, n=1500):
    """A model that is too sure by a factor: clipping lowers its confidence, at a price."""
    return linear_data(rng, n=n, width=20, temperature=6.0)


def judged(clip, logits, labels, features, head, weight=None):
    """Metrics of the last layer on clipped features."""
    found = features.clip(-clip, clip) @ head[0].T + head[1]
    return {
        name: estimate.value
        for name, estimate in cal.evaluate(found, labels, level=None, sample_weight=weight).items()
    }


@pytest.fixture(scope="module")
def dense_grid():
    """Data, and their metrics without clipping and at many clipping values."""
    data = too_sure(np.random.default_rng(20260101))
    values = np.linspace(0.02, np.abs(data[2]).max(), 80)
    return data, judged(np.inf, *data), [judged(c, *data) for c in values]


@pytest.mark.parametrize(
    ("objective", "loss"), [("nll", 0.0), ("ece", 0.02), ("nll", 0.5), ("ece", 0.5)]
)
def test_no_value_of_a_dense_grid_is_better_at_the_same_accuracy(objective, loss, dense_grid):
    data, plain, dense = dense_grid
    module = FeatureClipping(objective=objective, max_accuracy_loss=loss, temperature=False)
    fitted(module, *data)
    allowed = [x for x in (plain, *dense) if x["accuracy"] >= (1 - loss) * plain["accuracy"]]
    found = judged(float(module.clip_), *data)
    assert found["accuracy"] >= (1 - loss) * plain["accuracy"] - 1e-9
    assert found[objective] <= min(x[objective] for x in allowed) * 1.05 + 0.002
    if loss < 0.5:  # the limit holds something back
        assert found[objective] > 1.1 * min(x[objective] for x in dense)


def test_the_objective_decides(rng):
    data = too_sure(rng)
    make = partial(FeatureClipping, max_accuracy_loss=1.0, temperature=False)
    likely, calibrated = (
        judged(float(fitted(make(objective=o), *data).clip_), *data) for o in ("nll", "ece")
    )
    assert likely["nll"] < calibrated["nll"]
    assert likely["ece"] > calibrated["ece"]


@pytest.mark.filterwarnings("ignore:.*keeps predictions")
def test_values_are_judged_at_their_own_temperatures(rng):
    logits, labels, features, head = too_sure(rng)
    make = partial(FeatureClipping, max_accuracy_loss=1.0)
    together, alone = (
        fitted(make(temperature=t), logits, labels, features, head) for t in (True, False)
    )
    assert float(together.clip_) > 1.2 * float(alone.clip_)  # a temperature does it better

    def after(clip):
        by_hand = features.clip(-clip, clip) @ head[0].T + head[1]
        return mean_nll(TemperatureScaling().fit(by_hand, labels).predict_proba(by_hand), labels)

    found = mean_nll(together.predict_proba(logits, features), labels)
    assert found < after(float(alone.clip_)) - 0.005
    assert found <= min(map(after, np.linspace(0.05, np.abs(features).max(), 60))) + 0.002


def test_values_between_those_of_the_grid_are_tried(rng, monkeypatch):
    logits, labels, features, head, _ = clipped_data(rng, n=2000)
    monkeypatch.setattr(clipping, "_TAILS", (1e-3, 0.5, 4))
    module = FeatureClipping(max_accuracy_loss=1.0, temperature=False)
    clip = float(fitted(module, logits, labels, features, head).clip_)
    coarse = np.quantile(np.abs(features), 1 - np.geomspace(1e-3, 0.5, 4))
    assert np.abs(coarse - clip).min() > 0.02
    data = logits, labels, features, head
    assert judged(clip, *data)["nll"] < min(judged(c, *data)["nll"] for c in coarse)


def test_the_accuracy_that_is_kept_is_the_weighted_one(rng):
    data = logits, labels, features, head = too_sure(rng)
    make = partial(FeatureClipping, max_accuracy_loss=0.05, temperature=False)
    clip = float(fitted(make(), *data).clip_)
    clipped = features.clip(-clip, clip) @ head[0].T + head[1]
    lost = (logits.argmax(-1) == labels) & (clipped.argmax(-1) != labels)
    weight = np.where(lost, 30.0, 1.0)

    def kept(value):
        after, before = (
            judged(c, logits, labels, features, head, weight)["accuracy"] for c in (value, np.inf)
        )
        return after / before

    tried = make()._judged(clip, tabulate(examples(clipped, labels, weight)))
    assert tried.accuracy == pytest.approx(np.average(clipped.argmax(-1) == labels, weights=weight))
    assert kept(clip) < 0.9
    assert kept(float(fitted(make(), *data, sample_weight=weight).clip_)) >= 0.95 - 1e-9


def test_where_clipping_does_not_help_logits_stay_to_the_last_digit(rng):
    logits, labels, features, head = linear_data(rng, temperature=0.5)  # under-confident
    module = FeatureClipping(temperature=False).fit(logits, labels, features=features, head=head)
    assert float(module.clip_) == pytest.approx(3e38)
    assert torch.isfinite(module.clip_)
    given = torch.from_numpy(logits).float()
    expected = given - given.amax(-1, keepdim=True)
    found = module(given, 1e4 * torch.from_numpy(features).float())
    assert torch.equal(found, expected - expected.amax(-1, keepdim=True))


def test_log_probabilities_and_half_precision_agree_with_the_layer(rng):
    logits, labels, features, head, _ = clipped_data(rng, n=1000)
    whole = FeatureClipping().fit(logits, labels, features=features, head=head)
    shifted = FeatureClipping().fit(log_softmax(logits, -1), labels, features=features, head=head)
    torch.testing.assert_close(shifted.clip_, whole.clip_, rtol=1e-3, atol=0)
    narrow = [torch.from_numpy(x).to(torch.bfloat16) for x in (logits, features)]
    FeatureClipping().fit(narrow[0], labels, features=narrow[1], head=head)


def test_a_layer_without_bias(rng):
    logits, labels, features, (weight, bias), _ = clipped_data(rng, n=1000)
    FeatureClipping().fit(logits - bias, labels, features=features, head=(weight, None))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda z, f, w, b: (z, f, (w[::-1].copy(), b)),
        lambda z, f, w, b: (z, f, (w, b + np.linspace(-2, 2, 6))),
        lambda z, f, w, b: (z / 2, f, (w, b)),
        lambda z, f, w, b: (z, np.maximum(f, 0), (w, b)),
        lambda z, f, w, b: (z[::-1].copy(), f, (w, b)),
    ],
    ids=["weight", "bias", "scaled logits", "other features", "other order"],
)
def test_a_layer_that_does_not_give_the_logits_is_refused(wrong, rng):
    logits, labels, features, head, _ = clipped_data(rng, n=500)
    logits, features, head = wrong(logits, features, *head)
    with pytest.raises(ValueError, match="head and features must give the logits"):
        FeatureClipping().fit(logits, labels, features=features, head=head)


def test_misshapen_layers_are_refused(rng):
    logits, labels, features, (weight, bias), _ = clipped_data(rng, n=500)
    fit = partial(FeatureClipping().fit, logits, labels, features=features)
    with pytest.raises(ValueError, match=r"of shapes \(classes, width\) and \(classes,\)"):
        fit()
    with pytest.raises(TypeError, match=r"head must be \(weight, bias\), got ndarray"):
        fit(head=weight)
    for head in ((weight.T, bias), (weight[:-1], bias[:-1]), (weight, bias[:, None])):
        with pytest.raises(ValueError, match=r"of shapes \(6, 30\) and \(6,\)"):
            fit(head=head)
    with pytest.raises(ValueError, match="head must be finite"):
        fit(head=(np.where(weight > 1, np.nan, weight), bias))


def test_of_many_samples_and_features_some_are_searched(rng, monkeypatch):
    logits, labels, features, head, _ = clipped_data(rng, n=3000)
    fit = partial(FeatureClipping(max_accuracy_loss=1.0).fit, features=features, head=head)
    whole = copy.deepcopy(fit(logits, labels))
    monkeypatch.setattr(clipping, "_MAX_SEARCHED", 1000)
    monkeypatch.setattr(clipping, "_LOOKED_AT", 5000)
    some = fit(logits, labels)
    assert float(some.clip_) != float(whole.clip_)
    assert float(some.clip_) == pytest.approx(float(whole.clip_), abs=0.3)
    # the temperature is that of all samples
    clip = float(some.clip_)
    by_hand = features.clip(-clip, clip) @ head[0].T + head[1]
    single = TemperatureScaling().fit(by_hand, labels).temperature_
    torch.testing.assert_close(some.temperature_, single, rtol=1e-4, atol=0)


def test_weights_of_samples_count_in_the_search(rng):
    logits, labels, features, head, _ = clipped_data(rng, n=600)
    weight = rng.integers(1, 4, size=600)
    rows = np.repeat(np.arange(600), weight)
    one = fitted(FeatureClipping(), logits, labels, features, head, sample_weight=weight)
    two = fitted(FeatureClipping(), logits[rows], labels[rows], features[rows], head)
    plain = fitted(FeatureClipping(), logits, labels, features, head)
    torch.testing.assert_close(one.temperature_, two.temperature_, rtol=0.02, atol=0)
    assert abs(float(plain.temperature_) - float(one.temperature_)) > 1e-3


# ----------------------------------------------------------------------------------------- files


def file_arrays(rng, **extra):
    logits, labels, features, head = linear_data(rng, n=400)
    arrays: dict[str, Any] = {}
    for name, rows in (("val", slice(0, 200)), ("test", slice(200, 400))):
        arrays |= {f"{name}_logits": logits[rows], f"{name}_labels": labels[rows]}
        arrays[f"{name}_features"] = features[rows]
    return arrays | {"weight": head[0], "bias": head[1]} | extra


class OnePartition(GroupCalibration):
    """A group calibration whose fit is quick."""

    def __init__(self):
        super().__init__(partitions=1)


@pytest.fixture
def registered(monkeypatch):
    for name, kind in (("gc_", OnePartition), ("fc_", FeatureClipping)):
        monkeypatch.setitem(CALIBRATORS, name, kind)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("without", "run"),
    [
        ([], {"gc_", "fc_"}),
        (["weight", "bias"], {"gc_"}),
        (["bias"], {"gc_", "fc_"}),
        (["test_features"], set()),
    ],
)
def test_methods_run_where_the_file_has_what_they_need(without, run, rng, monkeypatch):
    some = {"gc_": OnePartition, "none": CALIBRATORS["none"], "fc_": FeatureClipping}
    monkeypatch.setattr(comparison, "calibrators_for", lambda _: some)
    arrays = {k: v for k, v in file_arrays(rng).items() if k not in without}
    found = comparison.compare(arrays, methods="all", level=None)
    assert {row.method for row in found.rows} == {"none"} | run


@pytest.mark.usefixtures("registered")
def test_a_column_of_weights_is_no_last_layer(rng):
    arrays = file_arrays(rng, weight=np.ones(200))
    del arrays["bias"]
    found = comparison.compare(arrays, methods=["gc_", "fc_"], level=None)
    assert found["gc_"].error is None
    assert "FeatureClipping needs the last layer" in (found["fc_"].error or "")


def test_files_with_features_are_fitted_and_calibrated(rng, tmp_path):
    arrays = file_arrays(rng)
    np.savez(tmp_path / "p.npz", **arrays)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = fit(tmp_path / "p.npz", method=FeatureClipping())
    apply(module, tmp_path / "p.npz", tmp_path / "out.npz")
    out = arrays_in(tmp_path / "out.npz")
    expected = module.predict_proba(arrays["test_logits"], arrays["test_features"])
    np.testing.assert_allclose(softmax(out["test_logits"], -1), expected, atol=1e-6)
    np.savez(tmp_path / "q.npz", **(arrays | {"test_features": np.zeros((200, 7))}))
    steps: list[tuple[int, int]] = []
    with (
        pytest.raises(ValueError, match=r"q\.npz: features must be \(..., 6\), as in fit"),
        use(progress=lambda *step: steps.append(step)),
    ):
        apply(
            module,
            tmp_path / "q.npz",
            tmp_path / "out2.npz",
        )
    assert not steps  # before any work
    assert not (tmp_path / "out2.npz").exists()
    del arrays["weight"], arrays["bias"]
    np.savez(tmp_path / "r.npz", **arrays)
    with pytest.raises(ValueError, match=r"r\.npz: FeatureClipping needs the last layer"):
        fit(tmp_path / "r.npz", method=FeatureClipping())
