"""A gate for answers of the server in ``tests/support/fake_upstream.py``."""

import numpy as np
import pytest

from calibrant.llm import fit_gate
from calibrant.llm.answers.confidence import answer_confidence
from calibrant.llm.answers.rows import AnswerRows
from tests.support.fake_upstream import MODEL


@pytest.fixture(scope="session")
def make_gate():
    """Return a function that makes gates for a model."""

    def make(model=MODEL, **about):
        rng = np.random.default_rng(0)
        rows = []
        for _ in range(1500):
            probs = rng.beta(6, 1, 2)
            right = rng.random() < answer_confidence([probs])[0]
            row = {"token_probs": probs.tolist(), "correct": bool(right), "model": model}
            rows.append({**row, **about})
        return fit_gate(AnswerRows.of(rows), max_error=0.1)

    return make


@pytest.fixture(scope="session")
def token_gate(make_gate):
    return make_gate()
