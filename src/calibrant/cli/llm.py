"""The verbs llm collect, fit, evaluate and ask."""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

import click

from calibrant.cli.shared import (
    AS_JSON,
    LEVEL,
    SET,
    how_written,
    interval_heading,
    method_options,
    new_console,
    progress_bar,
    say,
    text_table,
    until_closed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.text import Text

    from calibrant._core.checks import FloatArray
    from calibrant.llm import Answer, FittedHead, Question
    from calibrant.metrics.evaluation import Evaluation

DEVICE = click.option("--device", help="As torch names it.  [default: where the model is]")
DTYPE = click.option("--dtype", default="auto", show_default=True, help="Precision of the model.")
HEAD = click.option("--head", "folder", metavar="DIR", help="Head of 'llm fit'.")
RULES = ("geometric", "product", "arithmetic", "first", "minimum", "p_true")
HOW = click.option(
    "--how",
    type=click.Choice(RULES),
    help="Confidence of a written answer: from its tokens, or asked for in a second prompt "
    "(p_true).  [default: geometric]",
)


@click.group()
def llm() -> None:
    """Calibrate language models: token by token, and answer by answer."""


@llm.command()
@click.argument("model")
@click.argument("documents")
@click.option("-o", "--out", required=True, metavar="DIR", help="Folder of the table.")
@click.option("--length", default=1024, show_default=True, help="Tokens of a document at most.")
@click.option("--limit", type=click.IntRange(1), help="Use the first documents only.")
@click.option("--batch", default=8192, show_default=True, help="Tokens of a batch.")
@click.option("--prompts", is_flag=True, help="Keep states of prompts too, for the decoder head.")
@DEVICE
@DTYPE
def collect(
    model: str,
    documents: str,
    out: str,
    length: int,
    limit: int | None,
    batch: int,
    prompts: bool,
    device: str | None,
    dtype: str,
) -> None:
    """Run a model over documents once, and keep what a temperature can do to each token.

    MODEL is a folder of Hugging Face, a name on its hub, or a .gguf file. DOCUMENTS is .jsonl,
    .json or .txt: chats, instructions with outputs, prompts with answers, or texts. Only what the
    assistant says counts, or the answer, or all of a text. A run that was stopped goes on after
    its last whole shard of 65,536 tokens.

    \b
    Examples:
      calibrant llm collect model/ chats.jsonl -o table
    """  # noqa: D301
    from calibrant.llm import load_model, read_documents
    from calibrant.llm.tokens.collect import collect as run

    texts = read_documents(documents)[:limit]
    network, tokenizer = load_model(model, device=device, dtype=dtype)
    with progress_bar("tokens") as progress:
        table = run(
            network,
            texts,
            out,
            tokenizer=tokenizer,
            length=length,
            batch=batch,
            prompts=prompts,
            progress=progress,
        )
    used = len(set(table.documents.tolist()))  # one of several processes has a share of them
    count = f"{used:,}" if used == len(texts) else f"{used:,} of {len(texts):,}"
    say(f"{out}: {len(table):,} tokens of {count} documents; next: calibrant llm fit {out} -o HEAD")


@llm.command()
@click.argument("tables", nargs=-1, required=True, metavar="TABLE...")
@click.option(
    "--head", default="linear", show_default=True, help="global, linear, mlp, shape or decoder."
)
@click.option(
    "--objective",
    default="bce",
    show_default=True,
    help="bce, brier, nll, selective (the paper's) or smart.",
)
@SET
@click.option("--epochs", default=40, show_default=True, help="Epochs at most.")
@click.option("--always", is_flag=True, help="Train for all epochs, and keep the head in any case.")
@click.option("--seed", default=0, show_default=True, help="Of the split and the training.")
@click.option("--device", default="cpu", show_default=True, help="Where the head is trained.")
@click.option("-o", "--out", required=True, metavar="DIR", help="Folder to save in.")
@AS_JSON
def fit(
    tables: tuple[str, ...],
    head: str,
    objective: str,
    options: tuple[str, ...],
    epochs: int,
    always: bool,
    seed: int,
    device: str,
    out: str,
    as_json: bool,
) -> None:
    """Train a head that sets the temperature of each token, from tables of 'llm collect'.

    It is kept only if it beats one temperature for all on documents that it has not seen;
    otherwise that temperature is saved, and the reason told. --set has options of the head.

    \b
    Examples:
      calibrant llm fit table -o head
      calibrant llm fit table --head mlp --objective selective -o head
    """  # noqa: D301
    from calibrant.artifacts import save
    from calibrant.llm import fit_head, open_table

    with progress_bar("epochs") as progress:
        fitted = fit_head(
            open_table(list(tables)),
            head.lower(),
            objective.lower(),
            options=method_options(options),
            epochs=epochs,
            always=always,
            seed=seed,
            device=device,
            progress=progress,
        )
    written = how_written(out, "saved in")
    save(fitted, out)
    with until_closed():
        if as_json:
            about = {"kept": fitted.kept, "reasons": fitted.reasons, "settings": fitted.settings}
            click.echo(json.dumps({**about, "figures": fitted.figures}, indent=2))
        else:
            _print_fit(fitted)
    say(f"{written}; to use it: calibrant llm ask MODEL QUESTION --head {out}")


@llm.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@HEAD
@click.option("--model", metavar="MODEL", help="Model that answers; SOURCES are questions then.")
@click.option("--limit", type=click.IntRange(1), help="Draw so many questions.")
@click.option(
    "--shots",
    type=click.IntRange(0),
    default=5,
    show_default=True,
    help="Solved examples before a question.",
)
@HOW
@click.option("--seed", default=0, show_default=True, help="Of the questions drawn.")
@LEVEL
@AS_JSON
@DEVICE
@DTYPE
def evaluate(
    sources: tuple[str, ...],
    folder: str | None,
    model: str | None,
    limit: int | None,
    shots: int,
    how: str | None,
    seed: int,
    level: float,
    as_json: bool,
    device: str | None,
    dtype: str,
) -> None:
    """Measure the confidence of a language model, before and after a head.

    SOURCE is a table of 'llm collect', whose tokens are measured, with intervals for documents.
    With --model it is a folder of MMLU, TruthfulQA.csv, or a text file of questions and answers;
    the model answers them, and right is an exact match or the right letter.

    \b
    Examples:
      calibrant llm evaluate other_table --head head
      calibrant llm evaluate triviaqa.txt --model model/ --head head --limit 200
    """  # noqa: D301
    from calibrant.artifacts import load
    from calibrant.llm import FittedHead

    fitted = load(folder, FittedHead) if folder else None
    intervals = level or None
    if model is None:
        _check_unused("how", "limit", "shots")
        for source in filter(os.path.isfile, sources):
            raise click.UsageError(
                f"{source} is a file: questions need --model, tables are folders"
            )
        _show([("tokens", _measured_tokens(list(sources), fitted, intervals))], as_json)
        return
    from calibrant.llm import load_model

    # before the model is read, which takes longer than finding a mistake in them
    asked = [_questions(source, limit, shots, seed) for source in sources]
    for source, (questions, _) in zip(sources, asked, strict=True):
        if how and questions[0].choices:
            raise click.UsageError(
                f"--how is for written answers, and {source} has choices: leave it away"
            )
    network = load_model(model, device=device, dtype=dtype)
    measured = (_measured_answers(network, *one, fitted, how, intervals) for one in asked)
    _show(zip(sources, measured, strict=True), as_json)


@llm.command()
@click.argument("model")
@click.argument("question")
@HEAD
@click.option(
    "--answers", "mapped", metavar="FILE", help="Saved AnswerCalibrator: the chance of being right."
)
@HOW
@click.option("--least", type=click.FloatRange(0, 1), help="Abstain below this confidence.")
@click.option("--most", type=click.IntRange(1), default=64, show_default=True, help="Tokens.")
@click.option("--plain", is_flag=True, help="Do not put the question into the form of a chat.")
@DEVICE
@DTYPE
def ask(
    model: str,
    question: str,
    folder: str | None,
    mapped: str | None,
    how: str | None,
    least: float | None,
    most: int,
    plain: bool,
    device: str | None,
    dtype: str,
) -> None:
    """Answer a question, with each token shaded by its calibrated probability.

    The number below the answer is the geometric mean of its tokens, or what --how says or, with
    --answers, the chance that it is right; the threshold that was saved with it says when to
    abstain.

    \b
    Examples:
      calibrant llm ask model/ "What is the capital of Peru?" --head head --least 0.5
      calibrant llm ask model/ "What is the capital of Peru?" --how p_true --answers mapped.json
    """  # noqa: D301
    from calibrant.artifacts import load
    from calibrant.llm import (
        AnswerCalibrator,
        FittedHead,
        Question,
        ask as answered,
        chat_prompt,
        load_model,
    )

    if not question.strip():
        raise click.UsageError("the question is empty")
    if least is not None and math.isnan(least):
        raise click.UsageError("--least must be a number from 0 to 1, got nan")
    # before the model is read, which takes longer than finding a mistake in them
    calibrator = load(mapped, AnswerCalibrator) if mapped else None
    if calibrator is not None:
        _check_rule(how, calibrator.how)
    fitted = load(folder, FittedHead) if folder else None
    network, tokenizer = load_model(model, device=device, dtype=dtype)

    def form(text: str) -> str:
        return text if plain else chat_prompt(tokenizer, text)

    (found,) = answered(network, tokenizer, [form(question)], fitted=fitted, most=most)
    (sure,) = _sure((network, tokenizer), [Question(question, ())], [found], fitted, how, form)
    needed = 0.0 if least is None else least
    if calibrator is not None:
        sure = float(calibrator.predict([found.probs] if calibrator.how else [sure])[0])
        if calibrator.threshold_ is not None:
            needed = max(needed, calibrator.threshold_.threshold)
    console = new_console()
    with until_closed():
        if sure < needed:
            console.print(_withheld(needed), style="bold")
        else:
            console.print(_shaded(found))
        cut = f", of the first {most} tokens: --most cut the answer" if found.cut else ""
        console.print(f"confidence {100 * sure:.0f} %{cut}")


def _withheld(needed: float) -> str:
    if math.isinf(needed):
        return "no answer: no confidence was enough for the error that --answers is to keep"
    return f"no answer: the confidence is below the {100 * needed:.0f} % asked for"


def _check_unused(*names: str) -> None:
    """See that no option of questions was given for tables."""
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"--{name} is for questions that a model answers: name it by --model, or leave "
                f"--{name} away to measure the tokens of a table"
            )


def _check_rule(how: str | None, fitted_on: str | None) -> None:
    """See that a saved map gets what it was fitted on."""
    if fitted_on is None and how is None:
        raise click.UsageError(
            "--answers was fitted on confidences from elsewhere: say which, by --how"
        )
    if fitted_on is not None and how not in (None, fitted_on):
        raise click.UsageError(
            f"--answers was fitted on {fitted_on} confidences, --how asks for {how}: leave it away"
        )


def _sure(
    network: tuple[Any, Any],
    questions: Sequence[Question],
    answers: Sequence[Answer],
    fitted: FittedHead | None,
    how: Any,
    form: Callable[[str], str] = str,
) -> FloatArray:
    """Confidence of each answer; ``form`` makes a prompt of a text that asks."""
    from calibrant.llm import answer_confidence, ask_true, verdict_prompt

    if how != "p_true":
        return answer_confidence([answer.probs for answer in answers], how or "geometric")
    pairs = zip(questions, answers, strict=True)
    prompts = [form(verdict_prompt(question, answer.text)) for question, answer in pairs]
    return ask_true(*network, prompts, fitted=fitted)


def _measured_tokens(
    tables: list[str], fitted: FittedHead | None, level: float | None
) -> dict[str, Evaluation]:
    from calibrant.llm import evaluate_tokens, open_table
    from calibrant.llm.heads.fit import token_claims

    table = open_table(tables)
    found: dict[str, Evaluation] = {}
    for name, head in _before_and_after(fitted).items():
        claims = token_claims(table, head)
        found[name] = evaluate_tokens(
            claims.confidence, claims.correct, table.documents, nll=claims.nll, level=level
        )
    return found


def _before_and_after(fitted: FittedHead | None) -> dict[str, FittedHead | None]:
    return {"before": None} if fitted is None else {"before": None, "after": fitted}


def _questions(
    source: str, limit: int | None, shots: int, seed: int
) -> tuple[list[Question], list[Question]]:
    """Questions to put, and solved ones to show before them."""
    from pathlib import Path

    from calibrant.llm import read_mmlu, read_questions, read_truthfulqa, subset
    from calibrant.llm.answers.questions import first_of_each

    if Path(source).is_dir():
        solved = first_of_each(read_mmlu(source, "dev"), shots)
        whole = read_mmlu(source, "test")
        return subset(whole, min(limit or len(whole), len(whole)), seed=seed), solved
    read = read_truthfulqa if source.endswith(".csv") else read_questions
    whole = read(source)
    if len(whole) <= shots:
        raise click.UsageError(
            f"{source} has {len(whole)} questions, and --shots takes {shots} of them as solved "
            "examples: lower --shots, so that some are left to ask"
        )
    drawn = subset(whole, min((limit or len(whole)) + shots, len(whole)), seed=seed)
    return drawn[shots:], drawn[:shots]


def _measured_answers(
    network: tuple[Any, Any],
    questions: list[Question],
    solved: list[Question],
    fitted: FittedHead | None,
    how: str | None,
    level: float | None,
) -> dict[str, Evaluation]:
    import numpy as np

    from calibrant.llm import (
        ask_choices_each,
        ask_each,
        evaluate_answers,
        exact_match,
        short_prompt,
    )

    heads = _before_and_after(fitted)
    found: dict[str, Evaluation] = {}
    if questions[0].choices:
        with progress_bar("questions") as progress:
            scores, labels = ask_choices_each(
                *network, questions, heads, shots=solved, progress=progress
            )
        for name, logits in scores.items():
            sure, right = np.exp(logits.max(-1)), logits.argmax(-1) == labels
            found[name] = evaluate_answers(sure, right, level=level)
        return found
    prompts = [short_prompt(question, solved) for question in questions]
    with progress_bar("questions") as progress:
        given = ask_each(*network, prompts, heads, progress=progress)
    for name, answers in given.items():
        pairs = zip(answers, questions, strict=True)
        right = np.array([exact_match(a.text, q.references) for a, q in pairs])
        sure = _sure(network, questions, answers, heads[name], how)
        found[name] = evaluate_answers(sure, right, level=level)
    return found


def _show(measured: Iterable[tuple[str, dict[str, Evaluation]]], as_json: bool) -> None:
    """Print each source once it is measured; as JSON one object, or a list of several."""
    if not as_json:
        for title, found in measured:
            _print_figures(title, found)
        return
    told = [
        {"source": title, **{name: figures.to_dict() for name, figures in found.items()}}
        for title, found in measured
    ]
    with until_closed():
        click.echo(json.dumps(told if len(told) > 1 else told[0], indent=2))


def _print_figures(title: str, found: dict[str, Evaluation]) -> None:
    from rich.table import Table

    with until_closed():
        console = new_console()
        first = next(iter(found.values()))
        console.print(f"{title}: {first.describe()}", style="dim", soft_wrap=True)
        table = Table(box=None, pad_edge=False)
        table.add_column("")
        for name, figures in found.items():
            table.add_column(name, justify="right")
            table.add_column(interval_heading(figures), justify="right", style="dim")
        for rows in zip(*(figures.table() for figures in found.values()), strict=True):
            cells = (cell for _, value, interval in rows for cell in (value, interval))
            table.add_row(rows[0][0], *cells)
        console.print(table)


def _print_fit(fitted: FittedHead) -> None:
    console = new_console()
    console.print(fitted.reasons, soft_wrap=True)
    names = list(next(iter(fitted.figures.values())))
    rows = [(row, *(f"{of[name]:.4f}" for name in names)) for row, of in fitted.figures.items()]
    console.print(text_table(["on held-out documents", *names], rows))


def _shaded(answer: Answer) -> Text:
    """The tokens on backgrounds from red, for improbable ones, to none."""
    from rich.text import Text

    found = Text()
    for piece, prob in zip(answer.pieces, answer.probs, strict=True):
        doubt = 1 - float(prob)
        style = "" if doubt < 0.1 else f"on rgb({80 + round(130 * doubt)},40,40)"
        found.append(piece, style=style)
    return found
