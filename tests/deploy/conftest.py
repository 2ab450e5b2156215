"""A small network, its inputs and a small model of Hugging Face."""

import pytest
import torch
from torch import nn

from tests.support.models import CLASSES, WIDTH


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), nn.Dropout(), nn.Linear(WIDTH, CLASSES))


@pytest.fixture
def inputs():
    torch.manual_seed(1)
    return torch.randn(9, 3)


@pytest.fixture(scope="module")
def bert():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(
        vocab_size=50, intermediate_size=8, num_labels=CLASSES, max_position_embeddings=12, **small
    )
    return transformers.BertForSequenceClassification(config).eval()


@pytest.fixture
def texts():
    torch.manual_seed(2)
    ids = torch.randint(50, (5, 7))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
