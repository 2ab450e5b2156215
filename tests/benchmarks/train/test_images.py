"""Image sets against files written here, their checks, fingerprint, and validation split."""

import gzip
import hashlib
import pickle
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.train.images import ImageSplit, hold_out, make_image_set, read_images
from tests.support.images import assert_image_set, random_images


def assert_refused(folder, *words):
    with pytest.raises(ValueError, match=r".") as raised:
        read_images(folder)
    for word in words:
        assert str(word) in str(raised.value)


# CIFAR and MNIST.


def fifths(split):
    return [split.subset(slice(start, None, 5)) for start in range(5)]


def concatenated(batches):
    return ImageSplit(*map(np.concatenate, zip(*batches, strict=True)))


# Writers return the usual folder name, the files, and the training split in their order.


def python2_pickle(split, key):
    """A batch as Python 2 pickled it, opcode by opcode."""

    def text(value):
        return b"U" + bytes([len(value)]) + value

    def number(value):
        return b"J" + struct.pack("<i", value)

    rows = b"".join(image.tobytes() for image in split.images)  # red, green, blue planes
    kind = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNN"
    kind += number(-1) + number(-1) + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b")
    array += b"\x87R(K\x01" + number(len(split.images)) + number(3072) + b"\x86" + kind
    array += b"\x89T" + struct.pack("<i", len(rows)) + rows + b"tb"
    labels = b"](" + b"".join(number(int(label)) for label in split.labels) + b"e"
    coarse = text(b"coarse_labels") + b"](" + number(0) * len(split.labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + coarse + text(key) + labels + b"u."


def cifar10_python(train, test):
    names = [f"data_batch_{number}" for number in range(1, 6)]
    batches = [python2_pickle(batch, b"labels") for batch in fifths(train)]
    files = dict(zip(names, batches, strict=True))
    files |= {"test_batch": python2_pickle(test, b"labels"), "batches.meta": b"names"}
    return "cifar-10-batches-py", files, concatenated(fifths(train))


def cifar100_python(train, test):
    files = {"train": python2_pickle(train, b"fine_labels"), "meta": b"names"}
    files["test"] = python2_pickle(test, b"fine_labels")
    return "cifar-100-python", files, train


def idx(values):
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + values.astype(np.uint8).tobytes()


def idx_files(train, test):
    files = {}
    for name, split in (("train", train), ("t10k", test)):
        files[f"{name}-images-idx3-ubyte"] = idx(split.images[:, 0])
        files[f"{name}-labels-idx1-ubyte"] = idx(split.labels)
    return "raw", files, train


def compressed_idx_files(train, test):
    folder, files, train = idx_files(train, test)
    return folder, {f"{name}.gz": gzip.compress(x) for name, x in files.items()}, train


COLOUR, GRAY = (3, 32, 32), (1, 28, 28)
WRITERS = {
    cifar10_python: (COLOUR, 10),
    cifar100_python: (COLOUR, 20),
    idx_files: (GRAY, 10),
    compressed_idx_files: (GRAY, 10),
}


def written(folder, files):
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(params=WRITERS, ids=lambda writer: writer.__name__)
def published(request, rng):
    """Folder name, files, and the image set that they contain."""
    shape, classes = WRITERS[request.param]
    train, test = random_images(rng, 40, shape, classes), random_images(rng, 10, shape, 10)
    folder, files, train = request.param(train, test)
    return folder, files, (train, test, classes)


def test_set_is_read_from_its_folder(published, tmp_path):
    name, files, expected = published
    folder = written(tmp_path / name, files)
    assert_image_set(read_images(str(folder)), *expected)


def test_plain_file_is_preferred_to_a_compressed_one(tmp_path, rng):
    _, files, train = idx_files(random_images(rng, 10, GRAY), test := random_images(rng, 10, GRAY))
    files["train-images-idx3-ubyte.gz"] = b"damaged"
    assert_image_set(read_images(written(tmp_path / "idx", files)), train, test, 10)


# Errors name the file, the problem and the remedy.


class Malicious:
    """Its pickle creates a file when it is loaded without care."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@pytest.mark.parametrize("nested", [False, True])
def test_malicious_pickle_is_refused(tmp_path, nested):
    trace = tmp_path / "trace"
    code = Malicious(trace)
    content = pickle.dumps({b"data": code, b"labels": [0]} if nested else code)
    pickle.loads(content)
    assert trace.exists()  # so the pickle works
    trace.unlink()
    path = written(tmp_path / "c", {"train": content, "test": content})
    assert_refused(path, "does not belong in an image set", "train", "trusted")
    assert not trace.exists()


def pickled(data, labels):
    return pickle.dumps({b"data": data, b"labels": labels}, 2)


ROWS = np.zeros((4, 3072), np.uint8)
DAMAGES = {
    "pickle cut": (cifar10_python, "data_batch_2", lambda x: x[:-50], "not a pickle"),
    "pickle list": (cifar10_python, "test_batch", lambda x: b"](K\x01K\x02e.", "not a pickle"),
    "pickle empty": (cifar100_python, "train", lambda x: b"", "not a pickle"),
    "no data": (cifar100_python, "train", lambda x: pickled(None, [0]), "got ()"),
    "no labels": (cifar100_python, "train", lambda x: b"}.", "a whole label"),
    "data shape": (cifar100_python, "test", lambda x: pickled(ROWS[:, :9], [0] * 4), "(4, 9)"),
    "ragged data": (cifar100_python, "test", lambda x: pickled([[1], [1, 2]], [0] * 2), "shape"),
    "labels": (cifar100_python, "test", lambda x: pickled(ROWS, [0] * 3), "and 3 labels"),
    "ragged labels": (cifar100_python, "test", lambda x: pickled(ROWS, [[1], [1, 2]]), "shape"),
    "idx axes": (
        *(idx_files, "train-labels-idx1-ubyte"),
        *(lambda x: b"\0\0\x08\x03" + x[4:], "bytes must follow the header"),
    ),
    "idx type": (
        *(idx_files, "train-labels-idx1-ubyte"),
        *(lambda x: b"\0\0\x0d" + x[3:], "no idx header"),
    ),
    "idx size": (idx_files, "train-images-idx3-ubyte", lambda x: x[:-1], "40 x 28 x 28"),
    "idx header": (idx_files, "t10k-images-idx3-ubyte", lambda x: x[:6], "no idx header"),
    "gz cut": (compressed_idx_files, "t10k-images-idx3-ubyte.gz", lambda x: x[:-100], "ended"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_named(damage, tmp_path, rng):
    writer, name, change, message = DAMAGES[damage]
    shape, classes = WRITERS[writer]
    train, test = random_images(rng, 40, shape, classes), random_images(rng, 10, shape, 10)
    folder, files, _ = writer(train, test)
    files[name] = change(files[name])
    path = written(tmp_path / folder, files)
    assert_refused(path, path / name, message, "download it again")


def test_missing_and_unknown_folders_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        read_images(tmp_path / "nowhere")
    assert_refused(tmp_path, str(tmp_path), "got nothing", "train/CLASS")
    (tmp_path / "test").touch()
    assert_refused(tmp_path, "got test", "Fashion-MNIST")


def test_complete_set_is_preferred_to_leftovers_of_another(tmp_path, rng):
    name, files, train = cifar100_python(random_images(rng, 10), test := random_images(rng, 10))
    folder = written(tmp_path / name, files | {"data_batch_1": b"of another set"})
    assert_image_set(read_images(folder), train, test, 10)


# Folders of PNG and JPEG files.


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


# Errors name the file, the problem and the remedy.


def test_missing_test_split_is_named(animals):
    folder, *_ = animals()
    shutil.rmtree(folder / "test")
    assert_refused(folder, "neither test nor val", folder, "move some")


def test_test_class_without_training_images_is_named(animals):
    folder, *_ = animals()
    save_picture(folder / "test" / "dog" / "one.png", np.zeros((3, 6, 7), np.uint8))
    assert_refused(folder, "is a class that", folder / "test" / "dog", "remove it")


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


# Checks, the fingerprint, and the validation split.


def test_digits_are_the_default():
    digits = read_images()
    assert digits.train.images.shape == (1437, 1, 8, 8)
    assert digits.test.images.shape == (360, 1, 8, 8)
    assert digits.train.images.max() == 255
    assert digits.fingerprint == "3704f0fd277e22d1b91158273c26a251496d79933a705434ccbd2a113646d2ba"


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
