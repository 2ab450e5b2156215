"""The log of a run as CSV and in TensorBoard, and statistics of the gate of FeDLaS."""

import math
import sys
import types

import numpy as np
import pytest
import torch

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


@pytest.mark.parametrize(("loss", "alpha"), [("fedlas_ls", 0.05), ("fedlas_mbls", 0.1)])
def test_statistics_are_those_of_the_signs_and_weights_of_each_batch(tmp_path, loss, alpha):
    trainer = make_trainer(tmp_path, short_recipe(loss=loss, epochs=3))
    batches = []
    trainer.loss.register_forward_hook(
        lambda module, args, _: batches.append((args[3].tolist(), module.last))
    )
    trainer.run()
    before: dict[int, float] | None = None
    for epoch, row in enumerate(trainer.log):
        signs: dict[int, float] = {}
        weights: list[float] = []
        for index, (batch_signs, batch_weights) in batches[4 * epoch :][:4]:
            signs |= dict(zip(index, batch_signs.tolist(), strict=True))
            weights += batch_weights.tolist()
        assert len(signs) == 26
        assert row["gate_positive"] == pytest.approx(sum(s > 0 for s in signs.values()) / 26)
        assert row["smoothing_lowered"] == pytest.approx(np.mean(np.array(weights) < alpha))
        assert row["smoothing_ratio"] == pytest.approx(np.mean(weights) / alpha, rel=1e-5)
        if before is None:
            assert math.isnan(row["gate_flips"])
        else:
            flips = sum(signs[i] != before[i] for i in signs)
            assert row["gate_flips"] == pytest.approx(flips / 26)
        before = signs


def test_changed_signs_are_counted(tmp_path):
    trainer = make_trainer(tmp_path, short_recipe(loss="fedlas_ls", epochs=2))
    with torch.no_grad():
        trainer.loss.gate[2].bias.copy_(torch.tensor([0.0, 50.0]))

    def turn(done, _):
        if done == 5:  # after the first batch of the second epoch, which was still positive
            with torch.no_grad():
                trainer.loss.gate[2].bias.copy_(torch.tensor([50.0, 0.0]))

    trainer.run(turn)
    first, second = trainer.log
    assert (first["gate_positive"], second["gate_positive"]) == (1, pytest.approx(8 / 26))
    assert second["gate_flips"] == pytest.approx(18 / 26)
