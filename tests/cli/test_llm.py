"""Questions put to tiny models, documents from files, and the verbs of calibrant llm."""

import copy
import inspect
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

import calibrant
import calibrant as cal
from calibrant._core import torch_models as _models
from calibrant._core.torch_models import own_device
from calibrant.cli.llm import RULES, fit
from calibrant.llm import (
    AnswerCalibrator,
    FittedHead,
    Question,
    answer_confidence,
    ask,
    ask_choices,
    ask_true,
    choice_prompt,
    exact_match,
    fit_head,
    load_model,
    mark_of,
    open_table,
    read_documents,
    read_mmlu,
    read_questions,
    short_prompt,
    token_claims,
    verdict_prompt,
)
from calibrant.llm.answers.asking import _length, _pieces, _spelled
from calibrant.llm.answers.confidence import Aggregator
from calibrant.llm.tokens.collect import collect

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = [
    *("<pad>", "<s>", "</s>", "<unk>", "Question:", "Answer:", "A", "B", "C", "D", "A.", "B."),
    *("C.", "D.", "one", "two", "three", "four", "red", "blue", "what", "is", "it", "yes", "no"),
    *("True", "False"),
]
BREAK = "</s>"


@pytest.fixture(scope="module")
def tokenizer():
    words = {word: number for number, word in enumerate(WORDS)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **special)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.5,
    )
    return transformers.LlamaForCausalLM(config).eval()


PROMPTS = ["Question: what is it Answer:", "Question: is it red Answer:", "what"]


def by_hand(model, tokenizer, prompt, most, temperature=1.0):
    """Greedy tokens one by one, without a cache or padding, and their probabilities."""
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    tokens, probs = [], []
    for _ in range(most):
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
    fitted = FittedHead.of_temperature(temperature, mark_of(model))
    done = []
    found = ask(
        model,
        tokenizer,
        PROMPTS,
        fitted=fitted,
        most=6,
        batch=2,
        progress=lambda *t: done.append(t),
    )
    assert done == [(2, 3), (3, 3)]
    for prompt, answer in zip(PROMPTS, found, strict=True):
        tokens, probs = by_hand(model, tokenizer, prompt, 6, temperature)
        assert len(answer.pieces) == len(tokens)
        assert "".join(answer.pieces) == tokenizer.decode(tokens)
        np.testing.assert_allclose(answer.probs, probs, atol=1e-5)
        assert answer.confidence == pytest.approx(float(answer_confidence([probs])[0]), abs=1e-5)
        assert answer.text == tokenizer.decode(tokens, skip_special_tokens=True).strip()


def test_without_a_head_the_probabilities_are_those_of_the_model(model, tokenizer):
    one = FittedHead.of_temperature(1.0, mark_of(model))
    plain, same = (ask(model, tokenizer, PROMPTS[:1], fitted=f, most=3)[0] for f in (None, one))
    np.testing.assert_allclose(plain.probs, same.probs)
    assert tokenizer.padding_side == "right"


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        ([], {}, ValueError, "a prompt at least"),
        ("what is it", {}, TypeError, "got one text: put it into a list"),
        (["what is it", 5], {}, TypeError, "got 5 for prompt 1"),
        (["what is it", ""], {}, ValueError, "prompt 1 is empty"),
        (["what is it"], {"fitted": "head"}, TypeError, "got 'head': calibrant.load"),
    ],
)
def test_prompts_and_heads_that_are_none(model, tokenizer, prompts, options, error, message):
    with pytest.raises(error, match=message):
        ask(model, tokenizer, prompts, **options)


def test_pieces_of_characters_and_of_words_with_their_blanks():
    made = tokenizers
    letters = sorted(made.pre_tokenizers.ByteLevel.alphabet())
    inner = made.Tokenizer(made.models.BPE({one: i for i, one in enumerate(letters)}, []))
    inner.pre_tokenizer = made.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = made.decoders.ByteLevel()
    byte_wise = transformers.PreTrainedTokenizerFast(tokenizer_object=inner)
    text = "a\N{CJK UNIFIED IDEOGRAPH-4F60}b \N{GRINNING FACE}"
    ids = byte_wise(text)["input_ids"]
    assert len(ids) == 1 + 3 + 1 + 1 + 4
    found = _pieces(byte_wise, ids)
    assert found == [text[0], "", "", text[1], text[2], text[3], "", "", "", text[4]]
    cut = _pieces(byte_wise, ids[:-1])
    assert "".join(cut) == byte_wise.decode(ids[:-1])  # the broken end is shown

    words = {"<unk>": 0, "\u2581Lima": 1, "\u2581is": 2, "\u2581it": 3}
    inner = made.Tokenizer(made.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = made.pre_tokenizers.Metaspace()
    inner.decoder = made.decoders.Metaspace()
    word_wise = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    assert word_wise.decode([2]) == "is"  # alone it has no blank
    assert _pieces(word_wise, [1, 2, 3]) == ["Lima", " is", " it"]


def test_whether_an_answer_was_cut(model, tokenizer):
    whole = ask(model, tokenizer, PROMPTS, most=64)
    prompt, answer = next(
        pair for pair in zip(PROMPTS, whole, strict=True) if pair[1].probs.size > 1
    )
    assert not answer.cut
    (short,) = ask(model, tokenizer, [prompt], most=answer.probs.size - 1)
    assert short.cut
    assert short.pieces == answer.pieces[:-1]


def test_an_answer_that_the_model_ends_is_not_cut(model, tokenizer, monkeypatch):
    (plain,) = ask(model, tokenizer, PROMPTS[:1], most=1)
    token = tokenizer.convert_tokens_to_ids(plain.pieces[0].strip())
    assert plain.cut == (token not in tokenizer.all_special_ids)
    # a token that ends texts, though the tokenizer does not count it among the special ones
    monkeypatch.setattr(model.generation_config, "eos_token_id", [2, token])
    for most in (1, 8):
        (ended,) = ask(model, tokenizer, PROMPTS[:1], most=most)
        assert not ended.cut
        assert ended.pieces == plain.pieces  # one at least, so that there is a claim


def test_answers_of_a_model_with_an_adapter(model, tokenizer):
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    options = {"r": 2, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "up_proj"], **options)
    adapted = peft.get_peft_model(copy.deepcopy(model), config).eval()
    fitted = FittedHead.of_temperature(2.0, mark_of(adapted))
    found = ask(adapted, tokenizer, PROMPTS, fitted=fitted, most=6, batch=2)
    merged = copy.deepcopy(adapted).merge_and_unload()
    for prompt, answer in zip(PROMPTS, found, strict=True):
        tokens, probs = by_hand(merged, tokenizer, prompt, 6, temperature=2.0)
        assert len(answer.pieces) == len(tokens)
        assert "".join(answer.pieces) == tokenizer.decode(tokens)
        np.testing.assert_allclose(answer.probs, probs, atol=1e-5)
    plain = ask(model, tokenizer, PROMPTS, fitted=fitted, most=6)
    assert [one.pieces for one in plain] != [one.pieces for one in found]


def test_a_rendered_chat_begins_once(model, tokenizer):
    adding = copy.deepcopy(tokenizer)  # as those of Llama and Gemma, whose templates write it too
    adding.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    texts = [f"<s> {PROMPTS[0]}", PROMPTS[0], PROMPTS[2]]  # one batch, both kinds, other lengths
    assert adding(texts[0])["input_ids"][:2] == [1, 1]
    found = ask(model, adding, texts, most=6)
    for prompt, answer in zip((PROMPTS[0], PROMPTS[0], PROMPTS[2]), found, strict=True):
        tokens, probs = by_hand(model, tokenizer, f"<s> {prompt}", 6)
        assert len(answer.pieces) == len(tokens)
        assert "".join(answer.pieces) == tokenizer.decode(tokens)
        np.testing.assert_allclose(answer.probs, probs, atol=1e-5)
    _, twice = by_hand(model, tokenizer, f"<s> <s> {PROMPTS[0]}", 1)
    assert abs(found[0].probs[0] - twice[0]) > 1e-3


def test_an_answer_ends_before_a_line_break(tokenizer, model, monkeypatch):
    monkeypatch.setattr(
        tokenizer.__class__,
        "decode",
        lambda self, ids, **_: " ".join("\n" if i == 18 else WORDS[i] for i in ids),
    )
    assert _length(tokenizer, [14, 15, 18, 16], {0, 2}) == 2
    assert (
        _length(tokenizer, [18, 14, 15], {0, 2}) == 3
    )  # a break before the first word does not count
    assert _length(tokenizer, [14, 2, 0], {0, 2}) == 1
    assert _length(tokenizer, [2], {0, 2}) == 1


QUESTIONS = [
    Question("what is it", ("two",), ("one", "two", "three", "four"), 1, "numbers"),
    Question("is it", ("red",), ("red", "blue", "yes", "no"), 0, "colours"),
    Question("it", ("no",), ("red", "blue", "yes", "no"), 3, "colours"),
]


@pytest.mark.parametrize("temperature", [None, 3.0])
def test_choices_are_the_logits_of_their_letters(model, tokenizer, temperature):
    fitted = temperature and FittedHead.of_temperature(temperature, mark_of(model))
    shots = [Question("two", ("one",), ("one", "two", "three", "four"), 0, "numbers")]
    found, labels = ask_choices(
        model, tokenizer, QUESTIONS, shots=shots, fitted=fitted or None, prefix="", batch=2
    )
    assert labels.tolist() == [1, 0, 3]
    letters = [WORDS.index(letter) for letter in "ABCD"]
    for question, row in zip(QUESTIONS, found, strict=True):
        prompt = choice_prompt(question, shots)
        with torch.no_grad():
            logits = model(**tokenizer(prompt, return_tensors="pt")).logits[0, -1].double()
        wanted = (logits / (temperature or 1.0))[letters].log_softmax(-1)
        np.testing.assert_allclose(row - np.logaddexp.reduce(row), wanted, atol=1e-5)


def test_letters_of_a_tokenizer_that_puts_blanks_itself(model, tokenizer):
    llama = copy.deepcopy(tokenizer)  # "<unk>" stands for the blank of its own in front of " A"
    blank = tokenizers.normalizers.Replace(tokenizers.Regex("^ "), "<unk> ")
    llama.backend_tokenizer.normalizer = blank
    assert len(llama.encode(" A", add_special_tokens=False)) == 2
    wanted, _ = ask_choices(model, tokenizer, QUESTIONS, prefix="")
    np.testing.assert_array_equal(ask_choices(model, llama, QUESTIONS)[0], wanted)
    with pytest.raises(ValueError, match="with the prefix ' ' choice 'A' is 2 tokens"):
        ask_choices(model, llama, QUESTIONS, prefix=" ")


def test_questions_with_different_choices_are_refused(model, tokenizer):
    fewer = Question("it", ("no",), ("yes", "no"), 1)
    with pytest.raises(ValueError, match=r"equally many choices, got \[2, 4\]"):
        ask_choices(model, tokenizer, [*QUESTIONS, fewer])


def true_by_hand(model, tokenizer, prompt, temperature=1.0):
    """Probability of True against False as the next word, by a pass without padding."""
    with torch.no_grad():
        logits = model(**tokenizer(prompt, return_tensors="pt")).logits[0, -1].double()
    odds = (logits[WORDS.index("True")] - logits[WORDS.index("False")]) / temperature
    return float(torch.sigmoid(odds))


@pytest.mark.parametrize("temperature", [None, 2.0])
def test_the_verdict_is_the_next_word(model, tokenizer, temperature):
    fitted = FittedHead.of_temperature(temperature, mark_of(model)) if temperature else None
    done = []
    found = ask_true(
        model, tokenizer, PROMPTS, fitted=fitted, batch=2, progress=lambda *t: done.append(t)
    )
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

    assert _spelled(Coded(), "True") == [4, 5]
    assert _spelled(tokenizer, "False") == [WORDS.index("False")]
    with pytest.raises(ValueError, match="no token of its own for 'False'"):
        _spelled(Coded(), "False")


# -------------------------------------------------------------------------------------- documents


def test_documents_of_every_form(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"conversations": ["a", "b", "c"]},
        {
            "id": 7,
            "conversations": [
                {"from": who, "value": f"{who} said\u2028this\x85"}
                for who in ("system", "human", "gpt", "user", "assistant", "chatgpt", "model")
            ],
        },
        {"instruction": "a", "input": "x", "output": "b"},
        {"instruction": "a", "input": None, "output": "b"},
        {"prompt": "a", "answer": "b"},
        {"text": "a b"},
        "plain",
    ]
    wanted = [
        rows[0]["messages"],  # type: ignore[index]
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ],
        [
            {"role": role, "content": f"{who} said\u2028this\x85"}
            for who, role in (
                ("system", "system"),
                ("human", "user"),
                ("gpt", "assistant"),
                ("user", "user"),
                ("assistant", "assistant"),
                ("chatgpt", "assistant"),
                ("model", "assistant"),
            )
        ],
        [{"role": "user", "content": "a\n\nx"}, {"role": "assistant", "content": "b"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        ("a", "b"),
        "a b",
        "plain",
    ]
    (tmp_path / "d.json").write_text(json.dumps(rows))
    lines = (json.dumps(row, ensure_ascii=False) for row in rows)  # with breaks inside strings
    (tmp_path / "d.jsonl").write_text("\n".join(lines) + "\n\n", "utf-8")
    (tmp_path / "d.txt").write_text("one\ntwo\n\n \nthree\n")
    assert read_documents(tmp_path / "d.json") == wanted
    assert read_documents(tmp_path / "d.jsonl") == wanted
    assert read_documents(tmp_path / "d.txt") == ["one\ntwo", "three"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.json", "{", "not valid JSON"),
        ("d.json", "{}", "must hold a list"),
        ("d.json", "[]", "a document at least"),
        ("d.jsonl", '{"a": 1}', r"document 0 must be one of .*, got the keys a"),
        ("d.jsonl", "3", "got int"),
        ("d.csv", "x", r"must be \.jsonl, \.json or \.txt"),
        ("d.jsonl", '"a"\n{"text": 3}', "document 1 must have a string as its 'text', got"),
        ("d.jsonl", '{"prompt": ["a"], "answer": "b"}', "document 0 .* 'prompt'"),
        ("d.jsonl", '{"prompt": "a", "answer": null}', "document 0 .* 'answer'"),
        ("d.jsonl", '{"instruction": 1, "output": "b"}', "document 0 .* 'instruction'"),
        ("d.jsonl", '{"instruction": "a", "input": 1, "output": "b"}', "document 0 .* 'input'"),
        ("d.jsonl", '{"instruction": "a", "output": {}}', "document 0 .* 'output'"),
        ("d.jsonl", '{"messages": "hello"}', "document 0 must have a list of turns, got 'hello'"),
        ("d.jsonl", '{"messages": []}', "document 0 must have a list of turns"),
        ("d.jsonl", '{"messages": ["a"]}', "document 0, turn 0 .* 'role'"),
        ("d.jsonl", '{"messages": [{"role": "user"}]}', "document 0, turn 0 .* 'content'"),
        (
            "d.jsonl",
            '{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}',
            "document 0, turn 0 .* 'content'",
        ),
        ("d.jsonl", '{"conversations": {"from": "human"}}', "document 0 must have a list of turns"),
        ("d.jsonl", '{"conversations": ["a", {"from": "gpt"}]}', "document 0, turn 0 .* 'from'"),
        ("d.jsonl", '{"conversations": ["a", 2]}', "document 0, turn 0 .* 'from'"),
        (
            "d.jsonl",
            '"a"\n{"conversations": [{"from": "user", "value": "a"}, {"from": "gpt", "value": 2}]}',
            "document 1, turn 1 .* 'value'",
        ),
        (
            "d.jsonl",
            '{"conversations": [{"from": "tool", "value": "a"}]}',
            "document 0, turn 0 must be from one of human, user, .*, got 'tool'",
        ),
    ],
)
def test_other_documents_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_documents(tmp_path / name)


# ------------------------------------------------------------------------------ the command line


@pytest.fixture(scope="module")
def saved(model, tokenizer, tmp_path_factory):
    """A folder with the model, texts, and questions."""
    folder = tmp_path_factory.mktemp("llm")
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    texts = [{"text": " ".join(rng.choice(WORDS[4:], 20))} for _ in range(30)]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    blocks = (f"what is it {word}\nyes\n" for word in WORDS[14:22])
    (folder / "questions.txt").write_text("\n".join(blocks))
    return folder


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_from_documents_to_an_answer(run, saved, model):
    table, head = saved / "table", saved / "head"
    code, _, err = run("llm", "collect", saved / "model", saved / "texts.jsonl", "-o", table)
    assert code == 0, err
    assert "570 tokens of 30 documents" in err
    assert len(open_table(table)) == 570
    code, out, err = run("llm", "fit", table, "--head", "global", "--json", "-o", head)
    assert code == 0, err
    told = json.loads(out)
    fitted = cal.load(head)
    assert told["figures"]["global"] == fitted.figures["global"]
    assert told["figures"]["global"]["brier"] < told["figures"]["before"]["brier"]

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, out, err = run("llm", "evaluate", table, "--head", head, "--level", "0", "--json")
    assert code == 0, err
    assert "warning: the head was trained on tokens of this table" in err
    found = json.loads(out)
    with pytest.warns(UserWarning, match="trained on tokens of this table"):
        claims = token_claims(open_table(table), fitted)
    assert found["after"]["metrics"]["nll"]["value"] == pytest.approx(claims.nll.mean())
    assert found["before"]["metrics"]["nll"]["value"] > found["after"]["metrics"]["nll"]["value"]

    code, out, err = run("llm", "ask", saved / "model", PROMPTS[0], "--head", head, "--most", "4")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[-1].startswith("confidence ")
    code, abstained, _ = run(
        "llm", "ask", saved / "model", PROMPTS[0], "--head", head, "--least", "1.0"
    )
    assert code == 0
    assert abstained.startswith("no answer")

    rng = np.random.default_rng(0)
    answers = [rng.beta(4, 1, size=3) for _ in range(600)]
    right = rng.random(600) < answer_confidence(answers) / 2
    mapped = AnswerCalibrator().fit(answers[:300], right[:300])
    cal.save(mapped, saved / "mapped.json")
    told = ["llm", "ask", saved / "model", PROMPTS[0], "--answers", saved / "mapped.json"]
    code, out, err = run(*told)
    assert code == 0, err
    (answer,) = ask(*load_model(saved / "model"), [PROMPTS[0]], most=64)
    chance = float(mapped.predict([answer.probs])[0])
    assert out.splitlines()[-1] == f"confidence {100 * chance:.0f} %"
    found = mapped.control(answers[300:], right[300:], max_error=0.05)
    cal.save(mapped, saved / "mapped.json")
    assert "no confidence was enough" in run(*told)[1]
    mapped.threshold_ = found._replace(threshold=chance + 0.01)
    cal.save(mapped, saved / "mapped.json")
    for more in ([], ["--least", chance / 2]):
        assert f"below the {100 * (chance + 0.01):.0f} % asked for" in run(*told, *more)[1]
    lengths = [one.probs.size for one in ask(*load_model(saved / "model"), PROMPTS, most=64)]
    longest = int(np.argmax(lengths))
    cut = ["--most", lengths[longest] - 1]
    code, out, _ = run("llm", "ask", saved / "model", PROMPTS[longest], *cut)
    assert out.splitlines()[-1].endswith("tokens: --most cut the answer")
    code, _, err = run(*told[:4], "--least", "nan")
    assert code == 2
    assert "from 0 to 1, got nan" in err

    questions = ["--model", saved / "model", "--head", head, "--shots", "1", "--level", "0"]
    code, out, err = run("llm", "evaluate", saved / "questions.txt", *questions)
    assert code == 0, err
    assert "7 answers" in out
    assert "before" in out
    assert "after" in out


def said(run, *arguments):
    """Confidence in percent at the end of what the command wrote, and all of it."""
    code, out, err = run("llm", "ask", *arguments)
    assert code == 0, err
    return out.splitlines()[-1], out


def percent(chance):
    return f"confidence {100 * chance:.0f} %"


@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize("chat", [False, True])
def test_confidence_by_a_second_prompt(run, saved, model, tokenizer, tmp_path, chat):
    folder = saved / "model"
    if chat:
        folder = tmp_path / "chat"
        model.save_pretrained(folder)
        talking = copy.deepcopy(tokenizer)
        talking.chat_template = "{{ '<s> red ' + messages[0]['content'] + ' blue' }}"
        talking.save_pretrained(folder)

    def form(text):
        return f"<s> red {text} blue" if chat else text

    (answer,) = ask(model, tokenizer, [form(PROMPTS[0])], most=64)
    prompt = form(verdict_prompt(Question(PROMPTS[0], ()), answer.text))
    chance = true_by_hand(model, tokenizer, prompt)
    assert percent(chance) != percent(answer.confidence)
    second = (folder, PROMPTS[0], "--how", "p_true")
    assert said(run, *second)[0] == percent(chance)
    cal.save(FittedHead.of_temperature(3.0, mark_of(model)), tmp_path / "head")
    softer = percent(true_by_hand(model, tokenizer, prompt, 3.0))
    assert said(run, *second, "--head", tmp_path / "head")[0] == softer != percent(chance)
    assert said(run, *second, "--least", min(1, chance + 1e-5))[1].startswith("no answer")
    assert not said(run, *second, "--least", chance - 1e-5)[1].startswith("no answer")
    assert said(run, *second, "--plain")[0] == said(run, saved / "model", *second[1:])[0]

    rng = np.random.default_rng(0)
    claims = rng.random(400)
    mapped = AnswerCalibrator(how=None).fit(claims, rng.random(400) < claims / 2)
    cal.save(mapped, tmp_path / "mapped.json")
    told = said(run, *second, "--answers", tmp_path / "mapped.json")[0]
    assert told == percent(float(mapped.predict([chance])[0]))


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_a_map_gets_what_it_was_fitted_on(run, saved, tmp_path):
    rng = np.random.default_rng(0)
    claims, right = rng.random(400), rng.random(400) < 0.5
    cal.save(AnswerCalibrator(how=None).fit(claims, right), tmp_path / "other.json")
    least = AnswerCalibrator("minimum").fit(list(claims[:, None]), right)
    cal.save(least, tmp_path / "least.json")
    start = ("llm", "ask", saved / "model", PROMPTS[0], "--answers")
    code, _, err = run(*start, tmp_path / "other.json")
    assert code == 2
    assert "say which, by --how" in err
    code, _, err = run(*start, tmp_path / "least.json", "--how", "p_true")
    assert code == 2
    assert "fitted on minimum confidences, --how asks for p_true" in err
    assert run(*start, tmp_path / "least.json", "--how", "minimum")[0] == 0


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_rules_of_the_command(run, saved, model, tokenizer):
    assert (*get_args(Aggregator), "p_true") == RULES
    (answer,) = ask(model, tokenizer, [PROMPTS[0]], most=5)
    start = (saved / "model", PROMPTS[0], "--most", "5")
    for rule in get_args(Aggregator):
        wanted = percent(float(answer_confidence([answer.probs], rule)[0]))
        assert said(run, *start, "--how", rule)[0] == wanted


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_questions_are_measured_by_a_second_prompt(run, saved, model, tokenizer, tmp_path):
    source = saved / "questions.txt"
    cal.save(FittedHead.of_temperature(3.0, mark_of(model)), tmp_path)
    start = ("llm", "evaluate", source, "--model", saved / "model", "--head", tmp_path)
    options = ("--shots", "0", "--level", "0", "--json")
    code, out, err = run(*start, *options, "--how", "p_true")
    assert code == 0, err
    found, plain = json.loads(out), json.loads(run(*start, *options)[1])
    questions = read_questions(source)
    answers = ask(model, tokenizer, [short_prompt(question) for question in questions])
    pairs = list(zip(questions, answers, strict=True))
    right = np.array([exact_match(answer.text, question.references) for question, answer in pairs])
    for name, temperature in {"before": 1.0, "after": 3.0}.items():
        prompts = [verdict_prompt(question, answer.text) for question, answer in pairs]
        chances = [true_by_hand(model, tokenizer, prompt, temperature) for prompt in prompts]
        brier = np.mean((np.array(chances) - right) ** 2)
        assert found[name]["metrics"]["brier"]["value"] == pytest.approx(brier, abs=1e-5)
        assert plain[name]["metrics"]["brier"]["value"] != pytest.approx(brier, abs=1e-3)


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_each_process_tells_of_its_own_documents(run, saved, tmp_path, monkeypatch):
    (tmp_path / "texts.txt").write_text("\n\n".join(["one two three", "red", *["is it"] * 5]))
    monkeypatch.setenv("WORLD_SIZE", "3")
    told = []
    for rank in "012":
        monkeypatch.setenv("RANK", rank)
        command = ("llm", "collect", saved / "model", tmp_path / "texts.txt")
        code, _, err = run(*command, "-o", tmp_path / "table")
        assert code == 0, err
        told.append(err.splitlines()[-1].split(": ")[1].split(";")[0])
    # nothing predicts the only token of the second document
    assert told == [f"{tokens} tokens of 2 of 7 documents" for tokens in (3, 2, 2)]
    assert len(open_table(tmp_path / "table")) == 7


@pytest.fixture(scope="module")
def lettered(saved):
    """A folder of MMLU."""
    folder = saved / "mmlu"
    folder.mkdir()
    for split, texts in {"dev": ["two", "red"], "test": ["what is it", "is it", "it"]}.items():
        rows = "".join(f"{text},one,two,three,four,{n}\n" for n, text in enumerate(texts))
        head = "question,choice0,choice1,choice2,choice3,answer\n"
        (folder / f"numbers_{split}.csv").write_text(head + rows)
    return folder


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_several_sources_are_one_list(run, saved, lettered, model, tokenizer):
    sources = [saved / "questions.txt", lettered]
    start = ("--model", saved / "model", "--shots", "1", "--level", "0")
    code, out, err = run("llm", "evaluate", *sources, *start, "--json")
    assert code == 0, err
    both = json.loads(out)
    assert [one["source"] for one in both] == list(map(str, sources))
    for source, one in zip(sources, both, strict=True):
        assert json.loads(run("llm", "evaluate", source, *start, "--json")[1]) == one
    shown = run("llm", "evaluate", *sources, *start)[1]
    assert shown.index(f"{sources[0]}: 7 answers") < shown.index(f"{lettered}: 3 answers")
    questions = read_mmlu(lettered)
    logits, labels = ask_choices(
        model, tokenizer, questions, shots=read_mmlu(lettered, "dev")[:1], prefix=" "
    )
    right = float((logits.argmax(-1) == labels).mean())
    assert both[1]["before"]["metrics"]["accuracy"]["value"] == pytest.approx(right)


@pytest.mark.parametrize("shots", [8, 11])
def test_questions_must_be_left_after_the_solved_ones(run, saved, shots):
    start = ("llm", "evaluate", saved / "questions.txt", "--model", "none", "--shots", shots)
    code, _, err = run(*start)
    assert code == 2
    told = " ".join(err.split())
    assert f"has 8 questions, and --shots takes {shots}" in told
    assert "lower --shots" in told


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_options_without_a_use_are_refused(run, saved, lettered):
    for option in (("--how", "first"), ("--limit", "3"), ("--shots", "5")):
        code, _, err = run("llm", "evaluate", saved / "table", *option)
        assert code == 2
        assert f"{option[0]} is for questions" in " ".join(err.split())
    start = ("llm", "evaluate", saved / "questions.txt", lettered, "--model", "none")
    code, _, err = run(*start, "--how", "first")
    assert code == 2
    assert "--how is for written answers" in err


def test_epochs_are_those_of_python():
    (option,) = (one for one in fit.params if one.name == "epochs")
    assert option.default == inspect.signature(fit_head).parameters["epochs"].default


@pytest.mark.slow
def test_two_processes_collect_what_one_does(run, saved, tmp_path):
    arguments = ["llm", "collect", saved / "model", saved / "texts.jsonl", "-o"]
    code, _, err = run(*arguments, tmp_path / "one")
    assert code == 0, err
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, "-m", "calibrant", *arguments, tmp_path / "two"]
    env = {**os.environ, "PYTHONPATH": str(Path(calibrant.__file__).parents[1])}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        list(map(str, command)), env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["rank-0", "rank-1"]
    one, two = open_table(tmp_path / "one"), open_table(tmp_path / "two")
    np.testing.assert_array_equal(one.documents, two.documents)
    # batches differ, and with them the rounding of sums
    np.testing.assert_allclose(one.hidden(), two.hidden(), rtol=2e-3, atol=2e-3)
    mine, theirs = one.records(), two.records()
    np.testing.assert_array_equal(mine.labels, theirs.labels)
    for name in ("table", "own_gap", "mean_gap", "top"):
        np.testing.assert_allclose(getattr(mine, name), getattr(theirs, name), rtol=1e-4, atol=1e-4)


@pytest.fixture
def with_gpus(monkeypatch):
    monkeypatch.setattr(_models, "unusable", lambda device: "")


@pytest.mark.usefixtures("with_gpus")
def test_each_process_has_a_gpu_of_its_own(monkeypatch):
    assert str(own_device("cuda")) == "cuda"
    monkeypatch.setenv("LOCAL_RANK", "3")
    names = ("cuda", "cuda:1", "cpu", torch.device("cuda"))
    assert [str(own_device(name)) for name in names] == ["cuda:3", "cuda:1", "cpu", "cuda:3"]


def test_a_device_or_precision_that_is_not_there(run, saved):
    for option in (("--device", "gpu"), ("--device", "cuda:77"), ("--dtype", "float17")):
        code, _, err = run("llm", "ask", str(saved / "model"), "Who?", *option)
        assert code
        assert "cannot be used here" in err or "dtype must be auto, float32" in err
        assert "Traceback" not in err


@pytest.mark.parametrize("path", ["./nowhere", "nowhere/", "nowhere.gguf", "/nowhere/model"])
def test_a_model_that_is_not_there(run, path):
    code, _, err = run("llm", "ask", path, "Who?")
    assert code
    assert f"there is no model at {path}" in err


def test_a_blank_question_is_refused(run, saved):
    code, _, err = run("llm", "ask", str(saved / "model"), "  ")
    assert code == 2
    assert "the question is empty" in err


def test_questions_without_a_model(run, tmp_path):
    (tmp_path / "questions.txt").write_text("Who?\n")
    code, _, err = run("llm", "evaluate", str(tmp_path / "questions.txt"))
    assert code == 2
    assert "is a file: questions need --model, tables are folders" in err


@pytest.mark.usefixtures("with_gpus")
@pytest.mark.filterwarnings("ignore")  # of transformers
def test_models_are_moved_to_the_device_of_their_process(saved, model, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    went = []

    def to(self, place):
        went.append(str(place))
        return self

    monkeypatch.setattr(transformers.LlamaForCausalLM, "to", to)
    load_model(saved / "model", device="cuda")
    collect(model, [{"input_ids": [4, 5]}], tmp_path, device="cuda")
    assert went == ["cuda:3", "cuda:3"]


def test_a_head_of_another_model_is_refused(run, saved, model, tmp_path):
    torch.manual_seed(1)
    other = transformers.LlamaForCausalLM(model.config)
    fitted = FittedHead.of_temperature(2.0, mark_of(other))
    with pytest.raises(ValueError, match="model"):
        fitted.mark.check(mark_of(model), "the table")


def test_ask_refuses_what_the_model_has_no_room_for(model, tokenizer):
    positions = model.config.max_position_embeddings
    with pytest.raises(ValueError, match=f"need more than the {positions} positions"):
        ask(model, tokenizer, [PROMPTS[0]], most=positions)
    with pytest.raises(ValueError, match="batch must be 1 or more"):
        ask(model, tokenizer, [PROMPTS[0]], batch=0)


def test_ask_follows_no_rule_of_the_model_but_the_likeliest_token(model, tokenizer, monkeypatch):
    (plain,) = ask(model, tokenizer, [PROMPTS[0]], most=8)
    monkeypatch.setattr(model.generation_config, "repetition_penalty", 5.0)
    monkeypatch.setattr(model.generation_config, "no_repeat_ngram_size", 1)
    (again,) = ask(model, tokenizer, [PROMPTS[0]], most=8)
    assert again.text == plain.text
    np.testing.assert_array_equal(again.probs, plain.probs)


def test_the_line_that_is_no_json_is_named(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n\n{"text": \n')
    with pytest.raises(ValueError, match=r"line 3 of .*bad\.jsonl is not valid JSON"):
        read_documents(tmp_path / "bad.jsonl")


def test_files_of_other_editors(tmp_path):
    (tmp_path / "marked.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    assert read_documents(tmp_path / "marked.jsonl") == ["a"]
    (tmp_path / "old.txt").write_bytes("Frage: Gr\u00f6\u00dfe?\nAntwort".encode("latin-1"))
    for read in (read_documents, read_questions):
        with pytest.raises(ValueError, match=r"old\.txt is no text in UTF-8"):
            read(tmp_path / "old.txt")
