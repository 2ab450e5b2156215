"""Columns of any name, which every verb that reads a prediction file takes."""

import json
import shlex

import numpy as np
import pytest

import calibrant as cal
from calibrant import cli

pd = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")
NAMES = ("--labels", "truth", "--probs", "p_cat,p_dog,p_cow")


@pytest.fixture(params=[".csv", ".parquet"])
def table(request, tmp_path, monkeypatch, rng):
    """A file whose labels the rules would not find, and a column of labels that are others."""
    monkeypatch.chdir(tmp_path)
    logits = 3 * rng.normal(size=(600, 3))
    labels = (logits / 3 + rng.gumbel(size=logits.shape)).argmax(1)
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    columns = dict(zip(("p_cat", "p_dog", "p_cow"), probs.T, strict=True))
    truth = np.array(["cat", "dog", "cow"])[labels]
    frame = pd.DataFrame({**columns, "truth": truth, "label": 0, "site": np.arange(600) % 2})
    name = f"scores{request.param}"
    (frame.to_csv if request.param == ".csv" else frame.to_parquet)(name, index=False)
    np.savez("same.npz", probs=probs, labels=labels)
    return name


def test_evaluate_reads_them(run, table):
    code, out, err = run("evaluate", table, *NAMES, "--json")
    assert code == 0, err
    expected = cal.evaluate("same.npz")
    assert json.loads(out)["metrics"]["ece"]["value"] == pytest.approx(expected["ece"].value)
    assert json.loads(out)["class_names"] == ["cat", "dog", "cow"]


def test_probabilities_that_are_named_as_logits(run, table):
    _, _, err = run("evaluate", table, "--labels", "truth", "--logits", NAMES[-1], "--level", "0")
    assert "sums to one; if they are, name them as probs= (--probs)" in " ".join(err.split())


def test_one_column_is_that_of_class_1(run, tmp_path, rng):
    score = rng.uniform(size=300)
    happened = rng.uniform(size=300) < score
    path = tmp_path / "a.csv"
    pd.DataFrame({"score": score, "truth": happened}).to_csv(path, index=False)
    _, out, _ = run("evaluate", path, "--labels", "truth", "--probs", "score", "--json")
    expected = cal.evaluate(probs=score, labels=happened.astype(int))
    assert json.loads(out)["estimand"] == "binary"
    assert json.loads(out)["metrics"]["nll"]["value"] == pytest.approx(expected["nll"].value)


COMMANDS = [
    "compare {} --methods none,ts --level 0",
    "fit {} --method ts --cross-fit 2 -o other",
    "apply calibrator {} -o out.npz",
    "decide {} --max-error 0.5",
    "estimate {} --ignore-labels",
    "estimate {} --ignore-labels --label-budget 5",
    "monitor {}",
    "plot {} --level 0",
    "report {} --methods none --level 0 -o -",
    "slices {} --depth 1",
]


def test_every_verb_takes_them(run, table):
    assert run("-q", "fit", table, *NAMES, "--method", "ts")[0] == 0
    for command in COMMANDS:
        code, _, err = run(*command.replace("{}", table).split(), *NAMES)
        assert code == 0, (command, err)
    tried = {command.split()[0] for command in COMMANDS} | {"evaluate"}
    taking = {
        name
        for name, verb in cli.cli.commands.items()
        if {"--labels", "--probs", "--logits"} <= {opt for p in verb.params for opt in p.opts}
    }
    assert taking == tried


def test_apply_keeps_the_names(run, table):
    run("-q", "fit", table, *NAMES, "--method", "ts")
    for out in ("out.csv", "out.npz"):
        code, _, err = run("apply", "calibrator", table, *NAMES, "-o", out)
        assert code == 0
        command = err.splitlines()[-1].split()
        assert (command[:3], command[3:]) == (
            ["calibrant", "evaluate", out],
            [*NAMES] if out == "out.csv" else [],
        )
        assert run(*command[1:])[0] == 0
    written = pd.read_csv("out.csv")
    assert {"p_cat", "p_dog", "p_cow", "truth", "site"} <= {*written.columns}
    _, out, _ = run("evaluate", "out.csv", *NAMES, "--json")
    after = json.loads(out)["metrics"]["nll"]["value"]
    assert after < cal.evaluate("same.npz")["nll"].value


def test_names_with_commas_stand_in_quotes(run, tmp_path, monkeypatch, rng):
    monkeypatch.chdir(tmp_path)
    wet = rng.uniform(size=400)
    dry = (rng.uniform(size=400) > wet).astype(int)
    table = pd.DataFrame({"a, wet": wet, 'a "dry"': 1 - wet, "y": dry})
    table.to_csv("odd.csv", index=False)
    names = ["--labels", "y", "--probs", '"a, wet","a ""dry"""']
    code, out, err = run("evaluate", "odd.csv", *names, "--json")
    assert code == 0, err
    assert json.loads(out)["class_names"] == ["a, wet", 'a "dry"']
    run("fit", "odd.csv", *names, "--method", "ts", "-o", "fitted")
    _, _, err = run("apply", "fitted", "odd.csv", *names, "-o", "after.csv")
    assert run(*shlex.split(err.splitlines()[-1])[1:])[0] == 0


def test_a_name_that_no_column_has(run, table):
    code, _, err = run("evaluate", table, "--labels", "trut", "--probs", "p_cat,p_dog,p_cow")
    assert code == 2
    assert "unknown column 'trut': did you mean truth?" in err
    code, _, err = run("evaluate", table, "--labels", "truth", "--probs", "p_cat,p_cat")
    assert "p_cat is named twice" in err


def test_a_file_without_known_columns_tells_the_remedy(run, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("score,truth\n0.5,1\n")
    code, _, err = run("evaluate", path)
    assert code == 2
    assert "--labels truth --probs" in err
