"""Statistics of the gate of FeDLaS against its answers."""

import math

import numpy as np
import pytest
import torch

from tests.support.training import make_trainer, short_recipe


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
