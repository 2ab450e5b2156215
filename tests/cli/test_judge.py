"""Judged answers on the command line."""

import json

import numpy as np
import pytest

import calibrant as cal
from calibrant.llm import judge_report, read_judged
from calibrant.llm.answers.rows import read_answers, write_rows


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """Scores from 1 to 10 of 300 answers, a third of them with labels."""
    rng = np.random.default_rng(1)
    right = rng.random(300) < 0.6
    scores = np.clip(np.round(5.5 + 3 * (right - 0.5) + 2 * rng.normal(size=300)), 1, 10)
    rows = [{"judge": float(score), "answer": "x" * 9} for score in scores]
    for row, label in zip(rows[:100], right, strict=False):
        row["human"] = bool(label)
    path = tmp_path_factory.mktemp("judged") / "judged.jsonl"
    write_rows(path, rows)
    return path


def test_rates_and_labels_needed(run, judged):
    code, out, err = run("llm", "judge", judged, "--scale", "1,10", "--width", "0.05")
    assert code == 0, err
    report = judge_report(read_judged(judged, scale=(1, 10)))
    rate = report.rates[""]
    needed = rate.labels_needed(0.05)
    assert needed is not None
    assert f"{100 * rate.rate.value:.1f} %" in out
    assert f"[{100 * rate.rate.low:.1f}, {100 * rate.rate.high:.1f}]" in out
    assert f"needs about {needed - 100:,} more labels" in " ".join(out.split())


def test_json_has_everything(run, judged):
    start = ("llm", "judge", judged, "--scale", "1,10")
    code, out, _ = run(*start, "--width", "0.05", "--level", "0.8", "--threshold", "7", "--json")
    assert code == 0
    wanted = judge_report(
        read_judged(judged, scale=(1, 10)), cut=7, level=0.8, width=0.05
    ).to_dict()
    found = json.loads(out)
    assert found["rates"] == wanted["rates"]
    assert found["agreement"]["cut"] == 7
    assert found["length_bias"]["odds_ratio"]["value"] is None  # all have the same length


def test_pairs_in_both_orders_need_no_scores(run, tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text("winner,swapped_winner\na,b\nb,b\ntie,tie\na,a\n")
    code, out, _ = run("llm", "judge", path)
    assert code == 0
    assert "25.0 %" in out
    assert "62.5 %" in out
    _, out, _ = run("llm", "judge", path, "--json")
    found = json.loads(out)
    assert {*found} == {"format", "level", "position_bias"}
    assert found["position_bias"]["flips"]["value"] == 0.25


def test_a_map_is_fitted_saved_and_applied(run, judged, tmp_path):
    mapped, out_file = tmp_path / "map", tmp_path / "out.csv"
    code, out, err = run("llm", "answers", "fit", judged, "--scale", "1,10", "-o", mapped)
    assert code == 0, err
    assert "100 answers" in out
    assert f"to use it: calibrant llm answers apply {mapped} FILE -o OUT" in " ".join(err.split())
    code, _, err = run("llm", "answers", "apply", mapped, judged, "-o", out_file)
    assert code == 0, err
    rows = read_answers(out_file).rows
    shares = read_judged(judged, scale=(1, 10)).shares
    wanted = cal.load(mapped).predict(shares)
    np.testing.assert_allclose([float(row["calibrated"]) for row in rows], wanted)
    assert "confidence" not in rows[0]


def test_scores_of_another_judge_are_refused(run, judged, tmp_path):
    mapped, votes = tmp_path / "map", tmp_path / "votes.jsonl"
    run("llm", "answers", "fit", judged, "--scale", "1,10", "-o", mapped)
    write_rows(votes, [{"judge": 1, "source": "another"}])
    code, _, err = run("llm", "answers", "apply", mapped, votes, "-o", tmp_path / "out.jsonl")
    assert code == 2
    assert "fitted on confidence judge, 1 to 10, not another, 1 to 10" in " ".join(err.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "must be a score from 0 to 1"),
        (("--scale", "ten"), "'ten' must be two numbers LOW,HIGH, as 1,10"),
        (("--scale", "1,10", "--width", "2"), "'--width': 2.0 is not in the range 0<x<0.5"),
        (("--scale", "1,10", "--level", "0"), "'--level': 0.0 is not in the range 0<x<=0.99"),
    ],
)
def test_mistakes_are_explained(run, judged, options, message):
    code, out, err = run("llm", "judge", judged, *options)
    assert code == 2
    assert not out
    assert message in " ".join(err.split())
