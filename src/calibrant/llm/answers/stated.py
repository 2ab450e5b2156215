"""Confidences that a model states in words or numbers, read without guessing.

The numbers of ``LIKELIHOODS`` are the midpoints of the ranges in Intelligence Community
Directive 203 (2015); those of ``LEVELS`` are equally spaced. Only their order matters once a
map is fitted to them.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Mapping
from typing import Any, NamedTuple

from calibrant._core.messages import printable

LIKELIHOODS = {
    **dict.fromkeys(("almost certainly not", "almost no chance", "almost impossible"), 0.03),
    **dict.fromkeys(("very unlikely", "highly unlikely", "extremely unlikely"), 0.125),
    **dict.fromkeys(("unlikely", "improbable", "probably not", "not likely"), 0.325),
    **dict.fromkeys(("even chance", "roughly even", "about even", "fifty fifty"), 0.5),
    **dict.fromkeys(("likely", "probable", "probably"), 0.675),
    **dict.fromkeys(("very likely", "highly likely", "extremely likely"), 0.875),
    **dict.fromkeys(("very probable", "highly probable"), 0.875),
    **dict.fromkeys(("almost certain", "almost certainly", "nearly certain"), 0.97),
    **dict.fromkeys(("certain", "absolutely certain", "completely certain"), 0.99),
}
"""Confidences by the words for a likelihood."""
LEVELS = {
    **dict.fromkeys(("very low", "not at all confident", "not sure at all"), 0.1),
    **dict.fromkeys(("low", "not confident", "not very confident", "not sure", "unsure"), 0.3),
    **dict.fromkeys(("medium", "moderate", "somewhat confident", "fairly confident"), 0.5),
    **dict.fromkeys(("moderately confident", "somewhat sure", "fairly sure"), 0.5),
    **dict.fromkeys(("high", "confident", "sure", "pretty sure", "quite sure"), 0.7),
    **dict.fromkeys(("very high", "very confident", "highly confident", "very sure"), 0.9),
    **dict.fromkeys(("extremely confident", "absolutely sure", "completely sure"), 0.9),
}
"""Confidences by the words for a level."""
# the longest first, so that "very likely" is not read as "likely"
_PHRASES = sorted({**LIKELIHOODS, **LEVELS}.items(), key=lambda pair: -len(pair[0]))
_BARE = ("very low", "low", "medium", "moderate", "high", "very high")
"""Levels that must stand alone or before a noun: "low" alone may be about anything."""
OFF_SCALE = "the number is off the scale"
"""Begin of the reason why a number without a percent sign is not read."""
_MAX_READ = 4000
"""Characters at the end of a text that are read: confidences are stated after the answer."""

_NOUN = r"(?:confidence|certainty|probability|likelihood|chance)"
_LABEL = re.compile(
    rf"\b{_NOUN}(?: level| score| rating)?(?:\s*\([^)\n]{{0,40}}\))?[\"'*_\]]*\s*"
    r"(?::|=|\bis\b|\bof\b)\s*[\"'*_\[(]*([^\n;]*)"
)
_KEY = re.compile(rf"^(?:\w+_)*{_NOUN}(?:_\w+)*$")
# a number that is no part of a word, a date or a version
_NUMBER = r"(?<![\w.,/+-])(\d+(?:\.\d+|,\d\d?)?|\.\d+)"
_END = r"(?![\w/]|[.,]\d)"
_SIGN = r"\s*(?:%|percent\b|per cent\b)"
_PERCENT = re.compile(_NUMBER + _SIGN)
_FRACTION = re.compile(rf"{_NUMBER}\s*(?:/|out of|in)\s*(\d+(?:\.\d+)?){_END}(?!{_SIGN})")
_PLAIN = re.compile(_NUMBER + _END)
_EVEN = re.compile(r"\b(?:50|fifty)\s*[/-]\s*(?:50|fifty)\b(?!\s*%)")
_DECLINED = re.compile(
    r"\b(?:(?:do not|don't|dont|does not|cannot|can't|can not|could not|couldn't) "
    r"(?:know|say|answer|tell|determine|assess|estimate|provide)|no idea|unable to|not able to|"
    r"refuse|declin\w+|as an ai|i'm sorry|i am sorry|not applicable|n/a|unknown|no answer)\b"
)
_BOUND = re.compile(
    r"[<>≤≥]|\b(?:not|never|less|more|at least|at most|under|over|below|above|up to|between|"
    r"n't|minimum|maximum)\b|n't\b|\d\s*%?\s*(?:-|–|—|to|or|±|\+/-)\s*~?\d"  # noqa: RUF001
)
_INVERTED = re.compile(
    r"\b(?:wrong|incorrect|false|mistaken|untrue|error|errors|doubt|uncertainty|uncertain|risk)\b"
)
_NEGATED = re.compile(r"(?:\b(?:not|never|hardly|no|less|far from)|n't)(?: \w+)?$")


class Stated(NamedTuple):
    """A stated confidence; ``value`` is None if there is none, for the ``reason``."""

    value: float | None
    reason: str = ""


def stated_confidence(said: Any, *, scale: float = 1) -> Stated:
    """Read the confidence that a model stated.

    Percents (``90 %``), fractions (``9/10``, ``9 out of 10``), numbers from 0 to ``scale``, words
    (``LIKELIHOODS`` and ``LEVELS``) and a field of JSON (``{"confidence": 0.9}``) are
    read. Where ``confidence:`` or the like stands in a text, only what follows it on the line
    counts. There is no value for bounds and ranges ("at least 80 %", "80 to 90 %"), for the chance
    to be wrong, for two different numbers, and where the model declines to answer. Of longer texts
    the last 4,000 characters are read.

    Parameters
    ----------
    said : str, number, mapping or None
    scale : float
        What the model was asked to state at most: 1, 10 or 100. It applies to numbers without a
        percent sign; those outside are not read.

    Examples
    --------
    >>> stated_confidence("Lima. Confidence: 90 %").value
    0.9
    >>> stated_confidence("9/10").value, stated_confidence("very likely").value
    (0.9, 0.875)
    >>> stated_confidence(85, scale=100).value
    0.85
    >>> stated_confidence("80 to 90 %")
    Stated(value=None, reason='it is a bound, a range or a negation')
    """
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale must be the largest confidence that can be stated, got {scale!r}")
    if said is None:
        return Stated(None, "nothing is stated")
    if isinstance(said, Mapping):
        return _from_fields(said, scale)
    if isinstance(said, (int, float)) and not isinstance(said, bool):
        return _on_scale(said, scale)
    if not isinstance(said, str):
        return Stated(None, f"it is a {type(said).__name__}, not a text or a number")
    return _from_text(said, scale)


def _from_fields(fields: Mapping[Any, Any], scale: float) -> Stated:
    named = [value for key, value in fields.items() if _KEY.match(_plain(str(key)))]
    if len(named) != 1:
        return Stated(None, f"its JSON has {len(named)} fields for a confidence, not one")
    if isinstance(named[0], Mapping):
        return Stated(None, "the confidence in its JSON is an object")
    return stated_confidence(named[0], scale=scale)


def _on_scale(number: float, scale: float) -> Stated:
    if not 0 <= number <= scale:
        return Stated(None, f"{OFF_SCALE} from 0 to {scale:g}")
    return Stated(number / scale)


def _from_text(said: str, scale: float) -> Stated:
    said = said[-_MAX_READ:]
    start, end = said.find("{"), said.rfind("}")
    try:
        fields = json.loads(said[start : end + 1]) if 0 <= start < end else None
    except (ValueError, RecursionError):
        fields = None
    if isinstance(fields, Mapping):
        return _from_fields(fields, scale)
    text = _plain(said)
    labelled = [found for found in _LABEL.findall(text) if found.strip()]
    readings = {_reading(part, scale) for part in labelled or [text]}
    values = {one for one in readings if one.value is not None}
    if len(values or readings) > 1:
        return Stated(None, "it states several confidences")
    return next(iter(values or readings))


def _plain(said: str) -> str:
    """Lower case, ASCII digits and signs, and plain apostrophes."""
    text = unicodedata.normalize("NFKC", said).lower()
    text = text.replace("\u2044", "/").replace("\u2019", "'").replace("\u2212", "-")
    return _EVEN.sub("fifty fifty", text)


def _reading(text: str, scale: float) -> Stated:
    """Read a text without a label."""
    if not text.strip():
        return Stated(None, "nothing is stated")
    if _DECLINED.search(text):
        return Stated(None, "the model declined")
    if _INVERTED.search(text):
        return Stated(None, "it may be the chance to be wrong")
    numbers = _numbers(text, scale)
    if not numbers:
        return _from_words(text)
    if _BOUND.search(text):
        return Stated(None, "it is a bound, a range or a negation")
    if len(numbers) > 1:
        return Stated(None, "it states several confidences")
    (number,) = numbers
    return number


def _numbers(text: str, scale: float) -> set[Stated]:
    """Return all readings of numbers; those off the scale count only if there are no others."""
    rest = _FRACTION.sub(" ", text)
    signed = {
        *(_share(_number(part), _number(whole)) for part, whole in _FRACTION.findall(text)),
        *(_share(_number(percent), 100) for percent in _PERCENT.findall(rest)),
    }
    plain = {_on_scale(_number(one), scale) for one in _PLAIN.findall(_PERCENT.sub(" ", rest))}
    return signed | {one for one in plain if one.value is not None} or plain


def _number(digits: str) -> float:
    return float(digits.replace(",", "."))


def _share(part: float, whole: float) -> Stated:
    if not 0 <= part <= whole or not whole:
        return Stated(None, "the fraction or percentage is above 1")
    return Stated(part / whole)


def _from_words(text: str) -> Stated:
    words = " ".join(re.findall(r"[\w']+", text))
    found: dict[float, str] = {}
    for phrase, value in _PHRASES:
        pattern = rf"\b{phrase}\b"
        if phrase in _BARE:
            pattern = rf"^{phrase}$|\b{phrase}(?= {_NOUN}\b)"
        for match in re.finditer(pattern, words):
            if _NEGATED.search(words[: match.start()].rstrip()):
                return Stated(None, "it is a bound, a range or a negation")
            found[value] = phrase
        words = re.sub(pattern, " ", words)
    if len(found) > 1:
        return Stated(None, f"it has the words {printable(' and '.join(found.values()))}")
    return Stated(next(iter(found))) if found else Stated(None, "it has no number or known word")
