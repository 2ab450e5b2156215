"""Saved objects come back bit by bit, whatever their kind.

The folders ``tests/files/format1_*`` were written by ``save`` of the release that introduced
format 1, and stay as they are: later releases must load them. Methods that came with format 2 have
a folder ``tests/files/format2_*`` instead. Each has, besides, an
``expected.json`` with some ``logits`` and the ``probs`` that the saved calibrator gave for them
(``predict_proba(logits).tolist()``), and ``features`` where the method needs them. All
were fitted on ``drawn(np.random.default_rng(1), 500, 3, temperature=2.0)``, with default options
but for format1_ts, ``TemperatureScaling(objective="brier")``, and format1_prior, a
``PriorCorrection`` of vector scaling from (0.3, 0.3, 0.4) to (0.2, 0.5, 0.3). Features are centred
logits, for which the last layer is the identity; format1_maccal was fitted on them.

The files of ``tests/files/two_classes`` were written when all of these methods, with default
options, kept the predicted class of two classes; ``expected.json`` is as above.
"""

import hashlib
import json
import math
import shutil
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import save as bytes_of
from torch import nn

import calibrant as cal
from calibrant import artifacts as io
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.registry import CALIBRATORS
from calibrant.calibrators.scaling import Identity, TemperatureScaling
from calibrant.decide import ConformalSets, PriorCorrection, Threshold, conformal, threshold
from calibrant.llm import AnswerCalibrator, FittedHead
from calibrant.llm.fingerprint import ModelFingerprint
from calibrant.llm.heads.modules import HEADS, make_head
from calibrant.monitor import Monitor
from calibrant.retrain import as_calibrator
from tests.support.artifacts import FORMAT_1, examples, fitted, fitted_kind, temperature
from tests.support.simulate import drawn

TWO_CLASSES = FORMAT_1 / "two_classes"
MARK = ModelFingerprint("tiny", 16, 50, "0" * 16, None)
NEWER = {"quadratic", "robust_sigmoid", "venn_abers", "multicalibration"}  # than format 1
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
    ("kind", "options"), [*((kind, {}) for kind in CALIBRATORS), *OPTIONS.items()]
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
    assert (about.format, about.kind, about.calibrant) == (2, kind, cal.__version__)
    assert [path.name for path in (tmp_path / kind).iterdir()] == [io.FILE]


def test_a_person_can_read_what_a_file_holds(tmp_path):
    io.save(fitted(TemperatureScaling(objective="brier")), tmp_path / "ts.safetensors")
    text = (tmp_path / "ts.safetensors").read_bytes()[8:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines()[2:8]]
    assert lines[:2] == ['"format": "2",', '"kind": "ts",']
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
    module = CALIBRATORS[kind]().fit(3 * logits, labels)
    prior = PriorCorrection(module).set_priors([0.5, 0.5], [0.1, 0.9])
    for each in (module, prior):
        io.save(each, tmp_path / "saved")
        again = io.load(tmp_path / "saved")
        assert np.array_equal(again.predict_proba(logits), each.predict_proba(logits))
        assert again.predict_proba(logits).shape == (400,)


@pytest.mark.parametrize("inside", [TemperatureScaling, Identity])
def test_a_corrected_calibrator_comes_back_with_the_one_inside(inside, tmp_path):
    module = PriorCorrection(fitted(inside())).set_priors([0.25] * 4, [0.1, 0.2, 0.3, 0.4])
    io.save(module, tmp_path / "prior")
    again = io.load(tmp_path / "prior", PriorCorrection)
    assert type(again.calibrator) is inside
    same(module, again)
    logits = examples()[0]
    assert np.array_equal(module.predict_proba(logits), again.predict_proba(logits))


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


def test_nothing_is_shared_with_the_saved_module(tmp_path):
    module = temperature()
    io.save(module, tmp_path)
    again = io.load(tmp_path)
    again.temperature_ += 1
    assert float(module.temperature_) == float(io.load(tmp_path).temperature_) == 2


def test_a_loaded_calibrator_can_be_fitted_again(tmp_path):
    io.save(temperature(), tmp_path)
    logits, labels = drawn(np.random.default_rng(0), 2000, 3, temperature=3.0)
    assert float(io.load(tmp_path).fit(logits, labels).temperature_) == pytest.approx(3, rel=0.1)


# ------------------------------------------------------------------------------------ state_dict


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_the_state_dict_of_auto_goes_into_a_fresh_one(scale):
    logits, labels = drawn(np.random.default_rng(1), 400, 4)
    module = cal.Auto(candidates=("none", "ts")).fit(scale * logits, labels)
    again = cal.Auto()
    again.load_state_dict(module.state_dict())
    same(module, again)
    assert np.array_equal(module.predict_proba(logits), again.predict_proba(logits))


@pytest.mark.parametrize("kind", ["ts", "auto", "vector", "odds"])
def test_the_state_dict_of_a_calibrated_model_goes_into_a_fresh_one(kind):
    torch.manual_seed(0)
    network, other = nn.Linear(5, 4), nn.Linear(5, 4)
    model = cal.calibrated(network, fitted_kind(kind))
    again = cal.calibrated(other, CALIBRATORS[kind]())
    inputs = torch.randn(6, 5)
    with pytest.raises(RuntimeError, match="not fitted"):
        again(inputs)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(inputs), model(inputs))


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
    for kind in CALIBRATORS:
        if CALIBRATORS[kind].needs_features or kind == "auto":
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = CALIBRATORS[kind]().fit(np.array([[0.5, 1.0]]), [0])
        io.save(found, tmp_path / "one.safetensors")
        again = io.load(tmp_path / "one.safetensors")
        assert torch.equal(again(torch.eye(2)), found(torch.eye(2))), kind


@pytest.mark.parametrize("kind", HEADS)
def test_temperature_heads_come_back(kind, tmp_path):
    torch.manual_seed(0)
    options = {"decoder": {"attention_heads": 2}, "mlp": {"units": 4}}.get(kind, {})
    head = make_head(kind, width=16, **options)
    for value in head.parameters():
        value.data.normal_()
    figures = {"before": {"nll": 1.5, "auroc": math.nan}}
    fit = FittedHead(head, MARK, "bce", False, "why", figures, {"seed": 3, "alpha": None})
    io.save(fit, tmp_path / "head")
    again = io.load(tmp_path / "head", FittedHead)
    assert type(again.head) is type(head)
    same(head, again.head)
    assert not any(value.requires_grad for value in again.head.parameters())
    assert (again.fingerprint, again.objective, again.kept, again.reasons) == (
        MARK,
        "bce",
        False,
        "why",
    )
    assert again.settings == {"seed": 3, "alpha": None}
    assert again.figures["before"]["nll"] == 1.5
    assert math.isnan(again.figures["before"]["auroc"])


@pytest.mark.parametrize("stage", ["sigmoid", "beta", "isotonic"])
@pytest.mark.parametrize("how", [None, "minimum"])
def test_answer_maps_come_back(stage, how, tmp_path):
    rng = np.random.default_rng(0)
    sure = rng.beta(4, 1, size=900)
    answers = sure if how is None else list(sure[:, None])
    right = rng.random(900) < sure
    found = AnswerCalibrator(how, stage=stage).fit(answers[:400], right[:400])
    io.save(found, tmp_path / "map.json")
    assert io.load(tmp_path / "map.json", AnswerCalibrator).threshold_ is None
    found.control(answers[400:], right[400:], max_error=0.4)
    io.save(found, tmp_path / "map.json")
    again = io.load(tmp_path / "map.json", AnswerCalibrator)
    assert (again.threshold_, again.limits_) == (found.threshold_, found.limits_)
    assert np.array_equal(again.predict(answers), found.predict(answers))


def test_monitors_go_on_after_a_load(tmp_path):
    logits, labels = drawn(np.random.default_rng(0), 600, 3, 1.5)
    calibrator = TemperatureScaling().fit(logits, labels)
    whole, watch = (Monitor(calibrator, window=50, keep=4) for _ in range(2))
    for each in (whole, watch):
        each.update(logits[:300], labels[:300]).predicted(["é", 7], logits[:2])
    io.save(watch, tmp_path / "watch.json")
    again = io.load(tmp_path / "watch.json", Monitor).resume(calibrator)
    for each in (whole, again):
        each.update(logits[300:], labels[300:])
    assert again.report().to_dict() == whole.report().to_dict()
    assert again.state() == whole.state()


# --------------------------------------------------------------------------------------- format 1


@pytest.mark.parametrize("place", sorted(FORMAT_1.glob("format*_*")), ids=lambda path: path.name)
def test_folders_of_every_format_load_and_are_replaced(place, tmp_path):
    expected = json.loads((place / "expected.json").read_text())
    inputs = np.array(expected["logits"]), expected.get("features")
    found = as_calibrator(io.load(place)).predict_proba(*inputs)
    np.testing.assert_allclose(found, expected["probs"], rtol=1e-6)
    folder = tmp_path / "saved"
    shutil.copytree(place, folder)
    io.save(io.load(folder), folder)
    assert np.array_equal(as_calibrator(io.load(folder)).predict_proba(*inputs), found)
    assert sorted(path.name for path in folder.iterdir()) == [io.FILE, "expected.json"]


def test_there_is_a_folder_of_every_calibrator():
    kinds = {*CALIBRATORS, "prior", "maccal"} - NEWER
    assert {place.name.partition("_")[2] for place in FORMAT_1.glob("format*_*")} == kinds


@pytest.mark.parametrize("file", sorted(TWO_CLASSES.glob("*.safetensors")), ids=lambda p: p.stem)
def test_maps_of_the_top_class_of_two_load(file, tmp_path):
    """Once, they kept the predicted class of two classes by default, or knew no other way."""
    expected = json.loads((TWO_CLASSES / "expected.json").read_text())
    module, logits = io.load(file), np.array(expected["logits"])
    found = module.predict_proba(logits)
    np.testing.assert_allclose(found, expected["probs"][file.stem], rtol=1e-6)
    assert module.keeps_argmax
    assert ((found > 0.5) == (logits > 0)).all()
    io.save(module, tmp_path / "again")
    assert np.array_equal(io.load(tmp_path / "again").predict_proba(logits), found)


def test_what_auto_had_chosen_in_format_1_is_known():
    module = io.load(FORMAT_1 / "format1_auto")
    assert module.get_extra_state()["chosen"] == "ts"
    assert module.get_extra_state()["reasons"].startswith("chose ts: the first within noise")


def test_json_files_of_format_1_load(tmp_path):
    state = {"how": None, "stage": "sigmoid", "learned": {"line": [2.0, 0.5]}, "threshold": None}
    (tmp_path / "map.json").write_text(json.dumps({"format": 1, **state}))
    found = io.load(tmp_path / "map.json", AnswerCalibrator).predict([0.5])
    assert found[0] == pytest.approx(1 / (1 + math.exp(-0.5)))
    watch = Monitor(window=5).observe([0.5] * 12, [0, 1] * 6)
    (tmp_path / "watch.json").write_text(
        json.dumps({"format": 1, "kind": "monitor", **watch.state()})
    )
    assert io.load(tmp_path / "watch.json").state() == watch.state()
    io.save(watch, tmp_path / "watch.json")
    assert io.load(tmp_path / "watch.json").state() == watch.state()


def test_heads_of_format_1_load_and_are_replaced(tmp_path):
    weights = bytes_of({"bias": torch.tensor(-0.5)})
    name = "head-0123456789abcdef.safetensors"
    header = {
        **{"format": 1, "calibrant": "0.0.1", "kind": "global", "config": {}},
        **{"mark": vars(MARK), "objective": "bce", "kept": True, "reasons": "", "settings": {}},
        **{"figures": {"before": {"auroc": None}}, "weights": name},
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
    }
    (tmp_path / "head.json").write_text(json.dumps(header))
    (tmp_path / name).write_bytes(weights)
    (tmp_path / "config.json").write_text('{"architectures": ["of the model"]}')
    found = io.load(tmp_path, FittedHead)
    assert found.head.state_dict() == {"bias": torch.tensor(-0.5)}
    assert found.fingerprint == MARK
    assert math.isnan(found.figures["before"]["auroc"])
    io.save(found, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [io.FILE, "config.json"]
    assert io.load(tmp_path, FittedHead).config() == found.config()
