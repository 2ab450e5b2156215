"""The default method: its figures and weights against a slow definition, and what comes of it."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import expit, log_softmax

import calibrant as cal
from calibrant._core.chunks import examples
from calibrant.calibrators import auto
from calibrant.calibrators.affine import StructuredMatrixScaling
from calibrant.calibrators.auto import (
    CHANGING,
    FEWER_FOLDS_FROM,
    KEEPING,
    MIN_EXAMPLES,
    TWO_CLASSES,
    Auto,
)
from calibrant.calibrators.average import Average
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.features import GroupCalibration
from calibrant.calibrators.fit_inputs import folds, told
from calibrant.calibrators.logpartition import tabulate
from calibrant.calibrators.parts import ShrunkTemperature
from calibrant.calibrators.scaling import TemperatureScaling
from tests.support.calibrators import EVERY_METHOD
from tests.support.simulate import drawn

SIMPLE = ("none", "ts")
PLAIN = [name for name in KEEPING if not EVERY_METHOD[name].needs_features]
FEW = ["shrunk_ts" if name == "ts" else name for name in PLAIN]
"""Candidates that a fit without features has, and those of few examples."""


def parts_of(fitted):
    """The members that were chosen."""
    chosen = fitted.chosen_
    return chosen.parts if isinstance(chosen, Average) else [chosen]


def names_of(fitted):
    return [part.name for part in parts_of(fitted)]


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
def test_without_a_choice_a_temperature_near_1_is_fitted(rng, kind):
    n = MIN_EXAMPLES - 1 if kind == "few" else 3 * MIN_EXAMPLES
    logits, labels = drawn(rng, n, 4, 3.0)
    if kind != "few":
        labels = logits.argmax(-1) if kind == "right" else logits.argmin(-1)
    message = f"all {n} predictions are {kind}"
    if kind == "few":
        message = f"{n} examples are too few to choose a method, which takes {MIN_EXAMPLES}"
    fitted = Auto()
    with told(), pytest.warns(UserWarning, match=f"{message}: a temperature near 1 is all"):
        fitted.fit(logits, labels)
    assert isinstance(fitted.chosen_, ShrunkTemperature)
    assert fitted.candidates_ == []
    assert fitted.reasons_ == f"chose shrunk_ts: {message}"
    before, after = (cal.nll(each, labels) for each in (logits, fitted.transform(logits)))
    assert after < before - 0.01


@pytest.mark.parametrize("kind", ["calibrated", "overconfident", "separable"])
@pytest.mark.parametrize("n", [20, 150])
def test_few_examples_cost_little_and_gain_what_one_temperature_does(n, kind):
    """Above the better of none and ts, in the mean over worlds: the whole table is in a study."""
    above: dict[str, list[float]] = {"none": [], "ts": []}
    for seed in range(12 if n == 20 else 6):
        rng = np.random.default_rng(seed)
        temperature = {"calibrated": 1.0, "overconfident": 3.0, "separable": 0.05}[kind]
        logits, labels = drawn(rng, n, 4, temperature)
        fresh, answers = drawn(rng, 2000, 4, temperature)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = cal.nll(Auto().fit(logits, labels).transform(fresh), answers)
            for name in above:
                fitted = EVERY_METHOD[name]().fit(logits, labels)
                above[name].append(loss - cal.nll(fitted.transform(fresh), answers))
    most = 0.01 if n > 20 else 0.07 if kind == "separable" else 0.03
    assert max(np.mean(values) for values in above.values()) < most


def test_just_enough_is_enough(rng):
    logits, labels = drawn(rng, MIN_EXAMPLES, 4)
    fitted = Auto(candidates=SIMPLE).fit(logits, labels)
    assert [c.name for c in fitted.candidates_] == list(SIMPLE)


def test_ignored_labels_do_not_make_enough(rng):
    logits, labels = drawn(rng, MIN_EXAMPLES + 20, 4)
    labels[:30] = -100
    with pytest.warns(UserWarning, match=f"{MIN_EXAMPLES - 10} examples are too few to choose"):
        Auto().fit(logits, labels)


# What is chosen


def test_what_one_temperature_cannot_do_is_not_left_to_one(rng):
    fitted = Auto().fit(*margin_dependent(rng, 2000))
    assert not set(names_of(fitted)) & set(SIMPLE)
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
    """Weighted data with masked classes, and what each candidate claims of them, by hand."""
    rng = np.random.default_rng(5)
    logits, labels = margin_dependent(rng, 500)
    hidden = rng.random(logits.shape) < 0.1
    hidden[np.arange(500), labels] = False
    logits, weight = np.where(hidden, -np.inf, logits), rng.exponential(size=500)
    fitted = Auto(folds=4, seed=9).fit(logits, labels, sample_weight=weight)
    parts, claims = folds(np.zeros(500, dtype=int), 4, seed=9), {}
    for name in PLAIN:
        confidence, nll = np.full(500, np.nan), np.full(500, np.nan)
        for held in parts:
            seen = np.setdiff1d(np.arange(500), held)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                one = EVERY_METHOD[name]()
                one.fit(logits[seen], labels[seen], sample_weight=weight[seen])
            scores = log_softmax(one.transform(logits[held]), -1)
            confidence[held] = np.exp(scores.max(-1))
            nll[held] = -scores[np.arange(len(held)), labels[held]]
        claims[name] = confidence, nll
    return fitted, claims, parts, (logits, labels, weight)


def test_figures_are_those_of_fits_that_did_not_see_the_examples(judged):
    fitted, claims, parts, (logits, labels, weight) = judged
    share, right = weight / weight.sum(), logits.argmax(-1) == labels
    assert [c.name for c in fitted.candidates_] == PLAIN
    for c in fitted.candidates_:
        confidence, nll = claims[c.name]
        error = sum(soft_ece(confidence[h], right[h], share[h]) for h in parts)
        assert (c.nll, c.ece) == pytest.approx((share @ nll, error), abs=2e-4)
        gains = claims["none"][1] - nll
        assert c.gain == pytest.approx(share @ gains, abs=2e-4)
        noise = np.sqrt((share**2 * (gains - share @ gains) ** 2).sum())
        assert c.error == pytest.approx(noise, abs=2e-4)


def test_weights_follow_the_held_out_likelihood_and_the_number_of_parameters(judged):
    fitted, claims, _, (_, _, weight) = judged
    share = weight / weight.sum()
    sizes = {"none": 0, "ts": 1, "beta": 3, "blend": 10, "top_and_rest": 10}
    worth = 1 / (share**2).sum()  # of so many examples of equal weight
    logs = np.array([-worth * share @ claims[n][1] / 2 - sizes[n] / 5 for n in PLAIN])
    expected = np.exp(logs) / np.exp(logs).sum()
    expected = np.where(expected < 0.05, 0, expected)
    expected /= expected.sum()
    np.testing.assert_allclose([c.weight for c in fitted.candidates_], expected, atol=5e-3)
    assert 2 <= (expected > 0).sum() < len(PLAIN)  # so that all of this is seen


def test_members_are_fitted_on_all_and_averaged(judged):
    fitted, _, _, (logits, labels, weight) = judged
    expected = np.zeros(logits.shape)
    for c in fitted.candidates_:
        if c.weight:
            alone = EVERY_METHOD[c.name]().fit(logits, labels, sample_weight=weight)
            expected += c.weight * alone.predict_proba(logits)
    np.testing.assert_allclose(fitted.predict_proba(logits), expected, atol=1e-5)
    assert names_of(fitted) == [c.name for c in fitted.candidates_ if c.weight]


def test_reasons_name_the_chosen_and_the_figures_of_all(judged):
    fitted = judged[0]
    first, *lines = fitted.reasons_.splitlines()
    *shares, by = first.split(", ")
    assert by == "weighted by held-out likelihood"
    expected = [f"{100 * c.weight:.0f} % {c.name}" for c in fitted.candidates_ if c.weight > 0]
    assert sorted(shares) == sorted(expected)
    assert len(lines) == len(PLAIN)
    for line, c in zip(lines, fitted.candidates_, strict=True):
        assert line.split()[0] == c.name
        assert f"NLL {c.nll:.4f}, ECE {100 * c.ece:.2f} %" in line
        assert line.endswith(f"gain {c.gain:.4f} +- {c.error:.4f}") == (c.name != "none")


def test_a_part_that_two_candidates_have_is_fitted_once(rng, monkeypatch):
    logits, labels = margin_dependent(rng, 300)
    apart = Auto(candidates=("top_and_rest",), folds=2).fit(logits, labels)
    real, fits = cal.SMART.fit_records, []

    def counted(self, *arguments):
        fits.append(self)
        return real(self, *arguments)

    monkeypatch.setattr(cal.SMART, "fit_records", counted)
    both = Auto(candidates=("blend", "top_and_rest"), folds=2).fit(logits, labels)
    assert len(fits) == 3  # two folds, and all
    assert both.candidates_[1].nll == pytest.approx(apart.candidates_[0].nll, abs=1e-12)


def test_flat_rows_of_many_classes_are_judged_by_what_the_map_does():
    """Half of the rows are sure, half know nothing, as tokens of a language model."""
    rng = np.random.default_rng(2)
    logits = 0.3 * rng.normal(size=(3000, 1000))
    sure = rng.random(3000) < 0.5
    logits[sure, 0] += 8
    labels = np.where(sure & (rng.random(3000) < 0.9), 0, rng.integers(1, 1000, 3000))
    fresh, answers = logits[2000:], labels[2000:]
    records = tabulate(examples(fresh, answers))
    for name in ("none", "ts", "beta", "blend"):
        fitted: Any = EVERY_METHOD[name]().fit(logits[:2000], labels[:2000])
        actual = cal.nll(fitted(torch.from_numpy(fresh)).numpy(), answers)
        assert fitted.predict_records(records).nll.mean() == pytest.approx(actual, abs=5e-3)


def test_records_do_not_suffice_for_every_choice(rng):
    logits, labels = drawn(rng, 400, 3)
    fitted = Auto(candidates=("none", "vector"), keep_argmax=False)
    fitted.fit(logits + np.array([0.0, 3.0, 0.0]), labels)
    with pytest.raises(TypeError, match="vector need logits, not records"):
        fitted.predict_records(tabulate(examples(logits, labels)))


def test_the_seed_is_that_of_the_folds(rng):
    logits, labels = drawn(rng, 300, 4, 1.3)
    one, same, other = (
        Auto(candidates=SIMPLE, seed=s).fit(logits, labels).candidates_ for s in (1, 1, 2)
    )
    assert one == same
    assert one[1].nll != other[1].nll
    assert one[0].nll == pytest.approx(other[0].nll, rel=1e-12)  # nothing is fitted


@pytest.mark.parametrize(("n", "count"), [(FEWER_FOLDS_FROM - 1, 5), (FEWER_FOLDS_FROM, 3)])
def test_many_examples_need_fewer_folds(rng, monkeypatch, n, count):
    calls = spied(monkeypatch)
    Auto(candidates=SIMPLE).fit(*drawn(rng, n, 3, 2.0))
    assert [len(parts) for _, _, parts in calls] == [count]


# Features


def by_feature(rng, n):
    """The sign of a feature says whether the logits are honest or three times too large."""
    features = rng.normal(size=(n, 4))
    honest = 2 * rng.normal(size=(n, 5))
    labels = (honest + rng.gumbel(size=honest.shape)).argmax(-1)
    logits = np.where(features[:, :1] > 0, 3.0, 1.0) * honest
    return logits, labels, features


def test_features_are_considered_where_they_are_given(rng):
    logits, labels, features = by_feature(rng, 700)
    plain = Auto(candidates=("none", "ts", "beta", "gc", "procal"), folds=2).fit(logits, labels)
    assert [c.name for c in plain.candidates_] == ["none", "ts", "beta"]
    assert not plain.needs_features
    fitted = Auto(candidates=("none", "ts", "gc"), folds=2).fit(logits, labels, features=features)
    assert names_of(fitted) == ["gc"]
    assert fitted.needs_features
    fresh = by_feature(rng, 3000)
    better = cal.nll(probs=fitted.predict_proba(fresh[0], fresh[2]), labels=fresh[1])
    worse = cal.nll(probs=plain.predict_proba(fresh[0]), labels=fresh[1])
    assert better < worse - 0.05
    with pytest.raises(ValueError, match="needs features"):
        fitted.predict_proba(fresh[0])
    again = fitted.fit(logits, labels)  # forgets that it had features
    assert not again.needs_features


def test_figures_with_features_are_those_of_fits_that_did_not_see_the_sample(rng):
    logits, labels, features = by_feature(rng, 400)
    labels[:30] = -100
    fitted = Auto(candidates=("none", "gc"), folds=2, seed=4)
    fitted.fit(logits, labels, features=features)
    kept = np.arange(30, 400)
    total = 0.0
    for held in folds(np.zeros(370, dtype=int), 2, seed=4):
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


@pytest.mark.parametrize(("errors", "expected"), [(0.45, {"none": 1.0}), (0.55, {"ts": 1.0})])
def test_what_gains_less_than_half_a_standard_error_is_left_undone(rng, errors, expected):
    records = tabulate(examples(*drawn(rng, 400, 4)))
    judge = auto._Judge(auto._Data(records), [np.arange(200), np.arange(200, 400)], True)
    gains = rng.normal(size=400)
    gains = 2 * (gains - gains.mean()) / gains.std()
    gains += errors * gains.std() / np.sqrt(400)
    for name, nll in {"none": np.zeros(400), "ts": -gains}.items():
        judge._known[name] = auto._Predictions(np.ones(400), nll, records.correct)
    assert judge.weights(SIMPLE) == expected
    assert judge.weights(["none"]) == {"none": 1.0}


def test_without_none_something_is_always_done(rng):
    fitted = Auto(candidates=("ts", "beta")).fit(*drawn(rng, 100, 4))
    assert set(names_of(fitted)) <= {"ts", "beta"}


def test_one_candidate_is_chosen(rng):
    fitted = Auto(candidates=("ts",)).fit(*drawn(rng, 100, 4))
    assert names_of(fitted) == ["ts"]
    assert fitted.reasons_.startswith("chose ts: by the held-out likelihood")
    assert [c.weight for c in fitted.candidates_] == [1.0]


def test_methods_with_too_few_examples_are_no_candidates(rng):
    """Five for each parameter that counts: ten of blend, one for each class of the matrix."""
    logits, labels = drawn(rng, 99, 20)
    assert [c.name for c in Auto(folds=2).fit(logits, labels).candidates_] == FEW[:-1]
    assert [c.name for c in Auto(folds=2).fit(*drawn(rng, 100, 20)).candidates_] == FEW
    with pytest.raises(ValueError, match=r"none of the candidates vector can be .*add none or ts"):
        Auto(candidates=("vector",)).fit(logits, labels)


def test_any_method_of_the_registry_can_be_a_candidate(rng):
    fitted = Auto(candidates=("temperature", "vector", "cts")).fit(*drawn(rng, 400, 4, 2.0))
    assert [c.name for c in fitted.candidates_] == ["ts", "vector", "cts"]


def test_candidates_keep_the_prediction_unless_it_may_change():
    assert all(EVERY_METHOD[name]().keeps_argmax for name in KEEPING)
    assert not any(EVERY_METHOD[name]().keeps_argmax for name in set(CHANGING) - set(KEEPING))
    assert KEEPING[0] == TWO_CLASSES[0] == "none"


def test_what_cannot_be_chosen_is_refused():
    with pytest.raises(ValueError, match="unknown method 'plat': did you mean sigmoid"):
        Auto(candidates=("none", "plat"))
    for wrong in ((), ("auto",)):
        with pytest.raises(ValueError, match="candidates must be methods other than auto, got"):
            Auto(candidates=wrong)


# Predictions that may change


def preferring(rng, n, classes=4):
    """A model that prefers the first of the options, whatever the question."""
    truth = 1.5 * rng.normal(size=(n, classes))
    return truth + 2 * np.eye(classes)[0], (truth + rng.gumbel(size=truth.shape)).argmax(-1)


def test_predictions_change_where_the_accuracy_clearly_rises(rng):
    logits, labels = preferring(rng, 500)
    fitted, free = (Auto(keep_argmax=k, folds=2).fit(logits, labels) for k in ("auto", False))
    assert not fitted.keeps_argmax
    assert names_of(fitted) == names_of(free)
    gain = fitted.reasons_.splitlines()[-1]
    right = 100 * (logits.argmax(-1) == labels).mean()
    assert gain.startswith(f"predictions change, as by sms: accuracy {right:.2f} -> ")
    assert gain.endswith("; keep_argmax=True forbids it")
    assert fitted.findings[1:] == [gain]
    assert fitted.left_out() == []
    with told():
        kept = Auto(keep_argmax=True, folds=2).fit(logits, labels)
    assert kept.keeps_argmax


def test_the_calibration_error_is_that_of_the_class_that_is_predicted_then(rng):
    logits, labels = preferring(rng, 400)
    fitted = Auto(candidates=("none", "sms"), keep_argmax=False, folds=2).fit(logits, labels)
    error = 0.0
    for held in folds(np.zeros(400, dtype=int), 2):
        seen = np.setdiff1d(np.arange(400), held)
        probs = cal.calibrators.StructuredMatrixScaling().fit(logits[seen], labels[seen])
        claimed = probs.predict_proba(logits[held])
        right = claimed.argmax(-1) == labels[held]
        error += soft_ece(claimed.max(-1), right, np.full(len(held), 1 / 400))
    assert fitted.candidates_[1].ece == pytest.approx(error, abs=2e-4)


def test_predictions_stay_where_the_accuracy_does_not_clearly_rise(rng, monkeypatch):
    """By two standard errors of the difference, pair by pair; a little less is not enough."""
    logits, labels = drawn(rng, 400, 4, 2.0)
    right = logits.argmax(-1) == labels
    real = auto._Judge._predicted
    for extra, kept in ((3, True), (6, False)):  # of 3 and 6 pairs that differ, all for it
        better = right.copy()
        better[np.flatnonzero(~right)[:extra]] = True

        def predicted(self, name, better=better):
            found = real(self, name)
            return found._replace(correct=better) if name == "sms" else found

        monkeypatch.setattr(auto._Judge, "_predicted", predicted)
        fitted = Auto(folds=2).fit(logits, labels)
        judged = [c.name for c in fitted.candidates_]
        assert ("top_and_rest" in judged, "sms_blend" in judged) == (kept, not kept)
        # nothing is left to allow: the likelihood is against sms_blend, or the gain is not clear
        assert fitted.keeps_argmax
        assert fitted.left_out() == []
        with told():  # of what is fixed, more right answers at a worse likelihood are no gain
            asked = Auto(candidates=("none", "ts"), folds=2).fit(logits, labels)
        assert asked.left_out() == []


def mixed_up(rng, n, classes=4):
    """A model that takes each class for the next one, much of the time."""
    truth = 2 * rng.normal(size=(n, classes))
    mixed = truth + 0.8 * np.roll(truth, 1, axis=-1)
    return mixed, (truth + rng.gumbel(size=truth.shape)).argmax(-1)


@pytest.mark.parametrize(("n", "classes"), [(400, 8), (800, 4)])
def test_penalties_are_weakened_as_long_as_that_gains(rng, n, classes):
    logits, labels = mixed_up(rng, n, classes)
    parts = folds(np.zeros(n, dtype=int), 4, seed=0)
    best, expected = np.full(n, np.inf), 0.0
    for penalty in auto.PENALTIES:
        loss = np.empty(n)
        for held in parts:
            seen = np.setdiff1d(np.arange(n), held)
            method = StructuredMatrixScaling(penalty=penalty).fit(logits[seen], labels[seen])
            claimed = log_softmax(method.transform(logits[held]), -1)
            loss[held] = -claimed[np.arange(len(held)), labels[held]]
        gain = best - loss
        doubt = 0 if penalty >= auto.WEAK else 2 * gain.std() / np.sqrt(n)
        if not gain.mean() > doubt:
            break
        best, expected = loss, penalty
    assert expected < 1  # as the data were made
    fitted = Auto(keep_argmax=False, folds=4).fit(logits, labels)
    (part,) = (p for p in parts_of(fitted) if p.name == "sms_blend")
    assert part.penalty == part.matrix.penalty == expected
    kept = Auto(keep_argmax=True, folds=4).fit(logits, labels)
    assert {p.matrix.penalty for p in parts_of(kept) if p.name == "top_and_rest"} == {1}


def test_weaker_penalties_gain_where_classes_are_mixed_up(rng, monkeypatch):
    (logits, labels), (fresh, answers) = (mixed_up(rng, n, 8) for n in (800, 10_000))
    chosen = cal.nll(Auto(folds=2).fit(logits, labels).transform(fresh), answers)
    monkeypatch.setattr(auto, "PENALTIES", (1.0,))
    published = cal.nll(Auto(folds=2).fit(logits, labels).transform(fresh), answers)
    assert chosen < published - 0.05


def test_a_method_that_is_named_has_its_published_penalties(rng):
    (member,) = parts_of(Auto(candidates=["sms"], keep_argmax=False).fit(*mixed_up(rng, 800)))
    assert member.penalty == 1


def test_what_other_predictions_would_gain_is_told(rng):
    logits, labels = preferring(rng, 500)
    with pytest.warns(UserWarning, match="^Auto keeps predictions, so that after") as caught:
        fitted = Auto(candidates=("none", "ts", "beta"), folds=2).fit(logits, labels)
    assert fitted.keeps_argmax
    gain = fitted.reasons_.splitlines()[-1]
    assert [str(one.message).endswith(f"; {gain}") for one in caught] == [True]
    assert gain.startswith("sms, which may change the predicted class, would gain: accuracy")
    assert gain.endswith("keep_argmax=False allows it")
    before, after = (float(gain.split("accuracy ")[1].split()[i]) for i in (0, 2))
    fresh, answers = preferring(rng, 20_000)
    free = Auto(keep_argmax=False, folds=2).fit(logits, labels)
    assert before == pytest.approx(100 * (logits.argmax(-1) == labels).mean(), abs=0.01)
    gained = 100 * (free.transform(fresh).argmax(-1) == answers).mean()
    assert after == pytest.approx(gained, abs=3)
    assert gained > 100 * (fresh.argmax(-1) == answers).mean() + 5
    assert "sms_blend" in names_of(free)
    assert "would gain" not in free.reasons_


def test_nothing_is_told_where_nothing_would_be_gained_or_the_answer_is_known(rng):
    assert "would gain" not in Auto(folds=2).fit(*drawn(rng, 500, 4, 2.0)).reasons_
    with told():
        known = Auto(keep_argmax=True, folds=2).fit(*preferring(rng, 500))
    assert "would gain" not in known.reasons_


# Folds and groups


def test_groups_stay_together(rng, monkeypatch):
    calls = spied(monkeypatch)
    logits, labels = drawn(rng, 300, 4, 1.5)
    labels[::7] = -100
    groups = rng.integers(0, 30, 300)
    Auto(candidates=SIMPLE).fit(logits, labels, groups=groups)
    ((used, members, parts),) = calls
    kept = labels != -100
    assert len(used) == kept.sum()
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


def test_one_group_cannot_be_parted_and_it_says_so(rng):
    logits, labels = drawn(rng, 300, 4)
    with pytest.raises(ValueError, match="groups must have two values or more"):
        Auto(candidates=SIMPLE).fit(logits, labels, groups=np.zeros(300))


def test_a_choice_is_made_on_some_and_fitted_on_all(rng, monkeypatch):
    monkeypatch.setattr(auto, "MAX_EXAMPLES", 150)
    calls = spied(monkeypatch)
    logits, labels = drawn(rng, 1000, 4, 2.0)
    fitted = Auto(candidates=SIMPLE).fit(logits, labels, groups=np.arange(1000))
    ((used, members, _),) = calls
    assert len(used) == 150
    assert not np.array_equal(members, np.arange(150))
    drawn_rows = logits[members], labels[members]  # rows and groups were drawn together
    assert fitted.candidates_[0].nll == pytest.approx(cal.nll(*drawn_rows), rel=1e-6)
    alone = TemperatureScaling().fit(logits, labels)
    assert names_of(fitted) == ["ts"]
    assert isinstance(fitted.chosen_, Calibrator)
    np.testing.assert_allclose(fitted.predict_proba(logits), alone.predict_proba(logits), rtol=1e-6)
    Auto(candidates=SIMPLE, seed=1).fit(logits, labels, groups=np.arange(1000))
    assert not np.array_equal(calls[1][1], members)  # the seed draws others


def test_all_are_used_where_there_are_not_too_many(rng, monkeypatch):
    monkeypatch.setattr(auto, "MAX_EXAMPLES", 150)
    calls = spied(monkeypatch)
    Auto(candidates=SIMPLE).fit(*drawn(rng, 150, 4))
    assert sorted(np.concatenate(calls[0][2])) == list(range(150))


def test_rows_of_many_classes_are_fewer(rng, monkeypatch):
    monkeypatch.setattr(auto, "MAX_LOGITS", 2000)
    calls = spied(monkeypatch)
    Auto(candidates=SIMPLE).fit(*drawn(rng, 300, 20))
    assert len(calls[0][0]) == 100


# The outcome


def test_a_refit_replaces_the_choice(rng):
    fitted = Auto(candidates=SIMPLE).fit(*drawn(rng, 400, 4, 4.0))
    assert names_of(fitted) == ["ts"]
    before = fitted.reasons_, fitted.candidates_
    assert "chosen_.temperature_" in fitted.state_dict()
    fitted.fit(*drawn(rng, 400, 4))
    assert names_of(fitted) == ["none"]
    assert fitted.reasons_ != before[0]
    assert fitted.candidates_ != before[1]
    assert "chosen_.temperature_" not in fitted.state_dict()
    with pytest.warns(UserWarning, match="too few to choose"):
        fitted.fit(*drawn(rng, 10, 4))
    assert fitted.candidates_ == []


def test_a_refit_does_not_warn_of_the_choice_before(rng):
    fitted = Auto(candidates=("none", "ts", "vector")).fit(*preferring(rng, 1000))
    assert names_of(fitted) == ["vector"]
    assert "would gain" not in fitted.reasons_  # predictions may change already
    fitted.fit(*drawn(rng, 50, 20))  # a warning would be an error
    assert set(names_of(fitted)) <= set(SIMPLE)


def test_the_chosen_is_a_part_of_the_module(rng):
    fitted = Auto(candidates=SIMPLE).fit(*drawn(rng, 400, 4, 4.0))
    assert dict(fitted.named_children()) == {"chosen_": fitted.chosen_}
    assert fitted.chosen_ is not None
    assert fitted.solution_ is fitted.chosen_.solution_ is not None
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


def test_a_fresh_module_takes_an_average(judged):
    fitted, _, _, (logits, _, _) = judged
    fresh = Auto()
    fresh.load_state_dict(fitted.state_dict())
    assert names_of(fresh) == names_of(fitted)
    assert fresh.describe() == fitted.describe()
    assert fresh.learned() == fitted.learned()
    np.testing.assert_array_equal(fresh.predict_proba(logits), fitted.predict_proba(logits))


@pytest.mark.filterwarnings("ignore:sms, which may change")
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
    pairs = np.stack([np.zeros(len(odds)), odds], 1)
    assert not fitted.keeps_argmax
    assert set(names_of(fitted)) <= set(TWO_CLASSES)
    assert Auto().fit(pairs[:n], labels[:n]).predict_proba(pairs).shape == pairs.shape


@pytest.mark.filterwarnings("ignore:.*keeps predictions")
def test_the_predicted_class_of_two_is_kept_if_asked_for(rng):
    odds, labels = rarer(rng, 2000)
    kept = Auto(keep_argmax=True).fit(odds, labels)
    assert kept.keeps_argmax
    assert set(names_of(kept)) <= set(KEEPING)
    np.testing.assert_array_equal(kept.predict_proba(odds) > 0.5, odds > 0)
    odds, labels = rarer(rng, 20_000)
    best = np.where(odds > 0, np.maximum(odds - 2, 0), odds - 2)  # of all that keep it
    assert cal.nll(kept.transform(odds), labels) < cal.nll(best, labels) + 0.02


def test_calibrated_log_odds_are_mostly_left_alone(rng):
    chosen = []
    for _ in range(20):
        odds = 2 * rng.normal(size=500)
        labels = (rng.random(500) < expit(odds)).astype(int)
        chosen.append(names_of(Auto().fit(odds, labels)))
    assert chosen.count(["none"]) >= 12


def test_the_calibration_of_class_1_decides(rng):
    """The top label is calibrated, and P(y = 1) is not: right as often as claimed on average."""
    odds, labels = rarer(rng, 4000)
    fitted = Auto().fit(odds, labels)
    figures = {c.name: c for c in fitted.candidates_}
    probs = expit(odds)
    assert figures["none"].ece == pytest.approx(np.abs(probs.mean() - labels.mean()), rel=0.1)
