"""A text whose tokens are shaded by their probability."""

from __future__ import annotations

import math
from collections.abc import Sequence

from calibrant.display.html import Html, escaped, html_table, joined, tag
from calibrant.display.results import remarks

STRONGEST = 55
"""Share of orange behind a token of probability 0, in percent; text stays readable on it."""
DOUBTFUL = 0.5
"""Probability below which tokens are underlined as well."""
LISTED = 200
"""Tokens that the table below the text has at most."""


def shaded_tokens(tokens: Sequence[str], probs: Sequence[float]) -> Html:
    """Return tokens as a text in which the less probable ones are shaded more strongly.

    Those below 50 % are underlined too, so that no colour is needed to find them. The number shows
    while the pointer is over a token.

    Parameters
    ----------
    tokens : sequence of str
        Texts that, one after the other, make up the whole.
    probs : (tokens,)
        In [0, 1]; NaN where unknown.

    Examples
    --------
    >>> shaded_tokens(["Lima"], [0.9])[-67:]
    '<span class="cal-t" style="--c:5%" title="90.0 %">Lima</span></div>'
    """
    spans = [_span(text, float(p)) for text, p in zip(tokens, probs, strict=True)]
    return Html(f'<div class="cal-text"><style>{RULES}</style>{"".join(spans)}</div>')


def _span(text: str, prob: float) -> str:
    # a line break has no width of its own: a sign shows its shade
    shown = escaped(text).replace("\n", '<span class="cal-break">↵</span>\n')
    if math.isnan(prob):
        return f"<span>{shown}</span>"
    doubt = " cal-doubt" if prob < DOUBTFUL else ""
    shade = round(STRONGEST * (1 - prob))
    number = f"{100 * prob:.1f} %"
    return f'<span class="cal-t{doubt}" style="--c:{shade}%" title="{number}">{shown}</span>'


def token_scale(unit: str = "token") -> Html:
    """Return the key of the shades; ``unit`` is what has a probability."""
    steps = (1.0, 0.75, 0.5, 0.25, 0.0)
    swatches = shaded_tokens([f" {100 * step:.0f} % " for step in steps], steps)
    note = f"Probability of each {unit}; underlined below 50 %."
    return tag("div", joined([swatches, remarks([note])]), class_="cal-key")


def token_table(tokens: Sequence[str], probs: Sequence[float], unit: str = "token") -> Html:
    """Return the numbers as a table that opens on request."""
    rows = [
        (repr(text)[1:-1], "-" if math.isnan(p) else f"{100 * p:.1f} %")
        for text, p in zip(tokens[:LISTED], probs[:LISTED], strict=True)
    ]
    left = len(tokens) - len(rows)
    more = [f"and {left:,} more"] if left else []
    table = joined([html_table((unit, "probability"), rows), remarks(more)])
    return tag("details", tag("summary", "numbers"), table)


RULES = """
.cal .cal-text{white-space:pre-wrap;overflow-wrap:anywhere;font-size:16px;line-height:1.9;
margin:8px 0}
.cal .cal-t{background:color-mix(in srgb,var(--cal-wrong) var(--c),transparent);padding:2px 0;
border-radius:2px}
.cal .cal-doubt{text-decoration:underline;text-decoration-thickness:2px;
text-underline-offset:4px;text-decoration-color:var(--cal-wrong)}
.cal .cal-break{color:var(--cal-muted)}
.cal .cal-key .cal-text{font-size:12px;margin:4px 0}
""".replace("\n", "")
