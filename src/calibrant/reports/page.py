"""A report as a page of HTML."""

from __future__ import annotations

from calibrant.display.html import escaped
from calibrant.reports.results import Results


def page_of(report: Results) -> str:
    """Return the page."""
    title, text = escaped(report.title), escaped(str(report.verdict))
    return f"<!doctype html><title>{title}</title><pre>{text}</pre>"


def notebook_form(report: Results) -> str:
    """Return the verdict and findings for a notebook."""
    return f"<pre>{escaped(str(report.verdict))}</pre>"
