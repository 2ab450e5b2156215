"""Optimisers in float64 on NumPy arrays, which stop at the end of a :func:`time_limit`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from scipy import optimize

from calibrant._core.checks import FloatArray

# value and gradient (p,) at parameters (p,)
Objective: TypeAlias = Callable[[FloatArray], tuple[float, FloatArray]]
_IMPROVEMENT = 1e-4
_X = TypeVar("_X")
_Y = TypeVar("_Y")


class Solution(NamedTuple):
    """The end of a search."""

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


def _timed(function: Callable[[_X], _Y]) -> Callable[[_X], _Y]:
    def timed(x: _X) -> _Y:
        check_time()
        return function(x)

    return timed


def minimise_convex(
    slope: Callable[[float], float], low: float, high: float, *, tolerance: float = 1e-10
) -> Solution:
    """Minimise a convex function of one variable in ``[low, high]`` by the sign of its slope.

    Without a minimum inside, the end towards which the function falls is returned as not converged.

    >>> minimise_convex(lambda x: 2 * (x - 3), 0, 10).x
    array([3.])
    """
    slope = cache(_timed(slope))  # both ends are asked for twice
    for end, falls_beyond in ((low, slope(low) >= 0), (high, slope(high) <= 0)):
        if falls_beyond:
            return Solution(np.array([end], dtype=np.float64), math.nan, 2, False)
    # SciPy wraps the function in one that refers to itself: were it the slope, the data behind it
    # would stay in memory until the garbage collector runs.
    held = [slope]
    root, about = optimize.brentq(lambda x: held[0](x), low, high, xtol=tolerance, full_output=True)
    held.clear()
    return Solution(np.array([root]), math.nan, about.function_calls, about.converged)


def minimise_scalar(
    function: Callable[[float], float], low: float, high: float, *, points: int = 121
) -> Solution:
    """Minimise any function of one variable in ``[low, high]``: a grid, then its best cell."""
    function = _timed(function)
    grid = np.linspace(low, high, points)
    values = [function(float(x)) for x in grid]
    best = int(np.argmin(values))
    left, right = grid[max(best - 1, 0)], grid[min(best + 1, points - 1)]
    result = optimize.minimize_scalar(
        function, bounds=(left, right), method="bounded", options={"xatol": 1e-9}
    )
    inner = result.fun < values[best]
    x, value = (result.x, result.fun) if inner else (grid[best], values[best])
    inside = low < x - 1e-6 and x + 1e-6 < high
    return Solution(np.array([x]), float(value), points + result.nfev, bool(inside))


def minimise(
    function: Objective,
    start: FloatArray,
    *,
    lowest: FloatArray | None = None,
    steps: int = 500,
    tolerance: float = 1e-8,
) -> Solution:
    """Minimise a smooth function of many parameters by L-BFGS with a line search.

    ``lowest`` are lower bounds ``(p,)``; a parameter that ends there counts as converged.
    """
    result = optimize.minimize(
        _timed(function),
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=None if lowest is None else optimize.Bounds(lowest, np.inf),
        options={"maxiter": steps, "maxfun": 2 * steps, "gtol": tolerance, "ftol": 1e-14},
    )
    # status 2 is a line search that can gain no more in float64, which is convergence as well
    return Solution(result.x, float(result.fun), int(result.nit), result.status in (0, 2))


def minimise_within(
    function: Objective,
    start: FloatArray,
    bounds: Sequence[tuple[float, float]],
    *,
    total: float | None = None,
) -> Solution:
    """Minimise a smooth function of a few parameters within bounds, and with a fixed sum ``total``.

    A parameter that ends at a bound counts as converged.
    """
    fixed_sum: Any = {"type": "eq", "fun": lambda w: w.sum() - total, "jac": np.ones_like}
    result = optimize.minimize(
        _timed(function),
        start,
        jac=True,
        method="SLSQP",  # L-BFGS-B wakes the threads of BLAS for a handful of numbers
        bounds=bounds,
        constraints=() if total is None else fixed_sum,
        options={"maxiter": 300, "ftol": 1e-13},
    )
    low, high = np.transpose(bounds)
    x = np.clip(result.x, low, high)
    # 8: no descent is left along the line but rounding error
    return Solution(x, float(result.fun), int(result.nit), result.status in (0, 8))


def adam(
    function: Objective, start: FloatArray, *, steps: int, rate: float, patience: int
) -> Solution:
    """Minimise by Adam on the whole data, and return the best parameters of all steps.

    It has converged when the value has not fallen by 1e-4 for ``patience`` steps.
    """
    x, best, marked = start.copy(), start.copy(), math.inf
    lowest, since = math.inf, 0
    mean, square = np.zeros_like(x), np.zeros_like(x)
    for step in range(1, steps + 1):
        check_time()
        value, gradient = function(x)
        if value < lowest:
            lowest, best = value, x.copy()
        since = 0 if value < marked - _IMPROVEMENT else since + 1
        marked = value if since == 0 else marked
        if since >= patience:
            return Solution(best, lowest, step, math.isfinite(lowest))
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        corrected = math.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        x = x - rate * corrected * mean / (np.sqrt(square) + 1e-8)
    return Solution(best, lowest, steps, False)
