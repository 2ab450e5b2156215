"""The verb monitor."""

import json
import os
import shutil
import warnings
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from calibrant.artifacts import load
from calibrant.cli import cli
from calibrant.data import open_dataset, sample_path, save_predictions
from calibrant.monitor import Monitor
from tests.support.simulate import drawn


@pytest.fixture
def days(rng, tmp_path, monkeypatch):
    """Twelve files, the last four of a model that has become over-confident."""
    monkeypatch.chdir(tmp_path)
    for day in range(1, 13):
        logits, labels = drawn(rng, 500, 5, 1.0 if day <= 8 else 2.5)
        save_predictions(f"day{day}.npz", {"logits": logits, "labels": labels})
    return [f"day{day}.npz" for day in range(1, 13)]


def test_report(run, days):
    code, out, err = run("monitor", *days)
    assert (code, err) == (0, "")
    assert "Recommend a refit: over-confident since window day9.npz" in " ".join(out.split())
    assert out.count("day") >= 12
    code, out, err = run("monitor", *days[:8])
    assert code == 0
    assert "No drift detected" in out
    assert run("monitor", *days, "--fail")[0] == 1
    assert run("monitor", *days[:8], "--fail")[0] == 0


def test_json(run, days):
    code, out, err = run("monitor", *days, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["drift"]["direction"] == "over"
    assert found["drift"]["since"] == "day9.npz"
    assert [row["window"] for row in found["windows"]] == days
    assert found["n"] == 6000
    assert found["alarm"]["examples"] <= 5500


def test_pattern_in_natural_order(run, days):
    code, out, err = run("monitor", "day*.npz", "--json")
    assert (code, err) == (0, "")
    assert [row["window"] for row in json.loads(out)["windows"]] == days
    code, out, err = run("monitor", *sorted(days), "--json")  # as a shell expands it
    assert code == 0
    assert [row["window"] for row in json.loads(out)["windows"]] == sorted(days)
    assert "day12.npz comes before day2.npz" in err


def test_state_continues(run, days):
    assert run("monitor", *days, "--json", "--state", "whole.json")[0] == 0
    for day in days:
        code, out, err = run("monitor", day, "--json", "--state", "s.json", "--tolerance", 0.02)
        assert (code, err) == (0, "")
    assert Path("s.json").read_bytes() == Path("whole.json").read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, again, err = run("monitor", days[-1], "--json", "--state", "s.json")
    assert code == 0
    assert "day12.npz is in the stream already" in err
    before, after = json.loads(out), json.loads(again)
    assert (before["counts"].pop("again"), after["counts"].pop("again")) == (0, 500)
    assert after == before
    code, out, err = run("monitor", days[0], "--state", "s.json", "--tolerance", 0.03)
    assert code == 2
    assert "tolerance" in err


def test_runs_at_the_same_time_lose_no_window(run, days, monkeypatch):
    others: list[Thread] = []

    def working(watch, path, **how):
        """Begin another run while this one works."""
        if not others:
            arguments = ["monitor", days[1], "--state", "s.json"]
            options = {"standalone_mode": False}
            others.append(Thread(target=cli.main, args=[arguments], kwargs=options))
            others[0].start()
            others[0].join(timeout=2)
        return update_file(watch, path, **how)

    update_file = Monitor.update_file
    monkeypatch.setattr(Monitor, "update_file", working)
    assert run("monitor", days[0], "--state", "s.json")[0] == 0
    others[0].join()
    windows = load("s.json", Monitor).report().windows
    assert [row["window"] for row in windows] == days[:2]


def test_a_file_is_known_under_every_path(run, days):
    run("monitor", days[0], "--state", "s.json")
    shutil.copy(days[0], "copy.npz")
    arrays = open_dataset(days[0]).split()
    save_predictions("copy.safetensors", {"logits": arrays.logits, "labels": arrays.labels})
    for name in (f"./{days[0]}", Path(days[0]).resolve(), "copy.npz", "copy.safetensors"):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            code, _, err = run("monitor", name, "--state", "s.json")
        assert code == 0
        assert "is in the stream already" in err
    _, out, _ = run("monitor", "--state", "s.json", "--json")
    assert json.loads(out)["n"] == 500


def test_labels_that_come_later(run, days):
    """A job that runs four times a day on the file of the day, as its labels come."""
    arrays = open_dataset(days[0]).split()
    logits, labels = np.asarray(arrays.logits), arrays.labels
    for share in (0.25, 0.5, 0.75, 1.0):
        known = np.where(np.arange(500) < 500 * share, labels, -100)
        save_predictions("today.npz", {"logits": logits, "labels": known})
        code, out, err = run("monitor", "today.npz", "--state", "s.json", "--json")
        assert (code, err) == (0, "")
    (window,) = json.loads(out)["windows"]
    _, once, _ = run("monitor", days[0], "--json")
    assert {**json.loads(once)["windows"][0], "window": "today.npz"} == pytest.approx(window)


def test_ids_tell_examples_apart(run, days):
    logits = np.tile([[1.0, 0.0], [0.0, 2.0]], (50, 1))
    for day in (1, 2):
        ids = np.arange(100 * day, 100 * day + 100)
        save_predictions("day.npz", {"logits": logits, "labels": np.zeros(100, int), "order": ids})
        code, out, err = run("monitor", "day.npz", "--ids", "order", "--state", "s.json", "--json")
        assert (code, err, json.loads(out)["n"]) == (0, "", 100 * day)
    code, _, err = run("monitor", "day.npz", "--state", "s.json")
    assert code == 2
    assert "recognises its examples by their ids, got logits: pass ids (--ids COLUMN) with" in err


@pytest.mark.skipif(os.name == "nt", reason="Windows has no permission bits")
def test_a_state_keeps_its_permissions(run, days):
    run("monitor", days[0], "--state", "s.json")
    Path("s.json").chmod(0o600)
    run("monitor", days[1], "--state", "s.json")
    assert Path("s.json").stat().st_mode & 0o777 == 0o600
    assert json.loads(run("monitor", "--state", "s.json", "--json")[1])["n"] == 1000


def test_a_missing_state_is_named(run, days):
    code, _, err = run("monitor", "--state", "nope.json")
    assert code == 2
    assert "there is no state nope.json to report on: name FILES to begin one" in err
    code, _, err = run("monitor", days[0], "--state", "nowhere/s.json")
    assert code == 2
    assert "nowhere does not exist; create it first" in err


def test_report_on_a_state(run, days):
    run("monitor", *days, "--state", "s.json")
    before = Path("s.json").read_bytes()
    code, out, _ = run("monitor", "--state", "s.json", "--json")
    assert code == 0
    assert json.loads(out)["n"] == 6000
    assert Path("s.json").read_bytes() == before
    assert run("monitor")[0] == 2
    assert run("monitor", "--state", "none.json")[0] == 2


def test_refused_file_keeps_the_state(run, days):
    run("monitor", days[0], "--state", "s.json")
    before = Path("s.json").read_bytes()
    np.savez("bad.npz", logits=np.full((5, 5), np.nan), labels=np.zeros(5, int))
    code, out, err = run("monitor", days[1], "bad.npz", "--state", "s.json")
    assert (code, out) == (2, "")
    assert "bad.npz" in err
    assert Path("s.json").read_bytes() == before
    assert run("monitor", "nothing*.npz")[0] == 2


def test_calibrator_and_splits(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("fit", sample_path(), "--method", "ts", "-o", "ts")[0] == 0
    given = ("monitor", sample_path(), "--json")
    code, out, _ = run(*given, "--calibrator", "ts", "--split", "val,test")
    assert code == 0
    calibrated = json.loads(out)
    assert [row["n"] for row in calibrated["windows"]] == [5000, 10000]
    assert [row["window"].rpartition(", ")[2] for row in calibrated["windows"]] == ["val", "test"]
    assert calibrated["alarm"] is None
    code, out, _ = run(*given)
    raw = json.loads(out)
    assert raw["drift"]["direction"] == "over"
    assert raw["windows"][0]["ece"] == pytest.approx(0.0424, abs=5e-5)
    code, out, _ = run(*given, "--reference", sample_path())
    assert json.loads(out)["alarm"] is None
    run(*given, "--calibrator", "ts", "--state", "s.json")
    code, _, err = run(*given, "--state", "s.json")
    assert code == 2
    assert "--calibrator" in err


def test_reference_of_a_state(run, days):
    known = ("--reference", days[0])
    assert run("monitor", days[1], *known, "--state", "s.json")[0] == 0
    code, out, _ = run("monitor", days[2], *known, "--state", "s.json", "--json")
    assert code == 0
    assert json.loads(out)["n"] == 1000
    assert json.loads(out)["reference"] is True
    code, _, err = run("monitor", days[3], "--reference", days[4], "--state", "s.json")
    assert code == 2
    assert "begun with another reference" in err
    save_predictions("probs.npz", {"probs": np.full((5, 5), 0.2), "labels": np.zeros(5, int)})
    code, _, err = run("monitor", days[1], "--reference", "probs.npz")
    assert code == 2
    assert "a reference needs logits" in err
