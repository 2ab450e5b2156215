"""Files that other programs run: they give what the calibrator gives, or are not written."""

import copy
import json
import re
import sys
import warnings
import zipfile
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import scipy.special
import torch
from torch import nn

import calibrant
from calibrant import artifacts as io
from calibrant.calibrators.registry import CALIBRATORS
from calibrant.calibrators.scaling import Identity, TemperatureScaling
from calibrant.decide.priors import PriorCorrection
from calibrant.deploy import export_graph, onnx as export
from calibrant.deploy.exports import EXPORTS
from calibrant.deploy.onnx import export_onnx
from calibrant.deploy.torch_export import export_program

CLASSES, WIDTH = 100, 16

QUICK: dict[str, dict[str, Any]] = {
    "matrix": {"off_diagonal": 1e4, "intercept": 1.0},
    "dirichlet": {"off_diagonal": 1e4, "intercept": 1.0},
    "cts": {"passes": 1},
}
"""Options of methods whose fits take long."""


def simulated(n, seed=0):
    """Features, over-confident logits and labels of 100 classes."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n, WIDTH))
    weight, bias = np.random.default_rng(7).normal(size=(CLASSES, WIDTH)), np.zeros(CLASSES)
    truth = features @ weight.T
    labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    return {
        "logits": (2 * truth).astype("float32"),
        "labels": labels,
        "features": features.astype("float32"),
        "head": (2 * weight, bias),
    }


@cache
def fitted(name):
    """A method on 100 classes, or with "/1" behind its name on log-odds."""
    name, _, one = name.partition("/")
    data = simulated(800)
    if one:
        data["logits"], data["labels"] = data["logits"][:, 0], data["labels"] % 2
        data["head"] = tuple(part[:1] for part in data["head"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few samples for many parameters
        return CALIBRATORS[name](**QUICK.get(name, {})).fit(**data).eval()


def ran(path, *inputs):
    """What ONNX Runtime gives for arrays, in the order of the inputs."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    (found,) = session.run(None, dict(zip(names, inputs, strict=True)))
    return found


def about(path):
    return {one.key: one.value for one in onnx.load(path).metadata_props}


def softmax(logits):
    z = logits.astype("float64") - logits.max(-1, keepdims=True)
    return np.exp(z) / np.exp(z).sum(-1, keepdims=True)


def takes_masks(calibrator, *inputs):
    try:
        calibrator.predict_proba(*inputs)
    except ValueError as refused:
        if "-inf" not in str(refused):
            raise
        return False
    return True


# Parity: every method of the table.


def compare_with_onnx(calibrator, path, *, tokens):
    """Whole files against `predict_proba`, batches 1 and 1000, with masked classes where legal."""
    beside = ("features",) if calibrator.needs_features else ()
    for rows, seed in ((1, 1), (1000, 2)):
        data = simulated(rows * (3 if tokens else 1), seed)
        inputs = [data[key] for key in ("logits", *beside)]
        if tokens:
            inputs = [part.reshape(rows, 3, -1) for part in inputs]
        logits = inputs[0].copy()
        logits[..., 5:9] = -np.inf
        masked = [logits, *inputs[1:]]
        for given in [inputs, masked] if takes_masks(calibrator, *masked) else [inputs]:
            found = ran(path, *given)
            wanted = calibrator.predict_proba(*given)
            assert found.shape == wanted.shape
            np.testing.assert_allclose(softmax(found), wanted, rtol=0, atol=1e-5)
            if calibrator.keeps_argmax:
                np.testing.assert_array_equal(found.argmax(-1), given[0].argmax(-1))


@pytest.mark.parametrize("name", CALIBRATORS)
def test_onnx_gives_what_the_calibrator_gives(name, tmp_path):
    calibrator = fitted(name)
    path = tmp_path / "calibrator.onnx"
    assert export_onnx(calibrator, path) <= 1e-5
    compare_with_onnx(calibrator, path, tokens=False)
    assert about(path) == {"kind": name, "classes": "100", "calibrant": calibrant.__version__}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ts", "matrix", "smart", "histogram_ovr", "isotonic", "gc", "blend"]
)
def test_onnx_of_tokens_gives_what_the_calibrator_gives(name, tmp_path):
    path = tmp_path / "calibrator.onnx"
    assert export_onnx(fitted(name), path, tokens=True) <= 1e-5
    compare_with_onnx(fitted(name), path, tokens=True)


@pytest.mark.parametrize("name", CALIBRATORS)
def test_program_gives_what_the_calibrator_gives(name, tmp_path):
    calibrator = fitted(name)
    path = tmp_path / "calibrator.pt2"
    assert export_program(calibrator, path) <= 1e-5
    again = torch.export.load(path).module()
    for rows in (1, 1000):
        data = simulated(rows, 3)
        given = [data["logits"], *([data["features"]] if calibrator.needs_features else [])]
        with torch.no_grad():
            found = again(*map(torch.from_numpy, given)).numpy()
        np.testing.assert_allclose(softmax(found), calibrator.predict_proba(*given), atol=1e-5)
    with zipfile.ZipFile(path) as archive:
        (inside,) = (one for one in archive.namelist() if one.endswith("calibrant.json"))
        assert json.loads(archive.read(inside))["kind"] == name


# What goes in and what comes out.


@pytest.mark.parametrize("name", ["none", "ts", "vector", "odds", "smart"])
@pytest.mark.parametrize("probabilities", [False, True])
def test_log_odds(name, probabilities, tmp_path):
    calibrator = fitted(f"{name}/1")
    path = tmp_path / "calibrator.onnx"
    export_onnx(calibrator, path, probabilities=probabilities)
    for rows in (1, 301):
        logits = 5 * np.random.default_rng(rows).normal(size=rows).astype("float32")
        found = ran(path, logits)
        found = found if probabilities else 1 / (1 + np.exp(-found.astype("float64")))
        np.testing.assert_allclose(found, calibrator.predict_proba(logits), atol=1e-6)


def shapes(values):
    """Names of inputs or outputs, with the dimensions as they are written."""
    dims = {one.name: one.type.tensor_type.shape.dim for one in values}
    return {name: tuple(d.dim_param or d.dim_value for d in each) for name, each in dims.items()}


@pytest.mark.parametrize(
    ("name", "options", "given", "returned"),
    [
        ("ts", {}, ("batch", 100), "calibrated"),
        ("ts", {"probabilities": True}, ("batch", 100), "probs"),
        ("ts", {"tokens": True}, ("batch", "tokens", 100), "calibrated"),
        ("ts/1", {}, ("batch",), "calibrated"),
        ("ts/1", {"tokens": True}, ("batch", "tokens"), "calibrated"),
    ],
)
def test_names_and_shapes(name, options, given, returned, tmp_path):
    path = tmp_path / "calibrator.onnx"
    export_onnx(fitted(name), path, **options)
    written = onnx.load(path)
    onnx.checker.check_model(written, full_check=True)
    assert shapes(written.graph.input) == {"logits": given}
    assert shapes(written.graph.output) == {returned: given}


def test_probabilities_sum_to_one(tmp_path):
    path = tmp_path / "calibrator.onnx"
    export_onnx(fitted("smart"), path, probabilities=True)
    logits = simulated(50, 1)["logits"]
    found = ran(path, logits)
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-6)
    np.testing.assert_allclose(found, fitted("smart").predict_proba(logits), atol=1e-6)


def test_correction_of_the_prior(tmp_path):
    old, new = np.full(CLASSES, 1 / CLASSES), np.arange(1.0, CLASSES + 1)
    corrected = PriorCorrection(fitted("ts")).set_priors(old, new / new.sum())
    export_onnx(corrected, tmp_path / "corrected.onnx")
    logits = simulated(50, 1)["logits"]
    found = softmax(ran(tmp_path / "corrected.onnx", logits))
    np.testing.assert_allclose(found, corrected.predict_proba(logits), atol=1e-6)
    assert about(tmp_path / "corrected.onnx")["kind"] == "prior"


@pytest.mark.parametrize("opset", [18, 21])
def test_opset(opset, tmp_path):
    path = tmp_path / "calibrator.onnx"
    export_onnx(fitted("odds"), path, opset=opset)
    assert onnx.load(path).opset_import[0].version == opset
    compare_with_onnx(fitted("odds"), path, tokens=False)


class Shifted(TemperatureScaling):
    """Divides by the temperature after the first features were added, and so needs them."""

    needs_features = True

    def _fit(self, given, context):
        self._labelled_features(given, context)
        super()._fit(given, context)

    def _transform(self, logits, top, features):
        return super()._transform(logits + features[..., :1] * torch.sign(logits + 1), top, None)

    keeps_argmax = False


def shifted():
    return Shifted().fit(**simulated(300)).eval()


@pytest.mark.parametrize("tokens", [False, True])
def test_features_are_the_second_input(tokens, tmp_path):
    calibrator, path = shifted(), tmp_path / "calibrator.onnx"
    export_onnx(calibrator, path, tokens=tokens)
    lead = ("batch", "tokens") if tokens else ("batch",)
    wanted = {"logits": (*lead, CLASSES), "features": (*lead, WIDTH)}
    assert shapes(onnx.load(path).graph.input) == wanted
    compare_with_onnx(calibrator, path, tokens=tokens)


def test_features_of_the_calibrator_within(tmp_path):
    even = np.full(CLASSES, 1 / CLASSES)
    corrected = PriorCorrection(shifted()).set_priors(even, even)
    export_onnx(corrected, tmp_path / "calibrator.onnx")
    compare_with_onnx(corrected, tmp_path / "calibrator.onnx", tokens=False)


# With a model before it.


class Named(nn.Module):
    """Takes its inputs by name and returns a dictionary."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, CLASSES)

    def forward(self, *, left, right):
        return {"logits": self.fc(left + right), "rest": left}


def network():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout())
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(144, CLASSES))


@pytest.mark.parametrize("rows", [1, 5])
def test_model_and_calibrator(rows, tmp_path):
    model, path = network(), tmp_path / "model.onnx"
    model[3].eval()  # of layers in different modes each keeps its own
    export_onnx(fitted("smart"), path, model=model, example=torch.randn(rows, 1, 8, 8))
    assert [layer.training for layer in model] == [True, True, True, False, True, True]
    images = torch.randn(33, 1, 8, 8)
    with torch.no_grad():
        wanted = fitted("smart").predict_proba(model.eval()(images)).numpy()
    found = ran(path, images.numpy())
    np.testing.assert_allclose(softmax(found), wanted, atol=1e-5)
    written = onnx.load(path)
    assert shapes(written.graph.input) == {"input": ("batch", 1, 8, 8)}
    assert shapes(written.graph.output) == {"calibrated": ("batch", 100)}


@pytest.mark.parametrize("suffix", EXPORTS)
def test_inputs_by_name(suffix, tmp_path):
    torch.manual_seed(0)
    model, path = Named(), tmp_path / f"model{suffix}"
    left, right = torch.randn(2, 9, WIDTH)
    example = {"right": right[:2], "left": left[:2]}  # another order than that of the model
    EXPORTS[suffix](fitted("ts"), path, model=model, example=example)
    with torch.no_grad():
        wanted = fitted("ts").predict_proba(model.fc(left + right)).numpy()
        if suffix == ".onnx":
            assert list(shapes(onnx.load(path).graph.input)) == ["right", "left"]
            found = ran(path, right.numpy(), left.numpy())
        else:
            found = torch.export.load(path).module()(right=right, left=left).numpy()
    np.testing.assert_allclose(softmax(found), wanted, atol=1e-6)


def test_inputs_by_position(tmp_path):
    path = tmp_path / "model.onnx"
    left, right = torch.randn(2, 9, 12, CLASSES)
    model = nn.Bilinear(CLASSES, CLASSES, CLASSES)
    export_onnx(*(fitted("ts"), path), model=model, example=(left[:2], right[:2]), tokens=True)
    assert shapes(onnx.load(path).graph.input) == {
        f"input_{i}": ("batch", "tokens", CLASSES) for i in (0, 1)
    }
    with torch.no_grad():
        wanted = fitted("ts").predict_proba(model(left, right)).numpy()
    np.testing.assert_allclose(softmax(ran(path, left.numpy(), right.numpy())), wanted, atol=1e-5)


@pytest.mark.parametrize("suffix", EXPORTS)
def test_features_of_a_model(suffix, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    path, inputs = tmp_path / f"model{suffix}", torch.randn(9, 3)
    EXPORTS[suffix](shifted(), path, model=model, example=inputs[:2], last_layer=model[2])
    with torch.no_grad():
        hidden = model[:2](inputs)
        wanted = shifted().predict_proba(model(inputs), hidden).numpy()
        if suffix == ".onnx":
            found = ran(path, inputs.numpy())
        else:
            found = torch.export.load(path).module()(inputs).numpy()
    np.testing.assert_allclose(softmax(found), wanted, atol=1e-6)
    assert not model[2]._forward_pre_hooks


# What is refused.


class Halved(TemperatureScaling):
    """Halves the logits where nobody sees it: in the exported graph."""

    def _transform(self, logits, top, features):
        found = super()._transform(logits, top, features)
        return found / 2 if torch.compiler.is_exporting() else found


class Rounded(TemperatureScaling):
    """Rounds to six digits in the exported graph, which levels near ties and little else."""

    def forward(self, logits, features=None):
        found = super().forward(logits, features)
        return (1e6 * found).round() / 1e6 if torch.compiler.is_exporting() else found


class Step(TemperatureScaling):
    """The temperature is another from a margin on, that in the exported graph is moved."""

    edge, moved = 0.0, 2e-7

    def _temperature(self, logits, top):
        first, second = logits.topk(2, dim=-1).values.unbind(-1)
        edge = self.edge + self.moved * torch.compiler.is_exporting()
        return torch.where(first - second > edge, 1.0, 2.0)[..., None]


class Nothing(TemperatureScaling):
    """Gives NaN."""

    def _temperature(self, logits, top):
        return super()._temperature(logits, top) * torch.nan


class Lost(TemperatureScaling):
    """Gives NaN in the exported graph."""

    def _transform(self, logits, top, features):
        found = super()._transform(logits, top, features)
        return found * (torch.nan if torch.compiler.is_exporting() else 1)


class Short(TemperatureScaling):
    """Leaves a class out in the exported graph."""

    def forward(self, logits, features=None):
        found = super().forward(logits, features)
        return found[..., 1:] if torch.compiler.is_exporting() else found


class Moved(Step):
    moved = 0.5


class Steep(TemperatureScaling):
    """The temperature rises from 1 to 1.05 while the margin rises by little."""

    def _temperature(self, logits, top):
        first, second = logits.topk(2, dim=-1).values.unbind(-1)
        moved = 1e-7 * torch.compiler.is_exporting()
        return 1 + 0.05 * ((first - second + moved) / 1e-6).clamp(0, 1)[..., None]


def planted(kind):
    data = simulated(300)
    return kind().fit(data["logits"], data["labels"])


@pytest.mark.parametrize("suffix", EXPORTS)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            Halved,
            r"nothing was written: on a batch of \d+ .* gives probabilities that differ by 0\.\d+ ",
        ),
        (Rounded, "nothing was written: on small logits .* predicts other classes than torch"),
        (Moved, "nothing was written: on .* gives probabilities that differ"),
        (Nothing, "nothing was written: on a batch of 1 torch itself gives NaN"),
        (Lost, "nothing was written: on a batch of 1 .* differ by inf"),
        (Short, r"on a batch of 1 .* gives the shape \(1, 99\) and torch \(1, 100\)"),
    ],
)
def test_wrong_export_is_not_written(suffix, kind, message, tmp_path):
    path = tmp_path / f"calibrator{suffix}"
    path.write_text("as before")
    with pytest.raises(ValueError, match=message):
        EXPORTS[suffix](planted(kind), path)
    assert path.read_text() == "as before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", [Step, Steep])
def test_either_side_of_a_step_is_right(kind, tmp_path):
    """Where logits are at a step, rounding decides, and no export could do the same."""
    assert export_program(planted(kind), tmp_path / "calibrator.pt2") <= 1e-5
    found = torch.export.load(tmp_path / "calibrator.pt2").module()
    near = torch.full((1, CLASSES), -3.0)
    near[0, 3:5] = torch.tensor([1.5e-7, 0.0])
    assert (found(near).softmax(-1) - planted(kind)(near).softmax(-1)).abs().max() > 1e-4


def test_tolerance(tmp_path):
    data = simulated(300)
    almost = planted(Halved)
    with pytest.raises(ValueError, match=r"1e-05 is allowed"):
        export_program(almost, tmp_path / "a.pt2")
    assert export_program(almost, tmp_path / "a.pt2", tolerance=1.0) > 0.1
    found = torch.export.load(tmp_path / "a.pt2").module()(torch.from_numpy(data["logits"]))
    assert found.shape == (300, CLASSES)


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
def test_model_that_torch_cannot_export(model, by, tmp_path):
    name = type(model).__name__
    with pytest.raises(ValueError, match=rf"^{name} cannot be exported: torch\.{by} says '\w"):
        export_onnx(
            *(fitted("ts"), tmp_path / "m.onnx"), model=model, example=torch.randn(2, CLASSES)
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"path": "a.pt"}, ValueError, r"cannot write .*a\.pt: the suffix must be \.onnx"),
        ({"path": "folder.onnx"}, ValueError, r"folder\.onnx is a folder: name a file"),
        ({"path": "gone/a.onnx"}, FileNotFoundError, "gone does not exist; create it first"),
        ({"opset": 17}, ValueError, "opset must be 18 or newer, got 17"),
        ({"model": nn.Identity()}, ValueError, "model and example belong together"),
        ({"example": torch.zeros(2, 100)}, ValueError, "model and example belong together"),
        ({"model": nn.Identity(), "example": 3}, TypeError, "example must be a tensor, .* got int"),
        ({"model": nn.Identity(), "example": ()}, TypeError, "example must be .* got tuple"),
        (
            {"model": nn.Identity(), "example": {"a": torch.zeros(2), "b": 1}},
            TypeError,
            "example must be .* got dict",
        ),
        ({"model": nn.Identity(), "example": torch.zeros(0, 100)}, TypeError, "one row or more"),
        (
            {"model": nn.Identity(), "example": (torch.zeros(2, 1), torch.zeros(3, 1))},
            ValueError,
            "the same number of rows, got 2, 3",
        ),
        ({"calibrator": TemperatureScaling()}, ValueError, "TemperatureScaling is not fitted"),
        ({"calibrator": nn.Identity()}, TypeError, "must be a Calibrator, got Identity"),
    ],
)
def test_refused(options, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.onnx").mkdir()
    given = {"calibrator": fitted("ts"), "path": "a.onnx", **options}
    with pytest.raises(error, match=message):
        export_onnx(**given)
    assert [one.name for one in tmp_path.iterdir()] == ["folder.onnx"]


def test_models_beyond_the_size_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "LARGEST", 100)
    with pytest.raises(ValueError, match=r"the weights have .* GB and an ONNX file holds 2"):
        export_onnx(fitted("vector"), tmp_path / "a.onnx")


@pytest.mark.parametrize("library", ["onnx", "onnxscript", "onnxruntime"])
def test_missing_library_is_named(library, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"{library}.*pip install 'calibrant\[export\]'"):
        export_onnx(fitted("ts"), tmp_path / "a.onnx")


def test_file_that_cannot_be_run(tmp_path, monkeypatch):
    class Failing:
        def __init__(self, *_, **__):
            pass

        def run(self, *_):
            raise RuntimeError("no such operator\nsecond line")

    monkeypatch.setattr(onnxruntime, "InferenceSession", Failing)
    message = "nothing was written: ONNX Runtime fails on a batch of 1 with 'no such operator'"
    with pytest.raises(ValueError, match=message):
        export_onnx(fitted("ts"), tmp_path / "a.onnx")
    assert not list(tmp_path.iterdir())


OPERATORS: dict[Any, tuple[Any, list[float]]] = {
    torch.log1p: (np.log1p, [-1.0, -0.75, -1e-8, 0.0, 1e-8, 1e-3, 3.0, 1e20, np.inf]),
    torch.expm1: (np.expm1, [-np.inf, -200.0, -1e-8, 0.0, 1e-8, 1e-3, 3.0, 80.0, np.inf]),
    torch.sigmoid: (scipy.special.expit, [-np.inf, -80.0, -20.0, -1.0, 0.0, 20.0, np.inf]),
}


class Operator(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def by_onnx(function, tmp_path, *inputs):
    """A function as ONNX Runtime computes it, written as the exports are."""
    dims = tuple({0: torch.export.Dim.DYNAMIC} for _ in inputs)
    with export_graph._quiet():
        program = torch.export.export(Operator(function), inputs, dynamic_shapes=(dims,))
        written = torch.onnx.export(
            program.run_decompositions(export.PRECISE), dynamo=True, verbose=False
        )
    assert written is not None
    written.save(tmp_path / "f.onnx", external_data=False)
    return ran(tmp_path / "f.onnx", *(one.numpy() for one in inputs))


@pytest.mark.parametrize("function", OPERATORS)
def test_operators_keep_their_digits(function, tmp_path, rng):
    reference, edges = OPERATORS[function]
    inside = rng.normal(size=999) * 10.0 ** rng.uniform(-8, 1, 999)
    values = np.concatenate([edges, inside[inside > -1]]).astype("float32")
    found = by_onnx(function, tmp_path, torch.from_numpy(values))
    with np.errstate(divide="ignore"):
        wanted = reference(values.astype("float64"))
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-38)


def test_sums_of_logarithms_keep_their_digits(tmp_path, rng):
    left, right = (200 * rng.normal(size=(2, 500))).astype("float32")
    left[:4], right[:4] = [-np.inf, -np.inf, 1, np.inf], [-np.inf, 3, -np.inf, 2]
    pair = tuple(map(torch.from_numpy, (left, right)))
    wanted = np.logaddexp(left.astype("float64"), right)
    np.testing.assert_allclose(by_onnx(torch.logaddexp, tmp_path, *pair), wanted, rtol=1e-6)
    rows = np.stack([np.full(500, -np.inf, "float32"), left, right], 1)
    for keepdim in (False, True):
        found = by_onnx(
            lambda x, keepdim=keepdim: x.logsumexp(-1, keepdim=keepdim),
            *(tmp_path, torch.from_numpy(rows)),
        )
        np.testing.assert_allclose(found, wanted[:, None] if keepdim else wanted, rtol=1e-6)
    found = by_onnx(lambda x: x.logsumexp((0, -1)), tmp_path, torch.from_numpy(rows[:, 1:][4:]))
    np.testing.assert_allclose(found, np.logaddexp.reduce(wanted[4:]), rtol=1e-6)
    many = torch.zeros(3, 50_000) + 1e-4 * torch.from_numpy(rng.normal(size=(3, 1))).float()
    found = by_onnx(lambda x: x.logsumexp(-1), tmp_path, many)
    np.testing.assert_allclose(found, np.log(50_000) + many[:, 0], rtol=3e-7)


def test_class_of_your_own_is_named(tmp_path):
    class Own(Identity):
        pass

    export_onnx(Own().fit([[0.0, 1.0]], [1]), tmp_path / "a.onnx")
    assert about(tmp_path / "a.onnx")["kind"] == "Own"


def test_the_calibrator_stays_as_it_was(tmp_path):
    calibrator = copy.deepcopy(fitted("vector")).train()
    before = {name: value.clone() for name, value in calibrator.state_dict().items()}
    export_onnx(calibrator, tmp_path / "a.onnx")
    assert calibrator.training
    assert all(torch.equal(value, before[name]) for name, value in calibrator.state_dict().items())


# On the command line.


@pytest.fixture
def saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    io.save(fitted("ts"), "saved")


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize("suffix", EXPORTS)
def test_verb(run, suffix):
    code, out, err = run("export", "saved", "-o", f"out{suffix}", "--tokens", "--probabilities")
    assert (code, out) == (0, "")
    assert err.startswith(f"wrote out{suffix}; its probabilities differ from the calibrator's by ")
    assert err.count("\n") == 1
    logits = simulated(6, 1)["logits"].reshape(2, 3, CLASSES)
    if suffix == ".onnx":
        found = ran("out.onnx", logits)
    else:
        found = torch.export.load("out.pt2").module()(torch.from_numpy(logits)).numpy()
    np.testing.assert_allclose(found, fitted("ts").predict_proba(logits), atol=1e-6)


@pytest.mark.usefixtures("saved")
def test_opset_on_the_command_line(run):
    assert run("export", "saved", "-o", "out.onnx", "--opset", "19")[0] == 0
    assert onnx.load("out.onnx").opset_import[0].version == 19


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["saved", "-o", "out.pt"], r"error: cannot write out\.pt: the suffix must be one of \.on"),
        (["gone", "-o", "out.onnx"], "error: there is no folder gone"),
        (["saved", "-o", "out.onnx", "--opset", "9"], "error: opset must be 18 or newer"),
        (["saved", "-o", "out.pt2", "--opset", "20"], r"Error: --opset is for \.onnx files"),
        (["saved"], "Error: Missing option '-o'"),
    ],
)
def test_failed_verb(run, arguments, message):
    code, out, err = run("export", *arguments)
    assert (code, out) == (2, "")
    assert re.search(f"^{message}", err, re.M)
