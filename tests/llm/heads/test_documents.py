"""Documents as token ids: texts, pairs, and chats with every kind of template."""

from typing import Any

import numpy as np
import pytest

from calibrant.llm.answers.asking import ask
from calibrant.llm.heads.collect import collect
from calibrant.llm.heads.documents import BadDocument, _encode_documents
from tests.support.language_models import (
    assert_same_table,
    tokenizers,
    transformers,
)

WORDS = [
    *("user", "assistant", "system", "hello", "there", "how", "are", "you"),
    *("fine", "thanks", "good", "bye", "what", "is", "it"),
]


# <nl> is the line break after a turn, which belongs to the answer only where nothing else ends it
CHATML = (
    "{% for m in messages %}<|start|> {{ m['role'] }} {{ m['content'] }} <|end|> <nl> "
    "{% endfor %}{% if add_generation_prompt %}<|start|> assistant {% endif %}"
)


MARKED = (
    "{% for m in messages %}<|start|> {{ m['role'] }} {% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }} <|end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }} <|end|>{% endif %} <nl> {% endfor %}"
)


FORGETFUL = (  # only the last answer has thoughts, as in Qwen3
    "{% for m in messages %}<|start|> {{ m['role'] }} "
    "{% if loop.last and m['role'] == 'assistant' %}<think> {% endif %}"
    "{{ m['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|start|> assistant {% endif %}"
)


PHI3 = (  # with an end of all text
    "{% for m in messages %}<|start|> {{ m['role'] }} {{ m['content'] }} <|end|> <nl> {% endfor %}"
    "{% if add_generation_prompt %}<|start|> assistant {% else %}</s>{% endif %}"
)


LLAMA3 = (  # as it came out at first: always ready for an answer
    "{% for m in messages %}<|start|> {{ m['role'] }} {{ m['content'] | trim }} <|end|> "
    "{% endfor %}<|start|> assistant "
)


ENDLESS = (  # special tokens begin turns, and none ends them
    "{% for m in messages %}<|start|> {{ m['role'] }} {{ m['content'] }} <nl> {% endfor %}"
    "{% if add_generation_prompt %}<|start|> assistant {% else %}</s>{% endif %}"
)


def made_tokenizer(around):
    names = ["<pad>", "<s>", "</s>", "<unk>", "<|start|>", "<|end|>", "<nl>", "<think>", *WORDS]
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>")
    )
    inner.decoder = tokenizers.decoders.Replace("<nl>", "\n")
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["<s>", "</s>", "<|start|>", "<|end|>"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single=around, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="module")
def tokenizer():
    return made_tokenizer("<s> $A")


CHAT = [
    {"role": "user", "content": "hello there"},
    {"role": "assistant", "content": "how are you"},
    {"role": "user", "content": "fine thanks"},
    {"role": "assistant", "content": "good bye"},
]


def words(tokenizer, table):
    return " ".join(tokenizer.convert_ids_to_tokens(table.records().labels.tolist()))


def test_every_token_of_a_text_counts_but_the_first(model, tokenizer, tmp_path):
    table = collect(model, ["hello there", "what is it"], tmp_path, tokenizer=tokenizer)
    assert words(tokenizer, table) == "hello there what is it"
    np.testing.assert_array_equal(table.documents, [0, 0, 1, 1, 1])


def test_only_the_answer_of_a_pair_counts(model, tokenizer, tmp_path):
    pairs = [("hello there", "how are you"), ["what is it", "fine"]]
    table = collect(model, pairs, tmp_path, tokenizer=tokenizer)
    assert words(tokenizer, table) == "how are you fine"
    ids = [[1, 11, 12, 13, 14, 15], [1, 20, 21, 22, 16]]  # one <s> only
    ready = [
        {"input_ids": row, "labels": [-100] * at + row[at:]}
        for row, at in zip(ids, (3, 4), strict=True)
    ]
    assert_same_table(table, collect(model, ready, tmp_path / "ready"))


@pytest.mark.parametrize("text", ["hello there", "<s> hello there", "<s>"])
def test_a_text_begins_once(tokenizer, text):
    wanted = [1, 11, 12] if "hello" in text else [1]
    plain, pair = _encode_documents([text, (text, "<s> you")], tokenizer, 99)
    assert plain.ids.tolist() == wanted
    assert pair.ids.tolist() == [*wanted, 1, 15]


@pytest.mark.parametrize("around", ["<s> $A </s>", "$A </s>"])
def test_prompts_have_no_end_token(model, tokenizer, around):
    ending = made_tokenizer(around)
    start = [1] if "<s>" in around else []
    pairs = ("hello </s>", "you"), ("", "you"), ("<s> hello", "you")
    text, pair, empty, rendered = _encode_documents(["it", *pairs], ending, 99)
    assert rendered.ids.tolist() == [1, 11, 15]
    assert text.ids.tolist() == [*start, 22, 2]  # a text as the tokenizer has it
    assert pair.ids.tolist() == [*start, 11, 2, 15]
    assert pair.labels.tolist() == [-100] * len(start) + [-100, -100, 15]
    assert empty.ids.tolist() == [*start, 15]
    plain = tokenizer if start else made_tokenizer("$A")
    (found,), (wanted,) = (
        ask(model, each, ["what is it"], max_new_tokens=4) for each in (ending, plain)
    )
    assert found.token_texts == wanted.token_texts
    np.testing.assert_array_equal(found.probs, wanted.probs)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (PHI3, "how are you <|end|> good bye <|end|>"),
        (LLAMA3, "how are you <|end|> good bye <|end|>"),
        (ENDLESS, "how are you good bye <nl> </s>"),
        (CHATML, "how are you <|end|> good bye <|end|>"),
        (MARKED, "how are you <|end|> good bye <|end|>"),
        (FORGETFUL, "<think> good bye <|end|>"),
        (CHATML.replace(" <|end|>", ""), "how are you <nl> good bye <nl>"),
    ],
)
def test_only_the_assistant_counts_in_a_chat(model, tokenizer, tmp_path, template, said):
    tokenizer.chat_template = template
    table = collect(model, [CHAT], tmp_path, tokenizer=tokenizer)
    assert words(tokenizer, table) == said


@pytest.mark.parametrize("template", [CHATML, PHI3, LLAMA3])
@pytest.mark.parametrize(
    ("turns", "said"),
    [
        (CHAT[:3], "how are you <|end|>"),
        (CHAT[1:], "how are you <|end|> good bye <|end|>"),
        (CHAT[1:3], "how are you <|end|>"),
        ([CHAT[0], {"role": "assistant", "content": ""}, *CHAT[2:]], "<|end|> good bye <|end|>"),
        (
            [CHAT[0], {"role": "assistant", "content": " are <|end|> you "}, CHAT[2]],
            "are <|end|> you <|end|>",
        ),
        ([*CHAT[:2], *CHAT[:2]], "how are you <|end|> how are you <|end|>"),
        ([*CHAT[:2], CHAT[3]], "how are you <|end|> good bye <|end|>"),
    ],
    ids=["ends with the user", "begins with it", "both", "empty", "special", "twice", "two turns"],
)
def test_answers_are_found_wherever_they_are(tokenizer, template, turns, said):
    tokenizer.chat_template = template
    (found,) = _encode_documents([turns], tokenizer, 99)
    kept = found.labels[found.labels != -100]
    assert " ".join(tokenizer.convert_ids_to_tokens(kept.tolist())) == said
    np.testing.assert_array_equal(kept, found.ids[found.labels != -100])


@pytest.mark.parametrize("template", [CHATML, PHI3])
def test_thoughts_inside_an_answer_may_be_dropped(tokenizer, template):
    tokenizer.chat_template = template.replace("m['content']", "m['content'].split('</think>')[-1]")
    thinking = [CHAT[0], {**CHAT[1], "content": "how </think> are you"}, *CHAT[2:]]
    (found,) = _encode_documents([thinking], tokenizer, 99)
    kept = found.labels[found.labels != -100].tolist()
    said = "are you <|end|> good bye <|end|>"
    assert " ".join(tokenizer.convert_ids_to_tokens(kept)) == said


@pytest.mark.parametrize("template", [CHATML, PHI3, LLAMA3])
@pytest.mark.parametrize(
    "rendered",
    [
        "m['content']",
        "m['content'] | replace('<think>', '<think> <nl>') | replace('</think>', '<nl> </think>')",
    ],
    ids=["unchanged", "with line breaks"],
)
def test_thoughts_may_contain_the_answer(tokenizer, template, rendered):
    tokenizer.chat_template = template.replace("m['content']", rendered)
    thinking = [CHAT[0], {**CHAT[1], "content": "<think> are you </think> are you"}, CHAT[2]]
    (found,) = _encode_documents([thinking], tokenizer, 99)
    kept = found.labels[found.labels != -100].tolist()
    said = [word for word in tokenizer.convert_ids_to_tokens(kept) if word != "<nl>"]
    assert " ".join(said) == "<think> are you <unk> are you <|end|>"


LLAMA2 = (  # nothing precedes an answer
    "{% for m in messages %}{% if m['role'] == 'user' %}<|start|> {{ m['content'] }} <|end|>"
    "{% else %} {{ m['content'] }} </s>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_chat_may_begin_with_an_answer_without_anything_before_it(tokenizer, count):
    tokenizer.chat_template = LLAMA2
    (found,) = _encode_documents([CHAT[1 : 1 + count]], tokenizer, 99)
    kept = found.labels[found.labels != -100].tolist()
    said = "how are you </s> good bye </s>" if count == 3 else "how are you </s>"
    assert " ".join(tokenizer.convert_ids_to_tokens(kept)) == said


@pytest.mark.parametrize("template", [CHATML, PHI3, LLAMA3])
def test_empty_keys_of_turns_are_ignored(tokenizer, template):
    tokenizer.chat_template = template
    filled = [{**turn, "tool_calls": None, "name": ""} for turn in CHAT]
    wanted, found = _encode_documents([CHAT, filled], tokenizer, 99)
    np.testing.assert_array_equal(found.labels, wanted.labels)


def test_a_template_that_wants_the_user_first(tokenizer):
    tokenizer.chat_template = (
        "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
        "{{ raise_exception('no user') }}{% endif %}" + CHATML
    )
    (found,) = _encode_documents([CHAT[1:]], tokenizer, 99)  # the first answer cannot be told apart
    kept = found.labels[found.labels != -100].tolist()
    assert " ".join(tokenizer.convert_ids_to_tokens(kept)) == "good bye <|end|>"


def test_calls_of_tools_count(tokenizer):
    tokenizer.chat_template = CHATML.replace(
        "<|end|>", "{% if m['calls'] %}<|start|> {{ m['calls'] }} {% endif %}<|end|>"
    ).replace(" <nl>", "")
    calling = [CHAT[0], {**CHAT[1], "calls": "what is"}, CHAT[2]]
    for turns in (calling, calling[:2]):
        (found,) = _encode_documents([turns], tokenizer, 99)
        kept = found.labels[found.labels != -100].tolist()
        wanted = "how are you <|start|> what is <|end|>"
        assert " ".join(tokenizer.convert_ids_to_tokens(kept)) == wanted


def splitting(names, pattern):
    """A tokenizer of these names, cut out by a pattern, which puts nothing between them."""
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({name: i for i, name in enumerate(names)})
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    inner.add_special_tokens(["<end>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize(("answer", "said"), [("how", "how<end>"), ("\n\nhow", "how<end>")])
def test_a_token_of_prompt_and_answer_does_not_count(answer, said):
    names = ["\n", "\n\n\n", "user", "assistant", "how", "you", "<end>"]
    breaking = splitting(names, r"\n+")
    breaking.chat_template = (
        "{% for m in messages %}{{ m['role'] + '\n' + m['content'] + '<end>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
    )
    chat: list[Any] = [
        {"role": "user", "content": "you"},
        {"role": "assistant", "content": answer},
    ]
    (found,) = _encode_documents([chat], breaking, 99)
    assert breaking.decode(found.labels[found.labels != -100]) == said
    breaking.chat_template = breaking.chat_template.replace("m['content']", "m['content'][0].text")
    parts = [{**turn, "content": [{"text": turn["content"]}]} for turn in chat]
    (same,) = _encode_documents([parts], breaking, 99)
    np.testing.assert_array_equal(same.labels, found.labels)


def test_a_chat_needs_to_know_where_its_tokens_are(tokenizer, monkeypatch):
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    tokenizer.chat_template = MARKED
    assert len(_encode_documents([CHAT], tokenizer, 99)) == 1  # the template marks the answers
    tokenizer.chat_template = CHATML
    with pytest.raises(ValueError, match="does not say where its tokens are in the text"):
        _encode_documents([CHAT], tokenizer, 99)


def test_spaces_belong_to_the_words_after_them():
    names = ["user:", "assistant:", " how", " you", "<end>"]
    blank = splitting(names, " [a-z]+")
    blank.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<end>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    roles = ("assistant", "user", "assistant")
    chat = [{"role": role, "content": "how"} for role in roles]
    (found,) = _encode_documents([chat], blank, 99)
    assert found.labels.tolist() == [-100, 2, 4, -100, -100, -100, -100, 2, 4]


def test_chats_and_texts_mix(model, tokenizer, tmp_path):
    tokenizer.chat_template = CHATML
    chat = [{"role": "system", "content": "it is"}, *CHAT[:2]]
    table = collect(model, ["hello", chat, ("you", "are")], tmp_path, tokenizer=tokenizer)
    assert words(tokenizer, table) == "hello how are you <|end|> are"
    np.testing.assert_array_equal(table.documents, [0, 1, 1, 1, 1, 2])


def test_a_chat_without_answer_is_refused(model, tokenizer, tmp_path):
    tokenizer.chat_template = CHATML
    with pytest.raises(ValueError, match=r"documents\[1\] has no turn of the assistant"):
        collect(model, ["hello there", CHAT[:1]], tmp_path, tokenizer=tokenizer)


def test_a_chat_needs_a_template(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"documents\[1\] is a chat.* no chat template.*prompts"):
        _encode_documents(["hello", CHAT], tokenizer, 99)


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_chat_that_the_template_refuses_is_named(tokenizer, template):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}" + template
    with pytest.raises(BadDocument, match=r"documents\[1\] is refused.*: roles must alternate"):
        _encode_documents(["hello", CHAT], tokenizer, 99)


@pytest.mark.parametrize(
    "document",
    [
        "hello \ud83d",
        ("hello", "\udc00"),
        [CHAT[0], {"role": "assistant", "content": "how \ud800"}],
    ],
)
def test_half_characters_are_named(tokenizer, document):
    tokenizer.chat_template = CHATML
    with pytest.raises(BadDocument, match=r"documents\[1\] has half of a character, '\\ud"):
        _encode_documents(["hello", document], tokenizer, 99)


def test_encoded_documents_are_taken_as_they_are(tokenizer):
    ready = _encode_documents(["hello there", ("how", "are you")], tokenizer, 99)
    again = _encode_documents(ready, None, 3)
    for one, other in zip(ready, again, strict=True):
        np.testing.assert_array_equal(one.ids[:3], other.ids)
        np.testing.assert_array_equal(one.labels[:3], other.labels)
