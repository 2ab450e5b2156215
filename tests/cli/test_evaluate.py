"""The verb evaluate: figures on stdout, messages on stderr, exit codes 0, 1 and 2."""

import json
import math
import re

import numpy as np
import pytest

import calibrant
from calibrant.data import save_predictions
from tests.support.command_line import ROWS, figures, in_shell
from tests.support.metrics import ANY_CLASSES

# What is printed.


def test_table_shows_every_metric_in_percent_or_plain(run, path, arrays):
    code, out, err = run("evaluate", path)
    assert (code, err) == (0, "")
    shown = figures(out)
    expected = calibrant.evaluate(arrays["logits"], arrays["labels"])
    assert len(shown) == len(ANY_CLASSES)
    for title, name, percent in (("ECE", "ece", True), ("NLL", "nll", False)):
        value, is_percent, low = shown[title]
        scale, digits = (100, 2) if percent else (1, 4)
        assert is_percent == percent
        assert value == round(scale * expected[name].value, digits)
        assert low == round(scale * expected[name].low, digits)
    assert out.splitlines()[0] == "p.npz"
    assert "400 examples, 4 classes" in out
    assert "90 % interval" in out
    assert "\nMiscalibrated (p " in out
    assert max(map(len, out.splitlines())) <= 80


def test_json_has_the_promised_form(run, path, arrays):
    code, out, err = run("evaluate", path, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found.keys() >= {"n", "classes", "split", "metrics"}
    assert (found["n"], found["classes"], found["split"]) == (ROWS, 4, None)
    assert list(found["metrics"]) == ANY_CLASSES
    expected = calibrant.evaluate(arrays["logits"], arrays["labels"], level=None)
    for name, figure in found["metrics"].items():
        assert figure.keys() == {"value", "low", "high"}
        assert figure["value"] == pytest.approx(expected[name].value, abs=1e-12)  # a fraction
        assert figure["low"] <= figure["high"]
    right = (arrays["logits"].argmax(1) == arrays["labels"]).mean()
    assert found["metrics"]["accuracy"]["value"] == pytest.approx(right)


@pytest.mark.parametrize("level", ["0.9", "0"])
def test_undefined_figures_are_null(run, tmp_path, rng, level):
    logits = rng.normal(size=(90, 3))
    np.savez(tmp_path / "p.npz", logits=logits, labels=logits.argmax(1))
    code, out, _ = run("evaluate", tmp_path / "p.npz", "--json", "--level", level)
    assert code == 0
    assert "NaN" not in out
    found = json.loads(out)["metrics"]
    assert found["auroc"] == {"value": None, "low": None, "high": None}
    assert found["accuracy"]["value"] == 1
    assert (found["accuracy"]["low"] is None) == (level == "0")
    _, table, _ = run("evaluate", tmp_path / "p.npz", "--level", level)
    assert re.search(r"^AUROC of confidence +-\s*$", table, re.M)


def test_talk_stays_out_of_the_json(tmp_path):
    np.savez(tmp_path / "p.npz", probs=np.eye(3)[[0, 1, 2]], labels=[0, 1, 1])
    done = in_shell("evaluate", tmp_path / "p.npz", "--json", "--max", "ece=0.01")
    assert done.returncode == 1
    assert json.loads(done.stdout)["metrics"]["ece"]["value"] == pytest.approx(1 / 3)
    warning, limit, _, row = done.stderr.splitlines()
    assert warning.startswith("warning: 1 labels have a probability of 0, ")
    assert limit == "1 limit is exceeded:"
    assert row.split() == ["all", "examples", "3", "ECE", "0.3333", "0.01", "exceeded"]


def test_names_are_printed_as_they_are(run, tmp_path, monkeypatch, arrays):
    """Brackets and colons mean nothing, though the library that prints has uses for them."""
    monkeypatch.chdir(tmp_path)
    odd = {"a": "[/b]", "b": "[red]", "c": ":smile:"}
    region = np.array([odd[name] for name in arrays["region"]])
    np.savez("[bold]:x:.npz", **arrays | {"region": region})
    code, out, _ = run(
        "evaluate", "[bold]:x:.npz", "--by", "region", "--metrics", "ece", "--level", "0"
    )
    assert code == 0
    assert out.splitlines()[0] == "[bold]:x:.npz"
    assert all(re.search(rf"^{re.escape(name)} ", out, re.M) for name in odd.values())


# The options.


@pytest.mark.parametrize(
    ("options", "split", "n"),
    [([], "test", ROWS), (["--split", "val"], "val", 90), (["--split", "test"], "test", ROWS)],
)
def test_split(run, split_file, options, split, n):
    code, out, _ = run("evaluate", split_file, "--json", "--metrics", "ece", *options)
    found = json.loads(out)
    assert (code, found["split"], found["n"]) == (0, split, n)
    _, table, _ = run("evaluate", split_file, "--metrics", "ece", *options)
    assert table.splitlines()[0] == f"{split_file}, {split} split"


def test_a_limit_is_a_fraction_that_may_be_reached(run, path):
    ece = json.loads(run("evaluate", path, "--json", "--metrics", "ece")[1])["metrics"]["ece"]
    limit = ("evaluate", path, "--metrics", "ece", "--level", "0", "--max")
    assert run(*limit, f"ece={ece['value']!r}")[0] == 0
    assert run(*limit, f"ece={math.nextafter(ece['value'], 0)!r}")[0] == 1
    assert run(*limit, "ece=1")[0] == 0
    code, out, err = run(*limit, "ece=0.01")
    assert code == 1
    assert "ECE" in out  # the table is printed all the same
    row = f"all examples  {ROWS}  ECE  {ece['value']:.4f}  0.01  exceeded"
    assert err.startswith("1 limit is exceeded:\n  subgroup ")
    assert re.sub(" {2,}", "  ", err.splitlines()[-1]) == f"  {row}"
    assert run(*limit[:-1], "--max", "ece=0.01")[::2] == (1, err)


def test_only_the_point_value_counts_for_the_limit(run, path):
    ece = json.loads(run("evaluate", path, "--json", "--metrics", "ece")[1])["metrics"]["ece"]
    middle = (ece["value"] + ece["high"]) / 2
    assert ece["value"] < middle < ece["high"]
    assert run("evaluate", path, "--metrics", "ece", "--max", f"ece={middle}")[0] == 0
    code, _, err = run("evaluate", path, "--metrics", "ece", "--max", f"ece.high={middle}")
    assert code == 1
    assert "ECE, upper end" in err


def test_limits_of_several_metrics_hold_in_every_subgroup(run, path):
    options = ("--by", "region", "--max", "nll=9", "--min", "accuracy=0.999", "--json")
    code, out, err = run("evaluate", path, *options)
    found = json.loads(out)
    groups = [None, *found["by"]]
    assert [(each["subgroup"], each["metric"]) for each in found["limits"]] == [
        (group, metric) for group in groups for metric in ("nll", "accuracy")
    ]
    judged = [each for each in found["limits"] if each["judged"]]
    beyond = [each for each in judged if each["exceeded"]]
    assert {each["metric"] for each in beyond} == {"accuracy"}
    assert len(beyond) > 1
    assert code == 1
    shown = sum(e["exceeded"] or not e["judged"] for e in found["limits"])
    assert len(err.splitlines()[2:]) == shown
    for each in beyond:
        part = found if each["subgroup"] is None else found["by"][each["subgroup"]]
        assert each["value"] == part["metrics"]["accuracy"]["value"] < each["limit"] == 0.999
    assert "limits" not in json.loads(run("evaluate", path, "--json")[1])


def test_groups_come_worst_first(run, path, arrays):
    options = ("--by", "region", "--metrics", "accuracy,ece", "--level", "0")
    _, out, _ = run("evaluate", path, "--json", *options)
    groups = json.loads(out)["by"]
    assert list(groups) == ["c", "a", "b"]
    for name, found in groups.items():
        rows = arrays["region"] == name
        part = calibrant.evaluate(arrays["logits"][rows], arrays["labels"][rows], level=None)
        assert found["n"] == rows.sum()
        assert found["metrics"]["ece"]["value"] == pytest.approx(part["ece"].value, abs=1e-12)
    _, table, _ = run("evaluate", path, *options)
    assert re.findall(r"^([abc]) +13", table, re.M) == ["c", "a", "b"]
    assert re.findall(r"^([abc]) ", table, re.M) == ["c", "a", "b"]


def test_groups_without_ece_claim_no_order(run, path):
    _, table, _ = run("evaluate", path, "--by", "region", "--metrics", "brier", "--level", "0")
    assert "worst" not in table
    assert len(re.findall(r"^[abc] +\d+ +\d\.\d{4}", table, re.M)) == 3


def test_weights(run, path, arrays):
    options = ("--json", "--metrics", "accuracy,ece", "--level", "0")
    _, out, _ = run("evaluate", path, "--sample-weight", "importance", *options)
    right = arrays["logits"].argmax(1) == arrays["labels"]
    weighted = np.average(right, weights=arrays["importance"])
    found = json.loads(out)["metrics"]
    assert found["accuracy"]["value"] == pytest.approx(weighted)
    assert weighted != pytest.approx(right.mean(), abs=1e-4)


def test_multilabel(run, tmp_path):
    logits = np.array([[0.0, 2.0], [0.0, 2.0]])
    save_predictions(tmp_path / "p.npz", {"logits": logits, "labels": [[0, 1], [1, 1]]})
    options = ("--metrics", "ece", "--level", "0", "--json")
    code, out, _ = run("evaluate", tmp_path / "p.npz", "--multilabel", *options)
    found = json.loads(out)
    assert (code, found["n"]) == (0, 4)
    # half of the cells claim 1/2 rightly, the others sigmoid(2) where 1 happened
    expected = (1 - 1 / (1 + math.exp(-2))) / 2
    assert found["metrics"]["ece"]["value"] == pytest.approx(expected)
    code, out, err = run("evaluate", tmp_path / "p.npz", *options)
    assert (code, out) == (2, "")
    assert "multilabel" in err


@pytest.mark.parametrize("one_logit", [True, False])
def test_binary(run, tmp_path, one_logit):
    logits = np.array([-3.0, -3.0])
    labels = [0, 1]
    wide = logits if one_logit else np.stack([np.zeros(2), logits], 1)
    np.savez(tmp_path / "p.npz", logits=wide, labels=labels)
    options = ("--metrics", "auroc,ece", "--level", "0", "--json")
    claimed = 1 / (1 + math.exp(3))
    code, out, _ = run("evaluate", tmp_path / "p.npz", *options)
    assert code == 0
    assert json.loads(out)["estimand"] == "binary"
    assert json.loads(out)["metrics"]["ece"]["value"] == pytest.approx(0.5 - claimed)
    _, out, _ = run("evaluate", tmp_path / "p.npz", "--top-label", *options)
    assert json.loads(out)["estimand"] == "top_label"
    assert json.loads(out)["metrics"]["ece"]["value"] == pytest.approx(0.5 - claimed)
    _, out, _ = run("evaluate", tmp_path / "p.npz")
    assert "calibration of P(y = 1)" in out


@pytest.mark.parametrize("given", ["nll,ece", "nll, ece", "nll,ece,", "NLL,Ece"])
def test_choice_of_metrics(run, path, given):
    _, out, _ = run("evaluate", path, "--json", "--metrics", given)
    assert list(json.loads(out)["metrics"]) == ["nll", "ece"]


def test_level_and_bins(run, path):
    def interval(level, *options):
        _, out, _ = run("evaluate", path, "--json", "--metrics", "ece", "--level", level, *options)
        return json.loads(out)["metrics"]["ece"]

    assert interval(0)["low"] is None
    wide, narrow = interval(0.99), interval(0.5)
    assert wide["high"] - wide["low"] > narrow["high"] - narrow["low"]
    assert interval(0, "--bins", 1)["value"] < interval(0)["value"]
    _, table, _ = run("evaluate", path, "--metrics", "ece", "--level", "0")
    assert "interval" not in table
    assert "[" not in table.splitlines()[-1]


# Failures.


def failing(name):
    """Return arguments that cannot succeed, and the line that says why."""
    return {
        "missing file": (["gone.npz"], r"error: gone\.npz does not exist; expected a prediction"),
        "no match": (["gone*.npz"], r"error: no file in .* matches gone\*\.npz"),
        "bad split": (
            ["p.npz", "--split", "dev"],
            "error: p.npz has no split 'dev', only an unnamed",
        ),
        "corrupt file": (["torn.npz"], r"error: torn\.npz is damaged or incomplete"),
        "not a number": (["nan.npz"], r"error: nan\.npz: logits must be finite.* row 2 has NaN"),
        "no labels": (["unlabelled.npz"], "error: unlabelled.npz has no labels"),
        "other suffix": (["notes.txt"], r"error: notes\.txt is not a prediction file"),
        "unknown metric": (["p.npz", "--metrics", "ecee"], "error: unknown metric 'ecee': did"),
        "unknown group": (["p.npz", "--by", "age"], "error: p.npz has no age .*; found logi"),
        "unknown weight": (
            ["p.npz", "--sample-weight", "age"],
            "error: p.npz has no age in this s",
        ),
        "no bins": (["p.npz", "--bins", "0"], "error: bins must be a positive whole number"),
        "bad level": (["p.npz", "--level", "90"], "Error: .*--level.*90"),
        "percent limit": (
            ["p.npz", "--max", "ece=3"],
            r"error: the limit of ece must be a fraction",
        ),
        "limit of nan": (
            ["p.npz", "--max", "ece=nan"],
            "error: the limit of ece must be .*got nan",
        ),
        "limit unmeasured": (
            ["p.npz", "--max", "ece=0.1", "--metrics", "nll"],
            "Error: the limits need ece among the --metrics",
        ),
        "typo": (["p.npz", "--splt", "val"], "Error: No such option.*--split"),
        "no argument": ([], "Error: Missing argument 'PRED'"),
    }[name]


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    "name",
    [
        *("missing file", "no match", "bad split", "corrupt file", "not a number", "no labels"),
        *("other suffix", "unknown metric", "unknown group", "unknown weight"),
        *("no bins", "bad level", "percent limit", "limit of nan", "limit unmeasured", "typo"),
        "no argument",
    ],
)
def test_failure_is_explained_and_exits_2(run, name):
    with open("p.npz", "rb") as whole, open("torn.npz", "wb") as torn:
        torn.write(whole.read()[:500])
    np.savez("nan.npz", logits=[[0.0, 1.0], [0.0, 1.0], [0.0, np.nan]], labels=[0, 0, 0])
    np.savez("unlabelled.npz", logits=np.zeros((2, 2)))
    open("notes.txt", "w").close()
    arguments, message = failing(name)
    code, out, err = run("evaluate", *arguments)
    assert (code, out) == (2, "")
    assert re.search(f"^{message}", err, re.M)
    assert "Traceback" not in err
    if message.startswith("error"):
        assert err.count("\n") == 1  # one line, none of them empty
