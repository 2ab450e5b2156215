import json
from typing import Any, cast

import numpy as np
import pytest

import calibrant as cal
from calibrant.integrations.wandb import BIN_COLUMNS, _bin_rows, log_calibration
from tests.support.evaluations import FEW, check_scalars, predictions


class Page:
    def save(self, path):
        path.write_text("<p>all is well</p>", encoding="utf-8")


def test_a_run_that_is_offline_has_values_bins_figure_and_report(rng, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    logits, labels = predictions(rng)
    result = cal.evaluate(logits, labels, metrics=FEW)
    settings = wandb.Settings(console="off", disable_git=True, x_disable_stats=True, silent=True)
    with wandb.init(mode="offline", dir=tmp_path, settings=settings) as run:
        log_calibration(run, result, step=5, report=cast(Any, Page()))
        run.log({}, step=6)  # ends step 5
        logged = dict(run.summary)
        files = {path.suffix: path for path in tmp_path.rglob("media/**/*.*")}
    assert logged["_step"] == 5
    numbers = {name: v for name, v in logged.items() if isinstance(v, (int, float))}
    check_scalars(numbers, logits, labels, metrics=FEW)
    assert {*files} == {".html", ".json", ".png"}
    table = json.loads(files[".json"].read_text("utf-8"))
    assert table["columns"] == [*BIN_COLUMNS]
    assert table["data"] == _bin_rows(result)
    assert "all is well" in files[".html"].read_text("utf-8")


def test_rows_of_the_bins_add_up_to_the_error(rng):
    logits, labels = predictions(rng, n=300)
    result = cal.evaluate(logits, labels, metrics=FEW)
    rows = [dict(zip(BIN_COLUMNS, row, strict=True)) for row in _bin_rows(result)]
    assert sum(row["examples"] for row in rows) == result.n == (labels != -100).sum()
    gaps = [row["examples"] * abs(row["confidence"] - row["accuracy"]) for row in rows]
    assert sum(gaps) / result.n == pytest.approx(result["ece"].value, rel=1e-12)
    for row in rows:
        assert row["from"] < row["confidence"] <= row["to"]
        assert row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"]
    confidence = np.exp(logits - np.logaddexp.reduce(logits, -1)[:, None]).max(-1)
    last = [c > 14 / 15 for c in confidence[labels != -100]]
    assert rows[-1]["examples"] == sum(last)
