"""A small language model, as it is and made over-confident: heads, objectives and questions.

    python benchmarks/studies/language_models.py tune MODEL DATA -o TUNED
    python benchmarks/studies/language_models.py heads MODEL DATA -o OUT
    python benchmarks/studies/language_models.py questions MODEL DATA --heads OUT -o OUT

MODEL is a folder of Hugging Face or a .gguf file. DATA is a folder with lima.json, qa/, mmlu/ and
perhaps texts/*.jsonl. ``tune`` makes a model over-confident on purpose: it is trained on LIMA and
on right answers, then by direct preference optimisation on right against wrong answers. ``heads``
collects tokens, trains every head with every objective over some seeds, judges them on documents
that none has seen, and saves the first seed of each. ``questions`` puts questions before and after
some of them. Rows go to OUT/heads.csv and OUT/questions.csv as they are made. ``--device cuda``
for a GPU.
"""

import argparse
import ast
import copy
import csv
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from calibrant import llm

OBJECTIVES: dict[str, dict[str, Any]] = {
    "bce": {"objective": "bce"},
    "brier": {"objective": "brier"},
    "nll": {"objective": "nll"},
    "smart": {"objective": "smart"},
    "selective, alpha searched": {"objective": "selective"},
    "selective, alpha 0.5": {"objective": "selective", "alpha": 0.5},
    "selective, top 5": {"objective": "selective", "objective_options": {"over": 5}},
}
HEADS = ("linear", "mlp", "shape")
SETS = ("triviaqa", "sciq", "NQ", "truthfulqa")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("step", choices=("tune", "heads", "questions"))
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--heads", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--documents", type=int, help="to collect; all by default")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--limit", type=int, default=2000, help="questions of each set")
    parser.add_argument("--examples", type=int, help="of each kind, to tune on")
    parser.add_argument("--batch", type=int, default=32)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    {"tune": tune, "heads": heads, "questions": questions}[given.step](given)


# ------------------------------------------------------------------------------------------ heads


def heads(given: argparse.Namespace) -> None:
    model, tokenizer = llm.load_model(given.model, device=given.device, dtype=precision(given))
    kept = documents(given.data)[: given.documents]
    start = time.perf_counter()
    table = llm.collect(model, kept, given.out / "table", tokenizer=tokenizer)
    seconds = time.perf_counter() - start
    print(f"{len(table):,} tokens of {len(kept):,} documents in {seconds:.0f} s", flush=True)
    with writer(given.out / "heads.csv") as write:
        for seed in range(given.seeds):
            for head in HEADS:
                for name, options in OBJECTIVES.items():
                    start = time.perf_counter()
                    fitted = llm.fit_head(
                        table,
                        head,
                        seed=seed,
                        epochs=given.epochs,
                        device=given.device,
                        batch=8192,
                        **options,
                    )
                    seconds = time.perf_counter() - start
                    if seed == 0:
                        place = given.out / "saved" / f"{head}-{name.replace(' ', '_')}"
                        place.parent.mkdir(exist_ok=True)
                        llm.save_head(fitted, place)
                    for part, figures in fitted.figures.items():
                        about = {
                            "tokens": len(table),
                            "head": head,
                            "objective": name,
                            "seed": seed,
                            "figures": part,
                            "kept": int(fitted.kept),
                            "alpha": fitted.settings.get("alpha", ""),
                            "temperature": f"{fitted.settings['temperature']:.4f}",
                        }
                        rounded = {key: f"{value:.6f}" for key, value in figures.items()}
                        write({**about, **rounded, "seconds": f"{seconds:.1f}"})


def documents(data: Path) -> list[Any]:
    """LIMA's chats, questions with their answers and further texts, in a fixed random order."""
    found: list[Any] = list(llm.read_documents(data / "lima.json"))
    for path in sorted((data / "texts").glob("*.jsonl")):
        found += llm.read_documents(path)
    for name in ("sciq.train", "triviaqa.test"):
        path = data / "qa" / f"{name}.txt"
        if path.exists():
            asked = llm.read_questions(path)
            held = len(asked) // 2  # the others are for measuring
            found += [f"Question: {one.text}\nAnswer: {one.references[0]}" for one in asked[:held]]
    random.Random(0).shuffle(found)
    return found


# -------------------------------------------------------------------------------------- questions


def questions(given: argparse.Namespace) -> None:
    model, tokenizer = llm.load_model(given.model, device=given.device, dtype=precision(given))
    chosen: dict[str, llm.FittedHead | None] = {"none": None}
    for name in ("linear-bce", "shape-bce", "linear-selective,_alpha_0.5"):
        place = given.heads / "saved" / name
        if place.exists():
            chosen[name] = llm.load_head(place)
    one = next(head for head in chosen.values() if head is not None)
    chosen["global"] = llm.FittedHead.of_temperature(one.settings["temperature"], one.mark)
    with writer(given.out / "questions.csv") as write:
        for source, name, sure, right in measured(given, model, tokenizer, chosen):
            found = llm.evaluate_answers(sure, right)
            row: dict[str, Any] = {"set": source, "head": name, "n": len(right)}
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
        shots = few(llm.read_mmlu(given.data / "mmlu", "dev"), 5)
        scores, labels = llm.ask_choices_each(
            model, tokenizer, asked, heads, shots=shots, batch=given.batch
        )
        for head, logits in scores.items():
            sure = np.exp(logits - np.logaddexp.reduce(logits, -1, keepdims=True)).max(-1)
            yield "mmlu", head, sure, logits.argmax(-1) == labels
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


def few(solved: list[llm.Question], count: int) -> list[llm.Question]:
    """The first of each subject."""
    seen: dict[str, list[llm.Question]] = {}
    for one in solved:
        seen.setdefault(one.subject, []).append(one)
    return [one for part in seen.values() for one in part[:count]]


# ------------------------------------------------------------------------------------------- tune


def tune(given: argparse.Namespace) -> None:
    """Supervised training, then preferences, until answers are surer than they should be."""
    torch.manual_seed(0)
    model, tokenizer = llm.load_model(given.model, device=given.device, dtype="float32")
    right, pairs = examples(given, tokenizer)
    supervised(model, right, epochs=3, rate=3e-5, given=given)
    before = copy.deepcopy(model).eval()
    preferred(model, before, pairs, epochs=2, rate=3e-6, given=given)
    fresh = type(model)(model.config)
    fresh.load_state_dict(model.state_dict())
    if hasattr(fresh.config, "quantization_config"):
        del fresh.config.quantization_config
    fresh.to(torch.bfloat16).save_pretrained(given.out)
    tokenizer.save_pretrained(given.out)


def examples(given: argparse.Namespace, tokenizer: Any) -> tuple[list[Any], list[Any]]:
    """Ids with the length of the prompt: right answers, and pairs of right and wrong ones."""
    right = []
    for turns in llm.read_documents(given.data / "lima.json")[: given.examples]:
        start = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
        right.append(joined(tokenizer, start, turns[1]["content"]))
    pairs = []
    for file in sorted((given.data / "qa").glob("*.pos_neg*.csv")):
        with file.open(newline="", encoding="utf-8") as lines:
            rows = list(csv.reader(lines))[1:][: given.examples]
        for row in rows:
            question, good, wrong = row
            bad = ast.literal_eval(wrong)
            prompt = llm.short_prompt(llm.Question(question, (good,)))
            kept = joined(tokenizer, prompt, f" {good}")
            right.append(kept)
            pairs += [(kept, joined(tokenizer, prompt, f" {one}")) for one in bad[:1]]
    return right, pairs


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
