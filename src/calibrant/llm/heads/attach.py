"""Attach a temperature head to a live model, for calibrated generation.

Two hooks do it: one keeps the hidden states that the head needs, one multiplies the logits that the
model returns, in single precision and after any soft-capping. No weight of the model changes, and
the hooks are removed at the end of the block.
"""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from calibrant.llm.fingerprint import fingerprint_of
from calibrant.llm.heads.cache import DecoderFollower
from calibrant.llm.heads.fitted import FittedHead
from calibrant.llm.heads.modules import DecoderHead, Head, bounded, shape_features_of_logits
from calibrant.llm.huggingface import (
    SCALES,
    backbone_of,
    has_head,
    output_embeddings,
    plain_model,
    uncompiled,
    weights_loaded,
)


@contextmanager
def attached(model: Any, fitted: FittedHead) -> Iterator[Any]:
    """Make a Hugging Face causal language model return calibrated logits within the block.

    ``model(...)`` and ``model.generate(...)`` then have the calibrated distribution, also for
    sampling and for ranking beams. Confidences of a generation are in its ``logits``
    (``output_logits=True``); ``scores`` are those after top-k and the like. ``loss`` is computed
    inside the model and does not change.

    Heads that look at one token at a time are exact in every mode. The decoder head needs the
    whole text; it follows the cache of the model, also through beam search, and needs a
    two-dimensional attention mask. It refuses static caches, texts packed into one row, and
    recurrent models, unless they are run with ``use_cache=False``.

    Several threads may use the model. It may be compiled, but not with ``fullgraph=True``;
    ``torch.compile``'s code of this process is dropped at both ends of the block, because it does
    not notice hooks, and is compiled again on the next call.

    Parameters
    ----------
    model : PreTrainedModel
        The model that the head was fitted for. Of a PEFT model the base model is used, with its
        adapters. A change of adapter is not noticed: fit another head for it.
    fitted : FittedHead
        From :func:`fit_head`, :func:`calibrant.load` or :func:`read_official`.

    Yields
    ------
    PreTrainedModel
        The model.
    """
    inner = matching_model(model, fitted)
    if has_head(inner):
        raise ValueError(
            "this model has a head attached already: leave that block first, and do not copy a "
            "model within it"
        )
    layer = output_embeddings(inner)
    with weights_loaded(layer):
        head = on_device(fitted.head, layer.weight.device)
    with ExitStack() as stack:
        stack.callback(torch.compiler.reset)  # compiled code does not look for hooks again
        call = CallState()
        follow = _follow_texts if isinstance(head, DecoderHead) else _follow_tokens
        log_sharpness = follow(inner, head, call, stack)

        def scale(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
            if call.scaled is not None and call.scaled() is output:
                return output
            logits = tensor_of(output, "logits")
            u = bounded(log_sharpness(logits, _named(module, args, kwargs)))
            if u.shape != logits.shape[:-1]:
                raise ValueError(
                    f"a head needs the state of each of the {tuple(logits.shape[:-1])} logits, got "
                    f"states {tuple(u.shape)}: use a global or shape head with "
                    f"{type(inner).__name__}"
                )
            output.logits = logits.float() * u.exp()[..., None].to(logits.device)
            call.scaled = weakref.ref(output)
            for state in (getattr(output, "hidden_states", None) or ())[-1:]:
                setattr(state, SCALES, True)  # generate returns these very states
            return output

        # generate calls the inner model. So does a call of a PEFT model, but up to PEFT 0.20 by its
        # forward, which skips the hooks: then the outer one scales.
        for module in dict.fromkeys((inner, uncompiled(model))):
            hook = _hooked(module.register_forward_hook, scale, stack, with_kwargs=True)
            setattr(hook, SCALES, True)
        torch.compiler.reset()  # nor does code that was compiled before
        yield model


def matching_model(model: Any, fitted: FittedHead) -> Any:
    """Return the plain causal language model; raise if the head belongs to another one."""
    if not isinstance(fitted, FittedHead):
        raise TypeError(f"fitted must be a FittedHead, got {fitted!r:.60}: calibrant.load it")
    inner = plain_model(model)
    fingerprint_of(inner).check(fitted.fingerprint, "the head")
    return inner


def on_device(head: Head, device: torch.device) -> Head:
    """Return the head, or a copy of it on the device."""
    if next(head.parameters()).device == device:
        return head
    return copy.deepcopy(head).to(device)


def tensor_of(output: Any, name: str) -> Tensor:
    """Return a tensor of a model output."""
    tensor = getattr(output, name, None)
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"the model must return an object with {name} while a head is attached, got "
            f"{type(output).__name__}: call it with return_dict=True"
        )
    return tensor


class CallState(threading.local):
    """State that the hooks of one call of the model share, per thread."""

    seen: Tensor | None = None  # hidden states, or log-sharpness of the decoder head
    past: int = 0  # tokens in the cache before this call
    scaled: weakref.ref[Any] | None = None

    def take(self) -> Tensor:
        """Return what was seen in this call, and forget it."""
        seen, self.seen = self.seen, None
        if seen is None:
            raise RuntimeError("no hidden states seen: attach before the first compiled call")
        return seen


def log_sharpness_of_tokens(head: Head, hidden: Tensor | None, logits: Tensor) -> Tensor:
    """Log-sharpness ``(...)`` by a head that looks at one token at a time."""
    if head.wants == "hidden":
        assert hidden is not None
        seen = hidden.float()
    else:
        seen = shape_features_of_logits(logits) if head.wants == "shape" else logits
    return head(seen.to(next(head.parameters()).device))  # type: ignore[no-any-return]


LogSharpness = Callable[[Tensor, dict[str, Any]], Tensor]
"""Log-sharpness of logits ``(..., vocabulary)``, from the arguments of the call."""


def _follow_tokens(inner: Any, head: Head, call: CallState, stack: ExitStack) -> LogSharpness:
    """For heads that look at one token: listen to the input of the output embeddings."""
    if head.wants != "hidden":
        return lambda logits, _: log_sharpness_of_tokens(head, None, logits)

    def listen(_: nn.Module, args: tuple[Any, ...]) -> None:
        call.seen = args[0]

    _hooked(output_embeddings(inner).register_forward_pre_hook, listen, stack)
    return lambda logits, _: log_sharpness_of_tokens(head, call.take(), logits)


def _follow_texts(inner: Any, head: Head, call: CallState, stack: ExitStack) -> LogSharpness:
    """For the decoder head: listen to the states of all tokens that the backbone returns."""
    assert isinstance(head, DecoderHead)
    backbone = backbone_of(inner)
    follower = DecoderFollower(head)
    stack.callback(follower.detach)

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        call.past = follower.cached_tokens(_named(module, args, kwargs))

    def after(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        hidden = tensor_of(output, "last_hidden_state")
        cache = getattr(output, "past_key_values", None)
        named = _named(module, args, kwargs)
        call.seen = follower.log_sharpness(hidden, cache, named, call.past)

    _hooked(backbone.register_forward_pre_hook, before, stack, with_kwargs=True)
    _hooked(backbone.register_forward_hook, after, stack, with_kwargs=True)

    def kept(logits: Tensor, kwargs: dict[str, Any]) -> Tensor:
        u, keep = call.take(), kwargs.get("logits_to_keep", 0)
        chosen = u[:, slice(-keep, None) if isinstance(keep, int) else keep]
        # a model that does not know logits_to_keep returns all
        return chosen if chosen.shape == logits.shape[:-1] else u

    return kept


def _hooked(
    register: Callable[..., Any], hook: Callable[..., Any], stack: ExitStack, **options: Any
) -> Callable[..., Any]:
    """Register a hook until the end of the block; compiled models run it uncompiled."""
    plain: Callable[..., Any] = torch.compiler.disable(hook)
    stack.callback(register(plain, **options).remove)
    return plain


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call by their names, including the positional ones."""
    if not args:
        return kwargs
    return {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}
