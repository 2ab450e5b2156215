"""Fitted objects of every kind, and artifacts that were changed by hand."""

import functools
import json
import warnings

import numpy as np
import torch
from safetensors.torch import load as tensors_of, save as bytes_of

from calibrant.artifacts import objects
from calibrant.calibrators.scaling import TemperatureScaling
from tests.support.calibrators import EVERY_METHOD


def examples(n=400, classes=4, width=6):
    """Logits of a last layer, with the layer, its inputs, and labels that it is too sure about."""
    rng = np.random.default_rng(3)
    features = rng.normal(size=(n, width))
    weight, bias = rng.normal(size=(classes, width)), rng.normal(size=classes)
    logits = features @ weight.T + bias
    labels = (logits / 2 + rng.gumbel(size=logits.shape)).argmax(-1)
    return logits, labels, features, (weight, bias)


def fitted(module):
    classes = 2 if getattr(module, "two_classes_only", False) else 4
    logits, labels, features, head = examples(classes=classes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some have many parameters for so few examples
        return module.fit(logits, labels, features=features, head=head)


@functools.cache
def fitted_kind(kind, **options):
    few = {"candidates": ("ts", "blend")} if kind == "auto" else {}  # all would take long
    return fitted(EVERY_METHOD[kind](**few, **options))


def temperature(value=2.0):
    """A fitted calibrator whose learned value is known."""
    module = TemperatureScaling()
    learned = {"classes_": torch.tensor(3), "temperature_": torch.tensor(float(value))}
    module.load_state_dict(module.state_dict() | learned)
    return module


def write_state(file, kind, state):
    """Write the artifact of an object of a kind that is saved as JSON."""
    tensors = {"state": objects._json_tensor(state)}
    file.write_bytes(objects.packed(objects.Artifact(kind, "", "", {}, {}, tensors)))


def rewrite(file, *, metadata=None, tensors=None, checksum=True):
    """Change an artifact by hand; with a checksum that fits, so that it is not what is refused."""
    content = file.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    about, state = header["__metadata__"], tensors_of(content)
    about = about if metadata is None else metadata(dict(about))
    state = state if tensors is None else tensors(state)
    if checksum and {"config", "extra", "sha256"} <= set(about):
        about["sha256"] = objects._digest(about["config"], about["extra"], state)
    plain = bytes_of(state)
    begin = 8 + int.from_bytes(plain[:8], "little")
    text = json.dumps({"__metadata__": about, **json.loads(plain[8:begin])}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + plain[begin:])
