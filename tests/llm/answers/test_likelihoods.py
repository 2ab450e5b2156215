"""Choices between whole texts, by a loop over single texts."""

import numpy as np
import pytest
import torch

from calibrant.llm.answers.choices import ask_texts_each
from calibrant.llm.answers.questions import Question, short_prompt
from calibrant.llm.heads.fitted import FittedHead
from calibrant.llm.models.fingerprint import fingerprint_of

QUESTIONS = [
    Question("what is it", ("one two",), ("one two", "red", "yes no no"), 0),
    Question("is it red", ("no",), ("no", "blue blue"), 0),
]
SHOTS = [Question("it", ("four",))]


def total(model, tokenizer, prompt, choice, temperature):
    """Log-probability of a text after a prompt, token by token."""
    ids, added = tokenizer(prompt)["input_ids"], 0.0
    for token in tokenizer(choice)["input_ids"]:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1].double() / temperature
        added += float(logits.log_softmax(-1)[token])
        ids = [*ids, token]
    return added


def test_likelihoods_are_those_of_a_loop(model, tokenizer):
    heads = {"before": None, "after": FittedHead.from_temperature(2.5, fingerprint_of(model))}
    done = []
    found = ask_texts_each(
        model, tokenizer, QUESTIONS, heads, shots=SHOTS, batch=2, progress=lambda *t: done.append(t)
    )
    assert done == [(2, 10), (4, 10), (5, 10), (7, 10), (9, 10), (10, 10)]
    for name, temperature in {"before": 1.0, "after": 2.5}.items():
        for question, logits in zip(QUESTIONS, found[name], strict=True):
            prompt = short_prompt(question, SHOTS)
            logs = np.array(
                [total(model, tokenizer, prompt, c, temperature) for c in question.choices]
            )
            np.testing.assert_allclose(logits, logs - np.logaddexp.reduce(logs), atol=1e-5)


def test_long_choices_are_refused_at_first(model, tokenizer, monkeypatch):
    monkeypatch.setattr(type(model), "forward", None)  # nothing runs
    positions = model.config.max_position_embeddings
    long = Question("it", ("no",), ("no", " ".join(["red"] * positions)), 0)
    with pytest.raises(ValueError, match=rf"choice 'red .*more than the {positions} positions"):
        ask_texts_each(model, tokenizer, [*QUESTIONS, long], {"": None})
