"""Any number, order and size of shards gives the figures of one array; bad shards are left out."""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import calibrant
from calibrant import use
from calibrant._core import engines
from calibrant.data import Dataset
from calibrant.data.shards import array_column
from calibrant.show.report import report
from calibrant.workflows.compare import compare
from calibrant.workflows.effect import effect
from calibrant.workflows.fit import cross_fit, fit, fit_and_measure
from calibrant.workflows.large import describe_skipped, open_good_shards
from tests.support.predictions import cut, needs_pyarrow, predictions

ARRAYS = predictions(rows=90, classes=3)
COLUMNS: dict[str, Any] = {"sample_weight": "importance"}


@pytest.fixture(scope="module", params=["here", "threads"])
def executor(request):
    if request.param == "here":
        yield None
        return
    with ThreadPoolExecutor(2) as pool:
        yield pool


def sharded(shards):
    """A dataset in memory whose files are ``shards``."""
    return Dataset(
        "shards",
        [
            {key: array_column(key, values, f"shard{i}") for key, values in shard.items()}
            for i, shard in enumerate(shards)
        ],
    )


@st.composite
def shardings(draw):
    places = sorted(draw(st.lists(st.integers(0, 90), max_size=6)))
    return sharded(draw(st.permutations(cut(ARRAYS, *places))))


def assert_equal(found, expected):
    assert found.n == expected.n
    assert found.bins.count.tolist() == expected.bins.count.tolist()
    for name in expected:
        np.testing.assert_allclose(found[name].value, expected[name].value, rtol=1e-9, atol=1e-12)


@pytest.fixture(scope="module")
def of_one_array():
    options: dict[str, Any] = {"level": None, **COLUMNS}
    calibrator = fit(ARRAYS, method="ts", **COLUMNS)
    return (
        calibrant.evaluate(ARRAYS, by="region", **options),
        calibrator,
        effect(calibrator, ARRAYS, **options),
    )


@given(shardings())
@settings(max_examples=12)
def test_any_sharding(executor, of_one_array, data):
    whole, calibrator, changed = of_one_array
    with use(executor=executor):
        found = calibrant.evaluate(data, by="region", level=None, **COLUMNS)
        fitted = fit(data, method="ts", **COLUMNS)
        after = effect(calibrator, data, level=None, **COLUMNS)
    assert_equal(found, whole)
    assert found.by.keys() == whole.by.keys()
    for name, part in whole.by.items():
        assert_equal(found.by[name], part)
    np.testing.assert_allclose(fitted.temperature_, calibrator.temperature_, rtol=1e-6)
    assert_equal(after.before, changed.before)
    assert_equal(after.after, changed.after)
    assert after.argmax_changed == changed.argmax_changed
    assert after.temperatures == pytest.approx(changed.temperatures, rel=1e-6)


def test_comparison_and_folds_in_shards(executor):
    data = sharded(cut(ARRAYS, 0, 10, 30))
    options: dict[str, Any] = {"level": None, "seed": 3, **COLUMNS}
    with use(executor=executor):
        found = compare(data, methods=["none", "ts"], **options)
    expected = compare(ARRAYS, methods=["none", "ts"], **options)
    assert (found.n_fit, found.n_test) == (expected.n_fit, expected.n_test)
    for one, other in zip(found.rows, expected.rows, strict=True):
        assert one.argmax_changed == other.argmax_changed
        assert one.evaluation is not None
        assert other.evaluation is not None
        for name, estimate in other.evaluation.items():
            assert one.evaluation[name].value == pytest.approx(
                estimate.value, rel=1e-6, nan_ok=True
            )
    assert found.advice() == expected.advice()
    with use(executor=executor):
        folds = cross_fit(data, method="ts", **options)
    np.testing.assert_allclose(
        folds.effect.after["nll"].value,
        cross_fit(ARRAYS, method="ts", **options).effect.after["nll"].value,
    )
    vector = fit(ARRAYS, method="vector", **COLUMNS)
    changed = [effect(vector, d, level=None, **COLUMNS).argmax_changed for d in (data, ARRAYS)]
    assert changed[0] == changed[1] > 0
    with use(executor=executor):
        measured = fit_and_measure(data, method="ts", **COLUMNS)
    assert_equal(
        measured.effect.after, fit_and_measure(ARRAYS, method="ts", **COLUMNS).effect.after
    )


def test_reports_in_shards(executor):
    data = sharded(cut(ARRAYS, 0, 10, 30))
    options: dict[str, Any] = {"methods": ["none", "ts"], "level": None, **COLUMNS}
    with use(executor=executor):
        (found,) = report(data, **options).subjects
    (expected,) = report(ARRAYS, **options).subjects
    assert_equal(found.evaluation, expected.evaluation)
    assert found.ignored == expected.ignored
    for one, other in zip(found.margins, expected.margins, strict=True):
        assert one.n == other.n
        assert one.accuracy == pytest.approx(other.accuracy, rel=1e-9)
    assert found.remedy is not None
    assert expected.remedy is not None
    assert found.remedy.comparison.advice() == expected.remedy.comparison.advice()


# Shards that cannot be used.


def write_bad_shards(folder):
    """Five good shards, and one of each kind that is bad."""
    good = cut(ARRAYS, 10, 40, 40, 70)
    for i, shard in enumerate(good):
        np.savez(folder / f"a{i}.npz", **shard)
    wide = predictions(rows=10, classes=4)
    np.savez(folder / "classes.npz", **wide)
    np.savez(folder / "float64.npz", **{**good[0], "logits": good[0]["logits"].astype("float64")})
    for name, key, value in (("nan", "logits", np.nan), ("label", "labels", 7)):
        values = good[1][key].copy()
        values[5] = value
        np.savez(folder / f"{name}.npz", **{**good[1], key: values})
    content = (folder / "a1.npz").read_bytes()
    (folder / "cut.npz").write_bytes(content[: len(content) // 2])
    flipped = bytearray(content)
    flipped[200] ^= 255  # within the logits: only the checksum tells
    (folder / "flipped.npz").write_bytes(flipped)
    (folder / "text.npz").write_text("no archive")
    return {"classes", "nan", "label", "cut", "flipped", "text"}


def test_bad_shards_are_listed_and_left_out(tmp_path, executor):
    names = write_bad_shards(tmp_path)
    with use(executor=executor):
        data = open_good_shards(tmp_path)
    assert set(data.skipped) == {str(tmp_path / f"{name}.npz") for name in names}
    assert all(name in message for name, message in data.skipped.items())
    rows = np.r_[:90, :10]
    with use(executor=executor):
        found = calibrant.evaluate(data, level=None)
    expected = calibrant.evaluate(ARRAYS["logits"][rows], ARRAYS["labels"][rows], level=None)
    assert_equal(found, expected)
    lines = list(describe_skipped(data.skipped, len(data.files)))
    assert lines[0] == "skipped 6 bad shards of 12:"
    assert "has logits of shape (10, 4), most shards have logits of shape (rows, 3)" in "".join(
        lines
    )


def test_without_skipping_the_first_bad_shard_is_named(tmp_path):
    write_bad_shards(tmp_path)
    with pytest.raises(ValueError, match=r"cut\.npz is damaged or incomplete"):
        calibrant.evaluate(tmp_path)


def test_nothing_is_left(tmp_path):
    (tmp_path / "a.npz").write_text("no archive")
    with pytest.raises(ValueError, match=r"every shard of .* is bad; the first: .*a\.npz"):
        open_good_shards(tmp_path)
    np.savez(tmp_path / "a.npz", logits=np.full((2, 3), np.nan), labels=[0, 1])
    with pytest.raises(ValueError, match=r"every shard of .* is bad; the first: .*NaN"):
        open_good_shards(tmp_path)


def test_all_shards_are_good(tmp_path):
    np.savez(tmp_path / "a.npz", **ARRAYS)
    data = open_good_shards(tmp_path)
    assert not data.skipped
    assert list(describe_skipped(data.skipped, len(data.files))) == []


@needs_pyarrow
def test_on_the_command_line(tmp_path, run):
    write_bad_shards(tmp_path)
    code, out, err = run("evaluate", tmp_path, "--skip-bad", "--level", "0", "--json")
    assert code == 0
    assert '"n": 93' in out
    assert err.startswith("skipped 6 bad shards of 12:\n")
    for wrong in ("-1", "many"):
        code, _, err = run("evaluate", tmp_path, "--workers", wrong)
        assert code == 2
        assert f"'{wrong}' is neither a number of processes nor an address" in err


def test_reports_keep_single_pairs(monkeypatch):
    """Answers are grouped by predicted class and by margin, which pooled pairs do not have."""
    one = report(ARRAYS, methods=[], level=None).subjects[0]
    monkeypatch.setattr("calibrant.metrics.summary.MOST_PAIRS", 0)
    same = report(ARRAYS, methods=[], level=None).subjects[0]
    assert (same.margins, same.answers, same.coverage) == (one.margins, one.answers, one.coverage)


@needs_pyarrow
def test_monitors_and_reports_of_good_shards(tmp_path, run):
    """Each names what it leaves out, and the figures are those of the other shards."""
    folder, good = tmp_path / "run", tmp_path / "good.npz"
    folder.mkdir()
    write_bad_shards(folder)
    np.savez(good, **{**ARRAYS, "logits": ARRAYS["logits"] + 1})
    (tmp_path / "bad.npz").write_bytes(b"PK")
    files = (folder, tmp_path / "bad.npz", good)
    code, _, err = run("monitor", *files, "--json")
    assert code == 2
    code, out, err = run("monitor", *files, "--skip-bad", "--json", "--reference", folder)
    assert code == 0
    counts = [window["n"] for window in json.loads(out)["windows"]]
    assert counts == [93, (ARRAYS["labels"] >= 0).sum()]
    skipped = json.loads(out)["skipped"]  # the messages by path, six of shards and one of a file
    assert len(skipped) == 7
    assert f"every shard of {tmp_path / 'bad.npz'}" in skipped[str(tmp_path / "bad.npz")]
    assert all(message in err for message in skipped.values())
    assert err.count("skipped 6 bad shards of 12:\n") == 2  # of the reference and of the window
    assert f"skipped {tmp_path / 'bad.npz'}: every shard of" in err
    assert "skipped 1 of 3 files\n" in err
    code, _, err = run("monitor", tmp_path / "bad.npz", "--skip-bad")
    assert code == 2
    assert "is bad; the first: " in err

    target = tmp_path / "report.json"
    code, _, err = run("report", folder, "--skip-bad", "--methods", "", "-o", target)
    assert code == 0
    assert "skipped 6 bad shards of 12:\n" in err
    result = json.loads(target.read_text())
    assert "--skip-bad" in result["provenance"]["command"]
    (found,) = [f for f in result["subjects"][0]["findings"] if f["code"] == "CAL017"]
    assert found["evidence"].startswith("Skipped 6 bad shards of 12: ")
    code, _, err = run("report", folder, good, "--skip-bad", "--methods", "", "-o", target)
    assert code == 0


@pytest.mark.slow
def test_worker_processes_on_the_command_line(tmp_path, run):
    """Figures of all verbs from one other process are those from here."""
    shards, out = tmp_path / "in", tmp_path / "out"
    shards.mkdir()
    for i, shard in enumerate(cut(ARRAYS, 0, 40)):
        np.savez(shards / f"{i}.npz", **shard)
    for verb in (
        ["evaluate", shards, "--level", "0", "--json"],
        ["fit", shards, "--method", "ts", "--json", "-o", tmp_path / "ts"],
        ["monitor", shards, "--json"],
    ):
        results = [run(*verb, *workers) for workers in ([], ["--workers", "1"])]
        assert [code for code, _, _ in results] == [0, 0]
        assert results[0][1] == results[1][1]
        assert re.search(r"90 examples in [\d.]+ s on 1 worker: [\d,]+ examples per", results[1][2])
    code, _, err = run("apply", tmp_path / "ts", shards, "--workers", "1", "-o", out)
    assert code == 0
    assert f"wrote 3 shards in {out}; to measure it:\n  calibrant evaluate {out}\n" in err
    code, _, err = run("apply", tmp_path / "ts", shards, "--workers", "1", "-o", "one.npz")
    assert code == 2
    assert "one.npz must be a folder, which has no suffix" in err


@pytest.fixture
def cluster(monkeypatch):
    """A thread takes the place of a cluster."""

    @contextmanager
    def client(address):
        with ThreadPoolExecutor(1) as pool:
            page = "http://10.0.0.1:8787/status"
            workers = {"workers": ["one"]}
            yield SimpleNamespace(
                pool=pool, dashboard_link=page, scheduler_info=lambda n_workers: workers
            )

    monkeypatch.setattr(engines, "_dask_client", client)
    monkeypatch.setattr(engines, "_ClusterExecutor", lambda client: client.pool)


@needs_pyarrow
@pytest.mark.parametrize(
    "verb",
    [
        ["evaluate", "--level", "0"],
        ["fit", "--method", "ts", "-o", "ts"],
        ["compare", "--methods", "ts", "--level", "0"],
        ["slices"],
    ],
    ids=lambda verb: verb[0],
)
def test_json_names_the_skipped_shards_and_the_summary_leaves_them_out(
    tmp_path, run, monkeypatch, cluster, verb
):
    monkeypatch.chdir(tmp_path)
    os.mkdir("in")
    names = write_bad_shards(Path("in"))
    code, out, err = run(*verb, "in", "--skip-bad", "--workers", "tcp://here", "--json")
    assert code == 0
    skipped = json.loads(out)["skipped"]
    assert set(skipped) == {os.path.join("in", f"{name}.npz") for name in names}
    assert "NaN" in skipped[os.path.join("in", "nan.npz")]
    unit = "1 methods" if verb[0] == "compare" else "100 examples"
    assert re.search(rf"^{unit} in [\d.]+ s on 1 dask worker of tcp://here", err, re.M), err


def test_the_dashboard_is_named(tmp_path, run, cluster):
    np.savez(tmp_path / "a.npz", **ARRAYS)
    code, _, err = run("evaluate", tmp_path / "a.npz", "--workers", "tcp://here", "--level", "0")
    assert code == 0
    first, last = err.splitlines()
    assert first == "dashboard: http://10.0.0.1:8787/status"
    assert re.fullmatch(
        r"90 examples in [\d.]+ s on 1 dask worker of tcp://here: [\d,]+ examples per second", last
    )
