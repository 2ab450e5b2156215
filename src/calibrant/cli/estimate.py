"""The verb estimate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from calibrant.cli import engine, shared

if TYPE_CHECKING:
    pass


@click.command()
@click.argument("pred")
@click.option("--calibrator", "folder", metavar="DIR", help="Apply this saved calibrator first.")
@click.option(
    "--reference", metavar="PRED", help="Labelled predictions of the same model, calibrated alike."
)
@click.option("--reference-split", metavar="NAME", help="Its split.  [default: as for evaluate]")
@click.option("--split", metavar="NAME", help=shared.SPLIT.format("estimate", "test"))
@shared.SAMPLE_WEIGHT
@click.option(
    "--threshold",
    type=float,
    metavar="FRACTION",
    help="Accept answers from this confidence on: estimate their share and error as well.",
)
@click.option(
    "--labels",
    "known",
    metavar="CSV",
    help="Labels of some rows: a file of --label-budget that was filled in.",
)
@click.option("--ignore-labels", is_flag=True, help="Do not use the labels in PRED.")
@shared.CERTAIN_LEVEL
@click.option(
    "--tolerance",
    default=0.1,
    show_default=True,
    metavar="FRACTION",
    help="Withdraw the promise if intervals would widen by more accuracy than this.",
)
@click.option(
    "--drift-level",
    default=0.01,
    show_default=True,
    metavar="FRACTION",
    help="Probability of seeing a shift where there is none.",
)
@click.option(
    "--label-budget",
    type=click.IntRange(1),
    metavar="N",
    help="Choose N examples to label instead, and write them to --out.",
)
@click.option("-o", "--out", metavar="CSV", help="File for the examples to label.")
@click.option("--seed", default=0, show_default=True, help="Of draws and choices.")
@click.option(
    "--fail",
    is_flag=True,
    help="Exit with 1 if a shift or labels speak against the calibration, 2 if nothing checks it.",
)
@shared.AS_JSON
@shared.AS_LATEX
@engine.engine_options
def estimate(
    pred: str,
    folder: str | None,
    known: str | None,
    ignore_labels: bool,
    sample_weight: str | None,
    split: str | None,
    label_budget: int | None,
    out: str | None,
    seed: int,
    fail: bool,
    form: str | None,
    workers: int | None,
    dask: str | None,
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
      calibrant estimate today.npz --calibrator calibrator --reference predictions.npz
      calibrant estimate today.npz --calibrator calibrator --label-budget 200 -o to_label.csv
      calibrant estimate today.npz --calibrator calibrator --labels to_label.csv

    \b
    Exit status: 0 done, 1 --fail and calibration is contradicted or its promise withdrawn,
    2 could not run, or --fail and nothing to check calibration with.
    """  # noqa: D301
    from calibrant.artifacts import load
    from calibrant.estimate import choose_labels, estimate_performance

    if (label_budget is None) != (out is None):
        raise click.UsageError("--label-budget and --out go together")
    if known is not None and ignore_labels:
        raise click.UsageError("name --labels or --ignore-labels, not both")
    calibrator = load(folder) if folder else None
    with engine.working(workers, dask):
        if label_budget is not None and out is not None:
            sample = choose_labels(
                pred,
                label_budget,
                calibrator=calibrator,
                split=split,
                labels=known or not ignore_labels,
                seed=seed,
            )
            message = shared.how_written(out)
            sample.save(out)
            shared.say(f"{message}: {sample!r}")
            return 0
        result = estimate_performance(
            pred,
            calibrator=calibrator,
            labels=known or not ignore_labels,
            sample_weight=sample_weight,
            split=split,
            seed=seed,
            **options,
        )
    with shared.until_closed():
        if form == "json":
            shared.write_json(result.to_dict())
        elif form == "latex":
            click.echo(result.to_latex())
        else:
            shared.print_box(result, pred)
    if fail and result.status == "unchecked":
        raise ValueError(
            "--fail has nothing to check calibration with: name labelled predictions with "
            "--reference, or labels of some rows with --labels"
        )
    return int(fail and result.status in ("withdrawn", "contradicted"))
