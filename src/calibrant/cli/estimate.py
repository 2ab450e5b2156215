"""The verb estimate."""

from __future__ import annotations

from typing import Any

import click

from calibrant.cli import engine, shared
from calibrant.cli.shared import FILE, _option, _verb


@_verb()
@click.argument("pred", type=FILE)
@shared.CALIBRATOR
@_option(
    "--reference",
    type=FILE,
    metavar="PRED",
    help="Labelled predictions of the same model, calibrated in the same way.",
)
@shared._split_option("estimate")
@shared.SAMPLE_WEIGHT
@_option(
    "--labelled",
    type=FILE,
    metavar="CSV",
    help="Labels of some rows: a file of --label-budget that was filled in.",
)
@_option("--ignore-labels", is_flag=True, help="Do not use the labels in PRED.")
@shared.CERTAIN_LEVEL
@_option(
    "--label-budget",
    type=shared.AT_LEAST_1,
    metavar="N",
    help="Choose N examples to label instead, and write them to --out.",
)
@_option(
    "-o",
    "--out",
    type=FILE,
    default="to_label.csv",
    metavar="CSV",
    help="File for the examples to label.",
)
@_option(
    "--fail",
    is_flag=True,
    help="Exit with 1 if a shift or labels speak against the calibration, 2 if nothing checks it.",
)
@shared.AS_JSON
@engine._reads_predictions(skip_bad=False)
def estimate(
    pred: str,
    folder: str | None,
    reference: str | None,
    labelled: str | None,
    ignore_labels: bool,
    split: str | None,
    label_budget: int | None,
    out: str,
    fail: bool,
    form: str | None,
    source: engine.InputFiles,
    **options: Any,
) -> int:
    """Estimate accuracy without labels, from calibrated predictions.

    PRED is a file as for "calibrant evaluate", whose labels may be missing, or be -100 where they
    are not known. Intervals need a --reference or labels. Shifts from the reference widen the
    intervals or withdraw them, with the reason. From 30 labels of PRED on, the estimate rests on
    these alone, and a contradiction is named. With --label-budget, the rows to label next are
    written, with their inclusion probabilities.

    \b
    Examples:
      calibrant estimate today.npz --reference predictions.npz
      calibrant estimate today.npz --calibrator calibrator --label-budget 200
      calibrant estimate today.npz --labelled to_label.csv

    \b
    Exit status: 0 done, 1 --fail and calibration is contradicted or its guarantee
    withdrawn, 2 could not run, or --fail and nothing to check calibration with.
    """  # noqa: D301
    from calibrant.artifacts import load
    from calibrant.estimate import choose_labels, estimate_performance

    if labelled is not None and ignore_labels:
        raise click.UsageError("name --labelled or --ignore-labels, not both")
    common: dict[str, Any] = {"calibrator": load(folder) if folder else None, "split": split}
    common["labels"] = labelled or not ignore_labels
    with source.working():
        data = source.open(pred)
        if label_budget is not None:
            sample = choose_labels(data, label_budget, **common)
            message = shared._how_written(out)
            sample.save(out)
            shared.say(f"{message}: {sample!r}")
            return 0
        known = source.open(reference) if reference else None
        result = estimate_performance(data, reference=known, **common, **options)
    shared._show_result(form, result, pred)
    if fail and result.status == "unchecked":
        raise ValueError(
            "--fail has nothing to check calibration with: name labelled predictions with "
            "--reference, or labels of some rows with --labelled"
        )
    return int(fail and result.status in ("withdrawn", "contradicted"))
