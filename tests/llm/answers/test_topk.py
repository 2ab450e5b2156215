"""Bounds from the top tokens of a service."""

from collections import UserList
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy.special import softmax

from calibrant.llm.answers.choices import choice_logits_from_top
from calibrant.llm.answers.topk import Bounds, _log_partition_bounds, _top_logprobs, top_confidence


def full_distributions(rng, n, vocabulary):
    """Peaked, flat and heavy-tailed rows of log-probabilities, the largest first."""
    scale = rng.uniform(0.1, 6, size=(n, 1))
    logits = scale * np.where(rng.random((n, 1)) < 0.5, 1, -1) * rng.gumbel(size=(n, vocabulary))
    return -np.sort(-np.log(softmax(logits, -1)), axis=1)


@pytest.mark.parametrize("temperature", [0.4, 0.8, 1.0, 1.3, 2.0, 5.0])
@pytest.mark.parametrize("k", [1, 3, 20])
def test_bounds_hold_for_full_distributions(rng, temperature, k):
    logs = full_distributions(rng, 500, 300)
    truth = softmax(logs / temperature, -1)[:, 0]
    found = top_confidence(logs[:, :k], temperature, vocabulary=300, rounding=1e-14)
    assert (found.low <= truth + 1e-12).all()
    assert (truth <= found.high + 1e-12).all()
    np.testing.assert_allclose(found.middle, (found.low + found.high) / 2)
    shown = softmax(logs[:, :k] / temperature, -1)[:, 0]
    assert (shown >= found.high - 1e-12).all()  # renormalising is too sure
    # single precision is within the default
    rough = top_confidence(logs[:, :k].astype(np.float32), temperature, vocabulary=300)
    assert ((rough.low <= truth + 1e-5) & (truth <= rough.high + 1e-5)).all()
    if temperature == 1:
        np.testing.assert_allclose(found.low, np.exp(logs[:, 0]))
        np.testing.assert_allclose(found.high, np.exp(logs[:, 0]))


@pytest.mark.parametrize("temperature", [0.2, 0.5, 1.0, 1.5, 5.0])
@pytest.mark.parametrize("k", [1, 5, 60])
@pytest.mark.parametrize("digits", [1, 2, 4])
def test_bounds_hold_for_rounded_log_probabilities(rng, temperature, k, digits):
    logs = full_distributions(rng, 500, 60)
    truth = softmax(logs / temperature, -1)[:, 0]
    sums = np.log(np.exp(logs / temperature).sum(1))
    options = {"vocabulary": 60, "rounding": 0.5 * 10**-digits}
    shown = logs[:, :k].round(digits)
    found = top_confidence(shown, temperature, **options)
    assert ((found.low <= truth + 1e-12) & (truth <= found.high + 1e-12)).all()
    assert ((found.low <= found.middle) & (found.middle <= found.high) & (found.high <= 1)).all()
    low, high = _log_partition_bounds(
        _top_logprobs(shown, rounding=0.05), 1 / temperature, **options
    )
    assert ((low <= sums + 1e-12) & (sums <= high + 1e-12)).all()
    if k == 60:  # then a difference of two log-probabilities is off by twice the rounding
        widest = np.tanh(10**-digits / temperature / 2)
        assert (found.high - found.low <= widest + 1e-12).all()


@pytest.mark.parametrize("temperature", [0.2, 0.5, 1.5, 5.0])
def test_hidden_tokens_may_exceed_the_least_shown_by_its_rounding(temperature):
    for equal in range(2, 60):  # so many tokens share everything, others are impossible
        shown = np.log([[1 / equal]]).round(1)
        logs = _top_logprobs(shown, rounding=0.05)
        low, high = _log_partition_bounds(logs, 1 / temperature, vocabulary=60, rounding=0.05)
        truth = (1 - 1 / temperature) * np.log(equal)
        assert low[0] - 1e-12 <= truth <= high[0] + 1e-12


def test_bounds_are_ordered_and_at_most_one(rng):
    for logs in ([[0.0]], [[-1e-9, -30.0]], np.log1p(-rng.exponential(1e-7, (2000, 1)))):
        for temperature in (0.05, 0.2, 1.0, 20.0):
            found = top_confidence(np.asarray(logs), temperature, vocabulary=1000)
            assert (found.low <= found.high).all()
            assert found.high.max() <= 1


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_bounds_are_reached(temperature):
    shown, vocabulary = np.array([0.4, 0.15, 0.1]), 40
    equal = np.append(shown, np.full(37, 0.35 / 37))
    packed = np.concatenate([shown, [0.1, 0.1, 0.1, 0.05], np.zeros(33)])
    ends = [p[0] ** (1 / temperature) / (p ** (1 / temperature)).sum() for p in (equal, packed)]
    found = top_confidence(np.log(shown)[None], temperature, vocabulary=vocabulary, rounding=0)
    np.testing.assert_allclose([found.low[0], found.high[0]], sorted(ends))


def test_bounds_meet_if_all_tokens_are_shown(rng):
    logs = full_distributions(rng, 20, 30)
    found = top_confidence(logs, 1.8, vocabulary=30)
    truth = softmax(logs / 1.8, -1)[:, 0]
    # what rounding leaves of the sum is spread over no tokens
    np.testing.assert_allclose(found.low, truth, atol=1e-6)
    np.testing.assert_allclose(found.high, truth, atol=1e-6)


def test_k_excludes_a_drawn_token(rng):
    logs = full_distributions(rng, 300, 200)
    shown = np.column_stack([logs[:, :5], logs[:, 60]])  # five likeliest and one that was drawn
    truth = softmax(logs / 1.5, -1)[:, 0]
    found = top_confidence(shown, 1.5, vocabulary=200, k=5)
    assert ((found.low <= truth + 1e-12) & (truth <= found.high + 1e-12)).all()
    wrong = top_confidence(shown, 1.5, vocabulary=200)
    assert not (truth <= wrong.high + 1e-12).all()


def test_each_position_may_have_a_temperature(rng):
    logs = full_distributions(rng, 4, 100)[:, :5]
    several = top_confidence(logs, [0.5, 1.0, 2.0, 3.0], vocabulary=100)
    for i, temperature in enumerate((0.5, 1.0, 2.0, 3.0)):
        one = top_confidence(logs[i : i + 1], temperature, vocabulary=100)
        np.testing.assert_allclose([x[i] for x in several], [x[0] for x in one])


def test_forms_of_top_logprobs_agree():
    rows = [{" Paris": -0.3, "Lyon": -2.0, "\ufffd": -3.0}, {"a": -0.1}]
    entries = [
        {
            "token": "x",
            "logprob": -9.0,
            "top_logprobs": [{"token": t, "logprob": v} for t, v in row.items()],
        }
        for row in rows
    ]
    array = np.array([[-2.0, -0.3, -3.0], [-0.1, -np.inf, -np.inf]])
    for form in (rows, entries, array, torch.tensor(array)):
        np.testing.assert_array_equal(_top_logprobs(form), -np.sort(-array, axis=1))
    low, high = _log_partition_bounds(_top_logprobs(rows), 1.0, vocabulary=9)
    np.testing.assert_allclose(low, 0, atol=2e-6)
    np.testing.assert_allclose(high, 0, atol=2e-6)


@pytest.mark.parametrize(
    ("top", "options", "message"),
    [
        ([[2.0, 1.0]], {}, "logarithms of probabilities"),
        ([[0.004]], {}, "rounded by more than 1e-06"),
        ([[0.007]], {"rounding": 0.005}, "got a sum of 1.007"),
        ([[-np.inf, -np.inf]], {}, "natural logarithms"),
        ([[np.nan, -1.0]], {}, "natural"),
        ([-1.0, -2.0], {}, r"got \(2,\)"),
        ([{}], {}, "got "),
        ([[-1.0, -2.0]], {"temperature": 0.0}, "above 0"),
        ([[-1.0, -2.0]], {"temperature": [1.0, 2.0]}, "each of 1 positions"),
        ([[-1.0, -2.0]], {"vocabulary": 1}, "2 tokens are shown"),
        ([[-1.0, -2.0]], {"k": 0}, "k must be at least 1"),
    ],
)
def test_bad_top_logprobs_are_refused(top, options, message):
    with pytest.raises(ValueError, match=message):
        top_confidence(top, **{"temperature": 1.5, "vocabulary": 100, **options})


def test_tokens_with_probability_zero():
    """Some write -9999 for a probability of nothing."""
    found = top_confidence([{"a": -0.1, "b": -9999.0}], 1.5, vocabulary=50_000)
    wanted = top_confidence([{"a": -0.1}], 1.5, vocabulary=50_000)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, wanted)


class Logprob(NamedTuple):
    """As vLLM has them, under the id of the token."""

    logprob: float
    rank: int
    decoded_token: str


def in_forms_of_services(rows):
    """Top tokens ``{token: logprob}`` as clients return them, and as JSON."""
    types = pytest.importorskip("openai.types")
    chat = types.chat.chat_completion.ChoiceLogprobs.model_validate(
        {
            "content": [
                {
                    **{"token": "x", "logprob": -9.0, "bytes": None},
                    "top_logprobs": [
                        {"token": token, "logprob": value, "bytes": None}
                        for token, value in row.items()
                    ],
                }
                for row in rows
            ]
        }
    )
    completion = types.completion_choice.Logprobs(
        tokens=["x"] * len(rows), token_logprobs=[-9.0] * len(rows), top_logprobs=rows
    )
    by_id = [
        {number: Logprob(value, 1, token) for number, (token, value) in enumerate(row.items())}
        for row in rows
    ]
    json_by_id = [{str(k): v._asdict() for k, v in row.items()} for row in by_id]
    return {
        "chat": chat,
        "chat_content": chat.content,
        "chat_json": chat.model_dump(),
        "completion": completion,
        "completion_json": completion.model_dump(),
        "vllm": by_id,
        "vllm_json": json_by_id,
        "vllm_sequence": UserList(by_id),
    }


FORMS = (
    *("chat", "chat_content", "chat_json", "completion", "completion_json"),
    *("vllm", "vllm_json", "vllm_sequence"),
)


@pytest.mark.parametrize("form", FORMS)
def test_objects_of_clients_are_their_numbers(form):
    rows = [{" A": -0.25, "B": -2.0, "C": -3.0}, {"A": -1.0, " B": -0.75}]
    top = in_forms_of_services(rows)[form]
    for name, value in zip(Bounds._fields, top_confidence(top, 1.5, vocabulary=900), strict=True):
        wanted = getattr(top_confidence(rows, 1.5, vocabulary=900), name)
        np.testing.assert_array_equal(value, wanted)
    choices = np.exp(choice_logits_from_top(top, ("A", "B")))
    odds = [np.exp(-0.25 + 2.0), np.exp(-1.0 + 0.75)]
    np.testing.assert_allclose(choices[:, 0] / choices[:, 1], odds)


@pytest.mark.parametrize(
    "top",
    [
        [{"token": "A", "logprob": -0.1, "bytes": [65]}],
        [{"token": "A", "logprob": -0.1, "top_logprobs": []}],
        [SimpleNamespace(token="A", logprob=-0.1, top_logprobs=[])],
        [{"A": -0.1}, None],
    ],
)
def test_positions_without_top_tokens_name_what_to_request(top):
    with pytest.raises(ValueError, match=r"of top has no top tokens, got .*request them .*=20"):
        top_confidence(top, 1.5, vocabulary=900)


def test_choices_need_tokens():
    for wrong in ({"a": -0.1}, [[10**400]], [[-0.1], [-0.1, -2.0]]):
        with pytest.raises(
            ValueError, match=r"top must be log-probabilities \(n, k\), or a list of"
        ):
            top_confidence(wrong, 1.5, vocabulary=900)
    with pytest.raises(TypeError, match="top must hold tokens with their log-probabilities"):
        choice_logits_from_top(np.log([[0.5, 0.5]]))
