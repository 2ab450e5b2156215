"""Warnings about the data of a fit."""

import pytest

from calibrant.calibrators.data_checks import warn_of_few_examples


def test_fewer_examples_than_enough_are_told_of():
    warn_of_few_examples("X", 6, 30, None, enough=30)  # a warning would be an error
    warn_of_few_examples("X", 6, 100, 30, enough=30)
    with pytest.warns(UserWarning, match="X has 6 parameters for 29 examples: it may fit"):
        warn_of_few_examples("X", 6, 29, None, enough=30)
    with pytest.warns(UserWarning, match=r"for 100 examples \(29 of the first are not alike\)"):
        warn_of_few_examples("X", 6, 100, 29, enough=30)
