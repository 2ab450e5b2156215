"""Multiple choice."""

import math

import numpy as np
import pytest
import torch

from calibrant import use
from calibrant.llm.answers.choices import (
    _choice_tokens,
    _spellings,
    ask_choices,
    ask_texts_each,
    ask_true,
    choice_logits_from_likelihoods,
    choice_logits_from_top,
)
from calibrant.llm.answers.questions import Question, _choice_prompt, short_prompt
from calibrant.llm.heads.fitted import FittedHead
from calibrant.llm.models.huggingface import fingerprint_of
from tests.support.language_models import (
    PROMPTS,
    QUIZ_WORDS,
    true_by_hand,
)


class Words:
    """A tokenizer of a few words; everything else is letters of three each."""

    unk_token_id = 0
    known = ("?", " A", " B", " C", " D", "A", "B", " True", " False")

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        if text in self.known:
            return [self.known.index(text)]
        return [100 + i for i in range(-(-len(text) // 3))]

    def decode(self, tokens):
        return "|".join(map(str, tokens))


def test_tokens_of_choices():
    assert _choice_tokens(Words(), "ABCD") == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="no token of its own for 'Lima': pass"):
        _choice_tokens(Words(), ("A", "Lima"))
    with pytest.raises(ValueError, match="no token of its own for 'x', 'y'"):
        _choice_tokens(Words(), ("x", "y"))


def sentencepiece(*, doubled):
    """A tokenizer of letters with or without a blank before them.

    With ``doubled`` it puts a blank before every text, as that of Llama 2, even before a blank.
    """
    made = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = ["<unk>", "\u2581", *"ABCD", *(f"\u2581{letter}" for letter in "ABCD")]
    merges = [("\u2581", letter) for letter in "ABCD"]
    vocabulary = {word: number for number, word in enumerate(words)}
    plain = made.Tokenizer(made.models.BPE(vocabulary, merges, unk_token="<unk>"))
    plain.pre_tokenizer = made.pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    if doubled:
        plain.normalizer = made.normalizers.Prepend("\u2581")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>")


def test_letters_with_and_without_a_space():
    llama = sentencepiece(doubled=True)  # adds spaces of its own
    assert _choice_tokens(llama, "ABCD") == [6, 7, 8, 9]
    assert llama.encode("D: A", add_special_tokens=False)[-1] == 6  # what follows a prompt
    assert _choice_tokens(sentencepiece(doubled=False), "ABCD") == [6, 7, 8, 9]
    with pytest.raises(ValueError, match="no token of its own for 'AB': pass"):
        _choice_tokens(llama, ("AB", "C"))


def test_a_choice_needs_a_log_probability():
    for value, message in (
        (math.nan, "question 0 has a log-probability that is NaN"),
        (-math.inf, "choice 'B' is not among the 2 tokens of question 0"),
    ):
        with pytest.raises(ValueError, match=message):
            choice_logits_from_top([{"A": -1.0, "B": value}], ("A", "B"))


def test_whole_choices_by_likelihood():
    sums = np.array([[-3.0, -8.0, -2.0]])
    plain = np.exp(choice_logits_from_likelihoods(sums))[0]
    np.testing.assert_allclose(plain, np.exp(sums[0]) / np.exp(sums[0]).sum())
    with pytest.raises(ValueError, match="at most 0"):
        choice_logits_from_likelihoods([[1.0, -2.0]])
    with pytest.raises(ValueError, match="two choices or more"):
        choice_logits_from_likelihoods([[-1.0]])


def test_choices_of_a_service_are_renormalised():
    shown = [
        {"A": -1.0, " A": -2.0, "B": -3.0, "The": -0.9},
        {"A": -4.0, "B": -0.1},
    ]
    found = np.exp(choice_logits_from_top(shown, ("A", "B")))
    first = math.exp(-1) + math.exp(-2)
    np.testing.assert_allclose(found[0, 0], first / (first + math.exp(-3)))
    np.testing.assert_allclose(found[1, 0], math.exp(-4) / (math.exp(-4) + math.exp(-0.1)))
    with pytest.raises(ValueError, match="choice 'C' is not among the 4 tokens of question"):
        choice_logits_from_top(shown, ("A", "C"))


QUESTIONS = [
    Question("what is it", ("two",), ("one", "two", "three", "four"), 1, "numbers"),
    Question("is it", ("red",), ("red", "blue", "yes", "no"), 0, "colours"),
    Question("it", ("no",), ("red", "blue", "yes", "no"), 3, "colours"),
]


@pytest.mark.parametrize("temperature", [None, 3.0])
def test_choices_are_the_logits_of_their_letters(model, tokenizer, temperature):
    fitted = temperature and FittedHead.from_temperature(temperature, fingerprint_of(model))
    shots = [Question("two", ("one",), ("one", "two", "three", "four"), 0, "numbers")]
    found, labels = ask_choices(
        model, tokenizer, QUESTIONS, shots=shots, fitted=fitted or None, batch=2
    )
    assert labels.tolist() == [1, 0, 3]
    letters = [QUIZ_WORDS.index(letter) for letter in "ABCD"]
    for question, row in zip(QUESTIONS, found, strict=True):
        prompt = _choice_prompt(question, shots)
        with torch.no_grad():
            logits = model(**tokenizer(prompt, return_tensors="pt")).logits[0, -1].double()
        wanted = (logits / (temperature or 1.0))[letters].log_softmax(-1)
        np.testing.assert_allclose(row - np.logaddexp.reduce(row), wanted, atol=1e-5)


def test_questions_with_different_choices_are_refused(model, tokenizer):
    fewer = Question("it", ("no",), ("yes", "no"), 1)
    with pytest.raises(ValueError, match=r"equally many choices, got \[2, 4\]"):
        ask_choices(model, tokenizer, [*QUESTIONS, fewer])


@pytest.mark.parametrize("temperature", [None, 2.0])
def test_verdict_is_the_next_word(model, tokenizer, temperature):
    fitted = (
        FittedHead.from_temperature(temperature, fingerprint_of(model)) if temperature else None
    )
    done = []
    with use(progress=lambda *t: done.append(t)):
        found = ask_true(model, tokenizer, PROMPTS, fitted=fitted, batch=2)
    wanted = [true_by_hand(model, tokenizer, prompt, temperature or 1.0) for prompt in PROMPTS]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert np.ptp(wanted) > 0.05
    assert done == [(2, 3), (3, 3)]


def test_every_spelling_of_a_verdict_counts(tokenizer):
    class Coded:
        unk_token_id = 0

        def encode(self, text, add_special_tokens):
            assert not add_special_tokens
            return {" True": [4], "True": [5], " true": [4], "true": [6, 7]}.get(text, [0])

    assert _spellings(Coded(), "True") == [4, 5]
    assert _spellings(tokenizer, "False") == [QUIZ_WORDS.index("False")]
    with pytest.raises(ValueError, match="no token of its own for 'False'"):
        _spellings(Coded(), "False")


TEXTS = [
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
    with use(progress=lambda *t: done.append(t)):
        found = ask_texts_each(model, tokenizer, TEXTS, heads, shots=SHOTS, batch=2)
    assert done == [(2, 10), (4, 10), (5, 10), (7, 10), (9, 10), (10, 10)]
    for name, temperature in {"before": 1.0, "after": 2.5}.items():
        for question, logits in zip(TEXTS, found[name], strict=True):
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
        ask_texts_each(model, tokenizer, [*TEXTS, long], {"": None})
