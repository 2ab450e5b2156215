"""Names of classes: those of the columns of a table or data frame, and labels that are names.

Data frames are recognised by what they offer, and read through ``numpy.asarray``: that suffices
for pandas, polars and others alike, and imports none of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calibrant._core.checks import IGNORED, IntArray, Values
from calibrant._core.messages import comma_separated, unknown_name

_MAX_NAMES = 20
"""Names of classes in a message, at most."""
_NO_CLASS = ("id", "ids", "index", "label", "labels", "split", "target", "uuid", "weight", "y")
"""Names that whole numbers beside the scores of classes usually have, in lower case."""

if TYPE_CHECKING:
    from typing_extensions import TypeIs

_SCORE_NAME = re.compile(
    r"(?:(?P<logits>logits?|log_?probs?)|(?P<probs>probs?|proba|probabilit(?:y|ies)|p))"
    r"(?:_(?P<name>.+))?",
    re.IGNORECASE | re.DOTALL,
)

_MISSING = ("", "nan", "none", "na", "n/a", "<na>", "null", "nat")
"""What tables write where a value is missing, in lower case."""


def is_missing(text: str) -> bool:
    """Return True for a text that stands for a missing value.

    >>> is_missing(" N/A"), is_missing("no")
    (True, False)
    """
    return text.strip().lower() in _MISSING


class _ScoreColumn(NamedTuple):
    """The parts of a score column's name."""

    domain: str  # "logits" or "probs"
    prefix: str
    class_name: str  # "" if the column names none


def score_column(name: str) -> _ScoreColumn | None:
    """Return the parts of a score column's name; None for other columns.

    >>> score_column("logit_cat"), score_column("p_01"), score_column("price")
    (_ScoreColumn(domain='logits', prefix='logit', class_name='cat'), \
_ScoreColumn(domain='probs', prefix='p', class_name='1'), None)
    """
    match = _SCORE_NAME.fullmatch(name)
    if match is None:
        return None
    domain = "logits" if match["logits"] else "probs"
    of = match["name"] or ""
    return _ScoreColumn(domain, match[domain], str(int(of)) if of.isdecimal() else of)


class Frame(Protocol):
    """A data frame, such as those of pandas and polars."""

    @property
    def columns(self) -> Any:
        """Names of the columns."""

    @property
    def dtypes(self) -> Any:
        """Types of the columns."""

    def __array__(self, dtype: Any = ..., /) -> NDArray[Any]: ...


def is_frame(values: object) -> TypeIs[Frame]:
    """Return True for a data frame."""
    return hasattr(values, "columns") and hasattr(values, "dtypes") and hasattr(values, "__array__")


def class_names_of(scores: object) -> list[str] | None:
    """Return the names of the columns of a data frame of scores, less prefixes such as prob."""
    if not is_frame(scores):
        return None
    names = [str(name) for name in scores.columns]
    parts = [part for part in map(score_column, names) if part is not None and part.class_name]
    if not parts:  # then the types of the columns tell which cannot be of a class
        kinds = {str(c): as_array(scores[c][:1]).dtype.kind for c in scores.columns}  # type: ignore[index]
        floats = "f" in kinds.values()
        others = [
            name
            for name, kind in kinds.items()
            if kind not in "fiu" or (kind != "f" and (floats or name.lower() in _NO_CLASS))
        ]
        if others:
            raise ValueError(
                "a data frame of scores has columns that are not scores, "
                f"{comma_separated(others)}: select the columns of classes, or name these "
                "prob_CLASS or logit_CLASS"
            )
    elif len(parts) < len(names) or len({part.domain for part in parts}) > 1:
        raise ValueError(
            "a data frame of logits must have nothing but their columns, got "
            f"{comma_separated(names[:_MAX_NAMES])}: select them, or pass the whole frame without "
            "labels"
        )
    found = [part.class_name for part in parts] or names
    numbers = [name for name in found if name.isdecimal()]
    if len(set(found)) < len(found) or 0 < len(numbers) < len(found):
        raise ValueError(
            "a data frame of scores needs a name for each class, either all numbers or none, got "
            f"{comma_separated(names[:_MAX_NAMES])}: rename its columns"
        )
    return found


def kept_names(names: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return names of classes that say more than their numbers, or None."""
    if names is None or list(names) == list(map(str, range(len(names)))):
        return None
    return tuple(names)


def class_order(
    known: Sequence[str] | None, names: Sequence[str] | None, where: str
) -> IntArray | None:
    """Return the place among ``names`` of each class that is ``known``, or None if it is its own.

    Classes without names are their numbers. These stand for any names; where both sides have
    names, they must be the same, in any order.

    >>> class_order(["cat", "dog", "owl"], ["dog", "owl", "cat"], "the frame")
    array([2, 0, 1])
    >>> class_order(["cat", "dog"], None, "the frame"), class_order(None, ["1", "0"], "the frame")
    (None, array([1, 0]))
    """
    numbers = list(map(str, range(len(known or names or ()))))
    known, names = kept_names(known), kept_names(names)
    first, second = list(known or numbers), list(names or numbers)
    if first == second:
        return None
    if sorted(first) == sorted(second):
        return np.array([second.index(name) for name in first])
    if known is None or names is None:
        return None
    missing = comma_separated([name for name in first if name not in second][:_MAX_NAMES])
    further = comma_separated([name for name in second if name not in first][:_MAX_NAMES])
    raise ValueError(
        f"{where} has other classes than those of the fit: {missing} missing, {further} new; "
        "rename the columns if they mean the same, or fit again"
    )


def columns_in_order(order: IntArray, values: NDArray[Any]) -> NDArray[Any]:
    """Return scores or tags ``(..., classes)`` with the classes in another order."""
    return np.take(values, order, axis=-1)


def numbers_in_order(order: IntArray, labels: NDArray[Any]) -> NDArray[Any]:
    """Return labels as numbers of the classes in another order; other numbers stay."""
    known = (labels >= 0) & (labels < len(order))
    return np.where(known, np.argsort(order)[np.where(known, labels, 0)], labels)


def in_order(scores: Any, known: Sequence[str] | None) -> tuple[Any, IntArray | None]:
    """Return scores, a data frame as an array with its classes in the order of those ``known``.

    If the order is another one, the places of the known classes in the frame come with them.
    """
    if not is_frame(scores):
        return scores, None
    places = class_order(known, class_names_of(scores), "the data frame")
    array = np.asarray(scores)
    return array if places is None else columns_in_order(places, array), places


def numbered(labels: Values, *scores: object) -> Values:
    """Return labels as numbers of classes where some scores are a data frame with their names."""
    frame = next(filter(is_frame, scores), None)
    if frame is None or isinstance(labels, Tensor):
        return labels
    first, second = getattr(frame, "index", None), getattr(labels, "index", None)
    if first is not None and second is not None and not callable(second):  # those of pandas
        same = len(first) != len(second) or first.equals(second)
        if not same and first.sort_values().equals(second.sort_values()):
            raise ValueError(
                "labels have the index of the logits in another order: pass "
                "labels.loc[logits.index]"
            )
    array = as_array(labels)
    names = class_names_of(frame)
    if names is None or array.ndim != 1 or len(names) < 2:
        return labels
    try:
        return ClassNumbers(names)(array)
    except LabelError as error:
        raise ValueError(f"labels, row {error.row}: it {error}") from error


def without_frames(labels: Values, *scores: Any) -> tuple[Any, ...]:
    """Return labels as numbers of classes, and scores that are data frames as arrays."""
    arrays = (np.asarray(values) if is_frame(values) else values for values in scores)
    return numbered(labels, *scores), *arrays


def as_array(values: object) -> NDArray[Any]:
    """Return the values of a series as numbers or text where they are one of both.

    Tensors come from any device; NumPy has no bfloat16, which is widened.
    """
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values
    array = np.asarray(values)
    if array.dtype == object and array.ndim == 1:
        try:
            return np.array(array.tolist())
        except ValueError:  # lists of different lengths
            return array
    return array


class ClassNumbers:
    """Numbers of the classes that labels stand for.

    A label is the name of a class or, where names are not numbers, its number, counted from 0 in
    the order of the columns; -100 is ignored. One column of scores has the labels 0 and 1, or
    false and true.

    >>> ClassNumbers(["cat", "dog"])(np.array(["dog", "cat", "-100"]))
    array([   1,    0, -100])
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = {name: i for i, name in enumerate(names)}
        self._known: dict[object, int] = dict(self._names.items())
        if all(name.isdecimal() for name in names):
            numbered = {int(name): i for i, name in enumerate(names)} or {0: 0, 1: 1}
        else:
            numbered = {i: i for i in range(len(names))}
        self._numbered = numbered
        self._same = all(label == number for label, number in numbered.items())

    def __call__(self, values: NDArray[Any]) -> IntArray:
        """Return the numbers of labels; raise :class:`LabelError` for the first without one."""
        if self._same and values.dtype.kind in "iub":
            return values.astype(np.int64)  # checked with the scores
        labels = values.tolist()
        unknown = dict.fromkeys(label for label in labels if label not in self._known)
        for label in unknown:
            try:
                self._known[label] = self._number(label)
            except ValueError as problem:
                raise LabelError(labels.index(label), str(problem)) from None
        return np.array([self._known[label] for label in labels], dtype=np.int64)

    def _number(self, label: object) -> int:
        text = label.strip() if isinstance(label, str) else str(label)
        if text in self._names:
            return self._names[text]
        if is_missing(text):
            raise ValueError(f"is missing: drop the row, or write {IGNORED} to ignore it")
        if text.lower() in ("false", "true") and list(self._numbered) == [0, 1]:
            return int(text.lower() == "true")
        try:
            number = math.nan if "_" in text else float(text)  # Python reads 1_0 as 10
        except ValueError:
            if not self._names:
                remedy = "0 or 1 is wanted beside one column of scores; name both, as in prob_CLASS"
                raise ValueError(f"is {text!r}: {remedy}") from None
            raise ValueError(f"is an {unknown_name('class', text, [*self._names][:20])}") from None
        if number == IGNORED:
            return IGNORED
        if number not in self._numbered:
            known = comma_separated(map(str, [*self._numbered][:20]))
            raise ValueError(f"is {text}, but the classes are {known}; -100 is ignored")
        return self._numbered[int(number)]


class LabelError(ValueError):
    """A label that stands for no class, in a row."""

    def __init__(self, row: int, problem: str) -> None:
        super().__init__(problem)
        self.row = row
