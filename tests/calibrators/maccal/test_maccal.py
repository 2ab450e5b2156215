"""MaC-Cal: known truth by simulation, the protocol of a fit, and refused input."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import calibrant as cal
from calibrant.calibrators.maccal import MaCCal, maccal, masked
from calibrant.calibrators.maccal.masked import KeepRate, MaskedClassifier
from tests.support.features import CLASSES, QUICK, WIDTH, clustered_features


def test_masks_apply_to_the_forward_pass_and_to_the_update(data):
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


def saturated(rng, n, seen):
    """Features of a network that was trained to the end, of images that it has seen or not.

    A unit for each class is at 4 for the label, with noise of 0.3: of a seen image for its label
    itself; of an unseen one for another class in one case of five, and then nothing tells.
    """
    labels = rng.integers(CLASSES, size=n)
    shown = labels if seen else np.where(rng.random(n) < 0.8, labels, rng.integers(CLASSES, size=n))
    features = 4 * np.eye(CLASSES)[shown] + 0.3 * rng.normal(size=(n, CLASSES))
    return features.astype(np.float32), labels


def test_held_out_control_brings_confidence_to_the_known_accuracy():
    """The truth: an unseen answer is right in 80 % + 20 % / 4 = 85 %, whatever the features are."""
    rng = np.random.default_rng(0)
    train, val, test = (saturated(rng, n, seen) for n, seen in ((1000, True), (4000, 0), (8000, 0)))
    options: dict[str, Any] = {"bottleneck": 32, "batch_size": 50, "rate": 0.01, "epochs": 30}
    held = MaCCal(**options).fit(*train, held_out=val)
    plain = MaCCal(**{**options, "epochs": 5}, keep=1.0, step=0.0).fit(*train)
    probs, overconfident = (m.predict_proba(test[0]) for m in (held, plain))
    accuracy = (probs.argmax(-1) == test[1]).mean()
    assert accuracy == pytest.approx(0.85, abs=0.015)
    assert overconfident.max(-1).mean() > 0.98
    assert probs.max(-1).mean() == pytest.approx(accuracy, abs=0.02)
    after, before = (
        cal.evaluate(probs=p, labels=test[1], metrics=("ece", "nll"), level=None)
        for p in (probs, overconfident)
    )
    assert after["ece"].value < 0.03 < 0.12 < before["ece"].value
    assert after["nll"].value < before["nll"].value
    # a share of what the network has seen does not show over-confidence: all of it is right
    with pytest.warns(UserWarning, match="every held-out example is predicted right"):
        shared = MaCCal(**{**options, "epochs": 6}).fit(*train, held_out=0.1)
    assert shared.predict_proba(test[0]).max(-1).mean() > 0.95


def test_control_on_the_training_set_brings_masked_confidence_to_its_target():
    train = saturated(np.random.default_rng(0), 1000, True)
    module = MaCCal(bottleneck=32, batch_size=100, rate=0.005, gamma=0.9, epochs=30).fit(*train)
    last = module.history[-1]
    assert last.accuracy > 0.95
    assert last.confidence == pytest.approx(0.9 * last.accuracy, abs=0.02)
    assert last.keep < 0.7
    assert module.predict_proba(train[0]).max(-1).mean() > last.confidence  # without masks


def test_history_has_the_figures_that_the_controller_used(data, rng, monkeypatch):
    monkeypatch.setattr(masked, "_WARM_UP_STEPS", 1)
    val = clustered_features(rng, 200, 1.5)
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


def test_little_data_is_learned_before_the_control_starts(rng, monkeypatch):
    assert (maccal._DEFAULT_EPOCHS, maccal._MIN_STEPS) == (20, 2000)
    monkeypatch.setattr(maccal, "_MIN_STEPS", 400)
    train, val, test = (clustered_features(rng, n, 2.5) for n in (600, 300, 2000))
    module = MaCCal(rate=0.003).fit(*train, held_out=val)
    steps = -(-600 // 256)
    assert len(module.history) == -(-400 // steps)
    begun = next(
        n for n, epoch in enumerate(module.history) if abs(epoch.keep - module.keep) > 1e-6
    )
    assert begun * steps >= 100
    probs = module.predict_proba(test[0])
    assert (probs.argmax(-1) == test[1]).mean() > 0.85
    assert cal.ece(probs=probs, labels=test[1]) < 0.05


def test_classifier_that_has_hardly_learned_is_warned_of(rng):
    train = clustered_features(rng, 200, 0.0)
    with pytest.warns(UserWarning, match="has hardly learned: accuracy"):
        MaCCal(**{**QUICK, "step": 1.0}).fit(*train, held_out=clustered_features(rng, 200, 0.0))


def test_result_depends_on_the_seed_and_on_no_global_state(data):
    before = torch.get_rng_state()
    first, again, other = (
        MaCCal(**QUICK, seed=seed).fit(*data).predict_proba(data[0]) for seed in (5, 5, 6)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("kind", ["tensor", "float64", "half", "mapped", "tokens"])
def test_arrays_and_tensors_of_every_dtype_give_the_same_result(data, tmp_path, kind):
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


def test_ignored_labels_and_zero_weights_leave_examples_out(data):
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


def test_weight_two_counts_an_example_twice(data):
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


def test_held_out_share_is_stratified_and_not_learned_from(data, monkeypatch):
    seen, module = [], MaCCal(**QUICK)
    step = masked._Training._step

    def spy(self, batch, random):
        seen.append(batch.features.numpy())
        return step(self, batch, random)

    monkeypatch.setattr(masked._Training, "_step", spy)
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
def test_stopped_run_continues_to_the_same_result(data, rng, tmp_path, monkeypatch, warm_up):
    monkeypatch.setattr(masked, "_WARM_UP_STEPS", warm_up)
    val = clustered_features(rng, 100, 1.0)
    options = {**QUICK, "epochs": 6, "step": 2.0, "gamma": 0.8, "keep": 0.6, "decay": 1e-3}

    def stop(done, of):
        assert of == 6
        if done == 3:
            raise Stop

    def fitted(**named):
        with pytest.warns(UserWarning, match="hardly learned|did not settle"):
            return MaCCal(**options).fit(*data, held_out=val, **named)

    path = tmp_path / "run.pt"
    with pytest.raises(Stop), cal.use(progress=stop):
        MaCCal(**options).fit(*data, held_out=val, checkpoint=path)
    done = []
    with cal.use(progress=lambda *told: done.append(told)):
        resumed = fitted(checkpoint=path)
    whole = fitted()
    assert done == [(epoch, 6) for epoch in range(7)]
    assert len(torch.load(path)["history"]) == 6
    assert resumed.history == whole.history
    assert len({epoch.keep for epoch in whole.history}) == (6 if warm_up == 1 else 3)
    assert np.array_equal(resumed.predict_proba(data[0]), whole.predict_proba(data[0]))
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]
    with pytest.raises(ValueError, match="other data or options"):
        MaCCal(**{**options, "rate": 0.1}).fit(*data, held_out=val, checkpoint=path)
    with pytest.raises(ValueError, match="other data or options"):
        MaCCal(**options).fit(data[0], data[1][::-1].copy(), held_out=val, checkpoint=path)


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
def test_inconsistent_data_are_refused(data, change, message):
    given = {"features": data[0], "labels": data[1], **change}
    with pytest.raises(ValueError, match=message):
        MaCCal(**QUICK).fit(given.pop("features"), **given)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_features_that_are_not_finite_are_refused(data, value):
    features, labels = data
    features[7, 2] = value
    with pytest.raises(ValueError, match="features must be finite, row 7"):
        MaCCal(**QUICK).fit(features, labels)
    module = MaCCal(**QUICK).fit(features[10:], labels[10:])
    with pytest.raises(ValueError, match="features must be finite, row 7"):
        module.predict_proba(features)


def test_a_keep_rate_below_the_least_is_refused():
    with pytest.raises(ValueError, match=r"keep must be at least least_keep \(0.1\), got 0.05"):
        MaCCal(keep=0.05)


def test_wrong_use_is_refused(data):
    with pytest.raises(RuntimeError, match="this MaCCal is not fitted"):
        MaCCal().predict_proba(data[0])
    with pytest.raises(RuntimeError, match="this MaCCal is not fitted"):
        MaCCal()(torch.zeros(1, 2))
    module = MaCCal(**QUICK).fit(*data)
    with pytest.raises(ValueError, match=r"must be \(\.\.\., 12\)"):
        module.predict_proba(data[0][:, :5])
    with pytest.raises(TypeError, match="held_out must be"):
        MaCCal().fit(*data, held_out="val")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="labels must be integers"):
        MaCCal().fit(data[0], data[1] + 0.5)


def test_loss_that_overflows_stops_the_fit(data):
    with pytest.raises(ValueError, match="in epoch 1"):
        MaCCal(**{**QUICK, "rate": 1e30}).fit(*data)


def test_classes_without_examples_get_little_probability(data):
    module = MaCCal(**{**QUICK, "epochs": 20}, rate=0.01).fit(*data, classes=CLASSES + 1)
    probs = module.predict_proba(data[0])
    assert probs.shape == (300, CLASSES + 1)
    assert probs[:, -1].mean() < 0.05


def test_checkpoint_of_another_held_out_share_or_model_is_refused(data, tmp_path):
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


def test_as_every_calibrator_it_takes_logits_and_ignores_them(data, rng):
    features, labels = data
    logits = 3 * np.eye(CLASSES)[labels] + rng.normal(size=(300, CLASSES))
    fitted = MaCCal(**QUICK).fit(logits, labels, features=features)
    noise = fitted.predict_proba(10 * logits, features)
    assert np.array_equal(noise, fitted.predict_proba(features))
    assert torch.equal(fitted(torch.tensor(features)).amax(-1), torch.zeros(300))
    with pytest.raises(TypeError, match="held_out, classes and checkpoint go with"):
        MaCCal(**QUICK).fit(logits, labels, features=features, held_out=0.1)
    with pytest.raises(ValueError, match=r"features must be \(..., 12\), as in fit"):
        fitted.predict_proba(logits)


@pytest.mark.parametrize("grouped", [False, True])
def test_a_fifth_of_a_calibration_set_controls_the_keep_rate(data, rng, monkeypatch, grouped):
    """Those examples, whole groups of them, are not learned from."""
    features, labels = data
    groups = np.arange(300) // 10 if grouped else None
    parts = []
    train_on = MaCCal._train_on

    def noted(self, *given):
        parts.append(given)
        train_on(self, *given)

    monkeypatch.setattr(MaCCal, "_train_on", noted)
    logits = np.eye(CLASSES)[labels] + rng.normal(size=(300, CLASSES))
    MaCCal(**QUICK).fit(logits, labels, features=features, groups=groups)
    train, watched = (part.kept for part in parts[0][:2])
    assert sorted([*train, *watched]) == [*range(300)]
    assert len(watched) == pytest.approx(60, abs=CLASSES)
    if grouped:
        assert not set(train // 10) & set(watched // 10)


@pytest.mark.usefixtures("operators_read_once")
def test_the_average_over_masks_is_exported_to_onnx(data, tmp_path):
    module = MaCCal(**QUICK, keep=0.7, samples=2).fit(*data)
    assert cal.export(module, tmp_path / "classifier.onnx") <= 1e-5
