"""A headless Chromium, for tests of pages: what they show, fetch and report."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

AXE = Path(sys.prefix) / "browser" / "node_modules" / "axe-core" / "axe.min.js"
"""Accessibility checks; ``make test`` installs them from npm."""
# Chromium's own connections would fail without a network, and disturb what the page fetches.
QUIET = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars"),
)
RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice")


class Browser:
    """One window; ``driver`` is that of Selenium."""

    def __init__(self, driver: Any):
        self.driver = driver

    def open(self, page: str | Path) -> None:
        """Open a file or an address, and forget what earlier pages logged."""
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)
        self.driver.get(page.as_uri() if isinstance(page, Path) else page)

    def resize(self, width: int, height: int = 900) -> None:
        """Set the size of the page itself, as small as a phone's."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, scheme: str) -> None:
        """Prefer "light" or "dark" pages."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def find(self, selector: str) -> Any:
        """Return the first element of a CSS selector."""
        return self.driver.find_element("css selector", selector)

    def find_all(self, selector: str) -> Any:
        return self.driver.find_elements("css selector", selector)

    def run(self, script: str, *arguments: Any) -> Any:
        """Run JavaScript in the page, and return what it returns."""
        return self.driver.execute_script(script, *arguments)

    def console_errors(self) -> list[str]:
        """Return errors and warnings that the page logged since they were last asked for."""
        entries = self.driver.get_log("browser")
        return [e["message"] for e in entries if e["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """Return the addresses that the page has fetched since they were last asked for."""
        messages = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent]

    def violations(self) -> list[str]:
        """Return the rules of accessibility that the page breaks, with the elements that do."""
        self.run(AXE.read_text("utf-8"))
        script = (
            "const done = arguments[arguments.length - 1];"
            "axe.run({runOnly: arguments[0]}).then(r => done(r.violations),"
            " problem => done([{id: String(problem), nodes: []}]));"
        )
        broken = self.driver.execute_async_script(script, list(RULES))
        return [f"{v['id']}: {[n['html'][:200] for n in v['nodes'][:3]]}" for v in broken]

    def screenshot(self, file: Path) -> None:
        self.driver.save_screenshot(str(file))


@contextmanager
def browser(downloads: Path | None = None) -> Iterator[Browser]:
    """Start a browser; skip the test where there is none, unless CALIBRANT_BROWSER is set."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver and AXE.exists()):
        missing = "needs chromium, chromium-driver (Debian) and axe-core (npm): see CONTRIBUTING.md"
        (pytest.fail if os.environ.get("CALIBRANT_BROWSER") else pytest.skip)(missing)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in QUIET:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    if downloads is not None:
        options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    started = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        yield Browser(started)
    finally:
        started.quit()
