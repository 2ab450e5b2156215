"""How calibrators describe themselves: in a line, as HTML for notebooks, and as a frame."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from calibrant._core.tables import frame
from calibrant.display.html import Html, joined, notebook, side_by_side
from calibrant.display.results import facts, heading, remarks

if TYPE_CHECKING:
    import pandas as pd

SHOWN = ("temperature_", "temperatures_", "slope_", "offset_", "line_", "weights_")
"""Learned values that say something by themselves."""
FEW = 5
"""Numbers of a learned value that are shown at most."""
PROPERTIES = {
    "keeps_argmax": "keeps the predicted class",
    "monotone": "keeps the order of all classes",
    "accepts_masked": "accepts masked classes",
    "needs_features": "needs features",
    "needs_head": "needs the last layer for a fit",
    "two_classes_only": "two classes only",
}


class Described(nn.Module):
    """Base of calibrators: everything that only reads what they are and have learned."""

    keeps_argmax: bool
    monotone: bool
    multilabel: bool
    _classes: int

    def size(self, classes: int) -> int:
        """Number of fitted parameters for a number of classes."""
        raise NotImplementedError

    def learned(self) -> dict[str, Any]:
        """Learned values of at most five numbers each, by name, as they can be written to JSON."""
        few = [(n.rstrip("_"), value) for n, value in self.named_buffers() if value.numel() <= FEW]
        return {n: value.tolist() for n, value in few if not n.endswith(("classes", "floor"))}

    def describe(self) -> str:
        """One sentence about the fit: classes, number of parameters, temperatures."""
        kind = type(self).__name__
        if not self._classes:
            return f"{kind}, not fitted"
        size = self.size(max(self._classes, 2))  # one logit stands for two classes
        of = "one logit" if self._classes == 1 else f"{self._classes:,} classes"
        return f"{kind} for {of}: {size:,} parameter{'s' * (size != 1)}{self._temperatures()}"

    def _temperatures(self) -> str:
        values = dict(self.named_buffers())
        learned = values.get("temperature_", values.get("temperatures_"))
        if learned is None:
            return ""
        if learned.numel() > 1:
            return f", temperatures from {float(learned.min()):.4g} to {float(learned.max()):.4g}"
        return f", temperature {float(learned):.4g}" if self._uses_temperature() else ""

    def _uses_temperature(self) -> bool:
        """Return True unless all temperatures are 1, which means not in use if they are not all."""
        values = dict(self.named_buffers())
        alone = set(values) == {"classes_", "floor_", "temperature_"}
        return alone or bool((values["temperature_"] != 1).any())

    def extra_repr(self) -> str:
        """The arguments that differ from their defaults, learned values, and classes."""
        parameters = inspect.signature(type(self)).parameters.values()
        values = [(p.name, getattr(self, p.name, p.default), p.default) for p in parameters]
        plain = [x for x in values if not _holds_modules(x[1])]
        changed = [f"{name}={value!r}" for name, value, default in plain if value != default]
        if not self._classes:
            return ", ".join([*changed, "not fitted"])
        columns = f"{'tags' if self.multilabel else 'classes'}={self._classes}"
        if self._classes == 1 and not self.multilabel:
            columns = "one logit"
        return ", ".join([*changed, *self._key_values(), columns])

    def _key_values(self) -> Iterator[str]:
        """Yield the learned values that fit into a line."""
        own = dict(self.named_buffers(recurse=False))
        for name in SHOWN:
            value = own.get(name)
            if value is None or (name == "temperature_" and not self._uses_temperature()):
                continue
            if value.numel() <= FEW:
                yield f"{name.rstrip('_')}={_numbers(value)}"
            else:
                yield f"{name.rstrip('_')}={float(value.min()):.4g}..{float(value.max()):.4g}"

    def held(self) -> dict[str, Described]:
        """Calibrators that it holds, by the names of their attributes."""
        found: dict[str, Described] = {}
        for name, child in self.named_children():
            members = child if isinstance(child, nn.ModuleList) else [child]
            for number, member in enumerate(members):
                if isinstance(member, Described):
                    found[f"{name}[{number}]" if member is not child else name] = member
        return found

    def __repr__(self) -> str:
        parts = [f"{name}={part.short()}" for name, part in self.held().items()]
        return f"{type(self).__name__}({', '.join([*parts, self.extra_repr()])})"

    def short(self) -> str:
        """The name of the class, with those of the calibrators it holds and a few values."""
        inside = [type(part).__name__ for part in self.held().values()]
        words = ", ".join([*inside, *self._key_values()])
        return f"{type(self).__name__}({words})" if words else type(self).__name__

    def properties(self) -> str:
        """Return in words what the calibrator guarantees and needs."""
        texts = {**PROPERTIES, **({"accepts_masked": ""} if self.multilabel else {})}
        return "; ".join(text for name, text in texts.items() if text and getattr(self, name))

    def fragment(self) -> Html:
        """HTML of what was learned, without its style."""
        name = type(self).__name__
        description = self.describe()
        about = heading(name, description.removeprefix(f"{name} for "), self.properties())
        if not self._classes:
            return about
        values = dict(word.split("=", 1) for word in self._key_values())
        parts = {name: part.describe() for name, part in self.held().items()}
        said = {name: words for name, words in parts.items() if words not in description}
        table = facts({**values, **said})
        return joined([about, self.reasoning(), side_by_side(table, *self.charts())])

    def charts(self) -> list[str]:
        """Charts of what was learned, as SVG; none by default."""
        return []

    def reasoning(self) -> Html:
        """HTML of the reasons of a choice; nothing by default."""
        return remarks([])

    def _repr_html_(self) -> str:
        return notebook(self.fragment())

    def to_frame(self) -> pd.DataFrame:
        """Return a frame of all learned values: ``name``, ``index`` and ``value``. Needs pandas.

        ``index`` counts the numbers of a value in order, row by row.
        """
        learned = {n: value for n, value in self.state_dict().items() if isinstance(value, Tensor)}
        return frame(
            {"name": name.rstrip("_"), "index": index, "value": number}
            for name, value in learned.items()
            if not name.endswith(("classes_", "floor_", "width_"))
            for index, number in enumerate(value.reshape(-1).tolist())
        )


def _holds_modules(value: object) -> bool:
    values = value if isinstance(value, (list, tuple, nn.ModuleList)) else [value]
    return any(isinstance(one, nn.Module) for one in values)


def _numbers(value: Tensor) -> str:
    """Return few numbers as text: one alone, several in brackets."""
    return _rounded(value.tolist())


def _rounded(value: Any) -> str:
    """Return a number or nested lists of numbers with four digits."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_rounded, value))}]"
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)
