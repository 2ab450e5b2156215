"""From raw material of answers to a map of signals, by commands."""

import json

import numpy as np
import pytest
from scipy.special import expit

import calibrant as cal
from calibrant.llm.answers.rows import read_answers
from calibrant.llm.answers.signal_calibrator import fit_signals

N = 240


def drawn_rows(seed):
    """Answers whose statements and samples each tell a part of the truth."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(N):
        x, y = rng.normal(size=2)
        agreeing = rng.binomial(6, expit(y))
        stated = "I cannot say" if number % 8 == 0 else f"Confidence: {100 * expit(x):.0f} %"
        rows.append(
            {
                "question": f"q{number}",
                "answer": "yes",
                "stated": stated,
                "samples": ["Yes."] * agreeing + ["no"] * (6 - agreeing),
                "model": "m",
                "correct": bool(rng.random() < expit(1.5 * x + 1.5 * y)),
            }
        )
    return rows


def written(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("signals")
    written(folder / "log.jsonl", drawn_rows(0))
    return folder


@pytest.fixture(scope="module")
def mapped(folder):
    """A map of one signal."""
    fitted = fit_signals(
        read_answers(folder / "log.jsonl"), ["stated"], stage="sigmoid", level=None
    )
    cal.save(fitted.calibrator, folder / "map")
    return folder / "map"


@pytest.fixture
def said(run):
    """Run a command, and return its exit code and both streams with single spaces."""

    def call(*arguments):
        code, out, err = run("llm", "answers", *arguments)
        return code, " ".join(out.split()), " ".join(err.split())

    return call


def test_a_map_of_signals_is_fitted_and_applied(said, folder, tmp_path):
    start = ("fit", folder / "log.jsonl", "--method", "sigmoid", "-o", tmp_path / "map")
    code, out, err = said(*start, "--signals", "stated, agreement")
    assert code == 0, err
    assert "signal has it raw ECE AUROC % ECE % log loss Brier stated 88 %" in out
    assert "combined" in out
    assert "30 answers without the signal stated: the model declined" in err
    fitted = cal.load(tmp_path / "map")
    assert fitted.names_ == ["stated", "agreement"]
    assert fitted.source_.model == "m"

    new = written(tmp_path / "new.jsonl", drawn_rows(1))
    code, _, err = said("apply", tmp_path / "map", new, "-o", tmp_path / "calibrated.jsonl")
    assert code == 0, err
    rows = read_answers(tmp_path / "calibrated.jsonl").rows
    chances = np.array([row["calibrated"] for row in rows])
    right = np.array([row["correct"] for row in rows])
    assert np.isfinite(chances).all()
    assert chances.mean() == pytest.approx(right.mean(), abs=0.08)
    assert chances[right].mean() > chances[~right].mean() + 0.2
    assert {*rows[0]} == {*drawn_rows(1)[0], "calibrated"}  # nothing else is added


def test_figures_are_written_as_json(said, folder, tmp_path):
    start = ("fit", folder / "log.jsonl", "--method", "sigmoid", "-o", tmp_path / "map")
    code, out, err = said(*start, "--signals", "stated", "--json")
    assert code == 0, err
    content = json.loads(out)
    assert content["signals"]["stated"]["coverage"] == 0.875
    assert content["signals"]["stated"]["calibrated"]["auroc"]["low"] > 0.5
    assert content["combined"] == content["signals"]["stated"]["calibrated"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "other"}, "model m, not other"),
        ({"stated": None}, "must have the signals stated, got agreement_exact"),
    ],
)
def test_answers_of_another_source_are_refused(said, mapped, tmp_path, change, message):
    new = written(tmp_path / "new.jsonl", [{**row, **change} for row in drawn_rows(1)[:3]])
    code, _, err = said("apply", mapped, new, "-o", tmp_path / "out.jsonl")
    assert code == 2
    assert message in err
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.filterwarnings("always:none of the 12", "always:12 of 12 stated")
def test_a_signal_that_all_answers_lack_is_reported(said, mapped, tmp_path):
    new = written(tmp_path / "x.jsonl", [{**row, "stated": "85"} for row in drawn_rows(1)[:12]])
    code, _, err = said("apply", mapped, new, "-o", tmp_path / "out.jsonl")
    assert code == 0
    assert "none of the 12 answers has the signal stated, which 88 % of those of the fit had" in err
    assert "12 of 12 stated confidences are numbers above 1 without a percent sign" in err
    rows = [{**row, "stated": 85, "stated_scale": 100} for row in drawn_rows(1)[:12]]
    code, _, err = said("apply", mapped, written(new, rows), "-o", tmp_path / "out.jsonl")
    assert (code, "stated confidences" in err) == (0, False)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"answer": "a", "token_probs": [0.5], "correct": true}', '{"answer": "a"'], "line 2"),
        (['{"answer": "a", "samples": [], "correct": true}'], "samples of line 1"),
    ],
)
def test_bad_files_are_refused_with_the_line(said, tmp_path, lines, message):
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    code, _, err = said("fit", tmp_path / "x.jsonl", "--signals", "all", "-o", tmp_path / "map")
    assert code == 2
    assert message in err
    assert not (tmp_path / "map").exists()


def test_options_and_artifacts_that_do_not_go_together(said, folder, tmp_path):
    both = ("--signals", "all", "--confidence", "first")
    code, _, err = said("fit", folder / "log.jsonl", *both, "-o", tmp_path / "map")
    assert code == 2
    assert "leave --confidence out" in err
    cal.save(cal.threshold(confidence=[0.9] * 50, outcome=[1] * 50, max_error=0.2), tmp_path / "t")
    code, _, err = said("apply", tmp_path / "t", folder / "log.jsonl", "-o", tmp_path / "x.csv")
    assert code == 2
    assert "holds a Threshold, a AnswerMap is wanted" in err
