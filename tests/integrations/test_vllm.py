"""Heads as logits processors, against stand-ins for the base classes of vLLM."""

import importlib
import sys
from abc import ABC, abstractmethod
from types import ModuleType, SimpleNamespace

import pytest
import torch

import calibrant as cal
from calibrant.llm.heads.attach import attached
from calibrant.llm.heads.fitted import FittedHead
from calibrant.llm.models.huggingface import fingerprint_of
from tests.support.language_models import random_head, tiny_model


class FirstProcessor(ABC):
    """The abstract methods of ``vllm.v1.sample.logits_processor.LogitsProcessor``."""

    @abstractmethod
    def __init__(self, vllm_config, device, is_pin_memory): ...

    @abstractmethod
    def apply(self, logits): ...

    @abstractmethod
    def is_argmax_invariant(self): ...

    @abstractmethod
    def update_state(self, batch_update): ...


class SecondProcessor(ABC):
    """Those of ``vllm.v1.worker.gpu.sample.logits_processor.LogitsProcessor``."""

    @abstractmethod
    def apply(self, logits, ctx): ...


BASES = {
    "vllm.v1.sample.logits_processor": FirstProcessor,
    "vllm.v1.worker.gpu.sample.logits_processor": SecondProcessor,
}


@pytest.fixture
def serve(monkeypatch):
    """Import the plug-in where vLLM has the given base classes."""

    def load(*names):
        for name, base in BASES.items():
            parts = name.split(".")
            for count in range(1, len(parts) + 1):
                parent = ModuleType(".".join(parts[:count]))
                monkeypatch.setitem(sys.modules, parent.__name__, parent)
            module = ModuleType(name)
            module.LogitsProcessor = base  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, name, module if name in names else None)
        monkeypatch.delitem(sys.modules, "calibrant.integrations.vllm", raising=False)
        return importlib.import_module("calibrant.integrations.vllm")

    monkeypatch.delenv("CALIBRANT_HEAD", raising=False)
    return load


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def saved(model, kind, folder):
    fitted = FittedHead(random_head(kind), fingerprint_of(model), "bce")
    cal.save(fitted, folder)
    return fitted


def config(folder):
    return SimpleNamespace(additional_config={"calibrant_head": str(folder)})


@pytest.mark.parametrize("kind", ["global", "shape"])
def test_logits_are_those_of_the_attached_head(serve, model, kind, tmp_path, monkeypatch):
    plugin = serve(*BASES)
    fitted = saved(model, kind, tmp_path / "head")
    text, device = torch.tensor([[1, 5, 9, 4]]), torch.device("cpu")
    with torch.no_grad():
        logits = model(text).logits[0]
        with attached(model, fitted):
            wanted = model(text).logits[0]
    first = plugin.HeadProcessor(config(tmp_path / "head"), device, False)
    assert isinstance(first, FirstProcessor)
    assert first.is_argmax_invariant() is False
    first.update_state(None)
    torch.testing.assert_close(first.apply(logits.clone()), wanted)
    half = logits.bfloat16()
    torch.testing.assert_close(first.apply(half), first.apply(half.float()))
    monkeypatch.setenv("CALIBRANT_HEAD", str(tmp_path / "head"))
    states = SimpleNamespace(device=device)
    second = plugin.HeadProcessorV2(SimpleNamespace(additional_config={}), states)
    assert isinstance(second, SecondProcessor)
    again = logits.clone()
    assert second.apply(again, None) is again  # in place
    torch.testing.assert_close(again, wanted)
    masked = logits.clone()
    masked[:, 7:20] = -torch.inf
    assert torch.isneginf(first.apply(masked)[:, 7:20]).all()


@pytest.mark.parametrize("kind", ["linear", "ats"])
def test_heads_of_hidden_states_are_refused(serve, model, kind, tmp_path):
    plugin = serve(*BASES)
    saved(model, kind, tmp_path / "head")
    with pytest.raises(ValueError, match=f"the {kind} head needs the hidden states, which vLLM"):
        plugin._ScaledLogits(config(tmp_path / "head"), torch.device("cpu"))


def test_a_head_of_this_vocabulary_is_needed(serve, model, tmp_path):
    plugin = serve(*BASES)
    saved(model, "global", tmp_path / "head")
    scaled = plugin._ScaledLogits(config(tmp_path / "head"), torch.device("cpu"))
    with pytest.raises(ValueError, match="for a vocabulary of 300, and the model has 7"):
        scaled.apply(torch.zeros(2, 7))
    with pytest.raises(ValueError, match="a head is needed: pass additional_config="):
        plugin._ScaledLogits(SimpleNamespace(additional_config={}), torch.device("cpu"))


def test_older_and_missing_versions(serve):
    first, second = BASES
    assert issubclass(serve(first).HeadProcessor, FirstProcessor)
    with pytest.raises(ImportError, match="pip install vllm"):
        serve(second)
