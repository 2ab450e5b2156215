"""Collect logits and labels of a model from a data loader."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from calibrant._core import checks, torch_models
from calibrant._core.checks import IGNORED
from calibrant._core.torch_models import evaluating, layer_inputs, logits_of, moved
from calibrant.deploy.attach import Layer


@checks.warnings_at_caller()
def collect(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    last_layer: Layer | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, ...]:
    """Collect logits and labels for the fit of a calibrator.

    The model runs without gradients in ``eval`` mode, and its layers return to their modes.

    Parameters
    ----------
    model : nn.Module
        With outputs as for :func:`calibrated`.
    loader : iterable of batches
        A ``DataLoader``, for instance. A batch is ``(inputs, labels)``, or ``(input, input, ...,
        labels)``, or a dictionary with ``labels`` whose other items are the inputs by name.
    last_layer : nn.Module or str, optional
        Also return the inputs of this layer.
    device : optional
        The model is moved there. By default it stays where its parameters are.

    Returns
    -------
    logits : (n, ..., classes)
    labels : (n, ...)
    features : (n, ..., width)
        With ``last_layer``. All are on the CPU. If batches have texts of different lengths, only
        tokens with a label are returned, one per row.

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
    place = torch_models.device_of(model, device or "cpu")
    layer = None if last_layer is None else torch_models.name_of(model, last_layer)
    with evaluating(model), torch.no_grad():
        batches = [_outputs(model, batch, layer, place) for batch in loader]
    if not batches:
        raise ValueError("the loader must have at least one batch, got none")
    if len({labels.shape[1:] for _, labels, *_ in batches}) > 1:
        batches = [_labelled_rows(*arrays) for arrays in batches]
    arrays = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    checks.warn_of_probs(arrays[0], "if they are, collect the outputs of the layer before")
    return arrays


def _outputs(
    model: nn.Module, batch: Any, layer: str | None, device: torch.device
) -> tuple[Tensor, ...]:
    """Return logits, labels and, with a layer, features of a batch, on the CPU."""
    inputs, named, labels = torch_models.taken_apart(batch)
    inputs, named = moved(inputs, device), moved(named, device)
    targets = torch.as_tensor(labels).cpu()
    if layer is None:
        return logits_of(model(*inputs, **named)).detach().cpu(), targets
    with layer_inputs(model, layer) as features:
        logits = logits_of(model(*inputs, **named))
        return logits.detach().cpu(), targets, features().detach().cpu()


def _labelled_rows(logits: Tensor, labels: Tensor, *features: Tensor) -> tuple[Tensor, ...]:
    kept = labels.reshape(-1) != IGNORED
    rows, *others = (values.flatten(0, -2)[kept] for values in (logits, *features))
    return rows, labels.reshape(-1)[kept], *others
