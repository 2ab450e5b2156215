"""Fixtures of the tests of token tables and heads."""

import pytest

from tests.support.language_models import drawn_documents, tiny_model


@pytest.fixture(scope="session")
def model():
    return tiny_model()


@pytest.fixture(scope="session")
def documents():
    return drawn_documents()
