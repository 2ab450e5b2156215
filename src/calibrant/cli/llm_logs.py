"""The verbs llm answers report, read and request."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calibrant.cli import shared
from calibrant.cli.shared import _new_console, _until_closed, say

if TYPE_CHECKING:
    from collections.abc import Callable

FORMATS = ("answers", "lm_eval", "inspect", "openai")


def _of_log(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options by which logs are read."""
    options = (
        click.option(
            "--format",
            type=click.Choice(FORMATS),
            help="Format of the log.  [default: told from its content]",
        ),
        click.option(
            "--outcome",
            metavar="NAME",
            help="What says if an answer is right: a metric of lm-eval (or METRIC,FILTER), a "
            "scorer of Inspect, or a key of the lines.  [default: the first]",
        ),
        click.option(
            "--outcomes",
            metavar="FILE",
            help="A .jsonl or .csv file with id and correct of each answer.",
        ),
        click.option("--skip-bad", is_flag=True, help="Leave out answers that cannot be used."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command("report", cls=shared.Verb)
@click.argument("file")
@click.option(
    "-o", "--out", type=click.Path(), required=True, metavar="DIR", help="Folder to write."
)
@_of_log
@click.option(
    "--max-error",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.1,
    help="Largest share of wrong answers above the threshold.",
)
@click.option(
    "--certainty",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.9,
    help="Certainty of that guarantee.",
)
@click.option("--seed", default=0, help="Random seed for the halves of map and threshold.")
def report(
    file: str, out: str, max_error: float, certainty: float, seed: int, **reading: Any
) -> None:
    """Measure the confidences of graded answers, and calibrate them.

    FILE is a log of graded answers: samples of lm-evaluation-harness (lm_eval --log_samples) or
    their folder, a log of Inspect (.eval, .json), chat completions or batch output of OpenAI's
    interface (.jsonl, with --outcomes where they are in another file), or .jsonl and .csv with
    confidence and correct.

    DIR gets report.html, a reliability diagram, the map from confidences to the chance to be
    right with a threshold that keeps --max-error, and the calibrated answers.

    \b
    Examples:
      calibrant llm answers report output.jsonl --outcomes graded.csv -o report
      calibrant llm answers report lm_eval_output/ --outcome acc_norm -o report
    """  # noqa: D301
    from calibrant.llm import read_log, study_answers
    from calibrant.llm.answers.logs.report import answer_lines, save_answer_report

    log = read_log(file, **reading)
    study = study_answers(log, max_error=max_error, certainty=certainty, seed=seed)
    written = shared._how_written(out)
    names = save_answer_report(study, out)
    with _until_closed():
        console = _new_console()
        for line in answer_lines(study):
            console.print(line, soft_wrap=True)
    say(f"{written}: {', '.join(names)}; open {Path(out) / names[0]}")


@click.command("read", cls=shared.Verb)
@click.argument("file")
@click.option(
    "-o",
    "--out",
    type=click.Path(),
    required=True,
    metavar="FILE",
    help="A .jsonl, .csv or .npz file.",
)
@_of_log
@click.option("--ungraded", is_flag=True, help="Answers need not be graded.")
def read(file: str, out: str, ungraded: bool, **reading: Any) -> None:
    """Turn a log into a file of answers, which the other verbs of 'llm answers' take.

    FILE is as for 'llm answers report'. With a .npz file as OUT, the log-probabilities of multiple
    choice are written as logits with labels, for 'calibrant fit'.

    \b
    Examples:
      calibrant llm answers read logs/capitals.eval -o answers.jsonl
      calibrant llm answers read samples_arc_easy_2026.jsonl -o options.npz
    """  # noqa: D301
    from calibrant.llm import read_log
    from calibrant.llm.answers.logs.study import save_options
    from calibrant.llm.answers.rows import check_suffix, write_rows

    if not out.endswith(".npz"):
        check_suffix(out)
    log = read_log(file, graded=not ungraded, **reading)
    written = shared._how_written(out)
    if out.endswith(".npz"):
        save_options(log.answers.rows, out)
    else:
        write_rows(out, log.answers.rows)
    say(f"{written}: {len(log.answers.rows):,} answers ({log.format})")


@click.command("request", cls=shared.Verb)
@click.argument("questions")
@click.option(
    "-o",
    "--out",
    type=click.Path(),
    required=True,
    metavar="FILE",
    help="A .jsonl file; goes on with it.",
)
@click.option("--model", required=True, metavar="NAME", help="Model to ask, or litellm/NAME.")
@click.option(
    "--url", metavar="URL", help="Address of the service, such as http://localhost:8000/v1."
)
@click.option("--logprobs/--no-logprobs", default=True, help="Request token probabilities.")
@click.option(
    "--samples",
    type=click.IntRange(0),
    default=0,
    help="Further answers to draw, at temperature 1.",
)
@click.option("--stated", is_flag=True, help="Ask the model to state its confidence.")
@click.option("--p-true", is_flag=True, help="Ask the model if its answer is true.")
@click.option("--max-tokens", type=click.IntRange(1), default=256, help="Longest answer.")
@click.option("--system", default="", help="First message of every chat.")
@click.option(
    "--grade",
    type=click.Choice(("contains", "exact", "none")),
    default="contains",
    help="When an answer is right: it contains a reference, or equals one.",
)
@click.option("--set", "fields", multiple=True, metavar="KEY=VALUE", help="A field of requests.")
@click.option("--concurrency", type=click.IntRange(1), default=4, help="Questions at a time.")
@click.option("--max-retries", type=click.IntRange(0), default=5, help="Repetitions of a request.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=60.0, help="Seconds.")
@click.option("--price-in", type=click.FloatRange(0), help="Price of a million tokens sent.")
@click.option("--price-out", type=click.FloatRange(0), help="Price of a million received.")
@click.option("--dry-run", is_flag=True, help="Only estimate the cost.")
def request(
    questions: str,
    out: str,
    model: str,
    url: str | None,
    fields: tuple[str, ...],
    concurrency: int,
    max_retries: int,
    timeout: float,
    price_in: float | None,
    price_out: float | None,
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
    from calibrant.llm.models.services import Connection, service_for

    asked = read_asked(questions)
    values = {name: parsed_text(text) for name, text in shared._named_texts(fields).items()}
    chosen = RequestPlan(model, fields=values, **plan)
    prices = None if price_in is None and price_out is None else (price_in or 0, price_out or 0)
    say(cost_of(asked, chosen, out, prices))
    if dry_run:
        return
    reached = service_for(model, Connection(url, timeout, max_retries))
    with reached as service, shared._progress_bar("questions") as progress:
        count = request_answers(
            asked,
            service,
            chosen,
            out,
            concurrency=concurrency,
            progress=progress,
        )
    say(f"{out}: {count:,} new answers; next: calibrant llm answers report {out} -o DIR")
