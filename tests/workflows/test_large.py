"""Fits on splits that are too large for memory: tables that are kept, samples, sums over shards."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import calibrant
from calibrant import use
from calibrant.calibrators import logpartition, records
from calibrant.calibrators.records import records_of
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.data import Split, as_dataset, open_dataset
from calibrant.data.shards import Sample, uniform
from calibrant.workflows import large
from calibrant.workflows.compare import compare
from calibrant.workflows.fit import cross_fit, fit, fit_and_measure
from tests.support.predictions import cut, predictions

ARRAYS = predictions(rows=900, classes=3)
WEIGHTS: dict[str, Any] = {"sample_weight": "importance"}


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for i, shard in enumerate(cut(ARRAYS, 0, 300, 310)):
        np.savez(folder / f"{i}.npz", **shard)
    return folder


# Tables that are kept.


@pytest.fixture
def tabulations(monkeypatch):
    """Number of rows of each chunk that is tabulated."""
    calls, tabulate = [], logpartition.tabulate

    def counting(examples):
        calls.append(len(examples.labels))
        return tabulate(examples)

    monkeypatch.setattr(records, "tabulate", counting)
    return calls


def test_tables_are_made_once(tmp_path, shards, tabulations):
    expected = fit(ARRAYS, method="ts", **WEIGHTS)
    del tabulations[:]
    data = open_dataset(shards, cache=tmp_path / "cache")
    for method in ("ts", "ets", "smart"):
        fitted = fit(data, method=method, **WEIGHTS)
        if method == "ts":
            np.testing.assert_array_equal(fitted.temperature_, expected.temperature_)
    assert sorted(tabulations) == [10, 300, 590]
    assert len(list((tmp_path / "cache").iterdir())) == 3
    cross_fit(data, method="ts", level=None, seed=5, **WEIGHTS)
    assert len(tabulations) == 3
    fit(data, method="ts")  # without weights they are others
    assert len(tabulations) == 6


def test_a_changed_shard_is_tabulated_again(tmp_path, shards, tabulations):
    cache = tmp_path / "cache"
    fit(open_dataset(shards, cache=cache), method="ts")
    del tabulations[:]
    other = {**cut(ARRAYS, 300, 310)[1], "logits": np.ones((10, 3))}
    np.savez(shards / "2.npz", **other)
    found: Any = fit(open_dataset(shards, cache=cache), method="ts")
    assert tabulations == [10]
    expected: Any = fit(shards, method="ts")
    np.testing.assert_array_equal(found.temperature_, expected.temperature_)


def test_damaged_tables_are_made_again(tmp_path, shards, tabulations):
    cache = tmp_path / "cache"
    fit(open_dataset(shards, cache=cache), method="ts")
    del tabulations[:]
    first, second, _ = sorted(cache.iterdir(), key=lambda path: path.stat().st_size)
    first.write_bytes(b"")
    second.write_bytes(second.read_bytes()[:-10])
    found: Any = fit(open_dataset(shards, cache=cache), method="ts")
    assert len(tabulations) == 2
    expected: Any = fit(shards, method="ts")
    np.testing.assert_array_equal(found.temperature_, expected.temperature_)


def test_settings_of_the_table_are_part_of_its_name(tmp_path, shards, tabulations, monkeypatch):
    cache = tmp_path / "cache"
    fit(open_dataset(shards, cache=cache), method="ts")
    monkeypatch.setattr(records, "FORMAT", 99)
    fit(open_dataset(shards, cache=cache), method="ts")
    assert len(tabulations) == 6


def test_a_killed_run_keeps_the_tables_that_it_made(tmp_path, shards, tabulations, monkeypatch):
    cache, save = tmp_path / "cache", records._save
    saved: list[Any] = []

    def once(path, shard):
        if saved:
            raise KeyboardInterrupt
        saved.append(path)
        save(path, shard)

    with monkeypatch.context() as patch:
        patch.setattr(records, "_save", once)
        with pytest.raises(KeyboardInterrupt):
            fit(open_dataset(shards, cache=cache), method="ts")
    del tabulations[:]
    fit(open_dataset(shards, cache=cache), method="ts")
    assert sorted(tabulations) == [10, 590]


def test_cache_on_the_command_line(tmp_path, shards, run):
    code, _, _ = run(
        *("fit", shards, "--method", "ts", "--cache", tmp_path / "cache"),
        *("-o", tmp_path / "calibrator"),
    )
    assert code == 0
    assert len(list((tmp_path / "cache").iterdir())) == 3


# Samples.


def test_a_sample_does_not_depend_on_chunks():
    sample = Sample(0.3, seed=4)
    whole = sample.keeps(0, 5000)
    parts = [sample.keeps(a, 50) for a in range(0, 5000, 50)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert abs(whole.mean() - 0.3) < 4 * np.sqrt(0.3 * 0.7 / 5000)
    assert (Sample(0.3, seed=5).keeps(0, 5000) != whole).any()
    rest = Sample(0.7, seed=4, start=0.3).keeps(0, 5000)
    np.testing.assert_array_equal(rest, ~whole)


def test_uniform_numbers():
    values = np.stack([uniform(seed, 0, 20_000) for seed in range(3)])
    assert abs(np.corrcoef(values) - np.eye(3)).max() < 0.03
    assert abs(np.corrcoef(values[0, 1:], values[0, :-1])[0, 1]) < 0.03
    np.testing.assert_allclose(np.histogram(values, 10, (0, 1))[0], 6000, atol=400)


def test_the_table_of_a_sample(shards, monkeypatch):
    monkeypatch.setattr(records, "MAX_EXAMPLES", 450)
    split = open_dataset(shards).split()
    some = records.bounded(split)
    assert some.sample == Sample(0.5)
    found = records_of(some)
    kept = Sample(0.5).keeps(0, 900) & (ARRAYS["labels"] != -100)
    np.testing.assert_array_equal(found.labels, ARRAYS["labels"][kept])
    np.testing.assert_array_equal(some.labels == -100, ~kept)
    message = rf"sample of {kept.sum()} of 900 examples, which costs about 0\.0006 in NLL"
    with pytest.warns(UserWarning, match=message):
        fitted: Any = fit(shards, method="ts")
    expected = TemperatureScaling().fit(ARRAYS["logits"][kept], ARRAYS["labels"][kept])
    np.testing.assert_allclose(fitted.temperature_, expected.temperature_, rtol=1e-6)


def test_tables_of_samples_are_kept_too(tmp_path, shards, tabulations, monkeypatch):
    monkeypatch.setattr(records, "MAX_EXAMPLES", 450)
    data = open_dataset(shards, cache=tmp_path / "cache")
    found = [records_of(records.bounded(data.split(), seed)).labels for seed in (0, 0, 1)]
    assert len(tabulations) == 6
    np.testing.assert_array_equal(found[0], found[1])
    assert len(found[0]) != len(found[2]) or (found[0] != found[2]).any()


@pytest.fixture
def no_large_reads(monkeypatch):
    """Let nobody read more logits at once than a sample has."""
    read = Split.read

    def refusing(self, column):
        assert column != "logits" or self.rows < 500 or self.path == "the arrays"
        return read(self, column)

    monkeypatch.setattr(Split, "read", refusing)


@pytest.fixture
def small(monkeypatch):
    """Half of the logits are too many."""
    monkeypatch.setattr(large, "LARGE", 900 * 3 // 2)


@pytest.mark.usefixtures("small", "no_large_reads")
def test_other_methods_are_fitted_on_a_sample(shards):
    kept = Sample(0.5).keeps(0, 900) & (ARRAYS["labels"] != -100)
    some = {key: values[kept] for key, values in ARRAYS.items()}
    message = rf"random sample of {kept.sum()} of 900 examples"
    with pytest.warns(UserWarning, match=message):
        found: Any = fit(shards, method="isotonic_ovr", **WEIGHTS)
    expected = fit(some, method="isotonic_ovr", **WEIGHTS)
    np.testing.assert_array_equal(
        found.transform(ARRAYS["logits"]), expected.transform(ARRAYS["logits"])
    )


@pytest.mark.usefixtures("small", "no_large_reads")
def test_comparisons_and_folds_use_a_sample(shards):
    kept = Sample(0.5).keeps(0, 900) & (ARRAYS["labels"] != -100)
    np.savez(shards / "test.npz", **predictions(rows=60, classes=3, seed=1))
    for path in shards.glob("[0-9].npz"):
        with np.load(path) as file:
            np.savez(path, **{f"val_{key}": values for key, values in file.items()})
    (shards / "test.npz").rename(shards / "9.npz")
    with np.load(shards / "9.npz") as file:
        np.savez(shards / "9.npz", **{f"test_{key}": values for key, values in file.items()})
    found = compare(shards, methods=["none", "ts", "vector"], level=None)
    assert found.n_fit == kept.sum()
    assert f"{kept.sum()} random examples of val split, seed 0" in found.describe()
    assert all(row.evaluation is not None for row in found.rows)
    with pytest.warns(UserWarning, match=rf"random sample of {kept.sum()} of 900 examples"):
        folds = cross_fit(shards, method="ts", split="val", level=None)
    assert folds.effect.after.n == kept.sum()
    assert folds.split == "val"


@pytest.mark.usefixtures("no_large_reads")
def test_comparisons_and_folds_of_many_rows_hold_a_sample(shards, monkeypatch):
    """Few classes make records and labels outgrow memory long before the logits do."""
    monkeypatch.setattr(records, "MAX_EXAMPLES", 300)
    labelled = ARRAYS["labels"] != -100
    places = uniform(3, 0, 900)[labelled]
    found = compare(shards, methods=["none", "ts"], level=None, seed=3)
    assert found.n_fit == (places < 1 / 3).sum()  # of the half, as many as are allowed
    assert found.n_test == (places >= 0.5).sum()
    assert (
        f"{found.n_fit} random examples of a random half of the unnamed split" in found.describe()
    )
    rest = labelled & (uniform(3, 0, 900) >= 0.5)
    expected = calibrant.evaluate(ARRAYS["logits"][rest], ARRAYS["labels"][rest], level=None)
    assert found["none"].evaluation is not None
    assert found["none"].evaluation["nll"].value == pytest.approx(expected["nll"].value)
    with pytest.warns(UserWarning, match=r"random sample of \d+ of 900 examples"):
        folds = cross_fit(shards, method="ts", level=None, seed=3)
    assert folds.effect.after.n == (places < 1 / 3).sum()


# Sums over shards.


@pytest.mark.usefixtures("no_large_reads")
@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("vector", {}),
        ("matrix", {"off_diagonal": 0.1, "intercept": 0.01}),
        ("dirichlet", {"off_diagonal": 0.1, "intercept": 0.01}),
    ],
)
def test_affine_maps_by_sums_over_shards(shards, method, options, threads, monkeypatch):
    expected: Any = fit(ARRAYS, method=method, options=options, **WEIGHTS)
    monkeypatch.setattr(large, "LARGE", 900 * 3 // 2)
    with ThreadPoolExecutor(2) as pool:
        executor = pool if threads else None
        with use(executor=executor):
            found: Any = fit(shards, method=method, options=options, **WEIGHTS)
    probs = [c.predict_proba(ARRAYS["logits"]) for c in (found, expected)]
    np.testing.assert_allclose(probs[0], probs[1], atol=2e-5)  # the tolerance of the search
    sample = large._in_memory(open_dataset(shards).split())
    start = fit(sample.dataset, method=method, options=options)
    assert np.abs(start.predict_proba(ARRAYS["logits"]) - probs[1]).max() > 1e-3


def test_a_penalty_that_is_chosen_on_the_sample(shards, small):
    found: Any = fit(shards, method="matrix")
    sample: Any = fit(large._in_memory(open_dataset(shards).split()).dataset, method="matrix")
    np.testing.assert_array_equal(found.off_diagonal_, sample.off_diagonal_)
    chosen = {"off_diagonal": None, "intercept": None}
    assert found.config() == {**found.config(), **chosen}
    assert (found.weight_ != sample.weight_).any()


def test_two_classes_and_one_logit(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    odds = 3 * rng.normal(size=800)
    labels = (rng.random(800) < 1 / (1 + np.exp(1 - odds / 2))).astype(int)
    for i in range(2):
        half = slice(400 * i, 400 * i + 400)
        np.savez(tmp_path / f"{i}.npz", logits=odds[half], labels=labels[half])
    methods = ("vector", "sigmoid", "beta")
    expected = [fit({"logits": odds, "labels": labels}, method=method) for method in methods]
    monkeypatch.setattr(large, "LARGE", 400)
    for method, one in zip(methods, expected, strict=True):
        found = fit(tmp_path, method=method)
        assert found.one_logit
        np.testing.assert_allclose(found.transform(odds), one.transform(odds), atol=1e-4)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("method", ["none", "pooled", "tags"])
def test_tags_by_sums_over_shards(tmp_path, method, weighted, monkeypatch):
    rng = np.random.default_rng(1)
    logits = 2 * rng.normal(size=(600, 3)) + [0, 1, -1]
    truth = logits * [0.4, 0.7, 1.2] + [1, 0, -0.5]
    labels = (rng.random(logits.shape) < 1 / (1 + np.exp(-truth))).astype(int)
    labels[::7, 1] = -100
    arrays = {"logits": logits, "labels": labels, "importance": rng.uniform(0.2, 2, 600)}
    for i, shard in enumerate(cut(arrays, 50, 300)):
        np.savez(tmp_path / f"{i}.npz", **shard)
    columns: dict[str, Any] = WEIGHTS if weighted else {}
    options: dict[str, Any] = {"estimand": "multilabel", **columns}
    expected: Any = fit(arrays, method=method, **options)
    monkeypatch.setattr(large, "LARGE", 900)
    found: Any = fit(tmp_path, method=method, **options)
    np.testing.assert_allclose(found.slope_, expected.slope_, rtol=2e-5)
    np.testing.assert_allclose(found.intercept_, expected.intercept_, atol=2e-5)
    if method == "tags":
        np.testing.assert_allclose(found.pool_, expected.pool_, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.spread_, expected.spread_, rtol=1e-3)


def test_rare_tags_and_missing_classes_are_those_of_all_examples(tmp_path, small, monkeypatch):
    labels = ARRAYS["labels"].copy()
    labels[labels == 2] = -100
    last = np.flatnonzero(~Sample(0.5).keeps(0, 900))[0]
    labels[last] = 2
    np.savez(tmp_path / "a.npz", logits=ARRAYS["logits"], labels=labels)
    fit(tmp_path, method="vector")  # the class that the sample lacks is there: no warning
    labels[last] = -100
    np.savez(tmp_path / "a.npz", logits=ARRAYS["logits"], labels=labels)
    with pytest.warns(UserWarning, match="1 of 3 classes have no example"):
        fit(tmp_path, method="vector")


def test_bad_rows_are_named(tmp_path, small):
    logits = ARRAYS["logits"].copy()
    logits[800, 1] = -np.inf
    kept = Sample(0.5).keeps(0, 900)
    at = 800 if not kept[800] else int(np.flatnonzero(~kept & (ARRAYS["labels"] != -100))[-1])
    logits[800], logits[at, 1] = ARRAYS["logits"][800], -np.inf
    np.savez(tmp_path / "a.npz", logits=logits, labels=ARRAYS["labels"])
    with pytest.raises(ValueError, match=r"a\.npz: logits must be finite here, row"):
        fit(tmp_path, method="vector")


def test_no_labels_at_all():
    data = as_dataset({"logits": np.zeros((4, 3)), "labels": np.full(4, -100)})
    with pytest.raises(ValueError, match="nothing to measure"):
        large.ShardPasses(data.split()).sums(lambda examples: [1.0])


def test_memory_does_not_grow_without_pairs(shards):
    found = calibrant.evaluate(shards, metrics=["ece", "nll"], level=None)
    expected = calibrant.evaluate(ARRAYS, metrics=["ece", "nll", "auroc"], level=None)
    assert found["ece"].value == pytest.approx(expected["ece"].value, rel=1e-12)
    assert found["nll"].value == pytest.approx(expected["nll"].value, rel=1e-12)


def test_figures_of_a_large_fit_are_those_of_all_examples(shards, small):
    found = fit_and_measure(shards, method="vector", metrics=["nll"])
    assert found.effect.before.n == (ARRAYS["labels"] != -100).sum()
    data = open_dataset(shards)
    assert replace(data, cache=None) == data
