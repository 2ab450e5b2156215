"""The state of a monitor in the forms of a report."""

import json

import numpy as np
import pytest

from calibrant.monitor import Monitor
from calibrant.show.monitor import _monitor_markdown, _monitor_page
from calibrant.show.report import save_monitor_report
from tests.show.report.conftest import drawn


def watched(folder, factors):
    monitor = Monitor()
    for day, factor in enumerate(factors):
        path = folder / f"{day} <b>.npz"
        np.savez(path, **drawn(400, factor=factor, seed=day))
        monitor.update_file(str(path))
    return monitor.report()


@pytest.fixture(scope="module")
def drifted(tmp_path_factory):
    return watched(tmp_path_factory.mktemp("days"), [1, 1, 4, 4])


def test_an_alarm_is_the_answer(drifted):
    page, text = _monitor_page(drifted), _monitor_markdown(drifted)
    assert '<p class="answer">Yes</p>' in page
    assert "Recommend a refit" in page
    assert "🔴 **Has the model drifted? Yes.**" in text
    assert "calibrant fit recent.npz" in page


def test_windows_are_named_without_their_folder_and_safely(drifted):
    page = _monitor_page(drifted)
    assert "0 &lt;b&gt;.npz</th>" in page
    assert "<b>.npz" not in page
    assert "days" not in page


def test_a_calm_monitor_says_so(tmp_path):
    page = _monitor_page(watched(tmp_path, [1, 1]))
    assert '<p class="answer">Not so far</p>' in page
    assert "calibrant fit" not in page


def test_all_forms_are_written(tmp_path, drifted):
    for suffix in (".html", ".md", ".json"):
        save_monitor_report(drifted, tmp_path / f"drift{suffix}")
    stored = json.loads((tmp_path / "drift.json").read_text("utf-8"))
    assert stored["alarm"]["window"] == drifted.alarm.window
    assert np.isfinite(stored["e_value"])
