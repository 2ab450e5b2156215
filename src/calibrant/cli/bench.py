"""The verbs bench train and bench rows."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calibrant.cli.shared import (
    SET,
    method_options,
    names_in,
    new_console,
    progress_bar,
    say,
    text_table,
    until_closed,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from calibrant.bench.train.images.sets import ImageSet

SHOWN = "ce ls mbls acls focal fedlas_ls fedlas_mbls"
DIGITS = {"network": "tiny", "epochs": 30, "augment": False}
OTHERS = {"network": "resnet18", "epochs": 350, "augment": True}
"""What is done by default: a mirrored digit is none, and a small network is enough for them."""
HELD_OUT = {"digits": 0.3}
"""Shares of the training images that are held out, where it is not a tenth."""


@click.group()
def bench() -> None:
    """Train networks by the papers' recipes, and tabulate what comes out."""


@bench.command()
@click.argument("data", required=False, metavar="[DATA]")
@click.option("--loss", default=SHOWN, metavar="NAMES", help=f"Losses.  [default: {SHOWN}]")
@SET
@click.option(
    "--network", metavar="NAME", help="Of the network.  [default: tiny for digits, resnet18]"
)
@click.option("--epochs", type=int, help="Epochs.  [default: 30 for digits, 350]")
@click.option("--batch", default=128, show_default=True, help="Images in a batch, of all ranks.")
@click.option("--rate", default=0.1, show_default=True, help="Learning rate at the start.")
@click.option("--seed", default="0", show_default=True, metavar="NUMBERS", help="Seeds.")
@click.option(
    "--augment/--no-augment",
    default=None,
    help="Shift and mirror images.  [default: not for digits]",
)
@click.option(
    "--mixup", default=0.0, metavar="ALPHA", help="Mix images, with shares from Beta(ALPHA, ALPHA)."
)
@click.option("--half", is_flag=True, help="Compute in bfloat16.")
@click.option("--compile", "compiled", is_flag=True, help="Compile the network first.")
@click.option(
    "--ood",
    default="shuffled",
    show_default=True,
    metavar="KIND",
    help="Images of no class: gaussian, uniform, shuffled, or another image set.",
)
@click.option("--device", help="As torch names it.  [default: the GPU if there is one]")
@click.option("--tensorboard", is_flag=True, help="Log for TensorBoard too.")
@click.option(
    "-o", "--out", default="runs", show_default=True, metavar="DIR", help="Folder of the runs."
)
def train(
    data: str | None,
    loss: str,
    options: tuple[str, ...],
    seed: str,
    ood: str,
    out: str,
    device: str | None,
    tensorboard: bool,
    **recipe: Any,
) -> None:
    """Train a network with each loss and compare their calibration.

    DATA is CIFAR-10 or CIFAR-100 (an archive or a folder), Tiny-ImageNet, MNIST or Fashion-MNIST,
    or any folder with train/CLASS/*.png and test/CLASS/*.png. Without it, scikit-learn's digits
    are used, which takes a minute or two on any machine.

    Each run has a folder of its own under --out, with predictions that the other commands read.
    A run that was stopped goes on where it was. Rows are added to results.csv there as runs end.
    Under torchrun each batch is shared by its processes.

    \b
    Examples:
      calibrant bench train
      calibrant bench train cifar-10-python.tar.gz --loss "ce fedlas_ls" --epochs 60 --half
      torchrun --nproc-per-node 2 -m calibrant bench train --loss ce
    """  # noqa: D301
    from calibrant.bench.train.images import read_images
    from calibrant.bench.train.ranks import joining
    from calibrant.bench.train.results import summary, train as run
    from calibrant.bench.train.trainer import Recipe

    losses = list(dict.fromkeys(names_in(loss) or []))
    seeds = list(dict.fromkeys(_whole(word) for word in names_in(seed) or []))
    chosen = method_options(options)
    if not losses or not seeds:
        raise click.UsageError("name a loss with --loss, and a seed with --seed")
    if chosen and len(losses) != 1:
        raise click.UsageError("--set is for one loss: name it with --loss")
    usual = OTHERS if data else DIGITS
    recipe = {**usual, **{name: value for name, value in recipe.items() if value is not None}}
    recipes = [
        Recipe(loss=one, loss_options=chosen, seed=number, **recipe)
        for number in seeds
        for one in losses
    ]
    images, name = read_images(data), data or "digits"
    foreign = _foreign(images, ood)
    found: list[Mapping[str, str]] = []
    with joining(device) as ranks:
        for one in recipes:
            home = Path(out) / f"{one.network}-{one.loss}-{one.seed}"
            with progress_bar(f"steps of {one.loss}, seed {one.seed},") as progress:
                rows = run(
                    images,
                    one,
                    home,
                    name=name,
                    held_out=HELD_OUT.get(name, 0.1),
                    ood=(ood, foreign),
                    device=device,
                    tensorboard=tensorboard,
                    progress=None if ranks.rank else progress,
                )
            if rows:
                _add_rows(Path(out) / "results.csv", rows)
                say(f"{home}: ECE {100 * float(rows[0]['ece']):.2f} %")
            found += rows
    if found:
        with until_closed():
            headings, *lines = summary(found)
            new_console().print(text_table(headings, lines, names=2))


@bench.command()
@click.argument("folders", nargs=-1, required=True, metavar="DIR...")
def rows(folders: tuple[str, ...]) -> None:
    """Measure runs that have ended, and write their rows as csv.

    \b
    Examples:
      calibrant bench rows runs/resnet18-ce-0 runs/resnet18-ls-0 > results.csv
    """  # noqa: D301
    from calibrant.bench.train.results import COLUMNS, rows as measured

    with until_closed():
        writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for folder in folders:
            writer.writerows(measured(folder))


def _whole(word: str) -> int:
    if not word.isdecimal():
        raise click.UsageError(f"--seed wants whole numbers, got {word}")
    return int(word)


def _foreign(images: ImageSet, kind: str) -> NDArray[Any]:
    from calibrant.bench.train.images import read_images
    from calibrant.bench.train.images.shifts import OOD_KINDS, ood_images

    if kind in OOD_KINDS:
        return ood_images(images.test.images, kind)
    return ood_images(images.test.images, read_images(kind).test.images)


def _add_rows(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    """Add rows to a file, in place of those about the same runs."""
    from calibrant._core.atomic_files import replacing
    from calibrant.bench.train.results import COLUMNS

    about = COLUMNS[: COLUMNS.index("after") + 1]
    kept: dict[tuple[str, ...], Mapping[str, str]] = {}
    before: list[dict[str, str]] = []
    if path.exists():
        with path.open(newline="") as file:
            before = list(csv.DictReader(file))
    for row in (*before, *rows):
        kept[tuple(row[name] for name in about)] = row
    with replacing(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept.values())
