"""The verbs methods and metrics: what there is to choose from."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from calibrant.cli import shared
from calibrant.cli.shared import _verb

if TYPE_CHECKING:
    from calibrant.calibrators.base import Calibrator


@_verb()
@click.argument("name", required=False)
@shared.MULTILABEL
def methods(name: str | None, estimand: Any) -> None:
    """List the methods of calibration; with a name, its options.

    \b
    Examples:
      calibrant methods
      calibrant methods smart
      calibrant fit predictions.npz --method smart --set hidden=32,16
    """  # noqa: D301
    from calibrant.calibrators.registry import PARTS, calibrators_for, find_calibrator

    with shared._until_closed():
        if name is not None:
            _print_method(*find_calibrator(name, estimand or "auto"))
            return
        registry = calibrators_for(estimand or "auto")
        _print_list("method", {key: kind.summary for key, kind in registry.items()})
        if estimand != "multilabel":
            click.echo()
            _print_list("part of auto", {key: _summary(kind) for key, kind in PARTS.items()})
        click.echo("\nThe options of one: calibrant methods NAME")


@_verb()
def metrics() -> None:
    """List the metrics, and what they mean.

    JSON and the options --metrics, --max and --min use these names. Lower is better, except for
    accuracy, auroc, roc_auc, brier_skill and p-values, where higher is better, and for
    calibration_slope, where 1 is best. Metrics of P(y = 1) beside roc_auc are computed only if you
    name them.
    """
    from calibrant.metrics.registry import METRICS

    with shared._until_closed():
        _print_list("metric", {name: metric.summary for name, metric in METRICS.items()})


def _print_method(name: str, kind: type[Calibrator]) -> None:
    """Print what a method is, and its options with their defaults."""
    from calibrant._core.options import in_words, options_of

    console = shared._new_console()
    shared.write(console, name, "bold")
    shared.write(console, _summary(kind))
    options = options_of(kind)
    if not options:
        shared.write(console, "It has no options.")
        return
    empty = inspect.Parameter.empty
    rows = [
        (key, "needed" if each.default is empty else str(each.default), in_words(each.annotation))
        for key, each in options.items()
    ]
    console.print(shared._text_table(("--set", "default", "values"), rows, names=3))


def _print_list(kind: str, summaries: Mapping[str, str]) -> None:
    console = shared._new_console()
    rows = [(name, _plain(summary)) for name, summary in summaries.items()]
    console.print(shared._text_table((kind, ""), rows, names=2))


def _summary(kind: type[Calibrator]) -> str:
    """Return what a method does; parts of ``auto`` have the first sentence of their docstring."""
    if kind.summary:
        return _plain(kind.summary)
    first = (inspect.getdoc(kind) or "").split("\n\n")[0]
    return _plain(first[:1].lower() + first[1:])


def _plain(text: str) -> str:
    """Return a sentence of the documentation without its markup and equations.

    >>> _plain("[averages](#auto) the best, :math:`p_i^2`, as `nll` does; see {doc}`smart`.")
    'averages the best, as nll does'
    """
    text = re.sub(r"[,:] :math:`[^`]*`", "", text)
    text = re.sub(r"; see \{doc\}`[^`]*`", "", text)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"(?::\w+:)?`([^`]*)`", r"\1", text)
    return text.removesuffix(".")
