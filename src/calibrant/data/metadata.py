"""Metadata of examples, such as age and site, as codes: the subgroups that they can form.

Numbers and dates are cut at quantiles, texts and numbers with few values are categories. A
condition on a column is a range of codes, such as ``age < 30`` or ``site = B``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from calibrant._core.checks import BoolArray, FloatArray, IntArray, Values, as_keys
from calibrant._core.class_names import as_array, is_frame, is_missing
from calibrant._core.messages import comma_separated
from calibrant.data.formats import Array
from calibrant.data.shards import SCORES

MAX_CATEGORIES = 100
"""Values of a category that have a code of their own; the rarer ones share one."""
_FEW_VALUES = 10
"""Numbers with at most so many values are categories."""
_DAY = 86400.0
_DATE = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d.*)?)?")
_NAT = np.datetime64("NaT", "s")
NO_METADATA = (*SCORES, "labels", "features", "fold", "inclusion_probability")
"""Columns of a split that are not about the subgroups of its examples."""


class Condition(NamedTuple):
    """A range of codes of a column, ``low <= code < high``."""

    column: int
    low: int
    high: int

    def holds(self, codes: IntArray) -> BoolArray:
        """Return True for rows of codes ``(n, columns)`` in the range."""
        of_column = codes[:, self.column]
        return np.asarray((of_column >= self.low) & (of_column < self.high))


@dataclass(frozen=True)
class MetadataColumn:
    """A column as codes: bins between ``cuts``, or the places of ``values``.

    The code ``size - 1`` is that of missing values; of a category, ``size - 2`` is that of values
    without a code of their own.

    >>> age = learn_column("age", np.arange(20, 60))
    >>> age.cuts[:2], age.codes(age.numbers(np.array([21, 59, np.nan])))
    ((25.0, 30.0), array([0, 7, 8]))
    """

    name: str
    kind: Literal["number", "date", "category"]
    cuts: tuple[float, ...] = ()
    values: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Number of codes."""
        return len(self.values) + 2 if self.kind == "category" else len(self.cuts) + 2

    def numbers(self, values: Array) -> FloatArray:
        """Return numbers for values ``(n,)``: places of categories; NaN where they are missing."""
        if self.kind == "number":
            return _as_numbers(values)
        if self.kind == "date":
            return _seconds(values)
        texts, index = np.unique(_as_texts(values), return_inverse=True)
        place = {text: float(i) for i, text in enumerate(self.values)}
        known = [
            math.nan if is_missing(text) else place.get(text, float(len(self.values)))
            for text in texts.tolist()
        ]
        return np.array(known, np.float64)[index.reshape(-1)]

    def codes(self, numbers: FloatArray) -> IntArray:
        """Return the codes of numbers ``(n,)``, as :meth:`numbers` returns them."""
        missing = np.isnan(numbers)
        if self.kind == "category":
            codes = np.where(missing, 0, numbers).astype(np.int64)
        else:
            codes = np.searchsorted(self.cuts, numbers, side="right")
        return np.asarray(np.where(missing, self.size - 1, codes), np.int64)

    def conditions(self, number: int, *, between: bool = False) -> list[Condition]:
        """Return all conditions on this column, the one with this ``number``.

        Each category, each one-sided range of numbers, those ``between`` two cuts if asked for,
        and that the value is missing.
        """
        last = self.size - 1
        if self.kind == "category":
            ranges = [(i, i + 1) for i in range(len(self.values))]
        else:
            ends = itertools.combinations(range(last + 1), 2)
            ranges = [r for r in ends if (between or 0 in r or last in r) and r != (0, last)]
        return [Condition(number, *ends) for ends in (*ranges, (last, last + 1))]

    def text(self, low: int, high: int) -> str:
        """Return the condition ``low <= code < high`` in words."""
        if low == self.size - 1:
            return f"{self.name} is missing"
        if self.kind == "category":
            shown = [*self.values, "another value"][low:high]
            return f"{self.name} = {' or '.join(shown)}"
        first = f"{self._shown(low - 1)} <= " if low else ""
        final = f" < {self._shown(high - 1)}" if high < self.size - 1 else ""
        if first and not final:
            return f"{self.name} >= {self._shown(low - 1)}"
        return f"{first}{self.name}{final}"

    def _shown(self, cut: int) -> str:
        value = self.cuts[cut]
        if self.kind == "number":
            return f"{value:.15g}"
        return str(np.datetime64(int(value), "s")).removesuffix("T00:00:00")

    def config(self) -> dict[str, Any]:
        """Return the fields, as they can be written to JSON."""
        return asdict(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> MetadataColumn:
        """Return the column of what :meth:`config` returned."""
        cuts, values = tuple(config["cuts"]), tuple(config["values"])
        return cls(config["name"], config["kind"], cuts, values)


def conjunction_text(columns: Sequence[MetadataColumn], conditions: Iterable[Condition]) -> str:
    """Return conditions that hold together in words, one for each column.

    >>> age = MetadataColumn("age", "number", cuts=(30.0, 40.0))
    >>> site = MetadataColumn("site", "category", values=("A", "B"))
    >>> both = [Condition(0, 1, 3), Condition(1, 1, 2), Condition(0, 0, 2)]
    >>> conjunction_text([age, site], both)
    '30 <= age < 40 and site = B'
    """
    ranges: dict[int, tuple[int, int]] = {}
    for column, low, high in conditions:
        before = ranges.get(column, (low, high))
        ranges[column] = (max(low, before[0]), min(high, before[1]))
    return " and ".join(columns[i].text(*ends) for i, ends in ranges.items()) or "all examples"


def as_metadata(metadata: object) -> dict[str, Array]:
    """Return a mapping, a data frame or an array ``(n, columns)`` as arrays by name."""
    if isinstance(metadata, Mapping) or is_frame(metadata):
        keys = list(metadata if isinstance(metadata, Mapping) else metadata.columns)
        names = [str(key) for key in keys]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"columns of metadata need different names, got {twice[0]} twice")
        values = [metadata[key] for key in keys]  # type: ignore[index]  # a frame has them too
    else:
        table = as_array(metadata)
        if table.ndim not in (1, 2) or table.dtype.names:
            raise ValueError(
                "metadata must be a data frame, a mapping of arrays (n,) or an array (n, columns), "
                f"got a {type(metadata).__name__} of shape {table.shape}"
            )
        values = [table] if table.ndim == 1 else list(table.T)
        names = [f"column {i}" for i in range(len(values))]
        if table.ndim == 1 and isinstance(name := getattr(metadata, "name", None), str):
            names = [name]
    arrays = {name: _storable(as_array(v)) for name, v in zip(names, values, strict=True)}
    if wrong := [name for name, values in arrays.items() if values.ndim != 1]:
        raise ValueError(
            "metadata must have one value per example in each column, got "
            f"{comma_separated(f'{name} of shape {arrays[name].shape}' for name in wrong)}"
        )
    return arrays


def _storable(values: Array) -> Array:
    """Return objects, such as dates and missing values, as text; other arrays as they are."""
    if values.dtype != object or values.ndim != 1:
        return values
    nested = (list, tuple, dict, np.ndarray)
    return values if any(isinstance(v, nested) for v in values) else as_keys(values)


def learn_column(
    name: str, values: Values, *, bins: int = 8, most: int = MAX_CATEGORIES, fewest: float = 1
) -> MetadataColumn | None:
    """Return the codes of a column from some of its values; None if there is nothing to tell apart.

    Numbers have ``bins`` bins with about equally many values; categories have codes for the
    ``most`` frequent values that occur ``fewest`` times. Texts that are all numbers are numbers,
    and those that are all dates, such as 2026-01-31, are dates.
    """
    array = _storable(as_array(values))
    if array.dtype.kind == "M" or _are_dates(array):
        return learn_numbers(name, _seconds(array), kind="date", bins=bins)
    numbers = _numbers_or_none(array)
    if numbers is not None and np.unique(numbers[~np.isnan(numbers)]).size > _FEW_VALUES:
        return learn_numbers(name, numbers, bins=bins)
    texts, counts = np.unique(_as_texts(array), return_counts=True)
    order = np.argsort(-counts, kind="stable")
    frequent = [
        str(texts[i]) for i in order if counts[i] >= fewest and not is_missing(str(texts[i]))
    ]
    kept = tuple(sorted(frequent[:most], key=_in_order))
    missing = any(is_missing(text) for text in texts.tolist())
    if not kept or (texts.size == 1 and not missing):
        return None
    return MetadataColumn(name, "category", values=kept)


def are_identifiers(values: Values) -> bool:
    """Return True for whole numbers or texts that are all different, such as numbers of rows.

    Decimal numbers and dates usually are all different, and tell examples apart nonetheless.
    """
    array = _storable(as_array(values))
    if array.dtype.kind not in "iuSU" or _are_dates(array):
        return False
    numbers = _numbers_or_none(array)
    whole = numbers is None or not np.any(numbers[~np.isnan(numbers)] % 1)
    return whole and np.unique(array).size == array.size > _FEW_VALUES


def learn_numbers(
    name: str,
    numbers: FloatArray,
    *,
    kind: Literal["number", "date"] = "number",
    bins: int = 8,
) -> MetadataColumn | None:
    """Return the codes of a column of numbers, few different ones too, as :func:`learn_column`.

    Cuts are at quantiles, rounded to what a person would write.
    """
    known = numbers[np.isfinite(numbers)]
    if not known.size or known.min() == known.max():
        return None
    share = np.arange(1, bins) / bins
    quantiles = np.unique(np.quantile(known, share, method="higher"))
    if quantiles.size < 2:  # nearly all values are equal: tell the others apart
        quantiles = np.unique(np.quantile(np.unique(known), share, method="higher"))
    ends = np.unique([known.min(), *quantiles, known.max()])
    rounded = set()
    for before, cut, after in zip(ends, ends[1:], ends[2:], strict=False):
        # with few digits, at most half of the room to its neighbours away
        room = float(min(cut - before, after - cut))
        if kind == "date" and room >= _DAY:
            rounded.add(round(float(cut) / _DAY) * _DAY)
        else:
            rounded.add(round(float(cut), -math.floor(math.log10(room))) + 0.0)  # no negative zero
    cuts = sorted(cut for cut in rounded if known.min() < cut <= known.max())
    return MetadataColumn(name, kind, cuts=tuple(cuts)) if cuts else None


def _numbers_or_none(values: Array) -> FloatArray | None:
    """Return numbers, of texts too, or None if some value is none."""
    if values.dtype.kind in "iuf":
        return values.astype(np.float64)
    if values.dtype.kind not in "OSU":
        return None
    texts, index = np.unique(_as_texts(values), return_inverse=True)
    numbers = _parsed(texts)
    known = [not is_missing(text) for text in texts.tolist()]
    if np.isnan(numbers[known]).any() or not any(known):
        return None
    return numbers[index.reshape(-1)]


def _as_numbers(values: Array) -> FloatArray:
    """Return values of a column of numbers; what is none is missing."""
    if values.dtype.kind in "biuf":
        return values.astype(np.float64)
    texts, index = np.unique(_as_texts(values), return_inverse=True)
    return _parsed(texts)[index.reshape(-1)]


def _parsed(texts: Array) -> FloatArray:
    numbers = np.full(texts.shape, math.nan)
    for i, text in enumerate(texts.tolist()):
        try:
            numbers[i] = math.nan if "_" in text else float(text)  # Python reads 1_0 as 10
        except ValueError:
            continue
    return numbers


def _are_dates(values: Array) -> bool:
    """Return True for texts that are dates or missing."""
    if values.dtype.kind not in "SU":
        return False
    known = [text for text in np.unique(_as_texts(values)).tolist() if not is_missing(text)]
    return bool(known) and all(_DATE.fullmatch(text.strip()) for text in known)


def _seconds(values: Array) -> FloatArray:
    """Return dates as seconds; NaN where they are missing."""
    if values.dtype.kind != "M":
        texts, index = np.unique(_as_texts(_storable(values)), return_inverse=True)
        values = np.array([_as_date(text.strip()) for text in texts.tolist()])[index.reshape(-1)]
    dates = values.astype("datetime64[s]")
    return np.where(np.isnat(dates), math.nan, dates.astype(np.int64).astype(np.float64))


def _as_date(text: str) -> np.datetime64:
    """Return a date without its time zone; none for other texts."""
    try:
        return np.datetime64(text[:19].replace(" ", "T"), "s") if _DATE.fullmatch(text) else _NAT
    except ValueError:  # 2026-02-31
        return _NAT


def _as_texts(values: Array) -> Array:
    """Return values as text: whole numbers without a point."""
    keys = as_keys(values)
    if keys.dtype.kind == "f":
        return np.array([f"{x:.15g}" for x in keys.tolist()], dtype=str)
    return keys.astype(str)


def _in_order(text: str) -> tuple[bool, float, str]:
    """Sort numbers by size, and before other texts."""
    number = float(_parsed(np.array([text]))[0])
    return (math.isnan(number), 0.0 if math.isnan(number) else number, text)
