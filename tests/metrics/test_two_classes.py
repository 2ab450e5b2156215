"""Two classes: P(y = 1) is measured unless the caller asks for the predicted class."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import expit

import calibrant as cal
from calibrant import use
from calibrant.llm import evaluate_answers
from calibrant.show import figures
from tests.support.simulate import drawn

ERRORS = (
    *("ece", "debiased_ece", "ada_ece", "mce", "over_ece", "under_ece"),
    *("ks", "smooth_ece", "smce"),
)
SCORES = ("accuracy", "nll", "brier", "classwise_ece", "auroc", "aurc")
"""Metrics that do not depend on the default estimand."""
TOP: dict[str, Any] = {"estimand": "top_label"}


def clicks(seed=0, n=2000, shift=2.0):
    """Log-odds z, and labels drawn from sigmoid(z - shift)."""
    rng = np.random.default_rng(seed)
    z = 2 * rng.normal(size=n)
    return z, (rng.random(n) < expit(z - shift)).astype(int)


def softened(z, labels):
    """Log-odds whose confidence in the predicted class is right on average."""
    return cal.TemperatureScaling().fit(z, labels).transform(z)


def forms(z):
    """The same predictions in every form, as keyword arguments."""
    p = expit(z)
    return {
        "log-odds": {"logits": z},
        "two logits": {"logits": np.stack([np.full_like(z, 3.0), z + 3.0], -1)},
        "tensor": {"logits": torch.tensor(z)},
        "P(y = 1)": {"probs": p},
        "both probabilities": {"probs": np.stack([1 - p, p], -1)},
    }


FORMS = list(forms(np.zeros(1)))
every_form = pytest.mark.parametrize("form", FORMS)


def curve_ece(calibration_curve, labels, claimed, bins):
    """ECE of P(y = 1) by the curve of scikit-learn, with the share of each bin counted apart."""
    happened, stated = calibration_curve(labels, claimed, n_bins=bins, strategy="uniform")
    edges = np.linspace(0, 1, bins + 1)
    number = np.array([sum(1 for edge in edges[1:-1] if p > edge) for p in claimed])
    _, count = np.unique(number, return_counts=True)
    return float((count / count.sum() * np.abs(happened - stated)).sum())


# A known truth


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.filterwarnings("ignore:.*keeps predictions")
def test_an_intercept_is_always_detected(seed):
    """P(y = 1) is 27 points too high, while the predicted class is as sure as it is right."""
    z, labels = clicks(seed)
    soft = softened(z, labels)
    found = cal.evaluate(soft, labels, metrics=["ece"])
    assert found["ece"].value == pytest.approx(0.27, abs=0.04)
    assert found["ece"].low > 0.2
    assert found.test is not None
    assert found.test == cal.metrics.calibration_test(soft, labels)
    assert found.test.p_value == 0.001
    assert found.verdict().startswith("P(y = 1) is miscalibrated (p ")
    assert cal.metrics.calibration_test(soft, labels, **TOP).p_value > 0.001


def test_calibrated_log_odds_are_rejected_as_rarely_as_promised():
    """200 tests at 5 %: more than 19 rejections have a chance of 0.4 %."""
    p_values = [
        cal.metrics.calibration_test(*clicks(seed, n=200, shift=0.0)).p_value for seed in range(200)
    ]
    assert 2 <= sum(p < 0.05 for p in p_values) <= 19
    found = cal.evaluate(*clicks(1, shift=0.0), metrics=["ece"])
    assert found["ece"].low == 0
    assert found.verdict().startswith("No evidence of miscalibration of P(y = 1) in 2,000 examples")


# Other libraries


@every_form
@pytest.mark.parametrize("bins", [5, 10, 15])
def test_ece_is_that_of_the_calibration_curve_of_sklearn(form, bins):
    curve = pytest.importorskip("sklearn.calibration").calibration_curve
    z, labels = clicks()
    given = forms(z)[form]
    expected = curve_ece(curve, labels, expit(z), bins)
    assert cal.ece(labels=labels, bins=bins, **given) == pytest.approx(expected, abs=1e-12)
    assert cal.ece(labels=labels, bins=bins, **TOP, **given) != pytest.approx(expected, abs=0.1)


def test_auroc_ranks_answers_and_that_of_the_positive_class_is_roc_auc():
    metrics = pytest.importorskip("sklearn.metrics")
    z, labels = clicks()
    right = (z > 0) == labels
    answers = metrics.roc_auc_score(right, np.abs(z))
    classes = metrics.roc_auc_score(labels, z)
    found = cal.evaluate(z, labels, level=None)
    named = cal.evaluate(z, labels, level=None, estimand="binary")
    assert cal.auroc(z, labels) == pytest.approx(answers, abs=1e-12)
    assert found["auroc"].value == pytest.approx(answers, abs=1e-12)
    assert cal.auroc(z, labels, estimand="binary") == pytest.approx(classes, abs=1e-12)
    assert named["auroc"].value == pytest.approx(classes, abs=1e-12)


@every_form
@pytest.mark.parametrize("typed", ["roc_auc", "AUC", "ROC AUC"])
def test_roc_auc_is_that_of_scikit_learn(form, typed):
    metrics = pytest.importorskip("sklearn.metrics")
    z, labels = clicks()
    weight = np.random.default_rng(1).exponential(size=z.size)
    expected = metrics.roc_auc_score(labels, z, sample_weight=weight)
    data = {**forms(z)[form], "labels": labels, "sample_weight": weight}
    assert cal.METRICS[typed].compute(**data) == pytest.approx(expected, abs=1e-12)
    logits = data.pop("logits", None)
    chosen: list[dict[str, Any]] = [{}, {"metrics": [typed]}, {"estimand": "binary"}]
    for options in chosen:
        found = cal.evaluate(logits, level=None, **data, **options)
        assert found[typed].value == pytest.approx(expected, abs=1e-12)
    value, low, high = cal.evaluate(logits, metrics=[typed], **data)[typed]
    assert low < value < high


def test_roc_auc_is_of_two_classes_only(rng):
    logits, labels = drawn(rng, 50, 3)
    z, clicked = clicks()
    tags: dict[str, Any] = {"estimand": "multilabel"}
    cases = [(logits, labels, {}), (logits, (logits > 1).astype(int), tags), (z, clicked, TOP)]
    for scores, targets, options in cases:
        assert "roc_auc" not in cal.evaluate(scores, targets, level=None, **options)
        with pytest.raises(ValueError, match=r"roc_auc is a figure of P\(y = 1\) .*: name auroc"):
            cal.evaluate(scores, targets, metrics=["auc"], **options)
    with pytest.raises(ValueError, match="one_vs_rest"):
        cal.metrics.roc_auc(logits, labels)


# The table, the functions and the curves agree


@every_form
@pytest.mark.parametrize("weigh", [False, True])
def test_functions_and_evaluation_agree(form, weigh):
    z, labels = clicks()
    labels[::9] = -100
    weight = np.random.default_rng(1).exponential(size=z.size) if weigh else None
    data = {**forms(z)[form], "labels": labels, "sample_weight": weight}
    kept = labels >= 0
    pairs = {"confidence": expit(z[kept]), "outcome": labels[kept]}
    pairs["sample_weight"] = None if weight is None else weight[kept]
    rest = {key: value for key, value in data.items() if key != "logits"}
    found = cal.evaluate(data.get("logits"), level=None, **rest)
    assert found.estimand == "binary"
    for name in ERRORS:
        expected = cal.METRICS[name].compute(**pairs)
        assert found[name].value == pytest.approx(expected, abs=1e-9), name
        assert cal.METRICS[name].compute(**data) == pytest.approx(expected, abs=1e-9), name
    for name in SCORES:
        expected = cal.METRICS[name].compute(**data)
        assert found[name].value == pytest.approx(expected, abs=1e-12), name


@every_form
def test_the_top_label_gives_the_figures_of_its_pairs(form):
    z, labels = clicks()
    given = forms(z)[form]
    confidence, outcome = expit(np.abs(z)), (z > 0) == labels
    found = cal.evaluate(given.get("logits"), labels, probs=given.get("probs"), level=None, **TOP)
    for name in (*ERRORS, "accuracy", "auroc", "aurc"):
        expected = cal.METRICS[name].compute(confidence=confidence, outcome=outcome)
        assert found[name].value == pytest.approx(expected, abs=1e-9), name
    assert found.probability == ""
    assert "P(y = 1)" not in str(found)


def test_scores_and_rankings_do_not_depend_on_the_default():
    """Also where confidences tie: 0.8 for either class is one confidence."""
    rng = np.random.default_rng(0)
    p = rng.integers(1, 10, 500) / 10
    labels = (rng.random(500) < p**2).astype(int)
    for data in (p, np.stack([1 - p, p], -1)):
        options: dict[str, Any] = {"probs": data, "labels": labels, "metrics": [*SCORES, "ece"]}
        default, top = cal.evaluate(**options), cal.evaluate(**options, **TOP)
        for name in SCORES:
            assert default[name] == top[name], name
        assert default["ece"] != top["ece"]


@pytest.mark.parametrize("estimand", ["auto", "top_label", "binary"])
def test_curves_are_of_the_same_probability(estimand):
    z, labels = clicks()
    pairs = cal.top_label if estimand == "top_label" else cal.metrics.positive_class
    confidence, outcome = pairs(z, labels)
    for curve in (cal.metrics.reliability, cal.metrics.smooth_reliability):
        found = curve(z, labels, estimand=estimand)
        assert found.probability == ("" if estimand == "top_label" else "P(y = 1)")
        expected = curve(confidence=confidence, outcome=outcome)
        assert expected.probability == ""
        for ours, theirs in zip(found[:5], expected[:5], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-12)
    [margin] = cal.metrics.reliability_by_margin(z, labels, estimand=estimand, margin_bins=1)
    np.testing.assert_allclose(
        margin.reliability.accuracy,
        cal.metrics.reliability(z, labels, estimand=estimand).accuracy,
        atol=1e-12,
    )


# Streams, shards, subgroups


@pytest.mark.parametrize("one_logit", [True, False])
@pytest.mark.parametrize(
    "options",
    [{"metrics": ["ece", "ks", "auroc", "aurc", "nll"], "level": None}, {"metrics": ["nll"]}],
)
def test_streams_and_merges_give_the_figures_of_the_whole(one_logit, options):
    """All figures, and then the test, which comes with intervals."""
    z, labels = clicks(n=600)
    logits = z if one_logit else np.stack([-z, np.zeros_like(z)], -1)
    group = np.arange(600) % 3
    expected = cal.evaluate(logits, labels, by=group, **options)
    stream, total = (cal.Accumulator(pairs=True, **options) for _ in range(2))
    for part in np.array_split(np.arange(600), 7):
        stream.update(logits[part], labels[part], by=group[part])
        alone = total.like().update(logits[part], labels[part], by=group[part])
        total.merge(pickle.loads(pickle.dumps(alone)))
    for found in (stream.compute(), total.compute()):
        same_figures(found, expected)
        for name, subgroup in expected.by.items():
            inside = group == int(name)
            same_figures(found.by[name], subgroup)
            same_figures(subgroup, cal.evaluate(logits[inside], labels[inside], **options))


def same_figures(found, expected):
    assert found.estimand == expected.estimand == "binary"
    assert found.test == expected.test
    for name in expected:
        values = found[name].value, expected[name].value
        assert values[0] == pytest.approx(values[1], abs=1e-12, nan_ok=True), name


def test_shards_of_one_logit_and_of_two_add_up(tmp_path):
    z, labels = clicks(n=600)
    pair = np.stack([np.zeros_like(z), z], -1)
    for i, part in enumerate(np.array_split(np.arange(600), 3)):
        np.savez(tmp_path / f"{i}.npz", logits=pair[part], labels=labels[part])
    options: dict[str, Any] = {"metrics": ["ece", "ks", "auroc", "aurc", "nll"]}
    expected = cal.evaluate(z, labels, **options)
    with ThreadPoolExecutor(2) as pool:
        for executor in (None, pool):
            with use(executor=executor):
                same_figures(cal.evaluate(tmp_path, **options), expected)
    stream = cal.Accumulator(pairs=True, **options)
    same_figures(
        stream.update(z[:200], labels[:200]).update(pair[200:], labels[200:]).compute(), expected
    )


# Workflows


@pytest.mark.filterwarnings("ignore:.*keeps predictions")
def test_workflows_measure_what_evaluate_does():
    z, labels = clicks(n=600)
    data = {"logits": z, "labels": labels}
    kept = cal.TemperatureScaling().fit(z, labels)
    for estimand in ("auto", "top_label"):
        options: dict[str, Any] = {"estimand": estimand, "level": None}
        before = cal.evaluate(z, labels, **options)
        after = cal.evaluate(kept.transform(z), labels, **options)
        changed = cal.effect(kept, data, **options)
        assert changed.before.metrics == before.metrics
        assert changed.after.metrics == after.metrics
        assert cal.cross_fit(data, method="ts", **options).effect.before.metrics == before.metrics
        comparison = cal.compare(
            {**data, "val_logits": z, "val_labels": labels},
            methods=["none", "ts"],
            fit_split="val",
            test_split="",
            **options,
        )
        for method, measured in (("none", before), ("ts", after)):
            assert comparison.measured[method]["ece"] == measured["ece"]
        assert comparison.estimand == comparison.to_dict()["estimand"] == before.estimand
        assert ("ECE of P(y = 1)" in str(comparison)) == (estimand == "auto")


# What is about answers stays so


def test_thresholds_and_histograms_are_about_the_predicted_class():
    z, labels = clicks(shift=0.0)
    confidence, outcome = cal.top_label(z, labels)
    found = cal.threshold(z, labels, max_error=0.2)
    assert found == cal.threshold(confidence=confidence, outcome=outcome, max_error=0.2)
    shares = cal.metrics.confidence_histogram(z, labels)
    expected = cal.metrics.confidence_histogram(confidence=confidence, outcome=outcome)
    np.testing.assert_allclose(shares.right, expected.right, atol=1e-12)


def test_answers_of_language_models_are_not_called_a_class():
    z, labels = clicks()
    text = str(evaluate_answers(expit(z), labels))
    assert "the answer is right" in text
    assert "P(y = 1)" not in text


# Words


@pytest.mark.parametrize("estimand", ["auto", "top_label"])
def test_diagrams_name_the_probability(estimand):
    plt = pytest.importorskip("matplotlib.pyplot")
    z, labels = clicks()
    names = ("P(y = 1)", "frequency of y = 1") if estimand == "auto" else ("confidence", "accuracy")
    options: dict[str, Any] = {"estimand": estimand}
    drawn = [
        figures.reliability_diagram(cal.evaluate(z, labels, metrics=["ece"], **options)),
        figures.reliability_diagram(cal.metrics.reliability(z, labels, **options)),
        figures.smooth_diagram(cal.metrics.smooth_reliability(z, labels, **options)),
    ]
    for axes in drawn:
        assert (axes.get_xlabel(), axes.get_ylabel()) == names
        legend = axes.get_legend()
        assert legend is not None
        assert names[1] in [text.get_text() for text in legend.get_texts()]
    plt.close("all")


@pytest.mark.parametrize("form", ["frame", "table", "mapping"])
def test_the_class_that_is_measured_has_its_name(form, rng):
    """The second column is the class that is measured, whatever its name."""
    pandas = pytest.importorskip("pandas")
    yes = rng.uniform(size=400)
    labels = np.where(rng.random(400) < yes**3, "yes", "no")
    for names in (["no", "yes"], ["yes", "no"]):
        probs = np.stack([yes if name == "yes" else 1 - yes for name in names], -1)
        site = np.arange(400) % 2
        if form == "frame":
            frame = pandas.DataFrame(probs, columns=names)
            found = cal.evaluate(probs=frame, labels=labels, by=site)
        elif form == "table":
            frame = pandas.DataFrame(probs, columns=[f"prob_{name}" for name in names])
            found = cal.evaluate(frame.assign(label=labels, site=site), by="site")
        else:
            numbers = (labels == names[1]).astype(int)
            data = {"probs": probs, "labels": numbers, "class_names": names, "site": site}
            found = cal.evaluate(data, by="site")
        of = f"P({names[1]})"
        assert f"calibration of {of}; 15" in found.describe()
        assert found.verdict().startswith(f"{of} is miscalibrated")
        assert found.reliability().probability == of
        assert "y = 1" not in str(found) + found._repr_html_()
        assert {part.probability for part in found.by.values()} == {of}
        plain = cal.evaluate(probs=probs, labels=(labels == names[1]).astype(int))
        assert found["over_ece"] == plain["over_ece"]
    numbered = pandas.DataFrame(probs, columns=["0", "1"])
    assert (
        cal.evaluate(probs=numbered, labels=(labels == "no").astype(int)).probability == "P(y = 1)"
    )


def test_a_mistake_in_the_order_of_named_classes_names_them(rng):
    pandas = pytest.importorskip("pandas")
    yes = rng.uniform(size=2000)
    labels = np.where(rng.random(2000) < yes, "no", "yes")
    frame = pandas.DataFrame({"no": 1 - yes, "yes": yes})
    hint = cal.evaluate(probs=frame, labels=labels).hint()
    assert hint.startswith("P(yes) is higher where the label is no (ROC AUC")
    assert hint.endswith("check that yes is the second column")
