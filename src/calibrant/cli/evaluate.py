"""The verb evaluate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from calibrant.cli import engine, shared

if TYPE_CHECKING:
    from collections.abc import Iterable

    from calibrant.metrics.evaluation import Evaluation


@click.command()
@click.argument("pred")
@click.option("--split", metavar="NAME", help=shared.SPLIT.format("measure", "test"))
@click.option(
    "--max",
    "most",
    multiple=True,
    metavar="METRIC=LIMIT",
    help="Exit with 1 if a metric exceeds a limit, in a subgroup of --by too; METRIC.high is the "
    "upper end of the interval.",
)
@click.option(
    "--min",
    "least",
    multiple=True,
    metavar="METRIC=LIMIT",
    help="Likewise if accuracy or AUROC is below a limit; METRIC.low is the lower end.",
)
@click.option("--max-ece", metavar="FRACTION", help="Short for --max ece=FRACTION.")
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
    most: tuple[str, ...],
    least: tuple[str, ...],
    max_ece: str | None,
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
      calibrant evaluate p.npz --by country --max ece.high=0.05 --max nll=0.4 --min accuracy=0.9

    \b
    Figures, with 0 the best unless higher is better:
      accuracy              share of right answers; higher is better
      ECE                   how far confidence and accuracy are apart, on average over bins
      smooth ECE, smCE, KS  the same without bins, by other definitions
      NLL, Brier            penalties for low probabilities of the right class
      AUROC                 how well confidence tells right answers from wrong; higher is better
      AURC                  error among the surest answers, on average over how many are kept

    \b
    Exit status: 0 done, 1 a limit is exceeded, 2 could not run.
    """  # noqa: D301  # click reads the escaped character as "do not rewrap"
    from calibrant.data.dataset import TEST_SPLITS
    from calibrant.metrics.limits import limits_of
    from calibrant.metrics.registry import METRICS
    from calibrant.workflows import evaluate as workflow

    names = shared.names_in(metrics)
    short = () if max_ece is None else (f"ece={max_ece}",)
    limits = _limits("--max", (*most, *short)), _limits("--min", least)
    needed = {limit.metric for limit in limits_of(*limits)}
    if names and (missing := needed - set(map(METRICS.name, names))):
        raise click.UsageError(f"the limits need {', '.join(sorted(missing))} among the --metrics")
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
    checked = evaluation.check_limits(*limits)
    with shared.until_closed():
        if form == "json":
            named = {"class_names": data.class_names} if data.class_names else {}
            about = {**evaluation.to_dict(), **named, "skipped": dict(data.skipped)}
            about |= {"limits": [each._asdict() for each in checked]} if checked else {}
            shared.write_json({"split": name or None, **about})
        elif form == "latex":
            click.echo(evaluation.to_latex())
        else:
            print_evaluation(evaluation, f"{pred}, {name} split" if name else pred)
    for each in checked:
        if each.exceeded or not each.judged:
            shared.say(str(each))
    return int(any(each.exceeded for each in checked))


def _limits(option: str, texts: Iterable[str]) -> dict[str, float]:
    """Return the limits in texts such as ``ece=0.05``."""
    limits: dict[str, float] = {}
    for text in texts:
        name, _, bound = text.partition("=")
        try:
            number = float(bound)
        except ValueError:
            raise click.UsageError(
                f"{option} wants METRIC=LIMIT, such as {option} ece=0.05, got {text}"
            ) from None
        if name in limits:
            raise click.UsageError(f"{option} has two limits of {name}: name one")
        limits[name] = number
    return limits


def print_evaluation(evaluation: Evaluation, title: str) -> None:
    """Write the figures to stdout, and those of the subgroups below."""
    from calibrant.show.metrics import metrics_table, subgroup_table

    console = shared.new_console()
    console.print(title, style="bold", soft_wrap=True)
    console.print(evaluation.describe(), style="dim", soft_wrap=True)
    metrics = metrics_table(evaluation)
    console.print(shared.text_table(metrics.headings, metrics.rows, bold=[1]))
    console.print("What the figures mean: calibrant evaluate --help", style="dim")
    for remark in filter(None, (evaluation.verdict(), evaluation.hint(), evaluation.search)):
        console.print(remark, soft_wrap=True)
    if not evaluation.by:
        return
    console.print(f"\nby subgroup{', worst first' if 'ece' in evaluation else ''}")
    subgroups = subgroup_table(evaluation)
    console.print(shared.text_table(subgroups.headings, subgroups.rows, bold=[2, 4, 5]))
