"""Calibration metrics in the harness; the harness itself runs where it is installed."""

import json

import numpy as np
import pytest

from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.integrations.lm_eval import _metric_of, with_calibration
from calibrant.llm import read_log
from tests.support.definitions import slow_brier, slow_ece, slow_nll, slow_softmax
from tests.support.recorded_logs import FILES, lm_eval_tasks, tiny_harness, write_lm_eval

CHOICES = ["red", "blue", "one"]


class Task:
    """As much of a task of the harness as is used."""

    OUTPUT_TYPE = "multiple_choice"
    multiple_input = False

    def __init__(self):
        self.functions, self.directions = {}, {}

    def process_results(self, doc, results):
        return {"acc": 1.0}

    def doc_to_target(self, doc):
        return doc["answer"]

    def doc_to_choice(self, doc):
        return CHOICES

    def aggregation(self):
        return self.functions

    def higher_is_better(self):
        return self.directions


@pytest.fixture
def items(rng):
    scores = 2 * rng.normal(size=(40, 3)) - 5
    labels = (scores / 2 + rng.gumbel(size=scores.shape)).argmax(1)
    return list(zip(labels.tolist(), scores, strict=True))


def by_definition(items):
    probs = [slow_softmax(scores) for _, scores in items]
    labels = [label for label, _ in items]
    right = [float(np.argmax(p) == y) for p, y in zip(probs, labels, strict=True)]
    return {
        "ece": slow_ece([max(p) for p in probs], right),
        "nll": np.mean([slow_nll(scores, label) for label, scores in items]),
        "brier": np.mean([slow_brier(p, y) for p, y in zip(probs, labels, strict=True)]),
        "accuracy": np.mean(right),
    }


@pytest.mark.parametrize("name", ["ece", "nll", "brier", "accuracy"])
def test_metrics_are_those_of_the_definition(items, name):
    assert _metric_of(items, name=name) == pytest.approx(by_definition(items)[name])


def test_a_task_gets_metrics_of_all_its_questions(items):
    task = with_calibration(Task())
    rows = [
        task.process_results({"answer": label}, [(score, False) for score in scores])
        for label, scores in items
    ]
    assert rows[0]["acc"] == 1.0
    for name in ("ece", "nll", "brier"):
        found = task.aggregation()[name]([row[name] for row in rows])
        assert found == pytest.approx(by_definition(items)[name])
        assert task.higher_is_better()[name] is False
    named = task.process_results({"answer": "blue"}, [(-1.0, False)] * 3)
    assert named["ece"][0] == 1


def test_a_calibrator_changes_the_options_first(items):
    labels, scores = map(np.array, zip(*items, strict=True))
    fitted = TemperatureScaling().fit(scores, labels)
    task = with_calibration(Task(), fitted)
    found = task.aggregation()["calibrated_nll"](items)
    cooler = [(label, row / float(fitted.temperature_)) for label, row in items]
    assert found == pytest.approx(by_definition(cooler)["nll"], rel=1e-4)
    assert task.higher_is_better()["calibrated_accuracy"] is True


def test_other_tasks_are_refused():
    task = Task()
    task.OUTPUT_TYPE = "generate_until"
    with pytest.raises(ValueError, match="multiple_choice"):
        with_calibration(task)
    several = with_calibration(Task())
    with pytest.raises(ValueError, match="must have one right option"):
        several.process_results({"answer": [0, 1]}, [(-1.0, False)] * 3)


@pytest.mark.filterwarnings("ignore")  # of the harness and what it uses
def test_the_harness_itself(tmp_path):
    lm_eval = pytest.importorskip("lm_eval")
    task = with_calibration(lm_eval_tasks()[0])
    results = lm_eval.simple_evaluate(tiny_harness(), tasks=[task], bootstrap_iters=10)
    found = results["results"]["quiz_choice"]
    rows = read_log(next((FILES / "lm_eval").glob("samples_quiz_choice_*"))).answers.rows
    items = [(row["label"], np.array(row["option_logits"])) for row in rows]
    for name in ("ece", "nll", "brier"):
        assert found[f"{name},none"] == pytest.approx(by_definition(items)[name], rel=1e-4)
    assert found["acc,none"] == by_definition(items)["accuracy"]


@pytest.mark.filterwarnings("ignore")
def test_the_recorded_files_are_what_the_harness_writes(tmp_path):
    pytest.importorskip("lm_eval")
    folder = write_lm_eval(tmp_path)
    (fresh,) = folder.glob("samples_quiz_choice_*.jsonl")
    (recorded,) = (FILES / "lm_eval").glob("samples_quiz_choice_*.jsonl")
    for new, old in zip(fresh.open(), recorded.open(), strict=True):
        assert json.loads(new).keys() == json.loads(old).keys()
    again, before = (read_log(file).answers.confidences()[0] for file in (fresh, recorded))
    np.testing.assert_allclose(again, before, rtol=1e-4)
