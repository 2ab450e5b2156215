"""Estimated performance: known truths, the guarantee, labels, files and refused input."""

import math

import numpy as np
import pytest
from scipy.special import expit, softmax
from scipy.stats import binom, rankdata

import calibrant as cal
from calibrant.data import save_predictions
from calibrant.estimate import PerformanceEstimator, choose_labels
from calibrant.show.estimate import _estimates_table
from tests.support.simulate import drawn


def labelled(rng, n, classes=4, scale=2.0):
    logits = scale * rng.normal(size=(n, classes))
    return logits, (logits + rng.gumbel(size=logits.shape)).argmax(1)


def as_data(logits, labels, **more):
    return {"logits": logits, "labels": labels, **more}


def test_intervals_hold_the_measured_metrics_at_their_level():
    """90 % intervals of 80 batches, each beside a reference of its own."""
    held = {name: 0 for name in ("accuracy", "accepted_error", "brier", "nll")}
    for seed in range(80):
        rng = np.random.default_rng(seed)
        (logits, labels), reference = labelled(rng, 250), labelled(rng, 400)
        result = cal.estimate_performance(
            logits, as_data(*reference), threshold=0.8, drift_level=0, seed=seed
        )
        probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        wrong, sure = logits.argmax(1) != labels, probs.max(1) >= 0.8
        own = probs[np.arange(250), labels]
        measured = {
            "accuracy": 1 - wrong.mean(),
            "accepted_error": wrong[sure].mean(),
            "brier": (1 - 2 * own + (probs**2).sum(1)).mean(),
            "nll": -np.log(own).mean(),
        }
        assert result["coverage"].value == pytest.approx(sure.mean())
        for name, value in measured.items():
            held[name] += result[name].low <= value <= result[name].high
    for name, count in held.items():
        assert count >= 64, name  # of 80 at 90 %; fewer with a probability of 0.2 %


def test_a_reference_corrects_what_is_off(rng):
    """Confidences too high at the reference are corrected, not averaged."""
    logits, labels = labelled(rng, 20_000, scale=1.6)
    sharp = 1.15 * logits
    result = cal.estimate_performance(sharp[:10_000], as_data(sharp[10_000:], labels[10_000:]))
    truth = (logits[:10_000].argmax(1) == labels[:10_000]).mean()
    trusted = cal.estimate_performance(sharp[:10_000])
    assert trusted["accuracy"].value > result["accuracy"].high
    assert result["accuracy"].low < truth < result["accuracy"].high


def test_shifts_widen_and_withdraw(rng):
    reference = as_data(*labelled(rng, 3000))
    states = {}
    for name, scale in (("same", 2.0), ("lower", 1.8), ("low", 1.0)):
        states[name] = cal.estimate_performance(labelled(rng, 3000, scale=scale)[0], reference)
    assert [states[name].status for name in states] == ["holds", "widened", "withdrawn"]
    wide, same = states["lower"]["accuracy"], states["same"]["accuracy"]
    assert wide.high - wide.low > same.high - same.low + states["lower"].widening
    assert math.isnan(states["low"]["accuracy"].low)
    assert "confidence" in states["low"].reasons[0]
    assert "withdrawn" in repr(states["low"])


def test_a_label_shift_is_recognised(rng):
    """The estimate follows the class frequencies, where the average of confidence does not."""
    logits, labels = labelled(rng, 30_000, classes=2, scale=1.5)
    logits = logits + np.array([0.0, 1.0]) * (labels == 1)[:, None]  # one class is easier
    fitted = cal.CALIBRATORS["vector"]().fit(logits[:10_000], labels[:10_000])
    rare = np.arange(30_000) >= 20_000
    rare &= (labels == 0) | (rng.random(30_000) < 0.15)
    reference = as_data(logits[10_000:20_000], labels[10_000:20_000])
    result = cal.estimate_performance(logits[rare], reference, calibrator=fitted)
    assert result.new_prior == pytest.approx(np.bincount(labels[rare]) / rare.sum(), abs=0.03)
    predicted = fitted.predict_proba(logits[rare]).argmax(1)
    truth = (predicted == labels[rare]).mean()
    assert result.status == "widened"
    assert result["accuracy"].low < truth < result["accuracy"].high
    assert result["accuracy"].value == pytest.approx(truth, abs=0.02)


def test_labels_tighten_the_interval(rng):
    logits, labels = labelled(rng, 3000)
    reference = as_data(*labelled(rng, 200))
    few = np.where(np.arange(3000) % 5 == 0, labels, -100)
    with_labels = cal.estimate_performance(logits, reference, labels=few, drift_level=0)["accuracy"]
    without = cal.estimate_performance(logits, reference, drift_level=0)["accuracy"]
    assert with_labels.high - with_labels.low < 0.7 * (without.high - without.low)
    truth = (logits.argmax(1) == labels).mean()
    assert with_labels.low < truth < with_labels.high


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_labels_decide_where_the_reference_is_wrong(noise):
    """A share of the labels of each batch is random, which no view of predictions shows."""
    runs, reference_held, contradicted = 60, 0, 0
    held = {name: 0 for name in ("accuracy", "accepted_error", "brier", "nll")}
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        logits, labels = labelled(rng, 1500, classes=5, scale=2.5)
        broken = np.where(rng.random(1500) < noise, rng.integers(0, 5, 1500), labels)
        estimator = PerformanceEstimator(
            as_data(*labelled(rng, 1000, classes=5, scale=2.5)), threshold=0.8, drift_level=0
        )
        sample = choose_labels(logits, 300, seed=seed)
        known, inclusion = np.full(1500, -100), np.ones(1500)
        known[sample.row], inclusion[sample.row] = broken[sample.row], sample.inclusion
        result = estimator.estimate(logits, labels=known, inclusion=inclusion)
        measured = cal.evaluate(logits, broken, metrics=("accuracy", "brier", "nll"), level=None)
        truth = {name: estimate.value for name, estimate in measured.items()}
        sure = softmax(logits, 1).max(1) >= 0.8
        truth["accepted_error"] = (logits.argmax(1) != broken)[sure].mean()
        for name in held:
            held[name] += result[name].low <= truth[name] <= result[name].high
        low, high = estimator.estimate(logits)["accuracy"][1:]
        reference_held += low <= truth["accuracy"] <= high
        contradicted += result.status == "contradicted"
        assert result.status in ("labels", "contradicted")
    for name, count in held.items():
        assert count >= binom.ppf(0.001, runs, 0.9), name
    assert reference_held < (50 if noise < 0.1 else 10)
    assert contradicted > (-1 if noise < 0.1 else runs / 3)


def test_few_labels_of_two_classes_suffice():
    """Right answers are events above one half and others below: 30 labels tell both shares."""
    runs = 80
    held: dict[str, list[bool]] = {"accuracy": [], "f1": [], "auroc": []}
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        logits = rng.normal(-1, 2, 1000)
        labels = (rng.random(1000) < expit(logits)).astype(int)
        known = np.full(1000, -100)
        known[:30] = labels[:30]
        result = cal.estimate_performance(logits, labels=known, seed=seed)
        predicted, events = logits > 0, labels == 1
        hits, both = (predicted & events).sum(), predicted.sum() + events.sum()
        below = rankdata(logits)[events].sum() - events.sum() * (events.sum() + 1) / 2
        truth = {
            "accuracy": (predicted == events).mean(),
            "f1": 2 * hits / both,
            "auroc": below / (events.sum() * (~events).sum()),
        }
        for name, value in truth.items():
            held[name].append(result[name].low - 1e-9 <= value <= result[name].high + 1e-9)
    for name, inside in held.items():
        assert sum(inside) >= binom.ppf(0.001, runs, 0.9), name


def test_a_contradiction_is_named_with_its_remedy(rng):
    logits, labels = labelled(rng, 4000)
    broken = np.where(rng.random(4000) < 0.3, rng.integers(0, 4, 4000), labels)
    reference = as_data(*labelled(rng, 2000))
    assert cal.estimate_performance(logits, reference).status == "holds"
    known = np.where(np.arange(4000) % 8 == 0, broken, -100)
    result = cal.estimate_performance(logits, reference, labels=known)
    assert result.status == "contradicted"
    shown = 100 * (logits.argmax(1) == known)[known >= 0].mean()
    assert f"the labels show an accuracy of {shown:.1f} % where the reference expects" in str(
        result
    )
    assert "Fit a calibrator on recent labels" in result.verdict()
    without = cal.estimate_performance(logits, labels=known)
    assert "where the confidences claim" in without.verdict()
    assert without.metrics == result.metrics


def test_few_labels_withdraw_but_do_not_estimate(rng):
    logits, labels = labelled(rng, 2000)
    reference = as_data(*labelled(rng, 1000))
    few = np.where(np.arange(2000) < 20, labels, -100)
    agreed = cal.estimate_performance(logits, reference, labels=few)
    assert agreed.status == "holds"
    assert "20 labels are too few to estimate from: 30 are needed" in agreed.remarks()
    wrong = np.where(few >= 0, (logits.argmax(1) + 1) % 4, -100)
    result = cal.estimate_performance(logits, reference, labels=wrong)
    assert result.status == "withdrawn"
    assert math.isnan(result["accuracy"].low)
    assert "choose_labels" in result.verdict()


def test_labels_alone_are_not_widened_by_a_shift(rng):
    reference = as_data(*labelled(rng, 3000))
    logits, labels = labelled(rng, 3000, scale=1.0)
    known = np.where(np.arange(3000) % 10 == 0, labels, -100)
    result = cal.estimate_performance(logits, reference, labels=known)
    assert (result.status, result.widening) == ("labels", 0)
    accuracy = result["accuracy"]
    assert accuracy.low < (logits.argmax(1) == labels).mean() < accuracy.high
    assert accuracy.high - accuracy.low < 0.12


def test_selected_labels_are_weighted_by_their_inclusion(rng):
    """Wrong answers at one confidence are labelled nine times as often."""
    n = 20_000
    right = rng.random(n) < 0.8
    chance = np.where(right, 0.05, 0.45)
    labels = np.where(rng.random(n) < chance, right.astype(int), -100)
    probs = np.full(n, 0.8)
    result = cal.estimate_performance(probs=probs, labels=labels, inclusion=chance)
    assert result["accuracy"].value == pytest.approx(right.mean(), abs=0.02)
    biased = cal.estimate_performance(probs=probs, labels=labels)
    assert biased["accuracy"].value < 0.5


def test_an_alarm_of_a_monitor_withdraws(rng):
    logits, labels = labelled(rng, 3000)
    watch = cal.Monitor().update(3 * logits, labels)
    result = cal.estimate_performance(logits, monitor=watch)
    assert result.status == "withdrawn"
    assert "alarm" in result.reasons[0]
    known = np.where(np.arange(3000) % 10 == 0, labels, -100)
    result = cal.estimate_performance(logits, monitor=watch, labels=known)
    assert result.status == "contradicted"
    assert not math.isnan(result["accuracy"].low)


def test_nothing_is_promised_without_labels(rng):
    """Confidences that are far too high, and nothing that could show it."""
    logits, labels = labelled(rng, 2000)
    result = cal.estimate_performance(3 * logits)
    assert result["accuracy"].value > (logits.argmax(1) == labels).mean() + 0.1
    assert all(math.isnan(end) for estimate in result.values() for end in estimate[1:])
    assert result.status == "unchecked"
    for text in (str(result), repr(result), result._repr_html_()):
        assert "the values are right only if the confidences are" in text
        assert "--reference" in text
        assert "interval</th>" not in text
    assert _estimates_table(result).headings == ("metric", "if confidences are right")
    assert result.to_dict()["metrics"]["accuracy"]["low"] is None


def test_a_shift_that_cannot_be_seen_is_named(rng):
    """The larger batch and reference, the smaller what they could miss."""
    unseen = []
    for n in (200, 5000):
        logits, reference = labelled(rng, n)[0], as_data(*labelled(rng, n))
        result = cal.estimate_performance(logits, reference)
        unseen.append(result.unseen)
        assert f"changes accuracy by {100 * result.unseen:.1f} points" in str(result)
    assert unseen[0] > 3 * unseen[1]
    assert cal.estimate_performance(logits).to_dict()["unseen"] is None
    assert math.isnan(cal.estimate_performance(logits, reference, drift_level=0).unseen)


def test_an_estimate_is_a_mapping(rng):
    result = cal.estimate_performance(rng.normal(size=(100, 3)))
    assert "nll" in result
    assert "ece" not in result
    assert dict(result) == result.metrics
    assert len(result) == len(result.metrics)


def test_chunks_shards_and_arrays_agree(rng, tmp_path, monkeypatch):
    logits, _ = labelled(rng, 600)
    features, weight = rng.normal(size=(600, 3)), rng.uniform(0.5, 2, 600)
    for i in range(3):
        part = slice(200 * i, 200 * i + 200)
        arrays = {"logits": logits[part], "features": features[part], "w": weight[part]}
        save_predictions(tmp_path / f"{i}.npz", arrays)
    reference = as_data(*labelled(rng, 900), features=rng.normal(size=(900, 3)))
    whole = cal.estimate_performance(
        logits, reference, features=features, sample_weight=weight, threshold=0.7
    )
    shards = cal.estimate_performance(tmp_path, reference, sample_weight="w", threshold=0.7)
    assert [s.view for s in whole.shifts][-1] == "features"
    for name, estimate in whole.metrics.items():
        assert shards[name] == pytest.approx(estimate), name
    for first, second in zip(whole.shifts, shards.shifts, strict=True):
        assert first[1:] == pytest.approx(second[1:])


def test_weights_count_as_repeated_examples(rng):
    logits = rng.normal(size=(500, 2))
    weight = rng.integers(1, 4, 500)
    weighted = cal.estimate_performance(logits, sample_weight=weight.astype(float))
    repeated = cal.estimate_performance(np.repeat(logits, weight, axis=0))
    for name in ("accuracy", "auroc", "f1", "brier", "nll"):
        assert weighted[name].value == pytest.approx(repeated[name].value), name


def test_two_classes_in_any_form(rng):
    log_odds = rng.normal(0, 2, 400)
    pairs = np.stack([np.zeros(400), log_odds], 1)
    one, two = cal.estimate_performance(log_odds), cal.estimate_performance(pairs)
    probs = cal.estimate_performance(probs=1 / (1 + np.exp(-log_odds)))
    for name, estimate in one.items():
        assert two[name].value == pytest.approx(estimate.value), name
        assert probs[name].value == pytest.approx(estimate.value), name
    counts = sum(one[name].value for name in one.metrics if name.endswith("tives"))
    assert counts == pytest.approx(400)


def test_results_show_themselves(rng):
    result = cal.estimate_performance(rng.normal(size=(200, 2)), threshold=0.9)
    text = str(result)
    for words in ("accuracy", "F1", "error of accepted", "Assumed:", "No interval is given"):
        assert words in text
    assert "Assumed" in repr(result)
    assert "<table" in result._repr_html_()
    assert len(result.to_frame()) == len(result.metrics)
    assert result.to_latex().startswith(r"\begin{tabular}")
    assert result.to_dict()["status"] == "unchecked"
    assert result.plot().get_xlabel().startswith("estimate")


def test_bad_input_is_refused_with_a_remedy(rng):
    logits, labels = drawn(rng, 4000, 4)
    with pytest.raises(ValueError, match="calibrant fit"):
        PerformanceEstimator(as_data(5 * logits, labels))
    with pytest.raises(ValueError, match="calibrant evaluate"):
        cal.estimate_performance(as_data(logits, labels))
    assert cal.estimate_performance(as_data(logits, labels), labels=False).labels == 0
    with pytest.raises(ValueError, match="sum to one"):
        cal.estimate_performance(probs=np.full((5, 3), 0.5))
    with pytest.raises(ValueError, match="NaN"):
        cal.estimate_performance(np.array([[0.0, np.nan]]))
    with pytest.raises(ValueError, match="reference has 4 classes"):
        cal.estimate_performance(logits[:, :3], as_data(logits, labels))
    with pytest.raises(ValueError, match="every label is -100"):
        PerformanceEstimator(as_data(logits, np.full(4000, -100)))
    known = np.where(np.arange(4000) < 50, labels, -100)
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        cal.estimate_performance(logits, labels=known, inclusion=np.zeros(4000))
    with pytest.raises(ValueError, match="threshold must be"):
        PerformanceEstimator(threshold=1.5)
    with pytest.raises(ValueError, match="drift_level must be"):
        PerformanceEstimator(drift_level=-0.1)
    with pytest.raises(ValueError, match="false_alarms must be"):
        PerformanceEstimator(false_alarms=5)
    with pytest.raises(TypeError, match="either logits or probs"):
        cal.estimate_performance()
