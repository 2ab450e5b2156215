"""Evaluation of files: the figures of the whole arrays, whatever holds the rows.

The expected values come from ``calibrant.evaluate`` of the arrays before they were written, which
other tests compare with other libraries; the accuracy and the NLL are also recomputed here.
"""

import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import calibrant
from calibrant import use
from calibrant.data import save_predictions
from calibrant.data.shards import Sample
from tests.support.predictions import (
    FORMS,
    REGIONS,
    as_npz,
    as_npz_folder,
    as_pair,
    as_parquet_folder,
    cut,
    needs_pyarrow,
    predictions,
)
from tests.support.warm_scripts import run_script

SUMS = {"accuracy", "ece", "debiased_ece", "classwise_ece", "mce", "over_ece", "under_ece"} | {
    *("nll", "brier")
}
"""Metrics of sums, which another order of addition may change in the last digits."""


def assert_same(found, expected):
    """Both evaluations tell the same, down to intervals, bins and groups."""
    assert (found.n, found.classes, found.estimand) == (
        expected.n,
        expected.classes,
        expected.estimand,
    )
    assert list(found) == list(expected)
    np.testing.assert_array_equal(found.bins.count, expected.bins.count)
    for name in expected:
        if name in SUMS:
            np.testing.assert_allclose(
                found[name].value, expected[name].value, rtol=0, atol=1e-12, err_msg=name
            )
        else:
            np.testing.assert_array_equal(found[name].value, expected[name].value, err_msg=name)
        # The draws behind the class-wise interval are made block by block.
        tolerance = 0.02 if name == "classwise_ece" else 1e-9
        np.testing.assert_allclose(found[name][1:], expected[name][1:], atol=tolerance)
    assert (found.test is None) == (expected.test is None)
    assert list(found.by) == list(expected.by)
    for name, part in expected.by.items():
        assert_same(found.by[name], part)


# The figures are those of the arrays.


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("write", FORMS)
def test_a_file_has_the_figures_of_its_arrays(tmp_path, write):
    """With weights and subgroups, which are columns of the file."""
    arrays = predictions()
    options: dict[str, Any] = {"metrics": ["ece", "nll", "ada_ece", "auroc"], "level": None}
    path = write(tmp_path, arrays)
    found = calibrant.evaluate(path, sample_weight="importance", by="site", **options)
    expected = calibrant.evaluate(
        arrays["logits"],
        arrays["labels"],
        sample_weight=arrays["importance"],
        by=arrays["site"],
        **options,
    )
    assert sorted(found.by) == ["0", "1", "2"]
    assert_same(found, expected)


@pytest.mark.usefixtures("small_chunks")
def test_all_metrics_and_intervals_of_shards(tmp_path):
    arrays = predictions()
    found = calibrant.evaluate(as_npz_folder(tmp_path, arrays))
    assert_same(found, calibrant.evaluate(arrays["logits"], arrays["labels"]))


def test_arrays_may_be_a_mapping_or_a_dataset(tmp_path):
    arrays = predictions()
    options: dict[str, Any] = {"metrics": ["ece", "auroc"], "level": None}
    expected = calibrant.evaluate(as_npz(tmp_path, arrays), by="site", **options)
    data = calibrant.open_dataset(tmp_path / "p.npz")
    assert_same(calibrant.evaluate(arrays, by="site", **options), expected)
    assert_same(calibrant.evaluate(arrays, by=arrays["site"], **options), expected)
    assert_same(calibrant.evaluate(data, by="site", **options), expected)
    with pytest.raises(TypeError, match="by must be the names of columns where the data are a fi"):
        calibrant.evaluate(data, by=arrays["site"])


def test_accuracy_and_nll_by_hand(tmp_path):
    arrays = predictions()
    kept = arrays["labels"] != -100
    logits, labels = arrays["logits"][kept].astype(float), arrays["labels"][kept]
    weight = arrays["importance"][kept] / arrays["importance"][kept].sum()
    log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    path = as_npz_folder(tmp_path, arrays)
    found = calibrant.evaluate(path, sample_weight="importance", level=None)
    assert found["accuracy"].value == pytest.approx(weight @ (logits.argmax(1) == labels))
    assert found["nll"].value == pytest.approx(-weight @ log_probs[np.arange(len(labels)), labels])


@pytest.mark.parametrize(
    "write", [as_npz, as_pair, pytest.param(as_parquet_folder, marks=needs_pyarrow)]
)
def test_subgroups_of_text(tmp_path, write):
    arrays = predictions()
    options: dict[str, Any] = {"metrics": ["ece", "nll"], "level": None}
    found = calibrant.evaluate(write(tmp_path, arrays), by="region", **options)
    assert sorted(found.by) == sorted(REGIONS)
    for name, part in found.by.items():
        rows = arrays["region"] == name
        expected = calibrant.evaluate(arrays["logits"][rows], arrays["labels"][rows], **options)
        assert_same(part, expected)


def test_a_subgroup_that_only_the_last_shard_has(tmp_path):
    arrays = predictions(rows=40)
    arrays["site"] = (np.arange(40) >= 30).astype(int)
    for number, shard in enumerate(cut(arrays, 10, 30)):
        save_predictions(tmp_path / f"{number}.npz", shard)
    found = calibrant.evaluate(tmp_path, by="site", level=None)
    assert found.by["1"].n == (arrays["labels"][30:] != -100).sum()


def test_choice_of_split(tmp_path):
    val, test = predictions(rows=50, seed=1), predictions(rows=60, seed=2)
    both = {"val": val, "test": test}
    path = tmp_path / "p.npz"
    np.savez(path, **{f"{n}_{key}": v for n, split in both.items() for key, v in split.items()})
    for split, arrays in ((None, test), ("test", test), ("val", val)):
        found = calibrant.evaluate(path, split=split, by="site", level=None)
        expected = calibrant.evaluate(
            arrays["logits"], arrays["labels"], by=arrays["site"], level=None
        )
        assert_same(found, expected)
    with pytest.raises(ValueError, match=r"unknown split 'tset': did you mean test.* val, test"):
        calibrant.evaluate(path, split="tset")


def test_split_of_a_file_with_val_alone_is_not_guessed(tmp_path):
    path = tmp_path / "p.npz"
    np.savez(path, **{f"val_{key}": values for key, values in predictions().items()})
    with pytest.raises(ValueError, match="no split 'test' or unnamed split, only val: name the s"):
        calibrant.evaluate(path)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("shards", [False, True])
def test_zeros_among_probabilities_are_counted_once(tmp_path, shards):
    arrays = predictions(rows=40)
    probs = np.exp(arrays["logits"]) / np.exp(arrays["logits"]).sum(1, keepdims=True)
    probs[[3, 20, 39]] = np.eye(5, dtype=np.float32)[0]  # in several blocks
    labels = arrays["labels"].copy()
    labels[[3, 20, 39]] = [1, 0, 4]
    arrays = {"probs": probs, "labels": labels}
    path = (as_npz_folder if shards else as_npz)(tmp_path, arrays)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = calibrant.evaluate(path, level=None)
    assert [str(warning.message).split(",")[0] for warning in told] == [
        "2 labels have a probability of 0"
    ]
    with pytest.warns(UserWarning, match="2 labels"):
        expected = calibrant.evaluate(probs=probs, labels=arrays["labels"], level=None)
    assert_same(found, expected)
    assert np.isfinite(found["nll"].value)


@pytest.mark.usefixtures("small_chunks")
def test_multilabel_file(tmp_path, rng):
    logits = rng.normal(size=(90, 6))
    labels = rng.integers(2, size=(90, 6))
    labels[4, 2] = -100
    save_predictions(tmp_path / "p.safetensors", {"logits": logits, "labels": labels})
    found = calibrant.evaluate(tmp_path / "p.safetensors", estimand="multilabel", level=None)
    assert found.n == 90 * 6 - 1
    assert_same(found, calibrant.evaluate(logits, labels, estimand="multilabel", level=None))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("estimand", "write"), [("top_label", as_npz), ("binary", as_npz_folder)])
def test_one_logit_file(tmp_path, rng, estimand, write):
    arrays = {"logits": 2 * rng.normal(size=300), "labels": rng.integers(2, size=300)}
    options: dict[str, Any] = {"estimand": estimand, "metrics": ["ece", "nll"], "level": None}
    found = calibrant.evaluate(write(tmp_path, arrays), **options)
    assert found.classes == 2
    assert_same(found, calibrant.evaluate(arrays["logits"], arrays["labels"], **options))


@pytest.mark.usefixtures("small_chunks")
def test_tokens_of_sequences(tmp_path, rng):
    logits = rng.normal(size=(12, 9, 4)).astype(np.float32)
    labels = rng.integers(4, size=(12, 9))
    labels[:, 5:] = -100
    np.savez(tmp_path / "p.npz", logits=logits, labels=labels)
    found = calibrant.evaluate(tmp_path / "p.npz", level=None)
    assert found.n == 12 * 5
    assert_same(found, calibrant.evaluate(logits, labels, level=None))


def test_options_reach_the_evaluation(tmp_path):
    arrays = predictions()
    options: dict[str, Any] = {"bins": 7, "metrics": ["mce", "ece"], "level": 0.5, "seed": 3}
    found = calibrant.evaluate(as_npz(tmp_path, arrays), **options)
    expected = calibrant.evaluate(arrays["logits"], arrays["labels"], **options)
    assert list(found) == ["mce", "ece"]
    assert found.bins.count.size == 7
    assert_same(found, expected)


# Executors and progress.


@pytest.mark.slow
def test_process_pool(tmp_path, process_pool):
    arrays = predictions()
    path = as_npz_folder(tmp_path, arrays)
    columns: dict[str, Any] = {"sample_weight": "importance", "by": "region"}
    options: dict[str, Any] = {"metrics": ["ece", "auroc"], "level": None}
    with use(executor=process_pool):
        found = calibrant.evaluate(path, **columns, **options)
    data = calibrant.open_dataset(path)
    faulty = {key: np.copy(values) for key, values in arrays.items()}
    faulty["logits"][-1, 0] = np.nan
    faulty["labels"][-1] = 1
    np.savez(path / "part3.npz", **cut(faulty, 250)[-1])
    with pytest.raises(ValueError, match=r"part3\.npz: .*NaN"), use(executor=process_pool):
        calibrant.evaluate(path)
    with (
        pytest.raises(ValueError, match=r"part3\.npz was .*; run again when it is complete"),
        use(executor=process_pool),
    ):
        calibrant.evaluate(data)  # opened before
    assert_same(found, calibrant.evaluate(arrays, **columns, **options))


def test_zeros_are_counted_over_an_executor(tmp_path):
    path = as_npz_folder(tmp_path, {"probs": np.eye(3)[np.arange(300) % 3], "labels": [0] * 300})
    with (
        ThreadPoolExecutor(2) as pool,
        pytest.warns(UserWarning, match="^200 labels"),
        use(executor=pool),
    ):
        calibrant.evaluate(path, metrics=["nll"], level=None)


# Memory.


# Pages of a mapped file count as resident too, but the system takes them back when it needs them.
PEAK = """
import sys
import textwrap
import calibrant
import torch
torch.set_num_threads(1)  # each has chunks of its own
folder, held = sys.argv[1], []
def note(done, total):
    with open("/proc/self/status") as status:
        held.append(next(int(line.split()[1]) for line in status if line.startswith("RssAnon")))
for name in ("small", "large"):
    with calibrant.use(progress=note):
        calibrant.evaluate(f"{folder}/{name}_logits.npy", level=None)
print(1024 * (max(held) - held[0]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_memory_stays_far_below_the_size_of_the_file(tmp_path):
    rows, classes = 150_000, 1000
    for name, count in (("small", 10), ("large", rows)):
        path = tmp_path / f"{name}_logits.npy"
        logits = np.lib.format.open_memmap(path, "w+", np.float16, (count, classes))
        logits[:, 0] = 9
        np.save(tmp_path / f"{name}_labels.npy", np.arange(count) % 2)
    assert logits.nbytes == 300_000_000
    # memory that is freed goes back at once, so that what is in use is measured
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**17)}
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < logits.nbytes / 12


def test_subgroups_found_in_one_half_are_measured_in_the_other(rng, tmp_path):
    folder = tmp_path / "shards"
    site, probs = rng.choice(["A", "B"], 4000), rng.uniform(0.01, 0.99, 4000)
    labels = (rng.uniform(size=4000) < np.where(site == "B", probs / 2, probs)).astype(int)
    data = {"probs": probs, "labels": labels, "site": site}
    found = calibrant.evaluate(data, by="auto", metrics=["accuracy"], seed=3).by["site = B"]
    other = (site == "B") & Sample(0.5, 3, 0.5).keeps(0, 4000)
    assert found.n == other.sum()
    right = (probs[other] > 0.5) == labels[other]
    assert found["accuracy"].value == pytest.approx(right.mean())
    folder.mkdir()
    for i, rows in enumerate(np.array_split(np.argsort(site)[::-1], 3)):  # the last has no B
        np.savez(folder / f"{i}.npz", **{key: values[rows] for key, values in data.items()})
    shards = calibrant.evaluate(folder, by="auto", metrics=["accuracy"]).by
    assert sum(part.n for part in shards.values()) > 0
    kept = [np.load(folder / f"{i}.npz") for i in range(3)]
    joined = {key: np.concatenate([one[key] for one in kept]) for key in data}
    whole = calibrant.evaluate(joined, by="auto", metrics=["accuracy"]).by
    assert {name: part.n for name, part in shards.items()} == {n: p.n for n, p in whole.items()}
    named = calibrant.evaluate({**data, "auto": site}, by="auto", metrics=["accuracy"]).by
    assert set(named) == {"A", "B"}  # a column of that name


# Errors.


def faulty(folder, **changes):
    """Four shards, the last of which has one wrong value at its end."""
    arrays = predictions()
    arrays["labels"][-1] = 1
    for key, value in changes.items():
        arrays[key][-1] = value
    return as_npz_folder(folder, arrays)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": np.nan}, "logits must be finite.*NaN"),
        ({"logits": np.inf}, r"logits must be finite.*\+inf"),
        ({"logits": -np.inf}, "logits must be finite.*-inf in every class"),
        ({"labels": 5}, r"labels must be in \[0, 5\).*got 5"),
        ({"importance": np.nan}, r"sample_weight must be 0 \(leaves out\) or in .*got nan"),
        ({"importance": -1}, r"sample_weight must be 0 \(leaves out\) or in .*got -1\.0"),
    ],
)
def test_fault_in_the_last_shard_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=rf"part3\.npz: {message}"):
        calibrant.evaluate(faulty(tmp_path, **changes), sample_weight="importance")


def test_fault_in_a_later_block_is_counted_from_its_first_row(tmp_path, monkeypatch):
    monkeypatch.setattr("calibrant.data.dataset.CHUNK", 5 * 100)  # a hundred rows of five classes
    arrays = predictions()
    arrays["logits"][342] = np.nan
    arrays["labels"][342] = 1
    message = r"predictions\.npz, counting from row 300: logits must be finite.* row 42 has NaN"
    np.savez(tmp_path / "predictions.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        calibrant.evaluate(tmp_path / "predictions.npz")


def test_fault_among_probabilities_is_named(tmp_path):
    np.savez(tmp_path / "p.npz", probs=[[0.5, 0.4]], labels=[0])
    with pytest.raises(ValueError, match=r"probs must sum to one.*0\.9 at row 0"):
        calibrant.evaluate(tmp_path / "p.npz")


@pytest.mark.parametrize("column", ["sample_weight", "by"])
def test_missing_column_lists_what_was_found(tmp_path, column):
    path = as_npz(tmp_path, predictions())
    asked: dict[str, Any] = {column: "age"}
    with pytest.raises(ValueError, match="no age in this split; found logits, labels, importance"):
        calibrant.evaluate(path, **asked)


@pytest.mark.parametrize(
    "labels", [np.full(6, -100), np.zeros(0, int)], ids=["all ignored", "empty"]
)
def test_nothing_to_measure(tmp_path, labels):
    np.savez(tmp_path / "p.npz", logits=np.zeros((len(labels), 3)), labels=labels)
    with pytest.raises(ValueError, match="nothing to measure"):
        calibrant.evaluate(tmp_path / "p.npz")


LIMITED = """
    import resource, sys, warnings
    import numpy as np
    import calibrant

    warnings.simplefilter("ignore")
    calibrant.evaluate(np.eye(3), np.arange(3))  # imports
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]),) * 2)
    print(calibrant.evaluate(sys.argv[1])["accuracy"].value)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory as Linux does")
def test_memory_is_in_proportion_to_the_numbers_of_a_file(tmp_path):
    """A small file of a great many classes takes a few times the memory of its logits."""
    logits = np.zeros((1, 10_000_000), np.float32)
    np.savez_compressed(tmp_path / "wide.npz", logits=logits, labels=[0])
    assert (tmp_path / "wide.npz").stat().st_size < 100_000
    done = run_script(LIMITED, tmp_path / "wide.npz", 10 * logits.nbytes)
    assert (done.stdout, done.returncode) == ("1.0\n", 0), done.stderr[-500:]


def test_too_many_classes_for_class_wise_errors():
    logits = np.zeros((1, 600_000), np.float32)
    with pytest.warns(UserWarning, match="classwise_ece is left out: 600,000 classes are too many"):
        found = calibrant.evaluate(logits, [0])
    assert np.isnan(found["classwise_ece"].value)
    for measure in (
        lambda: calibrant.evaluate(logits, [0], metrics=["classwise_ece"]),
        lambda: calibrant.classwise_ece(logits, [0]),
    ):
        with pytest.raises(ValueError, match="classwise_ece takes at most 559,240 classes with 15"):
            measure()
    assert calibrant.classwise_ece(logits, [0], bins=10) >= 0


def test_names_of_splits_and_columns_are_not_for_arrays():
    logits, labels = np.eye(3), np.arange(3)
    with pytest.raises(ValueError, match="arrays have no splits, got split='val'"):
        calibrant.evaluate(logits, labels, split="val")
    with pytest.raises(TypeError, match="arrays have no columns, got by='country'"):
        calibrant.evaluate(logits, labels, by="country")
    with pytest.raises(TypeError, match="arrays have no columns, got sample_weight='w'"):
        calibrant.evaluate(logits, labels, sample_weight="w")
    with pytest.raises(ValueError, match="bins must be at most 100,000, got 100001"):
        calibrant.evaluate(logits, labels, bins=100_001)


def test_subgroups_of_numbers_have_one_name_in_shards_of_other_types(tmp_path, rng):
    """A table that lacks a number has floats; texts with a point and halves stay as they are."""
    logits, labels = rng.normal(size=(90, 3)), rng.integers(3, size=90)
    site = np.arange(90) % 3
    for i, kind in enumerate((int, float, str)):
        rows = slice(30 * i, 30 * i + 30)
        shard = {"logits": logits[rows], "labels": labels[rows], "site": site[rows].astype(kind)}
        save_predictions(tmp_path / f"{i}.npz", shard)
    by = calibrant.evaluate(tmp_path, by="site", level=None).by
    assert {name: group.n for name, group in by.items()} == {"0": 30, "1": 30, "2": 30}
    by = calibrant.evaluate(logits, labels, by=site / 2, level=None).by
    assert {name: group.n for name, group in by.items()} == {"0": 30, "0.5": 30, "1": 30}
    by = calibrant.evaluate(logits, labels, by=(site / 2).astype(str), level=None).by
    assert set(by) == {"0.0", "0.5", "1.0"}
