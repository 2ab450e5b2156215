"""Artifacts: everything that calibrant saves, in one format.

An artifact is one safetensors file: learned values, and metadata (see :class:`Artifact`) that name
a class and the arguments of its constructor. Nothing in it is executed. A calibrator, or a class
of ``KINDS``, has ``config()``, ``state_dict()`` and ``load_state_dict()``, as modules do, or
``state()`` and ``from_state()``, whose JSON becomes the only tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, overload

import torch
from torch import nn

from calibrant._core.atomic_files import replacing
from calibrant._core.torch_models import own_device
from calibrant.artifacts.objects import (
    FORMAT,
    KINDS,
    Artifact,
    artifact_of,
    holds_predictions,
    kind_of,
    packed,
    restored,
    unpacked,
)

__all__ = ["FILE", "FORMAT", "KINDS", "Artifact", "kind_of", "load", "read", "save"]

FILE = "calibrant.safetensors"  # in a folder
FILE_SUFFIXES = (".safetensors", ".json")  # of paths that name the file itself

Device: TypeAlias = str | torch.device
T = TypeVar("T")


def save(obj: Any, path: str | os.PathLike[str]) -> None:
    """Write a fitted object to an artifact, which :func:`load` reads.

    A kill at any moment leaves the old artifact or the new one. Other files in the folder are left
    alone. Temporary files of killed writers are removed when they are an hour old.

    Parameters
    ----------
    obj : object
        A fitted calibrator, a ``PriorCorrection``, ``Threshold``, ``ConformalSets``,
        ``DecisionRule``, ``Monitor``, or of :mod:`calibrant.llm` a ``FittedHead``,
        ``AnswerCalibrator``, ``SignalCalibrator``, ``Gate`` or ``GateWatch``.
    path : path
        A folder, created where it is missing, for the file ``calibrant.safetensors``; or, with the
        suffix .safetensors or .json, the file itself. The parent folder must exist.

    Examples
    --------
    >>> import tempfile
    >>> from calibrant.calibrators import TemperatureScaling
    >>> fitted = TemperatureScaling().fit([2.0, 1.0, -1.0, -0.5, -1.5], [1, 0, 0, 1, 0])
    >>> with tempfile.TemporaryDirectory() as home:
    ...     save(fitted, f"{home}/ts")
    ...     again = load(f"{home}/ts")
    >>> bool(again.temperature_ == fitted.temperature_)
    True
    """
    if isinstance(obj, (str, os.PathLike)):
        got = type(path).__name__
        raise TypeError(f"a fitted object comes first, got a path and a {got}: save(obj, path)")
    content = packed(artifact_of(obj))
    try:
        restored(unpacked(content))
    except (TypeError, ValueError) as error:
        raise ValueError(f"this {type(obj).__name__} could not be loaded again: {error}") from error
    place = Path(path).resolve()  # a link still points to the artifact afterwards
    if not place.parent.is_dir():
        raise FileNotFoundError(f"folder {place.parent} does not exist; create it first")
    if place.is_dir() or not (place.exists() or place.suffix in FILE_SUFFIXES):
        place.mkdir(exist_ok=True)
        place /= FILE
    elif place.exists():
        try:
            read(place)
        except ValueError as error:
            problem = f"{place} is not an artifact and is not replaced: name another"
            raise ValueError(problem) from error
    with replacing(place) as temporary, temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@overload
def load(path: str | os.PathLike[str], *, device: Device = "cpu") -> Any: ...
@overload
def load(path: str | os.PathLike[str], wanted: type[T], *, device: Device = "cpu") -> T: ...
def load(
    path: str | os.PathLike[str], wanted: type[Any] = object, *, device: Device = "cpu"
) -> Any:
    """Read an artifact that :func:`save` wrote.

    The outputs are bit by bit those of the saved object. Unknown keys, missing tensors, other
    dtypes or shapes, NaN, infinity, values that make probabilities NaN, and damaged files are
    refused.

    Parameters
    ----------
    path : path
        The folder, or the file itself.
    wanted : type, optional
        Refuse objects of other classes.
    device : str or torch.device
        Where learned values go, wherever they were saved.

    Examples
    --------
    >>> load("no/such/folder")
    Traceback (most recent call last):
    ...
    FileNotFoundError: there is no artifact no/such/folder: calibrant.save(obj, path) ...
    """
    artifact = read(path)
    with _naming(path):
        obj = restored(artifact)
    if not isinstance(obj, wanted):
        raise ValueError(f"{path} holds a {type(obj).__name__}, a {wanted.__name__} is wanted")
    parts = [obj] if isinstance(obj, nn.Module) else getattr(obj, "__dict__", {}).values()
    place = own_device(device)
    for part in parts:
        if isinstance(part, nn.Module):
            part.to(place)
    return obj


def read(path: str | os.PathLike[str]) -> Artifact:
    """Read the content of an artifact without making the object of it."""
    place = Path(path)
    file = place / FILE if place.is_dir() else place
    remedy = "calibrant.save(obj, path) or calibrant fit -o makes one"
    with _naming(path):
        if not file.is_file():
            raise FileNotFoundError(f"there is no artifact {path}: {remedy}")
        if file.suffix in (".npz", ".npy", ".parquet", ".csv"):
            raise _no_artifact(path)
        content = file.read_bytes()
        try:
            return unpacked(content)
        except ValueError:
            if holds_predictions(content):
                raise _no_artifact(path) from None
            raise


class PredictionFileError(ValueError):
    """A prediction file was passed in place of an artifact."""


def _no_artifact(path: str | os.PathLike[str]) -> PredictionFileError:
    return PredictionFileError(
        f"{path} is a prediction file, not an artifact: calibrant.fit(path) fits a calibrator on "
        "it, calibrant.apply(calibrator, path, out) calibrates it"
    )


@contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name the artifact in errors that its content causes."""
    try:
        yield
    except (OSError, PredictionFileError):
        raise
    except Exception as error:
        remedy = "save it again, or upgrade calibrant if a newer release wrote it"
        raise ValueError(f"{path} cannot be loaded: {error}; {remedy}") from error
