"""The log of a run as CSV and in TensorBoard."""

import sys
import types

import numpy as np
import pytest

from tests.support.training import make_trainer, read_rows, short_recipe


def test_log_file_has_the_figures_of_each_epoch(tmp_path):
    trainer = make_trainer(tmp_path, short_recipe(epochs=2, loss="fedlas_ls"))
    trainer.run()
    rows = read_rows((tmp_path / "log.csv").read_text())
    for row, expected in zip(rows, trainer.log, strict=True):
        assert list(row) == list(expected)
        np.testing.assert_allclose(
            [float(v) for v in row.values()], list(expected.values()), rtol=1e-5
        )


def test_missing_tensorboard_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        make_trainer(tmp_path, tensorboard=True)


def test_each_epoch_is_passed_to_tensorboard_once(tmp_path, monkeypatch):
    calls: list[object] = []

    class Writer:
        def __init__(self, folder):
            assert folder == str(tmp_path)

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def flush(self):
            calls.append("flush")

    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    trainer = make_trainer(tmp_path, short_recipe(epochs=2), tensorboard=True)
    trainer.run()
    expected: list[object] = []
    for epoch, row in enumerate(trainer.log, 1):
        expected += [*((name, value, epoch) for name, value in row.items()), "flush"]
    assert calls == expected


@pytest.mark.filterwarnings("ignore")  # TensorBoard's own
def test_tensorboard_reads_the_log(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer = make_trainer(tmp_path, short_recipe(epochs=2), tensorboard=True)
    trainer.run()
    events = reader.EventAccumulator(str(tmp_path)).Reload()
    steps = [(event.step, event.value) for event in events.Scalars("loss")]
    expected = [(row["epoch"], row["loss"]) for row in trainer.log]
    np.testing.assert_allclose(steps, expected, rtol=1e-6)
