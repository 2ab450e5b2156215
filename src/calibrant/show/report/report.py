"""The result of a report, and its forms."""

from __future__ import annotations

import os
from dataclasses import dataclass

from calibrant._core.showing import one_line
from calibrant.show.report.files import write_form
from calibrant.show.report.page import markdown_of, notebook_of, page_of
from calibrant.show.report.results import Results
from calibrant.show.report.view import counted


@dataclass(frozen=True, eq=False, repr=False)
class Report(Results):
    """A verdict on the confidences of one or several sets of predictions, findings and remedies.

    Made by :func:`calibrant.report`; printing it gives Markdown.
    """

    def __repr__(self) -> str:
        return one_line(self, self.title, self.verdict.answer, counted(self.findings))

    def __str__(self) -> str:
        return self.to_markdown()

    def _repr_html_(self) -> str:
        return notebook_of(self)

    def to_markdown(self) -> str:
        """Return the report for pull requests and the summaries of continuous integration."""
        return markdown_of(self)

    def to_html(self) -> str:
        """Return the page: one file that fetches nothing."""
        return page_of(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as ``.html``, ``.md`` or ``.json``, by the suffix of the path."""
        forms = {".html": self.to_html, ".md": self.to_markdown, ".json": self.to_json}
        write_form(path, forms)
