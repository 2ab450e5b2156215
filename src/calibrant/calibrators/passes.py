"""Passes over examples that do not fit into memory, for methods that need sums only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from calibrant._core.checks import FloatArray
from calibrant._core.chunks import Examples

Sums: TypeAlias = Sequence[Any]  # arrays and numbers, which add one by one
Task: TypeAlias = Callable[[Examples], Sums]


class Passes(Protocol):
    """All examples, some at a time, as often as a method asks."""

    classes: int

    def sums(self, task: Task) -> list[FloatArray]:
        """Return the sums of ``task(examples)`` over all examples; the task can be pickled."""
        ...
