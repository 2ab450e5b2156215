"""Image sets: checks, fingerprint, the validation split, and the digits."""

import hashlib
import sys

import numpy as np
import pytest

from calibrant.bench.train.images.image_set import ImageSplit, hold_out, make_image_set
from calibrant.bench.train.images.read import read_images
from tests.support.images import random_images


def test_digits_are_the_default():
    digits = read_images()
    assert digits.train.images.shape == (1437, 1, 8, 8)
    assert digits.test.images.shape == (360, 1, 8, 8)
    assert digits.train.images.max() == 255
    assert digits.fingerprint == "3704f0fd277e22d1b91158273c26a251496d79933a705434ccbd2a113646d2ba"


def test_missing_scikit_learn_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'calibrant\[train\]'"):
        read_images()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: ImageSplit(x.images / 255, x.labels), "test images must be uint8"),
        (lambda x: ImageSplit(x.images[0], x.labels), "n, channels, height, width"),
        (lambda x: ImageSplit(x.images, x.labels[1:]), r"6 images and labels of shape \(5,\)"),
        (lambda x: x.subset(slice(0)), "some images"),
        (lambda x: ImageSplit(x.images[:, :, 1:], x.labels), r"\(3, 31, 32\)"),
        (lambda x: ImageSplit(x.images, x.labels + 1), "got 0 to 3"),
        (lambda x: ImageSplit(x.images, x.labels - 1), "got -1 to 2"),
    ],
)
def test_splits_that_do_not_match_are_refused(rng, change, message):
    with pytest.raises(ValueError, match=message):
        make_image_set(random_images(rng, 6, classes=3), change(random_images(rng, 6, classes=3)))


def test_fingerprint_is_the_hash_of_all_images_and_labels(rng):
    train, test = random_images(rng, 20), random_images(rng, 20)
    values = (train.images, train.labels, test.images, test.labels)
    expected = hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()
    assert make_image_set(train, test).fingerprint == expected
    other_order = ImageSplit(np.asfortranarray(train.images), train.labels)
    assert make_image_set(other_order, test).fingerprint == expected
    assert make_image_set(test, train).fingerprint != expected


def numbered(labels):
    """Images that carry their number in their first two pixels."""
    images = np.zeros((len(labels), 1, 2, 2), np.uint8)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = np.divmod(np.arange(len(labels)), 256)
    return ImageSplit(images, labels)


def numbers(split):
    return split.images[:, 0, 0, :2].astype(int) @ [256, 1]


def test_held_out_images_are_disjoint_and_stratified(rng):
    labels = rng.permutation(np.repeat(np.arange(4), [400, 200, 100, 33]))
    whole = numbered(labels)
    splits = hold_out(make_image_set(whole, whole.subset(slice(20))), 0.2)
    train, val = numbers(splits.train), numbers(splits.val)
    np.testing.assert_array_equal(np.sort(np.concatenate([train, val])), np.arange(len(labels)))
    np.testing.assert_array_equal(splits.train.labels, labels[train])
    np.testing.assert_array_equal(splits.val.labels, labels[val])
    np.testing.assert_array_equal(np.bincount(splits.val.labels), [80, 40, 20, 7])
    np.testing.assert_array_equal(splits.test.images, whole.images[:20])


def test_held_out_images_depend_on_the_seed_alone():
    whole = numbered(np.arange(300) % 3)
    images = make_image_set(whole, whole)
    first, again, other = (numbers(hold_out(images, seed=seed).val) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert set(first) != set(other)
    # pinned, because results of different days share the split
    assert first[:5].tolist() == [15, 17, 44, 48, 60]
