"""Fitted calibrators to export, and how to run the files."""

import warnings
from functools import cache
from typing import Any

import numpy as np
import onnxruntime
import torch

from calibrant.calibrators.scaling import TemperatureScaling
from tests.support.calibrators import EVERY_METHOD

CLASSES, WIDTH = 100, 16
FEWER = {
    **dict.fromkeys(["vector", "matrix", "dirichlet"], 20),
    **{name: 2 for name, kind in EVERY_METHOD.items() if kind.two_classes_only},
}
"""Numbers of classes of methods whose fits take long, or that take only two."""

QUICK: dict[str, dict[str, Any]] = {
    "matrix": {"off_diagonal": 1e4, "intercept": 1.0},
    "dirichlet": {"off_diagonal": 1e4, "intercept": 1.0},
    "cts": {"passes": 1},
    "gc": {"partitions": 3},
    "auto": {"candidates": ["none", "ts"]},
}
"""Options of methods whose fits or exports take long."""


def simulated(n, seed=0, classes=CLASSES):
    """Features, over-confident logits and labels."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n, WIDTH))
    weight, bias = np.random.default_rng(7).normal(size=(classes, WIDTH)), np.zeros(classes)
    truth = features @ weight.T
    labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    return {
        "logits": (2 * truth).astype("float32"),
        "labels": labels,
        "features": features.astype("float32"),
        "head": (2 * weight, bias),
    }


@cache
def fitted(name):
    """A method on several classes, or with "/1" behind its name on log-odds."""
    name, _, one = name.partition("/")
    data = simulated(800, classes=FEWER.get(name, CLASSES))
    if one:
        data["logits"], data["labels"] = data["logits"][:, 0], data["labels"] % 2
        data["head"] = tuple(part[:1] for part in data["head"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few examples for many parameters
        return EVERY_METHOD[name](**QUICK.get(name, {})).fit(**data).eval()


class Shifted(TemperatureScaling):
    """Divides by the temperature after the first feature was added, and so needs features."""

    needs_features = True
    keeps_argmax = False

    def _fit(self, given, context):
        self._labelled_features(given, context)
        super()._fit(given, context)

    def _transform(self, logits, top, features):
        return super()._transform(logits + features[..., :1] * torch.sign(logits + 1), top, None)


def shifted():
    """A calibrator that needs features."""
    return Shifted().fit(**simulated(300)).eval()


def load_file(path):
    """A function that gives the output of an exported file for arrays."""
    if str(path).endswith(".onnx"):
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [one.name for one in session.get_inputs()]
        return lambda *inputs, **named: session.run(
            None, named or dict(zip(names, inputs, strict=True))
        )[0]
    program = torch.export.load(path).module()

    def run(*inputs, **named):
        tensors = {name: torch.from_numpy(value) for name, value in named.items()}
        with torch.no_grad():
            return program(*map(torch.from_numpy, inputs), **tensors).numpy()

    return run


def run_file(path, *inputs, **named):
    """Output of an exported file for arrays."""
    return load_file(path)(*inputs, **named)


def softmax(logits):
    """Probabilities in float64."""
    z = logits.astype("float64") - logits.max(-1, keepdims=True)
    return np.exp(z) / np.exp(z).sum(-1, keepdims=True)
