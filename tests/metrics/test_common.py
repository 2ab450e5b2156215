"""What every metric of the table must satisfy, whatever it measures.

A metric that is added to ``calibrant.METRICS`` is held to all of this without a line here.
"""

import json
import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import calibrant as cal
from tests.support.simulate import drawn

every = pytest.mark.parametrize("name", cal.METRICS)

NOT_REPEATED = {"aurc", "debiased_ece"}
"""A weight is a share of every mean, not a number of copies. A copy would be one more of the
"k most confident examples" of AURC, and one more witness against noise in the debiased error."""


@pytest.fixture
def data(rng):
    return drawn(rng, 600, 5, 1.5)


def values(logits, labels, **options):
    """Every figure, without intervals."""
    found = cal.evaluate(logits, labels, level=None, **options)
    return {name: estimate.value for name, estimate in found.items()}


def assert_same(found, expected, abs=1e-12):
    assert set(found) == set(expected)
    for name in expected:
        assert found[name] == pytest.approx(expected[name], abs=abs, rel=0, nan_ok=True), name


# The table


@every
def test_the_figure_of_the_table_is_that_of_an_evaluation(data, name):
    alone = cal.METRICS[name].compute(*data)
    assert alone == pytest.approx(cal.evaluate(*data, level=None)[name].value, abs=1e-12)
    assert cal.evaluate(*data, metrics=[name])[name].value == pytest.approx(alone, abs=1e-12)


@every
def test_the_figure_is_a_python_float(data, name):
    assert type(cal.METRICS[name].compute(*data)) is float
    assert [type(x) for x in cal.evaluate(*data, metrics=[name])[name]] == [float] * 3


@every
def test_the_direction_of_a_metric_is_as_declared(rng, name):
    """Honest logits are better than the same ones with four rows in ten shuffled."""
    logits, labels = drawn(rng, 4000, 5)
    worse = logits.copy()
    worse[:1600] = 3 * rng.permuted(logits[:1600], axis=-1)
    metric = cal.METRICS[name]
    better = metric.compute(logits, labels) - metric.compute(worse, labels)
    if name == "under_ece":  # what is over-confident is not under-confident
        assert better >= 0
    else:
        assert better > 0 if metric.higher_is_better else better < 0


def test_a_proper_score_is_best_at_the_true_temperature(rng):
    logits, labels = drawn(rng, 20_000, 4, 1.5)
    proper = [name for name, metric in cal.METRICS.items() if metric.proper]
    assert proper == ["nll", "brier"]
    for name in proper:
        at = {t: cal.METRICS[name].compute(logits / t, labels) for t in (0.7, 1.0, 1.5, 2.2, 4.0)}
        assert min(at, key=lambda t: at[t]) == 1.5


def test_metrics_that_need_no_pairs_are_those_of_a_stream(data):
    stream = cal.Accumulator(level=None).update(*data).compute()
    assert set(stream) == {name for name, m in cal.METRICS.items() if not m.needs_pairs}


# Invariance


@every
def test_the_order_of_examples_does_not_matter(rng, data, name):
    logits, labels = data
    order = rng.permutation(len(labels))
    expected = cal.METRICS[name].compute(logits, labels)
    found = cal.METRICS[name].compute(logits[order], labels[order])
    assert found == pytest.approx(expected, abs=1e-12)


@every
def test_a_shift_of_a_row_does_not_matter(rng, data, name):
    logits, labels = data
    expected = cal.METRICS[name].compute(logits, labels)
    shift = rng.normal(0, 50, (len(labels), 1))
    assert cal.METRICS[name].compute(logits + shift, labels) == pytest.approx(expected, abs=1e-11)


@every
def test_log_probabilities_are_logits(data, name):
    logits, labels = data
    logs = torch.tensor(logits).log_softmax(-1)
    expected = cal.METRICS[name].compute(logits, labels)
    assert cal.METRICS[name].compute(logs, labels) == pytest.approx(expected, abs=1e-11)


@every
def test_the_order_of_classes_does_not_matter(rng, data, name):
    logits, labels = data
    order = rng.permutation(logits.shape[1])
    expected = cal.METRICS[name].compute(logits, labels)
    found = cal.METRICS[name].compute(logits[:, order], np.argsort(order)[labels])
    assert found == pytest.approx(expected, abs=1e-12)


@every
def test_an_ignored_row_is_as_if_not_there(rng, data, name):
    logits, labels = data
    kept = rng.random(len(labels)) < 0.7
    expected = cal.METRICS[name].compute(logits[kept], labels[kept])
    found = cal.METRICS[name].compute(logits, np.where(kept, labels, -100))
    assert found == pytest.approx(expected, abs=1e-12)


@every
def test_a_row_of_weight_zero_is_as_if_not_there(rng, data, name):
    logits, labels = data
    weight = rng.exponential(size=len(labels)) * (rng.random(len(labels)) < 0.7)
    kept = weight > 0
    expected = cal.evaluate(logits[kept], labels[kept], sample_weight=weight[kept], metrics=[name])
    found = cal.evaluate(logits, labels, sample_weight=weight, metrics=[name])
    assert found[name].value == pytest.approx(expected[name].value, abs=1e-12)
    assert found.n == expected.n == kept.sum()


@every
def test_only_the_ratio_of_weights_matters(rng, data, name):
    weight = rng.exponential(size=len(data[1]))
    once = cal.evaluate(*data, sample_weight=weight, metrics=[name])[name]
    found = cal.evaluate(*data, sample_weight=7 * weight, metrics=[name])[name]
    np.testing.assert_allclose(found, once, atol=1e-9)


@every
def test_equal_weights_are_no_weights(data, name):
    plain = cal.evaluate(*data, metrics=[name])[name]
    found = cal.evaluate(*data, sample_weight=np.full(600, 0.25), metrics=[name])[name]
    np.testing.assert_allclose(found, plain, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in cal.METRICS if name not in NOT_REPEATED])
def test_a_weight_of_two_is_the_row_twice(rng, name):
    logits, labels = drawn(rng, 4000, 3, 1.5)
    weight = rng.integers(1, 3, len(labels))
    twice = np.repeat(np.arange(len(labels)), weight)
    expected = cal.METRICS[name].compute(logits[twice], labels[twice])
    found = cal.evaluate(logits, labels, sample_weight=weight, metrics=[name], level=None)
    assert found[name].value == pytest.approx(expected, abs=1e-12)


def test_weights_move_every_figure(rng):
    """Or the tests of weights would pass for a metric that does not look at them."""
    logits, labels = drawn(rng, 2000, 5, 1.5)
    right = logits.argmax(-1) == labels
    weight = np.where(right, 1.0, 3.0) * np.exp(rng.normal(size=2000) - logits.max(-1) / 4)
    plain, found = values(logits, labels), values(logits, labels, weight=weight)
    for name in set(plain) - {"under_ece"}:
        assert abs(found[name] - plain[name]) > 1e-4, name
    upward = values(logits, labels, weight=np.where(right, 3.0, 1.0))
    assert upward["under_ece"] > plain["under_ece"]


# The form of the input


def as_sequences(logits, labels):
    return logits.reshape(20, 30, 5), labels.reshape(20, 30)


def moved(logits, labels):
    """(batch, classes, seq), as images and tokens often come, with the classes moved back."""
    stored = np.ascontiguousarray(np.moveaxis(logits.reshape(20, 30, 5), -1, 1))
    return np.moveaxis(stored, 1, -1), labels.reshape(20, 30)


def as_tensors(logits, labels):
    return torch.tensor(logits), torch.tensor(labels)


FORMS: dict[str, Any] = {
    "lists": lambda z, y: (z.tolist(), y.tolist()),
    "tensors": as_tensors,
    "tensor and array": lambda z, y: (torch.tensor(z), y),
    "array and tensor": lambda z, y: (z, torch.tensor(y)),
    "(batch, seq)": as_sequences,
    "(batch, seq) tensors": lambda z, y: as_tensors(*as_sequences(z, y)),
    "four dimensions": lambda z, y: (z.reshape(2, 10, 30, 5), y.reshape(2, 10, 30)),
    "one row per index": lambda z, y: (z[:, None], y[:, None]),
    "classes moved": moved,
    "classes moved, tensors": lambda z, y: (
        torch.tensor(z.reshape(20, 30, 5)).movedim(-1, 1).contiguous().movedim(1, -1),
        torch.tensor(y.reshape(20, 30)),
    ),
    "Fortran order": lambda z, y: (np.asfortranarray(z), y),
    "transposed tensor": lambda z, y: (torch.tensor(z.T.copy()).T, y),
    "every second row": lambda z, y: (np.repeat(z, 2, axis=0)[::2], np.repeat(y, 2)[::2]),
    "every second column": lambda z, y: (np.repeat(z, 2, axis=1)[:, ::2], y),
    "backwards": lambda z, y: (z[::-1].copy()[::-1], y[::-1].copy()[::-1]),
    "expanded tensor": lambda z, y: (torch.tensor(z)[None].expand(1, -1, -1), y[None]),
    "requires grad": lambda z, y: (torch.tensor(z, requires_grad=True), torch.tensor(y)),
    "in a graph": lambda z, y: (2 * torch.tensor(z / 2, requires_grad=True), torch.tensor(y)),
    "big-endian": lambda z, y: (z.astype(">f8"), y.astype(">i4")),
    "long double": lambda z, y: (z.astype(np.longdouble), y),
    "labels of 8 bits": lambda z, y: (z, y.astype(np.int8)),
    "unsigned labels": lambda z, y: (z, y.astype(np.uint8)),
    "tensor labels of 16 bits": lambda z, y: (z, torch.tensor(y).short()),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_same_numbers_in_another_form_give_the_same_figures(data, form):
    assert_same(values(*FORMS[form](*data)), values(*data))


@pytest.mark.parametrize("form", ["(batch, seq)", "(batch, seq) tensors", "classes moved"])
def test_weights_and_groups_have_the_form_of_the_labels(rng, data, form):
    weight, groups = rng.exponential(size=600), rng.integers(0, 2, 600)
    expected = cal.evaluate(*data, sample_weight=weight, by=groups, level=None)
    shape = (20, 30)
    found = cal.evaluate(
        *FORMS[form](*data),
        sample_weight=torch.tensor(weight.reshape(shape)),
        by=torch.tensor(groups.reshape(shape)),
        level=None,
    )
    assert_same({k: e.value for k, e in found.items()}, {k: e.value for k, e in expected.items()})
    assert list(found.groups) == list(expected.groups)
    for name in "01":
        assert found.groups[name]["ece"].value == pytest.approx(
            expected.groups[name]["ece"].value, abs=1e-12
        )


def test_a_read_only_memory_map_is_measured_and_left_as_it_was(tmp_path, data):
    np.save(tmp_path / "logits.npy", data[0])
    before = (tmp_path / "logits.npy").read_bytes()
    mapped = np.load(tmp_path / "logits.npy", mmap_mode="r")
    assert_same(values(mapped, data[1]), values(*data))
    assert (tmp_path / "logits.npy").read_bytes() == before


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_the_arrays_of_the_caller_are_not_written_to(data, make):
    logits, labels, weight = make(data[0]), make(data[1]), make(np.arange(600.0))
    cal.evaluate(logits, labels, sample_weight=weight)
    cal.evaluate(logits, labels, sample_weight=weight, by=labels, level=None)
    np.testing.assert_array_equal(logits, data[0])
    np.testing.assert_array_equal(labels, data[1])
    np.testing.assert_array_equal(weight, np.arange(600.0))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_low_precision_arrays_are_measured_as_their_values_in_float64(data, dtype):
    rounded = data[0].astype(dtype)
    found, expected = values(rounded, data[1]), values(rounded.astype(np.float64), data[1])
    assert found == expected


@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, 2e-5), (torch.float16, 6e-3), (torch.bfloat16, 4e-2)]
)
def test_low_precision_is_close_to_full_precision(data, dtype, close):
    logits, labels = data
    assert_same(values(torch.tensor(logits).to(dtype), labels), values(*data), abs=close)


def test_probabilities_in_any_form_are_the_same(data):
    probs = torch.tensor(data[0]).softmax(-1).numpy()
    expected = values(*data)
    for form in ("lists", "(batch, seq)", "Fortran order", "every second column", "backwards"):
        given_probs, labels = FORMS[form](probs, data[1])
        assert_same(values(None, labels, probs=given_probs), expected, abs=1e-11)
    single = torch.tensor(probs).float()
    found = values(None, data[1], probs=single)
    assert_same(found, values(None, data[1], probs=single.numpy()), abs=0)


def test_probabilities_as_a_tensor_of_float64_keep_their_digits(data):
    probs = torch.tensor(data[0]).softmax(-1)
    assert_same(values(None, data[1], probs=probs), values(*data), abs=1e-11)
    tiny = torch.tensor([[1e-60, 1 - 1e-60]], dtype=torch.float64)
    assert values(None, [0], probs=tiny)["nll"] == pytest.approx(60 * math.log(10))


# The same under hypothesis: few rows, many ties, every dtype

DTYPES = [np.float16, np.float32, np.float64, torch.bfloat16, torch.float16, torch.float64]


@st.composite
def problems(draw):
    """Logits in eighths, so that every dtype holds them, shifts are exact and ties abound."""
    n, k = draw(st.integers(1, 30)), draw(st.integers(2, 6))
    eighths = st.integers(-24, 24)
    flat = draw(st.lists(eighths, min_size=n * k, max_size=n * k))
    labels = draw(st.lists(st.integers(-1, k - 1), min_size=n, max_size=n))
    labels = [draw(st.integers(0, k - 1)), *labels[1:]]  # one at least is labelled
    logits = np.array(flat, dtype=np.float64).reshape(n, k) / 8
    return logits, np.array([-100 if y < 0 else y for y in labels])


def of_dtype(logits, dtype):
    if isinstance(dtype, torch.dtype):
        return torch.tensor(logits).to(dtype)
    return logits.astype(dtype)


@given(problems(), st.sampled_from(DTYPES))
def test_every_dtype_that_holds_the_logits_gives_the_same_figures(problem, dtype):
    logits, labels = problem
    assert_same(values(of_dtype(logits, dtype), labels), values(logits, labels), abs=0)


@given(problems(), st.randoms(use_true_random=False))
def test_no_permutation_of_rows_changes_a_figure(problem, random):
    logits, labels = problem
    order = random.sample(range(len(labels)), len(labels))
    assert_same(values(logits[order], labels[order]), values(logits, labels))


@given(problems(), st.lists(st.integers(-80, 80), min_size=30, max_size=30))
def test_no_exact_shift_of_rows_changes_any_digit(problem, shifts):
    logits, labels = problem
    shift = np.array(shifts[: len(labels)])[:, None] / 8
    assert_same(values(logits + shift, labels), values(logits, labels), abs=0)


@given(problems(), st.data())
def test_any_shape_of_the_leading_dimensions_is_the_same(problem, data):
    logits, labels = problem
    n = len(labels)
    first = data.draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))
    shape = data.draw(st.sampled_from([(first, n // first), (1, first, n // first), (n, 1)]))
    found = values(logits.reshape(*shape, -1), labels.reshape(shape))
    assert_same(found, values(logits, labels))


@given(problems())
def test_dropping_ignored_rows_changes_nothing(problem):
    logits, labels = problem
    kept = labels != -100
    assert_same(values(logits[kept], labels[kept]), values(logits, labels))


@given(problems())
def test_every_figure_is_within_its_range(problem):
    found = values(*problem)
    assert found["nll"] >= 0
    assert -1e-15 <= found["brier"] <= 2
    for name in set(found) - {"nll", "brier"}:
        assert math.isnan(found[name]) or -1e-15 <= found[name] <= 1 + 1e-12, name
    assert not math.isnan(found["ece"])
    assert found["over_ece"] + found["under_ece"] == pytest.approx(found["ece"], abs=1e-15)
    assert found["debiased_ece"] <= found["ece"] + 1e-15
    confidence, outcome = cal.top_label(*problem)
    residual = np.abs(confidence - outcome).mean()  # no error of pairs exceeds it
    for name in ("ece", "ada_ece", "ks", "smce", "smooth_ece"):
        assert found[name] <= residual + 1e-9, name


# The result


def test_an_evaluation_is_a_mapping_with_what_it_means(data):
    found = cal.evaluate(*data)
    assert list(found) == list(cal.METRICS)
    assert len(found) == len(cal.METRICS)
    assert "ece" in found
    assert (found.n, found.classes, found.estimand, found.level) == (600, 5, "top_label", 0.9)
    assert found.binning == "15 equal-width bins (lo, hi], first bin closed"
    assert found.describe().startswith("600 examples, 5 classes; estimand: top label; 15 equal")
    assert found.bins.count.sum() == 600
    with pytest.raises(KeyError):
        found["nothing"]


def test_the_metrics_come_in_the_order_asked_for(data):
    assert list(cal.evaluate(*data, metrics=["nll", "ece"], level=None)) == ["nll", "ece"]


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "no intervals": {"level": None},
    "some": {"metrics": ["nll", "brier"]},
    "groups": {"groups": np.arange(600) % 3, "metrics": ["nll", "ece", "auroc"]},
    "weights": {"weight": np.linspace(0, 1, 600)},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_the_dictionary_is_json_and_holds_the_figures(data, options):
    found = cal.evaluate(*data, **OPTIONS[options])
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
    assert list(back.get("groups", {})) == list(found.groups)


@pytest.mark.parametrize("n", [1, 2, 600])
def test_undefined_figures_are_null_in_the_dictionary_and_a_dash_in_print(data, n):
    logits, labels = data[0][:n], data[0][:n].argmax(-1)  # all right: no AUROC
    found = cal.evaluate(logits, labels)
    assert math.isnan(found["auroc"].value)
    assert found.to_dict()["metrics"]["auroc"] == {"value": None, "low": None, "high": None}
    json.dumps(found.to_dict(), allow_nan=False)
    line = next(line for line in str(found).splitlines() if line.startswith("AUROC"))
    assert line.split() == ["AUROC", "of", "confidence", "-"]


@pytest.mark.parametrize("options", OPTIONS)
def test_print_shows_every_title_and_value(data, options):
    found = cal.evaluate(*data, **OPTIONS[options])
    text = str(found)
    for name, estimate in found.items():
        metric = cal.METRICS[name]
        shown = f"{100 * estimate.value:.2f} %" if metric.percent else f"{estimate.value:.4f}"
        line = next(line for line in text.splitlines() if line.startswith(f"{metric.title}  "))
        assert shown in line
        assert ("[" in line) == (found.level is not None)
    assert ("90 % interval" in text) == (found.level is not None)
    assert all(f"group {name}, 200 examples: " in text for name in found.groups)


def test_the_verdict_follows_the_test(rng):
    logits, labels = drawn(rng, 2000, 4)
    calm, wild = cal.evaluate(logits, labels), cal.evaluate(4 * logits, labels)
    assert calm.test is not None
    assert wild.test is not None
    assert calm.test.p_value > 0.05
    assert wild.test.p_value == 0.001
    assert "no evidence of miscalibration in 2,000 examples" in str(calm)
    assert "miscalibrated: a calibrated model would rarely look this far off" in str(wild)
    assert "p <= 0.001" in str(wild)
    assert cal.evaluate(logits, labels, level=None).verdict() == ""
    for found in (calm, wild):
        assert found.verdict() in str(found)


# Groups


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
    assert list(found.groups) == ["worst", "bad", "good"]
    assert found.n == sum(part.n for part in found.groups.values()) == 1200
    assert "none" not in str(found)


def test_a_small_group_that_proves_nothing_does_not_come_first(rng):
    """Three unlucky examples look worse than 2000 that are surely off; the proof decides."""
    confidence = np.concatenate([np.full(2000, 0.9), np.full(3, 0.6)])
    right = np.concatenate([np.arange(2000) % 10 < 6, [False] * 3])
    odds = np.log(confidence / (1 - confidence))
    groups = np.repeat(["many", "few"], [2000, 3])
    found = cal.evaluate(odds, right.astype(int), by=groups, estimand="binary", metrics=["ece"])
    assert found.groups["few"]["ece"].value > found.groups["many"]["ece"].value
    assert list(found.groups) == ["many", "few"]


def test_a_group_is_the_evaluation_of_its_examples(rng):
    logits, labels, names = three_groups(rng)
    weight = rng.exponential(size=len(labels))
    found = cal.evaluate(logits, labels, by=names, sample_weight=weight)
    for name, part in found.groups.items():
        inside = names == name
        alone = cal.evaluate(logits[inside], labels[inside], sample_weight=weight[inside])
        assert part.to_dict() == alone.to_dict()


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor, list])
def test_groups_are_named_after_their_values(data, kind):
    numbers = [0, 7] * 300
    found = cal.evaluate(*data, by=kind(numbers), metrics=["ece"], level=None)
    assert set(found.groups) == {"0", "7"}
    assert {part.n for part in found.groups.values()} == {300}


def test_a_group_per_row_serves_the_row(rng):
    logits, labels = drawn(rng, 120, 3)
    groups = np.arange(20) % 2
    found = cal.evaluate(logits.reshape(20, 6, 3), labels.reshape(20, 6), by=groups, level=None)
    expected = cal.evaluate(logits, labels, by=groups.repeat(6), level=None)
    assert {name: part.to_dict() for name, part in found.groups.items()} == {
        name: part.to_dict() for name, part in expected.groups.items()
    }


def test_nan_is_a_group(data):
    groups = np.where(np.arange(600) % 3 == 0, math.nan, 1.5)
    found = cal.evaluate(*data, by=groups, metrics=["ece"], level=None)
    assert {name: part.n for name, part in found.groups.items()} == {"nan": 200, "1.5": 400}


def test_more_than_a_thousand_groups_are_refused(rng):
    logits, labels = drawn(rng, 1001, 3)
    with pytest.raises(ValueError, match="groups has 1001 different values, more than 1000"):
        cal.evaluate(logits, labels, by=np.arange(1001), metrics=["ece"], level=None)
    groups = np.minimum(np.arange(1001), 999)
    assert len(cal.evaluate(logits, labels, by=groups, metrics=["ece"], level=None).groups) > 1


def test_huge_values_are_printed_in_scientific_form():
    found = cal.evaluate([[0.0, 1e30], [0.0, 1e30]], [0, 1], metrics=["nll"], level=None)
    assert "5e+29" in str(found)


def test_groups_of_an_estimand_with_one_logit_are_the_subsets(rng):
    odds = rng.normal(size=400)
    labels = (rng.random(400) < 1 / (1 + np.exp(-odds))).astype(int)
    groups = np.arange(400) % 2
    found = cal.evaluate(odds, labels, by=groups, estimand="binary", level=None)
    for name in (0, 1):
        alone = values(odds[groups == name], labels[groups == name], estimand="binary")
        assert_same({k: e.value for k, e in found.groups[str(name)].items()}, alone)


def test_groups_of_tags_keep_the_tags_apart(rng):
    logits = rng.normal(size=(200, 3))
    labels = (rng.random((200, 3)) < 1 / (1 + np.exp(-logits))).astype(int)
    half = np.repeat([0, 1], 100)
    with pytest.raises(ValueError, match="by must have one value per example or per row"):
        cal.evaluate(logits, labels, by=half[:, None].repeat(3, 1), estimand="multilabel")
    found = cal.evaluate(logits, labels, by=half, estimand="multilabel", level=None)
    for name in (0, 1):
        alone = values(logits[half == name], labels[half == name], estimand="multilabel")
        assert found.groups[str(name)].classes == 3
        assert_same({k: e.value for k, e in found.groups[str(name)].items()}, alone)
