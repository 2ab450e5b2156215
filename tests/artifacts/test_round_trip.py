"""Saved objects come back bit by bit, whatever their kind."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import calibrant as cal
from calibrant import artifacts as io
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.registry import CALIBRATORS
from calibrant.calibrators.scaling import Identity, TemperatureScaling
from calibrant.decide import ConformalSets, PriorCorrection, Threshold, conformal, threshold
from tests.support.artifacts import examples, fitted, fitted_kind
from tests.support.calibrators import EVERY_METHOD
from tests.support.simulate import drawn

OPTIONS = {  # where they decide which tensors there are, or their shapes
    "smart": {"indicator": "all", "hidden": (3,)},
    "procal": {"method": "density_ratio"},
    "odds": {"knots": 1},
    "gc": {"group_count": 3, "partitions": 1},
    "spline": {"knots": 3},
    "histogram": {"bins": 4, "mass": False},
}


def same(one, other):
    """Two modules have the same tensors, bit by bit."""
    states = one.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    for name in states[0]:
        if not isinstance(states[0][name], torch.Tensor):
            assert states[0][name] == states[1][name]
            continue
        assert states[0][name].dtype == states[1][name].dtype
        assert torch.equal(states[0][name], states[1][name])


class Held(Calibrator):
    """A calibrator that holds others, in every place where a config can hold one."""

    def __init__(self, first, others=(), by_name=None, scale=1.0):
        super().__init__()
        self.first, self.scale = first, scale
        self.others = nn.ModuleList(others)
        self.by_name = nn.ModuleDict(by_name or {})

    def config(self):
        return {**super().config(), "others": list(self.others), "by_name": dict(self.by_name)}

    def size(self, classes):
        return 0

    def _fit(self, given, context):
        for inner in (self.first, *self.others, *self.by_name.values()):
            inner._fit(given, context)
            inner._set_classes(given.classes)

    def _transform(self, logits, top, features):
        steps = (self.first, *self.others, *self.by_name.values())
        return self.scale * sum(inner._transform(logits, top, features) for inner in steps)


# ------------------------------------------------------------------------------------ calibrators


@pytest.mark.parametrize(
    ("kind", "options"), [*((kind, {}) for kind in EVERY_METHOD), *OPTIONS.items()]
)
def test_every_calibrator_comes_back_bit_by_bit(kind, options, tmp_path):
    module = fitted_kind(kind, **options)
    io.save(module, tmp_path / kind)
    again = io.load(tmp_path / kind)
    assert type(again) is type(module)
    assert again.config() == module.config()
    same(module, again)
    values = examples(classes=module.classes)
    logits, _, features, _ = (torch.tensor(v) if i < 3 else v for i, v in enumerate(values))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        inputs = logits.to(dtype), features.float()
        assert torch.equal(module.predict_proba(*inputs), again.predict_proba(*inputs))
    about = io.read(tmp_path / kind)
    assert (about.kind, about.calibrant) == (kind, cal.__version__)
    assert [path.name for path in (tmp_path / kind).iterdir()] == [io.FILE]


def test_a_person_can_read_what_a_file_holds(tmp_path):
    io.save(fitted(TemperatureScaling(objective="brier")), tmp_path / "ts.safetensors")
    text = (tmp_path / "ts.safetensors").read_bytes()[8:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines()[2:8]]
    assert lines[:2] == ['"format": "1",', '"kind": "ts",']
    assert lines[2].startswith('"description": "TemperatureScaling')
    assert lines[3].startswith('"calibrant": "')
    assert lines[4] == r'"config": "{\"objective\": \"brier\"}",'


def test_the_same_object_makes_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        io.save(fitted_kind("blend"), tmp_path / name)
    assert (tmp_path / "a" / io.FILE).read_bytes() == (tmp_path / "b" / io.FILE).read_bytes()


@pytest.mark.parametrize(
    "kind",
    [
        *("ts", "vector", "histogram_ovr", "isotonic_ovr", "dirichlet", "isotonic", "sigmoid"),
        *("quadratic", "robust_sigmoid", "venn_abers"),
    ],
)
def test_one_logit_comes_back(kind, tmp_path):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=400)
    labels = (logits + rng.logistic(size=400) > 0).astype(int)
    module = EVERY_METHOD[kind]().fit(3 * logits, labels)
    prior = PriorCorrection(module).set_priors([0.5, 0.5], [0.1, 0.9])
    for each in (module, prior):
        io.save(each, tmp_path / "saved")
        again = io.load(tmp_path / "saved")
        assert np.array_equal(again.predict_proba(logits), each.predict_proba(logits))
        assert again.predict_proba(logits).shape == (400,)


def test_calibrators_inside_lists_and_others_come_back(tmp_path, monkeypatch):
    monkeypatch.setitem(CALIBRATORS, "held", Held)
    deep = Held(TemperatureScaling(objective="brier"))
    module = fitted(Held(deep, [Identity(), TemperatureScaling()], {"last": Identity()}, 0.25))
    io.save(module, tmp_path / "held")
    inner = io.read(tmp_path / "held").config["first"]["config"]["first"]
    assert inner == {"kind": "ts", "config": {"objective": "brier"}}
    again = io.load(tmp_path / "held")
    same(module, again)
    logits = torch.tensor(examples()[0])
    assert torch.equal(module(logits), again(logits))


def test_tensors_may_share_memory(tmp_path, monkeypatch):
    monkeypatch.setitem(CALIBRATORS, "held", Held)
    inside = TemperatureScaling()
    module = fitted(Held(inside, [inside]))
    io.save(module, tmp_path / "held")
    same(module, io.load(tmp_path / "held"))


# ------------------------------------------------------------------------------------ other kinds


@pytest.mark.parametrize("enough", [True, False])
def test_thresholds_come_back(enough, tmp_path):
    rng = np.random.default_rng(0)
    sure = rng.uniform(0.5, 1, 2000 if enough else 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no threshold
        right = rng.random(sure.size) < sure
        found = threshold(confidence=sure, outcome=right, max_error=0.1)
    assert math.isinf(found.threshold) is not enough
    io.save(found, tmp_path / "threshold")
    again = io.load(tmp_path / "threshold", Threshold)
    assert str(again) == str(found)  # in which NaN equals itself
    assert io.read(tmp_path / "threshold").description == str(found)


@pytest.mark.parametrize("coverage", [0.8, 0.999])
def test_conformal_sets_come_back(coverage, tmp_path):
    logits, labels = drawn(np.random.default_rng(0), 400, 5)
    probs = torch.tensor(logits).softmax(-1).numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are too few examples
        found = conformal(probs=probs[:200], labels=labels[:200], coverage=coverage, seed=3)
    io.save(found, tmp_path / "sets.json")
    again = io.load(tmp_path / "sets.json", ConformalSets)
    assert again == found
    assert np.array_equal(again.sets(probs=probs), found.sets(probs=probs))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, torch.bfloat16])
def test_sets_of_low_precision_have_a_plain_limit(dtype, tmp_path):
    logits, labels = drawn(np.random.default_rng(0), 100, 5)
    values = torch.tensor(logits).to(dtype) if dtype == torch.bfloat16 else logits.astype(dtype)
    found = conformal(values, labels)
    exact = conformal(np.asarray(torch.as_tensor(values).double()), labels)
    assert type(found.limit) is float
    assert exact.limit <= found.limit < exact.limit + 0.01
    io.save(found, tmp_path / "sets")
    assert io.load(tmp_path / "sets") == found


def test_a_fit_on_one_example_comes_back(tmp_path):
    """A learned value of one number may have a stride of 0."""
    for kind in EVERY_METHOD:
        if EVERY_METHOD[kind].needs_features or kind == "auto":
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = EVERY_METHOD[kind]().fit(np.array([[0.5, 1.0]]), [0])
        io.save(found, tmp_path / "one.safetensors")
        again = io.load(tmp_path / "one.safetensors")
        assert torch.equal(again(torch.eye(2)), found(torch.eye(2))), kind
