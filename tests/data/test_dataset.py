"""Datasets: splits, columns, shards, the last layer, and the walk."""

import gc
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from calibrant import use
from calibrant.data import as_dataset, open_dataset, sample_path, save_predictions
from tests.support.prediction_files import (
    FORMATS,
    assert_holds,
    joined,
    needs_pyarrow,
    predictions,
    tiny,
    under,
    write,
    write_lists,
    write_npy_folder,
)


def test_one_logit_per_example_means_two_classes(tmp_path):
    split = open_dataset(tiny(tmp_path / "a.npz", logits=np.zeros(5))).split("")
    assert (split.shape, split.classes) == ((), 2)


def test_tokens_are_more_leading_dimensions(tmp_path):
    path = tiny(tmp_path / "a.npz", logits=np.zeros((5, 6, 7)), labels=np.zeros((5, 6), int))
    split = open_dataset(path).split("")
    assert (split.rows, split.shape, split.classes) == (5, (6, 7), 7)


def test_probs_stand_in_for_logits(tmp_path):
    path = tiny(tmp_path / "a.npz", val_probs=np.full((4, 2), 0.5), val_labels=np.zeros(4, int))
    val = open_dataset(path).split("val")
    assert (val.domain, val.classes, val.keys) == ("probs", 2, ["probs", "labels"])
    np.testing.assert_array_equal(val.read("probs"), np.full((4, 2), 0.5))
    np.testing.assert_array_equal(val.read("logits"), np.log(np.full((4, 2), 0.5)))
    ((chunk,),) = val.shards[0].chunks(9, ["logits"])
    np.testing.assert_array_equal(chunk, np.full((4, 2), 0.5))


def test_logits_come_before_probs(tmp_path):
    path = tiny(tmp_path / "a.npz", probs=np.full((4, 2), 0.5), logits=np.zeros((4, 2)))
    split = open_dataset(path).split("")
    assert split.domain == "logits"
    np.testing.assert_array_equal(split.read("logits"), np.zeros((4, 2)))
    np.testing.assert_array_equal(split.read("probs"), np.full((4, 2), 0.5))


@pytest.mark.parametrize("form", FORMATS)
def test_a_shard_travels_to_another_process(tmp_path, form):
    arrays = predictions()
    (shard,) = open_dataset(write(tmp_path, form, arrays)).split("").shards
    copy = pickle.loads(pickle.dumps(shard))
    assert copy.rows == 23
    ((logits,),) = copy.chunks(100, ["logits"])
    np.testing.assert_array_equal(logits, arrays["logits"])


@pytest.fixture
def three_splits(tmp_path):
    names = ("val", "test", "noise_3")
    arrays = {name: predictions(rows=5 + i, seed=i) for i, name in enumerate(names)}
    path = tmp_path / "splits.npz"
    np.savez(path, **{k: v for name in names for k, v in under(name, arrays[name]).items()})
    return path, arrays


def test_splits_keep_the_order_of_the_file(three_splits):
    path, arrays = three_splits
    found = open_dataset(path)
    assert found.splits == ["val", "test", "noise_3"]
    for name in found.splits:
        assert_holds(found.split(name), arrays[name])


@pytest.mark.parametrize(
    ("prefer", "chosen"),
    [(["val", ""], "val"), (["", "test", "val"], "test"), (["blur", "noise_3"], "noise_3")],
)
def test_first_preferred_split_is_chosen(three_splits, prefer, chosen):
    assert open_dataset(three_splits[0]).split(None, prefer).name == chosen


def test_file_without_predictions_lists_its_keys(tmp_path):
    path = tiny(tmp_path / "a.npz", weight=np.zeros((2, 3)), my_labels=np.zeros(4))
    with pytest.raises(ValueError, match="no logits, probs or features, only weight, my_labels"):
        open_dataset(path).split("", [])


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("labels", "no labels in this split; found features, age"),
        ("ages", r"no ages in this split; did you mean age\? found features, age"),
        ("logits", "no logits or probs in this split; found features, age"),
    ],
)
def test_missing_column_lists_what_was_found(tmp_path, column, message):
    path = tiny(tmp_path / "a.npz", train_features=np.zeros((4, 2)), train_age=np.zeros(4))
    train = open_dataset(path).split("train")
    assert train.rows == 4
    with pytest.raises(ValueError, match=message):
        train.read(column)
    with pytest.raises(ValueError, match=message):
        next(train.shards[0].chunks(2, [column]))
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
    found = open_dataset(path)
    assert found.splits == ["", "noise", "noise_3"]
    assert found.split("").read("group").tolist() == [1, 2]
    assert found.split("noise").read("group").tolist() == [3]
    assert found.split("noise_3").read("group").tolist() == [4]
    assert found.split("").keys == ["logits", "group", "coarse_labels"]


def test_split_consists_of_the_shards_that_have_it(tmp_path):
    shards = [predictions(seed=i) for i in range(3)]
    np.savez(tmp_path / "0.npz", **under("val", shards[0]), **under("test", shards[1]))
    np.savez(tmp_path / "1.npz", **under("val", shards[2]))
    found = open_dataset(tmp_path)
    assert_holds(found.split("val"), joined(shards[0], shards[2]))
    assert_holds(found.split("test"), shards[1])


def test_dtypes_of_shards_meet_in_the_wider_one(tmp_path):
    shards = [predictions(seed=0, dtype="float16"), predictions(seed=1, dtype="float32")]
    for i, arrays in enumerate(shards):
        np.savez(tmp_path / f"{i}.npz", **arrays)
    assert_holds(open_dataset(tmp_path).split(""), joined(*shards))


@needs_pyarrow
def test_empty_shard_without_known_classes_does_no_harm(tmp_path):
    arrays = predictions()
    write_lists(tmp_path / "0.parquet", predictions(rows=0))
    write_lists(tmp_path / "1.parquet", arrays)
    split = open_dataset(tmp_path).split("")
    assert split.classes == 4
    assert_holds(split, arrays)


def test_column_that_one_shard_lacks(tmp_path):
    np.savez(tmp_path / "0.npz", **predictions())
    np.savez(tmp_path / "1.npz", logits=np.zeros((3, 4)))
    split = open_dataset(tmp_path).split("")
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
        open_dataset(tmp_path).split("")


def test_further_columns_of_shards_must_agree_when_read(tmp_path):
    np.savez(tmp_path / "0.npz", logits=np.zeros((3, 4)), age=np.zeros((3, 2)))
    np.savez(tmp_path / "1.npz", logits=np.zeros((3, 4)), age=np.zeros((3, 1)))
    split = open_dataset(tmp_path).split("")
    with pytest.raises(ValueError, match="number of rows only"):
        split.read("age")


def test_pickled_further_column_harms_only_who_asks(tmp_path):
    objects = np.array([None, {}, 1], dtype=object)
    split = open_dataset(tiny(tmp_path / "a.npz", logits=np.zeros((3, 2)), x=objects)).split("")
    assert split.read("logits").shape == (3, 2)
    with pytest.raises(ValueError, match="x was saved as a pickle"):
        split.read("x")


@pytest.mark.parametrize("key", ["logits", "probs", "features"])
def test_logits_must_be_numbers(tmp_path, key):
    path = tiny(tmp_path / "a.npz", **{f"val_{key}": np.array(["a", "b"])})
    with pytest.raises(ValueError, match=f"val_{key} must be numbers, got str"):
        open_dataset(path).split("val")


def test_columns_need_as_many_rows(tmp_path):
    path = tiny(tmp_path / "a.npz", val_logits=np.zeros((4, 2)), val_labels=np.zeros(3))
    with pytest.raises(ValueError, match="val_labels has 3 rows, but val_logits has 4"):
        open_dataset(path).split("val")


def test_further_columns_need_as_many_rows_when_asked(tmp_path):
    path = tiny(tmp_path / "a.npz", logits=np.zeros((4, 2)), names=np.array(["cat", "dog"]))
    split = open_dataset(path).split("")
    with pytest.raises(ValueError, match="names has 2 rows, but logits has 4"):
        next(split.shards[0].chunks(2, ["logits", "names"]))


def test_block_needs_a_row(tmp_path):
    (shard,) = open_dataset(tiny(tmp_path / "a.npz", logits=np.zeros((4, 2)))).split("").shards
    with pytest.raises(ValueError, match="at least 1 row, got rows=0"):
        next(shard.chunks(0, ["logits"]))


# Names of splits.


@pytest.mark.parametrize(
    ("stored", "asked", "found"),
    [
        ("val", "validation", "val"),
        ("valid", "val", "valid"),
        ("dev", "valid", "dev"),
        ("dev", None, "dev"),
    ],
)
def test_names_of_the_validation_split_stand_for_each_other(tmp_path, stored, asked, found):
    path = tiny(tmp_path / "a.npz", **under(stored, predictions()), **under("test", predictions()))
    assert open_dataset(path).split(asked, ["val", ""]).name == found


def test_exact_names_come_before_aliases_and_several_are_not_guessed(tmp_path):
    path = tiny(tmp_path / "a.npz", **under("dev", predictions()), **under("valid", predictions()))
    assert open_dataset(path).split("dev").name == "dev"
    with pytest.raises(ValueError, match=r"a\.npz: unknown split 'val': .*choose from dev, valid"):
        open_dataset(path).split("val")


def test_files_with_aliases_of_val_as_names_are_that_split(tmp_path):
    for name in ("valid", "test"):
        tiny(tmp_path / f"{name}.npz", **predictions())
    assert open_dataset(tmp_path).split("val").name == "valid"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"name": "tset"}, "unknown split 'tset': did you mean test. choose from val, test, noise"),
        ({"name": "zebra"}, "unknown split 'zebra': choose from val, test, noise_3"),
        ({"name": "zebra", "prefer": ["val"]}, "unknown split 'zebra': choose from val, test"),
        ({"prefer": ["blur", ""]}, "no split 'blur' or unnamed split, only val, test, .*--split"),
    ],
)
def test_a_missing_split_lists_the_others(three_splits, asked, message):
    with pytest.raises(ValueError, match=message):
        open_dataset(three_splits[0]).split(**asked)


def test_a_missing_split_of_plain_arrays(tmp_path):
    path = tiny(tmp_path / "a.npz", **predictions())
    with pytest.raises(ValueError, match=r"a\.npz has no split 'val', only an unnamed split"):
        open_dataset(path).split("val")


# The last layer and the names of the classes.


WEIGHT, BIAS = np.arange(6.0).reshape(2, 3), np.array([1.0, 2.0])


@pytest.mark.parametrize("front", ["head_", ""])
def test_last_layer(tmp_path, front):
    layer = {f"{front}weight": WEIGHT, f"{front}bias": BIAS}
    data = open_dataset(tiny(tmp_path / "a.npz", val_logits=np.zeros((5, 2)), **layer))
    assert data.has_head
    assert data.head is not None
    np.testing.assert_array_equal(data.head[0], WEIGHT)
    np.testing.assert_array_equal(data.head[1], BIAS)
    assert data.split("val").keys == ["logits"]


def test_last_layer_without_bias_has_zeros(tmp_path):
    weight = np.ones((2, 3), np.float16)
    path = tiny(tmp_path / "a.npz", logits=np.zeros((5, 2)), head_weight=weight)
    head = open_dataset(path).head
    assert head is not None
    assert head[1].dtype == np.float16
    assert head[1].tolist() == [0, 0]


def test_a_column_named_weight_is_no_layer(tmp_path):
    columns = {"weight": np.arange(5.0), "bias": np.ones(5)}
    data = open_dataset(tiny(tmp_path / "a.npz", logits=np.zeros((5, 2)), **columns))
    assert not data.has_head
    assert data.head is None
    assert data.split("").keys == ["logits", "weight", "bias"]
    assert_holds(data.split(""), columns)


@pytest.mark.parametrize("shapes", [((2, 3), (3,)), ((2,), (2,)), ((), ())])
def test_last_layer_must_fit_together(tmp_path, shapes):
    layer = {"head_weight": np.zeros(shapes[0]), "head_bias": np.zeros(shapes[1])}
    data = open_dataset(tiny(tmp_path / "a.npz", **layer))
    with pytest.raises(ValueError, match=r"head_weight \(classes, features\) and head_bias"):
        _ = data.head


def test_class_names_are_no_column(tmp_path):
    names = np.array(["cat", "dog"])
    data = open_dataset(tiny(tmp_path / "a.npz", logits=np.zeros((3, 2)), class_names=names))
    assert data.class_names == ["cat", "dog"]
    assert data.split("").keys == ["logits"]
    assert open_dataset(sample_path()).class_names is None


# Arrays as datasets.


def test_arrays_and_mappings_as_datasets():
    logits, labels = predictions()["logits"], predictions()["labels"]
    data = as_dataset(logits, labels, sample_weight=np.ones(23), groups=np.arange(23))
    split = data.split()
    assert (data.path, split.rows, split.classes) == ("the arrays", 23, 4)
    np.testing.assert_array_equal(split.weights, np.ones(23))
    np.testing.assert_array_equal(split.groups, np.arange(23))
    assert as_dataset(data) is data
    named = as_dataset({"val_logits": logits, "val_labels": labels, "val_age": labels}, by="age")
    assert (named.by, named.splits) == ("age", ["val"])
    assert as_dataset(probs=np.full((2, 2), 0.5)).split().domain == "probs"
    with pytest.raises(TypeError, match="labels go with logits, and a file"):
        as_dataset(named, labels)


# The walk.


def lengths(chunks):
    return [len(chunk["logits"]) for chunk in chunks]


def test_walk_has_named_columns_and_roles(tmp_path):
    arrays = predictions() | {"age": np.arange(23), "importance": np.ones(23)}
    data = as_dataset(tiny(tmp_path / "a.npz", **arrays), sample_weight="importance")

    def keys(chunks):
        return [(list(chunk), chunk.get("age").tolist()) for chunk in chunks]

    ((first, *_),) = data.split().walk(keys, "labels", "age", "sample_weight", "by", rows=10)
    assert first == (["labels", "age", "sample_weight"], list(range(10)))


def test_walk_converts_probs_only_if_logits_are_asked_for(tmp_path):
    probs = np.array([[0.25, 0.75], [1.0, 0.0]])
    split = open_dataset(tiny(tmp_path / "a.npz", probs=probs)).split()
    ((chunk,),) = split.walk(list, "logits")
    np.testing.assert_allclose(np.exp(chunk["logits"]), probs, atol=1e-43)
    ((chunk,),) = split.walk(list, "probs")
    np.testing.assert_array_equal(chunk["probs"], probs)


def test_walk_yields_a_result_per_shard_with_or_without_threads(tmp_path):
    for i, rows in enumerate((5, 1, 7)):
        tiny(tmp_path / f"{i}.npz", **predictions(rows=rows))
    split = open_dataset(tmp_path).split()
    steps: list[tuple[int, int]] = []
    with use(progress=lambda *step: steps.append(step)):
        found = list(split.walk(lengths, "logits", rows=3))
    assert found == [[3, 2], [1], [3, 3, 1]]
    assert steps == [(done, 13) for done in (3, 5, 6, 9, 12, 13)]
    with ThreadPoolExecutor(2) as pool, use(executor=pool):
        assert list(split.walk(lengths, "logits", rows=3)) == found


def test_threads_read_headers_one_at_a_time(tmp_path):
    path = tiny(tmp_path / "a.npz", **predictions(rows=2))
    wait, threshold = (lambda *_: time.sleep(1e-5)), gc.get_threshold()
    gc.callbacks.append(wait)  # lets another thread begin while this one is within the parser
    gc.set_threshold(20)
    try:
        with ThreadPoolExecutor(4) as pool:
            opened = pool.map(open_dataset, [path] * 200)
            assert {data.split().rows for data in opened} == {2}
    finally:
        gc.callbacks.remove(wait)
        gc.set_threshold(*threshold)


@pytest.mark.parametrize("kind", [ValueError, TypeError])
def test_errors_of_a_walk_have_their_place(tmp_path, kind):
    split = open_dataset(tiny(tmp_path / "a.npz", **predictions())).split()

    def fails(chunks):
        for chunk in chunks:
            if chunk.get("labels")[0] == predictions()["labels"][10]:
                raise kind("too odd")

    assert predictions()["labels"][0] != predictions()["labels"][10]
    with pytest.raises(kind, match=r"a\.npz, counting from row 10: too odd$"):
        list(split.walk(fails, "labels", rows=10))


def test_damage_found_in_a_walk_names_the_file_once(tmp_path):
    path = tiny(tmp_path / "a.npz", logits=np.random.default_rng(0).normal(size=(500, 4)))
    content = bytearray(path.read_bytes())
    content[3000] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"^[^ ]*a\.npz is damaged or incomplete \(Bad CRC"):
        list(open_dataset(path).split().walk(list, "logits"))


# One open handle per file.


def replaced(path, arrays):
    """Put another file in the place of a file."""
    save_predictions(path.with_name(f"new{path.suffix}"), arrays)
    os.replace(path.with_name(f"new{path.suffix}"), path)


def rewritten(path, arrays):
    """Write other content into a file."""
    save_predictions(path.with_name(f"new{path.suffix}"), arrays)
    content = path.with_name(f"new{path.suffix}").read_bytes()
    with open(path, "r+b") as file:  # at once: a map of a file that shrinks would end the process
        file.write(content)
    os.utime(path, ns=(1, 1))  # as if it had been a while ago


SUFFIXES = [".npz", ".safetensors", pytest.param(".parquet", marks=needs_pyarrow)]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("change", [replaced, rewritten])
def test_a_file_that_changes_during_a_walk_never_mixes_generations(tmp_path, suffix, change):
    old, new = predictions(rows=5000, seed=1), predictions(rows=5000, seed=2)
    path = tmp_path / f"a{suffix}"
    save_predictions(path, old)
    split = open_dataset(path).split()

    def read(chunks):
        first = next(chunks)
        change(path, new)
        columns = [first, *chunks]
        return {key: np.concatenate([one[key] for one in columns]) for key in old}

    if change is rewritten:
        with pytest.raises(ValueError, match=rf"a\{suffix} was replaced or rewritten"):
            list(split.walk(read, "logits", "labels", rows=100))
        return
    ((found),) = split.walk(read, "logits", "labels", rows=100)
    for key in old:
        np.testing.assert_array_equal(found[key], old[key])
    assert_holds(split, old)  # the handle is still that of the old file
    assert_holds(open_dataset(path).split(), new)


def test_a_rewritten_npy_file_is_an_error(tmp_path):
    write_npy_folder(tmp_path / "run", predictions(rows=50, seed=1))
    split = open_dataset(tmp_path / "run").split()
    np.save(tmp_path / "run" / "logits.npy", predictions(rows=3, seed=2)["logits"])
    with pytest.raises(ValueError, match=r"logits\.npy was replaced or rewritten"):
        list(split.walk(list, "logits", "labels"))


def test_an_error_in_a_rewritten_file_is_explained_by_that(tmp_path):
    path = tmp_path / "a.npz"
    save_predictions(path, predictions(seed=1))
    split = open_dataset(path).split()

    def fails(chunks):
        next(chunks)
        rewritten(path, predictions(seed=2))
        raise ValueError("NaN")

    with pytest.raises(ValueError, match=r"a\.npz was replaced or rewritten"):
        list(split.walk(fails, "logits"))


def test_another_process_sees_that_a_file_was_replaced(tmp_path):
    path = tmp_path / "a.npz"
    save_predictions(path, predictions(seed=1))
    (shard,) = open_dataset(path).split().shards
    copy = pickle.loads(pickle.dumps(shard))
    replaced(path, predictions(seed=2))
    with pytest.raises(ValueError, match=r"a\.npz was replaced or rewritten"):
        next(copy.chunks(3, ["logits"]))


def test_only_so_many_files_stay_open(tmp_path, monkeypatch):
    monkeypatch.setattr("calibrant.data.shards.MAX_OPEN_FILES", 3)
    shards = [predictions(rows=2, seed=i) for i in range(8)]
    for i, arrays in enumerate(shards):
        save_predictions(tmp_path / f"{i}.npz", arrays)
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    data = open_dataset(tmp_path)
    assert_holds(data.split(), joined(*shards))
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + 3
    replaced(tmp_path / "0.npz", shards[1])  # closed by now: it would be opened anew
    with pytest.raises(ValueError, match=r"0\.npz was replaced or rewritten"):
        data.split().read("logits")


# ------------------------------------------------------------------------ shards that are not there


def broken(path, how):
    """Put something in the place of a shard."""
    arrays = predictions(rows=8)
    if how == "link":
        path.symlink_to(path.with_name("gone"))
    elif how == "folder":
        path.mkdir()
    elif how == "capitals":
        np.savez(path.with_suffix(".x"), **arrays)
        path.with_suffix(".x.npz").rename(path.with_suffix(".NPZ"))
    else:
        kept = {"labels only": ["labels"], "logits only": ["logits"], "groups only": ["group"]}
        arrays["group"] = arrays["labels"]
        np.savez(path, **{key: arrays[key] for key in kept.get(how, [])})


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("link", r"1\.npz is a link to a file that does not exist"),
        ("folder", r"1\.npz is a folder"),
        ("capitals", r"1\.NPZ has its suffix in capitals"),
        ("labels only", r"1\.npz has no logits, probs or features, only labels"),
        ("logits only", r"1\.npz has no labels"),
        ("groups only", r"1\.npz has no logits, probs or features, only group"),
        ("nothing", r"1\.npz holds no arrays"),
    ],
)
def test_a_shard_that_cannot_be_used_is_an_error(tmp_path, how, message):
    for i in (0, 2):
        np.savez(tmp_path / f"{i}.npz", **predictions(rows=8))
    broken(tmp_path / "1.npz", how)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        open_dataset(tmp_path).split().labels.sum()


def test_labels_of_one_split_alone_are_an_error_only_for_that_split(tmp_path):
    first = under("val", predictions(rows=8)) | under("test", predictions(rows=8))
    second = under("val", predictions(rows=4)) | {"test_labels": np.zeros(4, int)}
    np.savez(tmp_path / "0.npz", **first)
    np.savez(tmp_path / "1.npz", **second)
    data = open_dataset(tmp_path)
    assert data.split("val").rows == 12
    with pytest.raises(
        ValueError, match=r"1\.npz has no logits, probs or features of split 'test'"
    ):
        data.split("test")


def test_the_last_layer_may_have_a_file_of_its_own(tmp_path):
    np.savez(tmp_path / "0.npz", **predictions(rows=8))
    np.savez(tmp_path / "head.npz", head_weight=np.ones((5, 2)), head_bias=np.ones(5))
    data = open_dataset(tmp_path)
    assert data.split().rows == 8
    assert data.has_head


@pytest.mark.parametrize("first", [0, 1])
def test_names_that_count_the_shards_are_complete(tmp_path, first):
    paths = [tmp_path / f"x-{i:02}-of-03.npz" for i in range(first, first + 3)]
    for path in paths:
        np.savez(path, **predictions(rows=8))
    assert open_dataset(tmp_path).split().rows == 24
    assert open_dataset(tmp_path / f"x-0{first}*.npz").split().rows == 8  # chosen, not missing
    paths[1].unlink()
    with pytest.raises(FileNotFoundError, match=rf"{paths[1].name} is missing among 3 shards"):
        open_dataset(tmp_path)
