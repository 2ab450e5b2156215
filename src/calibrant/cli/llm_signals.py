"""The verb llm answers signals, and the maps of several signals of llm answers fit."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from calibrant.cli import shared
from calibrant.cli.shared import _new_console, _until_closed, say

if TYPE_CHECKING:
    from calibrant.llm.answers.signal_calibrator import SignalFit
    from calibrant.metrics.clustered import ConfidenceEvaluation

SHOWN = ("auroc", "ece", "nll", "brier")
"""Metrics of the table, each with its interval."""
LEVEL = 0.9
_MOST_REASONS = 10


@click.command("signals", cls=shared.Verb)
@click.argument("file")
@click.option(
    "-o", "--out", type=click.Path(), required=True, metavar="FILE", help="File to write."
)
@click.option(
    "--stated-scale",
    type=click.FloatRange(0, min_open=True),
    default=1,
    help="Scale of stated numbers without a percent sign: 1, 10 or 100.",
)
@click.option(
    "--vocabulary",
    type=click.IntRange(1),
    default=1 << 18,
    help="Tokens of the model, for the entropy of top tokens.",
)
def signals(file: str, out: str, stated_scale: float, vocabulary: int) -> None:
    """Compute signals of confidence from answers.

    FILE and OUT are .jsonl or .csv, with an answer to a line. Signals are computed from
    token_probs, top_logprobs, stated (what the model said of its confidence), samples (other
    answers to the same question, compared as texts), option_logits, judges and confidence, where a
    line has them. They are written as an object 'signals' of numbers in [0, 1], null where a line
    lacks the material. All other values are kept, signals of FILE too.

    \b
    Examples:
      calibrant llm answers signals log.jsonl -o signals.jsonl
      calibrant llm answers signals log.jsonl --stated-scale 100 -o signals.jsonl
    """  # noqa: D301
    from calibrant.llm import signals_of
    from calibrant.llm.answers.rows import check_suffix, read_answers, write_rows
    from calibrant.llm.answers.signals import UNREAD, signal_values

    check_suffix(out)
    found = signals_of(read_answers(file), stated_scale=stated_scale, vocabulary=vocabulary)
    values = signal_values(found)
    written = shared._how_written(out)
    write_rows(out, found.rows)
    rows = [(name, f"{(column == column).sum():,}") for name, column in values.items()]
    with _until_closed():
        _new_console().print(shared._text_table(("signal", "answers"), rows))
    _say_reasons(Counter(pair for row in found.rows for pair in row.get(UNREAD, {}).items()))
    say(
        f"{written}: {len(found.rows):,} answers; next: calibrant llm answers fit {out} "
        "--signals all -o MAP"
    )


def _say_reasons(reasons: Counter[tuple[str, str]]) -> None:
    for (name, reason), count in reasons.most_common(_MOST_REASONS):
        say(f"{count:,} answers without the signal {name}: {reason}")


def fit_signals(file: str, names: str, out: str, stage: Any, form: str | None) -> None:
    """Fit a map of several signals, save it, and print what each of them is worth."""
    from calibrant.artifacts import save
    from calibrant.llm.answers.rows import read_answers
    from calibrant.llm.answers.signal_calibrator import fit_signals as fit

    chosen = None if names == "all" else shared._names_in(names)
    result = fit(read_answers(file), chosen, stage=stage, level=LEVEL)
    written = shared._how_written(out, "saved in")
    save(result.calibrator, out)
    with _until_closed():
        if form == "json":
            shared._write_json(_as_json(result))
        else:
            _print_fit(file, result)
    say(f"{written}; to use it: calibrant llm answers apply {out} FILE -o OUT")


def _as_json(result: SignalFit) -> dict[str, Any]:
    fitted = result.calibrator
    return {
        "signals": {
            name: {
                "coverage": fitted.coverage_[name],
                "raw": _metrics(result.raw.get(name)),
                "calibrated": _metrics(result.alone.get(name)),
            }
            for name in fitted.names_
        },
        "combined": _metrics(result.together),
    }


def _metrics(evaluation: ConfidenceEvaluation | None) -> Any:
    return None if evaluation is None else evaluation.to_dict()["metrics"]


def _print_fit(title: str, result: SignalFit) -> None:
    fitted, console = result.calibrator, _new_console()
    some = next(iter((result.alone or result.raw).values()))
    about = f"{title}: {some.describe()}; cross-validated, with intervals of {100 * LEVEL:.0f} %"
    console.print(about, style="dim", soft_wrap=True)
    if result.alone:
        headings = ("signal", "has it", "raw ECE", "AUROC %", "ECE %", "log loss", "Brier")
        rows = [row for name in fitted.names_ for row in _lines(name, result)]
        if result.together is not None and len(fitted.names_) > 1:
            rows += _pair("combined", "", "", result.together)
        console.print(shared._text_table(headings, rows))


def _lines(name: str, result: SignalFit) -> list[tuple[str, ...]]:
    share = f"{100 * result.calibrator.coverage_[name]:.0f} %"
    raw = result.raw.get(name)
    return _pair(
        name, share, "-" if raw is None else _percent(raw["ece"].value), result.alone[name]
    )


def _pair(name: str, share: str, raw: str, one: ConfidenceEvaluation) -> list[tuple[str, ...]]:
    """Return a line of values, and below it one of their intervals."""
    form = {"auroc": _percent, "ece": _percent}
    cells = [(form.get(metric, _fraction), one[metric]) for metric in SHOWN]
    values = (show(estimate.value) for show, estimate in cells)
    ends = (f"{show(e.low)}\N{EN DASH}{show(e.high)}" for show, e in cells)
    return [(name, share, raw, *values), ("", "", "", *ends)]


def _percent(value: float) -> str:
    return "-" if value != value else f"{100 * value:.1f}"


def _fraction(value: float) -> str:
    return "-" if value != value else f"{value:.3f}"
