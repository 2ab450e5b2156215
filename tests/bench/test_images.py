"""Readers of image sets against archives written here byte by byte, the split, and the shifts."""

import gzip
import hashlib
import io
import pickle
import shutil
import struct
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from calibrant.bench.train.images import read_images
from calibrant.bench.train.images.sets import ImageSet, Part, Parts, image_set, parts
from calibrant.bench.train.images.shifts import CORRUPTIONS, OOD_KINDS, corrupted, ood_images


def drawn(rng, count, shape=(3, 32, 32), classes=10):
    """Random images whose labels hold every class, in a random order."""
    images = rng.integers(0, 256, (count, *shape), np.uint8)
    return Part(images, rng.permutation(np.arange(count) % classes))


def fifths(part):
    return [part.take(slice(start, None, 5)) for start in range(5)]


def together(batches):
    return Part(*map(np.concatenate, zip(*batches, strict=True)))


# Writers: each gives the files of a set, the training images in the order of the files.


def python2_pickle(part, key):
    """A batch as Python 2 pickled it, opcode by opcode."""

    def text(value):
        return b"U" + bytes([len(value)]) + value

    def number(value):
        return b"J" + struct.pack("<i", value)

    rows = b"".join(image.tobytes() for image in part.images)  # red, green, blue planes
    kind = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNN"
    kind += number(-1) + number(-1) + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b")
    array += b"\x87R(K\x01" + number(len(part.images)) + number(3072) + b"\x86" + kind
    array += b"\x89T" + struct.pack("<i", len(rows)) + rows + b"tb"
    labels = b"](" + b"".join(number(int(label)) for label in part.labels) + b"e"
    coarse = text(b"coarse_labels") + b"](" + number(0) * len(part.labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + coarse + text(key) + labels + b"u."


def cifar10_python(train, test):
    names = [f"data_batch_{number}" for number in range(1, 6)]
    batches = [python2_pickle(batch, b"labels") for batch in fifths(train)]
    files = dict(zip(names, batches, strict=True))
    files |= {"test_batch": python2_pickle(test, b"labels"), "batches.meta": b"names"}
    return "cifar-10-batches-py", files, together(fifths(train))


def cifar100_python(train, test):
    files = {"train": python2_pickle(train, b"fine_labels"), "meta": b"names"}
    files["test"] = python2_pickle(test, b"fine_labels")
    return "cifar-100-python", files, train


def records(part, coarse=b""):
    rows = zip(part.images, part.labels, strict=True)
    return b"".join(coarse + bytes([label]) + image.tobytes() for image, label in rows)


def cifar10_binary(train, test):
    files = {f"data_batch_{n}.bin": records(batch) for n, batch in enumerate(fifths(train), 1)}
    files |= {"test_batch.bin": records(test), "batches.meta.txt": b"names"}
    return "cifar-10-batches-bin", files, together(fifths(train))


def cifar100_binary(train, test):
    files = {"train.bin": records(train, b"\x07"), "test.bin": records(test, b"\x07")}
    return "cifar-100-binary", files, train


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def idx(values):
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + values.astype(np.uint8).tobytes()


def idx_files(train, test):
    files = {}
    for name, part in (("train", train), ("t10k", test)):
        files[f"{name}-images-idx3-ubyte"] = idx(part.images[:, 0])
        files[f"{name}-labels-idx1-ubyte"] = idx(part.labels)
    return "raw", files, train


def packed_idx_files(train, test):
    folder, files, train = idx_files(train, test)
    return folder, {f"{name}.gz": gzip.compress(held) for name, held in files.items()}, train


UNREAD = {"meta", "batches.meta", "batches.meta.txt", "package.json"}
COLOUR, GRAY = (3, 32, 32), (1, 28, 28)
WRITERS = {
    cifar10_python: (COLOUR, 10),
    cifar100_python: (COLOUR, 100),
    cifar10_binary: (COLOUR, 10),
    cifar100_binary: (COLOUR, 100),
    idx_files: (GRAY, 10),
    packed_idx_files: (GRAY, 10),
}


def written(folder, files):
    folder.mkdir(parents=True)
    for name, held in files.items():
        (folder / name).write_bytes(held)
    return folder


def archived(path, files, folder="some/where", mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, held in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(held)
            archive.addfile(member, io.BytesIO(held))
    return path


def assert_holds(found, train, test, classes):
    for part, wanted in ((found.train, train), (found.test, test)):
        np.testing.assert_array_equal(part.images, wanted.images)
        np.testing.assert_array_equal(part.labels, wanted.labels)
        assert part.images.dtype == np.uint8
        assert part.labels.dtype == np.int64
        assert part.images.flags.writeable  # torch warns of others
        assert part.images.flags.c_contiguous
    assert found.classes == classes


@pytest.fixture(params=WRITERS, ids=lambda writer: writer.__name__)
def case(request, rng):
    """Folder name, files, and the set that they hold."""
    shape, classes = WRITERS[request.param]
    train, test = drawn(rng, 200, shape, classes), drawn(rng, 40, shape, 10)
    folder, files, train = request.param(train, test)
    return folder, files, (train, test, classes)


def only(*writers):
    """Leave the case to some of the writers."""
    return pytest.mark.parametrize("case", writers, indirect=True, ids=lambda w: w.__name__)


def test_folder_holds_what_was_written(case, tmp_path):
    folder, files, wanted = case
    assert_holds(read_images(written(tmp_path / folder, files)), *wanted)


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_archive_holds_what_was_written(case, tmp_path, mode):
    _, files, wanted = case
    path = archived(tmp_path / "archive", files, mode=mode)
    assert_holds(read_images(str(path)), *wanted)
    assert [*tmp_path.iterdir()] == [path]  # nothing was unpacked


@only(cifar10_python, cifar100_python, cifar10_binary, cifar100_binary)
def test_folder_above_will_do(case, tmp_path):
    folder, files, wanted = case
    written(tmp_path / folder, files)
    assert_holds(read_images(tmp_path), *wanted)


def test_digest_is_that_of_images_and_labels(case, tmp_path):
    folder, files, (train, test, _) = case
    values = (train.images, train.labels, test.images, test.labels)
    wanted = hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()
    assert read_images(written(tmp_path / folder, files)).digest == wanted


def test_digits_are_the_default():
    found = read_images()
    assert found.train.images.shape == (1437, 1, 8, 8)
    assert found.test.images.shape == (360, 1, 8, 8)
    assert found.train.images.max() == 255
    assert found.digest == "3704f0fd277e22d1b91158273c26a251496d79933a705434ccbd2a113646d2ba"


# Folders of pictures


def saved(path, image, **options):
    """Save ``(channels, height, width)``, gray if there is one channel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
    Image.fromarray(pixels).save(path, **options)


def save_class_folders(folder, part, names, suffixes=("png",)):
    for number, (image, label) in enumerate(zip(part.images, part.labels, strict=True)):
        suffix = suffixes[number % len(suffixes)]
        saved(folder / names[label] / f"{number:03}.{suffix}", image)


def by_label(part):
    return part.take(np.argsort(part.labels, kind="stable"))


@pytest.fixture
def animals(tmp_path, rng):
    """Make the folder of a set of three classes, and the parts that it holds."""

    def make(shape=(3, 6, 7), test="test"):
        train, held = drawn(rng, 12, shape, 3), drawn(rng, 6, shape, 2)
        save_class_folders(tmp_path / "train", train, ["ape", "bee", "cat"])
        save_class_folders(tmp_path / test, held, ["ape", "bee"], ("png", "PNG"))
        return tmp_path, by_label(train), by_label(held)

    return make


@pytest.mark.parametrize("test", ["test", "val"])
@pytest.mark.parametrize("shape", [(3, 6, 7), (1, 5, 4)])
def test_class_folders(animals, shape, test):
    folder, train, held = animals(shape, test)
    (folder / "train" / "ape" / "notes.txt").write_text("no image")
    (folder / "train" / "ape" / "._000.png").write_text("no image")
    (folder / "train" / ".cache").mkdir()
    assert_holds(read_images(folder), train, held, 3)


def test_one_colour_image_makes_three_channels(animals, rng):
    folder, train, held = animals((1, 6, 7))
    colour = rng.integers(0, 256, (3, 6, 7), np.uint8)
    saved(min((folder / "test" / "ape").iterdir()), colour)
    train, held = (Part(part.images.repeat(3, 1), part.labels) for part in (train, held))
    held.images[0] = colour
    assert_holds(read_images(folder), train, held, 3)


def test_jpegs_are_decoded(tmp_path):
    """A JPEG of one colour is exact but for its rounding."""
    for name, value in (("a", 10), ("b", 200)):
        for part in ("train", "test"):
            image = np.full((3, 16, 16), value, np.uint8)
            saved(tmp_path / part / name / "one.JPG", image, quality=95)
            saved(tmp_path / part / name / "two.jpeg", image, quality=95)
    found = read_images(tmp_path)
    wanted = np.array([10, 10, 200, 200])[:, None, None, None]
    assert found.test.images.shape == (4, 3, 16, 16)
    assert abs(found.test.images - wanted).max() <= 2


@pytest.fixture
def tiny(tmp_path, rng):
    """Tiny-ImageNet with three classes out of order; PNG inside keeps the pixels exact."""
    names = ["n03", "n01", "n02"]
    train, test = drawn(rng, 9, (3, 8, 8), 3), drawn(rng, 5, (3, 8, 8), 3)
    for number, (image, label) in enumerate(zip(*train, strict=True)):
        name = names[label]
        saved(tmp_path / "train" / name / "images" / f"{name}_{number}.JPEG", image, format="png")
    lines = []
    for number, (image, label) in enumerate(zip(*test, strict=True)):
        saved(tmp_path / "val" / "images" / f"val_{number}.JPEG", image, format="png")
        lines.append(f"val_{number}.JPEG\t{names[label]}\t0\t0\t7\t7")
    (tmp_path / "wnids.txt").write_text("\n".join(names) + "\n")
    (tmp_path / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "test").mkdir()  # has no labels, and is left alone
    return tmp_path, by_label(train), test


def test_tiny_imagenet(tiny):
    folder, train, test = tiny
    assert_holds(read_images(folder), train, test, 3)


# Errors: each names the file, what was wanted or came, and the remedy.


def refused(path, *words):
    with pytest.raises(ValueError, match=words[0]) as found:
        read_images(path)
    for word in words:
        assert word in str(found.value)


class Evil:
    """Its pickle makes a file when it is loaded without care."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@pytest.mark.parametrize("nested", [False, True])
def test_evil_pickle_is_refused(tmp_path, nested):
    trace = tmp_path / "trace"
    evil = Evil(trace)
    held = pickle.dumps({b"data": evil, b"labels": [0]} if nested else evil)
    pickle.loads(held)
    assert trace.exists()  # the pickle does what it is for
    trace.unlink()
    path = archived(tmp_path / "c.tar.gz", {"train": held, "test": held})
    refused(path, "does not belong in an image archive", "train", "trust")
    assert not trace.exists()


@pytest.mark.parametrize("name", ["eval", "getattr", "__import__"])
def test_builtins_are_refused(tmp_path, name):
    held = b"cbuiltins\n" + name.encode() + b"\n(S'1'\ntR."
    refused(written(tmp_path / "c", {"train": held, "test": held}), f"builtins.{name}")


def test_paths_of_members_are_not_used(tmp_path, rng):
    _, files, train = cifar100_binary(drawn(rng, 10), test := drawn(rng, 10))
    inner = tmp_path / "inner"
    inner.mkdir()
    for folder in ("../..", "/etc"):
        path = archived(inner / "c.tar", files, folder=folder, mode="w")
        assert_holds(read_images(path), train, test, 10)
    assert sorted(tmp_path.rglob("*")) == [inner, inner / "c.tar"]


def test_links_in_archives_are_not_followed(tmp_path, rng):
    _, files, _ = cifar100_binary(part := drawn(rng, 10), part)
    (tmp_path / "secret").write_bytes(files.pop("test.bin"))
    path = archived(tmp_path / "c.tar", files, mode="w")
    with tarfile.open(path, "a") as archive:
        link = tarfile.TarInfo("test.bin")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret")
        archive.addfile(link)
    refused(path, "lacks test.bin")


def test_truncated_archive_is_refused(case, tmp_path):
    _, files, _ = case
    whole = archived(tmp_path / "whole.tgz", files).read_bytes()
    path = tmp_path / "cut.tgz"
    for share in (0.01, 0.3, 0.7, 0.99):
        path.write_bytes(whole[: int(share * len(whole))])
        refused(path, "cut.tgz", "truncated", "fetch it again")


def test_truncated_plain_tar_is_refused(case, tmp_path):
    _, files, _ = case
    whole = archived(tmp_path / "whole.tar", files, mode="w").read_bytes()
    half = len(whole) // 2
    path = tmp_path / "cut.tar"
    for end in (700, half, half // 512 * 512):
        path.write_bytes(whole[:end])
        refused(path, "cut.tar", "fetch it again")


def test_flipped_byte_is_found_by_the_checksum(tmp_path, rng):
    _, files, _ = cifar100_binary(drawn(rng, 10), drawn(rng, 10))
    plain = archived(tmp_path / "c.tar", files, mode="w").read_bytes()
    held = bytearray(gzip.compress(plain, 0))  # stored, so that the rest stays legal
    path = tmp_path / "c.tar.gz"
    path.write_bytes(held)
    read_images(path)
    held[5000] ^= 1
    path.write_bytes(held)
    refused(path, "c.tar.gz", "damaged", "fetch it again")


def test_no_archive(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    refused(path, "notes.txt", "no tar archive", "name the folder")


def test_archive_of_other_things(tmp_path):
    refused(archived(tmp_path / "a.tgz", {"x.txt": b"x"}), "a.tgz", "none of the known", "CIFAR-10")


def test_member_twice(tmp_path, rng):
    path = archived(tmp_path / "a.tar", {"train.bin": b"", "more/train.bin": b""}, mode="w")
    refused(path, "a.tar holds train.bin twice", "keep one")


def test_truncated_gz_is_refused(tmp_path, rng):
    _, files, _ = packed_idx_files(drawn(rng, 20, GRAY), drawn(rng, 10, GRAY))
    files["t10k-images-idx3-ubyte.gz"] = files["t10k-images-idx3-ubyte.gz"][:-100]
    refused(written(tmp_path / "f", files), "t10k-images-idx3-ubyte.gz is truncated", "fetch")


def test_missing_file_is_named(case, tmp_path):
    _, files, _ = case
    for number, name in enumerate(set(files) - UNREAD):
        rest = {other: held for other, held in files.items() if other != name}
        place = written(tmp_path / str(number), rest)
        refused(place, place.name, f"lacks {name.removesuffix('.gz')}", "put all files")


DAMAGES = {
    "bin size": (cifar10_binary, "data_batch_3.bin", lambda held: held[:-1], "multiple of 3073"),
    "bin empty": (cifar10_binary, "test_batch.bin", lambda held: b"", "has 0 bytes"),
    "bin 100 size": (cifar100_binary, "test.bin", lambda held: held + b"x", "multiple of 3074"),
    "pickle cut": (cifar10_python, "data_batch_2", lambda held: held[:-50], "not a pickle"),
    "pickle list": (cifar10_python, "test_batch", lambda held: b"](K\x01K\x02e.", "not a pickle"),
    "pickle empty": (cifar100_python, "train", lambda held: b"", "not a pickle"),
    "pickle no data": (cifar100_python, "train", lambda held: b"}.", "(n, 3072), got NoneType"),
    "pickle type": (
        cifar100_python,
        "test",
        lambda held: pickle.dumps({b"data": np.zeros((4, 3072)), b"labels": [0] * 4}, 2),
        "got float64 of shape (4, 3072)",
    ),
    "pickle shape": (
        cifar100_python,
        "test",
        lambda held: pickle.dumps({b"data": np.zeros((4, 9), np.uint8), b"labels": [0] * 4}, 2),
        "got uint8 of shape (4, 9)",
    ),
    "pickle labels": (
        cifar100_python,
        "test",
        lambda held: pickle.dumps({b"data": np.zeros((4, 3072), np.uint8), b"labels": [0] * 3}, 2),
        "has 4 images",
    ),
    "idx magic": (
        idx_files,
        "train-labels-idx1-ubyte",
        lambda held: b"\0\0\x08\x03" + held[4:],
        "begin with 0 0 8 1",
    ),
    "idx size": (idx_files, "train-images-idx3-ubyte", lambda held: held[:-1], "200 x 28 x 28"),
    "idx header": (
        idx_files,
        "t10k-images-idx3-ubyte",
        lambda held: held[:6],
        "begin with 0 0 8 3",
    ),
    "idx labels": (
        idx_files,
        "t10k-labels-idx1-ubyte",
        lambda held: idx(np.arange(39)),
        "has 40 images",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_named(damage, tmp_path, rng):
    writer, name, change, message = DAMAGES[damage]
    shape, classes = WRITERS[writer]
    folder, files, _ = writer(drawn(rng, 200, shape, classes), drawn(rng, 40, shape, 10))
    files[name] = change(files[name])
    with pytest.raises(ValueError, match=r"fetch it again|replace it") as found:
        read_images(written(tmp_path / folder, files))
    assert str(tmp_path / folder / name).removesuffix(".gz") in str(found.value)
    assert message in str(found.value)


def test_no_such_path(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no"):
        read_images(tmp_path / "nowhere")


def test_empty_folder(tmp_path):
    refused(tmp_path, "it is empty", str(tmp_path), "train/CLASS")


def test_unknown_folder(tmp_path):
    for name in "dcab":
        (tmp_path / name).touch()
    refused(tmp_path, "it holds a, b, c, ...", "none of the known forms", "Fashion-MNIST")


def test_whole_set_is_taken_beside_leftovers(tmp_path, rng):
    folder, files, train = cifar100_binary(drawn(rng, 10), test := drawn(rng, 10))
    place = written(tmp_path / folder, files | {"data_batch_1": b"of another set"})
    assert_holds(read_images(place), train, test, 10)


def test_several_sets(tmp_path, rng):
    for writer in (cifar10_binary, cifar100_binary):
        folder, files, _ = writer(part := drawn(rng, 50), part)
        written(tmp_path / folder, files)
    refused(tmp_path, "several sets, cifar-10-batches-bin, cifar-100-binary", "name one")


def test_missing_test_part(animals):
    folder, *_ = animals()
    shutil.rmtree(folder / "test")
    refused(folder, "neither test nor val", str(folder), "move some")


def test_class_that_train_lacks(animals, rng):
    folder, *_ = animals()
    saved(folder / "test" / "dog" / "one.png", np.zeros((3, 6, 7), np.uint8))
    refused(folder, "is a class that", str(folder / "test" / "dog"), "take it out")


def test_class_without_images(animals):
    folder, *_ = animals()
    (folder / "train" / "dog").mkdir()
    refused(folder, "holds no image", str(folder / "train" / "dog"), "remove it")


def test_train_without_classes(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "val").mkdir()
    refused(tmp_path, "has no folders", str(tmp_path / "train"), "one for each class")


@pytest.mark.parametrize("place", ["train/bee/zz.png", "test/ape/zz.png"])
def test_first_image_of_another_size_is_named(animals, place):
    folder, *_ = animals()
    saved(folder / place, np.zeros((3, 7, 6), np.uint8))
    saved(folder / "test" / "bee" / "zzz.png", np.zeros((3, 9, 9), np.uint8))
    refused(folder, "is 7 x 6 pixels", str(folder / place), "is 6 x 7", "resize")


def test_broken_image_is_named(animals, rng):
    folder, *_ = animals()
    path = folder / "train" / "bee" / "000.png"
    saved(path, drawn(rng, 1, (3, 6, 7)).images[0])
    path.write_bytes(path.read_bytes()[:-60])
    refused(folder, "cannot be read as an image", str(path), "replace it")


def test_deep_image_is_named(animals):
    folder, *_ = animals((1, 6, 7))
    deep = np.full((6, 7), 1000, np.uint16)
    Image.fromarray(deep).save(folder / "train" / "bee" / "zz.png")
    refused(folder, "more than 8 bits a channel", "zz.png", "replace it")


@pytest.mark.parametrize("name", ["wnids.txt", "val/val_annotations.txt"])
def test_tiny_imagenet_without_its_lists(tiny, name):
    folder, *_ = tiny
    (folder / name).write_text("\n")
    refused(folder, f"{name} is missing or empty", str(folder), "fetch")


@pytest.mark.parametrize("line", ["val_0.JPEG\tn99", "val_0.JPEG"])
def test_tiny_imagenet_with_an_odd_annotation(tiny, line):
    folder, *_ = tiny
    with (folder / "val" / "val_annotations.txt").open("a") as file:
        file.write(line + "\n")
    refused(folder, "line 6 of", "val_annotations.txt", line.split("\t")[-1])


def test_tiny_imagenet_with_an_image_missing(tiny):
    folder, *_ = tiny
    (folder / "val" / "images" / "val_3.JPEG").unlink()
    refused(folder, "val_3.JPEG", "replace it")


def test_missing_pillow(animals, monkeypatch):
    folder, *_ = animals()
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match="pip install pillow"):
        read_images(folder)


def test_missing_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'calibrant\[sklearn\]'"):
        read_images()


# Sets and their split


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda part: Part(part.images / 255, part.labels), "test images must be uint8"),
        (lambda part: Part(part.images[0], part.labels), "n, channels, height, width"),
        (lambda part: Part(part.images, part.labels[1:]), r"6 images and labels of shape \(5,\)"),
        (lambda part: part.take(slice(0)), "at least one image"),
        (lambda part: Part(part.images[:, :, 1:], part.labels), r"\(3, 31, 32\)"),
        (lambda part: Part(part.images, part.labels + 1), "got 0 to 3"),
        (lambda part: Part(part.images, part.labels - 1), "got -1 to 2"),
    ],
)
def test_parts_that_do_not_match(rng, change, message):
    with pytest.raises(ValueError, match=message):
        image_set(drawn(rng, 6, classes=3), change(drawn(rng, 6, classes=3)))


def numbered(labels):
    """Images that carry their number in their first two pixels."""
    images = np.zeros((len(labels), 1, 2, 2), np.uint8)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = np.divmod(np.arange(len(labels)), 256)
    return Part(images, labels)


def numbers(part):
    return part.images[:, 0, 0, :2].astype(int) @ [256, 1]


def test_split_is_disjoint_and_stratified(rng):
    labels = rng.permutation(np.repeat(np.arange(4), [400, 200, 100, 33]))
    whole = numbered(labels)
    found = parts(image_set(whole, whole.take(slice(20))), held_out=0.2)
    assert isinstance(found, Parts)
    train, val = numbers(found.train), numbers(found.val)
    np.testing.assert_array_equal(np.sort(np.concatenate([train, val])), np.arange(len(labels)))
    np.testing.assert_array_equal(found.train.labels, labels[train])
    np.testing.assert_array_equal(found.val.labels, labels[val])
    np.testing.assert_array_equal(np.bincount(found.val.labels), [80, 40, 20, 7])
    np.testing.assert_array_equal(found.test.images, whole.images[:20])


def test_split_depends_on_its_seed_alone(rng):
    whole = numbered(np.arange(300) % 3)
    images = image_set(whole, whole)
    first, again, other = (numbers(parts(images, seed=seed).val) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert set(first) != set(other)
    # a pinned start, because results of different days share the split
    assert first[:5].tolist() == [15, 17, 44, 48, 60]


def test_digest_tells_parts_apart(rng):
    train, test = drawn(rng, 20), drawn(rng, 20)
    digests = {image_set(train, test).digest, image_set(test, train).digest}
    changed = Part(train.images.copy(), train.labels)
    changed.images[3, 1, 2, 2] ^= 1
    digests.add(image_set(changed, test).digest)
    assert len(digests) == 3
    swapped = Part(np.asfortranarray(train.images), train.labels)
    assert image_set(swapped, test).digest in digests


# Corruptions


@pytest.fixture(scope="module")
def photos():
    """Smooth random images with a little texture, ``(1100, 3, 32, 32)``: more than a batch."""
    rng = np.random.default_rng(3)
    walk = rng.normal(size=(1100, 3, 32, 32)).cumsum(2).cumsum(3)
    walk -= walk.mean((2, 3), keepdims=True)
    walk *= 45 / walk.std((2, 3), keepdims=True)
    return (walk + 120 + rng.normal(0, 5, walk.shape)).clip(0, 255).astype(np.uint8)


def distances(images, name, severities=(1, 2, 3, 4, 5)):
    found = [corrupted(images, name, severity) for severity in severities]
    assert all(each.dtype == np.uint8 and each.shape == images.shape for each in found)
    return np.array([((each.astype(float) - images) ** 2).mean() for each in found])


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_each_severity_changes_more(photos, name):
    found = distances(photos, name)
    assert found[0] > 1
    assert (np.diff(found) > 0.05 * found[:-1]).all()


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_each_severity_changes_more_in_gray_digits(name):
    severities = (1, 2, 3, 5) if name == "pixelate" else (1, 2, 3, 4, 5)
    assert (np.diff(distances(read_images().test.images, name, severities)) > 0).all()


@pytest.mark.parametrize(
    ("severity", "deviation"), [(1, 0.04), (2, 0.08), (3, 0.12), (4, 0.16), (5, 0.2)]
)
def test_noise_has_its_deviation(severity, deviation):
    gray = np.full((200, 3, 32, 32), 128, np.uint8)
    found = corrupted(gray, "noise", severity).astype(float)
    # what is clipped beyond 2.5 deviations takes 1 % off the last
    assert found.std() / 255 == pytest.approx(deviation, rel=0.005 if severity < 4 else 0.015)
    assert found.mean() == pytest.approx(127.9, abs=0.2)
    first, second = (found[:, channel].ravel() for channel in (0, 1))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.01


def test_noise_has_its_seed(photos):
    first, again, other = (corrupted(photos, "noise", 2, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.9
    alike = np.full((1100, 1, 4, 4), 128, np.uint8)
    found = corrupted(alike, "noise", 2)
    assert len(np.unique(found.reshape(1100, -1), axis=0)) == 1100  # batches draw anew


@pytest.mark.parametrize(("severity", "sigma"), [(1, 0.5), (2, 0.75), (3, 1), (4, 1.5), (5, 2)])
def test_blur_is_the_gaussian_filter(photos, severity, sigma):
    images = photos[:5, :, :20]  # not square
    wanted = ndimage.gaussian_filter(
        images.astype(float),
        (0, 0, sigma, sigma),
        mode="nearest",
        radius=(0, 0, *2 * [int(np.ceil(3 * sigma))]),
    )
    assert abs(corrupted(images, "blur", severity) - wanted).max() < 0.501


@pytest.mark.parametrize(
    ("severity", "share"), [(1, 0.8), (2, 0.6), (3, 0.45), (4, 0.3), (5, 0.15)]
)
def test_contrast_keeps_a_share(photos, severity, share):
    images = photos[:5]
    found = corrupted(images, "contrast", severity)
    for image, result in zip(images, found, strict=True):
        for channel, plane in zip(image, result, strict=True):
            mean = channel.mean()
            assert abs(plane - (mean + share * (channel - mean))).max() < 0.501


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
def test_brightness_adds_and_clips(photos, severity):
    wanted = np.minimum(photos[:5] + 0.1 * severity * 255, 255)
    assert abs(corrupted(photos[:5], "brightness", severity) - wanted).max() < 0.501


@pytest.mark.parametrize(("severity", "block"), [(1, 2), (2, 3), (3, 4), (4, 6), (5, 8)])
def test_pixelate_averages_blocks(photos, severity, block):
    images = photos[:3, :, :20]
    found = corrupted(images, "pixelate", severity)
    for top in range(0, 20, block):
        for left in range(0, 32, block):
            where = (..., slice(top, top + block), slice(left, left + block))
            mean = images[where].mean((2, 3), keepdims=True)
            assert abs(found[where] - mean).max() < 0.501


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_batches_do_not_show(photos, name):
    for start in (0, 990) if name != "noise" else (0,):
        part = slice(start, start + 20)
        np.testing.assert_array_equal(
            corrupted(photos[part], name, 3), corrupted(photos, name, 3)[part]
        )


def test_corruptions_leave_their_input(photos):
    before = photos.copy()
    for name in CORRUPTIONS:
        corrupted(photos[:10], name, 5)
    np.testing.assert_array_equal(photos, before)
    assert corrupted(photos[:0], "blur", 1).shape == (0, 3, 32, 32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fog", 1), "name must be one of noise, blur, contrast, brightness, pixelate, got 'fog'"),
        (("blur", 0), r"severity must be 1, 2 \.\.\. 5, got 0"),
        (("blur", 6), "got 6"),
        (("blur", 1.5), "got 1.5"),
    ],
)
def test_corruptions_refuse(photos, arguments, message):
    with pytest.raises(ValueError, match=message):
        corrupted(photos, *arguments)


def test_corruptions_want_bytes(photos):
    with pytest.raises(ValueError, match=r"images must be uint8 .* got float64"):
        corrupted(photos / 255, "blur", 1)


# Images of other things


@pytest.mark.parametrize("kind", OOD_KINDS)
def test_ood_has_the_shape_and_a_seed(photos, kind):
    first, again, other = (ood_images(photos, kind, seed=seed) for seed in (0, 0, 1))
    assert first.dtype == np.uint8
    assert first.shape == photos.shape
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.5
    assert len(np.unique(first.reshape(len(first), -1), axis=0)) == len(first)


def test_gaussian_has_the_moments_of_each_channel(rng):
    centres = np.array([90, 120, 160])[None, :, None, None]
    like = (centres + rng.normal(0, 20, (200, 3, 16, 16))).clip(0, 255).astype(np.uint8)
    found = ood_images(like, "gaussian").astype(float)
    np.testing.assert_allclose(found.mean((0, 2, 3)), like.mean((0, 2, 3)), atol=0.5)
    np.testing.assert_allclose(found.std((0, 2, 3)), like.std((0, 2, 3)), atol=0.5)


def test_uniform_has_all_values(photos):
    counts = np.bincount(ood_images(photos, "uniform").ravel(), minlength=256)
    expected = photos.size / 256
    assert ((counts - expected) ** 2 / expected).sum() < 256 + 5 * np.sqrt(2 * 256)


def test_shuffled_keeps_the_colours_of_each_image(photos):
    found = ood_images(photos, "shuffled")
    for image, result in zip(photos[::50], found[::50], strict=True):
        wanted, colours = (sorted(map(tuple, x.reshape(3, -1).T.tolist())) for x in (image, result))
        assert wanted == colours
    # neighbours are alike in a photo, and no longer
    before, after = (
        np.corrcoef(x[..., :-1].ravel(), x[..., 1:].ravel())[0, 1] for x in (photos, found)
    )
    within = photos.mean((2, 3)).var() / photos.var()  # alike because of the image
    assert before > 0.9
    assert abs(after - within) < 0.05


def test_smaller_images_are_put_in_the_middle(photos, rng):
    other = rng.integers(1, 256, (60, 1, 28, 27), np.uint8)
    found = ood_images(photos, other)
    assert found.shape == (60, 3, 32, 32)
    for channel in range(3):
        np.testing.assert_array_equal(found[:, channel, 2:30, 2:29], other[:, 0])
    assert found.astype(int).sum() == 3 * other.astype(int).sum()  # black all around


def test_larger_images_are_scaled(rng):
    like = np.zeros((30, 3, 8, 8), np.uint8)
    other = rng.integers(0, 256, (20, 3, 20, 12), np.uint8)
    found = ood_images(like, other)
    assert found.shape == (20, 3, 8, 8)
    for image, result in zip(other, found, strict=True):
        for plane, got in zip(image, result, strict=True):
            wanted = Image.fromarray(plane).resize((8, 8), Image.Resampling.BILINEAR)
            assert abs(np.asarray(wanted).astype(int) - got).max() <= 1


def test_colour_becomes_gray_as_elsewhere(rng):
    like = np.zeros((30, 1, 8, 8), np.uint8)
    other = rng.integers(0, 256, (20, 3, 8, 8), np.uint8)
    for image, got in zip(other, ood_images(like, other), strict=True):
        wanted = Image.fromarray(image.transpose(1, 2, 0)).convert("L")
        assert abs(np.asarray(wanted).astype(int) - got[0]).max() <= 1


def test_as_many_images_are_drawn_as_wanted():
    other = numbered(np.zeros(300, int))
    like = np.zeros((50, 1, 2, 2), np.uint8)
    first, again, second = (
        numbers(Part(ood_images(like, other.images, seed=seed), other.labels)) for seed in (0, 0, 1)
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
        ((5, 3, 8, 8), np.zeros((5, 4, 8, 8), np.uint8), "4 channels cannot become"),
    ],
)
def test_ood_refuses(like, kind, message):
    with pytest.raises(ValueError, match=message):
        ood_images(np.zeros(like, np.uint8), kind)


def test_a_set_trains_as_it_is_read(case, tmp_path):
    """Arrays become tensors without a warning."""
    folder, files, _ = case
    found = read_images(written(tmp_path / folder, files))
    assert isinstance(found, ImageSet)
    for part in parts(found):
        for values in part:
            assert len(torch.as_tensor(values)) == len(part.labels)
