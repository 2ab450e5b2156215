"""The optimisers find minima that are known, say whether they did, and keep to their time."""

import gc
import math
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.optimize import rosen, rosen_der

from calibrant._core import solve as _solve
from calibrant._core.solve import (
    adam,
    check_time,
    minimise,
    minimise_convex,
    minimise_scalar,
    minimise_within,
    time_limit,
)

CENTRE = np.array([1.5, -2.0, 0.25])


def bowl(x):
    """Smallest at ``CENTRE``, with the value 7."""
    scale = np.array([1.0, 10.0, 100.0])
    return 7 + float(scale @ (x - CENTRE) ** 2), 2 * scale * (x - CENTRE)


def calls(function):
    """The function, and the list of what it was called with."""
    seen = []

    def counted(x):
        seen.append(np.copy(x))
        return function(x)

    return counted, seen


def told(values):
    """A function that returns these values in turn, whatever it is called with."""
    left = iter(values)
    return lambda x: (next(left), np.ones(1))


# One variable


@pytest.mark.parametrize("minimum", [-2.9, -1e-3, 0.0, 1.234, 4.9])
def test_the_root_of_the_slope_is_the_minimum(minimum):
    for slope in (lambda x: x - minimum, lambda x: math.sinh(3 * (x - minimum))):
        found = minimise_convex(slope, -3, 5)
        assert found.x.shape == (1,)
        assert found.x.dtype == np.float64
        assert found.x[0] == pytest.approx(minimum, abs=1e-9)
        assert found.converged is True


def test_the_tolerance_is_on_the_variable():
    rough, fine = (
        minimise_convex(lambda x: math.expm1(x - 1), -9, 9, tolerance=t) for t in (1, 1e-12)
    )
    assert abs(fine.x[0] - 1) < 1e-11
    assert rough.steps < fine.steps


@pytest.mark.parametrize(("slope", "end"), [(1.0, -3), (-1.0, 5), (0.0, -3)])
def test_a_function_without_minimum_ends_at_the_bound_it_falls_to(slope, end):
    found = minimise_convex(lambda x: slope, -3, 5)
    assert found.x.tolist() == [end]
    assert found.x.dtype == np.float64
    assert found.converged is False


@pytest.mark.parametrize("minimum", [-2.99, -1.0, 0.1234, 4.99])
@pytest.mark.parametrize("power", [1, 2, 4])
def test_a_grid_and_its_best_cell_hold_the_minimum(minimum, power):
    found = minimise_scalar(lambda x: 3 + abs(x - minimum) ** power, -3, 5)
    assert found.x.shape == (1,)
    assert found.x[0] == pytest.approx(minimum, abs=1e-6 if power < 4 else 1e-2)
    assert found.value == pytest.approx(3, abs=1e-6)
    assert found.converged is True


def test_the_lowest_of_many_minima_is_found():
    found = minimise_scalar(lambda x: math.cos(4 * x) + 0.1 * (x - 3) ** 2, -10, 10)
    grid = np.linspace(-10, 10, 200_001)
    values = np.cos(4 * grid) + 0.1 * (grid - 3) ** 2
    assert found.x[0] == pytest.approx(grid[values.argmin()], abs=2e-4)
    assert found.value <= values.min() + 1e-9


def test_steps_that_a_search_within_a_cell_cannot_follow_keep_the_best_point_of_the_grid():
    found = minimise_scalar(lambda x: 0.0 if abs(x - 1) < 1e-3 else 1.0, -3, 5, points=9)
    assert found.x.tolist() == [1.0]
    assert found.value == 0


@pytest.mark.parametrize(("sign", "end"), [(1, -3), (-1, 5)])
def test_a_minimum_at_a_bound_has_not_converged(sign, end):
    found = minimise_scalar(lambda x: sign * x, -3, 5)
    assert found.x[0] == pytest.approx(end, abs=1e-6)
    assert -3 <= found.x[0] <= 5
    assert found.converged is False


# Several variables


def test_a_bent_valley_is_followed_to_its_end():
    found = minimise(lambda x: (float(rosen(x)), rosen_der(x)), np.array([-1.2, 1.0]))
    np.testing.assert_allclose(found.x, 1, atol=1e-4)
    assert found.converged is True


def test_too_few_steps_have_not_converged():
    found = minimise(lambda x: (float(rosen(x)), rosen_der(x)), np.array([-1.2, 1.0]), steps=3)
    assert found.steps <= 3
    assert found.converged is False


def test_bounds_are_kept_and_the_best_within_them_is_found():
    function, seen = calls(bowl)
    found = minimise_within(function, np.zeros(3), [(-1, 1), (-1, 1), (-1, 1)])
    np.testing.assert_allclose(found.x, [1, -1, 0.25], atol=1e-6)
    assert np.abs(seen).max() <= 1
    free = minimise_within(bowl, np.zeros(3), [(-9, 9)] * 3)
    np.testing.assert_allclose(free.x, CENTRE, atol=1e-6)


def test_the_start_is_left_as_it_was():
    start = np.zeros(3)
    minimise(bowl, start)
    adam(bowl, start, steps=20, rate=0.1, patience=5)
    on_simplex(lambda w: (float(w @ w), 2 * w), np.array([1.0, 0.0]))
    np.testing.assert_array_equal(start, 0)


def on_simplex(function, start):
    return minimise_within(function, start, [(0.0, 1.0)] * len(start), total=1.0)


def test_the_nearest_point_of_the_simplex_is_found():
    target = np.array([0.9, 0.5, -0.4])  # its projection is (0.7, 0.3, 0)

    def distance(w):
        return float((w - target) @ (w - target)), 2 * (w - target)

    for start in ([1.0, 0, 0], [0, 0, 1.0], [1 / 3, 1 / 3, 1 / 3]):
        found = on_simplex(distance, np.array(start))
        np.testing.assert_allclose(found.x, [0.7, 0.3, 0], atol=1e-6)
        assert found.value == pytest.approx(distance(np.array([0.7, 0.3, 0]))[0], abs=1e-9)
        assert found.converged is True


# Adam


def test_adam_follows_its_published_update():
    rate, x = 0.1, np.zeros(3)
    mean, square = np.zeros(3), np.zeros(3)
    function, seen = calls(bowl)
    adam(function, x, steps=30, rate=rate, patience=100)
    for t in range(1, 31):
        np.testing.assert_allclose(seen[t - 1], x, atol=1e-6)
        gradient = bowl(x)[1]
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        unbiased = mean / (1 - 0.9**t), square / (1 - 0.999**t)
        x = x - rate * unbiased[0] / (np.sqrt(unbiased[1]) + 1e-8)


def test_adam_returns_the_best_parameters_and_not_the_last():
    function, seen = calls(lambda x: (float(abs(x[0] - 1)), np.array([-1.0])))  # past the minimum
    found = adam(function, np.zeros(1), steps=40, rate=0.1, patience=100)
    values = [abs(x[0] - 1) for x in seen]
    assert found.value == min(values)
    assert found.x[0] == seen[int(np.argmin(values))][0]
    assert seen[-1][0] > 2
    assert (found.steps, found.converged) == (40, False)


def test_adam_remembers_a_best_value_that_is_too_small_an_improvement_to_count():
    falling = told(1 - 1e-5 * np.arange(100))
    found = adam(falling, np.zeros(1), steps=99, rate=1, patience=5)
    assert found.steps == 6
    assert found.value == pytest.approx(1 - 5e-5, abs=1e-12)


@pytest.mark.parametrize("patience", [1, 7, 30])
def test_adam_gives_up_after_its_patience(patience):
    function, seen = calls(lambda x: (5.0, np.zeros(1)))
    found = adam(function, np.zeros(1), steps=1000, rate=0.1, patience=patience)
    assert found.steps == len(seen) == patience + 1
    assert found.converged is True


def test_adam_passes_by_values_that_are_not_numbers():
    function, seen = calls(told([3.0, math.nan, 2.0] + [math.nan] * 50))
    found = adam(function, np.zeros(1), steps=40, rate=0.1, patience=10)
    assert found.value == 2
    assert found.x[0] == seen[2][0]
    assert found.steps == 13


def test_adam_has_not_converged_where_nothing_is_a_number():
    found = adam(
        lambda x: (math.nan, np.full(1, math.nan)), np.zeros(1), steps=99, rate=0.1, patience=5
    )
    assert not found.converged


# Time

SEARCHES = {
    "minimise_convex": lambda tick: minimise_convex(lambda x: tick() + math.sinh(x - 1), -3, 5),
    "minimise_scalar": lambda tick: minimise_scalar(lambda x: tick() + (x - 1) ** 2, -3, 5),
    "minimise": lambda tick: minimise(
        lambda x: (tick() + float(rosen(x)), rosen_der(x)), np.array([-1.2, 1.0])
    ),
    "minimise_within": lambda tick: on_simplex(
        lambda w: (tick() + float(w**4 @ [1, 2, 3]), 4 * w**3 * [1, 2, 3]), np.array([1.0, 0, 0])
    ),
    "adam": lambda tick: adam(
        lambda x: (tick() + bowl(x)[0], bowl(x)[1]), np.zeros(3), steps=50, rate=0.1, patience=50
    ),
}


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves by a second whenever it is told to."""

    class Clock:
        now = 1000.0

        def tick(self):
            self.now += 1
            return 0.0

    ours = Clock()
    monkeypatch.setattr(_solve, "time", SimpleNamespace(monotonic=lambda: ours.now))
    return ours


@pytest.mark.parametrize("search", SEARCHES)
def test_a_search_that_lasts_too_long_is_ended(clock, search):
    with time_limit(3.5), pytest.raises(TimeoutError, match="the time limit was reached"):
        SEARCHES[search](clock.tick)
    assert clock.now == 1004
    assert SEARCHES[search](clock.tick).steps >= 1


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("seconds", [None, 1e6, math.inf])
def test_a_search_within_its_time_is_not_disturbed(clock, search, seconds):
    expected = SEARCHES[search](lambda: 0.0)
    with time_limit(seconds):
        found = SEARCHES[search](clock.tick)
    np.testing.assert_array_equal(found.x, expected.x)
    assert found[2:] == expected[2:]


@pytest.mark.parametrize(("outer", "inner"), [(5, 10), (10, 5), (5, None), (None, 5)])
def test_the_tighter_of_two_limits_holds(clock, outer, inner):
    with time_limit(outer), time_limit(inner):
        clock.now += 4.9
        check_time()
        clock.now += 0.2
        with pytest.raises(TimeoutError):
            check_time()


def test_an_outer_limit_holds_again_after_an_inner_one(clock):
    with time_limit(10):
        with time_limit(1):
            clock.now += 2
            with pytest.raises(TimeoutError):
                check_time()
        check_time()
        clock.now += 9
        with pytest.raises(TimeoutError):
            check_time()
    check_time()


def test_a_limit_is_lifted_when_its_context_fails(clock):
    def fails():
        with time_limit(1):
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        fails()
    clock.now += 100
    check_time()


def test_real_seconds_count():
    def waits():
        while True:
            check_time()

    with time_limit(0.01), pytest.raises(TimeoutError):
        waits()


def test_what_a_slope_refers_to_is_freed_without_the_garbage_collector():
    class Data:
        centre = 3.0

    data = Data()
    gone = weakref.ref(data)

    def slope(x, data=data):
        return x - data.centre

    gc.disable()
    try:
        minimise_convex(slope, 0, 10)
        del data, slope
        assert gone() is None
    finally:
        gc.enable()
