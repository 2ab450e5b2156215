"""Chunks of rows against the same rows of a flattened copy."""

import itertools

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
