"""A head on a live model: calibrated generation, or calibrated confidences of a text as it is.

Two hooks do it. One hears the hidden states that the head looks at, one multiplies the logits that
the model returns, in single precision and after any soft-capping. No weight of the model changes,
and at the end of the block the hooks are gone.
"""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from calibrant.llm.fingerprint import mark_of
from calibrant.llm.heads.fit import FittedHead
from calibrant.llm.heads.modules import DecoderHead, Head, Memory, bounded, shape_features_of_logits
from calibrant.llm.huggingface import (
    SCALES,
    at_hand,
    backbone_of,
    has_head,
    output_embeddings,
    plain_model,
    uncompiled,
)


@contextmanager
def attached(model: Any, fitted: FittedHead) -> Iterator[Any]:
    """Let a causal language model of Hugging Face give calibrated logits for a while.

    Within the block ``model(...)`` and ``model.generate(...)`` have the calibrated distribution:
    it is also the one that is sampled from and that beams are ranked by. Confidences of
    a generation are in its ``logits`` (``output_logits=True``); ``scores`` are what is left after
    top-k and the like. ``loss`` is computed inside the model and stays as it was.

    Heads that look at one token at a time are exact in every mode. The decoder head sees the whole
    text; it follows the cache of the model, also through beam search, and needs a two-dimensional
    attention mask, which a static cache does not leave: that is refused. So are texts that are
    packed into one row, and the memory of recurrent models, which are run with
    ``use_cache=False``.

    Several threads may use the model in one block. A model may be compiled, but not with
    ``fullgraph=True``; what ``torch.compile`` has made in this process is dropped at both ends of
    the block, since it does not notice hooks, and is made again when it is called.

    Parameters
    ----------
    model : PreTrainedModel
        The one that the head was made for; another one is refused. Of a PEFT model the base model
        is used, with its adapters. A change of adapter is not noticed: fit another head for it.
    fitted : FittedHead
        From :func:`fit_head`, :func:`calibrant.load` or :func:`read_official`.

    Yields
    ------
    PreTrainedModel
        The model.
    """
    inner = fitting(model, fitted)
    if has_head(inner):
        raise ValueError(
            "this model has a head attached already, logits would be scaled twice: leave that "
            "block first, and do not copy a model within it"
        )
    layer = output_embeddings(inner)
    with at_hand(layer):
        head = _placed(fitted.head, layer.weight.device)
    with ExitStack() as stack:
        stack.callback(torch.compiler.reset)  # what is compiled does not look for hooks again
        call = _Call()
        if isinstance(head, DecoderHead):
            log_sharpness = _decoding(inner, head, call, stack)
        else:
            log_sharpness = _listening(layer, head, call, stack)

        def scale(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
            if call.scaled is not None and call.scaled() is output:
                return output
            logits = _part(output, "logits")
            u = bounded(log_sharpness(logits, _named(module, args, kwargs)))
            if u.shape != logits.shape[:-1]:
                raise ValueError(
                    f"a head must see the state of each of the {tuple(logits.shape[:-1])} logits, "
                    f"got states {tuple(u.shape)}: {type(inner).__name__} makes its logits in an "
                    "unknown way; use a global or shape head"
                )
            output.logits = logits.float() * u.exp()[..., None].to(logits.device)
            call.scaled = weakref.ref(output)
            for state in (getattr(output, "hidden_states", None) or ())[-1:]:
                setattr(state, SCALES, True)  # what generate returns has the states as they are
            return output

        # generate calls the inner model. So does a call of a PEFT model, but up to PEFT 0.20 by its
        # forward, which passes over the hooks: then the outer one scales.
        for module in dict.fromkeys((inner, uncompiled(model))):
            hook = _hooked(module.register_forward_hook, scale, stack, with_kwargs=True)
            setattr(hook, SCALES, True)
        torch.compiler.reset()  # nor does what was compiled before
        yield model


def fitting(model: Any, fitted: FittedHead) -> Any:
    """The causal language model itself, if the head fits it."""
    if not isinstance(fitted, FittedHead):
        raise TypeError(f"fitted must be a FittedHead, got {fitted!r:.60}: calibrant.load it")
    inner = plain_model(model)
    mark_of(inner).check(fitted.mark, "the head")
    return inner


def _placed(head: Head, device: torch.device) -> Head:
    """The head, or a copy of it where it would have to move."""
    if next(head.parameters()).device == device:
        return head
    return copy.deepcopy(head).to(device)


def _hooked(
    register: Callable[..., Any], hook: Callable[..., Any], stack: ExitStack, **how: Any
) -> Callable[..., Any]:
    """Register a hook until the end of the block; compiled models run it as it is."""
    plain: Callable[..., Any] = torch.compiler.disable(hook)
    stack.callback(register(plain, **how).remove)
    return plain


def _part(output: Any, name: str) -> Tensor:
    """A tensor in what a model returned."""
    found = getattr(output, name, None)
    if not isinstance(found, Tensor):
        raise TypeError(
            f"the model must return an object with {name} while a head is attached, got "
            f"{type(output).__name__}: call it with return_dict=True"
        )
    return found


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call of a module by their names, also those that were given by position."""
    if not args:
        return kwargs
    return {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}


class _Call(threading.local):
    """What the hooks of one call of the model tell each other; each thread has its own."""

    seen: Tensor | None = None  # what the head needs, or what it found
    past: int = 0  # tokens in the cache before this call
    scaled: weakref.ref[Any] | None = None

    def take(self) -> Tensor:
        """What was seen in this call; it is of no use in the next."""
        seen, self.seen = self.seen, None
        if seen is None:
            raise RuntimeError(
                "a head needs the hidden states of each call, and none were seen in this one: the "
                "model went around its own layers, or was compiled without the hooks of the head; "
                "attach before the first compiled call, or use a global or shape head"
            )
        return seen


# ------------------------------------------------------------- where the log-sharpness comes from

Source = Callable[[Tensor, dict[str, Any]], Tensor]
"""Gives the log-sharpness of logits ``(..., vocabulary)``, from the arguments of that call."""


def _listening(layer: nn.Module, head: Head, call: _Call, stack: ExitStack) -> Source:
    """For heads that look at a token alone: what went into the output embedding says it."""
    if head.wants != "hidden":
        return lambda logits, _: _of_tokens(head, None, logits)

    def hear(_: nn.Module, args: tuple[Any, ...]) -> None:
        call.seen = args[0]

    _hooked(layer.register_forward_pre_hook, hear, stack)
    return lambda logits, _: _of_tokens(head, call.take(), logits)


def _of_tokens(head: Head, hidden: Tensor | None, logits: Tensor) -> Tensor:
    """Log-sharpness ``(...)`` by a head that looks at a token alone."""
    if head.wants == "hidden":
        assert hidden is not None
        seen = hidden.float()
    else:
        seen = shape_features_of_logits(logits) if head.wants == "shape" else logits
    return head(seen.to(next(head.parameters()).device))  # type: ignore[no-any-return]


def _decoding(inner: Any, head: DecoderHead, call: _Call, stack: ExitStack) -> Source:
    """For the decoder head: the states of all tokens, from what the backbone returns."""
    backbone = backbone_of(inner)
    follower = _Follower(head, call)
    stack.callback(follower.leave)

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        follower.before(_named(module, args, kwargs))

    def after(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        follower.after(_named(module, args, kwargs), output)

    _hooked(backbone.register_forward_pre_hook, before, stack, with_kwargs=True)
    _hooked(backbone.register_forward_hook, after, stack, with_kwargs=True)

    def kept(logits: Tensor, kwargs: dict[str, Any]) -> Tensor:
        found, keep = call.take(), kwargs.get("logits_to_keep", 0)
        chosen = found[:, slice(-keep, None) if isinstance(keep, int) else keep]
        # a model that does not know logits_to_keep gives all
        return chosen if chosen.shape == logits.shape[:-1] else found

    return kept


MEMORIES = ("past_key_values", "cache_params", "state")
"""Arguments by which models get what they know of earlier tokens; only the first is followed."""
REORDERING = ("reorder_cache", "batch_select_indices")
"""Methods of a cache that choose rows of the batch; beam search calls the first."""


@dataclass
class _Follower:
    """Runs a decoder head next to the backbone, with a memory for each of the model's caches."""

    head: DecoderHead
    call: _Call
    # held weakly: a cache and its memory go when a generation is over
    memories: weakref.WeakKeyDictionary[Any, Memory] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def before(self, kwargs: dict[str, Any]) -> None:
        """Note how much of the text the cache holds before this call."""
        self.call.past = _length(kwargs.get("past_key_values"))

    def after(self, kwargs: dict[str, Any], output: Any) -> None:
        """Run the head on the states of this call."""
        hidden = _part(output, "last_hidden_state")
        memory = self._memory(output, hidden, kwargs)
        present = _present(kwargs.get("attention_mask"), self.call.past + hidden.shape[1])
        _check_positions(kwargs.get("position_ids"), present)
        self.call.seen = self.head(hidden.float(), present=present, memory=memory)

    def _memory(self, output: Any, hidden: Tensor, kwargs: dict[str, Any]) -> Memory | None:
        cache = getattr(output, "past_key_values", None)
        batch, tokens, _ = hidden.shape
        past = self.call.past
        if _length(cache) != past + tokens:
            _check_whole(kwargs)
            return None
        if cache not in self.memories:
            self._follow(cache)
        memory = self.memories[cache]
        memory.crop(past)  # speculative decoding takes tokens back
        same = memory.keys is None or len(memory.keys) == batch
        if len(memory) != past or not same:
            raise ValueError(
                f"the decoder head must have seen all tokens in the cache of the model: it has "
                f"{past} of {batch} texts, the head saw {len(memory)} of them; fill the cache "
                "while the head is attached, and do not repeat its rows"
            )
        return memory

    def _follow(self, cache: Any) -> None:
        """Let the memory be reordered with the cache, for as long as the head is attached."""
        memory = Memory()
        self.memories[cache] = memory
        for name in REORDERING:
            setattr(cache, name, _Followed(weakref.ref(cache), name, memory))

    def leave(self) -> None:
        """Give the caches their own methods back."""
        for cache in list(self.memories):
            for name in REORDERING:
                delattr(cache, name)
        self.memories.clear()


@dataclass
class _Followed:
    """The method of a cache, which also reorders the memory; it does not keep the cache alive."""

    cache: weakref.ref[Any]
    name: str
    memory: Memory

    def __call__(self, rows: Tensor) -> Any:
        self.memory.select(rows)
        cache = self.cache()
        return getattr(type(cache), self.name)(cache, rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """For a copy of the cache, which nobody follows: its own method."""
        cache = self.cache()
        return MethodType(getattr(type(cache), self.name), memo[id(cache)])


def _length(cache: Any) -> int:
    """Tokens in a cache; 0 for what is none, or does not count them."""
    getter = getattr(cache, "get_seq_length", None)
    return int(getter()) if callable(getter) else 0


def _check_whole(kwargs: dict[str, Any]) -> None:
    """Without a cache to follow, the tokens of a call must be the whole text."""
    given = [name for name in MEMORIES if kwargs.get(name) is not None]
    if given or kwargs.get("use_cache"):
        raise ValueError(
            "the decoder head needs whole texts, or a cache that counts its tokens and that the "
            f"model returns as past_key_values, got {', '.join(given) or 'use_cache=True'} and no "
            "such cache: pass use_cache=False and no earlier state, to generate too, or use "
            "a head that looks at one token"
        )


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


def _check_positions(position: Any, present: Tensor | None) -> None:
    """Raise where positions begin again in a row: then it holds several texts."""
    if not isinstance(position, Tensor) or position.ndim != 2 or position.shape[1] < 2:
        return
    again = position[:, 1:] <= position[:, :-1]
    if present is not None:
        present = present[:, -position.shape[1] :].to(again.device)
        again = again & present[:, 1:] & present[:, :-1]
    if again.any():
        raise ValueError(
            "the decoder head needs one text in each row, got position_ids that begin again: pass "
            "packed texts one by one or padded, or use a head that looks at one token"
        )


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
        That generated, without the head attached. A text that was generated with it is refused,
        except by an assistant model, where that leaves no trace.
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
    inner = fitting(model, fitted)
    if has_head(inner) or _was_scaled(output):
        raise ValueError(
            "report is for texts that were generated without a head, and this one had one: read "
            "the calibrated logits of the output itself, or generate outside of attached"
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
        written = _written(
            tokens, list(end_tokens(inner)) if eos_token_id is None else eos_token_id
        )
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
        prompt = output.sequences.shape[1] - steps
        if not prompt and attention_mask is not None:  # it was given as inputs_embeds
            prompt = attention_mask.shape[1]
        _check_prompt(states[0], attention_mask, prompt)
        u = _of_text(head, states, _repeated(attention_mask, len(output.logits[0]), rows))
    else:
        u = _of_tokens(head, torch.stack([state[:, -1] for state in states], 1), logits)
    sharpness = bounded(u).exp()
    log_probs = (logits.float() * sharpness[..., None]).log_softmax(-1)
    chosen = log_probs.gather(-1, tokens.to(logits.device)[..., None])[..., 0]
    return Report(tokens, chosen, log_probs.amax(-1).exp(), sharpness, written)


def _was_scaled(output: Any) -> bool:
    """Whether a head was attached when this was generated."""
    states = getattr(output, "hidden_states", None)
    return states is not None and hasattr(states[0][-1], SCALES)


def end_tokens(model: Any) -> set[int]:
    """Tokens with which ``generate`` ends a text."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return set() if found is None else set(torch.as_tensor(found).reshape(-1).tolist())


def _written(tokens: Tensor, ends: int | Sequence[int]) -> Tensor:
    """Which tokens belong to their texts, the one that ends them among them."""
    stop = torch.as_tensor(ends, dtype=torch.long, device=tokens.device)
    ended = torch.isin(tokens, stop).int()
    return (ended.cumsum(1) - ended) == 0


def _repeated(mask: Tensor | None, batch: int, rows: Tensor) -> Tensor | None:
    """The mask of the prompt of each text; the rows of one prompt lie next to each other."""
    if mask is None:
        return None
    return mask.repeat_interleave(batch // len(mask), 0)[rows[:, 0].to(mask.device)]


def _check_prompt(states: Tensor, mask: Tensor | None, prompt: int) -> None:
    """The first step of ``generate`` must have the states of the whole prompt."""
    masked = prompt if mask is None else mask.shape[1]
    if not states.shape[1] == masked == prompt:
        raise ValueError(
            f"the decoder head needs the states and the mask of all {prompt} tokens of the prompt, "
            f"got {states.shape[1]} and {masked}: generate without past_key_values and "
            "prefill_chunk_size; with inputs_embeds, pass attention_mask"
        )


def _of_text(head: DecoderHead, states: list[Tensor], mask: Tensor | None) -> Tensor:
    """Log-sharpness by the decoder head, from the states of the prompts and of all steps."""
    # without a cache each step has the states of the whole text
    hidden = torch.cat([states[0], *(step[:, -1:] for step in states[1:])], 1).float()
    present = None
    if mask is not None:
        present = nn.functional.pad(mask.to(hidden.device), (0, len(states) - 1), value=1)
    return head(hidden, present=present)[:, -len(states) :]  # type: ignore[no-any-return]
