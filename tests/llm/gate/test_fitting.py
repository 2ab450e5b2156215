"""Gates keep their guarantees in simulations, for each kind of question and after a verifier."""

import warnings

import numpy as np
import pytest
from scipy.stats import binom

from calibrant.llm.answers.calibrator import fit_answers
from calibrant.llm.answers.rows import AnswerRows, Source
from calibrant.llm.gate import fitting
from calibrant.llm.gate.fitting import _find_threshold, _Scored, fit_gate
from calibrant.llm.gate.gate import Terms
from tests.support.graded_answers import graded_answers, joined, true_error

pytestmark = pytest.mark.filterwarnings("ignore:no threshold keeps", "ignore:no answer of kinds")


def quiet_gate(answers, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit_gate(answers, **options)


def test_all_answers_serve_the_threshold_if_the_map_rises(rng):
    answers = graded_answers(rng, 900, source="judge", model="m")
    gate = fit_gate(answers, max_error=0.2)
    (band,) = gate.bands
    assert band.accept.n == 900
    assert (band.verify, band.kinds) == (None, None)
    assert band.accept.certainty == 0.95
    assert gate.source == Source("judge", "", "m")
    wanted = fit_answers(answers)
    assert gate.calibrator.learned_ is not None
    assert wanted.learned_ is not None
    np.testing.assert_array_equal(gate.calibrator.learned_["line"], wanted.learned_["line"])
    three = fit_gate(answers, max_error=0.2, verifier_misses=0.4)
    assert three.bands[0].accept.n == 450
    assert three.bands[0].accept.certainty == pytest.approx(0.975)
    below = three.bands[0].verify
    assert below is not None
    assert below.n < 450
    assert below.max_error == pytest.approx(0.5)


def test_no_answer_decides_twice_about_accepting_and_verifying(rng, monkeypatch):
    answers = graded_answers(rng, 600)
    used = []

    def find(scored, **options):
        used.append(np.array([answers.rows[i]["confidence"] for i in scored.unit]))
        return _find_threshold(scored, **options)

    monkeypatch.setattr(fitting, "_find_threshold", find)
    fit_gate(answers, max_error=0.2, verifier_misses=0.4)
    assert len(used[0]) == 300
    assert 0 < len(used[1]) < 300
    everything = np.concatenate(used)
    assert len(np.unique(everything)) == len(everything)


def test_a_map_of_other_answers_leaves_all_for_the_thresholds(rng):
    other = fit_answers(graded_answers(rng, 500))
    gate = fit_gate(graded_answers(rng, 400), max_error=0.2, calibrator=other)
    assert gate.calibrator is other
    assert gate.bands[0].accept.n == 400
    with pytest.raises(ValueError, match="leave aggregate out"):
        fit_gate(graded_answers(rng, 400), max_error=0.2, calibrator=other, aggregate="first")


def test_the_error_of_accepted_answers_is_kept():
    """Of thresholds and a map that were found with the same few answers."""
    runs, certainty, broken, accepted = 60, 0.8, 0, 0
    grid = np.linspace(0.5, 0.9999, 500)
    for seed in range(runs):
        answers = graded_answers(np.random.default_rng(seed), 240)
        gate = quiet_gate(answers, max_error=0.2, certainty=certainty)
        above = gate.calibrator.predict(grid) >= gate.bands[0].accept.threshold
        if above.any():
            broken += true_error(grid[above.argmax()]) > 0.2
            accepted += 1
    assert accepted > runs / 2
    assert broken <= binom.ppf(0.999, runs, 1 - certainty)


KINDS = ("easy", "hard", "rare", "odd")
CHANCES = np.array([0.5, 0.4, 0.06, 0.04])


def drawn_kinds(rng, n):
    """Calibrated confidences of kinds, of which one is never right often enough."""
    at = rng.choice(len(KINDS), n, p=CHANCES)
    confidence = rng.uniform(0.6, 1, n)
    error = np.where(at == 1, 0.104, np.where(at == 2, 0.5, 0.02))
    return _Scored(confidence, rng.random(n) >= error, np.arange(n), np.array(KINDS)[at])


def test_promises_for_all_kinds_hold_together():
    """The rare ones are too often wrong together; only the easy ones may be accepted."""
    runs, terms, together, by_kind, easy = 120, Terms(0.1, 0.9), 0, 0, 0
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        scored = drawn_kinds(rng, 1200)
        parts = (np.arange(1200) % 2).astype(np.int64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sets = fitting._sets_of_kinds(scored.kind, parts, terms)
            each = 1 - (1 - terms.certainty) / len(sets)
            bands = [fitting._band(scored, parts, names, terms, each) for names in sets]
            one = fitting._band(scored, parts, None, terms, terms.certainty)
        assert sets == [("easy",), ("hard",), ("odd", "rare")]
        accepts = [band.accept.coverage > 0 for band in bands]
        easy += accepts[0]
        by_kind += any(accepts[1:])
        together += one.accept.coverage > 0
    most = binom.ppf(0.999, runs, 1 - terms.certainty)
    assert easy == runs
    assert by_kind <= most < together  # one threshold for all breaks the guarantee for a kind


def test_rare_kinds_share_a_threshold_with_a_warning(rng):
    several = [
        graded_answers(rng, n, sharp=0.5, kind=k) for k, n in (("a", 900), ("b", 90), ("c", 60))
    ]
    with pytest.warns(UserWarning, match="of kinds b, c: they share one"):
        gate = fit_gate(joined(*several), max_error=0.1, by_kind=True)
    assert [band.kinds for band in gate.bands] == [("a",), ("b", "c")]
    assert {band.accept.certainty for band in gate.bands} == {0.975}
    assert gate.bands[0].accept.n + gate.bands[1].accept.n == 945  # a tenth decides on kinds
    assert "It holds for each of: a; b, c together." in gate.promise()


def test_what_a_verifier_leaves_is_promised():
    """By the definition: of new answers, the verifier misses a share of the wrong ones."""
    misses, runs, broken, verified = 0.3, 60, 0, 0
    rng = np.random.default_rng(7)
    confidence = rng.beta(5, 1, 100_000)
    right = rng.random(100_000) < confidence**2
    missed = ~right & (rng.random(100_000) < misses)
    for seed in range(runs):
        answers = graded_answers(np.random.default_rng(seed), 400)
        gate = quiet_gate(answers, max_error=0.1, certainty=0.8, verifier_misses=misses)
        accept, verify, _ = gate.bands[0]
        chance = gate.calibrator.predict(confidence)
        to_verify = (chance < accept.threshold) & (chance >= verify.threshold)
        if to_verify.any():
            verified += 1
            broken += missed[to_verify].mean() > 0.1
    assert verified > runs / 2
    assert broken <= binom.ppf(0.999, runs, 0.2)


def test_a_good_verifier_gets_everything_that_is_not_accepted(rng):
    gate = fit_gate(graded_answers(rng, 600), max_error=0.2, verifier_misses=0.1)
    (low,) = gate.check(AnswerRows.of([{"confidence": 0.01}]))
    assert (low.verdict, low.threshold) == ("verify", 0.0)
    assert "at most 100 % of the answers to verify are wrong" in low.promise


def test_turns_of_a_conversation_stay_in_one_part(rng):
    rows = [
        {**row, "conversation": f"c{i // 3}", "turn": i % 3}
        for i, row in enumerate(graded_answers(rng, 900).rows)
    ]
    numbers = fitting._unit_numbers(AnswerRows.of(rows), "turn")
    parts = fitting._parts(numbers, 1 / 3, False, rng)
    assert all(np.ptp(parts[numbers == number]) == 0 for number in range(300))
    assert np.bincount(parts).tolist() == [300, 600]
    gate = fit_gate(AnswerRows.of(rows), max_error=0.3, unit="conversation")
    assert gate.bands[0].accept.n == 300
    assert "of the conversations with accepted turns have a wrong one" in gate.promise()


def test_refusals(rng):
    answers = graded_answers(rng, 60)
    turns = AnswerRows.of([{**row, "conversation": i // 2} for i, row in enumerate(answers.rows)])
    mixed = AnswerRows.of([{**row, "kind": str(i % 2)} for i, row in enumerate(turns.rows)])
    for rows, options, message in (
        (turns, {}, "answer 1 and answer 2 are turns of one conversation"),
        (answers, {"unit": "turn"}, "answer 1 has no conversation, which unit='turn' needs"),
        (answers, {"by_kind": True}, "answer 1 has no kind"),
        (mixed, {"by_kind": True, "unit": "conversation"}, "one kind for each conversation"),
        (answers.where(np.arange(60) < 29), {}, "needs 30 independent graded answers .*, got 29"),
        (answers, {"max_error": 1.5}, "max_error must be between 0 and 1"),
        (answers, {"verifier_misses": 0.0}, "verifier_misses must be between 0 and 1"),
        (turns, {"unit": "conversation", "verifier_misses": 0.5}, "must be left out"),
        (answers, {"unit": "word"}, "unit"),
    ):
        with pytest.raises(ValueError, match=message):
            quiet_gate(rows, **{"max_error": 0.1, **options})


def test_answers_that_are_all_cut_off_are_too_few(rng):
    with pytest.raises(ValueError, match=r"needs 30 independent graded answers .*, got 0"):
        quiet_gate(graded_answers(rng, 60, truncated=True), max_error=0.5)
    with pytest.raises(ValueError, match=r"needs 30 independent graded answers .*, got 0"):
        quiet_gate([], max_error=0.5)


def test_repeated_questions_are_warned_of(rng):
    chat = [{"role": "user", "content": "q"}]
    with pytest.warns(UserWarning, match="59 answers are to questions that others answer as well"):
        fit_gate(graded_answers(rng, 60, question=chat), max_error=0.5)
    with pytest.warns(UserWarning, match="59 answers are to questions that others answer as well"):
        fit_gate(graded_answers(rng, 60, question="q"), max_error=0.5)
