"""The script that tries every method, on each device."""

from itertools import islice

import pytest

from tests.devices.every_method import attempts, others

STEPS = ("isotonic", "isotonic_ovr", "histogram", "histogram_ovr", "bbq", "scaling_binning", "gc")


@pytest.mark.slow
def test_every_method_answers_there_as_on_the_cpu(device):
    on_gpu = device.type == "cuda"
    # the other tests in this folder have the other methods on a pretended device
    for name, place, difference in islice(
        attempts(device, 4000 if on_gpu else 300), None if on_gpu else 4
    ):
        assert place == device, name
        assert difference.mean() < 1e-3, name
        # a step may lie on either side of a log-odds that is rounded
        assert name in STEPS or difference.max() < 0.02, name


def test_other_ways_in(device):
    others(device, 300)
