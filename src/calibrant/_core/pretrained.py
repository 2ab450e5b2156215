"""Checks of pretrained models that are loaded by a path or a name, with transformers or without."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from calibrant._core.messages import comma_separated
from calibrant._core.optional import needed
from calibrant._core.torch_models import own_device

CONFIGS = ("config.json", "adapter_config.json")  # one is in the folder of every model


def check_options(*, device: str | None, dtype: str) -> tuple[Any, Any]:
    """Return the torch device, None to leave the model where it is, and the precision."""
    precision: Any = "auto" if dtype == "auto" else getattr(torch, dtype, None)
    usable = isinstance(precision, torch.dtype) and precision.is_floating_point
    if precision != "auto" and not usable:
        raise ValueError(f"dtype must be auto, float32, bfloat16 or float16, got {dtype!r}")
    return (None if device is None else own_device(device)), precision


def check_transformers(what: str) -> None:
    """Raise unless transformers can be imported, which ``what`` need."""
    with needed(f"{what} need transformers", "'calibrant[llm]'"):
        import transformers  # noqa: F401


def check_model(path: str | os.PathLike[str]) -> None:
    """Raise if a path leads to no model; a name on the hub is not looked up."""
    file, name = Path(path), str(path)
    # a name on the hub is one word, or two with a slash between them
    local = file.is_absolute() or name.startswith(".") or name.endswith(("/", ".gguf"))
    if local and not file.exists():
        raise FileNotFoundError(f"there is no model at {path}")
    if file.is_dir() and not any((file / name).exists() for name in CONFIGS):
        found = _models_in(file)
        hint = f"; pass {found[0]}" if found else ""
        raise FileNotFoundError(f"{path} is no folder of a model: it has no {CONFIGS[0]}{hint}")


def _models_in(folder: Path) -> list[Path]:
    """Return GGUF files of a folder, or the models of a folder of the cache of the hub."""
    snapshots = folder.glob(f"snapshots/*/{CONFIGS[0]}")
    return sorted(folder.glob("*.gguf")) or sorted(config.parent for config in snapshots)


@contextmanager
def naming_the_model(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let errors of transformers name the model, since many tell only what went wrong inside."""
    try:
        yield
    except (OSError, ValueError) as error:
        if str(path) in str(error):
            raise
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"the model {path} cannot be loaded: {error}") from error


def check_complete(report: dict[str, Any], path: object, name: str) -> None:
    """Raise if weights of a model were not loaded: they would be random."""
    wrong = sorted([*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])])
    if wrong:
        raise ValueError(
            f"{path} must have all weights of {name}, got none of the right shape for "
            f"{comma_separated(wrong[:3])}{' and others' * (len(wrong) > 3)}: download or save "
            "the model again"
        )
