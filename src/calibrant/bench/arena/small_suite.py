"""The small suite: generated data with known faults, and a part of the embedded sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from calibrant._core.checks import FloatArray, IntArray
from calibrant.bench.arena.tasks import Examples, FileTask, Predictions, stratified
from calibrant.data import sample_path

Drawn = tuple[FloatArray, IntArray]


def shifted_binary(rng: np.random.Generator, n: int) -> Drawn:
    """Log-odds that are too high by 2, as after training on balanced classes."""
    logits = 2 * rng.normal(size=n)
    return _columns(logits), (rng.random(n) < expit(logits - 2)).astype(np.int64)


def curved_binary(rng: np.random.Generator, n: int) -> Drawn:
    """Log-odds that are too extreme on one side only, as of a naive Bayes classifier."""
    truth = 2 * rng.normal(size=n)
    return _columns(np.where(truth > 0, 4, 1) * truth), (rng.random(n) < expit(truth)).astype(
        np.int64
    )


def calibrated(rng: np.random.Generator, n: int) -> Drawn:
    """Ten classes with honest logits, where the best is to do nothing."""
    return _drawn(rng, 2 * rng.normal(size=(n, 10)))


def over_confident(rng: np.random.Generator, n: int) -> Drawn:
    """A hundred classes with logits that are twice too large."""
    logits, labels = _drawn(rng, 3 * rng.normal(size=(n, 100)))
    return 2 * logits, labels


def biased_choices(rng: np.random.Generator, n: int) -> Drawn:
    """Four options of which the model prefers the first, whatever it stands for."""
    logits, labels = _drawn(rng, 1.5 * rng.normal(size=(n, 4)))
    return 1.5 * logits + np.array([1.5, 0, 0, -0.5]), labels


def _columns(log_odds: FloatArray) -> FloatArray:
    return np.stack([np.zeros_like(log_odds), log_odds], -1)


def _drawn(rng: np.random.Generator, logits: FloatArray) -> Drawn:
    """Return logits with labels drawn from their softmax."""
    return logits, (logits + rng.gumbel(size=logits.shape)).argmax(-1)


@dataclass(frozen=True)
class GeneratedTask:
    """Data drawn from a world whose truth is known."""

    draw: Callable[[np.random.Generator, int], Drawn]
    n_fit: int
    n_test: int
    suite: str = "small"

    @property
    def name(self) -> str:
        """Name of the world with the number of examples."""
        return f"{self.draw.__name__}_{self.n_fit}"

    @property
    def dataset(self) -> str:
        """Name of the world."""
        return self.draw.__name__

    def read(self) -> Predictions:
        """Return examples, always the same ones."""
        rng = np.random.default_rng(17)
        fit, test = (Examples(*self.draw(rng, n)) for n in (self.n_fit, self.n_test))
        return Predictions(fit, test)


@dataclass(frozen=True)
class SampleTask:
    """A part of the predictions that come with the package: a ResNet-50 on CIFAR-10."""

    n_fit: int
    n_test: int
    suite: str = "small"
    dataset: str = "cifar10"

    @property
    def name(self) -> str:
        """Name with the number of examples."""
        return f"cifar10_resnet50_{self.n_fit}"

    def read(self) -> Predictions:
        """Return examples with their share of every class, always the same ones."""
        whole = FileTask(str(sample_path()), self.suite, self.name, self.dataset).read()
        fit, test = (
            Examples(side.logits, side.labels).at(stratified(side.labels, n, 17))
            for side, n in ((whole.fit, self.n_fit), (whole.test, self.n_test))
        )
        return Predictions(fit, test)


def small_suite() -> list[GeneratedTask | SampleTask]:
    """Return the tasks of the small suite, which takes half a minute for all methods."""
    return [
        GeneratedTask(shifted_binary, 200, 4000),
        GeneratedTask(shifted_binary, 2000, 4000),
        GeneratedTask(curved_binary, 1000, 4000),
        GeneratedTask(calibrated, 100, 4000),
        GeneratedTask(calibrated, 1000, 4000),
        GeneratedTask(over_confident, 2000, 2000),
        GeneratedTask(biased_choices, 1000, 4000),
        SampleTask(1000, 4000),
    ]
