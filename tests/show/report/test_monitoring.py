"""The state of a monitor in the forms of a report."""

import json

import numpy as np
import pytest
import scipy

from calibrant import load, open_dataset, save
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
    assert "calibrant fit recent.npz -o new_calibrator" in page
    assert "--calibrator new_calibrator --state new_watch.json" in page  # of another calibrator


def test_windows_are_named_without_their_folder_and_safely(drifted):
    page = _monitor_page(drifted)
    assert "0 &lt;b&gt;.npz</th>" in page
    assert "<b>.npz" not in page
    assert "days" not in page


def test_a_calm_monitor_says_so(tmp_path):
    page = _monitor_page(watched(tmp_path, [1, 1]))
    assert '<p class="answer">Not so far</p>' in page
    assert "calibrant fit" not in page


@pytest.mark.parametrize("factor", [1, 4])
def test_commands_name_the_columns_the_format_and_the_state(tmp_path, factor):
    path, watch = tmp_path / "day.csv", Monitor()
    data = drawn(800, classes=3, factor=factor)
    table = np.c_[scipy.special.softmax(data["logits"], -1), data["labels"], np.arange(800)]
    np.savetxt(path, table, delimiter=",", header="a,b,c,truth,key", comments="")
    watch.update_file(open_dataset(path, probs=["a", "b", "c"], labels="truth"), ids="key")
    save(watch, tmp_path / "w.json")
    report = load(tmp_path / "w.json", Monitor).report()  # as without FILES
    text = _monitor_markdown(report, "runs/w.json")
    named = "--labels truth --probs a,b,c"
    if factor == 1:
        assert f"monitor tomorrow.csv {named} --ids key --state runs/w.json --fail" in text
        return
    new = "--calibrator new_calibrator --state runs/new_w.json --fail"
    assert f"calibrant fit recent.csv {named} -o new_calibrator\n" in text
    assert f"calibrant monitor today.csv {named} --ids key {new}" in text


def test_labels_in_another_order_are_doubted_before_a_refit(tmp_path):
    data, path = drawn(1500, classes=3), tmp_path / "day.npz"
    np.savez(path, logits=data["logits"], labels=np.roll(data["labels"], 1))
    report = Monitor().update_file(path).report()
    assert report.advice().startswith("Check the data before a refit. Accuracy (")
    assert "no better than that of guessing" in report.advice()
    assert "Recommend" not in report.advice()
    text = _monitor_markdown(report)
    assert "**Has the model drifted? Check the data first.**" in text
    assert "If the data are right: fit a calibrator" in text


def test_all_forms_are_written(tmp_path, drifted):
    for suffix in (".html", ".md", ".json"):
        save_monitor_report(drifted, tmp_path / f"drift{suffix}")
    stored = json.loads((tmp_path / "drift.json").read_text("utf-8"))
    assert stored["alarm"]["window"] == drifted.alarm.window
    assert np.isfinite(stored["e_value"])
