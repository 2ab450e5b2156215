"""Draw several answers to each question: how far they agree is a confidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from calibrant._core.checks import check_whole
from calibrant._core.engines import Progress
from calibrant.llm.answers.asking import GREEDY, LengthLimit, end_ids, length_of, outputs
from calibrant.llm.models import huggingface

SAMPLED = {
    **GREEDY,
    "do_sample": True,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "output_logits": False,
    "output_hidden_states": False,
}
"""Options of ``generate`` that draw from the distribution of the model itself."""


def draw_answers(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    samples: int = 10,
    seed: int = 0,
    max_new_tokens: int = 32,
    one_line: bool = False,
    batch: int = 8,
    progress: Progress | None = None,
) -> list[list[str]]:
    """Return several answers to each prompt, drawn at temperature 1 from all tokens.

    Parameters
    ----------
    samples : int
        Answers to each prompt.
    seed : int
        Of the draws, which depend on ``batch`` and on the device as well. The random state of
        torch is left as it was.
    model, tokenizer, prompts, max_new_tokens, one_line, batch, progress
        As for :func:`~calibrant.llm.ask`. With a head attached (:func:`~calibrant.llm.attached`)
        the answers are drawn from the calibrated distribution.
    """
    check_whole("samples", samples)
    limit = LengthLimit(max_new_tokens, end_ids(model, tokenizer), one_line)
    options = {**SAMPLED, "num_return_sequences": samples}
    device = huggingface.inputs_device(model)
    drawn: list[list[str]] = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for mask, output in outputs(model, tokenizer, prompts, batch, limit, options):
            rows = output.sequences[:, mask.shape[1] :].tolist()
            texts = [_text(tokenizer, ids, limit) for ids in rows]
            drawn += [texts[i : i + samples] for i in range(0, len(texts), samples)]
            if progress is not None:
                progress(len(drawn), len(prompts))
    return drawn


def _text(tokenizer: Any, ids: list[int], limit: LengthLimit) -> str:
    text: str = tokenizer.decode(ids[: length_of(tokenizer, ids, limit)], skip_special_tokens=True)
    return text.strip()
