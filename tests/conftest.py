import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("calibrant", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("calibrant")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20260101)
