"""The verbs llm answers fit and llm answers apply, and the group of those of answers."""

from __future__ import annotations

from typing import Any

import click

from calibrant.cli import llm_fields, llm_logs, llm_signals, shared
from calibrant.cli.judge import SCALE
from calibrant.cli.shared import AS_JSON, Commands, Verb, _option, say

CONFIDENCES = ("geometric", "product", "arithmetic", "first", "minimum", "p_true")
STAGES = ("beta", "sigmoid", "isotonic")
FEW = 20
"""Graded answers below which a map is warned of."""
VERB: Any = {"cls": Verb, "context_settings": {"show_default": True}}


@click.group(cls=Commands)
def answers() -> None:
    """Calibrate graded answers of any origin: the chance that an answer is right."""


@answers.command("fit", **VERB)
@click.argument("file")
@_option(
    "-o", "--out", type=click.Path(), required=True, metavar="MAP", help="Where to save the map."
)
@_option(
    "--confidence",
    type=click.Choice(CONFIDENCES[:-1]),
    help="Compute confidences from the token probabilities.  [default: those of FILE, else "
    "geometric]",
)
@_option(
    "--signals",
    metavar="NAMES",
    help="Combine signals in place of the confidence: 'all', or names with commas.",
)
@SCALE
@_option("--stage", type=click.Choice(STAGES), default=STAGES[0], help="Kind of the map.")
@AS_JSON
def fit_map(
    file: str,
    out: str,
    confidence: Any,
    signals: str | None,
    scale: tuple[float, float] | None,
    stage: Any,
    form: str | None,
) -> None:
    """Learn from graded answers how often answers of each confidence are right.

    FILE is .jsonl or .csv, with an answer to a line: its confidence in [0, 1] (or token_probs, a
    list), and correct (true or false, 1 or 0). 'llm evaluate --save-answers' writes such files. An
    optional source names where the confidence comes from; all answers must have the same. The
    figures are cross-validated: each answer is calibrated by a map of others.

    With --signals, the map combines signals of the answers ('llm answers signals' lists them), and
    the figures are those of each alone and of all together.

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
    from calibrant.llm.answers.judged import read_judged

    if signals is not None:
        if confidence:
            raise click.UsageError("--signals has confidences of its own: leave --confidence out")
        llm_signals.fit_signals(file, signals, out, stage, form)
        return
    graded, options = read_answers(file), {"aggregate": confidence, "stage": stage}
    if scale is not None or any("judge" in r and "correct" not in r for r in graded.rows):
        graded = read_judged(graded, scale=scale).graded()
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
        usage = f"calibrant llm ask MODEL QUESTION --answers {out}"
    say(f"{written}; to use it: {usage}")


@answers.command("apply", **VERB)
@click.argument("mapped", metavar="MAP")
@click.argument("file")
@_option("-o", "--out", type=click.Path(), required=True, metavar="FILE", help="File to write.")
def apply_map(mapped: str, file: str, out: str) -> None:
    """Write answers with the chance that each is right, as 'calibrated'.

    FILE and OUT are .jsonl or .csv; the other values are kept. Confidences and signals of another
    source than those that MAP was fitted on are refused, as are scores of another judge. With a
    threshold in MAP there is also 'abstains'.

    \b
    Examples:
      calibrant llm answers apply map new.jsonl -o calibrated.jsonl
    """  # noqa: D301
    from calibrant.artifacts import load
    from calibrant.llm.answers.calibrator import AnswerMap
    from calibrant.llm.answers.rows import check_suffix, read_answers, write_rows

    check_suffix(out)
    rows = load(mapped, AnswerMap).apply(read_answers(file))
    written = shared._how_written(out)
    write_rows(out, rows)
    say(f"{written}: {len(rows):,} answers")


answers.add_command(llm_fields.documents)
answers.add_command(llm_fields.fields)
answers.add_command(llm_logs.read)
answers.add_command(llm_logs.report)
answers.add_command(llm_logs.request)
answers.add_command(llm_signals.signals)
