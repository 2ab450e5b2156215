"""FeDLaS against its definition, and what its gate learns."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import expit, log_softmax
from torch.nn import functional as F

from calibrant.losses.fedlas import FeDLaS
from calibrant.losses.smoothing import ls, mbls
from tests.support.losses import gradient, value


def feature_batch(rng, n=64, classes=5):
    logits = torch.from_numpy(rng.normal(size=(n, classes)) * 3)
    labels = torch.from_numpy(rng.integers(0, classes, n))
    return logits, labels, torch.from_numpy(rng.normal(size=(n, 16)) * 2)


def direct_fedlas(loss, logits, labels, features):
    """The definition in float64, from the state after the batch was taken in."""
    z, y, f = logits.detach().numpy(), labels.numpy(), features.detach().numpy()
    first, _, second = loss.gate
    with torch.no_grad():
        hidden = F.leaky_relu(first(logits.float()), 0.01)
        gate = second(hidden).double().softmax(-1).numpy()
    sign = np.sign(gate[:, 1] - gate[:, 0])
    gamma = (np.abs(f).sum(-1) - value(loss.mean_)) / (value(loss.deviation_) + 1e-3)
    alpha = 2 * loss.alpha * expit(loss.beta * sign * gamma)
    own = -log_softmax(z, -1)[np.arange(len(y)), y]
    if loss.base == "ls":
        penalty = -log_softmax(z, -1).mean(-1)
    else:
        penalty = np.maximum(z.max(-1, keepdims=True) - z - loss.margin, 0).mean(-1)
    return np.mean((1 - alpha) * own + alpha * penalty)


@pytest.mark.parametrize("base", ["ls", "mbls"])
def test_fedlas_is_its_definition(base, rng):
    loss = FeDLaS(5, base=base, margin=2.0)
    given = feature_batch(rng)
    found = value(loss(*given))
    norm = given[2].abs().sum(-1)
    assert value(loss.mean_) == pytest.approx(value(norm.mean()), rel=1e-6)  # the first batch
    assert value(loss.deviation_) == pytest.approx(value(norm.std()), rel=1e-5)
    assert found == pytest.approx(direct_fedlas(loss, *given), rel=1e-6)
    other = feature_batch(rng)
    found = value(loss(*other))
    expected = 0.5 * value(norm.mean()) + 0.5 * value(other[2].abs().sum(-1).mean())
    assert value(loss.mean_) == pytest.approx(expected, rel=1e-6)
    assert found == pytest.approx(direct_fedlas(loss, *other), rel=1e-6)


def test_fedlas_without_beta_is_plain_smoothing(rng):
    logits, labels, features = feature_batch(rng)
    found = FeDLaS(5, base="ls", beta=0.0, alpha=0.07)(logits, labels, features)
    assert value(found) == pytest.approx(value(ls(logits, labels, alpha=0.07).mean()))
    found = FeDLaS(5, base="mbls", beta=0.0, alpha=0.1, margin=2.0)(logits, labels, features)
    plain = 0.9 * mbls(logits, labels, margin=2.0, weight=0.1 / 0.9).mean()
    assert value(found) == pytest.approx(value(plain))


def test_the_weight_passes_no_gradient_to_the_backbone_but_one_to_the_gate(rng):
    loss = FeDLaS(5)
    logits, labels, features = feature_batch(rng)
    logits.requires_grad_()
    features.requires_grad_()
    loss.weights(logits, features).sum().backward()
    assert logits.grad is None
    assert features.grad is None
    loss(logits, labels, features).backward()
    assert features.grad is None
    fixed = loss.last[1].double()
    again = logits.detach().requires_grad_()
    own = -again.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    ((1 - fixed) * own + fixed * -again.log_softmax(-1).mean(-1)).mean().backward()
    torch.testing.assert_close(logits.grad, again.grad)
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in loss.gate.parameters())


def test_the_gate_learns_what_lowers_the_loss(rng):
    """Its gradient asks for less smoothing wherever smoothing costs more than the label."""
    loss = FeDLaS(4, base="ls", beta=4.0, alpha=0.1)
    labels = torch.from_numpy(rng.integers(0, 4, 512))
    logits = (
        6.0 * F.one_hot(labels, 4).float() + torch.from_numpy(rng.normal(size=(512, 4))).float()
    )
    scale = torch.where(labels < 2, 1.0, 3.0)  # the classes say whether norms are small
    features = scale[:, None] * torch.ones(512, 8) + 0.1 * torch.rand(512, 8)
    optimiser = torch.optim.SGD(loss.parameters(), 1.0)
    before = value(loss.weights(logits, features).mean())
    for _ in range(200):
        optimiser.zero_grad()
        loss(logits, labels, features).backward()
        optimiser.step()
    assert value(loss.weights(logits, features).mean()) < 0.5 * min(before, loss.alpha)


def test_weights_stay_within_twice_alpha(rng):
    loss = FeDLaS(5, alpha=0.05)
    logits, _, features = feature_batch(rng)
    weights = loss.weights(logits, 100 * features)
    assert ((weights >= 0) & (weights <= 0.1)).all()


def test_fedlas_state_travels_and_evaluation_does_not_change_it(rng):
    loss = FeDLaS(5)
    given = feature_batch(rng)
    loss(*given)
    other = FeDLaS(5)
    other.load_state_dict(loss.state_dict())
    loss.eval()
    other.eval()
    fresh = feature_batch(rng)
    assert value(loss(*fresh)) == value(other(*fresh))
    assert value(loss.mean_) == pytest.approx(value(given[2].abs().sum(-1).mean()), rel=1e-6)


def test_fedlas_in_a_batch_of_one_or_two_classes(rng):
    loss = FeDLaS(2)
    for _ in range(3):
        found = loss(torch.randn(1, 2), torch.tensor([1]), torch.randn(1, 4))
        assert torch.isfinite(found)
    assert value(loss.deviation_) == 1.0


def test_fedlas_says_what_it_wants():
    loss = FeDLaS(5)
    labels = torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match="FeDLaS needs features"):
        loss(torch.zeros(3, 5), labels)
    with pytest.raises(ValueError, match=r"FeDLaS needs features .* got \(2, 4\)"):
        loss(torch.zeros(3, 5), labels, torch.zeros(2, 4))
    with pytest.raises(ValueError, match="made for 5 classes, got logits of 4"):
        loss(torch.zeros(3, 4), labels, torch.zeros(3, 4))
    wrong: list[dict[str, Any]] = [{"base": "x"}, {"theta": 0.0}, {"classes": 1}]
    for bad in wrong:
        with pytest.raises(ValueError, match="must be"):
            FeDLaS(**{"classes": 5, **bad})


def test_half_precision_under_autocast(rng):
    loss = FeDLaS(5)
    last = torch.nn.Linear(16, 5)
    with torch.autocast("cpu", torch.bfloat16):
        features = torch.relu(torch.from_numpy(rng.normal(size=(32, 16))).float())
        logits = last(features)
        found = loss(logits, torch.from_numpy(rng.integers(0, 5, 32)), features)
    assert found.dtype == torch.float32
    found.backward()
    assert torch.isfinite(gradient(last.weight)).all()
