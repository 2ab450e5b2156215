"""Temperature heads of language models on a device."""

from typing import Any

import numpy as np
import pytest
import torch

import calibrant as cal
from calibrant._core.chunks import examples
from calibrant.calibrators.logpartition import tabulate
from calibrant.llm.heads.fit import fit_head
from calibrant.llm.heads.fitted import HEADS, _make_head
from calibrant.llm.heads.modules import _shape_features_of_logits
from calibrant.llm.models.huggingface import ModelFingerprint
from tests.support.language_models import memory_table


def table(width=16):
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(1500, width))
    logits = (3 * rng.normal(size=(1500, 12))).astype(np.float32)
    true = np.exp(hidden[:, :1]) * logits / 2
    labels = (true + rng.gumbel(size=logits.shape)).argmax(-1)
    mark = ModelFingerprint("tiny", width, 12, "0" * 16, None)
    records = tabulate(examples(logits, labels))
    return memory_table(hidden, records, np.arange(1500) // 25, mark)


def inputs_of(head):
    hidden = torch.from_numpy(np.random.default_rng(1).normal(size=(2, 5, 16))).float()
    return _shape_features_of_logits(3 * hidden) if head.wants == "shape" else hidden


@pytest.mark.parametrize("kind", HEADS)
def test_every_head_computes_there(kind, device):
    torch.manual_seed(0)
    head = _make_head(kind, width=16, start=0.2)
    inputs = inputs_of(head)
    wanted = head(inputs)
    result = head.to(device)(inputs.to(device))
    assert result.device == device
    torch.testing.assert_close(result.cpu(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", HEADS)
def test_every_head_is_trained_there(kind, device, tmp_path):
    options: dict[str, Any] = {"epochs": 2, "batch": 512, "keep_always": True}
    plain = fit_head(table(), kind, "nll", **options)
    fitted = fit_head(table(), kind, "nll", **options, device=device)
    assert {p.device for p in fitted.head.parameters()} == {torch.device("cpu")}
    for group, figures in plain.figures.items():
        assert fitted.figures[group] == pytest.approx(figures, rel=1e-3, abs=1e-4)
    cal.save(fitted, tmp_path / "head")
    loaded = cal.load(tmp_path / "head", device=device)
    assert {p.device for p in loaded.head.parameters()} == {device}
    there = inputs_of(loaded.head).to(device)
    wanted = fitted.head(there.cpu())
    torch.testing.assert_close(loaded.head(there).cpu(), wanted, rtol=1e-4, atol=1e-5)
