"""The verbs fit, apply and compare: one call each, figures on stdout, talk on stderr."""

import json
import os
import re
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch

import calibrant
from calibrant import io
from calibrant.calibrators import CALIBRATORS
from calibrant.calibrators.files import apply_file, fit_file
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.cli.fit import fit
from calibrant.cli.shared import method_options
from calibrant.comparison import compare
from tests.test_files import predictions
from tests.test_fit_files import PerRow, Shift, splits


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Work in a folder with a file of two splits, p.npz, and one without val set, test.npz."""
    monkeypatch.chdir(tmp_path)
    np.savez("p.npz", **splits(val=predictions(seed=1), test=predictions(rows=500, seed=2)))
    np.savez("test.npz", **splits(test=predictions(seed=3)))
    np.savez("plain.npz", **predictions(seed=4))
    return tmp_path


class Failing(TemperatureScaling):
    """Cannot be fitted."""

    def _fit_records(self, records):
        raise ValueError("no such luck")


# fit


def test_fit_saves_what_it_learned(run):
    code, out, err = run("fit", "p.npz", "--method", "ts", "-o", "saved")
    assert code == 0
    found: Any = io.load("saved")
    expected: Any = fit_file("p.npz", "ts")
    assert float(found.temperature_) == float(expected.temperature_)
    lines = out.splitlines()
    assert lines[0] == "ts on p.npz, val split"
    assert lines[1] == "564 examples, 5 classes; 1 parameter"
    assert lines[2] == f"temperature {float(expected.temperature_):.4g}"
    assert re.search(r"^on the data of the fit +before +after", out, re.M)
    val = predictions(seed=1)
    before = calibrant.evaluate(val["logits"], val["labels"], level=None)
    with torch.no_grad():
        logits = expected(torch.as_tensor(val["logits"]))
    after = calibrant.evaluate(logits, val["labels"], level=None)
    shown = re.search(r"^ECE +([\d.]+) % +([\d.]+) %", out, re.M)
    assert shown is not None
    assert float(shown[1]) == round(100 * before["ece"].value, 2)
    assert float(shown[2]) == round(100 * after["ece"].value, 2)
    assert "The fit has seen these examples" in lines[-1]
    assert err == "saved in saved; to use it: calibrant apply saved p.npz -o OUT\n"
    assert max(map(len, lines)) <= 80


def test_fit_in_json(run):
    code, out, _ = run(
        *("fit", "p.npz", "--method", "ts", "--set", "objective=brier", "-o", "saved", "--json")
    )
    found = json.loads(out)
    learned: Any = io.load("saved")
    assert code == 0
    assert learned.objective == "brier"
    temperature = float(learned.temperature_)
    assert found["learned"] == {"temperature": temperature}
    assert found["temperature"] == {"low": temperature, "high": temperature}
    for key, value in (
        *(("method", "ts"), ("options", {"objective": "brier"}), ("folds", None)),
        *(("saved", "saved"), ("split", "val"), ("n", 564), ("classes", 5), ("parameters", 1)),
        ("argmax_changed", 0),
    ):
        assert found[key] == value
    for key in ("before", "after"):
        assert list(found[key]) == ["accuracy", "ece", "nll", "brier"]
        assert found[key]["ece"].keys() == {"value", "low", "high"}
        assert found[key]["ece"]["low"] is None
    assert found["after"]["nll"]["value"] < found["before"]["nll"]["value"]


def test_range_of_temperatures_and_changed_classes_are_told(run, monkeypatch):
    monkeypatch.setitem(CALIBRATORS, "per_row", PerRow)
    monkeypatch.setitem(CALIBRATORS, "shift", Shift)
    monkeypatch.setattr(io, "save", lambda *_: None)
    each = PerRow().fit([[1.0, 0.0]], [0])
    each._fitted(5)
    val = predictions(seed=1)
    found = each.temperature(val["logits"][val["labels"] >= 0])
    _, out, _ = run("fit", "p.npz", "--method", "per_row", "-o", "saved")
    assert f"\ntemperatures from {found.min():.4g} to {found.max():.4g}\n" in out
    _, out, _ = run("fit", "p.npz", "--method", "shift", "-o", "saved")
    assert re.search(r"^the predicted class of \d+ examples changes$", out, re.M)


def test_explanation_of_a_method_is_shown(run, monkeypatch):
    monkeypatch.setattr(TemperatureScaling, "reasons", "chose it:\n  why", raising=False)
    _, out, _ = run("fit", "p.npz", "--method", "ts", "-o", "saved")
    assert out.splitlines()[1:3] == ["chose it:", "  why"]


@pytest.mark.parametrize(
    ("options", "n"),
    [(["plain.npz"], 564), (["p.npz", "--split", "test"], 470), (["test.npz", "--cross-fit"], 564)],
)
def test_split_of_a_fit(run, options, n):
    code, out, _ = run("fit", *options, "--method", "ts", "-o", "saved", "--json")
    found = json.loads(out)
    assert (code, found["n"]) == (0, n)
    assert found["split"] == (None if options == ["plain.npz"] else "test")


@pytest.mark.parametrize(("given", "folds"), [(["--cross-fit"], 5), (["--cross-fit", "3"], 3)])
def test_cross_fit(run, given, folds):
    code, out, _ = run("fit", "test.npz", *given, "--method", "ts", "-o", "saved")
    assert code == 0
    assert out.splitlines()[0] == "ts on test.npz, test split"
    assert re.search(rf"^out of {folds} folds +before +90 % interval +after +90 % ", out, re.M)
    assert re.search(r"^ECE +[\d.]+ % +\[[\d., ]+\] +[\d.]+ % +\[[\d., ]+\]", out, re.M)
    assert f"a fit on the other {folds - 1} folds" in out
    found: Any = io.load("saved")
    expected: Any = fit_file("test.npz", "ts", split="test")
    assert float(found.temperature_) == pytest.approx(float(expected.temperature_), rel=1e-6)
    assert f"temperature {float(found.temperature_):.4g}\n" in out


def test_cross_fit_in_json_with_groups_and_seed(run):
    arguments = ("fit", "plain.npz", "--method", "ts", "--cross-fit", "3", "-o", "saved", "--json")
    found = [
        json.loads(run(*arguments, *more)[1])
        for more in ([], [], ["--seed", "1"], ["--group-by", "site"], ["--weight-by", "importance"])
    ]
    nll = [one["after"]["nll"]["value"] for one in found]
    assert nll[0] == nll[1]
    assert len(set(nll)) == 4
    assert {one["folds"] for one in found} == {3}
    assert found[0]["after"]["ece"]["low"] is not None


@pytest.mark.parametrize(
    ("text", "value"),
    [("a=1", 1), ("a=nll", "nll"), ("a=[1, 2]", [1, 2]), ("a=true", True), ("a=x=y", "x=y")],
)
def test_values_of_options(text, value):
    assert method_options((text, "b=0.5")) == {"a": value, "b": 0.5}


def failing(name):
    """Return arguments of fit that cannot succeed, and the line that says why."""
    ts = ("--method", "ts")
    return {
        "test only": (["test.npz", *ts], r"error: test\.npz has no split 'val' .*--cross-fit"),
        "no split": (["p.npz", *ts, "--split", "dev"], r"error: p\.npz has no split 'dev'; found"),
        "no method": (["p.npz", "--method", "tss"], "error: unknown method 'tss': did you mean ts"),
        "no option": (["p.npz", *ts, "--set", "x=1"], "error: ts has no option 'x': its options a"),
        "bad value": (
            ["p.npz", *ts, "--set", "objective=x"],
            "error: objective must be one of nll",
        ),
        "no value": (
            ["p.npz", *ts, "--set", "objective"],
            "Error: --set wants KEY=VALUE, got obje",
        ),
        "one fold": (["p.npz", *ts, "--cross-fit", "1"], "Error: .*--cross-fit.*1"),
        "no weight": (["p.npz", *ts, "--weight-by", "age"], r"error: p\.npz has no age"),
        "no group": (["p.npz", *ts, "--group-by", "age"], r"error: p\.npz has no age"),
        "no file": (["gone.npz", *ts], r"error: gone\.npz does not exist"),
    }[name]


@pytest.mark.parametrize(
    "name",
    [
        *("test only", "no split", "no method", "no option", "bad value", "no value", "one fold"),
        *("no weight", "no group", "no file"),
    ],
)
def test_failed_fit_saves_nothing(run, name):
    arguments, message = failing(name)
    code, out, err = run("fit", *arguments, "-o", "saved")
    assert (code, out) == (2, "")
    assert re.search(f"^{message}", err, re.M)
    assert "Traceback" not in err
    assert not os.path.exists("saved")


def test_fit_needs_a_place_to_save(run):
    code, _, err = run("fit", "p.npz", "--method", "ts")
    assert code == 2
    assert "Missing option '-o'" in err


def test_auto_is_the_default():
    given = {parameter.name: parameter.default for parameter in fit.params}
    assert given["method"] == "auto"


# apply


def test_apply_writes_the_calibrated_file(run):
    run("fit", "p.npz", "--method", "ts", "-o", "saved")
    code, out, err = run("apply", "saved", "p.npz", "-o", "out.npz")
    assert (code, out) == (0, "")
    assert err == "wrote out.npz; to measure it: calibrant evaluate out.npz\n"
    apply_file(io.load("saved"), "p.npz", "expected.npz")
    found, expected = np.load("out.npz"), np.load("expected.npz")
    assert list(found) == list(expected)
    for key in expected:
        np.testing.assert_array_equal(found[key], expected[key])
    assert run("evaluate", "out.npz", "--metrics", "ece", "--level", "0")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("saved", "p.npz", "-o", "p.npz"), r"error: p\.npz is part of the input"),
        (("saved", "p.npz", "-o", "out.csv"), r"error: cannot write out\.csv: the suffix"),
        (("saved", "gone.npz", "-o", "out.npz"), r"error: gone\.npz does not exist"),
        (("gone", "p.npz", "-o", "out.npz"), "error: .*folder gone"),
        (("saved", "p.npz"), "Error: Missing option '-o'"),
    ],
)
def test_failed_apply(run, arguments, message):
    run("fit", "p.npz", "--method", "ts", "-o", "saved")
    before = sorted(os.listdir())
    code, out, err = run("apply", *arguments)
    assert (code, out) == (2, "")
    assert re.search(f"^{message}", err, re.M)
    assert sorted(os.listdir()) == before


# compare


def test_compare_prints_a_table(run, monkeypatch):
    made = []

    def kept(*given, **options):
        made.append(compare(*given, **options))
        return made[0]

    monkeypatch.setattr("calibrant.comparison.compare", kept)
    code, out, err = run("compare", "p.npz", "--methods", "none,ts", "--bins", "10")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "p.npz"
    assert "fitted on 564 examples (val split), measured on 470 (test split)" in lines[1]
    assert max(map(len, lines[2:])) <= 80
    assert re.search(r"^method +ECE % +90 % interval +NLL +Brier +acc. % +changed +fit", out, re.M)
    for method, row in zip(("none", "ts"), made[0].table()[1:], strict=True):
        shown = next(line for line in lines if line.startswith(f"{method} "))
        assert shown.split() == " ".join(row).split()
    assert "* best, or within the interval of the best" in lines
    assert lines[-1].startswith(("Use ts: the least NLL", "No method is clearly better"))


def test_compare_in_json(run):
    arguments = ("compare", "p.npz", "--methods", "ts, none", "--json", "--level", "0")
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["n_fit"], found["n_test"], found["classes"]) == (564, 470, 5)
    assert [row["method"] for row in found["rows"]] == ["ts", "none"]
    for row in found["rows"]:
        assert row["metrics"]["ece"].keys() == {"value", "low", "high"}
        assert row["metrics"]["ece"]["low"] is None
        assert row["argmax_changed"] == 0
        assert row["error"] is None
        assert row["fit_seconds"] >= 0


def test_options_reach_the_comparison(run, monkeypatch):
    asked: dict[str, Any] = {}

    def spy(pred, methods, **options):
        asked.update(options, pred=pred, methods=methods)
        return compare("p.npz", "none", level=None)

    monkeypatch.setattr("calibrant.comparison.compare", spy)
    run(
        *("compare", "x.npz", "--time-limit", "5", "--fit-split", "a", "--test-split", "b"),
        *("--weight-by", "w", "--group-by", "g", "--bins", "7", "--level", "0.5", "--seed", "3"),
    )
    asked.pop("progress")
    assert asked == {
        **{"pred": "x.npz", "methods": None, "time_limit": 5, "fit_split": "a", "test_split": "b"},
        **{"weight": "w", "groups": "g", "bins": 7, "level": 0.5, "seed": 3},
    }
    run("compare", "x.npz", "--time-limit", "0", "--level", "0")
    assert (asked["time_limit"], asked["level"]) == (None, None)


def test_failed_methods_are_told_and_only_all_failed_exits_2(run, monkeypatch):
    monkeypatch.setitem(CALIBRATORS, "failing", Failing)
    options = ("--level", "0")
    code, out, err = run("compare", "p.npz", "--methods", "failing,none", *options)
    assert (code, err) == (0, "")
    assert re.search(r"^failing +failed +[\d.]+ s", out, re.M)
    assert "failing failed: no such luck" in out
    code, out, _ = run("compare", "p.npz", "--methods", "failing", *options)
    assert code == 2
    assert "No method could be fitted and measured." in out


def test_half_of_plain_arrays(run):
    code, out, _ = run("compare", "plain.npz", "--methods", "none", "--level", "0", "--seed", "7")
    assert code == 0
    assert "282 examples (a random half of the plain arrays, seed 7), measured on 282 (the" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["p.npz", "--methods", "smrt,ts"], "error: unknown method 'smrt'"),
        (["gone.npz"], r"error: gone\.npz does not exist"),
        (["p.npz", "--fit-split", "dev"], r"error: p\.npz has no split 'dev'"),
        (["p.npz", "--time-limit", "-1"], "Error: .*--time-limit.*-1"),
    ],
)
def test_failed_comparison(run, arguments, message):
    code, out, err = run("compare", *arguments)
    assert (code, out) == (2, "")
    assert re.search(f"^{message}", err, re.M)


def test_bar_counts_methods(run, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def slow(pred, methods, *, progress, **_):
        for done in (0, 1, 2):
            now[0] += 2
            progress(done, 2)
        return compare("p.npz", "none", level=None)

    monkeypatch.setattr("calibrant.comparison.compare", slow)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    _, _, err = run("compare", "p.npz")
    assert re.search("2/2.* methods", err)


@pytest.mark.parametrize(("verb", "count"), [("fit", 3), ("apply", 2), ("compare", 2)])
def test_help_has_examples_that_parse(run, monkeypatch, verb, count):
    monkeypatch.setitem(CALIBRATORS, "auto", CALIBRATORS.get("auto", TemperatureScaling))
    code, out, _ = run(verb, "-h")
    assert code == 0
    examples = re.findall(rf"^ +calibrant ({verb} .*)$", out, re.M)
    assert len(examples) == count
    for example in examples:
        code, _, err = run(*example.replace("'", "").split())
        assert code == 2
        assert re.match(r"error: (\S+ does not exist|.*folder calibrator)", err)
