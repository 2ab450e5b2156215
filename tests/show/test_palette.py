import re

import pytest

from calibrant.show.style import DARK, LIGHT

TEXT = ("ink", "muted", "right", "wrong", "good", "warn", "bad")


def luminance(color: str) -> float:
    """Relative luminance by the definition of WCAG 2.1."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted([luminance(one), luminance(other)])
    return (light + 0.05) / (dark + 0.05)


def test_contrast_of_black_and_white():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("palette", [LIGHT, DARK])
@pytest.mark.parametrize("ground", ["paper", "panel"])
@pytest.mark.parametrize("name", TEXT)
def test_text_can_be_read_on_its_paper(palette, ground, name):
    assert contrast(getattr(palette, name), getattr(palette, ground)) >= 4.5


@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_css_declares_every_colour(palette):
    declared = re.findall(r"--cal-(\w+): (#[0-9a-f]{6});", palette.css_variables())
    assert dict(declared) == vars(palette)
