"""The verbs llm judge, llm judge fit and llm judge apply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from calibrant.cli import shared
from calibrant.cli.shared import AS_JSON, LEVEL, Commands, _new_console, _until_closed, say

if TYPE_CHECKING:
    from calibrant.llm.answers.judges.judged import Scale
    from calibrant.llm.answers.rows import AnswerRows

STAGES = ("beta", "sigmoid", "isotonic")


def _ends(_: Any, __: Any, value: str | None) -> tuple[float, float] | None:
    """Return the two numbers of an option."""
    if value is None:
        return None
    try:
        low, high = (float(part) for part in value.split(","))
    except ValueError:
        message = f"{value!r} must be the lowest and the highest score, as 1,10"
        raise click.BadParameter(message) from None
    return low, high


SCALE = click.option(
    "--scale",
    callback=_ends,
    metavar="LOW,HIGH",
    help="Lowest and highest score.  [default: votes, or numbers from 0 to 1]",
)


class _EstimateByDefault(Commands):
    """A group in which a file in the place of a verb is passed to ``estimate``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {*self.commands, *self.get_help_option_names(ctx)}
        if args and args[0] not in known:
            args = ["estimate", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_EstimateByDefault, context_settings={"show_default": True})
def judge() -> None:
    """Use a judge with a few human labels: success rates, and the judge's own quality.

    \b
    Examples:
      calibrant llm judge judged.jsonl --scale 1,10 --width 0.02
      calibrant llm judge fit judged.jsonl --scale 1,10 -o map
      calibrant llm judge apply map other.jsonl --scale 1,10 -o calibrated.jsonl
    """  # noqa: D301


@judge.command()
@click.argument("file")
@SCALE
@click.option(
    "--cut", type=float, help="Lowest score that counts as right.  [default: middle of the scale]"
)
@click.option(
    "--width", type=float, help="Report how many labels an interval of this half-width needs."
)
@LEVEL
@AS_JSON
def estimate(
    file: str,
    scale: Scale | None,
    cut: float | None,
    width: float | None,
    level: float,
    form: str | None,
) -> None:
    """Estimate success rates from judged answers, and measure the judge.

    FILE is .jsonl or .csv, with an answer to a line: judge (a score or vote), and for some of them
    human (true or false, or a grade from 0 to 1). Optional are system, whose rates are compared,
    and question; label_probability or stratum, if labels were not drawn at random; answer or
    length, for the length bias; winner and swapped_winner (a, b or tie), for the position bias.

    \b
    Examples:
      calibrant llm judge judged.jsonl --scale 1,10 --width 0.02
    """  # noqa: D301
    from calibrant.llm.answers.judges.judged import read_judged
    from calibrant.llm.answers.judges.report import judge_report, pairs_of
    from calibrant.llm.answers.rows import read_answers

    if not level:
        raise click.UsageError("--level must be above 0: a rate without an interval says little")
    if width is not None and not 0 < width < 0.5:
        raise click.UsageError(f"--width must be between 0 and 0.5, got {width:g}")
    answers = read_answers(file)
    position = pairs_of(answers, level)
    if position is not None and not any("judge" in row for row in answers.rows):
        _print_pairs(file, answers, level, form)
        return
    report = judge_report(
        read_judged(answers, scale=scale), cut=cut, level=level, position=position
    )
    with _until_closed():
        if form == "json":
            shared._write_json(report.to_dict(width))
            return
        _print_table(file, report.table(), level)
        console = _new_console()
        for line in report.remarks(width):
            console.print(line, soft_wrap=True)


def _print_pairs(file: str, answers: AnswerRows, level: float, form: str | None) -> None:
    from calibrant.llm.answers.judges.report import figures_of, pairs_of, position_rows

    position = pairs_of(answers, level)
    with _until_closed():
        if form == "json" and position is not None:
            shared._write_json({"level": level, "position_bias": figures_of(position)})
        else:
            _print_table(file, position_rows(position), level)


def _print_table(file: str, rows: list[tuple[str, str, str]], level: float) -> None:
    headings = [file, "value", f"{100 * level:g} % interval"]
    _new_console().print(shared._text_table(headings, rows))


@judge.command("fit")
@click.argument("file")
@SCALE
@click.option("-o", "--out", required=True, metavar="MAP", help="Where to save the map.")
@click.option("--stage", type=click.Choice(STAGES), default=STAGES[0], help="Kind of the map.")
@AS_JSON
def fit_map(file: str, scale: Scale | None, out: str, stage: Any, form: str | None) -> None:
    """Learn from human labels how often answers of each score are right.

    The figures are cross-validated: each score is calibrated by a map of others.

    \b
    Examples:
      calibrant llm judge fit judged.jsonl --scale 1,10 -o map
    """  # noqa: D301
    from calibrant.artifacts import save
    from calibrant.llm.answers.judges.judged import cross_validated_judge, fit_judge, read_judged

    judged = read_judged(file, scale=scale)
    fitted = fit_judge(judged, stage=stage)
    evaluations = cross_validated_judge(judged, stage=stage)
    written = shared._how_written(out, "saved in")
    save(fitted, out)
    shared._show_evaluations(form, file, evaluations)
    say(f"{written}; to use it: calibrant llm judge apply {out} FILE -o OUT")


@judge.command("apply")
@click.argument("mapped", metavar="MAP")
@click.argument("file")
@SCALE
@click.option("-o", "--out", required=True, metavar="FILE", help="File to write.")
def apply_map(mapped: str, file: str, scale: Scale | None, out: str) -> None:
    """Write judged answers with the chance that each is right, as 'calibrated'.

    FILE and OUT are .jsonl or .csv; the other values are kept. Scores of another judge or scale
    than those that MAP was fitted on are refused.

    \b
    Examples:
      calibrant llm judge apply map other.jsonl --scale 1,10 -o calibrated.jsonl
    """  # noqa: D301
    from calibrant.artifacts import load
    from calibrant.llm import AnswerCalibrator
    from calibrant.llm.answers.judges.judged import apply_judge
    from calibrant.llm.answers.rows import check_suffix, read_answers, write_rows

    check_suffix(out)
    rows = apply_judge(load(mapped, AnswerCalibrator), read_answers(file), scale)
    written = shared._how_written(out)
    write_rows(out, rows)
    say(f"{written}: {len(rows):,} answers")
