"""Statistics of a batch against their definitions, and in training."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from scipy.special import softmax
from torch import nn
from torch.nn import functional as F

import calibrant as cal
from calibrant.losses import LOSSES
from calibrant.losses.regularisers import CRL, avuc, mdca, mmce, soft_ece
from tests.support.losses import STATISTICS, gradient, value


def pairs_of(data):
    probs = softmax(data[0].numpy(), -1)
    return probs.max(-1), (probs.argmax(-1) == data[1].numpy()).astype(float)


def test_mmce_is_the_double_sum(data):
    c, a = pairs_of(data)
    kernel = np.exp(-np.abs(c[:, None] - c) / 0.4)
    plain = math.sqrt(
        np.mean(
            [
                [(x - a[i]) * (y - a[j]) * kernel[i, j] for j, y in enumerate(c)]
                for i, x in enumerate(c)
            ]
        )
    )
    assert value(mmce(*data, weighted=False)) == pytest.approx(plain, rel=1e-6)
    right, wrong = np.flatnonzero(a), np.flatnonzero(1 - a)
    m, n = len(right), len(wrong)
    both = (
        sum((1 - c[i]) * (1 - c[j]) * kernel[i, j] for i in right for j in right) / m**2
        + sum(c[i] * c[j] * kernel[i, j] for i in wrong for j in wrong) / n**2
        - 2 * sum((1 - c[i]) * c[j] * kernel[i, j] for i in right for j in wrong) / (m * n)
    )
    assert value(mmce(*data)) == pytest.approx(math.sqrt(both), rel=1e-6)
    again = (
        sum((1 - c[i]) * (1 - c[j]) * kernel[i, j] for i in right for j in right) / m**4
        + sum(c[i] * c[j] * kernel[i, j] for i in wrong for j in wrong) / n**4
        - 2 * sum((1 - c[i]) * c[j] * kernel[i, j] for i in right for j in wrong) / (m * n) ** 2
    )
    assert value(mmce(*data, twice=True)) == pytest.approx(math.sqrt(again + 1e-10), rel=1e-6)


def test_mmce_of_answers_of_one_kind_is_zero():
    logits = torch.tensor([[3.0, 0.0], [2.0, 0.0]], requires_grad=True)
    found = mmce(logits, torch.tensor([0, 0]))
    found.backward()
    assert value(found) == 0
    assert not gradient(logits).any()


def test_mdca_compares_every_class(data):
    probs = softmax(data[0].numpy(), -1).mean(0)
    share = np.bincount(data[1].numpy(), minlength=5) / 40
    assert value(mdca(*data)) == pytest.approx(np.abs(probs - share).mean())


def test_soft_ece_is_the_binned_definition(data):
    c, a = pairs_of(data)
    centres = (np.arange(15) + 0.5) / 15
    part = softmax(-((c[:, None] - centres) ** 2) / (2 * 0.05**2), -1)
    total = 0.0
    for b in range(15):
        n = part[:, b].sum()
        total += n / 40 * ((part[:, b] @ c - part[:, b] @ a) / n) ** 2
    assert value(soft_ece(*data)) == pytest.approx(math.sqrt(total), rel=1e-6)


def test_avuc_adds_up_its_cells(data):
    c, a = pairs_of(data)
    probs = softmax(data[0].numpy(), -1)
    u = -(probs * np.log(probs)).sum(-1)
    cells = dict.fromkeys(("AC", "AU", "IC", "IU"), 0.0)
    for ci, ai, ui in zip(c, a, u, strict=True):
        sure = ui <= 0.4
        weight = (ci if ai else 1 - ci) * (1 - math.tanh(ui) if sure else math.tanh(ui))
        cells[("A" if ai else "I") + ("C" if sure else "U")] += weight
    bad, good = cells["AU"] + cells["IC"], cells["AC"] + cells["IU"]
    assert value(avuc(*data, threshold=0.4)) == pytest.approx(math.log(1 + bad / good))


def test_crl_ranks_by_history():
    loss = CRL(examples=10, weight=1.0)
    loss.right_[:4] = torch.tensor([4.0, 1.0, 4.0, 0.0])
    loss.seen_[:4] = 4.0
    logits = torch.tensor([[0.2, 0.0], [3.0, 0.0]])  # the second is surer, and was wrong more often
    labels = torch.tensor([0, 0])
    found = value(loss(logits, labels, indices=torch.tensor([0, 1])))
    c = softmax(logits.numpy().astype(float), -1).max(-1)
    plain = value(F.cross_entropy(logits, labels))
    assert found == pytest.approx(plain + (0.75 - (c[0] - c[1])), rel=1e-5)


def test_crl_compares_labelled_neighbours_only():
    loss = CRL(examples=5)
    loss.right_[:] = torch.tensor([4.0, 1.0, 4.0, 0.0, 2.0])
    loss.seen_[:] = 4.0
    logits = torch.tensor([[0.2, 0.0], [3.0, 0.0], [0.0, 0.1], [2.0, 0.0], [0.0, 1.0]])
    labels = torch.tensor([0, 1, -100, 0, 1])
    c, past = softmax(logits.double().numpy(), -1).max(-1), [1, 0.25, 1, 0, 0.5]
    penalties = []
    for i, j in [(0, 1), (3, 4), (4, 0)]:  # example 2 has no label
        lead = past[i] - past[j]
        penalties.append(max(0, abs(lead) - np.sign(lead) * (c[i] - c[j])))
    expected = value(F.cross_entropy(logits, labels)) + np.mean(penalties)
    assert value(loss(logits, labels, indices=torch.arange(5))) == pytest.approx(expected, rel=1e-5)


def test_crl_remembers_in_training_only():
    loss = CRL(examples=3)
    logits, labels = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1])
    loss.eval()(logits, labels, indices=torch.tensor([0, 2]))
    assert loss.seen_.sum() == 0
    loss.train()(logits, labels, indices=torch.tensor([0, 2]))
    assert loss.seen_.tolist() == [1, 0, 1]
    assert loss.right_.tolist() == [1, 0, 0]
    with pytest.raises(ValueError, match="CRL needs indices"):
        loss(logits, labels)


@pytest.fixture(scope="module")
def learned():
    """Accuracy and ECE on other examples, of a small network that is trained with a loss."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(10, 20, generator=generator)
    labels = torch.randint(10, (5000,), generator=generator)
    inputs = centres[labels] + 1.3 * torch.randn(5000, 20, generator=generator)

    @cache
    def trained(name, **options):
        loss = LOSSES[name](**options)
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 10))
        optimiser = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
        for epoch in range(15):
            optimiser.param_groups[0]["lr"] = 0.1 if epoch < 10 else 0.01
            for part in torch.randperm(2000).split(125):
                optimiser.zero_grad()
                loss(network(inputs[part]), labels[part]).backward()
                nn.utils.clip_grad_norm_(network.parameters(), 2.0)
                optimiser.step()
        with torch.no_grad():
            found = cal.evaluate(
                network(inputs[2000:]), labels[2000:], metrics=["accuracy", "ece"], level=None
            )
        return found["accuracy"].value, found["ece"].value

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums of several threads come in any order, and training amplifies it
    yield trained
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_with_their_own_weights_do_not_harm_the_training(learned, name):
    (plain, before), (accuracy, ece) = learned("ce"), learned(name)
    assert accuracy > plain - 0.01
    assert ece < before + 0.005


def test_weights_of_published_code_are_too_much_for_the_formulas(learned):
    accuracy, before = learned("ce")
    assert learned("mmce", weight=2.0)[1] > before + 0.03
    assert learned("avuc", weight=3.0)[0] < accuracy - 0.2
