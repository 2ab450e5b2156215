"""The command line: one verb, one call into the library.

Data go to stdout, messages and progress to stderr. Exit codes: 0 done, 1 a limit was exceeded, 2
could not run. Nothing heavy is imported before a verb runs, so ``--help`` answers at once.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
import warnings
from collections import Counter
from importlib import import_module
from typing import Any

import click

from calibrant import __version__
from calibrant._core.messages import failure_text, printable
from calibrant.cli.shared import QUIET, QUIET_HELP, Commands, say

VERBS = {
    "collect": ["collect"],
    "compare": ["compare", "demo"],
    "decide": ["decide"],
    "estimate": ["estimate"],
    "evaluate": ["evaluate"],
    "fit": ["apply", "export", "fit"],
    "listing": ["methods", "metrics"],
    "llm": ["llm"],
    "monitor": ["monitor"],
    "plot": ["plot"],
    "report": ["report"],
    "slices": ["slices"],
    "ui": ["ui"],
}
"""Modules of this package, and the verbs that each defines under their names."""
LONGEST = 50
"""Characters of a warning that is counted."""
SECTIONS = {
    "Measure": ["demo", "ui", "collect", "evaluate", "report", "plot", "slices", "metrics"],
    "Fix": ["compare", "fit", "apply", "methods"],
    "Ship": ["export", "decide"],
    "Watch": ["monitor", "estimate"],
    "Language models": ["llm"],
}


def main() -> None:
    """Run the command line and exit."""
    said: Counter[str] = Counter()
    warnings.showwarning = lambda message, *_, **__: _warn(str(message), said)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: the next file to be opened would be in its place
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # it takes every character, as stderr does
        sys.stdout.reconfigure(errors="backslashreplace")
    code: Any = 2
    try:
        code = cli.main(prog_name="calibrant", standalone_mode=False)
    except click.ClickException as problem:
        # before click removes escape sequences where stderr is no terminal
        problem.message = printable(problem.message)  # type: ignore[misc]
        problem.show()
    except (click.Abort, KeyboardInterrupt):
        say("stopped")
    except SystemExit as stopped:
        # no verb's: click exits with 1 where the reader of help has left, with 0 for completions
        code = 0 if stopped.code in (0, 1) else 2
    except Exception as problem:
        text = failure_text(problem)
        if text is not None:
            say(f"error: {text}")
        else:
            say(traceback.format_exc().rstrip("\n"))
            say("this is a bug in calibrant: please report it with the lines above")
    for text, times in said.items():
        if times > 1:
            start = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
            say(f"the warning '{start}' came {times:,} times")
    sys.exit(code or 0)


def _warn(text: str, said: Counter[str]) -> None:
    """Write a warning, but not a second time."""
    said[text] += 1
    if said[text] == 1:
        say(f"warning: {text}")


@click.group(
    cls=Commands, sections=SECTIONS, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.option("-q", "--quiet", is_flag=True, help=QUIET_HELP)
@click.version_option(__version__, prog_name="calibrant")
@click.pass_context
def cli(ctx: click.Context, quiet: bool) -> None:
    """Measure and fix the confidence of a classifier or language model.

    \b
    Start here:
      calibrant demo
      calibrant evaluate predictions.npz
      calibrant fit predictions.npz
    """  # noqa: D301
    ctx.meta[QUIET] = quiet


for module, verbs in VERBS.items():
    for verb in verbs:
        cli.add_command(getattr(import_module(f"calibrant.cli.{module}"), verb))
