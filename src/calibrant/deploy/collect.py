"""Logits and labels of a model over a data loader."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from calibrant._core.checks import IGNORED
from calibrant._core.torch_models import (
    device_of,
    evaluating,
    layer_inputs,
    logits_of,
    moved,
    name_of,
    taken_apart,
)

if TYPE_CHECKING:
    pass


# ------------------------------------------------------------------------------ collect and fold


@overload
def collect(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    last_layer: None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def collect(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    last_layer: nn.Module | str,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...
def collect(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    last_layer: nn.Module | str | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, ...]:
    """Logits and labels of a data set: what calibrators are fitted on.

    The model runs in ``eval`` mode and without gradients; afterwards its layers are in the modes
    that they were in.

    Parameters
    ----------
    model : nn.Module
        With outputs as for :func:`calibrated`.
    loader : iterable of batches
        A ``DataLoader``, for instance. A batch is ``(inputs, labels)``, or ``(input, input, ...,
        labels)``, or a dictionary with ``labels`` whose other items are the inputs by name.
    last_layer : nn.Module or str, optional
        Return the inputs of this layer as well.
    device : optional
        The model is moved there. By default it stays where its parameters are.

    Returns
    -------
    logits : (n, ..., classes)
    labels : (n, ...)
    features : (n, ..., width)
        Only with ``last_layer``. All are on the CPU. Where batches are texts of different
        lengths, the rows are the tokens with a label.

    Examples
    --------
    >>> network = nn.Linear(2, 3)
    >>> loader = [(torch.randn(4, 2), torch.tensor([0, 1, 2, 0])) for _ in range(5)]
    >>> logits, labels = collect(network, loader)
    >>> logits.shape, labels.shape
    (torch.Size([20, 3]), torch.Size([20]))
    """
    if device is not None:
        model.to(device)
    place = device_of(model, device or "cpu")
    layer = None if last_layer is None else name_of(model, last_layer)
    with evaluating(model), torch.no_grad():
        found = [_outcome(model, batch, layer, place) for batch in loader]
    if not found:
        raise ValueError("the loader must have a batch at least, got none")
    if len({part.shape[1:] for _, part, *_ in found}) > 1:
        found = [_labelled_rows(*parts) for parts in found]
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def _outcome(
    model: nn.Module, batch: Any, layer: str | None, device: torch.device
) -> tuple[Tensor, ...]:
    """Logits, labels and perhaps features of a batch, on the CPU."""
    inputs, named, labels = taken_apart(batch)
    inputs, named = moved(inputs, device), moved(named, device)
    if layer is None:
        parts = [logits_of(model(*inputs, **named))]
    else:
        with layer_inputs(model, layer) as heard:
            parts = [logits_of(model(*inputs, **named)), heard()]
    logits, *features = (part.detach().cpu() for part in parts)
    return logits, torch.as_tensor(labels).cpu(), *features


def _labelled_rows(logits: Tensor, labels: Tensor, *features: Tensor) -> tuple[Tensor, ...]:
    kept = labels.reshape(-1) != IGNORED
    rows = (part.reshape(-1, part.shape[-1])[kept] for part in (logits, *features))
    first, *rest = rows
    return first, labels.reshape(-1)[kept], *rest
