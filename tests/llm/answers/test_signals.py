"""Signals of answers, from material of every kind."""

import math

import numpy as np
import pytest

from calibrant.llm.answers.rows import AnswerRows, read_answers, write_rows
from calibrant.llm.answers.signals import signal_values, signals_of, top_token_confidence

FULL = {
    "question": "Capital of Peru?",
    "answer": "Lima",
    "token_probs": [0.9, 0.4],
    "top_logprobs": [{"Lima": -0.2, "Cusco": -2.0}],
    "stated": "I am 80 % sure",
    "samples": ["Lima", "lima.", "Cusco", "Rome"],
    "option_logits": [0.0, math.log(3)],
    "judges": {"gpt-x": {"score": 8, "scale": [1, 10]}, "b": {"votes": ["yes", "tie"]}},
    "confidence": 0.6,
    "source": "p_true",
    "correct": True,
}


def test_all_material_becomes_signals():
    (row,) = signals_of([FULL]).rows
    wanted = {
        "geometric": 0.6,
        "product": 0.36,
        "arithmetic": 0.65,
        "first": 0.9,
        "minimum": 0.4,
        "top_probability": math.exp(-0.2),
        "top_margin": math.exp(-0.2) - math.exp(-2),
        "stated": 0.8,
        "agreement_exact": 0.25,
        "agreement": 0.5,
        "semantic_negentropy": 1 - 1.5 * math.log(2) / math.log(4),  # shares 1/2, 1/4, 1/4
        "semantic_sets": 1 / 3,
        "option_probability": 0.75,
        "option_margin": 0.5,
        "judge:gpt-x": 7 / 9,
        "judge:b": 0.75,
        "p_true": 0.6,
    }
    entropy = row["signals"].pop("top_entropy")
    assert 0 < entropy < math.exp(-0.2)
    assert row["signals"] == pytest.approx(wanted)
    assert {key: row[key] for key in FULL} == FULL  # nothing is lost


def test_a_row_without_material_has_null_and_unread_material_a_reason():
    bare = {"answer": "Rome", "stated": "no idea", "samples": ["Rome"], "judges": {"gpt-x": None}}
    (_, row) = signals_of([FULL, bare]).rows
    assert row["signals"]["geometric"] is None
    assert row["signals"]["stated"] is None
    assert row["signals"]["agreement"] == 1
    assert row["signals"]["judge:b"] is None
    assert row["unread"] == {
        "stated": "the model declined",
        "semantic_negentropy": "it takes two samples",
        "semantic_sets": "it takes two samples",
        "judge:gpt-x": "the judge gave no score",
    }
    again = signals_of([{**row, "stated": "90 %", "samples": ["Rome", "rome"]}]).rows[0]
    assert again["signals"]["stated"] == 0.9
    assert {*again["unread"]} == {"judge:gpt-x"}


def test_signals_that_are_there_are_kept():
    row = {**FULL, "signals": {"stated": 0.33, "judge:z": None, "length": 1}}
    (found,) = signals_of([row]).rows
    assert found["signals"]["stated"] == 0.33
    assert found["signals"]["judge:z"] is None
    assert found["signals"]["length"] == 1
    unread = signals_of([{**row, "stated": "no idea"}]).rows[0]
    assert "unread" not in unread


def test_clusters_of_meaning_have_the_name_of_their_model():
    same = {frozenset(("Lima", "Rome")), frozenset(("Lima",))}
    found = signals_of([FULL], same=lambda a, b: frozenset((a, b)) in same, meaning="mine").rows[0][
        "signals"
    ]
    assert found["agreement"] == 0.5
    assert found["agreement:mine"] == 0.5  # "Lima" and "Rome"
    assert found["semantic_sets:mine"] == pytest.approx(1 - 2 / 3)
    with pytest.raises(ValueError, match="together"):
        signals_of([FULL], same=lambda a, b: True)


def test_stated_numbers_are_on_the_scale_that_is_passed():
    row = {"answer": "a", "stated": 85}
    assert signals_of([row]).rows[0]["signals"] == {"stated": None}
    assert signals_of([{**row, "stated_scale": 100}]).rows[0]["signals"] == {"stated": 0.85}


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_files_hold_material_and_signals(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    write_rows(path, [FULL, {**FULL, "stated": "no idea"}])
    found = signals_of(read_answers(path))
    assert found.rows[0]["signals"] == signals_of([FULL]).rows[0]["signals"]
    write_rows(path, found.rows)
    values = signal_values(read_answers(path))
    assert values["agreement"].tolist() == [0.5, 0.5]
    np.testing.assert_array_equal(values["stated"], [0.8, np.nan])


@pytest.mark.parametrize(
    ("material", "message"),
    [
        ({"token_probs": [0.5, math.nan]}, "token_probs of line 2 .* got nan"),
        ({"token_probs": [1.2]}, r"token_probs of line 2 .* in \[0, 1\], got 1.2"),
        ({"token_probs": [-0.7]}, "exp of them"),
        ({"token_probs": []}, "line 2 .* without tokens"),
        ({"top_logprobs": [{"a": 0.4}]}, "top_logprobs of line 2 .* natural logarithms"),
        ({"top_logprobs": [{"a": math.nan}]}, "top_logprobs of line 2 .*"),
        ({"top_logprobs": []}, "top_logprobs of line 2 .*"),
        ({"top_logprobs": "[oops"}, "top_logprobs of line 2 .*"),
        ({"samples": []}, "samples of line 2 .* one text or more"),
        ({"samples": ["a", None]}, "samples of line 2 .* list of texts"),
        ({"samples": "Lima"}, "samples of line 2 .*"),
        ({"option_logits": [1.0]}, "option_logits of line 2 .* two numbers"),
        ({"judges": {"x": {"score": 8}}}, "judges of line 2 .* worst of the scale first"),
        ({"judges": {"x": {"score": 11, "scale": [1, 10]}}}, "judges of line 2 .* from 1 to 10"),
        ({"judges": [0.5]}, "judges of line 2 .* an object"),
        ({"confidence": 90}, "confidence of line 2 .* divide percents"),
        ({"signals": {"x": 1.5}}, r"signal x of line 2 .* in \[0, 1\] or null, got 1.5"),
        ({"signals": {"x": math.nan}}, "signal x of line 2 .* got nan"),
        ({"signals": {"x": True}}, "got True"),
        ({"signals": [0.5]}, "signals of line 2 .* an object"),
        ({"signals": "{"}, "signals of line 2 .* not JSON"),
    ],
)
def test_bad_material_is_refused_with_its_place(tmp_path, material, message):
    answers = AnswerRows(["line 1 of x", "line 2 of x"], [FULL, {"answer": "a", **material}])
    with pytest.raises(ValueError, match=message):
        signals_of(answers)


def test_samples_need_an_answer_to_agree_with():
    with pytest.raises(ValueError, match="samples of answer 1: a list of texts and an answer"):
        signals_of([{"samples": ["a"]}])


def test_values_of_signals_are_those_of_all_rows_or_named():
    first: dict[str, float | None] = {"a": 0.5, "b": None}
    answers = AnswerRows.of([{"signals": one} for one in (first, {"a": 0.25}, {"a": 1})])
    values = signal_values(answers)
    assert values["a"].tolist() == [0.5, 0.25, 1]
    assert np.isnan(values["b"]).all()
    assert [*signal_values(answers, ["b"])] == ["b"]
    with pytest.raises(ValueError, match="must have the signals c, got a, b"):
        signal_values(answers, ["a", "c"])


def test_rows_without_signals_are_refused():
    with pytest.raises(ValueError, match="must have signals, got nothing"):
        signal_values(AnswerRows(["line 1"], [{"answer": "a"}]))


def of(**material):
    """Signals of one answer with some material."""
    return signals_of([{"answer": "a", **material}]).rows[0]["signals"]


@pytest.mark.parametrize(
    ("score", "scale", "share"),
    [(1, [1, 5], 0), (2, [1, 5], 0.25), (5, [1, 5], 1), (2, [5, 1], 0.75), (-3, [-5, 5], 0.2)],
)
def test_scores_are_linear_between_the_worst_and_the_best(score, scale, share):
    found = of(judges={"x": {"score": score, "scale": scale}})
    assert found == {"judge:x": pytest.approx(share)}


@pytest.mark.parametrize("score", [0, 11, math.nan, math.inf, True])
def test_scores_off_the_scale_are_refused(score):
    with pytest.raises(ValueError, match="from 1 to 10"):
        of(judges={"x": {"score": score, "scale": [1, 10]}})


@pytest.mark.parametrize("scale", [[1, 1], [0, math.inf], [math.nan, 1]])
def test_scales_have_two_ends(scale):
    with pytest.raises(ValueError, match="two different numbers"):
        of(judges={"x": {"score": 1, "scale": scale}})


def test_votes_are_counted():
    assert of(judges={"x": {"votes": ["yes", "No", " TIE "]}})["judge:x"] == 0.5
    assert of(judges={"x": {"votes": ["correct"]}})["judge:x"] == 1
    for votes, message in (([], "a judge has"), ("yes", "a judge has"), (["maybe"], "got 'maybe'")):
        with pytest.raises(ValueError, match=message):
            of(judges={"x": {"votes": votes}})


def test_options_have_a_probability_and_a_margin():
    found = of(option_logits=(np.log([0.2, 0.7, 0.1]) + 5).tolist())
    assert found == pytest.approx({"option_probability": 0.7, "option_margin": 0.5})
    assert {*of(option_logits=[0.0, -np.inf]).values()} == {1}
    for logits in ([1.0], [1.0, np.nan], [1.0, np.inf], [[1.0, 2.0]], [-np.inf, -np.inf]):
        with pytest.raises(ValueError, match="option_logits of answer 1"):
            of(option_logits=logits)


def drawn_positions(rng, count, vocabulary):
    return rng.dirichlet(np.full(vocabulary, 0.3), size=count)


def entropy(probs):
    return -sum(p * math.log(p) for p in probs if p)


def shown(probs, k):
    return [{str(i): math.log(row[i]) for i in np.argsort(-row)[:k]} for row in probs]


def test_top_tokens_bound_the_entropy_of_all():
    rng = np.random.default_rng(0)
    for _ in range(20):
        probs = drawn_positions(rng, 3, 30)
        truth = math.exp(-np.mean([entropy(row) for row in probs]))
        low = top_token_confidence(shown(probs, 5), vocabulary=30)
        assert low["top_entropy"] <= truth
        top = np.sort(probs)[:, ::-1]
        assert low["top_probability"] == pytest.approx(math.exp(np.log(top[:, 0]).mean()))
        assert low["top_margin"] == pytest.approx((top[:, 0] - top[:, 1]).mean())


def test_the_bound_of_the_entropy_is_reached_by_equal_hidden_tokens():
    probs = [0.5, 0.2, 0.1, 0.1, 0.1]
    low = top_token_confidence(shown(np.array([probs]), 2), vocabulary=5)["top_entropy"]
    assert low == pytest.approx(math.exp(-entropy(probs)))


def test_the_entropy_is_exact_if_nothing_is_hidden():
    probs = drawn_positions(np.random.default_rng(1), 2, 6)
    truth = math.exp(-np.mean([entropy(row) for row in probs]))
    found = top_token_confidence(shown(probs, 6), vocabulary=6)
    assert found["top_entropy"] == pytest.approx(truth)


def test_a_position_with_one_token_has_no_margin():
    found = top_token_confidence([{"a": -0.1, "b": -3.0}, {"c": -0.2}])
    assert {*found} == {"top_probability", "top_entropy"}


@pytest.mark.parametrize("bad", [math.nan, 0.3, math.inf])
def test_log_probabilities_that_are_none_are_refused(bad):
    with pytest.raises(ValueError, match="position 1 of top must have natural logarithms"):
        top_token_confidence([{"a": -0.1}, {"a": bad, "b": -1.0}])


def test_the_vocabulary_holds_what_is_shown():
    with pytest.raises(ValueError, match="vocabulary is 1, but 2"):
        top_token_confidence([{"a": -0.5, "b": -1.0}], vocabulary=1)


@pytest.mark.parametrize(
    "material",
    [
        {"confidence": 10**400},
        {"token_probs": [10**400]},
        {"top_logprobs": [{"a": 10**400}]},
        {"top_logprobs": [{"top_logprobs": [{"token": "a", "logprob": 10**400}]}]},
        {"option_logits": [1, 10**400]},
        {"judges": {"m": {"score": 10**400, "scale": [1, 10**401]}}},
    ],
)
def test_numbers_beyond_floating_point_are_refused_with_their_place(material):
    with pytest.raises(ValueError, match="answer 1"):
        signals_of([{"answer": "a", **material}])
