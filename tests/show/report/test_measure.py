"""The figures of a report equal those of evaluate, and of slow loops over the examples."""

import hashlib

import numpy as np
import pytest
from scipy.stats import binomtest

import calibrant as cal
from calibrant.show.report import report
from calibrant.show.report.measure import MAX_ERRORS
from tests.show.report.conftest import drawn


def softmax(logits):
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def measured(data, **options):
    (subject,) = report(data, methods=[], **options).subjects
    return subject


def test_the_evaluation_is_that_of_evaluate():
    data = {**drawn(800), "w": np.random.default_rng(1).random(800) + 0.5}
    data["labels"][:50] = -100
    subject = measured(data, sample_weight="w")
    expected = cal.evaluate(data, sample_weight="w").to_dict()
    assert subject.evaluation.to_dict() == expected
    assert subject.ignored == 50
    assert subject.weighted


@pytest.mark.parametrize("key", ["logits", "probs"])
def test_classes_are_those_of_a_loop(key):
    data = drawn(400)
    probs, labels = softmax(data["logits"]), data["labels"]
    subject = measured(
        {key: data["logits"] if key == "logits" else probs, "labels": labels}, level=None
    )
    predicted = probs.argmax(-1)
    for k, figures in enumerate(subject.classes):
        there = predicted == k
        assert figures.part.n == there.sum()
        assert figures.part.confidence == pytest.approx(probs[there, k].mean())
        assert figures.part.accuracy == pytest.approx((labels[there] == k).mean())
        assert figures.labelled == pytest.approx((labels == k).mean())
        assert figures.claimed == pytest.approx(probs[:, k].mean())


@pytest.mark.parametrize("estimand", ["auto", "binary", "top_label"])
def test_two_classes_have_answers_of_the_predicted_class(estimand):
    rng = np.random.default_rng(0)
    logits = 2 * rng.normal(size=300)
    p = 1 / (1 + np.exp(-logits))
    labels = (rng.random(300) < p).astype(int)
    subject = measured({"logits": logits, "labels": labels}, estimand=estimand, level=None)
    confidence, right = np.maximum(p, 1 - p), (p > 0.5) == labels
    assert subject.answers.confidence == pytest.approx(confidence.mean())
    assert subject.answers.accuracy == pytest.approx(right.mean())
    assert [c.part.n for c in subject.classes] == [(p <= 0.5).sum(), (p > 0.5).sum()]
    sure = confidence > 0.9
    assert (subject.sure.n, subject.sure.accuracy) == (
        sure.sum(),
        pytest.approx(right[sure].mean()),
    )
    assert subject.margins == []


def test_tags_are_measured_one_by_one():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(200, 3))
    p = 1 / (1 + np.exp(-logits))
    labels = (rng.random(p.shape) < p**2).astype(int)
    labels[25:, 1] = -100
    subject = measured({"logits": logits, "labels": labels}, estimand="multilabel", level=None)
    for k, figures in enumerate(subject.classes):
        claimed, happened = p[labels[:, k] >= 0, k], labels[labels[:, k] >= 0, k]
        assert figures.part.name == f"tag {k}"
        assert figures.part.n == len(happened) == (25 if k == 1 else 200)
        assert figures.part.confidence == pytest.approx(claimed.mean())
        assert figures.part.accuracy == pytest.approx(happened.mean())
        count = int(happened.sum()), len(happened), float(claimed.mean())
        tails = [binomtest(*count, alternative=side).pvalue for side in ("less", "greater")]
        assert figures.bias_p_value == pytest.approx(2 * min(tails))
    assert subject.coverage == []


def test_margins_are_groups_of_equal_size_in_order():
    data = drawn(500)
    subject = measured(data, level=None)
    top = np.sort(data["logits"], -1)
    margin = top[:, -1] - top[:, -2]
    groups = np.array_split(np.argsort(margin), 5)
    right = data["logits"].argmax(-1) == data["labels"]
    assert [part.n for part in subject.margins] == [100] * 5
    expected = [right[rows].mean() for rows in groups]
    assert [part.accuracy for part in subject.margins] == pytest.approx(expected)


def test_thresholds_keep_what_they_say():
    data = drawn(500)
    probs = softmax(data["logits"])
    confidence, right = probs.max(-1), probs.argmax(-1) == data["labels"]
    points = measured(data, level=None).coverage
    assert 90 <= len(points) <= 100
    for point in points[::10]:
        kept = confidence >= point.threshold - 1e-12
        assert point.coverage == pytest.approx(kept.mean())
        assert point.error == pytest.approx(1 - right[kept].mean())
    assert points[-1].coverage == 1


def test_files_are_hashed(tmp_path):
    path = tmp_path / "a.npz"
    cal.save_predictions(path, drawn(50))
    (file,) = measured(str(path), level=None).files
    assert file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert file.bytes == path.stat().st_size


def test_remedies_are_measured_after_calibration(over_confident):
    (subject,) = over_confident.subjects
    remedy = subject.remedy
    assert remedy.chosen.method == "ts"
    assert remedy.after["ece"].value < 0.05 < 0.1 < remedy.before["ece"].value
    assert remedy.before["ece"].value == pytest.approx(subject.evaluation["ece"].value, abs=1e-9)
    # after calibration a threshold is about the probability of being right
    some = [point for point in remedy.coverage if 0.3 < point.coverage < 0.5]
    assert all(point.threshold < 1 - point.error + 0.05 for point in some)
    assert remedy.coverage != subject.coverage
    wanted = [each.max_error for each in remedy.thresholds]
    assert wanted == [most for most in MAX_ERRORS if most < 1 - subject.answers.accuracy]
    assert all(each.n == 1500 for each in remedy.thresholds)
