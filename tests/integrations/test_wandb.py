import json

import pytest

import calibrant as cal
from calibrant.integrations.logged import BIN_COLUMNS, bin_rows
from calibrant.integrations.wandb import log_calibration
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
        log_calibration(run, result, step=5, report=Page())
        run.log({}, step=6)  # ends step 5
        logged = dict(run.summary)
        files = {path.suffix: path for path in tmp_path.rglob("media/**/*.*")}
    assert logged["_step"] == 5
    numbers = {name: v for name, v in logged.items() if isinstance(v, (int, float))}
    check_scalars(numbers, logits, labels, metrics=FEW)
    assert {*files} == {".html", ".json", ".png"}
    table = json.loads(files[".json"].read_text("utf-8"))
    assert table["columns"] == [*BIN_COLUMNS]
    assert table["data"] == bin_rows(result)
    assert "all is well" in files[".html"].read_text("utf-8")
