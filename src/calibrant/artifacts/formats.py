"""Files of artifacts: safetensors whose metadata describe them, and the first format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors.torch import load as tensors_of, save as bytes_of
from torch import Tensor

from calibrant._core.messages import comma_separated

FORMAT = 2  # a release reads its own and every earlier one
KEYS = ("format", "kind", "description", "calibrant", "config", "extra", "sha256")


class Artifact(NamedTuple):
    """The content of an artifact.

    Attributes
    ----------
    format : int
    kind : str
        Name of a class.
    description : str
    calibrant : str
        Version that wrote it.
    config : dict
        Arguments of the constructor; modules among them as ``{"kind": ..., "config": ...}``.
    extra : dict
        Entries of the ``state_dict`` that are no tensors.
    tensors : dict
    """

    format: int
    kind: str
    description: str
    calibrant: str
    config: Any
    extra: Any
    tensors: dict[str, Tensor]


def packed(artifact: Artifact) -> bytes:
    """Serialise an artifact; config and extra are JSON, and metadata come first in the file."""
    config, extra = to_json(artifact.config), to_json(artifact.extra)
    digest = _digest(config, extra, artifact.tensors)
    values = (str(artifact.format), *artifact[1:4], config, extra, digest)
    plain = bytes_of(artifact.tensors)
    begin = 8 + int.from_bytes(plain[:8], "little")
    # not by safetensors, which write metadata in random order
    header = {"__metadata__": dict(zip(KEYS, values, strict=True)), **json.loads(plain[8:begin])}
    text = json.dumps(header, indent=1, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # keeps the tensors aligned
    return b"".join([len(text).to_bytes(8, "little"), text, plain[begin:]])


def unpacked(content: bytes) -> Artifact:
    """Parse the bytes of an artifact; raises ValueError for anything else."""
    try:
        tensors = tensors_of(content)
    except Exception as error:  # of several kinds
        raise ValueError(f"it is not a safetensors file, or damaged ({error})") from error
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    metadata: dict[str, str] = header.get("__metadata__") or {}
    version = metadata.get("format", "")
    check_format(int(version) if version.isdecimal() else version, FORMAT)
    check_names(metadata, KEYS, "metadata")
    if metadata["sha256"] != _digest(metadata["config"], metadata["extra"], tensors):
        raise ValueError("it is damaged: the checksum differs")
    kind, description, calibrant = (metadata[key] for key in KEYS[1:4])
    config, extra = (parsed(metadata[key], key) for key in KEYS[4:6])
    return Artifact(int(version), kind, description, calibrant, config, extra, tensors)


def holds_predictions(content: bytes) -> bool:
    """Return True for safetensors with logits or probs of any split, without our metadata."""
    try:
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        return "kind" not in header.get("__metadata__", {}) and any(
            name.endswith(("logits", "probs")) for name in header
        )
    except (ValueError, AttributeError, RecursionError):
        return False


def _digest(config: str, extra: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(f"{config}\n{extra}\n".encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def to_json(value: Any) -> str:
    """Write a value as JSON, which knows neither NaN nor infinity."""
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        remedy = "use finite Python numbers, strings, and lists of them"
        raise ValueError(f"{value!r:.200} cannot be written to JSON ({error}): {remedy}") from error


def parsed(text: str | bytes, what: str, kind: type[Any] = object) -> Any:
    """Read JSON, of an object if ``kind`` is dict."""

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is no number")

    try:
        value = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not JSON ({error})") from error
    if not isinstance(value, kind):
        raise ValueError(f"{what} must hold an object, got a {type(value).__name__}")
    return value


def json_tensor(value: Any) -> Tensor:
    """Return the bytes of the JSON of a value as a tensor."""
    return torch.frombuffer(bytearray(to_json(value).encode()), dtype=torch.uint8)


def check_format(version: Any, newest: int) -> None:
    """Raise unless a version is a whole number from 1 to the newest."""
    if type(version) is not int or not 1 <= version <= newest:
        raise ValueError(f"its format is {version!r:.60}, this release reads 1 to {newest}")


def check_names(names: Iterable[str], wanted: Iterable[str], what: str) -> None:
    """Raise unless names are exactly those that are wanted."""
    missing, unknown = sorted(set(wanted) - set(names)), sorted(set(names) - set(wanted))
    if missing or unknown:
        lists = f"missing {comma_separated(missing)}, unknown {comma_separated(unknown)}"
        raise ValueError(f"{what}: {lists}")


# Format 1, which earlier releases wrote: JSON, and tensors in a file of their own.


CALIBRATOR, WEIGHTS, HEAD = "config.json", "weights.safetensors", "head.json"
KEYS_1 = ("format", "kind", "calibrant", "config", "weights_sha256")
CALIBRATOR_KEYS = ("description", "classes", "parameters")
HEAD_KEYS = ("objective", "kept", "reasons", "figures", "settings")
RENAMED = {"chosen": "chosen_", "head": "classifier"}  # modules that may have another name since


def read_folder(folder: Path) -> Artifact:
    """Read the folder of a calibrator or a temperature head."""
    extra: dict[str, Any] = {}
    if (folder / HEAD).is_file():
        header = _header(folder / HEAD, (*KEYS_1, *HEAD_KEYS, "mark", "weights"))
        config = {name: header[name] for name in HEAD_KEYS}
        config |= {"head": header["kind"], "options": header["config"]}
        config["fingerprint"] = header["mark"]
        kind, description = "head", ""
    else:
        header = _header(folder / CALIBRATOR, (*KEYS_1, *CALIBRATOR_KEYS))
        kind, description = header["kind"], header["description"]
        config, extra = _divided(header["config"])
    weights = folder / Path(str(header.get("weights", WEIGHTS))).name
    if not weights.is_file():
        raise ValueError(f"it has no file {weights.name}")
    content = weights.read_bytes()
    if hashlib.sha256(content).hexdigest() != header["weights_sha256"]:
        raise ValueError(f"{weights.name} is damaged: the checksum differs")
    return Artifact(1, kind, description, header["calibrant"], config, extra, tensors_of(content))


def _header(path: Path, keys: Iterable[str]) -> dict[str, Any]:
    header: dict[str, Any] = parsed(path.read_bytes(), path.name, dict)
    check_format(header.get("format"), 1)
    check_names(header, keys, f"keys of {path.name}")
    return header


def _divided(config: Any) -> tuple[Any, dict[str, Any]]:
    """Separate what Auto had chosen, once an argument, from the config."""
    if not isinstance(config, dict) or not isinstance(config.get("chosen"), dict):
        return config, {}
    rest = {**config}
    chosen, reasons = rest.pop("chosen"), rest.pop("reasons", None)
    state = {"chosen": chosen.get("kind"), "config": chosen.get("config"), "reasons": reasons}
    return rest, {"_extra_state": state}


def read_file(content: bytes) -> Artifact:
    """Read the JSON of a monitor or an answer calibrator."""
    state = parsed(content, "it", dict)
    check_format(state.pop("format", None), 1)
    kind = state.pop("kind", "answers")
    return Artifact(1, kind, "", "", {}, {}, {"state": json_tensor(state)})


def renamed(tensors: Mapping[str, Tensor], wanted: Mapping[str, Any]) -> dict[str, Tensor]:
    """Give tensors their present names, and drop numbers that are no longer kept."""
    present = {}
    for old, value in tensors.items():
        first, dot, rest = old.partition(".")
        name = old if old in wanted else RENAMED.get(first, first) + dot + rest
        if name in wanted or name not in ("classes_", "width_"):
            present[name] = value
    return present


def remove_files(folder: Path) -> None:
    """Remove what a new artifact in the folder replaces; files of other programs stay."""
    for name in (CALIBRATOR, HEAD):
        try:
            header = json.loads((folder / name).read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(header, dict) and set(KEYS_1) <= set(header):
            (folder / name).unlink(missing_ok=True)
            (folder / Path(str(header.get("weights", WEIGHTS))).name).unlink(missing_ok=True)
