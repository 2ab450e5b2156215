"""The page in a browser: files in, progress, report and downloads out, and nothing from outside."""

import time

import numpy as np
import pytest

import calibrant as cal
from tests.support.browser import browser
from tests.ui.conftest import npz, over_confident

HOSTILE = '<img src=x onerror="document.title=1">'
DROP = """
const data = new DataTransfer();
for (const [name, bytes] of arguments[0]) data.items.add(new File([new Uint8Array(bytes)], name));
const event = (type) => new DragEvent(type, {dataTransfer: data, bubbles: true, cancelable: true});
const zone = document.getElementById("drop");
zone.dispatchEvent(event("dragenter"));
const marked = document.body.classList.contains("dragging");
zone.dispatchEvent(event("dragover"));
zone.dispatchEvent(event("drop"));
return marked && !document.body.classList.contains("dragging");
"""


@pytest.fixture(scope="module")
def downloads(tmp_path_factory):
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def window(downloads):
    with browser(downloads) as started:
        started.resize(1200)
        yield started


@pytest.fixture
def page(window, client):
    """The page as it is opened; whatever a test does, nothing fails and nothing is fetched."""
    window.open(client.guard.address)
    yield window
    assert window.console_errors() == []
    asked = window.requests()
    assert asked
    assert [url for url in asked if not url.startswith(f"http://{client.host}/")] == []


def wait_until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def wait_for(page, view):
    script = "return !document.getElementById('view-' + arguments[0]).hidden"
    wait_until(lambda: page.run(script, view))


def choose_file(page, path, content):
    path.write_bytes(content)
    page.find("#file").send_keys(str(path))


def test_a_file_becomes_a_report_and_a_calibrator(page, content, arrays, tmp_path, downloads):
    assert page.violations() == []
    choose_file(page, tmp_path / "mine.npz", content)
    wait_for(page, "choose")
    assert page.find("#splits").text.split() == ["val", "300", "logits", "test", "200", "logits"]
    assert page.find("#facts").text.startswith("3 classes")
    assert page.violations() == []
    page.run("document.getElementById('method').value = 'ts'")
    page.find("#choices .primary").click()
    wait_for(page, "run")
    assert page.violations() == []
    wait_for(page, "done")
    assert page.violations() == []
    page.driver.switch_to.frame("report")
    wait_until(lambda: "mine" in page.run("return document.title"))
    assert page.run("return origin") == "null"  # it can reach nothing here
    page.driver.switch_to.default_content()
    page.find("#open").click()
    tabs = page.driver.window_handles
    page.driver.switch_to.window(tabs[1])
    wait_until(lambda: "mine" in page.driver.title)
    assert page.run("return origin") == "null"
    page.driver.close()
    page.driver.switch_to.window(tabs[0])
    page.find("[download='calibrator.safetensors']").click()
    file = downloads / "calibrator.safetensors"
    wait_until(file.exists)
    fitted = cal.TemperatureScaling().fit(arrays["val_logits"], arrays["val_labels"])
    loaded = cal.load(file)
    assert float(loaded.temperature_) == pytest.approx(float(fitted.temperature_), rel=1e-4)
    page.driver.refresh()  # the job is in the address, and the token is not
    wait_for(page, "done")
    assert "token" not in page.driver.current_url
    assert page.find("#view-done .file-name").text == "mine.npz"
    page.find("#view-done [data-action=restart]").click()
    wait_for(page, "file")


def test_the_sample_can_be_tried_and_stopped(page):
    page.find("#sample").click()
    wait_for(page, "choose")
    assert page.find("#view-choose .file-name").text == cal.sample_path().name
    assert page.find("#keep-field").is_displayed()
    assert not page.find("#estimand-field").is_displayed()
    page.find("#keep").click()
    assert "accuracy stays" in page.find("#keep-note").text
    page.find("#choices .primary").click()
    wait_for(page, "run")
    page.find("#stop").click()
    wait_for(page, "choose")


def test_the_stop_button_stays_where_it_is_while_the_steps_change(page):
    """A button that moves as somebody clicks on it is missed."""
    told = {"name": "a.npz", "state": "running", "steps": ["Fit", "Report"], "seconds": 1}
    page.run("show('run')")
    places = [page.find("#stop").rect]
    for step, progress in ((-1, None), (0, None), (0, [1, 3]), (1, [2, 3])):
        page.run("running(arguments[0])", {**told, "step": step, "progress": progress})
        places.append(page.find("#stop").rect)
    assert page.find("#steps progress").is_displayed()
    assert places == [places[0]] * 5


def test_a_file_can_be_dropped(page):
    logits, labels = over_confident(40, 3, classes=2)
    dropped = npz(logits=logits, labels=labels, class_names=[HOSTILE, "日本"])
    assert page.run(DROP, [["two.npz", list(dropped)]])
    wait_for(page, "choose")
    assert page.find("#names").text == f"Classes: {HOSTILE}, 日本"
    assert page.find("#estimand-field").is_displayed()
    assert not page.find("#split-fields").is_displayed()
    assert page.driver.title == "calibrant"
    assert page.violations() == []


def test_a_split_to_fit_on_must_be_chosen_where_there_is_only_a_test_set(page, arrays, tmp_path):
    extra = {"new_logits": arrays["val_logits"], "new_labels": arrays["val_labels"]}
    test = {key: values for key, values in arrays.items() if key.startswith("test")}
    choose_file(page, tmp_path / "test.npz", npz(**test, **extra))
    wait_for(page, "choose")
    assert page.find("#fit-split").get_attribute("value") == "?"
    page.find("#choices .primary").click()
    assert page.find("#view-choose").is_displayed()
    message = page.run("return document.getElementById('fit-split').validationMessage")
    assert message == "Choose a split of the file."
    page.run(
        "const s = document.getElementById('fit-split'); s.value = 'test';"
        "s.dispatchEvent(new Event('change', {bubbles: true}))"
    )
    assert "each with fits on the others" in page.find("#split-note").text


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([["cut.npz", b"PK\x03\x04"]], "cut.npz is damaged or incomplete"),
        ([[f"{HOSTILE[:4]}.npz", npz(x=np.zeros(2))]], f"{HOSTILE[:4]}.npz has no logits"),
        ([["model.pt", b"PK\x03\x04"]], "could run any code"),
        ([["a.npz", b"1"], ["b.npz", b"2"]], "one file at a time"),
    ],
)
def test_problems_are_explained(page, files, reason):
    page.run(DROP, [[name, list(content)] for name, content in files])
    wait_for(page, "error")
    assert reason in page.find("#error-text").text
    assert page.violations() == []
    refused = [entry for entry in page.console_errors() if "415" not in entry]
    assert refused == []  # Chromium logs the status of a refused upload
    page.find("#view-error [data-action=restart]").click()
    assert page.find("#view-file").is_displayed()


def test_a_file_that_is_too_large_is_not_even_sent(page):
    page.run(
        "take([{name: 'large.npz', size: 2000001, get stream() { throw Error('it was read'); }}])"
    )
    wait_for(page, "error")
    assert "--max-upload" in page.find("#error-text").text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone(window, client, scheme):
    window.resize(360, 740)
    window.prefer(scheme)
    try:
        window.open(client.guard.address)
        assert window.run("return document.documentElement.scrollWidth") == 360
        assert window.violations() == []
    finally:
        window.resize(1200)
        window.prefer("light")


def test_the_page_is_used_by_keyboard(page):
    """The file input is reached by tabs, and its label shows the focus."""
    from selenium.webdriver.common.keys import Keys

    for _ in range(10):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        if page.run("return document.activeElement.id") == "file":
            break
    assert page.run("return document.activeElement.id") == "file"
    style = "return getComputedStyle(document.querySelector('label[for=file]')).outlineStyle"
    assert page.run(style) == "solid"
