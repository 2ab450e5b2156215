"""The verb monitor."""

from __future__ import annotations

import glob
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calibrant.cli.shared import (
    AS_JSON,
    new_console,
    progress_bar,
    say,
    text_table,
    until_closed,
)

if TYPE_CHECKING:
    from calibrant.calibrators.base import Calibrator
    from calibrant.metrics.reductions import Pairs
    from calibrant.monitor import Monitor, MonitorReport


@click.command()
@click.argument("files", nargs=-1)
@click.option("--calibrator", "folder", metavar="DIR", help="Apply this saved calibrator first.")
@click.option(
    "--split",
    "splits",
    multiple=True,
    metavar="NAME",
    help="Split of each file; several are several windows.  [default: test, else the plain arrays]",
)
@click.option(
    "--state", metavar="FILE", help="Go on from this file where it exists, and write it anew."
)
@click.option(
    "--tolerance",
    type=float,
    metavar="FRACTION",
    help="How far accuracy may be from confidence.  [default: 0.02, 2 points]",
)
@click.option(
    "--false-alarms",
    type=float,
    metavar="FRACTION",
    help="Probability of ever raising an alarm without drift.  [default: 0.05]",
)
@click.option("--bins", type=int, help="Number of bins.  [default: 15]")
@click.option(
    "--reference",
    metavar="PRED",
    help="Watch for a change against this file, calibrated alike, instead of for miscalibration.",
)
@click.option("--reference-split", metavar="NAME", help="Its split.  [default: as for evaluate]")
@click.option("--fail", is_flag=True, help="Exit with 1 if there is or was an alarm.")
@AS_JSON
def monitor(
    files: tuple[str, ...],
    folder: str | None,
    splits: tuple[str, ...],
    state: str | None,
    tolerance: float | None,
    false_alarms: float | None,
    bins: int | None,
    reference: str | None,
    reference_split: str | None,
    fail: bool,
    as_json: bool,
) -> int:
    """Detect calibration drift of a deployed model, file by file.

    Each of FILES is a prediction file with labels, as for "calibrant evaluate", and one window of
    the stream, in the order given; a quoted pattern is taken in natural order. An alarm is raised
    when the e-value, the evidence against calibration that starts at 1, reaches 1 / --false-alarms.
    While the model has not drifted, the probability of an alarm, ever, is at most --false-alarms,
    however many files follow. Without FILES the state is reported.

    \b
    Examples:
      calibrant monitor 'days/*.npz' --calibrator calibrator
      calibrant monitor today.npz --calibrator calibrator --state watch.json --fail
      calibrant monitor --state watch.json --json

    \b
    Exit status: 0 done, 1 an alarm and --fail, 2 could not run.
    """  # noqa: D301
    from calibrant.artifacts import load, save
    from calibrant.monitor import Monitor

    given = {"tolerance": tolerance, "false_alarms": false_alarms, "bins": bins}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    known = state is not None and os.path.exists(state)
    if not files and not known:
        raise click.UsageError("FILES are missing, and there is no --state to report on")
    calibrator = load(folder) if folder else None
    pairs = _pairs(reference, reference_split, calibrator) if reference else None
    if state is not None and known:
        watch = _resumed(state, calibrator, settings, pairs)
    else:
        watch = Monitor(calibrator, reference=pairs, **settings)
    if files and calibrator is None and watch.fingerprint is not None:
        raise click.UsageError(
            f"{state} was collected with {watch.fingerprint}: name its folder with --calibrator"
        )
    _take(watch, _expanded(files), splits)
    if state is not None and files:
        save(watch, state)
    found = watch.report()
    with until_closed():
        if as_json:
            click.echo(json.dumps(found.to_dict(), indent=2))
        else:
            _print_report(found)
    return int(fail and found.alarm is not None)


def _resumed(
    state: str, calibrator: Calibrator | None, settings: dict[str, Any], reference: Pairs | None
) -> Monitor:
    """The stream of a state; options that contradict it are refused."""
    import numpy as np

    from calibrant.artifacts import load
    from calibrant.monitor import Monitor

    watch = load(state, Monitor)
    if calibrator is not None:
        watch.resume(calibrator)
    for name, value in settings.items():
        if value != getattr(watch, name):
            option = name.replace("_", "-")
            raise click.UsageError(
                f"{state} was begun with --{option} {getattr(watch, name):g}, not {value:g}: leave "
                "the option out, or begin a new --state"
            )
    if reference is not None:
        begun = {name: getattr(watch, name) for name in ("tolerance", "false_alarms", "bins")}
        same = Monitor(reference=reference, **begun)
        if not np.allclose(same.tolerated.gaps, watch.tolerated.gaps):
            raise click.UsageError(
                f"{state} was begun with another reference, or none: leave --reference out, or "
                "begin a new --state"
            )
    return watch


def _pairs(path: str, split: str | None, calibrator: Calibrator | None) -> Pairs:
    """Return the pairs of a reference."""
    from calibrant.data.dataset import TEST_SPLITS, open_dataset
    from calibrant.metrics.reductions import top_label

    chosen = open_dataset(path).split(split, TEST_SPLITS)
    if chosen.domain != "logits":
        raise ValueError(f"{path} has probs; a reference needs logits")
    logits = chosen.logits
    if calibrator is not None:
        features = chosen.features if calibrator.needs_features else None
        logits = calibrator.transform(logits, features)
    return top_label(logits, chosen.labels)


def _expanded(files: tuple[str, ...]) -> list[str]:
    """Names of files; a pattern stands for its files in natural order."""
    from calibrant.data.files import natural_order

    found: list[str] = []
    for name in files:
        if glob.has_magic(name) and not os.path.exists(name):
            matches = sorted(map(Path, glob.glob(name)), key=natural_order)
            if not matches:
                raise FileNotFoundError(f"no file matches {name}")
            found += map(str, matches)
        else:
            found.append(name)
    if list(files) == sorted(files):  # as a shell expands a pattern
        for before, after in pairwise(found):
            if natural_order(Path(before)) > natural_order(Path(after)):
                say(f"{before} comes before {after}, as given: quote a pattern for natural order")
                break
    return found


def _take(watch: Monitor, files: list[str], splits: tuple[str, ...]) -> None:
    """Add every file, and every split of it, as a window."""
    for name in files:
        for split in splits or (None,):
            with progress_bar() as progress:
                watch.update_file(name, split=split, progress=progress)


def _print_report(found: MonitorReport) -> None:
    console = new_console()
    console.print(found.describe(), style="dim", soft_wrap=True)
    headings, *rows = found.table()
    console.print(text_table(headings, rows))
    for line in found.remarks():
        console.print(line, soft_wrap=True)
    console.print(found.advice(), style="bold", soft_wrap=True)
