"""AdaFocal: the exponent follows the gap of each bin."""

import math

import numpy as np
import pytest
import torch
from scipy.special import softmax

from calibrant.losses.focal import AdaFocal
from tests.support.losses import value


def test_adafocal_follows_the_gap_of_each_bin():
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.55, 0.99, 4000)
    right = rng.random(4000) < confidence - 0.2  # over-confident by 0.2
    odds = np.log(confidence / (1 - confidence))
    logits = torch.from_numpy(np.stack([odds, np.zeros(4000)], -1))
    loss = AdaFocal(bins=4)
    loss.observe(logits, torch.from_numpy(np.where(right, 0, 1)))
    np.testing.assert_allclose(loss.gamma_, math.exp(0.2), rtol=0.05)
    np.testing.assert_allclose(loss.edges_, np.quantile(confidence, [0.25, 0.5, 0.75]), atol=1e-3)


def test_adafocal_changes_sign_and_stays_within_limits():
    loss = AdaFocal(bins=3)
    gamma = torch.tensor([0.21, -0.21, 19.9])
    moved = loss._moved(gamma, torch.tensor([-0.5, 0.5, 0.5]))
    torch.testing.assert_close(moved, torch.tensor([-0.2, 0.2, 20.0]))


def test_adafocal_with_negative_exponents_is_inverse_focal(data):
    loss = AdaFocal(bins=1).double()
    loss.gamma_.fill_(-1.5)
    p = softmax(data[0].numpy(), -1)[np.arange(40), data[1].numpy()]
    assert value(loss(*data)) == pytest.approx(np.mean(-((1 + p) ** 1.5) * np.log(p)))
