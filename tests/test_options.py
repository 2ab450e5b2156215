"""Whatever has options refuses values of other types and out of range, and reads texts.

Wrong values are derived from the annotations, so that a new method, loss or head is tested too.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import pytest

from calibrant._core.options import Options, check_options, options_of, parse_options
from calibrant.artifacts.objects import KINDS, class_of
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.maccal import MaskedClassifier
from calibrant.calibrators.registry import TAG_CALIBRATORS
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.llm.heads.fitted import HEADS
from calibrant.losses import CRL, LOSSES, FeDLaS
from tests.support.calibrators import EVERY_METHOD


class Optioned(NamedTuple):
    """Something with options, and the arguments that it cannot do without."""

    make: Any
    options: Options
    needed: dict[str, Any]


def optioned(make: Callable[..., Any], **needed: Any) -> Optioned:
    return Optioned(make, options_of(make), needed)


SAVED = ("monitor", "answers", "signals")
EVERYTHING = {
    **{name: optioned(kind) for name, kind in EVERY_METHOD.items()},
    **{f"tags {name}": optioned(kind) for name, kind in TAG_CALIBRATORS.items()},
    **{
        f"loss {name}": Optioned(loss, loss.options, {"classes": 5, "examples": 50})
        for name, loss in LOSSES.items()
    },
    "FeDLaS": optioned(FeDLaS, classes=5),
    "CRL": optioned(CRL, examples=50),
    **{
        f"head {name}": optioned(kind, **({"width": 32} if "width" in options_of(kind) else {}))
        for name, kind in HEADS.items()
    },
    "masked classifier": optioned(MaskedClassifier, width=4, classes=3),
    "prior": optioned(class_of("prior"), calibrator=TemperatureScaling()),
    **{name: optioned(class_of(name)) for name in SAVED},
}
ONE_BY_ONE = [(name, option) for name, thing in EVERYTHING.items() for option in thing.options]
VALUES = [
    *(None, True, "False", "16", b"16", 2.5, -0.5, math.nan, math.inf, -1, 3 + 0j, object()),
    *([], ["x"], [16], [-1], [2.5], [True], [[]], {}, {"ts": 1}, TemperatureScaling),
]


NONSENSE: dict[str, dict[str, Any]] = {
    "auto": {"folds": 1, "seed": -1},
    "beta": {"keep_argmax": "False"},
    "cts": {"passes": 0},
    "fc": {"max_accuracy_loss": 1.1, "objective": "mse"},
    "gc": {"group_count": 0, "partitions": 1.5, "regularisation": -0.1},
    "histogram": {"bins": 0},
    "matrix": {"off_diagonal": -1.0, "intercept": math.inf},
    "multicalibration": {"depth": 7, "rounds": 0, "rate": 0.0, "penalty": -1.0, "folds": 1},
    "odds": {"knots": 0},
    "procal": {"neighbours": 0, "bins": 0, "method": "kde"},
    "smart": {"hidden": (16, 0), "steps": 0, "likelihood": -0.1, "start": "TS"},
    "spline": {"knots": 1},
    "maccal": {
        **{"epochs": 0, "batch_size": 2.5, "bottleneck": 0, "samples": -1, "seed": -1},
        **{"rate": 0.0, "decay": -0.1, "step": -1.0, "least_keep": 0.0, "keep": 1.1, "gamma": 2.1},
    },
    "monitor": {
        **{"window": 0, "pending": 0.5, "keep": 0, "bins": 101, "false_alarms": 1.0},
        **{"tolerance": 0.5},
    },
    "head mlp": {"width": 0, "units": 0},
    "loss ls": {"alpha": 1.1},
    "loss focal": {"gamma": -1.0},
    "loss mmce": {"weight": -1.0, "width": 0.0},
    "FeDLaS": {"classes": 1, "theta": 1.1, "base": "focal"},
    "CRL": {"examples": 0},
}
"""Values that annotations must not allow."""


def accepts(hint: Any, value: Any) -> bool:
    """The definition of what an annotation accepts."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        limits = (limit.holds(value, limit.number) for limit in parts[1:])
        return accepts(parts[0], value) and all(limits)
    if kind in (Union, UnionType):
        return any(accepts(part, value) for part in parts)
    if kind is Literal:
        return isinstance(value, str) and value in parts
    if kind is Sequence:
        return type(value) in (list, tuple) and all(accepts(parts[0], v) for v in value)
    if kind is tuple:
        return type(value) in (list, tuple)
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return isinstance(value, kind) and not (kind is int and value is True)


def limits_in(hint: Any) -> Iterator[Any]:
    if get_origin(hint) is Annotated:
        yield from get_args(hint)[1:]
    else:
        for part in get_args(hint):
            yield from limits_in(part)


def wrong_values(hint: Any) -> list[Any]:
    ends = [n for limit in limits_in(hint) for n in (limit.number - 1, limit.number + 1)]
    ends += [limit.number for limit in limits_in(hint)]
    return [value for value in [*VALUES, *ends] if not accepts(hint, value)]


def as_text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize(("name", "option"), ONE_BY_ONE)
def test_wrong_values_are_refused(name, option):
    make, options, needed = EVERYTHING[name]
    hint = options[option].annotation
    wrong = wrong_values(hint)
    assert len(wrong) > 10, "an annotation that says nothing"
    for value in wrong:
        with pytest.raises((TypeError, ValueError), match=rf"^{option} must be .*got "):
            make(**{**needed, option: value})


@pytest.mark.parametrize("name", NONSENSE)
def test_limits_are_narrow_enough(name):
    make, _, needed = EVERYTHING[name]
    for option, value in NONSENSE[name].items():
        with pytest.raises((TypeError, ValueError), match=rf"^{option} must be .*got "):
            make(**{**needed, option: value})


@pytest.mark.parametrize(("name", "option"), ONE_BY_ONE)
def test_defaults_fit_and_can_be_typed(name, option):
    make, options, needed = EVERYTHING[name]
    default = options[option].default
    if default is inspect.Parameter.empty:
        default = needed[option]
    make(**{**needed, option: default})
    assert check_options(options, {option: default}) == {option: default}
    if not isinstance(default, Calibrator):
        assert parse_options(name, options, {option: as_text(default)}) == {option: default}


@pytest.mark.parametrize("name", EVERYTHING)
def test_unknown_options_are_refused(name):
    make, options, needed = EVERYTHING[name]
    with pytest.raises(TypeError, match="colour"):
        make(**needed, colour="red")
    with pytest.raises(ValueError, match=f"{name} has no option 'colour': "):
        parse_options(name, options, {"colour": "red"})


def test_everything_that_is_saved_with_options_is_here():
    without = {"threshold", "sets", "decision", "head", "gate", "gate_watch"}
    assert {*KINDS} - without == {"prior", *SAVED}
