"""Fits on files: what is learned is what the arrays alone would give.

Expected values come from ``fit`` on the arrays before they were written, which the tests of the
calibrators check.
"""

import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from scipy.special import softmax

import calibrant
from calibrant import use
from calibrant._core.checks import IGNORED
from calibrant.calibrators.registry import make_calibrator
from calibrant.calibrators.scaling import Identity, TemperatureScaling
from calibrant.data import open_dataset
from calibrant.workflows import fit as fitting
from calibrant.workflows.effect import effect
from calibrant.workflows.fit import cross_fit, fit, fit_and_measure
from tests.support.calibrators import Featured, Shift
from tests.support.predictions import (
    as_deflated,
    as_npy_folder,
    as_npz,
    as_npz_folder,
    as_npz_glob,
    as_pair,
    as_safetensors_glob,
    labelled,
    out_of,
    predictions,
    splits,
)
from tests.support.simulate import drawn

# Fit.


@pytest.mark.usefixtures("small_chunks", "no_whole_logits")
@pytest.mark.parametrize("write", [as_deflated, as_pair, as_safetensors_glob])
def test_temperature_of_a_file_is_that_of_its_arrays(tmp_path, write):
    arrays = predictions()
    found = fit(write(tmp_path, arrays), method="ts")
    expected = TemperatureScaling().fit(arrays["logits"], arrays["labels"])
    assert isinstance(found, TemperatureScaling)
    assert float(found.temperature_) == pytest.approx(float(expected.temperature_), rel=1e-5)
    assert int(found.classes_) == 5


@pytest.mark.parametrize("write", [as_npz, as_npy_folder])
def test_methods_that_read_whole_get_the_same_arrays(tmp_path, write):
    arrays = predictions()
    found = fit(write(tmp_path, arrays), method=Shift())
    expected = Shift().fit(arrays["logits"], arrays["labels"])
    torch.testing.assert_close(found.shift_, expected.shift_)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("kind", [TemperatureScaling, Shift])
@pytest.mark.filterwarnings("ignore:.*keeps predictions")
def test_weights_are_a_column(tmp_path, kind):
    arrays = predictions()
    arrays["importance"] *= (arrays["labels"] == 2) * 5
    arrays["importance"][:100] = 1
    path = as_npz_folder(tmp_path, arrays)
    expected = kind().fit(arrays["logits"], arrays["labels"], sample_weight=arrays["importance"])
    plain = kind().fit(arrays["logits"], arrays["labels"])
    found = fit(path, method=kind(), sample_weight="importance")
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-5, atol=0)
    learned = next(n for n in plain.state_dict() if n not in ("classes_", "floor_"))
    assert not torch.allclose(plain.state_dict()[learned], expected.state_dict()[learned])


def test_groups_reach_the_method(tmp_path):
    arrays = predictions()
    found: Any = fit(as_npz_folder(tmp_path, arrays), method=Shift(), groups="site")
    np.testing.assert_array_equal(found.context.groups, arrays["site"])
    assert found.context.features is None
    with pytest.raises(ValueError, match="no age in this split; found logits, labels, importance"):
        fit(tmp_path / "shards", method="ts", groups="age")


def test_groups_of_sequences_hold_for_their_tokens(tmp_path, rng):
    arrays = {
        "logits": rng.normal(size=(6, 3, 4)),
        "labels": rng.integers(4, size=(6, 3)),
        "document": np.array([0, 0, 1, 1, 2, 2]),
    }
    found: Any = fit(as_npz(tmp_path, arrays), method=Shift(), groups="document")
    np.testing.assert_array_equal(found.context.groups, np.repeat([0, 0, 1, 1, 2, 2], 3))


def test_features_and_last_layer_reach_methods_that_need_them(tmp_path, rng):
    arrays = {
        **splits(val=predictions()),
        "val_features": rng.normal(size=(600, 3)),
        "weight": rng.normal(size=(5, 3)),
        "bias": rng.normal(size=5),
    }
    path = as_npz(tmp_path, arrays)
    found: Any = fit(path, method=Featured())
    np.testing.assert_array_equal(found.context.features, arrays["val_features"])
    np.testing.assert_array_equal(found.context.head[0], arrays["weight"])
    np.testing.assert_array_equal(found.context.head[1], arrays["bias"])
    plain: Any = fit(path, method=Shift())
    assert plain.context.features is None
    assert plain.context.head is None


def test_missing_features_are_named(tmp_path):
    path = as_npz(tmp_path, splits(val=predictions()))
    with pytest.raises(ValueError, match=r"Featured needs features: .*p\.npz has no val_features"):
        fit(path, method=Featured())


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("kind", "shards"), [(TemperatureScaling, True), (Shift, False)])
def test_probabilities_become_logits_and_zeros_are_counted_once(tmp_path, kind, shards):
    arrays = predictions(rows=400)
    exact = np.exp(arrays["logits"].astype(float))
    probs = exact / exact.sum(1, keepdims=True)
    probs[[3, 20, 350]] = np.eye(5)[0]  # 4 zeros each, in several blocks
    arrays["labels"][[3, 20, 350]] = 0
    path = (as_npz_folder if shards else as_npz)(
        tmp_path, {"probs": probs, "labels": arrays["labels"]}
    )
    with pytest.warns(UserWarning, match="^12 of 1,880 probabilities are 0 ") as told:
        found = fit(path, method=kind())
    assert [w.filename for w in told] == [__file__]
    floor = probs[probs > 0].min() / 2
    expected = kind().fit(np.log(np.maximum(probs, floor)), arrays["labels"])
    expected.set_floor(floor)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-4, atol=0)
    options: dict[str, Any] = {"metrics": ["ece"]}
    for call in (
        lambda: fit_and_measure(path, method=kind(), **options),
        lambda: cross_fit(path, method=kind(), folds=2, level=None, **options),
    ):
        with pytest.warns(UserWarning, match="^12 of 1,880 probabilities are 0 ") as told:
            call()
        assert [w.filename for w in told] == [__file__]
    effect(found, path, level=None, **options)  # what zeros count as was told of by the fit


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("write", [as_npz, as_npz_folder])
def test_one_logit(tmp_path, rng, write):
    logits, labels = drawn(rng, 1000, 2, 2.0)
    odds = logits[:, 1] - logits[:, 0]
    found: Any = fit(write(tmp_path, {"logits": odds, "labels": labels}), method="ts")
    expected = TemperatureScaling().fit(odds, labels)
    assert float(found.temperature_) == pytest.approx(float(expected.temperature_), rel=1e-5)
    assert out_of(found, odds).shape == odds.shape


@pytest.mark.usefixtures("small_chunks")
def test_tokens_of_sequences(tmp_path, rng):
    flat, targets = drawn(rng, 450, 4, 2.0)
    logits, labels = flat.reshape(50, 9, 4), targets.reshape(50, 9)
    labels[:, 5:] = IGNORED
    labels[10:30] = IGNORED  # whole blocks without a label
    logits[10:30] = np.nan
    found: Any = fit(as_npz(tmp_path, {"logits": logits, "labels": labels}), method="ts")
    expected = TemperatureScaling().fit(logits, labels)
    assert float(found.temperature_) == pytest.approx(float(expected.temperature_), rel=1e-5)


def skewed(rng, rows=1500, classes=4):
    """Predictions that favour some classes below the top one: more than records can tell."""
    logits, labels = drawn(rng, rows, classes, 2.0)
    return {"logits": (logits + np.linspace(0, 3, classes)).astype(np.float32), "labels": labels}


def assert_same_fit(found, expected):
    assert found.reasons_ == expected.reasons_
    values = expected.state_dict()
    assert found.state_dict().keys() == values.keys()
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.filterwarnings("ignore:sms, which may change the predicted class")
def test_auto_reads_a_small_split_whole_and_chooses_as_from_arrays(tmp_path, rng):
    arrays = skewed(rng, 500)
    auto = partial(calibrant.Auto, candidates=("none", "ts", "top_and_rest"), folds=2)
    expected = auto().fit(arrays["logits"], arrays["labels"])
    for write in (as_npz, as_npz_folder, as_safetensors_glob):
        folder = tmp_path / write.__name__
        folder.mkdir()
        found: Any = fit(write(folder, arrays), method=auto())
        names = [candidate.name for candidate in found.candidates_]
        assert "top_and_rest" in names
        assert_same_fit(found, expected)


@pytest.mark.usefixtures("small_chunks", "no_whole_logits")
def test_auto_chooses_from_the_table_of_a_large_split(tmp_path, rng, monkeypatch):
    arrays = skewed(rng)
    monkeypatch.setattr(fitting, "WHOLE", arrays["logits"].size - 1)
    whole: Any = fit(as_npz(tmp_path, arrays), method="auto")
    shards: Any = fit(as_npz_folder(tmp_path, arrays), method="auto")
    assert {c.name for c in whole.candidates_} == {"none", "ts", "beta", "blend"}
    assert_same_fit(shards, whole)


def test_the_limit_counts_every_logit(tmp_path, rng, monkeypatch):
    tokens = {"logits": rng.normal(size=(40, 5, 3)), "labels": rng.integers(3, size=(40, 5))}
    split = open_dataset(as_npz(tmp_path, tokens)).split("")
    for limit, table in ((40 * 5 * 3, False), (40 * 5 * 3 - 1, True)):
        monkeypatch.setattr(fitting, "WHOLE", limit)
        assert fitting._fits_from_table(calibrant.Auto(), split) == table
        assert fitting._fits_from_table(TemperatureScaling(), split)


@pytest.mark.parametrize("labels", [np.full(6, IGNORED), np.zeros(0, int)], ids=["ignored", "none"])
def test_nothing_to_fit_on(tmp_path, labels):
    np.savez(tmp_path / "p.npz", logits=np.zeros((len(labels), 3)), labels=labels)
    with pytest.raises(ValueError, match="nothing to measure"):
        fit(tmp_path / "p.npz", method="ts")


# Which split.


@pytest.mark.parametrize(
    ("names", "asked", "used"),
    [
        (["val", "test"], None, "val"),
        (["test", "", "val"], None, "val"),
        (["", "test"], None, ""),
        (["val", "test"], "test", "test"),
        (["val", "noise_3"], "noise_3", "noise_3"),
    ],
)
def test_choice_of_split(tmp_path, names, asked, used):
    each = {name: predictions(seed=i, rows=200 + 50 * i) for i, name in enumerate(names)}
    for i, name in enumerate(names):
        each[name]["logits"] *= 1 + i
    found: Any = fit(as_npz(tmp_path, splits(**each)), method="ts", split=asked)
    expected = TemperatureScaling().fit(each[used]["logits"], each[used]["labels"])
    assert float(found.temperature_) == pytest.approx(float(expected.temperature_), rel=1e-5)


def test_test_set_is_not_fitted_unasked(tmp_path):
    path = as_npz(tmp_path, splits(test=predictions(), noise=predictions()))
    wanted = r"no split 'val' and no unnamed split.* only test, noise.*--fit-split.*--cross-fit"
    with pytest.raises(ValueError, match=wanted):
        fit(path, method="ts")
    with pytest.raises(ValueError, match="unknown split 'blur': choose from test, noise"):
        fit(path, method="ts", split="blur")


# Which method.


def test_calibrator_is_fitted_in_place(tmp_path):
    mine = TemperatureScaling(objective="brier")
    assert fit(as_npz(tmp_path, predictions()), method=mine) is mine


def test_options_reach_the_constructor(tmp_path):
    found: Any = fit(as_npz(tmp_path, predictions()), method="ts", options={"objective": "brier"})
    assert found.objective == "brier"


@pytest.mark.parametrize(
    ("method", "options", "kind", "message"),
    [
        ("tss", {}, ValueError, "unknown method 'tss': did you mean ts.* choose from none, ts"),
        ("zzzzzz", {}, ValueError, "unknown method 'zzzzzz': choose from none"),
        (
            "ts",
            {"objectiv": 1},
            ValueError,
            r"ts has no option 'objectiv': did you mean objective\? its options are objective",
        ),
        ("none", {"x": 1}, ValueError, "none has no option 'x': it has none"),
        (Identity(), {"x": 1}, TypeError, "options go with the name .* got x beside a Identity"),
    ],
)
def test_unknown_methods_and_options(method, options, kind, message):
    with pytest.raises(kind, match=message):
        make_calibrator(method, options)


# Executors, progress, errors.


@pytest.mark.parametrize("threads", [False, True])
def test_progress_grows_to_the_total(tmp_path, monkeypatch, threads):
    monkeypatch.setattr("calibrant.data.dataset.CHUNK", 6 * 40)
    steps: list[tuple[int, int]] = []
    with (
        ThreadPoolExecutor(2) as pool,
        use(executor=pool if threads else None, progress=lambda *step: steps.append(step)),
    ):
        fit(
            as_npz_glob(tmp_path, predictions()),
            method="ts",
        )
    done = [step[0] for step in steps]
    assert {step[1] for step in steps} == {600}
    assert done == sorted(set(done))
    assert done[-1] == 600
    assert len(done) == (4 if threads else 1 + 1 + 7 + 9)  # shards, or blocks of 40 rows


def test_faults_are_placed(tmp_path, monkeypatch):
    monkeypatch.setattr("calibrant.data.dataset.CHUNK", 6 * 100)  # 100 rows
    arrays = predictions()
    arrays["logits"][342], arrays["labels"][342] = np.nan, 1
    path = as_npz(tmp_path, arrays)
    with pytest.raises(
        ValueError, match=r"p\.npz, counting from row 300: logits .* row 42 has NaN"
    ):
        fit(path, method="ts")
    arrays["labels"][2] = 7
    with pytest.raises(ValueError, match=r"p\.npz: labels must be in \[0, 5\)"):
        fit(as_npz(tmp_path, arrays), method=Shift())


# Cross-fitting: the loop over folds, written out here.


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("kind", "write"), [(TemperatureScaling, as_npz_folder), (Shift, as_npz)])
def test_cross_fit_is_the_loop_over_folds(tmp_path, kind, write):
    arrays = predictions()
    arrays["importance"][::11] = 0  # as if they were not there
    found = cross_fit(
        write(tmp_path, arrays),
        method=kind(),
        folds=4,
        sample_weight="importance",
        metrics=["ece", "nll"],
    )
    kept, fold = labelled(arrays), found.folds[arrays["labels"] != IGNORED]
    after = np.zeros_like(kept["logits"])
    for i in range(4):
        seen = {key: values[fold != i] for key, values in kept.items()}
        fitted = kind().fit(seen["logits"], seen["labels"], sample_weight=seen["importance"])
        after[fold == i] = out_of(fitted, kept["logits"][fold == i])
    expected = calibrant.evaluate(
        after, kept["labels"], sample_weight=kept["importance"], metrics=["ece", "nll"]
    )
    for name in ("ece", "nll"):
        assert found.effect.after[name].value == pytest.approx(expected[name].value, abs=1e-5)
        assert found.effect.after[name].low == pytest.approx(expected[name].low, abs=1e-3)
    whole = kind().fit(arrays["logits"], arrays["labels"], sample_weight=arrays["importance"])
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(found.calibrator.state_dict()[name], value, rtol=1e-5, atol=0)
    assert len(found.calibrators) == 4
    assert found.effect.before.n == (kept["importance"] > 0).sum() == (found.folds >= 0).sum()


def test_folds_have_equal_shares_and_are_seeded(tmp_path):
    arrays = predictions()
    path = as_npz(tmp_path, arrays)
    options: dict[str, Any] = {"metrics": ["accuracy"], "level": None}
    first, again, other = (cross_fit(path, method="ts", seed=s, **options).folds for s in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    np.testing.assert_array_equal(first == -1, arrays["labels"] == IGNORED)
    for label in range(5):
        counts = np.bincount(first[arrays["labels"] == label], minlength=5)
        assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("kind", [TemperatureScaling, Shift])
def test_groups_stay_in_one_fold(tmp_path, rng, kind):
    arrays = predictions() | {"patient": np.sort(rng.integers(40, size=600))}
    arrays["labels"][arrays["patient"] == 0] = IGNORED
    found = cross_fit(
        as_npz(tmp_path, arrays), method=kind(), groups="patient", metrics=["accuracy"], level=None
    )
    for patient in np.unique(arrays["patient"]):
        rows = (arrays["patient"] == patient) & (arrays["labels"] != IGNORED)
        assert len(np.unique(found.folds[rows])) == (patient != 0)
    assert set(found.folds[arrays["labels"] != IGNORED]) == set(range(5))


@pytest.mark.filterwarnings("ignore:accuracy .*no better than that of guessing")
def test_cross_fit_takes_arrays_and_tokens(rng):
    logits = rng.normal(size=(30, 4, 3))
    labels = rng.integers(3, size=(30, 4))
    labels[::7] = IGNORED
    arrays = {"logits": torch.tensor(logits), "labels": torch.tensor(labels)}
    found = cross_fit(arrays, method=Shift(), folds=3, metrics=["nll"], level=None)
    after = np.empty_like(logits)
    for i in range(3):
        seen = found.folds != i
        fitted = Shift().fit(logits[seen], labels[seen])
        after[~seen] = out_of(fitted, logits[~seen])
    expected = calibrant.evaluate(after, labels, metrics=["nll"], level=None)
    assert found.effect.after["nll"].value == pytest.approx(expected["nll"].value)


def test_warning_of_every_fold_is_given_once(tmp_path):
    class Telling(Shift):
        def _fit(self, examples, context):
            super()._fit(examples, context)
            warnings.warn(f"{(examples.labels >= 0).sum()} samples", stacklevel=2)

    with pytest.warns(UserWarning, match="^564 samples") as told:
        cross_fit(as_npz(tmp_path, predictions()), method=Telling(), metrics=["ece"], level=None)
    assert len(told) == 1


@pytest.mark.parametrize(
    ("names", "used"), [(["test"], "test"), (["test", "val"], "val"), (["test", ""], "")]
)
def test_split_of_a_cross_fit(tmp_path, names, used):
    path = as_npz(tmp_path, splits(**{name: predictions(rows=60) for name in names}))
    assert cross_fit(path, method="ts", metrics=["accuracy"], level=None).split == used


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folds": 1}, "folds must be from 2 to the number of labelled rows, 564, got 1"),
        ({"folds": 565}, "folds must be from 2 to the number of labelled rows, 564, got 565"),
        ({"groups": "site"}, "folds must be from 2 to the number of values of site, 3, got 5"),
        ({"split": "test"}, "no split 'test', only an unnamed split"),
    ],
)
def test_impossible_folds(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        cross_fit(as_npz(tmp_path, predictions()), method="ts", **options)


def test_what_is_no_method_is_named():
    arrays: dict[str, Any] = {"logits": np.eye(3), "labels": [0, 1, 2]}
    kind, logits, labels = cast(Any, (Identity, np.eye(3), np.arange(3)))
    with pytest.raises(TypeError, match=r"got the class Identity: pass Identity\(\)"):
        fit(arrays, method=kind)
    with pytest.raises(TypeError, match=r"got a ndarray: arrays go into fit\(logits, labels\)"):
        fit(logits, method=labels)
    wrong: list[Any] = [logits, (logits, labels)]
    for data in wrong:
        with pytest.raises(TypeError, match=r"pass {'logits': logits, 'labels': labels}"):
            fit(data, method="ts")
    with pytest.raises(TypeError, match="labels are missing: fit was called on a class"):
        calibrant.TemperatureScaling.fit(logits, labels)
    with pytest.raises(TypeError, match=r"labels are missing: pass fit\(logits, labels\)"):
        calibrant.TemperatureScaling().fit(logits)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Identity, "got the class Identity: create one, and fit it"),
        ("folder", r"got str: pass calibrant\.load\(path\)"),
    ],
)
def test_what_is_no_calibrator_is_named(given, message, tmp_path):
    with pytest.raises(TypeError, match=message):
        calibrant.apply(given, {"logits": np.eye(3)}, tmp_path / "out.npz")


def test_arrays_and_tensors_are_fitted_as_files_are(tmp_path):
    arrays = predictions()
    logits, labels = arrays["logits"], arrays["labels"]
    expected = fit(as_npz(tmp_path, arrays), method="ts")
    for given in (logits, torch.from_numpy(logits)):
        found = fit(given, labels, method="ts")
        assert torch.equal(found.temperature_, expected.temperature_)
    probs = softmax(logits, -1)
    found = fit(probs=probs, labels=labels, method="ts", sample_weight=np.ones(len(labels)))
    assert float(found.temperature_) == pytest.approx(float(expected.temperature_), rel=1e-4)
    crossed = cross_fit(logits, labels, method="ts", level=None)
    assert float(crossed.calibrator.temperature_) == float(expected.temperature_)
    with pytest.raises(TypeError, match="pass other arguments by name"):
        fit(as_npz(tmp_path, arrays), "ts")
