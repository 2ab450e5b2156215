r"""Temperature heads: modules that predict the temperature of each token.

A head gives the log-sharpness :math:`u = \log b = -\log T` of each token; the calibrated logits are
:math:`e^u z`. Every head starts as one temperature for all tokens: its last layer is zero, and its
bias is the best global log-sharpness. The attribute ``wants`` declares its input.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calibrant._core.checks import check_choice
from calibrant._core.chunks import mask_gap, with_masks
from calibrant._core.logpartition import LARGEST_GAP, LEAST_REST, LOWEST, Records
from calibrant._core.options import (
    Count,
    Options,
    Positive,
    WithOptions,
    options_of,
    unknown_option,
)

LIMIT = 3.0
"""Log-sharpness is clipped to plus and minus this: temperatures from 0.05 to 20."""
SHARPEST = math.exp(LIMIT)


class Head(WithOptions, nn.Module):
    """Base class of temperature heads.

    A head ``wants`` ``"hidden"`` states ``(..., width)``; a ``"sequence"`` of them
    ``(batch, tokens, width)``, from the first token on; the ``"shape"`` of the logits,
    :func:`shape_features` ``(..., 12)``; or ``"nothing"``: any tensor ``(..., k)``, of which only
    the shape is used. ``kind`` is its name in :data:`HEADS`.
    """

    kind: ClassVar[str]
    wants: ClassVar[Literal["nothing", "hidden", "shape", "sequence"]]

    def config(self) -> dict[str, Any]:
        """Return the arguments that make a head of the same form, without learned values."""
        names = inspect.signature(type(self)).parameters
        return {name: getattr(self, name) for name in names if name != "start"}


class GlobalHead(Head):
    """One temperature for all tokens."""

    kind = "global"
    wants = "nothing"

    def __init__(self, *, start: float = 0.0) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor(float(start)))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the same log-sharpness for each ``(...)`` of ``(..., k)``."""
        return self.bias.expand(inputs.shape[:-1])


class LinearHead(Head):
    r"""A linear function of the hidden state: :math:`u = w \cdot \mathrm{norm}(h) + c`.

    The state is normalised to mean 0 and variance 1 first (a layer norm without weights).
    """

    kind = "linear"
    wants = "hidden"

    def __init__(self, *, width: Count, start: float = 0.0) -> None:
        super().__init__()
        self.width = width
        self.last = _last(width, start)

    def forward(self, hidden: Tensor) -> Tensor:
        """Log-sharpness ``(...)`` of states ``(..., width)``."""
        return cast(Tensor, self.last(F.layer_norm(hidden, hidden.shape[-1:])))[..., 0]


class MLPHead(Head):
    """A SwiGLU network with one inner layer of ``units`` on the hidden state."""

    kind = "mlp"
    wants = "hidden"

    def __init__(self, *, width: Count, units: Count = 64, start: float = 0.0) -> None:
        super().__init__()
        self.width, self.units = width, units
        self.first = nn.Linear(width, 2 * units)
        self.last = _last(units, start)

    def forward(self, hidden: Tensor) -> Tensor:
        """Log-sharpness ``(...)`` of states ``(..., width)``."""
        gate, value = self.first(F.layer_norm(hidden, hidden.shape[-1:])).chunk(2, -1)
        return cast(Tensor, self.last(F.silu(gate) * value))[..., 0]


OCTAVES_SEEN = 7
"""Sharpness 0.05, 0.1, ... 3.2, at which the log-odds of the top token are features."""
LEAST_ODDS = -12.0
"""Log-odds are clipped here: the top token is practically certain."""
GAPS_SEEN = 4
LARGEST_SEEN = 20.0
SHAPE_FEATURES = OCTAVES_SEEN + 1 + GAPS_SEEN


class ShapeHead(Head):
    """A linear function of the shape of the logits; it needs no hidden states."""

    kind = "shape"
    wants = "shape"
    centre: Tensor
    spread: Tensor

    def __init__(self, *, start: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(SHAPE_FEATURES))
        self.register_buffer("spread", torch.ones(SHAPE_FEATURES))
        self.last = _last(SHAPE_FEATURES, start)

    def standardise(self, features: Tensor) -> None:
        """Learn to normalise features ``(n, 12)`` to mean 0 and variance 1."""
        self.centre.copy_(features.mean(0))
        self.spread.copy_(features.std(0, correction=0).clamp(min=1e-3))

    def forward(self, features: Tensor) -> Tensor:
        """Log-sharpness ``(...)`` of features ``(..., 12)``."""
        return cast(Tensor, self.last((features - self.centre) / self.spread))[..., 0]


def shape_features(records: Records) -> Tensor:
    """Features ``(n, 12)`` of the shape of the logits, from records.

    The log-odds against the top token at seven sharpnesses, the mean gap, and the gaps of the next
    four tokens; gaps as ``log(1 + gap)``.
    """
    rest = records.table[:, : OCTAVES_SEEN * records.density : records.density, 0]
    gaps = records.gaps[:, 1 : GAPS_SEEN + 1]
    return _features(
        *(torch.from_numpy(np.array(part, np.float32)) for part in (rest, records.mean_gap, gaps))
    )


def shape_features_of_logits(logits: Tensor) -> Tensor:
    """The same features ``(..., 12)`` from logits ``(..., vocabulary)``."""
    logits = with_masks(logits.float(), mask_gap(logits))  # as the records have them
    best, top = logits.max(-1, keepdim=True)
    gaps = (best - logits).clamp(max=LARGEST_GAP)
    possible = ~torch.isneginf(logits)
    mean_gap = torch.where(possible, gaps, 0).sum(-1) / possible.sum(-1)
    count = min(GAPS_SEEN + 1, logits.shape[-1])
    leading = gaps.topk(count, largest=False, sorted=True).values[..., 1:]
    leading = F.pad(leading, (0, GAPS_SEEN + 1 - count), value=LARGEST_GAP)
    powers = (-LOWEST * gaps.scatter(-1, top, LARGEST_GAP)).exp()
    sums = []
    for _ in range(OCTAVES_SEEN):
        sums.append(powers.sum(-1))
        powers = powers * powers  # twice the sharpness
    return _features(torch.stack(sums, -1).clamp(min=LEAST_REST).log(), mean_gap, leading)


def _features(rest: Tensor, mean_gap: Tensor, leading: Tensor) -> Tensor:
    """Clip the features, so that no single unusual token dominates a fit."""
    gaps = torch.cat([mean_gap[..., None], leading], -1).clamp(max=LARGEST_SEEN)
    return torch.cat([rest.clamp(min=LEAST_ODDS), gaps.log1p()], -1)


EPS, THETA = 1e-6, 10000.0
"""Of the RMS norms and of the rotary positions of the ATS head, as in Llama 2."""


@dataclass
class Memory:
    """Keys and values ``(batch, heads, tokens, size)`` of the tokens seen by an ATS head."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def __len__(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add tokens, and return the keys and values of all."""
        if self.keys is not None and self.values is not None:
            keys = torch.cat([self.keys, keys], 2)
            values = torch.cat([self.values, values], 2)
        self.keys, self.values = keys, values
        return keys, values

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order, as each step of a beam search does."""
        if self.keys is not None and self.values is not None:
            rows = rows.to(self.keys.device)
            self.keys, self.values = self.keys[rows], self.values[rows]

    def crop(self, tokens: int) -> None:
        """Forget all but the first tokens."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:, :, :tokens], self.values[:, :, :tokens]


class ATSHead(Head):
    """Adaptive temperature scaling (Xie et al. 2024): a transformer layer, then a linear one.

    The first is a decoder layer like those of Llama: RMS norm, causal self-attention with rotary
    positions, SwiGLU, residuals, no biases. It attends to all earlier tokens, so it must be trained
    on whole texts, prompts included. The width must be a multiple of twice the ``attention_heads``.
    ``inner`` is the width of the SwiGLU layer, by default 8/3 of ``width``; ``cap`` is the largest
    sharpness.
    """

    kind = "ats"
    wants = "sequence"

    def __init__(
        self,
        *,
        width: Count,
        attention_heads: Count = 8,
        inner: Count | None = None,
        cap: Positive = SHARPEST,
        start: float = 0.0,
    ) -> None:
        super().__init__()
        if width % (2 * attention_heads):
            raise ValueError(
                f"width must be a multiple of twice the attention heads, got {width} and "
                f"{attention_heads}: choose another number of attention_heads"
            )
        self.width, self.attention_heads, self.cap = width, attention_heads, cap
        self.inner = 8 * width // 3 if inner is None else inner
        self.input_layernorm = nn.RMSNorm(width, EPS)
        self.self_attn = nn.ModuleDict({f"{n}_proj": _matrix(width, width) for n in "qkvo"})
        self.post_attention_layernorm = nn.RMSNorm(width, EPS)
        sizes = {
            "gate": (width, self.inner),
            "up": (width, self.inner),
            "down": (self.inner, width),
        }
        self.mlp = nn.ModuleDict({f"{name}_proj": _matrix(*size) for name, size in sizes.items()})
        self.last = _last(width, start)

    def forward(
        self, hidden: Tensor, *, present: Tensor | None = None, memory: Memory | None = None
    ) -> Tensor:
        """Log-sharpness ``(batch, tokens)`` of states ``(batch, tokens, width)``.

        They follow the tokens in the ``memory`` and are added to it. ``present``
        ``(batch, tokens so far)`` is False for padding, which takes up no position.
        """
        x = hidden + self._attended(self.input_layernorm(hidden), present, memory)
        normed = self.post_attention_layernorm(x)
        gate, up, down = (self.mlp[f"{name}_proj"] for name in ("gate", "up", "down"))
        x = x + down(F.silu(gate(normed)) * up(normed))
        return cast(Tensor, self.last(x))[..., 0].clamp(max=math.log(self.cap))

    def _attended(self, x: Tensor, present: Tensor | None, memory: Memory | None) -> Tensor:
        batch, tokens, _ = x.shape
        memory = Memory() if memory is None else memory
        query, key, value = (
            self.self_attn[f"{name}_proj"](x)
            .view(batch, tokens, self.attention_heads, -1)
            .transpose(1, 2)
            for name in "qkv"
        )
        past = len(memory)
        everything = torch.arange(past + tokens, device=x.device)
        position = own = everything[past:]
        allowed = everything <= own[:, None]
        if present is not None:
            present = present.bool()
            # a padded token still sees itself, since a softmax over nothing is NaN
            allowed = (allowed & present[:, None, None, :]) | (everything == own[:, None])
            position = present.cumsum(1)[:, None, past:] - 1  # padding takes up no position
        keys, values = memory.extend(self._rotated(key, position), value)
        mixed = F.scaled_dot_product_attention(
            self._rotated(query, position), keys, values, attn_mask=allowed
        )
        return cast(Tensor, self.self_attn["o_proj"](mixed.transpose(1, 2).flatten(2)))

    def _rotated(self, x: Tensor, position: Tensor) -> Tensor:
        """Rotary positions: pairs (i, i + size/2) are rotated (Su et al. 2021)."""
        half = x.shape[-1] // 2
        speed = THETA ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angle = position[..., None].to(torch.float32) * speed
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        left, right = x[..., :half], x[..., half:]
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


HEADS: dict[str, type[Head]] = {
    head.kind: head for head in (GlobalHead, LinearHead, MLPHead, ShapeHead, ATSHead)
}
"""Temperature heads by name."""


def head_options(kind: str) -> Options:
    """Return the options of a kind of head; its width and start are those of the data."""
    check_choice("head", kind, tuple(HEADS))
    options = options_of(HEADS[kind])
    return {name: options[name] for name in options if name not in ("width", "start")}


def make_head(kind: str, *, width: int, start: float = 0.0, **options: Any) -> Head:
    """Make a new head for hidden states of a width."""
    known = head_options(kind)
    for option in options.keys() - known.keys():
        raise unknown_option(f"the {kind} head", option, known)
    build: Any = HEADS[kind]
    if build.wants in ("hidden", "sequence"):
        options["width"] = width
    return cast(Head, build(start=start, **options))


def bounded(u: Tensor) -> Tensor:
    """Clip log-sharpness to its limits."""
    return u.float().clamp(-LIMIT, LIMIT)


def _matrix(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.02)
    return layer


def _last(inputs: int, start: float) -> nn.Linear:
    layer = nn.Linear(inputs, 1)
    nn.init.zeros_(layer.weight)
    nn.init.constant_(layer.bias, start)
    return layer
