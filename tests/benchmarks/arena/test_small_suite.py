"""The small suite: worlds as described, and limits that guard the quality of the default."""

import numpy as np
import pytest
from scipy.special import expit, log_softmax

from benchmarks.arena.methods import read_methods
from benchmarks.arena.results import run
from benchmarks.arena.tasks import small_suite


def nll(logits, labels):
    return -log_softmax(logits, -1)[np.arange(len(labels)), labels].mean()


def test_tasks_are_fixed_and_different():
    tasks = small_suite()
    assert len({task.name for task in tasks}) == len(tasks)
    prints = [task.read().fingerprint for task in tasks]
    assert prints == [task.read().fingerprint for task in small_suite()]
    assert len(set(prints)) == len(tasks)


def test_worlds_have_the_faults_that_they_are_named_for():
    read = {task.name: task.read().test for task in small_suite()}
    logits, labels, _ = read["shifted_binary_2000"]
    odds = logits[:, 1] - logits[:, 0]
    assert labels.mean() == pytest.approx(expit(odds - 2).mean(), abs=0.02)
    logits, labels, _ = read["calibrated_1000"]
    temperatures = np.linspace(0.8, 1.25, 10)
    best = min(temperatures, key=lambda t: nll(logits / t, labels))
    assert best == pytest.approx(1, abs=0.06)
    logits, labels, _ = read["over_confident_2000"]
    assert min([1, 1.5, 2, 2.5, 3], key=lambda t: nll(logits / t, labels)) == 2
    logits, labels, _ = read["biased_choices_1000"]
    right = (logits - np.array([1.5, 0, 0, -0.5])) / 1.5
    assert nll(right, labels) < nll(logits / 1.5, labels) - 0.05


BINARY = ("shifted_binary_200", "shifted_binary_2000", "curved_binary_1000")
HONEST = ("calibrated_100", "calibrated_1000")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows by task and method."""
    pytest.importorskip("sklearn")
    path = tmp_path_factory.mktemp("arena") / "rows.csv"
    found = run(small_suite(), read_methods("none ts auto sklearn:sigmoid"), path)
    assert [row["error"] for row in found] == [""] * len(found)
    return {(row["task"], row["method"]): row for row in found}


def ratio(rows, task, method, other, metric="nll"):
    return float(rows[task, method][metric]) / float(rows[task, other][metric])


@pytest.mark.slow
@pytest.mark.parametrize("task", [task.name for task in small_suite()])
def test_the_default_is_no_worse_than_a_temperature(rows, task):
    assert ratio(rows, task, "auto", "ts") <= 1.01


@pytest.mark.slow
@pytest.mark.parametrize("task", HONEST)
def test_the_default_does_no_harm_to_calibrated_data(rows, task):
    assert ratio(rows, task, "auto", "none") <= 1.01


@pytest.mark.slow
@pytest.mark.parametrize("task", ["over_confident_2000", "cifar10_resnet50_1000"])
def test_the_default_repairs_over_confidence(rows, task):
    assert ratio(rows, task, "auto", "none") <= 0.85
    assert ratio(rows, task, "auto", "none", "ece") <= 0.4


@pytest.mark.slow
def test_the_default_is_not_much_slower_than_a_temperature(rows):
    """Both in one run: machines differ, ratios travel. It fits some candidates in five folds."""
    seconds = {
        name: sum(float(row["fit_seconds"]) for (_, method), row in rows.items() if method == name)
        for name in ("ts", "auto")
    }
    assert seconds["auto"] <= 200 * seconds["ts"]


@pytest.mark.slow
@pytest.mark.parametrize("task", BINARY)
def test_the_default_is_no_worse_than_platt_on_two_classes(rows, task):
    assert ratio(rows, task, "auto", "sklearn:sigmoid") <= 1.01
