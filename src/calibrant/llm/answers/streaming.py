"""Answers token by token while they are written, each with its calibrated probability."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from calibrant._core.torch_models import evaluating
from calibrant.llm.answers.asking import GREEDY, INCOMPLETE, _checked_prompts, end_ids
from calibrant.llm.answers.confidence import Aggregator, answer_confidence
from calibrant.llm.heads.attach import attached
from calibrant.llm.heads.fitted import FittedHead
from calibrant.llm.models import huggingface

_OUTPUTS = ("return_dict_in_generate", "output_logits", "output_hidden_states")
"""Options of ``generate`` that would keep everything until the end."""


class StreamedToken(NamedTuple):
    """A token of an answer that is being written.

    Attributes
    ----------
    text : str
        Text that it adds; empty until the last token of a character.
    prob : float
        Calibrated probability of the token.
    confidence : float
        Of the answer so far, this token included.
    """

    text: str
    prob: float
    confidence: float


def stream(
    model: nn.Module,
    tokenizer: Any,
    prompt: str,
    *,
    fitted: FittedHead | None = None,
    aggregate: Aggregator = "geometric",
    max_new_tokens: int = 256,
    **options: Any,
) -> Iterator[StreamedToken]:
    """Generate an answer, and yield each token as soon as it is written.

    The model runs in a thread of its own, which ends when the generator is closed. The confidence
    is an aggregate of the probabilities so far: how likely the words are, not how likely the answer
    is to be right, for which there are answer calibrators and finished answers.

    Parameters
    ----------
    model, tokenizer
        Of Hugging Face.
    prompt : str
        For a question to a chat model, from :func:`~calibrant.llm.chat_prompt`.
    fitted : FittedHead, optional
        Without one the probabilities are those of the model.
    aggregate : str
        As for :func:`~calibrant.llm.answer_confidence`.
    max_new_tokens : int
        Largest number of tokens.
    **options
        Of ``generate``, by default greedy search. Text that is sampled (``do_sample=True``) is
        sampled from the calibrated distribution; probabilities are those before top-k and the
        like. Beams and assistant models do not write token by token.
    """
    if options.get("assistant_model") is not None or options.get("prompt_lookup_num_tokens"):
        raise ValueError("tokens of an assistant come several at a time: leave assistants out")
    (ids,) = _checked_prompts(model, tokenizer, [prompt], max_new_tokens)
    ends = end_ids(model, tokenizer)
    greedy = {name: value for name, value in GREEDY.items() if name not in _OUTPUTS}
    rules = {} if options.get("do_sample") else greedy
    # one prompt needs no padding, but generate warns if no token is named for it
    limits: Any = {"eos_token_id": sorted(ends) or None, "pad_token_id": min(ends, default=0)}
    rules |= {**limits, "max_new_tokens": max_new_tokens, **options}
    return _tokens(_Writer(model, ids, rules, fitted), tokenizer, ends, aggregate)


def _tokens(
    writer: _Writer, tokenizer: Any, ends: set[int], aggregate: Aggregator
) -> Iterator[StreamedToken]:
    ids: list[int] = []
    probs: list[float] = []
    done = ""
    writer.thread.start()
    try:
        while (item := writer.written.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            if item[0] in ends and ids:
                continue
            ids.append(item[0])
            probs.append(item[1])
            text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            text = done if text.endswith(INCOMPLETE) else text
            confidence = float(answer_confidence([probs], aggregate)[0])
            yield StreamedToken(text[len(done) :], item[1], confidence)
            done = text
    finally:
        writer.stopped.set()
        writer.thread.join()


class _Writer:
    """Runs ``generate`` in a thread, which puts tokens and their probabilities into a queue."""

    def __init__(
        self, model: Any, ids: list[int], options: dict[str, Any], fitted: FittedHead | None
    ) -> None:
        self.model, self.ids, self.options, self.fitted = model, ids, options, fitted
        self.written: queue.SimpleQueue[tuple[int, float] | BaseException | None] = (
            queue.SimpleQueue()
        )
        self.logits: Tensor | None = None  # of the last pass; None before the prompt is seen
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        from transformers import StoppingCriteriaList

        def stops(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            return torch.full((len(input_ids),), self.stopped.is_set(), device=input_ids.device)

        def listen(_: nn.Module, __: Any, output: Any) -> None:
            if threading.current_thread() is self.thread:  # others may use the model as well
                self.logits = output.logits[0, -1].detach()

        try:
            inner = huggingface._plain_model(self.model)
            with ExitStack() as stack:
                stack.enter_context(evaluating(self.model))
                stack.enter_context(torch.no_grad())
                if self.fitted is not None:
                    stack.enter_context(attached(self.model, self.fitted))
                # after the hook of the head, so that logits are calibrated
                stack.callback(inner.register_forward_hook(listen).remove)
                given = torch.tensor([self.ids], device=huggingface._inputs_device(inner))
                self.model.generate(
                    input_ids=given,
                    attention_mask=torch.ones_like(given),
                    streamer=self,
                    stopping_criteria=StoppingCriteriaList([stops]),
                    **self.options,
                )
        except BaseException as error:  # raised again in the thread of the caller
            self.written.put(error)
        self.written.put(None)

    def put(self, tokens: Tensor) -> None:
        """Take the prompt, and then each token; called by ``generate``."""
        if self.logits is not None:
            token = int(tokens.reshape(-1)[0])
            log_probs = self.logits.float().log_softmax(-1)
            self.written.put((token, float(log_probs[token].exp())))

    def end(self) -> None:
        """Do nothing; called by ``generate`` after the last token."""
