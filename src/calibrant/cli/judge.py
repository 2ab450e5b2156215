"""The verb llm judge."""

from __future__ import annotations

from typing import Any

import click

from calibrant.cli.shared import AS_JSON, CERTAIN_LEVEL, _option, _show_result, _verb


def _ends(_: Any, param: Any, value: str | None) -> tuple[float, float] | None:
    """Return the two numbers of an option."""
    if value is None:
        return None
    try:
        low, high = (float(part) for part in value.split(","))
    except ValueError:
        message = f"{value!r} must be two numbers {param.metavar}, as 1,10"
        raise click.BadParameter(message) from None
    return low, high


SCALE = _option(
    "--scale",
    callback=_ends,
    metavar="LOW,HIGH",
    help="Lowest and highest score of the judge.  [default: votes, or numbers from 0 to 1]",
)


@_verb()
@click.argument("file")
@SCALE
@_option(
    "--threshold",
    "cut",
    type=float,
    metavar="SCORE",
    help="Lowest score that counts as right.  [default: the middle]",
)
@_option(
    "--width",
    type=click.FloatRange(0, 0.5, min_open=True, max_open=True),
    metavar="FRACTION",
    help="Report how many labels an interval of this half-width needs.",
)
@CERTAIN_LEVEL
@AS_JSON
def judge(
    file: str,
    scale: tuple[float, float] | None,
    cut: float | None,
    width: float | None,
    level: float,
    form: str | None,
) -> None:
    """Estimate success rates from a judge and some human labels, and measure the judge.

    FILE is .jsonl or .csv, with an answer to a line: judge (a score or vote), and for some of them
    human (true or false, or a grade from 0 to 1). Optional are system, whose rates are compared,
    and question; label_probability or stratum, if labels were not drawn at random; answer or
    length, for the length bias; winner and swapped_winner (a, b or tie), for the position bias.

    For the chance that an answer with a score is right, see 'llm answers fit'.

    \b
    Examples:
      calibrant llm judge judged.jsonl --scale 1,10 --width 0.02
    """  # noqa: D301
    from calibrant.estimate.judge_report import JudgeReport, judge_report
    from calibrant.llm.answers.judged import pairs_of, read_judged
    from calibrant.llm.answers.rows import read_answers

    answers = read_answers(file)
    position = pairs_of(answers, level)
    report = JudgeReport(level, position=position)  # of verdicts on pairs alone
    if position is None or any("judge" in row for row in answers.rows):
        about: Any = {"cut": cut, "level": level, "position": position, "width": width}
        report = judge_report(read_judged(answers, scale=scale), **about)
    _show_result(form, report, file)
