"""JSON of every command beside ``docs/json.md``, with which ``run`` compares all of it."""

import json
import math
from typing import Any

import numpy as np
import pytest

import calibrant as cal
from calibrant._core.showing import json_text
from calibrant.llm.answers.rows import write_rows
from tests.support.graded_answers import graded_answers
from tests.support.json_page import check_content, check_output, tables, verbs
from tests.support.language_models import quiz_model, quiz_tokenizer

GRADED = "graded.jsonl"
COMMANDS = {
    "evaluate": ["p.npz", "--by", "site", "--max", "ece=0.01", "--min", "auroc.low=0.5"],
    "fit": ["p.npz", "--method", "ts", "-o", "calibrator"],
    "compare": ["p.npz", "--methods", "none,ts,matrix"],
    "slices": ["p.npz"],
    "decide": ["p.npz", "--max-error", "0.3", "--save", "rule"],
    "estimate": ["p.npz", "--split", "test", "--ignore-labels"],
    "monitor": ["p.npz"],
    "llm fit": ["table", "--head", "global", "-o", "head"],
    "llm evaluate": ["head", "table"],
    "llm answers fit": [GRADED, "-o", "map"],
    "llm judge": ["judged.jsonl", "--width", "0.1"],
    "llm gate fit": [GRADED, "--max-error", "0.2", "-o", "gate"],
    "llm gate watch": ["gate", "--state", "watch.json", "--new"],
}
"""Arguments of each command that has --json."""


@pytest.fixture
def small_files(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for split in ("val", "test"):
        logits = 2 * rng.normal(size=(600, 2))
        labels = (logits / 2 + rng.gumbel(size=logits.shape)).argmax(1)
        site = rng.choice(["A", "B", "C"], 600, p=[0.5, 0.48, 0.02])
        named = {"logits": logits, "labels": labels, "site": site}
        arrays |= {f"{split}_{name}": values for name, values in named.items()}
    np.savez("p.npz", **arrays)
    answers = graded_answers(rng, 600).rows
    write_rows(GRADED, answers)
    judged = [{"judge": row["confidence"], "length": 9 + i} for i, row in enumerate(answers)]
    for row, answer in zip(judged[:200], answers, strict=False):
        row["human"] = answer["correct"]
    write_rows("judged.jsonl", judged)
    claims = [{"text": "It is.", "correct": True}, {"text": " It is not.", "correct": False}]
    tokens = {"token_texts": ["It is.", " It is not."], "claims": claims}
    probs = rng.uniform(0.2, 1, (60, 2)).tolist()
    write_rows("claims.jsonl", [{**tokens, "token_probs": each} for each in probs])
    return run


def outputs(run, verb, arguments):
    code, out, err = run(*verb.split(), *arguments, "--json")
    assert code in (0, 1), err
    return json.loads(out)


@pytest.mark.parametrize("verb", [name for name in COMMANDS if not name.startswith("llm")])
def test_predictions(small_files, verb):
    found = outputs(small_files, verb, COMMANDS[verb])
    assert next(iter(found)) == "format"


def test_options_that_have_a_table(small_files):
    cal.save(cal.fit("p.npz", method="ts"), "calibrator")
    outputs(small_files, "slices", ["p.npz", "--by", "site", "--calibrator", "calibrator"])
    for promise in (["--coverage", "0.8"], COMMANDS["decide"][1:3]):
        outputs(small_files, "decide", ["p.npz", *promise, "--save", "rule"])
        outputs(small_files, "decide", ["p.npz", "--rule", "rule"])


@pytest.mark.parametrize("verb", [name for name in COMMANDS if name.startswith("llm")])
@pytest.mark.filterwarnings("ignore")  # of transformers
def test_language_models(small_files, verb):
    if "table" in COMMANDS[verb]:
        quiz_model().save_pretrained("model")
        quiz_tokenizer().save_pretrained("model")
        write_rows("texts.jsonl", [{"text": "what is it yes is it one two"}] * 20)
        assert small_files("llm", "collect", "model", "texts.jsonl", "-o", "table")[0] == 0
    if verb == "llm evaluate":
        options = ("--keep-always", "--epochs", "1")
        assert small_files("llm", "fit", "table", *options, "-o", "head")[0] == 0
    if verb == "llm gate watch":
        outputs(small_files, "llm gate fit", COMMANDS["llm gate fit"])
    outputs(small_files, verb, COMMANDS[verb])


def test_every_command_with_json_has_a_table_and_is_walked():
    assert sorted(verbs()) == sorted(COMMANDS)
    assert set(verbs()) <= set(tables())


@pytest.mark.parametrize("by", [[], ["--by", "site"]])
def test_a_report(small_files, by):
    small_files("report", "p.npz", "--methods", "none,ts", *by, "-o", "report.json")
    with open("report.json") as file:
        check_content(json.load(file), "report -o report.json")


def test_what_is_not_on_the_page_is_found(small_files):
    content = outputs(small_files, "slices", ["p.npz"])
    check_output(["slices", "p.npz"], json.dumps(content))
    faults = {
        "not on the page": {**content, "more": 1},
        "missing": {key: value for key, value in content.items() if key != "whole"},
        "is no integer": {**content, "n": "600"},
        "is no number": {**content, "whole": [{**content["whole"][0], "share": True}]},
        "not a list": {**content, "columns": "site"},
        "first key": {key: content[key] for key in reversed(content)},
    }
    for message, fault in faults.items():
        with pytest.raises(AssertionError, match=message):
            check_output(["slices", "p.npz"], json.dumps(fault))
    with pytest.raises(AssertionError, match="is no JSON"):
        check_output(["slices", "p.npz"], json.dumps({**content, "level": math.nan}))


def test_undefined_figures_are_null_wherever_they_stand():
    figures = {"a": math.nan, "b": [math.inf, {"c": -math.inf}], "d": (np.float64("nan"), 1.5)}
    assert json.loads(json_text(figures)) == {
        **{"format": 1, "a": None, "b": [None, {"c": None}]},
        "d": [None, 1.5],
    }
