"""Models with a calibrator behind them."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from calibrant._core.torch_models import layer_inputs, logits_of, name_of
from calibrant.artifacts import load, save
from calibrant.calibrators.base import Calibrator
from calibrant.deploy.model_card import CALIBRATOR, CARD, model_card, write_card
from calibrant.retrain.adapter import as_calibrator
from calibrant.retrain.maccal import MaCCal

if TYPE_CHECKING:
    from typing_extensions import Self

    from calibrant.workflows.effect import Effect


def calibrated(
    model: nn.Module, calibrator: Calibrator | MaCCal, *, last_layer: nn.Module | str | None = None
) -> CalibratedModel:
    """Put a calibrator behind a model: the same model, with calibrated logits.

    Parameters
    ----------
    model : nn.Module
        Returns logits, or a tuple or list that begins with them, or a dictionary or dataclass
        (as the outputs of Hugging Face models are) that has them as ``logits``.
    calibrator : Calibrator
        Fitted on logits of this model, or unfitted to load a state dict into.
    last_layer : nn.Module or str, optional
        The layer of the model, or its name in it, whose input is the features; for methods that
        need them.

    Examples
    --------
    >>> import torch
    >>> from calibrant.calibrators import TemperatureScaling
    >>> logits = torch.tensor([[4.0, 0.0], [2.0, 0.0], [0.0, 6.0], [0.0, 2.0], [4.0, 2.0]])
    >>> fitted = TemperatureScaling().fit(logits, [0, 0, 1, 0, 1])
    >>> model = calibrated(nn.Identity(), fitted)  # stands for a network that returns logits
    >>> torch.equal(model(logits), fitted(logits))
    True
    """
    return CalibratedModel(model, calibrator, last_layer=last_layer)


class CalibratedModel(nn.Module):
    """A model and the calibrator behind it; :func:`calibrated` makes one.

    All arguments go to the model, and its output comes back with calibrated logits: float32 or
    wider, the largest of each row 0. Everything else in the output is kept, also a loss, which is
    that of the logits before calibration.

    Attributes
    ----------
    model : nn.Module
    calibrator : Calibrator

    Examples
    --------
    >>> import tempfile, torch
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
        self,
        model: nn.Module,
        calibrator: Calibrator | MaCCal,
        *,
        last_layer: nn.Module | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
        calibrator = as_calibrator(calibrator)
        if calibrator.needs_features and last_layer is None:
            raise ValueError(
                f"{type(calibrator).__name__} needs features: pass last_layer=, the layer of the "
                "model, or its name, whose input they are"
            )
        self.model = model
        self.calibrator = calibrator
        # by name, since a module that is held twice would be saved twice
        self.last_layer = None if last_layer is None else name_of(model, last_layer)
        self.training = model.training  # the layers within keep their own modes

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The output of the model, with calibrated logits."""
        output, features = self.model_output(*inputs, **named)
        return with_logits(output, self.calibrate(logits_of(output), features))

    def model_output(self, *inputs: Any, **named: Any) -> tuple[Any, Tensor | None]:
        """The output of the model, and the features where the calibrator needs them."""
        if not self.calibrator.needs_features:
            return self.model(*inputs, **named), None
        assert self.last_layer is not None
        with layer_inputs(self.model, self.last_layer) as features:
            return self.model(*inputs, **named), features()

    def calibrate(self, logits: Tensor, features: Tensor | None) -> Tensor:
        """Calibrated logits, in the shape of the logits."""
        if logits.ndim == 0:
            raise ValueError(
                "the model must return logits first, got a single number: a loss? Call it without "
                "labels"
            )
        output: Tensor
        one_column = self.calibrator.classes == 1 and logits.shape[-1] == 1
        if features is not None and one_column and features.ndim == logits.ndim:
            # (n, 1), as a layer with one output returns it
            output = self.calibrator(logits[..., 0], features)[..., None]
        else:
            output = self.calibrator(logits, features)
        return output

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, figures: Effect | None = None
    ) -> None:
        """Write a folder for :meth:`from_pretrained`, with a model card.

        The calibrator goes into the subfolder ``calibrator`` and the card to ``README.md``. A model
        with a ``save_pretrained`` of its own, such as those of Hugging Face, writes its files
        beside them; other models are left to the caller.

        Parameters
        ----------
        folder : path
            Created where it does not exist. Other files in it stay.
        figures : Effect, optional
            Metrics before and after calibration, for the card.
        """
        target = Path(folder)
        target.mkdir(exist_ok=True)
        save(self.calibrator, target / CALIBRATOR)  # first, since it may be refused
        own = getattr(self.model, "save_pretrained", None)
        if own is not None:
            own(target)
        write_card(target / CARD, model_card(self, target, figures))

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        model: nn.Module | type | None = None,
        last_layer: nn.Module | str | None = None,
    ) -> Self:
        """Read a folder that :meth:`save_pretrained` wrote, without network access.

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
        inner: Any = _sequence_classifier() if model is None else model
        if not isinstance(inner, nn.Module):
            inner = inner.from_pretrained(target, local_files_only=True)
        return cls(inner, calibrator, last_layer=last_layer)


def fitted_calibrator(module: nn.Module) -> Calibrator:
    """Return a module as a calibrator; raise unless it is a fitted one."""
    calibrator = as_calibrator(module)
    if not calibrator.classes:
        name = type(calibrator).__name__
        raise ValueError(f"this {name} is not fitted: call fit(logits, labels) first")
    return calibrator


def with_logits(output: Any, logits: Tensor) -> Any:
    """The output of a model, with other logits."""
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


def _sequence_classifier() -> Any:
    try:
        from transformers import AutoModelForSequenceClassification
    except ImportError as problem:
        raise ImportError(
            f"a model in a folder needs transformers ({problem}): install it, or pass model="
        ) from problem
    return AutoModelForSequenceClassification
