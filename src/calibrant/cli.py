"""The command line: one verb, one call into the library.

Data go to stdout, talk and progress to stderr. Exit codes: 0 done, 1 a limit was exceeded, 2
could not run. Nothing heavy is imported before a verb runs, so ``--help`` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from rich.table import Table

    from calibrant.calibrators.base import Calibrator
    from calibrant.calibrators.crossfit import CrossFit
    from calibrant.calibrators.files import Effect, Fit
    from calibrant.comparison import Comparison
    from calibrant.metrics.evaluation import Evaluation

EXPECTED = (ValueError, TypeError, OSError, ImportError, MemoryError)
"""Failures that are explained in a line; anything else is a bug and shows its traceback."""

# Options that several verbs have.
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Write JSON; errors are fractions.")
BINS = click.option("--bins", default=15, show_default=True, help="Number of bins.")
LEVEL = click.option(
    "--level",
    default=0.9,
    show_default=True,
    type=click.FloatRange(0, 1, max_open=True),
    metavar="FRACTION",
    help="Coverage of the intervals; 0: none.",
)
WEIGHT = click.option("--weight-by", metavar="KEY", help="Weigh the examples by this array.")
TOGETHER = click.option(
    "--group-by", metavar="KEY", help="Keep rows with one value of this array in one fold or half."
)


def main() -> None:
    """Run the command line and exit."""
    warnings.showwarning = _show_warning
    try:
        code = cli.main(standalone_mode=False)
    except click.ClickException as problem:
        problem.show()
        code = 2
    except (click.Abort, KeyboardInterrupt):
        _say("stopped")
        code = 2
    except SystemExit as stopped:  # click's own, a closed pipe for instance
        code = 2 if stopped.code else 0
    except EXPECTED as problem:
        _say(f"error: {problem}")
        code = 2
    except Exception:
        traceback.print_exc()
        _say("this is a bug in calibrant: please report it with the lines above")
        code = 2
    sys.exit(code or 0)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="calibrant")
def cli() -> None:
    """Make classifiers say how sure they are, and mean it."""


@cli.command()
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
    from calibrant.metrics.files import evaluate_file

    names = metrics.replace(",", " ").split() if metrics else None
    if max_ece is not None and not 0 <= max_ece <= 1:
        raise click.UsageError(f"--max-ece must be a fraction (0.03 is 3 %), got {max_ece:g}")
    if max_ece is not None and names and "ece" not in names:
        raise click.UsageError("--max-ece needs ece among the --metrics")
    with _progress() as progress:
        found = evaluate_file(
            pred,
            split=split,
            weight=weight_by,
            groups=group_by,
            estimand=estimand or "top_label",  # type: ignore[arg-type]  # click's flag values
            bins=bins,
            metrics=names,
            level=level or None,
            seed=seed,
            progress=progress,
        )
    name = open_predictions(pred).split(split, ("test", "")).name
    with _until_closed():
        if as_json:
            click.echo(json.dumps({"split": name or None, **found.to_dict()}, indent=2))
        else:
            _print_evaluation(found, f"{pred}, {name} split" if name else pred)
    return _over_limit(found, max_ece)


@cli.command()
@click.argument("pred")
@click.option("--method", default="auto", show_default=True, metavar="NAME", help="What to fit.")
@click.option(
    "--split", metavar="NAME", help="Split to fit on.  [default: val, else the plain arrays]"
)
@click.option(
    "--set", "options", multiple=True, metavar="KEY=VALUE", help="An option of the method."
)
@click.option(
    "--cross-fit",
    "folds",
    type=click.IntRange(2),
    is_flag=False,
    flag_value=5,
    metavar="[K]",
    help="Fit on all examples of a file without a val set, and measure out of K folds.  [K: 5]",
)
@WEIGHT
@TOGETHER
@click.option("--seed", default=0, show_default=True, help="Of the folds.")
@AS_JSON
@click.option("-o", "--out", required=True, metavar="DIR", help="Folder to save in.")
def fit(
    pred: str,
    method: str,
    split: str | None,
    options: tuple[str, ...],
    folds: int | None,
    weight_by: str | None,
    group_by: str | None,
    seed: int,
    as_json: bool,
    out: str,
) -> None:
    """Fit a calibrator on a prediction file and save it in a folder.

    PRED is a file as for "calibrant evaluate". The fit uses its val split or, where there is
    none, the arrays without a name in front; never the test split, unless you name it.

    \b
    Examples:
      calibrant fit predictions.npz -o calibrator
      calibrant fit predictions.npz --method ts --set objective=brier -o calibrator
      calibrant fit test_only.npz --method ts --cross-fit 10 -o calibrator
    """  # noqa: D301
    from calibrant.calibrators.crossfit import cross_fit
    from calibrant.calibrators.files import fit_and_measure
    from calibrant.io import save

    given: dict[str, Any] = {"options": _options(options), "weight": weight_by, "groups": group_by}
    if folds:
        given |= {"folds": folds, "seed": seed}
    with _progress() as progress:
        found = (cross_fit if folds else fit_and_measure)(
            pred,
            method,
            split=split,
            metrics=["accuracy", "ece", "nll", "brier"],
            progress=progress,
            **given,
        )
    save(found.calibrator, out)
    with _until_closed():
        if as_json:
            about = {"method": method, "options": given["options"], "folds": folds, "saved": out}
            click.echo(json.dumps({**about, **_fit_dict(found)}, indent=2))
        else:
            _print_fit(found, f"{method} on {pred}", folds)
    _say(f"saved in {out}; to use it: calibrant apply {out} {pred} -o OUT")


@cli.command()
@click.argument("folder", metavar="DIR")
@click.argument("pred")
@click.option(
    "-o", "--out", required=True, metavar="OUT", help="File to write, as the suffix says."
)
def apply(folder: str, pred: str, out: str) -> None:
    """Calibrate a prediction file with a saved calibrator.

    Every split of PRED is calibrated; labels and other arrays are kept. OUT is one .npz,
    .safetensors or .parquet file, also for a folder or glob of shards.

    \b
    Examples:
      calibrant apply calibrator predictions.npz -o calibrated.npz
      calibrant apply calibrator 'shards/*.npz' -o calibrated.safetensors
    """  # noqa: D301
    from calibrant.calibrators.files import apply_file
    from calibrant.io import load

    with _progress() as progress:
        apply_file(load(folder), pred, out, progress=progress)
    _say(f"wrote {out}; to measure it: calibrant evaluate {out}")


@cli.command()
@click.argument("pred")
@click.option("--methods", metavar="NAMES", help="With commas between.  [default: all]")
@click.option(
    "--time-limit",
    default=60.0,
    show_default=True,
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="For the fit of each method; 0: none.",
)
@click.option(
    "--fit-split", metavar="NAME", help="Split to fit on.  [default: val, else the plain arrays]"
)
@click.option(
    "--test-split",
    metavar="NAME",
    help="Split to measure on.  [default: test, else the plain arrays]",
)
@WEIGHT
@TOGETHER
@BINS
@LEVEL
@click.option(
    "--seed",
    default=0,
    show_default=True,
    help="Of the halves, and of the draws behind the intervals.",
)
@AS_JSON
def compare(
    pred: str,
    methods: str | None,
    time_limit: float,
    fit_split: str | None,
    test_split: str | None,
    weight_by: str | None,
    group_by: str | None,
    bins: int,
    level: float,
    seed: int,
    as_json: bool,
) -> int:
    """Fit all methods and measure them side by side.

    Methods are fitted on the val split and measured on the test split. A file with only one set
    of examples is cut at random into two halves, each with its share of every class.

    \b
    Examples:
      calibrant compare predictions.npz
      calibrant compare predictions.npz --methods none,ts,smart --json
    """  # noqa: D301
    from calibrant.comparison import compare as compared

    with _progress("methods") as progress:
        found = compared(
            pred,
            methods.replace(",", " ").split() if methods else None,
            time_limit=time_limit or None,
            fit_split=fit_split,
            test_split=test_split,
            weight=weight_by,
            groups=group_by,
            bins=bins,
            level=level or None,
            seed=seed,
            progress=progress,
        )
    with _until_closed():
        if as_json:
            click.echo(json.dumps(found.to_dict(), indent=2))
        else:
            _print_comparison(found, pred)
    return 0 if found.measured else 2


@cli.command()
def demo() -> None:
    """Measure and calibrate a real classifier that comes with the package.

    The predictions are those of a ResNet-50 trained on CIFAR-10. It is measured on 10,000 test
    images; methods are fitted on 5,000 others and compared on the test images.
    """
    from calibrant.comparison import compare as compared
    from calibrant.data import sample_path
    from calibrant.metrics.files import evaluate_file

    path, console = sample_path(), _console()
    found = evaluate_file(path, split="test")
    with _until_closed():
        _print_evaluation(found, "ResNet-50 on CIFAR-10, 10,000 test images")
        console.print()
        console.print(_diagram(found, *("■│" if console.encoding.startswith("utf") else "#|")))
        console.print()
        sys.stdout.flush()  # there is something to read while the methods are fitted
        with _progress("methods") as progress:
            methods = compared(path, ["none", "ts", "smart", "auto"], progress=progress)
        _print_comparison(methods, "Calibrated by three methods")
        console.print()
        console.print(STEPS)
        console.print(f"The file measured here: {path}", soft_wrap=True)


STEPS = """The same for a file of yours:
  calibrant evaluate predictions.npz
  calibrant compare predictions.npz
  calibrant fit predictions.npz -o calibrator
  calibrant apply calibrator predictions.npz -o calibrated.npz"""
"""What the demo did, and what comes after it, as commands."""


def _options(given: tuple[str, ...]) -> dict[str, Any]:
    """Options of a method: values are JSON, or else text."""
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError(f"--set wants KEY=VALUE, got {text}")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _over_limit(found: Evaluation, max_ece: float | None) -> int:
    if max_ece is None or found["ece"].value <= max_ece:
        return 0
    _say(f"ECE {found['ece'].value:.4f} exceeds the limit of {max_ece:g}")
    return 1


def _print_evaluation(found: Evaluation, title: str) -> None:
    console = _console()
    console.print(title, style="bold", soft_wrap=True)
    console.print(found.describe(), style="dim", soft_wrap=True)
    console.print(_metric_table(found))
    if found.verdict():
        console.print(found.verdict(), soft_wrap=True)
    if found.groups:
        console.print()
        console.print(_group_table(found))


def _learned(calibrator: Calibrator) -> dict[str, Any]:
    """Learned values that are few enough to be read, by name."""
    values = {name.rstrip("_"): v for name, v in calibrator.named_buffers()}
    few = {name: v.tolist() for name, v in values.items() if v.numel() <= 5}
    return {name: v for name, v in few.items() if not name.endswith("classes")}


def _fit_dict(found: Fit | CrossFit) -> dict[str, Any]:
    calibrator, effect = found.calibrator, found.effect
    low, high = effect.temperatures or (None, None)
    return {
        "split": found.split or None,
        "n": effect.before.n,
        "classes": effect.before.classes,
        "parameters": calibrator.size(effect.before.classes),
        "learned": _learned(calibrator),
        "temperature": {"low": low, "high": high},
        "argmax_changed": effect.argmax_changed,
        "before": effect.before.to_dict()["metrics"],
        "after": effect.after.to_dict()["metrics"],
    }


def _print_fit(found: Fit | CrossFit, title: str, folds: int | None) -> None:
    console = _console()
    where = f", {found.split} split" if found.split else ""
    console.print(title + where, style="bold", soft_wrap=True)
    for line in _fit_lines(found.calibrator, found.effect):
        console.print(line, soft_wrap=True)
    console.print()
    console.print(_effect_table(found.effect, folds))
    if folds:
        console.print(f"Each example was calibrated by a fit on the other {folds - 1} folds.")
    else:
        console.print("The fit has seen these examples: expect slightly worse figures on others.")


def _fit_lines(calibrator: Calibrator, effect: Effect) -> Iterator[str]:
    """What was learned, in words."""
    if reasons := getattr(calibrator, "reasons", ""):
        yield reasons
    size = calibrator.size(effect.before.classes)
    counted = f"{size:,} parameter{'' if size == 1 else 's'}"
    yield f"{effect.before.n:,} examples, {effect.before.classes} classes; {counted}"
    if "temperature_" in dict(calibrator.named_buffers()):
        yield f"temperature {float(calibrator.temperature_):.4g}"  # type: ignore[arg-type]
    elif effect.temperatures is not None:
        low, high = (f"{temperature:.4g}" for temperature in effect.temperatures)
        yield f"temperatures from {low} to {high}"
    if effect.argmax_changed:
        yield f"the predicted class of {effect.argmax_changed:,} examples changes"


def _effect_table(effect: Effect, folds: int | None) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column(f"out of {folds} folds" if folds else "on the data of the fit")
    for heading in ("before", "after"):
        table.add_column(heading, justify="right", style="bold" if heading == "after" else "")
        if folds:
            table.add_column(_interval_heading(effect.before), justify="right")
    for before, after in zip(effect.before.table(), effect.after.table(), strict=True):
        cells = (*before[1:], *after[1:]) if folds else (before[1], after[1])
        table.add_row(before[0], *cells)
    return table


def _print_comparison(found: Comparison, title: str) -> None:
    console = _console()
    console.print(title, style="bold", soft_wrap=True)
    console.print(found.describe(), style="dim", soft_wrap=True)
    console.print(_comparison_table(found))
    within = "" if found.level is None else ", or within the interval of the best"
    console.print(f"* best{within}", style="dim")
    for remark in found.remarks():
        console.print(remark, soft_wrap=True)
    console.print(found.advice(), style="bold")


def _comparison_table(found: Comparison) -> Table:
    from rich.table import Table

    headings, *rows = found.table()
    table = Table(box=None, pad_edge=False)
    table.add_column(headings[0], overflow="fold")
    for heading in headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for cells in rows:
        table.add_row(*cells, style="bold" if cells[0] == found.choice() else "")
    return table


def _metric_table(found: Evaluation) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("metric")
    table.add_column("value", justify="right", style="bold")
    table.add_column(_interval_heading(found), justify="right")
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
            table.add_column(_interval_heading(found), justify="right", no_wrap=True)
    for group, part in found.groups.items():
        cells = dict(zip(part, part.table(), strict=True))
        _, value, interval = cells[shown[0]]
        others = [cells[name][1] for name in shown[1:]]
        table.add_row(group, f"{part.n:,}", value, interval, *others)
    return table


def _interval_heading(found: Evaluation) -> str:
    return "" if found.level is None else f"{100 * found.level:g} % interval"


def _diagram(found: Evaluation, block: str, line: str) -> Table:
    """Reliability as bars: accuracy per bin, with a mark where the confidence is."""
    from rich.table import Table
    from rich.text import Text

    width, bins = 40, found.bins
    table = Table(box=None, pad_edge=False)
    for heading in ("confidence", "examples", "accuracy"):
        table.add_column(heading, justify="right")
    table.add_column(f"accuracy {block} and claimed confidence {line}")
    for low, high, count, claimed, right in zip(
        bins.edges, bins.edges[1:], bins.count, bins.confidence, bins.accuracy, strict=False
    ):
        if count == 0:
            continue
        filled, mark = round(right * width), min(round(claimed * width), width - 1)
        bar = Text(block * filled + " " * (width - filled), style="cyan")
        bar = bar[:mark] + Text(line, style="bold red") + bar[mark + 1 :]
        table.add_row(
            f"{100 * low:.0f} to {100 * high:.0f} %", f"{count:,}", f"{100 * right:.1f} %", bar
        )
    return table


@contextmanager
def _progress(unit: str = "examples") -> Iterator[Callable[[int, int], None]]:
    """Yield a callback that shows a bar on stderr once the work has taken a second."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), unit, TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    started, task = time.monotonic(), bar.add_task("", total=None)

    def show(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if time.monotonic() - started > 1 and sys.stderr.isatty():
            bar.start()

    try:
        yield show
    finally:
        if bar.live.is_started:  # stopping one that never started would print an empty line
            bar.stop()


@contextmanager
def _until_closed() -> Iterator[None]:
    """Let the reader of a pipe leave early, as ``head`` does: the exit code still counts."""
    try:
        yield
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich turns the one into the other
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _console() -> Console:
    from rich.console import Console

    # Names of files and groups are printed as they are, whatever brackets and colons they have.
    return Console(markup=False, emoji=False, highlight=False)


def _say(text: str) -> None:
    click.echo(text, err=True)


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    _say(f"warning: {message}")
