"""Questions put to tiny models, answered greedily and by draws."""

import copy

import numpy as np
import pytest
import torch
from scipy import stats

from calibrant import use
from calibrant.llm.answers.asking import _token_texts, ask, draw_answers
from calibrant.llm.answers.confidence import answer_confidence
from calibrant.llm.heads.fitted import FittedHead
from calibrant.llm.models.huggingface import fingerprint_of
from tests.support.language_models import (
    PROMPTS,
    QUIZ_WORDS,
    quiz_model,
    tokenizers,
    transformers,
    word_tokenizer,
)


def by_hand(model, tokenizer, prompt, max_new_tokens, temperature=1.0):
    """Greedy tokens one by one, without a cache or padding, and their probabilities."""
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    tokens, probs = [], []
    for _ in range(max_new_tokens):
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, -1].double() / temperature
        token = int(logits.argmax())
        tokens.append(token)
        probs.append(float(logits.softmax(-1)[token]))
        if token < 4:  # the special ones
            break
        ids = torch.cat([ids, torch.tensor([[token]])], 1)
    if tokens[-1] < 4 and len(tokens) > 1:
        tokens, probs = tokens[:-1], probs[:-1]
    return tokens, np.array(probs)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_answers_are_those_of_a_loop_without_cache_and_padding(model, tokenizer, temperature):
    fitted = FittedHead.from_temperature(temperature, fingerprint_of(model))
    done = []
    with use(progress=lambda *t: done.append(t)):
        found = ask(model, tokenizer, PROMPTS, fitted=fitted, max_new_tokens=6, batch=2)
    assert done == [(2, 3), (3, 3)]
    for prompt, answer in zip(PROMPTS, found, strict=True):
        tokens, probs = by_hand(model, tokenizer, prompt, 6, temperature)
        assert len(answer.token_texts) == len(tokens)
        assert "".join(answer.token_texts) == tokenizer.decode(tokens)
        np.testing.assert_allclose(answer.probs, probs, atol=1e-5)
        assert answer.confidence == pytest.approx(float(answer_confidence([probs])[0]), abs=1e-5)
        assert answer.text == tokenizer.decode(tokens, skip_special_tokens=True).strip()


def test_without_a_head_the_probabilities_are_those_of_the_model(model, tokenizer):
    one = FittedHead.from_temperature(1.0, fingerprint_of(model))
    plain, same = (
        ask(model, tokenizer, PROMPTS[:1], fitted=f, max_new_tokens=3)[0] for f in (None, one)
    )
    np.testing.assert_allclose(plain.probs, same.probs)
    assert tokenizer.padding_side == "right"


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        ([], {}, ValueError, "at least one prompt"),
        ("what is it", {}, TypeError, "got one text: put it into a list"),
        (["what is it", 5], {}, TypeError, "got 5 for prompt 1"),
        (["what is it", ""], {}, ValueError, "prompt 1 is empty"),
        (["what is it"], {"fitted": "head"}, TypeError, "got 'head': calibrant.load"),
    ],
)
def test_invalid_prompts_and_heads(model, tokenizer, prompts, options, error, message):
    with pytest.raises(error, match=message):
        ask(model, tokenizer, prompts, **options)


def test_texts_of_tokens():
    made = tokenizers
    letters = sorted(made.pre_tokenizers.ByteLevel.alphabet())
    inner = made.Tokenizer(made.models.BPE({one: i for i, one in enumerate(letters)}, []))
    inner.pre_tokenizer = made.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = made.decoders.ByteLevel()
    byte_wise = transformers.PreTrainedTokenizerFast(tokenizer_object=inner)
    text = "a\N{CJK UNIFIED IDEOGRAPH-4F60}b \N{GRINNING FACE}"
    ids = byte_wise(text)["input_ids"]
    assert len(ids) == 1 + 3 + 1 + 1 + 4
    found = _token_texts(byte_wise, ids)
    assert found == [text[0], "", "", text[1], text[2], text[3], "", "", "", text[4]]
    cut = _token_texts(byte_wise, ids[:-1])
    assert "".join(cut) == byte_wise.decode(ids[:-1])  # the broken end is shown

    words = {"<unk>": 0, "\u2581Lima": 1, "\u2581is": 2, "\u2581it": 3}
    inner = made.Tokenizer(made.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = made.pre_tokenizers.Metaspace()
    inner.decoder = made.decoders.Metaspace()
    word_wise = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    assert word_wise.decode([2]) == "is"  # alone it has no blank
    assert _token_texts(word_wise, [1, 2, 3]) == ["Lima", " is", " it"]


def test_truncated_answers(model, tokenizer):
    whole = ask(model, tokenizer, PROMPTS, max_new_tokens=64)
    prompt, answer = next(
        pair for pair in zip(PROMPTS, whole, strict=True) if pair[1].probs.size > 1
    )
    assert not answer.truncated
    (short,) = ask(model, tokenizer, [prompt], max_new_tokens=answer.probs.size - 1)
    assert short.truncated
    assert short.token_texts == answer.token_texts[:-1]


def test_ended_answers_are_not_truncated(model, tokenizer, monkeypatch):
    (plain,) = ask(model, tokenizer, PROMPTS[:1], max_new_tokens=1)
    token = tokenizer.convert_tokens_to_ids(plain.token_texts[0].strip())
    assert plain.truncated == (token not in tokenizer.all_special_ids)
    # a token that ends texts, though the tokenizer does not count it among the special ones
    monkeypatch.setattr(model.generation_config, "eos_token_id", [2, token])
    for max_new_tokens in (1, 8):
        (ended,) = ask(model, tokenizer, PROMPTS[:1], max_new_tokens=max_new_tokens)
        assert not ended.truncated
        assert ended.token_texts == plain.token_texts  # one at least, so that there is a claim


def test_answers_of_a_model_with_an_adapter(model, tokenizer):
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    options = {"r": 2, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "up_proj"], **options)
    adapted = peft.get_peft_model(copy.deepcopy(model), config).eval()
    fitted = FittedHead.from_temperature(2.0, fingerprint_of(adapted))
    found = ask(adapted, tokenizer, PROMPTS, fitted=fitted, max_new_tokens=6, batch=2)
    merged = copy.deepcopy(adapted).merge_and_unload()
    for prompt, answer in zip(PROMPTS, found, strict=True):
        tokens, probs = by_hand(merged, tokenizer, prompt, 6, temperature=2.0)
        assert len(answer.token_texts) == len(tokens)
        assert "".join(answer.token_texts) == tokenizer.decode(tokens)
        np.testing.assert_allclose(answer.probs, probs, atol=1e-5)
    plain = ask(model, tokenizer, PROMPTS, fitted=fitted, max_new_tokens=6)
    assert [one.token_texts for one in plain] != [one.token_texts for one in found]


def test_a_rendered_chat_begins_once(model, tokenizer):
    adding = copy.deepcopy(tokenizer)  # as those of Llama and Gemma, whose templates write it too
    adding.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    texts = [f"<s> {PROMPTS[0]}", PROMPTS[0], PROMPTS[2]]  # one batch, both kinds, other lengths
    assert adding(texts[0])["input_ids"][:2] == [1, 1]
    found = ask(model, adding, texts, max_new_tokens=6)
    for prompt, answer in zip((PROMPTS[0], PROMPTS[0], PROMPTS[2]), found, strict=True):
        tokens, probs = by_hand(model, tokenizer, f"<s> {prompt}", 6)
        assert len(answer.token_texts) == len(tokens)
        assert "".join(answer.token_texts) == tokenizer.decode(tokens)
        np.testing.assert_allclose(answer.probs, probs, atol=1e-5)
    _, twice = by_hand(model, tokenizer, f"<s> <s> {PROMPTS[0]}", 1)
    assert abs(found[0].probs[0] - twice[0]) > 1e-3


@pytest.fixture(scope="module")
def breaking():
    """A tokenizer for which the word that ends the first line of an answer is a line break."""
    words = ["<nl>" if word == "no" else word for word in QUIZ_WORDS]
    return word_tokenizer(words, special=["<pad>", "<s>", "</s>", "<unk>"], pad_token="<pad>")


@pytest.fixture
def generated(model, monkeypatch):
    """Number of tokens of each call of generate."""
    counts, generate = [], type(model).generate

    def counted(self, **options):
        output = generate(self, **options)
        counts.append(len(output.logits))
        return output

    monkeypatch.setattr(type(model), "generate", counted)
    return counts


def test_the_whole_answer_is_shown_and_counts(model, tokenizer, breaking, generated):
    tokens, probs = by_hand(model, tokenizer, PROMPTS[1], 12)
    at = tokens.index(QUIZ_WORDS.index("no"))
    (whole,) = ask(model, breaking, [PROMPTS[1]], max_new_tokens=12)
    assert 1 < at < len(tokens) - 1
    assert whole.text == breaking.decode(tokens).strip()
    assert "\n" in whole.text
    assert "".join(whole.token_texts) == breaking.decode(tokens)
    np.testing.assert_allclose(whole.probs, probs, atol=1e-5)
    assert generated == [12]

    (line,) = ask(model, breaking, [PROMPTS[1]], max_new_tokens=12, one_line=True)
    assert line.text == breaking.decode(tokens[:at]).strip()
    np.testing.assert_allclose(line.probs, probs[:at], atol=1e-5)
    assert line.confidence == pytest.approx(float(answer_confidence([probs[:at]])[0]), abs=1e-5)
    assert not line.truncated
    assert generated == [12, at + 1]  # nothing is generated after the break


def test_lines_of_a_batch_end_each_for_itself(model, breaking, generated):
    alone = [
        ask(model, breaking, [prompt], max_new_tokens=12, one_line=True)[0] for prompt in PROMPTS
    ]
    together = ask(model, breaking, PROMPTS, max_new_tokens=12, one_line=True)
    assert generated[-1] == max(generated[:-1]) == 12
    for one, other in zip(alone, together, strict=True):
        assert (other.text, other.token_texts) == (one.text, one.token_texts)
        assert other.truncated == one.truncated
        np.testing.assert_allclose(other.probs, one.probs, atol=1e-5)


def test_generation_stops_at_special_tokens(model, tokenizer, generated, monkeypatch):
    # those of a chat model from a .gguf file may lack the token that ends a turn
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    (answer,) = ask(model, tokenizer, PROMPTS[:1], max_new_tokens=12)
    assert answer.probs.size == 1
    assert not answer.truncated
    assert generated == [1]


def test_too_long_prompts_are_refused_before_any_answer(model, tokenizer, generated):
    positions = model.config.max_position_embeddings
    long = " ".join(["two"] * positions)
    message = rf"prompt 2, ending with '.*two', has {positions} tokens, and 4 may follow: more than"
    with pytest.raises(ValueError, match=message):
        ask(model, tokenizer, [*PROMPTS[:2], long], max_new_tokens=4, batch=1)
    with pytest.raises(ValueError, match=f"more than the {positions} positions of the model"):
        ask(model, tokenizer, PROMPTS, max_new_tokens=positions)
    with pytest.raises(ValueError, match="batch must be a whole number, at least 1"):
        ask(model, tokenizer, [PROMPTS[0]], batch=0)
    assert not generated


def test_generation_config_is_ignored(model, tokenizer, monkeypatch):
    (plain,) = ask(model, tokenizer, [PROMPTS[0]], max_new_tokens=8)
    monkeypatch.setattr(model.generation_config, "repetition_penalty", 5.0)
    monkeypatch.setattr(model.generation_config, "no_repeat_ngram_size", 1)
    (again,) = ask(model, tokenizer, [PROMPTS[0]], max_new_tokens=8)
    assert again.text == plain.text
    np.testing.assert_array_equal(again.probs, plain.probs)


@pytest.fixture
def sharp(monkeypatch):
    made = quiz_model()
    # what models bring along must not sharpen the draws
    monkeypatch.setattr(made.generation_config, "temperature", 0.3)
    monkeypatch.setattr(made.generation_config, "top_k", 2)
    return made


def test_first_words_follow_the_distribution(sharp, tokenizer):
    prompts = PROMPTS[:2]
    drawn = draw_answers(sharp, tokenizer, prompts, samples=2000, max_new_tokens=1)
    for prompt, texts in zip(prompts, drawn, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            probs = sharp(input_ids=ids).logits[0, -1].double().softmax(-1)
        names = [tokenizer.decode([i], skip_special_tokens=True).strip() for i in range(len(probs))]
        chance = {name: 0.0 for name in names}
        for name, prob in zip(names, probs.tolist(), strict=True):
            chance[name] += prob
        counts = np.array([texts.count(name) for name in chance])
        expected = 2000 * np.array(list(chance.values()))
        assert counts.sum() == 2000
        assert stats.chisquare(counts, expected).pvalue > 1e-4


def test_draws_repeat_and_leave_the_random_state(sharp, tokenizer):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, again, other = (
        draw_answers(sharp, tokenizer, PROMPTS[:3], samples=4, seed=seed, batch=2)
        for seed in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert first == again != other
    assert [len(texts) for texts in first] == [4, 4, 4]


def test_number_of_samples(sharp, tokenizer):
    with pytest.raises(ValueError, match="samples must be"):
        draw_answers(sharp, tokenizer, PROMPTS[:1], samples=0)
