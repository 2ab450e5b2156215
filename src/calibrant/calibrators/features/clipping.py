"""Large features cut off before the last layer."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from calibrant._core.chunks import Examples, labelled_chunks
from calibrant._core.options import at_least, at_most
from calibrant._core.solve import check_time
from calibrant.calibrators.base import Calibrator, Context
from calibrant.calibrators.logpartition import Records, tabulate
from calibrant.calibrators.objectives import ece, nll
from calibrant.calibrators.piecewise import BEYOND
from calibrant.calibrators.scaling import best_sharpness

_TAILS = (1e-5, 0.5, 17)
"""Shares of features beyond the clipping values that are tried: from, to, and how many."""
_HALVINGS = 6  # further values below the smallest of these, each half of the one before
_REFINED = 4  # values that are tried between the best of these and each of its neighbours
_LOOKED_AT, _MAX_SEARCHED = 1_000_000, 10_000
"""Features at most that quantiles are taken of, and examples that clipping values are tried on."""
_MAX_DISAGREEMENT = 0.02
"""Part of their spread by which logits may differ from those of the last layer."""


class _Tried(NamedTuple):
    """A clipping value, its objective and accuracy, and the best log-sharpness after it."""

    clip: float
    value: float
    accuracy: float
    log_sharpness: float


class FeatureClipping(Calibrator):
    r"""Large features cut off before the last layer (Tao et al. 2025).

    .. math:: z' = W\,\mathrm{clip}(f, -c, c) + b

    computed as :math:`z + W (\mathrm{clip}(f, -c, c) - f)`, which keeps masked classes masked and
    logits as they are where nothing is clipped. :math:`c` is searched among quantiles of the
    features and down to 1/64 of their median, then between the neighbours of the best one, and must
    keep the accuracy. With a temperature, each value is judged at its own best one.

    Parameters
    ----------
    objective : {"nll", "ece"}
    max_accuracy_loss : float
        Part of the accuracy of the fit that clipping may cost.
    temperature : bool
        Divide by the best temperature afterwards.

    Attributes
    ----------
    clip_, temperature_ : scalar Tensor
        ``clip_`` is 3e38 where nothing is clipped.
    weight_ : (classes, width) Tensor
        Of the last layer.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> features, weight = rng.exponential(size=(4000, 20)), rng.normal(size=(5, 20))
    >>> honest = features.clip(max=1.5) @ weight.T
    >>> labels = (honest + rng.gumbel(size=honest.shape)).argmax(-1)
    >>> fitted = FeatureClipping(max_accuracy_loss=0.1).fit(
    ...     features @ weight.T, labels, features=features, head=(weight, np.zeros(5)))
    >>> 1.2 < float(fitted.clip_) < 1.8
    True
    """

    name = "fc"
    aliases = ("feature_clipping",)
    summary = "clips features before the last layer, then one temperature"
    needs_features = True
    needs_head = True
    learned_shapes = "weight_ classes width"
    clip_: Tensor
    weight_: Tensor
    temperature_: Tensor

    def __init__(
        self,
        *,
        objective: Literal["nll", "ece"] = "nll",
        max_accuracy_loss: Annotated[float, at_least(0), at_most(1)] = 0.01,
        temperature: bool = True,
    ) -> None:
        super().__init__()
        self.objective = objective
        self.max_accuracy_loss = max_accuracy_loss
        self.temperature = temperature
        self._store(clip_=BEYOND, weight_=torch.zeros(0, 0), temperature_=1.0)

    def size(self, classes: int) -> int:
        """The clipping value and the temperature."""
        return 1 + self.temperature

    def _fit(self, examples: Examples, context: Context) -> None:
        records = tabulate(examples)
        features = self._labelled_features(examples, context)
        parts = [chunk.logits for chunk in labelled_chunks(examples, 0, examples.labels.size)]
        logits = torch.cat(parts).float()
        weight, bias = (x.to(self.device) for x in _last_layer(context.head, examples, self._width))
        _check_head(logits, linear(features, weight, bias))
        some = np.arange(0, len(records), -(-len(records) // _MAX_SEARCHED))
        best = self._search(logits[some], features[some], weight, records.take(some))
        log_sharpness = best.log_sharpness
        if self.temperature:
            clipped = _clipped(logits, features, weight, best.clip)
            result = best_sharpness(_retabulated(clipped, records), warns=True)
            log_sharpness = float(result.x[0])
        self._store(clip_=best.clip, weight_=weight, temperature_=math.exp(-log_sharpness))

    def _search(self, logits: Tensor, features: Tensor, weight: Tensor, records: Records) -> _Tried:
        """The best clipping value among a coarse grid, then among a fine one around it."""
        size, largest = features.abs().reshape(-1), float(features.abs().max())
        if len(size) > _LOOKED_AT:
            rng = np.random.default_rng(0)
            size = size[rng.integers(len(size), size=_LOOKED_AT)]
        coarse = np.unique(np.quantile(size.cpu().numpy(), 1 - np.geomspace(*_TAILS)))
        coarse = coarse[coarse > 0]
        none = self._judged(BEYOND, records)
        if not len(coarse):  # features that are all zero
            return none
        below = coarse[0] * 0.5 ** np.arange(_HALVINGS, 0, -1)
        least = (1 - self.max_accuracy_loss) * none.accuracy

        def tried(clip: float) -> _Tried:
            check_time()
            moved = _clipped(logits, features, weight, clip)
            return self._judged(clip, _retabulated(moved, records))

        def best_of(result: list[_Tried]) -> _Tried:
            # the first of equals, so that nothing is clipped without need
            return min((x for x in result if x.accuracy >= least), key=lambda x: x.value)

        result = [none, *(tried(float(c)) for c in (*coarse[::-1], *below[::-1]) if c < largest)]
        best = best_of(result)
        if best is none:
            return none
        grid = [*sorted(x.clip for x in result[1:]), largest]
        at = grid.index(best.clip)
        ends = [(grid[max(at - 1, 0)], best.clip), (best.clip, grid[at + 1])]
        fine = np.concatenate([np.linspace(a, b, _REFINED + 2)[1:-1] for a, b in ends if a < b])
        return best_of([best, *(tried(float(c)) for c in fine)])

    def _judged(self, clip: float, records: Records) -> _Tried:
        u = float(best_sharpness(records).x[0]) if self.temperature else 0.0
        measure = nll if self.objective == "nll" else ece
        accuracy = float(records.weight @ records.correct / records.weight.sum())
        return _Tried(clip, measure(records, u).value, accuracy, u)

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        assert features is not None
        weight, clip = self.weight_.to(logits.dtype), self.clip_.to(logits.dtype)
        moved = _clipped(logits, features.to(logits.dtype), weight, clip)
        return moved / self.temperature_.to(logits.dtype)


def _clipped(logits: Tensor, features: Tensor, weight: Tensor, clip: Any) -> Tensor:
    return logits + linear(features.clamp(-clip, clip) - features, weight)


def _retabulated(logits: Tensor, records: Records) -> Records:
    """Records of the same examples with other logits."""
    return tabulate(Examples(logits, records.labels, records.weight, "top_label"))


def _last_layer(head: Any, examples: Examples, width: int) -> tuple[Tensor, Tensor]:
    """Weight and bias of the last layer in float32, with a row for each class."""
    if not isinstance(head, (tuple, list)) or len(head) != 2:
        raise TypeError(f"head must be (weight, bias), got {type(head).__name__}")
    layer = head[0], np.zeros(len(head[0])) if head[1] is None else head[1]
    arrays = (x.detach() if isinstance(x, Tensor) else np.asarray(x) for x in layer)
    weight, bias = (torch.as_tensor(x).float() for x in arrays)
    if examples.one_logit and weight.ndim == 2 and len(weight) == 1 and bias.shape == (1,):
        # one logit z stands for (0, z)
        weight, bias = (torch.cat([torch.zeros_like(x), x]) for x in (weight, bias))
    classes = examples.classes
    if weight.shape != (classes, width) or bias.shape != (classes,):
        raise ValueError(
            f"head must be (weight, bias) of shapes ({classes}, {width}) and ({classes},), for "
            f"these logits and features, got {tuple(weight.shape)} and {tuple(bias.shape)}"
        )
    if not (torch.isfinite(weight).all() and torch.isfinite(bias).all()):
        raise ValueError("head must be finite, got NaN or infinity in weight or bias")
    return weight, bias


def _check_head(logits: Tensor, expected: Tensor) -> None:
    """Raise unless the last layer gives the logits, up to a constant in each row and rounding."""
    possible = ~torch.isneginf(logits)
    count = possible.sum(-1, keepdim=True)

    def spread(values: Tensor) -> float:
        kept = torch.where(possible, values, 0).double()
        mean = kept.sum(-1, keepdim=True) / count
        return float((torch.where(possible, kept - mean, 0).square().sum() / count.sum()).sqrt())

    off, size = spread(expected - logits), spread(logits)
    if off > _MAX_DISAGREEMENT * size + 1e-4:
        raise ValueError(
            "head and features must give the logits, up to a constant in each row, but are off by "
            f"{off:.3g} where the logits spread by {size:.3g}: pass the weight, bias and inputs of "
            "the last layer, and the logits as the model gives them"
        )
