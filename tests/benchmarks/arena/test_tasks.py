"""Tasks from files, their splits and fingerprints."""

import numpy as np
import pytest
from scipy.special import expit, softmax

from benchmarks.arena.tasks import (
    Examples,
    Predictions,
    digest,
    find_tasks,
    logits_of,
    stratified,
)
from calibrant.data import save_predictions
from tests.support.predictions import predictions, splits


@pytest.fixture
def tree(tmp_path, rng):
    """Two models of one data set, one of two classes, and files that are no tasks."""
    labels = predictions(seed=1)["labels"]
    for name in ("b_2", "b_10"):
        logits = rng.normal(size=(len(labels), 4))
        both = {"logits": logits, "labels": labels % 4}
        np.savez(tmp_path / f"{name}.npz", **splits(val=both, test=both))
    deep = tmp_path / "deep" / "er"
    deep.mkdir(parents=True)
    odds = {"logits": rng.normal(size=20), "labels": np.arange(20) % 2}
    odds["labels"][3] = -100
    save_predictions(deep / "two.safetensors", splits(val=odds, test=odds))
    np.savez(tmp_path / "plain.npz", **predictions(seed=2))
    tags = {"logits": rng.normal(size=(9, 3)), "labels": np.ones((9, 3), int)}
    np.savez(tmp_path / "tags.npz", **splits(val=tags, test=tags))
    (tmp_path / "broken.npz").write_bytes(b"nothing")
    (tmp_path / "notes.txt").write_text("no data")
    return tmp_path


def test_a_folder_tree_is_searched(tree):
    tasks, skipped = find_tasks(tree)
    folder = tree.name
    assert [(task.suite, task.name) for task in tasks] == [
        (f"{folder}-multiclass", "b_2"),
        (f"{folder}-multiclass", "b_10"),
        ("deep/er-binary", "two"),
    ]
    assert tasks[0].dataset == tasks[1].dataset != tasks[2].dataset
    assert tasks[0].read().fingerprint != tasks[1].read().fingerprint
    assert len(skipped) == 3
    for text in ("plain.npz has no split 'val'", "tags.npz is multi-label", "broken.npz"):
        assert any(text in reason for reason in skipped)


def test_a_file_of_predictions_is_known_by_its_folder(tmp_path):
    both = splits(val=predictions(seed=1), test=predictions(seed=2))
    home = tmp_path / "runs" / "net.v1"
    home.mkdir(parents=True)
    np.savez(home / "predictions.npz", **both)
    for root in (tmp_path, tmp_path / "runs", home, home / "predictions.npz"):
        (task,) = find_tasks(root).tasks
        assert (task.suite, task.name) == ("runs-multiclass", "net.v1")


def test_log_odds_become_two_columns_without_ignored_rows(tree):
    (task,) = find_tasks(tree / "deep" / "er" / "two.safetensors").tasks
    assert task.suite == "er-binary"
    read = task.read()
    stored = np.delete(np.asarray(predictions_of(tree / "deep" / "er" / "two.safetensors")), 3)
    np.testing.assert_allclose(softmax(read.test.logits, -1)[:, 1], expit(stored), rtol=1e-6)
    assert read.classes == 2
    assert len(read.fit.labels) == 19


def predictions_of(path):
    from safetensors.numpy import load_file

    return load_file(path)["test_logits"]


def test_features_and_the_last_layer_come_along(tmp_path, rng):
    both = {"logits": rng.normal(size=(6, 3)), "labels": np.arange(6) % 3}
    both["features"] = rng.normal(size=(6, 5))
    head = {"head_weight": rng.normal(size=(3, 5)), "head_bias": np.zeros(3)}
    np.savez(tmp_path / "p.npz", **splits(val=both, test=both), **head)
    read = find_tasks(tmp_path).tasks[0].read()
    assert read.head is not None
    np.testing.assert_array_equal(read.test.features, both["features"])
    np.testing.assert_array_equal(read.head[0], head["head_weight"])
    redrawn = read.redrawn(1)
    assert redrawn.head is not None
    assert redrawn.fit.features is not None
    np.testing.assert_array_equal(redrawn.head[0], head["head_weight"])
    where = [np.flatnonzero((both["features"] == row).all(1))[0] for row in redrawn.fit.features]
    np.testing.assert_array_equal(redrawn.fit.logits, both["logits"][where])


def test_stored_probabilities(tmp_path):
    probs = np.array([[0.25, 0.75, 0.0], [0.5, 0.25, 0.25]], np.float32)
    both = {"probs": probs, "labels": np.array([1, 0])}
    np.savez(tmp_path / "p.npz", **splits(val=both, test=both))
    read = find_tasks(tmp_path).tasks[0].read()
    np.testing.assert_allclose(softmax(read.fit.logits, -1), probs, atol=1e-30)
    assert np.isfinite(read.fit.logits).all()


def test_nothing_to_do_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        find_tasks(tmp_path / "nowhere")
    np.savez(tmp_path / "plain.npz", **predictions(seed=2))
    with pytest.raises(ValueError, match=r"no file with the splits val and test: .*plain\.npz"):
        find_tasks(tmp_path)


def write_hdf5(path, groups):
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for name, arrays in groups.items():
            for key, values in arrays.items():
                file[f"{name}/{key}"] = values


def test_layout_of_calarena(tmp_path, rng):
    probs = rng.dirichlet([1, 1, 1], 8).astype(np.float32)
    many = {"probas_cal": probs[:5], "labels_cal": np.arange(5) % 3}
    many |= {"probas_test": probs[5:], "labels_test": np.arange(3)}
    two = {"probas_cal": probs[:4, 0], "labels_cal": np.array([0, 1, 0, 1])}
    two |= {"probas_test": probs[4:, :1], "labels_test": np.array([0, 1, 1, 1], np.uint8)}
    path = tmp_path / "cv-binary.h5"
    write_hdf5(path, {"c10/net": two, "c10/other": two, "birds/net": many})
    tasks = find_tasks(path).tasks
    expected = [("birds", "birds/net"), ("c10", "c10/net"), ("c10", "c10/other")]
    assert [(task.dataset, task.name) for task in tasks] == expected
    assert {task.suite for task in tasks} == {"cv-binary"}
    assert [task.suite for task in find_tasks(tmp_path).tasks] == ["cv-binary"] * 3
    read = tasks[0].read()
    np.testing.assert_allclose(np.exp(read.fit.logits), probs[:5], rtol=1e-6)
    np.testing.assert_array_equal(read.test.labels, [0, 1, 2])
    read = tasks[1].read()
    np.testing.assert_allclose(np.exp(read.fit.logits[:, 1]), probs[:4, 0], rtol=1e-6)
    np.testing.assert_allclose(np.exp(read.test.logits[:, 1]), probs[4:, 0], rtol=1e-6)
    assert read.test.labels.dtype == np.int64


def test_an_incomplete_group_is_an_error(tmp_path):
    write_hdf5(tmp_path / "x.h5", {"a/b": {"probas_cal": np.ones(3)}})
    with pytest.raises(ValueError, match="a/b has no labels_cal, probas_test, labels_test"):
        find_tasks(tmp_path)


@pytest.mark.parametrize(("sizes", "count"), [((60, 30, 10), 50), ((7, 1, 1), 4), ((5, 5), 9)])
def test_a_draw_has_its_share_of_every_class(sizes, count):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    draws = [stratified(labels, count, seed) for seed in (1, 2)]
    for rows in draws:
        assert len(set(rows.tolist())) == count
        shares = np.bincount(labels[rows], minlength=len(sizes))
        assert np.abs(shares - np.array(sizes) * count / len(labels)).max() < 1
    assert set(draws[0].tolist()) != set(draws[1].tolist())
    np.testing.assert_array_equal(draws[0], stratified(labels, count, 1))


def test_every_row_is_as_likely_to_be_drawn():
    labels = np.array([0] * 12 + [1] * 8)
    often = np.zeros(20)
    for seed in range(2000):
        often[stratified(labels, 5, seed)] += 1
    # 500 draws of each are expected, with a standard deviation of 19
    assert np.abs(often - 500).max() < 80


def test_other_seeds_redraw_the_same_examples(rng):
    logits, labels = rng.normal(size=(30, 3)), np.arange(30) % 3
    whole = Predictions(Examples(logits[:12], labels[:12]), Examples(logits[12:], labels[12:]))
    assert whole.redrawn(0) is whole
    again = whole.redrawn(1)
    assert (len(again.fit.labels), len(again.test.labels)) == (12, 18)
    np.testing.assert_array_equal(np.bincount(again.fit.labels), [4, 4, 4])
    both = np.concatenate([again.fit.logits, again.test.logits])
    np.testing.assert_array_equal(np.sort(both, 0), np.sort(logits, 0))
    assert again.fingerprint == whole.redrawn(1).fingerprint != whole.fingerprint


def test_fingerprints_see_values_shapes_and_types():
    one = np.arange(6.0)
    others = [one.astype(np.float32), one.reshape(2, 3), one[::-1], one + 1e-9]
    assert len({digest([array]) for array in (one, *others)}) == 5
    assert digest([one, None]) == digest([one.copy()])


def test_probabilities_out_of_range_are_refused():
    for bad in (1.5, -0.1, np.nan):
        with pytest.raises(ValueError, match=r"must be in \[0, 1\]"):
            logits_of(np.array([0.5, bad]))
