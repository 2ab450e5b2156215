"""Structured answers of a real model over texts with known values, with its log-probabilities.

    python benchmarks/studies/fields_extracted.py MODEL -o LOG.jsonl

MODEL is a folder of Hugging Face or a .gguf file. Each text is a note about a payment, made of a
template and drawn values: who pays (and who is paid), when it is due (and when it was written), the
total (and a part of it), and whether it is paid, open or cancelled, in other words. With
``--plain`` there is one name, one date and one sum. The model reads three solved examples and a
text, and writes a line of JSON greedily. A row of LOG has the ``id`` of the document, the
``answer``, its ``tokens``, ``token_probs`` and ``top_logprobs`` (of 20 tokens, as services show),
and ``truth``. Rows are appended, and the same command goes on after a stop.
"""

import argparse
import copy
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from calibrant import llm

LONGEST = 72
SHOWN = 20
TASK = "Extract who pays, when it is due, the total, and the state (paid, open or cancelled)."
SHOTS = (-8, -6, -7)
STATES = ("paid", "open", "cancelled")
FIRST = ("Maria", "José", "Anna", "Zoë", "Peter", "Ngozi", "Liam", "Chloé", "Omar", "Yuki", "Søren")
LAST = (
    "Müller",
    "Okafor",
    "Garcia",
    "Smith",
    "Tanaka",
    "O'Neil",
    "Nowak",
    "Hansen",
    "Silva",
    "Roy",
)
MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)
WORDS = {
    "paid": ("The money has arrived.", "This was settled last week.", "Received in full, thanks."),
    "open": ("We are still waiting for it.", "Please transfer it soon.", "Nothing came so far."),
    "cancelled": ("The order was called off.", "Please disregard it.", "It is void now."),
}
FORMS = (
    "On {written} {seller} sent {buyer} a bill over {total}, of which {part} is tax. It is due on "
    "{due}. {state}",
    "{state} The bill of {written} from {seller} comes to {total} (deposit {part}), payable by "
    "{buyer} until {due}.",
    "Note for {buyer}: {seller} charges {part} for parts, {total} in all. Written {written}, due "
    "{due}. {state}",
    "{buyer} owes {seller} {total} by {due}; {part} of it is shipping. Dated {written}. {state}",
)
PLAIN = (
    "{buyer} owes {total}, due on {due}. {state}",
    "{state} The bill for {buyer} comes to {total}, payable until {due}.",
    "Note: {buyer} has to pay {total} by {due}. {state}",
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--plain", action="store_true", help="one name, date and sum to a text")
    given = parser.parse_args()
    forms = PLAIN if given.plain else FORMS
    notes = [note(random.Random(number), forms) for number in range(given.documents)]
    done = len(given.out.read_text().splitlines()) if given.out.exists() else 0
    network = llm.load_model(given.model, device=given.device)
    prefix = prefix_of(*network, forms)
    for first in range(done, len(notes), given.batch):
        chosen = notes[first : first + given.batch]
        rows = extracted(*network, prefix, [text for text, _ in chosen])
        with given.out.open("a") as stream:
            for number, (row, (_, truth)) in enumerate(zip(rows, chosen, strict=True), first):
                about = {"id": f"note {number}", "model": given.model.stem, "prompt": "three shots"}
                stream.write(json.dumps({**about, **row, "truth": truth}) + "\n")
        print(first + len(chosen), flush=True)


def note(rng: random.Random, forms: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """A text and its true values."""
    buyer, seller = (
        f"{one} {last}" for one, last in zip(rng.sample(FIRST, 2), rng.sample(LAST, 2), strict=True)
    )
    written, due = sorted((2024, rng.randint(1, 12), rng.randint(1, 28)) for _ in range(2))
    total = round(rng.choice((40, 400, 4000)) * rng.uniform(0.5, 2), 2)
    part, state = round(total * rng.uniform(0.05, 0.4), 2), rng.choice(STATES)
    text = rng.choice(forms).format(
        buyer=buyer,
        seller=seller,
        written=day(written, rng),
        due=day(due, rng),
        total=f"${total:,.2f}",
        part=f"${part:,.2f}",
        state=rng.choice(WORDS[state]),
    )
    truth = {"payer": buyer, "due": "{}-{:02}-{:02}".format(*due), "total": total, "state": state}
    return text, truth


def day(date: tuple[int, int, int], rng: random.Random) -> str:
    year, month, number = date
    name = MONTHS[month - 1]
    return rng.choice(
        (
            f"{number} {name} {year}",
            f"{name} {number}, {year}",
            f"{number} {name[:3]} {year}",
            "{}-{:02}-{:02}".format(*date),
        )
    )


def shots(forms: Sequence[str]) -> str:
    """What is the same before all texts."""
    notes = [note(random.Random(f"shot {number}"), forms) for number in SHOTS]
    solved = [f"Text: {one}\nJSON: {json.dumps(truth, ensure_ascii=False)}" for one, truth in notes]
    return "\n\n".join((TASK, *solved, "Text:"))


def prefix_of(model: Any, tokenizer: Any, forms: Sequence[str]) -> tuple[torch.Tensor, Any]:
    """The tokens of the shots, and the cache after them."""
    ids = tokenizer(shots(forms), return_tensors="pt")["input_ids"].to(model.device)
    with torch.inference_mode():
        return ids, model(ids, use_cache=True, logits_to_keep=1).past_key_values


def extracted(model: Any, tokenizer: Any, prefix: Any, texts: list[str]) -> list[dict[str, Any]]:
    """Rows with the line that the model writes after each text, and its tokens."""
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    asked = [f" {text}\nJSON:" for text in texts]
    inputs = tokenizer(asked, return_tensors="pt", padding=True, add_special_tokens=False)
    ids, cache = prefix[0].expand(len(texts), -1), copy.deepcopy(prefix[1])
    cache.batch_repeat_interleave(len(texts))
    columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs = {k: torch.cat((v, inputs[k].to(v.device)), 1) for k, v in columns.items()}
    with torch.inference_mode():
        made = model.generate(
            **inputs,
            past_key_values=cache,
            do_sample=False,
            max_new_tokens=LONGEST,
            repetition_penalty=1.0,
            stop_strings=["\n"],
            tokenizer=tokenizer,
            return_dict_in_generate=True,
            output_logits=True,
        )
    written = made.sequences[:, inputs["input_ids"].shape[1] :]
    logs = torch.stack(made.logits, 1).float().log_softmax(-1)
    return [row_of(tokenizer, ids, one) for ids, one in zip(written.tolist(), logs, strict=True)]


def row_of(tokenizer: Any, ids: list[int], logs: torch.Tensor) -> dict[str, Any]:
    texts: list[str] = []  # a character of several tokens comes with the last of them
    for number in range(1, len(ids) + 1):
        whole = tokenizer.decode(ids[:number]).removesuffix("\N{REPLACEMENT CHARACTER}")
        texts.append(whole[len("".join(texts)) :])
        if "\n" in texts[-1] or ids[number - 1] in tokenizer.all_special_ids:
            break
    count = len(texts)
    probs = logs[range(count), ids[:count]].exp()
    top = logs[:count].topk(SHOWN)
    shown = [
        {tokenizer.decode([token]): round(value, 6) for token, value in reversed(list(pairs))}
        for pairs in (
            zip(*pair, strict=True)
            for pair in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        )
    ]
    answer = "".join(texts).split("\n")[0].removesuffix(tokenizer.eos_token).strip()
    return {
        "answer": answer,
        "tokens": texts,
        "token_probs": [float(f"{p:.8g}") for p in probs.tolist()],
        "top_logprobs": shown,
    }


if __name__ == "__main__":
    main()
