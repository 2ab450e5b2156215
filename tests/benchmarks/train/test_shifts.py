"""Corrupted and out-of-distribution images against their definitions."""

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from benchmarks.train import shifts
from benchmarks.train.images import read_images
from benchmarks.train.shifts import CORRUPTIONS, OOD_KINDS, corrupted, ood_images


@pytest.fixture(scope="module")
def photos():
    """Smooth random images with a little texture, ``(120, 3, 32, 32)``."""
    rng = np.random.default_rng(3)
    walk = rng.normal(size=(120, 3, 32, 32)).cumsum(2).cumsum(3)
    walk -= walk.mean((2, 3), keepdims=True)
    walk *= 45 / walk.std((2, 3), keepdims=True)
    return (walk + 120 + rng.normal(0, 5, walk.shape)).clip(0, 255).astype(np.uint8)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(shifts, "CHUNK", 50)


def distances(images, name, severities=(1, 2, 3, 4, 5)):
    results = [corrupted(images, name, severity) for severity in severities]
    assert all(each.dtype == np.uint8 and each.shape == images.shape for each in results)
    return np.array([((each.astype(float) - images) ** 2).mean() for each in results])


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_each_severity_changes_more(photos, name):
    changes = distances(photos, name)
    assert changes[0] > 1
    assert (np.diff(changes) > 0.05 * changes[:-1]).all()
    severities = (1, 2, 3, 5) if name == "pixelate" else (1, 2, 3, 4, 5)
    assert (np.diff(distances(read_images().test.images, name, severities)) > 0).all()


@pytest.mark.parametrize(
    ("severity", "deviation"), [(1, 0.04), (2, 0.08), (3, 0.12), (4, 0.16), (5, 0.2)]
)
def test_noise_has_its_deviation(severity, deviation):
    gray = np.full((200, 3, 32, 32), 128, np.uint8)
    noisy = corrupted(gray, "noise", severity).astype(float)
    # clipping beyond 2.5 deviations takes 1 % off the last
    assert noisy.std() / 255 == pytest.approx(deviation, rel=0.005 if severity < 4 else 0.015)
    assert noisy.mean() == pytest.approx(127.9, abs=0.2)
    first, second = (noisy[:, channel].ravel() for channel in (0, 1))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.01


def test_noise_depends_on_its_seed_and_differs_between_images(photos, small_chunks):
    first, again, other = (corrupted(photos, "noise", 2, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.9
    noisy = corrupted(np.full((120, 1, 4, 4), 128, np.uint8), "noise", 2)
    assert len(np.unique(noisy.reshape(120, -1), axis=0)) == 120


@pytest.mark.parametrize(("severity", "sigma"), [(1, 0.5), (2, 0.75), (3, 1), (4, 1.5), (5, 2)])
def test_blur_is_the_gaussian_filter(photos, severity, sigma):
    images = photos[:5, :, :20]  # not square
    expected = ndimage.gaussian_filter(
        images.astype(float),
        (0, 0, sigma, sigma),
        mode="nearest",
        radius=(0, 0, *2 * [int(np.ceil(3 * sigma))]),
    )
    assert abs(corrupted(images, "blur", severity) - expected).max() < 0.501


@pytest.mark.parametrize(
    ("severity", "factor"), [(1, 0.8), (2, 0.6), (3, 0.45), (4, 0.3), (5, 0.15)]
)
def test_contrast_shrinks_differences_from_the_mean(photos, severity, factor):
    mean = photos[:5].mean((2, 3), keepdims=True)
    expected = mean + factor * (photos[:5] - mean)
    assert abs(corrupted(photos[:5], "contrast", severity) - expected).max() < 0.501


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
def test_brightness_adds_and_clips(photos, severity):
    expected = np.minimum(photos[:5] + 0.1 * severity * 255, 255)
    assert abs(corrupted(photos[:5], "brightness", severity) - expected).max() < 0.501


@pytest.mark.parametrize(("severity", "side"), [(1, 2), (2, 3), (3, 4), (4, 6), (5, 8)])
def test_pixelate_averages_squares(photos, severity, side):
    images = photos[:3, :, :20]
    result = corrupted(images, "pixelate", severity)
    for top in range(0, 20, side):
        for left in range(0, 32, side):
            square = (..., slice(top, top + side), slice(left, left + side))
            mean = images[square].mean((2, 3), keepdims=True)
            assert abs(result[square] - mean).max() < 0.501


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_chunks_do_not_change_results_or_inputs(photos, name, small_chunks):
    before = photos.copy()
    whole = corrupted(photos, name, 3)
    for start in (0, 90) if name != "noise" else (0,):
        some = slice(start, start + 20)
        np.testing.assert_array_equal(corrupted(photos[some], name, 3), whole[some])
    np.testing.assert_array_equal(photos, before)
    assert corrupted(photos[:0], name, 1).shape == (0, 3, 32, 32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fog", 1), "name must be one of noise, blur, contrast, brightness, pixelate, got 'fog'"),
        (("blur", 0), r"severity must be 1, 2 \.\.\. 5, got 0"),
        (("blur", 6), "got 6"),
        (("blur", 1.5), "got 1.5"),
    ],
)
def test_unknown_corruptions_and_severities_are_refused(photos, arguments, message):
    with pytest.raises(ValueError, match=message):
        corrupted(photos, *arguments)
    with pytest.raises(ValueError, match=r"images must be uint8 .* got float64"):
        corrupted(photos / 255, "blur", 1)


# Out-of-distribution images.


@pytest.mark.parametrize("kind", OOD_KINDS)
def test_ood_images_have_the_shape_of_the_others_and_depend_on_the_seed(photos, kind, small_chunks):
    first, again, other = (ood_images(photos, kind, seed=seed) for seed in (0, 0, 1))
    assert first.dtype == np.uint8
    assert first.shape == photos.shape
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.5
    assert len(np.unique(first.reshape(len(first), -1), axis=0)) == len(first)


def test_gaussian_images_have_the_moments_of_each_channel(rng):
    centres = np.array([90, 120, 160])[None, :, None, None]
    like = (centres + rng.normal(0, 20, (200, 3, 16, 16))).clip(0, 255).astype(np.uint8)
    drawn = ood_images(like, "gaussian").astype(float)
    np.testing.assert_allclose(drawn.mean((0, 2, 3)), like.mean((0, 2, 3)), atol=0.5)
    np.testing.assert_allclose(drawn.std((0, 2, 3)), like.std((0, 2, 3)), atol=0.5)


def test_uniform_images_have_all_values_equally_often(photos):
    counts = np.bincount(ood_images(photos, "uniform").ravel(), minlength=256)
    expected = photos.size / 256
    assert ((counts - expected) ** 2 / expected).sum() < 256 + 5 * np.sqrt(2 * 256)


def test_shuffled_images_keep_their_colours_but_not_their_order(photos):
    shuffled = ood_images(photos, "shuffled")
    for image, result in zip(photos[::50], shuffled[::50], strict=True):
        before, after = (sorted(map(tuple, x.reshape(3, -1).T.tolist())) for x in (image, result))
        assert before == after
    # neighbouring pixels are similar in a photo, and no longer
    original, moved = (
        np.corrcoef(x[..., :-1].ravel(), x[..., 1:].ravel())[0, 1] for x in (photos, shuffled)
    )
    between_images = photos.mean((2, 3)).var() / photos.var()
    assert original > 0.9
    assert abs(moved - between_images) < 0.05


def test_smaller_images_are_centred_on_black(photos, rng):
    other = rng.integers(1, 256, (60, 1, 28, 27), np.uint8)
    result = ood_images(photos, other)
    assert result.shape == (60, 3, 32, 32)
    for channel in range(3):
        np.testing.assert_array_equal(result[:, channel, 2:30, 2:29], other[:, 0])
    assert result.astype(int).sum() == 3 * other.astype(int).sum()


def test_larger_images_are_scaled_and_colour_becomes_gray_as_in_pillow(rng):
    other = rng.integers(0, 256, (20, 3, 20, 12), np.uint8)
    scaled = ood_images(np.zeros((30, 3, 8, 8), np.uint8), other)
    gray = ood_images(np.zeros((30, 1, 20, 12), np.uint8), other)
    assert (scaled.shape, gray.shape) == ((20, 3, 8, 8), (20, 1, 20, 12))
    for image, small, plane in zip(other, scaled, gray, strict=True):
        picture = Image.fromarray(image.transpose(1, 2, 0))
        expected = np.asarray(picture.resize((8, 8), Image.Resampling.BILINEAR)).astype(int)
        assert abs(expected.transpose(2, 0, 1) - small).max() <= 1
        assert abs(np.asarray(picture.convert("L")).astype(int) - plane[0]).max() <= 1


def test_images_of_another_set_are_drawn_without_repetition():
    other = np.arange(300, dtype=">u2").view(np.uint8).reshape(300, 1, 1, 2)
    like = np.zeros((50, 1, 1, 2), np.uint8)
    first, again, second = (
        ood_images(like, other, seed=seed).reshape(-1, 2) @ [256, 1] for seed in (0, 0, 1)
    )
    assert len(set(first)) == 50
    np.testing.assert_array_equal(first, again)
    assert set(first) != set(second)
    assert first.max() > 200


@pytest.mark.parametrize(
    ("like", "kind", "message"),
    [
        ((5, 3, 8, 8), "fog", "one of gaussian, uniform, shuffled, got 'fog'"),
        ((5, 8, 8), "uniform", "like must be uint8"),
        ((5, 3, 8, 8), np.zeros((5, 3, 8, 8)), "kind must be uint8"),
        ((5, 3, 8, 8), np.zeros((5, 4, 8, 8), np.uint8), "1 or 3 channels, got 4"),
    ],
)
def test_unknown_kinds_and_shapes_of_ood_images_are_refused(like, kind, message):
    with pytest.raises(ValueError, match=message):
        ood_images(np.zeros(like, np.uint8), kind)
