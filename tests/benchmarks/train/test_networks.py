"""Networks: published sizes, shapes, and the last layer."""

import pytest
import torch

from benchmarks.train.networks import NETWORKS, wide_resnet


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("resnet18", 11_173_962),
        ("resnet50", 23_520_842),
        ("resnet101", 42_512_970),
        ("wrn16_4", 2_748_890),
        ("wrn28_10", 36_479_194),
        ("densenet121", 6_956_298),
    ],
)
def test_networks_have_the_published_number_of_parameters(name, count):
    with torch.device("meta"):
        network = NETWORKS[name](classes=10, channels=3)
    assert sum(p.numel() for p in network.parameters()) == count


@pytest.mark.parametrize(
    ("name", "width", "side"),
    [
        *(("resnet18", 512, 4), ("resnet50", 2048, 4)),
        *(("wrn16_4", 256, 8), ("densenet121", 1024, 4), ("tiny", 32, 16)),
    ],
)
def test_networks_have_the_published_width_and_stride(name, width, side):
    with torch.device("meta"):
        network = NETWORKS[name](classes=10, channels=3)
        features = network.backbone(torch.empty(2, 3, 32, 32))
    assert features.shape == (2, width, side, side)
    assert (network.last.in_features, network.last.out_features) == (width, 10)


def test_channels_and_classes_are_options():
    with torch.device("meta"):
        for name in NETWORKS:
            network = NETWORKS[name](classes=7, channels=1)
            first = next(m for m in network.modules() if isinstance(m, torch.nn.Conv2d))
            assert (first.in_channels, network.last.out_features) == (1, 7), name


def test_logits_are_the_last_layer_of_the_pooled_features():
    network = NETWORKS["tiny"](classes=5, channels=3).eval()
    images = torch.randn(3, 3, 8, 8)
    pooled = network.backbone(images).flatten(2).sum(-1) / 16
    logits, features = network(images)
    torch.testing.assert_close(features, pooled)
    expected = pooled @ network.last.weight.T + network.last.bias
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("depth", [4, 17, 2])
def test_depth_of_a_wide_network_is_checked(depth):
    with pytest.raises(ValueError, match=f"6 n \\+ 4, got {depth}"):
        wide_resnet(depth, 1, 10)
