"""The verbs fit and apply."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import calibrant
from calibrant import artifacts
from calibrant.calibrators.registry import CALIBRATORS
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.calibrators.tags import TagScaling
from calibrant.data import open_dataset, save_predictions
from calibrant.workflows.apply import apply
from calibrant.workflows.fit import fit as fit_workflow
from tests.support.calibrators import PerRow, Shift
from tests.support.prediction_files import arrays_in
from tests.support.predictions import predictions
from tests.support.simulate import drawn, drawn_tags, preferring

pytestmark = pytest.mark.usefixtures("folder")


# fit


def test_fit_saves_what_it_learned(run):
    code, out, err = run("fit", "p.npz", "--method", "ts", "-o", "saved")
    assert code == 0
    found: Any = artifacts.load("saved")
    expected: Any = fit_workflow("p.npz", method="ts")
    assert float(found.temperature_) == float(expected.temperature_)
    lines = out.splitlines()
    assert lines[0] == "ts on p.npz, val split"
    about = f"1 parameter, temperature {float(expected.temperature_):.4g}"
    assert lines[1].startswith("On the data of the fit: ECE ")
    assert lines[3] == f"564 examples; TemperatureScaling for 5 classes: {about}"
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
    assert "Measured on fitting data" in lines[-1]
    assert err == "saved in saved; to use it:\n  calibrant apply saved p.npz\n"
    assert max(map(len, lines)) <= 80


@pytest.mark.filterwarnings("ignore:Auto keeps predictions")
def test_predictions_change_where_that_is_clearly_better(run, rng):
    """A model that prefers a letter: auto corrects it, and says what that gains."""
    logits, labels = drawn(rng, 800, 4)
    np.savez("questions.npz", logits=preferring(logits), labels=labels)
    arguments = ("fit", "questions.npz", "--set", "folds=2", "-o", "saved")
    code, out, _ = run(*arguments, "--json")
    assert code == 0
    found = json.loads(out)
    truth = (logits.argmax(1) == labels).mean()
    assert found["argmax_changed"] > 100
    assert found["after"]["accuracy"]["value"] == pytest.approx(truth, abs=0.02)
    assert found["before"]["accuracy"]["value"] < truth - 0.1
    assert "predictions change, as by sms: accuracy" in " ".join(run(*arguments)[1].split())
    kept = json.loads(run(*arguments, "--set", "keep_argmax=yes", "--json")[1])
    assert (kept["argmax_changed"], kept["options"]["keep_argmax"]) == (0, True)


def test_fit_in_json(run):
    code, out, _ = run(
        *("fit", "p.npz", "--method", "ts", "--set", "objective=brier", "-o", "saved", "--json")
    )
    found = json.loads(out)
    learned: Any = artifacts.load("saved")
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


@pytest.mark.parametrize("folds", [(), ("--cross-fit", "2")])
@pytest.mark.filterwarnings("always:.*keeps predictions")
def test_fit_of_two_classes_says_which_probability_was_measured(run, rng, folds):
    z = 2 * rng.normal(size=300)
    labels = (rng.random(300) < 1 / (1 + np.exp(2 - z))).astype(int)
    np.savez("two.npz", logits=z, labels=labels)
    arguments = ("fit", "two.npz", "--method", "ts", "-o", "saved", *folds)
    _, out, _ = run(*arguments, "--json")
    expected = calibrant.evaluate(z, labels, metrics=["ece"], level=None)
    assert json.loads(out)["estimand"] == "binary"
    assert json.loads(out)["before"]["ece"]["value"] == pytest.approx(expected["ece"].value)
    _, out, _ = run(*arguments)
    assert ", P(y = 1)" in out
    assert max(map(len, out.splitlines())) <= 80


def test_range_of_temperatures_and_changed_classes_are_told(run, monkeypatch):
    monkeypatch.setitem(CALIBRATORS, "per_row", PerRow)
    monkeypatch.setitem(CALIBRATORS, "shift", Shift)
    monkeypatch.setattr(artifacts, "save", lambda *_: None)
    each = PerRow().fit([[1.0, 0.0]], [0])
    each._set_classes(5)
    val = predictions(seed=1)
    found = each.temperature(val["logits"][val["labels"] >= 0])
    _, out, _ = run("fit", "p.npz", "--method", "per_row", "-o", "saved")
    assert f"\ntemperatures of the examples from {found.min():.4g} to {found.max():.4g}\n" in out
    _, out, _ = run("fit", "p.npz", "--method", "shift", "-o", "saved")
    assert re.search(r"^the predicted class of \d+ examples changes$", out, re.M)


def test_explanation_of_a_method_is_shown(run, monkeypatch):
    monkeypatch.setattr(TemperatureScaling, "reasons_", "chose it:\n  why", raising=False)
    _, out, _ = run("fit", "p.npz", "--method", "ts", "-o", "saved")
    assert out.splitlines()[3:5] == ["chose it:", "  why"]


def honest(rows=2000, seed=9):
    """Logits that the labels are drawn from: there is nothing to calibrate."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(rows, 5))
    return {"logits": logits, "labels": (logits + rng.gumbel(size=logits.shape)).argmax(-1)}


def test_auto_tells_what_its_choice_would_tell(run):
    data = honest()
    np.savez("sure.npz", logits=3 * data["logits"], labels=data["labels"])
    _, alone, _ = run("fit", "sure.npz", "--method", "ts", "-o", "saved")
    _, chosen, _ = run("fit", "sure.npz", "-o", "saved")
    assert "chose ts:" in chosen
    said, shown = alone.splitlines(), chosen.splitlines()
    assert said[1:3] == shown[1:3]
    assert said[3:] == shown[-len(said[3:]) :]
    assert re.search(r"temperature [23]\.\d+$", chosen, re.M)
    alone, chosen = (
        json.loads(run("fit", "sure.npz", *more, "-o", "saved", "--json")[1])
        for more in (["--method", "ts"], [])
    )
    assert alone.pop("method") == "ts"
    assert chosen.pop("method") == "auto"
    assert alone == chosen


@pytest.mark.parametrize(
    ("method", "folds"), [("auto", []), ("none", []), ("ts", []), ("none", ["--cross-fit", "3"])]
)
def test_a_fit_that_changes_nothing_says_so_in_a_sentence(run, method, folds):
    data = honest()
    best: Any = TemperatureScaling().fit(**data)
    if method == "ts":  # of these the best temperature is 1
        data["logits"] = data["logits"] / float(best.temperature_)
    np.savez("honest.npz", **data)
    before = calibrant.evaluate(data["logits"], data["labels"], level=None)
    accuracy, ece, nll, brier = (before[n].value for n in ("accuracy", "ece", "nll", "brier"))
    code, out, _ = run("fit", "honest.npz", "--method", method, *folds, "-o", "saved")
    start = "Out of 3 folds nothing" if folds else "Nothing"
    figures = f"accuracy {100 * accuracy:.2f} %, ECE {100 * ece:.2f} %, NLL {nll:.4f}, "
    figures += f"Brier {brier:.4f}"
    assert code == 0
    said = f"{start} changes: {figures} before and after."
    assert " ".join(out.split("honest.npz\n")[1].split()).startswith(said)
    assert not re.search("on the data of the fit|^ECE|The fit has seen|Each example", out, re.M)


def test_figures_that_stay_are_a_table_if_predictions_change(run, monkeypatch):
    class Swap(Shift):
        """Exchanges two classes that are never the answer."""

        def _transform(self, logits, top, features):
            return torch.cat([logits[..., :-2], logits[..., -2:].flip(-1)], -1)

    rng = np.random.default_rng(3)
    logits = rng.normal(size=(50, 4)) + 9 * np.eye(4)[2]
    np.savez("wrong.npz", logits=logits, labels=np.arange(50) % 2)
    monkeypatch.setitem(CALIBRATORS, "swap", Swap)
    monkeypatch.setattr(artifacts, "save", lambda *_: None)
    _, out, _ = run("fit", "wrong.npz", "--method", "swap", "-o", "saved")
    rows = re.findall(r"^(?:accuracy|ECE|NLL|Brier) +([\d.]+(?: %)?) +([\d.]+(?: %)?)$", out, re.M)
    assert len(rows) == 4
    assert all(before == after for before, after in rows)
    assert "the predicted class of 50 examples changes" in out


def test_a_calibrator_that_is_replaced_is_told(run):
    os.mkdir("saved")  # an empty folder is none
    for start in ("saved in saved", "replaced saved", "replaced saved"):
        _, _, err = run("fit", "p.npz", "--method", "ts", "-o", "saved")
        assert err == f"{start}; to use it:\n  calibrant apply saved p.npz\n"


def boasts(**names):
    """Predictions whose probabilities are stored, under the names of logits by split."""
    data = honest(600)
    probs = np.exp(data["logits"]) / np.exp(data["logits"]).sum(-1, keepdims=True)
    stored = {"probs": probs, "logs": np.log(probs)}
    return {
        f"{split}_{key}": values
        for split, what in names.items()
        for key, values in {"logits": stored[what], "labels": data["labels"]}.items()
    }


PROBABLY = "look like probabilities: every row is nonnegative and sums to one; if they are, save"


@pytest.mark.parametrize(
    ("verb", "told"),
    [
        (["fit", "--method", "ts", "-o", "saved"], ["val"]),
        (["fit", "--method", "vector", "-o", "saved", "--json"], ["val"]),
        (["fit", "--method", "vector", "-o", "saved", "--cross-fit", "2"], ["val"]),
        (["fit", "--method", "ts", "--fit-split", "logs", "-o", "saved"], []),
        (["evaluate"], ["test"]),
        (["evaluate", "--split", "val", "--json"], ["val"]),
        (["evaluate", "--split", "logs"], []),
        (["compare", "--methods", "none,vector", "--level", "0"], ["val", "test"]),
        (["compare", "--methods", "none,vector", "--level", "0", "--fit-split", "logs"], ["test"]),
    ],
)
@pytest.mark.filterwarnings("always:.*look like probabilities")
def test_probabilities_stored_as_logits_are_told_once(run, verb, told):
    np.savez("b.npz", **boasts(val="probs", test="probs", logs="logs"))
    code, out, err = run(verb[0], "b.npz", *verb[1:])
    assert code == 0
    assert "look like" not in out
    found = [line for line in err.splitlines() if "look like" in line]
    assert found == [f"warning: {s}_logits of b.npz {PROBABLY} them as {s}_probs" for s in told]


@pytest.mark.filterwarnings("always:.*look like probabilities")
def test_stored_tokens_and_tags_that_sum_to_one(run):
    data = boasts(test="probs")
    logits, labels = data["test_logits"], data["test_labels"]
    np.savez("tokens.npz", logits=logits.reshape(60, 10, 5), labels=labels.reshape(60, 10))
    _, _, err = run("evaluate", "tokens.npz", "--metrics", "ece", "--level", "0")
    assert err == f"warning: logits of tokens.npz {PROBABLY} them as probs\n"
    np.savez("tags.npz", logits=logits, labels=np.eye(5, dtype=int)[labels])
    _, _, err = run("evaluate", "tags.npz", "--multilabel", "--metrics", "ece", "--level", "0")
    assert err == ""
    np.savez("probs.npz", probs=logits, labels=labels)
    _, _, err = run("evaluate", "probs.npz", "--metrics", "ece", "--level", "0")
    assert err == ""


@pytest.mark.parametrize(
    ("options", "n"),
    [
        (["plain.npz"], 564),
        (["p.npz", "--fit-split", "test"], 470),
        (["test.npz", "--cross-fit"], 564),
    ],
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
    found: Any = artifacts.load("saved")
    expected: Any = fit_workflow("test.npz", method="ts", split="test")
    assert float(found.temperature_) == pytest.approx(float(expected.temperature_), rel=1e-6)
    assert f"temperature {float(found.temperature_):.4g}\n" in out


def test_cross_fit_in_json_with_groups(run):
    arguments = ("fit", "plain.npz", "--method", "ts", "--cross-fit", "3", "-o", "saved", "--json")
    found = [
        json.loads(run(*arguments, *more)[1])
        for more in (
            [],
            [],
            ["--groups", "site"],
            ["--sample-weight", "importance"],
        )
    ]
    nll = [one["after"]["nll"]["value"] for one in found]
    assert nll[0] == nll[1]
    assert len(set(nll)) == 3
    assert {one["folds"] for one in found} == {3}
    assert found[0]["after"]["ece"]["low"] is not None


@pytest.mark.parametrize(
    ("method", "setting", "value"),
    [
        ("beta", "keep_argmax=False", False),
        ("beta", "keep_argmax=no", False),
        ("beta", "keep_argmax=1", True),
        ("beta", "Keep-Argmax=None", None),
        ("isotonic", "temperature=off", False),
        ("matrix", "off_diagonal=0.5", 0.5),
        ("spline", "knots=4", 4),
        ("auto", "candidates=none,ts", ("none", "ts")),
        ("auto", "candidates=[ts]", ("ts",)),
    ],
)
def test_an_option_means_what_it_says(run, method, setting, value):
    code, _, err = run("fit", "p.npz", "--method", method, "--set", setting, "-o", "saved")
    assert code == 0, err
    name = setting.partition("=")[0].lower().replace("-", "_")
    found = getattr(artifacts.load("saved"), name)
    assert found == value
    assert type(found) is type(value)


def failing(name):
    """Return arguments of fit that cannot succeed, and the line that says why."""
    ts = ("--method", "ts")
    return {
        "test only": (["test.npz", *ts], r"error: test\.npz has no split 'val' .*--cross-fit"),
        "no split": (["p.npz", *ts, "--fit-split", "tst"], r"error: p\.npz: unknown split 'tst'"),
        "no method": (["p.npz", "--method", "tss"], "error: unknown method 'tss': did you mean ts"),
        "no option": (["p.npz", *ts, "--set", "x=1"], "error: ts has no option 'x': its options a"),
        "near option": (
            ["p.npz", *ts, "--set", "objektive=x"],
            r"error: ts has no option 'objektive': did you mean objective\? its options are obj",
        ),
        "bad value": (
            ["p.npz", *ts, "--set", "objective=x"],
            "error: objective must be one of nll",
        ),
        "no boolean": (
            ["p.npz", "--set", "keep_argmax=maybe"],
            "error: keep_argmax must be True or False, or one of auto, got 'maybe'",
        ),
        "no number": (
            ["p.npz", "--method", "smart", "--set", "hidden=16,x"],
            "error: hidden must be a list of whole numbers, at least 1, got '16,x'",
        ),
        "no candidate": (["p.npz", "--set", "candidates=ts,tss"], "error: unknown method 'tss': "),
        "no value": (
            ["p.npz", *ts, "--set", "objective"],
            "Error: --set wants KEY=VALUE, got obje",
        ),
        "one fold": (["p.npz", *ts, "--cross-fit", "1"], "Error: .*--cross-fit.*1"),
        "no weight": (["p.npz", *ts, "--sample-weight", "age"], r"error: p\.npz has no age"),
        "no group": (["p.npz", *ts, "--groups", "age"], r"error: p\.npz has no age"),
        "no file": (["gone.npz", *ts], r"error: gone\.npz does not exist"),
    }[name]


@pytest.mark.parametrize(
    "name",
    [
        *("test only", "no split", "no method", "no option", "near option", "bad value"),
        *("no boolean", "no number", "no candidate", "no value", "one fold"),
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


def test_fit_and_export_have_a_place_to_save(run, folder):
    assert "calibrator" in run("fit", "p.npz", "--method", "ts")[2]
    assert run("export", "calibrator")[0] == 0
    assert {"calibrator", "calibrator.onnx"} <= {*os.listdir()}


# apply


def test_apply_writes_the_calibrated_file(run):
    run("fit", "p.npz", "--method", "ts", "-o", "saved")
    code, out, err = run("apply", "saved", "p.npz", "-o", "out.npz")
    assert (code, out) == (0, "")
    assert err == "wrote out.npz; to measure it:\n  calibrant evaluate out.npz\n"
    apply(artifacts.load("saved"), "p.npz", "expected.npz")
    found, expected = arrays_in("out.npz"), arrays_in("expected.npz")
    assert list(found) == list(expected)
    for key in expected:
        np.testing.assert_array_equal(found[key], expected[key])
    assert run("evaluate", "out.npz", "--metrics", "ece", "--level", "0")[0] == 0
    _, _, err = run("apply", "saved", "test.npz", "-o", "out.npz")
    assert err == "replaced out.npz; to measure it:\n  calibrant evaluate out.npz\n"
    assert list(arrays_in("out.npz")) == list(arrays_in("test.npz"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("saved", "p.npz", "-o", "p.npz"), r"error: p\.npz is part of the input"),
        (("saved", "p.npz", "-o", "out.txt"), r"error: cannot write out\.txt: the suffix"),
        (("saved", "gone.npz", "-o", "out.npz"), r"error: gone\.npz does not exist"),
        (("gone", "p.npz", "-o", "out.npz"), "error: there is no artifact gone"),
        (("saved", "wide.npz", "-o", "out.npz"), "error: fitted for 5 classes, got 7: "),
        (("saved",), "Error: Missing argument 'PRED'"),
    ],
)
def test_failed_apply(run, arguments, message):
    np.savez("wide.npz", logits=np.zeros((20, 7)), labels=np.zeros(20, int))
    run("fit", "p.npz", "--method", "ts", "-o", "saved")
    before = sorted(os.listdir())
    code, out, err = run("apply", *arguments)
    assert (code, out) == (2, "")
    assert re.search(f"^{message}", err, re.M)
    assert sorted(os.listdir()) == before


def test_maccal_learns_from_the_train_split_of_another_file(run):
    rng = np.random.default_rng(0)
    weight, bias = rng.normal(size=(3, 8)), np.zeros(3)

    def split(n):
        features = rng.normal(size=(n, 8))
        logits = 3 * features @ weight.T
        labels = (logits / 3 + rng.gumbel(size=logits.shape)).argmax(-1)
        return {"features": features, "labels": labels, "logits": logits}

    train = {f"train_{key}": values for key, values in split(600).items() if key != "logits"}
    parts = {f"{name}_{key}": v for name in ("val", "test") for key, v in split(400).items()}
    calibrant.save_predictions("train.npz", train)
    calibrant.save_predictions("predictions.npz", {**parts, "weight": weight, "bias": bias})
    command = ["fit", "predictions.npz", "--method", "maccal"]
    options = ["--set", "epochs=4", "--set", "bottleneck=16", "--set", "step=0"]
    out = ["-o", "head"]
    code, said, err = run(*command, *options, "--train", "train.npz", *out)
    assert code == 0, err
    assert "maccal on predictions.npz, val split" in said
    head = calibrant.load("head")
    assert isinstance(head, calibrant.MaCCal)
    assert len(head.history) == 4
    code, _, err = run("apply", "head", "predictions.npz", "-o", "a.npz")
    assert code == 0, err
    probs = torch.tensor(arrays_in("a.npz")["test_logits"]).softmax(-1).numpy()
    np.testing.assert_allclose(probs, head.predict_proba(parts["test_features"]), atol=1e-6)

    code, said, err = run(*command, *options, *out)  # on val, as other methods
    assert code == 0, err
    assert calibrant.load("head").history != head.history

    for wrong, message in (
        ([*command, "--train", "predictions.npz"], "no train_features"),
        ([*command, "--train", "train.npz", "--cross-fit", "5"], "leave out --cross-fit"),
        (["fit", "predictions.npz", "--method", "ts", "--train", "x"], "for the method maccal"),
    ):
        code, _, err = run(*wrong, *out)
        assert code == 2
        assert message in err


def test_temperatures_of_groups_are_told_as_a_range(run):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(600, 4))
    logits = 3 * rng.normal(size=(600, 3))
    labels = (logits / 2 + rng.gumbel(size=logits.shape)).argmax(-1)
    calibrant.save_predictions(
        "f.npz", {"val_logits": logits, "val_labels": labels, "val_features": features}
    )
    code, out, err = run("fit", "f.npz", "--method", "gc", "-o", "groups")
    assert code == 0, err
    found = calibrant.load("groups").state_dict()["temperature_"]
    said = f"temperatures from {found.min():.4g} to {found.max():.4g}"
    assert said in " ".join(out.split())


def test_a_map_without_a_temperature_tells_of_none(run):
    _, out, _ = run("fit", "p.npz", "--method", "spline", "-o", "saved")
    assert "temperature" not in out


def test_maccal_wants_features_of_the_validation_set_before_it_trains(run, monkeypatch):
    monkeypatch.setattr("calibrant.workflows.retrain.retrain", None)  # never reached
    code, _, err = run("fit", "p.npz", "--method", "maccal", "--train", "p.npz", "-o", "saved")
    assert code == 2
    assert "p.npz has no val_features" in err


def test_apply_without_labels_suggests_no_evaluation(run):
    run("fit", "p.npz", "--method", "ts", "-o", "saved")
    np.savez("new.npz", logits=arrays_in("test.npz")["test_logits"])
    assert run("apply", "saved", "new.npz", "-o", "out.npz") == (0, "", "wrote out.npz\n")


def test_tags_from_the_file_to_the_calibrated_one(run):
    logits, labels = drawn_tags(np.random.default_rng(0), 600, np.array([0.4, 0.6]), np.zeros(2))
    np.savez("tags.npz", logits=logits, labels=labels)
    code, out, err = run("fit", "tags.npz", "--multilabel", "-o", "saved")
    assert code == 0
    assert out.startswith("tags on tags.npz\nOn the data of the fit: ECE ")
    assert "\n1,200 labels; TagScaling for 2 tags: 4 parameters" in out
    code, _, err = run("apply", "saved", "tags.npz", "-o", "calibrated.npz")
    assert code == 0
    assert err.endswith("to measure it:\n  calibrant evaluate calibrated.npz --multilabel\n")
    expected = TagScaling().fit(logits, labels).transform(logits)
    np.testing.assert_allclose(np.load("calibrated.npz")["logits"], expected, rtol=1e-5, atol=1e-6)
    code, out, _ = run("fit", "tags.npz", "--multilabel", "--cross-fit", "3", "--json", "-o", "x")
    about = json.loads(out)
    assert (code, about["method"], about["estimand"]) == (0, "tags", "multilabel")
    assert about["after"]["nll"]["value"] < about["before"]["nll"]["value"]
    code, _, err = run("fit", "tags.npz", "--multilabel", "--method", "ts", "-o", "x")
    assert code == 2
    assert "unknown multi-label method 'ts': did you mean tags?" in err
    code, _, err = run("fit", "tags.npz", "-o", "x")
    assert code == 2
    assert 'estimand="multilabel" (--multilabel)' in err


@pytest.mark.parametrize(
    ("source", "target"),
    [("p.npz", "calibrated.npz"), ("t.csv", "calibrated.csv"), ("shards", "calibrated")],
)
def test_apply_has_a_usual_target(run, source, target):
    run("fit", "p.npz", "--method", "ts")
    save_predictions("t.csv", predictions(seed=5))
    os.mkdir("shards")
    save_predictions("shards/0.npz", predictions(seed=6))
    code, _, err = run("apply", "calibrator", source)
    assert code == 0, err
    written = Path(target) / "0.npz" if target == "calibrated" else Path(target)
    assert open_dataset(written).splits
    if target != "calibrated":
        assert run("apply", "calibrator", target)[0] == 2
        assert "name another file with -o" in run("apply", "calibrator", target)[2]


def test_labels_of_another_name_are_asked_for(run):
    Path("bad.csv").write_text("id,truth,probs\n1,0,0.25\n2,1,0.5\n")
    code, _, err = run("fit", "bad.csv")
    assert code == 2
    assert "bad.csv has no labels in this split; found" in err
    assert "name it: --labels truth" in err
