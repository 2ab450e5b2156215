"""Networks as a source of features, and with another last layer."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from calibrant._core.torch_models import (
    device_of,
    evaluating,
    layer_inputs,
    logits_of,
    moved,
    taken_apart,
)
from calibrant.calibrators.base import Calibrator


@torch.no_grad()
def count_outputs(model: nn.Module, loader: Iterable[Any]) -> int:
    """The number of logits that a model gives for the first batch of a loader."""
    for batch in loader:
        inputs, named, _ = moved(taken_apart(batch), device_of(model))
        with evaluating(model):
            return int(logits_of(model(*inputs, **named)).shape[-1])
    raise ValueError("the loader must have a batch at least, got none")


@torch.no_grad()
def feature_batches(
    model: nn.Module, loader: Iterable[Any], layer: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the inputs of a layer, and the labels, for each batch; the model learns nothing."""
    place = device_of(model)
    with evaluating(model), layer_inputs(model, layer) as heard:
        for batch in loader:
            inputs, named, labels = taken_apart(batch)
            model(*moved(inputs, place), **moved(named, place))
            yield heard().detach(), torch.as_tensor(labels)


# -------------------------------------------------------------------------------- its last layer


def last_layer(model: nn.Module, classes: int, name: str | None = None) -> str:
    """Name of the linear layer that gives the logits of a number of classes."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n}
    if name is not None:
        if name not in layers:
            raise ValueError(
                f"there is no linear layer {name!r} in this {type(model).__name__}; the last of "
                f"its {len(layers)} are {_shown(layers)}"
            )
        return name
    found = {n: m for n, m in layers.items() if m.out_features == classes}
    if len(found) != 1:
        which = "none" if not found else "several"
        raise ValueError(
            f"one linear layer with {classes} outputs is wanted, this {type(model).__name__} has "
            f"{which}: {_shown(found or layers)}; name the last one"
        )
    return str(*found)


def _shown(layers: Mapping[str, nn.Linear]) -> str:
    last = list(layers.items())[-5:]
    return ", ".join(f"{n} ({m.in_features} to {m.out_features})" for n, m in last) or "none"


def replace_head(model: nn.Module, head: nn.Module, name: str | None = None) -> nn.Module:
    """Return a model with another last layer; the given model keeps its own.

    All other layers are those of the given model, not copies, so that nothing large is held
    twice. The new model is used, compiled and exported as the old one was, and its ``state_dict``
    saved. But ``from_pretrained`` of Hugging Face builds the old layer: save the head on its own
    (:func:`calibrant.save`), and replace again after reading.

    Parameters
    ----------
    model : nn.Module
        A ResNet with its ``fc``, a vision transformer with its ``head`` or ``classifier``, or any
        other model with one linear layer that gives the logits.
    head : MaCCal, MaskedClassifier or nn.Module
        Maps features ``(..., width)`` to logits ``(..., classes)``. A copy of it is put where the
        last layer was, on the same device.
    name : str, optional
        The layer to replace, as ``model.named_modules()`` calls it. By default the linear layer
        with as many outputs as the head has classes; it must be the only one.

    Returns
    -------
    nn.Module
        Of the same class.

    Examples
    --------
    >>> from calibrant.retrain import MaskedClassifier
    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> other = replace_head(network, MaskedClassifier(8, 3))
    >>> other[3].width, network[3].in_features, other[1] is network[1]
    (8, 8, True)
    """
    if isinstance(head, Calibrator) and not head.classes:
        raise ValueError(f"this {type(head).__name__} is not fitted: call fit first")
    inside: Any = head.head if hasattr(head, "history_") else head  # what a MaCCal trained
    width, classes = _sizes(inside)
    path = last_layer(model, classes, name)
    layer = model.get_submodule(path)
    assert isinstance(layer, nn.Linear)
    if (layer.in_features, layer.out_features) != (width, classes):
        raise ValueError(
            f"the head maps {width} features to {classes} classes, the layer {path!r} maps "
            f"{layer.in_features} to {layer.out_features}: fit the head on its inputs"
        )
    others = [n for n, m in model.named_modules(remove_duplicate=False) if m is layer and n != path]
    if others:
        raise ValueError(
            f"the layer {path!r} is also {others[0]!r} in this {type(model).__name__}: it would be "
            "replaced in one place only"
        )
    put = copy.deepcopy(inside).to(layer.weight.device).train(layer.training)
    return _with_layer(model, path.split("."), put)


def _sizes(head: nn.Module) -> tuple[int, int]:
    if isinstance(head, nn.Linear):
        return head.in_features, head.out_features
    try:
        return int(head.width), int(head.classes)  # type: ignore[arg-type]
    except (AttributeError, TypeError):
        raise TypeError(
            "head must be a fitted MaCCal, a MaskedClassifier, an nn.Linear or another module with "
            f"width and classes, got {type(head).__name__}"
        ) from None


def _with_layer(module: nn.Module, path: list[str], layer: nn.Module) -> nn.Module:
    """A copy of a module, whose submodules are shared but for those on the path to the layer."""
    first, *rest = path
    found = copy.copy(module)
    found._modules = dict(module._modules)
    inner = module._modules[first]
    assert inner is not None
    found._modules[first] = _with_layer(inner, rest, layer) if rest else layer
    return found
