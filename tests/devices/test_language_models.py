"""Temperature heads from a language model on a device to its calibrated generations."""

from typing import Any

import pytest
import torch

from calibrant.llm.heads.attach import _calibrated_generation, attached
from calibrant.llm.heads.collect import collect
from calibrant.llm.heads.fit import fit_head
from tests.support.language_models import assert_same_table, drawn_documents, tiny_model

PROMPT = torch.tensor([[5, 6, 7, 8]])
KINDS = ["global", "linear", "mlp", "shape", "ats"]


@pytest.fixture
def documents():
    return drawn_documents([7, 20, 12, 13, 33, 9, 9, 16])


def test_a_table_collected_there_is_that_of_the_cpu(documents, device, tmp_path):
    table = collect(tiny_model(), documents, tmp_path / "here", batch=64)
    there = collect(tiny_model(), documents, tmp_path / "there", batch=64, device=device)
    assert_same_table(there, table, exact=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_attached_there_scales_as_on_the_cpu(kind, documents, device, tmp_path):
    model = tiny_model()
    table = collect(model, documents, tmp_path / "table", batch=64, prompts=True)
    options: dict[str, Any] = {"epochs": 2, "keep_always": kind != "global", "device": device}
    fitted = fit_head(table, kind, "nll", **options)
    assert {p.device for p in fitted.head.parameters()} == {torch.device("cpu")}
    how = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    mask = torch.ones_like(PROMPT)
    results = []
    for place in ("cpu", device):
        model = tiny_model().to(place)
        ids = {"input_ids": PROMPT.to(place), "attention_mask": mask.to(place)}
        with attached(model, fitted):
            called = model(**ids).logits
            output = model.generate(**ids, **how, output_logits=True)
        plain = model.generate(**ids, **how, output_logits=True, output_hidden_states=True)
        told = _calibrated_generation(fitted.head, plain, mask.to(place), [])
        assert called.device == told.log_probs.device == torch.device(place)
        results.append([x.detach().cpu() for x in (called, output.sequences, told.log_probs)])
    for found, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
