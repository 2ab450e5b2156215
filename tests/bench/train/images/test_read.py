"""Folders of PNG and JPEG files: a folder for each class, and Tiny-ImageNet."""

import shutil
import sys

import numpy as np
import pytest
from PIL import Image

from calibrant.bench.train.images.image_set import ImageSplit
from calibrant.bench.train.images.read import read_images
from tests.support.images import assert_image_set, random_images


def save_picture(path, image, **options):
    """Save ``(channels, height, width)``, gray if there is one channel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
    Image.fromarray(pixels).save(path, **options)


def save_class_folders(folder, split, names, suffixes=("png",)):
    for number, (image, label) in enumerate(zip(split.images, split.labels, strict=True)):
        suffix = suffixes[number % len(suffixes)]
        save_picture(folder / names[label] / f"{number:03}.{suffix}", image)


def by_label(split):
    return split.subset(np.argsort(split.labels, kind="stable"))


@pytest.fixture
def animals(tmp_path, rng):
    """Make the folder of a set of three classes, and return it with its splits."""

    def make(shape=(3, 6, 7), test_name="test"):
        train, test = random_images(rng, 12, shape, 3), random_images(rng, 6, shape, 3)
        test = test.subset(test.labels != 1)  # the class in the middle is not tested
        save_class_folders(tmp_path / "train", train, ["ape", "bee", "cat"])
        save_class_folders(tmp_path / test_name, test, ["ape", "bee", "cat"], ("png", "PNG"))
        return tmp_path, by_label(train), by_label(test)

    return make


@pytest.mark.parametrize(("shape", "test_name"), [((3, 6, 7), "test"), ((1, 5, 4), "val")])
def test_class_folders_are_read_in_the_order_of_names(animals, shape, test_name):
    folder, train, test = animals(shape, test_name)
    (folder / "train" / "ape" / "notes.txt").write_text("no image")
    (folder / "train" / "ape" / "._000.png").write_text("no image")
    (folder / "train" / ".cache").mkdir()
    assert_image_set(read_images(folder), train, test, 3)


def test_one_colour_image_makes_three_channels(animals, rng):
    folder, train, test = animals((1, 6, 7))
    colour = rng.integers(0, 256, (3, 6, 7), np.uint8)
    save_picture(min((folder / "test" / "ape").iterdir()), colour)
    train, test = (ImageSplit(x.images.repeat(3, 1), x.labels) for x in (train, test))
    test.images[0] = colour
    assert_image_set(read_images(folder), train, test, 3)


def test_jpegs_are_decoded(tmp_path):
    """A JPEG of one colour is exact but for rounding."""
    for name, value in (("a", 10), ("b", 200)):
        for split in ("train", "test"):
            image = np.full((3, 16, 16), value, np.uint8)
            save_picture(tmp_path / split / name / "one.JPG", image, quality=95)
            save_picture(tmp_path / split / name / "two.jpeg", image, quality=95)
    images = read_images(tmp_path).test.images
    assert images.shape == (4, 3, 16, 16)
    assert abs(images - np.array([10, 10, 200, 200])[:, None, None, None]).max() <= 2


@pytest.fixture
def tiny_imagenet(tmp_path, rng):
    """Three classes out of order; PNG data under the name of JPEG keep the pixels exact."""
    names = ["n03", "n01", "n02"]
    train, test = random_images(rng, 9, (3, 8, 8), 3), random_images(rng, 5, (3, 8, 8), 3)
    for number, (image, label) in enumerate(zip(*train, strict=True)):
        name = names[label]
        path = tmp_path / "train" / name / "images" / f"{name}_{number}.JPEG"
        save_picture(path, image, format="png")
    lines = []
    for number, (image, label) in enumerate(zip(*test, strict=True)):
        save_picture(tmp_path / "val" / "images" / f"val_{number}.JPEG", image, format="png")
        lines.append(f"val_{number}.JPEG\t{names[label]}\t0\t0\t7\t7")
    (tmp_path / "wnids.txt").write_text("\n".join(names) + "\n")
    (tmp_path / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "test").mkdir()  # has no labels, and is not read
    return tmp_path, by_label(train), test


def test_tiny_imagenet_is_read_in_the_order_of_its_list(tiny_imagenet):
    folder, train, test = tiny_imagenet
    assert_image_set(read_images(folder), train, test, 3)


# Errors name the file, the problem and the remedy.


def assert_refused(folder, *words):
    with pytest.raises(ValueError, match=r".") as raised:
        read_images(folder)
    for word in words:
        assert str(word) in str(raised.value)


def test_missing_test_split_is_named(animals):
    folder, *_ = animals()
    shutil.rmtree(folder / "test")
    assert_refused(folder, "neither test nor val", folder, "move some")


def test_test_class_without_training_images_is_named(animals):
    folder, *_ = animals()
    save_picture(folder / "test" / "dog" / "one.png", np.zeros((3, 6, 7), np.uint8))
    assert_refused(folder, "is a class that", folder / "test" / "dog", "remove it")


@pytest.mark.parametrize("split", ["train", "test"])
def test_class_without_images_is_named(animals, split):
    folder, *_ = animals()
    (folder / "train" / "dog").mkdir()
    (folder / split / "dog").mkdir(exist_ok=True)
    if split == "test":
        save_picture(folder / "train" / "dog" / "one.png", np.zeros((3, 6, 7), np.uint8))
    assert_refused(folder, "has no PNG or JPEG files", folder / split / "dog", "remove the folder")


def test_training_folder_without_classes_is_named(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "val").mkdir()
    assert_refused(tmp_path, tmp_path / "train", "a folder of images for each class, got none")


@pytest.mark.parametrize("place", ["train/bee/zz.png", "test/ape/zz.png"])
def test_first_image_of_another_size_is_named(animals, place):
    folder, *_ = animals()
    save_picture(folder / place, np.zeros((3, 7, 6), np.uint8))
    save_picture(folder / "test" / "cat" / "zzz.png", np.zeros((3, 9, 9), np.uint8))
    assert_refused(folder, f"(7, 6) in {folder / place}", "(6, 7) in", "resize")


def test_unreadable_image_is_named(animals, rng):
    folder, *_ = animals((1, 6, 7))
    path = folder / "train" / "bee" / "zz.png"
    Image.fromarray(np.full((6, 7), 1000, np.uint16)).save(path)
    assert_refused(folder, "more than 8 bits per channel", path, "replace or remove it")
    save_picture(path, random_images(rng, 1, (3, 6, 7)).images[0])
    path.write_bytes(path.read_bytes()[:-60])
    assert_refused(folder, "must be a PNG or JPEG file", path, "replace or remove it")


@pytest.mark.parametrize("name", ["wnids.txt", "val/val_annotations.txt"])
def test_empty_list_of_tiny_imagenet_is_named(tiny_imagenet, name):
    folder, *_ = tiny_imagenet
    (folder / name).write_text("\n")
    assert_refused(folder, f"{name} is missing or empty", folder, "download")


@pytest.mark.parametrize("line", ["val_0.JPEG\tn99", "val_0.JPEG"])
def test_annotation_of_an_unknown_class_is_named(tiny_imagenet, line):
    folder, *_ = tiny_imagenet
    with (folder / "val" / "val_annotations.txt").open("a") as file:
        file.write(line + "\n")
    assert_refused(folder, "line 6 of", "val_annotations.txt", line.split("\t")[-1])


def test_missing_images_of_tiny_imagenet_are_named(tiny_imagenet):
    folder, *_ = tiny_imagenet
    (folder / "val" / "images" / "val_3.JPEG").unlink()
    assert_refused(folder, "val_3.JPEG", "replace or remove it")
    shutil.rmtree(folder / "train" / "n01")
    assert_refused(folder, folder / "train" / "n01" / "images", "has no PNG or JPEG files")


def test_missing_pillow_is_named(animals, monkeypatch):
    folder, *_ = animals()
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match="pip install pillow"):
        read_images(folder)
