"""Small training runs, and the same by hand."""

import csv
import io
import math
from typing import Any

import numpy as np
import torch

from benchmarks.train.images import ImageSplit, TrainingSplits
from benchmarks.train.recipe import Recipe
from benchmarks.train.trainer import Trainer

CLASSES = 4
NEAR: dict[str, Any] = {"rtol": 1e-3, "atol": 2e-4}
"""Rounding differs by 1e-7, but where that turns a unit on or off a step differs by 1e-5."""


def noisy_images(seed, count):
    """Images whose mean brightness hints at their class."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(count) % CLASSES).astype(np.int64)
    images = rng.normal(60 + 30 * labels[:, None, None, None], 50, (count, 3, 8, 8))
    return ImageSplit(images.clip(0, 255).astype(np.uint8), labels)


def small_splits(train=26, val=16, test=12):
    return TrainingSplits(noisy_images(1, train), noisy_images(2, val), noisy_images(3, test))


def short_recipe(**changes):
    """A recipe of a few steps."""
    settings = {"network": "tiny", "epochs": 1, "batch": 8, "augment": False}
    return Recipe(**{**settings, **changes})


def make_trainer(folder, recipe=None, splits=None, **options):
    splits = splits or small_splits()
    return Trainer(splits, CLASSES, recipe or short_recipe(), folder, device="cpu", **options)


def assert_same(values, expected, **near):
    """Compare dictionaries of tensors, bit for bit unless a tolerance is passed."""
    assert values.keys() == expected.keys()
    for name in values:
        torch.testing.assert_close(
            values[name], expected[name], **(near or {"rtol": 0, "atol": 0}), msg=name
        )


def read_rows(text):
    return list(csv.DictReader(io.StringIO(text)))


def without_seconds(log):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in log]


def standardised_by_hand(images, like):
    """Images standardised by the moments of others, in double precision."""
    mean, deviation = (f(like / 255, (0, 2, 3), keepdims=True) for f in (np.mean, np.std))
    return torch.tensor((images / 255 - mean) / deviation, dtype=torch.float32)


class PlainDescent:
    """Gradient descent with momentum and decay; only the network's gradient is clipped."""

    def __init__(self, network, loss, recipe):
        self.clipped, self.free = list(network.parameters()), list(loss.parameters())
        self.recipe = recipe
        self.speed = [torch.zeros_like(p) for p in (*self.clipped, *self.free)]
        self.norms = []

    @torch.no_grad()
    def step(self, value, rate):
        parameters = [*self.clipped, *self.free]
        slopes = list(torch.autograd.grad(value, parameters))
        norm = math.sqrt(sum(float(s.double().square().sum()) for s in slopes[: len(self.clipped)]))
        self.norms.append(norm)
        for i, weight in enumerate(parameters):
            slope = slopes[i]
            if i < len(self.clipped):
                slope = slope * min(1, self.recipe.clip / norm)
            slope = slope + self.recipe.decay * weight
            self.speed[i] = self.recipe.momentum * self.speed[i] + slope
            weight -= rate * self.speed[i]
