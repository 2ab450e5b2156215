"""The verbs compare and demo."""

import json
import re
import sys
from typing import Any

import numpy as np
import pytest

import calibrant
from calibrant._core.engines import current_work, silently
from calibrant.calibrators.registry import CALIBRATORS
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.cli.compare import STEPS
from calibrant.data import sample_path
from calibrant.show.workflows import _methods_table
from calibrant.workflows.compare import compare
from tests.support.command_line import figures, set_clock
from tests.support.simulate import drawn_tags

pytestmark = pytest.mark.usefixtures("folder")


class Failing(TemperatureScaling):
    """Cannot be fitted."""

    def _fit_records(self, records):
        raise ValueError("no such luck")


def test_a_table_for_latex(run, monkeypatch):
    made = []

    def kept(*given, **options):
        made.append(compare(*given, **options))
        return made[0]

    code, out, _ = run("evaluate", "p.npz", "--by", "region", "--metrics", "ece,nll", "--latex")
    evaluation = calibrant.evaluate("p.npz", metrics=["ece", "nll"], by="region")
    assert (code, out) == (0, evaluation.to_latex() + "\n")
    monkeypatch.setattr("calibrant.workflows.compare.compare", kept)
    code, out, _ = run("compare", "p.npz", "--methods", "none,ts", "--latex")
    assert (code, out) == (0, made[0].to_latex() + "\n")
    assert [row.method for row in made[0].rows] == ["none", "ts"]
    assert r"\textbf" in out


def test_compare_prints_a_table(run, monkeypatch):
    made = []

    def kept(*given, **options):
        made.append(compare(*given, **options))
        return made[0]

    monkeypatch.setattr("calibrant.workflows.compare.compare", kept)
    code, out, err = run("compare", "p.npz", "--methods", "none,ts")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "p.npz"
    assert max(map(len, lines)) <= 80
    said, about = out.split("5 classes; ")[:2]
    assert " ".join(said.split()[1:]) == made[0].advice()
    measured = "fitted on 564 examples (val split), measured on 470 (test split)"
    assert " ".join(about.split()).startswith(measured)
    assert re.search(r"^method +ECE % +90 % interval +NLL +Brier +acc. % +changed +fit", out, re.M)
    for method, row in zip(("none", "ts"), _methods_table(made[0]).rows, strict=True):
        shown = next(line for line in lines if line.startswith(f"{method} "))
        assert shown.split() == " ".join(row).split()
    legend = " ".join(out[out.index("Bold type or a star: ") :].split())
    assert legend.startswith(f"Bold type or a star: {made[0].legend()}.")


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


@pytest.mark.parametrize("estimand", ["binary", "top_label"])
def test_compare_of_two_classes_says_which_probability_was_measured(run, rng, estimand):
    z = 2 * rng.normal(size=300)
    labels = (rng.random(300) < 1 / (1 + np.exp(2 - z))).astype(int)
    half = {"val_logits": z[:150], "val_labels": labels[:150]}
    np.savez("two.npz", **half, test_logits=z[150:], test_labels=labels[150:])
    flag = ("--top-label",) if estimand == "top_label" else ()
    arguments = ("compare", "two.npz", "--methods", "none", "--level", "0", *flag)
    _, out, _ = run(*arguments, "--json")
    options: dict[str, Any] = {"estimand": estimand, "metrics": ["ece"], "level": None}
    expected = calibrant.evaluate(z[150:], labels[150:], **options)["ece"].value
    found = json.loads(out)
    assert found["estimand"] == estimand
    assert found["rows"][0]["metrics"]["ece"]["value"] == pytest.approx(expected)
    _, out, _ = run(*arguments)
    assert ("2 classes, ECE of P(y = 1); fitted on 150" in out) == (estimand == "binary")


def test_options_reach_the_comparison(run, monkeypatch):
    asked: dict[str, Any] = {}

    def spy(pred, *, methods, **options):
        asked.update(options, pred=pred.path, methods=methods)
        return compare("p.npz", methods="none", level=None)

    monkeypatch.setattr("calibrant.workflows.compare.compare", spy)
    run(
        *("compare", "p.npz", "--time-limit", "5", "--fit-split", "test", "--split", "val"),
        *("--sample-weight", "w", "--groups", "g", "--level", "0.5"),
    )
    assert asked == {
        **{"pred": "p.npz", "methods": None, "time_limit": 5},
        **{"fit_split": "test", "test_split": "val"},
        **{"sample_weight": "w", "groups": "g", "level": 0.5},
        "estimand": "auto",
        "columns": None,
    }
    run("compare", "p.npz", "--time-limit", "0", "--level", "0", "--methods", "TS, None")
    assert (asked["time_limit"], asked["level"]) == (None, 0)
    assert asked["methods"] == ["TS", "None"]  # the workflow understands any case


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


def test_plain_arrays_are_cross_fitted(run):
    code, out, _ = run("compare", "plain.npz", "--methods", "none", "--level", "0")
    assert code == 0
    said = "measured on 564 (the same, each by a fit on the other folds; 5 folds, seed 0)"
    assert f"564 examples (unnamed split), {said}" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["p.npz", "--methods", "smrt,ts"], "error: unknown method 'smrt'"),
        (["gone.npz"], r"error: gone\.npz does not exist"),
        (
            ["p.npz", "--fit-split", "x"],
            r"error: p\.npz: unknown split 'x': choose from val, test$",
        ),
        (["test.npz", "--split", "val"], r"error: test\.npz: unknown split 'val': choose f"),
        (
            ["plain.npz", "--fit-split", "val"],
            r"error: plain\.npz has no split 'val', only an unnamed",
        ),
        (["p.npz", "--time-limit", "-1"], "Error: .*--time-limit.*-1"),
    ],
)
def test_failed_comparison(run, arguments, message):
    code, out, err = run("compare", *arguments)
    assert (code, out) == (2, "")
    assert re.search(f"^{message}", err, re.M)


def test_bar_counts_methods(run, monkeypatch):
    now = [0.0]
    set_clock(monkeypatch, now)

    def slow(pred, *, methods, **_):
        progress = current_work().progress
        assert progress is not None
        for done in (0, 1, 2):
            now[0] += 2
            progress(done, 2)
        with silently():
            return compare("p.npz", methods="none", level=None)

    monkeypatch.setattr("calibrant.workflows.compare.compare", slow)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    _, _, err = run("compare", "p.npz")
    assert re.search("2/2.* methods", err)


def test_demo_measures_and_calibrates_the_sample(run):
    code, out, err = run("demo")
    assert code == 0
    assert re.fullmatch(r"(\d of 4 methods\n)*", err)  # where it takes longer than ten seconds
    assert "CIFAR-10" in out
    assert figures(out)["accuracy"][0] == 93.37
    assert str(sample_path()) in out
    assert re.search(r"93 to 100 % +9,143 +97\.1 % +■+│", out)
    rows = re.findall(
        r"^(none|ts|smart|auto) +\*?([\d.]+) +\[.*\] +\*?[\d.]+ .* +93\.37 +0 ", out, re.M
    )
    assert [method for method, _ in rows] == ["none", "ts", "smart", "auto"]
    assert float(rows[0][1]) == 4.24
    assert max(float(ece) for _, ece in rows[1:]) < 1.5
    assert "Use " in out
    described = ("calibration of", "fitted on", "Use ", str(sample_path()))  # not wrapped
    lines = [line for line in out.splitlines() if not any(text in line for text in described)]
    assert max(map(len, lines)) <= 80


def test_the_commands_that_the_demo_names_exist(run):
    named = re.findall(r"^  calibrant (\w+) (.*)$", STEPS, re.M)
    assert [verb for verb, _ in named] == ["evaluate", "compare", "fit", "apply"]
    for verb, rest in named:
        code, _, err = run(verb, *rest.split())
        assert code == 2
        assert "does not exist" in err or "there is no artifact" in err


def test_demo_in_ascii(run, monkeypatch):
    def quick(data, *, methods):
        return compare(data, methods=["none"], level=None)

    monkeypatch.setattr("calibrant.workflows.compare.compare", quick)
    monkeypatch.setattr("rich.console.Console.encoding", "ascii")
    code, out, err = run("demo")
    assert (code, err) == (0, "")
    assert out.isascii()
    assert re.search(r"97\.1 % +#+\|", out)


def test_compare_tags(run):
    logits, labels = drawn_tags(np.random.default_rng(0), 600, np.array([0.4, 0.6]), np.zeros(2))
    np.savez("tags.npz", logits=logits, labels=labels)
    code, out, _ = run("compare", "tags.npz", "--multilabel")
    assert code == 0
    said = " ".join(out.split())
    assert re.match(r"tags.npz Use (pooled|tags) \(cross-validated", said)
    assert "2 tags; fitted on 1,200 labels (unnamed split), measured on" in said
    assert re.findall(r"^(?:none|pooled|tags)(?= )", out, re.M) == ["none", "pooled", "tags"]
