"""Descriptions of calibrators: in a line, as a frame, as a plot, and as a fingerprint.

The functions are methods of :class:`~calibrant.calibrators.base.Calibrator`; some methods have
their own.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from calibrant._core.checks import Features, Values
from calibrant._core.showing import as_axes, frame

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_SHOWN_VALUES = ("temperature_", "temperatures_", "slope_", "offset_", "line_", "weights_")
"""Learned values that say something by themselves."""
_MAX_NUMBERS = 5
"""Numbers of a learned value that are shown at most."""
_PROPERTIES = {
    "keeps_argmax": "keeps the predicted class",
    "monotone": "keeps the order of all classes",
    "accepts_masked": "accepts masked classes",
    "needs_features": "needs features",
    "needs_head": "needs the last layer for a fit",
    "two_classes_only": "two classes only",
}


def _learned(calibrator: Any) -> dict[str, Any]:
    """Learned values of at most five numbers each, by name, as they can be written to JSON."""
    return {
        name.rstrip("_"): value.tolist()
        for name, value in calibrator.named_buffers()
        if value.numel() <= _MAX_NUMBERS
        and not name.endswith(("classes_", "floor_"))
        and not name.startswith("recent_.")
    }


def describe(calibrator: Any) -> str:
    """One sentence about the fit: classes, number of parameters, temperatures."""
    kind, classes = type(calibrator).__name__, calibrator.classes
    if not classes:
        return f"{kind}, not fitted"
    size = calibrator.size(max(classes, 2))  # one logit stands for two classes
    of = "one logit" if classes == 1 else f"{classes:,} classes"
    said = f"{kind} for {of}: {size:,} parameter{'s' * (size != 1)}"
    values = dict(calibrator.named_buffers())
    value = values.get("temperature_", values.get("temperatures_"))
    if value is None:
        return said
    if value.numel() > 1:
        return f"{said}, temperatures from {float(value.min()):.4g} to {float(value.max()):.4g}"
    return f"{said}, temperature {float(value):.4g}" if _uses_temperature(calibrator) else said


def _uses_temperature(calibrator: Any) -> bool:
    """Return True unless all temperatures are 1, which means not in use if they are not all."""
    values = dict(calibrator.named_buffers())
    own = {name for name in values if not name.startswith("recent_.")}
    alone = own == {"classes_", "floor_", "temperature_"}
    return alone or bool((values["temperature_"] != 1).any())


def _key_values(calibrator: Any) -> dict[str, str]:
    """Learned values that fit into a line, as text by their names."""
    own = dict(calibrator.named_buffers(recurse=False))
    result = {}
    for name in _SHOWN_VALUES:
        value = own.get(name)
        if value is None or (name == "temperature_" and not _uses_temperature(calibrator)):
            continue
        if value.numel() <= _MAX_NUMBERS:
            text = _rounded(value.tolist())
        else:
            text = f"{float(value.min()):.4g}..{float(value.max()):.4g}"
        result[name.rstrip("_")] = text
    return result


def _extra_repr(calibrator: Any) -> str:
    """The arguments that differ from their defaults, learned values, and classes."""
    changed = []
    for parameter in inspect.signature(type(calibrator)).parameters.values():
        value = getattr(calibrator, parameter.name, parameter.default)
        members = value if isinstance(value, (list, tuple, nn.ModuleList)) else [value]
        holds_modules = any(isinstance(member, nn.Module) for member in members)
        if not holds_modules and value != parameter.default:
            changed.append(f"{parameter.name}={value!r}")
    if not calibrator.classes:
        return ", ".join([*changed, "not fitted"])
    columns = f"{'tags' if calibrator.multilabel else 'classes'}={calibrator.classes}"
    if calibrator.one_logit:
        columns = "one logit"
    values = [f"{name}={value}" for name, value in calibrator.key_values().items()]
    return ", ".join([*changed, *values, columns])


def _held(calibrator: Any) -> dict[str, Any]:
    """Calibrators that it holds, by the names of their attributes."""
    result: dict[str, Any] = {}
    for name, child in calibrator.named_children():
        if isinstance(child, nn.ModuleList):
            result |= {f"{name}[{number}]": member for number, member in enumerate(child)}
        elif hasattr(child, "key_values"):
            result[name] = child
    return result


def _in_words(calibrator: Any) -> str:
    """The ``repr``: the class, the calibrators that it holds, arguments and learned values."""
    parts = []
    for name, part in calibrator.held().items():
        inside = [type(each).__name__ for each in part.held().values()]
        values = [f"{key}={value}" for key, value in part.key_values().items()]
        brackets = f"({', '.join([*inside, *values])})" if inside or values else ""
        parts.append(f"{name}={type(part).__name__}{brackets}")
    return f"{type(calibrator).__name__}({', '.join([*parts, calibrator.extra_repr()])})"


def properties(calibrator: Any) -> str:
    """Return in words what the calibrator guarantees and needs."""
    texts = {**_PROPERTIES, **({"accepts_masked": ""} if calibrator.multilabel else {})}
    return "; ".join(text for name, text in texts.items() if text and getattr(calibrator, name))


def to_frame(calibrator: Any) -> pd.DataFrame:
    """Return a frame of all learned values: ``name``, ``index`` and ``value``. Needs pandas.

    ``index`` counts the numbers of a value in order, row by row.
    """
    values = {n: value for n, value in calibrator.state_dict().items() if isinstance(value, Tensor)}
    return frame(
        {"name": name.rstrip("_"), "index": index, "value": number}
        for name, value in values.items()
        if not name.endswith(("classes_", "floor_", "width_")) and not name.startswith("recent_.")
        for index, number in enumerate(value.reshape(-1).tolist())
    )


def plot(
    calibrator: Any,
    logits: Values | None = None,
    *,
    features: Features | None = None,
    ax: Axes | None = None,
    label: str = "",
) -> Axes:
    """Draw what was learned: temperature by margin if it varies, else confidence by confidence.

    Parameters
    ----------
    logits : (..., classes) or (n,), optional
        Examples to draw it for: the line is their median, and nine tenths of them are shaded.
        Without, examples are imagined whose other classes are equally probable.
    features : (..., width), optional
        Of the examples, for methods that need them.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.
    label : str
        Name of the line; that of the method by default.
    """
    return as_axes(calibrator, logits, features=features, ax=ax, label=label)


def calibrator_fingerprint(calibrator: Any) -> str:
    """Return the class of a fitted calibrator and a digest of what it has learned."""
    config = json.dumps(calibrator.config(), sort_keys=True, default=lambda part: str(type(part)))
    digest = hashlib.sha256(config.encode() + repr(calibrator.class_names_).encode())
    for name, value in sorted(calibrator.state_dict().items()):
        if isinstance(value, Tensor):
            digest.update(name.encode() + value.detach().cpu().double().numpy().tobytes())
        else:  # the choice of Auto
            digest.update(f"{name}{json.dumps(value)}".encode())
    return f"{type(calibrator).__name__} {digest.hexdigest()[:12]}"


def _rounded(value: Any) -> str:
    """Return a number or nested lists of numbers with four digits."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_rounded, value))}]"
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)
