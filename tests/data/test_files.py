"""Which files make up a dataset."""

import os

import numpy as np
import pandas
import pytest

from calibrant.data import open_dataset, sample_path, save_predictions
from tests.support.prediction_files import (
    assert_holds,
    joined,
    needs_pyarrow,
    predictions,
    tiny,
    under,
    write_npy_folder,
)


@pytest.mark.parametrize(
    "form", ["npz", "safetensors", pytest.param("parquet", marks=needs_pyarrow)]
)
@pytest.mark.parametrize("by", ["folder", "glob"])
def test_shards_come_in_natural_order(tmp_path, form, by):
    shards = {number: predictions(rows=number, seed=number) for number in (10, 2, 1)}
    for number, arrays in shards.items():
        save_predictions(tmp_path / f"part{number}.{form}", arrays)
    (tmp_path / "notes.json").write_text("{}")
    found = open_dataset(tmp_path if by == "folder" else str(tmp_path / f"part*.{form}"))
    split = found.split("")
    assert [shard.rows for shard in split.shards] == [1, 2, 10]
    assert_holds(split, joined(shards[1], shards[2], shards[10]))


def test_folder_of_npy_files_is_one_file(tmp_path):
    val, test = predictions(seed=1), predictions(rows=9, seed=2)
    layer = {"weight": np.zeros((4, 8)), "bias": np.zeros(4)}
    write_npy_folder(tmp_path / "run", under("val", val) | under("test", test) | layer)
    found = open_dataset(tmp_path / "run")
    assert found.splits == ["test", "val"]
    assert_holds(found.split("val"), val)
    assert_holds(found.split("test"), test)
    assert found.head is not None


@pytest.mark.parametrize("pattern", ["", "*.npy", "*_logits.npy"])
def test_numbered_npy_files_are_shards(tmp_path, pattern):
    shards = {number: predictions(rows=number + 1, seed=number) for number in (0, 2, 10)}
    arrays = {f"{n}_{key}": v for n, shard in shards.items() for key, v in shard.items()}
    write_npy_folder(tmp_path / "run", arrays)
    found = open_dataset(os.path.join(tmp_path, "run", pattern))
    assert found.splits == [""]
    assert_holds(found.split(""), joined(shards[0], shards[2], shards[10]))


def test_numbered_npy_files_may_be_shards_of_splits(tmp_path):
    shards = [predictions(rows=n + 1, seed=n) for n in range(2)]
    arrays = {f"{n}_val_{key}": v for n, shard in enumerate(shards) for key, v in shard.items()}
    write_npy_folder(tmp_path / "run", arrays)
    assert_holds(open_dataset(tmp_path / "run").split("val"), joined(*shards))


def test_glob_of_logits_takes_their_partners(tmp_path):
    shards = {name: predictions(rows=3, seed=i) for i, name in enumerate(("a", "a_b", "c"))}
    arrays = {k: v for name, shard in shards.items() for k, v in under(name, shard).items()}
    write_npy_folder(tmp_path / "run", arrays)
    found = open_dataset(str(tmp_path / "run" / "a*_logits.npy"))
    assert found.splits == [""]
    assert_holds(found.split(""), joined(shards["a_b"], shards["a"]))


def test_glob_of_logits_over_folders(tmp_path):
    shards = [predictions(rows=3, seed=i) for i in range(2)]
    for i, arrays in enumerate(shards):
        write_npy_folder(tmp_path / f"rank{i}", arrays)
    assert_holds(open_dataset(str(tmp_path / "rank*/logits.npy")).split(""), joined(*shards))


def test_glob_of_logits_keeps_val_and_test_apart(tmp_path):
    val, test = predictions(seed=1), predictions(seed=2)
    write_npy_folder(tmp_path / "run", under("val", val) | under("test", test))
    found = open_dataset(str(tmp_path / "run" / "*_logits.npy"))
    assert found.splits == ["test", "val"]
    assert_holds(found.split("val"), val)


@pytest.mark.parametrize("given_file", ["X_logits.npy", "X_labels.npy"])
def test_npy_file_finds_its_partners(tmp_path, given_file):
    arrays = predictions() | {"group": np.arange(23)}
    others = under("X_noise", predictions(seed=3)) | under("Y", predictions(seed=4))
    write_npy_folder(tmp_path / "run", under("X", arrays) | others)
    found = open_dataset(tmp_path / "run" / given_file)
    assert found.splits == [""]
    assert found.split("").keys == ["group", "labels", "logits"]
    assert_holds(found.split(""), arrays)


def test_plain_npy_file_finds_its_partners(tmp_path):
    arrays, others = predictions(), under("val", predictions(seed=4))
    write_npy_folder(tmp_path / "run", arrays | others | {"weight": np.zeros((4, 2))})
    found = open_dataset(tmp_path / "run" / "logits.npy")
    assert found.splits == [""]
    assert_holds(found.split(""), arrays)
    assert found.head is not None


def test_npy_file_of_a_named_split_stays_that_split(tmp_path):
    write_npy_folder(tmp_path / "run", under("test", predictions()))
    assert open_dataset(tmp_path / "run" / "test_logits.npy").splits == ["test"]


def test_files_named_after_splits_are_kept_apart(tmp_path):
    val, test = predictions(seed=1), predictions(seed=2)
    layer = {"weight": np.zeros((4, 8)), "bias": np.zeros(4)}
    tiny(tmp_path / "val.npz", **val, **layer, group=np.arange(23))
    np.savez(tmp_path / "test.npz", **test)
    found = open_dataset(tmp_path)
    assert found.splits == ["test", "val"]
    assert_holds(found.split("val"), val | {"group": np.arange(23)})
    assert_holds(found.split("test"), test)
    assert found.head is not None


def test_file_given_by_itself_keeps_its_plain_arrays(tmp_path):
    assert open_dataset(tiny(tmp_path / "val.npz", **predictions())).splits == [""]


@pytest.mark.parametrize("name", ["missing.npz", "missing_logits.npy", "missing"])
def test_missing_file(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=f"{name} does not exist; expected"):
        open_dataset(tmp_path / name)


def test_glob_without_match(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file in \.npz.* matches .*x-\*\.npz"):
        open_dataset(str(tmp_path / "x-*.npz"))


def test_name_with_brackets_is_a_file_when_it_exists(tmp_path):
    (tmp_path / "run[1]").mkdir()
    np.savez(tmp_path / "run[1]" / "a[2].npz", logits=np.zeros((2, 2)))
    assert open_dataset(str(tmp_path / "run[1]" / "a[2].npz")).splits == [""]
    assert open_dataset(str(tmp_path / "run[1]")).splits == [""]


def test_folder_without_predictions(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FileNotFoundError, match="holds no prediction file"):
        open_dataset(tmp_path)


def test_folder_with_two_kinds_of_files(tmp_path):
    np.savez(tmp_path / "a.npz", **predictions())
    np.save(tmp_path / "logits.npy", np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"mixes \.npy, \.npz files; choose one kind"):
        open_dataset(tmp_path)
    assert open_dataset(str(tmp_path / "*.npz")).split("").rows == 23


def test_unknown_suffix(tmp_path):
    (tmp_path / "a.xlsx").touch()
    with pytest.raises(ValueError, match=r"a\.xlsx is not a prediction file.*\.npz"):
        open_dataset(tmp_path / "a.xlsx")


def test_npy_file_that_does_not_say_what_it_is(tmp_path):
    np.save(tmp_path / "output.npy", np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"does not say what it holds; rename it to NAME_logits"):
        open_dataset(tmp_path / "output.npy")


def test_folder_must_exist(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"folder .*missing does not exist; create it"):
        save_predictions(tmp_path / "missing" / "a.npz", predictions())


@pytest.mark.parametrize("form", ["npz", "csv", "parquet"])
def test_frames_and_names_of_labels_are_saved_as_they_are_read(tmp_path, form):
    chances, names = np.array([[0.2, 0.8], [0.7, 0.3], [0.4, 0.6]]), ["yes", "no", "yes"]
    frame = pandas.DataFrame(chances, columns=["no", "yes"])
    arrays = {"val_probs": frame, "val_labels": names}
    arrays |= {"test_probs": frame[["yes", "no"]], "test_labels": names[::-1]}
    arrays = arrays if form == "npz" else {"probs": frame, "labels": names}
    save_predictions(tmp_path / f"a.{form}", arrays)
    found = open_dataset(tmp_path / f"a.{form}")
    assert found.class_names == ["no", "yes"]
    split = found.split("val" if form == "npz" else None)
    assert split.read("labels").tolist() == [1, 0, 1]
    if form == "npz":
        np.testing.assert_allclose(found.split("test").read("probs"), chances)


def test_names_of_labels_without_names_of_classes_are_refused(tmp_path):
    with pytest.raises(TypeError, match="labels must be integers, got names such as 'yes'"):
        save_predictions(tmp_path / "a.npz", {"probs": np.eye(2), "labels": ["yes", "no"]})


def test_sample_is_what_its_description_says():
    found = open_dataset(sample_path())
    assert found.splits == ["val", "test"]
    for name, rows in (("val", 5_000), ("test", 10_000)):
        split = found.split(name)
        assert (split.rows, split.classes, split.domain) == (rows, 10, "logits")
        assert split.read("logits").dtype == np.float16
        assert split.read("labels").shape == (rows,)
    layer = found.head
    assert layer is not None
    assert (layer[0].shape, layer[1].shape) == ((10, 2048), (10,))


def test_sample_predicts_most_test_images():
    test = open_dataset(sample_path()).split("test")
    right = test.read("logits").argmax(1) == test.read("labels")
    assert right.mean() == pytest.approx(0.9337, abs=5e-4)  # as noted when it was trained
