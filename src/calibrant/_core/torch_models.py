"""Helpers for third-party models: loading, batches, outputs, devices and layers."""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from calibrant._core.atomic_files import replacing
from calibrant._core.messages import comma_separated, needed

_CONFIGS = ("config.json", "adapter_config.json")  # one is in the folder of every model


def logits_of(output: Any) -> Tensor:
    """Return the logits in the output of a model."""
    named = isinstance(output, Mapping) and "logits" in output
    result = output["logits"] if named else getattr(output, "logits", output)
    if isinstance(result, (tuple, list)) and result:
        result = result[0]
    if not isinstance(result, Tensor):
        raise TypeError(
            "the model must return logits: a tensor, a tuple or list that begins with one, or a "
            f"dictionary or dataclass with logits; got {type(output).__name__}"
        )
    return result


def taken_apart(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return the inputs of a batch by position, those by name, and the labels."""
    if isinstance(batch, Mapping) and "labels" in batch:
        return (), {name: part for name, part in batch.items() if name != "labels"}, batch["labels"]
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        got = f"the keys {', '.join(batch)}" if isinstance(batch, Mapping) else type(batch).__name__
        raise TypeError(
            f"a batch of the loader must be (inputs, labels) or a dictionary with labels, got {got}"
        )
    *inputs, labels = batch
    first = inputs[0]
    if len(inputs) == 1 and isinstance(first, Mapping):
        return (), dict(first), labels
    if len(inputs) == 1 and isinstance(first, (tuple, list)):
        return tuple(first), {}, labels
    return tuple(inputs), {}, labels


def moved(value: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: moved(part, device) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(moved(part, device) for part in value)
    return value


def device_of(model: nn.Module, otherwise: Any = "cpu") -> torch.device:
    """Return the device of a model; ``otherwise`` if it has no parameters."""
    return next((p.device for p in model.parameters()), torch.device(otherwise))


def own_device(device: str | torch.device) -> torch.device:
    """Return the device of this process, of which several may share the name ``cuda``."""
    rank = os.environ.get("LOCAL_RANK")
    try:
        own = torch.device(f"cuda:{rank}" if rank and str(device) == "cuda" else device)
        torch.empty(0, device=own)
    except (RuntimeError, AssertionError) as error:  # torch has many for this
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {device!r} cannot be used here ({reason}): try cpu") from None
    return own


def own_rank() -> tuple[int, int]:
    """Return the number of this process and of all, from the variables of ``torchrun``."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if not 0 <= rank < ranks:
        raise ValueError(
            f"RANK must be below WORLD_SIZE (1 if unset), got {rank} and {ranks}: set both or none"
        )
    return rank, ranks


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into ``eval`` mode, and its layers back into their own modes afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def name_of(model: nn.Module, layer: nn.Module | str) -> str:
    """Return the name of a layer in a model, which it must be part of."""
    names = {name: module for name, module in model.named_modules() if name}
    for name, module in names.items():
        if layer is module or layer == name:
            return str(name)
    asked = repr(layer) if isinstance(layer, str) else f"this {type(layer).__name__}"
    raise ValueError(
        f"last_layer must be a layer of the model or its name, got {asked}; the last of its "
        f"{len(names)} layers are {', '.join(list(names)[-5:]) or 'none'}"
    )


@contextmanager
def layer_inputs(model: nn.Module, layer: nn.Module | str) -> Iterator[Callable[[], Tensor]]:
    """Capture the inputs of a layer while a model runs: the features, for its last layer.

    Parameters
    ----------
    model : nn.Module
    layer : nn.Module or str
        A layer of the model, or its name in it.

    Yields
    ------
    function
        Returns the input of the layer in the last call of the model, with its gradient.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> with layer_inputs(model, "2") as features:
    ...     logits = model(torch.randn(5, 4))
    ...     features().shape
    torch.Size([5, 8])
    """
    name = name_of(model, layer)
    captured: list[Tensor] = []
    here = threading.get_ident()  # another thread may run the same model

    def capture(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if threading.get_ident() == here:
            captured[:] = [*inputs, *named.values()][:1]

    def last() -> Tensor:
        if not captured:
            raise ValueError(f"the model did not call its layer {name!r}: name another last_layer")
        return captured[0]

    hook = model.get_submodule(name).register_forward_pre_hook(capture, with_kwargs=True)
    try:
        yield last
    finally:
        hook.remove()


def save_state(state: Any, path: Path) -> None:
    """Write what ``torch.load`` reads; an interrupted run leaves the old file or the new one."""
    written = io.BytesIO()  # on a full disk torch raises errors of its own, or ends the process
    torch.save(state, written)
    with replacing(path) as temporary:
        temporary.write_bytes(written.getbuffer())


def digest(model: nn.Module) -> str:
    """Return a hash of the weights of a model, from some numbers of each of its tensors."""
    seen = hashlib.sha256()
    for name, values in model.state_dict().items():
        if isinstance(values, Tensor):  # and not the extra state of a module
            some = values.detach().reshape(-1)[:: max(1, values.numel() // 16)].cpu()
            seen.update(f"{name} {tuple(values.shape)} {some.tolist()}".encode())
    return seen.hexdigest()


def device_and_dtype(*, device: str | None, dtype: str) -> tuple[Any, Any]:
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
    if file.is_dir() and not any((file / name).exists() for name in _CONFIGS):
        # GGUF files of a folder, or the models in a folder of the cache of the hub
        snapshots = file.glob(f"snapshots/*/{_CONFIGS[0]}")
        found = sorted(file.glob("*.gguf")) or sorted(config.parent for config in snapshots)
        hint = f"; pass {found[0]}" if found else ""
        raise FileNotFoundError(f"{path} is not a model folder: it has no {_CONFIGS[0]}{hint}")


def check_complete(report: dict[str, Any], path: object, name: str) -> None:
    """Raise if weights of a model were not loaded: they would be random."""
    wrong = sorted([*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])])
    if wrong:
        raise ValueError(
            f"{path} must have all weights of {name}, got none of the right shape for "
            f"{comma_separated(wrong[:3])}{' and others' * (len(wrong) > 3)}: download or save "
            "the model again"
        )
