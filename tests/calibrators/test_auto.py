"""The choice of a method: its figures against a slow definition, its rule, and what comes of it.

Candidates and sample sizes are taken from the module.
"""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import expit, softmax

import calibrant as cal
from calibrant._core.chunks import examples
from calibrant._core.logpartition import tabulate
from calibrant.calibrators import auto
from calibrant.calibrators.auto import (
    CANDIDATES,
    FEWEST,
    MANY_CLASSES,
    TWO_CLASSES,
    Auto,
    Candidate,
)
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.features import GroupCalibration
from calibrant.calibrators.folds import folds
from calibrant.calibrators.scaling import Identity, TemperatureScaling
from tests.support.simulate import drawn

SIMPLE = ("none", "ts")
TABLED = [name for name in MANY_CLASSES if not CANDIDATES[name].needs_features]
"""Candidates that a fit without features has."""


def name_of(fitted):
    """The candidate that was chosen."""
    (name,) = [n for n, kind in CANDIDATES.items() if type(kind()) is type(fitted.chosen_)]
    return name


def margin_dependent(rng, n, classes=6):
    """Logits that no single temperature calibrates."""
    logits = 3 * rng.normal(size=(n, classes))
    truth = 0.7 + 2.5 * expit(2 - np.diff(np.sort(logits, -1)[:, -2:], axis=-1))
    return logits, (logits / truth + rng.gumbel(size=logits.shape)).argmax(-1)


def soft_ece(confidence, right, share):
    """Gaps of 15 bins with Gaussian edges, one bin after the other."""
    centres = (np.arange(15) + 0.5) / 15
    kernel = np.exp(-((confidence[:, None] - centres) ** 2) / (2 * 0.05**2))
    part = kernel / kernel.sum(-1, keepdims=True)
    return sum(abs((share * part[:, b] * (confidence - right)).sum()) for b in range(15))


def spied(monkeypatch):
    """Calls of the folds, each with its labels, groups and parts."""
    calls = []

    def spy(labels, count, *, groups=None, seed=0):
        parts = folds(labels, count, groups=groups, seed=seed)
        calls.append((labels, groups, parts))
        return parts

    monkeypatch.setattr(auto, "folds", spy)
    return calls


# Too little data


@pytest.mark.parametrize("kind", ["few", "right", "wrong"])
def test_too_little_is_left_as_it_is(rng, kind):
    n = FEWEST - 1 if kind == "few" else 3 * FEWEST
    logits, labels = drawn(rng, n, 4, 3.0)
    if kind != "few":
        labels = logits.argmax(-1) if kind == "right" else logits.argmin(-1)
    right = int((logits.argmax(-1) == labels).sum())
    fitted = Auto()
    message = f"too little to calibrate on: {n} examples, {right} of them right; at least {FEWEST}"
    with pytest.warns(UserWarning, match=message):
        fitted.fit(logits, labels)
    assert isinstance(fitted.chosen_, Identity)
    assert fitted.candidates_ == []
    assert "left as it is" in fitted.reasons_
    assert "too little" in fitted.reasons_
    np.testing.assert_allclose(fitted.predict_proba(logits), softmax(logits, -1), rtol=1e-12)


def test_just_enough_is_enough(rng):
    logits, labels = drawn(rng, FEWEST, 4)
    fitted = Auto(candidates=SIMPLE).fit(logits, labels)
    assert [c.name for c in fitted.candidates_] == list(SIMPLE)


def test_ignored_labels_do_not_make_enough(rng):
    logits, labels = drawn(rng, FEWEST + 20, 4)
    labels[:30] = -100
    with pytest.warns(UserWarning, match=f"too little to calibrate on: {FEWEST - 10} examples"):
        Auto().fit(logits, labels)


def test_the_warning_points_to_the_line_of_the_fit(rng):
    with pytest.warns(UserWarning, match="too little") as caught:
        Auto().fit(*drawn(rng, 20, 4))
    assert [w.filename for w in caught] == [__file__]


# What is chosen


@pytest.mark.slow
def test_calibrated_logits_are_mostly_left_alone():
    left = 0
    for seed in range(20):
        logits, labels = drawn(np.random.default_rng(seed), 300, 4)
        left += name_of(Auto(seed=seed).fit(logits, labels)) == "none"
    assert left >= 14


@pytest.mark.parametrize("temperature", [0.4, 2.5])
def test_scaled_logits_are_not_left_alone(temperature):
    logits, labels = drawn(np.random.default_rng(0), 300, 5, temperature)
    fitted = Auto().fit(logits, labels)
    assert name_of(fitted) != "none"
    assert cal.nll(fitted(torch.from_numpy(logits)).numpy(), labels) < cal.nll(logits, labels)


def test_what_one_temperature_cannot_do_is_not_left_to_one(rng):
    fitted = Auto().fit(*margin_dependent(rng, 2000))
    assert name_of(fitted) not in SIMPLE
    fresh, answers = margin_dependent(rng, 10_000)
    before = cal.ece(fresh, answers)
    assert cal.ece(fitted(torch.from_numpy(fresh)).numpy(), answers) < before / 3


@pytest.mark.parametrize(
    ("kind", "n"),
    [("calibrated", 80), ("over", 400), ("under", 80), ("noisy", 400), ("margin", 80)],
)
def test_fresh_data_are_never_worse_off_beyond_noise(rng, kind, n):
    if kind == "margin":
        logits, labels = margin_dependent(rng, 10_000)
    else:
        temperature = {"over": 1.3, "under": 0.8}.get(kind, 1.0)
        logits, labels = drawn(rng, 10_000, 5, temperature)
        if kind == "noisy":
            labels = np.where(rng.random(10_000) < 0.1, rng.integers(0, 5, 10_000), labels)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* parameters for .* examples")
        fitted = Auto().fit(logits[:n], labels[:n])
    fresh, answers = logits[n:], labels[n:]
    out = fitted(torch.from_numpy(fresh)).numpy()
    assert cal.nll(out, answers) < cal.nll(fresh, answers) + 0.02
    change = cal.ece(out, answers) - cal.ece(fresh, answers)
    assert change < 0.03


# The figures


@pytest.fixture(scope="module")
def judged():
    """Weighted data with masked classes, and the claims of each candidate by hand."""
    rng = np.random.default_rng(5)
    logits, labels = margin_dependent(rng, 500)
    hidden = rng.random(logits.shape) < 0.1
    hidden[np.arange(500), labels] = False
    logits, weight = np.where(hidden, -np.inf, logits), rng.exponential(size=500) ** 2
    fitted = Auto(folds=4, seed=9).fit(logits, labels, sample_weight=weight)
    claims = {}
    for name in TABLED:
        kind: Any = CANDIDATES[name]
        confidence, nll = np.full(500, np.nan), np.full(500, np.nan)
        for held in folds(labels, 4, seed=9):
            seen = np.array([i for i in range(500) if i not in set(held)])
            one = kind().fit_records(
                tabulate(examples(logits[seen], labels[seen], weight[seen])),
            )
            probs = one.predict_proba(logits[held])
            confidence[held] = probs.max(-1)
            nll[held] = -np.log(probs[np.arange(len(held)), labels[held]])
        claims[name] = confidence, nll
    right = logits.argmax(-1) == labels

    def figures(name, share):
        """NLL, and the error of each fold with its share of the whole."""
        confidence, nll = claims[name]
        parts = [(confidence[h], right[h], share[h]) for h in folds(labels, 4, seed=9)]
        return share @ nll, sum(soft_ece(*part) for part in parts)

    return fitted, figures, weight / weight.sum(), (logits, labels)


def test_figures_are_those_of_fits_that_did_not_see_the_sample(judged):
    fitted, figures, share, _ = judged
    assert [c.name for c in fitted.candidates_] == TABLED
    for c in fitted.candidates_:
        assert (c.nll, c.ece) == pytest.approx(figures(c.name, share), abs=2e-4)
        assert c.score == pytest.approx(c.nll + c.ece, abs=1e-12)
    least = min(c.score for c in fitted.candidates_)
    for c in fitted.candidates_:
        assert c.excess == pytest.approx(c.score - least, abs=1e-12)
        assert (c.error == 0) == (c.excess == 0)


def test_the_error_is_that_of_samples_drawn_anew(judged, rng):
    fitted, figures, share, _ = judged
    best = min(fitted.candidates_, key=lambda c: c.score)
    others = [c for c in fitted.candidates_ if c is not best]
    differences = []
    for _ in range(300):
        again = share * np.bincount(rng.integers(0, 500, 500), minlength=500)
        again /= again.sum()
        least = sum(figures(best.name, again))
        differences.append([sum(figures(c.name, again)) - least for c in others])
    for c, expected in zip(others, np.std(differences, axis=0), strict=True):
        assert expected / 1.5 < c.error < 1.5 * expected
        assert c.error < 1.5 * c.excess + 0.05


def test_flat_rows_of_many_classes_are_judged_by_what_the_map_does():
    """Half of the rows are sure, half know nothing, as tokens of a language model."""
    rng = np.random.default_rng(2)
    logits = 0.3 * rng.normal(size=(3000, 1000))
    sure = rng.random(3000) < 0.5
    logits[sure, 0] += 8
    labels = np.where(sure & (rng.random(3000) < 0.9), 0, rng.integers(1, 1000, 3000))
    fresh, answers = logits[2000:], labels[2000:]
    records = tabulate(examples(fresh, answers))
    for name in TABLED:
        fitted: Any = CANDIDATES[name]().fit(logits[:2000], labels[:2000])
        actual = cal.nll(fitted(torch.from_numpy(fresh)).numpy(), answers)
        assert fitted.predict_records(records).nll.mean() == pytest.approx(actual, abs=5e-3)


def test_the_chosen_is_fitted_on_all(judged):
    fitted, _, share, (logits, labels) = judged
    alone: Any = CANDIDATES[name_of(fitted)]().fit(logits, labels, sample_weight=share)
    np.testing.assert_allclose(
        fitted.predict_proba(logits), alone.predict_proba(logits), rtol=1e-3, atol=1e-5
    )
    records = tabulate(examples(logits, labels))
    ours, expected = (c.predict_records(records) for c in (fitted, alone))
    for mine, its in zip(ours, expected, strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-3, atol=1e-5)
    assert fitted.solution_ is fitted.chosen_.solution_
    assert fitted.size(6) == alone.size(6)


def test_reasons_name_the_chosen_and_the_figures_of_all(judged):
    fitted = judged[0]
    first, *lines = fitted.reasons_.splitlines()
    assert first.startswith(f"chose {name_of(fitted)}:")
    assert len(lines) == len(TABLED)
    for line, c in zip(lines, fitted.candidates_, strict=True):
        assert line.split()[0] == c.name
        assert f"{c.nll:.4f} + {c.ece:.4f} = {c.score:.4f}" in line
        behind = f"{c.excess:.4f} +- {c.error:.4f} above the best" if c.excess else "the best"
        assert line.endswith(behind)


def test_the_seed_is_that_of_the_folds_and_draws(rng):
    logits, labels = drawn(rng, 300, 4, 1.3)
    one, same, other = (
        Auto(candidates=SIMPLE, seed=s).fit(logits, labels).candidates_ for s in (1, 1, 2)
    )
    assert one == same
    assert one[1].score != other[1].score
    assert one[0].nll == pytest.approx(other[0].nll, rel=1e-12)  # nothing is fitted
    assert one[0].error != other[0].error


# Features


def by_feature(rng, n):
    """The sign of a feature says whether the logits are honest or three times too large."""
    features = rng.normal(size=(n, 4))
    honest = 2 * rng.normal(size=(n, 5))
    labels = (honest + rng.gumbel(size=honest.shape)).argmax(-1)
    logits = np.where(features[:, :1] > 0, 3.0, 1.0) * honest
    return logits, labels, features


def test_features_are_considered_where_they_are_given(rng):
    logits, labels, features = by_feature(rng, 1500)
    plain = Auto(candidates=("none", "ts", "beta", "gc", "procal")).fit(logits, labels)
    assert [c.name for c in plain.candidates_] == ["none", "ts", "beta"]
    assert not plain.needs_features
    fitted = Auto(candidates=("none", "ts", "gc")).fit(logits, labels, features=features)
    assert name_of(fitted) == "gc"
    assert fitted.needs_features
    fresh = by_feature(rng, 3000)
    better = cal.evaluate(probs=fitted.predict_proba(fresh[0], fresh[2]), labels=fresh[1])
    worse = cal.evaluate(probs=plain.predict_proba(fresh[0]), labels=fresh[1])
    assert better["nll"].value < worse["nll"].value - 0.05
    with pytest.raises(ValueError, match="needs features"):
        fitted.predict_proba(fresh[0])
    again = fitted.fit(logits, labels)  # forgets that it had features
    assert not again.needs_features


def test_figures_with_features_are_those_of_fits_that_did_not_see_the_sample(rng):
    logits, labels, features = by_feature(rng, 400)
    labels[:30] = -100
    fitted = Auto(candidates=("none", "gc"), folds=3, seed=4)
    fitted.fit(logits, labels, features=features)
    kept = np.arange(30, 400)
    total = 0.0
    for held in folds(labels[kept], 3, seed=4):
        seen = np.setdiff1d(np.arange(370), held)
        masked = np.full(400, -100)
        masked[kept[seen]] = labels[kept[seen]]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one = GroupCalibration().fit(logits, masked, features=features)
        probs = one.predict_proba(logits[kept[held]], features[kept[held]])
        total -= np.log(probs[np.arange(len(held)), labels[kept[held]]]).sum()
    assert fitted.candidates_[1].nll == pytest.approx(total / 370, rel=1e-5)


# The rule


def told(monkeypatch, *figures):
    """Let the figures of the candidates be (name, excess in halves of its standard error)."""
    found = [Candidate(name, 1.0, 0.1, 1.1, halves * 0.01 / 2, 0.01) for name, halves in figures]
    monkeypatch.setattr(auto, "_judge", lambda *_: found)
    monkeypatch.setattr(auto, "_out_of_fold", lambda *_: None)


@pytest.mark.parametrize(
    ("halves", "expected"),
    [
        ((0.0, 0.5, 2.0), 0),
        ((0.9, 0.0, 0.5), 0),
        ((1.1, 0.0, 0.5), 1),
        ((1.1, 0.9, 0.0), 1),
        ((1.1, 1.1, 0.0), 2),
        ((1.0, 0.0, 0.0), 0),
    ],
)
def test_the_simplest_within_half_a_standard_error_is_taken(rng, monkeypatch, halves, expected):
    names = [*MANY_CLASSES][:3]
    told(monkeypatch, *zip(names, halves, strict=True))
    fitted = Auto().fit(*drawn(rng, 300, 4, 1.5))
    assert name_of(fitted) == names[expected]
    assert fitted.reasons_.startswith(f"chose {names[expected]}:")


def test_the_order_of_the_candidates_is_that_of_the_caller(rng, monkeypatch):
    told(monkeypatch, ("ts", 0.5), ("none", 0.0))
    fitted = Auto(candidates=("ts", "none")).fit(*drawn(rng, 100, 4, 1.5))
    assert name_of(fitted) == "ts"


def test_one_candidate_is_chosen(rng):
    logits, labels = drawn(rng, 100, 4)
    fitted = Auto(candidates=("ts",)).fit(logits, labels)
    assert name_of(fitted) == "ts"
    assert [(c.excess, c.error) for c in fitted.candidates_] == [(0, 0)]


def test_candidates_start_simple_and_keep_the_prediction():
    kinds = [CANDIDATES[name] for name in MANY_CLASSES]
    sizes = [kind().size(1000) for kind in kinds]
    assert sizes[:2] == sorted(sizes)[:2]
    assert all(kind().keeps_argmax for kind in kinds)
    assert MANY_CLASSES[0] == TWO_CLASSES[0] == "none"


def test_what_cannot_be_chosen_is_refused():
    known = ", ".join(CANDIDATES)
    with pytest.raises(ValueError, match=f"candidates must be among {known}, got .*'platt'"):
        Auto(candidates=("none", "platt"))
    with pytest.raises(ValueError, match=f"candidates must be among {known}, got"):
        Auto(candidates=())
    with pytest.raises(ValueError, match="folds must be a whole number, at least 2, got 1"):
        Auto(folds=1)


# Folds and groups


def test_groups_stay_together(rng, monkeypatch):
    calls = spied(monkeypatch)
    logits, labels = drawn(rng, 300, 4, 1.5)
    labels[::7] = -100
    groups = rng.integers(0, 30, 300)
    Auto(candidates=SIMPLE).fit(logits, labels, groups=groups)
    ((used, members, parts),) = calls
    kept = labels != -100
    np.testing.assert_array_equal(used, labels[kept])
    np.testing.assert_array_equal(members, groups[kept])
    assert len(parts) == 5
    for part in parts:
        others = np.setdiff1d(np.arange(kept.sum()), part)
        assert not set(members[part]) & set(members[others])


def test_groups_of_sequences_serve_all_of_their_tokens(rng, monkeypatch):
    calls = spied(monkeypatch)
    logits, labels = drawn(rng, 300, 4, 1.5)
    Auto(candidates=SIMPLE).fit(
        logits.reshape(30, 10, 4), labels.reshape(30, 10), groups=np.arange(30) // 2
    )
    np.testing.assert_array_equal(calls[0][1], np.arange(30).repeat(10) // 2)


@pytest.mark.filterwarnings("ignore:.*not alike")
def test_groups_change_the_figures_where_samples_repeat(rng):
    """Copies of a sample on both sides of a fold flatter the method."""
    logits, labels = drawn(rng, 60, 3, 1.0)
    twice, again, groups = np.tile(logits, (20, 1)), np.tile(labels, 20), np.tile(np.arange(60), 20)
    last = "blend"
    loose = Auto(candidates=("none", last)).fit(twice, again)
    tight = Auto(candidates=("none", last)).fit(twice, again, groups=groups)
    assert loose.candidates_[0].nll == pytest.approx(tight.candidates_[0].nll, abs=1e-9)
    assert tight.candidates_[1].nll > loose.candidates_[1].nll + 0.01


@pytest.mark.parametrize("candidates", [SIMPLE, MANY_CLASSES])
def test_one_group_cannot_be_parted_and_it_says_so(rng, candidates):
    logits, labels = drawn(rng, 300, 4)
    with pytest.raises(ValueError, match="group"):
        Auto(candidates=candidates).fit(logits, labels, groups=np.zeros(300))


def test_a_choice_is_made_on_some_and_fitted_on_all(rng, monkeypatch):
    monkeypatch.setattr(auto, "MOST", 150)
    calls = spied(monkeypatch)
    logits, labels = drawn(rng, 1000, 4, 2.0)
    fitted = Auto(candidates=SIMPLE).fit(logits, labels, groups=labels)
    ((used, members, _),) = calls
    assert len(used) == 150
    np.testing.assert_array_equal(used, members)  # rows and groups were drawn together
    assert not np.array_equal(used, labels[:150])
    alone = TemperatureScaling().fit(logits, labels)
    assert name_of(fitted) == "ts"
    assert isinstance(fitted.chosen_, Calibrator)
    np.testing.assert_array_equal(fitted.predict_proba(logits), alone.predict_proba(logits))
    Auto(candidates=SIMPLE, seed=1).fit(logits, labels)
    assert not np.array_equal(calls[1][0], used)  # the seed draws others


def test_all_are_used_where_there_are_not_too_many(rng, monkeypatch):
    monkeypatch.setattr(auto, "MOST", 150)
    calls = spied(monkeypatch)
    Auto(candidates=SIMPLE).fit(*drawn(rng, 150, 4))
    assert sorted(np.concatenate(calls[0][2])) == list(range(150))


# The outcome


def test_a_refit_replaces_the_choice(rng):
    fitted = Auto(candidates=SIMPLE).fit(*drawn(rng, 400, 4, 4.0))
    assert name_of(fitted) == "ts"
    before = fitted.reasons_, fitted.candidates_
    assert "chosen_.temperature_" in fitted.state_dict()
    fitted.fit(*drawn(rng, 400, 4))
    assert name_of(fitted) == "none"
    assert fitted.reasons_ != before[0]
    assert fitted.candidates_ != before[1]
    assert "chosen_.temperature_" not in fitted.state_dict()
    with pytest.warns(UserWarning, match="too little"):
        fitted.fit(*drawn(rng, 10, 4))
    assert fitted.candidates_ == []


def test_a_refit_does_not_warn_of_the_choice_before(rng):
    fitted = Auto(candidates=("none", "ts", "blend")).fit(*margin_dependent(rng, 1000))
    assert name_of(fitted) not in SIMPLE
    fitted.fit(*drawn(rng, 100, 6))
    assert name_of(fitted) in SIMPLE


def test_the_chosen_is_a_part_of_the_module(rng):
    fitted = Auto(candidates=SIMPLE).fit(*drawn(rng, 400, 4, 4.0))
    assert dict(fitted.named_children()) == {"chosen_": fitted.chosen_}
    state = fitted.state_dict()
    assert float(state["chosen_.temperature_"]) == pytest.approx(4, rel=0.15)
    assert int(state["classes_"]) == int(state["chosen_.classes_"]) == 4
    assert set(fitted.config()) == {"candidates", "keep_argmax", "folds", "seed"}
    extra = {"chosen": "ts", "config": {"objective": "nll"}, "reasons": fitted.reasons_}
    assert state["_extra_state"] == extra


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_a_fresh_module_takes_the_state_dict_with_choice_and_reasons(rng, temperature):
    logits, labels = drawn(rng, 400, 4, temperature)
    fitted = Auto(candidates=SIMPLE).fit(logits, labels)
    fresh = Auto()
    fresh.load_state_dict(fitted.state_dict())
    assert type(fresh.chosen_) is type(fitted.chosen_)
    assert fresh.reasons_ == fitted.reasons_
    assert fresh.classes == 4
    np.testing.assert_array_equal(fresh.predict_proba(logits), fitted.predict_proba(logits))
    fresh.load_state_dict(Auto().state_dict())
    assert fresh.chosen_ is None
    assert fresh.classes == 0


def test_the_temperature_is_that_of_the_chosen_if_it_has_one(rng):
    logits, labels = drawn(rng, 400, 4, 4.0)
    fitted = Auto(candidates=("ts",)).fit(logits, labels)
    np.testing.assert_allclose(fitted.temperature(logits), 4, rtol=0.15)
    assert not hasattr(Auto(candidates=("beta",)).fit(logits, labels), "temperature")
    assert not hasattr(Auto(), "temperature")


def test_description_and_learned_values_are_those_of_the_chosen(rng):
    fitted = Auto(candidates=("ts",)).fit(*drawn(rng, 400, 4, 4.0))
    assert fitted.chosen_ is not None
    assert fitted.learned() == fitted.chosen_.learned() != {}
    assert fitted.describe() == f"chosen: {fitted.chosen_.describe()}"
    assert Auto().describe() == "Auto, not fitted"


def test_the_chosen_of_log_odds_takes_log_odds(rng):
    logits, labels = drawn(rng, 300, 2, 3.0)
    odds = logits[:, 1] - logits[:, 0]
    fitted = Auto(candidates=SIMPLE).fit(odds, labels)
    assert fitted.chosen_ is not None
    np.testing.assert_array_equal(fitted.chosen_.predict_proba(odds), fitted.predict_proba(odds))


def test_nothing_is_chosen_before_a_fit():
    fresh = Auto()
    assert fresh.chosen_ is None
    assert fresh.size(10) == 0
    assert fresh.reasons_ == ""
    assert fresh.candidates_ == []


def rarer(rng, n):
    """Log-odds that are two too high, as after training with class weights."""
    odds = 2 * rng.normal(size=n)
    return odds, (rng.random(n) < expit(odds - 2)).astype(int)


@pytest.mark.parametrize("n", [300, 5000])
def test_two_classes_get_an_intercept(rng, n):
    fitted = Auto().fit(*rarer(rng, n))
    odds, labels = rarer(rng, 20_000)
    assert fitted.predict_proba(odds).mean() == pytest.approx(labels.mean(), abs=0.06)
    assert cal.nll(fitted.transform(odds), labels) < cal.nll(odds - 2, labels) + 0.02
    pairs = np.stack([np.zeros(n), rarer(rng, n)[0]], 1)
    assert not fitted.keeps_argmax
    assert name_of(fitted) in TWO_CLASSES
    assert Auto().fit(pairs, rarer(rng, n)[1]).predict_proba(pairs).shape == (n, 2)


def test_the_predicted_class_of_two_is_kept_if_asked_for(rng):
    odds, labels = rarer(rng, 2000)
    kept = Auto(keep_argmax=True).fit(odds, labels)
    assert kept.keeps_argmax
    assert name_of(kept) in MANY_CLASSES
    np.testing.assert_array_equal(kept.predict_proba(odds) > 0.5, odds > 0)


def test_calibrated_log_odds_are_mostly_left_alone(rng):
    chosen = []
    for _ in range(20):
        odds = 2 * rng.normal(size=500)
        labels = (rng.random(500) < expit(odds)).astype(int)
        chosen.append(name_of(Auto().fit(odds, labels)))
    assert chosen.count("none") >= 12


def test_the_calibration_of_class_1_decides(rng):
    """The top label is calibrated, and P(y = 1) is not: right as often as claimed on average."""
    odds, labels = rarer(rng, 4000)
    fitted = Auto().fit(odds, labels)
    figures = {c.name: c for c in fitted.candidates_}
    probs = expit(odds)
    assert figures["none"].ece == pytest.approx(np.abs(probs.mean() - labels.mean()), rel=0.1)
