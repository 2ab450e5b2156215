import pytest

from tests.support.features import clustered_features


@pytest.fixture
def data(rng):
    return clustered_features(rng)
