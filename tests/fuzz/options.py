"""Options mean what they say: texts become values of the annotated type, or are refused."""

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
import pytest

from calibrant._core.options import options_of, parse_options
from calibrant.calibrators import TAG_CALIBRATORS
from calibrant.losses import LOSSES
from tests.support.calibrators import EVERY_METHOD

KINDS: list[Any] = [*EVERY_METHOD.values(), *TAG_CALIBRATORS.values(), *LOSSES.values()]
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
ODD = ["", " ", "nan", "inf", "-1", "1e3", "0x10", "1_0", "½", "True,", "[", "None None", "9" * 40]
PARTS = [*TRUE, *FALSE, "none", "ts", "ece", "2", "0.5", ",", "-", "'", "é", "=", "\x00"]


def check(rng: np.random.Generator) -> None:
    """Parse a text of a value, or any text, for one option of a class."""
    kind = KINDS[rng.integers(len(KINDS))]
    options = options_of(kind)
    if not options:
        return
    name = str(rng.choice(list(options)))
    leaves = list(leaves_of(options[name].annotation))
    leaf = leaves[rng.integers(len(leaves))]
    if rng.random() < 0.5 and (drawn := text_and_value(rng, leaf)) is not None:
        check_value(kind, options, name, *drawn)
        return
    text = str(rng.choice(ODD)) if rng.random() < 0.5 else "".join(rng.choice(PARTS, 3))
    try:
        value = parse_options("it", options, {name: text})[name]
    except ValueError as error:
        assert name in str(error), error  # noqa: PT017
    else:
        assert any(is_of(leaf, value) for leaf in leaves), value
    with pytest.raises(ValueError, match="has no option"):
        parse_options("it", options, {f"{name}_x": text})


def check_value(kind: Any, options: Any, name: str, text: str, value: Any) -> None:
    """A text gives its value, unless it is beyond a limit, which the constructor has as well."""
    try:
        found = parse_options("it", options, {name: text})[name]
    except ValueError:
        with pytest.raises((ValueError, TypeError)):
            kind(**{name: value})
        return
    assert found == value
    assert type(found) is type(value)


def leaves_of(hint: Any) -> Any:
    """The types of an annotation, without limits and unions."""
    kind = get_origin(hint) or hint
    if kind is Annotated:
        yield from leaves_of(get_args(hint)[0])
    elif kind in (Union, UnionType):
        for part in get_args(hint):
            yield from leaves_of(part)
    else:
        yield hint


def text_and_value(rng: np.random.Generator, leaf: Any) -> tuple[str, Any] | None:
    """A text as people type it, and its value; None for types that have no text."""
    if leaf is bool:
        value = bool(rng.random() < 0.5)
        text = str(rng.choice(TRUE[:3] if value else FALSE[:3]))
        return (text.title() if rng.random() < 0.5 else text), value
    if leaf is NoneType:
        return str(rng.choice(["none", "None", "null"])), None
    if leaf is int:
        whole = int(rng.integers(2, 50))
        return str(whole), whole
    if get_origin(leaf) is Literal:
        choice = str(rng.choice(get_args(leaf)))
        return choice, choice
    return None


def is_of(leaf: Any, value: Any) -> bool:
    """Return True for a value of a type, as a slow reading of the annotation."""
    if get_origin(leaf) is Literal:
        return value in get_args(leaf)
    if leaf in (bool, str, NoneType):
        return type(value) is leaf
    if leaf is int:
        return type(value) is int
    if leaf is float:
        return type(value) is float and bool(np.isfinite(value))
    return True
