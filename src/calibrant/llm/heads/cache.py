"""Run a decoder head next to a model, with a memory for each of the model's caches."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from torch import Tensor

from calibrant.llm.heads.modules import DecoderHead, Memory

STATES = ("past_key_values", "cache_params", "state")
"""Arguments that hold the state of earlier tokens; only the first is followed."""
REORDERING = ("reorder_cache", "batch_select_indices")
"""Methods of a cache that select rows of the batch; beam search calls the first."""


@dataclass
class DecoderFollower:
    """Computes the log-sharpness of each call of a model, with a memory for each cache."""

    head: DecoderHead
    # weak references: a cache and its memory are freed when a generation is over
    memories: weakref.WeakKeyDictionary[Any, Memory] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def cached_tokens(self, kwargs: dict[str, Any]) -> int:
        """Return the number of tokens in the cache that a call gets."""
        return _length(kwargs.get("past_key_values"))

    def log_sharpness(
        self, hidden: Tensor, cache: Any, kwargs: dict[str, Any], past: int
    ) -> Tensor:
        """Run the head on the states of a call, after ``past`` cached tokens."""
        memory = self._memory(cache, hidden, kwargs, past)
        present = _present(kwargs.get("attention_mask"), past + hidden.shape[1])
        _check_positions(kwargs.get("position_ids"), present)
        return self.head(hidden.float(), present=present, memory=memory)  # type: ignore[no-any-return]

    def _memory(
        self, cache: Any, hidden: Tensor, kwargs: dict[str, Any], past: int
    ) -> Memory | None:
        batch, tokens, _ = hidden.shape
        if _length(cache) != past + tokens:
            _check_whole_text(kwargs)
            return None
        if cache not in self.memories:
            self._follow(cache)
        memory = self.memories[cache]
        memory.crop(past)  # speculative decoding takes tokens back
        same = memory.keys is None or len(memory.keys) == batch
        if len(memory) != past or not same:
            raise ValueError(
                f"the decoder head must have seen all tokens in the cache: it has {past} of "
                f"{batch} texts, the head saw {len(memory)}; fill the cache while the head is "
                "attached, and do not repeat its rows"
            )
        return memory

    def _follow(self, cache: Any) -> None:
        """Reorder the memory together with the cache, while the head is attached."""
        memory = Memory()
        self.memories[cache] = memory
        for name in REORDERING:
            setattr(cache, name, _Reordering(weakref.ref(cache), name, memory))

    def detach(self) -> None:
        """Restore the methods of the caches."""
        for cache in list(self.memories):
            for name in REORDERING:
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


def _check_whole_text(kwargs: dict[str, Any]) -> None:
    """Raise unless a call without a cache to follow has the whole text."""
    states = [name for name in STATES if kwargs.get(name) is not None]
    if states or kwargs.get("use_cache"):
        raise ValueError(
            "the decoder head needs whole texts, or a cache that counts its tokens and is returned "
            f"as past_key_values, got {', '.join(states) or 'use_cache=True'}: pass "
            "use_cache=False, to generate too, or use a head that looks at one token"
        )


def _present(mask: Any, tokens: int) -> Tensor | None:
    """Mask of the tokens that are not padding, ``(batch, tokens)``."""
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
    """Raise if positions restart in a row, which then holds several texts."""
    if not isinstance(position, Tensor) or position.ndim != 2 or position.shape[1] < 2:
        return
    restart = position[:, 1:] <= position[:, :-1]
    if present is not None:
        present = present[:, -position.shape[1] :].to(restart.device)
        restart = restart & present[:, 1:] & present[:, :-1]
    if restart.any():
        raise ValueError(
            "the decoder head needs one text in each row, got position_ids that restart: pad "
            "texts instead of packing them, or use a head that looks at one token"
        )
