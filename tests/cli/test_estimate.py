"""The verb estimate."""

import csv
import json

import numpy as np
import pytest

import calibrant as cal
from tests.support.simulate import drawn


@pytest.fixture
def files(rng, tmp_path, monkeypatch):
    """A labelled reference, a batch without labels, and the labels of the batch."""
    monkeypatch.chdir(tmp_path)
    logits, labels = drawn(rng, 2000, 3)
    np.savez("reference.npz", logits=logits[:1000], labels=labels[:1000])
    np.savez("batch.npz", logits=logits[1000:])
    np.savez("shifted.npz", logits=logits[1000:] / 3)
    return logits[1000:], labels[1000:]


def test_the_table_says_what_is_assumed(run, files):
    code, out, err = run("estimate", "batch.npz", "--reference", "reference.npz")
    assert (code, err) == (0, "")
    logits, labels = files
    assert "90 % interval" in out
    assert "Assumed: among the examples" in out
    assert "No shift from the reference was seen." in out
    code, out, _ = run("estimate", "batch.npz", "--reference", "reference.npz", "--json")
    result = json.loads(out)
    accuracy = result["metrics"]["accuracy"]
    assert accuracy["low"] < (logits.argmax(1) == labels).mean() < accuracy["high"]
    expected = cal.estimate_performance("batch.npz", "reference.npz").to_dict()
    assert result == json.loads(json.dumps(expected))
    assert run("estimate", "batch.npz", "--latex")[1].startswith(r"\begin{tabular}")


def test_a_withdrawn_promise_fails_if_asked(run, files):
    arguments = ("estimate", "shifted.npz", "--reference", "reference.npz")
    code, out, _ = run(*arguments)
    assert code == 0
    assert "The promise is withdrawn" in out
    assert run(*arguments, "--fail")[0] == 1


def test_labels_are_chosen_and_used(run, files):
    code, _, err = run("estimate", "batch.npz", "--label-budget", 100, "-o", "to_label.csv")
    assert code == 0
    assert "100 of 1,000 examples to label" in err
    with open("to_label.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    for line in lines:
        line["label"] = str(files[1][int(line["row"])])
    with open("to_label.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)
    code, out, _ = run("estimate", "batch.npz", "--labels", "to_label.csv", "--json")
    result = json.loads(out)
    assert (code, result["labels"], result["status"]) == (0, 100, "unchecked")


def test_options_that_contradict_each_other(run, files):
    assert run("estimate", "batch.npz", "--label-budget", 5)[0] == 2
    assert run("estimate", "batch.npz", "--labels", "x.csv", "--ignore-labels")[0] == 2
    code, _, err = run("estimate", "reference.npz")
    assert code == 2
    assert "--ignore-labels" in err


def test_the_monitor_estimates_windows(run, files):
    code, out, _ = run("monitor", "batch.npz", "--estimate", "reference.npz", "--json")
    assert code == 0
    row = json.loads(out)["windows"][0]
    assert row["n"] == 0
    assert row["estimate_low"] < row["estimate"] < row["estimate_high"]
