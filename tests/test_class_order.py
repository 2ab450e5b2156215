"""Classes keep their names: columns in another order give the same figures, at every door."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

import calibrant as cal
from calibrant.artifacts.objects import artifact_of, restored
from calibrant.calibrators.description import calibrator_fingerprint
from calibrant.decide import PriorCorrection
from calibrant.deploy import calibrate_table
from calibrant.deploy.exports import _metadata
from calibrant.estimate import PerformanceEstimator
from calibrant.monitor import Monitor
from calibrant.slices import find_slices, measure_groups
from calibrant.workflows.apply import apply, apply_shards
from calibrant.workflows.decide import apply_rule, decide
from calibrant.workflows.effect import effect
from calibrant.workflows.fit import cross_fit, fit
from calibrant.workflows.retrain import retrain
from tests.support.prediction_files import arrays_in

pytestmark = pytest.mark.filterwarnings("ignore:.* keeps predictions")
NAMES = ["cat", "dog", "owl"]
ORDER = [2, 0, 1]
OTHERS = {
    "renamed": lambda frame: frame.rename(columns={"prob_cat": "prob_fox"}),
    "further": lambda frame: frame.assign(prob_fox=1e-9),
    "missing": lambda frame: frame.drop(columns="prob_cat"),
}


@pytest.fixture(scope="module")
def frame():
    """Predictions that prefer the first class, with the labels as names."""
    rng = np.random.default_rng(5)
    logits = 3 * rng.normal(size=(900, 3))
    labels = (logits / 2 + rng.gumbel(size=logits.shape)).argmax(1)
    probs = np.exp(logits + np.array([2, 0, -1]))
    table = pd.DataFrame(probs / probs.sum(1, keepdims=True), columns=[f"prob_{n}" for n in NAMES])
    site = np.where(logits[:, 0] > 0, "north", "south")
    return table.assign(label=np.array(NAMES)[labels], site=site)


@pytest.fixture(scope="module")
def fitted(frame):
    return fit(frame, method="vector")


def permuted(frame):
    return frame[[*(frame.columns[k] for k in ORDER), "label", "site"]]


def scores(frame):
    return np.log(frame[[name for name in frame.columns if name.startswith("prob_")]])


def applied(fitted, frame, folder):
    frame.to_csv(folder / "in.csv", index=False)
    apply(fitted, folder / "in.csv", folder / "out.csv")
    return pd.read_csv(folder / "out.csv")[[f"prob_{name}" for name in NAMES]].to_numpy()


def applied_to_shards(fitted, frame, folder):
    (folder / "in").mkdir()
    frame[:500].to_csv(folder / "in/0.csv", index=False)
    frame[500:].to_csv(folder / "in/1.csv", index=False)
    apply_shards(fitted, folder / "in", folder / "out")
    shards = [pd.read_csv(folder / f"out/{i}.csv") for i in range(2)]
    return pd.concat(shards)[[f"prob_{name}" for name in NAMES]].to_numpy()


def predicted(method):
    def door(fitted, frame, folder):
        found = pd.DataFrame(getattr(fitted, method)(scores(frame)), columns=scores(frame).columns)
        return found[[f"prob_{name}" for name in NAMES]].to_numpy()

    return door


def decisions(**asked):
    def door(fitted, frame, folder):
        """A rule of the columns in their first order, applied to a file in this one."""
        rule = fitted.rules[tuple(asked)]
        frame.to_csv(folder / "in.csv", index=False)
        result = apply_rule(rule, folder / "in.csv", folder / "out.csv").to_dict()
        apply_rule(rule, folder / "in.csv", folder / "out.npz")
        written = arrays_in(folder / "out.npz")
        numbers = np.array([c.removeprefix("prob_") for c in frame.columns[:3]])
        names = numbers[written["predicted"]]
        direct = rule.decide(scores(frame))
        assert (numbers[direct["predicted"]] == names).all()
        if "set" in direct:
            places = [list(numbers).index(name) for name in NAMES]
            assert (written["set"] == direct["set"]).all()
            names = direct["set"][:, places]
        table = pd.read_csv(folder / "out.csv")
        assert [*table.columns[: len(frame.columns)]] == [*frame.columns]
        return [names, table[sorted(table.columns)].to_csv(), result]

    return door


def searched(fitted, frame, folder):
    return find_slices(frame, calibrator=fitted, columns=["site"]).to_dict()


DOORS: dict[str, Callable[..., Any]] = {
    "apply": applied,
    "apply_shards": applied_to_shards,
    "transform": predicted("transform"),
    "predict_proba": predicted("predict_proba"),
    "effect": lambda fitted, frame, _: effect(fitted, frame, level=None).to_dict(),
    "decide": lambda fitted, frame, _: decide(frame, max_error=0.3, calibrator=fitted).to_dict(),
    "threshold": decisions(max_error=0.3),
    "sets": decisions(coverage=0.8, score="lac"),
    "slices": searched,
    "groups": lambda fitted, frame, _: measure_groups(
        frame, by="site", calibrator=fitted
    ).to_dict(),
    "table": lambda fitted, frame, _: calibrate_table(frame, fitted)[
        [f"calibrated_{name}" for name in NAMES]
    ].to_numpy(),
}


@pytest.fixture(scope="module")
def with_rules(fitted, frame):
    """A calibrator that also carries the rules of the doors that apply them."""
    found = copy.deepcopy(fitted)
    object.__setattr__(
        found,
        "rules",
        {
            ("max_error",): decide(frame, max_error=0.3, calibrator=fitted).rule,
            ("coverage", "score"): decide(frame, coverage=0.8, score="lac", calibrator=fitted).rule,
        },
    )
    return found


@pytest.mark.parametrize("door", DOORS)
def test_columns_in_another_order_give_the_same(door, with_rules, frame, tmp_path):
    first, second = (tmp_path / name for name in ("first", "second"))
    first.mkdir()
    second.mkdir()
    expected = DOORS[door](with_rules, frame, first)
    found = DOORS[door](with_rules, permuted(frame), second)
    np.testing.assert_equal(found, expected)


@pytest.mark.parametrize("change", OTHERS)
@pytest.mark.parametrize("door", DOORS)
def test_other_classes_are_refused(door, change, with_rules, frame, tmp_path):
    other = OTHERS[change](frame.assign(label="dog"))
    with pytest.raises(ValueError, match="other classes than those of the fit"):
        DOORS[door](with_rules, other, tmp_path)


def test_names_are_those_of_the_columns(frame, fitted):
    assert fitted.class_names_ == tuple(NAMES)
    assert cross_fit(frame, method="ts", level=None).calibrator.class_names_ == tuple(NAMES)
    assert cal.Auto().fit(scores(frame), frame["label"]).class_names_ == tuple(NAMES)
    numbers = scores(frame).set_axis(["prob_0", "prob_1", "prob_2"], axis=1)
    again = fitted.fit(numbers, frame["label"].map(NAMES.index))
    assert again.class_names_ is None
    fitted.fit(scores(frame), frame["label"])


def test_arrays_stand_for_the_columns_of_the_fit(frame, fitted):
    expected = fitted.predict_proba(scores(frame))
    assert (fitted.predict_proba(scores(frame).to_numpy()) == expected).all()
    numbered = scores(frame).set_axis(range(3), axis=1)
    assert (fitted.predict_proba(numbered) == expected).all()
    backwards = numbered[[2, 1, 0]]
    plain = cal.TemperatureScaling().fit(numbered, frame["label"].map(NAMES.index))
    assert (plain.temperature(backwards) == plain.temperature(numbered)).all()


def test_frames_of_splits_come_into_one_order(frame):
    val, test = scores(frame[:500]), scores(permuted(frame)[500:])
    data = {"val_logits": val, "val_labels": frame["label"][:500]}
    data |= {"test_logits": test, "test_labels": frame["label"][500:]}
    apart = cal.evaluate({**data, "test_logits": scores(frame[500:])})["accuracy"]
    assert cal.evaluate(data)["accuracy"] == apart
    with pytest.raises(ValueError, match="other classes"):
        cal.evaluate({**data, "test_logits": test.rename(columns={"prob_cat": "prob_fox"})})


def saved_again(obj, folder):
    cal.save(obj, folder / "saved")
    return cal.load(folder / "saved")


def test_names_are_saved_and_exported(frame, fitted, tmp_path):
    """Of a calibrator, one inside of another, a rule, and a retrained classifier."""
    corrected = PriorCorrection(fitted).set_priors([0.2, 0.3, 0.5], [0.4, 0.3, 0.3])
    rule = decide(frame, max_error=0.3, calibrator=fitted).rule
    labels = np.arange(300) % 3
    data: Any = {
        "train_features": 2 * np.eye(3)[labels],
        "train_labels": labels,
        "class_names": NAMES,
    }
    retrained = retrain(data, options={"epochs": 3, "step": 0.0, "batch_size": 10})
    for obj in (fitted, corrected, retrained):
        assert saved_again(obj, tmp_path).class_names_ == obj.class_names_ == tuple(NAMES)
    again = saved_again(rule, tmp_path)
    assert again.class_names == NAMES
    assert again.calibrator.class_names_ == saved_again(corrected, tmp_path).calibrator.class_names_
    assert json.loads(_metadata(fitted)["class_names"]) == NAMES
    assert "class_names" not in _metadata(
        cal.TemperatureScaling().fit([[2.0, 0.0], [0.0, 2.0]] * 30, [0, 1, 0, 0] * 15)
    )


def test_other_names_are_other_calibrators(frame, fitted):
    """A run that goes on with shards of an earlier one must tell them apart."""
    renamed = copy.deepcopy(fitted)
    renamed.class_names_ = ("cat", "owl", "dog")
    assert calibrator_fingerprint(renamed) != calibrator_fingerprint(fitted)


@pytest.mark.parametrize(
    "names", ["cat", ["cat", "dog"], ["cat", "cat", "owl"], ["cat", "dog", 3], {"cat": 1}]
)
def test_artifacts_with_odd_names_are_refused(names, fitted):
    artifact = artifact_of(fitted)
    with pytest.raises(ValueError, match="class_names_ must name 3 classes"):
        restored(artifact._replace(extra={**artifact.extra, "class_names_": names}))


def named_days(frame, folder):
    """Two days of predictions: the second has its columns in another order."""
    frame[:450].to_csv(folder / "1.csv", index=False)
    permuted(frame)[450:].to_csv(folder / "2.csv", index=False)
    frame[450:].to_csv(folder / "same.csv", index=False)
    return [folder / name for name in ("1.csv", "2.csv", "same.csv")]


@pytest.mark.parametrize("calibrated", [True, False])
def test_a_monitor_finds_classes_by_name(calibrated, fitted, frame, tmp_path):
    """And recognises rows that come again with their columns in another order."""
    first, second, same = named_days(frame, tmp_path)
    calibrator = fitted if calibrated else None
    expected, watch = (Monitor(calibrator).update_file(first) for _ in range(2))
    expected.update_file(same)
    watch.update_file(second)
    assert watch.report().n == 900
    found, wanted = (one.report().windows for one in (watch, expected))
    assert [day["accuracy"] for day in found] == [day["accuracy"] for day in wanted]
    with pytest.warns(UserWarning, match="is in the stream already"):
        watch.update_file(same)
    direct = Monitor(calibrator).update(scores(frame), frame["label"])
    turned = Monitor(calibrator).update(scores(permuted(frame)), frame["label"])
    assert direct.report().to_dict() == turned.report().to_dict()
    if calibrated:
        other = OTHERS["renamed"](frame.assign(label="dog"))
        with pytest.raises(ValueError, match="other classes"):
            watch.update(scores(other), other["label"])


@pytest.mark.parametrize("calibrated", [True, False])
def test_an_estimate_finds_classes_by_name(calibrated, fitted, frame, tmp_path):
    """Of a file with labels of some rows, and with labels beside it as numbers of its columns."""
    options: Any = {"calibrator": fitted}
    if not calibrated:
        probs = fitted.predict_proba(scores(frame))
        frame, options = frame.assign(**dict(zip(frame.columns[:3], probs.T, strict=True))), {}
    some = frame.assign(label=frame["label"].where(frame.index % 450 < 200, "-100"))
    _, second, same = named_days(some, tmp_path)
    estimator = PerformanceEstimator(frame[:450], **options)
    for labels in (True, False):
        results = [estimator.estimate(day, labels=labels).to_dict() for day in (same, second)]
        np.testing.assert_equal(results[1], results[0])
    turned = permuted(some)[450:]
    places = [name.removeprefix("prob_") for name in turned.columns[:3]]
    numbers = [-100 if name == "-100" else places.index(name) for name in turned["label"]]
    beside = estimator.estimate(turned.drop(columns="label"), labels=np.array(numbers))
    assert beside["accuracy"] == estimator.estimate(same)["accuracy"]
    other = OTHERS["renamed"](frame.assign(label="dog"))
    with pytest.raises(ValueError, match="other classes"):
        estimator.estimate(other)
