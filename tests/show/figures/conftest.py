"""Figures that are closed before and after every test."""

import pytest


@pytest.fixture(autouse=True)
def closed():
    """Every test begins and ends without figures."""
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.close("all")
    yield
    plt.close("all")
