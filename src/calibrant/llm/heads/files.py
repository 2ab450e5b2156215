"""Heads as folders: ``head.json`` says what it is, a ``.safetensors`` file holds the numbers.

Nothing that is read is executed. The file of numbers is named after its content, and the json
names it: writing that last, in one step, replaces a head as a whole.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_of, save as bytes_of
from torch import Tensor

from calibrant._core.atomic_files import replacing
from calibrant._core.messages import listed
from calibrant.llm.fingerprint import ModelFingerprint
from calibrant.llm.heads.fitted import FittedHead
from calibrant.llm.heads.modules import HEADS, Head

FORMAT = 1
"""Version of the layout; a release reads its own and every earlier one."""
HEADER = "head.json"
DESCRIBED = ("objective", "kept", "reasons", "figures", "settings")
KEYS = ("format", "calibrant", "kind", "config", "mark", *DESCRIBED, "weights", "weights_sha256")
AGAIN = "copy the whole folder again, or fit and save again"


def save_head(fitted: FittedHead, folder: str | os.PathLike[str]) -> None:
    """Write a fitted head to a folder, which :func:`load_head` reads.

    An earlier head in it is replaced; a kill at any moment leaves the old one or the new one.
    Other files in the folder are left alone, so it may be that of the model.

    Parameters
    ----------
    fitted : FittedHead
    folder : path
        Made where it is missing; its parent must exist.

    Examples
    --------
    >>> import tempfile
    >>> tiny = ModelFingerprint("tiny", 2, 3, "0" * 16, None)
    >>> with tempfile.TemporaryDirectory() as home:
    ...     save_head(FittedHead.from_temperature(2.0, tiny), f"{home}/head")
    ...     again = load_head(f"{home}/head")
    >>> again.fingerprint == tiny, float(again.head.bias)
    (True, -0.69...)
    """
    from calibrant import __version__

    target = Path(folder)
    weights = bytes_of(_state(fitted.head))
    digest = hashlib.sha256(weights).hexdigest()
    header = {
        "format": FORMAT,
        "calibrant": __version__,
        "kind": fitted.head.kind,
        "config": fitted.head.config(),
        "mark": asdict(fitted.fingerprint),
        **{name: getattr(fitted, name) for name in DESCRIBED},
        "weights": f"head-{digest[:16]}.safetensors",
        "weights_sha256": digest,
    }
    text = json.dumps(_plain(header), indent=2, allow_nan=False)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"folder {target.parent} does not exist; create it first")
    target.mkdir(exist_ok=True)
    for name, content in ((header["weights"], weights), (HEADER, f"{text}\n".encode())):
        with replacing(target / name) as temporary:
            temporary.write_bytes(content)
    for old in target.glob("head-*.safetensors"):
        if old.name != header["weights"]:
            old.unlink(missing_ok=True)


def load_head(folder: str | os.PathLike[str]) -> FittedHead:
    """Read a head that :func:`save_head` wrote, onto the CPU.

    >>> load_head("no/such/folder")
    Traceback (most recent call last):
    ...
    FileNotFoundError: there is no head.json in no/such/folder; calibrant llm fit makes one
    """
    place = Path(folder)
    try:
        content = (place / HEADER).read_bytes()
    except OSError:
        raise FileNotFoundError(
            f"there is no {HEADER} in {folder}; calibrant llm fit makes one"
        ) from None
    header = _parsed(content, place)
    head = _built(header["kind"], header["config"], place)
    _fill(head, _weights(header, place), place)
    try:
        fingerprint = ModelFingerprint(**header["mark"])
    except TypeError as error:
        _refuse(place, f"its mark does not fit ({error})", cause=error)
    described: Any = {name: _restored(header[name]) for name in DESCRIBED}
    return FittedHead(head, fingerprint, **described)


# ------------------------------------------------------------------------------ what is written


def _state(head: Head) -> dict[str, Tensor]:
    state = {name: value.detach().cpu().contiguous() for name, value in head.state_dict().items()}
    for name, value in state.items():
        if not torch.isfinite(value).all():
            raise ValueError(
                f"{name} of this {type(head).__name__} holds NaN or infinity: nothing was written; "
                "fit it again, with a smaller rate"
            )
    return state


def _plain(value: Any) -> Any:
    """JSON has no NaN, which the AUROC is where all tokens are right: null stands for it."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return None if isinstance(value, float) and value != value else value


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _restored(item) for name, item in value.items()}
    return float("nan") if value is None else value


# --------------------------------------------------------------------------------- what is read


def _refuse(
    folder: Path, wrong: str, remedy: str = AGAIN, cause: Exception | None = None
) -> NoReturn:
    raise ValueError(f"{folder} holds no head that can be loaded: {wrong}; {remedy}") from cause


def _parsed(content: bytes, folder: Path) -> dict[str, Any]:
    try:
        header = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        _refuse(folder, f"{HEADER} is not JSON ({error})", cause=error)
    version = header.get("format") if isinstance(header, dict) else None
    if type(version) is not int or version < 1:
        _refuse(folder, f"{HEADER} must have a format from 1 to {FORMAT}, got {version!r}")
    if version > FORMAT:
        wrong = f"it has format {version}, this release reads up to {FORMAT}"
        _refuse(folder, wrong, "upgrade calibrant")
    _check_names(header, KEYS, f"keys of {HEADER}", folder)
    return cast(dict[str, Any], header)


def _check_names(found: Iterable[str], wanted: Iterable[str], what: str, folder: Path) -> None:
    missing, unknown = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or unknown:
        _refuse(folder, f"{what}: missing {listed(missing)}, unknown {listed(unknown)}")


def _built(kind: Any, config: Any, folder: Path) -> Head:
    if kind not in HEADS:
        _refuse(folder, f"its kind {kind!r} is unknown", f"known are {listed(HEADS)}")
    build: Any = HEADS[kind]
    if not isinstance(config, dict):
        _refuse(folder, f"the config of {kind} must be an object, got {config!r}")
    wanted = [name for name in inspect.signature(build).parameters if name != "start"]
    _check_names(config, wanted, f"arguments of {kind}", folder)
    try:
        return cast(Head, build(**config))
    except (TypeError, ValueError, RuntimeError) as error:
        _refuse(folder, f"{kind} does not take its arguments ({error})", cause=error)


def _weights(header: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    name = str(header["weights"])
    path = folder / name
    if Path(name).name != name or not path.is_file():
        _refuse(folder, f"it has no file {name}")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != header["weights_sha256"]:
        _refuse(folder, f"{name} is not the file that {HEADER} was written with")
    try:
        return tensors_of(content)
    except (SafetensorError, KeyError, ValueError) as error:
        _refuse(folder, f"{name} is damaged ({error})", cause=error)


def _fill(head: Head, state: dict[str, Tensor], folder: Path) -> None:
    _check_names(state, head.state_dict(), "tensors", folder)
    try:
        head.load_state_dict(state)
    except RuntimeError as error:
        _refuse(folder, f"its tensors do not fit ({error})", cause=error)
