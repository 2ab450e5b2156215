"""The verb report."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from typing import Any

import click

from calibrant.cli import engine, shared
from calibrant.cli.shared import FILE, _option, _verb


@_verb()
@click.argument("preds", nargs=-1, required=True, metavar="PRED...", type=FILE)
@_option(
    "-o",
    "--out",
    type=FILE,
    default="report.html",
    metavar="FILE",
    help="Write a page (.html), Markdown (.md) or JSON (.json), by the suffix; - is Markdown on "
    "stdout.",
)
@_option("--open", "opens", is_flag=True, help="Open the page in the browser.")
@_option(
    "--split",
    "splits",
    metavar="NAME,...",
    help="Split to measure; several are compared.  [default: test, else the unnamed split]",
)
@shared._split_option("fit methods on", "val", "--fit-split")
@_option("--by", metavar="COLUMN", help="Also report on each value of this column.")
@_option(
    "--methods",
    metavar="NAME,...",
    help="Methods to try; an empty text tries none.  [default: a few]",
)
@shared.LEVEL
@shared.SAMPLE_WEIGHT
@shared.MULTILABEL
@engine._reads_predictions()
def report(
    preds: tuple[str, ...],
    out: str,
    opens: bool,
    splits: str | None,
    methods: str | None,
    estimand: Any,
    source: engine.InputFiles,
    **options: Any,
) -> None:
    """Write a page: can the confidence be trusted, and what to do.

    The page is one file that fetches nothing: a verdict, findings with codes, where the model is
    off, which method of calibration helps, and commands to copy. Several PRED or splits are
    compared: models, days or shifts.

    \b
    Examples:
      calibrant report predictions.npz --open
      calibrant report monday.npz tuesday.npz --by country
      calibrant report predictions.npz -o - >> "$GITHUB_STEP_SUMMARY"
    """  # noqa: D301
    from calibrant.show.pages import check_target
    from calibrant.show.report import report as workflow

    if out != "-":
        check_target(out)
    elif opens:
        raise click.UsageError("--open needs a page, and -o - writes to stdout: leave one out")
    names = shared._names_in(splits) or []
    options |= {"methods": None if methods is None else shared._names_in(methods) or ()}
    options |= {"estimand": estimand or "auto"}
    with source.working("steps"):
        data: Any = [source.open(pred, estimand) for pred in preds]
        split: Any = names if len(names) > 1 else next(iter(names), None)
        result = workflow(data[0] if len(data) == 1 else data, split=split, **options)
    typed = shlex.join(["calibrant", *sys.argv[1:]])
    result = replace(result, provenance=replace(result.provenance, command=typed))
    if out == "-":
        with shared._until_closed():
            sys.stdout.write(result.to_markdown())
        return
    message = shared._how_written(out)
    result.save(out)
    shared.say(message)
    several = len(result.verdicts) > 1
    for name, verdict in result.verdicts.items():
        shared.say(f"{name}: {verdict}" if several else str(verdict))
    if opens:
        click.launch(out)
