"""Commands, options, tables and messages: what the verbs have in common."""

from __future__ import annotations

import csv
import os
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from calibrant._core.messages import printable, printable_name
from calibrant._core.showing import json_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from calibrant.metrics.clustered import Evaluations


F = TypeVar("F", bound=Callable[..., Any])
FILE = click.Path()
"""Type of files and folders, whose names shells complete."""
QUIET = "quiet"
QUIET_HELP = "Write results and errors only."
COLUMNS = "Columns of other names"
SHARDS = "Many shards"
NARROWEST = 80  # columns of tables: in fewer they would lose figures, so terminals break the lines
SECONDS_PER_LINE = 10  # of progress, where there is no terminal to draw a bar on
COLOURS = {"": "bold", "good": "bold green", "warn": "bold yellow", "bad": "bold red"}
"""Styles of callouts."""


class _Option(click.Option):
    """An option in a section of the help; the range of a number is left to its error."""

    def __init__(self, *names: Any, section: str = "Options", **settings: Any) -> None:
        super().__init__(*names, **settings)
        self.section = section

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Return what stands in brackets."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra


class Verb(click.Command):
    """A command that can be quiet, and shows its options by section."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        about: Any = {"is_flag": True, "expose_value": False, "callback": _keep_quiet}
        self.params.append(_Option(["-q", "--quiet"], help=QUIET_HELP, **about))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of each section."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                sections.setdefault(getattr(param, "section", "Options"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def _option(*names: str, **settings: Any) -> Callable[[F], F]:
    """Add an option to a verb."""
    return click.option(*names, cls=_Option, **settings)


def _verb() -> Callable[[Callable[..., Any]], Verb]:
    """Make a function a verb, whose help shows all defaults."""
    return click.command(cls=Verb, context_settings={"show_default": True})


class Commands(click.Group):
    """Commands with a whole sentence each, in the help under the titles of ``sections``."""

    command_class = Verb
    group_class = type

    def __init__(
        self, *args: Any, sections: Mapping[str, Any] | None = None, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self.sections = sections

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands of each section."""
        width = max(map(len, self.commands))
        for title, names in (self.sections or {"Commands": sorted(self.commands)}).items():
            lines = {f"{n:{width}}": self.commands[n].get_short_help_str(200) for n in names}
            with formatter.section(title):
                formatter.write_dl([*lines.items()])


AT_LEAST_0, AT_LEAST_1 = click.IntRange(0), click.IntRange(1)
FRACTION: Any = {"type": float, "metavar": "FRACTION"}
AS_JSON = _option("--json", "form", flag_value="json", help="Write JSON; errors are fractions.")
AS_LATEX = _option(
    "--latex", "form", flag_value="latex", help="Write a table for LaTeX, with booktabs."
)
LEVEL = _option(
    "--level",
    default=0.9,
    type=click.FloatRange(0, 0.99),
    metavar="FRACTION",
    help="Coverage of the intervals; 0: none.",
)
CERTAIN_LEVEL = _option(
    "--level",
    default=0.9,
    type=click.FloatRange(0, 0.99, min_open=True),
    metavar="FRACTION",
    help="Coverage of the intervals.",
)
SET = _option(
    "--set",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set an option of the method; 'calibrant methods NAME' lists them.",
)
METADATA = _option(
    "--columns", metavar="COLUMN,...", help="Metadata columns, for multicalibration."
)
SAMPLE_WEIGHT = _option("--sample-weight", metavar="COLUMN", help="Example weights; 0 excludes.")
CALIBRATOR = _option(
    "--calibrator", "folder", type=FILE, metavar="DIR", help="Apply this saved calibrator first."
)
MULTILABEL = _option(
    "--multilabel", "estimand", flag_value="multilabel", help="Labels are 0 or 1 for each tag."
)
TOP_LABEL = _option(
    "--top-label",
    "estimand",
    flag_value="top_label",
    help="With two classes, measure the predicted one instead of P(y = 1).",
)
GROUPS = _option(
    "--groups",
    metavar="COLUMN",
    help="Keep examples with the same value in this column in one fold.",
)


def _split_option(verb: str, default: str = "test", name: str = "--split") -> Callable[[F], F]:
    """Return the option that names the split which a verb uses."""
    about = f"Split to {verb}.  [default: {default}, else the unnamed split]"
    return _option(name, metavar="NAME", help=about)


def _was_passed(name: str) -> bool:
    """Return True for an option that stands on the command line."""
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def _names_in(text: str | None) -> list[str] | None:
    """Return the names in a list with commas; None for an empty one.

    A name that has a comma itself stands in quotes, as in the first line of a CSV file.
    """
    if not text:
        return None
    quoted = '"' in text
    names = next(csv.reader([text], skipinitialspace=True)) if quoted else text.split(",")
    return [name.strip() for name in names if name.strip()]


def _named_texts(settings: Iterable[str]) -> dict[str, str]:
    """Return the texts of ``--set KEY=VALUE`` by their keys."""
    texts: dict[str, str] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise click.UsageError(f"--set wants KEY=VALUE, got {setting}")
        texts[name] = text
    return texts


@contextmanager
def _progress_bar(unit: str = "examples") -> Iterator[Callable[[int, int], None]]:
    """Yield a callback that shows progress on stderr.

    A terminal gets a bar once the work has taken a second, a file or pipe a line every ten seconds.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class RateColumn(ProgressColumn):
        """Units per second."""

        def render(self, task: Task) -> Text:
            return Text(f"{task.speed:,.0f}/s" if task.speed else "")

    if _is_quiet():
        yield lambda done, total: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), unit, RateColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    last, task = time.monotonic(), bar.add_task("", total=None)

    def show(done: int, total: int) -> None:
        nonlocal last
        bar.update(task, completed=done, total=total)
        waited = time.monotonic() - last
        if sys.stderr.isatty():
            if waited > 1:
                bar.start()
        elif waited >= SECONDS_PER_LINE:
            last += waited
            say(f"{done:,} of {total:,} {unit}")

    try:
        yield show
    finally:
        if bar.live.is_started:  # stopping one that never started would print an empty line
            bar.stop()


@contextmanager
def _until_closed() -> Iterator[None]:
    """Ignore a pipe that is closed early, as ``head`` does; the exit code still counts."""
    try:
        yield
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich turns the one into the other
        _discard(sys.stdout)


def _discard(stream: TextIO) -> None:
    """Send what is left in the buffer, and what follows, nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _new_console() -> Console:
    """Return a console that writes to stdout."""
    from rich.console import Console

    class Printer(Console):
        """Every text, in tables too, passes here: data may hold escape sequences."""

        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

    # Names of files and groups are printed as they are, whatever brackets and colons they have.
    console = Printer(markup=False, emoji=False, highlight=False)
    console.width = max(console.width, NARROWEST)
    return console


def write(console: Console, text: str, style: str = "") -> None:
    """Print sentences in lines of whole words; words of more than a line, such as paths, stay."""
    for line in text.splitlines():
        lines = textwrap.wrap(
            line,
            console.width,
            subsequent_indent=" " * (len(line) - len(line.lstrip())),
            break_long_words=False,
            break_on_hyphens=False,
        )
        console.print("\n".join(lines), style=style, soft_wrap=True)


def _text_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    names: int = 1,
    marked: str = "",
    bold: Sequence[int] = (),
) -> Table:
    """Return a table whose first columns are names, with a marked row or some columns bold."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for i, heading in enumerate(headings):
        layout: Any = {"overflow": "fold"} if i < names else {"justify": "right", "no_wrap": True}
        table.add_column(heading, style="bold" if i in bold else "", **layout)
    for cells in rows:
        shown = map(printable_name, cells)
        table.add_row(*shown, style="bold" if marked and cells[0] == marked else "")
    return table


def _show_result(
    form: str | None,
    result: Any,
    title: str = "",
    *,
    show: Callable[[], None] | None = None,
    **more: Any,
) -> None:
    """Write a result to stdout: as JSON with ``more`` keys, as LaTeX, or as its box or ``show``."""
    with _until_closed():
        if form == "json":
            _write_json({**result.to_dict(), **more})
        elif form == "latex":
            click.echo(result.to_latex())
        elif show is not None:
            show()
        else:
            _print_box(result, title)


def _print_box(result: object, title: str = "") -> None:
    """Print what a result shows: what was found first, then tables and remarks."""
    from calibrant import show

    console, box = _new_console(), show.box(result)
    if title:  # with the path of a file
        console.print(title, style="bold", soft_wrap=True)
    for callout in box.callouts:
        write(console, callout.text, COLOURS[callout.kind])
    for line in box.about:
        write(console, line, "dim")
    for table in box.tables():
        marked = [table.rows[k][0] for k in table.highlighted]
        console.print(_text_table(table.headings, table.rows, marked="".join(marked)))
    for line in box.remarks:
        write(console, line)


def _print_evaluations(title: str, results: Evaluations) -> None:
    """Print the evaluations of a language model side by side."""
    from rich.table import Table

    with _until_closed():
        console = _new_console()
        first = next(iter(results.values()))
        console.print(f"{title}: {first.describe()}", style="dim", soft_wrap=True)
        table = Table(box=None, pad_edge=False)
        table.add_column("")
        for name, evaluation in results.items():
            table.add_column(name, justify="right")
            table.add_column(evaluation.interval_heading, justify="right", style="dim")
        for rows in zip(*(evaluation.table() for evaluation in results.values()), strict=True):
            cells = (cell for _, value, interval in rows for cell in (value, interval))
            table.add_row(rows[0][0], *cells)
        console.print(table)


def _show_evaluations(form: str | None, title: str, results: Evaluations) -> None:
    """Print evaluations as JSON or side by side."""
    if form == "json":
        with _until_closed():
            _write_json({name: one.to_dict() for name, one in results.items()})
    elif results:
        _print_evaluations(title, results)


def _how_written(out: str, anew: str = "wrote") -> str:
    """Return the message that ``out`` was written, before it is: it may replace something."""
    there = os.listdir(out) if os.path.isdir(out) else os.path.exists(out)
    return f"{'replaced' if there else anew} {out}"


def _keep_quiet(ctx: click.Context, _: click.Parameter, quiet: bool) -> None:
    ctx.meta[QUIET] = quiet or ctx.meta.get(QUIET, False)


def _is_quiet() -> bool:
    """Return True while a verb runs that was called with --quiet, before or after its name."""
    ctx = click.get_current_context(silent=True)
    return ctx is not None and ctx.meta.get(QUIET, False)


def say(text: str, *, always: bool = False) -> None:
    """Write a line to stderr; where nobody can read it, the exit code has to do.

    A verb that was told to be quiet writes nothing but what it must say ``always``.
    """
    if _is_quiet() and not always:
        return
    text = printable(text)
    if sys.stderr.isatty():  # lines of whole words, but for commands to copy
        width = shutil.get_terminal_size().columns
        lines = (
            line if line.startswith("  ") else textwrap.fill(line, width, break_on_hyphens=False)
            for line in text.split("\n")
        )
        text = "\n".join(lines)
    try:
        click.echo(text, err=True)
    except OSError:
        _discard(sys.stderr)


def _say_next(text: str, *words: str) -> None:
    """Write a line to stderr, and below it a command to copy."""
    say(f"{text}:\n  calibrant {shlex.join(words)}")


def _write_json(content: Mapping[str, Any]) -> None:
    """Write JSON to stdout; the page docs/json.md describes all of it."""
    click.echo(json_text(content))
