"""The verb monitor."""

from __future__ import annotations

import glob
import os
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calibrant.cli import engine, shared
from calibrant.cli.shared import FILE, _option, _verb

if TYPE_CHECKING:
    from calibrant.calibrators.base import Calibrator
    from calibrant.data.dataset import Dataset
    from calibrant.monitor import Monitor


@_verb()
@click.argument("files", nargs=-1, type=FILE)
@shared.CALIBRATOR
@_option(
    "--split",
    "splits",
    metavar="NAME,...",
    help="Split of each file; several are several windows.  [default: test, else the unnamed "
    "split]",
)
@_option(
    "--ids",
    metavar="COLUMN",
    help="Recognise examples that come again by this column.  [default: by their scores]",
)
@_option(
    "--state",
    type=FILE,
    metavar="FILE",
    help="Continue from this file if it exists, and update it; concurrent runs wait.",
)
@_option("--tolerance", **shared.FRACTION, help="Tolerated miscalibration.  [default: 0.02]")
@_option(
    "--false-alarms",
    **shared.FRACTION,
    help="Probability of ever raising an alarm without drift.  [default: 0.05]",
)
@_option(
    "--reference",
    type=FILE,
    metavar="PRED",
    help="Watch for a change from these labelled predictions, calibrated in the same way.",
)
@_option(
    "--estimate",
    "labelled",
    type=FILE,
    metavar="PRED",
    help="Estimate the accuracy of each file from these labelled predictions; FILES may then "
    "have no labels.",
)
@_option(
    "--report",
    "page",
    type=FILE,
    metavar="FILE",
    help="Write a page (.html), Markdown (.md) or JSON (.json) as well.",
)
@_option("--fail", is_flag=True, help="Exit with 1 if there is or was an alarm.")
@shared.AS_JSON
@engine._reads_predictions()
def monitor(
    files: tuple[str, ...],
    folder: str | None,
    splits: str | None,
    ids: str | None,
    state: str | None,
    reference: str | None,
    labelled: str | None,
    page: str | None,
    fail: bool,
    form: str | None,
    source: engine.InputFiles,
    **options: float | None,
) -> int:
    """Detect calibration drift of a deployed model, file by file.

    Each of FILES is a prediction file with labels, as for "calibrant evaluate", and one window of
    the stream, in the order given; a quoted pattern is taken in natural order. An alarm is raised
    when the e-value, the evidence against calibration that starts at 1, reaches 20. While the model
    has not drifted, the probability of an alarm, ever, is at most 5 %, however many files follow;
    --false-alarms changes both. Without FILES the state is reported.

    Each label counts once. Files may come again, in another order or precision, in shards or with
    more labels: a label that was -100 so far joins the window of its example.

    \b
    Examples:
      calibrant monitor 'days/*.npz' --calibrator calibrator
      calibrant monitor today.npz --state watch.json --fail
      calibrant monitor --state watch.json --json
      calibrant monitor --state watch.json --report drift.html
      calibrant monitor today.npz --estimate predictions.npz

    \b
    Exit status: 0 done, 1 an alarm and --fail, 2 could not run.
    """  # noqa: D301
    from calibrant._core.atomic_files import locked
    from calibrant.artifacts import load, save
    from calibrant.estimate import PerformanceEstimator
    from calibrant.show.monitor import save_monitor_report

    settings: dict[str, Any] = {name: v for name, v in options.items() if v is not None}
    _check_targets(files, state, page)
    calibrator = load(folder) if folder else None
    skipped: dict[str, str] = {}
    # From reading the state to writing it, so that no window of another run is lost.
    with (
        locked(Path(state).resolve()) if state is not None and files else nullcontext(),
        source.working(),
    ):
        known = None
        if reference is not None:
            (known,) = source.open_each([reference], skipped)
        watch = _begun(state, calibrator, settings, known)
        if files and calibrator is None and watch.fingerprint is not None:
            raise click.UsageError(
                f"{state} was collected with {watch.fingerprint}: name its folder with --calibrator"
            )
        estimator = None
        if labelled:
            estimator = PerformanceEstimator(source.open(labelled), calibrator=calibrator)
        for data in source.open_each(_expanded(files), skipped):
            for split in shared._names_in(splits) or (None,):
                watch.update_file(data, split=split, ids=ids, estimator=estimator)
        if state is not None and files:
            save(watch, state)
    report = watch.report()
    if page is not None:
        message = shared._how_written(page)
        save_monitor_report(report, page, state=state or "watch.json")
        shared.say(message)
    shared._show_result(form, report, skipped=skipped)
    return int(fail and report.alarm is not None)


def _check_targets(files: tuple[str, ...], state: str | None, page: str | None) -> None:
    """Refuse to begin with nothing to watch, or a page that cannot be written."""
    from calibrant.show.pages import check_target

    if not files and state is None:
        raise click.UsageError("pass FILES, or a --state to report on")
    if state is not None and not files and not os.path.exists(state):
        raise click.UsageError(f"there is no state {state} to report on: name FILES to begin one")
    if page is not None:
        check_target(page)


def _begun(
    state: str | None,
    calibrator: Calibrator | None,
    settings: dict[str, Any],
    known: Dataset | None,
) -> Monitor:
    """Return the stream of a state where there is one, else a new one."""
    from calibrant.monitor import Monitor
    from calibrant.monitor.reference import reference_bins

    if state is not None and os.path.exists(state):
        return _resumed(state, calibrator, settings, known)
    bins = None if known is None else reference_bins(known, calibrator)
    return Monitor(calibrator, reference=bins, **settings)


def _resumed(
    state: str,
    calibrator: Calibrator | None,
    settings: dict[str, Any],
    known: Dataset | None,
) -> Monitor:
    """Return the stream of a state; options that contradict it are refused."""
    import numpy as np

    from calibrant.artifacts import load
    from calibrant.monitor import Monitor
    from calibrant.monitor.reference import reference_bins

    watch = load(state, Monitor)
    if calibrator is not None:
        watch.resume(calibrator)
    begun = {name: getattr(watch, name) for name in ("tolerance", "false_alarms", "bins")}
    other = ""
    for name, value in settings.items():
        if value != begun[name]:
            option = f"--{name.replace('_', '-')}"
            other = f"{option} {begun[name]:g}, not {value:g}: leave the option out"
    if known is not None:
        same = Monitor(reference=reference_bins(known, calibrator, bins=watch.bins), **begun)
        if not np.allclose(same.tolerated.gaps, watch.tolerated.gaps):
            other = "another reference, or none: leave --reference out"
    if other:
        raise click.UsageError(f"{state} was begun with {other}, or begin a new --state")
    return watch


def _expanded(files: tuple[str, ...]) -> list[str]:
    from calibrant.data.files import natural_order
    from calibrant.data.formats import storage_of

    names: list[str] = []
    for name in files:
        storage, place = storage_of(name)
        if glob.has_magic(str(place)) and not storage.exists(place):
            matches = sorted(storage.matches(str(place)), key=natural_order)
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
