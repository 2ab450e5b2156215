"""Prediction files: every format reads back the same rows, in order, or says why not."""

import contextlib
import os
import pickle
import sys
import tempfile
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from calibrant.data import open_predictions, sample_path, save_predictions

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError:
    pa = pq = None

needs_pyarrow = pytest.mark.skipif(pa is None, reason="needs pyarrow")
FORMATS = [
    "npy",
    "npz",
    "deflated.npz",
    "safetensors",
    pytest.param("parquet", marks=needs_pyarrow),
    pytest.param("lists.parquet", marks=needs_pyarrow),
]


def write_npy_folder(folder, arrays):
    folder.mkdir()
    for key, values in arrays.items():
        np.save(folder / f"{key}.npy", values)


def write_lists(path, arrays):
    """Write as other programs do: lists of any length, in row groups of odd size."""
    columns = {
        key: pa.array(list(values), pa.list_(pa.from_numpy_dtype(values.dtype)))
        if values.ndim == 2
        else pa.array(values)
        for key, values in arrays.items()
    }
    pq.write_table(pa.table(columns), path, row_group_size=3)


def write(folder, form, arrays):
    """Write ``arrays`` as ``form`` and return the path to open."""
    path = folder / ("arrays" if form == "npy" else f"predictions.{form}")
    if form == "npy":
        write_npy_folder(path, arrays)
    elif form == "deflated.npz":
        np.savez_compressed(path, **arrays)
    elif form == "lists.parquet":
        write_lists(path, arrays)
    else:
        save_predictions(path, arrays)
    return path


def predictions(rows=23, classes=4, seed=0, dtype="float32"):
    rng = np.random.default_rng(seed)
    return {
        "logits": rng.normal(size=(rows, classes)).astype(dtype),
        "labels": rng.integers(classes, size=rows),
    }


def under(name, arrays):
    return {f"{name}_{key}": values for key, values in arrays.items()}


def joined(*shards):
    return {key: np.concatenate([shard[key] for shard in shards]) for key in shards[0]}


def assert_holds(split, arrays):
    for key, values in arrays.items():
        found = split.read(key)
        assert found.dtype == values.dtype
        np.testing.assert_array_equal(found, values)


def tiny(path, **arrays):
    np.savez(path, **arrays)
    return path


# Every format reads back what was written.


@pytest.mark.parametrize("form", FORMATS)
def test_round_trip(tmp_path, form):
    arrays = predictions() | {"features": np.ones((23, 7), np.float16), "group": np.arange(23) % 3}
    split = open_predictions(write(tmp_path, form, arrays)).split(None, ["", "val"])
    assert (split.name, split.rows, split.shape) == ("", 23, (4,))
    assert (split.classes, split.domain) == (4, "logits")
    assert sorted(split.keys) == sorted(arrays)
    assert_holds(split, arrays)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows", [1, 5, 22, 23, 24, 1000])
def test_blocks_are_aligned_and_complete(tmp_path, form, rows):
    arrays = predictions()
    (part,) = open_predictions(write(tmp_path, form, arrays)).split("").parts
    blocks = list(part.blocks(rows, ["labels", "logits"]))
    assert [len(labels) for labels, _ in blocks] == [min(rows, 23 - i) for i in range(0, 23, rows)]
    for column, values in zip(zip(*blocks, strict=True), ("labels", "logits"), strict=True):
        np.testing.assert_array_equal(np.concatenate(column), arrays[values])


@pytest.mark.parametrize("form", FORMATS)
def test_blocks_may_be_changed_without_changing_the_file(tmp_path, form):
    arrays = predictions()
    split = open_predictions(write(tmp_path, form, arrays)).split("")
    for (block,) in split.parts[0].blocks(10, ["logits"]):
        block += 1
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
@settings(max_examples=200)
def test_blocks_concatenate_to_the_whole(form, values, order, rows):
    with tempfile.TemporaryDirectory() as folder:
        arrays = {"logits": np.asarray(values, order=order)}
        split = open_predictions(write(Path(folder), form, arrays)).split("")
        assert_holds(split, {"logits": values})
        blocks = [block for (block,) in split.parts[0].blocks(rows, ["logits"])]
        assert [len(block) for block in blocks[:-1]] == [rows] * (len(blocks) - 1)
        empty = np.empty((0, *values.shape[1:]), values.dtype)
        np.testing.assert_array_equal(np.concatenate([empty, *blocks]), values)


@needs_pyarrow
@given(
    form=st.sampled_from(["parquet", "lists.parquet"]),
    values=NUMBERS.flatmap(
        lambda dtype: hnp.arrays(dtype, st.tuples(st.integers(1, 20), st.integers(1, 5)))
    ),
    rows=st.integers(1, 25),
)
def test_parquet_blocks_concatenate_to_the_whole(form, values, rows):
    with tempfile.TemporaryDirectory() as folder:
        split = open_predictions(write(Path(folder), form, {"logits": values})).split("")
        assert_holds(split, {"logits": values})
        blocks = [block for (block,) in split.parts[0].blocks(rows, ["logits"])]
        assert [len(block) for block in blocks[:-1]] == [rows] * (len(blocks) - 1)
        np.testing.assert_array_equal(np.concatenate(blocks), values)


@pytest.mark.parametrize("form", FORMATS)
def test_no_rows(tmp_path, form):
    split = open_predictions(write(tmp_path, form, predictions(rows=0))).split("")
    assert split.rows == 0
    assert list(split.parts[0].blocks(3, ["logits", "labels"])) == []
    assert split.read("labels").shape == (0,)


def test_one_logit_per_example_means_two_classes(tmp_path):
    split = open_predictions(tiny(tmp_path / "a.npz", logits=np.zeros(5))).split("")
    assert (split.shape, split.classes) == ((), 2)


def test_tokens_are_more_leading_dimensions(tmp_path):
    path = tiny(tmp_path / "a.npz", logits=np.zeros((5, 6, 7)), labels=np.zeros((5, 6), int))
    split = open_predictions(path).split("")
    assert (split.rows, split.shape, split.classes) == (5, (6, 7), 7)


def test_probs_stand_in_for_logits(tmp_path):
    path = tiny(tmp_path / "a.npz", val_probs=np.full((4, 2), 0.5), val_labels=np.zeros(4, int))
    val = open_predictions(path).split("val")
    assert (val.domain, val.classes, val.keys) == ("probs", 2, ["probs", "labels"])
    np.testing.assert_array_equal(val.read("logits"), np.full((4, 2), 0.5))
    ((block,),) = val.parts[0].blocks(9, ["logits"])
    np.testing.assert_array_equal(block, np.full((4, 2), 0.5))


def test_logits_come_before_probs(tmp_path):
    path = tiny(tmp_path / "a.npz", probs=np.full((4, 2), 0.5), logits=np.zeros((4, 2)))
    split = open_predictions(path).split("")
    assert split.domain == "logits"
    np.testing.assert_array_equal(split.read("logits"), np.zeros((4, 2)))
    np.testing.assert_array_equal(split.read("probs"), np.full((4, 2), 0.5))


def test_bfloat16_is_widened(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    logits = torch.randn(7, 3).bfloat16()
    save_file({"logits": logits}, tmp_path / "a.safetensors")
    split = open_predictions(tmp_path / "a.safetensors").split("")
    assert_holds(split, {"logits": logits.float().numpy()})


@pytest.mark.parametrize("form", ["npy", "npz"])
def test_foreign_byte_order_becomes_native(tmp_path, form):
    logits = np.arange(6, dtype=">f4").reshape(3, 2)
    np.savez(tmp_path / "a.npz", logits=logits)
    np.save(tmp_path / "logits.npy", logits)
    split = open_predictions(tmp_path / ("logits.npy" if form == "npy" else "a.npz")).split("")
    ((block,),) = split.parts[0].blocks(9, ["logits"])
    for found in (split.read("logits"), block):
        assert found.dtype.isnative
        np.testing.assert_array_equal(found, logits)


@pytest.mark.parametrize("form", ["npy", "npz", pytest.param("parquet", marks=needs_pyarrow)])
def test_group_column_of_text(tmp_path, form):
    groups = np.array(["a", "longer", "b", "a", "c"])
    path = write(tmp_path, form, predictions(rows=5) | {"region": groups})
    split = open_predictions(path).split("")
    np.testing.assert_array_equal(split.read("region"), groups)
    blocks = [block for (block,) in split.parts[0].blocks(2, ["region"])]
    assert [block.tolist() for block in blocks] == [["a", "longer"], ["b", "a"], ["c"]]


@needs_pyarrow
def test_categories_are_read_as_text(tmp_path):
    region = pa.array(["a", "b", "a"]).dictionary_encode()
    pq.write_table(pa.table({"logits": [[0.0, 1.0]] * 3, "region": region}), tmp_path / "a.parquet")
    split = open_predictions(tmp_path / "a.parquet").split("")
    assert split.read("region").tolist() == ["a", "b", "a"]


@pytest.mark.parametrize("form", FORMATS)
def test_part_travels_to_another_process(tmp_path, form):
    arrays = predictions()
    (part,) = open_predictions(write(tmp_path, form, arrays)).split("").parts
    copy = pickle.loads(pickle.dumps(part))
    assert copy.rows == 23
    ((logits,),) = copy.blocks(100, ["logits"])
    np.testing.assert_array_equal(logits, arrays["logits"])


# Memory.


def test_compressed_npz_is_streamed(tmp_path):
    logits = np.zeros((400_000, 10), np.float32)  # 16 MB, which shrink to a few kB
    np.savez_compressed(tmp_path / "a.npz", logits=logits)
    (part,) = open_predictions(tmp_path / "a.npz").split("").parts
    tracemalloc.start()
    try:
        rows = sum(len(block) for (block,) in part.blocks(4096, ["logits"]))
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
    (part,) = open_predictions(tmp_path / "a.parquet").split("").parts
    before = pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() - before for _ in part.blocks(4096, ["logits"])]
    assert max(held) < logits.nbytes / 5


def test_single_npy_is_mapped_not_loaded(tmp_path):
    np.save(tmp_path / "logits.npy", np.zeros((10, 3)))
    assert isinstance(open_predictions(tmp_path / "logits.npy").split("").read("logits"), np.memmap)


# Splits and keys.


@pytest.fixture
def three_splits(tmp_path):
    names = ("val", "test", "noise_3")
    arrays = {name: predictions(rows=5 + i, seed=i) for i, name in enumerate(names)}
    path = tmp_path / "splits.npz"
    np.savez(path, **{k: v for name in names for k, v in under(name, arrays[name]).items()})
    return path, arrays


def test_splits_keep_the_order_of_the_file(three_splits):
    path, arrays = three_splits
    found = open_predictions(path)
    assert found.splits == ["val", "test", "noise_3"]
    for name in found.splits:
        assert_holds(found.split(name), arrays[name])


@pytest.mark.parametrize(
    ("prefer", "chosen"),
    [(["val", ""], "val"), (["", "test", "val"], "test"), (["dev", "noise_3"], "noise_3")],
)
def test_first_preferred_split_is_chosen(three_splits, prefer, chosen):
    assert open_predictions(three_splits[0]).split(None, prefer).name == chosen


def test_named_split_beats_preference(three_splits):
    assert open_predictions(three_splits[0]).split("test", ["val"]).name == "test"


def test_unknown_split_lists_what_was_found(three_splits):
    with pytest.raises(ValueError, match=r"no split 'dev'; found split 'val', .*'noise_3'"):
        open_predictions(three_splits[0]).split("dev", ["val"])


def test_no_preferred_split_names_the_option(three_splits):
    with pytest.raises(ValueError, match=r"no split 'dev' or plain arrays; found .* --split"):
        open_predictions(three_splits[0]).split(None, ["dev", ""])


def test_file_without_predictions_lists_its_keys(tmp_path):
    path = tiny(tmp_path / "a.npz", weight=np.zeros((2, 3)), my_labels=np.zeros(4))
    with pytest.raises(ValueError, match="no logits, probs or features, only weight, my_labels"):
        open_predictions(path).split("", [])


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("labels", "no labels in this split; found features, age"),
        ("logits", "no logits or probs in this split; found features, age"),
    ],
)
def test_missing_column_lists_what_was_found(tmp_path, column, message):
    path = tiny(tmp_path / "a.npz", train_features=np.zeros((4, 2)), train_age=np.zeros(4))
    train = open_predictions(path).split("train")
    assert train.rows == 4
    with pytest.raises(ValueError, match=message):
        train.read(column)
    with pytest.raises(ValueError, match=message):
        next(train.parts[0].blocks(2, [column]))
    with pytest.raises(ValueError, match="no logits or probs"):
        train.domain  # noqa: B018


def test_further_keys_belong_to_the_longest_split_name(tmp_path):
    path = tiny(
        tmp_path / "a.npz",
        **{"logits": np.zeros((2, 3)), "group": np.array([1, 2]), "info": np.array("text")},
        **{"noise_logits": np.zeros((1, 3)), "noise_group": np.array([3])},
        **{"noise_3_logits": np.zeros((1, 3)), "noise_3_group": np.array([4])},
        coarse_labels=np.array([5, 6]),
    )
    found = open_predictions(path)
    assert found.splits == ["", "noise", "noise_3"]
    assert found.split("").read("group").tolist() == [1, 2]
    assert found.split("noise").read("group").tolist() == [3]
    assert found.split("noise_3").read("group").tolist() == [4]
    assert found.split("").keys == ["logits", "group", "coarse_labels"]


def test_last_layer(tmp_path):
    weight, bias = np.arange(6.0).reshape(2, 3), np.array([1.0, 2.0])
    path = tiny(tmp_path / "a.npz", val_logits=np.zeros((5, 2)), weight=weight, bias=bias)
    layer = open_predictions(path).last_layer()
    assert layer is not None
    np.testing.assert_array_equal(layer[0], weight)
    np.testing.assert_array_equal(layer[1], bias)


def test_last_layer_without_bias_has_zeros(tmp_path):
    path = tiny(tmp_path / "a.npz", logits=np.zeros((5, 2)), weight=np.ones((2, 3), np.float16))
    layer = open_predictions(path).last_layer()
    assert layer is not None
    assert layer[1].dtype == np.float16
    assert layer[1].tolist() == [0, 0]


def test_last_layer_may_be_missing(tmp_path):
    assert open_predictions(tiny(tmp_path / "a.npz", logits=np.zeros((5, 2)))).last_layer() is None


@pytest.mark.parametrize("shapes", [((2, 3), (3,)), ((2,), (2,)), ((), ())])
def test_last_layer_must_fit_together(tmp_path, shapes):
    path = tiny(tmp_path / "a.npz", weight=np.zeros(shapes[0]), bias=np.zeros(shapes[1]))
    with pytest.raises(ValueError, match=r"weight \(classes, features\) and bias"):
        open_predictions(path).last_layer()


# Shards.


@pytest.mark.parametrize(
    "form", ["npz", "safetensors", pytest.param("parquet", marks=needs_pyarrow)]
)
@pytest.mark.parametrize("by", ["folder", "glob"])
def test_shards_come_in_natural_order(tmp_path, form, by):
    shards = {number: predictions(rows=number, seed=number) for number in (10, 2, 1)}
    for number, arrays in shards.items():
        save_predictions(tmp_path / f"part{number}.{form}", arrays)
    (tmp_path / "notes.json").write_text("{}")
    found = open_predictions(tmp_path if by == "folder" else str(tmp_path / f"part*.{form}"))
    split = found.split("")
    assert [part.rows for part in split.parts] == [1, 2, 10]
    assert_holds(split, joined(shards[1], shards[2], shards[10]))


def test_folder_of_npy_files_is_one_file(tmp_path):
    val, test = predictions(seed=1), predictions(rows=9, seed=2)
    layer = {"weight": np.zeros((4, 8)), "bias": np.zeros(4)}
    write_npy_folder(tmp_path / "run", under("val", val) | under("test", test) | layer)
    found = open_predictions(tmp_path / "run")
    assert found.splits == ["test", "val"]
    assert_holds(found.split("val"), val)
    assert_holds(found.split("test"), test)
    assert found.last_layer() is not None


@pytest.mark.parametrize("pattern", ["", "*.npy", "*_logits.npy"])
def test_numbered_npy_files_are_shards(tmp_path, pattern):
    shards = {number: predictions(rows=number + 1, seed=number) for number in (0, 2, 10)}
    arrays = {f"{n}_{key}": v for n, shard in shards.items() for key, v in shard.items()}
    write_npy_folder(tmp_path / "run", arrays)
    found = open_predictions(os.path.join(tmp_path, "run", pattern))
    assert found.splits == [""]
    assert_holds(found.split(""), joined(shards[0], shards[2], shards[10]))


def test_numbered_npy_files_may_be_shards_of_splits(tmp_path):
    shards = [predictions(rows=n + 1, seed=n) for n in range(2)]
    arrays = {f"{n}_val_{key}": v for n, shard in enumerate(shards) for key, v in shard.items()}
    write_npy_folder(tmp_path / "run", arrays)
    assert_holds(open_predictions(tmp_path / "run").split("val"), joined(*shards))


def test_glob_of_logits_takes_their_partners(tmp_path):
    shards = {name: predictions(rows=3, seed=i) for i, name in enumerate(("a", "a_b", "c"))}
    arrays = {k: v for name, shard in shards.items() for k, v in under(name, shard).items()}
    write_npy_folder(tmp_path / "run", arrays)
    found = open_predictions(str(tmp_path / "run" / "a*_logits.npy"))
    assert found.splits == [""]
    assert_holds(found.split(""), joined(shards["a_b"], shards["a"]))


def test_glob_of_logits_over_folders(tmp_path):
    shards = [predictions(rows=3, seed=i) for i in range(2)]
    for i, arrays in enumerate(shards):
        write_npy_folder(tmp_path / f"rank{i}", arrays)
    assert_holds(open_predictions(str(tmp_path / "rank*/logits.npy")).split(""), joined(*shards))


def test_glob_of_logits_keeps_val_and_test_apart(tmp_path):
    val, test = predictions(seed=1), predictions(seed=2)
    write_npy_folder(tmp_path / "run", under("val", val) | under("test", test))
    found = open_predictions(str(tmp_path / "run" / "*_logits.npy"))
    assert found.splits == ["test", "val"]
    assert_holds(found.split("val"), val)


@pytest.mark.parametrize("given_file", ["X_logits.npy", "X_labels.npy"])
def test_npy_file_finds_its_partners(tmp_path, given_file):
    arrays = predictions() | {"group": np.arange(23)}
    others = under("X_noise", predictions(seed=3)) | under("Y", predictions(seed=4))
    write_npy_folder(tmp_path / "run", under("X", arrays) | others)
    found = open_predictions(tmp_path / "run" / given_file)
    assert found.splits == [""]
    assert found.split("").keys == ["group", "labels", "logits"]
    assert_holds(found.split(""), arrays)


def test_plain_npy_file_finds_its_partners(tmp_path):
    arrays, others = predictions(), under("val", predictions(seed=4))
    write_npy_folder(tmp_path / "run", arrays | others | {"weight": np.zeros((4, 2))})
    found = open_predictions(tmp_path / "run" / "logits.npy")
    assert found.splits == [""]
    assert_holds(found.split(""), arrays)
    assert found.last_layer() is not None


def test_npy_file_of_a_named_split_stays_that_split(tmp_path):
    write_npy_folder(tmp_path / "run", under("test", predictions()))
    assert open_predictions(tmp_path / "run" / "test_logits.npy").splits == ["test"]


def test_files_named_after_splits_are_kept_apart(tmp_path):
    val, test = predictions(seed=1), predictions(seed=2)
    layer = {"weight": np.zeros((4, 8)), "bias": np.zeros(4)}
    tiny(tmp_path / "val.npz", **val, **layer, group=np.arange(23))
    np.savez(tmp_path / "test.npz", **test)
    found = open_predictions(tmp_path)
    assert found.splits == ["test", "val"]
    assert_holds(found.split("val"), val | {"group": np.arange(23)})
    assert_holds(found.split("test"), test)
    assert found.last_layer() is not None


def test_file_given_by_itself_keeps_its_plain_arrays(tmp_path):
    assert open_predictions(tiny(tmp_path / "val.npz", **predictions())).splits == [""]


def test_split_consists_of_the_shards_that_have_it(tmp_path):
    shards = [predictions(seed=i) for i in range(3)]
    np.savez(tmp_path / "0.npz", **under("val", shards[0]), **under("test", shards[1]))
    np.savez(tmp_path / "1.npz", **under("val", shards[2]))
    found = open_predictions(tmp_path)
    assert_holds(found.split("val"), joined(shards[0], shards[2]))
    assert_holds(found.split("test"), shards[1])


def test_dtypes_of_shards_meet_in_the_wider_one(tmp_path):
    shards = [predictions(seed=0, dtype="float16"), predictions(seed=1, dtype="float32")]
    for i, arrays in enumerate(shards):
        np.savez(tmp_path / f"{i}.npz", **arrays)
    assert_holds(open_predictions(tmp_path).split(""), joined(*shards))


@needs_pyarrow
def test_empty_shard_without_known_classes_does_no_harm(tmp_path):
    arrays = predictions()
    write_lists(tmp_path / "0.parquet", predictions(rows=0))
    write_lists(tmp_path / "1.parquet", arrays)
    split = open_predictions(tmp_path).split("")
    assert split.classes == 4
    assert_holds(split, arrays)


def test_column_that_one_shard_lacks(tmp_path):
    np.savez(tmp_path / "0.npz", **predictions())
    np.savez(tmp_path / "1.npz", logits=np.zeros((3, 4)))
    split = open_predictions(tmp_path).split("")
    assert split.keys == ["logits"]
    with pytest.raises(ValueError, match=r"1\.npz has no labels"):
        split.read("labels")


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"logits": np.zeros((3, 5))}, r"0\.npz has logits of shape \(23, 4\).*1\.npz.*\(3, 5\)"),
        ({"probs": np.zeros((3, 4))}, r"0\.npz has logits, but .*1\.npz has probs"),
        ({"features": np.zeros((3, 4))}, r"0\.npz has logits, but .*1\.npz has no logits"),
    ],
)
def test_shards_of_a_split_must_agree(tmp_path, second, message):
    np.savez(tmp_path / "0.npz", **predictions())
    tiny(tmp_path / "1.npz", **second)
    with pytest.raises(ValueError, match=message):
        open_predictions(tmp_path).split("")


def test_further_columns_of_shards_must_agree_when_read(tmp_path):
    np.savez(tmp_path / "0.npz", logits=np.zeros((3, 4)), age=np.zeros((3, 2)))
    np.savez(tmp_path / "1.npz", logits=np.zeros((3, 4)), age=np.zeros((3, 1)))
    split = open_predictions(tmp_path).split("")
    with pytest.raises(ValueError, match="number of rows only"):
        split.read("age")


# Errors.


@pytest.mark.parametrize("name", ["missing.npz", "missing_logits.npy", "missing"])
def test_missing_file(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=f"{name} does not exist; expected"):
        open_predictions(tmp_path / name)


def test_glob_without_match(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file in \.npz.* matches .*x-\*\.npz"):
        open_predictions(str(tmp_path / "x-*.npz"))


def test_name_with_brackets_is_a_file_when_it_exists(tmp_path):
    (tmp_path / "run[1]").mkdir()
    np.savez(tmp_path / "run[1]" / "a[2].npz", logits=np.zeros((2, 2)))
    assert open_predictions(str(tmp_path / "run[1]" / "a[2].npz")).splits == [""]
    assert open_predictions(str(tmp_path / "run[1]")).splits == [""]


def test_folder_without_predictions(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FileNotFoundError, match="holds no prediction file"):
        open_predictions(tmp_path)


def test_folder_with_two_kinds_of_files(tmp_path):
    np.savez(tmp_path / "a.npz", **predictions())
    np.save(tmp_path / "logits.npy", np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"mixes \.npy, \.npz files; choose one kind"):
        open_predictions(tmp_path)
    assert open_predictions(str(tmp_path / "*.npz")).split("").rows == 23


def test_unknown_suffix(tmp_path):
    (tmp_path / "a.csv").touch()
    with pytest.raises(ValueError, match=r"a\.csv is not a prediction file.*\.npz"):
        open_predictions(tmp_path / "a.csv")


def test_npy_file_that_does_not_say_what_it_is(tmp_path):
    np.save(tmp_path / "output.npy", np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"does not say what it holds; rename it to NAME_logits"):
        open_predictions(tmp_path / "output.npy")


def largest_file(path):
    return max(path.iterdir(), key=lambda file: file.stat().st_size) if path.is_dir() else path


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kept", [0.0, 0.05, 0.5, 0.99])
def test_truncated_file(tmp_path, form, kept):
    path = write(tmp_path, form, predictions(rows=500))
    file = largest_file(path)
    file.write_bytes(file.read_bytes()[: int(kept * file.stat().st_size)])
    with pytest.raises(ValueError, match="damaged or incomplete"):
        open_predictions(path)


@given(
    form=st.sampled_from(["npy", "npz", "deflated.npz", "safetensors"]),
    place=st.floats(0, 1, exclude_max=True),
    byte=st.integers(1, 255),
)
@settings(max_examples=300)
def test_flipped_byte_is_an_error_or_other_values(form, place, byte):
    """Never a crash of another kind, whichever library finds the damage."""
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), form, predictions(rows=7))
        file = largest_file(path)
        content = bytearray(file.read_bytes())
        content[int(place * len(content))] ^= byte
        file.write_bytes(content)
        with contextlib.suppress(ValueError):
            split = open_predictions(path).split("")
            for key in split.keys:
                split.read(key)


@pytest.mark.parametrize("form", ["npz", "deflated.npz"])
@pytest.mark.parametrize("logits", [predictions(rows=20)["logits"], np.full((5000, 4), 1.5, "f4")])
def test_checksum_of_npz_is_compared(tmp_path, form, logits):
    """Also where the damage makes the compressed data longer than the array."""
    path = write(tmp_path, form, {"logits": logits})
    sound = path.read_bytes()
    split = open_predictions(path).split("")
    for place in np.linspace(0, len(sound) - 1, 400).astype(int):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        with contextlib.suppress(ValueError):
            found = split.read("logits")
            # Where nothing was raised, the byte was of no account, such as one of a date.
            np.testing.assert_array_equal(found, logits)


@needs_pyarrow
def test_damaged_parquet_page(tmp_path):
    path = write(tmp_path, "parquet", predictions(rows=5000))
    content = bytearray(path.read_bytes())
    content[4:2000] = bytes(1996)
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged or incomplete"):
        open_predictions(path).split("").read("logits")


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
        open_predictions(path).split("")
    assert not (tmp_path / "exploded").exists()


def test_pickled_further_column_harms_only_who_asks(tmp_path):
    objects = np.array([None, {}, 1], dtype=object)
    split = open_predictions(tiny(tmp_path / "a.npz", logits=np.zeros((3, 2)), x=objects)).split("")
    assert split.read("logits").shape == (3, 2)
    with pytest.raises(ValueError, match="x was saved as a pickle"):
        split.read("x")


@pytest.mark.parametrize("key", ["logits", "probs", "features"])
def test_text_is_no_logits(tmp_path, key):
    path = tiny(tmp_path / "a.npz", **{f"val_{key}": np.array(["a", "b"])})
    with pytest.raises(ValueError, match=f"val_{key} must be numbers, got str"):
        open_predictions(path).split("val")


def test_columns_need_as_many_rows(tmp_path):
    path = tiny(tmp_path / "a.npz", val_logits=np.zeros((4, 2)), val_labels=np.zeros(3))
    with pytest.raises(ValueError, match="val_labels has 3 rows, but val_logits has 4"):
        open_predictions(path).split("val")


def test_further_columns_need_as_many_rows_when_asked(tmp_path):
    path = tiny(tmp_path / "a.npz", logits=np.zeros((4, 2)), names=np.array(["cat", "dog"]))
    split = open_predictions(path).split("")
    with pytest.raises(ValueError, match="names has 2 rows, but logits has 4"):
        next(split.parts[0].blocks(2, ["logits", "names"]))


def test_block_needs_a_row(tmp_path):
    (part,) = open_predictions(tiny(tmp_path / "a.npz", logits=np.zeros((4, 2)))).split("").parts
    with pytest.raises(ValueError, match="at least 1 row, got rows=0"):
        next(part.blocks(0, ["logits"]))


@needs_pyarrow
@pytest.mark.parametrize(
    "rows", [[[1.0, 2.0], [1.0]], [[1.0, 2.0, 3.0], [1.0]], [[1.0, 2.0], None]]
)
def test_parquet_lists_of_different_lengths(tmp_path, rows):
    pq.write_table(pa.table({"logits": rows}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="rows of logits must have one length"):
        open_predictions(tmp_path / "a.parquet").split("").read("logits")


@needs_pyarrow
def test_parquet_with_missing_values(tmp_path):
    table = pa.table({"logits": [[1.0, 2.0], [3.0, 4.0]], "labels": [0, None]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="labels has missing values"):
        open_predictions(tmp_path / "a.parquet").split("").read("labels")


def test_missing_pyarrow_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    for name in ("pyarrow", "pyarrow.parquet", "pyarrow.compute"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'calibrant\[data\]'"):
        open_predictions(tmp_path / "a.parquet")


def test_unsupported_safetensors_dtype(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    save_file({"logits": torch.zeros(2, 2).to(torch.float8_e4m3fn)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"logits is F8_E4M3; save it again as float32"):
        open_predictions(tmp_path / "a.safetensors")


def test_npy_version_with_a_long_header(tmp_path):
    logits = predictions()["logits"]
    with open(tmp_path / "logits.npy", "wb") as stream:
        np.lib.format.write_array(stream, logits, version=(2, 0))
    assert_holds(open_predictions(tmp_path / "logits.npy").split(""), {"logits": logits})


def test_newer_npy_version(tmp_path):
    fields = np.zeros(3, dtype=[("λ", "f4")])  # the one case that needs version 3
    with pytest.warns(UserWarning, match="3.0"):
        np.save(tmp_path / "logits.npy", fields)
    with pytest.raises(ValueError, match=r"1\.0 and 2\.0 are known, got \(3, 0\)"):
        open_predictions(tmp_path / "logits.npy")


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
    assert_holds(open_predictions(path).split(""), old)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("form", WRITTEN)
def test_writing_replaces_the_old_file(tmp_path, form):
    path, new = tmp_path / f"a.{form}", predictions(seed=2)
    save_predictions(path, predictions(seed=1))
    save_predictions(str(path), new)
    assert_holds(open_predictions(path).split(""), new)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("form", WRITTEN)
def test_lists_fortran_and_foreign_order_are_written(tmp_path, form):
    path = tmp_path / f"a.{form}"
    logits = np.asfortranarray(np.arange(6.0).reshape(3, 2)).astype(">f8")
    save_predictions(path, {"logits": logits, "labels": [0, 1, 0]})
    split = open_predictions(path).split("")
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
        ("a.csv", {}, r"suffix must be one of \.npz, \.safetensors, \.parquet"),
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


def test_folder_must_exist(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"folder .*missing does not exist; create it"):
        save_predictions(tmp_path / "missing" / "a.npz", predictions())


# The sample.


def test_sample_is_what_its_description_says():
    found = open_predictions(sample_path())
    assert found.splits == ["val", "test"]
    for name, rows in (("val", 5_000), ("test", 10_000)):
        split = found.split(name)
        assert (split.rows, split.classes, split.domain) == (rows, 10, "logits")
        assert split.read("logits").dtype == np.float16
        assert split.read("labels").shape == (rows,)
    layer = found.last_layer()
    assert layer is not None
    assert (layer[0].shape, layer[1].shape) == ((10, 2048), (10,))


def test_sample_predicts_most_test_images():
    test = open_predictions(sample_path()).split("test")
    right = test.read("logits").argmax(1) == test.read("labels")
    assert right.mean() == pytest.approx(0.9337, abs=5e-4)  # as noted when it was trained
