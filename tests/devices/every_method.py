"""Every method fitted and called on a device: ``python -m tests.devices.every_method cuda``."""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import calibrant as cal
from tests.support.calibrators import EVERY_METHOD


def attempts(device, n=4000) -> Iterator[tuple[str, torch.device, torch.Tensor]]:
    """Yield the name of each method, where it answers, and how far that is from the CPU."""
    torch.manual_seed(0)
    logits, labels = 2 * torch.randn(n, 10), torch.randint(0, 10, (n,))
    logits[torch.arange(n), labels] += 4 * torch.rand(n)
    odds = 2 * torch.randn(n)
    tags, applies = 2 * torch.randn(n, 5), (torch.rand(n, 5) < 0.4).long()
    features = torch.randn(n, 32)
    weight, bias = torch.randn(10, 32), torch.zeros(10)
    people = {"age": np.arange(n) % 60, "site": np.array(["A", "B", "C"])[np.arange(n) % 3]}
    beside = {"gc": features, "procal": features, "fc": features, "multicalibration": people}
    methods: dict[str, Any] = {
        **EVERY_METHOD,
        **{f"tags: {k}": v for k, v in cal.TAG_CALIBRATORS.items()},
    }
    for name, kind in methods.items():
        options = {"columns": ["age", "site"]} if name == "multicalibration" else {}
        a, b = (tags, applies) if kind.multilabel else (logits, labels)
        if kind.two_classes_only:
            a, b = odds, (torch.rand(n) < 0.4).long()
        if name == "fc":
            a = features @ weight.T
        extra: dict[str, Any] = {"features": beside[name]} if name in beside else {}
        head: dict[str, Any] = {"head": (weight, bias)} if name == "fc" else {}
        want = kind(**options).fit(a, b, **extra, **head).predict_proba(a, *extra.values())
        extra = {k: v.to(device) if name != "multicalibration" else v for k, v in extra.items()}
        fitted = kind(**options).fit(a.to(device), b.to(device), **extra, **head)
        have = fitted.predict_proba(a.to(device), *extra.values())
        yield name, have.device, (have.cpu() - want).abs()


def others(device, n=4000) -> None:
    """MaC-Cal, a comparison and a report of what is on a device."""
    torch.manual_seed(0)
    labels, features = torch.randint(0, 10, (n,)), torch.randn(n, 64)
    logits = 2 * torch.randn(n, 10) + 3 * torch.nn.functional.one_hot(labels, 10)
    there, targets = logits.to(device), labels.to(device)
    retrained = cal.MaCCal(epochs=3).fit(features.to(device), targets)
    assert retrained(features.to(device)[:5]).device == there.device
    arrays = {"val_logits": there, "val_labels": targets, "test_logits": there}
    print(cal.compare({**arrays, "test_labels": targets}, methods=["smart"], level=None).choice())
    print(cal.compare(there, targets, methods=["ts"], level=None).choice())
    print(cal.report(there, targets, methods=["ts"]).verdict.answer)


if __name__ == "__main__":
    for name, place, difference in attempts(sys.argv[1]):
        print(f"{name:20} {place} {difference.mean():.1e} {difference.max():.1e}")
    others(sys.argv[1])
