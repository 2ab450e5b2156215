"""Metadata of the package that depends on where the project lives."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

HOME = ""
"""Address of the repository on GitHub. Empty: there is no public one yet."""

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://)([^)]+)\)")


def readme(text: str, home: str) -> str:
    """Return the README with links that work on a package page.

    Links to files of the repository become addresses; as long as there are none, links become
    plain text, and pictures are left out.
    """

    def absolute(link: re.Match[str]) -> str:
        picture, title, path = link.groups()
        if not home:
            return "" if picture else title
        return f"{picture}[{title}]({home}/{'raw' if picture else 'blob'}/main/{path})"

    return LINK.sub(absolute, text)


class Metadata(MetadataHookInterface):
    """Adds the README and the addresses of the project to the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set what ``pyproject.toml`` declares as dynamic, apart from the version."""
        text = (Path(self.root) / "README.md").read_text("utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": readme(text, HOME)}
        metadata["urls"] = (
            {
                "Source": HOME,
                "Issues": f"{HOME}/issues",
                "Changelog": f"{HOME}/blob/main/CHANGELOG.md",
            }
            if HOME
            else {}
        )
