"""What every calibrator guarantees, held against all of them."""

import contextlib
import copy
import functools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax

import calibrant as cal
from calibrant._core.chunks import examples
from calibrant._core.solve import time_limit
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.logpartition import tabulate
from calibrant.calibrators.records import RecordsCalibrator, TemperatureCalibrator
from tests.support.calibrators import EVERY_METHOD, beside, features_of, make
from tests.support.markup import check_inert
from tests.support.simulate import drawn

TWO_ONLY = [name for name, kind in EVERY_METHOD.items() if kind.two_classes_only]
KEEPERS = [name for name, kind in EVERY_METHOD.items() if kind().keeps_argmax]
TABLED = [
    name
    for name, kind in EVERY_METHOD.items()
    if issubclass(kind, RecordsCalibrator) and not kind.two_classes_only
]
MONOTONE = [
    name for name, kind in EVERY_METHOD.items() if kind().monotone and not kind.two_classes_only
]
TEMPERED = [name for name, kind in EVERY_METHOD.items() if issubclass(kind, TemperatureCalibrator)]
SIZES = {
    **{
        "none": 0,
        "ts": 1,
        "shrunk_ts": 1,
        "ets": 3,
        "vector": 12,
        "matrix": 42,
        "dirichlet": 42,
        "cts": 6,
    },
    **{"sms": 43, "svs": 13, "rank_gaps": 6},
    **{"pts": 91, "smart": 49, "odds": 6, "blend": 55, "auto": 0, "maccal": 0},
    **{"sigmoid": 2, "beta": 3, "histogram": 15, "histogram_ovr": 90, "bbq": 10},
    **{"scaling_binning": 17, "spline": 6, "isotonic": 11, "isotonic_ovr": 61},
    **{"gc": 40, "procal": 21, "fc": 2},
    **{"quadratic": 3, "robust_sigmoid": 3, "venn_abers": 10},
    **{"top_and_rest": 107, "sms_blend": 98},
}
"""Parameters of methods for six classes; those of ``auto`` and ``maccal`` are known after a fit."""
PENALISED = {"sms": 6, "svs": 6, "blend": 10, "top_and_rest": 10, "sms_blend": 10}
"""Numbers of parameters for which five examples each are enough, where they are fewer."""
MASKABLE = [*TABLED, "rank_gaps"]
"""Methods to which a masked class is none; other maps of classes refuse it, or count it."""
COUNTING = ["sms", "svs", "top_and_rest", "sms_blend"]


def fitted(name, logits, labels, **options) -> Any:
    """A calibrator of that name; its warnings of few examples are tested elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calibrator = make(name)
        return calibrator.fit(logits, labels, **beside(calibrator, logits), **options)


def inputs(calibrator, logits):
    if not calibrator.needs_features:
        return None
    one = calibrator.classes == 1
    scores = torch.as_tensor(logits)
    return features_of(torch.stack([torch.zeros_like(scores), scores], -1) if one else scores)


def predicted(calibrator, logits):
    features = inputs(calibrator, logits)
    return calibrator.predict_proba(logits, features)


def applied(calibrator, logits):
    return calibrator(logits, inputs(calibrator, logits))


@functools.cache
def overconfident(classes):
    """Over-confident logits, and labels."""
    return drawn(np.random.default_rng(7), 1500, classes, temperature=1.8, scale=2.5)


@pytest.fixture(scope="module", params=list(EVERY_METHOD))
def name(request):
    return request.param


@pytest.fixture(scope="module")
def classes(name):
    return 2 if name in TWO_ONLY else 6


@pytest.fixture(scope="module")
def data(classes):
    return overconfident(classes)


@pytest.fixture(scope="module")
def six():
    """Data of 6 classes."""
    return overconfident(6)


@functools.cache
def fitted_once(name, classes):
    return fitted(name, *overconfident(classes))


@pytest.fixture(scope="module")
def of_name():
    """Calibrators by name, each fitted once on the data."""
    return lambda name: fitted_once(name, 2 if name in TWO_ONLY else 6)


@pytest.fixture(scope="module")
def calibrator(name, of_name):
    return of_name(name)


def test_probabilities_sum_to_one_and_numpy_in_gives_numpy_out(calibrator, data):
    probs = predicted(calibrator, data[0])
    assert isinstance(probs, np.ndarray)
    assert probs.shape == data[0].shape
    assert probs.min() >= 0
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-6)


def test_transform_is_a_checked_call(calibrator, data, classes):
    logits = data[0][:50]
    result = calibrator.transform(logits, inputs(calibrator, logits))
    assert isinstance(result, np.ndarray)
    np.testing.assert_array_equal(result, applied(calibrator, torch.from_numpy(logits)))
    with pytest.raises(ValueError, match="row 1 has NaN"):
        calibrator.transform(np.array([[0.0] * classes, [np.nan] * classes]))


def test_predictions_are_the_most_probable_classes(calibrator, data):
    logits = data[0][:200]
    probs = predicted(calibrator, logits)
    expected = [list(row).index(max(row)) for row in probs]
    found = calibrator.predict(logits, inputs(calibrator, logits))
    assert found.dtype == np.int64
    assert found.tolist() == expected
    again = calibrator.predict(torch.from_numpy(logits), inputs(calibrator, logits))
    assert isinstance(again, torch.Tensor)
    assert again.tolist() == expected
    if calibrator.keeps_argmax:
        np.testing.assert_array_equal(found, logits.argmax(-1))


def test_the_first_of_equal_classes_is_predicted():
    classes = fitted("none", *overconfident(6))
    assert classes.predict(np.array([[0.0, 2.0, 2.0, 1.0, 2.0, 0.0]])) == 1
    odds = fitted("none", overconfident(2)[0][:, 1], overconfident(2)[1])
    assert odds.predict([-0.1, 0.0, 0.1]).tolist() == [0, 0, 1]


def test_a_call_on_arrays_names_what_takes_them(calibrator, data):
    message = r"called with tensors, got a ndarray: predict_proba\(logits\) and transform\(logits\)"
    with pytest.raises(TypeError, match=message):
        calibrator(data[0])


def test_forward_has_its_top_at_zero_and_is_the_logarithm_of_the_probabilities(calibrator, data):
    logits = torch.from_numpy(data[0]).float()
    out = applied(calibrator, logits)
    assert out.dtype == torch.float32
    assert (out.amax(-1) == 0).all()
    torch.testing.assert_close(out.softmax(-1), predicted(calibrator, logits))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_comes_out_wider(calibrator, data, dtype):
    assert applied(calibrator, torch.from_numpy(data[0]).to(dtype)).dtype == torch.float32


def test_it_improves_the_likelihood_of_what_it_was_fitted_on(name, calibrator, data):
    logits, labels = data
    before = cal.nll(logits, labels)
    after = cal.nll(np.asarray(applied(calibrator, torch.from_numpy(logits))), labels)
    assert after <= before + 1e-6 if name == "none" else after < before - 0.02


def test_it_calibrates_fresh_data(name, calibrator, classes):
    logits, labels = drawn(np.random.default_rng(8), 10_000, classes, temperature=1.8, scale=2.5)
    error = cal.evaluate(
        np.asarray(applied(calibrator, torch.from_numpy(logits))), labels, level=None
    )
    if name == "none":
        assert error["ece"].value > 0.05
    else:  # six curves from 1500 samples fit some of their noise
        assert error["ece"].value < (0.04 if name == "isotonic_ovr" else 0.03)


def test_a_constant_added_to_a_row_changes_nothing(name, calibrator, data):
    logits, labels = data
    shifted = log_softmax(logits, -1) + 3.0
    again = fitted(name, shifted, labels)
    np.testing.assert_allclose(predicted(again, shifted), predicted(calibrator, logits), atol=2e-4)


def test_order_of_the_examples_does_not_matter(name, calibrator, data, rng):
    if name in ("auto", "gc", "multicalibration", "maccal"):
        pytest.skip("its folds or batches depend on the order")
    order = rng.permutation(len(data[0]))
    again = fitted(name, data[0][order], data[1][order])
    np.testing.assert_allclose(predicted(again, data[0]), predicted(calibrator, data[0]), atol=5e-3)


def test_ignored_labels_and_zero_weights_are_rows_left_out(name, calibrator, data):
    logits, labels = (np.concatenate([x, x[:100]]) for x in data)
    ignored = labels.copy()
    ignored[-100:] = -100
    weight = np.ones(len(labels))
    weight[-100:] = 0
    expected = predicted(calibrator, data[0])
    for again in (
        fitted(name, logits, ignored),
        fitted(name, logits, labels, sample_weight=weight),
    ):
        np.testing.assert_array_equal(predicted(again, data[0]), expected)


def test_weight_two_is_a_row_twice(name, data):
    if name in ("auto", "matrix", "dirichlet", "gc", "multicalibration", "maccal"):
        pytest.skip("its folds or batches differ")
    if name == "procal":
        pytest.skip("a row twice has a neighbour at no distance")
    if name == "venn_abers":
        pytest.skip("a new example weighs as much as the mean example")
    if name in ("sms", "svs", "bbq", "top_and_rest", "sms_blend"):
        pytest.skip("a row twice is one more example")
    logits, labels = (x[:400] for x in data)
    weight = np.where(np.arange(400) < 150, 2.0, 1.0)
    twice = fitted(name, np.concatenate([logits, logits[:150]]), np.append(labels, labels[:150]))
    weighted = fitted(name, logits, labels, sample_weight=weight)
    np.testing.assert_allclose(predicted(weighted, logits), predicted(twice, logits), atol=5e-3)


@pytest.mark.parametrize(
    "method", ["bbq", "sms", "odds", "rank_gaps", "venn_abers", "multicalibration"]
)
def test_only_ratios_of_weights_matter(method, rng):
    """Priors and penalties count examples, and must not take weights for counts."""
    logits, labels = (x[:300] for x in overconfident(2 if method in TWO_ONLY else 6))
    weight = rng.exponential(size=300)
    small, large = (fitted(method, logits, labels, sample_weight=s * weight) for s in (1e-3, 1e3))
    np.testing.assert_allclose(predicted(large, logits), predicted(small, logits), atol=1e-8)


@pytest.mark.parametrize("method", ["venn_abers", "bbq", "odds"])
def test_only_ratios_of_weights_matter_to_parts_of_other_methods(method, rng):
    """``fit`` makes their mean 1; examples of a fold, and records, reach the method without it."""
    logits, labels = (x[:300] for x in overconfident(2 if method in TWO_ONLY else 6))
    weight, probs = rng.exponential(size=300), []
    for scale in (1e-3, 1.0, 1e3):
        part, some = make(method), examples(logits, labels, scale * weight)
        part.fit_examples(some) if method == "venn_abers" else part.fit_records(tabulate(some))
        probs.append(part.predict_proba(logits))
    for found in probs[::2]:
        np.testing.assert_allclose(found, probs[1], atol=1e-6)


def test_tokens_are_rows(name, calibrator, data, classes):
    logits, labels = data[0].reshape(50, 30, classes), data[1].reshape(50, 30)
    again = fitted(name, logits, labels)
    probs = predicted(again, logits)
    assert probs.shape == (50, 30, classes)
    np.testing.assert_array_equal(probs.reshape(-1, classes), predicted(calibrator, data[0]))


@pytest.mark.parametrize("keeper", ["ts", "smart", "isotonic", "blend"])
def test_a_row_is_predicted_as_many_are(keeper, of_name, six):
    logits = six[0].copy()
    logits[7, [0, 3]] = -np.inf
    logits[:50] = logits[:50].round()  # ties
    many = predicted(of_name(keeper), logits)
    for row, expected in zip(logits[:50], many, strict=False):
        np.testing.assert_allclose(predicted(of_name(keeper), row[None])[0], expected, atol=1e-6)


@pytest.mark.parametrize("keeper", ["ts", "smart", "isotonic", "sms"])
def test_vmap_maps_it_over_rows(keeper, of_name, six):
    rows = torch.from_numpy(six[0][:20])
    torch.testing.assert_close(torch.vmap(of_name(keeper))(rows), of_name(keeper)(rows))


def test_a_call_is_one_graph_with_the_same_result(calibrator, data):
    """The eager backend compiles nothing; that compiled code agrees is tested on a GPU."""
    torch.compiler.reset()  # a function has few compiled forms at a time
    logits = torch.from_numpy(data[0][:40]).float()
    features = inputs(calibrator, logits)
    traced = torch.compile(calibrator, backend="eager", fullgraph=True)
    with torch.inference_mode():
        found = traced(logits, features)
        torch.testing.assert_close(found, calibrator(logits, features))


def test_many_rows_are_predicted_as_a_few_are(name, calibrator, data, small_blocks, classes):
    logits = data[0][:300].reshape(10, 30, classes)
    probs = predicted(calibrator, logits)
    for few, rows in zip(probs, logits, strict=True):
        np.testing.assert_allclose(few, predicted(calibrator, rows), atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-3), (torch.bfloat16, 0.02)],
)
def test_every_precision_gives_nearly_the_same_fit(name, calibrator, data, dtype, tolerance):
    again = fitted(name, torch.from_numpy(data[0]).to(dtype), torch.from_numpy(data[1]))
    difference = predicted(again, data[0]) - predicted(calibrator, data[0])
    assert np.abs(difference).mean() < tolerance


def test_a_refit_forgets_and_the_same_data_give_the_same_fit(name, calibrator, classes, data, rng):
    again = fitted(name, *drawn(rng, 500, classes // 2 + 1, temperature=0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again.fit(*data, **beside(again, data[0]))
    np.testing.assert_array_equal(predicted(again, data[0]), predicted(calibrator, data[0]))


def test_log_odds_are_two_classes(name, rng):
    odds, labels = drawn(rng, 800, 2, temperature=2.0)
    one = fitted(name, odds[:, 1] - odds[:, 0], labels)
    two = fitted(name, odds, labels)
    probs = predicted(one, odds[:, 1] - odds[:, 0])
    assert probs.shape == (800,)
    np.testing.assert_allclose(probs, predicted(two, odds)[:, 1], atol=1e-3)
    found = one.predict(odds[:, 1] - odds[:, 0], inputs(one, odds[:, 1] - odds[:, 0]))
    np.testing.assert_array_equal(found, np.where(probs > 0.5, 1, 0))
    tags = applied(one, torch.zeros(4, 5))  # any shape: each number is a problem of its own
    assert tags.shape == (4, 5)


def test_state_dict_carries_the_fit(name, calibrator, data, classes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = EVERY_METHOD[name](**calibrator.config())
    other.load_state_dict(calibrator.state_dict())
    assert other.classes == calibrator.classes == classes
    assert other.describe() == calibrator.describe()
    assert repr(other) == repr(calibrator)
    assert other.learned() == calibrator.learned()
    np.testing.assert_array_equal(predicted(other, data[0]), predicted(calibrator, data[0]))


def test_it_shows_itself_in_a_line_and_in_a_notebook(name, calibrator):
    kind = type(calibrator).__name__
    for one in (calibrator, EVERY_METHOD[name]()):
        assert repr(one).startswith(f"{kind}(")
        assert str(one) == repr(one)
        assert ("not fitted" in repr(one)) == ("not fitted" in one.describe()) == (one.classes == 0)
        assert kind in check_inert(one._repr_html_()).text


def test_probabilities_count_as_at_least_the_floor_in_a_batch_or_alone(name, calibrator, data):
    floored = copy.deepcopy(calibrator)
    floored.set_floor(0.02)
    votes = softmax(data[0][:40], -1)
    votes = np.where(votes < 0.03, 0, votes)
    votes /= votes.sum(-1, keepdims=True)
    assert (votes == 0).any()
    with np.errstate(divide="ignore"):
        logs = np.log(votes)
    raised = np.log(np.maximum(votes, 0.02))
    least = np.maximum(logs, -100) if name == "none" else raised
    features = inputs(calibrator, raised)
    expected = calibrator.predict_proba(least, features)
    found = floored.predict_proba(np.maximum(logs, -100), features)  # as doors convert 0
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    if name == "none":
        return
    for i in range(5):
        row = slice(i, i + 1)
        one = floored.predict_proba(logs[row], None if features is None else features[row])
        np.testing.assert_allclose(one, expected[row], rtol=1e-4, atol=1e-6)
    again = EVERY_METHOD[name](**calibrator.config())
    again.load_state_dict(floored.state_dict())
    np.testing.assert_array_equal(
        again.predict_proba(logs, features), floored.predict_proba(logs, features)
    )


def test_a_fit_on_logits_forgets_the_floor(name, data):
    floored = make(name)
    floored.set_floor(0.02)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        floored.fit(*data, **beside(floored, data[0]))
    assert all(
        float(part.floor_) == 0 for part in floored.modules() if isinstance(part, Calibrator)
    )


def test_unfitted_and_wrong_inputs_are_refused(name, calibrator, classes):
    with pytest.raises(RuntimeError, match="is not fitted"):
        EVERY_METHOD[name]()(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=rf"must be \(..., {classes}\), as in fit, got \(2, 5\)"):
        predicted(calibrator, np.zeros((2, 5)))
    with pytest.raises(ValueError, match="row 1 has NaN"):
        predicted(calibrator, np.array([[0.0] * classes, [np.nan] * classes]))
    with pytest.raises(TypeError, match="logits must be floating point"):
        predicted(calibrator, np.zeros((2, classes), dtype=int))


def test_the_config_rebuilds_it(name):
    kind = EVERY_METHOD[name]
    assert kind(**kind().config()).config() == kind().config()


def test_size_counts_what_is_learned_and_warns(name, data, classes):
    calibrator = EVERY_METHOD[name]()
    size = calibrator.size(classes)
    assert size == SIZES.get(name, size)
    few = max(5 * PENALISED.get(name, size) // 2, 2)
    if size == 0:
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calibrator.fit(data[0][:few], data[1][:few], **beside(calibrator, data[0][:few]))
    assert any(
        f"has {size:,} parameter{'s' * (size > 1)} for {few:,} examples" in str(w.message)
        for w in caught
    )


# Guarantees that only some make


def near_ties(rng, rows, classes, dtype):
    """Random rows, a third of them with a runner-up within a rounding error of the top."""
    logits = torch.from_numpy(rng.normal(size=(rows, classes)) * 4).to(dtype)
    close = torch.arange(rows) % 3 == 0
    top = logits.argmax(-1)
    other = (top + 1) % classes
    nudged = torch.nextafter(logits.amax(-1), torch.tensor(-torch.inf, dtype=dtype))
    at = torch.arange(rows)[close]
    logits[at, other[close]] = nudged[close]
    tied = torch.arange(rows) % 7 == 0
    at = torch.arange(rows)[tied]
    logits[at, other[tied]] = logits.amax(-1)[tied]
    return logits


@pytest.mark.parametrize("keeper", KEEPERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_predictions_are_kept_near_ties_included(keeper, dtype, of_name, rng):
    calibrator = of_name(keeper)
    # a fault at one near tie in 1000 is missed with a probability of 0.1 %
    logits = near_ties(rng, 20_000, 6, dtype)
    expected = logits.argmax(-1)
    out = applied(calibrator, logits)
    assert (out.argmax(-1) == expected).all()
    assert (out.softmax(-1).argmax(-1) == expected).all()
    ties = (logits == logits.amax(-1, keepdim=True)).sum(-1)
    assert ((out == 0).sum(-1) == ties).all()  # what was equal stays equal, and nothing else


@pytest.mark.parametrize("monotone", MONOTONE)
def test_the_order_of_all_classes_is_kept(monotone, six, of_name):
    logits = six[0][:500]
    out = np.asarray(applied(of_name(monotone), torch.from_numpy(logits)))
    order = logits.argsort(-1)
    assert (np.diff(np.take_along_axis(out, order, -1), axis=-1) >= 0).all()


@pytest.mark.parametrize("tabled", TABLED)
def test_predictions_from_the_table_are_those_of_the_exact_softmax(tabled, six, of_name):
    calibrator = of_name(tabled)
    predictions = calibrator.predict_records(tabulate(examples(*six)))
    out = predicted(calibrator, six[0])
    np.testing.assert_allclose(predictions.confidence, out.max(-1), atol=1e-4)
    true = out[np.arange(len(out)), six[1]]
    np.testing.assert_allclose(predictions.nll, -np.log(true), atol=2e-3)


@pytest.mark.parametrize("maskable", MASKABLE)
def test_masked_classes_stay_impossible_and_count_for_nothing(maskable, six, of_name):
    logits, labels = six
    masked = np.concatenate([logits, np.full((len(logits), 2), -np.inf)], axis=1)
    wide, narrow = fitted(maskable, masked, labels), of_name(maskable)
    probs = predicted(wide, masked)
    assert (probs[:, 6:] == 0).all()
    np.testing.assert_allclose(probs[:, :6], predicted(narrow, logits), atol=5e-3)
    alone = np.array([[0.0] + [-np.inf] * 7])
    np.testing.assert_array_equal(predicted(wide, alone), [[1.0] + [0.0] * 7])


@pytest.mark.parametrize("maskable", [*MASKABLE, *COUNTING])
def test_a_row_with_one_possible_class_does_not_disturb_the_fit(maskable, six):
    logits, labels = six
    sure = np.full((30, 6), -np.inf)
    sure[:, 0] = 1.0
    mixed = fitted(maskable, np.concatenate([logits, sure]), np.append(labels, np.zeros(30, int)))
    assert np.isfinite(predicted(mixed, logits)).all()


MASKS: list[tuple[Any, Any]] = [
    (np.float64, -1e9),
    (np.float64, -1e30),
    (np.float64, np.finfo(np.float64).min),
    (np.float32, np.finfo(np.float32).min),
    (np.float16, np.finfo(np.float16).min),
]


def outcome_of(name, logits, labels, features):
    """Probabilities after a fit, or the error of it."""
    calibrator = make(name)
    beside = {"features": features, "head": (np.eye(6), np.zeros(6))}
    beside = beside if calibrator.needs_features else {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            calibrator.fit(logits, labels, **beside)
        probs = calibrator.predict_proba(logits, features)
    except ValueError as error:
        return str(error)
    called = calibrator(torch.from_numpy(logits), torch.from_numpy(features))
    np.testing.assert_array_equal(called.softmax(-1), probs)
    return probs


SEVERAL = [name for name in EVERY_METHOD if name not in TWO_ONLY]


# each method with two of the masks, each mask with a good third of the methods
@pytest.mark.parametrize(
    ("method", "number"),
    [(name, (i + step) % len(MASKS)) for i, name in enumerate(SEVERAL) for step in (0, 2)],
)
def test_huge_negative_numbers_are_masks(method, number, six):
    logits, labels = six[0][:300], six[1][:300]
    features = features_of(logits.astype(np.float16)).numpy().astype(np.float64)
    masked = np.random.default_rng(1).random(logits.shape) < 0.3
    masked[np.arange(300), labels] = False
    dtype, mask = MASKS[number]
    proper, odd = (np.where(masked, m, logits).astype(dtype) for m in (-np.inf, mask))
    wanted = outcome_of(method, proper, labels, features)
    np.testing.assert_array_equal(outcome_of(method, odd, labels, features), wanted)
    assert isinstance(wanted, str) or (wanted[masked] == 0).all()


@pytest.mark.parametrize("method", [name for name in EVERY_METHOD if name != "fc"])
@pytest.mark.parametrize("huge", [1e9, 1e300])
def test_one_huge_value_makes_no_probability_nan(method, huge):
    logits, labels = (x[:300].copy() for x in overconfident(2 if method in TWO_ONLY else 6))
    features = features_of(logits).numpy()
    logits[0, labels[0]] = huge
    result = outcome_of(method, logits, labels, features)
    assert "row 0 has -inf or a class far below" in result or np.isfinite(result).all()


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def test_autocast_default_dtype_and_errors_of_numpy_change_nothing(name, data):
    logits, labels = torch.from_numpy(data[0][:500]).float(), data[1][:500]

    def results():
        calibrator = fitted(name, logits, labels)
        tempered = isinstance(calibrator, TemperatureCalibrator)
        temperature = calibrator.temperature(logits) if tempered else None
        return applied(calibrator, logits), predicted(calibrator, logits), temperature

    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        default_dtype(torch.float16),
        np.errstate(all="raise"),
    ):
        inside = results()
    torch.testing.assert_close(inside, results(), rtol=0, atol=0)


def test_a_default_dtype_changes_no_records(rng):
    """Files are tabulated outside of a fit."""
    data = drawn(rng, 300, 5, 1.5)
    expected = tabulate(examples(*data))
    for dtype in (torch.float64, torch.bfloat16):
        with default_dtype(dtype):
            np.testing.assert_array_equal(tabulate(examples(*data)).table, expected.table)


def test_a_wider_default_dtype_changes_nothing(rng):
    data = drawn(rng, 300, 5, 1.5)
    expected = fitted("smart", *data).predict_proba(data[0])
    with default_dtype(torch.float64):
        found = fitted("smart", *data).predict_proba(data[0])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("narrow", ["half", "bfloat16", "double"])
def test_conversion_of_the_module_changes_nothing(narrow, calibrator, data):
    logits = torch.from_numpy(data[0])
    converted = getattr(torch.nn.Sequential(copy.deepcopy(calibrator)), narrow)()[0]
    torch.testing.assert_close(dict(converted.named_buffers()), dict(calibrator.named_buffers()))
    torch.testing.assert_close(
        applied(converted, logits), applied(calibrator, logits), rtol=0, atol=0
    )


@pytest.mark.parametrize("tempered", TEMPERED)
def test_temperature_divides_the_logits(tempered, six, of_name):
    logits = six[0][:50]
    calibrator = of_name(tempered)
    temperature = calibrator.temperature(logits)
    assert isinstance(temperature, np.ndarray)
    assert temperature.shape == (50,)
    assert (temperature > 0).all()
    np.testing.assert_allclose(
        predicted(calibrator, logits), softmax(logits / temperature[:, None], -1), atol=1e-6
    )
    assert calibrator.temperature(torch.from_numpy(logits)).shape == (50,)


@pytest.mark.parametrize("answers", ["right", "wrong"])
def test_data_without_an_optimum_end_within_bounds(name, classes, answers, rng):
    logits = rng.normal(size=(300, min(classes, 4))) * 3
    labels = logits.argmax(-1) if answers == "right" else logits.argmin(-1)
    calibrator = fitted(name, logits, labels)
    assert np.isfinite(predicted(calibrator, logits)).all()
    assert all(torch.isfinite(v).all() for v in calibrator.buffers())


def test_a_time_limit_ends_the_fit(name, data):
    if name in ("none", "spline", "histogram"):
        pytest.skip("searches for nothing")
    with time_limit(0), pytest.raises(TimeoutError, match="time limit"):
        fitted(name, *data)


@pytest.mark.parametrize(
    ("value", "said"), [(np.nan, "NaN"), (np.inf, r"\+inf"), (-np.inf, "-inf")]
)
def test_a_row_that_has_no_loss_is_named_in_the_fit(name, data, value, said):
    if name == "maccal":
        pytest.skip("ignores the logits")
    calibrator, broken = make(name), data[0].copy()
    broken[7, data[1][7]] = value  # -inf may be at other classes than the label
    with pytest.raises(ValueError, match=f"row 7 has {said}"):
        calibrator.fit(broken, data[1], **beside(calibrator, data[0]))


def test_a_fit_on_one_example_or_none(name, classes):
    calibrator = fitted(name, np.array([[2.0, 1.0, 0.0]])[:, :classes], [0])
    assert np.isfinite(predicted(calibrator, np.array([[0.5, 0.25, 0.0]])[:, :classes])).all()
    with pytest.raises(ValueError, match="nothing to measure"):
        fitted(name, np.zeros((3, classes)), [-100, -100, -100])


@pytest.mark.parametrize("from_table", [False, True])
@pytest.mark.filterwarnings("ignore:.*rows are copies")
def test_samples_that_are_all_alike_are_told_of(from_table):
    rng = np.random.default_rng(0)
    logits = np.repeat(2 * rng.normal(size=(20, 5)), 100, axis=0)
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(-1)
    module = cal.calibrators.HistogramBinning()
    fit = {
        False: lambda: module.fit(logits, labels),
        True: lambda: module.fit_records(tabulate(examples(logits, labels))),
    }
    with pytest.warns(UserWarning, match=r"2,000 examples \(\d+ of the first are not alike\)"):
        fit[from_table]()
    cal.TemperatureScaling().fit(logits, labels)  # one parameter is not too many for them


def test_labels_of_one_class_are_told_of():
    logits = np.random.default_rng(0).normal(size=(500, 3))
    with pytest.warns(UserWarning, match="all 500 labels are 1: what is learned of one class"):
        cal.TemperatureScaling().fit(logits, np.ones(500, int))
