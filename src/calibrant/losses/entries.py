"""Shared parts of the losses: checked batches, proper scores, modules and entries of the table.

Every loss takes ``logits (..., classes)`` and ``labels (...)`` with -100 ignored. Half precision
is widened to float32. Nothing here depends on the values, so ``torch.compile`` sees one graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calibrant._core.checks import IGNORED
from calibrant._core.options import (
    NonNegative,
    Options,
    WithOptions,
    check_options,
    options_of,
    unknown_option,
)

_Function: TypeAlias = Callable[..., Tensor]
"""Maps logits ``(..., classes)`` and labels ``(...)`` to values, with options by keyword."""
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
Extra: TypeAlias = Tensor | None
"""Features ``(..., width)`` or the indices ``(n,)`` of examples, which only some losses need."""


@dataclass
class Batch:
    """Flattened examples of a batch."""

    logits: Tensor  # (n, classes), float32 or wider
    labels: Tensor  # (n,), 0 where they are ignored
    mask: Tensor  # (n,), 1 for examples that count, 0 for ignored ones
    shape: torch.Size  # of the labels

    @property
    def log_probs(self) -> Tensor:
        """Log-probabilities ``(n, classes)``."""
        return self.logits.log_softmax(-1)

    @property
    def own(self) -> Tensor:
        """Log-probability of the label ``(n,)``."""
        return at(self.log_probs, self.labels)

    @property
    def correct(self) -> Tensor:
        """1 where the largest logit is that of the label, ``(n,)``."""
        return (self.logits.argmax(-1) == self.labels).to(self.logits.dtype)

    @property
    def confidence(self) -> Tensor:
        """Largest probability ``(n,)``."""
        return self.log_probs.amax(-1).exp()

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the examples that count; 0 where there are none."""
        return (values * self.mask).sum() / self.mask.sum().clamp(min=1)

    def shaped(self, values: Tensor) -> Tensor:
        """Values of examples in the shape of the labels, 0 where they are ignored."""
        return (values * self.mask).reshape(self.shape)


def batch_of(logits: Tensor, labels: Tensor) -> Batch:
    """Check shapes and flatten.

    Labels out of range fail where they index the logits. Masked classes (-inf) suit the losses
    that look at the label alone; those that sum over classes become infinite.
    """
    if not isinstance(logits, Tensor) or not isinstance(labels, Tensor):
        kinds = f"{type(logits).__name__} and {type(labels).__name__}"
        raise TypeError(f"logits and labels must be tensors, got {kinds}: use torch.as_tensor")
    if logits.ndim < 2 or logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits must be (..., classes) and labels (...), got {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}: classes come last, see logits.movedim(1, -1)"
        )
    if labels.is_floating_point():
        raise TypeError(f"labels must be whole numbers, got {labels.dtype}")
    wide = logits if logits.dtype.itemsize >= 4 else logits.float()
    rows, flat = wide.reshape(-1, logits.shape[-1]), labels.reshape(-1).long()
    kept = flat != IGNORED
    return Batch(rows, torch.where(kept, flat, 0), kept.to(rows.dtype), labels.shape)


def at(values: Tensor, index: Tensor) -> Tensor:
    """Return one entry of each row, ``(n, classes), (n,) -> (n,)``."""
    return values.gather(-1, index[:, None])[:, 0]


def summed_over_ranks(values: Tensor) -> Tensor:
    """Return the sum over the processes that train together, taken in place."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(values)
    return values


def ce(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Cross-entropy of each example, :math:`-\log p_y`.

    Parameters
    ----------
    logits : (..., classes)
    labels : (...) integers, -100 ignored

    Returns
    -------
    (...)
        0 where the label is ignored.

    Examples
    --------
    >>> ce(torch.tensor([[0.0, 0.0], [9.0, 0.0]]), torch.tensor([0, -100]))
    tensor([0.6931, 0.0000])
    """
    batch = batch_of(logits, labels)
    return batch.shaped(-batch.own)


def brier(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Brier score of each example, :math:`\sum_k (p_k - [k = y])^2`, between 0 and 2.

    >>> brier(torch.tensor([[0.0, 0.0]]), torch.tensor([0]))
    tensor([0.5000])
    """
    batch = batch_of(logits, labels)
    probs = batch.log_probs.exp()
    target = F.one_hot(batch.labels, probs.shape[-1])
    return batch.shaped((probs - target).square().sum(-1))


class MeanLoss(WithOptions, nn.Module):
    """Mean over a batch of a loss of each example.

    >>> MeanLoss(ce)(torch.zeros(4, 2), torch.tensor([0, 1, 1, -100]))
    tensor(0.6931)
    """

    def __init__(self, function: _Function, **options: Any) -> None:
        super().__init__()
        self.function, self.options = function, _checked_options(function, options)

    def forward(
        self, logits: Tensor, labels: Tensor, features: Extra = None, indices: Extra = None
    ) -> Tensor:
        """Mean loss of a batch; features and indices are not used."""
        values = self.function(logits, labels, **self.options)
        return batch_of(logits, labels).mean(values.reshape(-1))

    def extra_repr(self) -> str:
        """Name and options."""
        return _shown(self.function, self.options)


class RegularisedLoss(WithOptions, nn.Module):
    """A loss plus a weighted statistic of the batch.

    Parameters
    ----------
    statistic : function of logits and labels
    weight : float
    base : Module or str, optional
        The loss that the statistic is added to, or its name; cross-entropy by default.
    **options
        Of the statistic.
    """

    def __init__(
        self,
        statistic: _Function,
        *,
        weight: NonNegative,
        base: nn.Module | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.statistic, self.weight = statistic, weight
        self.options = _checked_options(statistic, options)
        if isinstance(base, str):
            losses = import_module("calibrant.losses").LOSSES  # which imports this module
            self.base: nn.Module = losses[losses.name(base)]()
        else:
            self.base = MeanLoss(ce) if base is None else base

    def forward(
        self, logits: Tensor, labels: Tensor, features: Extra = None, indices: Extra = None
    ) -> Tensor:
        """Loss of a batch; features and indices are not used."""
        base: Tensor = self.base(logits, labels)
        return base + self.weight * self.statistic(logits, labels, **self.options)

    def extra_repr(self) -> str:
        """Name, weight and options."""
        return _shown(self.statistic, {"weight": self.weight, **self.options})


def _checked_options(function: _Function, options: dict[str, Any]) -> dict[str, Any]:
    known = _by_keyword(options_of(function))
    for name in options.keys() - known.keys():
        raise TypeError(str(unknown_option(function.__name__, name, known)))
    return check_options(known, options)


def _by_keyword(options: Options) -> Options:
    return {name: option for name, option in options.items() if option.kind is _KEYWORD}


def _shown(function: _Function, options: dict[str, Any]) -> str:
    return ", ".join([function.__name__, *(f"{name}={value!r}" for name, value in options.items())])


class Loss(NamedTuple):
    """An entry of :data:`~calibrant.LOSSES`: call it with the options of the loss for a module.

    >>> Loss(MeanLoss, ce)(function=ce, classes=10, examples=50_000)
    MeanLoss(ce)
    """

    make: Callable[..., nn.Module]
    documented: Callable[..., Any]  # function or class with the documentation
    reference: str = ""
    aliases: tuple[str, ...] = ()

    def __call__(
        self, *, classes: int | None = None, examples: int | None = None, **options: Any
    ) -> nn.Module:
        """Make the module.

        Every loss takes the number of classes and that of the training examples; it uses what it
        needs.
        """
        sizes = {"classes": classes, "examples": examples}
        needed = {name: sizes[name] for name in options_of(self.make) if name in sizes}
        if missing := [name for name, size in needed.items() if size is None]:
            name = self.documented.__name__
            raise TypeError(f"{name} needs the number of {missing[0]}: pass {missing[0]}=")
        return self.make(**needed, **options)

    @property
    def options(self) -> Options:
        """Options by name, besides the numbers of classes and examples."""
        return _by_keyword({**options_of(self.documented), **options_of(self.make)})

    @property
    def summary(self) -> str:
        """First sentence of the documentation."""
        return (inspect.getdoc(self.documented) or "").partition("\n")[0]


def mean_of(function: _Function, reference: str = "", aliases: tuple[str, ...] = ()) -> Loss:
    """Return the entry of a loss that is the mean over the examples."""
    return Loss(partial(MeanLoss, function), function, reference, aliases)


def regularised_by(statistic: _Function, weight: float, reference: str) -> Loss:
    """Return the entry of a statistic of the batch that is added with its usual weight."""
    return Loss(partial(RegularisedLoss, statistic, weight=weight), statistic, reference)


TABLE = {
    "ce": mean_of(ce, aliases=("cross_entropy", "nll")),
    "brier": mean_of(brier, "Brier 1950", aliases=("brier_score",)),
}
