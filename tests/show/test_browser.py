"""Boxes of notebooks in a browser: themes, width, hover and accessibility."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import calibrant as cal
from calibrant import show
from calibrant.show import shaded_text
from calibrant.show.pages import page
from calibrant.show.style import DARK, LIGHT
from tests.support.browser import browser


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    rng = np.random.default_rng(0)
    honest = 2 * rng.normal(size=(300, 4))
    labels = (honest + rng.gumbel(size=honest.shape)).argmax(-1)
    file = {"logits": 2 * honest, "labels": labels}
    ts = cal.TemperatureScaling().fit(2 * honest, labels)
    results: list[Any] = [
        cal.evaluate(file, metrics=["ece", "nll"]),
        ts,
        cal.effect(ts, file, level=None),
    ]
    text = shaded_text(["The", " answer", "."], [0.9, 0.3, 0.99])
    path = tmp_path_factory.mktemp("pages") / "results.html"
    path.write_text(page("Results", *map(show.box, results), text.box()), encoding="utf-8")
    with browser() as window:
        yield SimpleNamespace(path=path, window=window)


def rgb(color):
    return f"rgb({', '.join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5))})"


def ground(window):
    return window.run("return getComputedStyle(document.querySelector('.cal')).backgroundColor")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_accessible_and_fetch_nothing(shown, scheme):
    window = shown.window
    window.prefer(scheme)
    window.resize(1000)
    window.open(shown.path)
    assert window.violations() == []
    assert window.console_errors() == []
    assert window.requests() == [shown.path.as_uri()]
    assert ground(window) == rgb({"light": LIGHT, "dark": DARK}[scheme].paper)


@pytest.mark.parametrize(
    ("script", "palette"),
    [
        ("document.body.dataset.jpThemeLight = 'false'", DARK),
        ("document.body.classList.add('vscode-dark')", DARK),
        ("document.documentElement.setAttribute('theme', 'dark')", DARK),
        ("document.documentElement.dataset.theme = 'dark'", DARK),
        ("document.body.dataset.jpThemeLight = 'true'", LIGHT),
        ("document.body.classList.add('vscode-light')", LIGHT),
    ],
)
def test_the_theme_of_the_page_goes_before_that_of_the_system(shown, script, palette):
    window = shown.window
    window.prefer("light" if palette is DARK else "dark")
    window.open(shown.path)
    assert ground(window) != rgb(palette.paper)
    window.run(script)
    assert ground(window) == rgb(palette.paper)


def test_charts_fit_a_phone(shown):
    window = shown.window
    window.resize(360)
    window.open(shown.path)
    for width in window.run(
        "return [...document.querySelectorAll('svg')].map(e => e.getBoundingClientRect().right)"
    ):
        assert width <= 360
    assert window.run("return document.documentElement.scrollWidth") <= 360
    assert window.violations() == []
