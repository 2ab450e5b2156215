"""Confidence of answers from token probabilities, against slow definitions."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from calibrant.llm.answers.confidence import AGGREGATORS, answer_confidence

SLOW: dict[str, Callable[[list[float]], float]] = {
    "geometric": lambda p: math.prod(x ** (1 / len(p)) for x in p),
    "product": math.prod,
    "arithmetic": lambda p: sum(p) / len(p),
    "first": lambda p: p[0],
    "minimum": min,
}


@pytest.fixture
def answers(rng):
    return [rng.uniform(0.01, 1, size=rng.integers(1, 12)) for _ in range(50)]


def test_every_aggregate_has_a_slow_definition():
    assert SLOW.keys() == AGGREGATORS.keys()


@pytest.mark.parametrize("aggregate", SLOW)
def test_confidence_in_every_layout(aggregate, answers, rng):
    wanted = [SLOW[aggregate](p.tolist()) for p in answers]
    np.testing.assert_allclose(answer_confidence(answers, aggregate), wanted)
    np.testing.assert_allclose(
        answer_confidence([torch.tensor(p) for p in answers], aggregate), wanted
    )

    width = max(map(len, answers))
    padded, mask = np.full((50, width), np.nan), np.zeros((50, width), dtype=bool)
    for i, p in enumerate(answers):
        skipped = int(rng.integers(width - len(p) + 1))  # padding on either side
        padded[i, skipped : skipped + len(p)] = p
        mask[i, skipped : skipped + len(p)] = True
    np.testing.assert_allclose(answer_confidence(padded, aggregate, mask=mask), wanted)
    tensors = torch.tensor(padded), torch.tensor(mask)
    np.testing.assert_allclose(answer_confidence(tensors[0], aggregate, mask=tensors[1]), wanted)

    names = rng.permutation(1000)[:50]
    flat = np.concatenate([answers[i] for i in np.argsort(names)])
    ids = np.repeat(np.sort(names), [len(answers[i]) for i in np.argsort(names)])
    by_name = np.asarray(wanted)[np.argsort(names)]
    np.testing.assert_allclose(answer_confidence(flat, aggregate, documents=ids), by_name)
    # answers that come mixed, each in the order of its tokens
    mixed = np.argsort(rng.random(len(ids)))
    mixed = np.concatenate([np.sort(mixed[: len(ids) // 2]), np.sort(mixed[len(ids) // 2 :])])
    order = {d: iter(np.flatnonzero(ids == d)) for d in np.unique(ids)}
    at = [next(order[d]) for d in ids[mixed]]
    np.testing.assert_allclose(
        answer_confidence(flat[at], aggregate, documents=ids[mixed]), by_name
    )


def test_default_is_the_geometric_mean():
    assert answer_confidence([[0.9, 0.4]]) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("given", "layout", "message"),
    [
        ([[0.5], [], [0.2]], {}, r"answer 1 has no tokens \(1 of 3"),
        ([], {}, "holds no answer"),
        (np.ones((2, 3)), {"mask": [[True, False, False], [False] * 3]}, "answer 1 has no tokens"),
        (np.ones((2, 3)), {"mask": np.ones((3, 2), dtype=bool)}, r"\(2, 3\) and \(3, 2\)"),
        (np.ones(3), {"documents": [0, 1]}, r"\(3,\) and \(2,\)"),
        (np.ones(3), {"documents": [0, 1, 1], "mask": np.ones(3, dtype=bool)}, "not both"),
        (np.ones(3), {}, "pass mask"),
        ([[-0.1, -0.2]], {}, r"np\.exp"),
        ([[0.5, math.nan]], {}, "NaN"),
        ([[1.5]], {}, r"in \[0, 1\]"),
        ([[[0.5]]], {}, r"got shape \(1, 1\) for answer 0"),
    ],
)
def test_bad_answers_are_refused(given, layout, message):
    with pytest.raises(ValueError, match=message):
        answer_confidence(given, **layout)
