"""Texts with the probability of every token, for notebooks and files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from calibrant._core.atomic_files import replacing
from calibrant._core.checks import FloatArray, Values, as_float64
from calibrant._core.showing import columns_frame, one_line
from calibrant.show.box import Box
from calibrant.show.pages import page
from calibrant.show.tokens import shaded_tokens, token_scale, token_table

if TYPE_CHECKING:
    import pandas as pd


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
        probs = self.probs.tolist()
        if not probs:
            return Box(self.title, [self.note])
        shaded = shaded_tokens(self.tokens, probs)
        parts = [shaded, token_scale(), token_table(self.tokens, probs)]
        return Box(self.title, [self.note], parts=parts)

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


def shaded_text(
    tokens: Sequence[str],
    probs: Values,
    *,
    title: str = "",
    note: str = "",
) -> ShadedText:
    """Return a text whose tokens are shaded by their probability, for a notebook or a file.

    Less probable tokens are darker, those below 50 % are underlined as well, and the number shows
    while the pointer is over a token.

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
