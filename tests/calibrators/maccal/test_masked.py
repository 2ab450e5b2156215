"""The masked classifier against NumPy, steps that leave masked weights unchanged, and control."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from calibrant.calibrators.maccal.masked import KeepRate, MaskedClassifier, masked_step
from tests.support.features import CLASSES, WIDTH, logits_by_hand


@pytest.mark.parametrize("mode", [True, False])
def test_without_masks_weights_but_not_biases_are_multiplied_by_the_keep_rate(rng, mode):
    classifier = MaskedClassifier(WIDTH, CLASSES, seed=3).train(mode)
    classifier.keep_.fill_(0.25)
    features = rng.normal(size=(5, WIDTH))
    logits = classifier(torch.tensor(features)).detach()
    np.testing.assert_allclose(logits, logits_by_hand(classifier, features, 0.25, 0.25), atol=1e-6)


def test_masks_are_applied_without_rescaling(rng):
    classifier = MaskedClassifier(WIDTH, CLASSES, seed=3)
    classifier.keep_.fill_(0.5)
    first, second = classifier.draw(torch.Generator().manual_seed(0))
    features = rng.normal(size=(5, WIDTH))
    logits = classifier(torch.tensor(features), (first, second)).detach()
    np.testing.assert_allclose(
        logits, logits_by_hand(classifier, features, first.numpy(), second.numpy()), atol=1e-6
    )


def test_masks_keep_the_right_share_of_each_matrix():
    classifier = MaskedClassifier(400, 50, bottleneck=300)
    classifier.keep_.fill_(0.3)
    masks = classifier.draw(torch.Generator().manual_seed(1))
    assert [mask.shape for mask in masks] == [
        classifier.first.weight.shape,
        classifier.second.weight.shape,
    ]
    for mask in masks:
        assert set(mask.unique().tolist()) == {0.0, 1.0}
        assert mask.mean() == pytest.approx(0.3, abs=4 * np.sqrt(0.21 / mask.numel()))


@pytest.mark.parametrize(
    ("width", "classes", "expected"), [(512, 10, 128), (2048, 10, 256), (64, 100, 100), (4, 3, 64)]
)
def test_default_bottleneck(width, classes, expected):
    assert MaskedClassifier(width, classes).bottleneck == expected


def test_average_over_masks_is_the_mean_probability():
    """With one hidden unit there are eight masks, whose probabilities are known."""
    classifier = MaskedClassifier(1, 2, bottleneck=1, samples=1000)
    classifier.keep_.fill_(0.6)
    features = np.array([[2.0]])
    with torch.no_grad():
        classifier.first.weight.fill_(1.5)
        classifier.first.bias.zero_()
        classifier.second.weight.copy_(torch.tensor([[1.0], [-2.0]]))
    expected = np.zeros(2)
    for m in np.ndindex(2, 2, 2):
        chance = np.prod([0.6 if kept else 0.4 for kept in m])
        logits = logits_by_hand(classifier, features, m[0], np.array([[m[1]], [m[2]]]))[0]
        expected += chance * np.exp(logits) / np.exp(logits).sum()
    log_probs = classifier(torch.tensor(features)).detach()[0]
    np.testing.assert_allclose(log_probs.exp(), expected, atol=0.05)
    half = classifier(torch.tensor(features).half()).detach()[0]
    assert half.dtype == torch.float32
    assert torch.equal(log_probs, half)  # the same masks each time


def test_width_of_features_is_checked():
    with pytest.raises(ValueError, match=r"must be \(\.\.\., 12\).*got \(2, 5\)"):
        MaskedClassifier(WIDTH, CLASSES)(torch.zeros(2, 5))


OPTIMISERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_masked_step_moves_only_unmasked_weights(data, name):
    features, labels = map(torch.tensor, data)
    classifier = MaskedClassifier(WIDTH, CLASSES, bottleneck=8)
    classifier.keep_.fill_(0.5)
    optimiser, random = OPTIMISERS[name](classifier.parameters()), torch.Generator().manual_seed(0)
    moved_by_plain_step = 0
    for _ in range(5):  # so that momentum and averages hold earlier gradients
        masks = classifier.draw(random)
        optimiser.zero_grad()
        F.cross_entropy(classifier(features, masks), labels).backward()
        before, plain = copy.deepcopy(classifier), copy.deepcopy(classifier)
        other = OPTIMISERS[name](plain.parameters())
        other.load_state_dict(copy.deepcopy(optimiser.state_dict()))
        for ours, theirs in zip(classifier.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            theirs.grad = ours.grad.clone()
        masked_step(optimiser, classifier, masks)
        other.step()
        for layer, mask in zip(("first", "second"), masks, strict=True):
            now, old, free = (getattr(m, layer) for m in (classifier, before, plain))
            out = mask == 0
            assert torch.equal(now.weight[out], old.weight[out])
            assert torch.equal(now.weight[~out], free.weight[~out])
            assert torch.equal(now.bias, free.bias)
            assert not torch.equal(now.bias, old.bias)
            moved_by_plain_step += int((free.weight[out] != old.weight[out]).sum())
    assert moved_by_plain_step > 0  # otherwise there was nothing to put back


def test_keep_rate_falls_when_confidence_exceeds_its_target_and_rises_otherwise():
    def after(confidence, accuracy, gamma=1.0):
        return KeepRate(0.5, 0.5, gamma, 0.1).update(confidence, accuracy)

    assert after(0.95, 0.90) == pytest.approx(0.5 - 0.5 * 0.05)
    assert after(0.85, 0.90) == pytest.approx(0.5 + 0.5 * 0.05)
    assert after(0.95, 1.00, gamma=0.9) == pytest.approx(0.5 - 0.5 * 0.05)
    assert after(0.95, 1.00, gamma=1.0) == pytest.approx(0.5 + 0.5 * 0.05)
    assert after(0.90, 0.90) == 0.5


def test_keep_rate_stays_within_bounds_and_moves_by_a_tenth_at_most():
    controller = KeepRate(0.35, 100.0, 1.0, 0.2)
    rates = [controller.update(0.9, 0.5) for _ in range(3)]
    assert rates == pytest.approx([0.25, 0.2, 0.2])
    rates = [controller.update(0.5, 0.9) for _ in range(12)]
    assert rates[0] == pytest.approx(0.3)
    assert rates[-1] == 1.0


def test_step_is_halved_at_each_change_of_sign_down_to_a_sixteenth():
    controller = KeepRate(0.5, 0.8, 1.0, 0.1)
    steps = []
    for confidence in (0.91, 0.92, 0.89, 0.91, 0.89, 0.91, 0.89, 0.91):
        controller.update(confidence, 0.9)
        steps.append(controller.step)
    assert steps == pytest.approx([0.8, 0.8, 0.4, 0.2, 0.1, 0.05, 0.05, 0.05])


def test_controller_converges_to_the_rate_at_which_confidence_is_right():
    """If confidence is 0.6 + 0.5 q and accuracy 0.8, q must become 0.4."""
    controller = KeepRate(0.9, 4.0, 1.0, 0.1)
    for _ in range(40):
        controller.update(0.6 + 0.5 * controller.keep, 0.8)
    assert controller.keep == pytest.approx(0.4, abs=1e-3)
