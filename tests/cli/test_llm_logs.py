"""The verbs of calibrant llm answers about logs and services."""

import json

import numpy as np
import pytest

from tests.support.answer_logs import harness_samples, service_log, write_lines
from tests.support.chat_server import chat_server


def test_one_command_from_a_log_to_a_report(run, tmp_path):
    lines = service_log(300)
    grades = [{"id": line["id"], "correct": line.pop("correct")} for line in lines]
    file = write_lines(tmp_path / "log.jsonl", lines)
    graded = write_lines(tmp_path / "graded.jsonl", grades)
    out = tmp_path / "report"
    arguments = ("--grades", graded, "--max-error", "0.4", "-o", out)
    code, said, err = run("llm", "answers", "report", file, *arguments)
    assert code == 0, err
    assert "300 answers (openai)" in said
    assert "at most 40 % of the accepted answers are wrong" in said
    assert len(said.strip().splitlines()) <= 10
    assert f"open {out / 'report.html'}" in err
    page = (out / "report.html").read_text()
    assert "Confidences are too high" in page
    # the map applies to the answers of the same log
    new = tmp_path / "new.jsonl"
    code, _, err = run("llm", "answers", "apply", out / "map", out / "calibrated.jsonl", "-o", new)
    assert code == 0, err
    again = [json.loads(line)["calibrated"] for line in new.read_text().splitlines()]
    first = [json.loads(line) for line in (out / "calibrated.jsonl").read_text().splitlines()]
    assert again == [row["calibrated"] for row in first]


@pytest.mark.filterwarnings("default")
def test_a_log_without_outcomes_is_an_error(run, tmp_path):
    lines = service_log(30)
    del lines[4]["correct"]
    file = write_lines(tmp_path / "log.jsonl", lines)
    code, _, err = run("llm", "answers", "report", file, "-o", tmp_path / "report")
    assert code == 2
    assert f"line 5 of {file}" in err
    assert not (tmp_path / "report").exists()
    code, said, err = run("llm", "answers", "report", file, "--skip-bad", "-o", tmp_path / "report")
    assert code == 0, err
    assert "left out 1 of 30 answers" in err
    assert "1 answers of the log were left out" in said


def test_a_log_without_any_grade_needs_a_file_of_them(run, tmp_path):
    lines = [{k: v for k, v in line.items() if k != "correct"} for line in service_log(30)]
    file = write_lines(tmp_path / "log.jsonl", lines)
    code, _, err = run("llm", "answers", "report", file, "-o", tmp_path / "report")
    assert code == 2
    assert "has no grades: name the file that has them by --grades" in " ".join(err.split())
    code, _, err = run("llm", "answers", "read", file, "-o", tmp_path / "new.jsonl")
    assert code == 0, err
    assert "next: calibrant llm answers apply MAP" in " ".join(err.split())


def test_a_log_becomes_a_file_of_answers_or_of_logits(run, tmp_path):
    file = write_lines(tmp_path / "samples_q_2026-01-01T00-00-00.jsonl", harness_samples(20))
    out = tmp_path / "answers.csv"
    code, _, err = run("llm", "answers", "read", file, "-o", out)
    assert code == 0, err
    assert "20 answers (lm_eval)" in err
    assert out.read_text().startswith("id,question,")
    code, _, err = run("llm", "answers", "read", file, "-o", tmp_path / "options.npz")
    assert code == 0, err
    with np.load(tmp_path / "options.npz") as held:
        assert held["logits"].shape == (20, 3)
    code, _, err = run("evaluate", tmp_path / "options.npz", "--json")
    assert code == 0, err


def test_questions_are_asked_and_paid_for(run, tmp_path, monkeypatch):
    pytest.importorskip("openai")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-9876543210")
    questions = tmp_path / "questions.jsonl"
    rows = [{"question": f"Capital {i}?", "references": ["Lima"]} for i in range(3)]
    write_lines(questions, rows)
    out = tmp_path / "answers.jsonl"
    with chat_server() as chats:
        start = ("llm", "answers", "request", questions, "--url", chats.url, "--model", "tiny")
        options = ("--p-true", "--prices", "1,2", "-o", out)
        code, _, err = run(*start, *options, "--dry-run")
        assert code == 0, err
        assert "3 questions, 0 of them finished: 6 requests" in err
        assert "; at most 0.00" in err
        assert not out.exists()
        code, _, err = run(*start, *options, "--set", "seed=3")
        assert code == 0, err
        assert "3 new answers; next: calibrant llm answers report" in err
        assert chats.requests[0]["seed"] == 3
        write_lines(questions, [{"question": "denied"}])
        code, _, err = run(*start, "-o", tmp_path / "other.jsonl")
    assert code == 2
    assert "status 401" in err
    assert "sk-secret" not in err + out.read_text()
