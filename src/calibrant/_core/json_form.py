"""JSON that the command line and reports write."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

FORMAT = 1
"""Version of all JSON: another one where keys change their meaning or go, not where some come."""


def json_text(content: Mapping[str, Any]) -> str:
    """Return JSON that every reader takes, with the version of the format first.

    >>> print(json_text({"ece": float("nan")}))
    {
      "format": 1,
      "ece": null
    }
    """
    return json.dumps({"format": FORMAT, **plain(content)}, indent=2, allow_nan=False)


def plain(content: Any) -> Any:
    """Return content without figures that are undefined or infinite, and with text that is Unicode.

    Names of files that are not UTF-8 have lone surrogates, which are escaped.
    """
    if isinstance(content, Mapping):
        return {plain(key): plain(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [plain(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    if isinstance(content, str):
        return content.encode("utf-8", "backslashreplace").decode("utf-8")
    return content
