"""The choices of the user for one file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from calibrant._core.options import check_options, options_of, unknown_option

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
    keep_argmax: bool | Literal["auto"] = "auto"

    @classmethod
    def from_json(cls, content: object) -> Choices:
        """Return the choices in a request, or raise; names are checked where they are used.

        >>> Choices.from_json({"method": "ts"}).method
        'ts'
        """
        if not isinstance(content, Mapping):
            raise TypeError(f"choices must be a JSON object, got {content!r:.80}")
        options = options_of(cls)
        for name in content.keys() - options.keys():
            raise unknown_option("a request", name, options)
        return cls(**check_options(options, content))
