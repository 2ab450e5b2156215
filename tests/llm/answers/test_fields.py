"""Confidence for each field: against slow definitions, and models with exact probabilities."""

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest

from calibrant.llm import documents_of, fields_of, fit_gate, read_log
from calibrant.llm.answers.fields import (
    Tokens,
    _allowed_prob,
    _json_leaves,
    _Leaf,
    _leaf_probs,
    _same_value,
    field_rows,
)
from calibrant.llm.answers.logprobs import _token_texts
from calibrant.llm.answers.rows import AnswerRows
from calibrant.llm.answers.signal_calibrator import fit_signals
from calibrant.llm.heads.documents import BadDocument
from tests.support.answer_logs import write_lines

NESTED = {
    "who": 'Ann "Bo" Ünal \\ \U0001f600',
    "empty": {},
    "items": [{"price": -1.5e3, "paid": True}, {"price": 12, "note": None}, [], "a/b~c", [[7]]],
    "a/b~c": {"": "blank key"},
    "text": '{"x": [1, 2]}, ',
}


# -------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_leaves_are_those_of_the_parsed_value_at_their_places(indent, ascii_only):
    text = "Here:\n```json\n" + json.dumps(NESTED, indent=indent, ensure_ascii=ascii_only) + "\n```"
    leaves = _json_leaves(text)
    assert [leaf.value for leaf in leaves] == [
        *(NESTED["who"], {}, -1500.0, True, 12, None, [], "a/b~c", 7, "blank key", NESTED["text"])
    ]
    for leaf in leaves:
        assert json.loads(text[leaf.start : leaf.end]) == leaf.value
        at: Any = NESTED
        for key in leaf.path:
            at = at[key]
        assert at == leaf.value
    assert leaves[2].pointer == "/items/0/price"
    assert leaves[2].kind == "items/*/price"
    assert leaves[9].pointer == "/a~1b~0c/"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("none", "no object"),
        ('{"a": 1', "delimiter"),
        ('{"a": {"b": 1}, "c"', "delimiter"),
        ('{"a": 1, "a": 2}', "a key twice"),
        ("[" * 100_000, "too deeply"),
    ],
)
def test_text_that_is_no_whole_json_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        _json_leaves(text)


def test_equal_values():
    assert _same_value(12, 12.0)
    assert _same_value(None, None)
    assert not _same_value(True, 1)
    assert not _same_value(0, False)
    assert not _same_value("12", 12)
    assert not _same_value(None, "")


# -------------------------------------------------------------------------------- tokens


def cut(text, rng, share=0.4):
    """Tokens of a text that is cut at random, also within characters."""
    raw = text.encode()
    at = [0, *(n for n in range(1, len(raw)) if rng.random() < share), len(raw)]
    content = [
        {"token": raw[a:b].decode("utf-8", "replace"), "bytes": list(raw[a:b])}
        for a, b in itertools.pairwise(at)
    ]
    return list(itertools.pairwise(at)), content


def test_the_tokens_of_a_leaf_are_those_that_hold_one_of_its_bytes():
    rng = np.random.default_rng(0)
    text = "Ü " + json.dumps(NESTED, ensure_ascii=False)
    leaves = _json_leaves(text)
    ranges = [
        range(len(text[: leaf.start].encode()), len(text[: leaf.end].encode())) for leaf in leaves
    ]
    for _ in range(50):
        places, content = cut(text, rng)
        texts = _token_texts(content)
        row = {"answer": text, "tokens": texts, "token_probs": rng.uniform(0.1, 1, len(texts))}
        tokens = Tokens.of(row, "it")
        for leaf, held in zip(leaves, ranges, strict=True):
            slow = [n for n, (a, b) in enumerate(places) if max(a, held[0]) < min(b, held[-1] + 1)]
            found = [*tokens.span(leaf)]
            # a part of a character just before the leaf may count
            assert found[-len(slow) :] == slow
            assert not any(texts[n] for n in found[: -len(slow)])


def test_tokens_that_straddle_quotes_and_escapes_count_once():
    answer = '{"to":"a\\"b","n":[1,20]}'
    texts = ['{"to":"a', "\\", '"b","', 'n":[', "1,", "20", "]}"]
    row = {"answer": answer, "tokens": texts, "token_probs": [0.9, 0.8, 0.7, 1, 0.6, 0.5, 0.4]}
    rows = field_rows(row)
    assert [one["token_probs"] for one in rows] == [[0.9, 0.8, 0.7], [0.6], [0.5, 0.4]]
    assert rows[0]["confidence"] == pytest.approx(0.9 * 0.8 * 0.7)


# ------------------------------------------------------------- a model of known probabilities


class CharModel:
    """Writes one of some texts, character by character, each text with its probability."""

    def __init__(self, texts):
        self.texts = texts

    def following(self, prefix):
        total = sum(p for text, p in self.texts.items() if text.startswith(prefix))
        found: dict[str, float] = {}
        for text, p in self.texts.items():
            if text.startswith(prefix) and len(text) > len(prefix):
                char = text[len(prefix)]
                found[char] = found.get(char, 0.0) + p / total
        return found

    def row(self, text):
        shown = [self.following(text[:n]) for n in range(len(text))]
        return {
            "id": "1",
            "answer": text,
            "tokens": list(text),
            "token_probs": [dist[char] for dist, char in zip(shown, text, strict=True)],
            "top_logprobs": [{c: math.log(p) for c, p in dist.items()} for dist in shown],
        }


def chance(model, prefix, leaf_text):
    """The probability that a whole value is written after a prefix, by adding up texts."""
    of = {t: p for t, p in model.texts.items() if t.startswith(prefix)}
    same = [
        p
        for text, p in of.items()
        if _json_leaves(text)[-1].start == len(prefix)
        and text[len(prefix) : _json_leaves(text)[-1].end] == leaf_text
    ]
    return sum(same) / sum(of.values())


def random_model(values, rng):
    ends = ["}", " }", "\n}"]
    texts = [f'{{"x": {json.dumps(value)}{end}' for value in values for end in ends]
    return CharModel(dict(zip(texts, rng.dirichlet(np.ones(len(texts))).tolist(), strict=True)))


@pytest.mark.parametrize(
    "values", [(1, 12, 12.5, 120, 3), ("a", "ab", "b", ""), (True, False, None), ([], {}, -1)]
)
def test_a_field_has_the_probability_of_its_value(values):
    rng = np.random.default_rng(1)
    for _ in range(5):
        model = random_model(values, rng)
        for text in model.texts:
            (row,) = field_rows(model.row(text))
            # from the first character of the value on: what comes before is the same in all texts
            exact = chance(model, '{"x": ', row["answer"])
            assert row["confidence"] == pytest.approx(exact, rel=1e-9)


def test_a_field_with_allowed_values_is_renormalised():
    rng = np.random.default_rng(2)
    allowed = ["red", "rose", "blue", "r"]
    for _ in range(10):
        model = random_model([*allowed, "green", "black", 7], rng)
        for text in model.texts:
            (row,) = field_rows(model.row(text), kinds={"x": allowed})
            value = json.loads(row["answer"])
            if value not in allowed:
                assert row["confidence"] == 0
                continue
            exact = {one: chance(model, '{"x": ', json.dumps(one)) for one in allowed}
            # what leads to black is taken to lead to blue, with which it begins
            begun = {**exact, "blue": exact["blue"] + chance(model, '{"x": ', '"black"')}
            share = exact[value] / sum(exact.values())
            if value != "blue":
                share = exact[value] / sum(begun.values())
            assert row["confidence"] == pytest.approx(share, rel=1e-9)


def test_allowed_values_of_whole_tokens():
    text = '{"s":"paid","n":1}'
    shown = [
        {'{"s":': 0.9},
        {'"paid': 0.6, '"open': 0.2, '"op': 0.1, '"p': 0.05, "null": 0.05},
        {'","': 0.9, '",': 0.05, "}": 0.05},
        {'n":': 1.0},
        {"1": 0.5, "12": 0.3, "2": 0.2},
        {"}": 0.7, "0": 0.3},
    ]
    row = {
        "answer": text,
        "tokens": ['{"s":', '"paid', '","', 'n":', "1", "}"],
        "token_probs": [0.9, 0.6, 0.9, 1.0, 0.5, 0.7],
        "top_logprobs": [{t: math.log(p) for t, p in one.items()} for one in shown],
    }
    kinds: dict[str, Any] = {"s": ["paid", "open", "part"], "n": [1, 12, 2]}
    state, number = field_rows(row, kinds=kinds)
    # "p begins paid and part alike, and null is not allowed
    mine = 0.6 * 0.9 + 0.6 * 0.05
    assert state["confidence"] == pytest.approx(mine / (mine + 0.3))
    assert number["confidence"] == pytest.approx(0.5 / (0.5 + 0.3 + 0.2))
    free = field_rows(row)
    assert free[0]["token_probs"] == pytest.approx([0.6, 0.95])
    assert free[1]["token_probs"] == pytest.approx([0.5, 0.7])


# -------------------------------------------------------------------------------- rows


def answer_of(value, probs=None, **more):
    text = json.dumps(value)
    tokens = list(text)
    probs = [0.9] * len(tokens) if probs is None else probs
    return {"answer": text, "tokens": tokens, "token_probs": probs, **more}


def test_grades_compare_with_the_truth():
    truth = {"to": "Li", "sum": 12.0, "gone": 3, "none": None, "items": [{"n": 1}]}
    said = {"to": "li", "sum": 12, "extra": None, "more": 1, "items": [{"n": 1}, {"n": 2}]}
    rows = field_rows(answer_of(said, truth=truth, id="d"))
    graded = {row["field"]: row["correct"] for row in rows}
    assert graded == {
        **{"/to": False, "/sum": True, "/extra": True, "/more": False},
        **{"/items/0/n": True, "/items/1/n": False},
    }
    assert {row["missing"] for row in rows} == {1}
    assert {row["conversation"] for row in rows} == {"d"}
    assert "correct" not in field_rows(answer_of(said))[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": None}, "no tokens"),
        ({"answer": "else"}, "another text"),
        ({"token_probs": [0.5]}, "one probability"),
        ({"tokens": "{"}, "tokens that cannot be used"),
        ({"token_probs": "high"}, "tokens that cannot be used"),
        ({"top_logprobs": [{"x": math.nan}] * 8}, "of the top token 'x' that is not a number"),
        ({"top_logprobs": ["x"] * 8}, "tokens that cannot be used: position 0 of top has no top"),
        ({"tokens": ["{", "}", "x"], "answer": "{", "token_probs": [1, 1]}, "one probability"),
    ],
)
def test_answers_without_usable_tokens_are_refused(change, message):
    with pytest.raises(BadDocument, match=message):
        field_rows({**answer_of({"a": 1}), **change})
    with pytest.raises(BadDocument, match="is not JSON"):
        field_rows(answer_of("no object"))
    with pytest.raises(BadDocument, match="has a truth that is not JSON"):
        field_rows(answer_of({"a": 1}, truth="one"))
    with pytest.raises(BadDocument, match="no top_logprobs"):
        field_rows(answer_of({"a": 1}), kinds={"a": [1, 2]})


def extractions(count, seed=0):
    """Answers with two fields whose probabilities mean different things."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        sure = rng.uniform(0.3, 1, 2)
        right = rng.random(2) < (sure[0], sure[1] ** 4)
        truth = {"name": "Li", "sum": 5}
        said = {"name": "Li" if right[0] else "Bo", "sum": 5 if right[1] else 6}
        text = json.dumps(said)
        probs = np.ones(len(text))
        leaves = _json_leaves(text)
        probs[[leaf.end - 1 for leaf in leaves]] = sure
        rows.append(answer_of(said, probs.tolist(), id=f"d{number}", truth=truth))
    return rows


def test_one_map_learns_what_the_confidence_of_each_kind_is_worth(tmp_path):
    file = write_lines(tmp_path / "log.jsonl", extractions(1500))
    kinds = {"name": None, "sum": None}
    fields = fields_of(read_log(file), kinds=kinds)
    fitted = fit_signals(fields, ["field product", "kind:name", "kind:sum"]).calibrator
    new = fields_of(
        read_log(write_lines(tmp_path / "new.jsonl", extractions(1500, 1))),
        kinds=kinds,
    )
    rows = fitted.apply(new)
    sure = np.array([row["confidence"] for row in rows])
    expected = np.where([row["kind"] == "sum" for row in rows], sure**4, sure)
    chances = np.array([row["calibrated"] for row in rows])
    assert np.abs(chances - expected).mean() < 0.03
    # new documents without one of the fields are calibrated too
    alone = fields_of(
        read_log(write_lines(tmp_path / "one.jsonl", [answer_of({"sum": 5})])),
        kinds=kinds,
    )
    assert 0 < fitted.apply(alone)[0]["calibrated"] < 1
    # and so are whole documents, by a gate with a guarantee
    gate = fit_gate(documents_of(AnswerRows.of(rows)), max_error=0.5)
    judged = gate.check(documents_of(AnswerRows.of(rows)))
    accepted = np.array([one.verdict == "accept" for one in judged])
    right = np.array([row["correct"] for row in documents_of(AnswerRows.of(rows)).rows])
    assert 0.01 < accepted.mean() < 0.5
    assert (~right[accepted]).mean() < 0.5
    per_field = fit_gate(AnswerRows.of(rows), max_error=0.3, unit="turn", by_kind=True)
    assert per_field.accepts_some


def test_a_log_with_answers_that_are_no_json(tmp_path):
    lines = [answer_of({"a": 1}, id="1"), answer_of("prose", id="2")]
    log = read_log(write_lines(tmp_path / "log.jsonl", lines))
    with pytest.raises(ValueError, match=r"line 2 of .* is not JSON"):
        fields_of(log)
    with pytest.warns(UserWarning, match="left out 1 of 2 answers"):
        fields = fields_of(log, skip_bad=True)
    assert [row["question"] for row in fields.rows] == ["1"]


def test_documents_multiply_their_fields():
    rows = [
        {"question": "1", "confidence": 0.5, "correct": True, "missing": 0},
        {"question": "2", "confidence": 0.5, "correct": True, "missing": 1},
        {"question": "1", "confidence": 0.4, "correct": True, "missing": 0},
        {"question": "3", "confidence": 0.3, "correct": False, "missing": 0},
    ]
    found = documents_of(AnswerRows.of(rows)).rows
    assert [row["confidence"] for row in found] == pytest.approx([0.2, 0.5, 0.3])
    assert [row["correct"] for row in found] == [True, False, False]
    assert "correct" not in documents_of(AnswerRows.of([{"question": 1, "confidence": 1}])).rows[0]
    rows[0]["calibrated"] = 0.9
    with pytest.raises(ValueError, match="the confidence of answer 3 must be a number"):
        documents_of(AnswerRows.of(rows))


def test_a_document_needs_a_name():
    with pytest.raises(ValueError, match="answer 2 has no question, which names the document"):
        documents_of(AnswerRows.of([{"question": "1", "confidence": 0.5}, {"confidence": 0.5}]))


def test_top_tokens_are_read_in_the_forms_of_services():
    plain = answer_of({"a": 1}, top_logprobs=[{t: 0.0} for t in '{"a": 1}'])
    shown = [{"top_logprobs": [{"token": t, "logprob": 0.0}]} for t in '{"a": 1}']
    for kinds in (None, {"a": [1, 2]}):
        assert field_rows({**plain, "top_logprobs": shown}, kinds=kinds) == field_rows(
            plain, kinds=kinds
        )


def test_probabilities_are_never_above_one():
    row = answer_of({"a": 1}, top_logprobs=[{"}": 0.0, "x": -0.001}] * 8)
    leaf = _Leaf(("a",), 1, 6, 7)
    tokens = Tokens.of(row, "it")
    assert max(_leaf_probs(tokens, leaf)) <= 1
    assert 0 < _allowed_prob(tokens, leaf, [1, 2]) <= 1
