"""Figures of estimates without labels."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from calibrant.metrics import Estimate
from calibrant.show.figures import estimate_plot


def batch(status, value, low=math.nan, high=math.nan) -> Any:
    return SimpleNamespace(
        metrics={"accuracy": Estimate(value, low, high)}, status=status, level=0.9
    )


def test_states_have_their_own_marks():
    batches = {
        "$a$": batch("holds", 0.9, 0.8, 0.95),
        "b": batch("withdrawn", 0.7),
        "c": batch("labels", 0.5, 0.4, 0.6),
    }
    axes: Any = estimate_plot(batches, measured={"b": 0.3})
    words = [text.get_text() for text in axes.get_legend().get_texts()]
    assert words == ["estimated, 90 %", "from labels, 90 %", "no interval", "measured"]
    lines = [(line.get_label(), line.get_xydata().round(6).tolist()) for line in axes.get_lines()]
    points = dict(lines)
    assert points["no interval"] == [[1, 70]]
    assert points["measured"] == [[1, 30]]
    ends = [places for _, places in lines if len(places) == 2]
    assert ends == [[[0, 80], [0, 95]], [[2, 40], [2, 60]]]
    assert axes.get_xticklabels()[0].get_text() == r"\$a\$"


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="no batch was estimated"):
        estimate_plot({})
