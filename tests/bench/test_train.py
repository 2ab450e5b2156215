"""Training against a slow loop, runs that go on, two processes against one, and rows of results."""

import copy
import csv
import dataclasses
import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax
from torch import nn

import calibrant
from calibrant.bench.train import images as bench_images, ranks, results, trainer as training
from calibrant.bench.train.images.sets import Part, Parts, image_set, parts
from calibrant.bench.train.networks import NETWORKS, wide_resnet
from calibrant.bench.train.trainer import Recipe, Trainer, augmented, channel_figures
from calibrant.cli import cli
from calibrant.data import open_dataset
from calibrant.losses.fedlas import FeDLaS
from calibrant.losses.registry import LOSSES
from calibrant.losses.regularisers import CRL

CLASSES = 4
WITH_MEMORY = ("ce", "fedlas_ls", "fedlas_mbls", "adafocal", "crl")
"""Losses of which all but the first keep something between steps or epochs."""


def drawn(seed, count, channels=3, side=8):
    """Noisy images; the mean of each is a hint at its class."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(count) % CLASSES).astype(np.int64)
    images = rng.normal(60 + 30 * labels[:, None, None, None], 50, (count, channels, side, side))
    return Part(images.clip(0, 255).astype(np.uint8), labels)


def small_parts(train=26, val=16, test=12):
    return Parts(drawn(1, train), drawn(2, val), drawn(3, test))


def short(**changes):
    """A recipe of a few steps."""
    usual = {"network": "tiny", "epochs": 1, "batch": 8, "augment": False}
    return Recipe(**{**usual, **changes})


def trainer_of(folder, recipe, data=None, **options):
    return Trainer(data or small_parts(), CLASSES, recipe, folder, device="cpu", **options)


def assert_same(found, expected, **near):
    """Two dictionaries of tensors; bit for bit unless told how near."""
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(
            found[name], expected[name], **(near or {"rtol": 0, "atol": 0}), msg=name
        )


def read_rows(text):
    return list(csv.DictReader(io.StringIO(text)))


def without_seconds(log):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in log]


# Networks.


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
def test_number_of_parameters_is_the_published_one(name, count):
    with torch.device("meta"):
        network = NETWORKS[name](classes=10, channels=3)
    assert sum(p.numel() for p in network.parameters()) == count


@pytest.mark.parametrize(
    ("name", "width", "side"),
    [
        *(("resnet18", 512, 4), ("resnet50", 2048, 4), ("resnet101", 2048, 4)),
        *(("wrn16_4", 256, 8), ("wrn28_10", 640, 8), ("densenet121", 1024, 4), ("tiny", 32, 16)),
    ],
)
def test_shapes_of_networks(name, width, side):
    with torch.device("meta"):
        network = NETWORKS[name](classes=7, channels=1)
        images = torch.empty(2, 1, 32, 32)
    assert network.backbone(images).shape == (2, width, side, side)
    assert network.features(images).shape == (2, width)
    assert network(images).shape == (2, 7)


def test_logits_are_the_last_layer_of_the_pooled_features():
    network = NETWORKS["tiny"](classes=5, channels=3).eval()
    images = torch.randn(3, 3, 8, 8)
    pooled = network.backbone(images).flatten(2).sum(-1) / 16
    expected = pooled @ network.last.weight.T + network.last.bias
    torch.testing.assert_close(network(images), expected)


@pytest.mark.parametrize("depth", [4, 17, 2])
def test_depth_of_a_wide_network_is_checked(depth):
    with pytest.raises(ValueError, match=f"6 n \\+ 4, got {depth}"):
        wide_resnet(depth, 1, 10)


# Shifted and mirrored images.


def shifted_and_mirrored(images, random, shift):
    """Cut each image out of one with black around it, pixel by pixel."""
    count, _, height, width = images.shape
    down = torch.randint(0, 2 * shift + 1, (count, 1), generator=random)
    right = torch.randint(0, 2 * shift + 1, (count, 1), generator=random)
    mirrored = torch.rand((count, 1), generator=random) < 0.5
    found = torch.zeros_like(images)
    for i in range(count):
        for y in range(height):
            for x in range(width):
                from_y = y + int(down[i]) - shift
                from_x = (width - 1 - x if mirrored[i] else x) + int(right[i]) - shift
                if 0 <= from_y < height and 0 <= from_x < width:
                    found[i, :, y, x] = images[i, :, from_y, from_x]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shift", [1, 4])
def test_augmented_images_are_those_of_the_slow_definition(dtype, shift):
    images = torch.randint(1, 256, (12, 3, 8, 6)).to(dtype)
    one, other = (torch.Generator().manual_seed(5) for _ in range(2))
    found = augmented(images, one, shift)
    assert (found.dtype, found.shape) == (dtype, images.shape)
    assert torch.equal(found, shifted_and_mirrored(images, other, shift))


def test_half_are_mirrored_and_all_shifts_are_equally_likely():
    count = 8100
    image = torch.arange(1.0, 257).reshape(1, 1, 16, 16)
    found = augmented(image.expand(count, 1, 16, 16), torch.Generator().manual_seed(1))[:, 0]
    inner = found[:, 6:9, 6:9]  # never touched by the black border
    step = inner[:, 0, 1] - inner[:, 0, 0]
    assert set(step.tolist()) == {1.0, -1.0}
    assert abs((step < 0).double().mean() - 0.5) < 4 * 0.5 / math.sqrt(count)
    y, x = (inner[:, 1, 1] - 1).long() // 16, (inner[:, 1, 1] - 1).long() % 16
    moved = torch.stack([y - 7, torch.where(step < 0, x - 8, x - 7)])
    assert (int(moved.min()), int(moved.max())) == (-4, 4)
    counts = torch.bincount((moved[0] + 4) * 9 + moved[1] + 4, minlength=81)
    assert (counts - 100).abs().max() < 45  # 4.5 deviations of a count of 100


# Recipes.


def test_defaults_are_those_of_the_papers():
    recipe = Recipe()
    found = (recipe.batch, recipe.rate, recipe.momentum, recipe.decay, recipe.clip, recipe.epochs)
    assert found == (128, 0.1, 0.9, 5e-4, 2.0, 350)
    assert recipe.augment
    assert recipe.loss_options == {}
    assert Recipe(loss="fedlas_ls").loss_options == {"theta": 0.95}
    assert Recipe(loss="fedlas_mbls", loss_options={"alpha": 0.2}).loss_options == {
        "theta": 0.95,
        "alpha": 0.2,
    }
    assert Recipe(loss="fedlas_ls", loss_options={"theta": 0.5}).loss_options == {"theta": 0.5}


def test_rate_falls_after_150_and_250_of_350_epochs():
    rates = [Recipe().rate_at(epoch) for epoch in range(350)]
    np.testing.assert_allclose(rates, [0.1] * 150 + [0.01] * 100 + [0.001] * 100)


def test_rate_falls_after_the_same_shares_of_fewer_epochs():
    rates = [Recipe(epochs=7, rate=2.0).rate_at(epoch) for epoch in range(7)]
    np.testing.assert_allclose(rates, [2, 2, 2, 0.2, 0.2, 0.02, 0.02])
    listed = {"milestones": [0.5]}  # as JSON has them
    assert Recipe(**listed).milestones == (0.5,)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network": "vgg"}, "unknown network 'vgg': choose from resnet18, .*tiny"),
        ({"loss": "hinge"}, "unknown loss 'hinge': choose from ce, .*fedlas_mbls"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"batch": -1}, "batch must be at least 1, got -1"),
    ],
)
def test_bad_recipes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**changes)


def test_recipe_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().epochs = 3  # type: ignore[misc]


# Figures of the channels.


def test_channel_figures_are_those_of_numpy(rng):
    images = rng.integers(0, 256, (20, 3, 5, 7), np.uint8)
    images[:, 1] = images[:, 1] // 9 + 3
    mean, deviation = channel_figures(images)
    assert mean.shape == deviation.shape == (1, 3, 1, 1)
    np.testing.assert_allclose(mean.ravel(), (images / 255).mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(deviation.ravel(), (images / 255).std((0, 2, 3)), rtol=1e-6)


@pytest.mark.parametrize("value", [0, 1, 97, 255])
def test_constant_channel_becomes_zero(tmp_path, value):
    data = small_parts()
    for part in data:
        part.images[:, 1] = value
    assert channel_figures(data.train.images)[1][0, 1] == 1
    trainer = trainer_of(tmp_path, short(), data)
    assert trainer._scaled(trainer.parts["val"].images)[:, 1].abs().max() < 1e-6


# An epoch against a plain loop.


class Seen:
    """What a loss was given and said, step by step."""

    def __init__(self, trainer):
        self.steps = []
        trainer.loss.register_forward_hook(self._note)

    def _note(self, loss, given, value):
        index = given[3].clone()
        self.steps.append((index, getattr(loss, "last", None)))

    @property
    def order(self):
        return [index for index, _ in self.steps]


def scaled_by_hand(data):
    """Standardised training images, in floating point throughout."""
    images = data.train.images / 255
    mean, deviation = (f(images, (0, 2, 3), keepdims=True) for f in (np.mean, np.std))
    return torch.tensor((images - mean) / deviation, dtype=torch.float32)


class PlainDescent:
    """Gradient descent with momentum and decay; only the network's gradient is clipped."""

    def __init__(self, network, loss, recipe):
        self.clipped, self.free = list(network.parameters()), list(loss.parameters())
        self.recipe = recipe
        self.speed = [torch.zeros_like(p) for p in (*self.clipped, *self.free)]
        self.norms = []

    @torch.no_grad()
    def step(self, value, rate):
        every = [*self.clipped, *self.free]
        slopes = list(torch.autograd.grad(value, every))
        norm = math.sqrt(sum(float(s.double().square().sum()) for s in slopes[: len(self.clipped)]))
        self.norms.append(norm)
        for i, weight in enumerate(every):
            slope = slopes[i]
            if i < len(self.clipped):
                slope = slope * min(1, self.recipe.clip / norm)
            slope = slope + self.recipe.decay * weight
            self.speed[i] = self.recipe.momentum * self.speed[i] + slope
            weight -= rate * self.speed[i]


NEAR = {"rtol": 1e-3, "atol": 2e-4}
"""Rounding differs by 1e-7, but where that turns a unit on or off a step differs by 1e-5."""


@pytest.mark.parametrize("loss", ["ce", "fedlas_ls"])
@pytest.mark.parametrize("clip", [0.3, 1e6])
def test_epochs_are_those_of_a_plain_loop(tmp_path, loss, clip):
    options = {"alpha": 0.5} if loss == "fedlas_ls" else {}  # so that the gate moves visibly
    usual = {"epochs": 2, "milestones": (0.5,), "decay": 0.05, "seed": 5}
    recipe = short(loss=loss, loss_options=options, clip=clip, **usual)
    data = small_parts()
    trainer = trainer_of(tmp_path, recipe, data)
    network, criterion = copy.deepcopy(trainer.network).train(), copy.deepcopy(trainer.loss)
    before = {name: p.clone() for name, p in criterion.state_dict().items()}
    seen = Seen(trainer)
    trainer.run()
    images, labels = scaled_by_hand(data), torch.tensor(data.train.labels)
    descent, values = PlainDescent(network, criterion, recipe), []
    for number, index in enumerate(seen.order):
        features = network.features(images[index])
        logits = features @ network.last.weight.T + network.last.bias
        value = criterion(logits, labels[index], features, index)
        descent.step(value, 0.1 if number < 4 else 0.01)
        values.append(float(value.detach()) * len(index))
    assert (max(descent.norms) > clip) == (clip < 1)
    assert_same(trainer.network.state_dict(), network.state_dict(), **NEAR)
    assert_same(trainer.loss.state_dict(), criterion.state_dict(), **NEAR)
    if loss == "fedlas_ls":
        moved = trainer.loss.state_dict()["gate.0.weight"] - before["gate.0.weight"]
        assert moved.abs().max() > 1e-3
    logged = [row["loss"] for row in trainer.log]
    np.testing.assert_allclose(logged, [sum(values[:4]) / 26, sum(values[4:]) / 26], rtol=1e-3)
    np.testing.assert_allclose([row["rate"] for row in trainer.log], [0.1, 0.01])


def test_batches_hold_every_image_once_in_an_order_of_seed_and_epoch(tmp_path):
    orders = {}
    for seed in (0, 1):
        trainer = trainer_of(tmp_path / str(seed), short(epochs=2, seed=seed))
        seen = Seen(trainer)
        trainer.run()
        assert [len(index) for index in seen.order] == [8, 8, 8, 2] * 2
        for epoch in (0, 1):
            orders[seed, epoch] = torch.cat(seen.order[4 * epoch :][:4]).tolist()
    assert all(sorted(order) == list(range(26)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 4


def test_images_are_augmented_in_training_only(tmp_path, monkeypatch):
    calls = []
    real = augmented

    def noted(images, random):
        calls.append((images, found := real(images, random)))
        return found

    monkeypatch.setattr(training, "augmented", noted)
    trainer = trainer_of(tmp_path, short(augment=True))
    taken = []
    trainer.network.backbone.register_forward_pre_hook(
        lambda module, given: taken.append((module.training, given[0].clone()))
    )
    trainer.run()
    assert [mode for mode, _ in taken] == [True] * 4 + [False]
    for (plain, found), (_, used) in zip(calls, taken[:4], strict=True):
        assert torch.equal(found, used)
        assert not torch.equal(found, plain)
    torch.testing.assert_close(taken[4][1], trainer._scaled(trainer.parts["val"].images))


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_trains(tmp_path, loss):
    trainer = trainer_of(tmp_path, short(loss=loss, augment=True))
    before = copy.deepcopy(trainer.network.state_dict())
    trainer.run()
    weights = trainer.network.state_dict()
    assert all(value.isfinite().all() for value in weights.values())
    assert not torch.equal(weights["last.weight"], before["last.weight"])
    assert all(math.isfinite(v) for k, v in trainer.log[0].items() if k != "gate_flips")


def test_half_precision_stays_near(tmp_path):
    whole, half = (
        trainer_of(tmp_path / str(half), short(half=half, rate=0.01)) for half in (False, True)
    )
    for trainer in (whole, half):
        trainer.run()
    found, expected = half.outputs("test"), whole.outputs("test")
    assert found.logits.dtype == found.features.dtype == torch.float32
    torch.testing.assert_close(found.logits, expected.logits, rtol=0.1, atol=0.1)
    assert not torch.equal(found.logits, expected.logits)


# What the gate did.


@pytest.mark.parametrize("loss", ["fedlas_ls", "fedlas_mbls"])
def test_gate_figures_are_those_of_its_answers(tmp_path, loss):
    trainer = trainer_of(tmp_path, short(loss=loss, epochs=3))
    seen = Seen(trainer)
    trainer.run()
    alpha = {"fedlas_ls": 0.05, "fedlas_mbls": 0.1}[loss]
    before: dict[int, float] | None = None
    for epoch, row in enumerate(trainer.log):
        signs: dict[int, float] = {}
        weights: list[float] = []
        for index, (said, used) in seen.steps[4 * epoch :][:4]:
            signs |= dict(zip(index.tolist(), said.tolist(), strict=True))
            weights += used.tolist()
        assert len(signs) == 26
        assert row["gate_positive"] == pytest.approx(sum(s > 0 for s in signs.values()) / 26)
        assert row["smoothing_lowered"] == pytest.approx(np.mean(np.array(weights) < alpha))
        assert row["smoothing_ratio"] == pytest.approx(np.mean(weights) / alpha, rel=1e-5)
        if before is None:
            assert math.isnan(row["gate_flips"])
        else:
            flips = sum(signs[i] != before[i] for i in signs)
            assert row["gate_flips"] == pytest.approx(flips / 26)
        before = signs


def test_gate_flips_are_counted(tmp_path):
    trainer = trainer_of(tmp_path, short(loss="fedlas_ls", epochs=2))
    with torch.no_grad():
        trainer.loss.gate[2].bias.copy_(torch.tensor([0.0, 50.0]))

    def turn(done, _):
        if done == 5:  # after the first batch of the second epoch, which still was positive
            with torch.no_grad():
                trainer.loss.gate[2].bias.copy_(torch.tensor([50.0, 0.0]))

    trainer.run(turn)
    first, second = trainer.log
    assert (first["gate_positive"], second["gate_positive"]) == (1, pytest.approx(8 / 26))
    assert second["gate_flips"] == pytest.approx(18 / 26)


# Runs that are stopped and go on.


class StopError(Exception):
    pass


def stopping_at(step):
    def told(done, _):
        if done == step:
            raise StopError

    return told


class StopsAfterKeeping(Trainer):
    def _keep(self, accuracy):
        super()._keep(accuracy)
        raise StopError


def files_of(folder):
    best = torch.load(folder / "best.pt", weights_only=True)
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    log = read_rows((folder / "log.csv").read_text())
    return best, state, without_seconds(log)


def assert_runs_agree(folder, other):
    (best, state, log), (best2, state2, log2) = files_of(folder), files_of(other)
    assert_same(best, best2)
    for name in ("network", "loss"):
        assert_same(state[name], state2[name])
    speeds, speeds2 = (
        {str(i): s["momentum_buffer"] for i, s in x["optimiser"]["state"].items()}
        for x in (state, state2)
    )
    assert_same(speeds, speeds2)
    assert log == log2
    np.testing.assert_equal(without_seconds(state["log"]), without_seconds(state2["log"]))
    assert (state["epoch"], state["best"]) == (state2["epoch"], state2["best"])


@pytest.mark.parametrize("loss", WITH_MEMORY)
def test_stopped_runs_go_on_as_if_nothing_had_happened(tmp_path, loss):
    recipe = short(loss=loss, epochs=3, augment=True)
    whole = trainer_of(tmp_path / "whole", recipe)
    whole.run()
    for step in (2, 6, 8):  # in the first epoch, in the second, and at its end, before it is kept
        stopped = trainer_of(tmp_path / "stopped", recipe)
        with pytest.raises(StopError):
            stopped.run(stopping_at(step))
    torch.rand(7)  # what happens to the global generator is of no interest
    again = trainer_of(tmp_path / "stopped", recipe)
    assert again.epoch == 1
    again.run()
    assert_runs_agree(tmp_path / "stopped", tmp_path / "whole")
    assert_same(again.network.state_dict(), whole.network.state_dict())
    assert_same(again.loss.state_dict(), whole.loss.state_dict())


@pytest.mark.parametrize("loss", WITH_MEMORY)
def test_runs_stopped_between_epochs_go_on(tmp_path, loss):
    recipe = short(loss=loss, epochs=3, augment=True)
    trainer_of(tmp_path / "whole", recipe).run()
    for _ in range(2):
        with pytest.raises(StopError):
            StopsAfterKeeping(small_parts(), CLASSES, recipe, tmp_path / "cut", device="cpu").run()
    again = trainer_of(tmp_path / "cut", recipe)
    assert again.epoch == 2
    told = []
    again.run(lambda done, steps: told.append((done, steps)))
    assert told == [(step, 12) for step in (9, 10, 11, 12)]
    assert_runs_agree(tmp_path / "cut", tmp_path / "whole")


def test_memory_of_the_losses_is_kept(tmp_path):
    """The runs above would agree as well if these were never updated."""
    for loss, name in (("fedlas_ls", "mean_"), ("adafocal", "gamma_"), ("crl", "seen_")):
        trainer = trainer_of(tmp_path / loss, short(loss=loss))
        before = trainer.loss.state_dict()[name].clone()
        trainer.run()
        assert not torch.equal(trainer.loss.state_dict()[name], before)
        assert_same(files_of(tmp_path / loss)[1]["loss"], trainer.loss.state_dict())


def test_adafocal_observes_the_validation_part_after_each_epoch(tmp_path):
    trainer = trainer_of(tmp_path, short(loss="adafocal"))
    expected = copy.deepcopy(trainer.loss)
    trainer.run()
    val = trainer.outputs("val")
    expected.observe(val.logits, val.labels)
    assert_same(trainer.loss.state_dict(), expected.state_dict())


def test_run_that_has_ended_is_not_trained_again(tmp_path):
    trainer_of(tmp_path, short()).run()
    before = (tmp_path / "checkpoint.pt").stat().st_mtime_ns
    again = trainer_of(tmp_path, short())
    again.run(stopping_at(1))
    assert (tmp_path / "checkpoint.pt").stat().st_mtime_ns == before
    assert len(again.log) == 1


def test_best_checkpoint_is_chosen_by_validation_accuracy(tmp_path):
    """Validation labels are what the network says after the second epoch: the others are worse."""
    states, said = [], []

    class Watched(Trainer):
        def _keep(self, accuracy):
            super()._keep(accuracy)
            states.append(copy.deepcopy(self.network.state_dict()))
            said.append(self.outputs("val").logits.argmax(-1))

    recipe, data = short(epochs=4), small_parts()
    Watched(data, CLASSES, recipe, tmp_path / "first", device="cpu").run()
    states.clear()
    labels = said[1].numpy().copy()
    data = data._replace(val=Part(data.val.images, labels))
    trainer = Watched(data, CLASSES, recipe, tmp_path / "second", device="cpu")
    trainer.run()
    found = [row["val_accuracy"] for row in trainer.log]
    np.testing.assert_allclose(found, [(s.numpy() == labels).mean() for s in said[4:]])
    assert found[1] == 1 > max(found[0], found[3])
    assert_same(torch.load(tmp_path / "second" / "best.pt", weights_only=True), states[1])
    assert_same(trainer.network.state_dict(), states[3])
    trainer.use_best()
    assert_same(trainer.network.state_dict(), states[1])


def test_first_of_equally_good_checkpoints_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "_accuracy", lambda found: 0.5)
    trainer = trainer_of(tmp_path, short(epochs=2))
    with pytest.raises(StopError):
        trainer.run(stopping_at(5))
    first = torch.load(tmp_path / "best.pt", weights_only=True)
    again = trainer_of(tmp_path, short(epochs=2))
    again.run()
    assert_same(torch.load(tmp_path / "best.pt", weights_only=True), first)
    assert not torch.equal(again.network.last.weight, first["last.weight"])


def test_log_file_holds_the_log(tmp_path):
    trainer = trainer_of(tmp_path, short(epochs=2, loss="fedlas_ls"))
    trainer.run()
    found = read_rows((tmp_path / "log.csv").read_text())
    for row, expected in zip(found, trainer.log, strict=True):
        assert list(row) == list(expected)
        np.testing.assert_allclose(
            [float(v) for v in row.values()], list(expected.values()), rtol=1e-5
        )


# Errors.


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rate": 0.2}, "another rate \\(0.1\\)"),
        ({"epochs": 2, "loss": "ls"}, "another loss and epochs \\('ce', 1\\)"),
        ({"milestones": (0.5,)}, "another milestones"),
    ],
)
def test_folder_with_another_recipe_is_refused(tmp_path, changes, named):
    trainer_of(tmp_path, short()).run()
    with pytest.raises(ValueError, match=f"{named}.*: name another folder, or remove that one"):
        trainer_of(tmp_path, short(**changes))


def test_folder_with_a_run_on_other_images_is_refused(tmp_path):
    trainer_of(tmp_path, short()).run()
    other = small_parts()
    other.test.images[3, 0, 0, 0] ^= 1
    with pytest.raises(ValueError, match=r"another data .*: name another folder"):
        trainer_of(tmp_path, short(), other)


@pytest.mark.parametrize("name", Parts._fields)
def test_empty_parts_are_refused(tmp_path, name):
    data = small_parts()
    data = data._replace(**{name: getattr(data, name).take(slice(0))})
    with pytest.raises(ValueError, match=f"the {name} part must have images, got none"):
        trainer_of(tmp_path, short(), data)


@pytest.mark.parametrize("name", Parts._fields)
@pytest.mark.parametrize("label", [CLASSES, -1])
def test_labels_that_are_no_classes_are_refused(tmp_path, name, label):
    data = small_parts()
    getattr(data, name).labels[2] = label
    with pytest.raises(ValueError, match=f"labels of the {name} part must be .*classes=4.*{label}"):
        trainer_of(tmp_path, short(), data)


def test_ignored_labels_are_accepted(tmp_path):
    data = small_parts()
    data.train.labels[:5] = -100
    trainer = trainer_of(tmp_path, short(), data)
    trainer.run()
    assert math.isfinite(trainer.log[0]["loss"])


def test_wrong_options_of_a_loss_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"options of the loss ls: .*beta"):
        trainer_of(tmp_path, short(loss="ls", loss_options={"beta": 1}))
    with pytest.raises(ValueError, match="theta must be above 0 and at most 1, got 2"):
        trainer_of(tmp_path, short(loss="fedlas_ls", loss_options={"theta": 2}))


def test_loss_that_is_not_finite_stops_the_run(tmp_path):
    trainer = trainer_of(tmp_path, short(rate=1e30))
    with pytest.raises(ValueError, match="the loss became nan in epoch 1: a lower rate may help"):
        trainer.run()
    assert not (tmp_path / "checkpoint.pt").exists()


# TensorBoard.


def test_missing_tensorboard_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        trainer_of(tmp_path, short(), tensorboard=True)


def test_log_is_handed_to_tensorboard(tmp_path, monkeypatch):
    given: list[object] = []

    class Writer:
        def __init__(self, folder):
            assert folder == str(tmp_path)

        def add_scalar(self, name, value, step):
            given.append((name, value, step))

        def flush(self):
            given.append("flush")

    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    trainer = trainer_of(tmp_path, short(epochs=2), tensorboard=True)
    trainer.run()
    expected: list[object] = []
    for epoch, row in enumerate(trainer.log, 1):
        expected += [*((name, value, epoch) for name, value in row.items()), "flush"]
    assert given == expected


@pytest.mark.filterwarnings("ignore")  # those of tensorboard are not ours
def test_tensorboard_reads_the_log(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer = trainer_of(tmp_path, short(epochs=2), tensorboard=True)
    trainer.run()
    events = reader.EventAccumulator(str(tmp_path)).Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    expected = [(row["epoch"], row["loss"]) for row in trainer.log]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


# Rows of results.


@pytest.fixture(scope="module")
def images():
    """Enough of them for calibrators, and a fifth with labels that cannot be known."""
    train, test = drawn(5, 960), drawn(6, 120)
    for part in (train, test):
        part.labels[::5] = np.roll(part.labels[::5], 1)
    return image_set(train, test)


@pytest.fixture(scope="module")
def ended(images, tmp_path_factory):
    """A run whose second epoch was the best: folder, rows, images of no class, and recipe."""
    folder = tmp_path_factory.mktemp("run") / "deeper" / "run"
    foreign = drawn(7, 40).images[:, :, ::-1].copy()
    recipe = short(loss="fedlas_ls", epochs=3, batch=32)
    said = iter([0.5, 0.9, 0.1])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training, "_accuracy", lambda _: next(said))
        found = results.train(
            images, recipe, folder, name="mine", held_out=0.5, ood=("odd", foreign), device="cpu"
        )
    return folder, found, foreign, recipe


def test_predictions_are_those_of_the_best_network(ended, images):
    folder, _, foreign, _ = ended
    file = open_dataset(folder / "predictions.npz")
    assert set(file.splits) == {"val", "test", "ood"}
    arrays = dict(np.load(folder / "predictions.npz"))
    split = parts(images, 0.5)
    network = NETWORKS["tiny"](classes=CLASSES, channels=3).eval()
    network.load_state_dict(torch.load(folder / "best.pt", weights_only=True))
    plain = split.train.images / 255
    mean, deviation = (f(plain, (0, 2, 3), keepdims=True) for f in (np.mean, np.std))
    given = {"val": split.val.images, "test": images.test.images, "ood": foreign}
    for name, pixels in given.items():
        scaled = torch.tensor((pixels / 255 - mean) / deviation, dtype=torch.float32)
        features = arrays[f"{name}_features"]
        assert features.dtype == np.float16
        with torch.no_grad():
            np.testing.assert_allclose(
                arrays[f"{name}_logits"], network(scaled), rtol=1e-4, atol=1e-4
            )
            np.testing.assert_allclose(features, network.features(scaled), rtol=2e-3, atol=1e-3)
        again = features.astype(np.float64) @ arrays["weight"].T + arrays["bias"]
        np.testing.assert_allclose(arrays[f"{name}_logits"], again, rtol=5e-3, atol=5e-3)
    np.testing.assert_array_equal(arrays["val_labels"], split.val.labels)
    np.testing.assert_array_equal(arrays["test_labels"], images.test.labels)
    assert set(arrays["ood_labels"].tolist()) == {-100}


def test_run_file_describes_the_run(ended, images):
    folder, _, _, recipe = ended
    about = json.loads((folder / "run.json").read_text())
    assert (about["data"], about["ood"], about["digest"]) == ("mine", "odd", images.digest)
    assert Recipe(**about["recipe"]) == recipe


def pairs_in_order(inside, outside):
    """Share of pairs in which the known one has the higher score; half for ties."""
    lead = inside[:, None] - outside[None]
    return ((lead > 0) + 0.5 * (lead == 0)).mean()


def figures_by_hand(probs, labels):
    sure, right = probs.max(1), probs.argmax(1) == labels
    number = np.ceil(15 * sure)  # of the bin
    gaps = [((sure - right)[number == bin_].sum() / len(sure)) for bin_ in range(1, 16)]
    equal = [part.sum() / len(sure) for part in np.array_split((sure - right)[sure.argsort()], 15)]
    return {
        "accuracy": right.mean(),
        "ece": np.abs(gaps).sum(),
        "ada_ece": np.abs(equal).sum(),
        "over_ece": np.maximum(gaps, 0).sum(),
        "under_ece": -np.minimum(gaps, 0).sum(),
        "nll": -np.log(probs[np.arange(len(labels)), labels]).mean(),
        "brier": ((probs - np.eye(CLASSES)[labels]) ** 2).sum(1).mean(),
        "auroc": pairs_in_order(sure[right], sure[~right]),
    }


def test_rows_are_figures_of_the_stored_logits(ended, images):
    folder, found, *_ = ended
    arrays = dict(np.load(folder / "predictions.npz"))
    fit_on, labels = (arrays["val_logits"], arrays["val_labels"]), arrays["test_labels"]
    made = {"ts": calibrant.TemperatureScaling(), "smart": calibrant.SMART()}
    assert [row["after"] for row in found] == ["none", *made]
    for row in found:
        logits, odd = arrays["test_logits"], arrays["ood_logits"]
        if row["after"] != "none":
            fitted = made[row["after"]].fit(*fit_on)
            logits, odd = fitted(torch.tensor(logits)), fitted(torch.tensor(odd)).numpy()
        probs, strange = (softmax(np.asarray(x, np.float64), 1) for x in (logits, odd))
        for name, expected in figures_by_hand(probs, labels).items():
            assert float(row[name]) == pytest.approx(expected, abs=2e-6), (row["after"], name)
        away = pairs_in_order(probs.max(1), strange.max(1))
        assert float(row["ood_auroc"]) == pytest.approx(away, abs=1e-3)
        assert row["digest"] == images.digest[:16]
        assert (row["data"], row["loss"], row["options"]) == ("mine", "fedlas_ls", "theta=0.95")
        assert list(row) == list(results.COLUMNS)
    assert found[0]["accuracy"] == found[1]["accuracy"]
    assert found[0]["nll"] != found[1]["nll"] != found[2]["nll"]
    assert results.rows(folder) == found


def test_run_without_images_of_no_class(images, tmp_path):
    found = results.train(images, short(batch=16), tmp_path, held_out=0.5, device="cpu")
    assert {(row["ood"], row["ood_auroc"]) for row in found} == {("", "")}
    assert open_dataset(tmp_path / "predictions.npz").splits == ["val", "test"]
    table = results.summary(found)
    assert [line[-1] for line in table] == ["OOD AUROC", "-", "-", "-"]


def test_summary_is_in_percent(ended):
    _, found, *_ = ended
    heading, *lines = results.summary(found)
    for row, line in zip(found, lines, strict=True):
        cells = dict(zip(heading, line, strict=True))
        assert (cells["loss"], cells["after"]) == (row["loss"], row["after"])
        assert float(cells["ECE"]) == pytest.approx(100 * float(row["ece"]), abs=0.005)
        assert float(cells["O-ECE"]) == pytest.approx(100 * float(row["over_ece"]), abs=0.005)
        assert float(cells["NLL"]) == pytest.approx(float(row["nll"]), abs=0.0005)
        assert float(cells["OOD AUROC"]) == pytest.approx(100 * float(row["ood_auroc"]), abs=0.05)


# The command that a row names.


@pytest.fixture
def parsed(images, monkeypatch):
    """Give a command to the real command line and return what it would train."""

    def call(command):
        made = []

        def noted(_, recipe, folder, *, name, ood, **rest):
            made.append((recipe, name, ood[0]))
            return []

        monkeypatch.setattr(results, "train", noted)
        monkeypatch.setattr(bench_images, "read_images", lambda path=None: images)
        first, *words = shlex.split(command)
        assert first == "calibrant"
        cli.main(words, standalone_mode=False)
        return made

    return call


def test_defaults_of_the_command_line(parsed):
    made = parsed("calibrant bench train --seed '0 4'")
    shown = ["ce", "ls", "mbls", "acls", "focal", "fedlas_ls", "fedlas_mbls"]
    assert [(r.loss, r.seed) for r, *_ in made] == [(x, s) for s in (0, 4) for x in shown]
    assert {(r.network, r.epochs, r.augment, d, o) for r, d, o in made} == {
        ("tiny", 30, False, "digits", "shuffled")
    }
    ((recipe, *_),) = parsed("calibrant bench train some.tar --loss ce")
    assert recipe == Recipe()


# The command line.


SHORT = ("--network", "tiny", "--epochs", 2, "--batch", 64, "--device", "cpu")


def test_bench_train_and_rows(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("bench", "train", "--loss", "ce,LS", *SHORT, "-o", "all")
    assert code == 0, err
    table = out.split("\n")
    assert table[0].split()[:3] == ["loss", "after", "accuracy"]
    assert [line.split()[:2] for line in table[1:7]] == [
        [loss, after] for loss in ("ce", "ls") for after in ("none", "ts", "smart")
    ]
    assert f"{Path('all/tiny-ce-0')}: ECE " in err
    first = Path("all/results.csv").read_text()
    rows = read_rows(first)
    assert [(row["loss"], row["after"]) for row in rows] == [
        (loss, after) for loss in ("ce", "ls") for after in ("none", "ts", "smart")
    ]
    assert {row["ood"] for row in rows} == {"shuffled"}
    held = parts(bench_images.read_images(), 0.3).val.labels
    stored = open_dataset("all/tiny-ce-0/predictions.npz").split("val").read("labels")
    np.testing.assert_array_equal(stored, held)

    code, out, _ = run("bench", "rows", "all/tiny-ce-0", "all/tiny-ls-0")
    assert (code, out) == (0, first)

    code, *_ = run("bench", "train", "--loss", "ce", *SHORT, "-o", "all", "--ood", "uniform")
    again = read_rows(Path("all/results.csv").read_text())
    assert (code, len(again)) == (0, 6)
    assert [row["ood"] for row in again] == ["uniform"] * 3 + ["shuffled"] * 3
    assert again[3:] == rows[3:]
    for row, before in zip(again[:3], rows[:3], strict=True):
        same = set(row) - {"ood", "ood_auroc"}
        assert {name: row[name] for name in same} == {name: before[name] for name in same}

    code, _, err = run("bench", "train", "--loss", "ce", *SHORT, "-o", "all", "--rate", 0.2)
    assert code == 2
    assert "holds a run with another rate (0.1)" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--loss", "ce ls", "--set", "alpha=0.1"), "--set is for one loss"),
        (("--set", "alpha=0.1"), "--set is for one loss"),
        (("--loss", "ls", "--set", "alpha"), "--set wants KEY=VALUE, got alpha"),
        (("--loss", "ls", "--set", "beta=1"), "error: options of the loss ls: .*beta"),
        (("--loss", "hinge"), "unknown loss 'hinge': choose from ce, brier, .*fedlas_mbls"),
        (("--loss", "ce", "--network", "vgg"), "unknown network 'vgg': choose from resnet18"),
        (("--loss", "ce", "--epochs", 0), "epochs must be at least 1, got 0"),
        (("--loss", "ce", "--ood", "nowhere"), "there is no nowhere"),
        (("nowhere.tar", "--loss", "ce"), "there is no nowhere.tar"),
        (("--loss", "ce", "--epochs", 1, "--rate", 1e30), "error: the loss became nan in epoch 1"),
    ],
)
def test_bad_calls_exit_with_2(run, tmp_path, words, message):
    code, out, err = run("bench", "train", *words, "-o", tmp_path)
    assert (code, out) == (2, "")
    assert re.search(message, err), err
    assert "bug" not in err


# Two processes.


SCRIPT = """
import copy, sys
from pathlib import Path
import numpy as np, torch
from calibrant.bench.images import Part, Parts
from calibrant.bench.train.ranks import joining
from calibrant.bench.train import Recipe, Trainer

home = Path(sys.argv[1])
given = np.load(home / "data.npz")
data = Parts(*(Part(given[f"{n}_images"], given[f"{n}_labels"]) for n in Parts._fields))
with joining() as ranks:
    assert ranks.size == 2
    for name, loss, changes in (
        ("ce", "ce", {}),
        ("fedlas_ls", "fedlas_ls", {"clip": 0.3, "loss_options": {"alpha": 0.5}}),
        ("crl", "crl", {}),
        ("augmented", "ce", {"augment": True}),
        ("left", "ce", {"batch": 13}),
    ):
        usual = {"network": "tiny", "epochs": 2, "batch": 10, "augment": False}
        folder = home / f"{name}-{ranks.rank}"
        recipe = Recipe(loss=loss, **{**usual, **changes})
        trainer = Trainer(data, 4, recipe, folder, device="cpu")
        start = copy.deepcopy((trainer.network.state_dict(), trainer.loss.state_dict()))
        order, inputs = [], []
        trainer.loss.register_forward_hook(lambda _, given, __: order.append(given[3].clone()))
        trainer.network.backbone.register_forward_pre_hook(
            lambda module, given: inputs.append(given[0].clone()) if module.training else None
        )
        trainer.run()
        state = {
            "start": start, "order": order, "inputs": inputs, "log": trainer.log,
            "network": trainer.network.state_dict(), "loss": trainer.loss.state_dict(),
            "files": sorted(p.name for p in folder.iterdir()),
        }
        torch.save(state, home / f"{name}-{ranks.rank}.pt")
"""


def launched(*words, cwd):
    """Run words under two processes of torchrun."""
    env = {**os.environ, "PYTHONPATH": str(Path(calibrant.__file__).parents[1])}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def shared_parts():
    return small_parts(train=27)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """States of both ranks by the name of the case."""
    home = tmp_path_factory.mktemp("pair")
    arrays: dict[str, Any] = {}
    for name, part in shared_parts()._asdict().items():
        arrays |= {f"{name}_images": part.images, f"{name}_labels": part.labels}
    np.savez(home / "data.npz", **arrays)
    (home / "script.py").write_text(SCRIPT)
    launched(home / "script.py", home, cwd=home)

    def states(name):
        return [torch.load(home / f"{name}-{rank}.pt", weights_only=True) for rank in (0, 1)]

    return states


CASES = ("ce", "fedlas_ls", "crl", "augmented", "left")


@pytest.mark.parametrize("name", CASES)
def test_ranks_agree_and_the_first_writes(pair, name):
    first, second = pair(name)
    assert_same(first["network"], second["network"])
    assert_same(first["loss"], second["loss"])
    np.testing.assert_equal(without_seconds(first["log"]), without_seconds(second["log"]))
    assert first["files"] == ["best.pt", "checkpoint.pt", "log.csv"]
    assert second["files"] == []


def test_ranks_share_every_batch(pair):
    first, second = pair("ce")
    assert [len(index) for index in first["order"]] == [5, 5, 4] * 2
    assert [len(index) for index in second["order"]] == [5, 5, 3] * 2
    every = torch.cat([*first["order"][:3], *second["order"][:3]])
    assert sorted(every.tolist()) == list(range(27))


def test_last_batch_that_is_too_small_for_all_is_left_out(pair):
    first, second = pair("left")
    assert [len(index) for index in first["order"]] == [7, 7] * 2
    assert [len(index) for index in second["order"]] == [6, 6] * 2


def test_ranks_draw_their_own_shifts(pair):
    """Which of an image's shifts and mirrored forms was used, in each of the steps."""
    first, second = pair("augmented")
    scaled = scaled_by_hand(shared_parts())
    drawn_by = []
    for state in (first, second):
        moves = []
        for index, used in zip(state["order"], state["inputs"], strict=True):
            moves += [_move(scaled[i], image) for i, image in zip(index, used, strict=True)]
        drawn_by.append(moves)
    assert len(set(drawn_by[0])) > 10
    same = sum(a == b for a, b in zip(*drawn_by, strict=False))
    assert same < 5


def _move(image, used):
    padded = nn.functional.pad(image, (4,) * 4)
    for down in range(9):
        for right in range(9):
            cut = padded[:, down : down + 8, right : right + 8]
            for mirrored in (False, True):
                if torch.allclose(cut.flip(-1) if mirrored else cut, used, atol=1e-4):
                    return down, right, mirrored
    raise AssertionError("no move gives this image")


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


@pytest.mark.parametrize("name", ["ce", "fedlas_ls", "crl"])
def test_two_ranks_step_as_one_process_would(pair, name):
    """Means, gate and moving figures of the whole batch, with batch normalisation by halves."""
    first, second = pair(name)
    data = shared_parts()
    images, labels = scaled_by_hand(data), torch.tensor(data.train.labels)
    recipe = short(loss=name, batch=10, clip=0.3 if name == "fedlas_ls" else 2.0, epochs=2)
    network = NETWORKS["tiny"](classes=CLASSES, channels=3)
    network.load_state_dict(first["start"][0])
    made: dict[str, nn.Module] = {
        "ce": nn.CrossEntropyLoss(),
        "fedlas_ls": FeDLaS(CLASSES, alpha=0.5, theta=0.95),
        "crl": CRL(27),
    }
    criterion: Any = made[name]
    criterion.load_state_dict(first["start"][1])
    descent = PlainDescent(network, criterion, recipe)
    losses, gate = [], []
    for step, halves in enumerate(zip(first["order"], second["order"], strict=True)):
        features, logits = halves_by_hand(network, images, halves)
        every = torch.cat(halves)
        if name == "crl":
            value = crl_by_hand(criterion, logits, labels, halves)
        elif name == "fedlas_ls":
            value = criterion(torch.cat(logits), labels[every], torch.cat(features))
            gate.append(torch.stack(criterion.last))
        else:
            value = criterion(torch.cat(logits), labels[every])
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


def test_history_of_two_ranks_counts_every_image(pair):
    first, _ = pair("crl")
    assert first["loss"]["seen_"].tolist() == [2] * 27
    assert 0 < first["loss"]["right_"].sum() < 54


def test_command_line_under_two_processes(tmp_path):
    done = launched(
        *("-m", "calibrant", "bench", "train", "--loss", "ce fedlas_ls", *SHORT), cwd=tmp_path
    )
    rows = read_rows((tmp_path / "runs" / "results.csv").read_text())
    assert [(row["loss"], row["after"]) for row in rows] == [
        (loss, after) for loss in ("ce", "fedlas_ls") for after in ("none", "ts", "smart")
    ]
    assert done.stdout.count("OOD AUROC") == 1
    assert done.stderr.count("tiny-ce-0: ECE") == 1
    assert results.rows(tmp_path / "runs" / "tiny-ce-0") == rows[:3]


def test_a_short_run_begins_at_its_full_rate():
    assert Recipe(epochs=1).rate_at(0) == 0.1


def test_a_device_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="there is no device 'cuda:7' here"):
        ranks.chosen_device("cuda:7")


def test_mixup_is_the_mixed_loss_of_mixed_images(tmp_path):
    cut = parts(image_set(*some_parts(6)))
    trainer = Trainer(cut, 3, Recipe(network="tiny", epochs=1, mixup=2.0), tmp_path / "run")
    trainer.network.eval()
    index = torch.tensor([4, 0, 2, 7])
    images = trainer._scaled(trainer.parts["train"].images[index])
    found = trainer._loss(images, index, torch.Generator().manual_seed(5))
    random = torch.Generator().manual_seed(5)
    seed = int(torch.randint(1 << 62, (), generator=random))
    share = np.random.default_rng(seed).beta(2.0, 2.0)
    other = torch.randperm(4, generator=random)
    logits = trainer.network(share * images + (1 - share) * images[other])
    labels = trainer.parts["train"].labels[index]
    wanted = share * nn.functional.cross_entropy(logits, labels)
    wanted += (1 - share) * nn.functional.cross_entropy(logits, labels[other])
    torch.testing.assert_close(found, wanted)
    assert 0.01 < share < 0.99
    with pytest.raises(ValueError, match="mixup must be at least 0"):
        Recipe(mixup=-1)


def test_mixup_lowers_the_confidence_of_a_run(tmp_path):
    images = image_set(*some_parts(40))
    sure = {}
    for mixup in (0.0, 1.0):
        recipe = Recipe(network="tiny", epochs=6, batch=20, mixup=mixup, augment=False)
        trainer = Trainer(parts(images), 3, recipe, tmp_path / str(mixup))
        trainer.run()
        sure[mixup] = trainer.outputs("test").logits.softmax(-1).amax(-1).mean()
    assert sure[1.0] < sure[0.0]


def some_parts(count):
    """Train and test images of three classes that differ in their brightness."""
    rng = np.random.default_rng(0)
    labels = np.arange(3 * count) % 3
    pixels = rng.integers(0, 60, (3 * count, 1, 8, 8)) + 60 * labels[:, None, None, None]
    whole = Part(pixels.astype(np.uint8), labels.astype(np.int64))
    return whole, whole
