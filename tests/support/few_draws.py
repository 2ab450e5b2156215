"""Quick intervals, for tests of what is done with them."""

from contextlib import contextmanager

import pytest

from calibrant.metrics import gaps


@contextmanager
def few_draws():
    """Draw a quarter of the replicates; how well intervals cover is seen in tests/metrics."""
    make = gaps._cells_of

    def fewer(filled, curve, replicates, seed):
        return make(filled, curve, replicates // 4, seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaps, "_cells_of", fewer)
        yield
