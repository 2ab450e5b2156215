"""The choices of the user for one file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, get_args

from calibrant._core.messages import comma_separated

Estimand: TypeAlias = Literal["auto", "top_label", "multilabel"]
STEPS = ("Fit the calibrator", "Measure, compare and write the report", "Export to ONNX")
"""Steps of the work that follows."""


@dataclass(frozen=True)
class Choices:
    """Method and data of a fit; splits that are None are those of the library."""

    method: str = "auto"
    fit_split: str | None = None
    test_split: str | None = None
    estimand: Estimand = "auto"
    keep_argmax: bool | None = None

    @classmethod
    def from_json(cls, content: object) -> Choices:
        """Return the choices in a request; names are checked where they are used.

        >>> Choices.from_json({"method": "ts"}).method
        'ts'
        """
        known = [field.name for field in fields(cls)]
        if not isinstance(content, Mapping) or not {*content} <= {*known}:
            raise ValueError(f"choices must be a JSON object with some of {comma_separated(known)}")
        if not isinstance(content.get("method", "auto"), str):
            raise ValueError("method must be a name")
        if not all(isinstance(content.get(f"{use}_split"), str | None) for use in ("fit", "test")):
            raise ValueError("fit_split and test_split must be names or null")
        if content.get("estimand", "auto") not in get_args(Estimand):
            raise ValueError(f"estimand must be one of {comma_separated(get_args(Estimand))}")
        if not isinstance(content.get("keep_argmax"), bool | None):
            raise ValueError("keep_argmax must be true, false or null")
        return cls(**content)
