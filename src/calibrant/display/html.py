"""Text and tables as HTML that is safe whatever the data hold."""

from __future__ import annotations

import html

from calibrant._core.messages import printable


def escaped(text: object) -> str:
    """Return text of any origin as HTML that shows it: markup and control characters are inert.

    >>> escaped("<b>cat & dog</b>")
    '&lt;b&gt;cat &amp; dog&lt;/b&gt;'
    """
    return html.escape(printable(str(text)), quote=True)
