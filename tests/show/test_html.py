import re

import pytest

from calibrant.show.box import Beside, Box, Callout
from calibrant.show.html import Html, _notebook, _rendered, _style_sheet, escaped
from calibrant.show.pages import page
from calibrant.show.tables import Table
from tests.support.markup import check_inert, parsed

HOSTILE = "<script>alert('1')</script>\x1b[31m\u202e"
SEEN = r"<script>alert('1')</script>\x1b[31m\u202e"


def test_markup_and_control_characters_are_inert():
    assert escaped('<img src="x">') == "&lt;img src=&quot;x&quot;&gt;"
    assert escaped("\x1b[31m'\u202e") == r"\x1b[31m&#x27;\u202e"
    assert escaped(3) == "3"


def test_templates_escape_everything_but_html():
    box = Box(HOSTILE, [HOSTILE], [Callout(HOSTILE)], [Html("<i>x</i>")], [HOSTILE])
    html = _rendered("box.html", box=box)
    assert "<i>x</i>" in html
    check_inert(html)
    assert " ".join(parsed(html).text).count(SEEN) == 4


def test_a_table_has_its_cells_and_headings():
    rows = [(HOSTILE, "1", "*2"), ("*b", "2", "y")]
    html = Table(("name", "n", ""), rows, highlighted=[1]).__html__()
    assert parsed(html).tables == [[["name", "n", ""], [SEEN, "1", "2"], ["*b", "2", "y"]]]
    assert html.count('scope="row"') == 2
    assert '<tr class="cal-chosen"><th scope="row">*b</th>' in html
    assert '<td class="cal-n"><b>2</b></td>' in html
    assert "<th></th>" not in html  # which a screen reader would read out


def test_the_text_of_a_box_has_what_its_html_has():
    inside = Box("inner", parts=[Table(("", "n"), [("a", "1")])])
    table = Table(("", "n"), [("bb", "20")])
    box = Box("t", ["about"], [Callout("so", "bad")], [Beside([inside, table])], ["beside"])
    assert box.text().splitlines() == ["about", "   n", "a  1", "     n", "bb  20", "beside", "so"]
    said = parsed(box.notebook()).text
    assert [word for word in said if word.strip() and "{" not in word] == [
        *("t", "about", "so", "inner", "n", "a", "1", "n", "bb", "20", "beside")
    ]


@pytest.mark.parametrize("made", [_notebook, lambda content: page("<title>", content)])
def test_a_box_is_whole_and_inert(made):
    check_inert(made(HOSTILE))


def test_no_rule_reaches_beyond_the_box():
    css = re.sub(r"@media[^{]*\{(.*?\})\}", r"\1", _style_sheet())
    for selectors in re.findall(r"([^{}]+)\{[^{}]*\}", css):
        for selector in selectors.split(","):
            assert re.search(r"\.cal(\.cal)?( |$|:)", selector.strip()), selector
    assert css.count("{") == css.count("}")


def test_the_page_decides_on_light_and_dark_before_the_system():
    css = _style_sheet()
    first, *later = (css.index(part) for part in ("prefers-color-scheme", "=true", "vscode-dark"))
    assert first < min(later)
