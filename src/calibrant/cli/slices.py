"""The verb slices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from calibrant.cli import engine, shared

if TYPE_CHECKING:
    from calibrant.slices import Groups, Slices

SEARCH = ("columns", "depth", "min_size", "most", "seed")
"""Options of a search, not of known groups."""


@click.command()
@click.argument("pred")
@click.option("--columns", metavar="NAMES", help="Columns to form subgroups of.  [default: all]")
@click.option("--by", metavar="COLUMN", help="Compare the groups of this column; search nothing.")
@click.option("--calibrator", "folder", metavar="DIR", help="Apply this saved calibrator first.")
@click.option("--split", metavar="NAME", help=shared.SPLIT.format("search", "test"))
@shared.SAMPLE_WEIGHT
@click.option(
    "--depth",
    default=2,
    show_default=True,
    type=click.IntRange(1, 3),
    help="Conditions of a subgroup.",
)
@click.option(
    "--min-size",
    type=click.IntRange(1),
    metavar="N",
    help="Examples of the smallest subgroups.  [default: 30, or a 500th of all]",
)
@click.option(
    "--most", default=20, show_default=True, type=click.IntRange(1), help="Subgroups to show."
)
@shared.CERTAIN_LEVEL
@click.option("--seed", default=0, show_default=True, help="Of samples and noise.")
@shared.AS_JSON
@shared.AS_LATEX
@engine.engine_options
@engine.SKIP_BAD
def slices(
    pred: str,
    columns: str | None,
    by: str | None,
    folder: str | None,
    split: str | None,
    sample_weight: str | None,
    level: float,
    form: str | None,
    workers: int | None,
    dask: str | None,
    skip_bad: bool,
    **options: Any,
) -> int:
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

    for name in filter(shared.was_passed, SEARCH if by is not None else ()):
        option = name.replace("_", "-")
        raise click.UsageError(f"--{option} is for a search; --by compares known groups")
    given: dict[str, Any] = {
        **{"calibrator": load(folder) if folder else None, "split": split},
        **{"sample_weight": sample_weight, "level": level},
    }
    result: Slices | Groups
    with engine.working(workers, dask):
        data = engine.opened(pred, skip_bad)
        if by is not None:
            result = measure_groups(data, by=by, **given)
        else:
            names = shared.names_in(columns)
            result = find_slices(data, columns=names, **given, **options)
    with shared.until_closed():
        if form == "json":
            shared.write_json({**result.to_dict(), "skipped": dict(data.skipped)})
        elif form == "latex":
            click.echo(result.to_latex())
        else:
            shared.print_box(result, pred)
    return 0
