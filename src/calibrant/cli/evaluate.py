"""The verb evaluate."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from calibrant.cli.shared import (
    AS_JSON,
    BINS,
    LEVEL,
    SAMPLE_WEIGHT,
    interval_heading,
    names_in,
    new_console,
    progress_bar,
    say,
    text_table,
    until_closed,
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
@click.option("--by", metavar="COLUMN", help="Measure each value of this column as well.")
@SAMPLE_WEIGHT
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
    by: str | None,
    sample_weight: str | None,
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
      calibrant evaluate 'shards/*.safetensors' --by country
      calibrant evaluate predictions.npz --max-ece 0.03    (for continuous integration)

    \b
    Exit status: 0 done, 1 the ECE exceeds --max-ece, 2 could not run.
    """  # noqa: D301  # click reads the escaped character as "do not rewrap"
    from calibrant.data.dataset import TEST_SPLITS, open_dataset
    from calibrant.workflows import evaluate as workflow

    if max_ece is not None and not 0 <= max_ece <= 1:
        raise click.UsageError(f"--max-ece must be a fraction (0.03 is 3 %), got {max_ece:g}")
    names = names_in(metrics)
    if max_ece is not None and names and "ece" not in names:
        raise click.UsageError("--max-ece needs ece among the --metrics")
    data = open_dataset(pred)
    name = data.split(split, TEST_SPLITS).name
    with progress_bar() as progress:
        evaluation = workflow.evaluate(
            data,
            split=name,
            sample_weight=sample_weight,
            by=by,
            estimand=estimand or "top_label",  # type: ignore[arg-type]  # click's flag values
            bins=bins,
            metrics=names,
            level=level or None,
            seed=seed,
            progress=progress,
        )
    with until_closed():
        if as_json:
            click.echo(json.dumps({"split": name or None, **evaluation.to_dict()}, indent=2))
        else:
            print_evaluation(evaluation, f"{pred}, {name} split" if name else pred)
    if max_ece is None or evaluation["ece"].value <= max_ece:
        return 0
    say(f"ECE {evaluation['ece'].value:.4f} exceeds the limit of {max_ece:g}")
    return 1


def print_evaluation(evaluation: Evaluation, title: str) -> None:
    """Write the figures to stdout, and those of the subgroups below."""
    console = new_console()
    console.print(title, style="bold", soft_wrap=True)
    console.print(evaluation.describe(), style="dim", soft_wrap=True)
    console.print(
        text_table(("metric", "value", interval_heading(evaluation)), evaluation.table(), bold=[1])
    )
    if evaluation.verdict():
        console.print(evaluation.verdict(), soft_wrap=True)
    if evaluation.by:
        console.print("\nby group, worst first" if "ece" in evaluation else "\nby group")
        console.print(_group_table(evaluation))


def _group_table(evaluation: Evaluation) -> Table:
    """Show three figures of each group; only the first has its interval, for narrow terminals."""
    usual = [name for name in ("ece", "accuracy", "nll") if name in evaluation]
    first, *others = usual or list(evaluation)[:3]
    titles = {name: row[0] for name, row in zip(evaluation, evaluation.table(), strict=True)}
    figures = (titles[first], interval_heading(evaluation), *(titles[name] for name in others))
    rows = []
    for group, part in evaluation.by.items():
        cells = dict(zip(part, part.table(), strict=True))
        rows.append((group, f"{part.n:,}", *cells[first][1:], *(cells[n][1] for n in others)))
    return text_table(("group", "examples", *figures), rows, bold=[2, 4, 5])
