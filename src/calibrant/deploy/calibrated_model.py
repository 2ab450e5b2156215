"""Models with a calibrator behind or in their last layer, and the folders they are saved in."""

from __future__ import annotations

import copy
import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from calibrant._core.atomic_files import replacing
from calibrant._core.checks import check_whole, warn, warnings_at_caller
from calibrant._core.chunks import as_tensor
from calibrant._core.messages import needed
from calibrant._core.showing import as_markdown
from calibrant._core.torch_models import device_of, evaluating, layer_inputs, logits_of, name_of
from calibrant.artifacts import load, read, save
from calibrant.calibrators.affine import MatrixScaling, VectorScaling
from calibrant.calibrators.auto import Auto
from calibrant.calibrators.base import Calibrator, check_calibrator
from calibrant.calibrators.class_temperatures import ClassTemperatures
from calibrant.calibrators.scaling import Identity, TemperatureScaling
from calibrant.calibrators.tags import TagCalibrator
from calibrant.decide.priors import PriorCorrection

if TYPE_CHECKING:
    from typing_extensions import Self

    from calibrant.workflows.effect import Effect

Layer: TypeAlias = nn.Module | str
CALIBRATOR, CARD = "calibrator", "README.md"
"""Files of the calibrator and the model card within the folder of a model."""
_OURS = "<!-- Written by calibrant, and again by the next save: delete this line to keep yours. -->"


def calibrated(
    model: nn.Module, calibrator: Calibrator, *, last_layer: Layer | None = None
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
        The layer of the model, or its name in it, whose input a method takes as features.

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

    Its output is that of the model with calibrated logits, in float32 or wider, of which the
    largest of each row is 0. A loss in the output is that of the logits before calibration.

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
        self, model: nn.Module, calibrator: Calibrator, *, last_layer: Layer | None = None
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
        check_calibrator(calibrator)
        name = type(calibrator).__name__
        if calibrator.input_columns not in ((), ("features",)):
            raise ValueError(
                f"{name} reads metadata columns, which a model does not give: apply it to the "
                "predictions, with features= or in a file"
            )
        if calibrator.needs_features and last_layer is None:
            raise ValueError(f"{name} needs features: pass last_layer=, the layer they go into")
        last: Any = model
        while isinstance(last, nn.Sequential) and len(last):
            last = last[-1]
        if isinstance(last, (nn.Softmax, nn.Sigmoid)):
            warn(
                f"the model ends with nn.{type(last).__name__}, so that it returns probabilities "
                "where a calibrator takes logits: leave that layer out",
                stacklevel=4,
            )
        self.model = model
        self.calibrator = calibrator
        # by name, since a module that is held twice would be saved twice
        self.last_layer = None if last_layer is None else name_of(model, last_layer)
        self.training = model.training  # the layers within keep their own modes

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the output of the model, with calibrated logits."""
        output, features = self.model_output(*inputs, **named)
        return _with_logits(output, self.calibrate(logits_of(output), features))

    def model_output(self, *inputs: Any, **named: Any) -> tuple[Any, Tensor | None]:
        """Return the output of the model, and features if the calibrator needs them."""
        if not self.calibrator.needs_features:
            return self.model(*inputs, **named), None
        assert self.last_layer is not None
        with layer_inputs(self.model, self.last_layer) as features:
            return self.model(*inputs, **named), features()

    def calibrate(
        self,
        logits: Tensor,
        features: Tensor | None = None,
        *,
        function: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """Return calibrated logits in the shape of the logits.

        ``function`` is another one of the calibrator, such as its ``predict_proba``.
        """
        if logits.ndim == 0:
            raise ValueError(
                "logits must come first, got a number (a loss?): call the model without labels"
            )
        apply = self.calibrator if function is None else function
        one_column = self.calibrator.one_logit and logits.shape[-1] == 1
        if features is not None and one_column and features.ndim == logits.ndim:
            # (n, 1), as a layer with one output returns it
            return cast(Tensor, apply(logits[..., 0], features)[..., None])
        return cast(Tensor, apply(logits, features))

    @warnings_at_caller()
    def predict_proba(
        self, *inputs: Any, batch_size: int = 256, **named: Any
    ) -> Tensor | NDArray[Any]:
        """Return calibrated probabilities of inputs of any number, in batches.

        They have the form of the logits: ``(n, ..., classes)``, or for one logit ``(n,)`` or
        ``(n, 1)``, the probability of class 1; for tags one probability each. The model runs
        without gradients in ``eval`` mode, and its layers return to their modes.

        Parameters
        ----------
        *inputs, **named
            What the model takes: arrays or tensors ``(n, ...)``, which are cut into batches and
            moved to the device of the model, or a mapping of them, as tokenizers return it. Floats
            of NumPy get the precision of the model. Anything else is passed on as it is.
        batch_size : int

        Returns
        -------
        Tensor or ndarray
            On the CPU; a tensor if the first input is one.

        Examples
        --------
        >>> import numpy as np
        >>> from calibrant.calibrators import Identity
        >>> plain = Identity().fit([[0.0, 1.0], [2.0, 0.0]], [1, 0])
        >>> model = calibrated(nn.Linear(3, 2), plain)
        >>> model.predict_proba(np.ones((1000, 3))).shape
        (1000, 2)
        """
        check_whole("batch_size", batch_size)
        first = next(iter(inputs), None)
        if len(inputs) == 1 and isinstance(first, Mapping):
            inputs, named = (), {**first, **named}
        arrays = [value for value in (*inputs, *named.values()) if hasattr(value, "__array__")]
        if not arrays:
            got = ", ".join(type(value).__name__ for value in (*inputs, *named.values()))
            raise TypeError(f"the inputs must be arrays or tensors (n, ...), got {got or 'none'}")
        rows = {len(array) for array in arrays}
        if len(rows) > 1:
            raise ValueError(f"the inputs must have as many rows each, got {sorted(rows)}")
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), None)
        device = device_of(self.model)

        def cut(value: Any, start: int) -> Any:
            if not hasattr(value, "__array__"):
                return value
            part = value[start : start + batch_size]
            if isinstance(part, Tensor):
                return part.to(device)
            tensor = torch.as_tensor(np.asarray(part))
            return tensor.to(device, dtype if tensor.is_floating_point() else None)

        probs = []
        with evaluating(self), torch.no_grad():
            for start in range(0, max(rows.pop(), 1), batch_size):
                parts = [cut(value, start) for value in inputs]
                by_name = {name: cut(value, start) for name, value in named.items()}
                output, features = self.model_output(*parts, **by_name)
                logits, function = logits_of(output), self.calibrator.predict_proba
                probs.append(self.calibrate(logits, features, function=function).cpu())
        whole = torch.cat(probs)
        return whole if isinstance(arrays[0], Tensor) else whole.numpy()

    @warnings_at_caller()
    def predict(self, *inputs: Any, batch_size: int = 256, **named: Any) -> Tensor | NDArray[Any]:
        """Return predicted classes ``(n, ...)``, or 0 and 1 for each tag.

        Arguments are those of :meth:`predict_proba`.
        """
        found = self.predict_proba(*inputs, batch_size=batch_size, **named)
        probs = torch.as_tensor(found)
        if self.calibrator.multilabel or self.calibrator.one_logit:
            above = (probs > 0.5).long()
            one_column = self.calibrator.one_logit and probs.ndim == 2 and probs.shape[1] == 1
            classes = above[:, 0] if one_column else above
        else:
            classes = probs.argmax(-1)
        return classes if isinstance(found, Tensor) else classes.numpy()

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, figures: Effect | None = None
    ) -> None:
        """Write a folder for :meth:`from_pretrained`, with a model card.

        The calibrator goes into the subfolder ``calibrator`` and the card, with the ``figures``
        before and after calibration, to ``README.md``. A model with a ``save_pretrained`` of its
        own, such as those of Hugging Face, writes its files beside them; other models are left to
        the caller. Other files in the folder stay.
        """
        target = Path(folder)
        target.mkdir(exist_ok=True)
        save(self.calibrator, target / CALIBRATOR)  # first, since it may be refused
        if hasattr(self.model, "save_pretrained"):
            self.model.save_pretrained(target)  # type: ignore[operator]  # an attribute of any kind
        _write_card(target / CARD, self, figures)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        model: nn.Module | type | None = None,
        last_layer: Layer | None = None,
    ) -> Self:
        """Read a folder that :meth:`save_pretrained` wrote, without network access.

        ``model`` is a model, or the class of transformers that reads it from the folder:
        ``AutoModelForSequenceClassification`` by default. ``last_layer`` is as for
        :func:`calibrated`.
        """
        target = Path(folder)
        if not target.is_dir():
            raise FileNotFoundError(f"there is no folder {target}; save_pretrained makes one")
        calibrator = load(target / CALIBRATOR)
        inner: Any = model
        if inner is None:
            what, remedy = "a model in a folder needs transformers", "transformers, or pass model="
            with needed(what, remedy):
                from transformers import AutoModelForSequenceClassification
            inner = AutoModelForSequenceClassification
        if not isinstance(inner, nn.Module):
            inner = inner.from_pretrained(target, local_files_only=True)
        return cls(inner, calibrator, last_layer=last_layer)


def _fitted_calibrator(module: nn.Module) -> Calibrator:
    """Return a module as a calibrator; raise unless it is a fitted one."""
    check_calibrator(module)
    assert isinstance(module, Calibrator)
    if not module.classes:
        name = type(module).__name__
        raise ValueError(f"this {name} is not fitted: call fit(logits, labels) first")
    return module


def _with_logits(output: Any, logits: Tensor) -> Any:
    """Return the output of a model, with other logits."""
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


def _write_card(path: Path, model: CalibratedModel, figures: Effect | None) -> None:
    """Write the card of a model, unless there is one that calibrant did not write."""
    if path.exists() and _OURS not in path.read_text("utf-8"):
        warnings.warn(f"{path} was written by someone else and stays as it is", stacklevel=3)
        return
    about = read(path.parent / CALIBRATOR)
    inside = type(model.model).__name__
    arguments = [f'"{path.parent.name}"']
    if not hasattr(model.model, "save_pretrained"):
        arguments.append("model=network")
    if model.calibrator.needs_features:
        arguments.append(f'last_layer="{model.last_layer}"')
    measured = ""
    if figures is not None:
        measured = f"\nMeasured on {figures.after.describe()}:\n\n{as_markdown(figures)}\n"
    text = f"""---
library_name: calibrant
tags:
- calibration
---
{_OURS}

# {inside}, calibrated

The logits of a `{inside}` go through the calibrator in the folder `{CALIBRATOR}`, so that their
{"sigmoid" if model.calibrator.multilabel else "softmax"} is a calibrated probability.

{about.description} (method `{about.kind}`, calibrant {about.calibrant}).

```python
from calibrant.deploy import CalibratedModel

model = CalibratedModel.from_pretrained({", ".join(arguments)})
```
{measured}"""
    with replacing(path) as temporary:
        temporary.write_text(text, "utf-8")


def fold_into_linear(calibrator: Calibrator, linear: nn.Linear) -> nn.Linear:
    r"""Build a calibrator into the last layer of a network, at no cost at inference.

    With :math:`z = Ax + c`, calibrated logits that are linear in :math:`z` are linear in
    :math:`x`: for ``ts``, :math:`A / T` and :math:`c / T`. ``none``, ``ts``, ``vector``,
    ``matrix`` and ``cts`` are linear, as are all methods for tags, ``auto`` where it chose one of
    them, and a correction of the prior after one of them. All others are refused.

    Parameters
    ----------
    calibrator : Calibrator
        Fitted on the outputs of ``linear``.
    linear : nn.Linear

    Returns
    -------
    nn.Linear
        A new layer. Its logits are the calibrated ones up to a constant for each row, computed in
        float64 and rounded to the type of ``linear``.

    Examples
    --------
    >>> from calibrant.calibrators import TemperatureScaling
    >>> logits = torch.tensor([[4.0, 0.0], [2.0, 0.0], [0.0, 6.0], [0.0, 2.0], [4.0, 2.0]])
    >>> fitted = TemperatureScaling().fit(logits, [0, 0, 1, 0, 1])
    >>> last = nn.Linear(3, 2)
    >>> inputs = torch.randn(4, 3)
    >>> probs = fold_into_linear(fitted, last)(inputs).softmax(-1)
    >>> torch.allclose(probs, fitted.predict_proba(last(inputs)), atol=1e-6)
    True
    """
    calibrator = copy.deepcopy(_fitted_calibrator(calibrator)).cpu()
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"linear must be an nn.Linear, got {type(linear).__name__}")
    classes = int(calibrator.classes_)
    if linear.out_features != classes:
        raise ValueError(f"linear must have {classes} outputs, got {linear.out_features}")
    weight = as_tensor(linear.weight).double()
    bias = weight.new_zeros(classes) if linear.bias is None else as_tensor(linear.bias).double()
    if calibrator.one_logit:  # the other class has the logit 0
        weight, bias = (torch.cat([torch.zeros_like(part), part]) for part in (weight, bias))
    weight, bias = _folded(calibrator, weight, bias)
    if calibrator.one_logit:
        weight, bias = weight[1:] - weight[:1], bias[1:] - bias[:1]
    has_bias = linear.bias is not None or bool(bias.any())
    like = {"device": linear.weight.device, "dtype": linear.weight.dtype}
    folded = nn.Linear(linear.in_features, classes, has_bias, **like)
    with torch.no_grad():
        folded.weight.copy_(weight)
        if has_bias:
            folded.bias.copy_(bias)
    return folded.train(linear.training)


def _folded(calibrator: Calibrator, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight ``(classes, width)`` and bias ``(classes,)`` after calibration."""
    if isinstance(calibrator, Auto) and calibrator.chosen_ is not None:
        return _folded(calibrator.chosen_, weight, bias)
    if isinstance(calibrator, PriorCorrection):
        weight, bias = _folded(calibrator.calibrator, weight, bias)
        zeros = calibrator.new_prior_.new_zeros(() if calibrator.one_logit else len(bias))
        shift = calibrator(zeros) - calibrator.calibrator(zeros)  # up to a constant
        return weight, bias + (torch.stack([zeros, shift]) if shift.ndim == 0 else shift).to(bias)
    if isinstance(calibrator, Identity):
        return weight, bias
    if isinstance(calibrator, TagCalibrator):
        slope, intercept = calibrator.slope_.to(bias), calibrator.intercept_.to(bias)
        return slope[:, None] * weight, slope * bias + intercept
    if isinstance(calibrator, TemperatureScaling):
        temperature = calibrator.temperature_.to(bias)
        return weight / temperature, bias / temperature
    # the others first subtract the mean of the logits
    weight, bias = weight - weight.mean(0), bias - bias.mean()
    if isinstance(calibrator, ClassTemperatures):
        temperatures = calibrator.temperatures_.to(bias)
        return weight / temperatures[:, None], bias / temperatures
    if isinstance(calibrator, (VectorScaling, MatrixScaling)):
        scale = calibrator.weight_.to(bias)
        matrix = scale.diag() if scale.ndim == 1 else scale
        return matrix @ weight, matrix @ bias + calibrator.bias_.to(bias)
    name = type(calibrator).__name__
    raise ValueError(f"{name} is not linear in the logits: use calibrated(model, calibrator)")
