"""Limits of figures: what is beyond them, in which subgroups, and names that are refused."""

import math

import numpy as np
import pytest

import calibrant as cal
from calibrant.metrics.evaluation import limits_of


@pytest.fixture
def by_place(rng):
    """Calibrated in the north, over-confident in the south; the islands have 12 examples."""
    logits = 1.5 * rng.normal(size=(4012, 4))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(1)
    place = np.repeat(["north", "south", "islands"], [2000, 2000, 12])
    return cal.evaluate(logits * np.where(place == "south", 2.5, 1.0)[:, None], labels, by=place)


def exceeded(checks):
    return {(each.subgroup, each.metric) for each in checks if each.exceeded}


def test_every_subgroup_is_compared(by_place):
    value = by_place["ece"].value
    assert by_place.by["south"]["ece"].value > value > by_place.by["north"]["ece"].value
    checks = by_place.check_limits({"ece": value})
    assert {each.subgroup for each in checks} == {None, "north", "south", "islands"}
    assert exceeded(checks) == {("south", "ece")}
    south = next(each for each in checks if each.subgroup == "south")
    by = by_place.by["south"]["ece"].value - value
    assert str(south).endswith(f"exceeds the limit of {value:g} by {by:.4f}")
    below = by_place.check_limits({"ece": math.nextafter(value, 0)})
    assert exceeded(below) == {(None, "ece"), ("south", "ece")}


def test_small_subgroups_are_said_to_be_and_fail_on_the_interval(by_place):
    assert by_place.by["islands"]["ece"].value > 0.05
    for name, fails in (("ece", False), ("ece.high", True), ("ece.low", False)):
        checks = by_place.check_limits({name: 0.9999})
        islands = next(each for each in checks if each.subgroup == "islands")
        assert (islands.judged, islands.exceeded) == (False, fails)
        assert "is that of too few in 12 examples" in str(islands)
        assert exceeded(checks) == ({("islands", "ece")} if fails else set())


def test_the_worse_end_of_an_interval(by_place):
    ece, accuracy = by_place["ece"], by_place["accuracy"]
    most, least = (ece.value + ece.high) / 2, (accuracy.value + accuracy.low) / 2
    kept = by_place.check_limits({"ece": most}, {"accuracy": least})[:2]
    beyond = by_place.check_limits({"ece.high": most}, {"accuracy.low": least})[:2]
    assert [each.exceeded for each in kept] == [False, False]
    assert [each.exceeded for each in beyond] == [True, True]
    assert [each.value for each in beyond] == [ece.high, accuracy.low]
    assert "the lower end of accuracy" in str(beyond[1])
    assert "is below the limit" in str(beyond[1])


def test_the_better_end_of_an_interval_fails_only_what_the_data_show(by_place):
    ece, accuracy = by_place["ece"], by_place["accuracy"]
    most, least = (ece.value + ece.low) / 2, (accuracy.value + accuracy.high) / 2
    beyond = by_place.check_limits({"ece": most}, {"accuracy": least})[:2]
    kept = by_place.check_limits({"ece.low": most}, {"accuracy.high": least})[:2]
    assert [each.exceeded for each in beyond] == [True, True]
    assert [each.exceeded for each in kept] == [False, False]
    assert [each.value for each in kept] == [ece.low, accuracy.high]
    assert by_place.check_limits({"ece.low": 0.99 * ece.low})[0].exceeded


def test_an_undefined_figure_of_all_examples_fails():
    """AUROC of confidence needs right answers and wrong ones."""
    result = cal.evaluate(5 * np.eye(3)[np.arange(90) % 3], np.arange(90) % 3)
    (check,) = result.check_limits(least={"auroc": 0.5})
    assert (check.exceeded, check.judged) == (True, False)
    assert "AUROC of confidence is undefined in 90 examples" in str(check)


@pytest.mark.parametrize("name", [n for n, metric in cal.METRICS.items() if not metric.two_sided])
def test_the_direction_of_each_metric_is_known(name):
    better = cal.METRICS[name].higher_is_better
    right, wrong = ({"least": {name: 0.5}}, {"most": {name: 0.5}})
    if not better:
        right, wrong = wrong, right
    assert limits_of(**right)[0].metric == name
    with pytest.raises(ValueError, match=f"{name} is better if it is"):
        limits_of(**wrong)


@pytest.mark.parametrize(
    ("most", "message"),
    [
        ({"ecee": 0.1}, "unknown metric 'ecee': did you mean ece"),
        ({"ece.hihg": 0.1}, "did you mean high"),
        ({"ece.middle": 0.1}, "or on an end of its interval, ece.low or ece.high"),
        ({"ece": 5}, r"must be a fraction \(0.03 is 3 %\), got 5"),
        ({"nll": math.inf}, "must be a finite number, got inf"),
    ],
)
def test_mistakes_are_explained(by_place, most, message):
    with pytest.raises(ValueError, match=message):
        by_place.check_limits(most)


def test_what_was_not_measured_has_no_limit(rng):
    logits = rng.normal(size=(50, 3))
    result = cal.evaluate(logits, logits.argmax(1), metrics=["ece"], level=None)
    with pytest.raises(ValueError, match="needs nll among the metrics"):
        result.check_limits({"nll": 1.0})
    with pytest.raises(ValueError, match=r"limit of ece.high needs intervals"):
        result.check_limits({"ece.high": 0.5})
