"""MaC-Cal: the masked head, its control, its training, and networks that get a new head."""

import copy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import calibrant as cal
from calibrant.retrain import maccal
from calibrant.retrain.adapter import as_calibrator
from calibrant.retrain.backbone import replace_head
from calibrant.retrain.keep_rate import KeepRate
from calibrant.retrain.maccal import MaCCal
from calibrant.retrain.masked_classifier import MaskedClassifier, masked_step
from calibrant.workflows.retrain import retrain

WIDTH, CLASSES = 12, 4
QUICK: dict[str, Any] = {"bottleneck": 16, "epochs": 3, "batch_size": 32, "step": 0.0}


def clouds(rng, n=300, distance=3.0):
    """Features around a centre for each class."""
    labels = rng.integers(CLASSES, size=n)
    features = rng.normal(size=(n, WIDTH)) + distance * np.eye(CLASSES, WIDTH)[labels]
    return features.astype(np.float32), labels


@pytest.fixture
def data(rng):
    return clouds(rng)


# -------------------------------------------------------------------------------------- the head


def by_hand(head, features, first, second):
    """The two layers, written with NumPy in float64."""
    state = {name: value.double().numpy() for name, value in head.state_dict().items()}
    hidden = features @ (state["first.weight"] * first).T + state["first.bias"]
    return np.maximum(hidden, 0) @ (state["second.weight"] * second).T + state["second.bias"]


@pytest.mark.parametrize("mode", [True, False])
def test_without_masks_the_weights_and_not_the_biases_are_multiplied_by_q(rng, mode):
    head = MaskedClassifier(WIDTH, CLASSES, seed=3).train(mode)
    head.keep_.fill_(0.25)
    features = rng.normal(size=(5, WIDTH))
    found = head(torch.tensor(features)).detach()
    np.testing.assert_allclose(found, by_hand(head, features, 0.25, 0.25), atol=1e-6)


def test_masks_are_used_as_they_are_and_nothing_is_divided_by_q(rng):
    head = MaskedClassifier(WIDTH, CLASSES, seed=3)
    head.keep_.fill_(0.5)
    first, second = head.draw(torch.Generator().manual_seed(0))
    features = rng.normal(size=(5, WIDTH))
    found = head(torch.tensor(features), (first, second)).detach()
    np.testing.assert_allclose(
        found, by_hand(head, features, first.numpy(), second.numpy()), atol=1e-6
    )


def test_masks_keep_a_share_q_of_each_matrix():
    head = MaskedClassifier(400, 50, bottleneck=300)
    head.keep_.fill_(0.3)
    masks = head.draw(torch.Generator().manual_seed(1))
    assert [mask.shape for mask in masks] == [head.first.weight.shape, head.second.weight.shape]
    for mask in masks:
        assert set(mask.unique().tolist()) == {0.0, 1.0}
        assert mask.mean() == pytest.approx(0.3, abs=4 * np.sqrt(0.21 / mask.numel()))


@pytest.mark.parametrize(
    ("width", "classes", "expected"), [(512, 10, 128), (2048, 10, 256), (64, 100, 100), (4, 3, 64)]
)
def test_default_bottleneck(width, classes, expected):
    assert MaskedClassifier(width, classes).bottleneck == expected


def test_average_over_masks_is_the_mean_probability(rng):
    """With one unit in the way every mask is one of eight, whose probabilities are known."""
    head = MaskedClassifier(1, 2, bottleneck=1, samples=1000)
    head.keep_.fill_(0.6)
    features = np.array([[2.0]])
    with torch.no_grad():
        head.first.weight.fill_(1.5)
        head.first.bias.zero_()
        head.second.weight.copy_(torch.tensor([[1.0], [-2.0]]))
    expected = np.zeros(2)
    for m in np.ndindex(2, 2, 2):
        chance = np.prod([0.6 if kept else 0.4 for kept in m])
        logits = by_hand(head, features, m[0], np.array([[m[1]], [m[2]]]))[0]
        expected += chance * np.exp(logits) / np.exp(logits).sum()
    found = head(torch.tensor(features)).detach()[0]
    np.testing.assert_allclose(found.exp(), expected, atol=0.05)
    assert torch.equal(found, head(torch.tensor(features)).detach()[0])  # the same masks each time
    half = head(torch.tensor(features).half()).detach()[0]
    assert half.dtype == torch.float32


def test_width_of_features_is_checked():
    with pytest.raises(ValueError, match=r"must be \(\.\.\., 12\).*got \(2, 5\)"):
        MaskedClassifier(WIDTH, CLASSES)(torch.zeros(2, 5))


# -------------------------------------------------------------------------------------- the step

OPTIMISERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_masked_weights_stay_and_the_others_take_the_step_of_the_optimiser(data, name):
    features, labels = map(torch.tensor, data)
    head = MaskedClassifier(WIDTH, CLASSES, bottleneck=8)
    head.keep_.fill_(0.5)
    optimiser, random = OPTIMISERS[name](head.parameters()), torch.Generator().manual_seed(0)
    moved_by_plain_step = 0
    for _ in range(5):  # so that momentum and averages hold earlier gradients
        masks = head.draw(random)
        optimiser.zero_grad()
        F.cross_entropy(head(features, masks), labels).backward()
        before, plain = copy.deepcopy(head), copy.deepcopy(head)
        other = OPTIMISERS[name](plain.parameters())
        other.load_state_dict(copy.deepcopy(optimiser.state_dict()))
        for ours, theirs in zip(head.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            theirs.grad = ours.grad.clone()
        masked_step(optimiser, head, masks)
        other.step()
        for layer, mask in zip(("first", "second"), masks, strict=True):
            now, old, free = (getattr(m, layer) for m in (head, before, plain))
            out = mask == 0
            assert torch.equal(now.weight[out], old.weight[out])
            assert torch.equal(now.weight[~out], free.weight[~out])
            assert torch.equal(now.bias, free.bias)
            assert not torch.equal(now.bias, old.bias)
            moved_by_plain_step += int((free.weight[out] != old.weight[out]).sum())
    assert moved_by_plain_step > 0  # otherwise there was nothing to put back


def test_masks_are_in_the_forward_pass_and_in_the_update_of_a_fit(data, monkeypatch):
    """One batch, one epoch, q = 0.5: the weights that moved are those of one mask."""
    start = MaskedClassifier(WIDTH, CLASSES, bottleneck=16)
    start.keep_.fill_(0.5)
    masks = start.draw(torch.Generator().manual_seed(0))
    module = MaCCal(**{**QUICK, "epochs": 1, "batch_size": 1000, "keep": 0.5}).fit(*data)
    first = module.classifier.first
    moved = first.weight != start.first.weight
    assert not moved[masks[0] == 0].any()
    assert moved[masks[0] == 1].float().mean() > 0.5
    # the forward pass too: Adam moves the biases by the sign of the gradient under these masks
    features, labels = map(torch.tensor, data)
    F.cross_entropy(start(features, masks), labels).backward()
    change, slope = module.classifier.second.bias - start.second.bias, start.second.bias.grad
    assert slope is not None
    assert torch.equal(change.sign(), -slope.sign())
    np.testing.assert_allclose(change.abs().detach(), module.rate, rtol=1e-3)


# ----------------------------------------------------------------------------------- the control


def test_q_falls_when_confidence_exceeds_gamma_times_accuracy_and_rises_otherwise():
    def after(confidence, accuracy, gamma=1.0):
        return KeepRate(0.5, 0.5, gamma, 0.1).update(confidence, accuracy)

    assert after(0.95, 0.90) == pytest.approx(0.5 - 0.5 * 0.05)
    assert after(0.85, 0.90) == pytest.approx(0.5 + 0.5 * 0.05)
    assert after(0.95, 1.00, gamma=0.9) == pytest.approx(0.5 - 0.5 * 0.05)
    assert after(0.95, 1.00, gamma=1.0) == pytest.approx(0.5 + 0.5 * 0.05)
    assert after(0.90, 0.90) == 0.5


def test_q_stays_within_its_bounds_and_moves_by_a_tenth_at_most():
    control = KeepRate(0.35, 100.0, 1.0, 0.2)
    seen = [control.update(0.9, 0.5) for _ in range(3)]
    assert seen == pytest.approx([0.25, 0.2, 0.2])
    seen = [control.update(0.5, 0.9) for _ in range(12)]
    assert seen[0] == pytest.approx(0.3)
    assert seen[-1] == 1.0


def test_step_is_halved_at_each_change_of_sign_down_to_a_sixteenth():
    control = KeepRate(0.5, 0.8, 1.0, 0.1)
    steps = []
    for confidence in (0.91, 0.92, 0.89, 0.91, 0.89, 0.91, 0.89, 0.91):
        control.update(confidence, 0.9)
        steps.append(control.step)
    assert steps == pytest.approx([0.8, 0.8, 0.4, 0.2, 0.1, 0.05, 0.05, 0.05])


def test_control_finds_the_q_at_which_confidence_is_right():
    """A made-up head whose confidence is known to be 0.6 + 0.5 q, with accuracy 0.8: q is 0.4."""
    control = KeepRate(0.9, 4.0, 1.0, 0.1)
    for _ in range(40):
        control.update(0.6 + 0.5 * control.keep, 0.8)
    assert control.keep == pytest.approx(0.4, abs=1e-3)


# ------------------------------------------------------------------------------------ simulation


def saturated(rng, n, seen):
    """Features of a network that was trained to the end, of images that it has seen or not.

    A unit for each class is at 4 for the label, with noise of 0.3: of a seen image for its label
    itself; of an unseen one for another class in one case of five, and then nothing tells.
    """
    labels = rng.integers(CLASSES, size=n)
    shown = labels if seen else np.where(rng.random(n) < 0.8, labels, rng.integers(CLASSES, size=n))
    features = 4 * np.eye(CLASSES)[shown] + 0.3 * rng.normal(size=(n, CLASSES))
    return features.astype(np.float32), labels


def test_confidence_on_saturated_features_comes_to_the_known_accuracy():
    """The truth: an unseen answer is right in 80 % + 20 % / 4 = 85 %, whatever the features are."""
    rng = np.random.default_rng(0)
    train, val, test = (saturated(rng, n, seen) for n, seen in ((2000, True), (4000, 0), (8000, 0)))
    options: dict[str, Any] = {"bottleneck": 32, "batch_size": 100, "rate": 0.003}
    held = MaCCal(**options).fit(*train, held_out=val)
    plain = MaCCal(keep=1.0, step=0.0, **options).fit(*train)
    found, before = (m.predict_proba(test[0]) for m in (held, plain))
    accuracy = (found.argmax(-1) == test[1]).mean()
    assert accuracy == pytest.approx(0.85, abs=0.015)
    assert before.max(-1).mean() > 0.98
    assert found.max(-1).mean() == pytest.approx(accuracy, abs=0.02)
    figures = (cal.evaluate(probs=p, labels=test[1], level=None) for p in (found, before))
    after, without = figures
    assert after["ece"].value < 0.03 < 0.12 < without["ece"].value
    assert after["nll"].value < without["nll"].value
    # a slice of what the network has seen cannot know: all of it is right
    with pytest.warns(UserWarning, match="every held-out example is predicted right"):
        sliced = MaCCal(**options).fit(*train, held_out=0.1)
    assert sliced.predict_proba(test[0]).max(-1).mean() > 0.95


def test_control_on_the_training_set_brings_masked_confidence_to_gamma_times_accuracy():
    train = saturated(np.random.default_rng(0), 2000, True)
    module = MaCCal(bottleneck=32, batch_size=100, rate=0.003, gamma=0.9, epochs=30).fit(*train)
    last = module.history[-1]
    assert last.accuracy > 0.95
    assert last.confidence == pytest.approx(0.9 * last.accuracy, abs=0.02)
    assert last.keep < 0.7
    assert module.predict_proba(train[0]).max(-1).mean() > last.confidence  # without masks


# ------------------------------------------------------------------------------------------- fit


def test_history_is_what_the_control_saw(data, rng, monkeypatch):
    monkeypatch.setattr(maccal, "WARM_UP", 1)
    val = clouds(rng, 200, 1.5)
    options = {**QUICK, "epochs": 4, "step": 1.0, "gamma": 1.0, "rate": 0.01}
    with pytest.warns(UserWarning, match="did not settle"):
        module = MaCCal(**options).fit(*data, held_out=val)
    history = module.history
    assert module.history_.shape == (4, 4)
    assert float(module.classifier.keep_) == history[-1].keep
    probs = module.predict_proba(val[0])
    assert history[-1].confidence == pytest.approx(probs.max(-1).mean(), abs=1e-6)
    assert history[-1].accuracy == pytest.approx((probs.argmax(-1) == val[1]).mean())
    control = KeepRate(0.9, 1.0, 1.0, 0.1)
    for last, now in pairwise(history):
        assert now.keep == pytest.approx(control.update(last.confidence, last.accuracy), abs=1e-6)
    assert history[0].loss > history[-1].loss


def test_little_data_is_learned_before_the_control_begins(rng):
    train, val, test = (clouds(rng, n, 2.5) for n in (600, 300, 2000))
    module = MaCCal().fit(*train, held_out=val)
    steps = -(-600 // 256)
    assert len(module.history) == -(-2000 // steps)
    begun = next(
        n for n, epoch in enumerate(module.history) if abs(epoch.keep - module.keep) > 1e-6
    )
    assert begun * steps >= 100
    probs = module.predict_proba(test[0])
    assert (probs.argmax(-1) == test[1]).mean() > 0.85
    assert cal.ece(np.log(probs), test[1]) < 0.05


def test_warns_of_a_classifier_that_has_hardly_learned(rng):
    train = clouds(rng, 200, 0.0)
    with pytest.warns(UserWarning, match="has hardly learned: accuracy"):
        MaCCal(**{**QUICK, "step": 1.0}).fit(*train, held_out=clouds(rng, 200, 0.0))


def test_same_seed_same_result_and_another_seed_another(data):
    before = torch.get_rng_state()
    first, again, other = (
        MaCCal(**QUICK, seed=seed).fit(*data).predict_proba(data[0]) for seed in (5, 5, 6)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_fit_again_forgets_and_another_width_is_learned(data, rng):
    module = MaCCal(**QUICK).fit(rng.normal(size=(50, 3)), rng.integers(2, size=50))
    found = module.fit(*data).predict_proba(data[0])
    assert np.array_equal(found, MaCCal(**QUICK).fit(*data).predict_proba(data[0]))


@pytest.mark.parametrize("kind", ["tensor", "float64", "half", "mapped", "tokens"])
def test_features_of_every_kind(data, tmp_path, kind):
    features, labels = (np.round(data[0] * 16) / 16), data[1]  # which half precision holds too
    np.save(tmp_path / "features.npy", features.astype(np.float16))
    given = {
        "tensor": (torch.tensor(features), torch.tensor(labels)),
        "float64": (features.astype(np.float64), labels.astype(np.int16)),
        "half": (torch.tensor(features).half(), labels),
        "mapped": (np.load(tmp_path / "features.npy", mmap_mode="r"), labels),
        "tokens": (features.reshape(30, 10, WIDTH), labels.reshape(30, 10)),
    }[kind]
    module = MaCCal(**QUICK).fit(*given)
    expected = MaCCal(**QUICK).fit(features, labels).predict_proba(features)
    found = module.predict_proba(given[0])
    assert isinstance(found, torch.Tensor) == isinstance(given[0], torch.Tensor)
    assert found.shape == (*given[0].shape[:-1], CLASSES)
    assert np.array_equal(np.asarray(found).reshape(-1, CLASSES), expected)


def test_ignored_labels_and_weights_of_zero_leave_examples_out(data):
    features, labels = data
    kept = np.arange(300) % 3 > 0
    # one batch, so that the order of the examples does not matter
    options = {**QUICK, "batch_size": 1000}
    expected = MaCCal(**options).fit(features[kept], labels[kept]).predict_proba(features)
    spoiled = np.where(kept[:, None], features, np.nan)
    ignored = MaCCal(**options).fit(spoiled, np.where(kept, labels, -100))
    weighted = MaCCal(**options).fit(spoiled, labels, sample_weight=kept.astype(float))
    for found in (ignored, weighted):
        np.testing.assert_allclose(found.predict_proba(features), expected, atol=1e-5)


def test_weight_two_is_an_example_twice(data):
    features, labels = data
    options = {**QUICK, "batch_size": 1000, "keep": 1.0}
    weight = 1.0 + (np.arange(300) % 2)
    twice = np.repeat(np.arange(300), weight.astype(int))
    expected = MaCCal(**options).fit(features[twice], labels[twice])
    found = MaCCal(**options).fit(features, labels, sample_weight=weight)
    assert found.history[-1] == pytest.approx(expected.history[-1], rel=1e-4)
    np.testing.assert_allclose(
        found.predict_proba(features), expected.predict_proba(features), atol=1e-4
    )


def test_a_slice_is_stratified_and_not_learned_from(data, monkeypatch):
    seen, module = [], MaCCal(**QUICK)
    learn = MaCCal._learn

    def spy(self, run, batch, random):
        seen.append(batch.features.numpy())
        return learn(self, run, batch, random)

    monkeypatch.setattr(MaCCal, "_learn", spy)
    module.fit(*data, held_out=0.2)
    learned = np.unique(np.concatenate(seen), axis=0)
    assert abs(len(learned) - 240) < CLASSES  # each class is rounded
    rows = {row.tobytes() for row in learned}
    out = data[1][[row.tobytes() not in rows for row in data[0]]]
    shares = np.bincount(out, minlength=CLASSES) / np.bincount(data[1], minlength=CLASSES)
    np.testing.assert_allclose(shares, 0.2, atol=0.02)


class Stop(Exception):
    pass


@pytest.mark.parametrize("warm_up", [1, 35])  # of 10 steps in an epoch
def test_a_run_that_was_stopped_ends_as_one_that_was_not(data, rng, tmp_path, monkeypatch, warm_up):
    monkeypatch.setattr(maccal, "WARM_UP", warm_up)
    val = clouds(rng, 100, 1.0)
    options = {**QUICK, "epochs": 6, "step": 2.0, "gamma": 0.8, "keep": 0.6, "decay": 1e-3}

    def stop(done, of):
        assert of == 6
        if done == 3:
            raise Stop

    def fitted(**named):
        with pytest.warns(UserWarning, match="hardly learned|did not settle"):
            return MaCCal(**options).fit(*data, held_out=val, **named)

    path = tmp_path / "run.pt"
    with pytest.raises(Stop):
        MaCCal(**options).fit(*data, held_out=val, checkpoint=path, progress=stop)
    done = []
    resumed = fitted(checkpoint=path, progress=lambda *told: done.append(told))
    whole = fitted()
    assert done == [(4, 6), (5, 6), (6, 6)]
    assert resumed.history == whole.history
    assert len({epoch.keep for epoch in whole.history}) == (6 if warm_up == 1 else 3)
    assert np.array_equal(resumed.predict_proba(data[0]), whole.predict_proba(data[0]))
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]
    with pytest.raises(ValueError, match="other data or options"):
        MaCCal(**{**options, "rate": 0.1}).fit(*data, held_out=val, checkpoint=path)
    with pytest.raises(ValueError, match="other data or options"):
        MaCCal(**options).fit(data[0], data[1][::-1].copy(), held_out=val, checkpoint=path)


# ---------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"labels": np.zeros(299, int)},
            r"must be \(\.\.\., width\).*got \(300, 12\) and \(299,\)",
        ),
        ({"features": np.zeros(300, np.float32)}, "one row of features"),
        ({"features": np.zeros((300, 0), np.float32)}, "one row of features"),
        ({"labels": np.zeros(300, int)}, "at least two classes, got only 0"),
        ({"labels": np.full(300, -100)}, "are empty"),
        ({"features": np.zeros((0, 4), np.float32), "labels": np.zeros(0, int)}, "are empty"),
        ({"classes": 3}, r"labels must be in \[0, 3\)"),
        ({"labels": np.arange(300) % 4 - 1}, r"labels must be in \[0, 3\).*got -1"),
        ({"held_out": (np.zeros((0, WIDTH), np.float32), np.zeros(0, int))}, "held_out .*empty"),
        ({"held_out": (np.zeros((5, 7), np.float32), np.zeros(5, int))}, r"\(\.\.\., 12\).*of 7"),
        ({"held_out": (np.zeros((1, WIDTH), np.float32), np.array([4]))}, r"in \[0, 4\)"),
        ({"held_out": 0.0}, r"share in \(0, 0.5\]"),
        ({"held_out": 0.7}, r"share in \(0, 0.5\]"),
        ({"sample_weight": np.ones(7)}, "weight must have one value per example"),
    ],
)
def test_refused_data(data, change, message):
    given = {"features": data[0], "labels": data[1], **change}
    with pytest.raises(ValueError, match=message):
        MaCCal(**QUICK).fit(**given)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_features_must_be_finite(data, value):
    features, labels = data
    features[7, 2] = value
    with pytest.raises(ValueError, match="features must be finite, row 7"):
        MaCCal(**QUICK).fit(features, labels)
    module = MaCCal(**QUICK).fit(features[10:], labels[10:])
    with pytest.raises(ValueError, match="features must be finite, row 7"):
        module.predict_proba(features)


@pytest.mark.parametrize(
    "options",
    [
        {"epochs": 0},
        {"batch_size": 2.5},
        {"bottleneck": 0},
        {"samples": -1},
        {"seed": -1},
        {"rate": 0.0},
        {"rate": np.nan},
        {"decay": -0.1},
        {"step": -1.0},
        {"least_keep": 0.0},
        {"keep": 1.1},
        {"keep": 0.05},
        {"gamma": 0.0},
    ],
)
def test_refused_options(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
        MaCCal(**options)


def test_use_before_fit_and_with_another_width(data):
    with pytest.raises(RuntimeError, match=r"call fit\(features, labels\) first"):
        MaCCal().predict_proba(data[0])
    with pytest.raises(RuntimeError, match=r"call fit\(features, labels\) first"):
        MaCCal()(torch.zeros(1, 2))
    module = MaCCal(**QUICK).fit(*data)
    with pytest.raises(ValueError, match=r"must be \(\.\.\., 12\)"):
        module.predict_proba(data[0][:, :5])
    with pytest.raises(TypeError, match="held_out must be"):
        MaCCal().fit(*data, held_out="val")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="labels must be integers"):
        MaCCal().fit(data[0], data[1] + 0.5)


def test_a_loss_that_overflows_is_an_error(data):
    with pytest.raises(ValueError, match="in epoch 1"):
        MaCCal(**QUICK).fit(data[0] * 3e37, data[1])


def test_a_missing_class_gets_little_and_classes_can_be_more_than_the_labels(data):
    module = MaCCal(**{**QUICK, "epochs": 20}, rate=0.01).fit(*data, classes=CLASSES + 1)
    probs = module.predict_proba(data[0])
    assert probs.shape == (300, CLASSES + 1)
    assert probs[:, -1].mean() < 0.05


# ------------------------------------------------------------------------------------- artifacts


@pytest.mark.parametrize("samples", [0, 3])
def test_saved_and_loaded_to_the_bit(data, tmp_path, samples):
    module = MaCCal(**QUICK, keep=0.7, samples=samples).fit(*data)
    cal.save(module, tmp_path / "head")
    again = cal.load(tmp_path / "head")
    assert isinstance(again, MaCCal)
    assert again.config() == module.config()
    assert again.history == module.history
    assert np.array_equal(again.predict_proba(data[0]), module.predict_proba(data[0]))
    assert module.size == WIDTH * 16 + 16 + 16 * CLASSES + CLASSES


@pytest.mark.parametrize("samples", [0, 3])
def test_exported_to_onnx(data, tmp_path, samples):
    module = MaCCal(**QUICK, keep=0.7, samples=samples).fit(*data)
    assert cal.export_onnx(module, tmp_path / "head.onnx") <= 1e-5


def test_as_a_calibrator_it_ignores_the_logits(data):
    module = MaCCal(**QUICK).fit(*data)
    features, calibrator = torch.tensor(data[0]), as_calibrator(module)
    logits = calibrator(torch.randn(300, CLASSES), features)
    assert torch.equal(logits, module(features))
    assert torch.equal(logits.amax(-1), torch.zeros(300))
    probs = calibrator.predict_proba(np.zeros((300, CLASSES)), data[0])
    np.testing.assert_allclose(probs, logits.softmax(-1), atol=1e-6)
    assert as_calibrator(calibrator) is calibrator
    with pytest.raises(TypeError, match="expected a calibrator or a MaCCal, got ReLU"):
        as_calibrator(nn.ReLU())


def test_from_a_file_with_features_of_the_training_set(data, rng, tmp_path):
    val = clouds(rng, 100)
    arrays = {"train_features": data[0], "train_labels": data[1]}
    weight = {"weight": np.zeros((CLASSES + 2, WIDTH)), "bias": np.zeros(CLASSES + 2)}
    other = {"val_features": val[0], "val_labels": val[1], "val_logits": np.zeros((100, 6))}
    cal.save_predictions(tmp_path / "one.npz", {**arrays, **other, **weight})
    cal.save_predictions(tmp_path / "train.npz", arrays)
    cal.save_predictions(tmp_path / "val.npz", {**other, **weight})
    expected = MaCCal(**QUICK).fit(*data, held_out=val, classes=CLASSES + 2)
    found = retrain(tmp_path / "one.npz", options=QUICK)
    apart = retrain(tmp_path / "val.npz", train=tmp_path / "train.npz", options=QUICK)
    alone = retrain(tmp_path / "train.npz", options=QUICK)
    assert found.history == apart.history == expected.history
    assert alone.history == MaCCal(**QUICK).fit(*data).history != expected.history
    with pytest.raises(ValueError, match=r"has no train_features, only the splits 'val'"):
        retrain(tmp_path / "val.npz")


# -------------------------------------------------------------------------------------- networks


class Residual(nn.Module):
    """As ResNets are: convolution, batch norm, pooling, ``fc``."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTH, 3)
        self.norm = nn.BatchNorm2d(WIDTH)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        hidden = F.relu(self.norm(self.conv(images))).mean((-2, -1))
        return self.fc(self.drop(hidden))


class Transformer(nn.Module):
    """As vision transformers of torchvision are, with ``heads.head``; returns a dictionary."""

    def __init__(self, spare=False):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.heads = nn.ModuleDict({"head": nn.Linear(WIDTH, CLASSES)})
        if spare:
            self.spare = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens):
        return {"logits": self.heads["head"](self.encoder(tokens)[:, 0])}


@pytest.fixture
def images(rng):
    images = torch.tensor(rng.normal(size=(40, 3, 6, 6)), dtype=torch.float32)
    return list(zip(images.split(10), torch.arange(40).remainder(CLASSES).split(10), strict=True))


def test_frozen_network_is_the_same_to_the_bit_and_its_features_are_learned_from(images):
    network = Residual().train()
    network.norm.eval()  # a mode of its own, to be kept
    before = copy.deepcopy(network.state_dict())
    options = {**QUICK, "batch_size": 10}
    module = MaCCal(**options).fit_model(network, images)
    after = network.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (network.training, network.norm.training, network.drop.training) == (True, False, True)
    assert not network.fc._forward_pre_hooks
    assert all(p.grad is None and p.requires_grad for p in network.parameters())
    # the same by hand: batches in the order of the loader
    network.eval()
    with torch.no_grad():
        inputs = [F.relu(network.norm(network.conv(x))).mean((-2, -1)) for x, _ in images]
    head = MaskedClassifier(WIDTH, CLASSES, bottleneck=16)
    optimiser = torch.optim.Adam(head.parameters())
    for epoch in range(3):
        optimiser.param_groups[0]["lr"] = 1e-3 * (1 + np.cos(np.pi * epoch / 3)) / 2
        random = torch.Generator().manual_seed(epoch)
        head.keep_.fill_(0.9)
        for features, (_, labels) in zip(inputs, images, strict=True):
            masks = head.draw(random)
            optimiser.zero_grad()
            F.cross_entropy(head(features, masks), labels).backward()
            masked_step(optimiser, head, masks)
    torch.testing.assert_close(module.classifier.first.weight, head.first.weight.detach())


def test_network_with_a_held_out_loader(images):
    network = Residual().eval()
    options = {**QUICK, "batch_size": 10}
    module = MaCCal(**options).fit_model(network, images, held_out=images[:2])
    features = cal.collect(network, images[:2], last_layer="fc")[2]
    claimed = module.predict_proba(features).amax(-1).mean()
    assert module.history[-1].confidence == pytest.approx(float(claimed), abs=1e-6)
    with pytest.raises(ValueError, match="at least one batch"):
        MaCCal(**options).fit_model(network, [])
    with pytest.raises(ValueError, match="held_out must have at least one batch"):
        MaCCal(**options).fit_model(network, images, held_out=[])
    wrong = [(images[0][0], images[0][1] + CLASSES)]
    with pytest.raises(ValueError, match=r"in \[0, 4\)"):
        MaCCal(**options).fit_model(network, wrong)
    ignored = [(images[0][0], torch.full((10,), -100))]
    with pytest.raises(ValueError, match="no labelled example in epoch 1"):
        MaCCal(**options).fit_model(network, ignored)


@pytest.mark.parametrize(
    ("network", "example", "layer"),
    [
        (Residual(), torch.randn(3, 3, 6, 6), "fc"),
        (Transformer(), torch.randn(3, 5, WIDTH), "heads.head"),
    ],
)
def test_replaced_head(data, network, example, layer):
    network.eval()
    module = MaCCal(**QUICK).fit(*data)
    before = network.state_dict()
    other = replace_head(network, module)
    assert type(other) is type(network)
    assert isinstance(network.get_submodule(layer), nn.Linear)
    assert isinstance(other.get_submodule(layer), MaskedClassifier)
    assert other.get_submodule(layer) is not module.classifier
    assert network.state_dict().keys() == before.keys()
    shared = {id(p) for p in other.parameters()} & {id(p) for p in network.parameters()}
    assert len(shared) == len(list(network.parameters())) - 2
    features = cal.collect(network, [(example, torch.zeros(3).long())], last_layer=layer)[2]
    found = other(example)
    logits = found if isinstance(found, torch.Tensor) else found["logits"]
    torch.testing.assert_close(logits.softmax(-1), module.predict_proba(features))
    # it behaves as the wrapped model, and a copy of the state of one fits the other
    wrapped = cal.calibrated(network, module, last_layer=layer)(example)
    wrapped = wrapped if isinstance(wrapped, torch.Tensor) else wrapped["logits"]
    torch.testing.assert_close(wrapped.softmax(-1), logits.softmax(-1))


class Patches(nn.Module):
    """As vision transformers of timm are: patches, a token for the class, blocks, ``head``."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.places = nn.Parameter(torch.randn(1, 5, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True, norm_first=True)
        self.blocks = nn.Sequential(layer)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def features(self, images):
        patches = self.embed(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(images), -1, -1), patches], 1)
        return self.norm(self.blocks(tokens + self.places))[:, 0]

    def forward(self, images):
        return self.head(self.features(images))


def hugging_face_transformer():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": WIDTH, "intermediate_size": 16, "image_size": 8, "patch_size": 4}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": CLASSES}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **layers))


@pytest.mark.parametrize(
    ("build", "layer", "features_of"),
    [
        (Patches, "head", lambda model, x: model.features(x)),
        (
            hugging_face_transformer,
            "classifier",
            lambda model, x: model.vit(x).last_hidden_state[:, 0],
        ),
    ],
    ids=["timm", "transformers"],
)
@torch.no_grad()
def test_vision_transformers_get_a_new_head(tmp_path, build, layer, features_of):
    torch.manual_seed(0)
    network, head = build().eval(), MaskedClassifier(WIDTH, CLASSES, seed=3)
    head.keep_.fill_(0.6)
    before = copy.deepcopy(network.state_dict())
    images = torch.randn(5, 3, 8, 8)

    def logits(model):
        found = model(images)
        return getattr(found, "logits", found)

    plain = logits(network)
    other = replace_head(network, head)
    wanted = by_hand(head, features_of(network, images).double().numpy(), 0.6, 0.6)
    np.testing.assert_allclose(logits(other), wanted, atol=1e-5)
    # all but the last layer is shared, and as it was to the bit; the given model keeps its own
    after = other.state_dict()
    backbone = {name for name in before if not name.startswith(f"{layer}.")}
    assert backbone == {name for name in after if not name.startswith(f"{layer}.")}
    assert all(torch.equal(before[name], after[name]) for name in backbone)
    assert all(after[name].data_ptr() == network.state_dict()[name].data_ptr() for name in backbone)
    assert torch.equal(logits(network), plain)
    # its weights fit another model of the same form
    torch.save(after, tmp_path / "weights.pt")
    again = replace_head(build().eval(), MaskedClassifier(WIDTH, CLASSES))
    assert not torch.allclose(logits(again), logits(other))
    again.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert torch.equal(logits(again), logits(other))


def test_head_of_a_vision_transformer_is_trained_saved_and_put_in(images, tmp_path):
    torch.manual_seed(0)
    network = hugging_face_transformer().eval()
    loader = [(F.interpolate(x, 8), y) for x, y in images]
    before = copy.deepcopy(network.state_dict())
    module = MaCCal(**{**QUICK, "batch_size": 10}).fit_model(network, loader)
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    cal.save(module, tmp_path / "head")
    network.save_pretrained(tmp_path / "model")
    read = type(network).from_pretrained(tmp_path / "model").eval()
    other = replace_head(read, cal.load(tmp_path / "head"))
    with torch.no_grad():
        features = network.vit(loader[0][0]).last_hidden_state[:, 0]
        found = other(pixel_values=loader[0][0]).logits
    torch.testing.assert_close(found.softmax(-1), module.predict_proba(features))
    assert read.classifier.weight.shape == (CLASSES, WIDTH)


def test_replaced_head_of_a_half_precision_model(data):
    module = MaCCal(**QUICK).fit(*data)
    network = Residual().to(torch.bfloat16).eval()
    found = replace_head(network, module)(torch.randn(2, 3, 6, 6, dtype=torch.bfloat16))
    assert found.dtype == torch.float32


def test_which_layer_is_the_last():
    head = MaskedClassifier(WIDTH, CLASSES)
    with pytest.raises(ValueError, match=r"has several: heads.head \(12 to 4\), spare \(12 to 4\)"):
        replace_head(Transformer(spare=True), head)
    chosen: Any = replace_head(Transformer(spare=True), head, name="spare")
    assert isinstance(chosen.spare, MaskedClassifier)
    assert isinstance(chosen.heads["head"], nn.Linear)
    with pytest.raises(ValueError, match=r"has none: fc \(12 to 4\)"):
        replace_head(Residual(), MaskedClassifier(WIDTH, CLASSES + 1))
    with pytest.raises(ValueError, match=r"no linear layer 'conv'; its last are fc \(12 to 4\)"):
        replace_head(Residual(), head, name="conv")
    with pytest.raises(ValueError, match="maps 9 features to 4 classes, the layer 'fc' maps 12"):
        replace_head(Residual(), MaskedClassifier(9, CLASSES))
    with pytest.raises(TypeError, match="a fitted MaCCal, a MaskedClassifier"):
        replace_head(Residual(), nn.ReLU())
    linear = replace_head(Residual(), nn.Linear(WIDTH, CLASSES))
    assert isinstance(linear.fc, nn.Linear)
    with pytest.raises(ValueError, match="is not fitted"):
        replace_head(Residual(), MaCCal())


def test_a_checkpoint_of_another_slice_or_model_is_refused(data, tmp_path):
    path = tmp_path / "run.pt"
    MaCCal(**QUICK).fit(*data, held_out=0.1, checkpoint=path)
    with pytest.raises(ValueError, match="other data or options"):
        MaCCal(**QUICK).fit(*data, held_out=0.5, checkpoint=path)
    features, labels = (torch.as_tensor(values) for values in data)
    loader = [(features.float(), labels)]
    torch.manual_seed(0)
    first, second = (nn.Sequential(nn.Linear(WIDTH, CLASSES)) for _ in range(2))
    path = tmp_path / "model.pt"
    MaCCal(**QUICK).fit_model(first, loader, checkpoint=path)
    with pytest.raises(ValueError, match="other data or options"):
        MaCCal(**QUICK).fit_model(second, loader, checkpoint=path)


def test_a_layer_with_two_names_is_not_half_replaced():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    model.alias = model[1]
    with pytest.raises(ValueError, match="is also 'alias'"):
        replace_head(model, MaskedClassifier(8, 3))


def test_a_module_with_a_part_called_head_is_put_in_whole():
    class Own(nn.Module):
        width, classes = 8, 3

        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 3)

        def forward(self, features):
            return 2 * self.head(features)

    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    assert isinstance(replace_head(model, Own())[1], Own)  # type: ignore[index]
