"""Warnings about the data of a fit."""

from functools import partial

import pytest

from calibrant.calibrators.data_checks import _warn_of_few_examples


def test_fewer_examples_than_enough_are_told_of():
    warn = partial(_warn_of_few_examples, "X", 6, enough=30, fewest="ts has one")
    warn(30, None)  # a warning would be an error
    warn(100, 30)
    with pytest.warns(
        UserWarning, match=r"X has 6 parameters for 29 examples: it may .*\(ts has one\)"
    ):
        warn(29, None)
    with pytest.warns(UserWarning, match=r"for 100 examples \(29 of the first are not alike\)"):
        warn(100, 29)
