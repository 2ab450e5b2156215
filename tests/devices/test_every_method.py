"""The script that tries every method, on each device."""

import pytest

from tests.devices.every_method import attempts, others
from tests.support.pretended_device import WITHOUT_FLOAT64

STEPS = ("isotonic", "isotonic_ovr", "histogram", "histogram_ovr", "bbq", "scaling_binning", "gc")


@pytest.mark.slow
def test_every_method_answers_there_as_on_the_cpu(device):
    if device == WITHOUT_FLOAT64:
        pytest.skip("the other tests in this folder have it")
    for name, place, difference in attempts(device, 4000 if device.type == "cuda" else 300):
        assert place == device, name
        assert difference.mean() < 1e-3, name
        # a step may lie on either side of a log-odds that is rounded
        assert name in STEPS or difference.max() < 0.02, name


def test_other_ways_in(device):
    others(device, 300)
