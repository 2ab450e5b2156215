"""Methods by name, with options, from other modules and entry points."""

import re
import sys
from importlib import metadata
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax

from benchmarks.arena import methods
from benchmarks.arena.methods import Method, read_method, read_methods
from benchmarks.arena.tasks import Examples, Predictions
from calibrant.calibrators.registry import CALIBRATORS, make_calibrator
from tests.support.simulate import drawn

MODULE = '''
import numpy as np

class Sharper:
    """Powers of the probabilities, and a record of what it was called with."""
    seen = []

    def __init__(self, power=2.0):
        self.power = power

    def fit(self, inputs, labels):
        self.seen.append((inputs, labels))

    def predict_proba(self, inputs):
        raised = inputs**self.power
        return raised / raised.sum(1, keepdims=True)

class OnLogits(Sharper):
    takes = "logits"

    def predict_proba(self, inputs):
        return np.full(inputs.shape, 1 / inputs.shape[1])

class Positive(Sharper):
    def predict_proba(self, inputs):
        return inputs[:, 1]
'''


@pytest.fixture
def task(rng):
    return Predictions(Examples(*drawn(rng, 300, 3, 2)), Examples(*drawn(rng, 200, 3, 2)))


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module in the working folder."""
    (tmp_path / "mine_in_tests.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "mine_in_tests"
    sys.modules.pop("mine_in_tests", None)


def outputs(method, task):
    entrant = method.make()
    entrant.fit(task)
    return entrant.predict(task.test)


def test_all_calibrators_that_need_only_logits_by_default():
    names = [method.text for method in read_methods()]
    needy = {n for n, kind in CALIBRATORS.items() if kind.needs_features or kind.needs_head}
    assert needy
    assert names == [name for name in CALIBRATORS if name not in needy]


def test_names_and_options_as_people_type_them():
    text = 'TS, temperature ts:objective=brier auto:candidates=["none","ts"]'
    read = [method.text for method in read_methods(text)]
    assert read == ["ts", "ts:objective=brier", 'auto:candidates=["none","ts"]']


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("tss", ValueError, "unknown method 'tss': did you mean ts"),
        ("ts:temperature=2", ValueError, "ts has no option 'temperature'"),
        ("beta:keep_argmax=maybe", ValueError, "keep_argmax must be True or False, or None, got"),
        ("sklearn:platt", ValueError, "sigmoid, isotonic and temperature, got 'platt'"),
        ("no_such_module:Thing", ImportError, "no_such_module"),
        ("json:Thing", ValueError, "json has no class 'Thing'"),
    ],
)
def test_wrong_names_are_errors_at_once(name, error, message):
    with pytest.raises(error, match=message):
        read_method(name)


def test_a_calibrator_is_that_of_the_registry(task):
    expected = make_calibrator("ts", {"objective": "brier"}).fit(*task.fit[:2])
    found = outputs(read_method("ts:objective=brier"), task)
    np.testing.assert_array_equal(found, expected.transform(task.test.logits))


def test_options_mean_what_they_say(mine):
    texts = "beta:keep_argmax=No", "auto:candidates=[none,ts]", f"{mine}:Sharper:power=False"
    made: list[Any] = [read_method(text).make() for text in texts]
    beta, auto, sharper = (entrant.calibrator for entrant in made)
    assert beta.keep_argmax is False
    assert auto.candidates == ("none", "ts")
    assert sharper.power is False


def test_features_go_to_those_that_use_them(rng):
    def examples(n):
        logits, labels = drawn(rng, n, 3, 2)
        return Examples(logits, labels, rng.normal(size=(n, 4)))

    task = Predictions(examples(400), examples(50))
    logits, labels, features = task.fit
    expected = make_calibrator("procal").fit(logits, labels, features=features)
    found = outputs(read_method("procal"), task)
    np.testing.assert_array_equal(found, expected.transform(task.test.logits, task.test.features))


def test_a_class_of_another_module_gets_probabilities(task, mine):
    method = read_method(f"{mine}:Sharper:power=3")
    assert method.text == "mine_in_tests:Sharper:power=3"
    probs = softmax(task.test.logits, -1)
    expected = probs**3 / (probs**3).sum(1, keepdims=True)
    np.testing.assert_allclose(np.exp(outputs(method, task)), expected, rtol=1e-12)
    inputs, labels = sys.modules[mine].Sharper.seen[-1]
    np.testing.assert_allclose(inputs, softmax(task.fit.logits, -1))
    np.testing.assert_array_equal(labels, task.fit.labels)


def test_a_class_may_ask_for_logits(task, mine):
    outputs(read_method(f"{mine}:OnLogits"), task)
    np.testing.assert_array_equal(sys.modules[mine].Sharper.seen[-1][0], task.fit.logits)


def test_probabilities_of_class_1_are_enough(rng, mine):
    task = Predictions(Examples(*drawn(rng, 50, 2)), Examples(*drawn(rng, 20, 2)))
    found = outputs(read_method(f"{mine}:Positive"), task)
    np.testing.assert_allclose(np.exp(found), softmax(task.test.logits, -1))


def test_the_version_of_a_local_class_changes_with_its_file(mine, tmp_path):
    before = Method(f"{mine}:Sharper").version
    (tmp_path / "mine_in_tests.py").write_text(MODULE + "\n")
    methods._version.cache_clear()
    after = Method(f"{mine}:Sharper").version
    assert len(before) == len(after) == 8
    assert before != after


def test_versions_are_those_of_packages(monkeypatch):
    assert Method("sklearn:sigmoid").version == metadata.version("scikit-learn")
    assert Method("numpy:matrix").version == np.__version__
    for own, expected in (("1.2.3", r"1\.2\.3$"), ("1.2.4.dev5", r"1\.2\.4\.dev5\.[0-9a-f]{8}$")):
        monkeypatch.setattr(methods, "__version__", own)
        methods._version.cache_clear()
        assert re.match(expected, Method("ts").version)
    methods._version.cache_clear()
