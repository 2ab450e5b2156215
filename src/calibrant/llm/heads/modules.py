r"""Temperature heads: modules that predict the temperature of each token.

A head gives the log-sharpness :math:`u = \log b = -\log T` of each token; the calibrated logits are
:math:`e^u z`. Every head starts as one temperature for all tokens: its last layer is zero, and its
bias is the best global log-sharpness. The attribute ``wants`` declares its input.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calibrant._core.chunks import mask_gap, with_masks
from calibrant._core.options import Count, WithOptions
from calibrant.calibrators.logpartition import LARGEST_GAP, LEAST_REST, LOWEST, Records

LIMIT = 3.0
"""Log-sharpness is clipped to plus and minus this: temperatures from 0.05 to 20."""
SHARPEST = math.exp(LIMIT)


class Head(WithOptions, nn.Module):
    """Base class of temperature heads.

    A head ``wants`` ``"hidden"`` states ``(..., width)``; a ``"sequence"`` of them
    ``(batch, tokens, width)``, from the first token on; the ``"shape"`` of the logits,
    :func:`_shape_features` ``(..., 12)``; or ``"nothing"``: any tensor ``(..., k)``, of which only
    the shape is used. ``kind`` is its name.
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
        self.last = last_layer(width, start)

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
        self.last = last_layer(units, start)

    def forward(self, hidden: Tensor) -> Tensor:
        """Log-sharpness ``(...)`` of states ``(..., width)``."""
        gate, value = self.first(F.layer_norm(hidden, hidden.shape[-1:])).chunk(2, -1)
        return cast(Tensor, self.last(F.silu(gate) * value))[..., 0]


_OCTAVES_SEEN = 7
"""Sharpness 0.05, 0.1, ... 3.2, at which the log-odds of the top token are features."""
_LEAST_ODDS = -12.0
"""Log-odds are clipped here: the top token is practically certain."""
_GAPS_SEEN = 4
_LARGEST_SEEN = 20.0
SHAPE_FEATURES = _OCTAVES_SEEN + 1 + _GAPS_SEEN


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
        self.last = last_layer(SHAPE_FEATURES, start)

    def standardise(self, features: Tensor) -> None:
        """Learn to normalise features ``(n, 12)`` to mean 0 and variance 1."""
        self.centre.copy_(features.mean(0))
        self.spread.copy_(features.std(0, correction=0).clamp(min=1e-3))

    def forward(self, features: Tensor) -> Tensor:
        """Log-sharpness ``(...)`` of features ``(..., 12)``."""
        return cast(Tensor, self.last((features - self.centre) / self.spread))[..., 0]


def _shape_features(records: Records) -> Tensor:
    """Features ``(n, 12)`` of the shape of the logits, from records.

    The log-odds against the top token at seven sharpnesses, the mean gap, and the gaps of the next
    four tokens; gaps as ``log(1 + gap)``.
    """
    rest = records.table[:, : _OCTAVES_SEEN * records.density : records.density, 0]
    gaps = records.gaps[:, 1 : _GAPS_SEEN + 1]
    return _features(
        *(torch.from_numpy(np.array(part, np.float32)) for part in (rest, records.mean_gap, gaps))
    )


def _shape_features_of_logits(logits: Tensor) -> Tensor:
    """The same features ``(..., 12)`` from logits ``(..., vocabulary)``."""
    logits = with_masks(logits.float(), mask_gap(logits))  # as the records have them
    best, top = logits.max(-1, keepdim=True)
    gaps = (best - logits).clamp(max=LARGEST_GAP)
    possible = ~torch.isneginf(logits)
    mean_gap = torch.where(possible, gaps, 0).sum(-1) / possible.sum(-1)
    count = min(_GAPS_SEEN + 1, logits.shape[-1])
    leading = gaps.topk(count, largest=False, sorted=True).values[..., 1:]
    leading = F.pad(leading, (0, _GAPS_SEEN + 1 - count), value=LARGEST_GAP)
    powers = (-LOWEST * gaps.scatter(-1, top, LARGEST_GAP)).exp()
    sums = []
    for _ in range(_OCTAVES_SEEN):
        sums.append(powers.sum(-1))
        powers = powers * powers  # twice the sharpness
    return _features(torch.stack(sums, -1).clamp(min=LEAST_REST).log(), mean_gap, leading)


def _features(rest: Tensor, mean_gap: Tensor, leading: Tensor) -> Tensor:
    """Clip the features, so that no single unusual token dominates a fit."""
    gaps = torch.cat([mean_gap[..., None], leading], -1).clamp(max=_LARGEST_SEEN)
    return torch.cat([rest.clamp(min=_LEAST_ODDS), gaps.log1p()], -1)


def bounded(u: Tensor) -> Tensor:
    """Clip log-sharpness to its limits."""
    return u.float().clamp(-LIMIT, LIMIT)


def last_layer(inputs: int, start: float) -> nn.Linear:
    """Return a layer whose output is ``start`` until it is trained."""
    layer = nn.Linear(inputs, 1)
    nn.init.zeros_(layer.weight)
    nn.init.constant_(layer.bias, start)
    return layer
