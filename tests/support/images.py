"""Random labelled images, and comparisons of image sets."""

import numpy as np

from benchmarks.train.images import ImageSplit


def random_images(rng, count, shape=(3, 32, 32), classes=10):
    """Random images whose labels contain every class, in random order."""
    images = rng.integers(0, 256, (count, *shape), np.uint8)
    return ImageSplit(images, rng.permutation(np.arange(count) % classes))


def assert_image_set(images, train, test, classes):
    for split, expected in ((images.train, train), (images.test, test)):
        np.testing.assert_array_equal(split.images, expected.images)
        np.testing.assert_array_equal(split.labels, expected.labels)
        assert split.images.dtype == np.uint8
        assert split.labels.dtype == np.int64
        assert split.images.flags.writeable  # torch warns of others
        assert split.images.flags.c_contiguous
    assert images.classes == classes
