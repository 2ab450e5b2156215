"""The result of a report, and its forms."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from calibrant._core.atomic_files import replacing
from calibrant._core.messages import comma_separated
from calibrant.reports.markdown import markdown_of
from calibrant.reports.model import SEVERITIES
from calibrant.reports.page import notebook_form, page_of
from calibrant.reports.results import Results


@dataclass(frozen=True, eq=False, repr=False)
class Report(Results):
    """A verdict on the confidences of one or several sets of predictions, findings and remedies.

    Made by :func:`calibrant.report`; printing it gives Markdown.
    """

    def __repr__(self) -> str:
        counted = [f"{sum(f.severity == s for f in self.findings)} {s}" for s in SEVERITIES[::-1]]
        return f"Report({self.title!r}: {self.verdict.answer}; {', '.join(counted)})"

    def __str__(self) -> str:
        return self.to_markdown()

    def _repr_html_(self) -> str:
        return notebook_form(self)

    def to_markdown(self) -> str:
        """Return the report for pull requests and the summaries of continuous integration."""
        return markdown_of(self)

    def to_html(self) -> str:
        """Return the page: one file that fetches nothing."""
        return page_of(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as ``.html``, ``.md`` or ``.json``, by the suffix of the path."""
        target = Path(path)
        text = FORMS[form_of(target)](self)
        with replacing(target) as temporary:
            temporary.write_bytes(text.encode("utf-8", "backslashreplace"))


FORMS = {".html": Report.to_html, ".md": Report.to_markdown, ".json": Report.to_json}


def form_of(path: Path) -> str:
    """Return the suffix of a report; an error for others."""
    suffix = {".htm": ".html", ".markdown": ".md"}.get(path.suffix.lower(), path.suffix.lower())
    if suffix not in FORMS:
        raise ValueError(f"a report is written as {comma_separated(FORMS)}, got {path.name}")
    return suffix
