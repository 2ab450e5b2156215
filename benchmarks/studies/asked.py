"""Questions put to a real model, with the material of every signal of confidence.

    python benchmarks/studies/asked.py MODEL DATA -o OUT --name NAME

MODEL is a folder of Hugging Face or a .gguf file; DATA has lima.json and qa/SET.test.txt. A global
and a linear temperature head are fitted to the tokens of LIMA's answers. Then each set is asked in
the short form with five solved examples. A row of OUT/SET.NAME.jsonl has the greedy answer, whether
it equals a reference, the probabilities of its tokens as they are (``token_probs``) and with each
head (``token_probs_global``, ``token_probs_linear``), ``samples`` drawn at temperature 1, the
verdict P(True) of the model (``signals``) and what it says when asked for a percentage
(``stated``). ``--device cuda`` for a GPU.
"""

import argparse
import itertools
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from calibrant import llm
from calibrant.llm.answers.asking import _ask_each, ask, chat_prompt, draw_answers
from calibrant.llm.answers.choices import ask_true
from calibrant.llm.answers.grading import QuestionSet, read_question_set
from calibrant.llm.answers.questions import Question, exact_match, short_prompt, verdict_prompt
from calibrant.llm.answers.rows import write_rows
from calibrant.llm.heads.fitted import FittedHead

SETS = ("sciq", "triviaqa", "NQ", "truthfulqa", "wikiqa")
LONGEST = 32
"""Tokens of an answer."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--documents", type=int, default=600, help="of LIMA, for the heads")
    parser.add_argument("--questions", type=int, default=1000, help="of each set, or all")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    model, tokenizer = llm.load_model(given.model, device=given.device)
    heads = fitted_heads(model, tokenizer, given)
    for name in SETS:
        started = time.perf_counter()
        asked = read_question_set(given.data / "qa" / f"{name}.test.txt", limit=given.questions)
        rows = answered(model, tokenizer, asked, heads, given)
        write_rows(given.out / f"{name}.{given.name}.jsonl", rows)
        right = sum(row["correct"] for row in rows)
        taken = time.perf_counter() - started
        print(f"{name}: {len(rows)} answers, {right} right, {taken:.0f} s", flush=True)


def fitted_heads(
    model: Any, tokenizer: Any, given: argparse.Namespace
) -> dict[str, FittedHead | None]:
    """No head, and the heads that the tokens of LIMA give."""
    with TemporaryDirectory() as folder:
        documents = lima(tokenizer, given.data / "lima.json", Path(folder) / "lima.jsonl")
        read = llm.read_documents(documents, limit=given.documents)
        table = llm.collect(model, read, f"{folder}/table", tokenizer=tokenizer, length=512)
        heads: dict[str, FittedHead | None] = {"": None}
        for kind in ("global", "linear"):
            heads[f"_{kind}"] = llm.fit_head(table, kind, device=given.device)
            print(json.dumps({kind: heads[f"_{kind}"].figures}), flush=True)
    return heads


def lima(tokenizer: Any, chats: Path, plain: Path) -> Path:
    """The file of documents: for models without a chat template, questions as plain prompts."""
    if tokenizer.chat_template:
        return chats
    with plain.open("w") as stream:
        for one in json.loads(chats.read_text()):
            prompt = f"Question: {one['instruction']}\nAnswer: "
            stream.write(json.dumps({"prompt": prompt, "answer": one["output"]}) + "\n")
    return plain


def answered(
    model: Any,
    tokenizer: Any,
    asked: QuestionSet,
    heads: dict[str, FittedHead | None],
    given: argparse.Namespace,
) -> list[dict[str, Any]]:
    network: Any = (model, tokenizer)
    prompts = [short_prompt(question, asked.shots) for question in asked.questions]
    short: Any = {"max_new_tokens": LONGEST, "one_line": True, "batch": given.batch}
    answers = _ask_each(*network, prompts, heads, **short)
    # as many rows at once as in the other steps
    short["batch"] = max(1, given.batch // given.samples)
    samples = draw_answers(*network, prompts, samples=given.samples, **short)
    pairs = list(zip(asked.questions, [answer.text for answer in answers[""]], strict=True))
    verdicts = [chat_prompt(tokenizer, verdict_prompt(*pair)) for pair in pairs]
    true = ask_true(*network, verdicts, batch=given.batch)
    percents = [chat_prompt(tokenizer, percent_prompt(*pair)) for pair in pairs]
    stated = ask(*network, percents, max_new_tokens=16, batch=given.batch)
    rows = []
    for i, (question, text) in enumerate(pairs):
        row: dict[str, Any] = {"question": question.text, "answer": text}
        row["references"] = list(question.references)
        row |= {f"token_probs{name}": rounded(made[i].probs) for name, made in answers.items()}
        row |= {"samples": samples[i], "stated": stated[i].text}
        row |= {"signals": {"p_true": round(float(true[i]), 8)}}
        row |= {"model": given.name, "prompt": f"short, {len(asked.shots)} shots"}
        rows.append({**row, "correct": exact_match(text, question.references)})
    return rows


def rounded(probs: Any) -> list[float]:
    """Eight digits, of which none is lost for probabilities below one half."""
    return [float(f"{prob:.8g}") for prob in itertools.chain(probs)]


def percent_prompt(question: Question, answer: str) -> str:
    return (
        f"Question: {question.text}\nProposed answer: {answer}\n"
        "How likely is the proposed answer to be right? State a percentage from 0 to 100, and "
        "nothing else.\nAnswer:"
    )


if __name__ == "__main__":
    main()
