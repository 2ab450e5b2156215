"""Registries understand names as people type them, and hint at the nearest."""

import pytest

import calibrant as cal
from calibrant._core.options import Registry


@pytest.mark.parametrize("registry", [cal.CALIBRATORS, cal.METRICS, cal.LOSSES])
def test_every_name_and_alias_is_understood_as_typed(registry):
    for name, entry in registry.items():
        for typed in (name, name.upper(), name.replace("_", "-"), f" {name} ", *entry.aliases):
            assert registry.name(typed) == name
            assert registry[typed] is entry


def test_the_nearest_name_is_hinted_at():
    registry = Registry("loss", {"focal": 1, "ls": 2})
    with pytest.raises(KeyError, match="unknown loss 'focall': did you mean focal"):
        registry["focall"]
    with pytest.raises(ValueError, match="unknown loss 'x': choose from focal, ls"):
        registry.name("x")
    assert "FOCAL" not in registry  # membership and iteration are those of a dictionary
    assert registry.get("FOCAL") is None
