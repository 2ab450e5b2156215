"""The scripts of examples/ run as they are, without a network, and do what they print."""

import inspect
import re
import runpy
import warnings
from pathlib import Path

import pytest
import torch

import calibrant as cal

EXAMPLES = Path(__file__).parents[1] / "examples"

LIGHTNING = (  # of torch 2.13, used by lightning 2.6
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"
)


@pytest.fixture
def example(capsys, monkeypatch, tmp_path):
    """Run an example in this process; returns what it printed, and what its ``main`` returns."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # Lightning sets it: let it be undone

    def run(name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # while the libraries are imported
            script = runpy.run_path(str(EXAMPLES / f"{name}.py"))
        takes_folder = inspect.signature(script["main"]).parameters
        with torch.random.fork_rng(), warnings.catch_warnings():
            # an example that tells what other predictions would gain does what it should
            warnings.filterwarnings("ignore", "sms, which may change the predicted class")
            found = script["main"](*[tmp_path][: len(takes_folder)])
        return capsys.readouterr().out, *(found if isinstance(found, tuple) else [found])

    return run


def check_figures(said, before, after):
    assert after["accuracy"].value == before["accuracy"].value > 0.5
    assert before["ece"].value > 0.08
    assert after["ece"].value < 0.6 * before["ece"].value
    assert after["nll"].value < before["nll"].value
    printed = re.findall(r"^(\w+) +([\d.]+) -> ([\d.]+)$", said, re.MULTILINE)
    assert printed == [
        (name, f"{before[name].value:.4f}", f"{after[name].value:.4f}")
        for name in ("accuracy", "ece", "nll")
    ]


def test_every_example_is_tested_and_short():
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text("utf-8")
        assert f'example("{path.stem}")' in Path(__file__).read_text("utf-8"), path.name
        assert len(text.splitlines()) < 100
        assert f"python examples/{path.name}" in text


def test_pytorch(example, tmp_path):
    pytest.importorskip("sklearn")
    check_figures(*example("pytorch_example"))
    assert {path.name for path in tmp_path.iterdir()} == {"model.pt", "model.pt2", "calibrator"}
    assert isinstance(cal.load(tmp_path / "calibrator"), cal.Auto)


@pytest.mark.filterwarnings(LIGHTNING)
def test_lightning(example, tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("lightning", minversion="2.6", exc_type=ImportError)
    check_figures(*example("lightning_example"))
    assert {"network.ckpt", "calibrator", "README.md"} <= {p.name for p in tmp_path.iterdir()}
    assert "| ECE |" in (tmp_path / "README.md").read_text("utf-8")


def test_trainer_of_hugging_face(example, tmp_path):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    check_figures(*example("hf_trainer_example"))
    saved = {path.name for path in tmp_path.iterdir()}
    assert {"config.json", "model.safetensors", "calibrator", "README.md"} <= saved
    assert isinstance(cal.load(tmp_path / "calibrator"), cal.TemperatureScaling)


def test_losses_in_a_plain_loop(example):
    pytest.importorskip("sklearn")
    said, found = example("losses_pytorch_example")
    assert set(found) == {"ce", "crl", "adafocal", "fedlas_ls"}
    assert all(figures["accuracy"].value > 0.75 for figures in found.values())
    assert found["fedlas_ls"]["ece"].value < 0.6 * found["ce"]["ece"].value
    assert f"ECE {found['crl']['ece'].value:.3f}" in said


def check_gate(loss):
    """It has seen batches, and its weights are in their range."""
    assert float(loss.started_) == 1
    assert float(loss.mean_) > 0
    signs, weights = loss.last
    assert set(signs.unique().tolist()) <= {-1.0, 1.0}
    assert ((weights > 0) & (weights < 2 * loss.alpha)).all()


@pytest.mark.filterwarnings(LIGHTNING)
def test_losses_in_lightning(example):
    pytest.importorskip("sklearn")
    pytest.importorskip("lightning", minversion="2.6", exc_type=ImportError)
    said, found, classifier = example("losses_lightning_example")
    assert found["accuracy"].value > 0.75
    assert found["ece"].value < 0.05
    check_gate(classifier.loss)
    gates = [name for name in classifier.state_dict() if "gate" in name]
    assert len(gates) == 4
    assert "smoothing 0.0" in said


def test_losses_in_the_trainer_of_hugging_face(example):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    _, found, loss = example("losses_trainer_example")
    assert found["accuracy"].value > 0.5
    check_gate(loss)
