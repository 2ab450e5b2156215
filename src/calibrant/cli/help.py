"""Commands and options: help in groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
FILE = click.Path()
"""Type of files and folders, whose names shells complete."""
QUIET = "quiet"
COLUMNS = "Columns of other names"
SHARDS = "Many shards"


class Option(click.Option):
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
    """A command that shows its options by section."""

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


def option(*names: str, **settings: Any) -> Callable[[F], F]:
    """Add an option to a verb."""
    return click.option(*names, cls=Option, **settings)


def verb() -> Callable[[Callable[..., Any]], Verb]:
    """Make a function a verb, whose help shows all defaults."""
    return click.command(cls=Verb, context_settings={"show_default": True})


class Group(click.Group):
    """Commands with a whole sentence each, in the help under the titles of ``sections``."""

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


def is_quiet() -> bool:
    """Return True while a verb runs after ``calibrant --quiet``."""
    ctx = click.get_current_context(silent=True)
    return ctx is not None and ctx.meta.get(QUIET, False)
