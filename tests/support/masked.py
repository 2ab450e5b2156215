"""Masked classes in methods that do not take them."""

import numpy as np
import pytest

from tests.support.simulate import drawn


def assert_masked_classes_are_refused(method, rng):
    """By a fit, and by a fitted calibrator."""
    logits, labels = drawn(rng, 300, 3)
    fitted = method().fit(logits, labels)
    logits[7, (labels[7] + 1) % 3] = -np.inf
    for refuse in (lambda: method().fit(logits, labels), lambda: fitted.predict_proba(logits)):
        with pytest.raises(ValueError, match=r"finite here, row 7 has -inf.* temperature method"):
            refuse()
