"""The report on the answers of a log: findings that are true, and a page that is safe."""

import re

import numpy as np
import pytest

import calibrant as cal
from calibrant.llm import AnswerCalibrator, Log, read_log, study_answers
from calibrant.llm.answers.rows import AnswerRows, read_answers
from calibrant.show.answer_findings import _notes_of, _verdict_of, kinds
from calibrant.show.answer_report import _answer_page, answer_lines, save_answer_report
from tests.support.answer_logs import harness_samples, service_log, write_lines
from tests.support.markup import parsed


def study_of(tmp_path, lines, **options):
    return study_answers(read_log(write_lines(tmp_path / "log.jsonl", lines)), **options)


def titles(study):
    return {note.title: note for note in _notes_of(study)}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Over-confident answers; those of kind b are right half as often as others."""
    lines = service_log(800, power=2, kinds=("a", "<i>b"), shifts=(1.0, 0.6))
    return study_of(tmp_path_factory.mktemp("log"), lines, max_error=0.5)


def test_findings_of_confidences_that_are_too_high(study):
    found = titles(study)
    assert _verdict_of(study).title == "No"
    assert found["Confidences are too high"].severity == "bad"
    assert found["The map helps"].severity == "good"
    assert "Confidence tells right answers from wrong ones" in found
    promise = found["A threshold with a guarantee"].evidence
    assert promise.startswith(
        "With 95 % certainty, at most 50 % of the accepted answers are wrong."
    )
    off = found["Some kinds of questions are off after calibration"].evidence
    assert "<i>b (" in off
    assert [note.severity for note in _notes_of(study)][:1] == ["bad"]


def log_of(confidence, right):
    rows = [
        {"confidence": float(c), "correct": bool(y)} for c, y in zip(confidence, right, strict=True)
    ]
    return Log("log.jsonl", "answers", AnswerRows([str(i) for i in range(len(rows))], rows))


def test_findings_of_calibrated_and_of_useless_confidences(rng):
    confidence = rng.uniform(0.2, 1, 4000)
    good = study_answers(log_of(confidence, rng.random(4000) < confidence))
    assert _verdict_of(good).severity == "good"
    assert "Confidences are too high" not in titles(good)
    with pytest.warns(UserWarning, match="not right more often"):
        useless = study_answers(log_of(confidence, rng.random(4000) < 0.6 - 0.2 * confidence))
    found = titles(useless)
    assert found["Confidence does not tell right answers from wrong ones"].severity == "bad"
    assert found["No threshold keeps the error rate"].severity == "warn"


def test_small_errors_are_told_with_their_digits(rng):
    confidence = rng.uniform(0.2, 1, 200)
    study = study_answers(log_of(confidence, rng.random(200) < confidence), max_error=0.005)
    evidence = titles(study)["No threshold keeps the error rate"].evidence
    assert "an error of at most 0.5 % with 95 % certainty" in evidence


def test_few_answers_do_not_show_that_a_confidence_is_useless():
    rank = np.arange(30)
    found = titles(study_answers(log_of(0.2 + rank / 50, rank * 3 % 10 < 3 + rank / 5)))
    assert found["Too few answers to see if confidence tells right from wrong"].severity == "warn"
    assert "Confidence does not tell right answers from wrong ones" not in found


def test_remarks_about_the_data(rng):
    confidence = np.where(rng.random(200) < 0.3, 1.0, rng.uniform(0.2, 0.9, 200))
    log = log_of(confidence, rng.random(200) < confidence)
    for i, row in enumerate(log.answers.rows):
        row |= {"question": f"q{i // 2}", "truncated": "true" if i < 7 else "false"}  # as in CSV
    found = titles(study_answers(log._replace(left_out=5)))
    said = found["About the data"].evidence
    assert "5 answers of the log were left out" in said
    assert "100 answers are to questions that come more than once" in said
    assert "7 of 200 answers were cut off" in said
    sure = (confidence == 1).mean()
    assert found["Many confidences are 1"].evidence.startswith(f"{100 * sure:.1f} %")


def test_kinds_are_measured_where_the_map_was_not_fitted(study):
    for part in kinds(study):
        those = [
            row for row in study.rows if row["kind"] == part.name and row["part"] == "threshold"
        ]
        assert part.n == len(those)
        assert part.confidence == pytest.approx(np.mean([row["calibrated"] for row in those]))
        assert part.accuracy == pytest.approx(np.mean([row["correct"] for row in those]))


def test_the_page_is_one_safe_file(study):
    page = _answer_page(study)
    parsed(page)
    assert "<i>b" not in page
    assert "&lt;i&gt;b" in page
    assert not re.search(r'(?:src|href)="(?!#|data:,)', page)
    for section in ("verdict", "findings", "how-far", "threshold", "kinds", "now", "data"):
        assert f'id="{section}"' in page
        assert f'href="#{section}"' in page
    assert 'id="options"' not in page
    assert "P(y = 1)" not in page


def test_the_folder_has_all_that_is_needed(study, tmp_path):
    names = save_answer_report(study, tmp_path / "report")
    assert names == ["report.html", "map", "calibrated.jsonl", "reliability.png"]
    assert all((tmp_path / "report" / name).exists() for name in names)
    loaded = cal.load(tmp_path / "report" / "map", AnswerCalibrator)
    assert loaded.threshold_ == study.threshold
    rows = read_answers(tmp_path / "report" / "calibrated.jsonl").rows
    assert [row["calibrated"] for row in rows] == [row["calibrated"] for row in study.rows]


def test_signals_are_shown_each(tmp_path, rng):
    odds = rng.normal(scale=1.5, size=(2, 400))
    right = rng.random(400) < 1 / (1 + np.exp(-odds.sum(0)))
    rows = [
        {
            "confidence": float(c),
            "source": "judge",
            "signals": {"<i>s": float(s)},
            "correct": bool(y),
        }
        for c, s, y in zip(*1 / (1 + np.exp(-odds)), right, strict=True)
    ]
    study = study_of(tmp_path, rows, max_error=0.3)
    assert study.source == "judge"
    page = _answer_page(study)
    parsed(page)
    assert 'id="signals"' in page
    assert "&lt;i&gt;s" in page
    assert "<i>s" not in page
    assert "Signals together do better than each" in titles(study)


def test_the_lines_are_few(study):
    lines = answer_lines(study)
    assert 5 <= len(lines) <= 10
    assert lines[0] == "800 answers (openai), confidence: geometric"
    assert lines[1].startswith("Are these confidences chances to be right? No.")


def test_multiple_choice_is_scored_again(tmp_path, monkeypatch):
    def without_preference(logits, labels):
        return logits - np.array([3.0, 0, 0])

    monkeypatch.setattr("calibrant.llm.answers.logs.study.calibrated_choices", without_preference)
    file = tmp_path / "samples_quiz_2026-01-01T00-00-00.jsonl"
    log = read_log(write_lines(file, harness_samples()))
    study = study_answers(log, max_error=0.4)
    assert study.options is not None
    assert "Options, calibrated and scored again" in titles(study)
    assert 'id="options"' in _answer_page(study)
    assert save_answer_report(study, tmp_path / "report")[-1] == "options.npz"
    before, after = (study.options[name]["accuracy"].value for name in ("before", "after"))
    assert after > before
    right = [np.argmax(row["option_probs"]) == row["label"] for row in study.rows]
    assert np.mean(right) == pytest.approx(after)
