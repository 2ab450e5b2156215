"""Streams of confidences and outcomes, and a comparison of monitors."""

import numpy as np
import pytest
from scipy.special import expit


def confidences(rng, n):
    """Confidences of a classifier of moderate skill."""
    return np.minimum(expit(rng.gamma(2.0, 1.6, n) - 0.5), 1 - 1e-9)


def outcomes(rng, truth):
    """Outcomes that happen with the probabilities ``truth``."""
    return rng.random(truth.size) < truth


def same(one, other):
    """Tell whether two monitors hold the same sums and have the same e-value."""
    assert sorted(one.windows) == sorted(other.windows)
    for number, window in one.windows.items():
        for key in ("count", "right", "claimed", "cumulant"):
            np.testing.assert_allclose(
                getattr(window, key), getattr(other.windows[number], key), rtol=1e-9, atol=1e-9
            )
    return one.e_value == pytest.approx(other.e_value, rel=1e-9)
