"""Artifacts of format 1, which earlier releases wrote: JSON, and tensors in a file of their own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load as tensors_of
from torch import Tensor

from calibrant.artifacts.container import (
    Artifact,
    check_format,
    check_names,
    parsed,
    text_tensor,
    to_json,
)

CALIBRATOR, WEIGHTS, HEAD = "config.json", "weights.safetensors", "head.json"
KEYS = ("format", "kind", "calibrant", "config", "weights_sha256")
CALIBRATOR_KEYS = ("description", "classes", "parameters")
HEAD_KEYS = ("objective", "kept", "reasons", "figures", "settings")
RENAMED = {"chosen": "chosen_", "head": "classifier"}
"""Modules that may have another name since."""


def read_folder(folder: Path) -> Artifact:
    """Read the folder of a calibrator or a temperature head."""
    extra: dict[str, Any] = {}
    if (folder / HEAD).is_file():
        header = _header(folder / HEAD, (*KEYS, *HEAD_KEYS, "mark", "weights"))
        config = {name: header[name] for name in HEAD_KEYS}
        config |= {"head": header["kind"], "options": header["config"]}
        config["fingerprint"] = header["mark"]
        kind, description = "head", ""
    else:
        header = _header(folder / CALIBRATOR, (*KEYS, *CALIBRATOR_KEYS))
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
    header = parsed(path.read_bytes(), path.name)
    if not isinstance(header, dict):
        raise ValueError(f"{path.name} must hold an object, got a {type(header).__name__}")
    check_format(header.get("format"), 1)
    check_names(header, keys, f"keys of {path.name}")
    return header


def _divided(config: Any) -> tuple[Any, dict[str, Any]]:
    """Separate what Auto had chosen, once an argument, from the config."""
    if not isinstance(config, dict) or not isinstance(config.get("chosen"), dict):
        return config, {}
    state = {
        "chosen": config["chosen"].get("kind"),
        "config": config["chosen"].get("config"),
        "reasons": config.get("reasons"),
    }
    rest = {key: value for key, value in config.items() if key not in ("chosen", "reasons")}
    return rest, {"_extra_state": state}


def read_file(content: bytes) -> Artifact:
    """Read the JSON of a monitor or an answer calibrator."""
    state = parsed(content, "it")
    if not isinstance(state, dict):
        raise ValueError(f"it must hold an object, got a {type(state).__name__}")
    check_format(state.pop("format", None), 1)
    kind = state.pop("kind", "answers")
    return Artifact(1, kind, "", "", {}, {}, {"state": text_tensor(to_json(state))})


def renamed(tensors: Mapping[str, Tensor], wanted: Mapping[str, Any]) -> dict[str, Tensor]:
    """Give tensors their present names, and drop numbers that are no longer kept."""
    found = {}
    for old, value in tensors.items():
        first, dot, rest = old.partition(".")
        name = old if old in wanted else RENAMED.get(first, first) + dot + rest
        if name in wanted or name not in ("classes_", "width_"):
            found[name] = value
    return found


def remove_files(folder: Path) -> None:
    """Remove what a new artifact in the folder replaces; files of other programs stay."""
    for name in (CALIBRATOR, HEAD):
        try:
            header = json.loads((folder / name).read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(header, dict) and set(KEYS) <= set(header):
            (folder / name).unlink(missing_ok=True)
            (folder / Path(str(header.get("weights", WEIGHTS))).name).unlink(missing_ok=True)
