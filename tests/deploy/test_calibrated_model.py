"""Models with a calibrator behind them: input, output, and saved folders."""

import copy
import dataclasses
import sys
import threading
import warnings
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from calibrant import artifacts
from calibrant.calibrators.registry import CALIBRATORS
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.calibrators.tags import TagScaling
from calibrant.deploy import CalibratedModel, calibrated
from calibrant.workflows.effect import effect
from tests.support.models import CLASSES, WIDTH, Shifted, fitted, shifted
from tests.support.simulate import drawn, drawn_tags


class Outputs(NamedTuple):
    hidden: torch.Tensor
    logits: torch.Tensor


class Plain(NamedTuple):
    scores: torch.Tensor
    hidden: torch.Tensor


@dataclasses.dataclass
class Record:
    loss: float
    logits: torch.Tensor


class Returning(nn.Module):
    """Returns its input in another form, with something beside it."""

    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, x):
        return self.form(x)


FORMS: dict[str, Any] = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, "rest"),
    "list": lambda x: [x, "rest"],
    "dictionary": lambda x: {"loss": 3, "logits": x},
    "ordered": lambda x: OrderedDict(loss=3, logits=x),
    "named tuple": lambda x: Outputs(x + 1, x),
    "plain named tuple": lambda x: Plain(x, x + 1),
    "dataclass": lambda x: Record(3, x),
}


@pytest.mark.parametrize("form", FORMS)
def test_output_keeps_its_form(form):
    calibrator, logits = fitted("ts"), torch.randn(5, CLASSES)
    model = Returning(FORMS[form])
    found, before = calibrated(model, calibrator)(logits), model(logits)
    assert type(found) is type(before)
    given = found["logits"] if isinstance(found, dict) else getattr(found, "logits", None)
    if given is None:
        given = found if form == "tensor" else found[0]
    assert torch.equal(given, calibrator(logits))
    rest = {
        "tuple": lambda x: x[1:],
        "list": lambda x: x[1:],
        "dictionary": lambda x: x["loss"],
        "ordered": lambda x: (list(x), x["loss"]),
        "named tuple": lambda x: x.hidden.tolist(),
        "plain named tuple": lambda x: x.hidden.tolist(),
        "dataclass": lambda x: x.loss,
    }
    if form in rest:
        assert rest[form](found) == rest[form](before)


def test_output_of_the_model_is_not_changed():
    kept = {"logits": torch.randn(5, CLASSES)}
    before = kept["logits"].clone()
    model = calibrated(Returning(lambda _: kept), fitted("ts"))
    assert not torch.equal(model(None)["logits"], before)
    assert torch.equal(kept["logits"], before)


@pytest.mark.parametrize(
    "form", [lambda x: None, lambda x: {"scores": x}, lambda x: ("a", x), lambda x: ()]
)
def test_output_without_logits(form):
    with pytest.raises(TypeError, match="the model must return logits: a tensor, a tuple or list"):
        calibrated(Returning(form), fitted("ts"))(torch.randn(5, CLASSES))


@pytest.mark.parametrize("one_logit", [False, True])
def test_loss_instead_of_logits(one_logit):
    model = calibrated(Returning(lambda x: (x.sum(), x)), fitted("ts", one_logit=one_logit))
    with pytest.raises(ValueError, match="logits must come first, got a number"):
        model(torch.randn(5, CLASSES))


def test_arguments_go_to_the_model():
    class Sum(nn.Module):
        def forward(self, a, b, *, c):
            return a + 10 * b + 100 * c

    a, b, c = torch.randn(3, 5, CLASSES)
    found = calibrated(Sum(), fitted("ts"))(a, b, c=c)
    assert torch.equal(found, fitted("ts")(a + 10 * b + 100 * c))


@pytest.mark.parametrize("shape", [(7,), (7, 1), (7, 3)])
def test_one_logit(shape):
    calibrator = fitted("ts", one_logit=True)
    logits = torch.randn(shape)
    found = calibrated(nn.Identity(), calibrator)(logits)
    assert found.shape == shape
    assert torch.allclose(found, logits / calibrator.temperature_, atol=1e-6)


@pytest.mark.parametrize("by_name", [False, True])
def test_features_are_the_input_of_the_last_layer(network, inputs, by_name):
    calibrator = shifted()
    model = calibrated(network, calibrator, last_layer="3" if by_name else network[3]).eval()
    hidden = network[:3](inputs)
    wanted = calibrator(network(inputs), hidden)
    assert torch.equal(model(inputs), wanted)
    assert not torch.equal(wanted, calibrator(network(inputs), 0 * hidden))
    assert not network[3]._forward_pre_hooks
    copied: Any = copy.deepcopy(model)
    with torch.no_grad():
        copied.model[0].weight.zero_()
    assert torch.equal(model(inputs), wanted)
    assert not torch.equal(copied(inputs), wanted)


def test_features_passed_by_name():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            return self.fc(input=x)

    net, x = Model(), torch.randn(5, WIDTH)
    assert torch.equal(calibrated(net, shifted(), last_layer="fc")(x), shifted()(net(x), x))


@pytest.mark.parametrize("column", [False, True])
def test_features_with_one_logit(column):
    last, x = nn.Linear(WIDTH, 1), torch.randn(5, WIDTH)
    net = nn.Sequential(last) if column else nn.Sequential(last, nn.Flatten(0))
    model = calibrated(net, shifted(one_logit=True), last_layer=last)
    assert model(x).shape == net(x).shape
    assert torch.equal(model(x).reshape(-1), shifted(one_logit=True)(last(x)[:, 0], x))


def test_layer_that_is_not_called(network, inputs):
    network.unused = nn.Identity()
    network.forward = lambda x: network[3](network[0](x))
    model = calibrated(network, shifted(), last_layer="unused")
    with pytest.raises(ValueError, match="did not call its layer 'unused': name another"):
        model(inputs)
    assert not network.unused._forward_pre_hooks


def test_threads_have_their_own_features():
    """Each of two threads is in the model at the same time as the other."""
    meet = threading.Barrier(2)

    class Slow(nn.Linear):
        def forward(self, x):
            meet.wait(10)
            return super().forward(x)

    last = Slow(WIDTH, CLASSES)
    net = nn.Sequential(last)
    model = calibrated(net, shifted(), last_layer=last)
    found: dict[int, list[torch.Tensor]] = {}

    def work(number):
        x = torch.full((2, WIDTH), float(number))
        for _ in range(5):
            found.setdefault(number, []).append(model(x).detach())

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, outputs in found.items():
        x = torch.full((2, WIDTH), float(number))
        wanted = shifted()(nn.functional.linear(x, last.weight, last.bias), x)
        assert all(torch.allclose(one, wanted) for one in outputs)


def test_modes_and_state(network, inputs):
    network[2].eval()
    model = calibrated(network, fitted("vector"))
    assert model.training
    assert [layer.training for layer in network] == [True, True, False, True]
    assert not calibrated(network.eval(), fitted("ts")).training
    model.eval()
    other = calibrated(
        copy.deepcopy(network),
        CALIBRATORS["vector"]().fit(*drawn(np.random.default_rng(1), 900, CLASSES)),
    ).eval()
    assert not torch.equal(model(inputs), other(inputs))
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(inputs), other(inputs))
    names = {name.split(".")[0] for name in model.state_dict()}
    assert names == {"model", "calibrator"}
    with_layer = calibrated(network, shifted(), last_layer=network[3])
    assert sum(name.endswith("3.weight") for name in with_layer.state_dict()) == 1


def test_unfitted_skeleton_loads_a_state_dict(network, inputs):
    model = calibrated(network, fitted("vector")).eval()
    skeleton = calibrated(copy.deepcopy(network), CALIBRATORS["vector"]()).eval()
    with pytest.raises(RuntimeError, match="VectorScaling is not fitted: call fit"):
        skeleton(inputs)
    skeleton.load_state_dict(model.state_dict())
    assert torch.equal(skeleton(inputs), model(inputs))


def test_gradients_go_through(network, inputs):
    calibrated(network, fitted("ts"))(inputs).logsumexp(-1).sum().backward()
    assert network[0].weight.grad.abs().sum() > 0


def test_devices_and_types(network, inputs):
    model = calibrated(network, fitted("smart")).eval()
    assert {value.device.type for value in model.to("meta").state_dict().values()} == {"meta"}
    low = calibrated(nn.Linear(3, CLASSES).bfloat16(), fitted("smart"))
    assert low(inputs.bfloat16()).dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("features", [False, True])
def test_compiled(network, inputs, features):
    last = network[3] if features else None
    model = calibrated(network, shifted() if features else fitted("smart"), last_layer=last).eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        compiled = torch.compile(model, backend="eager", fullgraph=not features)
        assert torch.allclose(compiled(inputs), model(inputs), atol=1e-6)
        assert torch.allclose(compiled(inputs[:3] + 1), model(inputs[:3] + 1), atol=1e-6)


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        (("x", "ts"), {}, TypeError, "model must be an nn.Module, got str"),
        (
            (nn.Identity(), "none"),
            {},
            TypeError,
            "calibrator must be a Calibrator, got str",
        ),
        (
            (nn.Identity(), shifted()),
            {},
            ValueError,
            "Shifted needs features: pass last_layer=, the layer",
        ),
        (
            (nn.Sequential(nn.Tanh(), nn.ReLU()), shifted()),
            {"last_layer": "fc"},
            ValueError,
            "got 'fc'; the last of its 2 layers are 0, 1",
        ),
        (
            (nn.Sequential(nn.Tanh()), shifted()),
            {"last_layer": nn.Tanh()},
            ValueError,
            "must be a layer of the model or its name, got this Tanh",
        ),
        ((nn.Tanh(), shifted()), {"last_layer": ""}, ValueError, "its 0 layers are none"),
    ],
)
def test_refused(given, options, error, message):
    model, calibrator = given
    if calibrator == "ts":
        calibrator = fitted("ts")
    with pytest.raises(error, match=message):
        calibrated(model, calibrator, **options)


# Saved folders.


def test_save_and_load(network, inputs, tmp_path):
    model = calibrated(network, fitted("smart")).eval()
    model.save_pretrained(tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"README.md", "calibrator"}
    again = CalibratedModel.from_pretrained(tmp_path / "saved", model=network)
    assert torch.equal(again(inputs), model(inputs))
    card = (tmp_path / "saved" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: calibrant\n")
    assert "method `smart`" in card
    assert 'from_pretrained("saved", model=network)' in card
    assert "before" not in card


def test_card_has_the_figures(network, tmp_path):
    calibrator = fitted("ts")
    logits, labels = drawn(np.random.default_rng(5), 400, CLASSES, 2.0)
    figures = effect(calibrator, {"logits": logits, "labels": labels}, metrics=["ece", "nll"])
    calibrated(network, calibrator).save_pretrained(tmp_path, figures=figures)
    card = (tmp_path / "README.md").read_text()
    assert "Measured on 400 examples, 4 classes" in card
    assert "| metric | before | 90 % interval | after | 90 % interval |" in card
    row = next(line for line in card.splitlines() if line.startswith("| ECE"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1] == f"{100 * figures.before['ece'].value:.2f} %"
    assert cells[3] == f"{100 * figures.after['ece'].value:.2f} %"


def test_saved_again(network, inputs, tmp_path):
    """Old files give way, those of others stay."""
    (tmp_path / "tokenizer.json").write_text("{}")
    calibrated(network, fitted("ts")).save_pretrained(tmp_path)
    calibrated(network, fitted("vector")).save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    assert "method `vector`" in (tmp_path / "README.md").read_text()
    again = CalibratedModel.from_pretrained(tmp_path, model=network).eval()
    assert torch.equal(again(inputs), fitted("vector")(network(inputs)))
    (tmp_path / "README.md").write_text("of mine")
    with pytest.warns(UserWarning, match=r"README\.md was written by someone else and stays"):
        calibrated(network, fitted("ts")).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "of mine"
    assert type(artifacts.load(tmp_path / "calibrator")) is TemperatureScaling


def test_loading_needs_the_last_layer_again(network, inputs, tmp_path, monkeypatch):
    monkeypatch.setitem(CALIBRATORS, "shifted", Shifted)
    model = calibrated(network, shifted(), last_layer=network[3]).eval()
    model.save_pretrained(tmp_path)
    assert 'last_layer="3")' in (tmp_path / "README.md").read_text()
    again = CalibratedModel.from_pretrained(tmp_path, model=network, last_layer="3")
    assert torch.equal(again(inputs), model(inputs))
    with pytest.raises(ValueError, match="needs features: pass last_layer="):
        CalibratedModel.from_pretrained(tmp_path, model=network)


def test_missing_folders(network, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*gone; save_pretrained"):
        CalibratedModel.from_pretrained(tmp_path / "gone", model=network)
    with pytest.raises(FileNotFoundError, match=r"there is no artifact .*calibrator"):
        CalibratedModel.from_pretrained(tmp_path, model=network)


def test_missing_transformers(network, tmp_path, monkeypatch):
    calibrated(network, fitted("ts")).save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers .* or pass model="):
        CalibratedModel.from_pretrained(tmp_path)


# Models of Hugging Face.


def test_output_of_transformers(bert, texts):
    model = calibrated(bert, fitted("smart"))
    labels = torch.tensor([0, 1, 2, 3, 0])
    plain = bert(**texts, labels=labels, output_hidden_states=True)
    found = model(**texts, labels=labels, output_hidden_states=True)
    assert type(found) is type(plain)
    assert list(found) == list(plain)
    assert torch.equal(found.logits, fitted("smart")(plain.logits))
    assert found["logits"] is found.logits
    assert torch.equal(found.loss, plain.loss)
    assert torch.equal(found.hidden_states[1], plain.hidden_states[1])
    as_tuple = model(**texts, return_dict=False)
    assert torch.equal(as_tuple[0], found.logits)
    with pytest.raises(ValueError, match="a loss"):
        model(**texts, labels=labels, return_dict=False)


def test_features_of_transformers(bert, texts):
    rng = np.random.default_rng(0)
    logits, labels = drawn(rng, 500, CLASSES, 2.0)
    calibrator = Shifted().fit(logits, labels, features=rng.normal(size=(500, 16)))
    found = calibrated(bert, calibrator, last_layer="classifier")(**texts)
    pooled = bert.bert(**texts).pooler_output
    assert torch.allclose(found.logits, calibrator(bert(**texts).logits, pooled), atol=1e-6)


def test_save_and_load_with_transformers(bert, texts, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = calibrated(bert, fitted("smart"))
    model.save_pretrained(tmp_path / "bert")
    names = {path.name for path in (tmp_path / "bert").iterdir()}
    assert {"config.json", "model.safetensors", "calibrator", "README.md"} <= names
    again = CalibratedModel.from_pretrained(tmp_path / "bert")
    assert type(again.model) is type(bert)
    assert not again.training
    assert torch.equal(again(**texts).logits, model(**texts).logits)
    kind: Any = type(bert)
    by_class = CalibratedModel.from_pretrained(tmp_path / "bert", model=kind)
    assert torch.equal(by_class(**texts).logits, model(**texts).logits)
    assert kind.from_pretrained(tmp_path / "bert").config.num_labels == CLASSES
    assert 'from_pretrained("bert")' in (tmp_path / "bert" / "README.md").read_text()


# predict_proba and predict


def test_probabilities_of_arrays_and_tensors_in_batches(network, inputs):
    model = calibrated(network.train(), fitted("ts"))
    network.eval()
    expected = torch.softmax(fitted("ts")(network(inputs)), -1).detach()
    network.train()  # with dropout, which predictions are made without
    for batch_size in (1, 4, 9, 1000):
        found = model.predict_proba(inputs, batch_size=batch_size)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
        as_array = model.predict_proba(inputs.numpy().astype(np.float64), batch_size=batch_size)
        assert isinstance(as_array, np.ndarray)
        np.testing.assert_allclose(as_array, expected, rtol=1e-5)
        assert np.array_equal(model.predict(inputs.numpy()), expected.argmax(-1).numpy())
    assert network.training
    assert network[2].training
    assert isinstance(found, torch.Tensor)
    assert not found.requires_grad


def test_probabilities_of_a_model_with_named_inputs(bert, texts):
    model = calibrated(bert, fitted("ts"))
    expected = torch.softmax(model(**texts).logits, -1).detach()
    arrays = {name: values.numpy() for name, values in texts.items()}
    for found in (
        model.predict_proba(texts, batch_size=2),
        model.predict_proba(**arrays, batch_size=2),
        model.predict_proba(arrays, output_attentions=False),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_probabilities_with_features(network, inputs):
    model = calibrated(network.eval(), shifted(), last_layer=network[3])
    expected = torch.softmax(model(inputs), -1).detach()
    np.testing.assert_allclose(model.predict_proba(inputs.numpy(), batch_size=4), expected, 1e-5)


@pytest.mark.parametrize("last", [(), (1,)])
def test_probabilities_of_one_logit_are_of_class_one(rng, last):
    logits = 3 * rng.normal(size=200)
    labels = (rng.random(200) < 1 / (1 + np.exp(-logits))).astype(int)
    calibrator = TemperatureScaling().fit(logits, labels)
    model = calibrated(nn.Identity(), calibrator)
    found = model.predict_proba(logits.reshape(-1, *last), batch_size=64)
    expected = 1 / (1 + np.exp(-logits / float(calibrator.temperature_)))
    np.testing.assert_allclose(found, expected.reshape(-1, *last), rtol=1e-6)
    assert np.array_equal(model.predict(logits.reshape(-1, *last)), (logits > 0).astype(int))


def test_probabilities_of_tags(rng):
    logits, labels = drawn_tags(rng, 200, np.ones(3), np.zeros(3))
    calibrator = TagScaling().fit(logits, labels)
    model = calibrated(nn.Identity(), calibrator)
    found = model.predict_proba(logits, batch_size=64)
    np.testing.assert_allclose(found, calibrator.predict_proba(logits), rtol=1e-6)
    assert np.array_equal(model.predict(logits), np.greater(found, 0.5).astype(int))


def test_inputs_that_cannot_be_cut_are_refused(network, inputs):
    model = calibrated(network, fitted("ts"))
    with pytest.raises(TypeError, match="arrays or tensors"):
        model.predict_proba([[1.0, 2.0, 3.0]])
    with pytest.raises(ValueError, match=r"as many rows each, got \[4, 9\]"):
        model.predict_proba(inputs, inputs[:4])
    with pytest.raises(ValueError, match="batch_size"):
        model.predict_proba(inputs, batch_size=0)
    with pytest.raises(ValueError, match="NaN"):
        model.predict_proba(np.full((5, 3), np.nan))
