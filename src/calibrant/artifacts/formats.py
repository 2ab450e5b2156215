"""Files of artifacts: safetensors whose metadata describe them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors.torch import load as tensors_of, save as bytes_of
from torch import Tensor

from calibrant._core.messages import comma_separated

FORMAT = 1
KEYS = ("format", "kind", "description", "calibrant", "config", "extra", "sha256")


class Artifact(NamedTuple):
    """The content of an artifact.

    Attributes
    ----------
    kind : str
        Name of a class.
    description : str
    calibrant : str
        Version that wrote it.
    config : dict
        Arguments of the constructor; modules among them as ``{"kind": ..., "config": ...}``.
    extra : dict
        Entries of the ``state_dict`` that are no tensors, and names of classes.
    tensors : dict
    """

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
    values = (str(FORMAT), *artifact[:3], config, extra, digest)
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
    if metadata.get("format") != str(FORMAT):
        version = metadata.get("format")
        raise ValueError(f"its format is {version!r:.60}, this release reads {FORMAT}")
    check_names(metadata, KEYS, "metadata")
    if metadata["sha256"] != _digest(metadata["config"], metadata["extra"], tensors):
        raise ValueError("it is damaged: the checksum differs")
    kind, description, calibrant = (metadata[key] for key in KEYS[1:4])
    config, extra = (parsed(metadata[key], key) for key in KEYS[4:6])
    return Artifact(kind, description, calibrant, config, extra, tensors)


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


def parsed(text: str | bytes, what: str) -> Any:
    """Read JSON."""

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is no number")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not JSON ({error})") from error


def json_tensor(value: Any) -> Tensor:
    """Return the bytes of the JSON of a value as a tensor."""
    return torch.frombuffer(bytearray(to_json(value).encode()), dtype=torch.uint8)


def check_names(names: Iterable[str], wanted: Iterable[str], what: str) -> None:
    """Raise unless names are exactly those that are wanted."""
    missing, unknown = sorted(set(wanted) - set(names)), sorted(set(names) - set(wanted))
    if missing or unknown:
        lists = f"missing {comma_separated(missing)}, unknown {comma_separated(unknown)}"
        raise ValueError(f"{what}: {lists}")
