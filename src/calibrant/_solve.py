"""The optimisers: the only places where parameters are searched for.

Everything runs in float64 on NumPy arrays. A function to minimise returns its value and its
gradient; what comes back says whether the search converged. Inside :func:`time_limit` every
search gives up when the time is over.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
from scipy import optimize

from calibrant._checks import FloatArray

Objective: TypeAlias = Callable[[FloatArray], tuple[float, FloatArray]]
"""Value and gradient ``(p,)`` at parameters ``(p,)``."""


X = TypeVar("X")
Y = TypeVar("Y")


class Solution(NamedTuple):
    """Where a search ended."""

    x: FloatArray
    value: float
    steps: int
    converged: bool


_DEADLINE: ContextVar[float] = ContextVar("deadline", default=math.inf)


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise TimeoutError from searches within this context that last longer; None: no limit."""
    ends = math.inf if seconds is None else time.monotonic() + seconds
    token = _DEADLINE.set(min(ends, _DEADLINE.get()))
    try:
        yield
    finally:
        _DEADLINE.reset(token)


def check_time() -> None:
    """Raise TimeoutError when the time limit is over; long loops call this now and then."""
    if time.monotonic() > _DEADLINE.get():
        raise TimeoutError("the time limit was reached")


def _timed(function: Callable[[X], Y]) -> Callable[[X], Y]:
    def timed(x: X) -> Y:
        check_time()
        return function(x)

    return timed


def minimise_convex(
    slope: Callable[[float], float], low: float, high: float, *, tolerance: float = 1e-10
) -> Solution:
    """Minimise a convex function of one variable in ``[low, high]`` by the sign of its slope.

    The end towards which the function falls is returned where it has no minimum inside; its
    ``converged`` is then False.

    >>> minimise_convex(lambda x: 2 * (x - 3), 0, 10).x
    array([3.])
    >>> minimise_convex(lambda x: -1.0, 0, 10)[::3]
    (array([10.]), False)
    """
    slope = _timed(slope)
    for end, falls_beyond in ((low, slope(low) >= 0), (high, slope(high) <= 0)):
        if falls_beyond:
            return Solution(np.array([end], dtype=np.float64), math.nan, 2, False)
    root, found = optimize.brentq(slope, low, high, xtol=tolerance, full_output=True)
    return Solution(np.array([root]), math.nan, found.function_calls, found.converged)


def minimise_scalar(
    function: Callable[[float], float], low: float, high: float, *, points: int = 121
) -> Solution:
    """Minimise any function of one variable in ``[low, high]``: a grid, then its best cell.

    >>> round(float(minimise_scalar(lambda x: abs(x - 3), 0, 10).x[0]), 6)
    3.0
    """
    function = _timed(function)
    grid = np.linspace(low, high, points)
    values = [function(float(x)) for x in grid]
    best = int(np.argmin(values))
    left, right = grid[max(best - 1, 0)], grid[min(best + 1, points - 1)]
    found = optimize.minimize_scalar(
        function, bounds=(left, right), method="bounded", options={"xatol": 1e-9}
    )
    inner = found.fun < values[best]
    x, value = (found.x, found.fun) if inner else (grid[best], values[best])
    inside = low < x - 1e-6 and x + 1e-6 < high
    return Solution(np.array([x]), float(value), points + found.nfev, bool(inside))


def minimise(
    function: Objective,
    start: FloatArray,
    *,
    bounds: Sequence[tuple[float, float]] | None = None,
    steps: int = 500,
    tolerance: float = 1e-8,
) -> Solution:
    """Minimise a smooth function by L-BFGS with a line search, within bounds if there are any.

    >>> minimise(lambda x: (float(((x - 3) ** 2).sum()), 2 * (x - 3)), np.zeros(2)).x
    array([3., 3.])
    """
    found = optimize.minimize(
        _timed(function),
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        options={"maxiter": steps, "maxfun": 2 * steps, "gtol": tolerance, "ftol": 1e-14},
    )
    # status 2 is a line search that can gain no more in float64: the end of the road as well
    return Solution(found.x, float(found.fun), int(found.nit), found.status in (0, 2))


def minimise_on_simplex(function: Objective, start: FloatArray) -> Solution:
    """Minimise a convex function of weights that are not negative and sum to one.

    >>> minimise_on_simplex(lambda w: (float(w @ w), 2 * w), np.array([1.0, 0.0])).x
    array([0.5, 0.5])
    """
    found = optimize.minimize(
        _timed(function),
        start,
        jac=True,
        method="SLSQP",
        bounds=[(0.0, 1.0)] * len(start),
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
        options={"maxiter": 200, "ftol": 1e-13},
    )
    weights = np.clip(found.x, 0, None)
    return Solution(weights / weights.sum(), float(found.fun), int(found.nit), bool(found.success))


def adam(
    function: Objective,
    start: FloatArray,
    *,
    steps: int,
    rate: float,
    patience: int,
    improvement: float = 1e-4,
) -> Solution:
    """Minimise by Adam on the whole data, and return the best parameters that were seen.

    The search ends when the value has not fallen by ``improvement`` for ``patience`` steps;
    only then it counts as converged.

    >>> found = adam(lambda x: (float(((x - 3) ** 2).sum()), 2 * (x - 3)), np.zeros(1),
    ...              steps=5000, rate=0.01, patience=100)
    >>> found.converged, round(float(found.x[0]), 1)
    (True, 3.0)
    """
    x, best, marked = start.copy(), start, math.inf
    lowest, since = math.inf, 0
    mean, square = np.zeros_like(x), np.zeros_like(x)
    for step in range(1, steps + 1):
        check_time()
        value, gradient = function(x)
        if value < lowest:
            lowest, best = value, x.copy()
        since = 0 if value < marked - improvement else since + 1
        marked = value if since == 0 else marked
        if since >= patience:
            return Solution(best, lowest, step, True)
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        corrected = math.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        x = x - rate * corrected * mean / (np.sqrt(square) + 1e-8)
    return Solution(best, lowest, steps, False)
