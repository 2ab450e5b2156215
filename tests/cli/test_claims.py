"""Claims on the command line."""

import json

import numpy as np
import pytest

import calibrant as cal
from calibrant.llm.answers.graded import read_rows, write_rows
from calibrant.llm.claims.maps import apply_claims, split_claims

TEXTS = ["It", " is", " so", ".", " <b>", " it", " is", " not", "."]


def rows_of(count):
    """Answers of two claims, the more confident of which are right more often."""
    rng, rows = np.random.default_rng(0), []
    for _ in range(count):
        probs = np.repeat(rng.random(2), [4, 5])
        grades = [bool(rng.random() < probs[at]) for at in (0, 4)]
        claims = [
            {"text": text, "correct": grade}
            for text, grade in zip(("It is so.", "<b> it is not."), grades, strict=True)
        ]
        rows.append({"token_texts": TEXTS, "token_probs": probs.tolist(), "claims": claims})
    return rows


@pytest.fixture
def files(tmp_path):
    write_rows(tmp_path / "graded.jsonl", rows_of(60))
    plain = [{key: row[key] for key in ("token_texts", "token_probs")} for row in rows_of(4)]
    write_rows(tmp_path / "plain.jsonl", plain)
    return tmp_path


def test_commands(run, files):
    split, mapped, out, page = (files / n for n in ("s.jsonl", "map", "o.jsonl", "p.html"))
    code, _, err = run("llm", "claims", "split", files / "plain.jsonl", "-o", split)
    assert code == 0, err
    assert "8 claims of 4 answers; next: grade them" in " ".join(err.split())
    assert read_rows(split).rows == split_claims(read_rows(files / "plain.jsonl"))
    options = ("--confidence", "minimum", "--stage", "sigmoid")
    code, shown, err = run("llm", "claims", "fit", files / "graded.jsonl", "-o", mapped, *options)
    assert code == 0, err
    assert "120 claims of 60 answers" in shown
    code, _, err = run("llm", "claims", "apply", mapped, split, "-o", out, "--html", page)
    assert code == 0, err
    fitted = cal.load(mapped)
    assert fitted.source_.confidence == "claims, minimum"
    rows = read_rows(out).rows
    assert rows == apply_claims(fitted, read_rows(split))
    assert "&lt;b&gt; it is not." in page.read_text()
    code, shown, _ = run("llm", "claims", "fit", files / "graded.jsonl", "-o", mapped, "--json")
    assert json.loads(shown)["after"]["n"] == 120
