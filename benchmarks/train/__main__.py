"""Train a network with each of several losses, and compare their calibration.

    python -m benchmarks.train
    python -m benchmarks.train cifar-10-batches-py --loss ce fedlas_ls --epochs 60 --half
    torchrun --nproc-per-node 2 -m benchmarks.train --loss ce

DATA is a folder: CIFAR-10 or CIFAR-100 (python), MNIST or Fashion-MNIST, or train/CLASS/*.png and
test/CLASS/*.png; by default scikit-learn's digits are used, which take a minute or two. Each run
has its own folder in --out with predictions that calibrant reads, and a stopped run is continued.
The rows of completed runs are added to results.csv there. Under torchrun the processes share each
batch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.train.images import read_images
from benchmarks.train.ranks import joining
from benchmarks.train.recipe import Recipe
from benchmarks.train.results import add_rows, summary, train
from benchmarks.train.shifts import OOD_KINDS, ood_images
from calibrant._core.options import parse_options
from calibrant.losses import LOSSES

COMPARED = ["ce", "ls", "mbls", "acls", "focal", "fedlas_ls", "fedlas_mbls"]
DIGITS: dict[str, Any] = {"network": "tiny", "epochs": 30, "augment": False, "held_out": 0.3}
OTHERS: dict[str, Any] = {"network": "resnet18", "epochs": 350, "augment": True, "held_out": 0.1}
"""Defaults by data. No augmentation for digits: mirroring changes their meaning."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="?", metavar="DATA")
    parser.add_argument("--loss", nargs="+", default=COMPARED, type=LOSSES.name)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of one loss")
    parser.add_argument("--network", help="tiny for digits, else resnet18")
    parser.add_argument("--epochs", type=int, help="30 for digits, else 350")
    parser.add_argument("--batch", type=int, default=128, help="over all processes")
    parser.add_argument("--rate", type=float, default=0.1, help="initial learning rate")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument(
        "--augment", action=argparse.BooleanOptionalAction, help="shift and mirror all but digits"
    )
    parser.add_argument("--mixup", type=float, default=0.0, help="mix images by Beta(ALPHA, ALPHA)")
    parser.add_argument("--half", action="store_true", help="compute in bfloat16")
    parser.add_argument("--compile", dest="compiled", action="store_true")
    parser.add_argument("--ood", default="shuffled", help="gaussian, uniform, shuffled or a set")
    parser.add_argument("--device", help="a GPU if there is one")
    parser.add_argument("-o", "--out", type=Path, default=Path("runs"), help="folder of the runs")
    given = vars(parser.parse_args(arguments))
    data, losses, seeds, texts = (given.pop(name) for name in ("data", "loss", "seeds", "set"))
    ood, device, out = (given.pop(name) for name in ("ood", "device", "out"))
    if texts and len(losses) != 1:
        parser.error("--set is for one loss: name it with --loss")
    typed = dict(text.partition("=")[::2] for text in texts)
    options = parse_options(losses[0], LOSSES[losses[0]].options, typed)
    settings = (OTHERS if data else DIGITS) | {k: v for k, v in given.items() if v is not None}
    held_out = settings.pop("held_out")
    images = read_images(data)
    foreign = ood_images(
        images.test.images, ood if ood in OOD_KINDS else read_images(ood).test.images
    )
    common: dict[str, Any] = {"name": data or "digits", "held_out": held_out}
    common |= {"ood": (ood, foreign), "device": device}
    results: list[Mapping[str, str]] = []
    with joining(device) as ranks:
        for seed in seeds:
            for loss in losses:
                recipe = Recipe(loss=loss, loss_options=options, seed=seed, **settings)
                folder = out / f"{recipe.network}-{loss}-{seed}"
                rows = train(images, recipe, folder, **common, progress=None if ranks.rank else say)
                if rows:
                    add_rows(out / "results.csv", rows)
                    ece = 100 * float(rows[0]["ece"])
                    print(f"\n{folder}: ECE {ece:.2f} %", file=sys.stderr)
                results += rows
    for line in summary(results) if results else ():
        print(("{:<12}{:<8}" + "{:>10}" * (len(line) - 2)).format(*line))


def say(done: int, total: int) -> None:
    print(f"\r{done} of {total} steps", end="", file=sys.stderr)


if __name__ == "__main__":
    main()
