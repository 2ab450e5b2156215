"""Documents from files."""

import json

import pytest

from calibrant.llm.answers.questions import (
    read_questions,
)
from calibrant.llm.heads.reading import _convert_documents, read_documents


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
        {"question": "a", "answer": "b"},
        {"prompt": "a", "answer": "b"},
        {"prompt": "a", "completion": "b"},
        {
            "prompt": [{"role": "user", "content": "a"}],
            "completion": [{"role": "assistant", "content": "b"}],
        },
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a "}, {"text": "c"}]},
                {"role": "assistant", "content": "b", "name": "x"},
            ]
        },
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
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        ("a", "b"),
        ("a", "b"),
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        [
            {"role": "user", "content": "a c"},
            {"role": "assistant", "content": "b", "name": "x"},
        ],
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
        ("d.jsonl", "\n \n", "one document or more"),
        ("d.txt", "\n \n", "one document or more"),
        (
            "d.json",
            '["a", 3]',
            r"document 2 of .*d\.json must be one of .*, got int; correct it or",
        ),
        ("d.json", "[3]", r"got int; correct it$"),
        ("d.jsonl", '{"a": 1}', r"line 1 of .* must be one of .*, got the keys a"),
        ("d.jsonl", "3", "got int"),
        ("d.csv", "x", r"must be \.jsonl, \.json or \.txt"),
        ("d.jsonl", '"a"\n{"text": 3}', "line 2 of .* must have a string as its 'text', got"),
        ("d.jsonl", '{"prompt": ["a"], "answer": "b"}', "line 1 of .* .* 'prompt'"),
        ("d.jsonl", '{"prompt": "a", "answer": null}', "line 1 of .* .* 'answer'"),
        ("d.jsonl", '{"instruction": 1, "output": "b"}', "line 1 of .* .* 'instruction'"),
        ("d.jsonl", '{"instruction": "a", "input": 1, "output": "b"}', "line 1 of .* .* 'input'"),
        ("d.jsonl", '{"instruction": "a", "output": {}}', "line 1 of .* .* 'output'"),
        ("d.jsonl", '{"messages": "hello"}', "line 1 of .* must have a list of turns, got 'hello'"),
        ("d.jsonl", '{"messages": []}', "line 1 of .* must have a list of turns"),
        ("d.jsonl", '{"messages": ["a"]}', "line 1 of .*, turn 1 .* 'role'"),
        ("d.jsonl", '{"messages": [{"role": "user"}]}', "line 1 of .*, turn 1 .* 'content'"),
        (
            "d.jsonl",
            '{"messages": [{"role": "user", "content": [{"type": "image", "text": "a"}]}]}',
            "line 1 of .*, turn 1 .* 'content'",
        ),
        (
            "d.jsonl",
            '{"conversations": {"from": "human"}}',
            "line 1 of .* must have a list of turns",
        ),
        ("d.jsonl", '{"conversations": ["a", {"from": "gpt"}]}', "line 1 of .*, turn 1 .* 'from'"),
        ("d.jsonl", '{"conversations": ["a", 2]}', "line 1 of .*, turn 1 .* 'from'"),
        (
            "d.jsonl",
            '"a"\n{"conversations": [{"from": "user", "value": "a"}, {"from": "gpt", "value": 2}]}',
            "line 2 of .*, turn 2 .* 'value'",
        ),
        (
            "d.jsonl",
            '{"conversations": [{"from": "tool", "value": "a"}]}',
            "line 1 of .*, turn 1 must be from one of human, user, .*, got 'tool'",
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


BAD_LINES = (
    b'{"text": "a"}\n{"x": 1}\n\n{"text": "b"}\n{"x": 2}\n{"text": "\xff"}\n[[\n{"text": "c"}'
)


def test_every_bad_line_is_told(tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(BAD_LINES)
    with pytest.raises(
        ValueError, match=r"cannot use 4 of 7 documents of .*bad\.jsonl:"
    ) as refused:
        read_documents(file)
    _, *lines, remedy = str(refused.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines] == ["line 2, line 5", "line 6", "line 7"]
    assert "skip_bad" in remedy
    with pytest.warns(
        UserWarning, match=r"left out 4 of 7 documents of .*\n  line 2, line 5: must"
    ):
        assert read_documents(file, skip_bad=True) == ["a", "b", "c"]
    file.write_bytes(b'{"x": 1}\n' * 30)
    with pytest.raises(ValueError, match=r"line 19, line 20 and 10 more: must") as refused:
        read_documents(file, skip_bad=True)
    assert "skip_bad" not in str(refused.value)


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_only_the_documents_of_the_limit_are_read(tmp_path, suffix):
    file = tmp_path / f"d{suffix}"
    lines = (b'"a"\n', b'"b"\n') if suffix == ".jsonl" else (b"a\n\n", b"b\n\n")
    file.write_bytes(b"".join(lines) * 20_000 + b"\xff")
    assert read_documents(file, limit=3) == ["a", "b", "a"]
    with pytest.raises(ValueError, match="is not UTF-8"):
        read_documents(file)


def test_paragraphs_are_placed_by_their_first_line(tmp_path):
    (tmp_path / "d.txt").write_text("\n a\nb \n\n \nc\n")
    found = _convert_documents(
        tmp_path / "d.txt", lambda text, place: (place.split(" of ")[0], text)
    )
    assert found == [("line 2", "a\nb"), ("line 6", "c")]


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
