"""The verbs llm collect, fit, evaluate and ask."""

from __future__ import annotations

import math
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from calibrant._core.messages import printable
from calibrant.cli import judge, llm_gate, shared
from calibrant.cli.engine import InputFiles
from calibrant.cli.llm_answers import AGGREGATES, answers
from calibrant.cli.shared import (
    AS_JSON,
    LEVEL,
    Commands,
    _new_console,
    _option,
    _until_closed,
    _verb,
    say,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from rich.text import Text

    from calibrant.llm import Answer
    from calibrant.llm.answers.choices import OptionBias
    from calibrant.llm.answers.grading import QuestionSet
    from calibrant.llm.heads.fitted import Gains
    from calibrant.metrics.clustered import Evaluations

    Biases = Mapping[str, OptionBias]
    Result = tuple[str, Evaluations, Gains, Biases]

DEVICE = _option("--device", metavar="NAME", help="A torch device.  [default: where the model is]")
DTYPE = _option("--dtype", default="auto", metavar="NAME", help="Precision of the model.")
TRUST = _option(
    "--trust-remote-code", is_flag=True, help="Run Python code that comes with the model."
)
LIMIT: Any = {"type": shared.AT_LEAST_1, "metavar": "N"}
ROWS = {"before": "as it is", "global": "one temperature", "head": "head"}
"""What was done to the tokens or the answers, in words."""
SCORES = {"nll": "NLL", "brier": "Brier"}
CONFIDENCE = _option(
    "--confidence",
    type=click.Choice((*AGGREGATES, "p_true")),
    metavar="NAME",
    help="Confidence of a written answer: an aggregate of its token probabilities (geometric, "
    "product, arithmetic, first or minimum), or the model's verdict in a second prompt (p_true).  "
    "[default: geometric]",
)


@click.group(
    cls=Commands,
    sections={
        "Tokens": ["collect", "fit", "evaluate", "ask"],
        "Answers": ["answers", "gate", "judge"],
    },
)
def llm() -> None:
    """Calibrate language models: token by token, and answer by answer."""


@_verb()
@click.argument("model")
@click.argument("documents")
@_option(
    "-o", "--out", type=click.Path(), required=True, metavar="TABLE", help="Folder of the table."
)
@_option("--length", default=1024, metavar="N", help="Longest document, in tokens.")
@_option("--limit", **LIMIT, help="Use only the first documents.")
@_option("--skip-bad", is_flag=True, help="Leave out documents that cannot be used.")
@_option("--batch", default=8192, metavar="N", help="Tokens per batch.")
@_option("--prompts", is_flag=True, help="Keep states of prompts too, for the head ats.")
@DEVICE
@DTYPE
@TRUST
def collect(model: str, documents: str, out: str, **options: Any) -> None:
    """Run a model over documents once, and store what heads are fitted from.

    MODEL is a Hugging Face folder, a name on the hub, or a .gguf file. DOCUMENTS is .jsonl, .json
    or .txt: chats, instructions with outputs, questions or prompts with answers, or texts. Only the
    assistant's turns count, or the answer, or all of a text. An interrupted run continues after its
    last complete shard.

    \b
    Examples:
      calibrant llm collect model/ chats.jsonl -o table
    """  # noqa: D301
    from calibrant.llm.heads.collect import collect_file

    _hide_bars()
    with InputFiles().working("tokens"):
        table, total = collect_file(model, documents, out, **options)
    used = len(set(table.documents.tolist()))  # one of several processes has a share of them
    count = f"{used:,}" if used == total else f"{used:,} of {total:,}"
    say(f"{out}: {len(table):,} tokens of {count} documents; next: calibrant llm fit {out} -o HEAD")


@_verb()
@click.argument("tables", nargs=-1, required=True, metavar="TABLE...")
@_option("--head", default="linear", metavar="KIND", help="linear, mlp, shape, ats or global.")
@_option(
    "--objective",
    metavar="NAME",
    help="nll, bce, brier, smart or selective (the paper's).  [default: selective for ats, else "
    "nll]",
)
@_option(
    "--alpha",
    metavar="NUMBER|search",
    help="Weight of wrong tokens in the selective objective; search tries six.  [default: 0.5]",
)
@_option(
    "--set",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="An option of the head or its objective, such as units=128 or over=5; repeatable.",
)
@_option("--epochs", default=40, metavar="N", help="Largest number of epochs.")
@_option("--keep-always", is_flag=True, help="Train all epochs and keep the head regardless.")
@_option("--seed", default=0, metavar="N", help="Random seed of the folds and the training.")
@_option("--device", default="cpu", metavar="NAME", help="Where the head is trained.")
@_option("-o", "--out", type=click.Path(), required=True, metavar="HEAD", help="Folder to save in.")
@AS_JSON
def fit(
    tables: tuple[str, ...],
    head: str,
    objective: str | None,
    alpha: str | None,
    options: tuple[str, ...],
    out: str,
    form: str | None,
    **training: Any,
) -> None:
    """Train a temperature head from tables of 'llm collect'.

    The head sets the temperature of each token. It is kept only if it beats one temperature for
    all tokens on held-out documents by two standard errors; otherwise that temperature is saved,
    with the reason. Up to 1,000 documents are all held out once, in five folds. --keep-always
    switches this rule off. --head ats has the layer and the loss of adaptive temperature scaling;
    its start, learning rate and batches are not those of the paper.

    \b
    Examples:
      calibrant llm fit table -o head
      calibrant llm fit table --head ats --alpha 0.5 --keep-always -o head
      calibrant llm fit table --head mlp --set units=128 -o head
    """  # noqa: D301
    from calibrant._core.options import parse_options
    from calibrant.artifacts import save
    from calibrant.llm import fit_head, open_table
    from calibrant.llm.heads.fit import options_for

    table, head = open_table(list(tables)), head.lower()
    training |= {"objective": objective and objective.lower(), "alpha": _alpha(alpha)}
    known = options_for(head, training["objective"])
    training["options"] = parse_options(f"the {head} head", known, shared._named_texts(options))
    with InputFiles().working("epochs"):
        fitted = fit_head(table, head, **training)
    written = shared._how_written(out, "saved in")
    save(fitted, out)
    with _until_closed():
        if form == "json":
            names = ("kept", "reasons", "settings", "figures")
            shared._write_json({name: getattr(fitted, name) for name in names})
        else:
            console = _new_console()
            console.print(fitted.reasons, soft_wrap=True)
            metrics = list(fitted.figures["before"])
            rows = [(on, *(f"{x[m]:.4f}" for m in metrics)) for on, x in fitted.figures.items()]
            console.print(shared._text_table(["on held-out documents", *metrics], rows))
    say(f"{written}; to measure it: calibrant llm evaluate {out} TABLE")


def _alpha(text: str | None) -> Any:
    """Return a number, or the text that stands for a search."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


@_verb()
@click.argument("paths", nargs=-1, required=True, metavar="[HEAD] TABLE|QUESTIONS...")
@_option("--model", metavar="MODEL", help="Model that answers QUESTIONS.")
@_option("--limit", **LIMIT, help="Draw this many questions.")
@_option(
    "--shots", type=shared.AT_LEAST_0, default=5, metavar="N", help="Solved examples before each."
)
@CONFIDENCE
@_option(
    "--permutations",
    type=click.Choice(("cyclic", "all")),
    help="Also ask multiple choice with its options in other orders, and average.",
)
@_option(
    "--chat",
    is_flag=True,
    help="Ask each question alone, as 'llm ask' does; right is what contains a reference.",
)
@_option(
    "--max-new-tokens",
    **LIMIT,
    help="Longest written answer.  [default: 32 tokens, with --chat 64]",
)
@_option(
    "--samples",
    **LIMIT,
    help="Also draw this many answers to each question, for --save-answers.",
)
@_option(
    "--save-answers", "saved", metavar="FILE", help="Write the answers, for 'llm answers fit'."
)
@LEVEL
@AS_JSON
@DEVICE
@DTYPE
@TRUST
def evaluate(
    paths: tuple[str, ...],
    model: str | None,
    confidence: Any,
    permutations: Any,
    chat: bool,
    max_new_tokens: int | None,
    samples: int | None,
    saved: str | None,
    level: float,
    form: str | None,
    device: str | None,
    dtype: str,
    trust_remote_code: bool,
    **drawing: Any,
) -> None:
    """Measure the calibration of a language model, as it is and with a head.

    HEAD is a folder of 'llm fit'. One temperature for all tokens accounts for most of its gain, so
    both are measured. TABLE is a table of 'llm collect', whose tokens are measured. QUESTIONS, with
    --model, is a text file of questions and answers, graded by exact match; a folder of MMLU,
    graded by the letter; or TruthfulQA.csv, where the best answer has to be likelier than each
    incorrect one (MC1). MMLU of 100 questions or more is also measured calibrated, each by a fit on
    others: it corrects a preference for some letters. With --permutations it is asked in several
    orders of its options, too, over which the preference averages out: the reference, at several
    times the cost.

    --save-answers writes an answer to a line (.jsonl or .csv), with its confidence and whether it
    is right; with HEAD, the confidences after it. Correct the grades there as you like. With
    --samples an answer has further ones beside it, drawn at temperature 1 from the model without
    a head: 'llm answers fit --signals all' uses how far they agree.

    \b
    Examples:
      calibrant llm evaluate head other_table
      calibrant llm evaluate head triviaqa.txt --model model/ --limit 200
      calibrant llm evaluate triviaqa.txt --model model/ --chat \\
        --save-answers graded.jsonl
    """  # noqa: D301
    from calibrant.artifacts import load
    from calibrant.llm import FittedHead, load_model, open_table
    from calibrant.llm.heads.fitted import evaluate_table

    folder, paths = _head_and_rest(paths)
    fitted = load(folder, FittedHead) if folder else None
    if model is None:
        names = ("confidence", "permutations", "limit", "shots", "chat")
        _check_unused(paths, *names, "max_new_tokens", "samples", "saved")
        evaluated = evaluate_table(open_table(list(paths)), fitted, level=level or None)
        results: Iterable[Result] = [("tokens", *evaluated, {})]
    else:
        # mistakes in these show before the slow load of the model
        if samples and not saved:
            raise click.UsageError("--samples are for a file of answers: add --save-answers FILE")
        wanted = {"confidence": confidence, "samples": samples, "permutations": permutations}
        wanted["max_new_tokens"] = max_new_tokens
        asked = _read_questions(paths, wanted, saved, chat=chat, **drawing)
        _hide_bars()
        network = load_model(model, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
        _tell_of_base(network[1], chat=chat)
        options = {"fitted": fitted, **wanted}
        results = _measure(network, asked, level or None, saved, **options)
    if form == "json":
        content = [_as_json(*result) for result in results]
        with _until_closed():
            shared._write_json({"sources": content})
        return
    for result in results:
        with _until_closed():
            _print_result(*result)


def _head_and_rest(paths: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """Return the folder of a head, if it comes first, and what is to be measured."""
    from calibrant.artifacts import FILE, FILE_SUFFIXES

    first = paths[0]
    if not (first.endswith(FILE_SUFFIXES) or os.path.exists(os.path.join(first, FILE))):
        return None, paths
    if len(paths) == 1:
        raise click.UsageError(f"{first} is a head: add the tables or questions to measure it on")
    return first, paths[1:]


def _print_result(title: str, evaluations: Evaluations, gains: Gains, biases: Biases) -> None:
    """Print a row for everything that was measured, and what it gains over one temperature."""
    console, first = _new_console(), evaluations["before"]
    console.print(f"{title}: {first.describe()}", style="dim", soft_wrap=True)
    rows = []
    for name, evaluation in evaluations.items():
        cells = {label: shown for label, *shown in evaluation.table()}
        figures = [cells[label][0] for label in ("accuracy", "NLL", "Brier", "AUROC of confidence")]
        rows.append([ROWS.get(name, name), *cells["ECE"], *figures])
    headings = ["", "ECE", first.interval_heading, "accuracy", "NLL", "Brier", "AUROC"]
    console.print(shared._text_table(headings, rows))
    if gains:
        by = "documents" if first.documents else "questions"
        title = f"gain over one temperature (± standard error by {by})"
        console.print(f"\n{title}", style="dim")
        rows = [
            [ROWS.get(name, name), *(f"{of[x].mean:+.4f} ± {of[x].error:.4f}" for x in SCORES)]
            for name, of in gains.items()
        ]
        console.print(shared._text_table(["", *SCORES.values()], rows))
    for name, bias in biases.items():
        console.print(f"{ROWS.get(name, name)}: {bias.describe()}", style="dim", soft_wrap=True)


def _read_questions(
    paths: tuple[str, ...], wanted: Mapping[str, Any], saved: str | None, **drawing: Any
) -> dict[str, QuestionSet]:
    from calibrant.llm.answers.grading import read_question_set
    from calibrant.llm.answers.rows import check_suffix

    if saved:
        check_suffix(saved)
    if drawing["chat"] and shared._was_passed("shots"):
        raise click.UsageError("--chat asks each question alone: leave --shots out")
    asked = {path: read_question_set(path, **drawing) for path in paths}
    for path, questions in asked.items():
        for name in ("confidence", "samples", "max_new_tokens"):
            if wanted[name] and questions.form != "written":
                option = name.replace("_", "-")
                raise click.UsageError(f"--{option} is for written answers, and {path} has choices")
        if wanted["permutations"] and questions.form != "letters":
            raise click.UsageError(f"--permutations is for letters, and {path} has none")
    return asked


def _hide_bars() -> None:
    """Let transformers draw no bars where a verb is quiet, or no terminal is there."""
    if shared._is_quiet() or not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()


def _tell_of_base(tokenizer: Any, *, chat: bool) -> None:
    """Say that a base model gets a bare question, which it continues rather than answers."""
    if chat and not tokenizer.chat_template:
        say(
            "note: the model has no chat template and continues the bare question; for a base "
            "model, leave --chat out of 'llm evaluate' to show solved examples, and write the "
            "whole prompt for 'llm ask --plain'"
        )


def _measure(
    network: tuple[Any, Any],
    asked: Mapping[str, QuestionSet],
    level: float | None,
    saved: str | None,
    **options: Any,
) -> Iterator[Result]:
    """Yield the evaluations of each set of questions when they are there."""
    from calibrant.llm.answers.grading import (
        check_lengths,
        evaluate_graded,
        gains_of_graded,
        grade_questions,
    )
    from calibrant.llm.answers.rows import write_rows

    for questions in asked.values():  # too long a prompt must not cost the answers to others
        named = {name: options[name] for name in ("confidence", "max_new_tokens")}
        check_lengths(*network, questions, **named)
    rows: list[dict[str, Any]] = []
    written = shared._how_written(saved) if saved else ""
    for path, questions in asked.items():
        with InputFiles().working("prompts"):
            graded = grade_questions(*network, questions, **options)
        # the answers with the head, or with one temperature if that was kept
        last = graded[next(name for name in reversed(ROWS) if name in graded)].answers.rows
        if saved:
            rows += last
            write_rows(saved, rows)  # after each set, so that an error costs only those to come
        if count := sum("truncated" in row for row in last):
            say(
                f"note: {count:,} of {len(last):,} answers were truncated and graded as "
                "they are: raise --max-new-tokens"
            )
        biases = {name: each.option_bias for name, each in graded.items() if each.option_bias}
        yield path, evaluate_graded(graded, level=level), gains_of_graded(graded), biases
    if saved:
        rest = f"{saved} --signals all" if options["samples"] else saved
        say(f"{written}: {len(rows):,} answers; next: calibrant llm answers fit {rest} -o MAP")


def _as_json(title: str, evaluations: Evaluations, gains: Gains, biases: Biases) -> dict[str, Any]:
    content = {"source": title, **{name: one.to_dict() for name, one in evaluations.items()}}
    if gains:
        content["gains"] = {
            name: {score: gain._asdict() for score, gain in of.items()}
            for name, of in gains.items()
        }
    if biases:
        content["option_bias"] = {name: bias.to_dict() for name, bias in biases.items()}
    return content


@_verb()
@click.argument("model")
@click.argument("question")
@click.argument("folder", required=False, metavar="[HEAD]")
@_option("--map", "mapped", metavar="MAP", help="Map of 'llm answers fit' to apply.")
@CONFIDENCE
@_option(
    "--min-confidence",
    type=click.FloatRange(0, 1),
    default=0,
    metavar="FRACTION",
    help="Abstain below it.",
)
@_option("--max-new-tokens", **LIMIT, default=64, help="Longest answer, in tokens.")
@_option("--plain", is_flag=True, help="Do not render the question as a chat.")
@_option("--html", metavar="FILE", help="Also write the shaded answer as a page of HTML.")
@DEVICE
@DTYPE
@TRUST
def ask(
    model: str,
    question: str,
    folder: str | None,
    mapped: str | None,
    plain: bool,
    html: str | None,
    device: str | None,
    dtype: str,
    trust_remote_code: bool,
    **options: Any,
) -> None:
    """Answer a question, with each token shaded by its calibrated probability.

    HEAD is a folder of 'llm fit'. The number below the answer is its confidence or, with --map, the
    chance that it is right; a threshold that was saved with the map decides when to abstain.
    The map must be fitted on answers of this model with this head to questions in the same form:
    those that 'llm evaluate --chat --save-answers' writes.

    \b
    Examples:
      calibrant llm ask model/ "What is the capital of Peru?" head
      calibrant llm ask model/ "What is the capital of Peru?" head --map map
    """  # noqa: D301
    from calibrant.artifacts import load
    from calibrant.llm import AnswerCalibrator, FittedHead, load_model
    from calibrant.llm.answers.grading import answer_question, confidence_of
    from calibrant.show.llm import shaded_answer

    if not question.strip():
        raise click.UsageError("the question is empty")
    if math.isnan(options["min_confidence"]):
        raise click.UsageError("--min-confidence must be a number from 0 to 1, got nan")
    # mistakes in these show before the slow load of the model
    calibrator = load(mapped, AnswerCalibrator) if mapped else None
    confidence_of(calibrator, options["confidence"])
    fitted = load(folder, FittedHead) if folder else None
    _hide_bars()
    network = load_model(model, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    _tell_of_base(network[1], chat=not plain)
    options |= {"fitted": fitted, "calibrator": calibrator, "chat": not plain}
    reply, console = answer_question(*network, question, **options), _new_console()
    with _until_closed():
        if not reply.abstains:
            console.print(_shaded(reply))
        elif math.isinf(reply.required):
            console.print("no answer: no confidence met the target error", style="bold")
        else:
            message = f"no answer: the confidence is below {100 * reply.required:.0f} %"
            console.print(message, style="bold")
        most = options["max_new_tokens"]
        end = f", truncated by --max-new-tokens {most}" if reply.truncated else ""
        console.print(f"confidence {100 * reply.confidence:.0f} %{end}")
    if html:
        written = shared._how_written(html)
        shaded_answer(reply, question).write(html)
        say(written)


def _check_unused(paths: tuple[str, ...], *names: str) -> None:
    """Refuse files, and options of questions, where tables are wanted."""
    for name in filter(shared._was_passed, names):
        option = {"saved": "save-answers"}.get(name, name.replace("_", "-"))
        raise click.UsageError(f"--{option} is for questions, which need --model")
    for path in filter(os.path.isfile, paths):
        raise click.UsageError(f"{path} is a file: questions need --model, tables are folders")


def _shaded(answer: Answer) -> Text:
    """Shade the background of improbable tokens red."""
    from rich.text import Text

    shaded = Text()
    for text, prob in zip(answer.token_texts, answer.probs, strict=True):
        doubt = 1 - float(prob)
        style = "" if doubt < 0.1 else f"on rgb({80 + round(130 * doubt)},40,40)"
        shaded.append(printable(text), style=style)
    return shaded


for command in (collect, fit, evaluate, ask, answers, llm_gate.gate, judge.judge):
    llm.add_command(command)
