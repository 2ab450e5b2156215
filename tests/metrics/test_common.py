"""What every metric of the table must satisfy, whatever it measures.

A metric that is added to ``calibrant.METRICS`` is held to all of this without a line here.
"""

import inspect
import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import calibrant as cal
from tests.support.metrics import ANY_CLASSES, classes_for
from tests.support.simulate import drawn

every = pytest.mark.parametrize("name", cal.METRICS)


def takes_pairs(name):
    """Whether a metric has confidence= and outcome= among its keyword arguments."""
    return "confidence" in inspect.signature(cal.METRICS[name].compute).parameters


TESTS = {"spiegelhalter_z", "spiegelhalter_p", "hosmer_lemeshow_p"}
NOT_REPEATED = {"aurc", "debiased_ece", "ici", "e50", "e90", *TESTS}
"""A weight is a share of every mean, not a number of copies. A copy would be one more of the
"k most confident examples" of AURC, one more witness in tests and in the debiased error, and one
more example for the choice of a window."""


def classes_of(request, several):
    """Number of classes that the metric of a test takes."""
    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name")
    return classes_for(name, several) if name else several


@pytest.fixture
def data(rng, request):
    return drawn(rng, 600, classes_of(request, 5), 1.5)


def values(logits, labels, **options):
    """Every figure, without intervals."""
    found = cal.evaluate(logits, labels, level=None, **options)
    return {name: estimate.value for name, estimate in found.items()}


def assert_same(found, expected, abs=1e-12):
    assert set(found) == set(expected)
    for name in expected:
        assert found[name] == pytest.approx(expected[name], abs=abs, rel=0, nan_ok=True), name


# Invariance


@every
def test_a_shift_of_a_row_does_not_matter(rng, data, name):
    logits, labels = data
    expected = cal.METRICS[name].compute(logits, labels)
    shift = rng.normal(0, 50, (len(labels), 1))
    assert cal.METRICS[name].compute(logits + shift, labels) == pytest.approx(expected, abs=1e-11)


@every
def test_the_order_of_classes_does_not_matter(rng, data, name):
    logits, labels = data
    order = rng.permutation(logits.shape[1])
    expected = cal.METRICS[name].compute(logits, labels)
    found = cal.METRICS[name].compute(logits[:, order], np.argsort(order)[labels])
    if cal.METRICS[name].two_sided:  # P(y = 1) is too high where P(y = 0) is too low
        found, expected = abs(found), abs(expected)
    assert found == pytest.approx(expected, abs=1e-12)


@every
def test_a_row_of_weight_zero_is_as_if_not_there(rng, data, name):
    logits, labels = data
    weight = rng.exponential(size=len(labels)) * (rng.random(len(labels)) < 0.7)
    kept = weight > 0
    options: dict[str, Any] = {"metrics": [name], "level": None}
    expected = cal.evaluate(logits[kept], labels[kept], sample_weight=weight[kept], **options)
    found = cal.evaluate(logits, labels, sample_weight=weight, **options)
    assert found[name].value == pytest.approx(expected[name].value, abs=1e-12)
    assert found.n == expected.n == kept.sum()


def test_only_the_ratio_of_weights_matters(rng, data):
    weight = rng.exponential(size=len(data[1]))
    once, found = (cal.evaluate(*data, sample_weight=factor * weight) for factor in (1, 7))
    for name in once:
        np.testing.assert_allclose(found[name], once[name], atol=1e-9, err_msg=name)


def test_equal_weights_are_no_weights(data):
    plain, found = cal.evaluate(*data), cal.evaluate(*data, sample_weight=np.full(600, 0.25))
    for name in plain:
        np.testing.assert_allclose(found[name], plain[name], atol=1e-9, err_msg=name)


@pytest.mark.parametrize("name", [name for name in cal.METRICS if name not in NOT_REPEATED])
def test_a_weight_of_two_is_the_row_twice(rng, name):
    logits, labels = drawn(rng, 4000, classes_for(name, 3), 1.5)
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
    plain, found = values(logits, labels), values(logits, labels, sample_weight=weight)
    for name in set(plain) - {"under_ece"}:
        assert abs(found[name] - plain[name]) > 1e-4, name
    upward = values(logits, labels, sample_weight=np.where(right, 3.0, 1.0))
    assert upward["under_ece"] > plain["under_ece"]


# The form of the input


@pytest.fixture
def with_weights(rng, request):
    logits, labels = drawn(rng, 300, classes_of(request, 4), 1.5)
    labels[::9] = -100
    return logits, labels, rng.exponential(size=300)


@every
def test_probabilities_give_the_value_of_their_logits(with_weights, name):
    logits, labels, weight = with_weights
    probs = torch.tensor(logits).softmax(-1)
    metric = cal.METRICS[name].compute
    expected = metric(logits, labels, sample_weight=weight)
    evaluated = cal.evaluate(logits, labels, sample_weight=weight, metrics=[name], level=None)
    assert evaluated[name].value == pytest.approx(expected, abs=1e-12)
    for form in (probs, probs.numpy(), probs.tolist()):
        found = metric(probs=form, labels=labels, sample_weight=weight)
        assert found == pytest.approx(expected, abs=1e-12)


@every
def test_pairs_give_the_value_of_the_logits_that_they_come_from(with_weights, name):
    logits, labels, weight = with_weights
    metric, kept = cal.METRICS[name].compute, labels != -100
    several = logits.shape[1] > 2
    confidence, outcome = (cal.top_label if several else cal.metrics.positive_class)(logits, labels)
    pairs = {"confidence": confidence, "outcome": outcome, "sample_weight": weight[kept]}
    if takes_pairs(name):
        expected = metric(logits, labels, sample_weight=weight)
        assert metric(**pairs) == pytest.approx(expected, abs=1e-12)
    else:
        with pytest.raises(TypeError, match="unexpected keyword argument 'confidence'"):
            metric(**pairs)


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
    assert list(found.by) == list(expected.by)
    for name in "01":
        assert found.by[name]["ece"].value == pytest.approx(
            expected.by[name]["ece"].value, abs=1e-12
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
    cal.evaluate(logits, labels, sample_weight=weight, metrics=["ece", "classwise_ece"])
    cal.evaluate(logits, labels, sample_weight=weight, by=labels, level=None)
    np.testing.assert_array_equal(logits, data[0])
    np.testing.assert_array_equal(labels, data[1])
    np.testing.assert_array_equal(weight, np.arange(600.0))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_measured_as_its_values_in_float64(data, dtype):
    rounded = of_dtype(data[0], dtype)
    exact = np.asarray(torch.as_tensor(rounded).double())
    assert values(rounded, data[1]) == values(exact, data[1])


def test_errors_of_numpy_and_the_default_dtype_change_no_figure(rng):
    """Confidences that are certain make exponentials underflow."""
    logits, labels = 30 * rng.normal(size=(100, 4)), rng.integers(0, 4, 100)
    expected = cal.evaluate(logits, labels)
    curve = cal.metrics.smooth_reliability(logits, labels)
    torch.set_default_dtype(torch.float16)
    try:
        with np.errstate(all="raise"):
            found = cal.evaluate(logits, labels)
            single = {name: cal.METRICS[name].compute(logits, labels) for name in ANY_CLASSES}
            again = cal.metrics.smooth_reliability(logits, labels)
    finally:
        torch.set_default_dtype(torch.float32)
    np.testing.assert_equal(dict(found), dict(expected))
    np.testing.assert_allclose(
        list(single.values()), [expected[n].value for n in single], rtol=1e-9
    )
    np.testing.assert_array_equal(again.accuracy, curve.accuracy)


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
    tiny = torch.tensor([[1e-40, 1 - 1e-40]], dtype=torch.float64)
    assert values(None, [0], probs=tiny)["nll"] == pytest.approx(40 * math.log(10))


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
