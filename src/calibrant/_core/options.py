"""Options: arguments of constructors, which are checked against their annotations.

An annotation may be ``bool``, ``int``, ``float``, ``str``, ``Literal``, ``Sequence`` of these, a
class, ``None``, and unions of all; ``Annotated[int, at_least(1)]`` adds the limits of a number.
Anything else accepts every value. :func:`parse_options` reads options as people type them.
"""

from __future__ import annotations

import inspect
import json
import math
import operator
import pkgutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from importlib import import_module
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

import numpy as np

from calibrant._core.messages import comma_separated, did_you_mean, plain_name, unknown_name

Options: TypeAlias = Mapping[str, inspect.Parameter]
"""Options of a constructor by name, with annotation and default."""

_TRUTH = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
_NOTHING = ("none", "null")
"""Texts that stand for booleans, and for None, in any case."""
_WORDS: dict[Any, tuple[str, str]] = {
    bool: ("True or False", "True or False"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    NoneType: ("None", "None"),
}
"""Types in messages: one value, and several."""


class _Limit(NamedTuple):
    """A limit of a number, as metadata of its annotation."""

    words: str
    holds: Callable[[float, float], bool]
    number: float

    def __str__(self) -> str:
        return f"{self.words} {self.number:g}"


above = partial(_Limit, "above", operator.gt)
at_least = partial(_Limit, "at least", operator.ge)
below = partial(_Limit, "below", operator.lt)
at_most = partial(_Limit, "at most", operator.le)

Count: TypeAlias = Annotated[int, at_least(1)]
Seed: TypeAlias = Annotated[int, at_least(0)]
Positive: TypeAlias = Annotated[float, above(0)]
NonNegative: TypeAlias = Annotated[float, at_least(0)]
Share: TypeAlias = Annotated[float, above(0), at_most(1)]


class WithOptions:
    """Base of classes whose constructors check their arguments against the annotations.

    >>> class Smoother(WithOptions):
    ...     def __init__(self, *, width: Count = 3) -> None:
    ...         self.width = width
    >>> Smoother(width=0)
    Traceback (most recent call last):
    ...
    ValueError: width must be a whole number, at least 1, got 0
    """

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        check_constructor(cls)


def check_constructor(cls: type) -> None:
    """Let the constructor of a class, if it has its own, check its arguments."""
    if "__init__" not in vars(cls):
        return
    constructor: Callable[..., None] = cls.__init__  # type: ignore[misc]

    @wraps(constructor)
    def checking(self: Any, *args: Any, **named: Any) -> None:
        options = options_of(constructor)  # not earlier: now all annotations have a meaning
        names = [*options][1:]  # without self
        checked = check_options(options, dict(zip(names, args, strict=False)))
        rest = args[len(names) :]  # too many, as Python will say
        constructor(self, *checked.values(), *rest, **check_options(options, named))

    cls.__init__ = checking  # type: ignore[misc]


def options_of(build: Callable[..., Any]) -> Options:
    """Return the arguments of a constructor or function by name, with evaluated annotations."""
    return inspect.signature(build, eval_str=True).parameters


def check_options(options: Options, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with sequences as tuples and NumPy scalars as Python's, or raise.

    Names that are no option are left to who is called with them.
    """
    checked = dict(values)
    for name in values.keys() & options.keys():
        value, hint = values[name], options[name].annotation
        try:
            checked[name] = _convert(hint, value)
        except (TypeError, ValueError) as error:
            got = f"{value!r:.80}"
            if isinstance(value, type):
                got = f"the class {value.__name__}: pass {value.__name__}()"
            elif isinstance(value, Integral) and abs(int(value)) > _MAX_INT:
                got += ", which has more than 64 bits"
            else:
                with suppress(TypeError, ValueError):
                    _convert(hint, [value])
                    got += f": pass [{value!r}]"
            raise type(error)(f"{name} must be {in_words(hint)}, got {got}") from None
    return checked


def parse_options(owner: str, options: Options, texts: Mapping[str, str]) -> dict[str, Any]:
    """Return values of texts that people typed, by the annotations of the options.

    >>> def smoother(*, exact: bool, widths: Sequence[int], seed: int | None = 0): ...
    >>> parse_options("smoother", options_of(smoother), {"exact": "no", "widths": "3,5"})
    {'exact': False, 'widths': (3, 5)}
    """
    values = {}
    for typed, text in texts.items():
        name = typed if typed in options else plain_name(typed)
        if name not in options:
            raise unknown_option(owner, typed, options)
        hint = options[name].annotation
        try:
            values[name] = _convert(hint, _parse(hint, text))
        except (TypeError, ValueError):
            raise ValueError(f"{name} must be {in_words(hint)}, got {text!r:.80}") from None
    return values


def unknown_option(owner: str, typed: str, options: Options) -> ValueError:
    """Return the error for an option that does not exist, with the nearest one and all others."""

    def shown(name: str, default: Any) -> str:
        if default is inspect.Parameter.empty:
            return name
        # computed ones, such as e to the power of 3, have more digits than anybody reads
        text = f"{default:.3g}" if isinstance(default, float) else repr(default)
        return f"{name} (default {text})"

    choices = [shown(name, option.default) for name, option in options.items()]
    has = f"its options are {comma_separated(choices)}" if choices else "it has none"
    return ValueError(f"{owner} has no option {typed!r}: {did_you_mean(typed, options)}{has}")


def parsed_text(text: str) -> Any:
    """Return the value of a text without an annotation: JSON, or else the text itself.

    >>> [parsed_text(text) for text in ("False", "none", "1.5", '["a"]', "beta")]
    [False, None, 1.5, ['a'], 'beta']
    """
    plain = text.strip().lower()
    if plain in ("true", "false"):
        return plain == "true"
    try:
        return None if plain in _NOTHING else json.loads(text)
    except ValueError:
        return text


# ------------------------------------------------------------------------------ annotations


def _convert(hint: Any, value: Any) -> Any:
    """Return a value as its annotation has it, or raise: ValueError if only its type fits."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        number = _convert(parts[0], value)
        if not all(limit.holds(number, limit.number) for limit in parts[1:]):
            raise ValueError
        return number
    if kind in (Union, UnionType):
        problem: type[Exception] = TypeError
        for part in parts:
            try:
                return _convert(part, value)
            except TypeError:
                continue
            except ValueError:
                problem = ValueError  # the type fits
        raise problem
    if kind is Literal:
        if not isinstance(value, str):
            raise TypeError
        if value not in parts:
            raise ValueError
    elif kind is Sequence:
        if not isinstance(value, (list, tuple)):
            raise TypeError
        return tuple(_convert(parts[0], item) for item in value)
    elif kind in _SCALARS:
        if not isinstance(value, _SCALARS[kind]) or (kind is not bool and isinstance(value, bool)):
            raise TypeError
        if abs(value) > _MAX_INT if kind is int else not math.isfinite(value):
            raise ValueError
        return kind(value)
    elif isinstance(kind, type) and kind not in (Any, inspect.Parameter.empty):
        wanted = (tuple, list) if kind is tuple else kind
        if not isinstance(value, wanted):
            raise TypeError
    return value


_MAX_INT = 2**63 - 1
"""Whole numbers in arrays have 64 bits."""
_SCALARS: dict[Any, Any] = {bool: (bool, np.bool_), int: Integral, float: Real}
"""What counts as a value of a type; a truth value is no number."""


def _parse(hint: Any, text: str) -> Any:
    """Return the value that a text stands for; its type may still be another than annotated."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        return _parse(parts[0], text)
    if kind in (Union, UnionType):
        # the first annotation that fits, and str last, which every text fits
        for part in sorted(parts, key=lambda part: (part is str, part is not NoneType)):
            with suppress(TypeError, ValueError):
                return _convert(part, _parse(part, text))
        raise ValueError
    if kind is Sequence:
        items = text.strip().strip("[]()").split(",")
        plain = [item.strip().strip("'\"") for item in items]
        return [_parse(parts[0], item) for item in plain if item]
    if kind is NoneType:
        return None if text.strip().lower() in _NOTHING else text
    if kind is bool:
        return _TRUTH.get(text.strip().lower(), text)
    if kind in (int, float):
        return kind(text)
    return text if kind in (str, Literal) else parsed_text(text)


def in_words(hint: Any, *, several: bool = False) -> str:
    """Return an annotation in words, for messages."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        return f"{in_words(parts[0], several=several)}, {' and '.join(map(str, parts[1:]))}"
    if kind in (Union, UnionType):
        return (" or " if several else ", or ").join(in_words(p, several=several) for p in parts)
    if kind is Literal:
        return f"one of {comma_separated(parts)}"
    if kind is Sequence:
        return f"a list of {in_words(parts[0], several=True)}"
    if kind in _WORDS:
        return _WORDS[kind][several]
    return f"a {kind.__name__}"


T = TypeVar("T")


class Registry(dict[str, T]):
    """Entries by name, which are found in any case, with dashes or blanks, and by their aliases.

    >>> class TemperatureScaling:
    ...     aliases = ("temperature",)
    >>> methods = Registry("method", {"ts": TemperatureScaling})
    >>> methods["Temperature"].__name__, list(methods)
    ('TemperatureScaling', ['ts'])
    """

    def __init__(self, kind: str, entries: Mapping[str, T]) -> None:
        super().__init__(entries)
        self.kind = kind
        self.aliases: dict[str, str] = {
            alias: name
            for name, entry in entries.items()
            for alias in getattr(entry, "aliases", ())
        }

    def has(self, typed: str) -> bool:
        """Return True if a name as people type it is that of an entry."""
        plain = plain_name(typed)
        return plain in self or plain in self.aliases

    def name(self, typed: str) -> str:
        """Return the name of an entry for a name as people type it."""
        if not self.has(typed):
            raise unknown_name(self.kind, typed, self, self.aliases)
        plain = plain_name(typed)
        return self.aliases.get(plain, plain)

    def __missing__(self, typed: str) -> T:
        try:
            return self[self.name(typed)]
        except ValueError as problem:
            raise KeyError(str(problem)) from None


def tables(package: str, first: Sequence[str], without: Collection[str] = ()) -> Iterator[Any]:
    """Yield the ``TABLE`` of each module of a package that has one; some modules come first."""
    modules = pkgutil.iter_modules(sys.modules[package].__path__)
    others = sorted({module.name for module in modules} - {*first, *without})
    for name in (*first, *others):
        table = vars(import_module(f"{package}.{name}")).get("TABLE")
        if table is not None:
            yield table
