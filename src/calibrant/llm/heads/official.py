"""Heads that the authors of ATS published, as decoder heads of this library."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from calibrant._core.messages import comma_separated
from calibrant.llm.fingerprint import mark_of
from calibrant.llm.heads.fit import FittedHead
from calibrant.llm.heads.modules import DecoderHead

WEIGHTS = "calibration_head.safetensors"
CONFIG = "config.json"
CAP = 10.0
"""Their code cuts the sharpness here."""
KNOWN = {"feature_key": "hidden_states", "normalize_logits": False, "hidden_act": "silu"}
"""Settings of their code that are read here; it has others, of which no head was published."""
DERIVED = "rotary_emb.inv_freq"
"""Angles that some versions of transformers saved, though they follow from theta."""


def read_official(
    folder: str | os.PathLike[str],
    model: Any,
    *,
    attention_heads: int | None = None,
    eps: float = 1e-6,
    theta: float = 10000.0,
) -> FittedHead:
    """Read a head that the official code of ATS (Xie et al. 2024) saved.

    Parameters
    ----------
    folder : path
        With ``calibration_head.safetensors``, of the kind ``transformer``.
    model : PreTrainedModel
        The model that it was trained for. The files do not tell which that is beyond its width, so
        this is taken on trust.
    attention_heads : int, optional
        By default ``num_attention_heads`` of the ``config.json`` in the folder, or else that of the
        model's configuration: the weights do not tell.
    eps, theta : float
        Of the RMS norms and of the rotary positions; the defaults are those of the official code.

    Returns
    -------
    FittedHead
        With a :class:`DecoderHead` whose sharpness is cut at 10, as there.
    """
    place = Path(folder)
    state, told = _state(place), _attention_heads(place, model)
    mark = mark_of(model)
    width = state["last.weight"].shape[1] if "last.weight" in state else None
    if width != mark.hidden_size:
        raise ValueError(
            f"{place} must hold a head for states of width {mark.hidden_size}, as {mark.name} has "
            f"them, got {width}: load the model that it was trained for"
        )
    inner = state.get("mlp.gate_proj.weight")
    head = DecoderHead(
        width=mark.hidden_size,
        attention_heads=attention_heads or told,
        inner=None if inner is None else len(inner),
        eps=eps,
        theta=theta,
        cap=CAP,
    )
    wanted = head.state_dict()
    missing, unknown = sorted(set(wanted) - set(state)), sorted(set(state) - set(wanted))
    if missing or unknown:
        raise ValueError(
            f"{place / WEIGHTS} is no head of the kind transformer: missing {comma_separated(missing)}, "
            f"unknown {comma_separated(unknown)}; its linear and mlp heads are not read"
        )
    try:
        head.load_state_dict({name: value.float() for name, value in state.items()})
    except RuntimeError as error:
        raise ValueError(f"{place / WEIGHTS} does not fit ({error})") from error
    return FittedHead(head, mark, "selective", reasons=f"read from {place.name}")


def _state(folder: Path) -> dict[str, Tensor]:
    """The tensors under the names of :class:`DecoderHead`."""
    try:
        found = load_file(folder / WEIGHTS)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no {WEIGHTS} in {folder}: download the whole repository of the head"
        ) from None
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS} is damaged ({error}); download it again") from error
    return {
        name.removeprefix("transformer.").replace("linear_head.", "last."): value
        for name, value in found.items()
        if not name.endswith(DERIVED)
    }


def _attention_heads(folder: Path, model: Any) -> int:
    """As the configuration says, which must ask for nothing that is not known here."""
    file = folder / CONFIG
    given = _object(file) if file.is_file() else {}
    for name, known in KNOWN.items():
        if given.get(name, known) != known:
            raise ValueError(
                f"{file} has {name}={given[name]!r}, and only heads with {known!r} are read"
            )
    found = given.get("num_attention_heads", model.config.num_attention_heads)
    if not isinstance(found, int) or found < 1:
        raise ValueError(f"num_attention_heads in {file} must be 1 or more, got {found!r}")
    return found


def _object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); download it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold an object, got a {type(found).__name__}")
    return found
