"""Metadata columns of prediction files reach the calibrators that read them, everywhere."""

import json
from typing import Any

import numpy as np
import pytest
import torch

import calibrant as cal
from calibrant.calibrators import Multicalibration
from calibrant.data import open_dataset
from calibrant.data.files import as_dataset, write_arrays
from calibrant.decide.priors import PriorCorrection
from calibrant.deploy.calibrated_model import CalibratedModel
from calibrant.deploy.dataframes import calibrate_table
from calibrant.estimate.sampling import choose_labels
from calibrant.monitor.reference import reference_bins
from calibrant.monitor.stream import Monitor
from calibrant.show.figures.from_data import figure
from calibrant.workflows import apply as applying, compare as comparing, effect as effects
from calibrant.workflows.decide import apply_rule, decide
from calibrant.workflows.fit import cross_fit, fit
from tests.calibrators.features.test_multicalibration import planted

NAMES = ["age", "site"]
OPTIONS: dict[str, Any] = {"columns": NAMES, "base": "ts", "rounds": 8}


@pytest.fixture(scope="module")
def arrays():
    """Arrays of two splits, of which the second has an age that is missing."""
    result: dict[str, Any] = {}
    for seed, split in enumerate(("val", "test")):
        odds, _, labels, metadata = planted(seed, 2500)
        age = metadata["age"].astype(float)
        age[0] = np.nan
        result |= {f"{split}_logits": odds, f"{split}_labels": labels, f"{split}_age": age}
        result[f"{split}_site"] = metadata["site"]
    return result


@pytest.fixture(scope="module")
def fitted(arrays):
    return fit(arrays, method="multicalibration", options=OPTIONS)


def inputs(arrays, split="test"):
    return {name: arrays[f"{split}_{name}"] for name in NAMES}


def test_a_fit_on_a_file_is_one_on_arrays(arrays, fitted, tmp_path):
    path = tmp_path / "predictions.npz"
    np.savez(path, **arrays)
    direct = Multicalibration(columns=NAMES, base="ts", rounds=8).fit(
        arrays["val_logits"], arrays["val_labels"], features=inputs(arrays, "val")
    )
    expected = direct.predict_proba(arrays["test_logits"], inputs(arrays))
    assert len(direct.leaf_)
    for again in (fitted, fit(path, method="multicalibration", options=OPTIONS)):
        found = again.predict_proba(arrays["test_logits"], inputs(arrays))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_apply_and_the_effect_read_the_columns(suffix, arrays, fitted, tmp_path):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    plain = {key.removeprefix("test_"): v for key, v in arrays.items() if key.startswith("test_")}
    path, out = tmp_path / f"test{suffix}", tmp_path / f"calibrated{suffix}"
    write_arrays(path, plain)
    applying.apply(fitted, path, out)
    split = open_dataset(out).split()
    expected = fitted.transform(plain["logits"], inputs(arrays))
    np.testing.assert_allclose(split.logits, expected, rtol=1e-6)
    assert split.read("site").tolist() == plain["site"].tolist()
    measured = effects.effect(fitted, path, level=None)
    assert measured.after["nll"].value == pytest.approx(cal.nll(expected, plain["labels"]))
    assert measured.after["nll"].value < measured.before["nll"].value


def test_folds_are_measured_by_their_own_columns(arrays):
    crossed = cross_fit(
        arrays, method="multicalibration", options=OPTIONS, split="val", folds=2, level=None
    )
    logits, labels = arrays["val_logits"], arrays["val_labels"]
    parts = inputs(arrays, "val")
    after = np.empty(len(logits))
    for number, calibrator in enumerate(crossed.calibrators):
        rows = crossed.folds == number
        chosen = {name: values[rows] for name, values in parts.items()}
        after[rows] = calibrator.transform(logits[rows], chosen)
    assert crossed.effect.after["nll"].value == pytest.approx(cal.nll(after, labels))


def test_compare_tries_it_where_columns_are_named(arrays):
    small = {key: values[:300] for key, values in arrays.items()}
    found = comparing.compare(
        small, methods=["none", "multicalibration"], columns=NAMES, level=None
    )
    rows = {row.method: row for row in found.rows}
    calibrator, evaluation = (
        rows["multicalibration"].calibrator,
        rows["multicalibration"].evaluation,
    )
    assert calibrator is not None
    assert calibrator.input_columns == ("age", "site")
    assert evaluation is not None
    assert evaluation["nll"].value > 0
    dataset = as_dataset(small)
    splits = [dataset.split(name) for name in ("val", "test")]
    for columns in (None, NAMES):
        options = {"keep_argmax": "auto", "columns": columns}
        names = comparing._chosen(None, splits, "auto", options)
        assert ("multicalibration" in names) == (columns is not None)


def test_decisions_estimates_and_monitors_read_the_columns(arrays, fitted):
    logits, labels = arrays["test_logits"], arrays["test_labels"]
    probs = fitted.predict_proba(logits, inputs(arrays))
    confidence = np.maximum(probs, 1 - probs)
    rule = decide(arrays, calibrator=fitted, max_error=0.3).rule
    told = rule.decide(logits, features=inputs(arrays))
    np.testing.assert_allclose(told["confidence"], confidence, rtol=1e-5)
    applied = apply_rule(rule, arrays).tallies["test"]
    assert applied.size == told["accepted"].sum()
    chosen = choose_labels(
        {k: v for k, v in arrays.items() if "labels" not in k}, 20, calibrator=fitted, split="test"
    )
    np.testing.assert_allclose(chosen.confidence, confidence[chosen.row], rtol=1e-5)
    by_file, by_arrays = Monitor(fitted), Monitor(fitted)
    by_file.update_file(arrays, split="test")
    by_arrays.update(logits, labels, features=inputs(arrays))
    for watch in (by_file, by_arrays):
        claimed = sum(window.answers[1] for window in watch.windows.values())
        assert claimed == pytest.approx(confidence.sum(), rel=1e-5)
    reference = reference_bins(arrays, fitted, split="test")
    np.testing.assert_allclose(reference.claimed.sum(), probs.sum(), rtol=1e-5)


def test_a_corrected_prior_reads_what_its_calibrator_reads(arrays, fitted):
    corrected = PriorCorrection(fitted).set_priors([0.5, 0.5], [0.5, 0.5])
    assert corrected.input_columns == ("age", "site")
    expected = fitted.predict_proba(arrays["test_logits"], inputs(arrays))
    found = corrected.predict_proba(arrays["test_logits"], inputs(arrays))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    measured = effects.effect(corrected, arrays, level=None)
    assert measured.after["nll"].value < measured.before["nll"].value


def test_large_files_are_sampled_with_their_columns(arrays, monkeypatch):
    monkeypatch.setattr("calibrant.workflows.large.LARGE", 2000)
    with pytest.warns(UserWarning, match="random sample of"):
        sampled = fit(arrays, method="multicalibration", options=OPTIONS)
    assert [column.name for column in sampled.metadata_] == NAMES


def test_figures_of_the_map_and_of_reliability_read_the_columns(arrays, fitted):
    pytest.importorskip("matplotlib")
    for kind in ("map", "reliability"):
        assert figure(arrays, kind=kind, calibrator=fitted, split="test") is not None


def test_missing_columns_are_named_with_the_remedy(arrays, fitted):
    without = {key: values for key, values in arrays.items() if not key.endswith("site")}
    wanted = "reads the metadata columns age, site: the arrays has no val_site in every shard"
    with pytest.raises(ValueError, match=wanted):
        fit(without, method="multicalibration", options=OPTIONS)
    with pytest.raises(ValueError, match="has no test_site in every shard, only"):
        effects.effect(fitted, without)
    with pytest.raises(ValueError, match="columns must be metadata, got labels"):
        Multicalibration(columns=["labels"])


def test_the_command_line_fits_and_applies(arrays, tmp_path, run):
    path = tmp_path / "predictions.npz"
    np.savez(path, **arrays)
    folder, out = tmp_path / "repaired", tmp_path / "out.npz"
    method = ("--method", "multicalibration", "--columns", "age,site", "--set", "base=ts")
    code, text, _ = run("fit", path, *method, "--set", "rounds=8", "-o", folder, "--json")
    told = json.loads(text)
    assert code == 0
    assert told["learned"]["corrections"][0]["subgroup"].endswith("and site = B")
    assert run("apply", folder, path, "-o", out)[0] == 0
    calibrated = open_dataset(out).split("test").logits
    expected = cal.load(folder).transform(arrays["test_logits"], inputs(arrays))
    np.testing.assert_allclose(calibrated, expected, rtol=1e-5)
    np.savez(path, **{key: values[:200] for key, values in arrays.items()})
    code, text, _ = run("compare", path, "--methods", "multicalibration", "--columns", "age,site")
    assert code == 0
    assert "multicalibration" in text


# Deployment


def test_tables_with_the_columns_are_calibrated(arrays, fitted):
    pd, _ = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    frame = pd.DataFrame({"logit": arrays["test_logits"], **inputs(arrays)})
    frame.loc[1, "site"] = None
    result = calibrate_table(frame, fitted)
    columns = {"age": frame["age"], "site": frame["site"]}
    expected = fitted.predict_proba(arrays["test_logits"], columns)
    np.testing.assert_allclose(result.iloc[:, -1], expected, rtol=1e-5)
    with pytest.raises(ValueError, match="has no site, only logit, age"):
        calibrate_table(frame.drop(columns="site"), fitted)


def test_a_model_gives_no_metadata(fitted):
    with pytest.raises(ValueError, match="reads metadata columns, which a model does not give"):
        CalibratedModel(torch.nn.Linear(3, 1), fitted)


def people_to_classify(seed, n):
    """A frame whose label depends on what the classifier sees, and on what it cannot combine."""
    odds, _, labels, metadata = planted(seed, n, effect=-2.5)
    pd = pytest.importorskip("pandas")
    return pd.DataFrame({"odds": odds, "age": metadata["age"], "site": metadata["site"]}), labels


@pytest.mark.parametrize("settings", [{"cv": 3}, {"cv": 2, "ensemble": True}])
def test_the_classifier_takes_columns_of_its_frame(settings):
    compose = pytest.importorskip("sklearn.compose")
    from sklearn.base import clone
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    from calibrant.deploy.sklearn import CalibratedClassifier

    # the model sees the odds alone
    seen = compose.make_column_transformer(("passthrough", ["odds"]))
    model = make_pipeline(seen, LogisticRegression())
    frame, labels = people_to_classify(0, 3000)
    new, outcome = people_to_classify(1, 3000)
    repaired, plain = (
        clone(CalibratedClassifier(model, method=method, options=options, **settings))
        for method, options in (("multicalibration", OPTIONS), ("ts", None))
    )
    losses = []
    for classifier in (repaired, plain):
        probs = classifier.fit(frame, labels).predict_proba(new)[:, 1]
        losses.append(-np.log(np.where(outcome == 1, probs, 1 - probs)).mean())
    assert losses[0] < losses[1] - 0.005


def test_the_classifier_takes_columns_by_number():
    pytest.importorskip("sklearn")
    from sklearn.linear_model import LogisticRegression

    from calibrant.deploy.sklearn import CalibratedClassifier

    frame, labels = people_to_classify(0, 1500)
    array = np.stack([frame["odds"], frame["age"], frame["site"] == "B"], axis=1)
    options = {**OPTIONS, "columns": [1, 2]}
    classifier = CalibratedClassifier(
        LogisticRegression(), method="multicalibration", options=options
    )
    probs = classifier.fit(array, labels).predict_proba(array)
    assert [column.name for column in classifier.calibrator_.metadata_] == ["1", "2"]
    np.testing.assert_allclose(probs.sum(1), 1)
    with pytest.raises(ValueError, match="needs features of a last layer: name columns of X"):
        CalibratedClassifier(LogisticRegression(), method="multicalibration").fit(array, labels)
