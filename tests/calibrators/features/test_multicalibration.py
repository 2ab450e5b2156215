"""Corrections for subgroups, against slow definitions and known truths."""

import itertools
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import expit, log_softmax, softmax

import calibrant as cal
from calibrant import artifacts as io
from calibrant._core.chunks import examples
from calibrant.calibrators import Multicalibration
from calibrant.calibrators.features import boosting
from calibrant.calibrators.features.boosting import (
    _best_rounds,
    _Boosting,
    _codes_of,
    _learned_columns,
    _number_splits,
    _Tree,
    _TreeLearner,
)
from calibrant.calibrators.features.correctable import _ClassLogits, _ClassOneOdds, _Temperatures
from calibrant.calibrators.logpartition import tabulate
from calibrant.data.metadata import Condition, MetadataColumn, conjunction_text
from tests.support.simulate import drawn

NAMES = ["age", "site"]


def people(rng, n):
    """Metadata of people."""
    return {"age": rng.integers(18, 80, n), "site": rng.choice(["A", "B", "C"], n)}


def in_trouble(metadata):
    """The intersection where errors are planted: one fifteenth of the people."""
    return (metadata["age"] < 30) & (metadata["site"] == "B")


def planted(seed, n, effect=-1.5):
    """Log-odds that are wrong in one intersection, the true ones, labels and metadata."""
    rng = np.random.default_rng(seed)
    odds, metadata = 1.5 * rng.normal(size=n), people(rng, n)
    truth = odds + effect * in_trouble(metadata)
    return odds, truth, (rng.random(n) < expit(truth)).astype(int), metadata


def regret(probs, truth):
    """Expected log loss of P(y = 1), above that of the true log-odds."""
    q = expit(truth)
    return float(np.mean(q * np.log(q / probs) + (1 - q) * np.log((1 - q) / (1 - probs))))


def planted_classes(seed, n, classes=5):
    """Logits that are three times too large in one intersection, labels and metadata."""
    rng = np.random.default_rng(seed)
    truth, metadata = 2 * rng.normal(size=(n, classes)), people(rng, n)
    labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    return truth * np.where(in_trouble(metadata), 3.0, 1.0)[:, None], truth, labels, metadata


# Trees and boosting


COLUMNS = [
    MetadataColumn("age", "number", cuts=(0.0, 1.0)),
    MetadataColumn("site", "category", values=("A", "B")),
]


def slow_best(codes, slope, curvature, weight, penalty, fewest):
    """The best range of codes of some examples, by trying every subset that is one."""

    def score(member):
        g, h = slope[member].sum(0), curvature[member].sum(0)
        return float((g**2 / (h + penalty)).sum())

    everyone = np.ones(len(weight), bool)
    best, found = 4.0, None  # the least gain of a split
    for number, column in enumerate(COLUMNS):
        for condition in column.conditions(number):
            code = codes[number]
            inside = (code >= condition.low) & (code < condition.high)
            if min(weight[inside].sum(), weight[~inside].sum()) < fewest:
                continue
            gain = score(inside) + score(~inside) - score(everyone)
            if gain > best * (1 + 1e-9):
                best, found = gain, condition
    return found


@pytest.mark.parametrize("outputs", [1, 3])
def test_a_tree_is_that_of_its_definition(outputs, rng):
    n, penalty, fewest, rate = 300, 2.0, 25.0, 0.3
    codes = np.stack([rng.integers(0, c.size, n) for c in COLUMNS]).astype(np.int16)
    weight = rng.choice([0.0, 0.5, 2.0], n)
    slope = weight[:, None] * (rng.normal(size=(n, outputs)) + (codes[0] == 1)[:, None])
    curvature = weight[:, None] * rng.uniform(1, 2, (n, outputs))
    learner = _TreeLearner(COLUMNS, 2, rate, penalty, fewest, doubt=np.zeros(outputs))
    tree, leaf = learner.learn(codes, slope, curvature, weight)

    members = {0: np.ones(n, bool)}
    for node in range(3):
        at = members[node]
        parts = (codes[:, at], slope[at], curvature[at], weight[at])
        best = slow_best(*parts, penalty, fewest) or Condition(0, 0, 0)
        assert (tree.column[node], tree.low[node], tree.high[node]) == tuple(best)
        inside = (codes[best.column] >= best.low) & (codes[best.column] < best.high)
        members[2 * node + 1], members[2 * node + 2] = at & ~inside, at & inside
    for number in range(4):
        member = members[3 + number]
        np.testing.assert_array_equal(leaf == number, member)
        expected = -rate * slope[member].sum(0) / (curvature[member].sum(0) + penalty)
        np.testing.assert_allclose(tree.leaf[number], expected, atol=1e-12)


def each_kind(rng, n=40):
    """Predictions of each kind, with their losses by definition."""
    odds, outcome = rng.normal(size=n), (rng.random(n) < 0.5).astype(float)
    logits, labels = drawn(rng, n, 4)
    rows = np.arange(n)

    def of_odds(f):
        moved = odds + f[:, 0] + f[:, 1] * odds / 1.3
        return np.where(outcome == 1, -np.log(expit(moved)), -np.log(expit(-moved)))

    def of_temperatures(f):
        return -log_softmax(logits / np.exp(f), -1)[rows, labels]

    def of_logits(f):
        return -log_softmax(logits + f, -1)[rows, labels]

    return [
        (_ClassOneOdds(odds, outcome, 1.3), of_odds),
        (_Temperatures(tabulate(examples(logits, labels))), of_temperatures),
        (_ClassLogits(log_softmax(logits, -1), labels), of_logits),
    ]


@pytest.mark.parametrize("kind", range(3))
def test_losses_and_derivatives_are_those_of_the_definition(kind, rng):
    predictions, losses = each_kind(rng)[kind]
    correction = 0.3 * rng.normal(size=(40, predictions.outputs))
    np.testing.assert_allclose(predictions.losses(correction), losses(correction), atol=1e-3)
    slope, curvature = predictions.derivatives(correction)
    for output in range(predictions.outputs):
        step = np.zeros_like(correction)
        step[:, output] = 1e-4
        numeric = (losses(correction + step) - losses(correction - step)) / 2e-4
        np.testing.assert_allclose(slope[:, output], numeric, atol=5e-3)
    assert (curvature >= 0).all()


def test_the_curvature_by_a_temperature_is_the_variance_of_the_scaled_logits(rng):
    logits, labels = drawn(rng, 50, 4)
    scaled = logits / np.exp(0.2)
    probs = softmax(scaled, -1)
    variance = (probs * scaled**2).sum(-1) - (probs * scaled).sum(-1) ** 2
    predictions = _Temperatures(tabulate(examples(logits, labels)))
    found = predictions.derivatives(np.full((50, 1), 0.2))[1][:, 0]
    np.testing.assert_allclose(found, variance, atol=0.05 * variance.max())


def test_splits_of_codes_are_splits_of_numbers(rng):
    columns = [MetadataColumn("age", "number", cuts=(0.7, 1.0)), COLUMNS[1]]
    numbers = np.stack([rng.choice([-1.0, 0.0, 0.7, 1.0, 2.0, np.nan], 200) for _ in columns])
    numbers[1] = rng.choice([0.0, 1.0, 2.0, np.nan], 200)  # places of categories
    numbers = numbers.astype(np.float32)  # in which 0.7 is a little less
    codes = [_codes_of(c, x) for c, x in zip(columns, numbers, strict=True)]
    for number, column in enumerate(columns):
        for condition in column.conditions(number):
            of, low, high = (np.array([value]) for value in condition)
            tree = _Tree(of, low, high, leaf=np.zeros((2, 1)))
            splits = _number_splits([tree], columns, 1)
            first, last, missing = (np.float32(x[0, 0]) for x in splits[1:])
            x = numbers[number]
            found = ((x >= first) & (x < last)) | (np.isnan(x) & (missing > 0))
            code = codes[number]
            inside = (code >= condition.low) & (code < condition.high)
            assert splits[0][0, 0] == number
            np.testing.assert_array_equal(found, inside)


def test_conditions_of_leaves_in_words():
    # age < 0 goes left; there site = B goes right, elsewhere missing ages do
    tree = _Tree(np.array([0, 1, 0]), np.array([1, 1, 3]), np.array([3, 2, 4]), np.zeros((4, 1)))
    words = [conjunction_text(COLUMNS, tree.conditions(leaf, COLUMNS)) for leaf in range(4)]
    assert words[:3] == ["age < 0", "age < 0 and site = B", "age >= 0"]


def test_the_error_of_a_gain_is_over_groups_if_there_are_any(rng):
    odds, _, labels, metadata = planted(0, 600)
    column = MetadataColumn("site", "category", values=("A", "B"))
    current = MetadataColumn("log-odds", "number", cuts=(0.0,))
    codes = np.stack([column.codes(column.numbers(metadata["site"])), current.codes(odds)])
    learner = _TreeLearner([column, current], 1, 0.5, 1.0, 5.0, np.array([0.0, 8.0]))
    run = _Boosting(
        _ClassOneOdds(odds, labels.astype(float), 1.0),
        learner,
        codes.astype(np.int16),
        np.ones(600),
    )
    parts = [np.arange(0, 600, 2), np.arange(1, 600, 2)]
    alone = _best_rounds(run, parts, 3, None)
    pairs = _best_rounds(run, parts, 3, np.arange(600) // 2)
    corrections = itertools.islice(boosting._held_out_corrections(run, parts), alone.rounds + 1)
    *_, last = (correction.copy() for correction in corrections)
    none, all_of_it, scaled = (run.predictions.losses(x * last) for x in (0, 1, alone.scale))
    assert scaled.mean() <= all_of_it.mean()
    gains = none - all_of_it
    assert alone.gain == pytest.approx(gains.mean())
    assert alone.error == pytest.approx(gains.std() / np.sqrt(600))
    of_pairs = gains.reshape(300, 2).mean(1)
    assert pairs.error == pytest.approx(of_pairs.std() / np.sqrt(300))
    assert not boosting._Choice(3, 1.0, 1.0, 0.1, 0.06).clear
    assert boosting._Choice(3, 1.0, 1.0, 0.1, 0.04).clear


# Known truths


@pytest.fixture(scope="module")
def repaired():
    odds, _, labels, metadata = planted(0, 8000)
    return Multicalibration(columns=NAMES, base="ts").fit(odds, labels, features=metadata)


def test_errors_in_an_intersection_are_repaired(repaired):
    odds, truth, _, metadata = planted(1, 20_000)
    before = regret(repaired.base_.predict_proba(odds), truth)
    probs = repaired.predict_proba(odds, metadata)
    assert regret(probs, truth) < 0.2 * before
    inside = in_trouble(metadata)
    wrong = (expit(odds) - expit(truth))[inside].mean()
    assert abs((probs - expit(truth))[inside].mean()) < 0.35 * wrong
    assert abs((probs - expit(truth))[~inside].mean()) < 0.01
    largest = repaired.corrections_[0]
    assert largest.subgroup.endswith("and site = B")
    assert largest.mean[0] == pytest.approx(-1.5, abs=0.4)
    assert largest.share == pytest.approx(inside.mean(), abs=0.02)


def test_an_output_in_doubt_needs_a_larger_gain_and_gets_a_smaller_step():
    codes = np.repeat(np.array([[0, 1]], np.int16), 100, axis=1)
    weight = np.ones(200)
    slope = np.where(codes[0] == 1, 0.5, 0.0)[:, None] * np.array([0.0, 1.0])
    steps = []
    for doubt in (0.0, 8.0, 30.0):  # the gain of the slope is 50**2 / (100 + 10), 23
        learner = _TreeLearner(COLUMNS[1:], 1, 1.0, 10.0, 5.0, np.array([0.0, doubt]))
        tree, leaf = learner.learn(codes, slope, np.ones((200, 2)), weight)
        steps.append(tree.leaf[leaf[-1]])
    gain, step = 50**2 / 110, -50 / 110
    expected = np.array([[0, step], [0, step * (1 - 8 / gain)], [0, 0]])
    np.testing.assert_allclose(steps, expected, atol=1e-12)


def test_a_site_that_is_too_sure_of_both_classes_is_repaired(rng):
    """Its residuals are zero on average: only their slope tells of it."""
    odds, site = 1.5 * rng.normal(size=4000), rng.choice(["A", "B", "C"], 4000)
    truth = odds * np.where(site == "C", 0.4, 1.0)
    labels = (rng.random(4000) < expit(truth)).astype(int)
    fitted = Multicalibration(columns=["site"], base="none").fit(
        odds, labels, features={"site": site}
    )
    probs = fitted.predict_proba(odds, {"site": site})
    assert regret(probs, truth) < 0.1 * regret(expit(odds), truth)
    slope = re.search(r"site = C: log-odds x (\S+) ", fitted.describe())
    assert slope is not None
    assert float(slope[1]) == pytest.approx(0.4, abs=0.15)


@pytest.mark.parametrize("keep_argmax", [None, True, False])
def test_predictions_follow_the_path_of_the_fit(keep_argmax, rng):
    """Trees know the current prediction, which they change: predictions must do so as well."""
    n, classes = 1500, 3 if keep_argmax is False else 2
    logits, site = 2 * rng.normal(size=(n, classes)), rng.choice(["A", "B"], n)
    labels = (
        logits * np.where(site == "B", 0.3, 1)[:, None] + rng.gumbel(size=(n, classes))
    ).argmax(-1)
    method = Multicalibration(columns=["site"], base="none", keep_argmax=keep_argmax, rounds=15)
    metadata = {"site": site}
    method.fit(logits, labels, features=metadata)
    numbers = np.asarray(method.encoded(metadata), np.float32)
    run = method._started(examples(logits, labels), numbers)
    for _ in range(15):
        run.step()
    method._keep(run.trees, run.learner.columns)
    split_by_prediction = method.column_[method.low_ < method.high_] == 1
    assert split_by_prediction.any()
    losses = -np.log(method.predict_proba(logits, metadata)[np.arange(n), labels])
    np.testing.assert_allclose(losses, run.predictions.losses(run.correction), atol=2e-3)


def test_it_says_what_it_learned(repaired):
    assert f"{len(repaired.leaf_)} rounds after TemperatureScaling" in repaired.describe()
    assert re.search(
        r"and site = B: log-odds x \d\.\d\d -1\.\d\d on \d\.\d % of examples", repaired.describe()
    )
    learned = repaired.learned()
    assert learned["rounds"] == len(repaired.leaf_) > 0
    assert learned["corrections"][0]["share"] == repaired.corrections_[0].share
    assert "rounds of corrections for subgroups: held-out NLL" in repaired.reasons_


def test_calibrated_predictions_are_left_alone():
    """Twenty sets of 600 calibrated examples; a wrong correction costs little, and is rare."""
    costs, corrected = [], 0
    for seed in range(20):
        odds, truth, labels, metadata = planted(seed, 600, effect=0.0)
        fitted = Multicalibration(columns=NAMES, base="none").fit(odds, labels, features=metadata)
        corrected += bool(len(fitted.leaf_))
        costs.append(regret(fitted.predict_proba(odds, metadata), truth))
    assert corrected <= 2
    assert np.mean(costs) < 0.001
    if not len(fitted.leaf_):
        np.testing.assert_allclose(fitted.predict_proba(odds, metadata), expit(odds), rtol=1e-14)
        assert "no corrections: no gain beyond noise" in fitted.reasons_


def test_temperatures_of_more_classes_are_repaired():
    logits, _, labels, metadata = planted_classes(0, 4000)
    fitted = Multicalibration(columns=NAMES, base="none").fit(logits, labels, features=metadata)
    assert fitted.keeps_argmax
    logits, truth, labels, metadata = planted_classes(1, 10_000)
    probs, inside = fitted.predict_proba(logits, metadata), in_trouble(metadata)
    assert (probs.argmax(-1) == logits.argmax(-1)).all()

    def loss(p, where):
        return -(softmax(truth, -1) * np.log(np.maximum(p, 1e-30))).sum(-1)[where].mean()

    before, after, best = (
        np.array([loss(p, inside), loss(p, ~inside)])
        for p in (softmax(logits, -1), probs, softmax(truth, -1))
    )
    assert after[0] - best[0] < 0.2 * (before[0] - best[0])
    assert after[1] - best[1] < 0.005
    assert "and site = B: temperature x 2." in fitted.describe()


def test_corrections_of_classes_find_their_offsets(rng):
    """A class that one site never tells of is too probable there."""
    truth, site = 2 * rng.normal(size=(3000, 3)), rng.choice(["A", "B"], 3000)
    labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    logits = truth + 1.5 * (site == "B")[:, None] * np.eye(3)[2]
    method = Multicalibration(columns=["site"], base="none", keep_argmax=False, depth=1)
    fitted = method.fit(logits, labels, features={"site": site})
    moved = np.log(fitted.predict_proba(logits, {"site": site}))[site == "B"] - logits[site == "B"]
    offset = (moved[:, 2] - moved[:, :2].mean(1)).mean()
    assert offset == pytest.approx(-1.5, abs=0.2)
    assert not fitted.keeps_argmax
    assert "site = B: logit of class 2 -" in fitted.describe()


def test_weights_count_as_often(rng):
    """Thrice the weight on trouble is as if it were sampled thrice, but for folds."""
    odds, _, labels, metadata = planted(2, 1500)
    weight = np.where(in_trouble(metadata), 3.0, 1.0)
    order = np.repeat(np.arange(1500), weight.astype(int))
    several = {name: values[order] for name, values in metadata.items()}
    # leaves are the same where the penalty and the least weight are scaled alike
    shrink = len(order) / 1500
    plain = Multicalibration(columns=NAMES, base="none", penalty=10 * shrink, fewest=20 * shrink)
    weighted = Multicalibration(columns=NAMES, base="none")
    trees = []
    for method, rows, extra in ((plain, order, {}), (weighted, slice(None), {"w": weight})):
        meta = several if rows is order else metadata
        method.metadata_ = _learned_columns(metadata, labels, None)
        checked = examples(odds[rows], labels[rows], extra.get("w")).scale_free()
        numbers = np.asarray(method.encoded(meta), np.float32)
        method.base_.fit_examples(checked)
        run = method._started(checked, numbers)
        run.learner.columns = [*run.learner.columns[:-1], MetadataColumn("log-odds", "number")]
        run.learner.__post_init__()
        run.step()
        trees.append(run.trees[0])
    for of_rows, of_weights in zip(*trees, strict=True):
        np.testing.assert_allclose(of_rows, of_weights, atol=1e-6)


# Inputs


def test_it_comes_back_bit_by_bit(repaired, tmp_path):
    odds, _, _, metadata = planted(1, 500)
    cal.save(repaired, tmp_path / "repaired")
    again = cal.load(tmp_path / "repaired")
    expected = repaired.predict_proba(odds, metadata)
    np.testing.assert_array_equal(again.predict_proba(odds, metadata), expected)
    assert again.describe() == repaired.describe()
    assert again.learned() == repaired.learned()
    assert again.reasons_ == repaired.reasons_
    assert again.metadata_ == repaired.metadata_


def test_a_file_with_columns_that_are_not_there_is_refused(repaired):
    artifact = io.objects.artifact_of(repaired)
    column = artifact.tensors["column_"].clone()
    column[0, 0] = 99
    with pytest.raises(ValueError, match="column_ must have numbers of the 2 columns"):
        io.objects.restored(artifact._replace(tensors={**artifact.tensors, "column_": column}))


def test_new_values_and_missing_ones_have_codes():
    odds, _, labels, metadata = planted(0, 4000)
    rng = np.random.default_rng(5)
    age = metadata["age"].astype(float)
    age[rng.random(4000) < 0.2] = np.nan
    site = metadata["site"].astype(object)
    site[rng.random(4000) < 0.1] = None
    labels = np.where(np.isnan(age), rng.random(4000) < 0.95, labels).astype(int)
    fitted = Multicalibration(columns=NAMES, base="none").fit(
        odds, labels, features={"age": age, "site": site}
    )
    new = {"age": [40, np.nan, 40, 40, np.inf], "site": ["A", "A", "nowhere", None, "A"]}
    probs = fitted.predict_proba(np.zeros(5), new)
    assert probs[0] == pytest.approx(0.5, abs=0.1)
    assert probs[1] > 0.75
    assert probs[2:] == pytest.approx(np.full(3, 0.5), abs=0.2)


def test_examples_that_do_not_count_teach_no_values():
    odds, _, labels, metadata = planted(5, 600)
    metadata["site"] = np.where(np.arange(600) < 200, "D", metadata["site"])
    weight = np.where(metadata["site"] == "D", 0.0, 1.0)
    ignored = np.where(metadata["site"] == "D", -100, labels)
    method: dict[str, Any] = {"columns": NAMES, "base": "none", "rounds": 1}
    weighted = Multicalibration(**method).fit(odds, labels, features=metadata, sample_weight=weight)
    left_out = Multicalibration(**method).fit(odds, ignored, features=metadata)
    for fitted in (weighted, left_out):
        assert fitted.metadata_[1].values == ("A", "B", "C")


def test_booleans_dates_and_numbers_as_text():
    odds, truth, labels, metadata = planted(0, 4000)
    start = np.datetime64("2020-01-01")
    same = {
        "age": start + metadata["age"].astype("timedelta64[D]"),
        "site": metadata["site"] == "B",
        "text": metadata["age"].astype(str),
    }
    fitted = Multicalibration(columns=["age", "site", "text"], base="none").fit(
        odds, labels, features=same
    )
    assert [column.kind for column in fitted.metadata_] == ["date", "category", "number"]
    assert regret(fitted.predict_proba(odds, same), truth) < 0.5 * regret(expit(odds), truth)


def test_frames_mappings_and_arrays_are_one(repaired):
    pd = pytest.importorskip("pandas")
    odds, _, labels, metadata = planted(1, 500)
    expected = repaired.predict_proba(odds, metadata)
    frame = pd.DataFrame(metadata)[["site", "age"]]
    np.testing.assert_array_equal(repaired.predict_proba(odds, frame), expected)
    array = np.stack([odds, metadata["age"], metadata["site"] == "B"], axis=1)
    method = Multicalibration(columns=[1, 2], base="ts", rounds=5)
    fitted = method.fit(odds, labels, features=array)
    by_name = fitted.predict_proba(odds, {"1": array[:, 1], "2": array[:, 2]})
    np.testing.assert_array_equal(fitted.predict_proba(odds, array), by_name)


def test_two_columns_are_one_logit():
    odds, _, labels, metadata = planted(0, 3000)
    two = np.stack([np.zeros(3000), odds], 1)
    method: dict[str, Any] = {"columns": NAMES, "base": "ts", "rounds": 10}
    one, both = (Multicalibration(**method).fit(x, labels, features=metadata) for x in (odds, two))
    assert len(one.leaf_)
    np.testing.assert_allclose(
        one.predict_proba(odds, metadata), both.predict_proba(two, metadata)[:, 1], atol=1e-5
    )
    tensor = torch.from_numpy(both.encoded(metadata))
    called = both(torch.from_numpy(two), tensor).softmax(-1).numpy()
    np.testing.assert_array_equal(called, both.predict_proba(two, metadata))


def test_numbers_of_a_matrix_are_columns_too(rng):
    odds, features = rng.normal(size=3000), rng.normal(size=(3000, 3))
    features[rng.random(3000) < 0.1, 1] = np.nan
    truth = odds + 1.5 * (features[:, 0] > 0.5)
    labels = (rng.random(3000) < expit(truth)).astype(int)
    fitted = Multicalibration(base="none").fit(odds, labels, features=features)
    assert fitted.corrections_[0].subgroup.startswith("feature 0 >= 0.")
    assert regret(fitted.predict_proba(odds, features), truth) < 0.3 * regret(expit(odds), truth)
    with pytest.raises(ValueError, match=r"features must be \(..., 3\), as in fit"):
        fitted.predict_proba(odds, features[:, :2])


@pytest.mark.filterwarnings("ignore:.*rows are copies")
def test_groups_stay_together():
    """Copies of examples in other folds would make noise look like a gain."""
    odds, _, labels, metadata = planted(3, 150, effect=0.0)
    rng = np.random.default_rng(0)
    copies = np.repeat(np.arange(150), 20)
    fingerprint = {"x": rng.normal(size=150)[copies], "age": metadata["age"][copies]}
    method: dict[str, Any] = {"columns": ["x", "age"], "base": "none", "rounds": 15}
    fits = [
        Multicalibration(**method).fit(
            odds[copies], labels[copies], features=fingerprint, groups=groups
        )
        for groups in (None, copies)
    ]
    assert len(fits[0].leaf_) > 0
    assert len(fits[1].leaf_) == 0
    alone = Multicalibration(**method).fit(
        odds[copies], labels[copies], features=fingerprint, groups=np.zeros(3000)
    )
    assert "too little data" in alone.reasons_


def test_groups_stay_together_in_the_fit_of_the_base():
    odds, _, labels, metadata = planted(3, 600)
    groups = np.arange(600) // 5
    method: dict[str, Any] = {"columns": NAMES, "base": "auto", "rounds": 1}
    fitted = Multicalibration(**method).fit(odds, labels, features=metadata, groups=groups)
    grouped, alone = cal.Auto().fit(odds, labels, groups=groups), cal.Auto().fit(odds, labels)
    assert fitted.base_.reasons_ == grouped.reasons_ != alone.reasons_


def test_many_examples_are_a_sample(monkeypatch):
    from calibrant.calibrators.features import multicalibration

    monkeypatch.setattr(multicalibration, "_MAX_LEARNED", 3000)
    monkeypatch.setattr(multicalibration, "_MAX_JUDGED", 2500)
    odds, truth, labels, metadata = planted(0, 6000)
    fitted = Multicalibration(columns=NAMES, base="ts", rounds=20).fit(
        odds, labels, features=metadata, groups=np.arange(6000) // 2
    )
    before = regret(fitted.base_.predict_proba(odds), truth)
    assert regret(fitted.predict_proba(odds, metadata), truth) < 0.6 * before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": []}, "columns must be different names"),
        ({"columns": ["age", "age"]}, "columns must be different names"),
        ({"base": "gc"}, "base must be a method that needs no features, got 'gc'"),
        ({"base": "multicalibration"}, "base must be a method that needs no features"),
        ({"base": "nothing"}, "unknown method"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Multicalibration(**options)


def test_wrong_metadata_are_refused(repaired):
    odds, _, labels, metadata = planted(0, 200)
    with pytest.raises(ValueError, match="columns age, site, but features= has no site: pass a"):
        repaired.predict_proba(odds, {"age": metadata["age"]})
    with pytest.raises(ValueError, match="features= has no age, site"):
        repaired.predict_proba(odds, np.zeros((200, 2)))
    with pytest.raises(ValueError, match="Multicalibration needs features"):
        repaired.predict_proba(odds)
    arrays = {"logits": odds, "labels": labels, **metadata}
    with pytest.raises(ValueError, match="name metadata columns with columns= or --columns"):
        cal.fit(arrays, method="multicalibration")
    with pytest.raises(ValueError, match="got 100 of age, 200 of site for labels of shape"):
        Multicalibration(columns=NAMES).fit(
            odds, labels, features={**metadata, "age": metadata["age"][:100]}
        )
    many = np.zeros((200, 101))
    with pytest.raises(ValueError, match="corrects each of up to 100 classes, got 101"):
        Multicalibration(columns=NAMES, keep_argmax=False).fit(many, labels, features=metadata)
    with pytest.raises(TypeError, match="features of GroupCalibration must be numbers"):
        cal.calibrators.GroupCalibration().fit(odds, labels, features=metadata)


def test_few_examples_warn_for_the_base():
    odds, _, labels, metadata = planted(0, 8)
    with pytest.warns(UserWarning, match="SigmoidScaling has 2 parameters for 8 examples"):
        Multicalibration(columns=NAMES, base="sigmoid").fit(odds, labels, features=metadata)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Multicalibration(columns=NAMES, base="none").fit(odds, labels, features=metadata)
