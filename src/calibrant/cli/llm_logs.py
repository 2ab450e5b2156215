"""The verbs llm answers request, report and read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calibrant.cli import shared
from calibrant.cli.engine import InputFiles
from calibrant.cli.judge import _ends
from calibrant.cli.shared import _new_console, _option, _until_closed, _verb, say

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

OUTCOME = _option(
    "--outcome",
    metavar="NAME",
    help="What says if an answer is right: a metric of lm-eval (or METRIC,FILTER), a scorer of "
    "Inspect, or a key of the lines.  [default: the first]",
)
GRADES = _option(
    "--grades",
    metavar="FILE",
    help="Grades in a file of their own: .jsonl or .csv with id and correct.",
)
SKIP_BAD = _option("--skip-bad", is_flag=True, help="Leave out answers that cannot be used.")
SHARE: Any = {"type": click.FloatRange(0, 1, True, True), "metavar": "FRACTION"}


@_verb()
@click.argument("file", metavar="LOG")
@_option("-o", "--out", type=click.Path(), required=True, metavar="DIR", help="Folder to write.")
@OUTCOME
@GRADES
@SKIP_BAD
@_option("--max-error", **SHARE, default=0.1, help="Largest share of errors.")
@_option("--certainty", **SHARE, default=0.95, help="Probability that the guarantee holds.")
def report(file: str, out: str, max_error: float, certainty: float, **reading: Any) -> None:
    """Measure the confidences of graded answers, and calibrate them.

    LOG is a log of graded answers: samples of lm-evaluation-harness (lm_eval --log_samples) or
    their folder, a log of Inspect (.eval, .json), chat completions or batch output of OpenAI's
    interface (.jsonl, with --grades where they are in another file), or .jsonl and .csv with
    confidence and correct.

    DIR gets report.html, a reliability diagram, the map from confidences to the chance to be right
    with a threshold that keeps --max-error, and the calibrated answers.

    \b
    Examples:
      calibrant llm answers report output.jsonl --grades graded.csv -o report
      calibrant llm answers report lm_eval_output/ --outcome acc_norm -o report
    """  # noqa: D301
    from calibrant.llm import read_log, study_answers
    from calibrant.show.answer_report import answer_lines, save_answer_report

    log = read_log(file, **reading)
    if not any("correct" in row for row in log.answers.rows):
        raise click.UsageError(f"{file} has no grades: name the file that has them by --grades")
    study = study_answers(log, max_error=max_error, certainty=certainty)
    written = shared._how_written(out)
    names = save_answer_report(study, out)
    with _until_closed():
        console = _new_console()
        for line in answer_lines(study):
            console.print(line, soft_wrap=True)
    say(f"{written}: {', '.join(names)}; open {Path(out) / names[0]}")


@_verb()
@click.argument("file", metavar="LOG")
@_option(
    "-o",
    "--out",
    type=click.Path(),
    required=True,
    metavar="FILE",
    help="A .jsonl, .csv or .npz file.",
)
@_option(
    "--fields",
    metavar="all|KINDS",
    help="Write a row for each field of answers that are JSON. KINDS is a file of their kinds.",
)
@OUTCOME
@GRADES
@SKIP_BAD
def read(file: str, out: str, fields: str | None, skip_bad: bool, **reading: Any) -> None:
    """Turn a log into a file of answers, which the other verbs take.

    LOG is as for 'llm answers report', graded or not. With a .npz file as OUT, the
    log-probabilities of multiple choice are written as logits with labels, for 'calibrant fit'.

    With --fields the log needs log-probabilities of tokens. Rows are graded if the log, or the file
    of --grades beside an id, has the right values as 'truth'. KINDS is JSON such as {"payer": null,
    "state": ["paid", "open"], "items/*/sum": null}: the fields that answers may have, those of
    lists with a star, and the values that are allowed, or null. For allowed values the log needs
    top_logprobs.

    \b
    Examples:
      calibrant llm answers read logs/capitals.eval -o answers.jsonl
      calibrant llm answers read samples_arc_easy_2026.jsonl -o options.npz
      calibrant llm answers read out.jsonl --fields kinds.json -o fields.jsonl
    """  # noqa: D301
    from calibrant.llm import fields_of, read_log
    from calibrant.llm.answers.logs.study import save_options
    from calibrant.llm.answers.rows import check_suffix, write_rows

    if fields or not out.endswith(".npz"):
        check_suffix(out)
    kinds = _read_kinds(fields) if fields not in (None, "all") else None
    log = read_log(file, skip_bad=skip_bad, **reading)
    rows = log.answers.rows
    if fields:
        rows = fields_of(log, skip_bad=skip_bad, kinds=kinds).rows
    written = shared._how_written(out)
    if out.endswith(".npz"):
        save_options(rows, out)
        say(f"{written}: {len(rows):,} questions")
        return
    write_rows(out, rows)
    if fields:
        with _until_closed():
            headings = ("field", "count", "confidence", "right")
            _new_console().print(shared._text_table(headings, list(_by_kind(rows))))
    graded = bool(rows) and "correct" in rows[0]
    how = " --signals all" if fields else ""
    usage = f"fit {out}{how} -o MAP" if graded else f"apply MAP {out} -o OUT"
    count = f"{len(rows):,} fields" if fields else f"{len(rows):,} answers ({log.format})"
    say(f"{written}: {count}; next: calibrant llm answers {usage}")


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


@_verb()
@click.argument("questions")
@_option(
    "-o",
    "--out",
    type=click.Path(),
    required=True,
    metavar="FILE",
    help="A .jsonl file; goes on with it.",
)
@_option("--model", required=True, metavar="MODEL", help="Model to ask, or litellm/NAME.")
@_option("--url", metavar="URL", help="Address of the service, such as http://localhost:8000/v1.")
@_option("--logprobs/--no-logprobs", default=True, help="Request token probabilities.")
@_option(
    "--samples",
    type=shared.AT_LEAST_1,
    metavar="N",
    help="Further answers to draw, at temperature 1.",
)
@_option("--stated", is_flag=True, help="Ask the model to state its confidence.")
@_option("--p-true", is_flag=True, help="Ask the model if its answer is true.")
@_option(
    "--max-new-tokens",
    "max_tokens",
    type=shared.AT_LEAST_1,
    default=256,
    metavar="N",
    help="Longest answer, in tokens.",
)
@_option("--system", default="", metavar="TEXT", help="First message of every chat.")
@_option(
    "--grade",
    type=click.Choice(("contains", "exact", "none")),
    default="contains",
    help="When an answer is right: it contains a reference, or equals one.",
)
@_option("--set", "fields", multiple=True, metavar="KEY=VALUE", help="A field of requests.")
@_option(
    "--concurrency", type=shared.AT_LEAST_1, default=4, metavar="N", help="Questions at a time."
)
@_option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    metavar="SECONDS",
    help="How long to wait for a response.",
)
@_option(
    "--prices",
    callback=_ends,
    metavar="IN,OUT",
    help="Prices of a million tokens, sent and received, for an estimate of the cost.",
)
@_option("--dry-run", is_flag=True, help="Only estimate the cost.")
def request(
    questions: str,
    out: str,
    model: str,
    url: str | None,
    samples: int | None,
    fields: tuple[str, ...],
    concurrency: int,
    timeout: float,
    prices: tuple[float, float] | None,
    dry_run: bool,
    **plan: Any,
) -> None:
    """Ask a service questions, and keep its answers with signals of their confidence.

    QUESTIONS is .jsonl or .csv with question (or messages), references, id and kind, or .txt. The
    service has the interface of OpenAI: vLLM, the server of llama.cpp, Ollama and others by --url.
    The key is that of the environment, OPENAI_API_KEY.

    Each finished question is appended to FILE. The same command goes on after a stop, and asks
    nothing twice.

    \b
    Examples:
      calibrant llm answers request asked.jsonl --model gpt-4o-mini -o new.jsonl
      calibrant llm answers request asked.jsonl --url http://localhost:8080/v1 \\
        --model local --samples 5 --stated --p-true -o new.jsonl
    """  # noqa: D301
    from calibrant._core.options import parsed_text
    from calibrant.llm.answers.requesting import RequestPlan, cost_of, read_asked, request_answers
    from calibrant.llm.models.services import service_for

    asked = read_asked(questions)
    values = {name: parsed_text(text) for name, text in shared._named_texts(fields).items()}
    chosen = RequestPlan(model, samples=samples or 0, fields=values, **plan)
    say(cost_of(asked, chosen, out, prices))
    if dry_run:
        return
    reached = service_for(model, url=url, timeout=timeout)
    with reached as service, InputFiles().working("questions"):
        done = request_answers(asked, service, chosen, out, concurrency=concurrency)
    say(f"{out}: {done:,} new answers; next: calibrant llm answers report {out} -o DIR")
