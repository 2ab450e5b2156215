"""Small classifiers that other processes can build by their names, and texts for them."""

import os
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from tests.support.language_models import transformers, word_tokenizer
from tests.support.shard_tasks import die

WORDS = [
    *("<pad>", "<s>", "</s>", "<unk>"),
    *("good", "bad", "fine", "poor", "film", "plot", "cast", "was", "the", "a"),
]
NAMES = ["negative", "neutral", "positive"]


def linear():
    """Eight inputs, three classes; the weights are new, and the same in every process."""
    return nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))


def slow():
    """Weights that are drawn while other threads could draw too."""
    network = nn.Linear(8, 3)
    time.sleep(0.1)
    return nn.Sequential(network, nn.Linear(3, 3))


def noisy():
    """Weights that no seed of torch makes the same in another process."""
    import secrets

    network = nn.Linear(8, 3)
    nn.init.constant_(network.bias, secrets.randbelow(1 << 20) + 1.0)
    return network


class Sum(nn.Module):
    """One logit for two inputs."""

    def forward(self, first, second):
        return (first.sum(1) - second.sum(1))[:, None]


class Broken(nn.Module):
    def forward(self, inputs):
        logits = inputs[:, :3].clone()
        return logits.log()  # NaN of negative inputs


KILLED = Path(tempfile.gettempdir(), f"calibrant-killed-{os.getpgrp()}")
"""Common to the processes that a test starts, and to no others."""


class KilledOnce(nn.Module):
    """Ends its process at the first batch, unless a file is there."""

    def forward(self, inputs):
        if not KILLED.exists():
            KILLED.touch()
            die(inputs)
        return inputs[:, :3]


def no_model():
    return "a model"


def save_text_classifier(folder, seed=0):
    """A random classifier of texts of three classes, far from uniform."""
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        **{"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 12},
        **{"id2label": dict(enumerate(NAMES)), "initializer_range": 0.5, "pad_token_id": 0},
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer = word_tokenizer(WORDS, around="<s> $A </s>", pad_token="<pad>")
    tokenizer.save_pretrained(folder)
    return folder


def made_up_texts(rng, rows):
    """Texts of one to fifteen words: some are truncated, and all batches are padded."""
    return [" ".join(rng.choice(WORDS[4:], rng.integers(1, 16))) for _ in range(rows)]
