"""Pages in a browser: what they do with a script, without one, on a phone and in the dark."""

import re

import numpy as np
import pytest

import calibrant as cal
from calibrant.monitor import Monitor
from calibrant.show.report import save_monitor_report
from tests.show.report.conftest import drawn
from tests.support.browser import browser


@pytest.fixture(scope="module")
def window():
    with browser() as one:
        yield one


@pytest.fixture(scope="module")
def page(tmp_path_factory, over_confident):
    file = tmp_path_factory.mktemp("pages") / "report.html"
    over_confident.save(file)
    return file


@pytest.fixture
def shown(window, page):
    window.resize(1200)
    window.prefer("light")
    window.open(page)
    return window


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    file = tmp_path_factory.mktemp("pages") / "several.html"
    sets = {"<b>monday": drawn(150), "tuesday": drawn(150, factor=4.0)}
    cal.report(sets, methods=[], level=None).save(file)
    return file


@pytest.fixture(scope="module")
def drift(tmp_path_factory):
    file = tmp_path_factory.mktemp("pages") / "drift.html"
    monitor = Monitor()
    for day in range(3):
        monitor.update(**drawn(200, factor=3.0, seed=day), window=day)
    save_monitor_report(monitor.report(), file)
    return file


def names_in(window):
    cells = window.find_all("#classes tbody tr:not([hidden]) th")
    return [cell.get_attribute("textContent") for cell in cells]


def test_nothing_is_fetched_and_nothing_fails(shown, page):
    assert shown.console_errors() == []
    outside = [a for a in shown.requests() if not a.startswith("data:")]
    assert [address.rpartition("/")[2] for address in outside] == [page.name]


@pytest.mark.parametrize("kind", ["page", "several", "drift"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_accessible_and_fit_a_phone(window, request, kind, scheme):
    window.resize(360)
    window.prefer(scheme)
    window.open(request.getfixturevalue(kind))
    window.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert window.violations() == []
    assert window.run("return document.documentElement.scrollWidth") == 360
    assert window.console_errors() == []


def test_classes_are_sorted_by_a_press_on_a_heading(shown):
    heading = shown.find("#classes thead th:nth-child(2)")
    for order, sign in (("descending", -1), ("ascending", 1)):
        heading.find_element("tag name", "button").click()
        assert heading.get_attribute("aria-sort") == order
        cells = shown.find_all("#classes tbody td:nth-child(2)")
        counts = [int(cell.text.replace(",", "")) for cell in cells]
        assert counts == sorted(counts, key=lambda n: sign * n)
    shown.find("#classes thead th:first-child button").click()
    assert names_in(shown) == sorted(names_in(shown))


def test_many_classes_are_found_by_name(window, tmp_path):
    names = ["ant", "bee", "<i>eel</i>", *(f"no. {k}" for k in range(8))]
    data = {**drawn(600, classes=11), "class_names": np.array(names)}
    cal.report(data, methods=[], level=None).save(tmp_path / "many.html")
    window.open(tmp_path / "many.html")
    field = window.find("input[type=search]")
    field.send_keys("EE")
    assert sorted(names_in(window)) == ["<i>eel</i>", "bee"]
    assert window.find("#classes-count").text == "2 of 11 shown"
    field.clear()
    field.send_keys("x")
    assert names_in(window) == []


def test_few_classes_need_no_search(shown):
    assert shown.find_all("input[type=search]") == []


def test_the_slider_tells_the_errors_of_the_answers(shown, over_confident):
    points = over_confident.subjects[0].remedy.coverage
    for index in (0, 40, len(points) - 1):
        script = "const s = document.querySelector('.slider input'); s.value = arguments[0];"
        shown.run(script + "s.dispatchEvent(new Event('input'))", index)
        text = shown.find(".slider output").text
        point = points[index]
        assert f"Answer {100 * point.coverage:.1f} %" in text
        assert f"{100 * point.error:.2f} % of these answers are wrong" in text
        threshold = float(re.findall(r"at least ([\d.]+)\. ", text)[0])
        assert threshold == pytest.approx(point.threshold, abs=5e-5)
        widths = [float(bar.size["width"]) for bar in shown.find_all(".stack i")]
        whole = shown.find(".stack").size["width"]
        assert np.isclose(sum(widths) / whole, point.coverage, atol=0.01)


def test_the_theme_can_be_switched(shown):
    def paper():
        return shown.run("return getComputedStyle(document.body).backgroundColor")

    button, light = shown.find(".theme"), paper()
    assert button.text == "Dark theme"
    button.click()
    assert paper() != light
    assert button.text == "Light theme"
    button.click()
    assert paper() == light


def test_findings_open_and_marks_show_their_numbers(shown):
    finding = shown.find(".finding")
    assert not finding.find_element("css selector", ".more").is_displayed()
    finding.find_element("tag name", "summary").click()
    assert "What to do" in finding.text
    titles = shown.find_all("#how-far svg g title")
    assert any("accuracy" in title.get_attribute("textContent") for title in titles)


def test_code_can_be_copied(shown):
    button = shown.find(".snippet .copy")
    shown.run("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()
    shown.driver.execute_async_script("setTimeout(arguments[0], 50)")
    assert button.text in ("Copied", "Selected")


def test_all_is_there_without_a_script(window, page):
    window.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        window.resize(1200)
        window.open(page)
        assert not window.find(".theme").is_displayed()
        assert not window.find(".slider").is_displayed()
        assert len(names_in(window)) == 5
        assert "confidence at least" in window.find("#decide table").text
        assert window.find("#how-far svg").is_displayed()
    finally:
        window.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_a_link_opens_the_set_that_it_leads_to(window, several):
    window.resize(1200)
    window.open(several)
    box = window.find("#set-2")
    assert box.get_attribute("open") is None
    window.find("nav a[href='#set-2']").click()
    window.driver.execute_async_script("setTimeout(arguments[0], 50)")
    assert box.get_attribute("open") is not None


def test_classes_need_no_scrolling_on_a_small_screen(window, tmp_path):
    data = drawn(600, classes=2, factor=3.0)
    cal.report(data, methods=[], level=0.9).save(tmp_path / "two.html")
    window.resize(1100)
    window.open(tmp_path / "two.html")
    wide = "const t = document.querySelector('#classes'); return t.scrollWidth - t.clientWidth"
    assert window.run(wide) == 0


def test_printed_tables_stay_with_their_headings(window, page):
    window.open(page)
    window.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        style = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
        assert window.run(style, ".scroll", "breakInside") == "avoid"
        assert window.run(style, "#details summary", "breakAfter") == "avoid"
        assert window.run(style, "#how-far", "breakBefore") == "auto"
        assert window.run(style, "footer", "breakBefore") == "avoid"
    finally:
        window.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_print_shows_closed_details(window, page):
    window.open(page)
    window.run("window.dispatchEvent(new Event('beforeprint'))")
    assert window.run("return document.querySelectorAll('details:not([open])').length") == 0
    window.run("window.dispatchEvent(new Event('afterprint'))")
    assert window.run("return document.querySelectorAll('details:not([open])').length") > 0
