"""The commands bench train, bench rows, bench arena and bench arena-view."""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calibrant._core.messages import printable
from calibrant.cli import shared

if TYPE_CHECKING:
    from collections.abc import Mapping

    from calibrant.bench.arena.views import View

LOSSES = "ce ls mbls acls focal fedlas_ls fedlas_mbls"
DIGITS: dict[str, Any] = {"network": "tiny", "epochs": 30, "augment": False, "held_out": 0.3}
OTHERS: dict[str, Any] = {"network": "resnet18", "epochs": 350, "augment": True, "held_out": 0.1}
"""Defaults by data. No augmentation for digits: mirroring changes their meaning."""


@click.group()
def bench() -> None:
    """Compare calibrators on many tasks, and networks trained with different losses."""


@bench.command()
@click.argument("data", required=False, metavar="[DATA]")
@click.option("--loss", default=LOSSES, metavar="NAMES", help=f"Losses.  [default: {LOSSES}]")
@shared.SET
@click.option("--network", metavar="NAME", help="Network.  [default: tiny for digits, resnet18]")
@click.option("--epochs", type=int, help="Number of epochs.  [default: 30 for digits, 350]")
@click.option("--batch", default=128, show_default=True, help="Batch size over all processes.")
@click.option("--rate", default=0.1, show_default=True, help="Initial learning rate.")
@click.option("--seed", default="0", show_default=True, metavar="NUMBERS", help="Seeds.")
@click.option(
    "--augment/--no-augment", default=None, help="Shift and mirror.  [default: all but digits]"
)
@click.option("--mixup", default=0.0, metavar="ALPHA", help="Mix images by Beta(ALPHA, ALPHA).")
@click.option("--half", is_flag=True, help="Compute in bfloat16.")
@click.option("--compile", "compiled", is_flag=True, help="Compile the network.")
@click.option(
    "--ood",
    default="shuffled",
    show_default=True,
    metavar="KIND",
    help="Out-of-distribution images: gaussian, uniform, shuffled, or another image set.",
)
@click.option("--device", help="Torch device.  [default: a GPU if there is one]")
@click.option("--tensorboard", is_flag=True, help="Also log for TensorBoard.")
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
    or a folder with train/CLASS/*.png and test/CLASS/*.png. By default scikit-learn's digits are
    used, which takes a minute or two on any machine.

    Each run has its own folder in --out, with predictions that the other commands read. A stopped
    run is continued. The results of each completed run are added to results.csv in --out. Under
    torchrun the processes share each batch.

    \b
    Examples:
      calibrant bench train
      calibrant bench train cifar-10-python.tar.gz --loss "ce fedlas_ls" --epochs 60 --half
      torchrun --nproc-per-node 2 -m calibrant bench train --loss ce
    """  # noqa: D301
    from calibrant._core.options import parse_options
    from calibrant.bench.train.images.read import read_images, read_ood_images
    from calibrant.bench.train.ranks import joining
    from calibrant.bench.train.recipe import Recipe
    from calibrant.bench.train.results import add_rows, summary, train as run
    from calibrant.losses import LOSSES

    losses = list(dict.fromkeys(map(LOSSES.name, shared.names_in(loss) or [])))
    seeds = list(dict.fromkeys(shared.names_in(seed) or []))
    texts = shared.named_texts(options)
    if not losses or not seeds:
        raise click.UsageError("name a loss with --loss, and a seed with --seed")
    if not all(map(str.isdecimal, seeds)):
        raise click.UsageError(f"--seed must be whole numbers, got {seed}")
    if texts and len(losses) != 1:
        raise click.UsageError("--set is for one loss: name it with --loss")
    loss_options = parse_options(losses[0], LOSSES[losses[0]].options, texts)
    settings = {**(OTHERS if data else DIGITS)}
    settings |= {name: value for name, value in recipe.items() if value is not None}
    held_out = settings.pop("held_out")
    recipes = [
        Recipe(loss=name, loss_options=loss_options, seed=int(number), **settings)
        for number in seeds
        for name in losses
    ]
    images = read_images(data)
    foreign = read_ood_images(images, ood)
    common: dict[str, Any] = {"name": data or "digits", "held_out": held_out}
    common |= {"ood": (ood, foreign), "device": device, "tensorboard": tensorboard}
    results: list[Mapping[str, str]] = []
    with joining(device) as ranks:
        for one in recipes:
            folder = Path(out) / f"{one.network}-{one.loss}-{one.seed}"
            with shared.progress_bar(f"steps of {one.loss}, seed {one.seed},") as progress:
                report = None if ranks.rank else progress
                rows = run(images, one, folder, **common, progress=report)
            if rows:
                add_rows(Path(out) / "results.csv", rows)
                shared.say(f"{folder}: ECE {100 * float(rows[0]['ece']):.2f} %")
            results += rows
    if results:
        with shared.until_closed():
            headings, *lines = summary(results)
            shared.new_console().print(shared.text_table(headings, lines, names=2))


@bench.command()
@click.argument("folders", nargs=-1, required=True, metavar="DIR...")
def rows(folders: tuple[str, ...]) -> None:
    """Measure completed runs and print their rows of results as CSV.

    \b
    Examples:
      calibrant bench rows runs/resnet18-ce-0 runs/resnet18-ls-0 > results.csv
    """  # noqa: D301
    from calibrant.bench.train.results import COLUMNS, result_rows

    with shared.until_closed():
        writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for folder in folders:
            for row in result_rows(folder):
                writer.writerow({name: printable(str(value)) for name, value in row.items()})


@bench.command()
@click.argument("data", required=False, metavar="[DATA]")
@click.option(
    "--methods",
    metavar="NAMES",
    help="With commas between, options as ts:objective=brier.  [default: all of calibrant]",
)
@click.option("--seed", default="0", show_default=True, metavar="NUMBERS", help="Splits.")
@click.option(
    "--workers", type=click.IntRange(1), help="Number of processes.  [default: one for each core]"
)
@click.option(
    "-o",
    "--out",
    default="arena.csv",
    show_default=True,
    metavar="FILE",
    help="File of results; what it has is not computed again.",
)
def arena(data: str | None, methods: str | None, seed: str, workers: int | None, out: str) -> None:
    """Measure calibrators on many tasks.

    DATA is a folder, all of whose prediction files with a val and a test split are tasks, or an
    HDF5 file in CalArena's layout. By default it is a small suite of generated data and a part of
    the embedded sample. Methods are fitted on val and measured on test; seeds other than 0 draw
    both anew from their union.

    Besides calibrant's own, methods are those of installed libraries (sklearn:sigmoid,
    probmetrics:sms, netcal:BBQ, venn_abers:inductive), entry points of the group
    calibrant.calibrators, and classes with fit and predict_proba as module:Class.

    \b
    Examples:
      calibrant bench arena
      calibrant bench arena predictions --methods none,ts,auto,sklearn:isotonic --seed "0 1 2"
      calibrant bench arena cv-binary.h5 --methods auto,mine:MyCalibrator -o results.csv
    """  # noqa: D301
    from calibrant.bench.arena import views
    from calibrant.bench.arena.methods import read_methods
    from calibrant.bench.arena.results import run
    from calibrant.bench.arena.small_suite import small_suite
    from calibrant.bench.arena.tasks import find_tasks

    seeds = shared.names_in(seed) or []
    if not seeds or not all(map(str.isdecimal, seeds)):
        raise click.UsageError(f"--seed must be whole numbers, got {seed}")
    chosen = read_methods(methods)
    tasks, skipped = find_tasks(data) if data else (small_suite(), [])
    for reason in skipped:
        shared.say(f"left out: {reason}")
    with shared.progress_bar("trials") as progress:
        rows = run(
            tasks,
            chosen,
            out,
            seeds=[int(number) for number in seeds],
            workers=workers or os.cpu_count() or 1,
            progress=progress,
        )
    suites, names = {task.suite for task in tasks}, [method.text for method in chosen]
    _print_view(views.means(views.scores(rows, suites=sorted(suites), methods=names)))
    shared.say(f"the rows are in {out}; see calibrant bench arena-view --help")


@bench.command("arena-view")
@click.argument("results", metavar="FILE")
@click.option(
    "--view",
    type=click.Choice(["means", "wins", "ranks", "elo", "calarena"]),
    default="wins",
    show_default=True,
    help="Table, or CalArena's files of results.",
)
@click.option("--metric", default="nll", show_default=True, metavar="NAME", help="To compare by.")
@click.option("--suites", metavar="NAMES", help="With commas between.  [default: all]")
@click.option("--methods", metavar="NAMES", help="With commas between.  [default: all]")
@click.option(
    "-o", "--out", metavar="PATH", help="A .md, .csv, .png, .svg or .pdf file, or a folder."
)
def arena_view(
    results: str,
    view: str,
    metric: str,
    suites: str | None,
    methods: str | None,
    out: str | None,
) -> None:
    """Show the results of bench arena as a table or a figure.

    means are those of each suite; wins the shares of pairwise wins and elo the ratings that follow
    from them, with intervals over data sets; ranks the mean ranks with their critical difference.
    calarena writes SUITE/METHOD.csv into a folder.

    \b
    Examples:
      calibrant bench arena-view arena.csv
      calibrant bench arena-view arena.csv --view ranks --metric brier -o ranks.png
      calibrant bench arena-view arena.csv --view calarena -o results
    """  # noqa: D301
    from calibrant.bench.arena import views
    from calibrant.bench.arena.methods import split_names
    from calibrant.bench.arena.results import read_rows
    from calibrant.bench.arena.view_files import write_view

    rows = read_rows(results)
    if not rows:
        raise FileNotFoundError(f"{results} has no rows: calibrant bench arena writes them")
    if view == "calarena":
        if out is None:
            raise click.UsageError("--view calarena needs a folder: name it with -o")
        for path in views.write_calarena(rows, Path(out)):
            shared.say(f"wrote {path}")
        return
    chosen = {"suites": split_names(suites), "methods": split_names(methods)}
    table = views.VIEWS[view](views.scores(rows, metric, **chosen))
    if out is None:
        _print_view(table)
        return
    written = shared.how_written(out)
    write_view(table, Path(out))
    shared.say(written)


def _print_view(view: View) -> None:
    with shared.until_closed():
        console = shared.new_console()
        console.print(view.title, style="bold")
        console.print(shared.text_table(view.headings, view.lines))
        console.print(view.note, style="dim", soft_wrap=True)
