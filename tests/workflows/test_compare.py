"""Comparison of methods: fair rows, and a failure of one method costs only its own row."""

import json
import math
import re
import time
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import calibrant
from calibrant import use
from calibrant._core.checks import IGNORED
from calibrant._core.solve import check_time
from calibrant.calibrators.records import records_of
from calibrant.calibrators.registry import CALIBRATORS, PARTS
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.data import open_dataset, sample_path
from calibrant.metrics.intervals import Estimate
from calibrant.show.workflows import _methods_table
from calibrant.workflows.choice import MethodChoice
from calibrant.workflows.compare import compare
from calibrant.workflows.comparison import Comparison, Row
from calibrant.workflows.fit import cross_fit
from tests.support.calibrators import Featured, Shift
from tests.support.metrics import ANY_CLASSES
from tests.support.predictions import as_npz, as_npz_folder, labelled, out_of, predictions, splits
from tests.support.simulate import drawn, preferring


class Slow(Shift):
    """Searches until its time is over."""

    def _fit(self, examples, context):
        while True:
            check_time()
            time.sleep(0.01)


class Broken(Shift):
    """Fails in the fit, by a bug or by a refusal."""

    problem: Exception = RuntimeError("the impossible")

    def _fit(self, examples, context):
        raise self.problem


class BrokenLater(Shift):
    """Fails when it is applied."""

    def _transform(self, logits, top, features):
        raise ValueError("cannot be applied")


class Chatty(Shift):
    """Warns twice of the same, and once of something else."""

    def _fit(self, examples, context):
        super()._fit(examples, context)
        for text in ("few samples", "few samples", "odd samples"):
            warnings.warn(text, stacklevel=2)


class Witness(Shift):
    """Writes down the rows that it is fitted on and applied to: their first logit in thousands."""

    def __init__(self):
        super().__init__()
        self.fitted: set[int] = set()
        self.applied: set[int] = set()

    def _fit(self, examples, context):
        super()._fit(examples, context)
        self.labels = examples.labels[examples.labels != IGNORED]
        self.groups = context.groups
        rows = np.asarray(examples.logits).reshape(-1, examples.classes)
        self.fitted = numbers(rows[examples.labels != IGNORED, 0])

    def _transform(self, logits, top, features):
        self.applied |= numbers((logits + top)[:, 0])
        return logits


def numbers(logits):
    return {round(1000 * value) for value in logits.tolist()}


@pytest.fixture
def both(tmp_path):
    """A file with a val and a test split, and its arrays."""
    val, test = predictions(rows=400, seed=1), predictions(rows=500, seed=2)
    return as_npz(tmp_path, splits(val=val, test=test)), val, test


def figures(rows):
    return [None if row.evaluation is None else row.evaluation["nll"].value for row in rows]


# The rows.


@pytest.mark.parametrize(("block", "level"), [(64, None), (1 << 22, 0.8)])
def test_rows_are_fits_on_val_measured_on_test(both, monkeypatch, block, level):
    monkeypatch.setattr("calibrant.data.dataset.CHUNK", block)
    (path, val, test), kinds = both, {"ts": TemperatureScaling, "x": Shift}
    found = compare(path, methods={name: kind() for name, kind in kinds.items()}, level=level)
    assert [row.method for row in found.rows] == ["ts", "x"]
    assert (found.n_fit, found.n_test, found.classes) == (376, 470, 5)
    kept = labelled(test)
    for row, kind in zip(found.rows, kinds.values(), strict=True):
        fitted = kind().fit(val["logits"], val["labels"])
        after = out_of(fitted, kept["logits"])
        expected = calibrant.evaluate(
            after, kept["labels"], metrics=["nll", "ece", "auroc"], level=level
        )
        assert row.evaluation is not None
        assert list(row.evaluation) == ANY_CLASSES
        for name, estimate in expected.items():
            np.testing.assert_allclose(row.evaluation[name], estimate, atol=1e-5)
        assert row.argmax_changed == (after.argmax(1) != kept["logits"].argmax(1)).sum()
        assert (row.argmax_changed != 0) == (kind is Shift)
        assert (row.error, row.notes) == (None, [])
        assert isinstance(row.calibrator, kind)


def test_json_has_the_promised_form(both):
    found = compare(
        both[0], methods={"ts": TemperatureScaling(), "bad": Broken()}, level=None
    ).to_dict()
    assert found.keys() >= {"n_fit", "n_test", "classes", "rows"}
    good, bad = json.loads(json.dumps(found, allow_nan=False))["rows"]
    for row in (good, bad):
        assert row.keys() >= {"method", "metrics", "fit_seconds", "argmax_changed", "error"}
        assert list(row["metrics"]) == ANY_CLASSES
        for figure in row["metrics"].values():
            assert figure.keys() == {"value", "low", "high"}
    assert good["metrics"]["ece"]["value"] < 1
    assert good["metrics"]["ece"]["low"] is None
    assert (good["argmax_changed"], good["error"]) == (0, None)
    assert bad["metrics"]["ece"] == {"value": None, "low": None, "high": None}
    assert (bad["argmax_changed"], bad["error"]) == (None, "RuntimeError: the impossible")
    assert bad["fit_seconds"] >= 0


@pytest.mark.parametrize(
    ("calibrator", "problem", "said"),
    [
        (Broken, RuntimeError("the impossible"), "RuntimeError: the impossible"),
        (Broken, KeyError("x"), "KeyError: 'x'"),
        (Broken, NotImplementedError(), "^NotImplementedError$"),
        (Broken, ValueError("too narrow"), r"p\.npz: too narrow"),
        (Broken, MemoryError(), "MemoryError"),
        (Broken, TimeoutError("the disk sleeps"), "the disk sleeps"),
        (BrokenLater, None, "cannot be applied"),
        (Featured, None, "Featured needs features"),
    ],
)
def test_failure_becomes_a_row(both, calibrator, problem, said):
    bad = calibrator()
    bad.problem = problem
    found = compare(
        both[0], methods={"bad": bad, "ts": TemperatureScaling()}, time_limit=None, level=None
    )
    row = found["bad"]
    assert row.evaluation is None
    assert row.calibrator is None
    assert row.argmax_changed is None
    assert re.search(said, row.error or "")
    assert found["ts"].error is None
    assert list(found.measured) == ["ts"]


def test_time_limit_stops_one_method_only(both):
    start = time.monotonic()
    calibrators = {"slow": Slow(), "ts": TemperatureScaling()}
    found = compare(both[0], methods=calibrators, time_limit=0.2, level=None)
    assert time.monotonic() - start < 10
    assert found["slow"].error == "the fit took longer than 0.2 s"
    assert 0.2 <= found["slow"].fit_seconds < 2
    assert found["ts"].error is None


def test_warnings_become_notes(both):
    found = compare(both[0], methods={"chatty": Chatty(), "ts": TemperatureScaling()}, level=None)
    assert found["chatty"].notes == ["few samples", "odd samples"]
    assert found["ts"].notes == []
    assert "chatty: odd samples" in str(found)


def test_a_warning_of_several_methods_is_told_once(both):
    found = compare(both[0], methods={"one": Chatty(), "two": Chatty()}, level=None)
    assert found.remarks()[:2] == ["one, two: few samples", "one, two: odd samples"]


def test_table_is_made_once_and_in_the_time_of_each(both, monkeypatch):
    made = []

    def slow(split):
        made.append(split)
        time.sleep(0.3)
        return records_of(split)

    monkeypatch.setattr("calibrant.workflows.compare.records_of", slow)
    calibrators = {name: TemperatureScaling() for name in ("a", "b")}
    found = compare(
        both[0], methods=calibrators | {"none": CALIBRATORS["none"](), "x": Shift()}, level=None
    )
    assert len(made) == 1
    assert found["a"].fit_seconds >= 0.3
    assert found["b"].fit_seconds >= 0.3
    assert found["none"].fit_seconds < 0.3
    assert found["x"].fit_seconds < 0.3


def test_progress_counts_methods(both):
    steps: list[tuple[int, int]] = []
    with use(progress=lambda *step: steps.append(step)):
        compare(both[0], methods=["none", "ts"], level=None)
    assert steps == [(0, 2), (1, 2), (2, 2)]


# Which methods.


@pytest.mark.parametrize("shared", [[], ["val"], ["val", "test"]])
def test_methods_that_need_features_run_where_there_are_some(both, tmp_path, monkeypatch, shared):
    monkeypatch.setitem(CALIBRATORS, "featured", Featured)
    _, val, test = both
    named = {"val": val, "test": test}
    for name in shared:
        named[name]["features"] = np.ones((len(named[name]["labels"]), 3), np.float32)
    data = as_npz(tmp_path, splits(**named))
    found = compare(data, methods="all", level=None, time_limit=0.01)
    methods = [row.method for row in found.rows]
    assert methods[:2] == ["none", "ts"]
    assert ("featured" in methods) == (len(shared) == 2)
    plain = [k for k in CALIBRATORS.values() if not k.needs_features and not k.two_classes_only]
    assert set(methods) >= {kind.name for kind in plain}


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (["ts", "tss"], "unknown method 'tss': did you mean ts"),
        ([], "methods must name at least one of none, ts"),
    ],
)
def test_unknown_methods_are_no_rows(both, methods, message):
    with pytest.raises(ValueError, match=message):
        compare(both[0], methods=methods)


@pytest.mark.parametrize("classes", [2, 5])
def test_a_dozen_methods_by_default(classes):
    logits, labels = drawn(np.random.default_rng(0), 400, classes, temperature=2.0)
    methods = [row.method for row in compare(logits, labels, level=None, time_limit=0.01).rows]
    assert len(methods) == 12
    assert set(methods) <= set(CALIBRATORS)
    assert ("venn_abers" in methods) == (classes == 2)


def test_parts_of_auto_are_understood_and_in_no_list(both):
    assert not set(PARTS) & set(CALIBRATORS)
    assert [row.method for row in compare(both[0], methods="odds", level=None).rows] == ["odds"]
    with pytest.raises(ValueError, match="unknown method 'oddz': choose from none, ts"):
        compare(both[0], methods="oddz")


def test_one_method_by_its_name(both):
    assert [row.method for row in compare(both[0], methods="ts", level=None).rows] == ["ts"]


# Which examples.


def test_a_single_split_is_cross_fitted(tmp_path):
    arrays = predictions(rows=601)
    arrays["logits"][:, 0] = np.arange(601) / 1000  # the number of the row
    path, kept = as_npz_folder(tmp_path, arrays), labelled(arrays)
    every, whole = numbers(kept["logits"][:, 0]), np.bincount(kept["labels"])
    for seed in (0, 1):
        found = compare(path, methods={"w": Witness()}, seed=seed, level=None)
        (row,) = found.rows
        assert found.folds == len(row.by_fold) == 5
        witnesses: list[Any] = row.by_fold
        for witness in witnesses:
            assert not witness.fitted & witness.applied
            assert witness.fitted | witness.applied == every
            assert (np.abs(np.bincount(witness.labels) - 0.8 * whole) <= 1).all()
        assert sum(len(witness.applied) for witness in witnesses) == len(every)
        assert isinstance(row.calibrator, Witness)
        assert row.calibrator.fitted == every
        assert found.n_fit == found.n_test == len(every)
        assert f"each by a fit on the other folds; 5 folds, seed {seed}" in found.describe()


def test_figures_out_of_fold_are_those_of_cross_fit(tmp_path):
    path = as_npz(tmp_path, predictions())
    found = compare(path, methods=["none", "ts"], level=None)
    expected = cross_fit(path, method="ts", folds=5, level=None).effect
    figures = [found[name].evaluation for name in ("none", "ts")]
    for got, wanted in zip(figures, (expected.before, expected.after), strict=True):
        assert got is not None
        assert got.to_dict()["metrics"] == wanted.to_dict()["metrics"]


def test_folds_are_seeded(tmp_path):
    path = as_npz(tmp_path, predictions())
    first, again, other = (
        figures(compare(path, methods=["none", "ts"], seed=seed, level=None).rows)
        for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


def test_groups_are_not_divided(tmp_path):
    arrays = predictions()
    arrays["logits"][:, 0] = np.arange(600) / 1000
    arrays["patient"] = np.arange(600) // 20
    methods = {"w": Witness(), "ts": TemperatureScaling()}
    found = compare(as_npz(tmp_path, arrays), methods=methods, groups="patient", level=None)
    witnesses: list[Any] = found["w"].by_fold
    for witness in witnesses:
        patients = {row // 20 for row in witness.fitted}
        assert not patients & {row // 20 for row in witness.applied}
        assert len(patients) == 24
        assert witness.groups is not None


def test_weights_count(both, tmp_path):
    _, val, test = both
    val["importance"][:30], test["importance"][:50] = 0, 0  # as if they were not there
    path = as_npz(tmp_path, splits(val=val, test=test))
    found = compare(path, methods=["ts"], sample_weight="importance", level=None)
    fitted = TemperatureScaling().fit(val["logits"], val["labels"], sample_weight=val["importance"])
    kept = labelled(test)
    expected = calibrant.evaluate(
        out_of(fitted, kept["logits"]), kept["labels"], sample_weight=kept["importance"], level=None
    )
    assert found.rows[0].evaluation is not None
    assert found.rows[0].evaluation["nll"].value == pytest.approx(expected["nll"].value, abs=1e-5)
    assert found.n_test == expected.n == (kept["importance"] > 0).sum()
    assert found.n_fit == (labelled(val)["importance"] > 0).sum()


@pytest.mark.parametrize(
    ("names", "asked", "described"),
    [
        (["val", "test"], {}, "10 examples (val split), measured on 20 (test split)"),
        (["val", "test", ""], {}, "10 examples (val split), measured on 20 (test split)"),
        (["val", ""], {}, "10 examples (val split), measured on 20 (unnamed split)"),
        (["", "test"], {}, "10 examples (unnamed split), measured on 20 (test split)"),
        (["test"], {}, "10 examples (test split), measured on 10 (the same, each by a fit on"),
        (["val"], {}, "10 examples (val split), measured on 10 (the same, each by a fit on"),
        (
            ["val", "test", "noise"],
            {"fit_split": "test", "test_split": "noise"},
            "20 examples (test split), measured on 30 (noise split)",
        ),
        (["val", "noise"], {"test_split": "noise"}, "10 examples (val split), measured on 20 (noi"),
    ],
)
def test_which_examples(names, asked, described):
    arrays = {
        name: {"logits": 4 * np.eye(2)[np.arange(10 * i) % 2], "labels": np.arange(10 * i) // 3 % 2}
        for i, name in enumerate(names, start=1)
    }
    found = compare(splits(**arrays), methods=["none"], level=None, **asked)
    assert f"fitted on {described}" in found.describe()


def test_no_split_to_fit_on(tmp_path):
    path = as_npz(tmp_path, splits(noise=predictions(rows=20), blur=predictions(rows=20)))
    with pytest.raises(
        ValueError, match=r"no split 'val', .* only noise, blur: name two with --fit-split"
    ):
        compare(path)
    with pytest.raises(ValueError, match="unknown split 'fog': choose from noise, blur"):
        compare(path, fit_split="fog")


def test_splits_must_have_the_same_classes():
    arrays = {"logits": np.eye(3), "labels": [0, 1, 2]}
    other = {"logits": np.eye(4), "labels": [0, 1, 2, 3]}
    with pytest.raises(ValueError, match=r"val split must have as many .* test split, got 3 and 4"):
        compare(splits(val=arrays, test=other))


@pytest.mark.parametrize("name", ["val", "test"])
@pytest.mark.parametrize("fault", ["logits", "labels"])
def test_wrong_data_are_no_fault_of_a_method(both, tmp_path, name, fault):
    _, val, test = both
    broken = {"val": val, "test": test}[name]
    broken["labels"][-1] = 1 if fault == "logits" else 9
    broken["logits"][-1] = np.nan if fault == "logits" else 0
    path = as_npz(tmp_path, splits(val=val, test=test))
    message = r"p\.npz: (logits must be finite|labels must be in)"
    with pytest.raises(ValueError, match=message):
        compare(path, methods=["none", "ts"])
    with pytest.raises(ValueError, match=message):
        compare(path, methods={"x": Shift()})


def test_logits_and_labels_are_compared_as_a_mapping_of_them(rng):
    logits, labels = drawn(rng, 400, 4, temperature=1.5)
    expected = compare({"logits": logits, "labels": labels}, methods=["ts"], level=None)
    for arrays in ((logits, labels), (torch.from_numpy(logits), labels.tolist())):
        found = compare(*arrays, methods=["ts"], level=None)
        assert figures(found.rows) == figures(expected.rows)
    for data in ("p.npz", {"logits": logits, "labels": labels}):
        with pytest.raises(
            TypeError, match=r"has its own: leave them out, .* by name, as in methods"
        ):
            compare(data, ["ts"])
    weight = rng.uniform(0.5, 2, 400)
    expected = compare({"logits": logits, "labels": labels}, methods=["ts"], sample_weight=weight)
    found = compare(logits, labels, methods=["ts"], sample_weight=torch.from_numpy(weight))
    assert figures(found.rows) == figures(expected.rows)


def test_arrays_are_compared_as_a_file_of_them(both):
    path, val, test = both
    arrays = {
        key: torch.as_tensor(values) if values.dtype.kind != "U" else values
        for key, values in splits(val=val, test=test).items()
    }
    found, expected = (
        compare(arrays, methods=["ts"], level=None),
        compare(path, methods=["ts"], level=None),
    )
    assert figures(found.rows) == figures(expected.rows)
    half = {key: value for key, value in arrays.items() if key.endswith(("logits", "labels"))}
    half |= {k: v.bfloat16() for k, v in half.items() if k.endswith("logits")}
    assert figures(compare(half, methods=["ts"], level=None).rows) == pytest.approx(
        figures(expected.rows), rel=0.01
    )


def test_one_logit(rng):
    logits, labels = drawn(rng, 800, 2, 2.0)
    odds = logits[:, 1] - logits[:, 0]
    found = compare({"logits": odds, "labels": labels}, methods=["none", "ts"], level=None)
    wide = compare({"logits": logits, "labels": labels}, methods=["none", "ts"], level=None)
    assert found.classes == 2
    assert figures(found.rows) == pytest.approx(figures(wide.rows), abs=1e-6)
    assert [row.argmax_changed for row in found.rows] == [0, 0]


def test_zeros_are_told_once_for_each_part(tmp_path):
    probs = np.full((40, 4), 0.25)
    probs[0] = probs[39] = np.eye(4)[0]
    arrays = {"probs": probs, "labels": np.arange(40) % 4}
    path = as_npz(tmp_path, splits(val=arrays, test={k: v[:39] for k, v in arrays.items()}))
    with pytest.warns(UserWarning, match="6 of 160 probabilities are 0") as told:
        found = compare(path, methods={"none": CALIBRATORS["none"](), "x": Shift()}, level=None)
    assert [str(warning.message).split()[0] for warning in told] == ["6"]
    assert [row.notes for row in found.rows] == [[], []]
    arrays["labels"][0] = 1  # in both
    with pytest.warns(UserWarning, match="6 of 160 prob|2 labels have a prob") as told:
        found = compare(
            {f"{name}_{k}": v for name in ("val", "test") for k, v in arrays.items()},
            methods={"none": CALIBRATORS["none"](), "x": Shift()},
            level=None,
        )
    assert len(told) == 2
    stated = np.maximum(probs[np.arange(40), arrays["labels"]], np.exp(-100))
    assert found["none"].evaluation is not None
    nll = found["none"].evaluation["nll"].value
    assert nll == pytest.approx(-np.log(stated).mean())  # as evaluate() has it


# What it says.


def comparison(**rows):
    """A comparison with these (ece, nll), each with an interval of 1 % and 0.1 around it."""
    made = []
    for method, (ece, nll) in rows.items():
        found: Any = {
            "ece": Estimate(ece, ece - 0.01, ece + 0.01),
            "nll": Estimate(nll, nll - 0.1, nll + 0.1),
            "accuracy": Estimate(1 - ece, 0.5, 1 - ece + 0.01),
        }
        made.append(Row(method, found, 0.5, 0, None))
    return as_comparison([*made, Row("bad", None, 0.5, None, "failed")], 0.9)


def as_comparison(rows, level):
    """A comparison of these rows, in which nothing was chosen."""
    return Comparison(rows, 1, 1, 3, "", "", level, "top_label", MethodChoice(None, "None."))


def test_best_are_those_within_the_interval_of_the_best():
    found = comparison(a=(0.05, 0.5), b=(0.02, 0.3), c=(0.029, 0.39), d=(0.031, 0.41))
    low = {"ece": Estimate(0.02, 0.0, 0.01)}  # an interval below the figure, half as wide
    near, far = {"ece": Estimate(0.0249)}, {"ece": Estimate(0.0251)}
    rows: Any = [Row(m, e, 0, 0, None) for m, e in (("f", far), ("n", near), ("l", low))]  # type: ignore[arg-type]
    assert as_comparison(rows, 0.9).best("ece") == ["l", "n"]
    assert found.best("ece") == ["b", "c"]
    assert found.best("nll") == ["b", "c"]
    assert found.best("accuracy") == ["b", "c", "d", "a"]  # high is good, down to 0.5
    assert found.legend() == "in the interval of the best, or within half its width"


@pytest.mark.parametrize("estimand", ["top_label", "binary", "multilabel"])
def test_differences_are_those_of_the_same_examples(rng, estimand):
    """On groups of weighted examples, against the sums of their differences."""
    classes = 5 if estimand == "top_label" else 2
    logits, labels = drawn(rng, 600, classes, 1.5)
    if estimand == "multilabel":
        labels = np.stack([labels, rng.integers(0, 2, labels.size)], -1)
    weight, groups = rng.uniform(0.2, 3, 600), rng.integers(0, 80, 600)
    options: dict[str, Any] = {"estimand": estimand, "sample_weight": weight, "groups": groups}
    methods = ["none", "ts" if estimand != "multilabel" else "tags"]
    found = compare(logits, labels, methods=methods, level=0.8, **options)
    assert set(found.behind) == {"nll", "brier", "accuracy"}
    sign = {"nll": 1, "brier": 1, "accuracy": -1}
    for metric, behind in found.behind.items():
        best = found.best(metric)[0]
        assert behind[best] == Estimate(0, 0, 0)
        for method, evaluation in found.measured.items():
            worse = sign[metric] * (evaluation[metric].value - found.measured[best][metric].value)
            assert behind[method].value == pytest.approx(worse, abs=1e-6)
            assert behind[method].low <= worse <= behind[method].high
    assert found.choice() == found.best("nll")[0] == methods[1]
    assert found.gain is not None
    none = found.behind["nll"]["none"]  # what it loses is what the choice gains
    assert none.low == pytest.approx(found.gain.low, abs=1e-6)
    assert none.high == pytest.approx(found.gain.high, abs=1e-6)


def test_best_of_mean_losses_is_paired():
    """A difference that is the same for every example is seen, however much the losses vary."""
    data = open_dataset(sample_path())
    found = compare(data, methods=["ts", "sms", "beta", "auto"])
    test = data.split("test")
    logits, labels = test.read("logits"), test.read("labels")
    rows = np.arange(labels.size)
    each = {
        row.method: -np.log(row.calibrator.predict_proba(logits)[rows, labels].astype(float))
        for row in found.rows
        if row.calibrator is not None
    }
    order = sorted(each, key=lambda method: each[method].mean())
    kept = []
    for method in order:
        worse = each[method] - each[order[0]]
        error = worse.std(ddof=1) / math.sqrt(worse.size)
        kept += [method] if worse.mean() <= 1.645 * error else []
    assert found.best("nll") == kept == ["sms", "auto"]
    high = found["sms"].evaluation["nll"].high  # type: ignore[index]
    assert found["ts"].evaluation["nll"].value < high  # type: ignore[index]
    assert "ts" in found.best("ece")


def test_best_without_intervals_is_the_best_alone():
    rows = [Row(m, {"ece": Estimate(v)}, 0, 0, None) for m, v in (("a", 0.2), ("b", 0.1))]  # type: ignore[arg-type]
    rows.append(Row("c", {"ece": Estimate(math.nan)}, 0, 0, None))  # type: ignore[arg-type]
    assert as_comparison(rows, None).best("ece") == ["b"]


def test_printed_table(both):
    found = compare(both[0], methods={"x": Shift(), "bad": Broken()})
    lines = str(found).splitlines()
    assert lines[0] == found.describe()
    assert re.sub(" +", " ", lines[1]) == "method ECE % 90 % interval NLL Brier acc. % changed fit"
    assert [line.split()[0] for line in lines[2:4]] == ["x", "bad"]
    assert lines[3].split()[1] == "failed"
    assert "bad failed: RuntimeError: the impossible" in lines
    assert lines[-1] == found.advice()
    assert max(map(len, lines[1:4])) <= 80
    ece = found["x"].evaluation["ece"]  # type: ignore[index]
    cells = dict(zip(_methods_table(found).headings, _methods_table(found).rows[0], strict=True))
    assert cells["ECE %"] == f"*{100 * ece.value:.2f}"  # of one method it is the best
    assert cells["90 % interval"] == f"[{100 * ece.low:.2f}, {100 * ece.high:.2f}]"
    assert cells["changed"] == str(found["x"].argmax_changed)
    with pytest.raises(KeyError):
        found["smart"]


def test_the_choice_is_about_the_examples_of_the_fit_and_the_advice_about_the_others(rng):
    val, test = drawn(rng, 1500, 4, 2.0), drawn(rng, 1500, 4, 1.0)  # calibrated
    data = {"val_logits": val[0], "val_labels": val[1]}
    data |= {"test_logits": test[0], "test_labels": test[1]}
    found = compare(data, methods=["none", "ts"], level=None)
    assert found["none"].evaluation["nll"].value < found["ts"].evaluation["nll"].value - 0.05  # type: ignore[index]
    assert found.choice() == "ts"
    assert found.chosen.advice.startswith("Use ts (cross-validated on the examples of the fit: ")
    assert found.gain is not None
    lower = found["none"].evaluation["nll"].value - found["ts"].evaluation["nll"].value  # type: ignore[index]
    assert found.gain.value == pytest.approx(lower, abs=1e-6)
    assert found.gain.high < 0
    assert re.fullmatch(
        r"No method clearly helps: leave the logits as they are. ts raises the NLL by .* on "
        r"examples it was not fitted on.",
        found.advice(),
    )
    assert (found.to_dict()["choice"], found.to_dict()["advice"]) == ("ts", found.advice())


def test_advice_that_may_be_noise_asks_for_more_examples(rng):
    """Of calibrated models few are told to use a method, and of miscalibrated ones all are."""
    options: dict[str, Any] = {"methods": ["none", "ts", "beta", "ets"], "level": None}
    for factor, least, most in ((1.0, 0, 2), (3.0, 20, 20)):
        made = [compare(*drawn(rng, 150, 4, factor), **options) for _ in range(20)]
        assert least <= sum(each.advice().startswith("Use ") for each in made) <= most
        doubtful = [
            each.advice()
            for each in made
            if each.gain is not None and each.gain.needed is not None and each.gain.low <= 0
        ]
        assert doubtful or factor > 1
        assert all(re.search(r"clearly helps; label about [\d,]+ more ex", x) for x in doubtful)


def test_advice_and_fit_agree(tmp_path, rng):
    """And both say what predictions that may change would gain."""
    logits, labels = drawn(rng, 800, 4, 1.5)
    path = as_npz(tmp_path, splits(val={"logits": preferring(logits), "labels": labels}))
    light = {"none": CALIBRATORS["none"](), "ts": TemperatureScaling()}
    found = compare(
        path, methods={**light, "auto": calibrant.Auto(candidates=list(light))}, level=None
    )
    with pytest.warns(UserWarning, match="Auto keeps predictions.*sms, which may change"):
        again = calibrant.fit(path, method=calibrant.Auto(candidates=list(light)))
    chosen: Any = found["auto"].calibrator
    assert found.choice() == "auto"
    assert chosen.findings[0] in found.advice()
    for reasons in (str(found), str(again.reasons_)):
        assert "sms, which may change the predicted class, would gain: accuracy" in reasons


def test_a_fit_may_take_as_long_as_it_wants(both):
    assert compare(both[0], methods=["ts"], time_limit=None, level=None).rows[0].error is None


def test_logits_that_look_like_probabilities_warn_at_the_line_of_the_caller(rng):
    probs = rng.dirichlet([1.0, 1.0, 1.0], 200)
    with pytest.warns(UserWarning, match="logits look like probabilities") as told:
        compare(
            {"logits": probs, "labels": rng.integers(3, size=200)}, methods=["none"], level=None
        )
    assert [warning.filename for warning in told] == [__file__]


def test_probabilities_are_passed_by_name():
    rng = np.random.default_rng(0)
    probs = rng.uniform(size=200)
    labels = (rng.uniform(size=200) < probs).astype(int)
    named, mapped = (
        compare(**form, methods=["none", "ts"], level=None)
        for form in (
            {"probs": probs, "labels": labels},
            {"data": {"probs": probs, "labels": labels}},
        )
    )
    assert [str(row.evaluation) for row in named.rows] == [
        str(row.evaluation) for row in mapped.rows
    ]
