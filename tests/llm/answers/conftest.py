"""Fixtures of the tests that ask a model."""

import pytest

from tests.support.language_models import quiz_model, quiz_tokenizer


@pytest.fixture(scope="module")
def model():
    return quiz_model()


@pytest.fixture(scope="module")
def tokenizer():
    return quiz_tokenizer()
