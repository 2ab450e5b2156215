"""Attach a temperature head to a live model, or apply it to what a model has generated.

One hook keeps the hidden states that the head needs, one multiplies the logits that the model
returns, in single precision and after any soft-capping. No weight of the model changes.
"""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from calibrant.llm.heads.ats import ATSHead, Memory
from calibrant.llm.heads.fitted import FittedHead
from calibrant.llm.heads.modules import Head, _shape_features_of_logits, bounded
from calibrant.llm.models import huggingface
from calibrant.llm.models.huggingface import SCALES, _output_embeddings, fingerprint_of

_STATES = ("past_key_values", "cache_params", "state")
"""Arguments that hold the state of earlier tokens; only the first is followed."""
_REORDERING = ("reorder_cache", "batch_select_indices")
"""Methods of a cache that select rows of the batch; beam search calls the first."""


@contextmanager
def attached(model: Any, fitted: FittedHead) -> Iterator[Any]:
    """Make a Hugging Face causal language model return calibrated logits within the block.

    ``model(...)`` and ``model.generate(...)`` then have the calibrated distribution, also for
    sampling and for ranking beams. Confidences of a generation are in its ``logits``
    (``output_logits=True``); ``scores`` are those after top-k and the like, and ``loss`` does not
    change. Pass ``temperature=1.0, top_k=0`` to sample from the calibrated distribution.

    Heads that look at one token at a time are exact in every mode. The ATS head follows the
    cache of the model, also through beam search, and needs a two-dimensional attention mask. It
    refuses static caches, texts packed into one row, and recurrent models, unless they are run with
    ``use_cache=False``.

    Several threads may use the model. It may be compiled, but not with ``fullgraph=True``; compiled
    code is dropped at both ends of the block, because it does not notice hooks.

    ``model`` is the one that the head was fitted for. Of a PEFT model the base model is used, with
    its adapters; a change of adapter is not noticed: fit another head for it.
    """
    inner = _matching_model(model, fitted)
    if huggingface._has_head(inner):
        raise ValueError(
            "this model has a head attached already: leave that block, do not copy a model in it"
        )
    layer = _output_embeddings(inner)
    with huggingface._weights_loaded(layer):
        head = on_device(fitted.head, layer.weight.device)
    call = _CallState()

    def listen(_: nn.Module, args: tuple[Any, ...]) -> None:
        call.seen = args[0]

    def scale(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if call.scaled is not None and call.scaled() is output:
            return output
        logits, seen = _tensor(output, "logits"), None
        if head.wants in ("hidden", "sequence"):
            seen, call.seen = call.seen, None
            if seen is None:
                raise RuntimeError("no hidden states seen: attach before the first compiled call")
        if seen is not None and isinstance(head, ATSHead):
            keep = _named(module, args, kwargs).get("logits_to_keep", 0)
            kept = seen[:, slice(-keep, None) if isinstance(keep, int) else keep]
            # a model that does not know logits_to_keep returns all
            u = bounded(kept if kept.shape == logits.shape[:-1] else seen)
        else:
            u = bounded(log_sharpness_of_tokens(head, seen, logits))
        if u.shape != logits.shape[:-1]:
            raise ValueError(
                f"the head needs states {tuple(logits.shape[:-1])} like the logits, got "
                f"{tuple(u.shape)}: use a global or shape head with {type(inner).__name__}"
            )
        output.logits = logits.float() * u.exp()[..., None].to(logits.device)
        call.scaled = weakref.ref(output)
        return output

    with ExitStack() as stack:

        def hooked(
            register: Callable[..., Any], hook: Callable[..., Any], **options: Any
        ) -> Callable[..., Any]:
            """Register a hook until the end of the block; compiled models run it uncompiled."""
            plain: Callable[..., Any] = torch.compiler.disable(hook)
            stack.callback(register(plain, **options).remove)
            return plain

        stack.callback(torch.compiler.reset)  # compiled code does not look for hooks again
        if isinstance(head, ATSHead):
            follower = _TextFollower(head, call)
            stack.callback(follower.detach)
            backbone = huggingface._backbone_of(inner)
            hooked(backbone.register_forward_pre_hook, follower.before, with_kwargs=True)
            hooked(backbone.register_forward_hook, follower.after, with_kwargs=True)
        elif head.wants == "hidden":
            hooked(layer.register_forward_pre_hook, listen)
        # generate calls the inner model. So does a call of a PEFT model, but up to PEFT 0.20 by its
        # forward, which skips the hooks: then the outer one scales.
        for module in dict.fromkeys((inner, getattr(model, "_orig_mod", model))):
            setattr(hooked(module.register_forward_hook, scale, with_kwargs=True), SCALES, True)
        torch.compiler.reset()  # nor does code that was compiled before
        yield model


def _matching_model(model: Any, fitted: FittedHead) -> Any:
    """Return the plain causal language model; raise if the head belongs to another one."""
    if not isinstance(fitted, FittedHead):
        raise TypeError(f"fitted must be a FittedHead, got {fitted!r:.60}: calibrant.load it")
    inner = huggingface._plain_model(model)
    fingerprint_of(inner).check(fitted.fingerprint, "the head")
    return inner


def on_device(head: Head, device: torch.device) -> Head:
    """Return the head, or a copy of it on the device."""
    same = next(head.parameters()).device == device
    return head if same else copy.deepcopy(head).to(device)


def log_sharpness_of_tokens(head: Head, hidden: Tensor | None, logits: Tensor) -> Tensor:
    """Log-sharpness ``(...)`` by a head that looks at one token at a time."""
    if head.wants == "hidden":
        assert hidden is not None
        seen = hidden.float()
    else:
        seen = _shape_features_of_logits(logits) if head.wants == "shape" else logits
    return head(seen.to(next(head.parameters()).device))  # type: ignore[no-any-return]


class CalibratedGeneration(NamedTuple):
    """Calibrated probabilities of generated texts, each ``(n, tokens)``.

    ``sharpness`` is the factor of the logits; ``written`` is False after the end of a text.
    """

    tokens: Tensor
    log_probs: Tensor
    sharpness: Tensor
    written: Tensor


@torch.no_grad()
def _calibrated_generation(
    head: Head, output: Any, mask: Tensor, ends: Sequence[int]
) -> CalibratedGeneration:
    """Calibrate the texts that a model generated greedily; they do not change.

    ``output`` is that of ``model.generate(..., num_beams=1, return_dict_in_generate=True,
    output_logits=True, output_hidden_states=True)``, with no head attached; several heads can be
    compared on it. ``mask`` ``(n, prompt)`` is that of the prompts; the tokens ``ends`` end a text.
    """
    logits = torch.stack(output.logits, 1)
    tokens = output.sequences[:, mask.shape[1] :]
    ended = torch.isin(tokens, torch.as_tensor(ends, device=tokens.device).long()).int()
    written = (ended.cumsum(1) - ended) == 0  # up to the token that ends the text
    states = [step[-1].to(logits.device) for step in output.hidden_states]
    head = on_device(head, logits.device)
    if isinstance(head, ATSHead):
        if states[0].shape[1] != mask.shape[1]:
            raise ValueError(
                f"the ATS head needs the states of all {mask.shape[1]} tokens of the prompt, got "
                f"{states[0].shape[1]}: generate without past_key_values and prefill_chunk_size"
            )
        # without a cache each step has the states of the whole text
        hidden = torch.cat([states[0], *(step[:, -1:] for step in states[1:])], 1).float()
        present = nn.functional.pad(mask.to(hidden.device), (0, len(states) - 1), value=1)
        u = head(hidden, present=present)[:, -len(states) :]
    else:
        hidden = torch.stack([state[:, -1] for state in states], 1)
        u = log_sharpness_of_tokens(head, hidden, logits)
    sharpness = bounded(u).exp()
    log_probs = (logits.float() * sharpness[..., None]).log_softmax(-1)
    chosen = log_probs.gather(-1, tokens.to(logits.device)[..., None])[..., 0]
    return CalibratedGeneration(tokens, chosen, sharpness, written)


class _CallState(threading.local):
    """State that the hooks of one call of the model share, per thread."""

    seen: Tensor | None = None  # hidden states, or log-sharpness of the ATS head
    past: int = 0  # tokens in the cache before this call
    scaled: weakref.ref[Any] | None = None


class _TextFollower:
    """Hooks of the backbone for the ATS head, which runs on the states of all tokens.

    The memory of earlier tokens belongs to the cache of the call.
    """

    def __init__(self, head: ATSHead, call: _CallState) -> None:
        self.head, self.call = head, call
        # weak references: a cache and its memory are freed when a generation is over
        self.memories: weakref.WeakKeyDictionary[Any, Memory] = weakref.WeakKeyDictionary()

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Count the tokens in the cache."""
        self.call.past = _length(_named(module, args, kwargs).get("past_key_values"))

    def after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Run the head on the states of the call."""
        hidden, named = _tensor(output, "last_hidden_state"), _named(module, args, kwargs)
        memory = self._memory(getattr(output, "past_key_values", None), hidden, named)
        mask, tokens = named.get("attention_mask"), self.call.past + hidden.shape[1]
        position, present = named.get("position_ids"), None
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] != tokens:
                got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
                raise ValueError(
                    f"the ATS head needs an attention mask (batch, {tokens}), got {got}: generate "
                    "with the default cache, not a static one, or use a head that looks at one "
                    "token"
                )
            present = mask.bool()
        if isinstance(position, Tensor) and position.ndim == 2:
            restart = position[:, 1:] <= position[:, :-1]
            if present is not None:
                own = present[:, -position.shape[1] :].to(restart.device)
                restart = restart & own[:, 1:] & own[:, :-1]
            if restart.any():
                raise ValueError(
                    "the ATS head needs one text in each row, got position_ids that restart: pad "
                    "texts instead of packing them, or use a head that looks at one token"
                )
        self.call.seen = self.head(hidden.float(), present=present, memory=memory)

    def _memory(self, cache: Any, hidden: Tensor, kwargs: dict[str, Any]) -> Memory | None:
        past = self.call.past
        if _length(cache) != past + hidden.shape[1]:
            states = [name for name in _STATES if kwargs.get(name) is not None]
            if states or kwargs.get("use_cache"):
                raise ValueError(
                    "the ATS head needs whole texts, or a cache that counts its tokens and is "
                    f"returned as past_key_values, got {', '.join(states) or 'use_cache=True'}: "
                    "pass use_cache=False, to generate too, or use a head that looks at one token"
                )
            return None
        if cache not in self.memories:
            self.memories[cache] = Memory()
            for name in _REORDERING:
                setattr(cache, name, _Reordering(weakref.ref(cache), name, self.memories[cache]))
        memory = self.memories[cache]
        memory.crop(past)  # speculative decoding takes tokens back
        if len(memory) != past or memory.batch not in (None, len(hidden)):
            raise ValueError(
                f"the ATS head must have seen all {past} tokens in the cache, got "
                f"{len(memory)}: fill it while the head is attached, and do not repeat its rows"
            )
        return memory

    def detach(self) -> None:
        """Restore the methods of the caches."""
        for cache in list(self.memories):
            for name in _REORDERING:
                delattr(cache, name)
        self.memories.clear()


@dataclass
class _Reordering:
    """A method of a cache that also reorders the memory; it does not keep the cache alive."""

    cache: weakref.ref[Any]
    name: str
    memory: Memory

    def __call__(self, rows: Tensor) -> Any:
        self.memory.select(rows)
        cache = self.cache()
        return getattr(type(cache), self.name)(cache, rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the plain method, for a copy of the cache, which is not followed."""
        cache = self.cache()
        return MethodType(getattr(type(cache), self.name), memo[id(cache)])


def _length(cache: Any) -> int:
    """Tokens in a cache; 0 if there is none, or it does not count them."""
    getter = getattr(cache, "get_seq_length", None)
    return int(getter()) if callable(getter) else 0


def _tensor(output: Any, name: str) -> Tensor:
    tensor = getattr(output, name, None)
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"the model must return an object with {name} while a head is attached, got "
            f"{type(output).__name__}: call it with return_dict=True"
        )
    return tensor


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call by their names, including the positional ones."""
    if not args:
        return kwargs
    return {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}
