"""Answers of a service, by the client of OpenAI against a server that misbehaves."""

import json
import math
import re
from typing import Any

import pytest

from calibrant.llm.answers.requesting import (
    CONFIDENCE_REQUEST,
    Asked,
    RequestPlan,
    _p_true_of,
    _without_statement,
    cost_of,
    read_asked,
    request_answers,
)
from calibrant.llm.answers.rows import read_answers
from calibrant.llm.models.services import ServiceError, service_for
from tests.support.chat_server import chat_server

pytest.importorskip("openai")


KEY = "sk-this-is-secret-0123456789"


@pytest.fixture(scope="module")
def chats():
    with chat_server() as chats:
        yield chats


@pytest.fixture(autouse=True)
def new_requests(chats, monkeypatch):
    chats.requests.clear()
    chats.keys.clear()
    chats.times.clear()
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def asked(*texts, references=("Lima",)):
    return [Asked([{"role": "user", "content": text}], references) for text in texts]


def collected(chats, out, *texts, timeout=10.0, max_retries=2, plan=None, **options):
    options = {"concurrency": 2, **options}
    with service_for("tiny", url=chats.url, timeout=timeout, max_retries=max_retries) as service:
        return request_answers(asked(*texts), service, plan or RequestPlan("tiny"), out, **options)


def rows_of(file):
    return read_answers(file).rows


def test_an_answer_with_the_probabilities_of_its_tokens(chats, tmp_path):
    out = tmp_path / "answers.jsonl"
    assert collected(chats, out, "Capital of Peru?") == 1
    (row,) = rows_of(out)
    assert row["question"] == "Capital of Peru?"
    assert row["answer"] == "Lima."
    assert row["correct"] is True
    assert row["token_probs"] == pytest.approx([0.8, 0.5])
    assert row["top_logprobs"][0] == {"Lima": math.log(0.5), "other": math.log(0.2)}
    assert (row["model"], row["prompt"], row["head"]) == ("tiny", "chat", "none")
    (request,) = chats.requests
    assert (request["temperature"], request["logprobs"], request["max_tokens"]) == (0, True, 256)
    assert chats.keys == [f"Bearer {KEY}"]
    assert read_answers(out).confidences()[0] == pytest.approx([math.sqrt(0.4)])


def test_samples_a_stated_confidence_and_a_verdict(chats, tmp_path):
    out = tmp_path / "answers.jsonl"
    plan = RequestPlan(
        "tiny", samples=2, stated=True, p_true=True, system="Be brief.", fields={"seed": 7}
    )
    collected(chats, out, "Capital of Peru?", plan=plan)
    (row,) = rows_of(out)
    assert (row["answer"], row["stated"]) == ("Lima", "Confidence: 70%")
    # the line about the confidence is no part of the answer, and neither are its tokens
    assert row["token_probs"] == pytest.approx([0.8])
    assert row["samples"] == ["Lima", "Lima"]
    # False is not among the top tokens, and so at most as likely as the last of them
    assert row["signals"] == {"p_true": pytest.approx(0.5 / 0.7)}
    assert row["prompt"].startswith("chat, system ")
    main, one, two, verdict = chats.requests
    assert main["messages"][0] == {"role": "system", "content": "Be brief."}
    assert main["messages"][-1]["content"] == f"Capital of Peru?\n\n{CONFIDENCE_REQUEST}"
    assert one["temperature"] == two["temperature"] == 1
    assert "Proposed answer: Lima\n" in verdict["messages"][-1]["content"]
    assert all(request["seed"] == 7 for request in chats.requests)


def test_p_true_is_the_confidence_where_there_is_no_other(chats, tmp_path):
    out = tmp_path / "answers.jsonl"
    collected(chats, out, "Capital of Peru?", plan=RequestPlan("tiny", logprobs=False, p_true=True))
    confidence, source = read_answers(out).confidences()
    assert source.confidence == "p_true"
    assert confidence == pytest.approx([0.5 / 0.7])


def test_a_stopped_run_goes_on_and_asks_nothing_twice(chats, tmp_path):
    out = tmp_path / "answers.jsonl"
    collected(chats, out, "one", "two")
    whole = out.read_bytes()
    with out.open("ab") as stream:
        stream.write(b'{"key": "abc", "answer": "cut o')  # the process was killed
    plan = RequestPlan("tiny")
    left = cost_of(asked("one", "two", "three"), plan, out)
    assert left.startswith("3 questions, 2 of them finished: 1 requests, about ")
    assert collected(chats, out, "one", "two", "three") == 1
    assert out.read_bytes().startswith(whole)
    assert {row["question"] for row in rows_of(out)} == {"one", "two", "three"}
    assert len(chats.requests) == 3
    with pytest.raises(ValueError, match=r"line 1 of .* with other options: use another file"):
        collected(chats, out, "one", plan=RequestPlan("tiny", max_tokens=5))


def test_problems_that_pass_are_waited_for(chats, tmp_path):
    out = tmp_path / "answers.jsonl"
    assert collected(chats, out, "busy", "broken") == 2
    assert chats.asked("busy") == 2
    assert chats.asked("broken") == 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("empty", "has no choices"),
        ("silent", "has no text"),
        ("nan", "log-probability of token 1 .'Lima'. that is not a number"),
        ("hidden", "has no logprobs: leave --logprobs out"),
        ("page", "did not return a JSON object but '<html>Welcome.*check the url"),
        ("garbled", "did not return a JSON object but"),
    ],
)
def test_a_lie_costs_one_question_and_no_other(chats, tmp_path, fault, message):
    out = tmp_path / "answers.jsonl"
    with pytest.raises(ValueError, match=message) as error:
        collected(chats, out, fault, "one", "two")
    assert "1 of 3 failed" in str(error.value)
    assert "the same command asks the others" in str(error.value)
    assert {row["question"] for row in rows_of(out)} == {"one", "two"}
    assert chats.asked(fault) == 1  # asking again would not help


def test_a_hanging_service_is_given_up(chats, tmp_path):
    with pytest.raises(ValueError, match=r"did not answer within 0\.2 s"):
        collected(chats, tmp_path / "answers.jsonl", "hang", timeout=0.2, max_retries=1)
    assert chats.asked("hang") == 2


def test_a_service_that_is_not_there_is_an_error(tmp_path):
    nowhere: Any = {"url": "http://127.0.0.1:9/v1", "timeout": 1.0, "max_retries": 0}
    out = tmp_path / "a.jsonl"
    with (
        service_for("tiny", **nowhere) as service,
        pytest.raises(ValueError, match="did not answer"),
    ):
        request_answers(asked("one"), service, RequestPlan("tiny"), out)


def test_a_refused_key_ends_everything_and_appears_nowhere(chats, tmp_path):
    out = tmp_path / "answers.jsonl"
    texts = [f"denied {i}" for i in range(50)]
    with pytest.raises(ValueError, match=r"status 401.*set OPENAI_API_KEY") as error:
        collected(chats, out, "Capital of Peru?", *texts, concurrency=1)
    assert len(chats.requests) < 10
    told, chain = "", [error.value]
    while chain:
        one: Any = chain.pop()
        told += repr(one)
        chain += [e for e in (one.__cause__, one.__context__) if e is not None]
    assert "status 401" in told
    assert KEY not in told
    assert KEY not in out.read_text()
    assert [row["question"] for row in rows_of(out)] == ["Capital of Peru?"]


def test_ten_failures_in_a_row_end_everything(chats, tmp_path):
    texts = [f"empty {i}" for i in range(40)]
    with pytest.raises(ValueError, match="10 questions have no answer"):
        collected(chats, tmp_path / "a.jsonl", *texts, concurrency=1)
    assert len(chats.requests) < 20


def test_failures_that_are_not_in_a_row_end_nothing(chats, tmp_path):
    texts = [f"{word} {i}" for i in range(12) for word in ("empty", "one")]
    with pytest.raises(ValueError, match="12 of 24 failed"):
        collected(chats, tmp_path / "a.jsonl", *texts, concurrency=1)


def test_the_cost_is_an_upper_bound(tmp_path):
    plan = RequestPlan("tiny", samples=3, p_true=True, max_tokens=100)
    said = cost_of(asked("a" * 4000), plan, tmp_path / "none.jsonl", (1000, 2000))
    form = (
        r"1 questions, 0 of .*: 5 requests, about ([\d,]+) tokens in and at most 401 out; .* (\S+)"
    )
    found = re.fullmatch(form, said)
    assert found is not None
    sent = int(found[1].replace(",", ""))
    assert 5 * 1000 < sent < 5 * 1100
    assert float(found[2]) == pytest.approx((sent * 1000 + 401 * 2000) / 1e6, abs=0.005)


def test_two_processes_do_not_write_one_file(chats, tmp_path):
    out = tmp_path / "answers.jsonl"

    def service(messages, fields):
        with pytest.raises(ValueError, match="another process writes"):
            collected(chats, out, "one")
        return {"choices": [{"message": {"content": "Lima"}}]}

    request_answers(asked("one"), service, RequestPlan("mine", logprobs=False), out)


def test_a_key_is_needed_for_the_service_of_openai(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    wanted = pytest.raises(ValueError, match="set the environment variable OPENAI_API_KEY")
    with wanted, service_for("gpt"):
        pass


def test_half_a_character_costs_one_question(chats, tmp_path):
    out = tmp_path / "answers.jsonl"
    with pytest.raises(ValueError, match="1 of 2 failed: a message is not valid text"):
        collected(chats, out, "half \ud800 a character", "a line\u2028 within a line")
    (line,) = out.read_text().splitlines()
    assert json.loads(line)["question"] == "a line\u2028 within a line"


@pytest.mark.filterwarnings("ignore")  # of LiteLLM itself
def test_the_same_through_litellm(chats, tmp_path, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # which it would look up online
    pytest.importorskip("litellm")
    out = tmp_path / "answers.jsonl"
    with service_for("litellm/openai/tiny", url=chats.url, timeout=10.0, max_retries=0) as service:
        plan = RequestPlan("litellm/openai/tiny")
        assert request_answers(asked("Capital of Peru?"), service, plan, out) == 1
        with pytest.raises(ServiceError, match="401") as problem:
            service([{"role": "user", "content": "denied"}], {})
    (row,) = rows_of(out)
    assert row["answer"] == "Lima."
    assert row["token_probs"] == pytest.approx([0.8, 0.5])
    assert chats.keys[0] == f"Bearer {KEY}"
    assert KEY not in str(problem.value)


@pytest.mark.parametrize(
    ("said", "answer", "stated"),
    [
        ("Lima\nConfidence: 90%", "Lima", "Confidence: 90%"),
        ("Lima\n\n**Confidence:** 90 %\n", "Lima", "**Confidence:** 90 %"),
        ("Confidence: 90%", "", "Confidence: 90%"),
        ("The confidence interval is [0, 1].", "The confidence interval is [0, 1].", None),
        ("Confidence matters.\nLima", "Confidence matters.\nLima", None),
    ],
)
def test_the_last_line_states_the_confidence(said, answer, stated):
    assert _without_statement({"answer": said}) == {"answer": answer, "stated": stated}


def test_tokens_of_the_statement_leave_with_it():
    tokens = ["Li", "ma", "\n", "Conf", "idence: 9%"]
    reply = {"answer": "".join(tokens), "tokens": tokens, "token_probs": [0.1, 0.2, 0.3, 0.4, 0.5]}
    row = _without_statement(reply)
    assert row["tokens"] == ["Li", "ma"]
    assert row["token_probs"] == [0.1, 0.2]


@pytest.mark.parametrize(
    ("shown", "chance"),
    [({"True": -1.0, "False": -1.0}, 0.5), ({" false": 0.0}, 0.0), ({"Yes": -0.1}, None)],
)
def test_p_true_sums_spellings(shown, chance):
    assert _p_true_of(shown) == chance


@pytest.mark.parametrize(
    ("shown", "chance"),
    [
        ({"The": 0.9, "True": 0.004, "A": 0.002}, 0.004 / 0.006),
        ({"The": 0.9, "False": 0.002}, 0.5),
        ({"True": 0.9}, 0.9),
        ({"True": 0.999, "The": 1e-9}, 1.0),
    ],
)
def test_a_word_below_the_top_tokens_may_be_as_likely_as_the_least_of_them(shown, chance):
    logprobs = {token: math.log(one) for token, one in shown.items()}
    assert _p_true_of(logprobs) == pytest.approx(chance)


def test_options_and_chats_change_the_key_and_grades_do_not():
    one = Asked([{"role": "user", "content": "a"}])
    key = RequestPlan("m").key(one)
    assert RequestPlan("m", grade="none").key(one) == key
    assert RequestPlan("m").key(one._replace(references=("b",), id="7")) == key
    assert RequestPlan("m").key(Asked([{"role": "user", "content": "b"}])) != key
    for changed in ({"samples": 1}, {"fields": {"seed": 1}}, {"system": "s"}, {"stated": True}):
        assert RequestPlan("m", **changed).key(one) != key
    assert RequestPlan("n").key(one) != key


def test_questions_of_every_form(tmp_path):
    lines = (
        '{"question": "a?", "references": ["x", "y"], "id": 7, "kind": "k"}',
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "b?"}]}',
        '{"question": "a?", "answer": "z"}',
    )
    (tmp_path / "q.jsonl").write_text("\n".join(lines))
    first, second = read_asked(tmp_path / "q.jsonl")  # the third is asked already
    assert (first.question, first.references, first.id, first.kind) == ("a?", ("x", "y"), "7", "k")
    assert (second.question, len(second.messages), second.references) == ("b?", 2, ())
    (tmp_path / "q.csv").write_text("question,reference\na?,x\n")
    assert read_asked(tmp_path / "q.csv")[0].references == ("x",)
    (tmp_path / "q.txt").write_text("a?\nx\n\nb?\ny\n")
    assert [one.references for one in read_asked(tmp_path / "q.txt")] == [("x",), ("y",)]


def test_right_answers_may_be_numbers(tmp_path):
    rows = [{"question": f"{n}?", "answer": n, "id": n} for n in range(2)]
    rows.append({"question": "both?", "references": [1, "one"]})
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_asked(tmp_path / "q.jsonl")
    assert [one.references for one in found] == [("0",), ("1",), ("1", "one")]
    assert [one.id for one in found] == ["0", "1", ""]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("q.jsonl", '{"messages": ["hi"]}', "line 1 of .* must have a question or messages"),
        (
            "q.jsonl",
            '{"question": "a", "answer": {"b": 1}}',
            "line 1 of .* texts or numbers as its",
        ),
        ("q.jsonl", '{"text": "a"}', "line 1 of .* must have a question or messages, got text"),
        ("q.jsonl", "[1]", r"line 1 of .* must be an object, got \[1\]"),
        ("q.jsonl", "", "has no questions"),
        ("q.json", "[]", "must be .jsonl, .csv or .txt"),
    ],
)
def test_other_files_of_questions_are_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_asked(tmp_path / name)
