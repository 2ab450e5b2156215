"""Several answers to a question are draws from the distribution of the model."""

import numpy as np
import pytest
import torch
from scipy import stats

from calibrant.llm.answers.asking import draw_answers
from tests.support.language_models import PROMPTS, quiz_model, quiz_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return quiz_tokenizer()


@pytest.fixture
def model(monkeypatch):
    made = quiz_model()
    # what models bring along must not sharpen the draws
    monkeypatch.setattr(made.generation_config, "temperature", 0.3)
    monkeypatch.setattr(made.generation_config, "top_k", 2)
    return made


def test_first_words_follow_the_distribution(model, tokenizer):
    prompts = PROMPTS[:2]
    drawn = draw_answers(model, tokenizer, prompts, samples=2000, max_new_tokens=1)
    for prompt, texts in zip(prompts, drawn, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            probs = model(input_ids=ids).logits[0, -1].double().softmax(-1)
        names = [tokenizer.decode([i], skip_special_tokens=True).strip() for i in range(len(probs))]
        chance = {name: 0.0 for name in names}
        for name, prob in zip(names, probs.tolist(), strict=True):
            chance[name] += prob
        counts = np.array([texts.count(name) for name in chance])
        expected = 2000 * np.array(list(chance.values()))
        assert counts.sum() == 2000
        assert stats.chisquare(counts, expected).pvalue > 1e-4


def test_draws_repeat_and_leave_the_random_state(model, tokenizer):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, again, other = (
        draw_answers(model, tokenizer, PROMPTS[:3], samples=4, seed=seed, batch=2)
        for seed in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert first == again != other
    assert [len(texts) for texts in first] == [4, 4, 4]


def test_number_of_samples(model, tokenizer):
    with pytest.raises(ValueError, match="samples must be"):
        draw_answers(model, tokenizer, PROMPTS[:1], samples=0)
