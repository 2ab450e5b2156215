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
    assert result == json.loads(json.dumps({"format": 1, **expected}))


def test_a_withdrawn_promise_fails_if_asked(run, files):
    arguments = ("estimate", "shifted.npz", "--reference", "reference.npz")
    code, out, _ = run(*arguments)
    assert code == 0
    assert "The guarantee is withdrawn" in out
    assert run(*arguments, "--fail")[0] == 1
    assert run("estimate", "batch.npz", "--reference", "reference.npz", "--fail")[0] == 0


def test_contradicting_labels_fail_if_asked(run, files):
    logits, labels = files
    wrong = np.where(np.arange(1000) < 50, (logits.argmax(1) + 1) % 3, -100)
    np.savez("wrong.npz", logits=logits, labels=wrong)
    right = np.where(np.arange(1000) < 50, labels, -100)
    np.savez("right.npz", logits=logits, labels=right)
    for arguments in ((), ("--reference", "reference.npz")):
        assert run("estimate", "wrong.npz", *arguments)[0] == 0
        assert run("estimate", "wrong.npz", *arguments, "--fail")[0] == 1
        assert run("estimate", "right.npz", *arguments, "--fail")[0] == 0


def test_nothing_to_check_with_is_no_success(run, files):
    code, out, err = run("estimate", "batch.npz")
    assert (code, err) == (0, "")
    assert "if confidences are right" in out
    assert "90 % interval" not in out
    code, out, err = run("estimate", "batch.npz", "--fail")
    assert code == 2
    assert "if confidences are right" in out
    assert "--reference" in err
    metrics = json.loads(run("estimate", "batch.npz", "--json")[1])["metrics"]
    assert {metrics["accuracy"][end] for end in ("low", "high")} == {None}


def test_labels_are_chosen_and_used(run, files):
    code, _, err = run("estimate", "batch.npz", "--label-budget", 100)
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
    code, out, _ = run("estimate", "batch.npz", "--labelled", "to_label.csv", "--json")
    result = json.loads(out)
    assert (code, result["labels"], result["status"]) == (0, 100, "labels")


def test_examples_with_labels_are_chosen_only_if_these_are_ignored(run, files):
    logits, labels = files
    np.savez("known.npz", logits=logits, labels=np.where(np.arange(1000) < 990, labels, -100))
    budget = ("--label-budget", 20, "-o", "to_label.csv")
    code, _, err = run("estimate", "known.npz", *budget)
    assert code == 2
    assert "at most the 10 unlabelled examples" in err
    code, _, err = run("estimate", "known.npz", *budget, "--ignore-labels")
    assert code == 0
    assert "20 of 1,000 examples to label" in err
    with open("known.csv", "w") as file:
        file.write("row,label\n" + "".join(f"{k},0\n" for k in range(980)))
    assert run("estimate", "batch.npz", *budget, "--labelled", "known.csv")[0] == 0
    with open("to_label.csv", newline="") as file:
        assert [int(line["row"]) for line in csv.DictReader(file)] == list(range(980, 1000))


def test_options_that_contradict_each_other(run, files):
    assert run("estimate", "batch.npz", "--labelled", "x.csv", "--ignore-labels")[0] == 2
    code, _, err = run("estimate", "reference.npz")
    assert code == 2
    assert "--ignore-labels" in err


def test_the_monitor_estimates_windows(run, files):
    code, out, _ = run("monitor", "batch.npz", "--estimate", "reference.npz", "--json")
    assert code == 0
    row = json.loads(out)["windows"][0]
    assert row["n"] == 0
    assert row["estimate_low"] < row["estimate"] < row["estimate_high"]
