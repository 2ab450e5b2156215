"""Questions put to tiny models, documents from files, and the verbs of calibrant llm."""

import json

import numpy as np
import pytest
import torch

from calibrant.llm import (
    AnswerCalibrator,
    FittedHead,
    Question,
    answer_confidence,
    ask,
    ask_choices,
    choice_prompt,
    load_head,
    load_model,
    mark_of,
    open_table,
    read_documents,
    token_claims,
)

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = [
    *("<pad>", "<s>", "</s>", "<unk>", "Question:", "Answer:", "A", "B", "C", "D", "A.", "B."),
    *("C.", "D.", "one", "two", "three", "four", "red", "blue", "what", "is", "it", "yes", "no"),
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
        if token == 2:
            break
        ids = torch.cat([ids, torch.tensor([[token]])], 1)
    if tokens[-1] == 2 and len(tokens) > 1:
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
        assert answer.pieces == [tokenizer.decode([token]) for token in tokens]
        np.testing.assert_allclose(answer.probs, probs, atol=1e-5)
        assert answer.confidence == pytest.approx(float(answer_confidence([probs])[0]), abs=1e-5)
        assert answer.text == tokenizer.decode(tokens, skip_special_tokens=True).strip()


def test_without_a_head_the_probabilities_are_those_of_the_model(model, tokenizer):
    one = FittedHead.of_temperature(1.0, mark_of(model))
    plain, same = (ask(model, tokenizer, PROMPTS[:1], fitted=f, most=3)[0] for f in (None, one))
    np.testing.assert_allclose(plain.probs, same.probs)
    assert tokenizer.padding_side == "right"
    with pytest.raises(ValueError, match="a prompt at least"):
        ask(model, tokenizer, [])


def test_an_answer_ends_before_a_line_break(tokenizer, model, monkeypatch):
    monkeypatch.setattr(
        tokenizer.__class__,
        "decode",
        lambda self, ids, **_: " ".join("\n" if i == 18 else WORDS[i] for i in ids),
    )
    from calibrant.llm.answering import _length

    assert _length(tokenizer, [14, 15, 18, 16]) == 2
    assert _length(tokenizer, [18, 14, 15]) == 3  # a break before the first word does not count
    assert _length(tokenizer, [14, 2, 0]) == 1
    assert _length(tokenizer, [2]) == 1


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


def test_questions_with_different_choices_are_refused(model, tokenizer):
    fewer = Question("it", ("no",), ("yes", "no"), 1)
    with pytest.raises(ValueError, match=r"equally many choices, got \[2, 4\]"):
        ask_choices(model, tokenizer, [*QUESTIONS, fewer])


# -------------------------------------------------------------------------------------- documents


def test_documents_of_every_form(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"conversations": ["a", "b", "c"]},
        {"instruction": "a", "input": "x", "output": "b"},
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
        [{"role": "user", "content": "a\n\nx"}, {"role": "assistant", "content": "b"}],
        ("a", "b"),
        "a b",
        "plain",
    ]
    (tmp_path / "d.json").write_text(json.dumps(rows))
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
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
    fitted = load_head(head)
    assert told["figures"]["global"] == fitted.figures["global"]
    assert told["figures"]["global"]["brier"] < told["figures"]["before"]["brier"]

    code, out, err = run("llm", "evaluate", table, "--head", head, "--level", "0", "--json")
    assert code == 0, err
    found = json.loads(out)
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
    mapped.save(saved / "mapped.json")
    told = ["llm", "ask", saved / "model", PROMPTS[0], "--answers", saved / "mapped.json"]
    code, out, err = run(*told)
    assert code == 0, err
    (answer,) = ask(*load_model(saved / "model"), [PROMPTS[0]], most=64)
    chance = float(mapped.predict([answer.probs])[0])
    assert out.splitlines()[-1] == f"confidence {100 * chance:.0f} %"
    mapped.control(answers[300:], right[300:], max_error=0.05)
    mapped.save(saved / "mapped.json")
    assert run(*told)[1].startswith("no answer")

    questions = ["--model", saved / "model", "--head", head, "--shots", "1", "--level", "0"]
    code, out, err = run("llm", "evaluate", saved / "questions.txt", *questions)
    assert code == 0, err
    assert "7 answers" in out
    assert "before" in out
    assert "after" in out


def test_a_head_of_another_model_is_refused(run, saved, model, tmp_path):
    torch.manual_seed(1)
    other = transformers.LlamaForCausalLM(model.config)
    fitted = FittedHead.of_temperature(2.0, mark_of(other))
    with pytest.raises(ValueError, match="model"):
        fitted.mark.check(mark_of(model), "the table")
