"""Losses by name, with what they need."""

import torch

from calibrant.losses import LOSSES


def gradient(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def value(number):
    return float(torch.as_tensor(number).detach())


STATISTICS = ("mmce", "mdca", "soft_ece", "avuc")
STATEFUL = ("adafocal", "crl", "fedlas_ls", "fedlas_mbls")


def made(name, classes=5, examples=50, **options):
    return LOSSES[name](classes=classes, examples=examples, **options)


def called(loss, logits, labels, width=7):
    """Any loss, with all that it may want."""
    flat = torch.arange(labels.numel()) % 50
    features = torch.linspace(-2, 3, labels.numel() * width, dtype=torch.float64)
    return loss(logits, labels, features.reshape(*labels.shape, width), flat)
