"""Chunks of rows against the same rows of a flattened copy."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from calibrant._core import chunks
from calibrant._core.checks import Logits

CLASSES = 3
LOGITS = np.arange(72.0).reshape(3, 4, 2, CLASSES)
FORMS: dict[str, Logits] = {
    "array": LOGITS,
    "tensor": torch.from_numpy(LOGITS),
    "classes moved to the end": np.moveaxis(np.moveaxis(LOGITS, -1, 1).copy(), 1, -1),
}


@pytest.mark.parametrize("size", [1, 12, 30, 1000])
@pytest.mark.parametrize("form", FORMS)
def test_each_row_between_start_and_stop_comes_once_with_its_number(monkeypatch, size, form):
    monkeypatch.setitem(chunks.CHUNK_SIZE, "cpu", size)
    rows = LOGITS.reshape(-1, CLASSES)
    for start, stop in itertools.combinations(range(len(rows) + 1), 2):
        parts = list(chunks.raw_chunks(FORMS[form], CLASSES, start, stop))
        numbers = [first + i for first, part in parts for i in range(len(part))]
        assert numbers == list(range(start, stop))
        np.testing.assert_array_equal(np.concatenate([part for _, part in parts]), rows[numbers])


@pytest.mark.parametrize(
    ("dtype", "gap"), [("float16", 32752.0), ("float32", 1e8), ("bfloat16", 1e8), ("float64", 1e8)]
)
def test_a_class_far_below_the_largest_of_its_row_is_masked(dtype, gap):
    top = 8.0 if dtype == "float64" else 0.0
    row = torch.tensor([top, top - 0.9 * gap, top - 1.1 * gap, -np.inf], dtype=torch.float64)
    logits = torch.stack([row, torch.zeros(4)]).to(getattr(torch, dtype))
    forms: list[Any] = [logits] if dtype == "bfloat16" else [logits, logits.numpy()]
    for form in forms:
        chunk = next(chunks.labelled_chunks(chunks.examples(form, [0, 1]), 0, 2))
        assert torch.isneginf(chunk.logits).tolist() == [[False, False, True, True], [False] * 4]


def test_log_odds_exclude_a_class_on_either_side():
    odds = chunks.examples(np.array([-1e9, 3.0, 1e9]), [0, 1, 1])
    excluded = torch.isneginf(next(chunks.labelled_chunks(odds, 0, 3)).logits)
    assert excluded.tolist() == [[False, True], [False, False], [True, False]]
