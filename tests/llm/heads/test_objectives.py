"""Objectives of temperature heads against autograd over full logits."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from calibrant._core.chunks import examples
from calibrant.calibrators.logpartition import tabulate
from calibrant.llm.heads.fit import OBJECTIVES


def tokens(n=60, classes=12, seed=0):
    rng = np.random.default_rng(seed)
    logits = 2.5 * rng.normal(size=(n, classes)).astype(np.float32)
    labels = (logits + 2 * rng.gumbel(size=logits.shape)).argmax(-1)
    weight = rng.uniform(0.5, 2, n)
    u = rng.uniform(-1.5, 1.0, n)
    return logits, labels, weight, u


def by_logits(name, logits, labels, weight, u, *, alpha=0.5, over=None, weighting="paper"):
    """Objectives by their definitions, from all logits, for autograd."""
    scaled = logits * u.exp()[:, None]
    logs, share = scaled.log_softmax(-1), weight / weight.sum()
    right = logits.argmax(-1) == labels
    own = F.nll_loss(logs, labels, reduction="none")
    p = logs.amax(-1).exp()
    if name == "nll":
        return (share * own).sum()
    if name == "bce":
        return (share * F.binary_cross_entropy(p, right.to(p), reduction="none")).sum()
    if name == "brier":
        return (share * (p - right.to(p)) ** 2).sum()
    if name == "smart":
        centres = (torch.arange(15, dtype=p.dtype) + 0.5) / 15
        part = (-((p[:, None] - centres) ** 2) / (2 * 0.05**2)).softmax(-1)
        mass = (share[:, None] * part).sum(0)
        gap = (share[:, None] * part * (p - right.to(p))[:, None]).sum(0) / mass
        return (mass * ((gap**2 + 1e-6).sqrt() - 1e-3)).sum()
    first = logs if over is None else logs.gather(-1, logits.topk(over).indices)
    flat = -first.mean(-1)
    if weighting == "paper":
        return (share * torch.where(right, (1 - alpha) * own, alpha * flat)).sum()
    good, bad = weight[right], weight[~right]
    n_good, n_bad = good.sum(), bad.sum()
    hard = (good * own[right]).sum() / n_good
    smooth = (bad * flat[~right]).sum() / n_bad
    total = (1 - alpha) * n_bad * hard + alpha * n_good * smooth
    return total / ((1 - alpha) * n_bad + alpha * n_good)


CASES = [
    *((name, {}) for name in ("nll", "bce", "brier", "smart")),
    ("selective", {"alpha": 0.3}),
    ("selective", {"alpha": 0.3, "over": 5}),
    ("selective", {"alpha": 0.3, "weighting": "official"}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_objective_against_autograd(name, options):
    logits, labels, weight, u = tokens()
    records = tabulate(examples(logits, labels, weight))
    leaf = torch.tensor(u, requires_grad=True)
    given = torch.from_numpy(logits).double(), torch.from_numpy(labels), torch.from_numpy(weight)
    wanted = by_logits(name, *given, leaf, **options)
    wanted.backward()
    found = OBJECTIVES[name](records, u, **options)
    assert abs(found.value - float(wanted.detach())) < 1e-5
    assert leaf.grad is not None
    assert float(leaf.grad.abs().max()) > 1e-4
    np.testing.assert_allclose(found.gradient, leaf.grad, rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_objective_against_differences(name, options):
    logits, labels, weight, u = tokens(8)
    records = tabulate(examples(logits, labels, weight))
    measure = partial(OBJECTIVES[name], **options)
    gradient = measure(records, u).gradient
    for i in range(8):
        step = 1e-3 * (np.arange(8) == i)
        slope = (measure(records, u + step).value - measure(records, u - step).value) / 2e-3
        assert abs(slope - gradient[i]) < 2e-5 + 2e-3 * abs(gradient[i])
