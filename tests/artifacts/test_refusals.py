"""Artifacts that are damaged, hostile or of a newer release are refused, at little cost."""

import itertools
import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from torch import nn

from calibrant import artifacts as io
from calibrant.artifacts.objects import artifact_of, restored
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.maccal import MaCCal
from calibrant.calibrators.registry import CALIBRATORS
from calibrant.calibrators.scaling import Identity, TemperatureScaling
from calibrant.data import save_predictions
from calibrant.decide import ConformalSets, PriorCorrection, Threshold
from calibrant.llm import FittedHead
from calibrant.llm.heads.fitted import HEADS, _make_head
from calibrant.llm.heads.modules import SHAPE_FEATURES
from calibrant.llm.models.huggingface import ModelFingerprint
from calibrant.monitor import Monitor
from tests.artifacts.test_round_trip import OPTIONS, Held
from tests.support.artifacts import fitted, fitted_kind, rewrite, temperature
from tests.support.calibrators import EVERY_METHOD

MARK = ModelFingerprint("tiny", 16, 50, "0" * 16, None)
PLAIN = {"objective": "nll"}


@pytest.fixture
def file(tmp_path):
    """The artifact of a temperature."""
    io.save(temperature(), tmp_path / "ts.safetensors")
    return tmp_path / "ts.safetensors"


def refused(path, message):
    with pytest.raises(ValueError, match=message) as caught:
        io.load(path)
    assert str(caught.value).startswith(f"{path} cannot be loaded: ")
    assert str(caught.value).endswith(
        "save it again, or upgrade calibrant if a newer release wrote it"
    )


def without(key):
    return lambda values: {k: v for k, v in values.items() if k != key}


def changed(**values):
    return lambda before: {**before, **values}


def config(value):
    return changed(config=json.dumps(value))


def prior(calibrator):
    return changed(kind="prior", config=json.dumps({"calibrator": calibrator}))


def nested(depth):
    text = '{"kind": "prior", "config": {"calibrator": ' * depth + "null" + "}}" * depth
    return changed(kind="prior", config=f'{{"calibrator": {text}}}')


METADATA = {
    "newer": (changed(format="2"), "its format is '2', this release reads 1"),
    "newer, other keys": (lambda _: {"format": "2", "parts": "2"}, "its format is '2'"),
    "no format": (without("format"), "its format is None"),
    "of another program": (lambda _: {}, "its format is None"),
    "no kind": (without("kind"), "missing kind, unknown nothing"),
    "no checksum": (without("sha256"), "missing sha256"),
    "unknown key": (changed(colour="red"), "missing nothing, unknown colour"),
    "unknown kind": (changed(kind="tss"), "unknown kind 'tss': did you mean ts. choose from none"),
    "far-off kind": (changed(kind="os.system"), "unknown kind 'os.system'.*choose from none, ts"),
    "another kind": (changed(kind="none", config="{}"), "unknown temperature_"),
    "kind of text": (changed(kind="threshold", config="{}"), "missing state, unknown classes_"),
    "kind of a head": (changed(kind="head"), "arguments of head: missing figures"),
    "unknown argument": (config({**PLAIN, "bins": 3}), "arguments of ts.*unknown bins"),
    "missing argument": (config({}), "arguments of ts: missing objective"),
    "refused argument": (config({"objective": "best"}), "objective must be one of"),
    "config no object": (config([1]), r"must be an object, got \[1\]"),
    "config no JSON": (changed(config="{objective: nll}"), "config is not JSON"),
    "config NaN": (changed(config='{"objective": NaN}'), "config is not JSON"),
    "config too deep": (changed(config="[" * 200_000), "config is not JSON"),
    "extra no object": (changed(extra="[]"), r"extra must be an object, got \[\]"),
    "extra no state": (changed(extra='{"temperature_": 2}'), "temperature_ must be a tensor"),
    "extra without use": (changed(extra='{"_extra_state": 2}'), "cannot be loaded"),
    "extra of nobody": (changed(extra='{"chosen._extra_state": 2}'), "cannot be loaded"),
    "nested unknown": (prior({"kind": "pickle", "config": {}}), "unknown kind 'pickle'"),
    "nested missing": (prior(None), "calibrator must be a Calibrator, got None"),
    "nested deep": (nested(300), "cannot be loaded"),
}
TENSORS = {
    "missing": (without("temperature_"), "missing temperature_"),
    "additional": (changed(bias_=torch.zeros(3)), "unknown bias_"),
    "none": (lambda _: {}, "missing classes_, floor_, temperature_"),
    "double": (changed(temperature_=torch.tensor(2.0).double()), "float32, got torch.float64"),
    "classes as float": (changed(classes_=torch.tensor(3.0)), "classes_ must be torch.int64"),
    "two numbers of classes": (changed(classes_=torch.tensor([3, 3])), r"shape \(\), got \(2,\)"),
    "no classes": (changed(classes_=torch.tensor(0)), "number of classes is 0"),
    "negative classes": (changed(classes_=torch.tensor(-2)), "number of classes is -2"),
    "a temperature per class": (changed(temperature_=torch.ones(3)), r"shape \(\), got \(3,\)"),
    "NaN": (changed(temperature_=torch.tensor(np.nan)), "temperature_ holds NaN or infinity"),
    "infinity": (changed(temperature_=torch.tensor(-np.inf)), "holds NaN or infinity"),
}


@pytest.mark.parametrize("name", METADATA)
def test_changed_metadata_are_refused(file, name):
    change, message = METADATA[name]
    rewrite(file, metadata=change)
    refused(file, message)


@pytest.mark.parametrize("classes", [0, -1, 2])
def test_a_part_of_other_classes_is_refused(tmp_path, classes):
    file = tmp_path / "prior.safetensors"
    io.save(PriorCorrection(temperature()).set_priors([0.2, 0.3, 0.5], [0.5, 0.3, 0.2]), file)
    rewrite(file, tensors=changed(**{"calibrator.classes_": torch.tensor(classes)}))
    refused(file, f"its parts have {classes}, 3 classes")


def test_a_number_is_not_true(tmp_path):
    file = tmp_path / "procal.safetensors"
    io.save(fitted_kind("procal"), file)
    rewrite(file, metadata=config({**io.read(file).config, "neighbours": True}))
    refused(file, "neighbours must be a whole number, at least 1, got True")


@pytest.mark.parametrize("name", TENSORS)
def test_changed_tensors_are_refused(file, name):
    change, message = TENSORS[name]
    rewrite(file, tensors=change)
    refused(file, message)


def test_the_change_itself_is_what_is_refused(file):
    rewrite(file, metadata=changed(), tensors=changed())
    assert float(io.load(file).temperature_) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": config({"objective": "brier"})},
        {"tensors": changed(temperature_=torch.tensor(2.5))},
    ],
)
def test_a_wrong_checksum_is_refused(file, change):
    rewrite(file, **change, checksum=False)
    refused(file, "the checksum differs")


def test_one_changed_bit_is_refused(file):
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    for at in range(begin, len(content)):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        refused(file, "the checksum differs")


@pytest.mark.parametrize("share", [0.001, 0.05, 0.5, 0.9, 0.995])
def test_a_file_that_was_cut_off_is_refused(file, share):
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    refused(file, "is not a safetensors file, or damaged|is not JSON")


def declared(shape):
    """A file that declares a tensor of a shape, and holds none."""
    size = 4 * int(np.prod(np.array(shape, dtype=object)))
    tensor = {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}
    text = json.dumps({"temperature_": tensor}).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"format": 1, "kind": "monitor"}',
        pickle.dumps({"temperature_": 1.0}),
        b"PK\x03\x04\x00\x00\x00\x00",
        b"\xff" * 7 + b"\x00",
        (1 << 40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (0).to_bytes(8, "little"),
        declared([10**9]),
        declared([2**40, 2**40]),
    ],
)
def test_other_content_is_refused(file, content):
    file.write_bytes(content)
    refused(file, "is not a safetensors file, or damaged")


def test_nothing_is_unpickled(file, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert float(io.load(file).temperature_) == 2


def test_an_object_of_another_class_is_refused(file):
    with pytest.raises(ValueError, match=r"ts\.safetensors holds a TemperatureScaling, a Thresh"):
        io.load(file, Threshold)


# ----------------------------------------------------------------------------------------- shapes

FREE = {("procal", "reference_", 0), ("maccal", "history_", 0)}
"""Kinds, tensors and axes of any size that no other tensor has."""


def one_more(value, axis):
    """Return what has one number along an axis, and as many along the others as the value."""
    return value.new_ones([1 if i == axis else size for i, size in enumerate(value.shape)])


@pytest.mark.parametrize(
    ("kind", "options"), [*((kind, {}) for kind in EVERY_METHOD), *OPTIONS.items()]
)
def test_tensors_of_another_shape_are_refused(kind, options, tmp_path):
    file = tmp_path / "saved.safetensors"
    io.save(fitted_kind(kind, **options), file)
    content = file.read_bytes()
    for name, value in io.read(file).tensors.items():
        longer = [torch.cat([value, one_more(value, axis)], axis) for axis in range(value.ndim)]
        for axis, tensor in enumerate([*longer, value[None]]):
            rewrite(file, tensors=changed(**{name: tensor}))
            if (kind, name, axis) in FREE and tensor.ndim == value.ndim:
                io.load(file)
            else:
                refused(file, rf"{name} must have the shape|must have the shape .*for")
            file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "value"), [("temperature_", 0.0), ("temperature_", -1.0), ("weights_", 0.0)]
)
def test_values_that_no_fit_gives_are_refused(name, value, tmp_path):
    file = tmp_path / "ets.safetensors"
    io.save(fitted_kind("ets"), file)
    rewrite(file, tensors=lambda tensors: {**tensors, name: torch.full_like(tensors[name], value)})
    refused(file, f"must be positive, got {value:g}|make probabilities NaN")


FORGED = (0.0, -1.0, 1e-45, 100.0, -1e30, 3e38, -3e38)
PLACES: tuple[int | slice, ...] = (slice(None), 0, -1)


def forgeries(obj):
    """Yield what can be loaded of an object with one tensor forged, or one number of it.

    Calibrators inside are kinds of their own.
    """
    artifact = artifact_of(obj)
    for name, value in artifact.tensors.items():
        numbers = FORGED if value.is_floating_point() and value.numel() else ()
        if isinstance(obj, Calibrator) and "." in name:
            continue
        for place, number in itertools.product(PLACES, numbers):
            forged = value.clone().reshape(-1)
            forged[place] = number
            tensors = {**artifact.tensors, name: forged.reshape(value.shape)}
            try:
                found = restored(artifact._replace(tensors=tensors))
            except (ValueError, IndexError):  # of which load makes the former
                continue
            yield found


@pytest.mark.parametrize(
    ("kind", "options"), [*((kind, {}) for kind in EVERY_METHOD), *OPTIONS.items()]
)
def test_what_is_loaded_gives_no_nan_whatever_was_forged(kind, options):
    rng, scale = np.random.default_rng(99), np.repeat([0, 1e-3, 3.0, 300.0], 10)[:, None]
    for found in forgeries(fitted_kind(kind, **options)):
        logits = torch.from_numpy(scale * rng.normal(size=(40, found.classes))).float()
        features = torch.from_numpy(scale * rng.normal(size=(40, max(found.width, 1)))).float()
        inputs = (logits, features) if found.needs_features else (logits,)
        assert not found(*inputs).isnan().any(), found.state_dict()


@pytest.mark.parametrize("kind", HEADS)
def test_no_head_with_forged_weights_gives_nan(kind):
    head = _make_head(kind, width=4, **({"attention_heads": 2} if kind == "ats" else {}))
    random = torch.Generator().manual_seed(7)
    inputs = torch.randn((3, 5, getattr(head, "width", SHAPE_FEATURES)), generator=random)
    for found in forgeries(FittedHead(head, MARK, "bce")):
        assert not found.head(inputs).isnan().any()


@pytest.mark.filterwarnings("ignore")  # of few examples
def test_no_retrained_classifier_with_forged_weights_gives_nan():
    features = np.random.default_rng(0).normal(size=(90, 4))
    small = MaCCal(bottleneck=8, epochs=1, batch_size=30)
    for found in forgeries(small.fit(features, np.arange(90) % 3, held_out=0.3)):
        assert np.isfinite(found.predict_proba(features)).all()


def test_a_head_of_another_size_is_refused(tmp_path):
    file = tmp_path / "head.safetensors"
    io.save(FittedHead(_make_head("linear", width=16), MARK, "bce"), file)
    about = io.read(file).config
    content = file.read_bytes()
    for options, message in (
        ({"width": 8}, r"last.weight must have the shape \(1, 8\), got \(1, 16\)"),
        ({"width": "16"}, "head does not take the arguments"),
        ({"width": 16, "units": 3}, "the linear head has no option 'units': it has none"),
        ({}, "options of the linear head must be like"),
    ):
        rewrite(file, metadata=config({**about, "options": options}))
        refused(file, message)
        file.write_bytes(content)
    for change, message in (
        ({"head": "lstm"}, "head must be one of"),
        ({"fingerprint": {"name": "tiny"}}, "missing 4 required positional arguments"),
        ({"more": 1}, "arguments of head: missing nothing, unknown more"),
    ):
        rewrite(file, metadata=config({**about, **change}))
        refused(file, message)
        file.write_bytes(content)


# ------------------------------------------------------------------------- kinds without tensors

SETS: dict[str, object] = {"limit": -0.1, "score": "aps", "coverage": 0.9}
SETS |= {"n": 50, "classes": 3, "seed": 0, "mean_size": 1.5}
SETS |= {"by": None, "limits": {}, "weighted": None}
LIMIT: dict[str, Any] = {"name": "error", "limit": 0.25, "found": 0.1, "bound": 0.2, "n": 4}
NUMBERS: dict[str, Any] = {"threshold": 0.5, "coverage": 0.5, "n": 9, "certainty": 0.95}
NUMBERS |= {"limits": [LIMIT], "more_labels": 0.0, "cost": None, "positive": None}


def text_tensor(text):
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("cls", "state"),
    [
        (ConformalSets, without("seed")(SETS)),
        (ConformalSets, {**SETS, "more": 1}),
        (ConformalSets, {**SETS, "limit": "0.5"}),
        (ConformalSets, {**SETS, "score": "other"}),
        (ConformalSets, {**SETS, "coverage": 1.5}),
        (ConformalSets, {**SETS, "coverage": "0.9"}),
        (ConformalSets, {**SETS, "classes": 0}),
        (ConformalSets, {**SETS, "n": 1.5}),
        (ConformalSets, {**SETS, "mean_size": 3.5}),
        (ConformalSets, []),
        (Threshold, without("n")(NUMBERS)),
        (Threshold, {**NUMBERS, "more": 1}),
        (Threshold, {**NUMBERS, "n": None}),
        (Threshold, {**NUMBERS, "threshold": "0.5"}),
        (Threshold, {**NUMBERS, "threshold": True}),
        (Threshold, {**NUMBERS, "limits": []}),
        (Threshold, {**NUMBERS, "limits": [{**LIMIT, "name": "f1"}]}),
        (Threshold, {**NUMBERS, "limits": [{**LIMIT, "limit": None}]}),
        (Threshold, [0.5]),
    ],
)
def test_states_that_do_not_fit_are_refused(cls, state, tmp_path):
    whole = {ConformalSets: SETS, Threshold: NUMBERS}[cls]
    file = tmp_path / "saved.json"
    io.save(cls.from_state(whole), file)
    rewrite(file, tensors=changed(state=text_tensor(json.dumps(state))))
    refused(file, f"it is not the state of a {cls.__name__}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(state=torch.zeros(4)), "state must be uint8"),
        (changed(state=torch.zeros(4, dtype=torch.uint8)), "state is not JSON"),
        (changed(more=torch.zeros(4)), "unknown more"),
        (changed(state=text_tensor('{"n": NaN}')), "state is not JSON"),
    ],
)
def test_states_that_are_no_text_are_refused(change, message, tmp_path):
    io.save(Monitor().observe([0.5], [1]), tmp_path / "watch.json")
    rewrite(tmp_path / "watch.json", tensors=change)
    refused(tmp_path / "watch.json", message)


# -------------------------------------------------------------------------------- what is not saved


def test_an_unfitted_calibrator_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match="TemperatureScaling is not fitted: call fit"):
        io.save(TemperatureScaling(), tmp_path / "ts")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_not_saved(file, bad):
    message = "this TemperatureScaling could not be loaded again: temperature_ holds NaN or inf"
    with pytest.raises(ValueError, match=message):
        io.save(temperature(bad), file)
    assert float(io.load(file).temperature_) == 2


def test_other_modules_are_not_saved(tmp_path):
    with pytest.raises(TypeError, match="save estimators of scikit-learn by joblib"):
        io.save(Ridge(), tmp_path / "a")
    with pytest.raises(TypeError, match="a Linear cannot be saved: choose an object of kind none"):
        io.save(nn.Linear(2, 2), tmp_path / "linear")


def test_swapped_arguments_and_classes_are_not_saved(tmp_path):
    with pytest.raises(TypeError, match=r"a fitted object comes first.*: save\(obj, path\)"):
        io.save(str(tmp_path / "ts"), temperature())
    with pytest.raises(TypeError, match="the class TemperatureScaling cannot be saved: fit an obj"):
        io.save(TemperatureScaling, tmp_path / "ts")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["p.npz", "p.safetensors", "p.csv"])
def test_a_prediction_file_is_named_as_such(name, tmp_path):
    save_predictions(tmp_path / name, {"val_logits": np.zeros((2, 3)), "val_labels": [0, 1]})
    with pytest.raises(ValueError, match=r"is a prediction file, not an artifact: calibrant\.fit"):
        io.load(tmp_path / name)


def test_a_subclass_is_not_saved_as_its_parent(tmp_path):
    class Mine(TemperatureScaling):
        pass

    with pytest.raises(TypeError, match="a Mine cannot be saved"):
        io.save(fitted(Mine()), tmp_path / "mine")


def test_what_would_not_load_is_not_saved(file):
    wide = temperature(3.0)
    wide.temperature_ = wide.temperature_.double()
    with pytest.raises(ValueError, match=r"temperature_ must be torch.float32, got torch.float64"):
        io.save(wide, file)
    assert float(io.load(file).temperature_) == 2


@pytest.mark.parametrize("scale", [np.nan, np.int64(1), {1, 2}])
def test_arguments_that_json_cannot_hold_are_not_saved(tmp_path, monkeypatch, scale):
    monkeypatch.setitem(CALIBRATORS, "held", Held)
    module = fitted(Held(Identity()))
    module.scale = scale
    with pytest.raises(ValueError, match="cannot be written to JSON"):
        io.save(module, tmp_path / "held")


def test_a_device_that_is_not_there(file):
    with pytest.raises(ValueError, match=r"device 'cuda:99' cannot be used here .*: try cpu"):
        io.load(file, device="cuda:99")
