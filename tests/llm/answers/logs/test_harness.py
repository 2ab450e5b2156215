"""Samples that lm-evaluation-harness wrote, against its own results."""

import json
import math
import shutil

import numpy as np
import pytest

from calibrant.llm import read_log
from calibrant.llm.answers.logs.harness import _sample_files
from tests.support.recorded_logs import FILES

FOLDER = FILES / "lm_eval"
RESULTS = json.loads(next(FOLDER.glob("results_*.json")).read_text())


def samples(task):
    return next(FOLDER.glob(f"samples_{task}_*.jsonl"))


def lines(task):
    return [json.loads(line) for line in samples(task).read_text().splitlines()]


@pytest.mark.parametrize(
    ("metric", "source", "length"),
    [
        ("acc", "texts", lambda _: 1),
        ("acc_norm", "texts, per character", len),
    ],
)
def test_multiple_choice_agrees_with_the_harness(metric, source, length):
    log = read_log(samples("quiz_choice"), outcome=metric)
    answers = log.answers
    assert log.format == "lm_eval"
    assert answers.grades().mean() == RESULTS["results"]["quiz_choice"][f"{metric},none"]
    assert answers.source().confidence == source
    for sample, row in zip(lines("quiz_choice"), log.answers.rows, strict=True):
        choices = sample["doc"]["choices"]
        scores = [
            math.exp(float(reply[0]) / length(choice))
            for reply, choice in zip(sample["filtered_resps"], choices, strict=True)
        ]
        probs = [score / sum(scores) for score in scores]
        assert np.exp(row["option_logits"]) == pytest.approx(probs)
        assert row["confidence"] == pytest.approx(max(probs))
        assert row["answer"] == choices[probs.index(max(probs))]
        assert row["label"] == sample["doc"]["answer"]
        assert row["kind"] == "quiz_choice"
        assert row["prompt"] == "0 shots"
        assert row["model"] == RESULTS["model_name"]


def test_written_answers_have_samples_but_no_confidence():
    with pytest.warns(UserWarning, match="2 filters, of which whole is read"):
        log = read_log(samples("quiz_written"))
    first, *_ = lines("quiz_written")
    assert len(log.answers.rows) == 8
    assert log.answers.rows[0]["samples"] == first["resps"][0][1:]
    assert log.answers.rows[0]["answer"] == first["filtered_resps"][0]
    other = read_log(samples("quiz_written"), outcome="exact_match,word")
    wanted = [one["filtered_resps"][0] for one in lines("quiz_written") if one["filter"] == "word"]
    assert [row["answer"] for row in other.answers.rows] == wanted
    with pytest.raises(ValueError, match="has no filter 'none': it has whole, word"):
        read_log(samples("quiz_written"), outcome="exact_match,none")


def test_the_likelihood_of_a_reference_is_no_confidence():
    with pytest.raises(ValueError, match="no confidence for likelihood tasks"):
        read_log(samples("quiz_likely"))


def test_a_folder_or_its_results_stand_for_all_tasks(tmp_path):
    for date in ("2026-01-01T00-00-00.000001", "2026-01-02T00-00-00.000001"):
        for task in ("one", "two"):
            shutil.copy(samples("quiz_choice"), tmp_path / f"samples_{task}_{date}.jsonl")
        (tmp_path / f"results_{date}.json").write_text('{"results": {}, "configs": {}}')
    log = read_log(tmp_path)
    assert len(log.answers.rows) == 16
    assert {row["kind"] for row in log.answers.rows} == {"one", "two"}
    assert all("01-02" in file.name for file in _sample_files(tmp_path))
    older = read_log(tmp_path / "results_2026-01-01T00-00-00.000001.json")
    assert all("01-01" in place for place in older.answers.places)
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="run lm_eval with --log_samples"):
        read_log(tmp_path / "none")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"acc": 0.5}, "line 1: must have 0 or 1 as its acc, got 0.5; its metrics: acc, acc_norm"),
        ({"target": "2"}, "has acc = 0, but its likelihoods choose option"),
        ({"resps": None, "filtered_resps": [["nan", "False"]] * 4}, "a log-likelihood of nan for"),
        ({"arguments": None}, "does not have the form of this log"),
    ],
)
def test_a_damaged_sample_is_named_and_can_be_left_out(tmp_path, change, message):
    first, second, *_ = lines("quiz_choice")
    if "target" in change:
        options = [float(reply[0]) for reply in first["filtered_resps"]]
        change = {"target": str(options.index(max(options)))}
    file = tmp_path / "samples_task_2026-01-01T00-00-00.000001.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in ({**first, **change}, second)))
    with pytest.raises(ValueError, match=message.replace("line 1: ", "")) as error:
        read_log(file, outcome="acc")
    assert "line 1" in str(error.value)
    with pytest.warns(UserWarning, match="left out 1 of 2 answers"):
        log = read_log(file, outcome="acc", skip_bad=True)
    assert (len(log.answers.rows), log.left_out) == (1, 1)


def test_tasks_with_different_shots_are_read_together(tmp_path):
    date = "2026-01-01T00-00-00.000001"
    for task in ("one", "two"):
        shutil.copy(samples("quiz_choice"), tmp_path / f"samples_{task}_{date}.jsonl")
    about = {"results": {}, "configs": {}, "n-shot": {"one": 0, "two": 5}}
    (tmp_path / f"results_{date}.json").write_text(json.dumps(about))
    answers = read_log(tmp_path).answers
    assert answers.source().prompt == "0 shots; 5 shots"
    assert len(answers.rows) == 16


def test_options_come_in_the_order_of_their_numbers(tmp_path):
    numbers = sorted(map(str, range(12)))  # as texts, 10 and 11 come before 2
    asked = {f"gen_args_{n}": {"arg_0": "Q", "arg_1": f" option {n}"} for n in numbers}
    replies = [[str(-abs(n - 10) - 1.0), "False"] for n in range(12)]
    sample = {
        **{"doc_id": 0, "doc": {}, "target": "10", "arguments": asked, "filter": "none"},
        **{
            "resps": [[r] for r in replies],
            "filtered_resps": replies,
            "metrics": ["acc"],
            "acc": 1,
        },
    }
    (tmp_path / "log.jsonl").write_text(json.dumps(sample))
    (row,) = read_log(tmp_path / "log.jsonl").answers.rows
    assert (row["answer"], row["label"]) == ("option 10", 10)
