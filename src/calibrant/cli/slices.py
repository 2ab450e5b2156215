"""The verb slices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from calibrant.cli import engine, shared
from calibrant.cli.shared import FILE, _option, _verb

if TYPE_CHECKING:
    from calibrant.slices import Groups, Slices

SEARCH = ("columns", "depth")
"""Options of a search, not of known groups."""


@_verb()
@click.argument("pred", type=FILE)
@_option(
    "--columns",
    metavar="COLUMN,...",
    help="Columns that form subgroups.  [default: all but identifiers]",
)
@_option("--by", metavar="COLUMN", help="Compare the groups of this column; search nothing.")
@shared.CALIBRATOR
@shared._split_option("search")
@shared.SAMPLE_WEIGHT
@_option(
    "--depth", default=2, type=click.IntRange(1, 3), metavar="N", help="Conditions of a subgroup."
)
@shared.CERTAIN_LEVEL
@shared.AS_JSON
@engine._reads_predictions()
def slices(
    pred: str,
    columns: str | None,
    by: str | None,
    folder: str | None,
    depth: int,
    form: str | None,
    source: engine.InputFiles,
    **options: Any,
) -> None:
    """Find the subgroups where confidence is wrong, worst first.

    PRED is a file as for "calibrant evaluate". Its further columns, such as age and site, form
    subgroups; so do the predictions, and clusters of features. The intervals account for the
    search: all of them hold together. With --by, the groups of one column are compared instead,
    with rates of decisions, before and after a --calibrator.

    \b
    Examples:
      calibrant slices predictions.csv
      calibrant slices predictions.parquet --columns age,site --depth 3
      calibrant slices predictions.csv --by site --calibrator repaired
    """  # noqa: D301
    from calibrant.artifacts import load
    from calibrant.slices import find_slices, measure_groups

    for name in filter(shared._was_passed, SEARCH if by is not None else ()):
        given = f"--{name.replace('_', '-')}"
        raise click.UsageError(f"{given} is for a search; --by compares known groups")
    options["calibrator"] = load(folder) if folder else None
    result: Slices | Groups
    with source.working():
        data = source.open(pred)
        if by is not None:
            result = measure_groups(data, by=by, **options)
        else:
            names = shared._names_in(columns)
            result = find_slices(data, columns=names, depth=depth, **options)
    shared._show_result(form, result, pred, skipped=dict(data.skipped))
