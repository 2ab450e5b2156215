"""The verb monitor."""

from __future__ import annotations

import glob
import os
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calibrant.cli import engine, shared

if TYPE_CHECKING:
    from collections.abc import Callable

    from calibrant._core.binning import Bins
    from calibrant.calibrators.base import Calibrator
    from calibrant.monitor import Monitor
    from calibrant.monitor.report import MonitorReport


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
    "--ids",
    metavar="COLUMN",
    help="Recognise examples that come again by this column.  [default: by their scores]",
)
@click.option(
    "--state",
    metavar="FILE",
    help="Go on from this file where it exists, and write it anew; another run waits.",
)
@click.option(
    "--tolerance", type=float, metavar="FRACTION", help="Tolerated miscalibration.  [default: 0.02]"
)
@click.option(
    "--false-alarms",
    type=float,
    metavar="FRACTION",
    help="Probability of ever raising an alarm without drift.  [default: 0.05]",
)
@click.option("--bins", type=int, help="Number of bins.  [default: 15]")
@click.option(
    "--reference", metavar="PRED", help="Watch for a change against this file, calibrated alike."
)
@click.option("--reference-split", metavar="NAME", help="Its split.  [default: as for evaluate]")
@click.option(
    "--estimate",
    "labelled",
    metavar="PRED",
    help="Estimate the accuracy of each file beside these labelled predictions; FILES may then "
    "have no labels.",
)
@click.option(
    "--report",
    "page",
    metavar="FILE",
    help="Write a page (.html), Markdown (.md) or JSON (.json) as well.",
)
@click.option("--fail", is_flag=True, help="Exit with 1 if there is or was an alarm.")
@shared.AS_JSON
@shared.AS_LATEX
@engine.engine_options
@engine.SKIP_BAD
def monitor(
    files: tuple[str, ...],
    folder: str | None,
    splits: tuple[str, ...],
    ids: str | None,
    state: str | None,
    reference: str | None,
    reference_split: str | None,
    labelled: str | None,
    page: str | None,
    fail: bool,
    form: str | None,
    workers: int | None,
    dask: str | None,
    skip_bad: bool,
    **options: float | None,
) -> int:
    """Detect calibration drift of a deployed model, file by file.

    Each of FILES is a prediction file with labels, as for "calibrant evaluate", and one window of
    the stream, in the order given; a quoted pattern is taken in natural order. An alarm is raised
    when the e-value, the evidence against calibration that starts at 1, reaches 1 / --false-alarms.
    While the model has not drifted, the probability of an alarm, ever, is at most --false-alarms,
    however many files follow. Without FILES the state is reported.

    Each label counts once. Files may come again, in another order or precision, in shards or with
    more labels: a label that was -100 so far joins the window of its example.

    \b
    Examples:
      calibrant monitor 'days/*.npz' --calibrator calibrator
      calibrant monitor today.npz --calibrator calibrator --state watch.json --fail
      calibrant monitor --state watch.json --json
      calibrant monitor --state watch.json --report drift.html
      calibrant monitor today.npz --calibrator calibrator --estimate predictions.npz

    \b
    Exit status: 0 done, 1 an alarm and --fail, 2 could not run.
    """  # noqa: D301
    from calibrant._core.atomic_files import locked
    from calibrant.artifacts import load, save
    from calibrant.estimate import PerformanceEstimator
    from calibrant.monitor import Monitor

    settings: dict[str, Any] = {name: v for name, v in options.items() if v is not None}
    _check_targets(files, state, page)
    calibrator = load(folder) if folder else None
    estimator = PerformanceEstimator(labelled, calibrator=calibrator) if labelled else None
    skipped: dict[str, str] = {}
    # From reading the state to writing it, so that no window of another run is lost.
    with (
        locked(Path(state).resolve()) if state is not None and files else nullcontext(),
        engine.working(workers, dask),
    ):
        known = partial(_known, reference, reference_split, calibrator, skip_bad, skipped)
        if state is not None and os.path.exists(state):
            watch = _resumed(state, calibrator, settings, known)
        else:
            watch = Monitor(calibrator, reference=known(settings.get("bins", 15)), **settings)
        if files and calibrator is None and watch.fingerprint is not None:
            raise click.UsageError(
                f"{state} was collected with {watch.fingerprint}: name its folder with --calibrator"
            )
        for data in engine.opened_each(_expanded(files), skip_bad, skipped):
            for split in splits or (None,):
                watch.update_file(data, split=split, ids=ids, estimator=estimator)
        if state is not None and files:
            save(watch, state)
    report = watch.report()
    _show(report, page, form, skipped)
    return int(fail and report.alarm is not None)


def _check_targets(files: tuple[str, ...], state: str | None, page: str | None) -> None:
    """Refuse to begin with nothing to watch, or a page that cannot be written."""
    from calibrant.show.report.files import check_target

    if not files and state is None:
        raise click.UsageError("FILES are missing, or a --state to report on")
    if state is not None and not files and not os.path.exists(state):
        raise click.UsageError(f"there is no state {state} to report on: name FILES to begin one")
    if page is not None:
        check_target(page)


def _known(
    reference: str | None,
    split: str | None,
    calibrator: Calibrator | None,
    skip_bad: bool,
    skipped: dict[str, str],
    bins: int,
) -> Bins | None:
    """Return the reference in bins, or None without one."""
    from calibrant.monitor.reference import reference_bins

    if reference is None:
        return None
    data = engine.opened(reference, skip_bad)
    skipped.update(data.skipped)
    return reference_bins(data, calibrator, split=split, bins=bins)


def _show(
    report: MonitorReport, page: str | None, form: str | None, skipped: dict[str, str]
) -> None:
    from calibrant.show.report.monitoring import save_monitor_report

    if page is not None:
        message = shared.how_written(page)
        save_monitor_report(report, page)
        shared.say(message)
    with shared.until_closed():
        if form == "json":
            shared.write_json({**report.to_dict(), "skipped": skipped})
        elif form == "latex":
            click.echo(report.to_latex())
        else:
            shared.print_box(report)


def _resumed(
    state: str,
    calibrator: Calibrator | None,
    settings: dict[str, Any],
    known: Callable[[int], Bins | None],
) -> Monitor:
    """Return the stream of a state; options that contradict it are refused."""
    import numpy as np

    from calibrant.artifacts import load
    from calibrant.monitor import Monitor

    watch = load(state, Monitor)
    if calibrator is not None:
        watch.resume(calibrator)
    begun = {name: getattr(watch, name) for name in ("tolerance", "false_alarms", "bins")}
    other = ""
    for name, value in settings.items():
        if value != begun[name]:
            option = f"--{name.replace('_', '-')}"
            other = f"{option} {begun[name]:g}, not {value:g}: leave the option out"
    if (reference := known(watch.bins)) is not None:
        same = Monitor(reference=reference, **begun)
        if not np.allclose(same.tolerated.gaps, watch.tolerated.gaps):
            other = "another reference, or none: leave --reference out"
    if other:
        raise click.UsageError(f"{state} was begun with {other}, or begin a new --state")
    return watch


def _expanded(files: tuple[str, ...]) -> list[str]:
    from calibrant.data.files import natural_order
    from calibrant.data.storage import storage_of

    names: list[str] = []
    for name in files:
        storage, place = storage_of(name)
        if glob.has_magic(place) and not storage.exists(storage.path(place)):
            matches = sorted(storage.matches(place), key=natural_order)
            if not matches:
                raise FileNotFoundError(f"no file matches {name}")
            names += map(storage.address, matches)
        else:
            names.append(name)
    if list(files) == sorted(files):  # as a shell expands a pattern
        for before, after in pairwise(names):
            if natural_order(Path(before)) > natural_order(Path(after)):
                problem = f"{before} comes before {after}, as given"
                shared.say(f"{problem}: quote a pattern for natural order")
                break
    return names
