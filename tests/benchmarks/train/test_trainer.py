"""Training against a plain loop, continued runs, checkpoints, and refused data."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.train.images import ImageSplit, TrainingSplits
from benchmarks.train.trainer import Trainer, channel_moments, shift_and_mirror
from calibrant.losses import LOSSES
from tests.support.training import (
    CLASSES,
    NEAR,
    PlainDescent,
    assert_same,
    make_trainer,
    read_rows,
    short_recipe,
    small_splits,
    standardised_by_hand,
    without_seconds,
)


def test_channel_moments_are_those_of_numpy(rng):
    images = rng.integers(0, 256, (20, 3, 5, 7), np.uint8)
    images[:, 1] = images[:, 1] // 9 + 3
    mean, deviation = channel_moments(images)
    assert mean.shape == deviation.shape == (1, 3, 1, 1)
    np.testing.assert_allclose(mean.ravel(), (images / 255).mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(deviation.ravel(), (images / 255).std((0, 2, 3)), rtol=1e-6)


@pytest.mark.parametrize("value", [0, 97, 255])
def test_constant_channel_becomes_zero(tmp_path, value):
    splits = small_splits()
    for split in splits:
        split.images[:, 1] = value
    assert channel_moments(splits.train.images)[1][0, 1] == 1
    trainer = make_trainer(tmp_path, splits=splits)
    assert trainer.standardised(trainer.splits["val"][0])[:, 1].abs().max() < 1e-6


# One epoch.


def recorded_batches(trainer):
    """Indices of the batches that the loss will get."""
    batches: list[torch.Tensor] = []
    trainer.loss.register_forward_hook(lambda _, args, __: batches.append(args[3].clone()))
    return batches


@pytest.mark.parametrize(("loss", "clip"), [("ce", 0.3), ("fedlas_ls", 0.3), ("fedlas_ls", 1e6)])
def test_epochs_are_those_of_a_plain_loop(tmp_path, loss, clip):
    options = {"alpha": 0.5} if loss == "fedlas_ls" else {}  # so that the gate moves visibly
    settings = {"epochs": 2, "milestones": (0.5,), "decay": 0.05, "seed": 5}
    recipe = short_recipe(loss=loss, loss_options=options, clip=clip, **settings)
    splits = small_splits()
    trainer = make_trainer(tmp_path, recipe, splits)
    network, criterion = copy.deepcopy(trainer.network).train(), copy.deepcopy(trainer.loss)
    before = {name: p.clone() for name, p in criterion.state_dict().items()}
    batches = recorded_batches(trainer)
    trainer.run()
    images = standardised_by_hand(splits.train.images, splits.train.images)
    labels = torch.tensor(splits.train.labels)
    descent, values = PlainDescent(network, criterion, recipe), []
    for number, index in enumerate(batches):
        features = network.backbone(images[index]).mean((-2, -1))
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


def test_batches_contain_every_image_once_in_an_order_of_seed_and_epoch(tmp_path):
    orders = {}
    for seed in (0, 1):
        trainer = make_trainer(tmp_path / str(seed), short_recipe(epochs=2, seed=seed))
        batches = recorded_batches(trainer)
        trainer.run()
        assert [len(index) for index in batches] == [8, 8, 8, 2] * 2
        for epoch in (0, 1):
            orders[seed, epoch] = torch.cat(batches[4 * epoch :][:4]).tolist()
    assert all(sorted(order) == list(range(26)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 4


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_trains(tmp_path, loss):
    trainer = make_trainer(tmp_path, short_recipe(loss=loss, augment=True, batch=13))
    before = copy.deepcopy(trainer.network.state_dict())
    trainer.run()
    weights = trainer.network.state_dict()
    assert all(value.isfinite().all() for value in weights.values())
    assert not torch.equal(weights["last.weight"], before["last.weight"])
    assert all(math.isfinite(v) for k, v in trainer.log[0].items() if k != "gate_flips")


def test_half_precision_stays_near(tmp_path):
    whole, half = (
        make_trainer(tmp_path / str(half), short_recipe(half=half, rate=0.01))
        for half in (False, True)
    )
    for trainer in (whole, half):
        trainer.run()
    outputs, expected = half.outputs("test"), whole.outputs("test")
    assert outputs.logits.dtype == outputs.features.dtype == torch.float32
    torch.testing.assert_close(outputs.logits, expected.logits, rtol=0.1, atol=0.1)
    assert not torch.equal(outputs.logits, expected.logits)
    # the last layer is not rounded
    last = half.network.last
    again = outputs.features @ last.weight.T + last.bias
    torch.testing.assert_close(outputs.logits, again.detach(), rtol=1e-5, atol=1e-5)


def test_mixup_is_the_mixed_loss_of_mixed_images(tmp_path):
    trainer = make_trainer(tmp_path, short_recipe(mixup=2.0))
    trainer.network.eval()
    index = torch.tensor([4, 0, 2, 7])
    images = trainer.standardised(trainer.images[index])
    loss = trainer._loss(images, index, torch.Generator().manual_seed(5))
    random = torch.Generator().manual_seed(5)
    seed = int(torch.randint(1 << 62, (), generator=random))
    share = np.random.default_rng(seed).beta(2.0, 2.0)
    order = torch.randperm(4, generator=random)
    logits, _ = trainer.network(share * images + (1 - share) * images[order])
    labels = trainer.labels[index]
    expected = share * nn.functional.cross_entropy(logits, labels)
    expected += (1 - share) * nn.functional.cross_entropy(logits, labels[order])
    torch.testing.assert_close(loss, expected)
    assert 0.01 < share < 0.99


def test_mixup_lowers_the_confidence_of_a_run(tmp_path):
    confidence = {}
    for mixup in (0.0, 1.0):
        recipe = short_recipe(epochs=3, batch=20, mixup=mixup)
        trainer = make_trainer(tmp_path / str(mixup), recipe, small_splits(train=80))
        trainer.run()
        confidence[mixup] = trainer.outputs("train").logits.softmax(-1).amax(-1).mean()
    assert confidence[1.0] < confidence[0.0]


# Stopped runs, continued.


class Stop(Exception):
    pass


def stopping_at(step):
    def progress(done, _):
        if done == step:
            raise Stop

    return progress


class StopsAfterSaving(Trainer):
    def _save(self):
        super()._save()
        raise Stop


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


@pytest.mark.parametrize(
    ("loss", "memory"), [("fedlas_ls", "mean_"), ("adafocal", "gamma_"), ("crl", "seen_")]
)
def test_stopped_run_continues_to_the_same_result(tmp_path, loss, memory):
    recipe = short_recipe(loss=loss, epochs=3, augment=True)
    whole = make_trainer(tmp_path / "whole", recipe)
    before = whole.loss.state_dict()[memory].clone()
    whole.run()
    assert not torch.equal(whole.loss.state_dict()[memory], before)  # there is something to keep
    for step in (2, 6, 8):  # in the first epoch, in the second, and at its end, before it is saved
        stopped = make_trainer(tmp_path / "stopped", recipe)
        with pytest.raises(Stop):
            stopped.run(stopping_at(step))
    torch.rand(7)  # the global generator is of no importance
    with pytest.raises(Stop):
        StopsAfterSaving(small_splits(), CLASSES, recipe, tmp_path / "stopped", device="cpu").run()
    again = make_trainer(tmp_path / "stopped", recipe)
    assert again.epoch == 2
    steps = []
    again.run(lambda *progress: steps.append(progress))
    assert steps == [(step, 12) for step in (9, 10, 11, 12)]
    assert_runs_agree(tmp_path / "stopped", tmp_path / "whole")
    assert_same(again.network.state_dict(), whole.network.state_dict())
    assert_same(again.loss.state_dict(), whole.loss.state_dict())


def test_adafocal_observes_the_validation_split_after_each_epoch(tmp_path):
    trainer = make_trainer(tmp_path, short_recipe(loss="adafocal"))
    expected = copy.deepcopy(trainer.loss)
    trainer.run()
    val = trainer.outputs("val")
    expected.observe(val.logits, val.labels)
    assert_same(trainer.loss.state_dict(), expected.state_dict())


def test_best_checkpoint_has_the_best_validation_accuracy(tmp_path):
    """Validation labels are the predictions after the second epoch: the others are worse."""
    states, predicted = [], []

    class Recording(Trainer):
        def _save(self):
            super()._save()
            states.append(copy.deepcopy(self.network.state_dict()))
            predicted.append(self.outputs("val").logits.argmax(-1))

    recipe, splits = short_recipe(epochs=4), small_splits()
    Recording(splits, CLASSES, recipe, tmp_path / "first", device="cpu").run()
    states.clear()
    labels = predicted[1].numpy().copy()
    splits = splits._replace(val=ImageSplit(splits.val.images, labels))
    trainer = Recording(splits, CLASSES, recipe, tmp_path / "second", device="cpu")
    trainer.run()
    accuracies = [row["val_accuracy"] for row in trainer.log]
    np.testing.assert_allclose(accuracies, [(p.numpy() == labels).mean() for p in predicted[4:]])
    assert accuracies[1] == 1 > max(accuracies[0], accuracies[3])
    assert_same(torch.load(tmp_path / "second" / "best.pt", weights_only=True), states[1])
    assert_same(trainer.network.state_dict(), states[3])
    trainer.use_best()
    assert_same(trainer.network.state_dict(), states[1])


def test_completed_run_is_not_repeated_and_not_mixed_with_another(tmp_path):
    make_trainer(tmp_path).run()
    before = (tmp_path / "checkpoint.pt").stat().st_mtime_ns
    again = make_trainer(tmp_path)
    again.run(stopping_at(1))
    assert (tmp_path / "checkpoint.pt").stat().st_mtime_ns == before
    assert len(again.log) == 1
    for changes, message in (
        ({"rate": 0.2}, "another rate \\(0.1\\)"),
        ({"epochs": 2, "loss": "ls"}, "another loss and epochs \\('ce', 1\\)"),
        ({"milestones": (0.5,)}, "another milestones"),
    ):
        with pytest.raises(ValueError, match=f"{message}.*: remove it, or use another folder"):
            make_trainer(tmp_path, short_recipe(**changes))
    other = small_splits()
    other.test.images[3, 0, 0, 0] ^= 1
    with pytest.raises(ValueError, match=r"another data .*: remove it"):
        make_trainer(tmp_path, splits=other)


# Data.


@pytest.mark.parametrize("name", TrainingSplits._fields)
def test_empty_splits_and_labels_without_a_class_are_refused(tmp_path, name):
    splits = small_splits()
    empty = splits._replace(**{name: getattr(splits, name).subset(slice(0))})
    with pytest.raises(ValueError, match=f"the {name} split must have images, got none"):
        make_trainer(tmp_path, splits=empty)
    for label in (CLASSES, -1):
        getattr(splits, name).labels[2] = label
        with pytest.raises(ValueError, match=f"of the {name} split must be from 0 to 3.*{label}"):
            make_trainer(tmp_path, splits=splits)


def test_ignored_labels_are_accepted(tmp_path):
    splits = small_splits()
    splits.train.labels[:5] = -100
    trainer = make_trainer(tmp_path, splits=splits)
    trainer.run()
    assert math.isfinite(trainer.log[0]["loss"])


def test_loss_that_is_not_finite_stops_the_run(tmp_path):
    trainer = make_trainer(tmp_path, short_recipe(rate=1e30))
    with pytest.raises(ValueError, match="the loss became nan in epoch 1: lower the rate"):
        trainer.run()
    assert not (tmp_path / "checkpoint.pt").exists()


# Shifted and mirrored images.


def pixel_by_pixel(images, random, shift):
    """Cut each image out of one with black around it."""
    count, _, height, width = images.shape
    down = torch.randint(0, 2 * shift + 1, (count, 1), generator=random)
    right = torch.randint(0, 2 * shift + 1, (count, 1), generator=random)
    mirrored = torch.rand((count, 1), generator=random) < 0.5
    moved = torch.zeros_like(images)
    for i in range(count):
        for y in range(height):
            for x in range(width):
                from_y = y + int(down[i]) - shift
                from_x = (width - 1 - x if mirrored[i] else x) + int(right[i]) - shift
                if 0 <= from_y < height and 0 <= from_x < width:
                    moved[i, :, y, x] = images[i, :, from_y, from_x]
    return moved


@pytest.mark.parametrize(
    ("dtype", "shift"), [(torch.float32, 4), (torch.bfloat16, 1), (torch.uint8, 4)]
)
def test_images_are_moved_as_in_the_slow_definition(dtype, shift):
    images = torch.randint(1, 256, (12, 3, 8, 6)).to(dtype)
    one, other = (torch.Generator().manual_seed(5) for _ in range(2))
    moved = shift_and_mirror(images, one, shift)
    assert (moved.dtype, moved.shape) == (dtype, images.shape)
    assert torch.equal(moved, pixel_by_pixel(images, other, shift))


def test_half_are_mirrored_and_all_shifts_are_equally_likely():
    count = 8100
    image = torch.arange(1.0, 257).reshape(1, 1, 16, 16)
    moved = shift_and_mirror(image.expand(count, 1, 16, 16), torch.Generator().manual_seed(1))[:, 0]
    inner = moved[:, 6:9, 6:9]  # never touched by the black border
    step = inner[:, 0, 1] - inner[:, 0, 0]
    assert set(step.tolist()) == {1.0, -1.0}
    assert abs((step < 0).double().mean() - 0.5) < 4 * 0.5 / math.sqrt(count)
    y, x = (inner[:, 1, 1] - 1).long() // 16, (inner[:, 1, 1] - 1).long() % 16
    shifts = torch.stack([y - 7, torch.where(step < 0, x - 8, x - 7)])
    assert (int(shifts.min()), int(shifts.max())) == (-4, 4)
    counts = torch.bincount((shifts[0] + 4) * 9 + shifts[1] + 4, minlength=81)
    assert (counts - 100).abs().max() < 45  # 4.5 deviations of a count of 100


# The log, and the gate of FeDLaS.


def test_log_file_has_the_figures_of_each_epoch(tmp_path):
    trainer = make_trainer(tmp_path, short_recipe(epochs=2, loss="fedlas_ls"))
    trainer.run()
    rows = read_rows((tmp_path / "log.csv").read_text())
    for row, expected in zip(rows, trainer.log, strict=True):
        assert list(row) == list(expected)
        np.testing.assert_allclose(
            [float(v) for v in row.values()], list(expected.values()), rtol=1e-5
        )


@pytest.mark.parametrize(("loss", "alpha"), [("fedlas_ls", 0.05), ("fedlas_mbls", 0.1)])
def test_statistics_are_those_of_the_signs_and_weights_of_each_batch(tmp_path, loss, alpha):
    trainer = make_trainer(tmp_path, short_recipe(loss=loss, epochs=3))
    batches = []
    trainer.loss.register_forward_hook(
        lambda module, args, _: batches.append((args[3].tolist(), module.last))
    )
    trainer.run()
    before: dict[int, float] | None = None
    for epoch, row in enumerate(trainer.log):
        signs: dict[int, float] = {}
        weights: list[float] = []
        for index, (batch_signs, batch_weights) in batches[4 * epoch :][:4]:
            signs |= dict(zip(index, batch_signs.tolist(), strict=True))
            weights += batch_weights.tolist()
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


def test_changed_signs_are_counted(tmp_path):
    trainer = make_trainer(tmp_path, short_recipe(loss="fedlas_ls", epochs=2))
    with torch.no_grad():
        trainer.loss.gate[2].bias.copy_(torch.tensor([0.0, 50.0]))

    def turn(done, _):
        if done == 5:  # after the first batch of the second epoch, which was still positive
            with torch.no_grad():
                trainer.loss.gate[2].bias.copy_(torch.tensor([50.0, 0.0]))

    trainer.run(turn)
    first, second = trainer.log
    assert (first["gate_positive"], second["gate_positive"]) == (1, pytest.approx(8 / 26))
    assert second["gate_flips"] == pytest.approx(18 / 26)
