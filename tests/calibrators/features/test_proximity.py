"""Proximity calibration, against direct sums over all pairs and known truths."""

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from scipy.interpolate import RegularGridInterpolator
from scipy.spatial.distance import cdist
from scipy.special import expit, logit, softmax

import calibrant as cal
from calibrant.calibrators.features import ProCal, proximity
from calibrant.calibrators.fit_inputs import told
from calibrant.calibrators.scaling import TemperatureScaling
from tests.support.simulate import drawn
from tests.support.with_features import every_proximity, fitted, mean_nll, near_and_far


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
