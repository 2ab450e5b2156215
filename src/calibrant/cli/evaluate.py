"""The verb evaluate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from calibrant.cli import engine, shared
from calibrant.cli.shared import FILE, _option, _verb

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from calibrant.metrics.evaluation import CheckedLimit


@_verb()
@click.argument("pred", type=FILE)
@shared._split_option("measure")
@_option(
    "--by",
    metavar="COLUMN",
    help='Also measure each value of this column; "auto" finds subgroups.',
)
@_option(
    "--max",
    "most",
    multiple=True,
    metavar="METRIC=LIMIT,...",
    help="Exit with 1 if a metric exceeds its limit, in a subgroup of --by too; METRIC.high "
    "and METRIC.low are the ends of its interval.",
)
@_option(
    "--min",
    "least",
    multiple=True,
    metavar="METRIC=LIMIT,...",
    help="Likewise if accuracy or AUROC is below its limit.",
)
@_option(
    "--metrics",
    metavar="NAME,...",
    help="Metrics to compute; 'calibrant metrics' lists them.  [default: all]",
)
@_option("--bins", default=15, metavar="N", help="Number of bins.")
@shared.LEVEL
@shared.SAMPLE_WEIGHT
@_option(
    "--groups",
    metavar="COLUMN",
    help="Examples with the same value in this column depend on each other; intervals allow for "
    "that.",
)
@shared.MULTILABEL
@shared.TOP_LABEL
@shared.AS_JSON
@shared.AS_LATEX
@engine._reads_predictions()
def evaluate(
    pred: str,
    split: str | None,
    most: tuple[str, ...],
    least: tuple[str, ...],
    metrics: str | None,
    level: float,
    estimand: Any,
    form: str | None,
    source: engine.InputFiles,
    **options: Any,
) -> int:
    """Measure the calibration of a prediction file.

    PRED is an .npz, .safetensors, .parquet or .pt file with arrays "logits" and "labels" (or
    "test_logits", "test_labels"), a .csv or .parquet file with columns "logit_CLASS" or
    "prob_CLASS" and "label", a folder or quoted glob of shards, or X_logits.npy beside
    X_labels.npy. Columns of other names are named with --labels and --probs or --logits.
    "calibrant metrics" says what the figures mean.

    \b
    Examples:
      calibrant evaluate predictions.npz
      calibrant evaluate predictions.npz --split val --json
      calibrant evaluate scores.csv --labels truth --probs p_cat,p_dog
      calibrant evaluate 'shards/*.safetensors' --by country
      calibrant evaluate shards --workers 8 --skip-bad
      calibrant evaluate predictions.npz --max ece=0.03      (in CI)
      calibrant evaluate predictions.npz --max ece.high=0.05,nll=0.4

    \b
    Exit status: 0 done, 1 a limit is exceeded, 2 could not run.
    """  # noqa: D301  # click reads the escaped character as "do not rewrap"
    from calibrant.data.dataset import TEST_SPLITS
    from calibrant.metrics.evaluation import limits_of
    from calibrant.metrics.registry import METRICS
    from calibrant.workflows import evaluate as workflow

    names = shared._names_in(metrics)
    limits = _limits("--max", most), _limits("--min", least)
    needed = {limit.metric for limit in limits_of(*limits)}
    if names and (missing := needed - set(map(METRICS.name, names))):
        raise click.UsageError(f"the limits need {', '.join(sorted(missing))} among the --metrics")
    with source.working():
        data = source.open(pred, estimand)
        options |= {"estimand": estimand or "auto", "metrics": names, "level": level}
        evaluation = workflow.evaluate(data, split=split, **options)
    name = data.find(split, TEST_SPLITS)
    checked = evaluation.check_limits(*limits)
    more: dict[str, Any] = {"split": name or None, "skipped": dict(data.skipped)}
    more |= {"class_names": data.class_names} if data.class_names else {}
    more |= {"limits": [each._asdict() for each in checked]} if checked else {}
    title = f"{pred}, {name} split" if name else pred
    shared._show_result(form, evaluation, title, **more)
    if beyond := [each for each in checked if each.exceeded or not each.judged]:
        _say_limits(beyond)
    return int(any(each.exceeded for each in checked))


def _say_limits(beyond: Sequence[CheckedLimit]) -> None:
    """Write the limits that are exceeded or cannot be compared, in a table."""
    from calibrant.metrics.registry import METRICS
    from calibrant.show.tables import Table

    ends = {"value": "", "low": ", lower end", "high": ", upper end"}
    rows = [
        (
            "all examples" if each.subgroup is None else each.subgroup,
            f"{each.n:,}",
            f"{METRICS[each.metric].title}{ends[each.end]}",
            "undefined" if math.isnan(each.value) else f"{each.value:.4f}",
            f"{each.limit:g}",
            "exceeded" if each.judged else "too few" if each.value == each.value else "",
        )
        for each in beyond
    ]
    headings = ("subgroup", "examples", "metric", "value", "limit", "")
    table = Table(headings, rows, words=(0, 2, 5)).text()
    count = sum(each.exceeded for each in beyond)
    said = f"{count} limit{' is' if count == 1 else 's are'} exceeded:"
    shared.say("\n  ".join([said, *table.splitlines()]), always=True)


def _limits(option: str, texts: Iterable[str]) -> dict[str, float]:
    """Return the limits in texts such as ``ece=0.05,nll=0.4``."""
    limits: dict[str, float] = {}
    for text in (each for texts_of_one in texts for each in texts_of_one.split(",")):
        name, _, bound = text.strip().partition("=")
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
