"""The binning rule, against the rule as a slow loop."""

from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import calibrant as cal
from calibrant._core.binning import (
    Bins,
    bin_index,
    equal_mass_edges,
    fill,
    stable_order,
    uniform_edges,
)
from tests.support.definitions import slow_groups, slow_index

SUMS = ("weight", "claimed", "observed", "spread", "squares")

counts = st.integers(1, 40)
positive = st.floats(1e-9, 1.0)
unit = st.one_of(st.floats(0.0, 1.0), st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0]))


def pairs(values=unit, most=60):
    """Confidence, outcome and whole weight of some examples."""
    whole = st.integers(1, 5)
    return st.lists(st.tuples(values, st.booleans(), whole), min_size=1, max_size=most).map(
        lambda rows: tuple(np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    )


def slow_sums(confidence, outcome, edges, weight):
    """Sums per bin, one example after the other."""
    sums = {name: [0.0] * (len(edges) - 1) for name in ("count", *SUMS)}
    for p, y, w in zip(confidence, outcome, weight, strict=True):
        b = slow_index(p, edges)
        sums["count"][b] += 1
        sums["weight"][b] += w
        sums["claimed"][b] += w * p
        sums["observed"][b] += w * y
        sums["spread"][b] += (w * (p - y)) ** 2
        sums["squares"][b] += w**2
    return sums


def assert_sums(filled, expected):
    np.testing.assert_array_equal(filled.count, expected["count"])
    for name in SUMS:
        np.testing.assert_allclose(getattr(filled, name), expected[name], atol=1e-12)


# Equal width


@given(counts)
def test_uniform_edges_are_the_nearest_floats_to_the_fractions(bins):
    edges = uniform_edges(bins)
    assert edges.dtype == np.float64
    assert edges.tolist() == [float(Fraction(i, bins)) for i in range(bins + 1)]


@given(st.lists(unit, min_size=1, max_size=60), counts)
def test_the_index_is_that_of_a_loop_over_the_bins(values, bins):
    edges = uniform_edges(bins)
    found = bin_index(np.array(values), edges)
    assert found.tolist() == [slow_index(value, edges) for value in values]


@given(pairs(), counts)
def test_sums_in_equal_width_bins_are_those_of_a_loop(data, bins):
    confidence, outcome, weight = data
    edges = uniform_edges(bins)
    assert_sums(
        fill(confidence, outcome, edges, weight), slow_sums(confidence, outcome, edges, weight)
    )
    plain = slow_sums(confidence, outcome, edges, np.ones_like(confidence))
    assert_sums(fill(confidence, outcome, edges), plain)


@pytest.mark.parametrize("bins", [1, 2, 3, 7, 10, 15, 20, 49, 100])
def test_every_decimal_edge_closes_its_bin(bins):
    """k / bins, as Python divides, is the last value of bin k; the next float is not."""
    edges = np.array([k / bins for k in range(1, bins + 1)])
    np.testing.assert_array_equal(bin_index(edges, uniform_edges(bins)), np.arange(bins))
    above = np.nextafter(edges[:-1], 2)
    np.testing.assert_array_equal(bin_index(above, uniform_edges(bins)), np.arange(1, bins))


# Equal mass


@given(pairs(positive | st.sampled_from([0.25, 0.5, 0.75, 1.0])), counts)
def test_equal_mass_bins_are_those_of_a_loop_over_the_values(data, bins):
    confidence, _, weight = data
    edges = equal_mass_edges(confidence, bins, weight)
    index = bin_index(confidence, edges)
    found = [sorted(set(confidence[index == b])) for b in range(edges.size - 1)]
    assert found == slow_groups(confidence, bins, weight)


@given(pairs(positive | st.sampled_from([0.25, 0.5, 0.75, 1.0])), counts)
def test_equal_mass_edges_are_values_and_no_bin_is_too_full(data, bins):
    confidence, _, weight = data
    edges = equal_mass_edges(confidence, bins, weight)
    assert edges[0] == 0
    assert edges[-1] == 1
    assert (np.diff(edges) > 0).all()
    assert set(edges[1:-1]) <= set(confidence)
    assert edges.size - 1 <= min(bins, np.unique(confidence).size)
    index = bin_index(confidence, edges)
    for b in range(edges.size - 1):
        inside = confidence[index == b]
        mass = weight[index == b]
        # without its largest value, which cannot be split, it would hold less than its share
        assert mass[inside < inside.max()].sum() < weight.sum() / bins * (1 + 1e-9)


@given(pairs(positive), counts)
def test_weights_of_equal_mass_edges_count_like_copies(data, bins):
    confidence, _, weight = data
    copies = np.repeat(confidence, weight.astype(int))
    np.testing.assert_array_equal(
        equal_mass_edges(confidence, bins, weight), equal_mass_edges(copies, bins)
    )


def test_equal_mass_bins_tell_zero_from_what_follows_it():
    """500 confidences of 0 that all happen, 500 of 1 that never do: as wrong as can be."""
    confidence, outcome = np.repeat([0.0, 1.0], 500), np.repeat([1, 0], 500)
    assert cal.ece(confidence=confidence, outcome=outcome) == 1
    assert cal.ada_ece(confidence=confidence, outcome=outcome) == 1


# Sums


def test_sums_with_different_edges_do_not_add():
    with pytest.raises(ValueError, match="different edges"):
        Bins.empty(uniform_edges(10)) + Bins.empty(uniform_edges(15))


@given(pairs(), pairs(), counts)
def test_sums_of_two_sets_add_up_to_those_of_their_union(one, two, bins):
    edges = uniform_edges(bins)
    added = fill(one[0], one[1], edges, one[2]) + fill(two[0], two[1], edges, two[2])
    both = [np.concatenate(columns) for columns in zip(one, two, strict=True)]
    assert_sums(added, slow_sums(both[0], both[1], edges, both[2]))
    np.testing.assert_array_equal(added.edges, edges)


@given(pairs(), counts)
def test_empty_sums_add_nothing(data, bins):
    filled = fill(data[0], data[1], uniform_edges(bins), data[2])
    for added in (filled + Bins.empty(filled.edges), Bins.empty(filled.edges) + filled):
        for name in ("count", *SUMS):
            np.testing.assert_array_equal(getattr(added, name), getattr(filled, name))


@pytest.mark.parametrize("bins", [1, 2, 3, 10, 15, 49, 100, 4096, 99_999])
def test_the_computed_index_is_the_one_that_is_searched(rng, bins):
    edges = uniform_edges(bins)
    near = [edges, np.nextafter(edges, 0), np.nextafter(edges, 1).clip(max=1), [5e-324]]
    values = np.concatenate([rng.random(1000), *near])
    searched = np.searchsorted(edges, values) - 1
    np.testing.assert_array_equal(bin_index(values, edges), searched.clip(min=0))


@pytest.mark.parametrize("weight", [None, np.array([2.0, 3.0])])
def test_counts_are_int64_and_sums_float64(weight):
    filled = fill(np.array([0.2, 0.9]), np.array([0.0, 1.0]), uniform_edges(15), weight)
    for bins in (filled, Bins.empty(uniform_edges(15)), filled + filled):
        assert bins.count.dtype == np.int64
        assert {getattr(bins, name).dtype for name in SUMS} == {np.dtype(np.float64)}


def test_sums_do_not_share_memory_with_what_was_added():
    filled = fill(np.array([0.2]), np.array([1.0]), uniform_edges(2))
    total = Bins.empty(filled.edges) + filled
    total.claimed[0] = 9
    assert filled.claimed[0] == 0.2


def test_means_and_gaps_per_bin_are_those_of_their_examples():
    confidence, outcome = np.array([0.1, 0.2, 0.9, 0.7]), np.array([0.0, 1.0, 1.0, 0.0])
    filled = fill(confidence, outcome, uniform_edges(4), np.array([1.0, 3.0, 2.0, 4.0]))
    assert filled.total == 10
    np.testing.assert_allclose(filled.confidence, [0.7 / 4, np.nan, 0.7, 0.9])
    np.testing.assert_allclose(filled.accuracy, [3 / 4, np.nan, 0, 1])
    np.testing.assert_allclose(filled.gap, [-2.3 / 10, 0, 2.8 / 10, -0.2 / 10])
    np.testing.assert_array_equal(filled.count, [2, 0, 1, 1])


@pytest.mark.parametrize("make", [uniform_edges, lambda bins: equal_mass_edges(np.ones(3), bins)])
@pytest.mark.parametrize("bins", [0, -2, 2.5, "3"])
def test_edges_need_a_positive_whole_number_of_bins(make, bins):
    with pytest.raises(ValueError, match="bins must be a positive whole number, got"):
        make(bins)


def test_a_numpy_integer_is_a_number_of_bins():
    assert uniform_edges(np.int64(3)).size == 4  # type: ignore[arg-type]


# Order


@given(st.lists(st.one_of(st.sampled_from([-np.inf, -0.0, 0.0, 1.0]), st.floats(-2, 2))))
def test_the_order_is_that_of_a_stable_sort(values):
    expected = sorted(range(len(values)), key=values.__getitem__)
    assert stable_order(np.array(values, dtype=np.float64)).tolist() == expected


@pytest.mark.parametrize("digits", [0, 2, 9])
def test_many_values_are_sorted_stably(rng, digits):
    values = rng.normal(size=20_000).round(digits)
    np.testing.assert_array_equal(stable_order(values), np.argsort(values, kind="stable"))
