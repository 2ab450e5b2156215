"""Examples to label: allocation, inclusion probabilities, files."""

import numpy as np
import pytest

from calibrant import fit
from calibrant._core.class_names import ClassNumbers
from calibrant.data import save_predictions
from calibrant.estimate import estimate_performance
from calibrant.estimate.sampling import _allocate, _make_plan, _read_labels, choose_labels


def test_allocation_spends_the_budget_within_the_strata():
    sizes = np.array([1000, 50, 3, 400])
    for budget in (1, 4, 60, 500, 1453):
        allotted = _allocate(sizes, np.array([0.01, 0.5, 0.4, 0.3]), budget)
        assert allotted.sum() == budget
        assert (allotted <= sizes).all()
    even = _allocate(sizes, np.zeros(4), 145)
    assert even.tolist() == pytest.approx(sizes / 10, abs=1)


def test_the_gain_is_the_ratio_of_variances():
    count, claimed = np.zeros(3200), np.zeros(3200)
    count[[1600, 3000]], claimed[[1600, 3000]] = [100, 900], [50, 900]
    plan = _make_plan(count, claimed, 100)
    assert plan.allotted.tolist() == [82, 18]  # four fifths where outcomes vary
    at_random, stratified = 0.1 * 0.25 / 100, 0.1**2 * 0.25 / 82
    assert plan.gain == pytest.approx(at_random / stratified)


def test_inclusion_probabilities_are_those_of_many_choices(rng):
    probs = rng.beta(0.3, 0.3, 200)
    chosen = np.zeros(200)
    for seed in range(300):
        sample = choose_labels(probs=probs, budget=40, seed=seed)
        chosen[sample.row] += 1
        assert (np.diff(sample.row) > 0).all()
    stated = np.full(200, np.nan)
    stated[sample.row] = sample.inclusion
    assert chosen[sample.row] / 300 == pytest.approx(sample.inclusion, abs=0.12)
    assert np.mean(chosen[sample.row] / 300 - sample.inclusion) == pytest.approx(0, abs=0.02)


def test_estimates_from_chosen_labels_are_unbiased_and_better_than_at_random():
    """Also where the probabilities are wrong: accuracy is ten points below confidence."""
    rng = np.random.default_rng(5)
    probs = np.clip(rng.beta(6, 0.6, 4000), 0.5, 0.9999)
    labels = (rng.random(4000) < np.clip(probs - 0.1, 0, 1)).astype(int)
    truth, errors = (labels == 1).mean(), []
    for seed in range(60):
        sample = choose_labels(probs=probs, budget=150, seed=seed)
        weight = 1 / sample.inclusion
        errors.append((weight * (labels[sample.row] == 1)).sum() / 4000 - truth)
    spread = np.std(errors)
    assert abs(np.mean(errors)) < 3 * spread / np.sqrt(60)
    assert spread < np.sqrt(truth * (1 - truth) / 150)


def test_shards_and_chunks_choose_the_same(rng, tmp_path, monkeypatch):
    logits = rng.normal(size=(90, 3)) * 3
    for i in range(3):
        save_predictions(tmp_path / f"{i}.npz", {"logits": logits[30 * i : 30 * i + 30]})
    whole = choose_labels(logits, 12)
    assert choose_labels(tmp_path, 12).row.tolist() == whole.row.tolist()
    assert whole.inclusion == pytest.approx(choose_labels(tmp_path, 12).inclusion)


def test_labelled_examples_are_not_chosen(rng):
    labels = np.where(np.arange(60) < 40, 0, -100)
    data = {"logits": rng.normal(size=(60, 2)), "labels": labels}
    assert choose_labels(data, 20).row.tolist() == list(range(40, 60))
    with pytest.raises(ValueError, match="at most the 20 unlabelled"):
        choose_labels(data, 21)


def test_labels_of_a_file(tmp_path, rng):
    sample = choose_labels(probs=rng.uniform(size=50), budget=5)
    path = tmp_path / "to_label.csv"
    sample.save(path)
    lines = path.read_text().splitlines()
    assert lines[0] == "row,predicted,confidence,inclusion_probability,label"
    filled = [lines[0], lines[1] + "1", *lines[2:]]
    path.write_text("\n".join(filled))
    numbers = ClassNumbers(["0", "1"])
    labels, inclusion = _read_labels(path, 50, numbers)
    assert np.flatnonzero(labels != -100).tolist() == [sample.row[0]]
    assert inclusion[sample.row[0]] == pytest.approx(sample.inclusion[0])
    for text, message in (
        ("row,class\n1,2", "columns row and label"),
        ("", "columns row and label, got nothing"),
        ("row,label\n50,1", r"row must be in \[0, 50\)"),
        ("row,label\n1,cat", "line 2: label is an unknown class 'cat': choose from 0, 1"),
        ("row,label\n1.5,1", "line 2: row and inclusion_probability must be numbers"),
        ("row,label\n1,1\n1,0", "has a label already"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            _read_labels(path, 50, numbers)


def test_labels_of_a_file_are_of_the_classes_that_it_names(tmp_path, rng):
    """In whatever order the columns of the batch are, and by name, number or both."""
    honest = 2 * rng.normal(size=(3000, 3))
    labels = (honest + rng.gumbel(size=honest.shape)).argmax(1)
    names, order = np.array(["cat", "dog", "owl"]), [2, 0, 1]
    calibrator = fit({"logits": honest, "labels": labels, "class_names": names}, method="ts")
    batch = {"logits": honest[:, order], "class_names": names[order]}
    sample = choose_labels(batch, 900, calibrator=calibrator)
    assert (names[order][sample.predicted] == names[honest.argmax(1)[sample.row]]).all()
    sample.save(tmp_path / "a.csv")
    head, *lines = (tmp_path / "a.csv").read_text().splitlines()
    assert {line.split(",")[1] for line in lines} == set(names)
    by_number = np.argsort(order)[labels[sample.row]]
    truth, estimates = (honest.argmax(1) == labels).mean(), []
    for written in (names[labels[sample.row]], by_number, [f"{number}.0" for number in by_number]):
        filled = [f"{line}{label}" for line, label in zip(lines, written, strict=True)]
        (tmp_path / "b.csv").write_text("\n".join([head, *filled]))
        result = estimate_performance(batch, labels=tmp_path / "b.csv", calibrator=calibrator)
        assert result.status == "labels"
        estimates.append(result["accuracy"])
    assert estimates[0] == estimates[1] == estimates[2]
    assert estimates[0].low < truth < estimates[0].high
