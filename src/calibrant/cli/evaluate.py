"""The verb evaluate."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from calibrant.cli.shared import (
    AS_JSON,
    BINS,
    LEVEL,
    WEIGHT,
    interval_heading,
    names_in,
    new_console,
    progress_bar,
    say,
    until_closed,
    warn_of_stored_probs,
)

if TYPE_CHECKING:
    from rich.table import Table

    from calibrant.metrics.evaluation import Evaluation


@click.command()
@click.argument("pred")
@click.option(
    "--split", metavar="NAME", help="Split to measure.  [default: test, else the plain arrays]"
)
@click.option(
    "--max-ece",
    metavar="FRACTION",
    type=float,
    help="Exit with 1 if the ECE exceeds this: 0.03 is 3 %.",
)
@AS_JSON
@click.option("--group-by", metavar="KEY", help="Measure each value of this array as well.")
@WEIGHT
@click.option(
    "--multilabel", "estimand", flag_value="multilabel", help="Labels are 0 or 1 for each tag."
)
@click.option(
    "--binary", "estimand", flag_value="binary", help="Measure P(class 1), not the top label."
)
@BINS
@click.option("--metrics", metavar="NAMES", help="With commas between, as in JSON.  [default: all]")
@LEVEL
@click.option("--seed", default=0, show_default=True, help="Of the draws behind the intervals.")
def evaluate(
    pred: str,
    split: str | None,
    max_ece: float | None,
    as_json: bool,
    group_by: str | None,
    weight_by: str | None,
    estimand: str | None,
    bins: int,
    metrics: str | None,
    level: float,
    seed: int,
) -> int:
    """Measure the calibration of a prediction file.

    PRED is an .npz, .safetensors or .parquet file with arrays "logits" and "labels" (or
    "test_logits", "test_labels"), a folder or quoted glob of shards, or X_logits.npy beside
    X_labels.npy.

    \b
    Examples:
      calibrant evaluate predictions.npz
      calibrant evaluate predictions.npz --split val --json
      calibrant evaluate 'shards/*.safetensors' --group-by country
      calibrant evaluate predictions.npz --max-ece 0.03    (for continuous integration)

    \b
    Exit status: 0 done, 1 the ECE exceeds --max-ece, 2 could not run.
    """  # noqa: D301  # click reads the escaped character as "do not rewrap"
    from calibrant.data import open_predictions
    from calibrant.workflows.evaluate import evaluate_file

    names = names_in(metrics)
    if max_ece is not None and not 0 <= max_ece <= 1:
        raise click.UsageError(f"--max-ece must be a fraction (0.03 is 3 %), got {max_ece:g}")
    if max_ece is not None and names and "ece" not in names:
        raise click.UsageError("--max-ece needs ece among the --metrics")
    with progress_bar() as progress:
        found = evaluate_file(
            pred,
            split=split,
            sample_weight=weight_by,
            by=group_by,
            estimand=estimand or "top_label",  # type: ignore[arg-type]  # click's flag values
            bins=bins,
            metrics=names,
            level=level or None,
            seed=seed,
            progress=progress,
        )
    name = open_predictions(pred).split(split, ("test", "")).name
    if estimand != "multilabel":  # there every column is a question of its own
        warn_of_stored_probs(pred, name)
    with until_closed():
        if as_json:
            click.echo(json.dumps({"split": name or None, **found.to_dict()}, indent=2))
        else:
            print_evaluation(found, f"{pred}, {name} split" if name else pred)
    return _over_limit(found, max_ece)


def _over_limit(found: Evaluation, max_ece: float | None) -> int:
    if max_ece is None or found["ece"].value <= max_ece:
        return 0
    say(f"ECE {found['ece'].value:.4f} exceeds the limit of {max_ece:g}")
    return 1


def print_evaluation(found: Evaluation, title: str) -> None:
    """Write the figures to stdout, and those of the groups below."""
    console = new_console()
    console.print(title, style="bold", soft_wrap=True)
    console.print(found.describe(), style="dim", soft_wrap=True)
    console.print(_metric_table(found))
    if found.verdict():
        console.print(found.verdict(), soft_wrap=True)
    if found.by:
        console.print()
        console.print(_group_table(found))


def _metric_table(found: Evaluation) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("metric")
    table.add_column("value", justify="right", style="bold")
    table.add_column(interval_heading(found), justify="right")
    for row in found.table():
        table.add_row(*row)
    return table


def _group_table(found: Evaluation) -> Table:
    """Three figures of each group; only the first has its interval, to fit a narrow terminal."""
    from rich.table import Table

    usual = [name for name in ("ece", "accuracy", "nll") if name in found]
    shown = usual or list(found)[:3]
    title = "by group, worst first" if "ece" in found else "by group"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    table.add_column("group", overflow="fold")
    table.add_column("examples", justify="right", no_wrap=True)
    headings = dict(zip(found, (row[0] for row in found.table()), strict=True))
    for name in shown:
        table.add_column(headings[name], justify="right", style="bold", no_wrap=True)
        if name == shown[0]:
            table.add_column(interval_heading(found), justify="right", no_wrap=True)
    for group, part in found.by.items():
        cells = dict(zip(part, part.table(), strict=True))
        _, value, interval = cells[shown[0]]
        others = [cells[name][1] for name in shown[1:]]
        table.add_row(group, f"{part.n:,}", value, interval, *others)
    return table
