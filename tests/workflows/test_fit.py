"""Calibrators over files: what is learned and written is what the arrays alone would give.

Expected values come from ``fit`` on the arrays before they were written, which the tests of the
calibrators check, or from a loop written here.
"""

import multiprocessing
import os
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import calibrant
from calibrant._core.checks import IGNORED
from calibrant.calibrators.base import Calibrator, TemperatureCalibrator
from calibrant.calibrators.registry import make_calibrator
from calibrant.calibrators.scaling import Identity, TemperatureScaling
from calibrant.data import Split, dataset as sources, open_predictions, save_predictions
from calibrant.workflows.apply import apply_file
from calibrant.workflows.cross_fit import cross_fit
from calibrant.workflows.effect import effect_file
from calibrant.workflows.fit import fit_and_measure, fit_file
from tests.support.simulate import drawn
from tests.workflows.test_evaluate import (
    FORMS,
    as_npz,
    as_npz_folder,
    as_npz_glob,
    cut,
    needs_pyarrow,
    predictions,
)


class Shift(Calibrator):
    """Adds the logarithm of how often each class is the label: reads whole, changes the argmax."""

    shift_: torch.Tensor

    def __init__(self):
        super().__init__()
        self._store(shift_=torch.zeros(0))
        self.context: Any = None

    def size(self, classes):
        return 0

    def _fit(self, given, context):
        kept = given.labels[given.labels != IGNORED]
        counts = np.bincount(kept, given.labelled_weight(), minlength=given.classes)
        self._store(shift_=np.log(counts + 1))
        self.context = context

    def _transform(self, logits, top, features):
        return logits + self.shift_


class Featured(Shift):
    """The same, with the first feature of a row added to its first class."""

    needs_features = True

    def _transform(self, logits, top, features):
        return (
            logits
            + self.shift_
            + torch.nn.functional.one_hot(torch.tensor(0), logits.shape[-1])
            * features[..., :1].to(logits.dtype)
        )


class PerRow(TemperatureCalibrator):
    """Divides each row by the distance of its two largest logits: a temperature of its own."""

    def size(self, classes):
        return 0

    def _fit_records(self, records):
        self.solution_ = None

    def _temperature(self, logits, top):
        two = logits.topk(2, -1).values
        return 1 + two[..., :1] - two[..., 1:]


def splits(**named):
    """The arrays of several splits under the keys that they have in one file."""
    return {
        f"{name}_{key}" if name else key: values
        for name, arrays in named.items()
        for key, values in arrays.items()
    }


def labelled(arrays):
    kept = arrays["labels"] != IGNORED
    return {key: values[kept] for key, values in arrays.items()}


def out_of(calibrator, logits, *rest):
    """Calibrated logits, as the module gives them."""
    with torch.no_grad():
        return calibrator(torch.as_tensor(logits), *map(torch.as_tensor, rest)).numpy()


@pytest.fixture
def small_blocks(monkeypatch):
    """Read a few rows at a time, so that small files too are walked in many blocks."""
    monkeypatch.setattr(sources, "BLOCK", 64)


@pytest.fixture
def no_whole_logits(monkeypatch):
    """Let nobody read all logits at once."""
    read = Split.read

    def refusing(self, column):
        assert column != "logits"
        return read(self, column)

    monkeypatch.setattr(Split, "read", refusing)


# Fit.


@pytest.mark.usefixtures("small_blocks", "no_whole_logits")
@pytest.mark.parametrize("write", FORMS)
def test_temperature_of_a_file_is_that_of_its_arrays(tmp_path, write):
    arrays = predictions()
    found = fit_file(write(tmp_path, arrays), "ts")
    expected = TemperatureScaling().fit(arrays["logits"], arrays["labels"])
    assert isinstance(found, TemperatureScaling)
    assert float(found.temperature_) == pytest.approx(float(expected.temperature_), rel=1e-5)
    assert int(found.classes_) == 5


@pytest.mark.parametrize("write", FORMS)
def test_methods_that_read_whole_get_the_same_arrays(tmp_path, write):
    arrays = predictions()
    found = fit_file(write(tmp_path, arrays), Shift())
    expected = Shift().fit(arrays["logits"], arrays["labels"])
    torch.testing.assert_close(found.shift_, expected.shift_)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_known_temperature_is_found_over_shards(tmp_path, rng, temperature):
    logits, labels = drawn(rng, 6000, 4, temperature)
    path = as_npz_folder(tmp_path, {"logits": logits.astype(np.float16), "labels": labels})
    found: Any = fit_file(path, "ts")
    assert float(found.temperature_) == pytest.approx(temperature, rel=0.08)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", [TemperatureScaling, Shift])
def test_weights_are_a_column(tmp_path, kind):
    arrays = predictions()
    arrays["importance"] *= (arrays["labels"] == 2) * 5
    arrays["importance"][:100] = 1
    path = as_npz_folder(tmp_path, arrays)
    expected = kind().fit(arrays["logits"], arrays["labels"], sample_weight=arrays["importance"])
    plain = kind().fit(arrays["logits"], arrays["labels"])
    found = fit_file(path, kind(), sample_weight="importance")
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-5, atol=0)
    learned = next(name for name in plain.state_dict() if name != "classes_")
    assert not torch.allclose(plain.state_dict()[learned], expected.state_dict()[learned])


def test_groups_reach_the_method(tmp_path):
    arrays = predictions()
    found: Any = fit_file(as_npz_folder(tmp_path, arrays), Shift(), groups="site")
    np.testing.assert_array_equal(found.context.groups, arrays["site"])
    assert found.context.features is None
    with pytest.raises(ValueError, match="no age in this split; found logits, labels, importance"):
        fit_file(tmp_path / "shards", "ts", groups="age")


def test_groups_of_sequences_hold_for_their_tokens(tmp_path, rng):
    arrays = {
        "logits": rng.normal(size=(6, 3, 4)),
        "labels": rng.integers(4, size=(6, 3)),
        "document": np.array([0, 0, 1, 1, 2, 2]),
    }
    found: Any = fit_file(as_npz(tmp_path, arrays), Shift(), groups="document")
    np.testing.assert_array_equal(found.context.groups, np.repeat([0, 0, 1, 1, 2, 2], 3))


def test_features_and_last_layer_reach_methods_that_need_them(tmp_path, rng):
    arrays = {
        **splits(val=predictions()),
        "val_features": rng.normal(size=(600, 3)),
        "weight": rng.normal(size=(5, 3)),
        "bias": rng.normal(size=5),
    }
    path = as_npz(tmp_path, arrays)
    found: Any = fit_file(path, Featured())
    np.testing.assert_array_equal(found.context.features, arrays["val_features"])
    np.testing.assert_array_equal(found.context.head[0], arrays["weight"])
    np.testing.assert_array_equal(found.context.head[1], arrays["bias"])
    plain: Any = fit_file(path, Shift())
    assert plain.context.features is None
    assert plain.context.head is None


def test_missing_features_are_named(tmp_path):
    path = as_npz(tmp_path, splits(val=predictions()))
    with pytest.raises(ValueError, match=r"Featured needs features: .*p\.npz has no val_features"):
        fit_file(path, Featured())


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", [TemperatureScaling, Shift])
@pytest.mark.parametrize("shards", [False, True])
def test_probabilities_become_logits_and_zeros_are_counted_once(tmp_path, kind, shards):
    arrays = predictions(rows=400)
    exact = np.exp(arrays["logits"].astype(float))
    probs = exact / exact.sum(1, keepdims=True)
    probs[[3, 20, 350]] = np.eye(5)[0]  # 4 zeros each, in several blocks
    arrays["labels"][[3, 20, 350]] = 0
    path = (as_npz_folder if shards else as_npz)(
        tmp_path, {"probs": probs, "labels": arrays["labels"]}
    )
    with pytest.warns(UserWarning, match="^12 probabilities are exactly 0") as told:
        found = fit_file(path, kind())
    assert len(told) == 1
    expected = kind().fit(np.log(np.maximum(probs, 5e-324)), arrays["labels"])
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-4, atol=0)
    options: dict[str, Any] = {"metrics": ["ece"]}
    for call in (
        lambda: fit_and_measure(path, kind(), **options),
        lambda: cross_fit(path, kind(), folds=2, level=None, **options),
        lambda: effect_file(found, path, level=None, **options),
    ):
        with pytest.warns(UserWarning, match="^12 probabilities are exactly 0") as told:
            call()
        assert len(told) == 1


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("write", [as_npz, as_npz_folder])
def test_one_logit(tmp_path, rng, write):
    logits, labels = drawn(rng, 1000, 2, 2.0)
    odds = logits[:, 1] - logits[:, 0]
    found: Any = fit_file(write(tmp_path, {"logits": odds, "labels": labels}), "ts")
    expected = TemperatureScaling().fit(odds, labels)
    assert float(found.temperature_) == pytest.approx(float(expected.temperature_), rel=1e-5)
    assert out_of(found, odds).shape == odds.shape


@pytest.mark.usefixtures("small_blocks")
def test_tokens_of_sequences(tmp_path, rng):
    flat, targets = drawn(rng, 450, 4, 2.0)
    logits, labels = flat.reshape(50, 9, 4), targets.reshape(50, 9)
    labels[:, 5:] = IGNORED
    labels[10:30] = IGNORED  # whole blocks without a label
    logits[10:30] = np.nan
    found: Any = fit_file(as_npz(tmp_path, {"logits": logits, "labels": labels}), "ts")
    expected = TemperatureScaling().fit(logits, labels)
    assert float(found.temperature_) == pytest.approx(float(expected.temperature_), rel=1e-5)


@pytest.mark.parametrize("labels", [np.full(6, IGNORED), np.zeros(0, int)], ids=["ignored", "none"])
def test_nothing_to_fit_on(tmp_path, labels):
    np.savez(tmp_path / "p.npz", logits=np.zeros((len(labels), 3)), labels=labels)
    with pytest.raises(ValueError, match="nothing to measure"):
        fit_file(tmp_path / "p.npz", "ts")


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
    found: Any = fit_file(as_npz(tmp_path, splits(**each)), "ts", split=asked)
    expected = TemperatureScaling().fit(each[used]["logits"], each[used]["labels"])
    assert float(found.temperature_) == pytest.approx(float(expected.temperature_), rel=1e-5)


def test_test_set_is_not_fitted_unasked(tmp_path):
    path = as_npz(tmp_path, splits(test=predictions(), noise=predictions()))
    wanted = r"no split 'val' and no plain arrays.* only 'test', 'noise'.*--split.*--cross-fit"
    with pytest.raises(ValueError, match=wanted):
        fit_file(path, "ts")
    with pytest.raises(ValueError, match="no split 'dev'; found split 'test', split 'noise'"):
        fit_file(path, "ts", split="dev")


# Which method.


def test_calibrator_is_fitted_in_place(tmp_path):
    mine = TemperatureScaling(objective="brier")
    assert fit_file(as_npz(tmp_path, predictions()), mine) is mine


def test_options_reach_the_constructor(tmp_path):
    found: Any = fit_file(as_npz(tmp_path, predictions()), "ts", options={"objective": "brier"})
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
            r"ts has no option 'objectiv': its options are objective \(default 'nll'\)",
        ),
        ("none", {"x": 1}, ValueError, "none has no option 'x': it has none"),
        (Identity(), {"x": 1}, TypeError, "options go with the name .* got x beside a Identity"),
    ],
)
def test_unknown_methods_and_options(method, options, kind, message):
    with pytest.raises(kind, match=message):
        make_calibrator(method, options)


# Executors, progress, errors.


@pytest.mark.slow
def test_process_pool(tmp_path):
    arrays = predictions()
    path = as_npz_folder(tmp_path, arrays)
    expected = TemperatureScaling().fit(
        arrays["logits"], arrays["labels"], sample_weight=arrays["importance"]
    )
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found: Any = fit_file(path, "ts", sample_weight="importance", executor=pool)
        arrays["logits"][-1] = np.nan
        arrays["labels"][-1] = 1
        np.savez(path / "part3.npz", **cut(arrays, 250)[-1])
        with pytest.raises(ValueError, match=r"part3\.npz: .*NaN"):
            fit_file(path, "ts", executor=pool)
    assert float(found.temperature_) == pytest.approx(float(expected.temperature_), rel=1e-5)


@pytest.mark.parametrize("threads", [False, True])
def test_progress_grows_to_the_total(tmp_path, monkeypatch, threads):
    monkeypatch.setattr(sources, "BLOCK", 6 * 40)
    steps: list[tuple[int, int]] = []
    with ThreadPoolExecutor(2) as pool:
        fit_file(
            as_npz_glob(tmp_path, predictions()),
            "ts",
            executor=pool if threads else None,
            progress=lambda done, total: steps.append((done, total)),
        )
    done = [step[0] for step in steps]
    assert {step[1] for step in steps} == {600}
    assert done == sorted(set(done))
    assert done[-1] == 600
    assert len(done) == (4 if threads else 1 + 1 + 7 + 9)  # shards, or blocks of 40 rows


def test_faults_are_placed(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 6 * 100)  # a hundred rows of five logits and a label
    arrays = predictions()
    arrays["logits"][342], arrays["labels"][342] = np.nan, 1
    path = as_npz(tmp_path, arrays)
    with pytest.raises(
        ValueError, match=r"p\.npz, counting from row 300: logits .* row 42 has NaN"
    ):
        fit_file(path, "ts")
    arrays["labels"][2] = 7
    with pytest.raises(ValueError, match=r"p\.npz: labels must be in \[0, 5\)"):
        fit_file(as_npz(tmp_path, arrays), Shift())


# Before and after.


@pytest.mark.usefixtures("small_blocks", "no_whole_logits")
@pytest.mark.parametrize("kind", [TemperatureScaling, Shift, PerRow])
@pytest.mark.parametrize("write", [as_npz, as_npz_folder])
def test_effect_is_that_of_the_arrays(tmp_path, kind, write):
    arrays, chosen = predictions(), ["accuracy", "ece", "nll", "auroc"]
    fitted = kind().fit(arrays["logits"], arrays["labels"])
    options: dict[str, Any] = {"metrics": chosen, "level": None}
    found = effect_file(fitted, write(tmp_path, arrays), sample_weight="importance", **options)
    kept = labelled(arrays)
    after = out_of(fitted, kept["logits"])
    for evaluation, logits in ((found.before, kept["logits"]), (found.after, after)):
        expected = calibrant.evaluate(
            logits, kept["labels"], sample_weight=kept["importance"], **options
        )
        assert evaluation.n == expected.n
        for name in chosen:
            assert evaluation[name].value == pytest.approx(expected[name].value, abs=1e-9)
    assert found.argmax_changed == (after.argmax(1) != kept["logits"].argmax(1)).sum()
    assert (found.argmax_changed > 0) == (kind is Shift)
    if kind is Shift:
        assert found.temperatures is None
    else:
        each = fitted.temperature(kept["logits"])
        assert found.temperatures == pytest.approx((each.min(), each.max()))


def test_effect_measures_test_and_fit_measures_what_it_fitted(tmp_path):
    val, test = predictions(rows=200, seed=1), predictions(rows=300, seed=2)
    path = as_npz(tmp_path, splits(val=val, test=test))
    found = fit_and_measure(path, "ts", metrics=["ece"])
    assert (found.split, found.effect.before.n) == ("val", (val["labels"] >= 0).sum())
    effect = effect_file(found.calibrator, path, metrics=["ece"], level=None)
    assert effect.before.n == (test["labels"] >= 0).sum()
    assert found.effect.before.level is None


def test_effect_with_features(tmp_path, rng):
    arrays = labelled(predictions()) | {"features": rng.normal(size=(564, 3)).astype(np.float32)}
    found = fit_and_measure(as_npz(tmp_path, arrays), Featured(), metrics=["nll"])
    after = out_of(found.calibrator, arrays["logits"], arrays["features"])
    expected = calibrant.evaluate(after, arrays["labels"], metrics=["nll"], level=None)
    assert found.effect.after["nll"].value == pytest.approx(expected["nll"].value, abs=1e-9)


# Cross-fitting.


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", [TemperatureScaling, Shift])
@pytest.mark.parametrize("write", [as_npz, as_npz_folder])
def test_cross_fit_is_the_loop_over_folds(tmp_path, kind, write):
    arrays = predictions()
    arrays["importance"][::11] = 0  # as if they were not there
    found = cross_fit(
        write(tmp_path, arrays), kind(), folds=4, sample_weight="importance", metrics=["ece", "nll"]
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
    first, again, other = (cross_fit(path, "ts", seed=s, **options).folds for s in (0, 0, 1))
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
        as_npz(tmp_path, arrays), kind(), groups="patient", metrics=["accuracy"], level=None
    )
    for patient in np.unique(arrays["patient"]):
        rows = (arrays["patient"] == patient) & (arrays["labels"] != IGNORED)
        assert len(np.unique(found.folds[rows])) == (patient != 0)
    assert set(found.folds[arrays["labels"] != IGNORED]) == set(range(5))


def test_cross_fit_takes_arrays_and_tokens(rng):
    logits = rng.normal(size=(30, 4, 3))
    labels = rng.integers(3, size=(30, 4))
    labels[::7] = IGNORED
    arrays = {"logits": torch.tensor(logits), "labels": torch.tensor(labels)}
    found = cross_fit(arrays, Shift(), folds=3, metrics=["nll"], level=None)
    after = np.empty_like(logits)
    for i in range(3):
        seen = found.folds != i
        fitted = Shift().fit(logits[seen], labels[seen])
        after[~seen] = out_of(fitted, logits[~seen])
    expected = calibrant.evaluate(after, labels, metrics=["nll"], level=None)
    assert found.effect.after["nll"].value == pytest.approx(expected["nll"].value)


def test_warning_of_every_fold_is_given_once(tmp_path):
    class Telling(Shift):
        def _fit(self, given, context):
            super()._fit(given, context)
            warnings.warn(f"{(given.labels >= 0).sum()} samples", stacklevel=2)

    with pytest.warns(UserWarning, match="^564 samples") as told:
        cross_fit(as_npz(tmp_path, predictions()), Telling(), metrics=["ece"], level=None)
    assert len(told) == 1


@pytest.mark.parametrize(
    ("names", "used"), [(["test"], "test"), (["test", "val"], "val"), (["test", ""], "")]
)
def test_split_of_a_cross_fit(tmp_path, names, used):
    path = as_npz(tmp_path, splits(**{name: predictions(rows=60) for name in names}))
    assert cross_fit(path, "ts", metrics=["accuracy"], level=None).split == used


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folds": 1}, "folds must be from 2 to the number of labelled rows, 564, got 1"),
        ({"folds": 565}, "folds must be from 2 to the number of labelled rows, 564, got 565"),
        ({"groups": "site"}, "folds must be from 2 to the number of values of site, 3, got 5"),
        ({"split": "test"}, "no split 'test'; found plain arrays"),
    ],
)
def test_impossible_folds(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        cross_fit(as_npz(tmp_path, predictions()), "ts", **options)


# Apply.


def fitted_on(arrays, kind=TemperatureScaling):
    return kind().fit(arrays["logits"], arrays["labels"])


@pytest.fixture
def halved():
    """A calibrator that makes the distances of five logits half as large."""
    found = TemperatureScaling()
    found._store(temperature_=2.0)
    found._set_classes(5)
    return found


def stored(path):
    return dict(np.load(path))


@pytest.mark.usefixtures("small_blocks", "no_whole_logits")
def test_every_split_is_calibrated_and_the_rest_kept(tmp_path, halved, rng):
    val, test = predictions(rows=90, seed=1), predictions(rows=70, seed=2)
    arrays: dict[str, Any] = {
        **splits(val=val),
        **splits(test=test),
        "train_features": rng.normal(size=(5, 2)),
        "names": np.array(["a", "b", "c", "d", "e"]),
        "weight": np.ones((5, 2), np.float16),
        "bias": np.ones(5),
        "epoch": np.array(7),
    }
    arrays["val_labels"] = arrays["val_labels"].astype(np.int16)
    arrays["test_logits"] = test["logits"].astype(np.float64)
    path, out = as_npz(tmp_path, arrays), tmp_path / "out.npz"
    steps: list[tuple[int, int]] = []
    apply_file(halved, path, out, progress=lambda *step: steps.append(step))
    found = stored(out)
    assert list(found) == [key for key in arrays if key != "epoch"]
    for key, values in found.items():
        if key.endswith("_logits"):
            before = arrays[key].astype(float)
            expected = (before - before.max(1, keepdims=True)) / 2
            np.testing.assert_allclose(values, expected, rtol=1e-6)
            assert values.dtype == np.float32
        else:
            np.testing.assert_array_equal(values, arrays[key])
            assert values.dtype == arrays[key].dtype
    assert steps[-1] == (160, 160)
    assert [step[0] for step in steps] == sorted({step[0] for step in steps})
    assert sorted(os.listdir(tmp_path)) == ["out.npz", "p.npz"]


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("write", FORMS)
@pytest.mark.usefixtures("small_blocks")
def test_shards_of_any_format_become_one_file(tmp_path, write, suffix, halved):
    arrays = {key: predictions()[key] for key in ("logits", "labels", "importance")}
    out = tmp_path / f"out{suffix}"
    apply_file(halved, write(tmp_path, arrays), out)
    found = open_predictions(out).split()
    np.testing.assert_allclose(found.read("logits"), out_of(halved, arrays["logits"]), rtol=1e-6)
    for key in ("labels", "importance"):
        np.testing.assert_array_equal(found.read(key), arrays[key])


@needs_pyarrow
def test_parquet_out(tmp_path, halved):
    arrays = predictions()
    apply_file(halved, as_npz(tmp_path, arrays), tmp_path / "out.parquet")
    found = open_predictions(tmp_path / "out.parquet").split()
    np.testing.assert_allclose(found.read("logits"), out_of(halved, arrays["logits"]), rtol=1e-6)
    np.testing.assert_array_equal(found.read("region"), arrays["region"])


def test_predicted_class_survives_rounding(tmp_path, rng):
    """Logits that float32 cannot tell apart keep their order in the file."""
    logits = np.zeros((500, 3)) + 1e-13 * rng.permuted(np.tile(np.arange(3), (500, 1)), axis=1)
    np.savez(tmp_path / "p.npz", logits=logits + 5)
    hot = TemperatureScaling()
    hot._store(temperature_=20.0)
    hot._set_classes(3)
    apply_file(hot, tmp_path / "p.npz", tmp_path / "out.npz")
    after = stored(tmp_path / "out.npz")["logits"]
    np.testing.assert_array_equal(after.argmax(1), (logits + 5).argmax(1))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("dtype", "wanted"), [("float16", "float32"), ("float32", "float32"), ("float64", "float64")]
)
def test_probabilities_stay_probabilities(tmp_path, halved, dtype, wanted):
    exact = np.exp(predictions()["logits"].astype(float))
    probs = (exact / exact.sum(1, keepdims=True)).astype(dtype)
    np.savez(tmp_path / "p.npz", test_probs=probs, test_labels=predictions()["labels"])
    apply_file(halved, tmp_path / "p.npz", tmp_path / "out.npz")
    found = stored(tmp_path / "out.npz")
    root = np.sqrt(probs.astype(float))  # half the logits
    np.testing.assert_allclose(
        found["test_probs"], root / root.sum(1, keepdims=True), rtol=1e-6, atol=1e-12
    )
    assert list(found) == ["test_probs", "test_labels"]
    assert found["test_probs"].dtype == wanted


def test_one_column_of_probabilities(tmp_path):
    halved = TemperatureScaling()
    halved._store(temperature_=2.0)
    halved._set_classes(1)
    np.savez(tmp_path / "p.npz", probs=[0.9, 0.2], labels=[1, 0])
    apply_file(halved, tmp_path / "p.npz", tmp_path / "out.npz")
    found = stored(tmp_path / "out.npz")["probs"]
    np.testing.assert_allclose(found, [3 / 4, 1 / 3])  # the odds 9 and 1/4 become 3 and 1/2
    np.savez(tmp_path / "p.npz", logits=[3.0, -1.0])
    apply_file(halved, tmp_path / "p.npz", tmp_path / "out.npz")
    np.testing.assert_allclose(stored(tmp_path / "out.npz")["logits"], [1.5, -0.5])


@pytest.mark.usefixtures("small_blocks")
def test_apply_with_features(tmp_path, rng):
    arrays = predictions() | {"features": rng.normal(size=(600, 3)).astype(np.float32)}
    path = as_npz_folder(tmp_path, arrays)
    fitted = fit_file(path, Featured())
    apply_file(fitted, path, tmp_path / "out.npz")
    found = stored(tmp_path / "out.npz")
    expected = out_of(fitted, arrays["logits"], arrays["features"])
    np.testing.assert_allclose(found["logits"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found["features"], arrays["features"])
    np.savez(tmp_path / "p.npz", logits=arrays["logits"])
    with pytest.raises(ValueError, match=r"Featured needs features: .* has no features"):
        apply_file(fitted, tmp_path / "p.npz", tmp_path / "new.npz")


def test_what_cannot_be_copied_is_named(tmp_path, halved):
    first, second = cut(predictions(rows=20), 8)
    del second["region"]
    folder = tmp_path / "shards"
    folder.mkdir()
    np.savez(folder / "0.npz", **first, notes=np.array([{}] * 8))
    np.savez(folder / "1.npz", **second, notes=np.array([{}] * 12))
    with pytest.warns(UserWarning, match="^left out: region, notes;"):
        apply_file(halved, folder, tmp_path / "out.npz")
    assert list(stored(tmp_path / "out.npz")) == ["logits", "labels", "importance", "site"]


def test_stale_probabilities_are_not_kept(tmp_path, halved):
    np.savez(tmp_path / "p.npz", logits=np.zeros((2, 5)), probs=np.full((2, 5), 0.2))
    apply_file(halved, tmp_path / "p.npz", tmp_path / "out.npz")
    assert list(stored(tmp_path / "out.npz")) == ["logits"]


@pytest.mark.parametrize(
    ("given", "out"),
    [
        ("p.npz", "p.npz"),
        ("p.npz", "link.npz"),
        ("shards", "shards/part2.npz"),
        ("shards", "shards/new.npz"),
        ("shards/*.npz", "shards/new.npz"),
        ("shards/*.npz", "shards/part0.npz"),
    ],
)
def test_input_is_never_overwritten(tmp_path, monkeypatch, halved, given, out):
    monkeypatch.chdir(tmp_path)
    as_npz(tmp_path, predictions())
    os.symlink("p.npz", "link.npz")
    as_npz_folder(tmp_path, predictions())
    before = (tmp_path / "p.npz").read_bytes()
    with pytest.raises(ValueError, match=r"is part of the input .*: write to another place"):
        apply_file(halved, given, out)
    assert (tmp_path / "p.npz").read_bytes() == before
    assert not os.path.exists("shards/new.npz")


def bad_input(folder, halved, name):
    """Arguments of apply_file that cannot work, and the message."""
    good = as_npz(folder, predictions())
    wrong = {"logits": predictions()["logits"]}
    wrong["logits"][599] = np.nan
    np.savez(folder / "nan.npz", **wrong)
    np.savez(folder / "wide.npz", logits=np.zeros((2, 7)))
    np.savez(folder / "bare.npz", features=np.zeros((2, 7)))
    single = Identity()
    single._set_classes(1)
    return {
        "nan": ((halved, folder / "nan.npz", "out.npz"), r"nan\.npz, counting .* has NaN"),
        "classes": ((halved, folder / "wide.npz", "out.npz"), r"\(\.\.\., 5\), as in fit"),
        "one logit": (
            (single, good, "out.npz"),
            "has 5 scores per row, but this Identity .* one logit",
        ),
        "no scores": ((halved, folder / "bare.npz", "out.npz"), "no logits or probs to calibrate"),
        "suffix": ((halved, good, "out.csv"), r"out\.csv: the suffix must be one of \.npz"),
        "npy": ((halved, good, "out.npy"), r"out\.npy: the suffix must be one of \.npz"),
        "folder": ((halved, good, "gone/out.npz"), "folder .*gone does not exist"),
    }[name]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "name", ["nan", "classes", "one logit", "no scores", "suffix", "npy", "folder"]
)
def test_nothing_is_written_when_apply_fails(tmp_path, halved, name):
    (calibrator, path, out), message = bad_input(tmp_path, halved, name)
    (tmp_path / "out.npz").write_text("old")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        apply_file(calibrator, path, tmp_path / out)
    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "out.npz").read_text() == "old"


def test_unfitted_calibrator_is_refused(tmp_path):
    path = as_npz(tmp_path, predictions())
    with pytest.raises(RuntimeError, match="not fitted"):
        apply_file(TemperatureScaling(), path, tmp_path / "out.npz")


def test_applied_file_measures_as_the_calibrated_arrays(tmp_path):
    arrays = predictions()
    path = as_npz(tmp_path, arrays)
    apply_file(fit_file(path, "ts"), path, tmp_path / "out.npz")
    found = calibrant.evaluate_file(tmp_path / "out.npz", level=None)
    expected = calibrant.evaluate(
        out_of(fitted_on(arrays), arrays["logits"]), arrays["labels"], level=None
    )
    for name in ("ece", "nll", "accuracy"):
        assert found[name].value == pytest.approx(expected[name].value, abs=1e-6)


def test_shards_named_by_split(tmp_path, halved):
    """Files val.npz and test.npz become the splits of one file."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for name in ("val", "test"):
        save_predictions(folder / f"{name}.npz", predictions(rows=20))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_file(halved, folder, tmp_path / "out.npz")
    assert open_predictions(tmp_path / "out.npz").splits == ["test", "val"]
