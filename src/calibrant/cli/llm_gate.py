"""The verbs llm gate fit, check and watch."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from calibrant.cli import shared
from calibrant.cli.llm_answers import AGGREGATE
from calibrant.cli.shared import AS_JSON, FRACTION, Commands, _new_console, _until_closed, say

if TYPE_CHECKING:
    from calibrant.llm import Gate

UNITS = ("answer", "turn", "conversation")
_CHECKED = {"model": "model", "prompt": "system prompt", "sampling": "sampling parameters"}
"""Parts of the source of answers that a gate checks where it knows them, in words."""
_MOST_REASONS = 10
STATE = click.option(
    "--state", type=click.Path(), metavar="FILE", help="Drift watch file, made by 'watch --new'."
)


@click.group(cls=Commands, context_settings={"show_default": True})
def gate() -> None:
    """Accept answers, verify them, or hand them to a person, at a guaranteed error."""


@gate.command()
@click.argument("file")
@click.option(
    "-o", "--out", type=click.Path(), required=True, metavar="GATE", help="Where to save the gate."
)
@click.option("--max-error", **FRACTION, required=True, help="Largest share of errors.")
@click.option("--certainty", **FRACTION, default=0.95, help="Probability that the guarantee holds.")
@click.option(
    "--unit",
    type=click.Choice(UNITS),
    default="answer",
    help="What the guarantee counts; rows of one conversation belong together unless it is answer.",
)
@click.option("--by-kind", is_flag=True, help="Thresholds for each kind of question.")
@click.option(
    "--verifier-misses",
    **FRACTION,
    help="Share of wrong answers that your verifier lets through.  [default: no verifier]",
)
@click.option("--map", "mapped", metavar="MAP", help="Map of 'llm answers fit' on other answers.")
@AGGREGATE
@click.option(
    "--false-alarms",
    **FRACTION,
    default=0.05,
    help="Probability of ever withdrawing the guarantee without drift.",
)
@AS_JSON
def fit(file: str, out: str, mapped: str | None, form: str | None, **options: Any) -> int:
    """Find from graded answers which ones to accept.

    FILE is .jsonl or .csv, as for 'llm answers fit'. All answers serve the thresholds and the map
    from confidences to probabilities. Rows may have a kind (of question) and a conversation.

    \b
    Examples:
      calibrant llm gate fit graded.jsonl --max-error 0.05 -o gate
      calibrant llm gate fit graded.jsonl --max-error 0.05 --by-kind -o gate
      calibrant llm gate fit chats.jsonl --max-error 0.1 --unit turn -o gate

    \b
    Exit status: 0 done, 1 nothing can be accepted, 2 could not run.
    """  # noqa: D301
    from calibrant._core.messages import comma_separated
    from calibrant.artifacts import load, save
    from calibrant.llm import fit_gate
    from calibrant.llm.answers.calibrator import AnswerMap
    from calibrant.llm.answers.rows import read_answers

    if mapped is not None:
        options["calibrator"] = load(mapped, AnswerMap)
    fitted = fit_gate(read_answers(file), **options)
    written = shared._how_written(out, "saved in")
    save(fitted, out)
    with _until_closed():
        if form == "json":
            shared._write_json(_summary(fitted))
        else:
            shared._print_box(fitted)
    unknown = [said for part, said in _CHECKED.items() if not getattr(fitted.source, part)]
    if unknown:
        said = f"{mapped or file} does not record {comma_separated(unknown)}"
        say(f"{said}: the gate will not notice if that changes")
    usage = f"calibrant llm gate check {out} FILE"
    if not fitted.accepts_some:
        usage = "grade more answers, or allow more errors, and fit again"
    say(f"{written}; next: {usage}")
    return int(not fitted.accepts_some)


@gate.command()
@click.argument("folder", metavar="GATE")
@click.argument("file")
@click.option(
    "-o", "--out", type=click.Path(), metavar="FILE", help="Write there instead, .jsonl or .csv."
)
@STATE
@click.option("--fail", is_flag=True, help="Exit with 1 unless every answer is accepted.")
def check(folder: str, file: str, out: str | None, state: str | None, fail: bool) -> int:
    """Judge answers: a row with 'verdict', 'calibrated', 'threshold' and 'reason' for each.

    FILE is .jsonl or .csv, with the confidence or token_probs of each answer, and its kind where
    the gate has kinds. Rows are written as JSON lines. The verdict is accept, verify, or person;
    answers whose confidence is missing or no number are for a person. Answers from another source
    than those of the fit are refused.

    With --state the answers are noted for the drift watch, under their id if they have one, and a
    guarantee that was withdrawn is not used.

    \b
    Examples:
      calibrant llm gate check gate new.jsonl > judged.jsonl
      calibrant llm gate check gate new.jsonl --state watch.json -o judged.jsonl

    \b
    Exit status: 0 done, 1 an answer is not accepted and --fail, 2 could not run.
    """  # noqa: D301
    from calibrant._core.checks import warn
    from calibrant.artifacts import load
    from calibrant.llm.answers.rows import check_suffix, read_answers, write_rows
    from calibrant.llm.gate.gate import DECISIONS, Gate
    from calibrant.llm.gate.watch import judge_rows

    if out is not None:
        check_suffix(out)
    answers = read_answers(file)
    rows = judge_rows(load(folder, Gate), answers, state)
    if out is not None:
        written = shared._how_written(out)
        write_rows(out, rows)
        say(f"{written}: {len(rows):,} answers")
    else:
        with _until_closed():
            for row in rows:
                click.echo(json.dumps(row))
    counts = {name: sum(row["verdict"] == name for row in rows) for name in DECISIONS}
    say(", ".join(f"{name}: {count:,}" for name, count in counts.items()))
    _say_reasons(Counter(filter(None, map(_reason, rows, answers.places))), "to a person")
    if rows and all(row["calibrated"] is None for row in rows):
        warn(f"none of the {len(rows):,} answers of {file} has a usable confidence")
    return int(fail and counts["accept"] < len(rows))


@gate.command()
@click.argument("folder", metavar="GATE")
@click.argument("grades", required=False, metavar="[GRADES]")
@click.option(
    "--state", type=click.Path(), required=True, metavar="FILE", help="File of the drift watch."
)
@click.option("--new", is_flag=True, help="Begin a watch: make the file, which must not exist.")
@click.option("--fail", is_flag=True, help="Exit with 1 if the guarantee is withdrawn.")
@AS_JSON
def watch(
    folder: str, grades: str | None, state: str, new: bool, fail: bool, form: str | None
) -> int:
    """Report whether the guarantee of a gate still holds, and add grades that have come.

    GRADES is .jsonl or .csv, with correct (true or false) for each answer, and the id under which
    it was noted, or calibrated as 'gate check' wrote it, or what 'gate check' computes that from.
    The grades of a conversation belong in one file; one of them counts. Grades that cannot be used
    are listed with the reason; if none can, the exit status is 2.

    Where the file of the watch is missing or damaged, nothing is guaranteed, since the guarantee
    may have been withdrawn. GATE.withdrawn, beside the gate, records a withdrawal: then --new is
    refused until a gate is fitted on other answers.

    \b
    Examples:
      calibrant llm gate watch gate --state watch.json --new
      calibrant llm gate watch gate --state watch.json
      calibrant llm gate watch gate graded_today.jsonl --state watch.json --fail

    \b
    Exit status: 0 done, 1 the guarantee is withdrawn and --fail, 2 could not run.
    """  # noqa: D301
    from calibrant.artifacts import load
    from calibrant.llm import Gate
    from calibrant.llm.answers.rows import read_answers
    from calibrant.llm.gate.watch import WatchFile, add_grades

    file = WatchFile(state, load(folder, Gate))
    if new:
        file.start(folder)
    if grades is not None:
        answers = read_answers(grades)
        used, unused = add_grades(file, answers)
        say(f"{used:,} grades added, {len(unused):,} not used")
        _say_reasons(Counter(_general(why, place) for place, why in unused), "not used")
        if not used:
            raise ValueError(
                f"none of the {len(answers.rows):,} grades of {grades} can be used: each needs the "
                "id of an answer that was judged, or calibrated, what the gate made of its "
                "confidence"
            )
    found = file.read()
    with _until_closed():
        if form == "json":
            e_values = {"grades": found.grades.e_value, "confidences": found.confidences.e_value}
            seen = {"graded": found.grades.seen, "judged": found.confidences.seen}
            shared._write_json({"withdrawn": found.withdrawn, **seen, "e_values": e_values})
        else:
            console = _new_console()
            console.print(found.describe(), style="dim", soft_wrap=True)
            verdict = found.withdrawn or "no drift detected: the guarantee holds"
            console.print(verdict, style="bold", soft_wrap=True)
    return int(fail and bool(found.withdrawn))


def _reason(row: dict[str, Any], place: str) -> str:
    """Return why an answer is for a person, without its own numbers; empty if it is not."""
    reason = _general(row["reason"], place)
    if row["verdict"] != "person":
        return ""
    if row["calibrated"] is None:
        return f"no usable confidence: {reason}"
    return re.sub(r"^the confidence \S+ is", "the confidence is", reason)


def _general(reason: str, place: str) -> str:
    """Return a reason without the place and the value of one answer."""
    return re.sub(r", got [^:]+", "", reason.replace(place, "the answer"))


def _say_reasons(counts: Counter[str], what: str) -> None:
    for reason, count in counts.most_common(_MOST_REASONS):
        say(f"{count:,} {what}: {reason}")


def _summary(fitted: Gate) -> dict[str, Any]:
    promises = {name: fitted.promise(name) for name in ("accept", "verify")}
    bands = [band.state() for band in fitted.bands]
    return {"promises": promises, "terms": fitted.terms._asdict(), "bands": bands}
