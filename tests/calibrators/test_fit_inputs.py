"""Warnings about the data of a fit; folds: disjoint, with all classes, groups kept together."""

import numpy as np
import pytest

from calibrant.calibrators.fit_inputs import _warn_of_few, folds


class X:
    multilabel = False

    def size(self, classes):
        return 2 * classes

    effective_size = size


def test_fewer_examples_than_enough_are_told_of():
    def warn(count, distinct):
        _warn_of_few(X(), count, 3, distinct)

    warn(30, None)  # a warning would be an error
    warn(100, 30)
    with pytest.warns(
        UserWarning, match=r"X has 6 parameters for 29 examples: it may .*\(ts has one\)"
    ):
        warn(29, None)
    with pytest.warns(UserWarning, match=r"for 100 examples \(29 of the first are not alike\)"):
        warn(100, 29)


@pytest.fixture
def labels(rng):
    return rng.choice(4, 203, p=[0.6, 0.25, 0.1, 0.05])


@pytest.mark.parametrize("count", [1, 2, 5, 10])
def test_folds_are_disjoint_and_cover_all(labels, count):
    parts = folds(labels, count)
    assert len(parts) == count
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(203))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    for part in parts:
        np.testing.assert_array_equal(part, np.sort(part))


@pytest.mark.parametrize("count", [2, 5])
def test_every_fold_has_its_share_of_every_class(labels, count):
    for of_class in range(4):
        held = [(labels[part] == of_class).sum() for part in folds(labels, count)]
        assert max(held) - min(held) <= 1


def test_groups_stay_together(rng, labels):
    names = np.array([f"patient {i}" for i in rng.integers(0, 30, 203)])
    for groups in (names, rng.integers(0, 30, 203)):
        parts = folds(labels, 4, groups=groups)
        np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(203))
        held = [set(groups[part]) for part in parts]
        assert sum(map(len, held)) == len(set(groups))
        assert max(map(len, held)) - min(map(len, held)) <= 1


def test_folds_follow_the_seed(labels):
    groups = np.arange(203) // 3
    for more in ({}, {"groups": groups}):
        same, again, other = (folds(labels, 5, seed=seed, **more) for seed in (3, 3, 4))
        for one, two in zip(same, again, strict=True):
            np.testing.assert_array_equal(one, two)
        assert set(same[0]) != set(other[0])


def test_neighbours_of_one_class_are_dealt_out_by_chance():
    first = [folds(np.zeros(20, dtype=int), 2, seed=seed)[0].tolist() for seed in range(20)]
    assert len(set(map(tuple, first))) == 20


def test_there_are_no_more_folds_than_samples_or_groups():
    assert sorted(map(len, folds(np.array([1, 0, 1]), 10))) == [1, 1, 1]
    groups = np.array([0, 0, 1, 1, 1, 1])
    assert sorted(map(len, folds(np.zeros(6, dtype=int), 10, groups=groups))) == [2, 4]
