"""Loss functions as modules, and the line of a loss in the table."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from calibrant.losses.base import batch_of
from calibrant.losses.proper import ce

Function = Callable[..., Tensor]
"""Maps logits ``(..., classes)`` and labels ``(...)`` to values, with options by keyword."""


class MeanLoss(nn.Module):
    """Mean over a batch of a loss of each example.

    >>> import torch
    >>> MeanLoss(ce)(torch.zeros(4, 2), torch.tensor([0, 1, 1, -100]))
    tensor(0.6931)
    """

    def __init__(self, function: Function, **options: Any) -> None:
        super().__init__()
        _check_options(function, options)
        self.function, self.options = function, options

    def forward(
        self,
        logits: Tensor,
        labels: Tensor,
        features: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        """Mean loss of a batch; features and indices are not used."""
        values = self.function(logits, labels, **self.options)
        return batch_of(logits, labels).mean(values.reshape(-1))

    def extra_repr(self) -> str:
        """Name and options."""
        return _shown(self.function, self.options)


class RegularisedLoss(nn.Module):
    """A loss plus a weighted statistic of the batch.

    Parameters
    ----------
    statistic : function of logits and labels
    weight : float
    base : Module, optional
        The loss that the statistic is added to; cross-entropy by default.
    **options
        Of the statistic.
    """

    def __init__(
        self, statistic: Function, *, weight: float, base: nn.Module | None = None, **options: Any
    ) -> None:
        super().__init__()
        _check_options(statistic, options)
        if not (base is None or isinstance(base, nn.Module)):
            raise TypeError(f'base must be a module such as LOSSES["focal"](), got {base!r}')
        self.statistic, self.weight, self.options = statistic, weight, options
        self.base = MeanLoss(ce) if base is None else base

    def forward(
        self,
        logits: Tensor,
        labels: Tensor,
        features: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        """Loss of a batch; features and indices are not used."""
        base: Tensor = self.base(logits, labels)
        return base + self.weight * self.statistic(logits, labels, **self.options)

    def extra_repr(self) -> str:
        """Name, weight and options."""
        return _shown(self.statistic, {"weight": self.weight, **self.options})


class Loss(NamedTuple):
    """A line of :data:`~calibrant.LOSSES`: call it with the options of the loss for a module."""

    make: Callable[..., nn.Module]
    documented: Callable[..., Any]
    """Function or class with the documentation."""
    reference: str = ""
    aliases: tuple[str, ...] = ()

    def __call__(self, **options: Any) -> nn.Module:
        """Make the module."""
        return self.make(**options)

    @property
    def summary(self) -> str:
        """First sentence of the documentation."""
        return (inspect.getdoc(self.documented) or "").partition("\n")[0]


def mean_of(function: Function, reference: str = "", aliases: tuple[str, ...] = ()) -> Loss:
    """Table line of a loss of each example."""
    return Loss(lambda **options: MeanLoss(function, **options), function, reference, aliases)


def regularised_by(statistic: Function, weight: float, reference: str) -> Loss:
    """Table line of a statistic of the batch, with its usual weight."""

    def make(**options: Any) -> nn.Module:
        return RegularisedLoss(statistic, **{"weight": weight, **options})

    return Loss(make, statistic, reference)


def _check_options(function: Function, options: dict[str, Any]) -> None:
    unknown = options.keys() - inspect.signature(function).parameters
    if unknown:
        raise TypeError(f"{function.__name__} has no option {', '.join(sorted(unknown))}")


def _shown(function: Function, options: dict[str, Any]) -> str:
    return ", ".join([function.__name__, *(f"{name}={value!r}" for name, value in options.items())])
