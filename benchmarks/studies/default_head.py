"""Which temperature head, with which objective: gains over one temperature, also on other texts.

    python benchmarks/studies/default_head.py NAME=MODEL... --data DATA --work WORK -o docs/data

MODEL is a folder of Hugging Face or a .gguf file. DATA is a folder with lima.json and qa/. For each
model and each corpus (LIMA's answers, short answers to questions) a table to fit and one to measure
on are collected in WORK, unless they are there. Every head is trained on each of the former with
every objective, and measured on each of the latter, whether ``fit_head`` would keep it or not; the
column ``kept`` says what it would do. Rows go to llm_default.csv, and the tables of the
documentation are made of them. The tables of Qwen2.5-Coder-1.5B-Instruct are those of ``--few``,
added with ``--add``.

    python benchmarks/studies/default_head.py -o docs/data

makes the tables of the rows alone.
"""

import argparse
import csv
import math
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rows import MISSING, Rows, chosen, read, write_tables

from calibrant import llm
from calibrant.llm.answers.questions import read_questions
from calibrant.llm.heads import fit
from calibrant.llm.heads.documents import BadDocument, Encoded, _encode_document
from calibrant.llm.heads.tables import TokenTable
from calibrant.metrics.clustered import paired_gain

SIZES = {"lima": (120, 60), "short": (200, 200)}
"""Documents of each corpus to fit and to measure on."""
FEW = {"lima": (57, 60), "short": (100, 100)}
"""The same with ``--few``."""
LENGTH = 128
CANDIDATES = {"linear": ("nll", "bce"), "mlp": ("nll", "bce"), "shape": ("nll", "bce")}
"""Heads that train in seconds, each with its objectives."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", metavar="NAME=MODEL")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--heads", nargs="+", default=list(CANDIDATES))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--few", action="store_true", help="fewer documents, for large models")
    parser.add_argument("--add", action="store_true", help="keep the rows that are there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    models = dict(model.split("=", 1) for model in given.models)
    for name, file in models.items():
        collect(file, given.data, given.work / name, FEW if given.few else SIZES)
    if models:
        measure(given, list(models))
    write_tables(given.out, tables(given.out))


# ------------------------------------------------------------------------------------- collecting


def collect(model: str, data: Path, folder: Path, sizes: Mapping[str, tuple[int, int]]) -> None:
    """Collect a table to fit and one to measure on for each corpus."""
    wanted = {corpus: (folder / f"{corpus}-fit", folder / f"{corpus}-test") for corpus in SIZES}
    missing = [corpus for corpus, paths in wanted.items() if not all(map(complete, paths))]
    if not missing:
        return
    network, tokenizer = llm.load_model(model, dtype="bfloat16")
    for corpus in missing:
        first, second = sizes[corpus]
        texts = encoded(corpus, data, tokenizer)
        for path, part in zip(
            wanted[corpus], (texts[:first], texts[first : first + second]), strict=True
        ):
            start = time.perf_counter()
            table = llm.collect(network, part, path, prompts=True, length=LENGTH, batch=2048)
            print(f"{path}: {len(table):,} tokens in {time.perf_counter() - start:.0f} s")


def complete(path: Path) -> bool:
    try:
        return len(llm.open_table(path)) > 0
    except ValueError:
        return False


def encoded(corpus: str, data: Path, tokenizer: Any) -> list[Encoded]:
    """Documents of a corpus, in random order; of a base model prompts with answers, not chats."""
    roles = ("user", "assistant")
    documents = [
        [{"role": role, "content": text} for role, text in zip(roles, pair, strict=True)]
        if tokenizer.chat_template
        else (f"Question: {pair[0]}\nAnswer:", f" {pair[1]}\n")
        for pair in (instructions(data) if corpus == "lima" else answers(data))
    ]
    random.Random(0).shuffle(documents)
    found = []
    for document in documents[: 2 * sum(SIZES[corpus])]:
        try:
            text = _encode_document(document, corpus, tokenizer, LENGTH)
        except BadDocument:  # an answer is empty
            continue
        found += [text] if len(text.targets) else []  # nothing of the answer is within the length
    return found


def instructions(data: Path) -> list[tuple[str, str]]:
    chats = llm.read_documents(data / "lima.json")
    return [(chat[0]["content"], chat[1]["content"]) for chat in chats if len(chat) == 2]


def answers(data: Path) -> list[tuple[str, str]]:
    asked = read_questions(data / "qa" / "triviaqa.test.txt")[:3000]
    asked += read_questions(data / "qa" / "sciq.test.txt")
    return [(question.text, question.references[0]) for question in asked]


# -------------------------------------------------------------------------------------- measuring


def measure(given: argparse.Namespace, models: list[str]) -> None:
    """Write a row for each head and each table that it is measured on."""
    vars(fit)["STANDARD_ERRORS"] = -math.inf  # keep every head, to see what it does
    writer: csv.DictWriter[str] | None = None
    with (given.out / "llm_default.csv").open("a" if given.add else "w", newline="") as file:
        for row in measured(given, models):
            if writer is None:
                writer = csv.DictWriter(file, list(row), lineterminator="\n")
                if not given.add:
                    writer.writeheader()
            writer.writerow(row)
            file.flush()


def measured(given: argparse.Namespace, models: list[str]) -> Iterator[dict[str, Any]]:
    for model in models:
        folder = given.work / model
        tests = {corpus: llm.open_table(folder / f"{corpus}-test") for corpus in SIZES}
        for corpus in SIZES:
            table = llm.open_table(folder / f"{corpus}-fit")
            for head in given.heads:
                for objective in CANDIDATES[head]:
                    for seed in range(given.seeds):
                        about = {"model": model, "fit": corpus, "head": head}
                        about |= {"objective": objective, "seed": seed}
                        yield from trained(table, tests, about)


def trained(
    table: TokenTable, tests: dict[str, TokenTable], about: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Train one head, and yield its figures on each table."""
    start = time.perf_counter()
    fitted = llm.fit_head(table, about["head"], about["objective"], seed=about["seed"])
    seconds = time.perf_counter() - start
    settings = fitted.settings
    one = llm.FittedHead.from_temperature(settings["temperature"], table.fingerprint)
    clear = settings["gain"] > 2 * settings["standard_error"]
    for name, test in tests.items():
        tried = {"before": None, "global": one, "head": fitted}
        told = {key: llm.token_predictions(test, each) for key, each in tried.items()}
        row = {**about, "test": name, "documents": len(set(test.documents)), "tokens": len(test)}
        row |= {"kept": int(fitted.kept and clear), "seconds": f"{seconds:.1f}"}
        for score, own in told["head"].scores().items():
            simple = told["global"].scores()[score]
            gain = paired_gain(simple, own, test.documents, told["head"].weight)
            row |= {score: f"{gain.mean:.6f}", f"{score}_error": f"{gain.error:.6f}"}
        row |= {f"ece_{key}": f"{each.figures()['ece']:.5f}" for key, each in told.items()}
        print(row, flush=True)
        yield row


# ----------------------------------------------------------------------------------------- tables


def tables(folder: Path) -> dict[str, list[tuple[str, ...]]]:
    """Tables of the documentation, by their names."""
    rows = read(folder / "llm_default.csv")
    same = [row for row in rows if row["fit"] == row["test"]]
    other = [row for row in rows if row["fit"] != row["test"]]
    return {"table_llm_default": summary(same, other), "table_llm_default_each": each(rows)}


def summary(same: Rows, other: Rows) -> list[tuple[str, ...]]:
    """Heads by how much they gain, on texts of the kind that they were trained on and on others."""
    names = ("NLL gain", "Brier gain", "ECE %")
    heading = ("head", "objective", "kept", *names, *(f"{name}, other texts" for name in names))
    table: list[tuple[str, ...]] = [heading]
    for objective in ("nll", "bce"):
        pair = [chosen(rows, head="linear", objective=objective) for rows in (same, other)]
        ece = [f"{np.mean([100 * float(row['ece_global']) for row in rows]):.2f}" for rows in pair]
        score = "nll" if objective == "nll" else "brier"
        table.append(("global", score, "", MISSING, MISSING, ece[0], MISSING, MISSING, ece[1]))
    for head, objectives in CANDIDATES.items():
        for objective in objectives:
            mine, theirs = (chosen(rows, head=head, objective=objective) for rows in (same, other))
            if mine:
                kept = f"{sum(int(row['kept']) for row in mine)} of {len(mine)}"
                table.append((head, objective, kept, *counted(mine), *counted(theirs)))
    return table


def counted(rows: Rows) -> list[str]:
    """Mean gains, with the significant ones counted, and the mean ECE."""
    cells = []
    for score in ("nll", "brier"):
        mean = [float(row[score]) for row in rows]
        error = [float(row[f"{score}_error"]) for row in rows]
        pairs = list(zip(mean, error, strict=True))
        up, down = sum(g > 2 * e for g, e in pairs), sum(g < -2 * e for g, e in pairs)
        cells.append(f"{np.mean(mean):+.4f} ({up} up, {down} down of {len(rows)})")
    ece = [100 * float(row["ece_head"]) for row in rows]
    return [*cells, f"{np.mean(ece):.2f}"]


def each(rows: Rows) -> list[tuple[str, ...]]:
    """Gains in likelihood of each head, for each model and pair of corpora."""
    heads = [head for head in CANDIDATES if chosen(rows, head=head, objective="nll")]
    heading = ("model", "trained on", "measured on", "ECE %: as it is", "one temperature", *heads)
    table: list[tuple[str, ...]] = [heading]
    first = chosen(rows, seed="0", objective="nll")
    keys = dict.fromkeys((row["model"], row["fit"], row["test"]) for row in first)
    for model, corpus, test in keys:
        own = chosen(first, model=model, fit=corpus, test=test)
        cells = []
        for head in heads:
            (row,) = chosen(own, head=head)
            cells.append(f"{float(row['nll']):+.4f} ± {float(row['nll_error']):.4f}")
        before, one = (f"{100 * float(own[0][f'ece_{k}']):.2f}" for k in ("before", "global"))
        table.append((model, corpus, test, before, one, *cells))
    return table


if __name__ == "__main__":
    main()
