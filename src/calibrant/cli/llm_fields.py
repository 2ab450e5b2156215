"""The verbs llm answers fields and documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calibrant.cli import shared
from calibrant.cli.llm_gate import AGGREGATES
from calibrant.cli.llm_logs import _of_log
from calibrant.cli.shared import _new_console, _until_closed, say

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@click.command("fields", cls=shared.Verb)
@click.argument("file", metavar="LOG")
@click.option(
    "-o", "--out", type=click.Path(), required=True, metavar="FILE", help="A .jsonl or .csv file."
)
@click.option("--kinds", metavar="FILE", help="JSON of kinds of fields, with allowed values.")
@click.option(
    "--confidence",
    type=click.Choice(AGGREGATES),
    default="product",
    help="Confidence of a field without allowed values.",
)
@_of_log
def fields(
    file: str, out: str, kinds: str | None, confidence: Any, skip_bad: bool, **reading: Any
) -> None:
    """Turn structured answers into a row for each field, with its confidence.

    LOG is as for 'llm answers report': answers that are JSON, with log-probabilities of their
    tokens. Rows are graded if the log, or the file of --outcomes beside an id, has the right
    values as 'truth'. --kinds is such as {"payer": null, "state": ["paid", "open"], "items/*/sum":
    null}: the fields that answers may have, those of lists with a star, and the values that are
    allowed, or null. For allowed values the log needs top_logprobs.

    The other verbs of 'llm answers' and 'llm gate' take OUT. With --signals all, the map of 'llm
    answers fit' tells the kinds of fields apart.

    \b
    Examples:
      calibrant llm answers fields out.jsonl --outcomes true.jsonl -o fields.jsonl
      calibrant llm answers fields new.jsonl --kinds kinds.json -o fields.jsonl
    """  # noqa: D301
    from calibrant.llm import fields_of, read_log
    from calibrant.llm.answers.rows import check_suffix, write_rows

    check_suffix(out)
    known = None if kinds is None else _read_kinds(kinds)
    log = read_log(file, graded=False, skip_bad=skip_bad, **reading)
    found = fields_of(log, skip_bad=skip_bad, kinds=known, aggregate=confidence).rows
    written = shared._how_written(out)
    write_rows(out, found)
    with _until_closed():
        headings = ("field", "count", "confidence", "right")
        _new_console().print(shared._text_table(headings, list(_by_kind(found))))
    graded = bool(found) and "correct" in found[0]
    usage = f"fit {out} --signals all -o MAP" if graded else f"apply MAP {out} -o OUT"
    say(f"{written}: {len(found):,} fields; next: calibrant llm answers {usage}")


def _read_kinds(path: str) -> dict[str, Any]:
    wanted = "must be an object with a list of allowed values, or null, for each kind of field"
    try:
        kinds = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise click.UsageError(f"{path} {wanted} ({error})") from error
    if not isinstance(kinds, dict) or not all(
        value is None or isinstance(value, list) for value in kinds.values()
    ):
        raise click.UsageError(f"{path} {wanted}, got {kinds!r:.80}")
    return kinds


def _by_kind(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield the number of fields of each kind, their mean confidence, and the share right."""
    for kind in dict.fromkeys(row["kind"] for row in rows):
        some = [row for row in rows if row["kind"] == kind]
        means = [
            f"{100 * sum(row[key] for row in some) / len(some):.1f} %" if key in some[0] else "-"
            for key in ("confidence", "correct")
        ]
        yield (kind, f"{len(some):,}", *means)


@click.command("documents", cls=shared.Verb)
@click.argument("file", metavar="FIELDS")
@click.option(
    "-o", "--out", type=click.Path(), required=True, metavar="FILE", help="A .jsonl or .csv file."
)
def documents(file: str, out: str) -> None:
    """Turn fields into a row for each document: the chance that all of it is right.

    FIELDS is a file of 'llm answers fields' or, better, what 'llm answers apply' made of it. The
    confidence of a document is the product of the chances of its fields. These depend on each
    other: fit a map, or a gate, to documents that the map of the fields was not fitted on.

    \b
    Examples:
      calibrant llm answers documents calibrated.jsonl -o documents.jsonl
      calibrant llm gate fit documents.jsonl --max-error 0.1 -o gate
    """  # noqa: D301
    from calibrant.llm import documents_of
    from calibrant.llm.answers.rows import check_suffix, read_answers, write_rows

    check_suffix(out)
    rows = documents_of(read_answers(file)).rows
    written = shared._how_written(out)
    write_rows(out, rows)
    say(f"{written}: {len(rows):,} documents; next: calibrant llm gate fit {out} -o GATE")
