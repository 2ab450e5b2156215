"""Artifacts that are damaged, hostile or of a newer release are refused, at little cost."""

import json
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from calibrant import artifacts as io
from calibrant.calibrators.registry import CALIBRATORS
from calibrant.calibrators.scaling import Identity, TemperatureScaling
from calibrant.data import save_predictions
from calibrant.decide import ConformalSets, PriorCorrection, Threshold
from calibrant.llm import FittedHead
from calibrant.llm.heads.modules import make_head
from calibrant.monitor import Monitor
from tests.artifacts.test_round_trip import MARK, OPTIONS, Held
from tests.support.artifacts import FORMAT_1, fitted, fitted_kind, rewrite, temperature

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
    "newer": (changed(format="3"), "its format is 3, this release reads 1 to 2"),
    "newer, other keys": (lambda _: {"format": "3", "parts": "2"}, "its format is 3"),
    "format as text": (changed(format="two"), "its format is 'two'"),
    "format zero": (changed(format="0"), "its format is 0"),
    "no format": (without("format"), "its format is ''"),
    "of another program": (lambda _: {}, "its format is ''"),
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
    "argument of another type": (config({"objective": []}), "cannot be loaded"),
    "config no object": (config([1]), r"must be an object, got \[1\]"),
    "config no JSON": (changed(config="{objective: nll}"), "config is not JSON"),
    "config NaN": (changed(config='{"objective": NaN}'), "config is not JSON"),
    "config too deep": (changed(config="[" * 200_000), "config is not JSON"),
    "extra no object": (changed(extra="[]"), r"extra must be an object, got \[\]"),
    "extra no state": (changed(extra='{"temperature_": 2}'), "temperature_ must be a tensor"),
    "extra without use": (changed(extra='{"_extra_state": 2}'), "cannot be loaded"),
    "extra of nobody": (changed(extra='{"chosen._extra_state": 2}'), "cannot be loaded"),
    "nested unknown": (prior({"kind": "pickle", "config": {}}), "unknown kind 'pickle'"),
    "nested list": (prior({"kind": ["ts"], "config": {}}), "unknown kind"),
    "nested missing": (prior(None), "prior does not take the arguments"),
    "nested deep": (nested(300), "cannot be loaded"),
}
TENSORS = {
    "missing": (without("temperature_"), "missing temperature_"),
    "additional": (changed(bias_=torch.zeros(3)), "unknown bias_"),
    "none": (lambda _: {}, "missing classes_, temperature_"),
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
    refused(file, "neighbours of procal must be a number, got True")


@pytest.mark.parametrize("value", [[], {}, 0, "yes", None])
def test_options_of_yes_and_no_are_nothing_else(tmp_path, value):
    file = tmp_path / "isotonic.safetensors"
    io.save(fitted_kind("isotonic"), file)
    rewrite(file, metadata=config({**io.read(file).config, "temperature": value}))
    refused(file, "temperature of isotonic must be true or false, got")


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is not JSON"),
        ("temperature: 2", "it is not JSON"),
        ("[1, 2, 3, 4]", "must hold an object, got a list"),
        ('{"format": 2, "kind": "monitor"}', "its format is 2, this release reads 1 to 1"),
        ('{"format": 1, "kind": "monitor"}', "not the state of a Monitor .*settings"),
        ('{"format": 1, "kind": "ts"}', "missing objective"),
        ('{"format": 1, "stage": "sigmoid"}', "not the state of a AnswerCalibrator"),
    ],
)
def test_other_text_is_refused(file, text, message):
    file.write_text(text)
    refused(file, message)


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

FREE = {("procal", "reference_", 0), ("procal", "masses_", 1), ("procal", "masses_", 2)}
"""Kinds, tensors and axes of any size that no other tensor has."""


def one_more(value, axis):
    """Return what has one number along an axis, and as many along the others as the value."""
    return value.new_ones([1 if i == axis else size for i, size in enumerate(value.shape)])


@pytest.mark.parametrize(
    ("kind", "options"), [*((kind, {}) for kind in CALIBRATORS), *OPTIONS.items()]
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


def test_a_head_of_another_size_is_refused(tmp_path):
    file = tmp_path / "head.safetensors"
    io.save(FittedHead(make_head("linear", width=16), MARK, "bce"), file)
    about = io.read(file).config
    content = file.read_bytes()
    for options, message in (
        ({"width": 8}, r"last.weight must have the shape \(1, 8\), got \(1, 16\)"),
        ({"width": "16"}, "head does not take the arguments"),
        ({"width": 16, "units": 3}, "has no option units"),
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

SETS = {"limit": -0.1, "score": "aps", "coverage": 0.9, "n": 50, "classes": 3, "seed": 0}
NUMBERS = {"threshold": 0.5, "coverage": 0.5, "error": 0.1, "bound": 0.2, "n": 9}


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
        (ConformalSets, []),
        (Threshold, without("n")(NUMBERS)),
        (Threshold, {**NUMBERS, "more": 1}),
        (Threshold, {**NUMBERS, "n": None}),
        (Threshold, {**NUMBERS, "threshold": "0.5"}),
        (Threshold, {**NUMBERS, "threshold": True}),
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


# --------------------------------------------------------------------------------------- format 1


def format_1(tmp_path, header=None, weights=None):
    """A folder of format 1, changed by hand."""
    source, folder = FORMAT_1 / "format1_ts", tmp_path / "old"
    folder.mkdir()
    about = json.loads((source / "config.json").read_text())
    content = (source / "weights.safetensors").read_bytes()
    if header != "":
        text = header if isinstance(header, str) else json.dumps((header or changed())(about))
        (folder / "config.json").write_text(text)
    if weights != b"":
        (folder / "weights.safetensors").write_bytes(weights or content)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"header": changed(format=2)}, "its format is 2, this release reads 1 to 1"),
        ({"header": changed(format=True)}, "its format is True"),
        ({"header": changed(kind="tss")}, "did you mean ts"),
        ({"header": without("kind")}, "missing kind"),
        ({"header": changed(colour="red")}, "unknown colour"),
        ({"header": changed(config={})}, "missing objective"),
        (
            {"header": changed(kind="odds", config={"knots": 10**9, "objective": "nll"})},
            "missing kn",
        ),
        ({"header": "[]"}, "config.json must hold an object, got a list"),
        ({"header": "{"}, "config.json is not JSON"),
        ({"header": "[" * 200_000}, "config.json is not JSON"),
        ({"weights": b""}, "it has no file weights.safetensors"),
        ({"weights": b"\0" * 8}, "weights.safetensors is damaged: the checksum differs"),
    ],
)
def test_damaged_folders_of_format_1_are_refused(change, message, tmp_path):
    refused(format_1(tmp_path, **change), message)


def test_the_folder_of_format_1_itself_loads(tmp_path):
    assert io.load(format_1(tmp_path)).config() == {"objective": "brier"}


def test_weights_of_format_1_alone_are_no_artifact(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no artifact"):
        io.load(format_1(tmp_path, header=""))


def test_a_device_that_is_not_there(file):
    with pytest.raises(ValueError, match=r"device 'cuda:99' cannot be used here .*: try cpu"):
        io.load(file, device="cuda:99")
