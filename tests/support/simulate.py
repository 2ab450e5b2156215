"""Data whose truth is known, because the labels were drawn from it."""

import numpy as np
from numpy.typing import NDArray


def drawn(
    rng: np.random.Generator,
    n: int,
    classes: int,
    temperature: float = 1.0,
    *,
    scale: float = 2.0,
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Logits ``(n, classes)``, and labels drawn from ``softmax(logits / temperature)``.

    At temperature 1 the logits are calibrated; above it they are over-confident, below it
    under-confident.
    """
    logits = scale * rng.normal(size=(n, classes))
    noise = rng.gumbel(size=logits.shape)  # the largest of logit + Gumbel noise is a softmax draw
    return logits, (logits / temperature + noise).argmax(-1)


def drawn_pairs(
    rng: np.random.Generator, n: int, gap: float = 0.0, low: float = 0.5, high: float = 1.0
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Confidences uniform in [low, high], right with a probability that is lower by ``gap``."""
    confidence = rng.uniform(low, high, n)
    return confidence, rng.random(n) < confidence - gap


def preferring(logits: NDArray[np.float64], by: float = 3.0) -> NDArray[np.float64]:
    """Return the logits of a model that prefers the first class whatever the input."""
    result: NDArray[np.float64] = logits + by * np.eye(logits.shape[-1])[0]
    return result


def drawn_tags(
    rng: np.random.Generator,
    n: int,
    slope: NDArray[np.float64],
    intercept: NDArray[np.float64],
    means: NDArray[np.float64] | float = 0.0,
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Logits ``(n, tags)``, and labels drawn from ``sigmoid(slope * logits + intercept)``."""
    logits = 2 * rng.normal(size=(n, len(slope))) + means
    chance = 1 / (1 + np.exp(-(slope * logits + intercept)))
    return logits, (rng.random(logits.shape) < chance).astype(np.int64)
