"""The targets: functions ``check(rng)`` that raise if something is wrong."""

import warnings
from collections.abc import Callable
from importlib import import_module

import numpy as np

TARGETS = {
    "metrics": 300,
    "accumulators": 30,
    "evaluations": 3,
    "readers": 75,
    "calibrators": 10,
    "artifacts": 30,
    "monitors": 30,
    "decisions": 50,
    "tables": 30,
    "class_names": 100,
    "frames": 30,
    "options": 300,
}
"""Modules of this package, with the number of inputs in ``make test``: about half a second each."""


def check_of(target: str) -> Callable[[np.random.Generator], None]:
    """Return the function of a target."""
    check: Callable[[np.random.Generator], None] = import_module(f"tests.fuzz.{target}").check
    return check


def run(target: str, seed: int) -> None:
    """Check one input; what NumPy or torch warn of is a failure, what users are told is not."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", UserWarning)
        check_of(target)(np.random.default_rng(seed))


def reproduction(target: str, seed: int) -> str:
    """Return the command that checks one input again."""
    return f"python -m tests.fuzz --target {target} --seed {seed}"


def summary(error: BaseException) -> str:
    """Return an error on one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else f"{text[:300]}..."
