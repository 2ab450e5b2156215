"""The table of metrics: names, order, documentation, and what each line declares."""

import inspect

import numpy as np
import pytest

import calibrant as cal
from tests.support.metrics import classes_for
from tests.support.simulate import drawn

every = pytest.mark.parametrize("name", cal.METRICS)


DATA, TWO = (drawn(np.random.default_rng(1), 600, classes, 1.5) for classes in (5, 2))


def test_the_names_come_in_the_order_of_the_contract():
    names = "accuracy ece debiased_ece ada_ece classwise_ece mce over_ece under_ece ks smooth_ece"
    names += " smce nll brier auroc aurc"
    assert [name for name in cal.METRICS if name in names.split()] == names.split()


@every
def test_a_metric_is_a_public_function_with_a_summary(name):
    metric = cal.METRICS[name]
    assert metric.compute is getattr(cal.metrics, name)
    assert len(metric.summary) > 15
    assert metric.summary.endswith((".", "nats."))


def test_a_metric_that_was_discovered_can_be_imported(monkeypatch):
    monkeypatch.setitem(cal.METRICS, "toy", cal.METRICS["ece"])
    from calibrant.metrics import toy  # type: ignore[attr-defined]

    assert toy is cal.ece
    with pytest.raises(AttributeError, match="no attribute 'smoth_ece': did you mean smooth_ece"):
        cal.metrics.smoth_ece  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"'calibrant\.metrics' has no attribute 'no_metric'"):
        cal.metrics.no_metric  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("typed", "name"),
    [("ECE", "ece"), ("Brier score", "brier"), ("log-loss", "nll"), ("AdaECE", "ada_ece")],
)
def test_names_are_understood_in_any_case_and_by_alias(typed, name):
    assert cal.METRICS.name(typed) == name
    assert list(cal.Accumulator(metrics=[typed], pairs=True).metrics) == [name]


def test_an_alias_belongs_to_one_metric_and_is_no_name():
    aliases = [alias for metric in cal.METRICS.values() for alias in metric.aliases]
    assert len(aliases) == len(set(aliases))
    assert not set(aliases) & set(cal.METRICS)


def test_a_near_miss_is_hinted_at():
    with pytest.raises(
        ValueError,
        match=r"unknown metric 'smoth_ece': did you mean smooth_ece\? choose from accuracy",
    ):
        cal.Accumulator(metrics=["smoth_ece"])


@pytest.fixture(scope="module")
def evaluated():
    return {data[0].shape[1]: cal.evaluate(*data) for data in (DATA, TWO)}


@every
def test_the_figure_of_the_table_is_that_of_an_evaluation_and_a_python_float(evaluated, name):
    classes = classes_for(name, 5)
    data = DATA if classes == 5 else TWO
    if cal.METRICS[name].on_request:
        estimate = cal.evaluate(*data, metrics=[name])[name]
    else:
        estimate = evaluated[classes][name]
    alone = cal.METRICS[name].compute(*data)
    single = cal.evaluate(*data, metrics=[name], level=None)[name].value
    assert alone == pytest.approx(estimate.value, abs=1e-12)
    assert alone == pytest.approx(single, abs=1e-12)
    assert [type(x) for x in (alone, *estimate)] == [float] * 4


@every
def test_the_direction_of_a_metric_is_as_declared(rng, name):
    """Honest logits are better than the same ones with four rows in ten shuffled."""
    logits, labels = drawn(rng, 4000, classes_for(name, 5))
    worse = logits.copy()
    worse[:1600] = 3 * rng.permuted(logits[:1600], axis=-1)
    metric = cal.METRICS[name]
    if metric.two_sided:
        pytest.skip("it is best in the middle")
    better = metric.compute(logits, labels) - metric.compute(worse, labels)
    if name == "under_ece":  # what is over-confident is not under-confident
        assert better >= 0
    else:
        assert better > 0 if metric.higher_is_better else better < 0


def test_metrics_that_need_no_pairs_are_those_of_a_stream():
    stream = cal.Accumulator(level=None).update(*DATA).compute()
    assert set(stream) == {name for name, m in cal.METRICS.items() if not m.needs_pairs}


@every
def test_misspelt_arguments_are_refused(name):
    with pytest.raises(TypeError, match="weight"):
        cal.METRICS[name].compute([[1.0, 0.0], [0.0, 2.0]], [0, 1], weight=[1.0, 2.0])


@every
def test_signatures_show_every_way_to_pass_examples(name):
    shown = inspect.signature(cal.METRICS[name].compute).parameters
    assert {"logits", "labels", "probs", "sample_weight"} <= set(shown)
    assert all(parameter.kind != inspect.Parameter.VAR_KEYWORD for parameter in shown.values())
