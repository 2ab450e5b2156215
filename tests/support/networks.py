"""Fits of calibrators with a network, and their objectives as slow definitions."""

import warnings
from typing import Any
from unittest import mock

import numpy as np
from scipy.special import log_softmax

from calibrant.calibrators import network


def at_rate(rate):
    """Let networks learn at another rate inside a ``with`` block."""
    return mock.patch.object(network, "_RATE", rate)


def fitted(calibrator, logits, labels, **options) -> Any:
    """Fit without a word about small samples or the pointwise objective."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* parameters for .* examples")
        warnings.filterwarnings("ignore", 'objective "pointwise"')
        return calibrator.fit(logits, labels, **options)


def masked(rng, logits, labels, share=0.2):
    hidden = rng.random(logits.shape) < share
    hidden[np.arange(len(labels)), labels] = False
    return np.where(hidden, -np.inf, logits)


def margins(logits):
    """Largest minus second largest of each row."""
    return np.diff(np.sort(logits, -1)[:, -2:], axis=-1)[:, 0]


def value_of(objective, logits, labels, temperature, share, likelihood):
    """The objectives of the paper's table 3 on the exact softmax."""
    sigma, delta = 0.05, 1e-3
    log_probs = log_softmax(logits / temperature[:, None], -1)
    probs, n = np.exp(log_probs), np.arange(len(labels))
    own = -log_probs[n, labels]
    brier = ((probs - np.eye(probs.shape[1])[labels]) ** 2).sum(-1)
    flat = np.array([-row[row > -np.inf].mean() for row in log_probs])
    proper = {
        "nll": own,
        "brier": brier,
        "mse": brier / probs.shape[1],
        "ls": 0.95 * own + 0.05 * flat,
    }
    if objective in proper:
        return share @ proper[objective]
    confidence, right = probs.max(-1), probs.argmax(-1) == labels
    centres = (np.arange(15) + 0.5) / 15
    part = np.exp(-((confidence[:, None] - centres) ** 2) / (2 * sigma**2))
    part /= part.sum(-1, keepdims=True)
    mass, gap = share @ part, (share * (confidence - right)) @ part
    error = np.sqrt((right[:, None] - centres) ** 2 + delta**2) - delta
    soft = {
        "charbonnier": (mass * (np.sqrt((gap / mass) ** 2 + delta**2) - delta)).sum(),
        "soft_ece": np.abs(gap).sum(),
        "pointwise": share @ (part * error).sum(-1),
    }
    return soft[objective] + likelihood * share @ own
