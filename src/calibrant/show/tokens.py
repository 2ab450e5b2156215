"""A text whose tokens are shaded by their probability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

from calibrant.show.html import Html, _asset, _rendered
from calibrant.show.tables import Table

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
    shown = [(text.split("\n"), _shade(float(p))) for text, p in zip(tokens, probs, strict=True)]
    style = Html("".join(_asset("tokens.css").splitlines()))
    return _rendered("tokens.html", tokens=shown, style=style)


def _shade(prob: float) -> dict[str, object]:
    """Return how a token looks; nothing special where its probability is unknown."""
    if math.isnan(prob):
        return {}
    strength = round(STRONGEST * (1 - prob))
    return {"strength": strength, "number": f"{100 * prob:.1f} %", "doubtful": prob < DOUBTFUL}


def token_scale(unit: str = "token") -> Html:
    """Return the key of the shades; ``unit`` is what has a probability."""
    steps = (1.0, 0.75, 0.5, 0.25, 0.0)
    swatches = shaded_tokens([f" {100 * step:.0f} % " for step in steps], steps)
    return _rendered("token_scale.html", swatches=swatches, unit=unit)


def token_table(tokens: Sequence[str], probs: Sequence[float], unit: str = "token") -> Html:
    """Return the numbers as a table that opens on request."""
    pairs = islice(zip(tokens, probs, strict=True), LISTED)
    rows = [(repr(text)[1:-1], "-" if math.isnan(p) else f"{100 * p:.1f} %") for text, p in pairs]
    left = len(tokens) - len(rows)
    return _rendered("token_table.html", table=Table((unit, "probability"), rows), left=left)
