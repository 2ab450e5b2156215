"""The graph that is exported, and its inputs."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from calibrant._core.torch_models import logits_of
from calibrant.artifacts import kind_of
from calibrant.calibrators.base import Calibrator
from calibrant.deploy.attach import CalibratedModel, check_fitted

LARGEST = 1_900_000_000
"""Bytes of weights that fit into one ONNX file, whose limit is 2 GB."""


# ----------------------------------------------------------------------------- what is exported


class _Graph(nn.Module):
    """A calibrator, with or without a model before it, that returns one tensor."""

    def __init__(self, inner: Calibrator | CalibratedModel, probabilities: bool) -> None:
        super().__init__()
        self.inner = inner
        self.probabilities = probabilities

    @property
    def calibrator(self) -> Calibrator:
        inner = self.inner
        return inner.calibrator if isinstance(inner, CalibratedModel) else inner

    def before(self, *inputs: Tensor, **named: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits and features that the calibrator is given."""
        if isinstance(self.inner, CalibratedModel):
            output, features = self.inner.outcome(*inputs, **named)
            return logits_of(output), features
        return inputs[0], inputs[1] if len(inputs) > 1 else None

    def after(self, logits: Tensor, features: Tensor | None) -> Tensor:
        """What the calibrator makes of them."""
        inner = self.inner
        apply = inner.calibrate if isinstance(inner, CalibratedModel) else inner
        found: Tensor = apply(logits, features)
        return self.probs(found) if self.probabilities else found

    def probs(self, logits: Tensor) -> Tensor:
        return logits.sigmoid() if self.calibrator.classes == 1 else logits.softmax(-1)


def _graph(inner: Calibrator | CalibratedModel, probabilities: bool, names: list[str]) -> _Graph:
    """A graph on the CPU whose inputs have names: torch cannot trace what takes any name."""

    def forward(self: _Graph, *inputs: Tensor, **named: Tensor) -> Tensor:
        return self.after(*self.before(*inputs, **named))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in ("self", *names)])
    forward.__signature__ = signature  # type: ignore[attr-defined]
    graph: _Graph = type("Graph", (_Graph,), {"forward": forward})(inner, probabilities)
    places = {value.device.type for value in (*graph.parameters(), *graph.buffers())}
    return graph if places <= {"cpu"} else copy.deepcopy(graph).cpu()


class _Subject(NamedTuple):
    """A graph, and example inputs by their names."""

    graph: _Graph
    inputs: tuple[Tensor, ...]
    names: list[str]
    by_name: bool  # whether the graph is called with names
    varying: int  # dimensions of any size, from the first on

    def given(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Values as arguments of a call, by position and by name."""
        return ((), dict(zip(self.names, values, strict=True))) if self.by_name else (values, {})

    def shapes(self, *dims: Any) -> dict[str, Any]:
        """What stands for the dimensions of any size, for each input."""
        return {
            name: dict(enumerate(dims[: min(self.varying, value.ndim)]))
            for name, value in zip(self.names, self.inputs, strict=True)
        }

    def program(self) -> torch.export.ExportedProgram:
        """The graph as torch traces it."""
        args, named = self.given(self.inputs)
        dynamic = torch.export.Dim.DYNAMIC
        with self.explained("torch.export"), _quiet(), torch.no_grad():
            return torch.export.export(
                self.graph,
                args,
                named,
                dynamic_shapes=self.shapes(dynamic, dynamic),
                strict=False,
            )

    @contextmanager
    def explained(self, by: str) -> Iterator[None]:
        """Turn what torch says of a model that it cannot export into an error that names both."""
        try:
            yield
        except Exception as error:
            what = type(getattr(self.graph.inner, "model", self.graph.calibrator)).__name__
            cause = error.__cause__ or error  # the one around it is about torch
            lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
            raise ValueError(
                f"{what} cannot be exported: {by} says {' '.join(lines[:2])!r}"
            ) from error


def _subject(
    calibrator: Calibrator,
    model: nn.Module | None,
    example: Any,
    last_layer: nn.Module | str | None,
    tokens: bool,
    probabilities: bool,
) -> _Subject:
    check_fitted(calibrator)
    if (model is None) != (example is None):
        raise ValueError("model and example belong together: give both or none of them")
    varying = 2 if tokens else 1
    if model is None:
        inputs = _random(calibrator, (2, 3)[:varying], torch.Generator().manual_seed(0))
        names = ["logits", "features"][: len(inputs)]
        return _Subject(_graph(calibrator, probabilities, names), inputs, names, False, varying)
    names, inputs, by_name = _example(example)
    whole = CalibratedModel(model, calibrator, last_layer=last_layer)
    return _Subject(_graph(whole, probabilities, names), inputs, names, by_name, varying)


def _example(example: Any) -> tuple[list[str], tuple[Tensor, ...], bool]:
    """Names of the inputs, the inputs, and whether the caller named them."""
    by_name = isinstance(example, Mapping)
    if isinstance(example, Tensor):
        names, values = ["input"], [example]
    elif by_name:
        names, values = list(example), list(example.values())
    elif isinstance(example, (tuple, list)):
        names, values = [f"input_{i}" for i in range(len(example))], list(example)
    else:
        names, values = [], []
    if not values or not all(isinstance(v, Tensor) and v.ndim and len(v) for v in values):
        raise TypeError(
            "example must be a tensor, or a tuple or dictionary of tensors, with one row or more, "
            f"got {type(example).__name__}"
        )
    if len({len(v) for v in values}) > 1:
        sizes = ", ".join(str(len(v)) for v in values)
        raise ValueError(f"inputs in example must have the same number of rows, got {sizes}")
    inputs = tuple(v.detach().cpu() for v in values)
    if len(inputs[0]) == 1:  # which torch would take for a constant
        inputs = tuple(torch.cat([v, v]) for v in inputs)
    return names, inputs, by_name


def _target(path: str | os.PathLike[str], suffix: str) -> Path:
    target = Path(path)
    if target.suffix != suffix:
        raise ValueError(f"cannot write {target}: the suffix must be {suffix}")
    if target.is_dir():
        raise ValueError(f"{target} is a folder: name a file")
    return target


def _about(calibrator: Calibrator) -> dict[str, str]:
    from calibrant import __version__

    try:
        kind = kind_of(calibrator)
    except TypeError:  # a calibrator of the user's own
        kind = type(calibrator).__name__
    return {"kind": kind, "classes": str(int(calibrator.classes_)), "calibrant": __version__}


def _random(
    calibrator: Calibrator, shape: tuple[int, ...], random: torch.Generator
) -> tuple[Tensor, ...]:
    """Logits, and features where they are needed, of rows of a shape."""
    classes = calibrator.classes
    found = [3 * torch.randn(shape if classes == 1 else (*shape, classes), generator=random)]
    if calibrator.needs_features:
        found.append(torch.randn((*shape, calibrator.width), generator=random))
    return tuple(found)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep to itself what torch has to say about its own future and about other libraries."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
