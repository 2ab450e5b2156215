"""The verbs llm answers fit and llm answers apply, and the group of those of answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from calibrant.cli import llm_logs, shared
from calibrant.cli.judge import SCALE
from calibrant.cli.shared import AS_JSON, Commands, _new_console, _option, _until_closed, _verb, say

if TYPE_CHECKING:
    from calibrant.llm.answers.signal_calibrator import SignalFit
    from calibrant.metrics.clustered import ConfidenceEvaluation

FEW = 20
"""Graded answers below which a map is warned of."""
AGGREGATES = ("geometric", "product", "arithmetic", "first", "minimum")
METHODS = ("beta", "sigmoid", "isotonic")
SHOWN = ("auroc", "ece", "nll", "brier")
"""Metrics of signals, each with its interval."""
LEVEL = 0.9
_MOST_REASONS = 10
AGGREGATE = _option(
    "--confidence",
    "aggregate",
    type=click.Choice(AGGREGATES),
    metavar="NAME",
    help="Compute confidences from the token probabilities: geometric, product, arithmetic, first "
    "or minimum.  [default: those of FILE, else geometric]",
)


@click.group(cls=Commands, sections={"Commands": ["request", "report", "read", "fit", "apply"]})
def answers() -> None:
    """Calibrate graded answers of any origin: the chance that an answer is right."""


@_verb()
@click.argument("file")
@_option(
    "-o", "--out", type=click.Path(), required=True, metavar="MAP", help="Where to save the map."
)
@AGGREGATE
@_option(
    "--signals",
    metavar="all|NAMES",
    help="Combine signals in place of the confidence: all, or names with commas.",
)
@SCALE
@_option(
    "--method",
    default=METHODS[0],
    metavar="NAME",
    help="Kind of the map: beta, sigmoid or isotonic.",
)
@AS_JSON
def fit(
    file: str,
    out: str,
    aggregate: Any,
    signals: str | None,
    scale: tuple[float, float] | None,
    method: Any,
    form: str | None,
) -> None:
    """Learn from graded answers how often answers of each confidence are right.

    FILE is .jsonl or .csv, with an answer to a line: its confidence in [0, 1] (or token_probs, a
    list), and correct (true or false, 1 or 0). 'llm evaluate --save-answers' writes such files. An
    optional source names where the confidence comes from; all answers must have the same. The
    figures are cross-validated: each answer is calibrated by a map of others.

    With --signals, the map combines what else the answers have, such as samples or a stated
    confidence, and the figures are those of each signal alone and of all together.

    Files of 'llm judge', with judge and human instead, make a map of the scores of the judge.

    \b
    Examples:
      calibrant llm answers fit graded.jsonl -o map
      calibrant llm answers fit graded.jsonl --signals all -o map
      calibrant llm answers fit judged.jsonl --scale 1,10 -o map
    """  # noqa: D301
    from calibrant._core.checks import warn
    from calibrant.artifacts import save
    from calibrant.llm import read_answers
    from calibrant.llm.answers.calibrator import cross_validated_answers, fit_answers
    from calibrant.llm.answers.grading import CONFIDENCES
    from calibrant.llm.answers.judged import graded_by_people

    if signals is not None:
        if aggregate:
            raise click.UsageError("--signals has confidences of its own: leave --confidence out")
        _fit_signals(file, signals, out, method, form)
        return
    graded, options = read_answers(file), {"aggregate": aggregate, "stage": method}
    if scale is not None or any("judge" in r and "correct" not in r for r in graded.rows):
        graded = graded_by_people(graded, scale=scale)
    if len(graded.rows) < FEW:
        warn(
            f"{len(graded.rows):,} answers are too few for a map, whose chances are then hardly "
            f"more than guesses: grade {FEW} at least, better 100"
        )
    fitted = fit_answers(graded, **options)
    evaluations = cross_validated_answers(graded, **options)
    written = shared._how_written(out, "saved in")
    save(fitted, out)
    shared._show_evaluations(form, file, evaluations)
    usage = f"calibrant llm answers apply {out} FILE -o OUT"
    source = fitted.source_
    asked = source.confidence in CONFIDENCES and source.prompt in ("chat", "plain")
    if asked and not source.served:
        usage = f"calibrant llm ask MODEL QUESTION --map {out}"
    say(f"{written}; to use it: {usage}")


@_verb()
@click.argument("mapped", metavar="MAP")
@click.argument("file")
@_option("-o", "--out", type=click.Path(), required=True, metavar="FILE", help="File to write.")
@_option(
    "--documents",
    is_flag=True,
    help="Write a row for each document, with the chance that all of its fields are right.",
)
def apply(mapped: str, file: str, out: str, documents: bool) -> None:
    """Write answers with the chance that each is right, as 'calibrated'.

    FILE and OUT are .jsonl or .csv; the other values are kept. Confidences and signals of another
    source than those that MAP was fitted on are refused, as are scores of another judge. With a
    threshold in MAP there is also 'abstains'.

    The confidence of a document is the product of the chances of its fields. These depend on each
    other: fit a map, or a gate, to documents that the map of the fields was not fitted on.

    \b
    Examples:
      calibrant llm answers apply map new.jsonl -o calibrated.jsonl
      calibrant llm answers apply map fields.jsonl --documents -o documents.jsonl
    """  # noqa: D301
    from calibrant.artifacts import load
    from calibrant.llm import documents_of, read_answers
    from calibrant.llm.answers.calibrator import AnswerMap
    from calibrant.llm.answers.rows import AnswerRows, check_suffix, write_rows

    check_suffix(out)
    read = read_answers(file)
    rows = load(mapped, AnswerMap).apply(read)
    if documents:
        rows = documents_of(AnswerRows(read.places, rows)).rows
    written = shared._how_written(out)
    write_rows(out, rows)
    say(f"{written}: {len(rows):,} {'documents' if documents else 'answers'}")


# ----------------------------------------------------------------------------------------- signals


def _fit_signals(file: str, names: str, out: str, method: Any, form: str | None) -> None:
    """Fit a map of several signals, save it, and print what each of them is worth."""
    from calibrant.artifacts import save
    from calibrant.llm import read_answers
    from calibrant.llm.answers.signal_calibrator import fit_signals

    chosen = None if names == "all" else shared._names_in(names)
    result = fit_signals(read_answers(file), chosen, stage=method, level=LEVEL)
    written = shared._how_written(out, "saved in")
    save(result.calibrator, out)
    with _until_closed():
        if form == "json":
            shared._write_json(_as_json(result))
        else:
            _print_fit(file, result)
    reasons = sorted(result.unread.items(), key=lambda item: -item[1])
    for (name, reason), count in reasons[:_MOST_REASONS]:
        say(f"{count:,} answers without the signal {name}: {reason}")
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
    if not result.alone:
        return
    rows = []
    for name in fitted.names_:
        share, raw = f"{100 * fitted.coverage_[name]:.0f} %", result.raw.get(name)
        ece = "-" if raw is None else _percent(raw["ece"].value)
        rows += _pair(name, share, ece, result.alone[name])
    if result.together is not None and len(fitted.names_) > 1:
        rows += _pair("combined", "", "", result.together)
    headings = ("signal", "has it", "raw ECE", "AUROC %", "ECE %", "log loss", "Brier")
    console.print(shared._text_table(headings, rows))


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


for command in (llm_logs.request, llm_logs.report, llm_logs.read, fit, apply):
    answers.add_command(command)
