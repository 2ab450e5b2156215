"""The verb report."""

from __future__ import annotations

import sys
from typing import Any

import click

from calibrant.cli import engine, shared


@click.command()
@click.argument("preds", nargs=-1, required=True, metavar="PRED...")
@click.option(
    "-o",
    "--out",
    required=True,
    metavar="FILE",
    help="Write a page (.html), Markdown (.md) or JSON (.json), by the suffix; - is Markdown on "
    "stdout.",
)
@click.option(
    "--split",
    "splits",
    multiple=True,
    metavar="NAME",
    help="Split to measure; several are compared.  [default: test, else the plain arrays]",
)
@click.option("--fit-split", metavar="NAME", help=shared.SPLIT.format("fit methods on", "val"))
@click.option("--by", metavar="COLUMN", help="Report on each value of this column as well.")
@shared.SAMPLE_WEIGHT
@click.option(
    "--methods",
    metavar="NAMES",
    help="Methods to try, with commas between; an empty text tries none.  [default: a few]",
)
@shared.CHOICES
@shared.MULTILABEL
@shared.BINARY
@shared.TOP_LABEL
@shared.BINS
@shared.LEVEL
@click.option("--seed", default=0, show_default=True, help="Of the halves and the intervals.")
@click.option("--title", metavar="TEXT", help="Title of the report.")
@engine.engine_options
@engine.SKIP_BAD
def report(
    preds: tuple[str, ...],
    out: str,
    splits: tuple[str, ...],
    methods: str | None,
    choices: bool,
    estimand: str | None,
    workers: int | None,
    dask: str | None,
    skip_bad: bool,
    **options: Any,
) -> None:
    """Report whether the confidence of a model can be trusted, and what to do.

    The page is one file that fetches nothing: a verdict, findings with codes, where the model is
    off, which method of calibration helps, and commands to copy. Several PRED or --split are
    compared: models, days or shifts.

    \b
    Examples:
      calibrant report predictions.npz -o report.html
      calibrant report monday.npz tuesday.npz --by country -o report.html
      calibrant report predictions.npz -o - >> "$GITHUB_STEP_SUMMARY"
    """  # noqa: D301
    from calibrant.show.report import report as workflow
    from calibrant.show.report.files import check_target

    if out != "-":
        check_target(out)
    with engine.working(workers, dask, "steps"):
        data: Any = preds
        if skip_bad:
            data = [engine.opened(pred, True, estimand) for pred in preds]
        result = workflow(
            data[0] if len(preds) == 1 else data,
            split=splits if len(splits) > 1 else next(iter(splits), None),
            methods=None if methods is None else shared.names_in(methods) or (),
            keep_argmax=False if choices else None,
            estimand=estimand or "auto",  # type: ignore[arg-type]  # click's flag values
            **options,
        )
    if out == "-":
        with shared.until_closed():
            sys.stdout.write(result.to_markdown())
        return
    message = shared.how_written(out)
    result.save(out)
    shared.say(message)
    several = len(result.verdicts) > 1
    for name, verdict in result.verdicts.items():
        shared.say(f"{name}: {verdict}" if several else str(verdict))
