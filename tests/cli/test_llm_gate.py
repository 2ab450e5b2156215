"""From graded answers to verdicts, by commands."""

import json
from shutil import copytree
from typing import get_args

import numpy as np
import pytest

import calibrant as cal
from calibrant.cli import llm_gate
from calibrant.llm import Gate, GateWatch
from calibrant.llm.answers.rows import read_answers, write_rows
from calibrant.llm.gate.gate import Unit
from tests.support.graded_answers import graded_answers, joined


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Graded answers of two kinds, and a gate."""
    folder = tmp_path_factory.mktemp("gate")
    rng = np.random.default_rng(0)
    answers = [graded_answers(rng, 600, sharp=0.5, kind=kind, source="judge") for kind in "ab"]
    write_rows(folder / "graded.jsonl", joined(*answers).rows)
    return folder


@pytest.fixture
def gate(run, folder):
    """Folder of a gate."""
    place = folder / "gate"
    if not place.exists():
        code, _, err = run("llm", "gate", "fit", folder / "graded.jsonl", *LIMIT, "-o", place)
        assert code == 0, err
    return place


LIMIT = ("--max-error", "0.1")


def new_answers(path, *confidences, **about):
    rows = [{"id": f"n{i}", "confidence": c, **about} for i, c in enumerate(confidences)]
    write_rows(path, rows)
    return path


def test_fit_saves_a_gate_and_says_what_it_promises(run, folder, tmp_path):
    start = ("llm", "gate", "fit", folder / "graded.jsonl", *LIMIT, "-o", tmp_path / "gate")
    code, out, err = run(*start)
    assert code == 0
    saved = cal.load(tmp_path / "gate", Gate)
    assert saved.promise() in " ".join(out.split())
    assert saved.bands[0].accept.n == 1200
    assert f"next: calibrant llm gate check {tmp_path / 'gate'} FILE" in " ".join(err.split())
    code, out, err = run(
        *start, "--by-kind", "--verifier-misses", "0.05", "--max-error", "0.2", "--json"
    )
    assert code == 0, err
    told = json.loads(out)
    assert [band["kinds"] for band in told["bands"]] == [["a"], ["b"]]
    assert told["terms"]["verifier_misses"] == 0.05
    assert "to verify" in told["promises"]["verify"]


def test_a_map_of_other_answers(run, folder, tmp_path):
    write_rows(tmp_path / "other.jsonl", graded_answers(np.random.default_rng(1), 300).rows)
    assert run("llm", "answers", "fit", tmp_path / "other.jsonl", "-o", tmp_path / "map")[0] == 0
    start = ("llm", "gate", "fit", folder / "graded.jsonl", *LIMIT, "-o", tmp_path / "gate")
    assert run(*start, "--map", tmp_path / "map")[0] == 0
    assert cal.load(tmp_path / "gate", Gate).bands[0].accept.n == 1200


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_fit_says_what_the_gate_cannot_check(run, tmp_path, form):
    rows = graded_answers(np.random.default_rng(0), 300).rows
    about = {"prompt": "chat", "model": "m", "sampling": "temperature=0"}
    cases: tuple[tuple[str, list[str]], ...] = (
        ("model, system prompt, sampling parameters", []),
        ("model, sampling parameters", ["prompt"]),
        ("", list(about)),
    )
    for lacking, known in cases:
        write_rows(tmp_path / "g.jsonl", [{**row, **{k: about[k] for k in known}} for row in rows])
        start = ("llm", "gate", "fit", tmp_path / "g.jsonl", "--max-error", "0.3", *form)
        err = " ".join(run(*start, "-o", tmp_path / "gate")[2].split())
        said = f"g.jsonl does not record {lacking}: the gate will not notice if that changes"
        assert (said in err) is bool(lacking)
        assert ("not record" in err) is bool(lacking)


@pytest.mark.filterwarnings("always:no threshold keeps")
def test_nothing_to_accept_exits_with_1(run, tmp_path):
    write_rows(tmp_path / "few.jsonl", graded_answers(np.random.default_rng(0), 60).rows)
    start = ("llm", "gate", "fit", tmp_path / "few.jsonl", "-o", tmp_path / "gate")
    code, out, err = run(*start, "--max-error", "0.01")
    assert code == 1
    assert "warning: no threshold keeps the error at 0.01" in " ".join(err.split())
    assert "a rough figure" in " ".join(err.split())
    assert "No answer is accepted" in out
    assert "next: grade more answers" in err
    assert "gate check" not in err


def test_check_writes_a_line_for_each_answer(run, gate, tmp_path):
    file = new_answers(tmp_path / "new.jsonl", 0.999, 0.2, "nan", source="judge")
    code, out, err = run("llm", "gate", "check", gate, file)
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [row["verdict"] for row in rows] == ["accept", "person", "person"]
    assert [row["id"] for row in rows] == ["n0", "n1", "n2"]
    saved = cal.load(gate, Gate)
    wanted = [one.calibrated for one in saved.check(read_answers(file))]
    assert [row["calibrated"] for row in rows] == wanted
    assert wanted[2] is None
    assert rows[0]["threshold"] == saved.bands[0].accept.threshold
    assert "must be a number in [0, 1]" in rows[2]["reason"]
    assert "accept: 1, verify: 0, person: 2" in err
    assert "1 to a person: the confidence is below 0." in err
    assert "1 to a person: no usable confidence: the confidence of the answer must be" in err


@pytest.mark.filterwarnings("always:none of the")
@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"answer": "Lima"}, "the answer has no token_probs among its keys answer:"),
        ({"token_probs": [-0.5]}, "token_probs of the answer must be in [0, 1]: for log"),
        ({"logprobs": [{"a": -1}]}, "the answer has a log-probability of token 1 ('') that is not"),
    ],
)
def test_check_says_why_nothing_could_be_judged(run, tmp_path, row, reason):
    rng = np.random.default_rng(0)
    answers = graded_answers(rng, 600, sharp=0.5).rows
    graded = [{"token_probs": [r["confidence"]], "correct": r["correct"]} for r in answers]
    write_rows(tmp_path / "graded.jsonl", graded)
    start = ("llm", "gate", "fit", tmp_path / "graded.jsonl", *LIMIT, "-o", tmp_path / "gate")
    assert run(*start)[0] == 0
    write_rows(tmp_path / "new.jsonl", [row, row, row])
    code, _, err = run("llm", "gate", "check", tmp_path / "gate", tmp_path / "new.jsonl")
    told = " ".join(err.split())
    assert code == 0
    assert f"3 to a person: no usable confidence: {reason}" in told
    assert "warning: none of the 3 answers" in told
    write_rows(tmp_path / "new.jsonl", [row, {"token_probs": [0.9]}])
    _, _, err = run("llm", "gate", "check", tmp_path / "gate", tmp_path / "new.jsonl")
    assert "warning" not in err


def test_fail_exits_with_1_unless_all_are_accepted(run, gate, tmp_path):
    good = new_answers(tmp_path / "good.jsonl", 0.999, 0.9999, source="judge")
    mixed = new_answers(tmp_path / "mixed.csv", 0.999, 0.1, source="judge")
    assert run("llm", "gate", "check", gate, good, "--fail")[0] == 0
    code, out, err = run("llm", "gate", "check", gate, mixed, "--fail", "-o", tmp_path / "j.csv")
    assert (code, out) == (1, "")
    assert "2 answers" in err
    assert [row["verdict"] for row in read_answers(tmp_path / "j.csv").rows] == ["accept", "person"]


def test_other_sources_are_refused_and_nothing_is_written(run, gate, tmp_path):
    file = new_answers(tmp_path / "new.jsonl", 0.999, source="p_true")
    state, out = tmp_path / "watch.json", tmp_path / "out.jsonl"
    assert run("llm", "gate", "watch", gate, "--state", state, "--new")[0] == 0
    before = state.read_bytes()
    code, _, err = run("llm", "gate", "check", gate, file, "-o", out, "--state", state)
    assert code == 2
    assert "confidence judge, not p_true" in err
    assert not out.exists()
    assert state.read_bytes() == before


def test_grades_that_come_later_withdraw_the_promise(run, gate, tmp_path):
    state = tmp_path / "watch.json"
    gate = copytree(gate, tmp_path / "gate")  # beside which the withdrawal is recorded
    rng = np.random.default_rng(3)
    answers = graded_answers(rng, 1500, sharp=9.0, source="judge")  # wrong far more often
    rows = [{**row, "id": i} for i, row in enumerate(answers.rows)]
    write_rows(tmp_path / "new.jsonl", [{k: r[k] for k in r if k != "correct"} for r in rows])
    start = ("llm", "gate", "check", gate, tmp_path / "new.jsonl", "--state", state)
    code, out, _ = run(*start)
    assert "is missing: whether the guarantee was withdrawn is unknown" in out  # it was not begun
    assert run("llm", "gate", "watch", gate, "--state", state, "--new")[0] == 0
    code, out, _ = run(*start)
    assert "accept" in {json.loads(line)["verdict"] for line in out.splitlines()}
    look = ("llm", "gate", "watch", gate, "--state", state)
    code, out, _ = run(*look, "--fail")
    assert code == 0
    assert "the guarantee holds" in out
    half = [{"id": r["id"], "correct": r["correct"]} for r in rows[:700]]
    half.append({"id": "never seen", "correct": True})
    write_rows(tmp_path / "ids.jsonl", half)
    code, out, err = run(*look[:4], tmp_path / "ids.jsonl", *look[4:])
    assert code == 0
    assert "700 grades added, 1 not used" in err
    assert "1 not used: no answer that was judged under its id waits for a grade" in err
    write_rows(tmp_path / "whole.jsonl", [{k: r[k] for k in r if k != "id"} for r in rows[700:]])
    code, _, err = run(*look[:4], tmp_path / "whole.jsonl", *look[4:], "--fail")
    assert code == 1
    assert "800 grades added, 0 not used" in err
    code, out, _ = run(*look, "--json")
    told = json.loads(out)
    assert (told["graded"], told["judged"]) == (1500, 1500)
    assert "the grades contradict the confidences" in told["withdrawn"]
    assert told["e_values"]["grades"] > 40
    code, out, err = run(*start)
    judged = [json.loads(line) for line in out.splitlines()]
    assert {row["verdict"] for row in judged} == {"person"}
    assert judged[0]["reason"] == told["withdrawn"]
    state.unlink()
    code, _, err = run(*look, "--new")
    assert code == 2
    assert "was withdrawn" in err
    assert "fit a gate on recent answers" in err


def test_grades_by_the_calibrated_confidence_are_not_mapped_again(run, gate, tmp_path):
    gate, state = copytree(gate, tmp_path / "gate"), ("--state", tmp_path / "watch.json")
    run("llm", "gate", "watch", gate, *state, "--new")
    answers = graded_answers(np.random.default_rng(3), 400, source="judge")
    write_rows(tmp_path / "new.jsonl", answers.rows)
    run("llm", "gate", "check", gate, tmp_path / "new.jsonl", "-o", tmp_path / "judged.jsonl")
    judged = read_answers(tmp_path / "judged.jsonl").rows
    rows = [{"calibrated": row["calibrated"], "correct": row["correct"]} for row in judged]
    rows += [{"calibrated": 83, "correct": True}, {"confidence": 0.9, "correct": True}]
    write_rows(tmp_path / "graded.jsonl", rows)
    code, _, err = run("llm", "gate", "watch", gate, tmp_path / "graded.jsonl", *state)
    assert code == 0
    assert "400 grades added, 2 not used" in err
    assert "1 not used: its confidence has no source, and the gate is for judge" in err
    assert "1 not used: the confidence of the answer must be a number in [0, 1]" in err
    wanted = GateWatch(cal.load(gate, Gate))
    wanted.observe([row["calibrated"] for row in judged], [row["correct"] for row in judged])
    added = json.loads(state[1].read_text())["grades"]
    assert added == json.loads(json.dumps(wanted.grades.state()))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"confidence": 0.9}, "its confidence has no source, and the gate is for judge"),
        ({"id": "never seen"}, "no answer that was judged under its id waits for a grade"),
        ({"calibrated": None}, "has no token_probs"),
    ],
)
@pytest.mark.parametrize("options", [(), ("--fail",), ("--json",)])
def test_grades_that_say_nothing_give_no_verdict(run, gate, tmp_path, row, reason, options):
    state = ("--state", tmp_path / "watch.json")
    run("llm", "gate", "watch", gate, *state, "--new")
    write_rows(tmp_path / "graded.jsonl", [{**row, "correct": True}] * 100)
    code, out, err = run("llm", "gate", "watch", gate, tmp_path / "graded.jsonl", *state, *options)
    assert (code, out) == (2, "")
    assert "100 not used: " in err
    assert reason in err
    assert "none of the 100 grades" in " ".join(err.split())


def test_one_answer_of_a_conversation_is_watched(run, tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        {**row, "conversation": f"c{i // 2}"}
        for i, row in enumerate(graded_answers(rng, 800, sharp=0.2).rows)
    ]
    write_rows(tmp_path / "chats.jsonl", rows)
    start = ("llm", "gate", "fit", tmp_path / "chats.jsonl", *LIMIT, "-o", tmp_path / "gate")
    _, out, _ = run(*start, "--unit", "conversation")
    assert "of the conversations with accepted turns" in " ".join(out.split())
    state = ("--state", tmp_path / "watch.json")
    place = (tmp_path / "gate", tmp_path / "chats.jsonl")
    run("llm", "gate", "watch", place[0], *state, "--new")
    run("llm", "gate", "check", *place, *state)
    err = run("llm", "gate", "watch", *place, *state)[2]
    assert "400 grades added, 400 not used" in err
    assert "400 not used: another answer of its conversation counts" in err
    told = json.loads(run("llm", "gate", "watch", place[0], *state, "--json")[1])
    assert (told["graded"], told["judged"]) == (400, 400)


def test_choices_are_those_of_python():
    assert get_args(Unit) == llm_gate.UNITS
