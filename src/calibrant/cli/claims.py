"""The verbs llm claims split, fit and apply."""

from __future__ import annotations

from typing import Any

import click

from calibrant.cli import shared
from calibrant.cli.shared import AS_JSON, say

STAGES = ("beta", "sigmoid", "isotonic")
AGGREGATES = ("geometric", "product", "arithmetic", "first", "minimum")
AGGREGATE = click.option(
    "--confidence",
    "aggregate",
    type=click.Choice(AGGREGATES),
    default=AGGREGATES[0],
    help="Aggregate of the token probabilities of a claim.",
)


@click.group(context_settings={"show_default": True})
def claims() -> None:
    """Calibrate parts of long answers: the chance that a sentence or claim is right."""


@claims.command()
@click.argument("file")
@click.option("-o", "--out", required=True, metavar="FILE", help="File to write.")
@AGGREGATE
def split(file: str, out: str, aggregate: Any) -> None:
    """Split answers into sentences, to be graded as claims.

    FILE is .jsonl or .csv with token_texts and token_probs for each answer, as 'llm evaluate --chat
    --save-answers' writes it. Each answer in OUT has claims, a list with the text, span and
    confidence of each sentence. Set correct of each to true or false, for 'llm claims fit'.

    \b
    Examples:
      calibrant llm claims split answers.jsonl -o claims.jsonl
    """  # noqa: D301
    from calibrant.llm.answers.graded import check_suffix, read_rows, write_rows
    from calibrant.llm.claims.maps import split_claims

    check_suffix(out)
    rows = split_claims(read_rows(file), aggregate)
    written, count = shared.how_written(out), sum(len(row["claims"]) for row in rows)
    write_rows(out, rows)
    say(f"{written}: {count:,} claims of {len(rows):,} answers; next: grade them (correct)")


@claims.command("fit")
@click.argument("file")
@click.option("-o", "--out", required=True, metavar="MAP", help="Where to save the map.")
@AGGREGATE
@click.option("--stage", type=click.Choice(STAGES), default=STAGES[0], help="Kind of the map.")
@AS_JSON
def fit_map(file: str, out: str, aggregate: Any, stage: Any, form: str | None) -> None:
    """Learn from graded claims how often claims of each confidence are right.

    FILE has token_texts, token_probs and claims for each answer: a list of objects with text or
    span, and correct. The figures are cross-validated with all claims of an answer in one fold.

    \b
    Examples:
      calibrant llm claims fit claims.jsonl -o map
    """  # noqa: D301
    from calibrant.artifacts import save
    from calibrant.llm.answers.calibrating import warn_of_few
    from calibrant.llm.claims.claimed import read_claims
    from calibrant.llm.claims.maps import cross_validated_claims, fit_claims

    read = read_claims(file)
    warn_of_few(int(read.graded().sum()), "graded claims")
    fitted = fit_claims(read, aggregate=aggregate, stage=stage)
    evaluations = cross_validated_claims(read, aggregate=aggregate, stage=stage)
    written = shared.how_written(out, "saved in")
    save(fitted, out)
    shared.show_evaluations(form, file, evaluations)
    say(f"{written}; to use it: calibrant llm claims apply {out} FILE -o OUT")


@claims.command("apply")
@click.argument("mapped", metavar="MAP")
@click.argument("file")
@click.option("-o", "--out", required=True, metavar="FILE", help="File to write.")
@click.option("--html", metavar="FILE", help="Also write the shaded answers as a page of HTML.")
def apply_map(mapped: str, file: str, out: str, html: str | None) -> None:
    """Write answers with the chance that each of their claims is right, as 'calibrated'.

    Answers without claims are split into sentences. Those of another source than MAP was fitted on
    are refused.

    \b
    Examples:
      calibrant llm claims apply map new.jsonl -o calibrated.jsonl --html answers.html
    """  # noqa: D301
    from calibrant.artifacts import load
    from calibrant.llm import AnswerCalibrator
    from calibrant.llm.answers.graded import check_suffix, read_rows, write_rows
    from calibrant.llm.claims.maps import apply_claims, write_page

    check_suffix(out)
    calibrator, answers = load(mapped, AnswerCalibrator), read_rows(file)
    rows = apply_claims(calibrator, answers)
    written, count = shared.how_written(out), sum(len(row["claims"]) for row in rows)
    write_rows(out, rows)
    say(f"{written}: {count:,} claims of {len(rows):,} answers")
    if html:
        written = shared.how_written(html)
        write_page(html, calibrator, answers)
        say(written)
