"""The verbs of calibrant llm answers with fields of structured answers."""

import json
import math

import numpy as np

from calibrant.llm.answers.rows import read_answers
from tests.support.answer_logs import write_lines


def token(text, prob, other):
    """A token in the form of a chat completion, with another one beside it."""
    shown = [
        {"token": t, "logprob": math.log(p), "bytes": list(t.encode())}
        for t, p in ((text, prob), (other, 1 - prob))
    ]
    return {**shown[0], "top_logprobs": shown}


def service_extractions(count):
    """A log of a service, whose probabilities of the state are too high, and the right values."""
    rng = np.random.default_rng(0)
    lines, truths = [], []
    for number in range(count):
        sure = rng.uniform(0.5, 1, 2)
        right = rng.random(2) < (sure[0], sure[1] ** 3)
        name, state = "Zoë" if right[0] else "Bo", "paid" if right[1] else "open"
        other = "open" if right[1] else "paid"
        content = [
            token('{"name": "', 0.9999, "The"),
            token(name, sure[0], "Al"),
            token('", "state": "', 0.9999, "}"),
            token(state, sure[1], other),
            token('"}', 0.9999, "s"),
        ]
        text = "".join(one["token"] for one in content)
        choice = {"message": {"content": text}, "logprobs": {"content": content}}
        body = {"model": "m", "choices": [choice]}
        lines.append({"custom_id": f"d{number}", "response": {"status_code": 200, "body": body}})
        truths.append({"id": f"d{number}", "truth": {"name": "Zoë", "state": "paid"}})
    return lines, truths


def test_from_a_log_of_a_service_to_accepted_fields_and_documents(run, tmp_path):
    lines, truths = service_extractions(600)
    truth = write_lines(tmp_path / "truth.jsonl", truths)
    kinds = write_lines(tmp_path / "kinds.json", [{"name": None, "state": ["paid", "open"]}])
    files = {}
    for name, part in (("first", lines[:300]), ("second", lines[300:])):
        log = write_lines(tmp_path / f"{name}.jsonl", part)
        files[name] = tmp_path / f"{name}_fields.jsonl"
        given = ("--grades", truth, "--fields", kinds, "-o", files[name])
        code, said, err = run("llm", "answers", "read", log, *given)
        assert code == 0, err
        assert "600 fields; next: calibrant llm answers fit" in err
    assert [line.split()[:2] for line in said.splitlines()[1:]] == [
        ["name", "300"],
        ["state", "300"],
    ]
    mapped, gate = tmp_path / "map", tmp_path / "gate"
    code, said, err = run("llm", "answers", "fit", files["first"], "--signals", "all", "-o", mapped)
    assert code == 0, err
    assert "kind:state" in said
    terms = ("--unit", "turn", "--map", mapped, "--max-error", "0.3", "-o", gate)
    code, said, err = run("llm", "gate", "fit", files["second"], *terms)
    assert code == 0, err
    assert "at most 30 % of the accepted turns are wrong" in said

    calibrated, documents = tmp_path / "calibrated.jsonl", tmp_path / "documents.csv"
    start = ("llm", "answers", "apply", mapped, files["second"])
    code, _, err = run(*start, "-o", calibrated)
    assert code == 0, err
    code, _, err = run(*start, "--documents", "-o", documents)
    assert code == 0, err
    assert "300 documents" in err
    fields = [json.loads(line) for line in calibrated.read_text().splitlines()]
    assert fields[0]["question"] == "d300"
    (first,) = [row for row in read_answers(documents).rows if row["question"] == "d300"]
    chances = [row["calibrated"] for row in fields if row["question"] == "d300"]
    assert float(first["confidence"]) == math.prod(chances)
    code, said, err = run("llm", "gate", "fit", documents, "--max-error", "0.5", "-o", gate)
    assert code == 0, err
    assert "at most 50 % of the accepted answers are wrong" in said


def test_a_log_without_right_values_is_not_graded(run, tmp_path):
    lines, _ = service_extractions(2)
    log, out = write_lines(tmp_path / "log.jsonl", lines), tmp_path / "fields.csv"
    code, said, err = run("llm", "answers", "read", log, "--fields", "all", "-o", out)
    assert code == 0, err
    assert said.splitlines()[1].split()[-1] == "-"
    assert "calibrant llm answers apply MAP" in err
    assert "correct" not in out.read_text()


def test_wrong_files_are_refused(run, tmp_path):
    lines, truths = service_extractions(3)
    log, out = write_lines(tmp_path / "log.jsonl", lines), tmp_path / "fields.jsonl"
    for kinds in ("[1]", '{"state": "paid"}', "{"):
        (tmp_path / "kinds.json").write_text(kinds)
        given = ("--fields", tmp_path / "kinds.json", "-o", out)
        code, _, err = run("llm", "answers", "read", log, *given)
        assert code == 2
        assert "must be an object with a list of allowed values, or null" in err
    lines[1]["response"]["body"]["choices"][0]["message"]["content"] = "something else"
    log = write_lines(tmp_path / "log.jsonl", lines)
    truth = write_lines(tmp_path / "truth.jsonl", truths)
    code, _, err = run(
        "llm", "answers", "read", log, "--grades", truth, "--fields", "all", "-o", out
    )
    assert code == 2
    assert f"line 2 of {log} has tokens that spell another text" in err
    assert not out.exists()
