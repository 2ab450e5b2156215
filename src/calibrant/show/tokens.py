"""A text whose tokens are shaded by their probability."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from calibrant._core.atomic_files import replacing
from calibrant._core.checks import FloatArray, Values, as_float64
from calibrant._core.showing import columns_frame, one_line
from calibrant.show.box import Box
from calibrant.show.html import Html, _asset, _rendered
from calibrant.show.pages import page
from calibrant.show.tables import Table

if TYPE_CHECKING:
    import pandas as pd

STRONGEST = 55
"""Share of orange behind a token of probability 0, in percent; text stays readable on it."""
_DOUBTFUL = 0.5
"""Probability below which tokens are underlined as well."""
LISTED = 200
"""Tokens that the table below the text has at most."""


class ShadedText(NamedTuple):
    """A text whose tokens are shaded by their probability; made by :func:`shaded_text`.

    A notebook shows it; :meth:`write` makes a file for a browser.

    Attributes
    ----------
    tokens : list of str
    probs : (tokens,)
    title, note : str
        Lines above the text.
    """

    tokens: list[str]
    probs: FloatArray
    title: str = ""
    note: str = ""

    def __repr__(self) -> str:
        return one_line(self, f"{len(self.tokens):,} tokens", self.note)

    def box(self) -> Box:
        """Return the text with its key and its numbers."""
        if not self.tokens:
            return Box(self.title, [self.note])
        steps = (1.0, 0.75, 0.5, 0.25, 0.0)
        swatches = _shaded([f" {100 * step:.0f} % " for step in steps], steps)
        scale = _rendered("token_scale.html", swatches=swatches)
        pairs = islice(zip(self.tokens, self.probs.tolist(), strict=True), LISTED)
        rows = [(repr(t)[1:-1], "-" if math.isnan(p) else f"{100 * p:.1f} %") for t, p in pairs]
        table, left = Table(("token", "probability"), rows), len(self.tokens) - len(rows)
        numbers = _rendered("token_table.html", table=table, left=left)
        shaded = _shaded(self.tokens, self.probs.tolist())
        return Box(self.title, [self.note], parts=[shaded, scale, numbers])

    def _repr_html_(self) -> str:
        return self.box().notebook()

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with a row for each token. Needs pandas."""
        return columns_frame({"token": self.tokens, "prob": self.probs})

    def write(self, file: str | os.PathLike[str]) -> None:
        """Write a page of HTML that needs nothing else."""
        with replacing(Path(file)) as temporary:
            content = page(self.title or "Shaded text", self._replace(title="").box())
            temporary.write_text(content, encoding="utf-8")


def _shaded(tokens: Sequence[str], probs: Sequence[float]) -> Html:
    """Return tokens as a text in which the less probable ones are shaded more strongly."""

    def look(prob: float) -> dict[str, object]:
        """Return how a token looks; nothing special where its probability is unknown."""
        if math.isnan(prob):
            return {}
        strength = round(STRONGEST * (1 - prob))
        return {"strength": strength, "number": f"{100 * prob:.1f} %", "doubtful": prob < _DOUBTFUL}

    shown = [(text.split("\n"), look(float(p))) for text, p in zip(tokens, probs, strict=True)]
    style = Html("".join(_asset("tokens.css").splitlines()))
    return _rendered("tokens.html", tokens=shown, style=style)


def shaded_text(
    tokens: Sequence[str], probs: Values, *, title: str = "", note: str = ""
) -> ShadedText:
    """Return a text whose tokens are shaded by their probability, for a notebook or a file.

    Less probable tokens are darker, those below 50 % are underlined as well, so that no colour is
    needed to find them, and the number shows while the pointer is over a token.

    Parameters
    ----------
    tokens : sequence of str
        Texts that, one after the other, make up the whole.
    probs : (tokens,) in [0, 1]
        Probabilities, such as ``Answer.probs``; NaN where unknown.
    title, note : str
        Lines above the text.

    Examples
    --------
    >>> shaded_text(["The", " capital", " is", " Lima"], [0.9, 0.8, 0.97, 0.55])
    ShadedText(4 tokens)
    """
    values = as_float64(probs)
    if values.shape != (len(tokens),):
        raise ValueError(
            f"probs must have one value for each of {len(tokens)} tokens, got {values.shape}"
        )
    wrong = values[(values < 0) | (values > 1 + 1e-6)]
    if wrong.size:
        raise ValueError(
            f"probs must be in [0, 1], got {wrong[0]:g}; for log-probabilities pass np.exp of them"
        )
    return ShadedText([str(token) for token in tokens], values.clip(max=1), title, note)
