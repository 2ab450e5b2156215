"""Decision rules on files: those of the functions, on examples that nothing else has seen."""

import csv
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file
from scipy.special import softmax

import calibrant
from calibrant import use
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.decide import DecisionRule, Threshold, conformal, threshold
from calibrant.workflows.decide import apply_rule, decide
from tests.support.calibrators import Featured
from tests.support.prediction_files import arrays_in
from tests.support.predictions import as_npz, as_npz_folder, needs_pyarrow, predictions, splits

NAMES = np.array(["ant", "bee", "cat, wild", "dog", "=eel"])


@pytest.fixture
def arrays() -> dict[str, Any]:
    val, test = predictions(rows=900, seed=1), predictions(rows=700, seed=2)
    return {**splits(val=val, test=test), "class_names": NAMES}


@pytest.fixture(scope="module")
def halved():
    arrays = predictions()
    found = TemperatureScaling().fit(arrays["logits"], arrays["labels"])
    found._store(temperature_=2.0)
    return found


def wrong_of(rule, logits, labels):
    """Accepted, or classes in sets; and the mistakes among the labelled ones."""
    kept = labels >= 0
    probs = softmax(logits[kept].astype(float), -1)
    if isinstance(rule, Threshold):
        taken = probs.max(1) >= rule.threshold
        return taken.sum(), (probs.argmax(1) != labels[kept])[taken].sum()
    members = rule.sets(logits[kept])
    return members.sum(), (~members[np.arange(kept.sum()), labels[kept]]).sum()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("asked", [{"max_error": 0.5}, {"coverage": 0.8, "score": "lac"}])
def test_the_rule_is_that_of_the_function_on_val_and_is_checked_on_test(asked, arrays, tmp_path):
    found = decide(as_npz(tmp_path, arrays), **asked)
    function: Any = threshold if "max_error" in asked else conformal
    kept = arrays["val_labels"] >= 0
    expected = function(arrays["val_logits"][kept], arrays["val_labels"][kept], **asked)
    assert found.rule.guarantee == expected
    assert found.rule.class_names == NAMES.tolist()
    assert (found.fitted_on, found.checked_on) == ("val split", "test split")
    for name, tally in (("val", found.fitted), ("test", found.checked)):
        labels = arrays[f"{name}_labels"]
        size, wrong = wrong_of(expected, arrays[f"{name}_logits"], labels)
        assert tally.n == (labels >= 0).sum()
        assert (tally.size, tally.wrong) == (size, wrong)


def test_a_calibrator_leaves_val_alone(arrays, halved):
    """It was probably fitted there: the rule and its check share the test split."""
    arrays["val_logits"] = np.full_like(arrays["val_logits"], np.nan)
    found = decide(arrays, max_error=0.5, calibrator=halved)
    labelled = (arrays["test_labels"] >= 0).sum()
    assert found.fitted.n + found.checked.n == labelled
    assert abs(found.fitted.n - found.checked.n) <= 1
    again = decide(arrays, max_error=0.5, calibrator=halved, seed=1)
    assert again.fitted != found.fitted
    named = decide(arrays, max_error=0.5, calibrator=halved, fit_split="test", test_split="test")
    assert named.fitted == found.fitted
    logits, labels = arrays["test_logits"] / 2, arrays["test_labels"]
    whole = DecisionRule(found.rule.guarantee, 5)
    both = whole.tally(whole.decide(logits[labels >= 0]), labels[labels >= 0])
    assert both.wrong == found.fitted.wrong + found.checked.wrong


def test_halves_are_left_to_chance():
    """Shares of the classes that are fixed would be no sample of the population."""
    labels = np.repeat([0, 1], 50)
    data = {"logits": np.where(labels == 1, 9.0, 0.1), "labels": labels}  # sure and right of ones
    accepted = {decide(data, max_error=0.2, seed=seed).fitted.size for seed in range(5)}
    assert len(accepted) > 1


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_decisions_of_every_row_are_written(arrays, halved, tmp_path, suffix, request):
    rule = decide(arrays, coverage=0.8, calibrator=halved).rule
    request.getfixturevalue("no_whole_logits")  # from here on
    if suffix == ".safetensors":  # it holds no text; names of classes are left out anyway
        text = [key for key, values in arrays.items() if values.dtype.kind == "U"]
        arrays = {key: values for key, values in arrays.items() if key not in text[:-1]}
    arrays = {**arrays, "val_features": np.ones((900, 2)), "epoch": np.array(7)}
    del arrays["test_labels"]
    out, steps = tmp_path / f"out{suffix}", []
    with use(progress=lambda *s: steps.append(s)):
        found = apply_rule(rule, as_npz(tmp_path, arrays), out)
    written = load_file(out) if suffix == ".safetensors" else arrays_in(out)
    gone = {"val_logits", "test_logits", "val_features"}
    gone |= {"class_names"} if suffix == ".safetensors" else set()
    made = {f"{s}_{name}" for s in ("val", "test") for name in ("predicted", "confidence", "set")}
    assert set(written) == (set(arrays) - gone) | made
    for name in ("val", "test"):
        for key, values in rule.decide(arrays[f"{name}_logits"]).items():
            np.testing.assert_array_equal(written[f"{name}_{key}"], values)
    assert found.tallies["val"].judged == (arrays["val_labels"] >= 0).sum()
    assert found.tallies["test"].judged == 0
    assert found.tallies["test"].n == 700
    assert steps[-1] == (1600, 1600)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"out{suffix}", "p.npz"]


@needs_pyarrow
def test_decisions_of_a_table_with_names(tmp_path):
    """Classes and labels of a .csv file have names; decisions go into .parquet and .csv."""
    arrays = {"class_names": NAMES[:2], **predictions(rows=300, classes=2)}
    calibrant.save_predictions(tmp_path / "in.csv", arrays)
    rule = decide(tmp_path / "in.csv", coverage=0.8).rule
    assert rule.class_names == ["ant", "bee"]
    made = rule.decide(arrays["logits"])
    for suffix in (".parquet", ".csv"):
        applied = apply_rule(rule, tmp_path / "in.csv", tmp_path / f"out{suffix}")
        assert applied.tallies[""].judged == (arrays["labels"] >= 0).sum()
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(tmp_path / "out.parquet").to_pydict()
    assert table["set"] == made["set"].tolist()
    with (tmp_path / "out.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["predicted"] for line in lines] == NAMES[made["predicted"]].tolist()


def test_lines_name_the_classes(arrays, tmp_path):
    rule = decide(arrays, coverage=0.8).rule
    del arrays["test_labels"]
    apply_rule(rule, arrays, tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 1600
    made = rule.decide(arrays["val_logits"])
    for i in (0, 3, 17):
        line = lines[i]
        assert (line["split"], line["row"]) == ("val", str(i))
        assert line["predicted"] == NAMES[made["predicted"][i]]
        assert line["set"] == ", ".join(NAMES[made["set"][i]])
        label = arrays["val_labels"][i]
        assert line["label"] == ("" if label < 0 else NAMES[label])
    assert lines[900]["split"] == "test"
    assert lines[900]["label"] == ""
    accept = decide(arrays, max_error=0.5, fit_split="val", test_split="val").rule
    apply_rule(accept, {"logits": arrays["val_logits"]}, tmp_path / "out.csv")
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert lines[0] == "split,row,predicted,confidence,accepted,label"
    expected = accept.decide(arrays["val_logits"])["accepted"]
    assert [line.split(",")[-2] == "yes" for line in lines[1:]] == expected.tolist()


def test_features_and_probabilities_reach_the_calibrator(rng, halved):
    arrays = predictions(rows=900)
    features = rng.normal(size=(900, 3)).astype(np.float32)
    featured = Featured().fit(arrays["logits"], arrays["labels"], features=features)
    rule = decide({**arrays, "features": features}, coverage=0.8, calibrator=featured).rule
    made = rule.decide(arrays["logits"], features=features)
    probs = softmax(featured.transform(arrays["logits"], features).astype(float), -1)
    np.testing.assert_allclose(made["confidence"], probs.max(1))
    stated = {"probs": softmax(arrays["logits"].astype(float), -1), "labels": arrays["labels"]}
    assert decide(stated, max_error=0.5, calibrator=halved).fitted == (
        decide(arrays, max_error=0.5, calibrator=halved).fitted
    )
    plain = decide(stated, max_error=0.5)
    assert plain.fitted == decide(arrays, max_error=0.5).fitted


def test_a_saved_rule_decides_alike(arrays, halved, tmp_path):
    auto = calibrant.Auto(candidates=("none", "ts")).fit(arrays["val_logits"], arrays["val_labels"])
    for calibrator in (None, halved, auto):
        asked: Any
        for asked in ({"max_error": 0.5}, {"coverage": 0.8}):
            rule = decide(arrays, calibrator=calibrator, **asked).rule
            calibrant.save(rule, tmp_path / "rule")
            again = calibrant.load(tmp_path / "rule", DecisionRule)
            assert again.guarantee == rule.guarantee
            assert again.class_names == rule.class_names
            assert again.describe() == rule.describe()
            for name, values in rule.decide(arrays["test_logits"]).items():
                np.testing.assert_array_equal(again.decide(arrays["test_logits"])[name], values)


@pytest.mark.filterwarnings("ignore:the classifier has hardly learned")
def test_a_rule_keeps_a_retrained_classifier(rng, tmp_path):
    features = rng.normal(size=(300, 4)).astype(np.float32)
    labels = (features[:, :3] + rng.gumbel(size=(300, 3))).argmax(1)
    arrays = {"logits": features[:, :3], "labels": labels, "features": features}
    retrained = calibrant.MaCCal(epochs=1).fit(features, labels)
    rule = decide(arrays, coverage=0.8, calibrator=retrained).rule
    calibrant.save(rule, tmp_path / "rule")
    again = calibrant.load(tmp_path / "rule")
    for name, values in rule.decide(arrays["logits"], features=features).items():
        found = again.decide(arrays["logits"], features=features)[name]
        np.testing.assert_array_equal(found, values)


def test_what_cannot_be_decided_is_refused(arrays, halved, tmp_path):
    path = as_npz_folder(tmp_path, predictions())
    rule = decide(arrays, max_error=0.5).rule
    tags = {"logits": np.zeros((40, 3)), "labels": np.zeros((40, 3), int)}
    refused: list[tuple[Any, str]] = [
        (lambda: decide(arrays), "either limits, such as max_error=, or coverage=, got neither"),
        (lambda: decide(arrays, max_error=0.1, coverage=0.9), "got both"),
        (lambda: decide(tags, max_error=0.5), "tags are not supported"),
        (lambda: decide({"logits": np.zeros((40, 3))}, max_error=0.5), "no labels"),
        (lambda: decide(tags, max_error=0.5, calibrator=halved), "5 classes"),
        (lambda: apply_rule(rule, tags), "for 5 classes, but the arrays has 3"),
        (lambda: apply_rule(rule, path, path / "out.csv"), "part of the input"),
        (lambda: apply_rule(rule, path, tmp_path / "out.txt"), r"\.parquet, \.csv"),
        (lambda: apply_rule(rule, {**arrays, "val_accepted": np.zeros(900)}), "accepted already"),
        (
            lambda: apply_rule(rule, {"logits": np.zeros((4, 3, 5))}, tmp_path / "out.csv"),
            "got tokens",
        ),
    ]
    for action, message in refused:
        with pytest.raises((TypeError, ValueError), match=message):
            action()
    assert [p.name for p in tmp_path.iterdir()] == ["shards"]


@pytest.mark.parametrize("suffix", [".csv", pytest.param(".parquet", marks=needs_pyarrow)])
def test_decisions_stand_behind_the_columns_of_a_table_as_they_are(tmp_path, suffix, small_chunks):
    """Also with one column of probabilities, and labels, scores and ids among each other."""
    rng = np.random.default_rng(0)
    score = rng.uniform(size=300).round(3)
    table = pd.DataFrame({"id": [f"row-{i}" for i in range(300)], "score": score})
    table["truth"] = (rng.random(300) < score).astype(int)
    table["age"] = rng.integers(20, 80, 300)
    write = table.to_csv if suffix == ".csv" else table.to_parquet
    write(tmp_path / f"in{suffix}", index=False)
    data = calibrant.open_dataset(tmp_path / f"in{suffix}", labels="truth", probs="score")
    rule: Any = decide(data, recall=0.8).rule
    apply_rule(rule, data, tmp_path / f"out{suffix}")
    read = pd.read_csv if suffix == ".csv" else pd.read_parquet
    written = read(tmp_path / f"out{suffix}")
    assert [*written.columns] == [*table.columns, "predicted", "confidence", "flagged"]
    pd.testing.assert_frame_equal(written[[*table.columns]], table, check_dtype=False)
    flagged = written["flagged"] == ("yes" if suffix == ".csv" else True)
    assert (flagged == (score >= rule.guarantee.threshold)).all()
    names = [f"logit_{name}" for name in "abcde"]
    by_class = pd.DataFrame(predictions(rows=60, seed=4)["logits"], columns=names)[names[::-1]]
    by_class["label"], by_class["split"] = [*"abcde"] * 12, ["val", "test"] * 30
    by_class.to_csv(tmp_path / "in.csv", index=False)
    apply_rule(
        decide(tmp_path / "in.csv", coverage=0.8).rule, tmp_path / "in.csv", tmp_path / "o.csv"
    )
    written = pd.read_csv(tmp_path / "o.csv")
    by_split = by_class.sort_values("split", ascending=False, kind="stable", ignore_index=True)
    columns = [*by_class.columns]
    pd.testing.assert_frame_equal(written[columns], by_split, check_dtype=False)


def test_lines_are_numbered_over_chunks(arrays, small_chunks, tmp_path):
    rule = decide(arrays, coverage=0.8).rule
    apply_rule(rule, {"logits": arrays["val_logits"]}, tmp_path / "out.csv")
    assert pd.read_csv(tmp_path / "out.csv")["row"].tolist() == [*range(900)]


def test_lines_of_decisions_keep_ids_and_further_columns(tmp_path):
    """Also where the splits have other ones; the order of the rows is that of the split."""
    data = predictions(rows=60, seed=4)
    frame = pd.DataFrame(data["logits"], columns=[f"logit_{name}" for name in "abcde"])
    frame.insert(0, "id", [f"row-{i}" for i in range(60)])
    frame["label"], frame["age"] = data["labels"].clip(0), np.arange(60)
    frame.to_csv(tmp_path / "in.csv", index=False)
    rule = decide(tmp_path / "in.csv", coverage=0.8).rule
    apply_rule(rule, tmp_path / "in.csv", tmp_path / "out.csv")
    written = pd.read_csv(tmp_path / "out.csv")
    assert written["id"].tolist() == frame["id"].tolist()
    assert written["age"].tolist() == frame["age"].tolist()
    probs = softmax(frame.iloc[:, 1:6].to_numpy(float), -1)
    assert (written["predicted"] == np.array(list("abcde"))[probs.argmax(1)]).all()
    some = {"val_logits": np.zeros((2, 5)), "val_site": np.array(["x", "y"])}
    apply_rule(rule, {**some, "test_logits": np.zeros((1, 5))}, tmp_path / "some.csv")
    with (tmp_path / "some.csv").open(newline="") as file:
        assert [line["site"] for line in csv.DictReader(file)] == ["x", "y", ""]
