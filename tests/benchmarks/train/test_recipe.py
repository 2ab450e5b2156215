"""Recipes: defaults of the papers, the schedule, and refused settings."""

import dataclasses

import numpy as np
import pytest

from benchmarks.train.recipe import Recipe


def test_defaults_are_those_of_the_papers():
    recipe = Recipe()
    values = (recipe.batch, recipe.rate, recipe.momentum, recipe.decay, recipe.clip, recipe.epochs)
    assert values == (128, 0.1, 0.9, 5e-4, 2.0, 350)
    assert recipe.augment
    assert recipe.loss_options == {}
    assert Recipe(loss="fedlas_ls").loss_options == {"theta": 0.95}
    assert Recipe(loss="fedlas_ls", loss_options={"theta": 0.5}).loss_options == {"theta": 0.5}
    mixed = Recipe(loss="fedlas_mbls", loss_options={"alpha": 0.2}).loss_options
    assert mixed == {"theta": 0.95, "alpha": 0.2}
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.epochs = 3  # type: ignore[misc]


def test_rate_falls_after_the_same_fractions_of_any_number_of_epochs():
    rates = [Recipe().rate_at(epoch) for epoch in range(350)]
    np.testing.assert_allclose(rates, [0.1] * 150 + [0.01] * 100 + [0.001] * 100)
    rates = [Recipe(epochs=7, rate=2.0).rate_at(epoch) for epoch in range(7)]
    np.testing.assert_allclose(rates, [2, 2, 2, 0.2, 0.2, 0.02, 0.02])
    assert Recipe(epochs=1).rate_at(0) == 0.1  # a short run starts at its full rate
    from_json = {"milestones": [0.5]}
    assert Recipe(**from_json).milestones == (0.5,)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network": "vgg"}, "unknown network 'vgg': choose from resnet18, .*tiny"),
        ({"loss": "hinge"}, "unknown loss 'hinge': choose from ce, .*fedlas_mbls"),
        ({"epochs": 0}, "epochs must be a whole number, at least 1, got 0"),
        ({"batch": -1}, "batch must be a whole number, at least 1, got -1"),
        ({"mixup": -1.0}, "mixup must be at least 0"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**changes)


def test_bad_options_of_a_loss_are_refused():
    with pytest.raises(TypeError, match="ls has no option 'beta': its options are alpha"):
        Recipe(loss="ls", loss_options={"beta": 1}).make_loss(4, 26)
    with pytest.raises(ValueError, match="theta must be a number, above 0 and at most 1, got 2"):
        Recipe(loss="fedlas_ls", loss_options={"theta": 2}).make_loss(4, 26)
