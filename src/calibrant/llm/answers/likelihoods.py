"""Multiple choice between whole texts, by their likelihood as answers to the question."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from calibrant._core.checks import FloatArray, check_whole
from calibrant._core.engines import Progress
from calibrant._core.torch_models import evaluating
from calibrant.llm.answers.choices import choice_logits_from_likelihoods
from calibrant.llm.answers.questions import Question, short_prompt
from calibrant.llm.heads.attach import attached
from calibrant.llm.heads.documents import Encoded, encode_documents
from calibrant.llm.heads.fitted import FittedHead
from calibrant.llm.models import huggingface


def ask_texts_each(
    model: nn.Module,
    tokenizer: Any,
    questions: Sequence[Question],
    heads: Mapping[str, FittedHead | None],
    *,
    shots: Sequence[Question] = (),
    batch: int = 8,
    progress: Progress | None = None,
) -> dict[str, list[FloatArray]]:
    """Compute the log-probabilities ``(choices,)`` of the choices of each question, by head.

    A choice is scored by the total log-probability of its text after the question, and these are
    normalised over the choices. For TruthfulQA, where the best answer stands against the incorrect
    ones, the share of questions whose right choice is likeliest is the measure MC1 (Lin, Hilton
    and Evans 2022).

    Parameters
    ----------
    questions : sequence of Question
        With two choices or more each, which the prompt does not show.
    heads : dict
        Temperature heads by name; None for no head.
    shots : sequence of Question
        Solved examples before each question.
    batch : int
        Texts that are scored together.
    model, tokenizer, progress
        As for :func:`~calibrant.llm.ask`.
    """
    check_whole("batch", batch)
    texts = encoded_choices(model, tokenizer, questions, shots)
    sizes = np.cumsum([len(question.choices) for question in questions])
    logits, total = {}, len(heads) * len(texts)
    for number, (name, fitted) in enumerate(heads.items()):
        parts = []
        with nullcontext() if fitted is None else attached(model, fitted):
            for part in _likelihoods(model, texts, batch):
                parts.append(part)
                if progress is not None:
                    done = number * len(texts) + sum(map(len, parts))
                    progress(done, total)
        rows = np.split(np.concatenate(parts), sizes[:-1])
        logits[name] = [choice_logits_from_likelihoods(row) for row in rows]
    return logits


def encoded_choices(
    model: Any, tokenizer: Any, questions: Sequence[Question], shots: Sequence[Question]
) -> list[Encoded]:
    """Return the tokens of each choice after its question; raise if any is too long."""
    pairs = [
        (short_prompt(question, shots), f" {choice}")
        for question in questions
        for choice in question.choices
    ]
    whole = 1 << 30  # nothing is cut
    texts, positions = encode_documents(pairs, tokenizer, whole), huggingface.positions_of(model)
    for (prompt, choice), text in zip(pairs, texts, strict=True):
        if positions and len(text.ids) > positions:
            raise ValueError(
                f"the choice {choice[1:61]!r} after a prompt ending with {prompt[-60:]!r} needs "
                f"{len(text.ids)} tokens, more than the {positions} positions of the model: show "
                "fewer shots, or leave the question out"
            )
    return texts


def _likelihoods(model: Any, texts: Sequence[Encoded], batch: int) -> Iterator[FloatArray]:
    """Yield the total log-probabilities of the tokens that count, for each batch of texts."""
    device = huggingface.inputs_device(model)
    with evaluating(model), torch.no_grad():
        for start in range(0, len(texts), batch):
            some = texts[start : start + batch]
            # padding comes after the texts, where causal attention does not look
            longest = max(len(text.ids) for text in some)
            ids = torch.zeros(len(some), longest, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, text in enumerate(some):
                ids[row, : len(text.ids)] = torch.from_numpy(text.ids)
                mask[row, : len(text.ids)] = 1
            logits = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
            yield np.array([_total(row, text) for row, text in zip(logits, some, strict=True)])


def _total(logits: Tensor, text: Encoded) -> float:
    targets = torch.from_numpy(text.targets)
    rows = logits[(targets - 1).to(logits.device)].float().log_softmax(-1)
    chosen = torch.from_numpy(text.ids)[targets].to(logits.device)
    return float(rows.gather(-1, chosen[:, None]).cpu().double().sum())
