"""Streamed tokens are those of the finished answer, with the same probabilities."""

import threading
from typing import Any

import numpy as np
import pytest
import torch

from calibrant.llm import ask, stream
from calibrant.llm.heads.fitted import FittedHead
from calibrant.llm.models.huggingface import fingerprint_of
from tests.support.language_models import PROMPTS, random_head

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers


@pytest.mark.parametrize("kind", [None, "global", "linear", "shape", "ats"])
def test_tokens_are_those_of_the_answer(model, tokenizer, kind):
    fitted = kind and FittedHead(random_head(kind), fingerprint_of(model), "bce")
    (answer,) = ask(model, tokenizer, PROMPTS[:1], fitted=fitted or None, max_new_tokens=9)
    found = list(stream(model, tokenizer, PROMPTS[0], fitted=fitted or None, max_new_tokens=9))
    assert [token.text for token in found] == answer.token_texts
    np.testing.assert_allclose([token.prob for token in found], answer.probs, rtol=1e-4)
    assert found[-1].confidence == pytest.approx(answer.confidence, rel=1e-4)
    running = [np.exp(np.log(answer.probs[: n + 1]).mean()) for n in range(len(found))]
    np.testing.assert_allclose([token.confidence for token in found], running, rtol=1e-4)
    assert not model._forward_hooks


def test_other_aggregates_and_an_end_token(model, tokenizer, monkeypatch):
    monkeypatch.setattr("calibrant.llm.answers.streaming.end_ids", lambda *_: set())
    long = list(stream(model, tokenizer, PROMPTS[0], aggregate="minimum", max_new_tokens=9))
    probs = [token.prob for token in long]
    assert [token.confidence for token in long] == pytest.approx(np.minimum.accumulate(probs))
    words = [token.text.strip() for token in long]
    at = next(n for n, word in enumerate(words) if word != words[0])  # the first other word
    ends = set(tokenizer.encode(words[at], add_special_tokens=False))
    monkeypatch.setattr("calibrant.llm.answers.streaming.end_ids", lambda *_: ends)
    short = list(stream(model, tokenizer, PROMPTS[0], max_new_tokens=9))
    assert [token.text.strip() for token in short] == words[:at]


def test_sampled_tokens_have_their_own_probabilities(model, tokenizer):
    torch.manual_seed(0)
    options: dict[str, Any] = {"do_sample": True, "top_k": 3, "temperature": 1.5}
    options["max_new_tokens"] = 12
    found = list(stream(model, tokenizer, PROMPTS[0], **options))
    text = "".join(token.text for token in found)
    ids = tokenizer(PROMPTS[0] + " " + text.strip(), return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logs = model(ids).logits[0].log_softmax(-1)
    start = ids.shape[1] - len(found)
    own = [logs[at - 1, ids[0, at]].exp().item() for at in range(start, ids.shape[1])]
    np.testing.assert_allclose([token.prob for token in found], own, rtol=1e-4)


def test_closing_stops_the_model(model, tokenizer, monkeypatch):
    monkeypatch.setattr("calibrant.llm.answers.streaming.end_ids", lambda *_: set())
    before = threading.active_count()
    tokens = stream(model, tokenizer, PROMPTS[0], max_new_tokens=2000)
    next(tokens)
    assert threading.active_count() == before + 1
    tokens.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
    assert not model._forward_hooks


def test_errors_of_the_thread_reach_the_caller(model, tokenizer, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no memory")

    monkeypatch.setattr(type(model), "generate", broken)
    with pytest.raises(RuntimeError, match="no memory"):
        list(stream(model, tokenizer, PROMPTS[0]))


@pytest.mark.parametrize("options", [{"assistant_model": 1}, {"prompt_lookup_num_tokens": 3}])
def test_assistants_are_refused(model, tokenizer, options):
    with pytest.raises(ValueError, match="several at a time"):
        stream(model, tokenizer, PROMPTS[0], **options)
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        stream(model, tokenizer, "")
