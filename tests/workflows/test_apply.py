"""Calibrated files: what is written is what the module gives for the arrays."""

import os
import time
import warnings
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax

import calibrant
from calibrant import use
from calibrant._core.atomic_files import STALE_SECONDS
from calibrant._core.checks import IGNORED
from calibrant.calibrators.scaling import Identity, TemperatureScaling
from calibrant.data import open_dataset, save_predictions
from calibrant.decide import DecisionRule
from calibrant.workflows.apply import apply
from calibrant.workflows.effect import effect
from calibrant.workflows.fit import fit
from tests.support.calibrators import Featured
from tests.support.prediction_files import arrays_in
from tests.support.predictions import (
    FORMS,
    as_npz,
    as_npz_folder,
    cut,
    needs_pyarrow,
    out_of,
    predictions,
    splits,
)


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
    return arrays_in(path)


def test_what_killed_runs_left_is_removed_when_it_is_old(tmp_path, halved):
    """A file of save_predictions, and a folder of apply; a folder that is written to is kept."""
    path, out = as_npz(tmp_path, predictions(rows=40)), tmp_path / "out.npz"
    left, old, busy = (tmp_path / f".out.npz.{digit * 32}" for digit in "012")
    left.write_bytes(b"part")
    for folder in (old, busy):
        folder.mkdir()
        (folder / "0.npy").write_bytes(b"part")
    long_ago = time.time() - STALE_SECONDS - 10
    for place in (left, old / "0.npy", old, busy):
        os.utime(place, (long_ago, long_ago))
    apply(halved, path, out)
    assert sorted(os.listdir(tmp_path)) == [busy.name, "out.npz", "p.npz"]


@pytest.mark.usefixtures("small_chunks", "no_whole_logits")
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
    with use(progress=lambda *step: steps.append(step)):
        apply(halved, path, out)
    found = stored(out)
    assert list(found) == list(arrays)
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


@pytest.mark.parametrize("write", FORMS)
@pytest.mark.usefixtures("small_chunks")
def test_shards_of_any_format_become_one_file(tmp_path, write, halved):
    arrays = {key: predictions()[key] for key in ("logits", "labels", "importance")}
    out = tmp_path / "out.safetensors"
    apply(halved, write(tmp_path, arrays), out)
    found = open_dataset(out).split()
    np.testing.assert_allclose(found.read("logits"), out_of(halved, arrays["logits"]), rtol=1e-6)
    for key in ("labels", "importance"):
        np.testing.assert_array_equal(found.read(key), arrays[key])


@needs_pyarrow
def test_parquet_out(tmp_path, halved):
    arrays = predictions()
    apply(halved, as_npz(tmp_path, arrays), tmp_path / "out.parquet")
    found = open_dataset(tmp_path / "out.parquet").split()
    np.testing.assert_allclose(found.read("logits"), out_of(halved, arrays["logits"]), rtol=1e-6)
    np.testing.assert_array_equal(found.read("region"), arrays["region"])


def test_predicted_class_survives_rounding(tmp_path, rng):
    """Logits that float32 cannot tell apart keep their order in the file."""
    logits = np.zeros((500, 3)) + 1e-13 * rng.permuted(np.tile(np.arange(3), (500, 1)), axis=1)
    np.savez(tmp_path / "p.npz", logits=logits + 5)
    hot = TemperatureScaling()
    hot._store(temperature_=20.0)
    hot._set_classes(3)
    apply(hot, tmp_path / "p.npz", tmp_path / "out.npz")
    after = stored(tmp_path / "out.npz")["logits"]
    np.testing.assert_array_equal(after.argmax(1), (logits + 5).argmax(1))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("dtype", "wanted"), [("float16", "float32"), ("float32", "float32"), ("float64", "float64")]
)
def test_probabilities_stay_probabilities(tmp_path, halved, dtype, wanted):
    exact = np.exp(predictions()["logits"].astype(float))
    probs = (exact / exact.sum(1, keepdims=True)).astype(dtype)
    np.savez(tmp_path / "p.npz", test_probs=probs, test_labels=predictions()["labels"])
    apply(halved, tmp_path / "p.npz", tmp_path / "out.npz")
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
    apply(halved, tmp_path / "p.npz", tmp_path / "out.npz")
    found = stored(tmp_path / "out.npz")["probs"]
    np.testing.assert_allclose(found, [3 / 4, 1 / 3])  # the odds 9 and 1/4 become 3 and 1/2
    np.savez(tmp_path / "p.npz", logits=[3.0, -1.0])
    apply(halved, tmp_path / "p.npz", tmp_path / "out.npz")
    np.testing.assert_allclose(stored(tmp_path / "out.npz")["logits"], [1.5, -0.5])


@pytest.fixture(scope="module")
def votes():
    """Shares of ten votes for three classes, of which many have none, and their labels."""
    rng = np.random.default_rng(5)
    truth = rng.dirichlet(np.full(3, 0.5), 700)
    labels = np.array([rng.choice(3, p=p) for p in 0.8 * truth + 0.2 / 3])
    return np.array([rng.multinomial(10, p) for p in truth]) / 10, labels


@pytest.fixture(scope="module")
def judged(votes):
    """Temperature scaling of the first votes, and what it makes of the others, by definition."""
    probs, labels = votes
    with pytest.warns(UserWarning, match="of 1,500 probabilities are 0 .* they count as 0.05"):
        found = fit({"probs": probs[:500], "labels": labels[:500]}, method="ts")
    logs = np.log(np.maximum(probs, 0.05))  # half a vote

    def loss(u):
        return -log_softmax(logs[:500] / np.exp(u), -1)[np.arange(500), labels[:500]].mean()

    temperature = np.exp(minimize_scalar(loss, bounds=(-2, 2), method="bounded").x)
    return found, softmax(logs[500:] / temperature, -1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_zeros_count_as_in_the_fit_wherever_it_is_applied(tmp_path, votes, judged, dtype):
    probs, (calibrator, expected) = votes[0][500:].astype(dtype), judged
    calibrant.save(calibrator, tmp_path / "saved")
    again = calibrant.load(tmp_path / "saved")
    with np.errstate(divide="ignore"):
        logs = np.log(probs)
    found = {
        "a batch": calibrator.predict_proba(logs),
        "a row": np.concatenate([again.predict_proba(row[None]) for row in logs[:20]]),
    }
    np.savez(tmp_path / "p.npz", probs=probs, labels=votes[1][500:])
    apply(again, tmp_path / "p.npz", tmp_path / "out.npz")
    found["a file"] = stored(tmp_path / "out.npz")["probs"]
    for name, values in found.items():
        np.testing.assert_allclose(values, expected[: len(values)], atol=1e-4, err_msg=name)
    sure = expected.max(-1)
    rule = DecisionRule(
        calibrant.conformal(probs=expected, labels=votes[1][500:], coverage=0.9), 3, again
    )
    np.testing.assert_allclose(rule.decide(probs=probs)["confidence"], sure, atol=1e-4)
    watch = calibrant.Monitor(again).update(probs=probs, labels=votes[1][500:])
    (window,) = watch.windows.values()
    assert window.claimed.sum() == pytest.approx(sure.sum(), abs=0.02)
    (later,) = calibrant.Monitor(again).update_file(tmp_path / "p.npz").windows.values()
    assert later.claimed.sum() == pytest.approx(sure.sum(), abs=0.02)


def test_a_fit_on_float32_is_that_on_float64(votes, judged):
    probs, labels = votes
    with pytest.warns(UserWarning, match="they count as 0.05"):
        found = fit({"probs": probs[:500].astype(np.float32), "labels": labels[:500]}, method="ts")
    assert float(found.temperature_) == pytest.approx(float(judged[0].temperature_), rel=1e-5)
    assert float(found.floor_) == pytest.approx(0.05)


def test_the_floor_is_that_of_labelled_rows_over_all_shards(tmp_path, votes):
    probs, labels = votes[0][:500].copy(), votes[1][:500].copy()
    probs[7], labels[7] = [0.999, 0.001, 0], IGNORED
    path = as_npz_folder(tmp_path, {"probs": probs, "labels": labels})
    for method in ("ts", "vector"):  # from records, and from arrays
        with pytest.warns(UserWarning, match="they count as 0.05"):
            found = fit(path, method=method)
        assert float(found.floor_) == pytest.approx(0.05)


def test_probabilities_before_calibration_are_those_stated(votes, judged):
    probs, labels = np.round(votes[0][500:]), votes[1][500:]
    probs = np.where(probs.sum(1, keepdims=True) == 1, probs, [1.0, 0.0, 0.0])
    options: dict[str, Any] = {"level": None, "metrics": ["ece", "nll"]}
    with pytest.warns(UserWarning, match="labels have a probability of 0"):
        found = effect(judged[0], {"probs": probs, "labels": labels}, **options)
    own = np.maximum(probs[np.arange(200), labels], np.exp(-100))
    assert found.before["nll"].value == pytest.approx(-np.log(own).mean())
    wrong = (probs.argmax(-1) != labels).mean()
    assert found.before["ece"].value == pytest.approx(wrong)


def test_one_column_as_a_matrix_is_told_apart(tmp_path):
    halved = TemperatureScaling()
    halved._set_classes(1)
    for name in ("probs", "logits"):
        with pytest.raises(ValueError, match=r"scores \(n, 1\), .* takes \(n,\): .* squeeze"):
            apply(halved, {name: np.array([[0.9], [0.2]])}, tmp_path / "out.npz")


@pytest.mark.usefixtures("small_chunks")
def test_apply_with_features(tmp_path, rng):
    arrays = predictions() | {"features": rng.normal(size=(600, 3)).astype(np.float32)}
    path = as_npz_folder(tmp_path, arrays)
    fitted = fit(path, method=Featured())
    apply(fitted, path, tmp_path / "out.npz")
    found = stored(tmp_path / "out.npz")
    expected = out_of(fitted, arrays["logits"], arrays["features"])
    np.testing.assert_allclose(found["logits"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found["features"], arrays["features"])
    np.savez(tmp_path / "p.npz", logits=arrays["logits"])
    with pytest.raises(ValueError, match=r"Featured needs features: .* has no features"):
        apply(fitted, tmp_path / "p.npz", tmp_path / "new.npz")


def test_what_cannot_be_copied_is_named(tmp_path, halved):
    first, second = cut(predictions(rows=20), 8)
    del second["region"]
    folder = tmp_path / "shards"
    folder.mkdir()
    np.savez(folder / "0.npz", **first, notes=np.array([{}] * 8))
    np.savez(folder / "1.npz", **second, notes=np.array([{}] * 12))
    with pytest.warns(
        UserWarning, match=r"^left out: region \(shards differ\), notes \(Python objects\)$"
    ):
        apply(halved, folder, tmp_path / "out.npz")
    assert list(stored(tmp_path / "out.npz")) == ["logits", "labels", "importance", "site"]


BESIDE: dict[str, Any] = {
    "epoch": np.array(7),
    "model": np.array(["resnet", "50\0x"]),
    "ratio": np.array([np.nan, -0.0, 1e-40], np.float32),
    "times": np.array(["2026-01-02T03:04:05.678901234"] * 3, "datetime64[ns]"),
    "raw": np.array([b"a\0b", b"c"]),
    "matrix": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "nothing": np.zeros((0, 3), np.int8),
}


@pytest.mark.parametrize("write", ["file", "npy", "shards"])
def test_arrays_that_are_not_per_row_are_kept(tmp_path, write, halved):
    """Those of shards are kept once, since they are the same in all of them."""
    folder = tmp_path / "in"
    folder.mkdir()
    arrays = predictions()
    for i, shard in enumerate(cut(arrays, 200) if write == "shards" else [arrays]):
        if write == "npy":
            for key, values in (shard | BESIDE).items():
                np.save(folder / f"{key}.npy", values)
        else:
            np.savez(folder / f"{i}.npz", **shard, **BESIDE)
    apply(halved, folder, tmp_path / "out.npz")
    found = stored(tmp_path / "out.npz")
    assert set(found) == {*predictions(), *BESIDE}
    for key, values in BESIDE.items():
        assert (found[key].dtype, found[key].shape) == (values.dtype, values.shape)
        assert found[key].tobytes() == values.tobytes()


def test_single_values_of_safetensors_are_kept(tmp_path, halved):
    arrays = {"logits": np.zeros((3, 5)), "epoch": np.array(7), "half": np.array(0.5, np.float16)}
    save_predictions(tmp_path / "p.safetensors", arrays)
    apply(halved, tmp_path / "p.safetensors", tmp_path / "out.npz")
    found = stored(tmp_path / "out.npz")
    assert (found["epoch"], found["epoch"].dtype, found["epoch"].shape) == (7, np.int64, ())
    assert (found["half"], found["half"].dtype) == (0.5, np.float16)


def test_what_shards_do_not_agree_on_is_named(tmp_path, halved):
    folder = tmp_path / "shards"
    folder.mkdir()
    for i in range(2):
        beside: dict[str, Any] = {
            "epoch": np.array(i),
            "note": np.array(list("abcd" + "ef"[i])),
        }
        np.savez(folder / f"{i}.npz", logits=np.zeros((3 + i, 5)), seed=np.array(1), **beside)
    message = r"^left out: note \(shards differ\), epoch \(shards differ\)$"
    with pytest.warns(UserWarning, match=message):
        apply(halved, folder, tmp_path / "out.npz")
    assert list(stored(tmp_path / "out.npz")) == ["logits", "seed"]


def unusual_table(rows, seed=0):
    """Columns of types that no array has, or with values that no array holds."""
    import pyarrow as pa

    logits = np.random.default_rng(seed).normal(size=(rows, 5))
    moments = [datetime(2026, 1, 2, 3, 4, 5, i, timezone.utc) for i in range(rows)]
    columns = {
        "labels": pa.array([*range(rows - 1), None], pa.int16()),
        "when": pa.array(moments, pa.timestamp("us", "Europe/Berlin")),
        "day": pa.array([m.date() for m in moments], pa.date32()),
        "price": pa.array([Decimal("0.10")] * rows, pa.decimal128(5, 2)),
        "place": pa.array([{"x": 1, "y": None}] * rows, pa.struct({"x": "i4", "y": "f8"})),
        "name": pa.array(["a\0b", "c\0"] * (rows // 2), pa.string()),
        "large": pa.array([None] + ["é"] * (rows - 1), pa.large_string()),
        "kind": pa.array(["x", "y"] * (rows // 2)).dictionary_encode(),
        "ragged": pa.array([list(range(i)) for i in range(rows)], pa.list_(pa.int8())),
        "words": pa.array([["a"], []] * (rows // 2), pa.list_(pa.string())),
        "bytes": pa.array([b"\x00\xff", None] * (rows // 2), pa.binary()),
        "uuid": pa.array([b"0123"] * rows, pa.binary(4)),
        "empty": pa.nulls(rows),
        "pairs": pa.array([[("k", 1)]] * rows, pa.map_(pa.string(), pa.int32())),
        "half": pa.array(np.ones(rows, np.float16)),
        "yes": pa.array([True, None] * (rows // 2)),
        "plain": pa.array(range(rows), pa.uint64()),
    }
    lists = pa.FixedSizeListArray.from_arrays(pa.array(logits.reshape(-1)), 5)
    return pa.table({"logits": lists, **columns})


@needs_pyarrow
@pytest.mark.parametrize("shards", [1, 2])
def test_parquet_columns_of_every_type_are_kept(tmp_path, halved, shards):
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path / "shards"
    folder.mkdir()
    tables = [unusual_table(8 + 2 * i, seed=i) for i in range(shards)]
    for i, table in enumerate(tables):
        pq.write_table(table, folder / f"{i}.parquet", row_group_size=3)
    apply(halved, folder, tmp_path / "out.parquet")
    whole = pa.concat_tables(tables)
    found = pq.read_table(tmp_path / "out.parquet")
    assert found.column_names == whole.column_names
    for name in set(whole.column_names) - {"logits"}:
        assert found.column(name).type == whole.column(name).type
        assert found.column(name).to_pylist() == whole.column(name).to_pylist()
    before = np.array(whole.column("logits").to_pylist())
    expected = (before - before.max(1, keepdims=True)) / 2
    after = np.array(found.column("logits").to_pylist())
    np.testing.assert_allclose(after, expected, rtol=1e-6)


@needs_pyarrow
def test_parquet_columns_that_are_no_arrays_are_named(tmp_path, halved):
    import pyarrow.parquet as pq

    table = unusual_table(8)
    pq.write_table(table, tmp_path / "p.parquet")
    with pytest.warns(UserWarning, match="^left out: labels") as caught:
        apply(halved, tmp_path / "p.parquet", tmp_path / "out.npz")
    found = stored(tmp_path / "out.npz")
    assert set(found) == {"logits", "kind", "half", "plain", "large"}
    for name in set(table.column_names) - set(found):
        assert f"{name} (" in str(caught[0].message)
    assert found["plain"].dtype == np.uint64
    assert found["kind"].tolist() == ["x", "y"] * 4
    assert found["large"].tolist() == [text or "" for text in table.column("large").to_pylist()]


def test_a_damaged_column_is_an_error_and_not_left_out(tmp_path, halved):
    np.savez(tmp_path / "p.npz", logits=np.zeros((50, 5)), site=np.arange(50))
    content = bytearray((tmp_path / "p.npz").read_bytes())
    content[content.rindex(np.int64(20).tobytes() + np.int64(21).tobytes())] ^= 1
    (tmp_path / "p.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"p\.npz is damaged"):
        apply(halved, tmp_path / "p.npz", tmp_path / "out.npz")
    assert not (tmp_path / "out.npz").exists()


@needs_pyarrow
def test_text_with_nul_goes_into_a_parquet_file_whole(tmp_path):
    arrays = {"text": np.array(["a\0b", "c"]), "raw": np.array([b"\0a", b"b"])}
    save_predictions(tmp_path / "p.parquet", {"logits": np.zeros((2, 3)), **arrays})
    import pyarrow.parquet as pq

    found = pq.read_table(tmp_path / "p.parquet").to_pydict()
    assert found["text"] == ["a\0b", "c"]
    assert found["raw"] == [b"\0a", b"b"]
    with pytest.raises(ValueError, match=r"\.parquet cannot hold z, which is complex128"):
        save_predictions(tmp_path / "z.parquet", {"z": np.zeros(2, complex)})


def test_stale_probabilities_are_not_kept(tmp_path, halved):
    np.savez(tmp_path / "p.npz", logits=np.zeros((2, 5)), probs=np.full((2, 5), 0.2))
    apply(halved, tmp_path / "p.npz", tmp_path / "out.npz")
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
        apply(halved, given, out)
    assert (tmp_path / "p.npz").read_bytes() == before
    assert not os.path.exists("shards/new.npz")


def bad_input(folder, halved, name):
    """Arguments of apply that cannot work, and the message."""
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
        "suffix": ((halved, good, "out.xlsx"), r"out\.xlsx: the suffix must be one of \.npz"),
        "npy": ((halved, good, "out.npy"), r"out\.npy: the suffix must be one of \.npz"),
        "folder": ((halved, good, "gone/out.npz"), "folder .*gone does not exist"),
    }[name]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    "name", ["nan", "classes", "one logit", "no scores", "suffix", "npy", "folder"]
)
def test_nothing_is_written_when_apply_fails(tmp_path, halved, name):
    (calibrator, path, out), message = bad_input(tmp_path, halved, name)
    (tmp_path / "out.npz").write_text("old")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        apply(calibrator, path, tmp_path / out)
    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "out.npz").read_text() == "old"


def test_unfitted_calibrator_is_refused(tmp_path):
    path = as_npz(tmp_path, predictions())
    with pytest.raises(RuntimeError, match="not fitted"):
        apply(TemperatureScaling(), path, tmp_path / "out.npz")


def test_applied_file_measures_as_the_calibrated_arrays(tmp_path):
    arrays = predictions()
    path = as_npz(tmp_path, arrays)
    apply(fit(path, method="ts"), path, tmp_path / "out.npz")
    found = calibrant.evaluate(tmp_path / "out.npz", level=None)
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
        apply(halved, folder, tmp_path / "out.npz")
    assert open_dataset(tmp_path / "out.npz").splits == ["test", "val"]
