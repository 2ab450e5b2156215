"""Accuracies that a monitor has estimated without labels."""

import json
import math

import numpy as np
import pytest

from calibrant.data import save_predictions
from calibrant.estimate import PerformanceEstimator
from calibrant.monitor import Monitor
from calibrant.monitor.stream_windows import WindowEstimate
from calibrant.show.monitor import _monitor_page
from calibrant.show.style import percent
from tests.support.simulate import drawn


def test_windows_without_labels_are_estimated(rng, tmp_path):
    logits, labels = drawn(rng, 4500, 4)
    estimator = PerformanceEstimator({"logits": logits[:1500], "labels": labels[:1500]})
    save_predictions(tmp_path / "a.npz", {"logits": logits[1500:3000]})
    save_predictions(tmp_path / "b.npz", {"logits": logits[3000:], "labels": labels[3000:]})
    watch = Monitor().update_file(tmp_path / "a.npz", estimator=estimator)
    watch.update_file(tmp_path / "b.npz", estimator=estimator)
    first, second = watch.report().windows
    assert first["n"] == 0
    assert second["n"] == 1500
    assert second["estimate_low"] < second["accuracy"] < second["estimate_high"]
    assert "estimated" in str(watch.report())
    page = _monitor_page(watch.report())
    assert f"b.npz: measured accuracy {percent(second['accuracy'])}" in page
    assert f"a.npz: estimated accuracy {percent(first['estimate'])} (" in page
    again = Monitor.from_state(json.loads(json.dumps(watch.state())))
    assert again.report().to_dict() == watch.report().to_dict()
    # the labels of a window come later
    save_predictions(tmp_path / "a.npz", {"logits": logits[1500:3000], "labels": labels[1500:3000]})
    after = watch.update_file(tmp_path / "a.npz", estimator=estimator).report().windows
    assert [row["n"] for row in after] == [1500, 1500]
    assert after[0]["estimate"] == first["estimate"]
    assert after[0]["estimate_low"] < after[0]["accuracy"] < after[0]["estimate_high"]
    with pytest.raises(ValueError, match="a share with its guarantee"):
        WindowEstimate.from_state([2.0, None, None, "holds"])
    with pytest.raises(ValueError, match="beside labelled predictions"):
        Monitor().update_file(tmp_path / "a.npz", estimator=PerformanceEstimator())


def test_an_alarm_ends_the_promise(rng, tmp_path):
    logits, labels = drawn(rng, 3000, 4)
    estimator = PerformanceEstimator({"logits": logits[:1000], "labels": labels[:1000]})
    wrong = (labels + rng.integers(0, 2, 3000)) % 4
    save_predictions(tmp_path / "a.npz", {"logits": logits[1000:2000], "labels": wrong[1000:2000]})
    save_predictions(tmp_path / "b.npz", {"logits": logits[2000:]})
    watch = Monitor()
    for name in "ab":
        watch.update_file(tmp_path / f"{name}.npz", estimator=estimator)
    for row in watch.report().windows:
        assert row["promise"] == "withdrawn"
        assert math.isnan(row["estimate_low"])
        assert not np.isnan(row["estimate"])
    assert watch.report().to_dict()["windows"][0]["estimate_low"] is None


def test_a_night_without_examples_has_no_estimate(rng, tmp_path):
    """Nor is one made again when nothing but labels comes."""
    logits, labels = drawn(rng, 2000, 4)
    estimator = PerformanceEstimator({"logits": logits[:1000], "labels": labels[:1000]})
    save_predictions(tmp_path / "a.npz", {"logits": logits[1000:]})
    save_predictions(tmp_path / "b.npz", {"logits": logits[:0]})
    watch = Monitor().update_file(tmp_path / "a.npz", estimator=estimator)
    with pytest.warns(UserWarning, match=r"b\.npz has no labelled examples: its window is empty"):
        watch.update_file(tmp_path / "b.npz", estimator=estimator)
    assert [row["promise"] for row in watch.report().windows] == ["holds", ""]
    with pytest.raises(ValueError, match=r"b\.npz: nothing to measure"):
        estimator.estimate(tmp_path / "b.npz")
    estimator.window_estimate = None  # type: ignore[method-assign, assignment]  # not callable
    save_predictions(tmp_path / "c.npz", {"logits": logits[1000:], "labels": labels[1000:]})
    assert watch.update_file(tmp_path / "c.npz", estimator=estimator).seen == 1000


@pytest.mark.parametrize("shards", [1, 3])
def test_the_estimate_of_a_window_is_that_of_its_new_examples(rng, tmp_path, shards):
    """As of the last week every night, in whatever order and with labels of other days."""
    logits, labels = drawn(rng, 3600, 4)
    estimator = PerformanceEstimator({"logits": logits[:1200], "labels": labels[:1200]})
    logits[2400:] *= 1.1
    days = slice(1200, 2400), slice(2400, 3600)
    week = np.random.default_rng(1).permutation(np.arange(1200, 3600))
    save_predictions(tmp_path / "first.npz", {"logits": logits[days[0]]})
    known = np.where(week < 2000, labels[week], -100)
    for i, part in enumerate(np.array_split(np.arange(2400), shards)):
        shard = {"logits": logits[week[part]], "labels": known[part]}
        (tmp_path / "week").mkdir(exist_ok=True)
        save_predictions(tmp_path / "week" / f"{i}.npz", shard)
    watch = Monitor().update_file(tmp_path / "first.npz", estimator=estimator)
    watch.update_file(tmp_path / "week", estimator=estimator)
    assert [row["n"] for row in watch.report().windows] == [800, 0]
    for row, day in zip(watch.report().windows, days, strict=True):
        alone = estimator.estimate(logits[day])
        assert row["estimate"] == pytest.approx(alone["accuracy"].value, rel=1e-9)
        assert row["estimate_low"] == pytest.approx(alone["accuracy"].low, rel=1e-9)
        assert row["promise"] == alone.status
