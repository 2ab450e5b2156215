"""A head on a live model: calibrated generation, or calibrated confidences of a text as it is.

Two hooks do it. One hears the hidden states that the head looks at, one multiplies the logits that
the model returns, in single precision and after any soft-capping. No weight of the model changes,
and at the end of the block the hooks are gone.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from calibrant.llm.fit import FittedHead
from calibrant.llm.heads import DecoderHead, Head, Memory, bounded, shape_features_of_logits
from calibrant.llm.marks import mark_of, output_embeddings

_ATTACHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models that have a head now."""


@contextmanager
def attached(model: Any, fitted: FittedHead) -> Iterator[Any]:
    """Let a causal language model of Hugging Face give calibrated logits for a while.

    Within the block ``model(...)`` and ``model.generate(...)`` have the calibrated distribution:
    it is also the one that is sampled from and that beams are ranked by. Confidences of
    a generation are in its ``logits`` (``output_logits=True``); ``scores`` are what is left after
    top-k and the like. ``loss`` is computed inside the model and stays as it was.

    Heads that look at one token at a time are exact in every mode. The decoder head sees the whole
    text; it follows the cache of the model, also through beam search, and needs a two-dimensional
    attention mask, which a static cache does not leave: that is refused.

    Parameters
    ----------
    model : PreTrainedModel
        The one that the head was made for; another one is refused. Of a PEFT model the base model
        is used, with its adapters. A change of adapter is not noticed: fit another head for it.
    fitted : FittedHead
        From :func:`fit_head`, :func:`load_head` or :func:`read_official`.

    Yields
    ------
    PreTrainedModel
        The model.
    """
    inner = _inner(model, fitted)
    if inner in _ATTACHED:
        raise ValueError(
            "this model has a head attached already, logits would be scaled twice: leave that "
            "block first"
        )
    layer = output_embeddings(inner)
    head = _placed(fitted.head, layer.weight.device)
    with ExitStack() as stack:
        _ATTACHED.add(inner)
        stack.callback(_ATTACHED.discard, inner)
        if isinstance(head, DecoderHead):
            log_sharpness = _decoding(inner, head, stack)
        else:
            log_sharpness = _listening(layer, head, stack)

        scaled: weakref.ref[Any] | None = None

        def scale(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
            nonlocal scaled
            if scaled is not None and scaled() is output:
                return output
            if not isinstance(getattr(output, "logits", None), Tensor):
                raise TypeError(
                    "the model must return an object with logits while a head is attached, got "
                    f"{type(output).__name__}: call it with return_dict=True"
                )
            u = bounded(log_sharpness(output.logits, kwargs))
            output.logits = output.logits.float() * u.exp()[..., None].to(output.logits.device)
            scaled = weakref.ref(output)
            return output

        # generate calls the inner model. So does a call of a PEFT model, but up to PEFT 0.20 by its
        # forward, which passes over the hooks: then the outer one scales.
        for module in dict.fromkeys((inner, model)):
            hook = module.register_forward_hook(scale, with_kwargs=True)
            stack.callback(hook.remove)
        yield model


def _inner(model: Any, fitted: FittedHead) -> nn.Module:
    """The causal language model in a PEFT model, or the model itself, if the head fits it."""
    getter = getattr(model, "get_base_model", None)
    inner: nn.Module = getter() if callable(getter) else model
    mark_of(inner).check(fitted.mark, "the head")
    return inner


def _placed(head: Head, device: torch.device) -> Head:
    """The head, or a copy of it where it would have to move."""
    if next(head.parameters()).device == device:
        return head
    return copy.deepcopy(head).to(device)


# ------------------------------------------------------------- where the log-sharpness comes from

Source = Callable[[Tensor, dict[str, Any]], Tensor]
"""Gives the log-sharpness of logits ``(..., vocabulary)``, from the arguments of that call."""


def _listening(layer: nn.Module, head: Head, stack: ExitStack) -> Source:
    """For heads that look at a token alone: what went into the output embedding says it."""
    if head.wants != "hidden":
        return lambda logits, _: _of_tokens(head, None, logits)
    heard: list[Tensor] = []

    def hear(_: nn.Module, args: tuple[Any, ...]) -> None:
        heard[:] = [args[0]]

    hook = layer.register_forward_pre_hook(hear)
    stack.callback(hook.remove)
    return lambda logits, _: _of_tokens(head, heard.pop(), logits)


def _of_tokens(head: Head, hidden: Tensor | None, logits: Tensor) -> Tensor:
    """Log-sharpness ``(...)`` by a head that looks at a token alone."""
    if head.wants == "hidden":
        assert hidden is not None
        seen = hidden.float()
    else:
        seen = shape_features_of_logits(logits) if head.wants == "shape" else logits
    return head(seen.to(next(head.parameters()).device))  # type: ignore[no-any-return]


def _decoding(inner: Any, head: DecoderHead, stack: ExitStack) -> Source:
    """For the decoder head: the states of all tokens, from what the backbone returns."""
    backbone = inner.base_model
    if backbone is inner:
        raise ValueError(
            f"the decoder head needs the states of all tokens, and {type(inner).__name__} has no "
            "base_model that returns them: use a linear, mlp or shape head"
        )
    follower = _Follower(head)
    stack.callback(follower.leave)
    for hook in (
        backbone.register_forward_pre_hook(follower.before, with_kwargs=True),
        backbone.register_forward_hook(follower.after, with_kwargs=True),
    ):
        stack.callback(hook.remove)

    def kept(logits: Tensor, kwargs: dict[str, Any]) -> Tensor:
        keep = kwargs.get("logits_to_keep", 0)
        return follower.found[:, slice(-keep, None) if isinstance(keep, int) else keep]

    return kept


REORDERING = ("reorder_cache", "batch_select_indices")
"""Methods of a cache that choose rows of the batch; beam search calls the first."""


@dataclass
class _Follower:
    """Runs a decoder head next to the backbone, with a memory for each of the model's caches."""

    head: DecoderHead
    found: Tensor = field(default_factory=lambda: torch.empty(0))
    # held weakly: a cache and its memory go when a generation is over
    memories: weakref.WeakKeyDictionary[Any, Memory] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    past: int = 0

    def before(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Note how much of the text the cache holds before this call."""
        cache = kwargs.get("past_key_values")
        self.past = 0 if cache is None else int(cache.get_seq_length())

    def after(self, _: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Run the head on the states of this call."""
        hidden = output.last_hidden_state
        memory = self._memory(getattr(output, "past_key_values", None), len(hidden))
        present = _present(kwargs.get("attention_mask"), self.past + hidden.shape[1])
        self.found = self.head(hidden.float(), present=present, memory=memory)

    def _memory(self, cache: Any, batch: int) -> Memory | None:
        if cache is None:
            return None
        if cache not in self.memories:
            self._follow(cache)
        memory = self.memories[cache]
        memory.crop(self.past)  # speculative decoding takes tokens back
        same = memory.keys is None or len(memory.keys) == batch
        if len(memory) != self.past or not same:
            raise ValueError(
                f"the decoder head must have seen all tokens in the cache of the model: it has "
                f"{self.past} of {batch} texts, the head saw {len(memory)} of them; fill the cache "
                "while the head is attached, and do not repeat its rows"
            )
        return memory

    def _follow(self, cache: Any) -> None:
        """Let the memory be reordered with the cache, for as long as the head is attached."""
        memory = Memory()
        self.memories[cache] = memory
        for name in REORDERING:
            setattr(cache, name, _followed(cache, name, memory))

    def leave(self) -> None:
        """Give the caches their own methods back."""
        for cache in list(self.memories):
            for name in REORDERING:
                delattr(cache, name)
        self.memories.clear()


def _followed(cache: Any, name: str, memory: Memory) -> Callable[[Tensor], Any]:
    """The method of a cache, which also reorders the memory; it does not keep the cache alive."""
    method, held = getattr(type(cache), name), weakref.ref(cache)

    def both(rows: Tensor) -> Any:
        memory.select(rows)
        return method(held(), rows)

    return both


def _present(mask: Any, tokens: int) -> Tensor | None:
    """Which tokens are no padding, ``(batch, tokens)``, from the mask that the model got."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] != tokens:
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"the decoder head needs an attention mask (batch, {tokens}), got {got}: generate with "
            "the default cache, not a static one, or use a head that looks at one token"
        )
    return mask.bool()


# ------------------------------------------------------------------------------------ report only


class Report(NamedTuple):
    """Calibrated probabilities of a text that was generated without a head, each ``(n, tokens)``.

    Attributes
    ----------
    tokens : int64
        The generated tokens.
    log_probs : float32
        Calibrated log-probability of each.
    confidence : float32
        Calibrated probability of the token that the model preferred there.
    sharpness : float32
        What the logits were multiplied with.
    written : bool
        False for what comes after the end of a text.
    """

    tokens: Tensor
    log_probs: Tensor
    confidence: Tensor
    sharpness: Tensor
    written: Tensor


@torch.no_grad()
def report(
    model: Any,
    fitted: FittedHead,
    output: Any,
    *,
    attention_mask: Tensor | None = None,
    eos_token_id: int | Sequence[int] | None = None,
) -> Report:
    """Calibrated confidences of what ``generate`` wrote; the text stays as it is.

    Parameters
    ----------
    model : PreTrainedModel
        That generated, without the head attached.
    fitted : FittedHead
    output : GenerateOutput
        Of ``model.generate(..., return_dict_in_generate=True, output_logits=True,
        output_hidden_states=True)``, greedy, sampled or by beams.
    attention_mask : (batch, prompt), optional
        Of the prompts, where they have padding. Only the decoder head needs it.
    eos_token_id : int or sequence of int, optional
        Where ``generate`` got another one than the model has in its generation config.

    Returns
    -------
    Report
    """
    inner = _inner(model, fitted)
    if inner in _ATTACHED:
        raise ValueError(
            "report is for texts that were generated without a head: read the calibrated logits "
            "of the output itself, or leave the block of attached"
        )
    for name in ("logits", "hidden_states"):
        if getattr(output, name, None) is None:
            raise ValueError(
                f"the output of generate has no {name}: call it with return_dict_in_generate=True, "
                "output_logits=True, output_hidden_states=True"
            )
    beams = getattr(output, "beam_indices", None)
    # a beam search may go on for longer than the texts that win
    steps = len(output.logits) if beams is None else beams.shape[1]
    tokens = output.sequences[:, -steps:]
    if beams is None:
        rows = torch.arange(len(tokens), device=tokens.device)[:, None].expand_as(tokens)
        written = _written(tokens, _ends(inner) if eos_token_id is None else eos_token_id)
    else:
        rows, written = beams.clamp(min=0), beams >= 0
    pairs = zip(output.logits[:steps], rows.T, strict=True)
    logits = torch.stack([step[row] for step, row in pairs], 1)
    states = [
        step[-1].to(logits.device)[row]
        for step, row in zip(output.hidden_states[:steps], rows.T, strict=True)
    ]
    head = _placed(fitted.head, logits.device)
    if isinstance(head, DecoderHead):
        u = _of_text(head, states, _repeated(attention_mask, len(output.logits[0]), rows))
    else:
        u = _of_tokens(head, torch.stack([state[:, -1] for state in states], 1), logits)
    sharpness = bounded(u).exp()
    log_probs = (logits.float() * sharpness[..., None]).log_softmax(-1)
    chosen = log_probs.gather(-1, tokens.to(logits.device)[..., None])[..., 0]
    return Report(tokens, chosen, log_probs.amax(-1).exp(), sharpness, written)


def _ends(inner: Any) -> Any:
    return getattr(getattr(inner, "generation_config", None), "eos_token_id", None)


def _written(tokens: Tensor, ends: Any) -> Tensor:
    """Which tokens belong to their texts, the one that ends them among them."""
    if ends is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    ended = torch.isin(tokens, torch.as_tensor(ends, device=tokens.device)).int()
    return (ended.cumsum(1) - ended) == 0


def _repeated(mask: Tensor | None, batch: int, rows: Tensor) -> Tensor | None:
    """The mask of the prompt of each text; the rows of one prompt lie next to each other."""
    if mask is None:
        return None
    return mask.repeat_interleave(batch // len(mask), 0)[rows[:, 0].to(mask.device)]


def _of_text(head: DecoderHead, states: list[Tensor], mask: Tensor | None) -> Tensor:
    """Log-sharpness by the decoder head, from the states of the prompts and of all steps."""
    hidden, present = torch.cat(states, 1).float(), None
    if mask is not None:
        present = nn.functional.pad(mask.to(hidden.device), (0, len(states) - 1), value=1)
    return head(hidden, present=present)[:, -len(states) :]  # type: ignore[no-any-return]
