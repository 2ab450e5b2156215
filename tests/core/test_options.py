"""Options: values and texts against annotations."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from calibrant._core.options import (
    Count,
    Positive,
    Share,
    WithOptions,
    above,
    at_least,
    at_most,
    below,
    check_options,
    options_of,
    parse_options,
    parsed_text,
)


def smoother(
    *,
    exact: bool = True,
    kept: bool | None = None,
    rounds: Count = 3,
    start: int = 0,
    rate: Positive = 0.5,
    share: Share | None = None,
    level: Annotated[float, above(0), below(1)] = 0.9,
    depth: Annotated[int, at_least(1), at_most(6)] = 3,
    kind: Literal["mean", "median"] = "mean",
    name: str = "",
    widths: Sequence[Count] = (16,),
    names: Sequence[str] | None = None,
    columns: Sequence[str | int] | None = None,
    inner: WithOptions | str | None = None,
    table: Mapping[str, Any] | None = None,
    apply: Callable[..., Any] | None = None,
    anything: Any = None,
    bare=None,
) -> None:
    """Take an option of each annotation."""


OPTIONS = options_of(smoother)


def checked(**values: Any) -> Any:
    (value,) = check_options(OPTIONS, values).values()
    return value


def parsed(**texts: str) -> Any:
    (value,) = parse_options("smoother", OPTIONS, texts).values()
    return value


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"exact": False}, False),
        ({"exact": np.True_}, True),
        ({"kept": None}, None),
        ({"rounds": np.int64(4)}, 4),
        ({"rate": 2}, 2.0),
        ({"rate": np.float32(0.5)}, 0.5),
        ({"share": 1}, 1.0),
        ({"depth": 6}, 6),
        ({"kind": "median"}, "median"),
        ({"widths": [3, np.int32(5)]}, (3, 5)),
        ({"widths": ()}, ()),
        ({"names": ("a", "b")}, ("a", "b")),
        ({"columns": ["age", 3]}, ("age", 3)),
        ({"inner": "ts"}, "ts"),
        ({"table": {"a": 1}}, {"a": 1}),
        ({"anything": 3}, 3),
        ({"bare": "x"}, "x"),
        ({"unknown": "x"}, "x"),  # left to who is called with it
    ],
)
def test_values_that_fit_come_back_as_pythons(options, value):
    found = checked(**options)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"exact": "False"}, TypeError, "exact must be True or False, got 'False'"),
        ({"exact": 0}, TypeError, "exact must be True or False, got 0"),
        ({"kept": "no"}, TypeError, "kept must be True or False, or None, got 'no'"),
        ({"rounds": 2.0}, TypeError, "rounds must be a whole number, at least 1, got 2.0"),
        ({"rounds": True}, TypeError, "rounds must be a whole number, at least 1, got True"),
        ({"rounds": 0}, ValueError, "rounds must be a whole number, at least 1, got 0"),
        ({"rounds": None}, TypeError, "rounds must be a whole number, at least 1, got None"),
        ({"rate": "0.1"}, TypeError, "rate must be a number, above 0, got '0.1'"),
        ({"rate": math.nan}, ValueError, "rate must be a number, above 0, got nan"),
        ({"rate": math.inf}, ValueError, "rate must be a number, above 0, got inf"),
        ({"rate": True}, TypeError, "rate must be a number, above 0, got True"),
        ({"share": 1.5}, ValueError, "share must be a number, above 0 and at most 1, or None, got"),
        ({"level": 1.0}, ValueError, "level must be a number, above 0 and below 1, got 1.0"),
        ({"depth": 7}, ValueError, "depth must be a whole number, at least 1 and at most 6, got 7"),
        ({"kind": "mode"}, ValueError, "kind must be one of mean, median, got 'mode'"),
        ({"kind": []}, TypeError, r"kind must be one of mean, median, got \[\]"),
        ({"name": b"a"}, TypeError, "name must be text, got b'a'"),
        (
            {"widths": 16},
            TypeError,
            r"widths must be a list of whole numbers, at least 1, got 16: pass \[16\]",
        ),
        ({"widths": [0]}, ValueError, r"widths must be a list of whole .* got \[0\]$"),
        ({"names": "ts"}, TypeError, r"names must be a list of texts, or None, got 'ts': pass \["),
        ({"columns": [2.5]}, TypeError, "columns must be a list of texts or whole numbers, or No"),
        ({"inner": 3}, TypeError, "inner must be a WithOptions, or text, or None, got 3"),
        ({"inner": WithOptions}, TypeError, r"inner .* got the class WithOptions: pass WithOpt"),
        ({"table": [1]}, TypeError, "table must be a Mapping, or None, got"),
        ({"apply": 3}, TypeError, "apply must be a Callable, or None, got 3"),
    ],
)
def test_values_that_do_not_fit_are_refused(options, error, message):
    with pytest.raises(error, match=f"^{message}"):
        checked(**options)


@pytest.mark.parametrize("text", ["false", "False", "NO", "off", "0", " false "])
def test_texts_that_mean_false(text):
    assert parsed(exact=text) is False
    assert parsed(kept=text) is False


@pytest.mark.parametrize("text", ["true", "True", "YES", "on", "1"])
def test_texts_that_mean_true(text):
    assert parsed(exact=text) is True


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"kept": "None"}, None),
        ({"kept": "null"}, None),
        ({"rounds": "8"}, 8),
        ({"start": "-8"}, -8),
        ({"rate": "1e-3"}, 1e-3),
        ({"rate": "1"}, 1.0),
        ({"kind": "median"}, "median"),
        ({"name": "none"}, "none"),
        ({"name": "3"}, "3"),
        ({"widths": "5,5"}, (5, 5)),
        ({"widths": "16"}, (16,)),
        ({"widths": "[5, 5]"}, (5, 5)),
        ({"widths": ""}, ()),
        ({"names": "none,ts"}, ("none", "ts")),
        ({"names": '["none", "ts"]'}, ("none", "ts")),
        ({"names": "[none]"}, ("none",)),
        ({"names": "none"}, None),
        ({"columns": "age, 3"}, ("age", 3)),
        ({"inner": "focal"}, "focal"),
        ({"anything": "False"}, False),
        ({"bare": "[1, 2]"}, [1, 2]),
        ({"Kind": "mean"}, "mean"),
    ],
)
def test_texts_are_read_by_the_annotation(options, value):
    found = parsed(**options)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exact": "maybe"}, "exact must be True or False, got 'maybe'"),
        ({"exact": "none"}, "exact must be True or False, got 'none'"),
        ({"kept": ""}, "kept must be True or False, or None, got ''"),
        ({"rounds": "2.5"}, "rounds must be a whole number, at least 1, got '2.5'"),
        ({"rounds": "true"}, "rounds must be a whole number, at least 1, got 'true'"),
        ({"rounds": "0"}, "rounds must be a whole number, at least 1, got '0'"),
        ({"rate": "fast"}, "rate must be a number, above 0, got 'fast'"),
        ({"rate": "nan"}, "rate must be a number, above 0, got 'nan'"),
        ({"share": "2"}, "share must be a number, above 0 and at most 1, or None, got '2'"),
        ({"kind": "mode"}, "kind must be one of mean, median, got 'mode'"),
        ({"widths": "5,x"}, "widths must be a list of whole numbers, at least 1, got '5,x'"),
        ({"table": "x"}, "table must be a Mapping, or None, got 'x'"),
        ({"rate_": "1"}, r"smoother has no option 'rate_': did you mean rate\? its options are ex"),
        ({"zzz": "1"}, r"smoother has no option 'zzz': its options are exact \(default True\), ke"),
    ],
)
def test_texts_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        parsed(**options)


def test_texts_without_an_annotation_are_json_or_themselves():
    found = [parsed_text(text) for text in ("null", "None", "FALSE", "3", '{"a": 1}', "beta", "no")]
    assert found == [None, None, False, 3, {"a": 1}, "beta", "no"]


def test_constructors_check_what_they_and_their_parents_take():
    class Parent(WithOptions):
        def __init__(self, width: int, *, rounds: Count = 3) -> None:
            self.width, self.rounds = width, rounds

    class Child(Parent):
        def __init__(self, *, width: Any, **options: Any) -> None:
            super().__init__(width, **options)

    class Grandchild(Child):
        pass

    make: Any = Parent
    assert make(np.int64(2)).width == Grandchild(width=2, rounds=1).width == 2
    for call, message in (
        (lambda: make("2"), "width must be a whole number, got '2'"),
        (lambda: make(2, rounds=0), "rounds must be"),
        (lambda: Grandchild(width=2.5), "width must be"),
        (lambda: Grandchild(width=2, rounds=0.5), "rounds must be"),
        (lambda: make(2, 3), "takes 2 positional arguments but 3 were given"),
        (lambda: make(2, width=2), "multiple values for argument 'width'"),
        (lambda: make(), "missing 1 required positional argument: 'width'"),
        (lambda: make(2, round=3), "unexpected keyword argument 'round'"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()
    assert [*options_of(Parent)] == ["width", "rounds"]
