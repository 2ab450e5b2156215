"""The verbs compare and demo."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from calibrant.cli import engine, shared
from calibrant.cli.shared import FILE, _option, _verb

if TYPE_CHECKING:
    from rich.table import Table

    from calibrant.metrics.evaluation import Evaluation


@_verb()
@click.argument("pred", type=FILE)
@_option(
    "--methods",
    metavar="NAME,...",
    help="Methods to fit, or all; 'calibrant methods' lists them.  [default: a dozen]",
)
@shared._split_option("fit on", "val", "--fit-split")
@shared._split_option("measure")
@_option(
    "--time-limit",
    default=60.0,
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="Time limit for the fit of each method; 0: none.",
)
@shared.METADATA
@shared.LEVEL
@shared.SAMPLE_WEIGHT
@shared.GROUPS
@shared.MULTILABEL
@shared.TOP_LABEL
@shared.AS_JSON
@shared.AS_LATEX
@engine._reads_predictions(cache=True)
def compare(
    pred: str,
    methods: str | None,
    split: str | None,
    time_limit: float,
    columns: str | None,
    estimand: Any,
    form: str | None,
    source: engine.InputFiles,
    **options: Any,
) -> int:
    """Fit a dozen methods, and measure them side by side.

    Methods are fitted on the val split and measured on the test split. In a file with only one set
    of examples, each example is measured with fits on the others (cross-fitting). The advice comes
    from cross-validation on the examples of the fit, as in "calibrant fit". "calibrant metrics"
    explains the figures; "changed" counts other predicted classes.

    \b
    Examples:
      calibrant compare predictions.npz
      calibrant compare predictions.npz --methods none,ts,smart --json
      calibrant compare predictions.npz --methods all
      calibrant compare scores.csv --labels truth --probs p_cat,p_dog
      calibrant compare tags.npz --multilabel
    """  # noqa: D301
    from calibrant.workflows import compare as workflow

    options |= {"test_split": split, "columns": shared._names_in(columns)}
    options |= {"time_limit": time_limit or None}
    with source.working("methods"):
        data = source.open(pred, estimand)
        comparison = workflow.compare(
            data, methods=shared._names_in(methods), estimand=estimand or "auto", **options
        )
    shared._show_result(form, comparison, pred, skipped=dict(data.skipped))
    return 0 if comparison.measured else 2


@_verb()
def demo() -> None:
    """Measure and calibrate a classifier that comes with calibrant.

    The predictions are those of a ResNet-50 trained on CIFAR-10. It is measured on 10,000 test
    images; methods are fitted on 5,000 others and compared on the test images.
    """
    from calibrant.data import open_dataset, sample_path
    from calibrant.workflows import compare as comparing, evaluate as evaluating

    path, console = sample_path(), shared._new_console()
    data = open_dataset(path)
    evaluation = evaluating.evaluate(data, split="test")
    with shared._until_closed():
        shared._print_box(evaluation, "ResNet-50 on CIFAR-10, 10,000 test images")
        console.print()
        console.print(_diagram(evaluation, *("■│" if console.encoding.startswith("utf") else "#|")))
        console.print()
        sys.stdout.flush()  # there is something to read while the methods are fitted
        with engine.InputFiles().working("methods"):
            methods = ["none", "ts", "smart", "auto"]
            comparison = comparing.compare(data, methods=methods)
        shared._print_box(comparison, "Calibrated by three methods")
        console.print()
        console.print(STEPS)
        console.print(f"The file measured here: {path}", soft_wrap=True)


STEPS = """The same for a file of yours:
  calibrant evaluate predictions.npz
  calibrant compare predictions.npz
  calibrant fit predictions.npz -o calibrator
  calibrant apply calibrator predictions.npz -o calibrated.npz"""


def _diagram(evaluation: Evaluation, block: str, line: str) -> Table:
    """Draw reliability as bars: accuracy per bin, with a mark at the confidence."""
    from rich.table import Table
    from rich.text import Text

    width, bins = 40, evaluation.bins
    table = Table(box=None, pad_edge=False)
    for heading in ("confidence", "examples", "accuracy"):
        table.add_column(heading, justify="right")
    table.add_column(f"accuracy {block} and mean confidence {line}")
    for low, high, count, claimed, right in zip(
        bins.edges, bins.edges[1:], bins.count, bins.confidence, bins.accuracy, strict=False
    ):
        if count == 0:
            continue
        filled, mark = round(right * width), min(round(claimed * width), width - 1)
        bar = Text(block * filled + " " * (width - filled), style="cyan")
        bar = bar[:mark] + Text(line, style="bold red") + bar[mark + 1 :]
        ends = f"{100 * low:.0f} to {100 * high:.0f} %"
        table.add_row(ends, f"{count:,}", f"{100 * right:.1f} %", bar)
    return table
