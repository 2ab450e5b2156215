"""Features with labels, of arrays or of a frozen network, and the replacement of its last layer."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from calibrant._core import checks, torch_models
from calibrant._core.checks import IGNORED, FloatArray, IntArray, Logits, Values
from calibrant._core.chunks import as_tensor
from calibrant._core.torch_models import device_of, evaluating, moved, taken_apart

CHUNK = 4096  # rows converted at a time for checks and for the control of the keep rate


class _FeatureBatch(NamedTuple):
    """Features ``(n, width)``, labels ``(n,)`` and weights ``(n,)`` on one device."""

    features: Tensor
    labels: Tensor
    weight: Tensor


class _LabelledFeatures(NamedTuple):
    """Features in their original dtype and place, of which only batches are converted."""

    features: Logits  # (n, width)
    labels: IntArray
    weight: FloatArray
    kept: IntArray  # rows with a label and a positive weight

    def batch(self, index: IntArray, device: torch.device) -> _FeatureBatch:
        """Return the rows at an index."""
        if isinstance(self.features, Tensor):
            features = self.features[torch.from_numpy(index)].detach()
        else:
            features = as_tensor(self.features[index])
        return _FeatureBatch(
            features.to(device, torch.float32),
            torch.from_numpy(self.labels[index]).to(device),
            torch.from_numpy(self.weight[index]).to(device, torch.float32),
        )

    def chunks(self, device: torch.device) -> Iterator[_FeatureBatch]:
        """Yield all kept rows, in order."""
        for start in range(0, len(self.kept), CHUNK):
            yield self.batch(self.kept[start : start + CHUNK], device)

    def check_finite(self) -> None:
        """Raise unless the features of all kept rows are finite."""
        home = self.features.device if isinstance(self.features, Tensor) else torch.device("cpu")
        for number, batch in enumerate(self.chunks(home)):
            checks.check_finite_rows(batch.features, self.kept[number * CHUNK :])

    def fingerprint(self) -> str:
        """Digest of all labels and weights, and of the features of 64 rows."""
        columns = (self.labels, self.weight, self.kept)
        digest = hashlib.sha256(b"".join(values.tobytes() for values in columns))
        some = np.unique(np.linspace(0, len(self.labels) - 1, 64).astype(np.int64))
        digest.update(self.batch(some, torch.device("cpu")).features.numpy().tobytes())
        return digest.hexdigest()


def _as_labelled_features(
    features: Values,
    labels: Values,
    sample_weight: Values | None = None,
    *,
    classes: int | None = None,
    name: str = "",
) -> _LabelledFeatures:
    """Check features ``(..., width)``, labels ``(...)`` and weights against each other."""
    inputs = checks.as_scores(features, f"{name}features")
    targets = checks.as_labels(labels, f"{name}labels")
    if classes is not None:
        checks.check_labels(targets, classes)
    shape = tuple(inputs.shape)
    if len(shape) < 2 or shape[:-1] != targets.shape or not shape[-1]:
        raise ValueError(
            f"{name}features must be (..., width) and {name}labels (...), one row of features for "
            f"each label, got {shape} and {targets.shape}"
        )
    weight, flat = np.ones(targets.size), targets.reshape(-1)
    if sample_weight is not None:
        weight = checks.as_weight(sample_weight, targets.shape)
    kept = np.flatnonzero((flat != IGNORED) & (weight > 0))
    if not len(kept):
        raise ValueError(f"{name}features are empty: no example has a label and a weight above 0")
    data = _LabelledFeatures(inputs.reshape(-1, shape[-1]), flat, weight, kept)
    data.check_finite()
    return data


def _stratified_share(labels: IntArray, share: float, seed: int) -> IntArray:
    """Return the sorted places of a random share of the examples of each class.

    >>> _stratified_share(np.array([0, 0, 0, 0, 1, 1]), 0.5, seed=0)
    array([0, 2, 5])
    """
    rng = np.random.default_rng(seed)
    members = (rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels))
    return np.sort(np.concatenate([each[: round(share * len(each))] for each in members]))


@torch.no_grad()
def _count_outputs(model: nn.Module, loader: Iterable[Any]) -> int:
    """Return the number of logits of a model, from the first batch of a loader."""
    batch = next(iter(loader), None)
    if batch is None:
        raise ValueError("the loader must have at least one batch, got none")
    inputs, named, _ = moved(taken_apart(batch), device_of(model))
    with evaluating(model):
        return int(torch_models.logits_of(model(*inputs, **named)).shape[-1])


@torch.no_grad()
def _feature_batches(
    model: nn.Module, loader: Iterable[Any], layer: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the inputs of a layer and the labels of each batch."""
    device = device_of(model)
    with evaluating(model), torch_models.layer_inputs(model, layer) as captured:
        for batch in loader:
            inputs, named, labels = taken_apart(batch)
            model(*moved(inputs, device), **moved(named, device))
            yield captured().detach().float(), torch.as_tensor(labels)


def _last_layer(model: nn.Module, classes: int, name: str | None = None) -> str:
    """Return the name of the linear layer that computes the logits."""
    kind = type(model).__name__
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n}
    if name is not None:
        if name not in layers:
            raise ValueError(f"{kind} has no linear layer {name!r}; its last are {_shown(layers)}")
        return name
    matching = {n: m for n, m in layers.items() if m.out_features == classes}
    if len(matching) != 1:
        count = "several" if matching else "none"
        raise ValueError(
            f"expected one linear layer with {classes} outputs, this {kind} has {count}: "
            f"{_shown(matching or layers)}; pass the name of the last one"
        )
    return str(*matching)


def _shown(layers: Mapping[str, nn.Linear]) -> str:
    last = list(layers.items())[-5:]
    return ", ".join(f"{n} ({m.in_features} to {m.out_features})" for n, m in last) or "none"


def replace_head(model: nn.Module, head: nn.Module, name: str | None = None) -> nn.Module:
    """Return a model with another last layer, which shares all other layers with the given one.

    The given model is not changed. ``from_pretrained`` of Hugging Face builds the old layer: save
    the new one separately (:func:`calibrant.save`), and replace again after loading.

    Parameters
    ----------
    model : nn.Module
        With a linear layer that computes the logits, such as ``fc`` of a ResNet.
    head : MaCCal, MaskedClassifier or nn.Module
        Maps features ``(..., width)`` to logits ``(..., classes)``. A copy of it takes the place
        of the last layer, on the same device.
    name : str, optional
        The layer to replace, as in ``model.named_modules()``. By default the only linear layer
        with as many outputs as the new one has classes.

    Examples
    --------
    >>> from calibrant.calibrators.maccal import MaskedClassifier
    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> other = replace_head(network, MaskedClassifier(8, 3))
    >>> other[3].width, network[3].in_features, other[1] is network[1]
    (8, 8, True)
    """
    new: Any = head.classifier if hasattr(head, "history_") else head  # what a MaCCal trained
    if new is not head and not head.classes:
        raise ValueError(f"this {type(head).__name__} is not fitted: call fit first")
    width, classes = getattr(new, "width", None), getattr(new, "classes", None)
    if isinstance(new, nn.Linear):
        width, classes = new.in_features, new.out_features
    if width is None or classes is None:
        raise TypeError(
            "head must be a fitted MaCCal, a MaskedClassifier, an nn.Linear or another module with "
            f"width and classes, got {type(head).__name__}"
        )
    path = _last_layer(model, classes, name)
    layer = model.get_submodule(path)
    assert isinstance(layer, nn.Linear)
    if (layer.in_features, layer.out_features) != (width, classes):
        raise ValueError(
            f"the new layer maps {width} features to {classes} classes, the layer {path!r} maps "
            f"{layer.in_features} to {layer.out_features}: fit it on the inputs of {path!r}"
        )
    for other, module in model.named_modules(remove_duplicate=False):
        if module is layer and other != path:
            raise ValueError(f"the layer {path!r} is also {other!r}: only one would be replaced")
    copied = copy.deepcopy(new).to(layer.weight.device).train(layer.training)
    return _with_layer(model, path.split("."), copied)


def _with_layer(module: nn.Module, path: list[str], layer: nn.Module) -> nn.Module:
    """Copy a module, sharing all submodules except those on the path to the layer."""
    first, *rest = path
    inner = _with_layer(module.get_submodule(first), rest, layer) if rest else layer
    copied = copy.copy(module)
    copied._modules = {**module._modules, first: inner}
    return copied
