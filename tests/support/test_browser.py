"""The browser sees the faults that tests of pages ask it for."""

import pytest

from tests.support.browser import browser

PAGE = """<!doctype html><html lang="en"><head><title>t</title></head><body><main><h1>t</h1>
{}</main></body></html>"""


@pytest.fixture(scope="module")
def window():
    with browser() as one:
        yield one


@pytest.fixture
def shown(window, tmp_path):
    def show(content):
        page = tmp_path / "page.html"
        page.write_text(PAGE.format(content), "utf-8")
        window.open(page)
        return window

    return show


def test_a_plain_page_has_no_faults(shown):
    page = shown("<p>text</p>")
    assert page.find("p").text == "text"
    assert page.violations() == page.console_errors() == []
    assert [address.rpartition("/")[2] for address in page.requests()] == ["page.html"]


def test_missing_text_of_an_image_is_a_violation(shown):
    (broken,) = shown('<img src="data:image/gif;base64,R0lGODlhAQABAAAAACw=">').violations()
    assert "image-alt" in broken


def test_outside_requests_and_script_errors_are_seen(shown):
    page = shown('<script src="http://outside.invalid/x.js"></script><script>fault()</script>')
    assert "http://outside.invalid/x.js" in page.requests()
    assert any("fault is not defined" in message for message in page.console_errors())


def test_the_page_is_as_wide_as_a_phone_and_dark(shown):
    page = shown("<p>text</p>")
    page.resize(360)
    page.prefer("dark")
    dark = "return [innerWidth, matchMedia('(prefers-color-scheme: dark)').matches]"
    assert page.run(dark) == [360, True]
