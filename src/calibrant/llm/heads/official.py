"""Temperature heads that the authors of ATS published, as ATS heads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from calibrant._core.messages import comma_separated
from calibrant.llm.heads.ats import ATSHead
from calibrant.llm.heads.fitted import FittedHead
from calibrant.llm.models.huggingface import fingerprint_of

_WEIGHTS = "calibration_head.safetensors"
_KNOWN = {"feature_key": "hidden_states", "normalize_logits": False, "hidden_act": "silu"}
"""Supported settings of their code; no head with others was published."""


def read_official(
    folder: str | os.PathLike[str], model: Any, *, attention_heads: int | None = None
) -> FittedHead:
    """Read a head that was saved by the official code of ATS (Xie et al. 2024).

    ``folder`` has ``calibration_head.safetensors``, of the kind ``transformer``. ``model`` is the
    one that it was trained for; only its width can be checked. ``attention_heads`` is by default
    that of ``config.json`` in the folder, or else of the model.
    """
    place, fingerprint = Path(folder), fingerprint_of(model)
    configured = _attention_heads(place / "config.json", model)
    try:
        tensors = load_file(place / _WEIGHTS)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {_WEIGHTS} in {folder}: download it too") from None
    except SafetensorError as error:
        raise ValueError(f"{place / _WEIGHTS} is damaged ({error}); download it again") from error
    state = {
        name.removeprefix("transformer.").replace("linear_head.", "last."): value
        for name, value in tensors.items()
        if not name.endswith("rotary_emb.inv_freq")  # which some versions of transformers saved
    }
    width = state["last.weight"].shape[1] if "last.weight" in state else None
    if width != fingerprint.hidden_size:
        raise ValueError(
            f"{place} must hold a head for states of width {fingerprint.hidden_size}, got {width}: "
            "load the model that it was trained for"
        )
    inner = state.get("mlp.gate_proj.weight")
    head = ATSHead(
        width=fingerprint.hidden_size,
        attention_heads=attention_heads or configured,
        inner=None if inner is None else len(inner),
        cap=10.0,  # as in their code
    )
    wanted = head.state_dict()
    missing, unknown = sorted(set(wanted) - set(state)), sorted(set(state) - set(wanted))
    if missing or unknown:
        raise ValueError(
            f"{place / _WEIGHTS} is not a head of the kind transformer: missing "
            f"{comma_separated(missing)}, unknown {comma_separated(unknown)}"
        )
    try:
        head.load_state_dict({name: value.float() for name, value in state.items()})
    except RuntimeError as error:
        raise ValueError(f"{place / _WEIGHTS} does not fit ({error})") from error
    return FittedHead(head, fingerprint, "selective", reasons=f"read from {place.name}")


def _attention_heads(file: Path, model: Any) -> int:
    """Check the configuration, and return its number of attention heads."""
    try:
        config = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); download it again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold an object, got a {type(config).__name__}")
    for name, known in _KNOWN.items():
        if config.get(name, known) != known:
            raise ValueError(f"{file} must have {name}={known!r}, got {config[name]!r}")
    count = config.get("num_attention_heads", model.config.num_attention_heads)
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"num_attention_heads in {file} must be 1 or more, got {count!r}")
    return count
