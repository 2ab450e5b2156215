"""From a model to calibrated logits and back: collect, wrap, fold, save with the model."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from calibrant._checks import IGNORED
from calibrant._models import (
    device_of,
    evaluating,
    layer_inputs,
    logits_of,
    moved,
    name_of,
    taken_apart,
)
from calibrant.calibrators.affine import DirichletCalibration, MatrixScaling, VectorScaling
from calibrant.calibrators.auto import Auto
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.classwise import ClassTemperatures
from calibrant.calibrators.scaling import Identity, TemperatureScaling
from calibrant.data.formats import replacing
from calibrant.decide import PriorCorrection
from calibrant.io import CONFIG, load, save

if TYPE_CHECKING:
    from typing_extensions import Self

    from calibrant.calibrators.files import Effect

CALIBRATOR = "calibrator"
"""Folder of the calibrator within that of a model."""
CARD = "README.md"
OURS = "<!-- Written by calibrant, and again by the next save: delete this line to keep yours. -->"


# ------------------------------------------------------------------------- the calibrated model


def calibrated(
    model: nn.Module, calibrator: Calibrator, *, last_layer: nn.Module | str | None = None
) -> CalibratedModel:
    """Put a fitted calibrator behind a model: the same model, with calibrated logits.

    Parameters
    ----------
    model : nn.Module
        It returns logits, or a tuple or list that begins with them, or a dictionary or dataclass
        (as the outputs of Hugging Face models are) that has them as ``logits``.
    calibrator : Calibrator
        Fitted on logits of this model.
    last_layer : nn.Module or str, optional
        The layer of the model, or its name in it, whose input is the features; for methods that
        need them.

    Returns
    -------
    CalibratedModel

    Examples
    --------
    >>> from calibrant.calibrators import TemperatureScaling
    >>> logits = torch.tensor([[4.0, 0.0], [2.0, 0.0], [0.0, 6.0], [0.0, 2.0], [4.0, 2.0]])
    >>> fitted = TemperatureScaling().fit(logits, [0, 0, 1, 0, 1])
    >>> model = calibrated(nn.Identity(), fitted)  # stands for a network that gives logits
    >>> torch.equal(model(logits), fitted(logits))
    True
    """
    return CalibratedModel(model, calibrator, last_layer=last_layer)


class CalibratedModel(nn.Module):
    """A model and the calibrator behind it; :func:`calibrated` makes one.

    Everything that it is called with goes to the model, and the output of the model comes back
    with other logits: float32 or wider, the largest of each row 0. All else that the model
    returns is kept, also a loss, which is that of the logits before.

    Attributes
    ----------
    model : nn.Module
    calibrator : Calibrator

    Examples
    --------
    >>> import tempfile
    >>> from calibrant.calibrators import Identity
    >>> plain = Identity().fit([[0.0, 1.0], [2.0, 0.0]], [1, 0])
    >>> network = nn.Linear(3, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     calibrated(network, plain).save_pretrained(folder)
    ...     again = CalibratedModel.from_pretrained(folder, model=network)
    >>> again(torch.randn(5, 3)).shape
    torch.Size([5, 2])
    """

    def __init__(
        self, model: nn.Module, calibrator: Calibrator, *, last_layer: nn.Module | str | None = None
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
        check_fitted(calibrator)
        if calibrator.needs_features and last_layer is None:
            raise ValueError(
                f"{type(calibrator).__name__} needs features: pass last_layer=, the layer of the "
                "model, or its name, whose input they are"
            )
        self.model = model
        self.calibrator = calibrator
        # by name, since a module that is held twice would be saved twice
        self.last_layer = None if last_layer is None else name_of(model, last_layer)
        self.training = model.training  # of the layers within, each keeps its own mode

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The output of the model, with calibrated logits."""
        output, features = self.outcome(*inputs, **named)
        return with_logits(output, self.calibrate(logits_of(output), features))

    def outcome(self, *inputs: Any, **named: Any) -> tuple[Any, Tensor | None]:
        """The output of the model as it is, and the features where the calibrator needs them."""
        if not self.calibrator.needs_features:
            return self.model(*inputs, **named), None
        assert self.last_layer is not None
        with layer_inputs(self.model, self.last_layer) as heard:
            return self.model(*inputs, **named), heard()

    def calibrate(self, logits: Tensor, features: Tensor | None) -> Tensor:
        """Calibrated logits of the shape that the model gave them."""
        if logits.ndim == 0:
            raise ValueError(
                "the model must return logits first, got a single number: a loss? Call it without "
                "labels"
            )
        one_logit = self.calibrator._classes == 1 and logits.shape[-1] == 1
        found: Tensor
        if features is not None and one_logit and features.ndim == logits.ndim:
            # (n, 1), as a layer with one output gives it
            found = self.calibrator(logits[..., 0], features)[..., None]
        else:
            found = self.calibrator(logits, features)
        return found

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, figures: Effect | None = None
    ) -> None:
        """Write the folder that :meth:`from_pretrained` reads, with a model card.

        The calibrator goes into its subfolder ``calibrator``, as :func:`calibrant.save` writes it,
        and the card to ``README.md``. A model that has a ``save_pretrained`` of its own, as those
        of Hugging Face have, writes its files beside them; another is left to you.

        Parameters
        ----------
        folder : path
            Created where it does not exist. Other files in it stay.
        figures : Effect, optional
            Before and after, as :func:`calibrant.effect_file` measures them, for the card.
        """
        target = Path(folder)
        target.mkdir(exist_ok=True)
        save(self.calibrator, target / CALIBRATOR)  # first, since it may be refused
        own = getattr(self.model, "save_pretrained", None)
        if own is not None:
            own(target)
        _write_card(target / CARD, _card(self, target, figures))

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        model: nn.Module | type | None = None,
        last_layer: nn.Module | str | None = None,
    ) -> Self:
        """Read a folder that :meth:`save_pretrained` wrote, without a look at the network.

        Parameters
        ----------
        folder : path
        model : nn.Module or class, optional
            A model, or the class of transformers that reads it from the folder:
            ``AutoModelForSequenceClassification`` by default.
        last_layer : nn.Module or str, optional
            As for :func:`calibrated`.
        """
        target = Path(folder)
        if not target.is_dir():
            raise FileNotFoundError(f"there is no folder {target}; save_pretrained makes one")
        calibrator = load(target / CALIBRATOR)
        inside: Any = _sequence_classifier() if model is None else model
        if not isinstance(inside, nn.Module):
            inside = inside.from_pretrained(target, local_files_only=True)
        return cls(inside, calibrator, last_layer=last_layer)


def check_fitted(calibrator: Calibrator) -> None:
    """Raise unless it is a calibrator that was fitted."""
    if not isinstance(calibrator, Calibrator):
        raise TypeError(f"calibrator must be a Calibrator, got {type(calibrator).__name__}")
    if not int(calibrator.classes_):
        raise ValueError(
            f"this {type(calibrator).__name__} is not fitted: call fit(logits, labels) first"
        )


# ------------------------------------------------------------------- what models take and return


def with_logits(output: Any, logits: Tensor) -> Any:
    """What a model returned, with other logits."""
    if isinstance(output, Tensor):
        return logits
    if dataclasses.is_dataclass(output):
        return dataclasses.replace(output, logits=logits)  # type: ignore[type-var]  # not a class
    if isinstance(output, Mapping):
        changed: Any = copy.copy(output)
        changed["logits"] = logits
        return changed
    if hasattr(output, "_replace"):  # a named tuple
        name = "logits" if hasattr(output, "logits") else output._fields[0]
        return output._replace(**{name: logits})
    return type(output)([logits, *output[1:]])


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


def fold(calibrator: Calibrator, linear: nn.Linear) -> nn.Linear:
    r"""Build a calibrator into the last layer of a network, at no cost when it is used.

    With :math:`z = Ax + c`, calibrated logits that are linear in :math:`z` are linear in
    :math:`x`: for ``ts``, :math:`A / T` and :math:`c / T`. ``none``, ``ts``, ``vector``,
    ``matrix`` and ``cts`` are linear, and so are ``auto``, where it chose one of them, and a
    correction of the prior after one of them. All others are refused.

    Parameters
    ----------
    calibrator : Calibrator
        Fitted on the outputs of ``linear``.
    linear : nn.Linear

    Returns
    -------
    nn.Linear
        A new one, with the calibrated logits up to a constant for each row, which no softmax
        sees. Values are computed in float64 and rounded to the type of ``linear``.

    Examples
    --------
    >>> from calibrant.calibrators import TemperatureScaling
    >>> logits = torch.tensor([[4.0, 0.0], [2.0, 0.0], [0.0, 6.0], [0.0, 2.0], [4.0, 2.0]])
    >>> fitted = TemperatureScaling().fit(logits, [0, 0, 1, 0, 1])
    >>> last = nn.Linear(3, 2)
    >>> inputs = torch.randn(4, 3)
    >>> probs = fold(fitted, last)(inputs).softmax(-1)
    >>> torch.allclose(probs, fitted.predict_proba(last(inputs)), atol=1e-6)
    True
    """
    check_fitted(calibrator)
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"linear must be an nn.Linear, got {type(linear).__name__}")
    classes = int(calibrator.classes_)
    if linear.out_features != classes:
        raise ValueError(
            f"linear must have {classes} outputs, as the logits of the fit, got "
            f"{linear.out_features}"
        )
    weight = linear.weight.detach().double()
    bias = weight.new_zeros(classes) if linear.bias is None else linear.bias.detach().double()
    if classes == 1:  # the other class has the logit 0
        weight, bias = (torch.cat([torch.zeros_like(part), part]) for part in (weight, bias))
    weight, bias = _folded(calibrator, weight, bias)
    if classes == 1:
        weight, bias = weight[1:] - weight[:1], bias[1:] - bias[:1]
    has_bias = linear.bias is not None or bool(bias.any())
    found = nn.Linear(
        *(linear.in_features, classes, has_bias), linear.weight.device, linear.weight.dtype
    )
    with torch.no_grad():
        found.weight.copy_(weight)
        if has_bias:
            found.bias.copy_(bias)
    return found.train(linear.training)


def _folded(calibrator: Calibrator, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Weight ``(classes, width)`` and bias ``(classes,)`` after calibration."""
    if isinstance(calibrator, Auto) and calibrator.chosen is not None:
        return _folded(calibrator.chosen, weight, bias)
    if isinstance(calibrator, PriorCorrection):
        weight, bias = _folded(calibrator.calibrator, weight, bias)
        return weight, bias + _added(calibrator).to(bias)
    if isinstance(calibrator, Identity):
        return weight, bias
    if isinstance(calibrator, TemperatureScaling):
        temperature = calibrator.temperature_.to(bias)
        return weight / temperature, bias / temperature
    # the others take the mean of the logits away first
    weight, bias = weight - weight.mean(0), bias - bias.mean()
    if isinstance(calibrator, ClassTemperatures):
        temperatures = calibrator.temperatures_.to(bias)
        return weight / temperatures[:, None], bias / temperatures
    if isinstance(calibrator, (VectorScaling, MatrixScaling)):
        by, plus = calibrator.weight_.to(bias), calibrator.bias_.to(bias)
        matrix = by.diag() if by.ndim == 1 else by
        return matrix @ weight, matrix @ bias + plus
    reason = "its logits are not a linear function of those that it is given"
    if isinstance(calibrator, DirichletCalibration):
        reason = "it works on log-probabilities, which are not linear in what the layer gives"
    raise ValueError(
        f"{type(calibrator).__name__} cannot be folded into a linear layer: {reason}; put it "
        "behind the model with calibrated(model, calibrator)"
    )


def _added(correction: PriorCorrection) -> Tensor:
    """What it adds to the calibrated logits of all rows, up to a constant."""
    classes = int(correction.classes_)
    zeros = correction.new_prior_.new_zeros(() if classes == 1 else classes)
    shift: Tensor = correction(zeros) - correction.calibrator(zeros)
    return torch.stack([zeros, shift]) if classes == 1 else shift


# ------------------------------------------------------------------------------------- the card


def _sequence_classifier() -> Any:
    try:
        from transformers import AutoModelForSequenceClassification
    except ImportError as problem:
        raise ImportError(
            f"reading a model from a folder needs transformers ({problem}): pip install "
            "transformers, or pass model="
        ) from problem
    return AutoModelForSequenceClassification


def _write_card(path: Path, text: str) -> None:
    if path.exists() and OURS not in path.read_text("utf-8"):
        warnings.warn(f"{path} was written by someone else and stays as it is", stacklevel=3)
        return
    with replacing(path) as temporary:
        temporary.write_text(text, "utf-8")


def _card(model: CalibratedModel, folder: Path, figures: Effect | None) -> str:
    about = json.loads((folder / CALIBRATOR / CONFIG).read_text("utf-8"))
    inside = type(model.model).__name__
    given = [f'"{folder.name}"']
    if not hasattr(model.model, "save_pretrained"):
        given.append("model=network")
    if model.calibrator.needs_features:
        given.append(f'last_layer="{model.last_layer}"')
    return f"""---
library_name: calibrant
tags:
- calibration
---
{OURS}

# {inside}, calibrated

The logits of a `{inside}` go through a calibrator, in the folder `{CALIBRATOR}`, so that the
softmax of what comes out is a probability to be taken at its word.

{about["description"]} (method `{about["kind"]}`, calibrant {about["calibrant"]}).

```python
from calibrant import CalibratedModel

model = CalibratedModel.from_pretrained({", ".join(given)})
```
{"" if figures is None else _figures(figures)}"""


def _figures(effect: Effect) -> str:
    level = effect.after.level
    interval = "" if level is None else f"{100 * level:g} % interval"
    rows = [("", "before", interval, "after", interval), ("---", *["---:"] * 4)]
    for before, after in zip(effect.before.table(), effect.after.table(), strict=True):
        rows.append((*before, *after[1:]))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"\nMeasured on {effect.after.describe()}:\n\n{table}\n"
