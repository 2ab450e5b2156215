"""Documents from files."""

import json

import pytest

from calibrant.llm.answers.questions import (
    read_questions,
)
from calibrant.llm.tokens.reading import read_documents


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
        ("d.json", "[]", "one document or more"),
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


def test_invalid_json_line_is_named(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n\n{"text": \n')
    with pytest.raises(ValueError, match=r"line 3 of .*bad\.jsonl is not valid JSON"):
        read_documents(tmp_path / "bad.jsonl")


def test_json_too_deep_for_python_is_named(tmp_path):
    (tmp_path / "deep.jsonl").write_text('{"text": "a"}\n' + "[" * 100_000)
    with pytest.raises(ValueError, match=r"line 2 of .*deep\.jsonl is not valid JSON"):
        read_documents(tmp_path / "deep.jsonl")


def test_encodings_of_files(tmp_path):
    (tmp_path / "marked.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    assert read_documents(tmp_path / "marked.jsonl") == ["a"]
    (tmp_path / "old.txt").write_bytes("Frage: Gr\u00f6\u00dfe?\nAntwort".encode("latin-1"))
    for read in (read_documents, read_questions):
        with pytest.raises(ValueError, match=r"old\.txt is not UTF-8 text"):
            read(tmp_path / "old.txt")
