"""The result of an evaluation: a mapping, its JSON, its print, its subgroups."""

import json
import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import calibrant as cal
from tests.support.metrics import ANY_CLASSES
from tests.support.simulate import drawn

DATA = drawn(np.random.default_rng(20260101), 600, 5, 1.5)


def test_an_evaluation_is_a_mapping_with_what_it_means():
    found = evaluated("default")
    assert list(found) == ANY_CLASSES
    assert len(found) == len(ANY_CLASSES)
    assert "ece" in found
    assert (found.n, found.classes, found.estimand, found.level) == (600, 5, "top_label", 0.9)
    assert found.binning == "15 equal-width bins (lo, hi], first bin closed"
    measured = "600 examples, 5 classes; calibration of the predicted class; 15 equal"
    assert found.describe().startswith(measured)
    assert found.bins.count.sum() == 600
    with pytest.raises(KeyError):
        found["nothing"]


def test_the_metrics_come_in_the_order_asked_for():
    assert list(cal.evaluate(*DATA, metrics=["nll", "ece"], level=None)) == ["nll", "ece"]


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "no intervals": {"level": None},
    "some": {"metrics": ["nll", "brier"]},
    "subgroups": {"by": np.arange(600) % 3, "metrics": ["nll", "ece", "auroc"]},
    "weights": {"sample_weight": np.linspace(0, 1, 600)},
}


@cache
def evaluated(options):
    """Evaluation with these options: made once, since intervals take time."""
    return cal.evaluate(*DATA, **OPTIONS[options])


@pytest.mark.parametrize("options", OPTIONS)
def test_the_dictionary_is_json_and_holds_the_figures(options):
    found = evaluated(options)
    back = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert back["n"] == found.n
    assert back["level"] == found.level
    for name, estimate in found.items():
        for key in ("value", "low", "high"):
            shown = back["metrics"][name][key]
            assert (math.nan if shown is None else shown) == pytest.approx(
                getattr(estimate, key), abs=0, nan_ok=True
            )
    assert (back["test"] is None) == (found.level is None)
    assert list(back.get("by", {})) == list(found.by)


@pytest.mark.parametrize("n", [1, 2, 600])
def test_undefined_figures_are_null_in_the_dictionary_and_a_dash_in_print(n):
    logits, labels = DATA[0][:n], DATA[0][:n].argmax(-1)  # all right: no AUROC
    found = cal.evaluate(logits, labels, metrics=["auroc", "nll"])
    assert math.isnan(found["auroc"].value)
    assert found.to_dict()["metrics"]["auroc"] == {"value": None, "low": None, "high": None}
    json.dumps(found.to_dict(), allow_nan=False)
    line = next(line for line in str(found).splitlines() if line.startswith("AUROC"))
    assert line.split() == ["AUROC", "of", "confidence", "-"]


@pytest.mark.parametrize("options", OPTIONS)
def test_print_shows_every_title_and_value(options):
    found = evaluated(options)
    text = str(found)
    for name, estimate in found.items():
        metric = cal.METRICS[name]
        shown = f"{100 * estimate.value:.2f} %" if metric.percent else f"{estimate.value:.4f}"
        line = next(line for line in text.splitlines() if line.startswith(f"{metric.title}  "))
        assert shown in line
        assert ("[" in line) == (found.level is not None)
    assert ("90 % interval" in text) == (found.level is not None)
    rows = [line.split()[:2] for line in text.splitlines()]
    assert all([name, "200"] in rows for name in found.by)


def test_huge_values_are_printed_in_scientific_form():
    found = cal.evaluate([[0.0, 9e7], [0.0, 9e7]], [0, 1], metrics=["nll"], level=None)
    assert "4.5e+07" in str(found)


def test_the_verdict_follows_the_test(rng):
    logits, labels = drawn(rng, 2000, 4)
    calm, wild = (cal.evaluate(scale * logits, labels, metrics=["ece"]) for scale in (1, 4))
    assert calm.test is not None
    assert wild.test is not None
    assert calm.test.p_value > 0.05
    assert wild.test.p_value == 0.001
    assert "No evidence of miscalibration in 2,000 examples" in str(calm)
    assert "Miscalibrated (p " in str(wild)
    assert "p <= 0.001" in str(wild)
    assert cal.evaluate(logits, labels, level=None).verdict() == ""
    for found in (calm, wild):
        assert found.verdict() in str(found)


# Subgroups


def three_groups(rng):
    """Calibrated "good", over-confident "bad", hopeless "worst", and "none" without a label."""
    logits, labels = drawn(rng, 1600, 4)
    names = np.repeat(["good", "bad", "worst", "none"], 400)
    logits[names == "bad"] *= 3
    logits[names == "worst"] = np.array([20.0, 0, 0, 0])
    labels[names == "none"] = -100
    order = rng.permutation(1600)
    return logits[order], labels[order], names[order]


@pytest.mark.parametrize("level", [None, 0.9])
def test_groups_come_worst_first_and_without_those_that_have_no_label(rng, level):
    logits, labels, names = three_groups(rng)
    found = cal.evaluate(logits, labels, by=names, level=level, metrics=["ece", "nll"])
    assert list(found.by) == ["worst", "bad", "good"]
    assert found.n == sum(part.n for part in found.by.values()) == 1200
    assert "none" not in str(found)


def test_a_small_group_that_proves_nothing_does_not_come_first(rng):
    """Three unlucky examples look worse than 2000 that are surely off; the proof decides."""
    confidence = np.concatenate([np.full(2000, 0.9), np.full(3, 0.6)])
    right = np.concatenate([np.arange(2000) % 10 < 6, [False] * 3])
    odds = np.log(confidence / (1 - confidence))
    groups = np.repeat(["many", "few"], [2000, 3])
    found = cal.evaluate(odds, right.astype(int), by=groups, estimand="binary", metrics=["ece"])
    assert found.by["few"]["ece"].value > found.by["many"]["ece"].value
    assert list(found.by) == ["many", "few"]


def test_a_group_is_the_evaluation_of_its_examples(rng):
    logits, labels, names = three_groups(rng)
    weight = rng.exponential(size=len(labels))
    options: dict[str, Any] = {"metrics": ["ece", "nll", "classwise_ece", "auroc", "ks"]}
    found = cal.evaluate(logits, labels, by=names, sample_weight=weight, **options)
    for name, part in found.by.items():
        inside = names == name
        alone = cal.evaluate(
            logits[inside], labels[inside], sample_weight=weight[inside], **options
        )
        assert part.to_dict() == alone.to_dict()


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor, list])
def test_groups_are_named_after_their_values(kind):
    numbers = [0, 7] * 300
    found = cal.evaluate(*DATA, by=kind(numbers), metrics=["ece"], level=None)
    assert set(found.by) == {"0", "7"}
    assert {part.n for part in found.by.values()} == {300}


def test_a_group_per_row_serves_the_row(rng):
    logits, labels = drawn(rng, 120, 3)
    groups = np.arange(20) % 2
    found = cal.evaluate(logits.reshape(20, 6, 3), labels.reshape(20, 6), by=groups, level=None)
    expected = cal.evaluate(logits, labels, by=groups.repeat(6), level=None)
    assert {name: part.to_dict() for name, part in found.by.items()} == {
        name: part.to_dict() for name, part in expected.by.items()
    }


def test_nan_is_a_group():
    groups = np.where(np.arange(600) % 3 == 0, math.nan, 1.5)
    found = cal.evaluate(*DATA, by=groups, metrics=["ece"], level=None)
    assert {name: part.n for name, part in found.by.items()} == {"nan": 200, "1.5": 400}


def test_more_than_a_thousand_groups_of_all_batches_are_refused(rng):
    logits, labels = drawn(rng, 600, 3)

    def of(first):
        stream = cal.Accumulator(metrics=["accuracy"], level=None)
        return stream.update(logits, labels, by=np.arange(first, first + 600))

    message = "by must have at most 1000 values, got 1200"
    stream = of(0)
    with pytest.raises(ValueError, match=message):
        stream.update(logits, labels, by=np.arange(600, 1200))
    with pytest.raises(ValueError, match=message):
        stream.merge(of(600))
    assert stream.compute().n == 600  # refused batches leave no trace


@pytest.mark.parametrize(
    "kind",
    [
        lambda g: torch.tensor(g).bfloat16(),
        lambda g: torch.tensor(g).float().to(torch.float8_e4m3fn),
        lambda g: np.array([b"\xff%d" % i for i in g]),
        lambda g: np.array([b"\xff%d" % i for i in g], dtype=object),
        lambda g: np.array([None if i == 0 else str(i) for i in g], dtype=object),
    ],
    ids=["bfloat16", "float8", "bytes", "objects of bytes", "objects with None"],
)
def test_subgroups_and_groups_may_be_of_any_kind(kind, rng):
    logits, labels = drawn(rng, 200, 3, 1.5)
    number = np.arange(200) % 3
    expected = cal.evaluate(logits, labels, by=number, metrics=["nll"], level=None)
    found = cal.evaluate(logits, labels, by=kind(number), metrics=["nll"], level=None)
    assert sorted(part["nll"] for part in found.by.values()) == sorted(
        part["nll"] for part in expected.by.values()
    )
    one, other = (
        cal.Auto(candidates=["none", "ts"]).fit(logits, labels, groups=groups)
        for groups in (number, kind(number))
    )
    np.testing.assert_array_equal(one.predict_proba(logits), other.predict_proba(logits))


def test_groups_of_an_estimand_with_one_logit_are_the_subsets(rng):
    odds = rng.normal(size=400)
    labels = (rng.random(400) < 1 / (1 + np.exp(-odds))).astype(int)
    groups = np.arange(400) % 2
    found = cal.evaluate(odds, labels, by=groups, estimand="binary", level=None)
    for name in (0, 1):
        inside = groups == name
        alone = cal.evaluate(odds[inside], labels[inside], estimand="binary", level=None)
        assert found.by[str(name)].to_dict() == alone.to_dict()


def test_groups_of_tags_keep_the_tags_apart(rng):
    logits = rng.normal(size=(200, 3))
    labels = (rng.random((200, 3)) < 1 / (1 + np.exp(-logits))).astype(int)
    half = np.repeat([0, 1], 100)
    with pytest.raises(ValueError, match="by must have one value per example or per row"):
        cal.evaluate(logits, labels, by=half[:, None].repeat(3, 1), estimand="multilabel")
    found = cal.evaluate(logits, labels, by=half, estimand="multilabel", level=None)
    for name in (0, 1):
        inside = half == name
        alone = cal.evaluate(logits[inside], labels[inside], estimand="multilabel", level=None)
        assert found.by[str(name)].classes == 3
        assert found.by[str(name)].to_dict() == alone.to_dict()
