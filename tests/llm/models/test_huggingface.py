"""Fingerprints of models."""

from itertools import product

import pytest
import torch

from calibrant.llm.models.huggingface import ModelFingerprint, fingerprint_of
from tests.support.language_models import tiny_model


def test_fingerprints_distinguish_models():
    mine = fingerprint_of(tiny_model())
    assert (mine.hidden_size, mine.vocabulary, mine.softcap) == (16, 300, None)
    mine.check(fingerprint_of(tiny_model()), "the head")
    for first, second in product((torch.float32, torch.bfloat16, torch.float16), repeat=2):
        fingerprint_of(tiny_model().to(first)).check(
            fingerprint_of(tiny_model().to(first).to(second)), "the head"
        )
    assert [
        fingerprint_of(tiny_model(family)).softcap
        for family in ("Gemma2", "RecurrentGemma", "xLSTM")
    ] == [3.0] * 3
    halves = [fingerprint_of(tiny_model().to(dtype)) for dtype in (torch.bfloat16, torch.float16)]
    for half in halves:
        mine.check(half, "the head")
    with pytest.raises(ValueError, match="load it in float32"):
        halves[0].check(halves[1], "the head")
    for name in ("Qwen2", "Qwen3", "Gemma2", "GPT2"):
        other = tiny_model(name, seed=1)
        with pytest.raises(ValueError, match=r"the head belongs to another model.*digest"):
            mine.check(fingerprint_of(other), "the head")
    changed = tiny_model()
    with torch.no_grad():
        changed.lm_head.weight[-1] += 0.1
    with pytest.raises(ValueError, match="digest"):
        mine.check(fingerprint_of(changed), "the head")
    with pytest.raises(ValueError, match=r"softcap 5\.0 where LlamaForCausalLM has None"):
        mine.check(ModelFingerprint("x", 16, 300, mine.digest, 5.0), "the head")


@pytest.mark.parametrize("change", [{"digest": ["a"]}, {"half": None}, {"vocabulary": "9"}])
def test_fingerprints_are_text_and_sizes(change):
    known = {"name": "x", "hidden_size": 16, "vocabulary": 9, "digest": "a", "softcap": None}
    with pytest.raises((TypeError, ValueError), match=f"{next(iter(change))} must be"):
        ModelFingerprint(**{**known, **change})


def test_hashes_that_are_missing_do_not_agree():
    mine, other = (ModelFingerprint("x", 16, 300, digest, None) for digest in ("a", "b"))
    with pytest.raises(ValueError, match="digest b where x has a"):
        mine.check(other, "the head")
