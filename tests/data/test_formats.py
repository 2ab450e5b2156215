"""Formats: every one reads back the same rows, in order, or says why not."""

import contextlib
import datetime
import os
import sys
import tempfile
import tracemalloc
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from hypothesis.extra import numpy as hnp

import calibrant as cal
from calibrant.data import arrow_files, open_dataset, save_predictions
from tests.support.prediction_files import (
    FORMATS,
    assert_holds,
    largest_file,
    needs_pyarrow,
    predictions,
    write,
)

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow import feather
except ImportError:
    pa = pq = feather = None


@pytest.mark.parametrize("form", FORMATS)
def test_round_trip(tmp_path, form):
    arrays = predictions() | {"features": np.ones((23, 7), np.float16), "group": np.arange(23) % 3}
    split = open_dataset(write(tmp_path, form, arrays)).split(None, ["", "val"])
    assert (split.name, split.rows, split.shape) == ("", 23, (4,))
    assert (split.classes, split.domain) == (4, "logits")
    assert sorted(split.keys) == sorted(arrays)
    assert_holds(split, arrays)


@pytest.mark.parametrize("form", FORMATS)
def test_threads_read_one_file_at_the_same_time(tmp_path, form):
    arrays = {f"column_{i}": np.arange(500) + i for i in range(4)}
    split = open_dataset(write(tmp_path, form, predictions(500) | arrays)).split("")
    with ThreadPoolExecutor(4) as pool:
        for _ in range(25):
            for name, values in zip(arrays, pool.map(split.read, arrays), strict=True):
                np.testing.assert_array_equal(values, arrays[name])


@pytest.mark.parametrize("form", FORMATS)
def test_chunks_are_aligned_and_complete(tmp_path, form):
    arrays = predictions()
    (shard,) = open_dataset(write(tmp_path, form, arrays)).split("").shards
    for rows in (1, 5, 22, 23, 24, 1000):
        chunks = list(shard.chunks(rows, ["labels", "logits"]))
        sizes = [min(rows, 23 - i) for i in range(0, 23, rows)]
        assert [len(labels) for labels, _ in chunks] == sizes
        for column, key in zip(zip(*chunks, strict=True), ("labels", "logits"), strict=True):
            np.testing.assert_array_equal(np.concatenate(column), arrays[key])


@pytest.mark.parametrize("form", FORMATS)
def test_chunks_may_be_changed_without_changing_the_file(tmp_path, form):
    arrays = predictions()
    split = open_dataset(write(tmp_path, form, arrays)).split("")
    for (chunk,) in split.shards[0].chunks(10, ["logits"]):
        chunk += 1
    split.read("logits")[:] = 0
    assert_holds(split, arrays)


NUMBERS = st.sampled_from(["float16", "float32", "float64", "int16", "int64", "uint8", "bool"])


@given(
    form=st.sampled_from(["npy", "npz", "deflated.npz", "safetensors"]),
    values=NUMBERS.flatmap(
        lambda dtype: hnp.arrays(
            dtype, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=9)
        )
    ),
    order=st.sampled_from("CF"),
    rows=st.integers(1, 12),
)
@example(form="npy", values=np.arange(6.0).reshape(3, 2), order="F", rows=2)
@example(form="deflated.npz", values=np.arange(6.0).reshape(3, 2), order="F", rows=2)
def test_chunks_concatenate_to_the_whole(form, values, order, rows):
    with tempfile.TemporaryDirectory() as folder:
        arrays = {"logits": np.asarray(values, order=order)}
        split = open_dataset(write(Path(folder), form, arrays)).split("")
        assert_holds(split, {"logits": values})
        chunks = [chunk for (chunk,) in split.shards[0].chunks(rows, ["logits"])]
        assert [len(chunk) for chunk in chunks[:-1]] == [rows] * (len(chunks) - 1)
        empty = np.empty((0, *values.shape[1:]), values.dtype)
        np.testing.assert_array_equal(np.concatenate([empty, *chunks]), values)


@needs_pyarrow
@given(
    form=st.sampled_from(["parquet", "lists.parquet"]),
    values=NUMBERS.flatmap(
        lambda dtype: hnp.arrays(dtype, st.tuples(st.integers(1, 20), st.integers(1, 5)))
    ),
    rows=st.integers(1, 25),
)
def test_parquet_chunks_concatenate_to_the_whole(form, values, rows):
    with tempfile.TemporaryDirectory() as folder:
        split = open_dataset(write(Path(folder), form, {"logits": values})).split("")
        assert_holds(split, {"logits": values})
        chunks = [chunk for (chunk,) in split.shards[0].chunks(rows, ["logits"])]
        assert [len(chunk) for chunk in chunks[:-1]] == [rows] * (len(chunks) - 1)
        np.testing.assert_array_equal(np.concatenate(chunks), values)


@pytest.mark.parametrize("form", FORMATS)
def test_no_rows(tmp_path, form):
    split = open_dataset(write(tmp_path, form, predictions(rows=0))).split("")
    assert split.rows == 0
    assert list(split.shards[0].chunks(3, ["logits", "labels"])) == []
    assert split.read("labels").shape == (0,)


def test_bfloat16_is_widened(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    logits = torch.randn(7, 3).bfloat16()
    save_file({"logits": logits}, tmp_path / "a.safetensors")
    split = open_dataset(tmp_path / "a.safetensors").split("")
    assert_holds(split, {"logits": logits.float().numpy()})


@pytest.mark.parametrize("form", ["npy", "npz"])
def test_foreign_byte_order_becomes_native(tmp_path, form):
    logits = np.arange(6, dtype=">f4").reshape(3, 2)
    np.savez(tmp_path / "a.npz", logits=logits)
    np.save(tmp_path / "logits.npy", logits)
    split = open_dataset(tmp_path / ("logits.npy" if form == "npy" else "a.npz")).split("")
    ((chunk,),) = split.shards[0].chunks(9, ["logits"])
    for found in (split.read("logits"), chunk):
        assert found.dtype.isnative
        np.testing.assert_array_equal(found, logits)


@pytest.mark.parametrize("form", ["npy", "npz", pytest.param("parquet", marks=needs_pyarrow)])
def test_group_column_of_text(tmp_path, form):
    groups = np.array(["a", "longer", "b", "a", "c"])
    path = write(tmp_path, form, predictions(rows=5) | {"region": groups})
    split = open_dataset(path).split("")
    np.testing.assert_array_equal(split.read("region"), groups)
    chunks = [chunk for (chunk,) in split.shards[0].chunks(2, ["region"])]
    assert [chunk.tolist() for chunk in chunks] == [["a", "longer"], ["b", "a"], ["c"]]


@needs_pyarrow
def test_categories_are_read_as_text(tmp_path):
    region = pa.array(["a", "b", "a"]).dictionary_encode()
    pq.write_table(pa.table({"logits": [[0.0, 1.0]] * 3, "region": region}), tmp_path / "a.parquet")
    split = open_dataset(tmp_path / "a.parquet").split("")
    assert split.read("region").tolist() == ["a", "b", "a"]


def test_compressed_npz_is_streamed(tmp_path):
    logits = np.zeros((400_000, 10), np.float32)  # 16 MB, which shrink to a few kB
    np.savez_compressed(tmp_path / "a.npz", logits=logits)
    (shard,) = open_dataset(tmp_path / "a.npz").split("").shards
    tracemalloc.start()
    try:
        rows = sum(len(chunk) for (chunk,) in shard.chunks(4096, ["logits"]))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rows == len(logits)
    assert peak < logits.nbytes / 5


@needs_pyarrow
def test_parquet_row_group_is_streamed(tmp_path):
    logits = np.random.default_rng(0).normal(size=(800_000, 10)).astype(np.float32)
    save_predictions(tmp_path / "a.parquet", {"logits": logits})
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 1
    (shard,) = open_dataset(tmp_path / "a.parquet").split("").shards
    before = pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() - before for _ in shard.chunks(4096, ["logits"])]
    assert max(held) < logits.nbytes / 5


def test_single_npy_is_mapped_not_loaded(tmp_path):
    np.save(tmp_path / "logits.npy", np.zeros((10, 3)))
    assert isinstance(open_dataset(tmp_path / "logits.npy").split("").read("logits"), np.memmap)


@pytest.mark.parametrize("form", FORMATS)
def test_truncated_file(tmp_path, form):
    path = write(tmp_path, form, predictions(rows=500))
    file = largest_file(path)
    whole = file.read_bytes()
    for kept in (0.0, 0.05, 0.5, 0.99):
        file.write_bytes(whole[: int(kept * len(whole))])
        with pytest.raises(ValueError, match="damaged or incomplete"):
            open_dataset(path)


@given(
    form=st.sampled_from(["npy", "npz", "deflated.npz", "safetensors"]),
    place=st.floats(0, 1, exclude_max=True),
    byte=st.integers(1, 255),
)
@settings(max_examples=150)
def test_flipped_byte_is_an_error_or_other_values(form, place, byte):
    """Never a crash of another kind, whichever library finds the damage."""
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), form, predictions(rows=7))
        file = largest_file(path)
        content = bytearray(file.read_bytes())
        content[int(place * len(content))] ^= byte
        file.write_bytes(content)
        with contextlib.suppress(ValueError):
            split = open_dataset(path).split("")
            for key in split.keys:
                split.read(key)


@pytest.mark.parametrize(
    "text",
    [b"{'descr': ", b"\t1\n  2", b"'", b"[" * 3000, b"0777", b"{'shape': 1 2}"],
)
def test_npy_header_that_is_no_python(tmp_path, text):
    content = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    (tmp_path / "logits.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"logits\.npy is damaged or incomplete"):
        open_dataset(tmp_path)


@pytest.mark.parametrize("dtype", ["|S0", "<U0", "|V0", "<f8"])
@pytest.mark.parametrize("shape", ["(1099511627776,)", "(-1, 3)", "(0, 18446744073709551616)"])
def test_npy_header_with_a_shape_that_no_file_holds(tmp_path, dtype, shape):
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    content = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    (tmp_path / "logits.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"logits\.npy is damaged or incomplete \(logits has"):
        open_dataset(tmp_path)


@needs_pyarrow
def test_parquet_footer_with_other_sizes(tmp_path, monkeypatch):
    arrays = predictions(rows=8)
    path = write(tmp_path, "parquet", arrays)
    reader = arrow_files.ParquetReader(str(path))
    first = next(reader._file.iter_batches(5))
    monkeypatch.setattr(
        reader,
        "_file",
        SimpleNamespace(
            metadata=reader._file.metadata, iter_batches=lambda rows, columns: iter([first])
        ),
    )
    with pytest.raises(ValueError, match=r"is damaged or incomplete \(5 rows of 8\)"):
        list(reader.chunks("logits", 3))
    with pytest.raises(ValueError, match="5 rows of 8"):
        list(reader.batches(["labels"], 3))


@pytest.mark.parametrize("form", ["npz", "deflated.npz"])
@pytest.mark.parametrize("logits", [predictions(rows=20)["logits"], np.full((5000, 4), 1.5, "f4")])
def test_checksum_of_npz_is_compared(tmp_path, form, logits):
    """Also where the damage makes the compressed data longer than the array."""
    path = write(tmp_path, form, {"logits": logits})
    sound = path.read_bytes()
    for place in np.linspace(0, len(sound) - 1, 400).astype(int):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        with contextlib.suppress(ValueError):
            found = open_dataset(path).split("").read("logits")
            # Where nothing was raised, the byte was of no account, such as one of a date.
            np.testing.assert_array_equal(found, logits)


@needs_pyarrow
def test_damaged_parquet_page(tmp_path):
    path = write(tmp_path, "parquet", predictions(rows=5000))
    content = bytearray(path.read_bytes())
    content[4:2000] = bytes(1996)
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged or incomplete"):
        open_dataset(path).split("").read("logits")


@needs_pyarrow
def test_a_flipped_bit_of_a_parquet_file_changes_no_value(tmp_path):
    """Pages are written with checksums, and these are compared."""
    path = tmp_path / "p.parquet"
    logits = predictions(rows=50)["logits"]
    save_predictions(path, {"logits": logits})
    sound = path.read_bytes()
    for place in np.linspace(0, len(sound) - 1, 150).astype(int):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 4]) + sound[place + 1 :])
        with contextlib.suppress(ValueError):
            np.testing.assert_array_equal(open_dataset(path).split("").read("logits"), logits)


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def bombs(mark):
    array = np.empty(3, dtype=object)
    array[:] = [Bomb(mark)] * 3
    return array


def test_bomb_is_live(tmp_path):
    np.save(tmp_path / "a.npy", bombs(tmp_path / "exploded"))
    np.load(tmp_path / "a.npy", allow_pickle=True)
    assert (tmp_path / "exploded").exists()


@pytest.mark.parametrize("form", ["npy", "deflated.npz"])
@pytest.mark.parametrize("key", ["logits", "labels"])
def test_pickles_are_refused_and_never_loaded(tmp_path, form, key):
    arrays = predictions(rows=3) | {key: bombs(tmp_path / "exploded")}
    path = write(tmp_path, form, arrays)
    with pytest.raises(ValueError, match=rf"{key} was saved as a pickle.*save it again"):
        open_dataset(path).split("")
    assert not (tmp_path / "exploded").exists()


@needs_pyarrow
@pytest.mark.parametrize(
    "rows", [[[1.0, 2.0], [1.0]], [[1.0, 2.0, 3.0], [1.0]], [[1.0, 2.0], None]]
)
def test_parquet_lists_of_different_lengths(tmp_path, rows):
    pq.write_table(pa.table({"logits": rows}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="rows of logits must have one length"):
        open_dataset(tmp_path / "a.parquet").split("").read("logits")


@needs_pyarrow
def test_parquet_with_missing_values(tmp_path):
    table = pa.table({"logits": [[1.0, 2.0], [3.0, 4.0]], "labels": [0, None]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(
        ValueError, match="labels has missing values; drop or fill those rows, labels with -100"
    ):
        open_dataset(tmp_path / "a.parquet").split("").read("labels")


@needs_pyarrow
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_metadata_may_be_missing(tmp_path, suffix):
    """Nulls become NaN or empty text, and whole numbers keep their digits."""
    day = datetime.date(2026, 1, 31)
    columns = {
        "prob": pa.array([0.1, 0.2, 0.3]),
        "age": pa.array([31, 2**60 + 1, None]),
        "dose": pa.array([0.5, 1.5, None]),
        "member": pa.array([True, False, None]),
        "site": pa.array(["A", "B", None]).dictionary_encode(),
        "day": pa.array([day, day, None]),
    }
    write = {".parquet": pq.write_table, ".arrow": feather.write_feather}[suffix]
    write(pa.table(columns), tmp_path / f"a{suffix}", **{LARGEST[suffix]: 2})
    split = open_dataset(tmp_path / f"a{suffix}").split("")
    assert split.read("age").tolist() == ["31", str(2**60 + 1), ""]
    np.testing.assert_array_equal(split.read("dose"), [0.5, 1.5, np.nan])
    assert split.read("member").tolist() == ["True", "False", ""]
    assert split.read("site").tolist() == ["A", "B", ""]
    assert split.read("day").tolist() == ["2026-01-31", "2026-01-31", ""]


@needs_pyarrow
def test_arrow_files_of_early_versions_of_the_library(tmp_path, monkeypatch):
    """Their readers cannot count rows."""

    class Early:
        def __init__(self, file):
            self.schema, self.get_batch = file.schema, file.get_batch
            self.num_record_batches = file.num_record_batches

    opened = arrow_files._ArrowTable._opened
    monkeypatch.setattr(arrow_files._ArrowTable, "_opened", lambda *args: Early(opened(*args)))
    arrays = predictions(50)
    feather.write_feather(
        pa.table({"logits": arrays["logits"].tolist(), "labels": arrays["labels"]}),
        tmp_path / "a.arrow",
        chunksize=7,
    )
    split = open_dataset(tmp_path / "a.arrow").split("")
    assert split.rows == 50
    np.testing.assert_array_equal(split.labels, arrays["labels"])


LARGEST = {".parquet": "row_group_size", ".arrow": "chunksize"}


@needs_pyarrow
def test_groups_of_one_number_are_one_group_with_and_without_nulls_in_a_shard(tmp_path):
    for i, site in enumerate(([1, 2, 1, 2], [1, 2, None, 1])):
        table = pa.table({"prob": [0.1, 0.2, 0.8, 0.9], "y": [0, 0, 1, 1], "site": site})
        pq.write_table(table, tmp_path / f"{i}.parquet")
    found = cal.evaluate(tmp_path, by="site", metrics=["accuracy"])
    assert {name: group.n for name, group in found.by.items()} == {"1": 4, "2": 3, "": 1}


COUNTED: dict[str, Any] = {
    **{"prob_a": [0.1, 0.2, 0.3], "prob_b": [0.9, 0.8, 0.7], "y": [0, 1, 0]},
    **{"split": [0, 1, 1], "feature_0": [True, False, True], "sample_weight": [1, 2, 3]},
}


@needs_pyarrow
@pytest.mark.parametrize("column", ["prob_a", "y", "split", "feature_0", "sample_weight"])
def test_what_is_counted_may_not_be_missing(tmp_path, column):
    columns = {**COUNTED, column: [*COUNTED[column][:2], None]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")

    def read_all():
        cal.evaluate(tmp_path / "a.parquet", split="1", sample_weight="sample_weight")
        open_dataset(tmp_path / "a.parquet").split("1").read("features")

    with pytest.raises(ValueError, match=rf"{column} .*missing values"):
        read_all()


@needs_pyarrow
def test_tags_may_not_be_missing(tmp_path):
    columns: dict[str, Any] = {f"prob_{tag}": [0.1, 0.9] for tag in "ab"}
    columns |= {"label_a": [True, False], "label_b": [True, None]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="label_b has missing values"):
        cal.evaluate(tmp_path / "a.parquet", estimand="multilabel")


def test_missing_pyarrow_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    for name in ("pyarrow", "pyarrow.parquet", "pyarrow.compute"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'calibrant\[data\]'"):
        open_dataset(tmp_path / "a.parquet")


def test_unsupported_safetensors_dtype(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    save_file({"logits": torch.zeros(2, 2).to(torch.float8_e4m3fn)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"logits is F8_E4M3; save it again as float32"):
        open_dataset(tmp_path / "a.safetensors")


def test_npy_version_with_a_long_header(tmp_path):
    logits = predictions()["logits"]
    with open(tmp_path / "logits.npy", "wb") as stream:
        np.lib.format.write_array(stream, logits, version=(2, 0))
    assert_holds(open_dataset(tmp_path / "logits.npy").split(""), {"logits": logits})


def test_newer_npy_version(tmp_path):
    fields = np.zeros(3, dtype=[("λ", "f4")])  # the one case that needs version 3
    with pytest.warns(UserWarning, match="3.0"):
        np.save(tmp_path / "logits.npy", fields)
    with pytest.raises(ValueError, match=r"1\.0 and 2\.0 are known, got \(3, 0\)"):
        open_dataset(tmp_path / "logits.npy")


# Writing.


WRITTEN = ["npz", "safetensors", pytest.param("parquet", marks=needs_pyarrow)]


@pytest.mark.parametrize("form", WRITTEN)
def test_kill_before_the_rename_leaves_the_old_file(tmp_path, form, monkeypatch):
    path, old = tmp_path / f"a.{form}", predictions(seed=1)
    save_predictions(path, old)

    def killed(source, target):
        assert Path(source).parent == tmp_path  # a rename across file systems is not atomic
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_predictions(path, predictions(seed=2))
    assert_holds(open_dataset(path).split(""), old)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("form", WRITTEN)
def test_writing_replaces_the_old_file(tmp_path, form):
    path, new = tmp_path / f"a.{form}", predictions(seed=2)
    save_predictions(path, predictions(seed=1))
    save_predictions(str(path), new)
    assert_holds(open_dataset(path).split(""), new)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("form", WRITTEN)
def test_lists_fortran_and_foreign_order_are_written(tmp_path, form):
    path = tmp_path / f"a.{form}"
    logits = np.asfortranarray(np.arange(6.0).reshape(3, 2)).astype(">f8")
    save_predictions(path, {"logits": logits, "labels": [0, 1, 0]})
    split = open_dataset(path).split("")
    np.testing.assert_array_equal(split.read("logits"), logits)
    assert split.read("labels").tolist() == [0, 1, 0]


def test_keys_that_are_arguments_of_savez(tmp_path):
    arrays = {"logits": np.zeros((3, 2)), "file": np.arange(3), "allow_pickle": np.arange(3)}
    save_predictions(tmp_path / "a.npz", arrays)
    with np.load(tmp_path / "a.npz") as loaded:
        assert sorted(loaded) == sorted(arrays)


def test_written_npz_is_plain_numpy(tmp_path):
    arrays = predictions()
    save_predictions(tmp_path / "a.npz", arrays)
    assert zipfile.ZipFile(tmp_path / "a.npz").testzip() is None
    with np.load(tmp_path / "a.npz", allow_pickle=False) as loaded:
        for key, values in arrays.items():
            np.testing.assert_array_equal(loaded[key], values)


@pytest.mark.parametrize(
    ("name", "arrays", "message"),
    [
        ("a.npy", {}, r"suffix must be one of \.npz, \.safetensors, \.parquet"),
        ("a.xlsx", {}, r"suffix must be one of \.npz, \.safetensors, \.parquet"),
        ("a.npz", {"logits": np.array([None])}, "cannot write logits: it holds Python objects"),
        ("a.safetensors", {"g": np.array(["x"])}, "cannot hold g, which is str.*write .npz"),
        pytest.param(
            "a.parquet",
            {"val_logits": np.zeros((3, 2)), "test_logits": np.zeros((4, 2))},
            "as many rows each, got val_logits 3, test_logits 4; write a file per split",
            marks=needs_pyarrow,
        ),
        pytest.param(
            "a.parquet",
            {"logits": np.zeros((3, 2, 2))},
            r"cannot hold logits of shape \(3, 2, 2\).*write .npz",
            marks=needs_pyarrow,
        ),
    ],
)
def test_what_cannot_be_written_leaves_nothing(tmp_path, name, arrays, message):
    with pytest.raises(ValueError, match=message):
        save_predictions(tmp_path / name, arrays)
    assert list(tmp_path.iterdir()) == []
