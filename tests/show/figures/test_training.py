"""Figures of trainings have their numbers by epoch."""

from typing import Any

import numpy as np
import pytest

from calibrant.calibrators.maccal import Epoch
from calibrant.show import figures


def test_the_gate_is_drawn_as_shares_of_the_examples_by_epoch():
    log = [
        {"epoch": 1, "gate_positive": 0.7, "gate_flips": float("nan"), "smoothing_lowered": 0.5},
        {"epoch": 2, "gate_positive": 0.9, "gate_flips": 0.2, "smoothing_lowered": 0.75},
    ]
    axes: Any = figures.gate_plot(log)
    drawn = {line.get_label(): line.get_ydata().tolist() for line in axes.lines}
    assert drawn["gate at +1"] == pytest.approx([70, 90])
    assert drawn["gate changed"][1] == pytest.approx(20)
    assert drawn["smoothing lowered"] == pytest.approx([50, 75])
    assert axes.lines[0].get_xdata().tolist() == [1, 2]
    with pytest.raises(ValueError, match="must be of a training with FeDLaS"):
        figures.gate_plot([{"epoch": 1, "loss": 0.5}])


def test_the_history_of_maccal_is_drawn_by_epoch():
    history = [Epoch(0.9, 0.99, 0.94, 0.1), Epoch(0.8, 0.95, 0.94, 0.2)]
    axes: Any = figures.keep_plot(history)
    drawn = {line.get_label(): line.get_ydata() for line in axes.lines}
    np.testing.assert_allclose(drawn["keep-rate q"], [90, 80])
    np.testing.assert_allclose(drawn["confidence"], [99, 95])
    np.testing.assert_allclose(drawn["accuracy"], [94, 94])
    assert list(axes.lines[0].get_xdata()) == [1, 2]
