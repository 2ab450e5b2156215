"""Runs: figures by hand, what is computed again, and failures."""

import sys

import numpy as np
import pytest
from scipy.special import softmax

import calibrant
from benchmarks.arena import results
from benchmarks.arena.methods import Method, read_methods
from benchmarks.arena.results import COLUMNS, KEY, figures, read_rows, run
from benchmarks.arena.tasks import find_tasks
from calibrant.calibrators.registry import make_calibrator
from tests.support.predictions import splits
from tests.support.simulate import drawn


@pytest.fixture
def folder(tmp_path, rng):
    """Two tasks, of three and of two classes."""
    for name, classes in (("three", 3), ("two", 2)):
        pairs = (drawn(rng, n, classes, 2.0) for n in (200, 300))
        val, test = ({"logits": logits, "labels": labels} for logits, labels in pairs)
        np.savez(tmp_path / f"{name}.npz", **splits(val=val, test=test))
    return tmp_path


def ece_by_hand(confidence, outcome):
    gaps = 0.0
    for i in range(15):
        inside = (confidence > i / 15) & (confidence <= (i + 1) / 15)
        if i == 0:
            inside |= confidence == 0
        if inside.any():
            gaps += inside.mean() * abs(outcome[inside].mean() - confidence[inside].mean())
    return gaps


@pytest.mark.parametrize("classes", [2, 3])
def test_figures_by_hand(rng, classes):
    logits, labels = drawn(rng, 500, classes)
    probs, n = softmax(logits, -1), np.arange(500)
    found = figures(logits, labels)
    assert found["nll"] == pytest.approx(-np.log(probs[n, labels]).mean())
    truth = np.eye(classes)[labels]
    assert found["brier"] == pytest.approx(((probs - truth) ** 2).sum(1).mean())
    assert found["accuracy"] == (probs.argmax(1) == labels).mean()
    if classes == 2:
        assert found["ece"] == pytest.approx(ece_by_hand(probs[:, 1], labels))
        walk = [0.0]
        for i in np.argsort(probs[:, 1]):
            walk.append(walk[-1] + (labels[i] - probs[i, 1]) / 500)
        assert found["kuiper"] == pytest.approx(max(walk) - min(walk))
    else:
        right = probs.argmax(1) == labels
        assert found["ece"] == pytest.approx(ece_by_hand(probs.max(1), right))
        assert "kuiper" not in found


def test_a_shift_of_two_classes_shows_in_ece():
    """Confidence in the top class is right on average here, and P(1) is wrong for everybody."""
    logits = np.array([[0, np.log(3)], [np.log(3), 0]] * 50)  # P(1) 75 % and 25 %
    labels = np.array([1, 1] * 38 + [0, 1] * 12)
    by_hand = abs(labels[::2].mean() - 0.75) / 2 + abs(labels[1::2].mean() - 0.25) / 2
    assert figures(logits, labels)["ece"] == pytest.approx(by_hand)
    assert by_hand > 0.3


def test_a_zero_at_the_label_is_not_infinite():
    logits = np.array([[0.0, -np.inf], [0.0, -1e5]])
    found = figures(logits, np.array([1, 1]))
    assert found["nll"] == pytest.approx(-np.log(np.finfo(np.float32).tiny))


def test_rows_have_figures_before_and_after(folder):
    tasks = find_tasks(folder).tasks
    rows = run(tasks, read_methods("none ts"), folder / "rows.csv")
    assert [tuple(row) for row in rows] == [COLUMNS] * 4
    assert [(row["task"], row["method"]) for row in rows] == [
        *[("three", "none"), ("three", "ts"), ("two", "none"), ("two", "ts")]
    ]
    predictions = tasks[0].read()
    calibrator = make_calibrator("ts").fit(*predictions.fit[:2])
    after = figures(calibrator.transform(predictions.test.logits), predictions.test.labels)
    before = figures(*predictions.test[:2])
    row = rows[1]
    for name in ("nll", "brier", "ece", "accuracy"):
        assert float(row[name]) == pytest.approx(after[name], rel=1e-7)
        assert float(row[f"{name}_before"]) == pytest.approx(before[name], rel=1e-7)
    sizes = {name: row[name] for name in ("classes", "n_fit", "n_test", "seed", "error", "kuiper")}
    assert sizes == {"classes": "3", "n_fit": "200", "n_test": "300", "seed": "0"} | {
        "error": "",
        "kuiper": "",
    }
    assert float(row["fit_seconds"]) >= 0
    assert row["calibrant"] == calibrant.__version__
    assert float(rows[3]["kuiper"]) > 0
    assert rows[0]["nll"] == rows[0]["nll_before"]


def test_only_what_is_missing_is_computed(folder, monkeypatch):
    path, counted = folder / "rows.csv", []
    original = results.trial_row

    def count(trial):
        counted.append((trial.task.name, trial.seed, trial.method.text))
        return original(trial)

    monkeypatch.setattr(results, "trial_row", count)

    def new(methods, seeds=(0,)):
        counted.clear()
        rows = run(find_tasks(folder).tasks, read_methods(methods), path, seeds=seeds)
        assert len({tuple(row[name] for name in KEY) for row in rows}) == len(rows)
        return sorted(counted)

    assert len(new("none ts")) == 4
    first = path.read_bytes()
    assert new("none ts") == []
    assert path.read_bytes() == first
    assert new("none ts:objective=brier") == [
        (t, 0, "ts:objective=brier") for t in ("three", "two")
    ]
    assert new("none", seeds=(0, 3)) == [("three", 3, "none"), ("two", 3, "none")]
    assert path.read_bytes().startswith(first)

    arrays = dict(np.load(folder / "two.npz"))
    arrays["test_logits"][0] += 1e-3
    np.savez(folder / "two.npz", **arrays)
    assert new("none") == [("two", 0, "none")]

    monkeypatch.setattr(Method, "version", "2.0")
    assert new("none") == [("three", 0, "none"), ("two", 0, "none")]


def test_a_stopped_run_goes_on(folder, monkeypatch):
    tasks, methods, path = find_tasks(folder).tasks, read_methods("none ts"), folder / "rows.csv"
    original, left = results.trial_row, [3]

    def stop_later(trial):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return original(trial)

    with monkeypatch.context() as patched:
        patched.setattr(results, "trial_row", stop_later)
        with pytest.raises(KeyboardInterrupt):
            run(tasks, methods, path)
    assert len(read_rows(path)) == 2
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[-1][:40])  # killed while it wrote a row
    rows = run(tasks, methods, path)
    assert [(row["task"], row["method"]) for row in rows] == [
        *[("three", "none"), ("three", "ts"), ("two", "none"), ("two", "ts")]
    ]
    assert path.read_bytes().startswith(whole)


def test_other_seeds_are_other_splits(folder):
    rows = run(
        find_tasks(folder).tasks[:1], read_methods("ts"), folder / "rows.csv", seeds=(0, 1, 2)
    )
    assert len({row["nll_before"] for row in rows}) == 3
    assert {(row["n_fit"], row["n_test"]) for row in rows} == {("200", "300")}
    assert len({row["fingerprint"] for row in rows}) == 1


FAULTY = """
import numpy as np
class Raises:
    def fit(self, probs, labels):
        raise RuntimeError("no luck,\\n at all")
    predict_proba = None
class Narrow(Raises):
    def fit(self, probs, labels): pass
    def predict_proba(self, probs): return np.full((len(probs), 5), 0.2)
class Infinite(Narrow):
    def predict_proba(self, probs): return np.full(probs.shape, np.nan)
"""


def test_failures_are_rows(folder, monkeypatch):
    (folder / "faulty_in_tests.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(folder)
    names = ["Raises", "Narrow", "Infinite"]
    methods = read_methods(" ".join(f"faulty_in_tests:{name}" for name in names) + " none procal")
    path = folder / "rows.csv"
    rows = run(find_tasks(folder).tasks[:1], methods, path)
    sys.modules.pop("faulty_in_tests")
    assert [row["error"] for row in rows][:2] == [
        "RuntimeError: no luck, at all",
        "ValueError: probabilities must be of shape (300, 3), got (300, 5)",
    ]
    assert "NaN" in rows[2]["error"]
    assert rows[3]["error"] == ""
    assert "needs features" in rows[4]["error"]
    assert all(row["nll"] == "" and row["nll_before"] for row in rows if row["error"])
    assert rows == read_rows(path)


def test_a_task_that_cannot_be_read_costs_no_other(folder):
    tasks = find_tasks(folder).tasks
    (folder / "three.npz").write_bytes(b"gone")
    rows = run(tasks, read_methods("none"), folder / "rows.csv")
    assert [bool(row["error"]) for row in rows] == [True, False]


@pytest.mark.slow
def test_processes_give_the_same_rows(folder):
    tasks, methods = find_tasks(folder).tasks, read_methods("none ts smart")
    alone = run(tasks, methods, folder / "one.csv")
    both = run(tasks, methods, folder / "two.csv", workers=2)

    def comparable(rows):
        timed = ("fit_seconds", "apply_seconds")
        kept = [{k: v for k, v in row.items() if k not in timed} for row in rows]
        return sorted(kept, key=lambda row: (row["task"], row["method"]))

    assert comparable(both) == comparable(alone)


def test_a_file_of_something_else_is_refused(folder):
    (folder / "rows.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"rows\.csv is no file of the arena: it has no suite"):
        run(find_tasks(folder).tasks, read_methods("none"), folder / "rows.csv")
    assert (folder / "rows.csv").read_text() == "a,b\n1,2\n"
