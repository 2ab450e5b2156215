"""The watch of a gate: alarms on drift, few without, and a state that survives."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from scipy.stats import binom

from calibrant.llm import GateWatch, fit_gate
from calibrant.llm.gate.gate import _CUTS, DriftReference
from calibrant.llm.gate.watch import _PENDING, WatchFile, judge_rows
from calibrant.monitor import Monitor
from tests.support.graded_answers import graded_answers


@pytest.fixture(scope="module")
def gate():
    return fit_gate(graded_answers(np.random.default_rng(0), 3000), max_error=0.2)


def calibrated(gate, rng, n, sharp=2.0):
    answers = graded_answers(rng, n, sharp=sharp)
    return np.array([one.calibrated for one in gate.check(answers)]), answers.grades()


def test_nothing_is_withdrawn_while_nothing_changes(gate, rng):
    watch = GateWatch(gate)
    confidence, correct = calibrated(gate, rng, 4000)
    watch.note(confidence)
    watch.observe(confidence, correct)
    assert watch.withdrawn == ""
    assert (watch.confidences.seen, watch.grades.seen) == (4000, 4000)


def test_other_confidences_withdraw_the_promise(gate, rng):
    watch = GateWatch(gate)
    watch.note(calibrated(gate, rng, 500)[0])
    watch.note(np.minimum(calibrated(gate, rng, 1000)[0] + 0.3, 1))
    assert "the confidences differ from those at the fit" in watch.withdrawn
    (one, *_) = gate.check(graded_answers(rng, 1), watch.withdrawn)
    assert (one.verdict, one.reason) == ("person", watch.withdrawn)


def test_grades_that_come_later_withdraw_it(gate, rng):
    watch = GateWatch(gate)
    confidence, correct = calibrated(gate, rng, 3000, sharp=5.0)  # wrong more often than it was
    ids = [f"r{i}" for i in range(3000)]
    watch.note(confidence, ids)
    assert watch.withdrawn == ""
    assert watch.label(ids, correct) == 3000
    assert watch.withdrawn.startswith("the guarantee is withdrawn: the grades contradict")
    assert watch.label(["r1", "other"], [True, False]) == 0


def test_an_alarm_stays(gate, rng):
    watch = GateWatch(gate)
    watch.note(np.full(500, 0.01))
    assert watch.withdrawn
    watch.note(calibrated(gate, rng, 20_000)[0])
    assert GateWatch.from_state(json.loads(json.dumps(watch.state()))).withdrawn == watch.withdrawn


def test_alarms_without_a_change_are_as_rare_as_promised():
    """Small references, whose shares are far from the true ones, and long streams."""
    runs, alarms = 40, 0
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        confidence = rng.random(120)
        correct = (rng.random(120) < confidence).astype(float)
        reference = DriftReference.of(confidence, correct, false_alarms=0.2)
        watch = GateWatch.__new__(GateWatch)
        watch.cuts, watch.grades, watch.confidences = reference
        stream = rng.random(4000)
        watch.note(stream)
        watch.observe(stream, rng.random(4000) < stream)
        alarms += bool(watch.withdrawn)
    assert alarms <= binom.ppf(0.999, runs, 0.2)


def test_one_cut_of_each_answer_in_turn(gate):
    """So that an answer is one bet: the shares that are observed are those of the definition."""
    watch = GateWatch(gate)
    values = np.random.default_rng(5).random(83)
    for part in np.split(values, [10, 11, 40]):
        watch.note(part)
    right, count = np.zeros(_CUTS), np.zeros(_CUTS)
    for i, value in enumerate(values):
        share = 1 - (i % _CUTS + 0.5) / _CUTS
        at = int(share * _CUTS)  # the bin of the monitor
        count[at] += 1
        right[at] += value >= watch.cuts[i % _CUTS]
    (window,) = watch.confidences.windows.values()
    np.testing.assert_array_equal(window.count, count)
    np.testing.assert_array_equal(window.right, right)


def test_cuts_have_the_shares_that_they_stand_for(rng):
    confidence = rng.random(40_000)
    reference = DriftReference.of(confidence, np.ones(40_000), 0.05)
    np.testing.assert_allclose(reference.cuts, (np.arange(_CUTS) + 0.5) / _CUTS, atol=0.02)
    assert reference.grades.false_alarms == reference.confidences.false_alarms == 0.025


def test_the_state_is_kept(gate, rng):
    watch = GateWatch(gate)
    confidence, correct = calibrated(gate, rng, 300)
    watch.note(confidence, [f"r{i}" for i in range(300)])
    watch.label([f"r{i}" for i in range(100)], correct[:100])
    again = GateWatch.from_state(json.loads(json.dumps(watch.state())))
    assert again.state() == watch.state()
    assert again.label([f"r{i}" for i in range(300)], correct) == 200
    assert "100 grades, 200 answers that wait" in watch.describe()


def test_the_oldest_are_dropped(gate):
    watch = GateWatch(gate)
    watch.note(np.full(_PENDING + 5, 0.9), [str(i) for i in range(_PENDING + 5)])
    assert watch.label(["4", "5"], [True, True]) == 1


@pytest.mark.parametrize("change", [{"cuts": [2.0] * _CUTS}, {"cuts": []}, {"extra": 1}])
def test_damaged_states_are_refused(gate, change):
    with pytest.raises(ValueError, match=r"cuts must be|a saved GateWatch has"):
        GateWatch.from_state({**GateWatch(gate).state(), **change})


@pytest.fixture
def file(gate, tmp_path):
    made = WatchFile(tmp_path / "watch.json", gate)
    made.start()
    return made


def test_a_file_is_updated_by_several(gate, file):
    def add(i):
        WatchFile(file.path, gate).update(lambda watch: watch.note([0.9], [f"r{i}"]))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(12)))
    assert file.read().confidences.seen == 12
    assert {*file.read().pending.waiting} == {f"r{i}" for i in range(12)}
    assert json.loads(file.path.read_text())["gate"] == gate.fingerprint()


def test_a_failed_change_leaves_the_file(file):
    file.update(lambda watch: watch.note([0.9]))
    with pytest.raises(ZeroDivisionError):
        file.update(lambda watch: [watch.note([0.9]), 1 / 0])
    assert file.read().confidences.seen == 1


def test_a_file_begins_once(file):
    file.update(lambda watch: watch.note([0.9]))
    with pytest.raises(ValueError, match="what it says of drift would be lost"):
        file.start()
    assert file.read().confidences.seen == 1


@pytest.mark.parametrize("content", [None, "", "[]", '{"gate": "x"}', b"\xff"])
def test_without_a_readable_file_nothing_is_promised(file, rng, caplog, content):
    file.path.unlink()
    if content is not None:
        file.path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert file.withdrawn().startswith("the guarantee is withdrawn: ")
    assert f"{file.path}" in caplog.text
    with pytest.raises(ValueError, match=r"is missing|cannot be read"):
        file.update(lambda watch: watch.note([0.9]))
    rows = judge_rows(file.gate, graded_answers(rng, 20), file.path)
    assert {row["verdict"] for row in rows} == {"person"}
    assert "start a new file by calibrant llm gate watch" in rows[0]["reason"]


def test_a_change_that_leaves_valid_json_is_seen(file):
    file.update(lambda watch: watch.note(np.full(900, 0.01)))
    assert "the confidences differ" in file.withdrawn()
    state = json.loads(file.path.read_text())
    clean = GateWatch(file.gate).state()
    file.path.write_text(json.dumps({**state, "confidences": clean["confidences"]}))
    with pytest.raises(ValueError, match="its digest does not fit its content"):
        file.read()
    assert file.withdrawn().startswith("the guarantee is withdrawn: ")


def test_a_withdrawn_gate_begins_no_other_watch(gate, tmp_path, caplog):
    place = tmp_path / "gate"
    file = WatchFile(tmp_path / "watch.json", gate)
    file.start(place)
    file.update(lambda watch: watch.note([0.9]))
    file.path.unlink()
    file.start(place)  # it was not withdrawn
    file.update(lambda watch: watch.note(np.full(900, 0.01)))
    file.path.unlink()
    for path in (file.path, tmp_path / "other.json"):
        with pytest.raises(ValueError, match=r"was withdrawn, as .*gate\.withdrawn records: fit a"):
            WatchFile(path, gate).start(place)
        assert not path.exists()
    other = fit_gate(graded_answers(np.random.default_rng(1), 300), max_error=0.5)
    WatchFile(file.path, other).start(place)  # a new gate in the same place

    lost = WatchFile(tmp_path / "lost.json", gate)
    lost.start(tmp_path / "nowhere" / "gate")
    lost.update(lambda watch: watch.note(np.full(900, 0.01)))
    assert "nowhere" in caplog.text
    assert lost.read().confidences.seen == 900


def test_the_file_of_another_gate_is_refused(gate, file):
    other = fit_gate(graded_answers(np.random.default_rng(1), 300), max_error=0.5)
    with pytest.raises(ValueError, match="watches another gate: name a file of this one"):
        WatchFile(file.path, other).read()
    with pytest.raises(ValueError, match="json file, got watch"):
        WatchFile("watch", gate)


def test_references_hold_no_examples(gate):
    assert isinstance(gate.drift.grades, Monitor)
    assert gate.drift.grades.seen == gate.drift.confidences.seen == 0
