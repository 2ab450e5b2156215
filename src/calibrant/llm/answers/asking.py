"""Let a model answer questions: greedily with calibrated confidences, or by random draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from calibrant._core.checks import FloatArray, check_whole
from calibrant._core.engines import report
from calibrant._core.showing import as_html, columns_frame, one_line
from calibrant._core.torch_models import evaluating
from calibrant.llm.answers.confidence import Aggregator, answer_confidence
from calibrant.llm.heads.attach import CalibratedGeneration, _calibrated_generation, _matching_model
from calibrant.llm.heads.documents import _prompt_ids
from calibrant.llm.heads.fitted import FittedHead
from calibrant.llm.models import huggingface
from calibrant.llm.models.huggingface import fingerprint_of

if TYPE_CHECKING:
    import pandas as pd

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Stands for a part of a character in decoded text."""
GREEDY = {
    "do_sample": False,
    "num_beams": 1,
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "repetition_penalty": 1.0,  # nor any other rule of the generation config
    "no_repeat_ngram_size": 0,
    "return_dict_in_generate": True,
    "output_logits": True,
    "output_hidden_states": True,
}
"""Options of ``generate``."""
_SAMPLED = GREEDY | {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
_SAMPLED |= {"output_logits": False, "output_hidden_states": False}
"""Options of ``generate`` that draw from the distribution of the model itself."""


class LengthLimit(NamedTuple):
    """Where answers end: after so many tokens, at an end token, or before a line break."""

    max_new_tokens: int
    ends: set[int]
    one_line: bool = False


class Answer(NamedTuple):
    """An answer of a model, with its confidence.

    Attributes
    ----------
    text : str
        The whole answer, without blanks around it; with ``one_line`` up to the first line break.
    token_texts : list of str
        Text that each token adds; a character of several tokens comes with its last.
    probs : (tokens,)
        Calibrated probability of each token.
    confidence : float
        Of exactly these tokens or, with a map, the chance that the answer is right.
    truncated : bool
        True if the answer would have continued after ``max_new_tokens``.
    required : float
        Confidence below which the answer is not shown.
    """

    text: str
    token_texts: list[str]
    probs: FloatArray
    confidence: float
    truncated: bool
    required: float = 0.0

    @property
    def abstains(self) -> bool:
        """True if the confidence is below the required one."""
        return self.confidence < self.required

    def __repr__(self) -> str:
        said = "abstains" if self.abstains else repr(self.text)
        end = "truncated" if self.truncated else ""
        return one_line(self, said, self.figures(), f"{len(self.probs)} tokens", end)

    def figures(self) -> str:
        """Return the confidence, and the one that is required, in words."""
        required = f", required {100 * self.required:g} %" if self.required else ""
        return f"confidence {100 * self.confidence:.1f} %{required}"

    def _repr_html_(self) -> str:
        return as_html(self)

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with a row for each token. Needs pandas."""
        return columns_frame({"token": self.token_texts, "prob": self.probs})


def chat_prompt(tokenizer: Any, question: str) -> str:
    """Render a question with the chat template, for :func:`ask`; unchanged if there is none."""
    if not getattr(tokenizer, "chat_template", None):
        return question
    turns = [{"role": "user", "content": question}]
    prompt: str = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return prompt


def ask(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    fitted: FittedHead | None = None,
    aggregate: Aggregator = "geometric",
    max_new_tokens: int = 32,
    one_line: bool = False,
    batch: int = 8,
) -> list[Answer]:
    """Generate answers greedily, to the end of the turn, with calibrated confidences.

    The text is that of the model without a head; a head only changes the probabilities. The length
    of every prompt is checked before the first answer is generated.

    Parameters
    ----------
    model, tokenizer
        Of Hugging Face.
    prompts : sequence of str
        A rendered chat, which begins with the beginning-of-text token, does not get a second one.
    fitted : FittedHead, optional
        Without one the probabilities are those of the model.
    aggregate : str
        As for :func:`answer_confidence`.
    max_new_tokens : int
        Largest number of tokens of an answer.
    one_line : bool
        Stop at the first line break, where answers are one line by design, as to prompts of
        :func:`~calibrant.llm.answers.questions.short_prompt`: models go on with another question.
    batch : int
        Prompts that are answered together. The callback of :func:`calibrant.use` is told the
        prompts done and their number.
    """
    limits: Any = {"max_new_tokens": max_new_tokens, "one_line": one_line, "batch": batch}
    return _ask_each(model, tokenizer, prompts, {"": fitted}, aggregate, **limits)[""]


def _ask_each(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    heads: Mapping[str, FittedHead | None],
    aggregate: Aggregator = "geometric",
    *,
    max_new_tokens: int = 32,
    one_line: bool = False,
    batch: int = 8,
) -> dict[str, list[Answer]]:
    """:func:`ask` once, with the confidences of several heads by name; None for no head."""
    answers: dict[str, list[Answer]] = {name: [] for name in heads}
    limit = LengthLimit(max_new_tokens, end_ids(model, tokenizer), one_line)
    runs = _calibrated_generations(model, tokenizer, prompts, heads, limit, batch)
    for name, generation, _ in runs:
        columns = generation.tokens, generation.log_probs, generation.written
        tokens, logs, written = (column.cpu() for column in columns)
        rows = zip(tokens, logs.double().exp(), written, strict=True)
        answers[name] += [_answer(tokenizer, row, aggregate, limit) for row in rows]
    return answers


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
) -> list[list[str]]:
    """Return several answers to each prompt, drawn at temperature 1 from all tokens.

    Parameters
    ----------
    samples : int
        Answers to each prompt.
    seed : int
        Of the draws, which depend on ``batch`` and on the device as well. The random state of
        torch is left as it was.
    model, tokenizer, prompts, max_new_tokens, one_line, batch
        As for :func:`~calibrant.llm.ask`. With a head attached (:func:`~calibrant.llm.attached`)
        the answers are drawn from the calibrated distribution.
    """
    check_whole("samples", samples)
    limit = LengthLimit(max_new_tokens, end_ids(model, tokenizer), one_line)
    options = {**_SAMPLED, "num_return_sequences": samples}
    device = huggingface._inputs_device(model)
    drawn: list[list[str]] = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for mask, output in _outputs(model, tokenizer, prompts, batch, limit, options):
            rows = output.sequences[:, mask.shape[1] :].tolist()
            texts = [_decoded(tokenizer, ids[: _length_of(tokenizer, ids, limit)]) for ids in rows]
            drawn += [texts[i : i + samples] for i in range(0, len(texts), samples)]
            report(len(drawn), len(prompts))
    return drawn


def _calibrated_generations(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    heads: Mapping[str, FittedHead | None],
    limit: LengthLimit,
    batch: int,
) -> Iterator[tuple[str, CalibratedGeneration, Tensor]]:
    """Yield the calibrated answers to a batch of prompts, for each head in turn.

    With them come the logits ``(rows, vocabulary)`` of their first tokens, without a head.
    """
    inner = huggingface._plain_model(model)
    plain = FittedHead.from_temperature(1.0, fingerprint_of(inner))
    tried = {name: plain if fitted is None else fitted for name, fitted in heads.items()}
    for fitted in tried.values():
        _matching_model(inner, fitted)
    if huggingface._has_head(inner):
        raise ValueError("this model has a head attached already: ask outside of attached")
    done, ends = 0, sorted(limit.ends)
    for mask, output in _outputs(model, tokenizer, prompts, batch, limit):
        first = output.logits[0].float()
        for name, fitted in tried.items():
            yield name, _calibrated_generation(fitted.head, output, mask, ends), first
        done += len(first)
        report(done, len(prompts))


def end_ids(model: Any, tokenizer: Any) -> set[int]:
    """Tokens at which an answer ends.

    Besides those of the generation config these are all special ones: from some files, such as
    ``.gguf``, the config of a chat model lacks the token that ends a turn.
    """
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    known = [] if ends is None else torch.as_tensor(ends).reshape(-1).tolist()
    return {*tokenizer.all_special_ids, *known}


def _outputs(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    batch: int,
    limit: LengthLimit,
    options: Mapping[str, Any] = GREEDY,
) -> Iterator[tuple[Tensor, Any]]:
    """Yield the attention mask and the output of ``generate`` for each batch of prompts."""
    from transformers import StoppingCriteriaList

    check_whole("batch", batch)
    ids = _checked_prompts(model, tokenizer, prompts, limit.max_new_tokens)
    device = huggingface._inputs_device(model)
    candidates = tokenizer.pad_token_id, tokenizer.eos_token_id, 0
    pad = next(token for token in candidates if token is not None)
    ends = {"eos_token_id": sorted(limit.ends) or None, "pad_token_id": pad}

    def at_line_break(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        texts = tokenizer.batch_decode(input_ids[:, longest:])
        return torch.tensor([*map(_breaks, texts)], device=input_ids.device)

    with evaluating(model), torch.no_grad():
        for start in range(0, len(prompts), batch):
            some = ids[start : start + batch]
            longest = max(map(len, some))
            # on the left, so that answers follow
            padding = [longest - len(row) for row in some]
            padded = [[pad] * n + row for n, row in zip(padding, some, strict=True)]
            mask = torch.tensor([[0] * n + [1] * (longest - n) for n in padding], device=device)
            output = model.generate(
                input_ids=torch.tensor(padded, device=device),
                attention_mask=mask,
                max_new_tokens=limit.max_new_tokens,
                stopping_criteria=StoppingCriteriaList([at_line_break] if limit.one_line else []),
                **ends,
                **options,
            )
            yield mask, output


def _breaks(text: str) -> bool:
    """Return True for a line break after the first word."""
    return "\n" in text.lstrip()


def _checked_prompts(
    model: Any, tokenizer: Any, prompts: Sequence[str], max_new_tokens: int
) -> list[list[int]]:
    """Return the token ids of the prompts; raise if any of them is too long for the model."""
    if isinstance(prompts, str):
        raise TypeError("prompts must be a list of texts, got one text: put it into a list")
    if not prompts:
        raise ValueError("at least one prompt is needed, got none")
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            raise TypeError(f"prompts must be texts, got {prompt!r:.60} for prompt {number}")
        if not prompt:
            raise ValueError(f"prompt {number} is empty")
    ids = [_prompt_ids(tokenizer, prompt) for prompt in prompts]
    positions = huggingface._positions_of(model)
    for number, row in enumerate(ids if positions else ()):
        if len(row) + max_new_tokens > (positions or 0):
            raise ValueError(
                f"prompt {number}, ending with {prompts[number][-60:]!r}, has {len(row)} tokens, "
                f"and {max_new_tokens} may follow: more than the {positions} positions of the "
                "model; shorten it or leave it out, show fewer shots, or lower max_new_tokens"
            )
    return ids


def _answer(
    tokenizer: Any, row: Sequence[Tensor], aggregate: Aggregator, limit: LengthLimit
) -> Answer:
    tokens, probs, written = row
    kept = written.nonzero()[:, 0].tolist()
    ids = [int(tokens[i]) for i in kept]
    count = _length_of(tokenizer, ids, limit)
    own = probs[kept[:count]].numpy()
    text = _decoded(tokenizer, ids[:count])
    confidence = float(answer_confidence([own], aggregate)[0])
    truncated = count == limit.max_new_tokens and ids[-1] not in limit.ends
    return Answer(text, _token_texts(tokenizer, ids[:count]), own, confidence, truncated)


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text.strip()


def _length_of(tokenizer: Any, ids: list[int], limit: LengthLimit) -> int:
    """Tokens before the end or, of one line, its break; at least one, to have a confidence."""
    for count in range(1, len(ids) + 1):
        broken = limit.one_line and _breaks(tokenizer.decode(ids[:count]))
        if ids[count - 1] in limit.ends or broken:
            return max(1, count - 1)
    return len(ids)


def _token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """Text that each token adds to those before it.

    Decoded alone, a part of a character has no text, and some tokenizers drop a word's space.
    """
    texts, done = [], ""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count], clean_up_tokenization_spaces=False)
        if text.endswith(INCOMPLETE) and count < len(ids):
            text = done
        texts.append(text[len(done) :])
        done = text
    return texts
