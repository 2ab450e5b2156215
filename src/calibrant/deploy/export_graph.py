"""The graph to export, and example inputs to trace it with."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from calibrant._core.torch_models import logits_of
from calibrant.artifacts import kind_of
from calibrant.calibrators.base import Calibrator
from calibrant.deploy.attach import CalibratedModel, fitted_calibrator
from calibrant.retrain.maccal import MaCCal


class ExportGraph(nn.Module):
    """A calibrator, with or without a model before it, as a graph with one output.

    ``inputs`` are examples, to be passed ``by_name`` or by position; the first ``varying``
    dimensions of each may have any size.
    """

    def __init__(
        self,
        inner: Calibrator | CalibratedModel,
        inputs: dict[str, Tensor],
        *,
        by_name: bool,
        varying: int,
        probabilities: bool,
    ) -> None:
        super().__init__()
        on_cpu = all(v.device.type == "cpu" for v in (*inner.parameters(), *inner.buffers()))
        self.inner = inner if on_cpu else copy.deepcopy(inner).cpu()
        self.inputs, self.by_name = inputs, by_name
        self.varying, self.probabilities = varying, probabilities

        def forward(*values: Tensor, **named: Tensor) -> Tensor:
            return self.calibrate(*self.model_output(*values, **named))

        # for tracing torch needs a named argument for each input
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in inputs]
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward

    @property
    def calibrator(self) -> Calibrator:
        """The calibrator."""
        inner = self.inner
        return inner.calibrator if isinstance(inner, CalibratedModel) else inner

    def model_output(self, *values: Tensor, **named: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits and features before calibration."""
        if isinstance(self.inner, CalibratedModel):
            output, features = self.inner.model_output(*values, **named)
            return logits_of(output), features
        return values[0], values[1] if len(values) > 1 else None

    def calibrate(self, logits: Tensor, features: Tensor | None) -> Tensor:
        """Calibrated logits or probabilities."""
        inner = self.inner
        apply = inner.calibrate if isinstance(inner, CalibratedModel) else inner
        output: Tensor = apply(logits, features)
        return self.softmax(output) if self.probabilities else output

    def softmax(self, logits: Tensor) -> Tensor:
        """Probabilities of logits."""
        return logits.sigmoid() if self.calibrator.classes == 1 else logits.softmax(-1)

    def arguments(self, values: Iterable[Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Values of all inputs as arguments of a call, by position and by name."""
        values = tuple(values)
        return ((), dict(zip(self.inputs, values, strict=True))) if self.by_name else (values, {})

    def dynamic_shapes(self, *dims: Any) -> dict[str, Any]:
        """The dimensions of any size of each input."""
        return {
            name: dict(enumerate(dims[: min(self.varying, value.ndim)]))
            for name, value in self.inputs.items()
        }

    def program(self) -> torch.export.ExportedProgram:
        """The traced graph."""
        args, named = self.arguments(self.inputs.values())
        shapes = self.dynamic_shapes(*[torch.export.Dim.DYNAMIC] * 2)
        with self.explained("torch.export"), quiet(), torch.no_grad():
            return torch.export.export(self, args, named, dynamic_shapes=shapes, strict=False)

    @contextmanager
    def explained(self, exporter: str) -> Iterator[None]:
        """Turn an error of torch about a model that it cannot export into one that names both."""
        try:
            yield
        except Exception as error:
            name = type(getattr(self.inner, "model", self.calibrator)).__name__
            cause = error.__cause__ or error  # the outer error is about torch
            lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
            raise ValueError(
                f"{name} cannot be exported: {exporter} says {' '.join(lines[:2])!r}"
            ) from error


def export_graph(
    calibrator: Calibrator | MaCCal,
    model: nn.Module | None,
    example: Any,
    last_layer: nn.Module | str | None,
    tokens: bool,
    probabilities: bool,
) -> ExportGraph:
    """Build the graph for the arguments of an export."""
    calibrator = fitted_calibrator(calibrator)
    if (model is None) != (example is None):
        raise ValueError("model and example belong together: pass both or neither")
    varying = 2 if tokens else 1
    inner: Calibrator | CalibratedModel = calibrator
    if model is None:
        values = random_inputs(calibrator, (2, 3)[:varying], torch.Generator().manual_seed(0))
        inputs = dict(zip(("logits", "features"), values, strict=False))
    else:
        inner = CalibratedModel(model, calibrator, last_layer=last_layer)
        inputs = _example_inputs(example)
    by_name = isinstance(example, Mapping)
    return ExportGraph(inner, inputs, by_name=by_name, varying=varying, probabilities=probabilities)


def _example_inputs(example: Any) -> dict[str, Tensor]:
    """Inputs by name."""
    inputs = {"input": example}
    if isinstance(example, Mapping):
        inputs = dict(example)
    elif isinstance(example, (tuple, list)):
        inputs = {f"input_{i}": value for i, value in enumerate(example)}
    values = inputs.values()
    if not values or not all(isinstance(v, Tensor) and v.ndim and len(v) for v in values):
        raise TypeError(
            "example must be a tensor, or a tuple or dictionary of tensors, with one row or more, "
            f"got {type(example).__name__}"
        )
    rows = {len(value) for value in values}
    if len(rows) > 1:
        raise ValueError(f"inputs in example must have the same number of rows, got {sorted(rows)}")
    inputs = {name: value.detach().cpu() for name, value in inputs.items()}
    if rows == {1}:  # torch would take it for a constant
        inputs = {name: torch.cat([value, value]) for name, value in inputs.items()}
    return inputs


def random_inputs(
    calibrator: Calibrator, shape: tuple[int, ...], random: torch.Generator
) -> tuple[Tensor, ...]:
    """Logits, and features where they are needed, for examples of a shape."""
    classes = calibrator.classes
    logits = 3 * torch.randn(shape if classes == 1 else (*shape, classes), generator=random)
    if not calibrator.needs_features:
        return (logits,)
    return logits, torch.randn((*shape, calibrator.width), generator=random)


def export_target(path: str | os.PathLike[str], suffix: str) -> Path:
    """Path of the file to write, checked."""
    target = Path(path)
    if target.suffix != suffix:
        raise ValueError(f"cannot write {target}: the suffix must be {suffix}")
    if target.is_dir():
        raise ValueError(f"{target} is a folder: name a file")
    return target


def metadata(calibrator: Calibrator | MaCCal) -> dict[str, str]:
    """Method, number of classes and version, to be stored in the file."""
    from calibrant import __version__

    try:
        kind = kind_of(calibrator)
    except TypeError:  # a class of the user
        kind = type(calibrator).__name__
    return {"kind": kind, "classes": str(calibrator.classes), "calibrant": __version__}


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch about its own future and about other libraries."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
