import re

import pytest

from calibrant.display.html import Html, escaped, html_table, notebook, page, style_sheet, tag
from tests.support.markup import check_inert, parsed


def test_markup_and_control_characters_are_inert():
    assert escaped('<img src="x">') == "&lt;img src=&quot;x&quot;&gt;"
    assert escaped("\x1b[31m'\u202e") == r"\x1b[31m&#x27;\u202e"
    assert escaped(3) == "3"


def test_content_and_attributes_are_escaped_unless_they_are_html():
    assert tag("p", "<b>", Html("<i>x</i>"), title='"') == (
        '<p title="&quot;">&lt;b&gt;<i>x</i></p>'
    )


def test_a_table_has_its_cells_and_headings():
    html = html_table(("name", "n", ""), [("<a>", "1", "x"), ("b", "2", "y")], highlighted=[1])
    assert parsed(html).tables == [[["name", "n", ""], ["<a>", "1", "x"], ["b", "2", "y"]]]
    assert html.count('scope="row"') == 2
    assert '<tr class="cal-chosen"><th scope="row">b</th>' in html
    assert "<th></th>" not in html  # which a screen reader would read out


@pytest.mark.parametrize("made", [notebook, lambda html: page("<title>", html)])
def test_a_box_is_whole_and_inert(made):
    check_inert(made(tag("p", "<script>")))


def test_no_rule_reaches_beyond_the_box():
    css = re.sub(r"@media[^{]*\{(.*?\})\}", r"\1", style_sheet())
    for selectors in re.findall(r"([^{}]+)\{[^{}]*\}", css):
        for selector in selectors.split(","):
            assert re.search(r"\.cal(\.cal)?( |$|:)", selector.strip()), selector
    assert css.count("{") == css.count("}")


def test_the_page_decides_on_light_and_dark_before_the_system():
    css = style_sheet()
    first, *later = (css.index(part) for part in ("prefers-color-scheme", "=true", "vscode-dark"))
    assert first < min(later)
