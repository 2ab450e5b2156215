"""The verb slices, and evaluate by subgroups that are found."""

import csv
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import calibrant as cal


@pytest.fixture
def table(rng, tmp_path, monkeypatch):
    """A CSV file whose probabilities are too high for the young of one site."""
    monkeypatch.chdir(tmp_path)
    n = 4000
    age, site = rng.integers(20, 80, n), rng.choice(["A", "B"], n)
    probs = rng.uniform(0.001, 0.999, size=n).round(4)
    truth = np.where((age < 40) & (site == "B"), probs / 2, probs)
    labels = (rng.uniform(size=n) < truth).astype(int)
    with open("predictions.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["prob", "label", "age", "site"])
        writer.writerows(zip(probs, labels, age, site, strict=True))
    return "predictions.csv"


def test_the_worst_subgroup_stands_first(run, table):
    code, out, err = run("slices", table)
    assert (code, err) == (0, "")
    assert "all intervals hold together" in out
    worst = "miscalibrated: the gap furthest beyond noise is that of age <"
    assert worst in " ".join(out.split())
    found = json.loads(run("slices", table, "--json")[1])
    expected = cal.find_slices(table).to_dict()
    assert found == json.loads(json.dumps({"format": 1, **expected, "skipped": {}}))
    assert "site = B" in found["slices"][0]["name"]


def test_columns_depth_and_calibrator(run, table):
    cal.save(cal.fit(table, method="sigmoid"), "calibrator")
    arguments = ("--columns", "site", "--depth", "1", "--calibrator", "calibrator", "--json")
    found = json.loads(run("slices", table, *arguments)[1])
    assert found["columns"] == ["site", "P(1)"]
    code, _, err = run("slices", table, "--columns", "sites")
    assert code == 2
    assert "did you mean site?" in err


def test_known_groups(run, table):
    cal.save(cal.fit(table, method="sigmoid"), "calibrator")
    out = run("slices", table, "--by", "site", "--calibrator", "calibrator")[1]
    assert "B after" in out
    assert "TPR %" in out
    for option in (("--columns", "age"), ("--depth", "2")):
        code, _, err = run("slices", table, "--by", "site", *option)
        assert code == 2
        assert f"{option[0]} is for a search" in err


def test_evaluate_measures_found_subgroups_in_the_other_half(run, table):
    found = json.loads(run("evaluate", table, "--by", "auto", "--metrics", "ece", "--json")[1])
    assert found["n"] == 4000
    name, worst = max(found["by"].items(), key=lambda item: item[1]["metrics"]["ece"]["low"])
    assert "site = B" in name
    frame = np.genfromtxt(table, delimiter=",", names=True, dtype=None, encoding="utf-8")
    assert worst["n"] < 0.6 * (frame["site"] == "B").sum()
    assert worst["metrics"]["ece"]["value"] == pytest.approx(0.25, abs=0.1)


def test_a_report_names_them(run, table):
    assert run("report", table, "--methods", "none,ts", "-o", "report.json")[0] == 0
    with open("report.json") as file:
        subject = json.load(file)["subjects"][0]
    codes = {finding["code"]: finding for finding in subject["findings"]}
    assert "site = B" in codes["CAL018"]["evidence"]
    count = sum(each["number"] for each in subject["slices"]["off"])
    one = f"{count} of {subject['slices']['searched']} subgroups are miscalibrated"
    assert codes["CAL018"]["evidence"].startswith(one)  # as under "Where it is off"
    assert subject["slices"]["verdict"].startswith(one)
    assert subject["slices"]["columns"] == ["age", "site"]
    page = run("report", table, "--methods", "", "--by", "auto", "-o", "-")[1]
    assert "by age, site, P(1)" in page


def test_groups_that_are_off_with_the_model_are_never_passed_over(run, tmp_path, monkeypatch, rng):
    monkeypatch.chdir(tmp_path)
    logits = 1.5 * rng.normal(size=(4000, 5))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(1)
    np.savez("p.npz", logits=2 * logits, labels=labels, colour=rng.choice(list("DEFG"), 4000))
    said = "over-confident by"
    for arguments in (("slices", "p.npz"), ("slices", "p.npz", "--by", "colour")):
        out = " ".join(run(*arguments)[1].split())
        assert said in out
        assert "as the model is as a whole" in out
    found = " ".join(run("evaluate", "p.npz", "--by", "auto")[1].split())
    assert re.search(r"Search in half of the examples: [\d,]+ of [\d,]+ subgroups are", found)
    assert "search" in json.loads(run("evaluate", "p.npz", "--by", "auto", "--json")[1])
    options = ("--methods", "", "--by", "colour")
    page = run("report", "p.npz", *options, "-o", "-")[1]
    assert "All subgroups are off, as the model is as a whole" in page
    assert "by colour. All 4 subgroups are over-confident by" in page
    for text in (page, found):
        assert "No subgroup is shown to be miscalibrated" not in text
    assert run("report", "p.npz", *options, "-o", "r.json")[0] == 0
    with open("r.json") as file:
        stored = json.load(file)["subjects"][0]["slices"]
    assert "as the model is as a whole" in stored["verdict"]
    assert stored["off"][0]["number"] == stored["off"][0]["searched"] == 4


def test_a_column_named_like_a_prediction_is_metadata_of_a_report(run, tmp_path, monkeypatch, rng):
    monkeypatch.chdir(tmp_path)
    logits = 2 * rng.normal(size=(2000, 3))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(1)
    rated = rng.choice(["low", "high"], 2000)
    labels[(rated == "low") & (rng.uniform(size=2000) < 0.5)] = 0
    np.savez("p.npz", logits=logits, labels=labels, confidence=rated)
    assert run("report", "p.npz", "--methods", "", "-o", "r.json")[0] == 0
    with open("r.json") as file:
        found = json.load(file)["subjects"][0]["slices"]["slices"]
    assert found[0]["name"] == "confidence = low"
    code, _, err = run("evaluate", "p.npz", "--by", "auto")
    assert code == 2
    assert "rename the column 'confidence'" in err


def test_a_report_has_the_commands_that_correct_subgroups(run, table):
    assert run("report", table, "--methods", "none,sigmoid", "-o", "r.md")[0] == 0
    block = Path("r.md").read_text("utf-8").split("a fit without corrections equals auto:")[1]
    compare, fit = re.findall("^calibrant (.*)$", block.split("```")[1], re.M)
    assert "--columns" in fit
    assert run(*shlex.split(fit), "-q")[0] == 0
    assert "multicalibration" in run(*shlex.split(compare), "--level", "0", "-q")[1]
