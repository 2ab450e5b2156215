"""The verb evaluate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from calibrant.cli import engine, shared

if TYPE_CHECKING:
    from calibrant.metrics.evaluation import Evaluation


@click.command()
@click.argument("pred")
@click.option("--split", metavar="NAME", help=shared.SPLIT.format("measure", "test"))
@click.option(
    "--max-ece", type=float, metavar="FRACTION", help="Exit with 1 if the ECE exceeds this limit."
)
@shared.AS_JSON
@shared.AS_LATEX
@click.option(
    "--by",
    metavar="COLUMN",
    help='Measure each value of this column as well; "auto": subgroups that are found.',
)
@shared.SAMPLE_WEIGHT
@shared.MULTILABEL
@shared.BINARY
@shared.TOP_LABEL
@shared.BINS
@click.option("--metrics", metavar="NAMES", help="With commas between, as in JSON.  [default: all]")
@shared.LEVEL
@click.option("--seed", default=0, show_default=True, help="Of the draws behind the intervals.")
@engine.engine_options
@engine.SKIP_BAD
def evaluate(
    pred: str,
    split: str | None,
    max_ece: float | None,
    form: str | None,
    estimand: str | None,
    metrics: str | None,
    level: float,
    workers: int | None,
    dask: str | None,
    skip_bad: bool,
    **options: Any,
) -> int:
    """Measure the calibration of a prediction file.

    PRED is an .npz, .safetensors, .parquet or .pt file with arrays "logits" and "labels" (or
    "test_logits", "test_labels"), a .csv or .parquet file with columns "logit_CLASS" or
    "prob_CLASS" and "label", a folder or quoted glob of shards, or X_logits.npy beside
    X_labels.npy.

    \b
    Examples:
      calibrant evaluate predictions.npz
      calibrant evaluate predictions.npz --split val --json
      calibrant evaluate predictions.csv
      calibrant evaluate 'shards/*.safetensors' --by country
      calibrant evaluate shards --workers 8 --skip-bad
      calibrant evaluate predictions.npz --max-ece 0.03    (for continuous integration)

    \b
    Figures, with 0 the best unless higher is better:
      accuracy              share of right answers; higher is better
      ECE                   how far confidence and accuracy are apart, on average over bins
      smooth ECE, smCE, KS  the same without bins, by other definitions
      NLL, Brier            penalties for low probabilities of the right class
      AUROC                 how well confidence tells right answers from wrong; higher is better
      AURC                  error among the surest answers, on average over how many are kept

    \b
    Exit status: 0 done, 1 the ECE exceeds --max-ece, 2 could not run.
    """  # noqa: D301  # click reads the escaped character as "do not rewrap"
    from calibrant.data.dataset import TEST_SPLITS
    from calibrant.workflows import evaluate as workflow

    if max_ece is not None and not 0 <= max_ece <= 1:
        raise click.UsageError(f"--max-ece must be a fraction (0.03 is 3 %), got {max_ece:g}")
    names = shared.names_in(metrics)
    if max_ece is not None and names and "ece" not in names:
        raise click.UsageError("--max-ece needs ece among the --metrics")
    with engine.working(workers, dask):
        data = engine.opened(pred, skip_bad, estimand)
        name = data.split(split, TEST_SPLITS).name
        evaluation = workflow.evaluate(
            data,
            split=name,
            estimand=estimand or "auto",  # type: ignore[arg-type]  # click's flag values
            metrics=names,
            level=level,
            **options,
        )
    with shared.until_closed():
        if form == "json":
            named = {"class_names": data.class_names} if data.class_names else {}
            about = {**evaluation.to_dict(), **named, "skipped": dict(data.skipped)}
            shared.write_json({"split": name or None, **about})
        elif form == "latex":
            click.echo(evaluation.to_latex())
        else:
            print_evaluation(evaluation, f"{pred}, {name} split" if name else pred)
            if options["by"] == "auto" and not evaluation.by:
                click.echo("No subgroup is shown to be miscalibrated.")
    if max_ece is None or evaluation["ece"].value <= max_ece:
        return 0
    shared.say(f"ECE {evaluation['ece'].value:.4f} exceeds the limit of {max_ece:g}")
    return 1


def print_evaluation(evaluation: Evaluation, title: str) -> None:
    """Write the figures to stdout, and those of the subgroups below."""
    console = shared.new_console()
    console.print(title, style="bold", soft_wrap=True)
    console.print(evaluation.describe(), style="dim", soft_wrap=True)
    about = (evaluation.heading or "metric", "value", evaluation.interval_heading)
    console.print(shared.text_table(about, evaluation.table(), bold=[1]))
    console.print("What the figures mean: calibrant evaluate --help", style="dim")
    for remark in filter(None, (evaluation.verdict(), evaluation.hint())):
        console.print(remark, soft_wrap=True)
    if not evaluation.by:
        return
    console.print(f"\nby subgroup{', worst first' if 'ece' in evaluation else ''}")
    headings, *rows = evaluation.subgroup_table()
    console.print(shared.text_table(headings, rows, bold=[2, 4, 5]))
