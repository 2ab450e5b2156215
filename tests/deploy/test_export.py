"""Exported files give what the calibrator gives, in ONNX Runtime and with torch.export."""

import copy
import json
import sys
import zipfile
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import scipy.special
import torch
from torch import nn

import calibrant
from calibrant.calibrators.average import Average
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.decide.priors import PriorCorrection
from calibrant.deploy import export
from calibrant.deploy.exports import SUFFIXES, _precise, _quiet
from tests.support.calibrators import EVERY_METHOD
from tests.support.exported import (
    CLASSES,
    WIDTH,
    fitted,
    load_file,
    run_file,
    shifted,
    simulated,
    softmax,
)
from tests.support.simulate import drawn

TOKENS, PROBABILITIES = {"tokens": True}, {"probabilities": True}
OPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["matrix", "rank_gaps", "histogram_ovr", "gc", "blend"], TOKENS),
    **dict.fromkeys(["ets", "pts", "isotonic_ovr", "fc"], PROBABILITIES),
    "smart": {**TOKENS, **PROBABILITIES},
    "odds": {"opset": 18},
    "beta": {"opset": 21},
}
"""Each method is exported once; those that are not here without options."""
PROGRAMS = [
    *("vector", "dirichlet", "svs", "sigmoid", "quadratic", "robust_sigmoid", "histogram"),
    *("scaling_binning", "isotonic_ovr", "venn_abers", "blend", "sms_blend"),
    *("histogram_ovr", "bbq"),
]
"""Methods with the operators of others that are exported to ONNX, here or for log-odds."""
IN_ONNX = """
    _assert_tensor_metadata add addmm amax arange argmax asinh bitwise_not cat clamp cumsum
    div eq exp ge gt index isneginf lerp linear log log1p log_softmax logaddexp logsumexp lt
    matmul mean minimum mul neg new_full new_ones new_zeros numpy_T pad relu reshape rsub
    scatter select sigmoid slice softmax softplus sort sqrt square stack sub sum sym_size to
    topk unbind unsqueeze where zeros_like
"""
"""Operators of those others; a method with one more has to be exported to ONNX, too."""


pytestmark = pytest.mark.usefixtures("operators_read_once")


def about(path):
    return {one.key: one.value for one in onnx.load(path).metadata_props}


def takes_masks(calibrator, *inputs):
    try:
        calibrator.predict_proba(*inputs)
    except ValueError as refused:
        if "-inf" not in str(refused):
            raise
        return False
    return True


def shapes(values):
    """Names of inputs or outputs, with the dimensions as they are written."""
    dims = {one.name: one.type.tensor_type.shape.dim for one in values}
    return {name: tuple(d.dim_param or d.dim_value for d in each) for name, each in dims.items()}


def check_shapes(calibrator, path, tokens=False, probabilities=False):
    """Check the names and shapes of inputs and outputs."""
    written = onnx.load(path)
    onnx.checker.check_model(written, full_check=True)
    lead = ("batch", "tokens") if tokens else ("batch",)
    classes, features = int(calibrator.classes_), {"features": (*lead, WIDTH)}
    logits = lead if classes == 1 else (*lead, classes)
    inputs = {"logits": logits, **(features if calibrator.needs_features else {})}
    assert shapes(written.graph.input) == inputs
    assert shapes(written.graph.output) == {"probs" if probabilities else "calibrated": logits}


def check_parity(calibrator, path, tokens=False, probabilities=False):
    """Compare a file with `predict_proba`, for batches of 1 and 1000, with masks where legal."""
    columns = ("logits", "features") if calibrator.needs_features else ("logits",)
    run = load_file(path)
    for rows, seed in ((1, 1), (1000, 2)):
        data = simulated(rows * (3 if tokens else 1), seed, int(calibrator.classes_))
        inputs = [data[column] for column in columns]
        if tokens:
            inputs = [part.reshape(rows, 3, -1) for part in inputs]
        logits = inputs[0].copy()
        logits[..., 5:9] = -np.inf
        masked = [logits, *inputs[1:]]
        for arrays in [inputs, masked] if takes_masks(calibrator, *masked) else [inputs]:
            output, wanted = run(*arrays), calibrator.predict_proba(*arrays)
            assert output.shape == wanted.shape
            probs = output if probabilities else softmax(output)
            np.testing.assert_allclose(probs, wanted, rtol=0, atol=1e-5)
            np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-6)
            if calibrator.keeps_argmax:
                np.testing.assert_array_equal(output.argmax(-1), arrays[0].argmax(-1))


@pytest.mark.parametrize("name", [name for name in EVERY_METHOD if name not in PROGRAMS])
def test_every_method(name, tmp_path):
    calibrator, path = fitted(name), tmp_path / "calibrator.onnx"
    options = dict(OPTIONS.get(name, {}))
    assert export(calibrator, path, **options) <= 1e-5
    version = onnx.load(path).opset_import[0].version
    assert version == options.pop("opset", 20)
    check_parity(calibrator, path, **options)
    check_shapes(calibrator, path, **options)
    assert about(path) == {
        "kind": name,
        "classes": str(int(calibrator.classes_)),
        "calibrant": calibrant.__version__,
    }


def test_an_average_of_methods(rng, tmp_path):
    logits, labels = drawn(rng, 200, 6, temperature=2.0)
    calibrator = calibrant.Auto(candidates=("ts", "ets")).fit(logits, labels)
    assert isinstance(calibrator.chosen_, Average)
    assert export(calibrator, tmp_path / "calibrator.onnx") <= 1e-5
    check_parity(calibrator, tmp_path / "calibrator.onnx")


@pytest.mark.parametrize("name", ["ts", "vector"])
def test_what_zeros_count_as(name, tmp_path):
    calibrator, path = copy.deepcopy(fitted(name)), tmp_path / "calibrator.onnx"
    calibrator.set_floor(0.004)
    assert export(calibrator, path) <= 1e-5
    check_parity(calibrator, path)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("ts", TOKENS), ("vector", PROBABILITIES), ("odds", {}), ("smart", {})),
        *(("robust_sigmoid", {}), ("venn_abers", TOKENS)),  # sigmoid is a part of the first
    ],
)
def test_log_odds(name, options, tmp_path):
    calibrator, path = fitted(f"{name}/1"), tmp_path / "calibrator.onnx"
    export(calibrator, path, **options)
    check_shapes(calibrator, path, **options)
    run = load_file(path)
    for rows in (1, 301):
        shape = (rows, 2) if options == TOKENS else (rows,)
        logits = 5 * np.random.default_rng(rows).normal(size=shape).astype("float32")
        output = run(logits)
        probs = output if options == PROBABILITIES else scipy.special.expit(output.astype(float))
        np.testing.assert_allclose(probs, calibrator.predict_proba(logits), atol=1e-6)


def test_steps_of_log_odds(tmp_path):
    path, logits = tmp_path / "calibrator.onnx", np.linspace(-9, 9, 301, dtype="float32")
    calibrator = fitted("isotonic/1")
    assert export(calibrator, path, probabilities=True) <= 1e-5
    np.testing.assert_allclose(run_file(path, logits), calibrator.predict_proba(logits), atol=1e-5)


def test_prior_correction_of_a_method_that_needs_features(tmp_path):
    old, new = np.full(CLASSES, 1 / CLASSES), np.arange(1.0, CLASSES + 1)
    corrected = PriorCorrection(shifted()).set_priors(old, new / new.sum())
    path = tmp_path / "corrected.onnx"
    export(corrected, path)
    check_shapes(corrected, path)
    check_parity(corrected, path)
    assert about(path)["kind"] == "prior"


def test_calibrator_of_an_own_class_with_features_is_not_changed(tmp_path):
    calibrator, path = shifted().train(), tmp_path / "calibrator.onnx"
    before = {name: value.clone() for name, value in calibrator.state_dict().items()}
    export(calibrator, path, tokens=True)
    check_shapes(calibrator, path, tokens=True)
    check_parity(calibrator, path, tokens=True)
    assert about(path)["kind"] == "Shifted"
    assert calibrator.training
    assert all(torch.equal(value, before[name]) for name, value in calibrator.state_dict().items())


# With a model.


def network():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout())
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(144, CLASSES))


def test_model_and_calibrator(tmp_path):
    model, path = network(), tmp_path / "model.onnx"
    model[3].eval()  # of layers in different modes each keeps its own
    export(fitted("smart"), path, model=model, example=torch.randn(1, 1, 8, 8))
    assert [layer.training for layer in model] == [True, True, True, False, True, True]
    images = torch.randn(33, 1, 8, 8)
    with torch.no_grad():
        wanted = fitted("smart").predict_proba(model.eval()(images)).numpy()
    found = run_file(path, images.numpy())
    np.testing.assert_allclose(softmax(found), wanted, atol=1e-5)
    written = onnx.load(path)
    assert shapes(written.graph.input) == {"input": ("batch", 1, 8, 8)}
    assert shapes(written.graph.output) == {"calibrated": ("batch", CLASSES)}


def test_inputs_by_position(tmp_path):
    path = tmp_path / "model.onnx"
    left, right = torch.randn(2, 9, 12, CLASSES)
    model = nn.Bilinear(CLASSES, CLASSES, CLASSES)
    export(*(fitted("ts"), path), model=model, example=(left[:2], right[:2]), tokens=True)
    assert shapes(onnx.load(path).graph.input) == {
        f"input_{i}": ("batch", "tokens", CLASSES) for i in (0, 1)
    }
    with torch.no_grad():
        wanted = fitted("ts").predict_proba(model(left, right)).numpy()
    np.testing.assert_allclose(
        softmax(run_file(path, left.numpy(), right.numpy())), wanted, atol=1e-5
    )


# Refused.


class Fixed(nn.Module):
    """Works for two rows only."""

    def forward(self, x):
        return x.reshape(2, CLASSES)


class Looking(nn.Module):
    """What it does depends on the values."""

    def forward(self, x):
        return x if x.sum() > 0 else -x


class Eigen(nn.Module):
    """ONNX has no eigenvalues."""

    def forward(self, x):
        return x + torch.linalg.eigvalsh(x[..., None] * x[:, None])


@pytest.mark.parametrize(
    ("model", "by"), [(Fixed(), "export"), (Looking(), "export"), (Eigen(), "onnx")]
)
def test_model_that_cannot_be_exported(model, by, tmp_path):
    name = type(model).__name__
    with pytest.raises(ValueError, match=rf"^{name} cannot be exported: torch\.{by} says '\w"):
        export(*(fitted("ts"), tmp_path / "m.onnx"), model=model, example=torch.randn(2, CLASSES))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"path": "a.pt"}, ValueError, r"cannot write .*a\.pt: the suffix must be \.onnx"),
        ({"path": "folder.onnx"}, ValueError, r"folder\.onnx is a folder: name a file"),
        ({"path": "gone/a.onnx"}, FileNotFoundError, "gone does not exist; create it first"),
        ({"opset": 17}, ValueError, "opset must be 18 or newer, got 17"),
        ({"model": nn.Identity()}, ValueError, "model and example belong together"),
        ({"example": torch.zeros(2, CLASSES)}, ValueError, "model and example belong together"),
        (
            {"model": nn.Identity(), "example": 3},
            TypeError,
            "example must be a tensor, or a tuple or dictionary of tensors, .* got int",
        ),
        ({"model": nn.Identity(), "example": ()}, TypeError, "example must be .* got tuple"),
        (
            {"model": nn.Identity(), "example": {"a": torch.zeros(2), "b": 1}},
            TypeError,
            "example must be .* got dict",
        ),
        (
            {"model": nn.Identity(), "example": torch.zeros(0, CLASSES)},
            TypeError,
            "one row or more",
        ),
        (
            {"model": nn.Identity(), "example": (torch.zeros(2, 1), torch.zeros(3, 1))},
            ValueError,
            r"the same number of rows, got \[2, 3\]",
        ),
        ({"calibrator": TemperatureScaling()}, ValueError, "TemperatureScaling is not fitted"),
        (
            {"calibrator": nn.Identity()},
            TypeError,
            "must be a Calibrator, got Identity",
        ),
    ],
)
def test_refused(options, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.onnx").mkdir()
    given = {"calibrator": fitted("ts"), "path": "a.onnx", **options}
    with pytest.raises(error, match=message):
        export(**given)
    assert [one.name for one in tmp_path.iterdir()] == ["folder.onnx"]


def test_model_larger_than_an_onnx_file(tmp_path, monkeypatch):
    monkeypatch.setattr("calibrant.deploy.exports._MAX_ONNX_BYTES", 100)
    with pytest.raises(ValueError, match=r"the weights have .* GB and an ONNX file holds 2"):
        export(fitted("vector"), tmp_path / "a.onnx")


@pytest.mark.parametrize("library", ["onnx", "onnxscript", "onnxruntime"])
def test_missing_library(library, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"{library}.*pip install 'calibrant\[export\]'"):
        export(fitted("ts"), tmp_path / "a.onnx")


def test_file_that_does_not_run(tmp_path, monkeypatch):
    class Failing:
        def __init__(self, *_, **__):
            pass

        def run(self, *_):
            raise RuntimeError("no such operator\nsecond line")

    monkeypatch.setattr(onnxruntime, "InferenceSession", Failing)
    message = "nothing was written: ONNX Runtime fails on a batch of 1: no such operator"
    with pytest.raises(ValueError, match=message):
        export(fitted("ts"), tmp_path / "a.onnx")
    assert not list(tmp_path.iterdir())


# Operators.


class Operators(nn.Module):
    def __init__(self, *functions):
        super().__init__()
        self.functions = functions

    def forward(self, *inputs):
        return tuple(function(*inputs) for function in self.functions)


def by_onnx(functions, tmp_path, *arrays):
    """Functions as ONNX Runtime computes them, written as the exports are."""
    inputs = tuple(map(torch.from_numpy, arrays))
    dims = tuple({0: torch.export.Dim.DYNAMIC} for _ in inputs)
    with _quiet():
        program = torch.export.export(Operators(*functions), inputs, dynamic_shapes=(dims,))
        written = torch.onnx.export(_precise(program), dynamo=True, verbose=False)
    assert written is not None
    written.save(tmp_path / "f.onnx", external_data=False)
    session = onnxruntime.InferenceSession(tmp_path / "f.onnx")
    names = [one.name for one in session.get_inputs()]
    return session.run(None, dict(zip(names, arrays, strict=True)))


def test_operators_are_precise(tmp_path, rng):
    edges = [-np.inf, -200.0, -80.0, -20.0, -1.0, -0.75, -1e-8, 0.0, 1e-8, 1e-3, 3.0, 20.0, 80.0]
    inside = rng.normal(size=999) * 10.0 ** rng.uniform(-8, 1, 999)
    values = np.concatenate([edges, [1e20, np.inf], inside]).astype("float32")
    left, right = (200 * rng.normal(size=(2, 500))).astype("float32")
    left[:4], right[:4] = [-np.inf, -np.inf, 1, np.inf], [-np.inf, 3, -np.inf, 2]
    rows = np.stack([np.full(500, -np.inf, "float32"), left, right], 1)
    many = (np.zeros((3, 50_000)) + 1e-4 * rng.normal(size=(3, 1))).astype("float32")
    *outputs, pair, flat, column, total, sums = by_onnx(
        [
            *(lambda x, *_: x.log1p(), lambda x, *_: x.expm1(), lambda x, *_: x.sigmoid()),
            lambda _, rows, __: torch.logaddexp(rows[:, 1], rows[:, 2]),
            lambda _, rows, __: rows.logsumexp(-1),
            lambda _, rows, __: rows.logsumexp(-1, keepdim=True),
            lambda _, rows, __: rows[4:, 1:].logsumexp((0, -1)),
            lambda _, __, many: many.logsumexp(-1),
        ],
        *(tmp_path, values, rows, many),
    )
    exact = values.astype("float64")
    with np.errstate(all="ignore"):
        wanted = [np.log1p(exact), np.expm1(exact), scipy.special.expit(exact)]
    legal = exact >= -1, exact < 88, exact > -87  # elsewhere NaN, or beyond float32
    for output, expected, where in zip(outputs, wanted, legal, strict=True):
        where = where | np.isposinf(exact) | (np.isneginf(exact) & ~np.isnan(expected))
        np.testing.assert_allclose(output[where], expected[where], rtol=1e-6, atol=1e-38)
    logs = np.logaddexp(left.astype("float64"), right)
    np.testing.assert_allclose(pair, logs, rtol=1e-6)
    np.testing.assert_allclose(flat, logs, rtol=1e-6)
    np.testing.assert_allclose(column, logs[:, None], rtol=1e-6)
    np.testing.assert_allclose(total, np.logaddexp.reduce(logs[4:]), rtol=1e-6)
    np.testing.assert_allclose(sums, np.log(50_000) + many[:, 0], rtol=3e-7)


def traced(function):
    with _quiet():
        return torch.export.export(Operators(function), (torch.ones(2, 3),), strict=False)


def test_operators_are_replaced_in_place_too_and_a_program_without_them_is_kept():
    def names(program):
        return {str(node.target) for node in program.graph.nodes}

    in_place = traced(lambda x: (x + 1).sigmoid_())
    assert "aten.sigmoid_.default" in names(in_place)
    with _quiet():
        assert not {one for one in names(_precise(in_place)) if "sigmoid" in one}
    without = traced(lambda x: x.exp())
    assert _precise(without) is without


# ----------------------------------------------------- torch.export, and inputs of both


def operators(archive):
    """Names of the operators in the file of a program, such as "add"."""
    (inside,) = (one for one in archive.namelist() if one.endswith("models/model.json"))
    nodes = json.loads(archive.read(inside))["graph_module"]["graph"]["nodes"]
    return {node["target"].removeprefix("torch.ops.aten.").split(".")[0] for node in nodes}


# the ONNX export of every other method begins with the same program; one with features
@pytest.mark.parametrize("name", [*PROGRAMS, "fc"])
def test_programs(name, tmp_path):
    calibrator, path, options = fitted(name), tmp_path / "calibrator.pt2", OPTIONS.get(name, {})
    assert export(calibrator, path, **options) <= 1e-5
    check_parity(calibrator, path, **options)
    with zipfile.ZipFile(path) as archive:
        (inside,) = (one for one in archive.namelist() if one.endswith("calibrant.json"))
        assert json.loads(archive.read(inside))["kind"] == name
        assert operators(archive) <= set(IN_ONNX.split())


class Named(nn.Module):
    """Takes its inputs by name and returns a dictionary."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, CLASSES)

    def forward(self, *, left, right):
        return {"logits": self.fc(left + right), "rest": left}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_inputs_by_name(suffix, tmp_path):
    torch.manual_seed(0)
    model, path = Named(), tmp_path / f"model{suffix}"
    left, right = torch.randn(2, 9, WIDTH)
    example = {"right": right[:2], "left": left[:2]}  # another order than that of the model
    export(fitted("ts"), path, model=model, example=example)
    with torch.no_grad():
        wanted = fitted("ts").predict_proba(model.fc(left + right)).numpy()
    output = run_file(path, right=right.numpy(), left=left.numpy())
    np.testing.assert_allclose(softmax(output), wanted, atol=1e-6)
    if suffix == ".onnx":
        assert [one.name for one in onnx.load(path).graph.input] == ["right", "left"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_features_of_a_model(suffix, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    path, inputs = tmp_path / f"model{suffix}", torch.randn(9, 3)
    export(shifted(), path, model=model, example=inputs[:2], last_layer=model[2])
    with torch.no_grad():
        wanted = shifted().predict_proba(model(inputs), model[:2](inputs)).numpy()
    np.testing.assert_allclose(softmax(run_file(path, inputs.numpy())), wanted, atol=1e-6)
    assert not model[2]._forward_pre_hooks


def test_a_calibrated_model_holds_what_the_file_needs(tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    model, inputs = calibrant.calibrated(network, shifted(), last_layer="2"), torch.randn(9, 3)
    export(model, tmp_path / "model.onnx", example=inputs[:2])
    output = run_file(tmp_path / "model.onnx", inputs.numpy())
    np.testing.assert_allclose(softmax(output), model.predict_proba(inputs.numpy()), atol=1e-6)
