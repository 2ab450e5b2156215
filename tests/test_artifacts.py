"""Saved calibrators: they come back bit by bit, and what is not whole does not come back at all.

The folders ``tests/files/format1_*`` were written by ``save`` of the release that introduced
format 1, and stay as they are: later releases must load them. Each has, besides, an
``expected.json`` with some ``logits`` and the ``probs`` that the saved calibrator gave for them
(``predict_proba(logits).tolist()``), and ``features`` where the method needs them. All
were fitted on ``drawn(np.random.default_rng(1), 500, 3, temperature=2.0)``, with default options
but for format1_ts, ``TemperatureScaling(objective="brier")``, and format1_prior, a
``PriorCorrection`` of vector scaling from (0.3, 0.3, 0.4) to (0.2, 0.5, 0.3). Features are centred
logits, for which the last layer is the identity; format1_maccal was fitted on them.
"""

import functools
import hashlib
import json
import os
import pickle
import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save as tensor_bytes
from torch import nn

from calibrant import artifacts as io
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.registry import CALIBRATORS
from calibrant.calibrators.scaling import Identity, TemperatureScaling
from calibrant.decide.priors import PriorCorrection
from tests.support.simulate import drawn

FILES = Path(__file__).parent / "files"
CONFIG, WEIGHTS = "config.json", "weights.safetensors"


def examples(n=400, classes=4, width=6):
    """Logits of a last layer, with the layer, its inputs, and labels that it is too sure about."""
    rng = np.random.default_rng(3)
    features = rng.normal(size=(n, width))
    weight, bias = rng.normal(size=(classes, width)), rng.normal(size=classes)
    logits = features @ weight.T + bias
    labels = (logits / 2 + rng.gumbel(size=logits.shape)).argmax(-1)
    return logits, labels, features, (weight, bias)


def fitted(module):
    logits, labels, features, head = examples()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some have many parameters for so few examples
        return module.fit(logits, labels, features=features, head=head)


@functools.cache
def fitted_kind(kind):
    return fitted(CALIBRATORS[kind]())


def temperature(value=2.0):
    """A fitted calibrator whose learned value is known."""
    module = TemperatureScaling()
    module._store(temperature_=value)
    module._set_classes(3)
    return module


@pytest.fixture
def folder(tmp_path):
    io.save(temperature(), tmp_path / "ts")
    return tmp_path / "ts"


def value(folder):
    found = io.load(folder)
    assert isinstance(found, TemperatureScaling)
    return float(found.temperature_)


def same(one, other):
    """Whether two modules have the same tensors, bit by bit."""
    states = one.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    for name in states[0]:
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


# ------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("kind", CALIBRATORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_calibrator_comes_back_bit_by_bit(kind, dtype, tmp_path):
    module = fitted_kind(kind)
    io.save(module, tmp_path / kind)
    again = io.load(tmp_path / kind)
    assert type(again) is type(module)
    same(module, again)
    logits, _, features, _ = examples()
    inputs = torch.tensor(logits).to(dtype), torch.tensor(features, dtype=torch.float32)
    assert torch.equal(module.predict_proba(*inputs), again.predict_proba(*inputs))


@pytest.mark.parametrize("kind", CALIBRATORS)
def test_a_saved_folder_says_what_it_is(kind, tmp_path):
    module = fitted_kind(kind)
    io.save(module, tmp_path / kind)
    text = (tmp_path / kind / CONFIG).read_text()
    header = json.loads(text)
    assert text.count("\n") > len(header)  # a line for each key
    assert header["format"] == 1
    assert header["kind"] == kind
    assert header["classes"] == 4
    assert header["parameters"] == module.size(4)
    assert type(module).__name__ in header["description"]
    assert set(header["config"]) == set(module.config())
    assert sorted(path.name for path in (tmp_path / kind).iterdir()) == [CONFIG, WEIGHTS]


def test_one_logit_comes_back(tmp_path):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=200)
    module = TemperatureScaling().fit(3 * logits, (logits + rng.logistic(size=200) > 0).astype(int))
    io.save(module, tmp_path / "ts")
    again = io.load(tmp_path / "ts")
    assert again.predict_proba(logits).shape == (200,)
    assert np.array_equal(again.predict_proba(logits), module.predict_proba(logits))
    header = json.loads((tmp_path / "ts" / CONFIG).read_text())
    assert (header["classes"], header["parameters"]) == (1, 1)
    assert "one logit" in header["description"]
    io.save(PriorCorrection(module).set_priors([0.5, 0.5], [0.1, 0.9]), tmp_path / "prior")
    header = json.loads((tmp_path / "prior" / CONFIG).read_text())
    assert (header["classes"], header["parameters"]) == (1, 2)


def test_arguments_come_back(tmp_path):
    io.save(fitted(TemperatureScaling(objective="soft_ece")), tmp_path / "ts")
    assert io.load(tmp_path / "ts").config() == {"objective": "soft_ece"}


@pytest.mark.parametrize("inside", [TemperatureScaling, Identity])
def test_a_corrected_calibrator_comes_back_with_the_one_inside(inside, tmp_path):
    module = PriorCorrection(fitted(inside())).set_priors([0.25] * 4, [0.1, 0.2, 0.3, 0.4])
    io.save(module, tmp_path / "prior")
    again = io.load(tmp_path / "prior")
    assert isinstance(again, PriorCorrection)
    assert type(again.calibrator) is inside
    same(module, again)
    logits = examples()[0]
    assert np.array_equal(module.predict_proba(logits), again.predict_proba(logits))
    header = json.loads((tmp_path / "prior" / CONFIG).read_text())
    assert (header["kind"], header["parameters"]) == ("prior", module.calibrator.size(4) + 3)


def test_calibrators_inside_lists_and_others_come_back(tmp_path, monkeypatch):
    monkeypatch.setitem(CALIBRATORS, "held", Held)
    deep = Held(TemperatureScaling(objective="brier"))
    module = fitted(Held(deep, [Identity(), TemperatureScaling()], {"last": Identity()}, 0.25))
    io.save(module, tmp_path / "held")
    header = json.loads((tmp_path / "held" / CONFIG).read_text())
    inner = header["config"]["first"]["config"]["first"]
    assert inner == {"kind": "ts", "config": {"objective": "brier"}}
    again = io.load(tmp_path / "held")
    same(module, again)
    logits = torch.tensor(examples()[0])
    assert torch.equal(module(logits), again(logits))


def test_tensors_may_share_memory_and_lie_anywhere_in_it(tmp_path, monkeypatch):
    monkeypatch.setitem(CALIBRATORS, "held", Held)
    inside = TemperatureScaling()
    module = fitted(Held(inside, [inside]))
    inside.temperature_ = torch.arange(6.0).view(2, 3).T[1:]
    io.save(module, tmp_path / "held")
    same(module, io.load(tmp_path / "held"))


def test_nothing_is_shared_with_the_saved_module(folder):
    module = temperature()
    io.save(module, folder)
    again = io.load(folder)
    assert isinstance(again, TemperatureScaling)
    again.temperature_ += 1
    assert float(module.temperature_) == 2
    assert value(folder) == 2


def test_a_loaded_calibrator_can_be_fitted_again(folder):
    logits, labels = drawn(np.random.default_rng(0), 2000, 3, temperature=3.0)
    found = io.load(folder).fit(logits, labels)
    assert float(found.state_dict()["temperature_"]) == pytest.approx(3, rel=0.1)


@pytest.mark.parametrize("place", sorted(FILES.glob("format1_*")), ids=lambda path: path.name)
def test_folders_of_earlier_releases_load(place):
    expected = json.loads((place / "expected.json").read_text())
    features = expected.get("features")
    found = io.load(place).predict_proba(np.array(expected["logits"]), features)
    np.testing.assert_allclose(found, expected["probs"], rtol=1e-6)


def test_there_is_a_folder_of_every_kind():
    assert {place.name for place in FILES.glob("format1_*")} == {f"format1_{k}" for k in io.kinds()}


# ---------------------------------------------------------------------------- what is not loaded


def tamper(folder, *, header=None, tensors=None):
    """Change a folder by hand, and the checksum with it."""
    config, weights = json.loads((folder / CONFIG).read_text()), (folder / WEIGHTS).read_bytes()
    if tensors is not None:
        weights = tensor_bytes(tensors(load(weights)))
        config["weights_sha256"] = hashlib.sha256(weights).hexdigest()
    config = config if header is None else header(config)
    (folder / CONFIG).write_text(json.dumps(config))
    (folder / WEIGHTS).write_bytes(weights)


def without(key):
    return lambda config: {k: v for k, v in config.items() if k != key}


def changed(**values):
    return lambda config: {**config, **values}


def wide(state):
    return {name: t.double() if t.is_floating_point() else t for name, t in state.items()}


PLAIN = {"objective": "nll"}
HEADERS = {
    "newer": (changed(format=2), r"format 2, this release reads up to 1; upgrade calibrant"),
    "newer, with other keys": (lambda _: {"format": 3, "parts": []}, "upgrade calibrant"),
    "format as text": (changed(format="1"), "whole number from 1 to 1, got '1'"),
    "format true": (changed(format=True), "whole number from 1 to 1, got True"),
    "format zero": (changed(format=0), "got 0"),
    "no format": (without("format"), "got None"),
    "no kind": (without("kind"), "missing kind, unknown nothing"),
    "no checksum": (without("weights_sha256"), "missing weights_sha256"),
    "unknown key": (changed(colour="red"), "missing nothing, unknown colour"),
    "unknown kind": (changed(kind="tss"), r"'tss' is unknown \(did you mean 'ts'\?\).*none, ts"),
    "far-off kind": (changed(kind="os.system"), "'os.system' is unknown; known are none, ts"),
    "kind no text": (changed(kind=["ts"]), "is unknown"),
    "another kind": (changed(kind="none", config={}), "tensors.*unknown temperature_"),
    "unknown argument": (changed(config={**PLAIN, "bins": 3}), "arguments of ts.*unknown bins"),
    "missing argument": (changed(config={}), "arguments of ts: missing objective"),
    "refused argument": (changed(config={"objective": "best"}), "objective must be one of"),
    "config no object": (changed(config=[1]), r"must be an object, got \[1\]"),
    "other classes": (changed(classes=4), "says 4 classes, not 3"),
    "nested unknown": (
        changed(kind="prior", config={"calibrator": {"kind": "pickle", "config": {}}}),
        "'pickle' is unknown",
    ),
    "nested missing": (changed(kind="prior", config={"calibrator": None}), "does not take"),
}
TENSORS = {
    "missing": (lambda state: without("temperature_")(state), "missing temperature_"),
    "additional": (lambda s: {**s, "bias_": torch.zeros(3)}, "unknown bias_"),
    "none": (lambda state: {}, "missing classes_, temperature_"),
    "double": (wide, r"temperature_ must be float32, got float64; call \.float\(\)"),
    "classes as float": (lambda s: {k: v.float() for k, v in s.items()}, "classes_ must be int64"),
    "two numbers of classes": (changed(classes_=torch.tensor([3, 3])), "does not fit"),
}
BYTES = {
    "config not JSON": (CONFIG, b"format: 1", "config.json is not JSON"),
    "config empty": (CONFIG, b"", "config.json is not JSON"),
    "config cut": (CONFIG, b'{"format": 1, "kind": "t', "config.json is not JSON"),
    "config no text": (CONFIG, b"\xff\xfe\x00", "config.json is not JSON"),
    "config a list": (CONFIG, b"[]", "must hold an object, got a list"),
    "config too deep": (CONFIG, b"[" * 200_000, "config.json is not JSON"),
    "weights empty": (WEIGHTS, b"", "damaged or incomplete"),
    "weights a pickle": (WEIGHTS, pickle.dumps({"temperature_": 1.0}), "damaged or incomplete"),
}


def refused(folder, message):
    with pytest.raises(ValueError, match=message) as caught:
        io.load(folder)
    assert str(caught.value).startswith(f"{folder} is no artifact that can be loaded")
    assert "; " in str(caught.value)  # what follows is the remedy


@pytest.mark.parametrize("name", HEADERS)
def test_a_changed_header_is_refused(folder, name):
    change, message = HEADERS[name]
    tamper(folder, header=change)
    refused(folder, message)


@pytest.mark.parametrize("name", TENSORS)
def test_changed_tensors_are_refused(folder, name):
    change, message = TENSORS[name]
    tamper(folder, tensors=change)
    refused(folder, message)


@pytest.mark.parametrize("name", BYTES)
def test_damaged_files_are_refused(folder, name):
    file, content, message = BYTES[name]
    (folder / file).write_bytes(content)
    refused(folder, message)


def test_the_change_itself_is_what_is_refused(folder):
    tamper(folder, header=changed(), tensors=lambda state: state)
    assert value(folder) == 2


@pytest.mark.parametrize("share", [0.05, 0.3, 0.9, 0.99])
@pytest.mark.parametrize("file", [CONFIG, WEIGHTS])
def test_a_file_that_was_cut_off_is_refused(folder, file, share):
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[: int(share * len(content))])
    refused(folder, "damaged or incomplete|is not JSON")


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS])
def test_a_folder_without_one_of_its_files_is_refused(folder, file):
    (folder / file).unlink()
    refused(folder, f"it has no file {file}")


def test_weights_of_another_artifact_are_refused(folder, tmp_path):
    io.save(temperature(3.0), tmp_path / "other")
    shutil.copy(tmp_path / "other" / WEIGHTS, folder / WEIGHTS)
    refused(folder, "is not the file that config.json was written with")


def test_one_changed_bit_is_refused(folder):
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-1] ^= 1  # of the last value
    (folder / WEIGHTS).write_bytes(bytes(content))
    refused(folder, "is not the file that config.json was written with")


@pytest.mark.parametrize("name", ["missing", "a file"])
def test_what_is_no_folder_is_not_loaded(tmp_path, name):
    (tmp_path / "a file").write_text("text")
    with pytest.raises(FileNotFoundError, match=f"there is no folder .*{re.escape(name)}; .*save"):
        io.load(tmp_path / name)


def test_nothing_is_unpickled(folder, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert value(folder) == 2


# ----------------------------------------------------------------------------- what is not saved


def test_an_unfitted_calibrator_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match=r"TemperatureScaling is not fitted: call fit"):
        io.save(TemperatureScaling(), tmp_path / "ts")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_not_saved(folder, bad):
    with pytest.raises(
        ValueError, match="temperature_ of this TemperatureScaling holds NaN or inf"
    ):
        io.save(temperature(bad), folder)
    assert value(folder) == 2


def test_other_modules_are_not_saved(tmp_path):
    with pytest.raises(TypeError, match="fitted calibrator, got Linear"):
        io.save(nn.Linear(2, 2), tmp_path / "linear")  # type: ignore[arg-type]


def test_a_subclass_is_not_saved_as_its_parent(tmp_path):
    class Mine(TemperatureScaling):
        pass

    with pytest.raises(ValueError, match=r"Mine cannot be saved.*none, ts"):
        io.save(fitted(Mine()), tmp_path / "mine")


def test_what_would_not_load_is_not_saved(folder):
    with pytest.raises(ValueError, match=r"must be float32, got float64; call \.float\(\)"):
        io.save(temperature().double(), folder)
    assert value(folder) == 2
    io.save(temperature(3.0).double().float(), folder)
    assert value(folder) == 3


@pytest.mark.parametrize("scale", [np.nan, np.int64(1), {1, 2}])
def test_arguments_that_json_cannot_hold_are_not_saved(tmp_path, monkeypatch, scale):
    monkeypatch.setitem(CALIBRATORS, "held", Held)
    module = fitted(Held(Identity()))
    module.scale = scale
    with pytest.raises(ValueError, match="an argument of held cannot be written to JSON"):
        io.save(module, tmp_path / "held")


# ----------------------------------------------------------------------- what stands in the place


def test_an_artifact_is_replaced(folder):
    io.save(temperature(3.0), folder)
    assert value(folder) == 3
    assert [path.name for path in folder.parent.iterdir()] == ["ts"]


def test_a_damaged_artifact_is_replaced(folder):
    (folder / WEIGHTS).unlink()
    io.save(temperature(3.0), folder)
    assert value(folder) == 3


def test_an_empty_folder_is_filled(tmp_path):
    io.save(temperature(), tmp_path)
    assert value(tmp_path) == 2


def test_a_link_is_followed(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    io.save(temperature(3.0), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert value(folder) == value(tmp_path / "link") == 3


def test_relative_paths_and_text_are_paths(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    io.save(temperature(3.0), "ts")
    assert value("./ts") == 3


def other_file(folder):
    (folder / "notes.txt").write_text("mine")
    return r"holds other files \(notes.txt\)"


def other_program(folder):
    (folder / CONFIG).write_text('{"architectures": ["Llama"], "format": 1}')
    return "holds files of another program"


def not_json(folder):
    (folder / CONFIG).write_text("mine")
    return "holds files of another program"


def only_weights(folder):
    (folder / CONFIG).unlink()
    return "holds files of another program"


@pytest.mark.parametrize("spoil", [other_file, other_program, not_json, only_weights])
def test_what_is_not_ours_is_not_replaced(folder, spoil):
    message = spoil(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match=f"{message}.*name a new folder"):
        io.save(temperature(3.0), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert len(list(folder.parent.iterdir())) == 1


def test_a_file_is_not_replaced(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="is a file: name a folder"):
        io.save(temperature(), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_missing_parent_is_not_made(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist; create it first"):
        io.save(temperature(), tmp_path / "a" / "b")


class Killed(BaseException):
    """What a process does after a kill: nothing more."""


@pytest.fixture
def kill(monkeypatch):
    """Let the process die at the ``step``-th time that it touches the disk."""

    def kill_at(step):
        done = 0

        def guarded(call):
            def guard(*args, **kwargs):
                nonlocal done
                done += 1
                if done > step:
                    raise Killed
                return call(*args, **kwargs)

            return guard

        for owner, name in (
            *((os, "rename"), (os, "replace"), (shutil, "rmtree")),
            *((Path, "mkdir"), (Path, "write_bytes"), (Path, "write_text")),
        ):
            monkeypatch.setattr(owner, name, guarded(getattr(owner, name)))

    yield kill_at
    monkeypatch.undo()


STEPS = 8
"""Folder, two files, an old backup removed, two renames, and the backup and the folder removed."""


@pytest.mark.parametrize("step", range(STEPS))
def test_after_a_kill_the_old_one_or_the_new_one_loads(folder, kill, monkeypatch, step):
    kill(step)
    with pytest.raises(Killed):
        io.save(temperature(3.0), folder)
    monkeypatch.undo()
    assert value(folder) == (2 if step <= 5 else 3)
    io.save(temperature(4.0), folder)  # and nothing is in the way of the next save
    assert value(folder) == 4


def test_the_steps_of_a_save_are_all_there_are(folder, kill, monkeypatch):
    kill(STEPS)
    io.save(temperature(3.0), folder)
    monkeypatch.undo()
    assert value(folder) == 3


@pytest.mark.parametrize("failing", [1, 2])
def test_after_a_failed_rename_the_old_one_stands_in_its_place(folder, monkeypatch, failing):
    rename, calls = os.rename, []

    def failing_once(*args):
        calls.append(args)
        if len(calls) == failing:
            raise OSError("the disk said no")
        rename(*args)

    monkeypatch.setattr(os, "rename", failing_once)
    with pytest.raises(OSError, match="the disk said no"):
        io.save(temperature(3.0), folder)
    assert value(folder) == 2
    assert [path.name for path in folder.parent.iterdir()] == ["ts"]
