"""A small language model, as it is and made over-confident: heads, objectives and questions.

    python benchmarks/studies/language_models.py tune MODEL DATA -o TUNED
    python benchmarks/studies/language_models.py heads MODEL DATA -o OUT
    python benchmarks/studies/language_models.py questions MODEL DATA --heads OUT -o OUT
    python benchmarks/studies/language_models.py tables docs/data

MODEL is a folder of Hugging Face or a .gguf file. DATA is a folder with lima.json, qa/, mmlu/ and
perhaps texts/*.jsonl. ``tune`` makes a model over-confident on purpose: it is trained on LIMA and
on right answers, then by direct preference optimisation on right against wrong answers. ``heads``
collects tokens, trains every head with every objective over some seeds, judges them on documents
that none has seen, and saves the first seed of each. ``questions`` puts questions before and after
some of them. Rows go to OUT/heads.csv and OUT/questions.csv as they are made; ``--name`` is that of
the model in them. ``--device cuda`` for a GPU. ``tables`` makes table_llm_*.csv of the rows of both
models, llm_heads.csv and llm_questions.csv.
"""

import argparse
import ast
import copy
import csv
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rows import Rows, chosen, read, shown, write_tables
from torch.nn import functional as F

from calibrant import llm
from calibrant.llm.questions import first_of_each

PAPER: dict[str, Any] = {"objective": "selective", "alpha": 0.5, "always": True, "epochs": 3}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "bce": {"objective": "bce"},
    "brier": {"objective": "brier"},
    "nll": {"objective": "nll"},
    "smart": {"objective": "smart"},
    "selective": {"objective": "selective"},
    "paper": PAPER,
    "official": {**PAPER, "objective_options": {"weighting": "official"}},
    "top5": {**PAPER, "objective_options": {"over": 5}},
}
"""Selective smoothing with alpha searched, as the paper has it, as its code has it, or over the
five likeliest tokens; these three are kept whatever comes out."""
HEADS = {
    **dict.fromkeys(("linear", "mlp", "shape"), tuple(OBJECTIVES)),
    "decoder": ("bce", "nll", "paper", "official"),
}
"""Heads, each with its objectives; the largest takes longest, so that it has fewer."""
ASKED = ("linear-bce", "shape-bce", "decoder-bce", "decoder-paper", "decoder-official")
"""Saved heads with which questions are put."""
SETS = ("triviaqa", "sciq", "NQ", "truthfulqa")


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
    parser.add_argument("--examples", type=int, help="of each kind, to tune on")
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
    jobs = [
        (given.out, head, name, seed, given.epochs, given.device if head == "decoder" else "cpu")
        for seed in range(given.seeds)
        for head in reversed(HEADS)
        for name in HEADS[head]
    ]
    # those that questions wait for come first
    jobs.sort(key=lambda job: job[3] > 0 or f"{job[1]}-{job[2]}" not in ASKED)
    with (
        writer(given.out / "heads.csv") as write,
        ProcessPoolExecutor(
            given.workers, get_context("spawn"), torch.set_num_threads, (1,)
        ) as pool,
    ):
        futures = [pool.submit(trained, *job) for job in jobs]
        try:
            for future in as_completed(futures):
                for row in future.result():
                    write({"model": given.name, **row})
        except BaseException:
            pool.shutdown(cancel_futures=True)  # else the others run before the error shows
            raise


def trained(
    out: Path, head: str, name: str, seed: int, epochs: int, device: str
) -> list[dict[str, Any]]:
    """Train one head; the rows of its figures, before, with one temperature, and after."""
    table = llm.open_table(out / "table")
    start = time.perf_counter()
    options = {"epochs": epochs, **OBJECTIVES[name]}

    def told(done: int, total: int) -> None:
        print(f"{head} {name} {seed}: epoch {done} of {total}, {time.perf_counter() - start:.0f} s")

    fitted = llm.fit_head(
        table, head, seed=seed, device=device, batch=2048, progress=told, **options
    )
    seconds = time.perf_counter() - start
    if seed == 0:
        llm.save_head(fitted, out / "saved" / f"{head}-{name}")
    about = {
        "tokens": len(table),
        "head": head,
        "objective": name,
        "seed": seed,
        "kept": int(fitted.kept),
        "epoch": fitted.settings["epoch"],
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
    seen = {row[0] for row in preferences(data)}
    for path in sorted((data / "texts").glob("*.jsonl")):
        found += llm.read_documents(path)
    for name in ("sciq.train", "triviaqa.test"):
        path = data / "qa" / f"{name}.txt"
        if path.exists():
            asked = llm.read_questions(path)
            held = asked[: len(asked) // 2]  # the others are for measuring
            fresh = [one for one in held if one.text not in seen]
            found += [f"Question: {one.text}\nAnswer: {one.references[0]}" for one in fresh]
    random.Random(0).shuffle(found)
    return found


# -------------------------------------------------------------------------------------- questions


def questions(given: argparse.Namespace) -> None:
    model, tokenizer = llm.load_model(given.model, device=given.device, dtype=precision(given))
    fitted = {name: llm.load_head(given.heads / "saved" / name) for name in ASKED}
    one = fitted[ASKED[0]]
    single = llm.FittedHead.of_temperature(one.settings["temperature"], one.mark)
    tried: dict[str, llm.FittedHead | None] = {"none": None, "global": single, **fitted}
    with writer(given.out / "questions.csv") as write:
        for source, name, sure, right in measured(given, model, tokenizer, tried):
            found = llm.evaluate_answers(sure, right)
            row: dict[str, Any] = {"model": given.name, "set": source, "head": name}
            row["n"] = len(right)
            for metric in ("accuracy", "ece", "debiased_ece", "brier", "nll", "auroc"):
                value, low, high = found[metric]
                row |= {metric: f"{value:.6f}", f"{metric}_low": f"{low:.6f}"}
                row |= {f"{metric}_high": f"{high:.6f}"}
            write(row)


def measured(
    given: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    heads: dict[str, llm.FittedHead | None],
) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield the set, the head, the confidences and whether answers are right."""
    if (given.data / "mmlu").exists():
        asked = llm.read_mmlu(given.data / "mmlu")
        asked = llm.subset(asked, min(given.limit, len(asked)))
        shots = first_of_each(llm.read_mmlu(given.data / "mmlu", "dev"), 5)
        scores, labels = llm.ask_choices_each(
            model, tokenizer, asked, heads, shots=shots, batch=given.batch
        )
        for head, logits in scores.items():
            yield "mmlu", head, np.exp(logits.max(-1)), logits.argmax(-1) == labels
    for name in SETS:
        path = given.data / "qa" / f"{name}.test.txt"
        if not path.exists():
            continue
        whole = llm.read_questions(path)
        later = whole[len(whole) // 2 :] if name == "triviaqa" else whole  # not seen in heads
        drawn = llm.subset(later, min(given.limit + 5, len(later)))
        shots, asked = drawn[:5], drawn[5:]
        prompts = [llm.short_prompt(one, shots) for one in asked]
        told = llm.ask_each(model, tokenizer, prompts, heads, most=16, batch=given.batch)
        for head, answers in told.items():
            pairs = zip(answers, asked, strict=True)
            right = np.array([llm.exact_match(a.text, q.references) for a, q in pairs])
            yield name, head, np.array([answer.confidence for answer in answers]), right


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
    for turns in llm.read_documents(given.data / "lima.json")[::2][: given.examples]:
        start = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
        right.append(joined(tokenizer, start, turns[1]["content"]))
    pairs = []
    for question, good, wrong in preferences(given.data)[: given.examples]:
        prompt = llm.short_prompt(llm.Question(question, (good,)))
        kept = joined(tokenizer, prompt, f" {good}")
        right.append(kept)
        pairs += [(kept, joined(tokenizer, prompt, f" {one}")) for one in wrong]
    return right, pairs


def preferences(data: Path) -> list[tuple[str, str, list[str]]]:
    """Questions, each with its answer and a wrong one that sounds right."""
    found = []
    for file in sorted((data / "qa").glob("*.pos_neg*.csv")):
        with file.open(newline="", encoding="utf-8") as lines:
            rows = list(csv.reader(lines))[1:]
        found += [(asked, good, ast.literal_eval(wrong)[:1]) for asked, good, wrong in rows]
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
        found[f"table_llm_questions_{number}"] = asked(chosen(of_questions, model=model))
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
            kept = "always" if "always" in OBJECTIVES[name] else kept
            table.append((head, named(name, own), kept, *figures(own)))
    return table


def named(objective: str, rows: Rows) -> str:
    """An objective, with the values of alpha that were found best."""
    found = sorted({row["alpha"] for row in rows})
    return f"{objective}, alpha {' or '.join(found)}" if objective == "selective" else objective


def figures(rows: Rows) -> tuple[str, ...]:
    return (
        shown(rows, "ece", 100, 2),
        *(shown(rows, name, 1, 4) for name in ("brier", "nll")),
        shown(rows, "auroc", 100, 2),
    )


def asked(rows: Rows) -> list[tuple[str, ...]]:
    """Every set of questions, before and with each head; intervals of 90 %."""
    heading = ("set", "questions", "right %", "head", "ECE %", "interval", "Brier", "AUROC %")
    table: list[tuple[str, ...]] = [heading]
    for row in rows:
        first = (row["set"], row["n"], f"{100 * float(row['accuracy']):.1f}")
        low, high = (f"{100 * float(row[f'ece_{end}']):.1f}" for end in ("low", "high"))
        table.append(
            (
                *(first if row["head"] == "none" else ("", "", "")),
                row["head"].replace("-", ", "),
                f"{100 * float(row['ece']):.1f}",
                f"{low} to {high}",
                f"{float(row['brier']):.4f}",
                f"{100 * float(row['auroc']):.1f}",
            )
        )
    return table


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
