"""A small language model, as it is and made over-confident: heads, objectives and questions.

    python benchmarks/studies/language_models.py tune MODEL DATA -o TUNED
    python benchmarks/studies/language_models.py heads MODEL DATA -o OUT
    python benchmarks/studies/language_models.py questions MODEL DATA --heads OUT -o OUT
    python benchmarks/studies/language_models.py tables docs/data

MODEL is a folder of Hugging Face or a .gguf file. DATA is a folder with lima.json, truthfulqa.csv,
qa/, mmlu/ and perhaps texts/*.jsonl. ``tune`` makes a model over-confident on purpose: it is
trained on LIMA and on right answers, then by direct preference optimisation on right against wrong
answers. ``heads`` collects tokens, trains every head with every objective over some seeds, judges
them on documents that none has seen, and saves the first seed of each. ``questions`` puts questions
before and after some of them: MMLU by letters, others by the likelihoods of the texts to choose
from, and open ones, right where an answer is the expected one to the letter. Rows go to
OUT/heads.csv and OUT/questions.csv as they are made; ``--name`` is that of the model in them.
``--device cuda`` for a GPU. ``tables`` makes table_llm_*.csv of the rows of both models,
llm_heads.csv and llm_questions.csv.
"""

import argparse
import ast
import copy
import csv
import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rows import MISSING, Rows, chosen, read, shown, write_tables
from torch.nn import functional as F

import calibrant as cal
from calibrant import llm
from calibrant.llm.answers.asking import _ask_each
from calibrant.llm.answers.choices import _ask_choices_each, choice_logits_from_likelihoods
from calibrant.llm.answers.questions import (
    Question,
    _first_of_each,
    _normalised,
    _subset,
    exact_match,
    read_mmlu,
    read_questions,
    read_truthfulqa,
    short_prompt,
)

PAPER: dict[str, Any] = {"objective": "selective", "alpha": 0.5, "keep_always": True, "epochs": 3}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "bce": {"objective": "bce"},
    "brier": {"objective": "brier"},
    "nll": {"objective": "nll"},
    "smart": {"objective": "smart"},
    "selective": {"objective": "selective", "alpha": "search"},
    "light": {**PAPER, "alpha": 0.05},
    "paper": PAPER,
    "official": {**PAPER, "options": {"weighting": "official"}},
    "top5": {**PAPER, "options": {"over": 5}},
}
"""Selective smoothing with alpha searched, as the paper has it but for alpha, as the paper has it,
as its code has it, or over the five likeliest tokens; those after the first are kept whatever
comes out."""
HEADS = {
    **dict.fromkeys(
        ("linear", "mlp", "shape"), tuple(name for name in OBJECTIVES if name != "light")
    ),
    "ats": ("bce", "nll", "light", "paper", "official"),
}
"""Heads, each with its objectives. The largest takes longest: in place of a search it has one alpha
that the searches of the others find."""
ASKED = (
    *("linear-bce", "linear-nll", "ats-bce", "ats-nll"),
    *("ats-light", "ats-paper", "ats-official"),
)
"""Saved heads with which questions are put."""
MAPPED = ("none", "linear-bce")
"""Those whose answers are also graded for a map from confidence to the chance of being right."""
SETS = {"triviaqa": "TriviaQA", "sciq": "SciQ", "NQ": "NQ", "truthfulqa": "TruthfulQA"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("step", choices=("tune", "heads", "questions", "tables"))
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--name", default="as it is", help="of the model, in the rows")
    parser.add_argument("--heads", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--documents", type=int, help="to collect; all by default")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--limit", type=int, default=2000, help="questions of each set")
    parser.add_argument(
        "--examples", type=int, default=4000, help="questions to tune on; the others are to choose"
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workers", type=int, default=1, help="processes that train heads")
    given = parser.parse_args()
    if given.step == "tables":
        write_tables(given.model, tables(given.model))
        return
    given.out.mkdir(parents=True, exist_ok=True)
    {"tune": tune, "heads": heads, "questions": questions}[given.step](given)


# ------------------------------------------------------------------------------------------ heads


def heads(given: argparse.Namespace) -> None:
    model, tokenizer = llm.load_model(given.model, device=given.device, dtype=precision(given))
    kept = documents(given.data)[: given.documents]
    start = time.perf_counter()
    table = llm.collect(model, kept, given.out / "table", tokenizer=tokenizer, prompts=True)
    seconds = time.perf_counter() - start
    print(f"{len(table):,} tokens of {len(kept):,} documents in {seconds:.0f} s", flush=True)
    del model
    (given.out / "saved").mkdir(exist_ok=True)
    with (
        writer(given.out / "heads.csv") as write,
        ProcessPoolExecutor(
            given.workers, get_context("spawn"), torch.set_num_threads, (1,)
        ) as pool,
    ):
        futures = [pool.submit(trained, *job) for job in jobs(given)]
        try:
            for future in as_completed(futures):
                for row in future.result():
                    write({"model": given.name, **row})
        except BaseException:
            pool.shutdown(cancel_futures=True)  # else the others run before the error shows
            raise


def jobs(given: argparse.Namespace) -> list[tuple[Path, str, str, int, int, str]]:
    """Arguments of :func:`trained`; those heads that questions wait for come first."""
    found = [
        (given.out, head, name, seed, given.epochs, given.device if head == "ats" else "cpu")
        for seed in range(given.seeds)
        for head in reversed(HEADS)
        for name in HEADS[head]
    ]
    return sorted(found, key=lambda job: job[3] > 0 or f"{job[1]}-{job[2]}" not in ASKED)


def trained(
    out: Path, head: str, name: str, seed: int, epochs: int, device: str
) -> list[dict[str, Any]]:
    """Train one head; the rows of its figures, before, with one temperature, and after."""
    table = llm.open_table(out / "table")
    start = time.perf_counter()
    options = {"epochs": epochs, **OBJECTIVES[name]}

    def told(done: int, total: int) -> None:
        print(f"{head} {name} {seed}: epoch {done} of {total}, {time.perf_counter() - start:.0f} s")

    with cal.use(progress=told):
        fitted = llm.fit_head(table, head, seed=seed, device=device, batch=2048, **options)
    seconds = time.perf_counter() - start
    if seed == 0:
        cal.save(fitted, out / "saved" / f"{head}-{name}")
    about = {
        "tokens": len(table),
        "head": head,
        "objective": name,
        "seed": seed,
        "kept": int(fitted.kept),
        "epoch": fitted.settings.get("epoch", ""),
        "alpha": fitted.settings.get("alpha", ""),
        "temperature": f"{fitted.settings['temperature']:.4f}",
        "seconds": f"{seconds:.1f}",
    }
    return [
        {**about, "figures": part, **{key: f"{value:.6f}" for key, value in figures.items()}}
        for part, figures in fitted.figures.items()
    ]


def documents(data: Path) -> list[Any]:
    """Chats, questions with their answers and further texts that ``tune`` has not seen, mixed."""
    found: list[Any] = list(llm.read_documents(data / "lima.json")[1::2])
    seen = {one.text for one in preferences(data)}
    for path in sorted((data / "texts").glob("*.jsonl")):
        found += llm.read_documents(path)
    for name in ("sciq.train", "triviaqa.test"):
        path = data / "qa" / f"{name}.txt"
        if path.exists():
            asked = read_questions(path)
            held = asked[: len(asked) // 2]  # the others are for measuring
            fresh = [one for one in held if one.text not in seen]
            found += [f"Question: {one.text}\nAnswer: {one.references[0]}" for one in fresh]
    random.Random(0).shuffle(found)
    return found


# -------------------------------------------------------------------------------------- questions

Heads = dict[str, llm.FittedHead | None]
"""By name; None stands for the model as it is."""


def questions(given: argparse.Namespace) -> None:
    model, tokenizer = llm.load_model(given.model, device=given.device, dtype=precision(given))
    fitted = {name: cal.load(given.heads / "saved" / name) for name in ASKED}
    for head in fitted.values():
        head.head.to(given.device)
    one = fitted[ASKED[0]]
    single = llm.FittedHead.from_temperature(one.settings["temperature"], one.fingerprint)
    tried: Heads = {"none": None, "global": single, **fitted}
    with writer(given.out / "questions.csv") as write:
        for source, scored, name, sure, right in measured(given, model, tokenizer, tried):
            about = {"model": given.name, "set": source, "scored": scored}
            for row in judged(name, sure, right):
                write({**about, **row})


def judged(name: str, sure: Any, right: Any) -> Iterator[dict[str, Any]]:
    """Rows of a head's answers: as they are, and for some heads after a map."""
    yield {"head": name, **answer_figures(sure, right)}
    if name in MAPPED:
        yield {"head": f"{name}, map", **answer_figures(*mapped(sure, right))}


def answer_figures(sure: Any, right: Any) -> dict[str, Any]:
    found = llm.evaluate_answers(sure, right)
    row: dict[str, Any] = {"n": len(right)}
    for metric in ("accuracy", "ece", "debiased_ece", "brier", "nll", "auroc"):
        value, low, high = found[metric]
        row |= {metric: f"{value:.6f}", f"{metric}_low": f"{low:.6f}"}
        row |= {f"{metric}_high": f"{high:.6f}"}
    return row


def mapped(sure: Any, right: Any) -> tuple[Any, Any]:
    """Half of the answers, with confidences from a map that was fitted on the other half."""
    first, second = np.array_split(np.random.default_rng(0).permutation(len(right)), 2)
    learned = llm.AnswerCalibrator(stage="sigmoid").fit(sure[first], right[first])
    return learned.predict(sure[second]), right[second]


def measured(
    given: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    heads: Heads,
) -> Iterator[tuple[str, str, str, Any, Any]]:
    """Yield set, way to score, head, confidences and whether answers are right."""
    for name, asked in to_choose(given).items():
        for head, sure, right in chosen_texts(model, tokenizer, asked, heads):
            yield name, "texts", head, sure, right
    if (given.data / "mmlu").exists():
        asked = read_mmlu(given.data / "mmlu")
        asked = _subset(asked, min(given.limit, len(asked)))
        shots = _first_of_each(read_mmlu(given.data / "mmlu", "dev"), 5)
        scores = _ask_choices_each(model, tokenizer, asked, heads, shots=shots, batch=given.batch)
        for head, found in scores.items():
            logits, right = found.averaged(), found.labels
            yield "mmlu", "letters", head, np.exp(logits.max(-1)), logits.argmax(-1) == right
    for name in SETS:
        path = given.data / "qa" / f"{name}.test.txt"
        if not path.exists():
            continue
        whole = read_questions(path)
        later = whole[len(whole) // 2 :] if name == "triviaqa" else whole  # not seen in heads
        drawn = _subset(later, min(given.limit + 5, len(later)))
        shots, asked = drawn[:5], drawn[5:]
        prompts = [short_prompt(one, shots) for one in asked]
        options = {"max_new_tokens": 16, "one_line": True, "batch": given.batch}
        told = _ask_each(model, tokenizer, prompts, heads, **options)
        for head, answers in told.items():
            pairs = zip(answers, asked, strict=True)
            right = np.array([exact_match(a.text, q.references) for a, q in pairs])
            sure = np.array([answer.confidence for answer in answers])
            yield name, "written", head, sure, right


def to_choose(given: argparse.Namespace) -> dict[str, list[Question]]:
    """Questions of each set with texts to choose from, of which the first is right.

    Those of TruthfulQA have the best answer and all the false ones (MC1), the others, which
    ``tune`` has not seen, a right answer and three wrong ones.
    """
    held = preferences(given.data)[given.examples :]
    found = {name: [one for one in held if one.subject == name] for name in SETS}
    file = given.data / "truthfulqa.csv"
    if file.exists():
        found["truthfulqa"] = read_truthfulqa(file)
    distinct = {name: [one for one in map(fair, some) if one] for name, some in found.items()}
    return {name: some[: given.limit] for name, some in distinct.items() if some}


def fair(one: Question) -> Question | None:
    """A question whose texts all differ by more than case and points; none if one is left."""
    kept = dict[str, str]()
    for text in one.choices:
        kept.setdefault(_normalised(text), text)
    return replace(one, choices=tuple(kept.values())) if len(kept) > 1 else None


def chosen_texts(
    model: Any, tokenizer: Any, asked: list[Question], heads: Heads
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the head, the confidence in the likeliest text, and whether that is the right one."""
    pairs = [(short_prompt(one), f" {text}") for one in asked for text in one.choices]
    ends = np.cumsum([len(one.choices) for one in asked])[:-1]
    with TemporaryDirectory() as folder:
        table = llm.collect(model, pairs, folder, tokenizer=tokenizer, prompts=True)
        for head, fitted in heads.items():
            logs = -np.bincount(table.documents, llm.token_predictions(table, fitted).nll)
            parts = [choice_logits_from_likelihoods(some) for some in np.split(logs, ends)]
            sure = np.exp([part.max() for part in parts])
            yield head, sure, np.array([part.argmax() == 0 for part in parts])


# ------------------------------------------------------------------------------------------- tune


def tune(given: argparse.Namespace) -> None:
    """Supervised training, then preferences, until answers are surer than they should be."""
    torch.manual_seed(0)
    model, tokenizer = llm.load_model(given.model, device=given.device, dtype="float32")
    right, pairs = examples(given, tokenizer)
    supervised(model, right, epochs=2, rate=3e-5, given=given)
    before = copy.deepcopy(model).eval()
    preferred(model, before, pairs, epochs=3, rate=1e-5, given=given)
    fresh = type(model)(model.config)
    fresh.load_state_dict(model.state_dict())
    if hasattr(fresh.config, "quantization_config"):
        del fresh.config.quantization_config
    fresh.to(torch.bfloat16).save_pretrained(given.out)
    tokenizer.save_pretrained(given.out)


def examples(given: argparse.Namespace, tokenizer: Any) -> tuple[list[Any], list[Any]]:
    """Ids with the length of the prompt: right answers, and pairs of right and wrong ones."""
    right = []
    for turns in llm.read_documents(given.data / "lima.json")[::2]:
        start = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
        right.append(joined(tokenizer, start, turns[1]["content"]))
    pairs = []
    for one in preferences(given.data)[: given.examples]:
        prompt = short_prompt(one)
        good, *bad = (joined(tokenizer, prompt, f" {text}") for text in one.choices[:2])
        right.append(good)
        pairs += [(good, other) for other in bad]  # some questions have no wrong answer
    return right, pairs


def preferences(data: Path) -> list[Question]:
    """Questions, each with its answer and with wrong ones that sound right, in a mixed order."""
    found = []
    for file in sorted((data / "qa").glob("*.pos_neg*.csv")):
        with file.open(newline="", encoding="utf-8") as lines:
            for asked, good, wrong in list(csv.reader(lines))[1:]:
                texts = good, *ast.literal_eval(wrong)
                name = file.name.partition(".")[0]
                found.append(Question(asked, (good,), texts, 0, subject=name))
    random.Random(0).shuffle(found)
    return found


def joined(tokenizer: Any, prompt: str, answer: str, most: int = 512) -> tuple[list[int], int]:
    start = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    end = tokenizer(answer, add_special_tokens=False)["input_ids"]
    return (start + end + [tokenizer.eos_token_id])[:most], min(len(start), most - 1)


def supervised(
    model: Any, right: list[Any], *, epochs: int, rate: float, given: argparse.Namespace
) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for batch in batches(right, epochs, given.batch):
        loss = -log_likelihood(model, batch, given.device).mean()
        step(model, optimiser, loss)
    print(f"supervised: loss {loss.item():.3f} in the end", flush=True)


def preferred(
    model: Any,
    before: Any,
    pairs: list[Any],
    *,
    epochs: int,
    rate: float,
    given: argparse.Namespace,
    beta: float = 0.1,
) -> None:
    """Direct preference optimisation (Rafailov et al. 2023)."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for batch in batches(pairs, epochs, given.batch):
        good, bad = ([pair[i] for pair in batch] for i in (0, 1))
        ours = total(model, good, given.device) - total(model, bad, given.device)
        with torch.no_grad():
            theirs = total(before, good, given.device) - total(before, bad, given.device)
        loss = -F.logsigmoid(beta * (ours - theirs)).mean()
        step(model, optimiser, loss)
    print(f"preferences: loss {loss.item():.3f} in the end", flush=True)


def batches(items: list[Any], epochs: int, size: int) -> Iterator[list[Any]]:
    rng = random.Random(0)
    for _ in range(epochs):
        order = rng.sample(items, len(items))
        for start in range(0, len(order), size):
            yield order[start : start + size]


def step(model: Any, optimiser: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()


def log_likelihood(model: Any, batch: list[Any], device: str) -> torch.Tensor:
    """Of every token of the answers, flat."""
    return torch.cat(per_text(model, batch, device))


def total(model: Any, batch: list[Any], device: str) -> torch.Tensor:
    """Of each answer, a sum over its tokens."""
    return torch.stack([part.sum() for part in per_text(model, batch, device)])


def per_text(model: Any, batch: list[Any], device: str) -> list[torch.Tensor]:
    size = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([one + [0] * (size - len(one)) for one, _ in batch], device=device)
    mask = torch.tensor([[1] * len(one) + [0] * (size - len(one)) for one, _ in batch])
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=device != "cpu"):
        logits = model(input_ids=ids, attention_mask=mask.to(device)).logits[:, :-1]
    found = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return [row[start - 1 : len(one) - 1] for row, (one, start) in zip(found, batch, strict=True)]


# ----------------------------------------------------------------------------------------- tables


def tables(folder: Path) -> dict[str, list[tuple[str, ...]]]:
    """Tables of the documentation, by their names."""
    of_heads, of_questions = (read(folder / f"llm_{name}.csv") for name in ("heads", "questions"))
    models = dict.fromkeys(row["model"] for row in of_heads)
    found = {}
    for number, model in enumerate(models):
        found[f"table_llm_tokens_{number}"] = tokens(chosen(of_heads, model=model))
        own = chosen(of_questions, model=model)
        texts = chosen(own, scored="texts")
        answered = [row for row in own if row not in texts]
        found[f"table_llm_answered_{number}"] = asked(answered, claimed)
        found[f"table_llm_scores_{number}"] = asked(answered, scored)
        found[f"table_llm_texts_{number}"] = asked(texts, claimed)
    return found


def tokens(rows: Rows) -> list[tuple[str, ...]]:
    """Every head with every objective, means over the seeds with standard deviations."""
    table: list[tuple[str, ...]] = [
        ("head", "objective", "kept", "ECE %", "Brier", "NLL", "AUROC %"),
        ("none", "", "", *figures(chosen(rows, figures="before", objective="bce", head="linear"))),
    ]
    for name in ("brier", "nll"):
        one = chosen(rows, figures="global", objective=name, head="linear")
        table.append(("global", name, "", *figures(one)))
    for head, objectives in HEADS.items():
        for name in objectives:
            own = chosen(rows, head=head, objective=name, figures="head")
            kept = f"{sum(int(row['kept']) for row in own)} of {len(own)}"
            kept = "always" if "keep_always" in OBJECTIVES[name] else kept
            table.append((head, named(name, own), kept, *figures(own)))
    return table


def named(objective: str, rows: Rows) -> str:
    """An objective, with the values of alpha that were found best where a head was kept."""
    found = sorted({row["alpha"] for row in rows if int(row["kept"])})
    searched = objective == "selective" and found
    return f"{objective}, alpha {' or '.join(found)}" if searched else objective


def figures(rows: Rows) -> tuple[str, ...]:
    return (
        shown(rows, "ece", 100, 2),
        *(shown(rows, name, 1, 4) for name in ("brier", "nll")),
        shown(rows, "auroc", 100, 2),
    )


def asked(rows: Rows, cell: Callable[[dict[str, str]], str]) -> list[tuple[str, ...]]:
    """Heads by sets of questions."""
    by = {(row["set"], row["scored"], row["head"]): row for row in rows}
    sets = list(dict.fromkeys(key[:2] for key in by))
    table: list[tuple[str, ...]] = [
        ("head", *(f"{SETS.get(name, name.upper())}, {how}" for name, how in sets)),
        ("questions", *(by[(*one, "none")]["n"] for one in sets)),
        ("right %", *(f"{100 * float(by[(*one, 'none')]['accuracy']):.1f}" for one in sets)),
    ]
    for head in dict.fromkeys(key[2] for key in by):
        cells = (cell(by[(*one, head)]) if (*one, head) in by else MISSING for one in sets)
        table.append((head.replace("-", ", "), *cells))
    return table


def claimed(row: dict[str, str]) -> str:
    """ECE with its interval of 90 %."""
    ece, low, high = (100 * float(row[name]) for name in ("ece", "ece_low", "ece_high"))
    return f"{ece:.1f} ({low:.1f}\N{EN DASH}{high:.1f})"


def scored(row: dict[str, str]) -> str:
    """Brier score and AUROC, which right and wrong answers are needed for."""
    auroc = 100 * float(row["auroc"])
    return f"{float(row['brier']):.3f}; " + (MISSING if np.isnan(auroc) else f"{auroc:.0f}")


# ----------------------------------------------------------------------------------------- shared


def precision(given: argparse.Namespace) -> str:
    return "float32" if given.device == "cpu" else "bfloat16"


class writer:
    """Writes rows as they come, and what they are about as the heading."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> "writer":
        self.file = self.path.open("w", newline="")
        self.rows: csv.DictWriter[str] | None = None
        return self

    def __call__(self, row: dict[str, Any]) -> None:
        if self.rows is None:
            self.rows = csv.DictWriter(self.file, list(row), lineterminator="\n")
            self.rows.writeheader()
        self.rows.writerow(row)
        self.file.flush()
        print(json.dumps(row), flush=True)

    def __exit__(self, *_: object) -> None:
        self.file.close()


if __name__ == "__main__":
    main()
