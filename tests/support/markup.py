"""Reads HTML and SVG strictly, for tests of what notebooks and reports show."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

VOID = {"meta", "br", "hr", "img", "input", "link"}
SVG = "{http://www.w3.org/2000/svg}"


class _Strict(HTMLParser):
    """Collects tables, titles and tags; raises where tags are not closed in order."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes = [], [], []
        self.tables, self.text = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> is out of order"

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data


def parsed(html):
    """Return the parser after a whole fragment whose tags are balanced."""
    reader = _Strict()
    reader.feed(html)
    reader.close()
    assert not reader.open, f"not closed: {reader.open}"
    return reader


def charts(html):
    """Return the root of each SVG in a page, which must be well-formed XML."""
    return [ElementTree.fromstring(one) for one in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]


def titles(chart):
    """Return the texts that marks show on hover."""
    return [element.text for element in chart.iter(f"{SVG}title")]


def texts(chart):
    return [element.text for element in chart.iter(f"{SVG}text")]


def check_inert(html):
    """Raise if a fragment holds script, fetches anything, or shows an undefined number."""
    reader = parsed(html)
    assert not {"script", "iframe", "object", "img", "link"} & set(reader.tags)
    for name, value in reader.attributes:
        assert not name.startswith("on"), name
        assert name not in ("href", "src"), value
    assert "url(" not in html
    for chart in charts(html):
        numbers = " ".join(v for e in chart.iter() for v in e.attrib.values())
        assert not re.search(r"\b(nan|inf)\b", numbers)
    assert not re.search(r"\bnan\b", " ".join(reader.text), re.IGNORECASE)
    return reader
