"""Artifacts: a fitted calibrator as a folder that a person can read and any release can load.

``config.json`` says what the folder holds, ``weights.safetensors`` holds the learned values.
Nothing in either is executed: the class is looked up by name in a fixed table, its constructor
gets the arguments that are written down, and numbers are read as numbers. A module can be saved
when ``type(module)(**module.config())`` has the buffers and submodules of ``module``. A value of
``config()`` that is itself a calibrator is written as its kind and its config, so calibrators
that hold others need nothing more.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_of, save as bytes_of
from torch import Tensor

from calibrant._core.messages import comma_separated
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.registry import CALIBRATORS
from calibrant.decide.priors import PriorCorrection
from calibrant.retrain.maccal import MaCCal

FORMAT = 1
"""Version of the folder's layout; a release reads its own and every earlier one."""
CONFIG = "config.json"
WEIGHTS = "weights.safetensors"
KEYS = {
    *("format", "kind", "description", "config", "classes", "parameters", "calibrant"),
    "weights_sha256",
}
AGAIN = "copy the whole folder again, or fit and save again"


def kinds() -> dict[str, type[Calibrator]]:
    """Every class that a folder may hold, by the name that stands in it."""
    return {**CALIBRATORS, "prior": PriorCorrection, "maccal": MaCCal}


def save(module: Calibrator, folder: str | os.PathLike[str]) -> None:
    """Write a fitted calibrator to a folder, which :func:`load` reads.

    Another artifact in its place is replaced as a whole: a kill at any moment leaves the old
    one or the new one for ``load``. A folder that holds anything else is not touched.

    Parameters
    ----------
    module : Calibrator
        Fitted, of one of the kinds in ``calibrant.CALIBRATORS``, or a
        :class:`calibrant.decide.PriorCorrection` of one, or a :class:`calibrant.MaCCal`.
    folder : path
        Its parent must exist.

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
    target = Path(folder).resolve()  # of a link, the folder that it points to is replaced
    weights = bytes_of(_state(module))
    header = _json(_header(module, weights))
    _restored(_parsed(header, target), weights, target)  # what cannot be loaded is not written
    _check_replaceable(target)
    with _replacing_folder(target) as temporary:
        (temporary / CONFIG).write_bytes(header)
        (temporary / WEIGHTS).write_bytes(weights)


def load(folder: str | os.PathLike[str]) -> Calibrator:
    """Read a calibrator that :func:`save` wrote, onto the CPU.

    Its outputs are those of the saved one, bit by bit. Whatever does not fit (an unknown key, a
    missing or additional tensor, another dtype, a damaged file) is refused, not repaired.

    Examples
    --------
    >>> load("no/such/folder")
    Traceback (most recent call last):
    ...
    FileNotFoundError: there is no folder no/such/folder; calibrant.save(module, folder) ...
    """
    target = Path(folder)
    place = _present(target)
    return _restored(_parsed(_content(place, CONFIG), target), _content(place, WEIGHTS), target)


# ------------------------------------------------------------------------------ what is written


def _state(module: Calibrator) -> dict[str, Tensor]:
    """Learned values, on the CPU and apart from each other in memory."""
    if not isinstance(module, Calibrator):
        raise TypeError(f"save takes a fitted calibrator, got {type(module).__name__}")
    if not int(module.classes_):
        raise ValueError(
            f"this {type(module).__name__} is not fitted: call fit(logits, labels) before save"
        )
    state = {name: value.detach().cpu() for name, value in module.state_dict().items()}
    for name, value in state.items():
        if not torch.isfinite(value).all():
            raise ValueError(
                f"{name} of this {type(module).__name__} holds NaN or infinity: nothing was "
                "written; fit it again, on data without them"
            )
    return {name: value.clone().contiguous() for name, value in state.items()}


def _header(module: Calibrator, weights: bytes) -> dict[str, Any]:
    from calibrant import __version__

    classes = int(module.classes_)
    size = module.size(max(classes, 2))  # one logit stands for two classes
    wanted = "one logit, the log-odds of two" if classes == 1 else f"logits of {classes}"
    return {
        "format": FORMAT,
        **_written(module),
        "description": f"{type(module).__name__} for {wanted} classes, parameters fitted: {size}",
        "classes": classes,
        "parameters": size,
        "calibrant": __version__,
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
    }


def _written(value: Any) -> Any:
    """A value of a config as JSON has it, a calibrator as its kind and its own config."""
    if isinstance(value, Calibrator):
        return {"kind": _kind(value), "config": _written(value.config())}
    if isinstance(value, Mapping):
        return {key: _written(item) for key, item in value.items()}
    return [_written(item) for item in value] if isinstance(value, (list, tuple)) else value


def _kind(module: Calibrator) -> str:
    # of a subclass the saved name would bring back its parent, so the type must be the very one
    for name, kind in kinds().items():
        if type(module) is kind:
            return name
    raise ValueError(
        f"{type(module).__name__} cannot be saved, its class is not in the table of calibrators: "
        f"{comma_separated(kinds())}"
    )


def _json(header: dict[str, Any]) -> bytes:
    try:
        return f"{json.dumps(header, indent=2, allow_nan=False)}\n".encode()
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"an argument of {header['kind']} cannot be written to JSON ({error}): give finite "
            "Python numbers, strings, or lists of them"
        ) from error


# --------------------------------------------------------------------------------- what is read


def _refuse(
    folder: Path, wrong: str, remedy: str = AGAIN, cause: Exception | None = None
) -> NoReturn:
    raise ValueError(f"{folder} is no artifact that can be loaded: {wrong}; {remedy}") from cause


def _content(folder: Path, name: str) -> bytes:
    if not (folder / name).is_file():
        _refuse(folder, f"it has no file {name}")
    return (folder / name).read_bytes()


def _parsed(text: bytes, folder: Path) -> dict[str, Any]:
    """The content of config.json, of a format that this release knows and with all its keys."""
    try:
        header = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        _refuse(folder, f"{CONFIG} is not JSON ({error})", cause=error)
    if not isinstance(header, dict):
        _refuse(folder, f"{CONFIG} must hold an object, got a {type(header).__name__}")
    _check_format(header.get("format"), folder)
    _check_names(header, KEYS, f"keys of {CONFIG}", folder)
    return header


def _check_format(version: Any, folder: Path) -> None:
    if type(version) is not int or version < 1:
        _refuse(folder, f"its format must be a whole number from 1 to {FORMAT}, got {version!r}")
    if version > FORMAT:
        _refuse(
            folder,
            f"it has format {version}, this release reads up to {FORMAT}",
            "upgrade calibrant",
        )


def _check_names(found: Iterable[str], wanted: Iterable[str], what: str, folder: Path) -> None:
    missing, unknown = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or unknown:
        _refuse(
            folder,
            f"{what}: missing {comma_separated(missing)}, unknown {comma_separated(unknown)}",
        )


def _restored(header: dict[str, Any], weights: bytes, folder: Path) -> Calibrator:
    module = _built(header["kind"], header["config"], folder)
    state = _tensors(weights, folder)
    wanted = module.state_dict()
    _check_names(state, wanted, f"tensors of {WEIGHTS}", folder)
    _check_dtypes(state, wanted, folder)
    if hashlib.sha256(weights).hexdigest() != header["weights_sha256"]:
        # also what a reader gets who opens one file before and the other after a save
        _refuse(folder, f"{WEIGHTS} is not the file that {CONFIG} was written with")
    try:
        module.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        _refuse(folder, f"{WEIGHTS} does not fit ({error})", cause=error)
    if int(module.classes_) != header["classes"]:
        _refuse(folder, f"{CONFIG} says {header['classes']} classes, not {int(module.classes_)}")
    return module


def _built(kind: Any, config: Any, folder: Path) -> Calibrator:
    """A module as its constructor makes it, without learned values."""
    if not isinstance(kind, str) or kind not in kinds():
        near = difflib.get_close_matches(str(kind), kinds(), 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        remedy = f"known are {comma_separated(kinds())}; a newer release may know it"
        _refuse(folder, f"its kind {kind!r} is unknown{hint}", remedy)
    if not isinstance(config, dict):
        _refuse(folder, f"the config of {kind} must be an object, got {config!r}")
    build: Callable[..., Calibrator] = kinds()[kind]
    _check_names(config, inspect.signature(build).parameters, f"arguments of {kind}", folder)
    arguments = {name: _argument(value, folder) for name, value in config.items()}
    try:
        return build(**arguments)
    except (TypeError, ValueError, AttributeError) as error:
        _refuse(folder, f"{kind} does not take the arguments in {CONFIG} ({error})", cause=error)


def _argument(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_argument(item, folder) for item in value]
    if isinstance(value, dict) and set(value) == {"kind", "config"}:
        return _built(value["kind"], value["config"], folder)
    if isinstance(value, dict):
        return {key: _argument(item, folder) for key, item in value.items()}
    return value


def _tensors(weights: bytes, folder: Path) -> dict[str, Tensor]:
    try:
        return tensors_of(weights)
    except (SafetensorError, KeyError, ValueError) as error:
        _refuse(folder, f"{WEIGHTS} is damaged or incomplete ({error})", cause=error)


def _check_dtypes(state: dict[str, Tensor], wanted: dict[str, Tensor], folder: Path) -> None:
    for name, value in state.items():
        if value.dtype != wanted[name].dtype:
            found, right = (str(t.dtype).removeprefix("torch.") for t in (value, wanted[name]))
            _refuse(folder, f"{name} must be {right}, got {found}", "call .float() and save again")


# ------------------------------------------------------------------------- how it takes its place


def _backup(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.calibrant-before")


def _present(folder: Path) -> Path:
    """The folder, or what was there before a save that was killed between its two renames."""
    target = folder.resolve()
    for place in (target, _backup(target)):
        if place.is_dir():
            return place
    raise FileNotFoundError(
        f"there is no folder {folder}; calibrant.save(module, folder) or calibrant fit -o makes one"
    )


def _check_replaceable(folder: Path) -> None:
    """Raise unless nothing is lost when a new artifact takes the place of ``folder``."""
    if not folder.parent.is_dir():
        raise FileNotFoundError(f"folder {folder.parent} does not exist; create it first")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file: name a folder")
    others = sorted(path.name for path in folder.iterdir() if path.name not in (CONFIG, WEIGHTS))
    if others:
        raise ValueError(
            f"{folder} holds other files ({comma_separated(others[:5])}) and is left as it is: name a new "
            "folder"
        )
    if any(folder.iterdir()) and not _is_artifact(folder):
        raise ValueError(f"{folder} holds files of another program: name a new folder")


def _is_artifact(folder: Path) -> bool:
    """Whether ``save`` made it, in this release or another, damaged weights or not."""
    try:
        header = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(header, dict) and {"format", "kind", "calibrant"} <= set(header)


@contextmanager
def _replacing_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder next to ``target`` that takes its place when all went well."""
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    temporary.mkdir()
    try:
        yield temporary
        _swap(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _swap(temporary: Path, target: Path) -> None:
    # Python cannot exchange two folders in one step. Between the two renames the old folder
    # stands under a name at which load looks too.
    backup = _backup(target)
    if target.exists():
        shutil.rmtree(backup, ignore_errors=True)  # of a save that was killed after its renames
        os.rename(target, backup)
    try:
        os.rename(temporary, target)
    finally:
        if backup.exists() and not target.exists():
            os.rename(backup, target)
    shutil.rmtree(backup, ignore_errors=True)
