"""What several verbs have in common: options, tables, and how they talk."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.console import Console
    from rich.table import Table

    from calibrant.metrics.evaluation import Evaluation


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
SET = click.option(
    "--set", "options", multiple=True, metavar="KEY=VALUE", help="An option of the method."
)
WEIGHT = click.option("--weight-by", metavar="KEY", help="Weigh the examples by this array.")
TOGETHER = click.option(
    "--group-by", metavar="KEY", help="Keep rows with one value of this array in one fold or half."
)


def names_in(text: str | None) -> list[str] | None:
    """Names with commas or spaces between, in any case; None where nothing was given."""
    return text.lower().replace(",", " ").split() if text else None


def method_options(given: tuple[str, ...]) -> dict[str, Any]:
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


def interval_heading(found: Evaluation) -> str:
    """Heading of a column of intervals."""
    return "" if found.level is None else f"{100 * found.level:g} % interval"


@contextmanager
def progress_bar(unit: str = "examples") -> Iterator[Callable[[int, int], None]]:
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
def until_closed() -> Iterator[None]:
    """Let the reader of a pipe leave early, as ``head`` does: the exit code still counts."""
    try:
        yield
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich turns the one into the other
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def new_console() -> Console:
    """Console that writes to stdout."""
    from rich.console import Console

    # Names of files and groups are printed as they are, whatever brackets and colons they have.
    return Console(markup=False, emoji=False, highlight=False)


def text_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, names: int = 1, marked: str = ""
) -> Table:
    """A table whose first columns are names and all others figures; a marked row is bold."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in headings[:names]:
        table.add_column(heading, overflow="fold")
    for heading in headings[names:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for cells in rows:
        table.add_row(*cells, style="bold" if marked and cells[0] == marked else "")
    return table


def check_split(pred: str, name: str | None, option: str) -> None:
    """Raise unless a file has the split that an option names."""
    from calibrant._core.messages import comma_separated
    from calibrant.data import open_predictions

    splits = open_predictions(pred).splits
    if name is None or name in splits or not splits:
        return
    named = [f"'{split}'" for split in splits if split]
    remedy = f"name one of {comma_separated(named)}" if named else "it has plain arrays only"
    remedy += f" with {option}" if named else f", leave out {option}"
    raise ValueError(f"{pred} has no split '{name}': {remedy}")


def warn_of_stored_probs(pred: str, *splits: str) -> None:
    """Say which of the splits have logits that look like probabilities."""
    from calibrant._core.checks import LOOKED_AT, SUMS_TO_ONE, look_like_probs
    from calibrant.data import open_predictions

    file = open_predictions(pred)
    for split in map(file.split, splits):
        if split.parts[0].domain != "logits":
            continue
        rows = -(-LOOKED_AT // max(1, math.prod(split.shape[:-1])))
        (first,) = next(split.parts[0].blocks(rows, ["logits"]))
        if look_like_probs(first):
            front = f"{split.name}_" if split.name else ""
            say(
                f"warning: {front}logits of {pred} look like probabilities: {SUMS_TO_ONE}; if "
                f"they are, save them as {front}probs"
            )


def how_written(out: str, anew: str = "wrote") -> str:
    """How to say that ``out`` was written; to be asked before."""
    there = os.listdir(out) if os.path.isdir(out) else os.path.exists(out)
    return f"{'replaced' if there else anew} {out}"


def say(text: str) -> None:
    """Write a line to stderr."""
    click.echo(text, err=True)
