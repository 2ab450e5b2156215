"""Training by two processes against one process."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.train.networks import NETWORKS
from benchmarks.train.results import result_rows
from calibrant.losses.fedlas import FeDLaS
from calibrant.losses.regularisers import CRL
from tests.support.training import (
    CLASSES,
    NEAR,
    PlainDescent,
    assert_same,
    read_rows,
    short_recipe,
    standardised_by_hand,
    without_seconds,
)
from tests.support.two_processes import SETTINGS, shared_splits, start_two_processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of two processes that have trained together."""
    folder = tmp_path_factory.mktemp("two")
    start_two_processes(folder)
    return folder


@pytest.fixture
def states(folder):
    """States of both processes by the name of the loss."""
    return lambda loss: [
        torch.load(folder / f"{loss}-{rank}.pt", weights_only=True) for rank in (0, 1)
    ]


@pytest.mark.parametrize("loss", SETTINGS)
def test_processes_agree_and_the_first_writes(states, loss):
    first, second = states(loss)
    assert_same(first["network"], second["network"])
    assert_same(first["loss"], second["loss"])
    np.testing.assert_equal(without_seconds(first["log"]), without_seconds(second["log"]))
    assert first["files"] == ["best.pt", "checkpoint.pt", "log.csv"]
    assert second["files"] == []


def test_processes_share_every_batch(states):
    first, second = states("crl")
    assert [len(index) for index in first["order"]] == [5, 5, 4] * 2
    assert [len(index) for index in second["order"]] == [5, 5, 3] * 2
    every = torch.cat([*first["order"][:3], *second["order"][:3]])
    assert sorted(every.tolist()) == list(range(27))
    # history of every image, from both processes
    assert first["loss"]["seen_"].tolist() == [2] * 27
    assert 0 < first["loss"]["right_"].sum() < 54


def test_last_batch_with_fewer_images_than_processes_is_left_out(states):
    first, second = states("ce")
    assert [len(index) for index in first["order"]] == [13, 13]
    assert [len(index) for index in second["order"]] == [13, 13]


def test_processes_draw_their_own_shifts(states):
    images = shared_splits().train.images
    standardised = standardised_by_hand(images, images)
    moves = [
        [
            move(standardised[i], image)
            for index, inputs in zip(state["order"], state["inputs"], strict=True)
            for i, image in zip(index, inputs, strict=True)
        ]
        for state in states("ce")
    ]
    assert len(set(moves[0])) > 10
    assert sum(a == b for a, b in zip(*moves, strict=False)) < 5


def move(image, moved):
    """Find the shift and mirroring that were applied."""
    padded = nn.functional.pad(image, (4,) * 4)
    for down in range(9):
        for right in range(9):
            cut = padded[:, down : down + 8, right : right + 8]
            for mirrored in (False, True):
                if torch.allclose(cut.flip(-1) if mirrored else cut, moved, atol=1e-4):
                    return down, right, mirrored
    raise AssertionError("no shift gives this image")


def halves_by_hand(network, images, halves):
    """Features and logits of both halves, normalised apart; the buffers follow the first."""
    aside = {name: buffer.clone() for name, buffer in network.backbone.named_buffers()}
    features = [
        torch.func.functional_call(network.backbone, buffers, images[half]).mean((-2, -1))
        for buffers, half in zip(({}, aside), halves, strict=True)
    ]
    return features, [f @ network.last.weight.T + network.last.bias for f in features]


def crl_by_hand(criterion, logits, labels, halves):
    """Pairs are neighbours in a half, the history is that of the whole batch."""
    criterion.eval()
    sizes = [len(half) for half in halves]
    values = [
        size * criterion(own, labels[half], indices=half)
        for own, half, size in zip(logits, halves, sizes, strict=True)
    ]
    criterion.train()
    with torch.no_grad():
        every = torch.cat(halves)
        criterion(torch.cat(logits), labels[every], indices=every)
    return sum(values) / sum(sizes)


@pytest.mark.parametrize("loss", ["fedlas_ls", "crl"])
def test_two_processes_step_as_one_would(states, loss):
    """Means, gate and moving averages of the whole batch, with batch normalisation by halves."""
    first, second = states(loss)
    splits = shared_splits()
    images = standardised_by_hand(splits.train.images, splits.train.images)
    labels = torch.tensor(splits.train.labels)
    recipe = short_recipe(loss=loss, batch=10, clip=0.3 if loss == "fedlas_ls" else 2.0, epochs=2)
    network = NETWORKS["tiny"](classes=CLASSES, channels=3)
    network.load_state_dict(first["start"][0])
    criterion: Any = CRL(27) if loss == "crl" else FeDLaS(CLASSES, alpha=0.5, theta=0.95)
    criterion.load_state_dict(first["start"][1])
    descent = PlainDescent(network, criterion, recipe)
    losses, gate = [], []
    for step, halves in enumerate(zip(first["order"], second["order"], strict=True)):
        features, logits = halves_by_hand(network, images, halves)
        every = torch.cat(halves)
        if loss == "crl":
            value = crl_by_hand(criterion, logits, labels, halves)
        else:
            value = criterion(torch.cat(logits), labels[every], torch.cat(features))
            gate.append(torch.stack(criterion.last))
        descent.step(value, recipe.rate_at(step // 3))
        losses.append(float(value.detach()) * len(every))
    assert_same(first["network"], network.state_dict(), **NEAR)
    assert_same(first["loss"], criterion.state_dict(), **NEAR)
    row = first["log"][0]
    assert row["loss"] == pytest.approx(sum(losses[:3]) / 27, rel=1e-4)
    if gate:
        signs, weights = torch.cat(gate[:3], 1).numpy()
        assert row["gate_positive"] == pytest.approx((signs > 0).mean())
        assert row["smoothing_lowered"] == pytest.approx((weights < 0.5).mean())
        assert row["smoothing_ratio"] == pytest.approx((weights / 0.5).mean(), rel=1e-3)


def test_command_line_writes_and_prints_results_once(folder):
    rows = read_rows((folder / "runs" / "results.csv").read_text())
    assert [(row["loss"], row["after"]) for row in rows] == [("ce", "none")]
    assert result_rows(folder / "runs" / "tiny-ce-0")[:1] == rows
    assert (folder / "0.out").read_text().count("OOD AUROC") == 1
    assert (folder / "0.err").read_text().count("tiny-ce-0: ECE") == 1
    assert (folder / "1.out").read_text() == ""
    assert "ECE" not in (folder / "1.err").read_text()
