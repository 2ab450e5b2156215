"""Collecting logits, labels and features from a data loader."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from calibrant.calibrators.scaling import Identity
from calibrant.deploy import collect
from tests.support.models import CLASSES, WIDTH


def batches(*tensors, size=4):
    return DataLoader(TensorDataset(*tensors), batch_size=size)


def test_collect(network, inputs):
    labels = torch.arange(9) % CLASSES
    network.train()
    network[0].eval()
    gradients = []
    network[1].register_forward_hook(lambda *_: gradients.append(torch.is_grad_enabled()))
    logits, found = collect(network, batches(inputs, labels))
    assert gradients == [False] * 3
    assert [layer.training for layer in network] == [False, True, True, True]
    assert torch.equal(found, labels)
    assert torch.allclose(logits, network.eval()(inputs), atol=1e-6)
    assert not logits.requires_grad
    found_logits, _, features = collect(network, batches(inputs, labels), last_layer="3")
    assert torch.equal(found_logits, logits)
    assert torch.allclose(features, network[:3](inputs), atol=1e-6)
    Identity().fit(logits, found)


class Pair(nn.Module):
    def forward(self, a, b):
        return {"logits": a + b}


@pytest.mark.parametrize(
    "form",
    [
        lambda a, b, y: (a, b, y),
        lambda a, b, y: [(a, b), y],
        lambda a, b, y: ({"b": b, "a": a}, y),
        lambda a, b, y: {"b": b, "labels": y, "a": a},
        lambda a, b, y: ([a, b], y.numpy()),
    ],
)
def test_forms_of_batches(form):
    a, b = torch.randn(2, 6, CLASSES)
    labels = torch.arange(6) % CLASSES
    loader = [form(a[rows], b[rows], labels[rows]) for rows in (slice(0, 4), slice(4, 6))]
    logits, found = collect(Pair(), loader)
    assert torch.equal(logits, a + b)
    assert torch.equal(found, labels)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([torch.zeros(3)], r"must be \(inputs, labels\) or a dictionary with labels, got Tensor"),
        ([(torch.zeros(3),)], "got tuple"),
        ([{"x": 1, "y": 2}], "got the keys x, y"),
    ],
)
def test_batch_without_labels(loader, message):
    with pytest.raises(TypeError, match=message):
        collect(nn.Identity(), loader)


def test_no_batch():
    with pytest.raises(ValueError, match="the loader must have at least one batch, got none"):
        collect(nn.Identity(), [])


def test_modes_return_after_a_failure(network):
    with pytest.raises(TypeError):
        collect(network.train(), [1])
    assert network[2].training


def test_texts_of_one_length_and_of_several():
    net = nn.Sequential(nn.Linear(3, WIDTH), nn.Linear(WIDTH, CLASSES))
    texts = [torch.randn(2, length, 3) for length in (5, 5, 3)]
    labels = [torch.randint(CLASSES, text.shape[:2]) for text in texts]
    labels[2][1, 1:] = -100
    same = list(zip(texts[:2], labels[:2], strict=True))
    logits, found, features = collect(net, same, last_layer="1")
    assert (logits.shape, found.shape, features.shape) == ((4, 5, 4), (4, 5), (4, 5, 6))
    logits, found, features = collect(net, list(zip(texts, labels, strict=True)), last_layer="1")
    rows = torch.cat([text.reshape(-1, 3) for text in texts])
    flat = torch.cat([part.reshape(-1) for part in labels])
    assert len(found) == 24
    assert torch.equal(found, flat[flat != -100])
    assert torch.allclose(logits, net(rows[flat != -100]), atol=1e-6)
    assert torch.allclose(features, net[0](rows[flat != -100]), atol=1e-6)


def test_device():
    net = nn.Linear(3, CLASSES)
    seen = []
    net.register_forward_pre_hook(lambda _, given: seen.append(given[0].device.type))
    loader = [(torch.randn(2, 3), torch.zeros(2).long())]
    collect(net, loader, device="cpu")
    assert seen == ["cpu"]
    with pytest.raises(NotImplementedError):  # values of meta tensors cannot be had
        collect(net, loader, device="meta")
    assert seen == ["cpu", "meta"]


def test_collect_from_transformers(bert, texts):
    batch = {**texts, "labels": torch.tensor([0, 1, 2, 3, 0])}
    logits, labels = collect(bert, [batch, batch])
    assert torch.allclose(logits[5:], bert(**texts).logits, atol=1e-6)
    assert labels.tolist() == 2 * [0, 1, 2, 3, 0]
