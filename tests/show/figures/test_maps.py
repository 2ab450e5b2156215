"""Calibrators draw what they have learned."""

from typing import Any

import numpy as np
import pytest

import calibrant as cal
from calibrant.calibrators.learned_curves import learned_map
from tests.show.figures.test_reliability import assert_whole, legend
from tests.support.calibrators import EVERY_METHOD
from tests.support.simulate import drawn


@pytest.fixture(scope="module")
def data():
    logits, labels = drawn(np.random.default_rng(0), 600, 4)
    return 3 * logits, labels


def fitted(name, logits, labels):
    return EVERY_METHOD[name]().fit(logits, labels)


@pytest.mark.parametrize("classes", [2, 5])
def test_the_map_of_one_temperature_is_known(rng, classes):
    logits, labels = drawn(rng, 400, classes)
    ts = fitted("ts", 3 * logits, labels)
    curve = learned_map(ts)
    odds = np.log(curve.before / (1 - curve.before)) + np.log(classes - 1)
    sharp = np.exp(odds / float(ts.temperature_))
    np.testing.assert_allclose(curve.after, sharp / (sharp + classes - 1), rtol=1e-5)
    np.testing.assert_allclose(curve.low, curve.high, rtol=1e-5)
    assert curve.probability == ("P(y = 1)" if classes == 2 else "")


def test_the_map_of_examples_is_their_median(data):
    vector = fitted("vector", *data)
    probs = vector.predict_proba(data[0]).max(1)
    exact = np.exp(data[0] - data[0].max(1, keepdims=True))
    before = 1 / exact.sum(1)
    curve = learned_map(vector, data[0])
    parts = np.array_split(np.argsort(before, kind="stable"), 60)
    np.testing.assert_allclose(curve.before, [before[p].mean() for p in parts])
    np.testing.assert_allclose(curve.after, [np.median(probs[p]) for p in parts], rtol=1e-6)
    axes: Any = vector.plot(data[0], label="mine")
    line = axes.get_lines()[0]
    np.testing.assert_allclose(line.get_ydata(), curve.after)
    assert legend(axes) == ["mine", "nine tenths of the examples", "unchanged"]
    assert_whole(axes.figure)


def test_varying_temperatures_are_drawn_by_margin(data):
    smart = fitted("smart", *data)
    axes: Any = smart.plot()
    margin, temperature = axes.get_lines()[0].get_data()
    rows = np.zeros((len(margin), 4))
    rows[:, 0] = margin
    np.testing.assert_allclose(temperature, smart.temperature(rows), rtol=1e-5)
    assert axes.get_ylabel() == "temperature"
    assert fitted("ts", *data).plot().get_ylabel() == "confidence after"


@pytest.mark.filterwarnings("ignore:.*may fit their noise")  # few examples
@pytest.mark.parametrize("name", EVERY_METHOD)
def test_every_calibrator_can_be_drawn_or_says_what_it_needs(name, data):
    kind = EVERY_METHOD[name]
    logits, labels = (x[:200] for x in data)
    if kind.two_classes_only:
        logits, labels = logits[:, 0], (labels == 0).astype(int)
    if kind.needs_features or kind.needs_head:
        with pytest.raises(RuntimeError, match="not fitted"):
            kind().plot()
        return
    few = {"candidates": ("none", "ts")} if name == "auto" else {}
    calibrator = kind(**few).fit(logits, labels)
    axes: Any = calibrator.plot()
    calibrator.plot(logits, ax=axes)
    axes.figure.canvas.draw()
    lines = axes.get_lines()
    assert len(lines) >= 2
    assert all(np.isfinite(line.get_ydata()).all() for line in lines)


@pytest.mark.filterwarnings("ignore:.*may fit their noise")
def test_features_are_asked_for(rng):
    logits, labels = drawn(rng, 100, 3)
    features = rng.normal(size=(100, 2))
    name = next(n for n, kind in EVERY_METHOD.items() if kind.needs_features)
    calibrator = EVERY_METHOD[name]()
    head = (rng.normal(size=(3, 2)), np.zeros(3))
    calibrator.fit(logits, labels, features=features, head=head)
    with pytest.raises(ValueError, match="needs features, too"):
        calibrator.plot(logits)
    assert calibrator.plot(logits, features=features).get_lines()


def test_maps_of_tags_are_those_of_every_tag(rng):
    logits = rng.normal(size=(200, 3))
    labels = (rng.random((200, 3)) < 0.5).astype(int)
    for kind in cal.TAG_CALIBRATORS.values():
        axes = kind().fit(logits, labels).plot()
        assert axes.get_xlabel() == "P(tag) before"
