"""Signals of answers: numbers in [0, 1], large for sure ones, that may tell right from wrong.

Samples are put into clusters of one meaning, by a function ``same(a, b)`` that compares two texts:
equal after :func:`_plain_text` by default, or a judgement of a model of your own
(:func:`by_entailment`, :func:`by_embedding`).
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from scipy.special import softmax, xlogy

from calibrant._core.checks import FloatArray, as_float64
from calibrant._core.messages import comma_separated, printable
from calibrant.llm.answers import topk
from calibrant.llm.answers.confidence import AGGREGATORS, answer_confidence
from calibrant.llm.answers.rows import (
    WRONG_FORM,
    AnswerRows,
    Row,
    _numbers,
    _stated_number,
    _token_probs_of,
    _unpacked_cell,
)
from calibrant.llm.answers.stated import stated_confidence
from calibrant.llm.answers.topk import TopLogprobs

Same: TypeAlias = Callable[[str, str], bool]
"""True if two texts mean the same."""

_WORD = re.compile(r"(?:(?<![\w.])[-+])?\d[\d,]*(?:\.\d+)?|\w+[+#]*")
_ARTICLES = {"a", "an", "the"}
_MAX_EMBEDDINGS = 4096
"""Texts whose embeddings are kept."""
_VOTES = {
    **dict.fromkeys(("yes", "true", "right", "correct", "pass"), 1.0),
    **dict.fromkeys(("no", "false", "wrong", "incorrect", "fail"), 0.0),
    **dict.fromkeys(("tie", "uncertain", "unsure", "partial"), 0.5),
}
"""Worth of a vote."""
_LARGEST_VOCABULARY = 1 << 18
"""Tokens of the largest vocabularies in use."""
UNREAD = "unread"
"""Key of a row for the reasons why material gave no signal."""
_Found = dict[str, float | None]
_Computed = dict[str, float | str]
"""Signals by name, or the reasons why material gives none."""


def _plain_text(text: str) -> str:
    """Normalise an answer: lower case, without punctuation and articles, numbers kept whole."""
    folded = unicodedata.normalize("NFKC", text).casefold().replace("\u2212", "-")
    words = [word.replace(",", "") for word in _WORD.findall(folded)]
    # a text of articles or signs alone stands for itself
    return " ".join(word for word in words if word not in _ARTICLES) or folded.strip()


def _same_text(a: str, b: str) -> bool:
    return _plain_text(a) == _plain_text(b)


def by_entailment(entails: Same) -> Same:
    """Return a ``same`` of texts that entail each other (Kuhn et al. 2023).

    ``entails(a, b)`` is that of a model for natural language inference.

    >>> by_entailment(lambda a, b: b in a)("Lima, Peru", "Lima")
    False
    """
    return lambda a, b: bool(entails(a, b)) and bool(entails(b, a))


def by_embedding(embed: Callable[[list[str]], Any], *, min_cosine: float = 0.9) -> Same:
    """Return a ``same`` of texts whose embeddings have a cosine of at least ``min_cosine``.

    ``embed`` takes a list of texts and returns a vector for each, as ``encode`` of
    sentence-transformers does.

    >>> same = by_embedding(lambda texts: [[len(t), 1.0] for t in texts])
    >>> same("Lima", "Rome")
    True
    """
    if not -1 <= min_cosine <= 1:
        raise ValueError(f"min_cosine must be in [-1, 1], got {min_cosine}")

    @lru_cache(_MAX_EMBEDDINGS)
    def direction(text: str) -> FloatArray:
        (vector,) = as_float64(embed([text]))
        length = float(np.linalg.norm(vector))
        if not (length > 0 and math.isfinite(length)):
            raise ValueError(f"embed must return finite vectors that are not 0, got {vector!r:.80}")
        return np.asarray(vector / length)

    # the last digits of the cosine of a text with itself must not matter
    return lambda a, b: float(direction(a) @ direction(b)) >= min_cosine - 1e-9


def agreement(answer: str, samples: Sequence[str], same: Same = _same_text) -> float:
    """Compute the share of samples that mean the same as the answer (Wang et al. 2023).

    >>> agreement("Lima", ["lima.", "Cusco", "Lima"])
    0.6666666666666666
    """
    _check_texts(samples)
    return sum(bool(same(answer, sample)) for sample in samples) / len(samples)


def clusters(texts: Sequence[str], same: Same = _same_text) -> list[list[int]]:
    """Put texts into clusters of one meaning (Kuhn et al. 2023, algorithm 1).

    Each text joins the first cluster whose first text means the same. Returns the numbers of the
    texts of each cluster.

    >>> clusters(["Lima", "Cusco", "lima."])
    [[0, 2], [1]]
    """
    _check_texts(texts)
    found: list[list[int]] = []
    for number, text in enumerate(texts):
        for cluster in found:
            if same(texts[cluster[0]], text):
                cluster.append(number)
                break
        else:
            found.append([number])
    return found


def semantic_entropy(grouped: Sequence[Sequence[int]], *, normalised: bool = False) -> float:
    r"""Compute the entropy :math:`-\sum_c p_c \log p_c` over meanings (Kuhn et al. 2023).

    :math:`p_c` is the share of the texts in cluster :math:`c` of :func:`clusters` (the discrete
    form of Farquhar et al. 2024). With ``normalised`` the result is divided by the logarithm of the
    number of texts, its maximum; it is then 0 for one meaning and 1 if all differ, and needs two
    texts.

    >>> semantic_entropy([[0, 2], [1, 3]])  # log 2
    0.6931471805599453
    >>> semantic_entropy([[0, 2], [1, 3]], normalised=True)
    0.5
    """
    numbers = [number for cluster in grouped for number in cluster]
    if sorted(numbers) != list(range(len(numbers))) or not all(grouped):
        raise ValueError("grouped must hold the number of each text once, as clusters returns them")
    if normalised and len(numbers) < 2:
        raise ValueError("the normalised entropy needs two texts or more")
    probs = np.array([len(cluster) / len(numbers) for cluster in grouped])
    entropy = abs(float(probs @ np.log(probs)))  # never -0
    return entropy / math.log(len(numbers)) if normalised else entropy


def _check_texts(texts: Sequence[str]) -> None:
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"samples must be a list of texts, got {texts!r:.80}")
    if not texts:
        raise ValueError("samples must hold one text or more, got none")


def top_token_confidence(
    top: TopLogprobs, *, vocabulary: int = _LARGEST_VOCABULARY
) -> dict[str, float]:
    r"""Compute confidences of an answer from the top tokens that a service shows.

    - ``top_probability``: geometric mean of the probabilities of the likeliest tokens;
    - ``top_margin``: mean of its distance to the second; left out if some position shows only one;
    - ``top_entropy``: :math:`e^{-H}`, with the largest mean entropy H of the positions that agrees
      with what is shown: that of equally likely hidden tokens.

    Parameters
    ----------
    top : as for :func:`~calibrant.llm.top_confidence`
        Of the positions of one answer.
    vocabulary : int
        Number of tokens of the model; one that is too large lowers ``top_entropy`` slightly.

    Examples
    --------
    >>> found = top_token_confidence([{"Paris": -0.2, "Lyon": -2.5}, {".": -0.1, "!": -3.0}])
    >>> {name: round(value, 3) for name, value in found.items()}
    {'top_probability': 0.861, 'top_margin': 0.796, 'top_entropy': 0.249}
    """
    logs = topk._top_logprobs(top)
    shown = np.isfinite(logs)
    if vocabulary < shown.sum(1).max():
        raise ValueError(f"vocabulary is {vocabulary}, but {shown.sum(1).max()} tokens are shown")
    found = {"top_probability": float(np.exp(np.minimum(logs[:, 0], 0.0).mean()))}
    if shown.sum(1).min() > 1:
        found["top_margin"] = float(np.clip(np.exp(logs[:, 0]) - np.exp(logs[:, 1]), 0, 1).mean())
    probs, hidden = np.exp(logs), vocabulary - shown.sum(1)
    # a hidden token is at most as likely as each that is shown
    rest = np.clip(1 - probs.sum(1), 0, hidden * np.where(shown, probs, np.inf).min(1))
    entropy = -xlogy(probs, probs).sum(1) - xlogy(rest, rest / np.maximum(hidden, 1))
    return {**found, "top_entropy": float(np.exp(-entropy.mean()))}


def signals_of(
    answers: AnswerRows | Sequence[Row],
    *,
    same: Same | None = None,
    meaning: str = "",
) -> AnswerRows:
    """Compute every signal that the material of the rows allows.

    The guide to signals lists the material, and what each gives.

    Parameters
    ----------
    answers : AnswerRows or list of rows
        Signals that are there already are kept.
    same : callable, optional
        ``same(a, b)`` is True if two texts mean the same: adds ``agreement``,
        ``semantic_negentropy`` and ``semantic_sets`` by meaning, as ``agreement:MEANING``.
    meaning : str
        Name of ``same``, such as that of its model.

    Returns
    -------
    AnswerRows
        New rows, all with the same signals, None where a row lacks the material; the row then has
        the reason, if the material was there, as ``unread``.

    Examples
    --------
    >>> row = {"answer": "Lima", "stated": "90 %", "samples": ["Lima", "lima", "Cusco"]}
    >>> found = signals_of([row, {"answer": "Rome", "stated": "no idea"}])
    >>> found.rows[0]["signals"]["stated"], found.rows[0]["signals"]["agreement"]
    (0.9, 0.6666666666666666)
    >>> found.rows[1]["signals"]["agreement"], found.rows[1]["unread"]
    (None, {'stated': 'the model declined'})
    """
    if (same is None) != (not meaning):
        raise ValueError("pass same and meaning, its name, together")
    placed = answers if isinstance(answers, AnswerRows) else AnswerRows.of(answers)

    def computed(row: Row, place: str) -> tuple[_Found, dict[str, str]]:
        """Signals of a row, and the reasons for those that its material does not give."""
        found, unread = _Found(), dict[str, str]()
        for key, compute in material.items():
            if row.get(key) is None:
                continue
            try:
                values = compute(row, place)
            except (*WRONG_FORM, RecursionError) as error:
                named = str(error) if place in str(error) else f"{key} of {place}: {error}"
                raise ValueError(named) from error
            found |= {name: value for name, value in values.items() if not isinstance(value, str)}
            unread |= {name: value for name, value in values.items() if isinstance(value, str)}
        found |= dict.fromkeys(unread)
        stored = _stored(row, place)
        given = {name: value for name, value in stored.items() if value is not None}
        reasons = {name: reason for name, reason in unread.items() if name not in given}
        return {**dict.fromkeys(stored), **found, **given}, reasons

    material: dict[str, Callable[[Row, str], _Computed]] = {
        "token_probs": _of_tokens,
        "top_logprobs": lambda row, _: {
            **top_token_confidence(_unpacked_cell(row["top_logprobs"]))
        },
        "stated": _of_statement,
        "samples": lambda row, _: _of_samples(row, same, meaning),
        "option_logits": _of_options,
        "judges": lambda row, _: _of_judges(_unpacked_cell(row["judges"])),
        "confidence": lambda row, place: {
            str(row.get("source") or "confidence"): _stated_number(row, place)
        },
    }
    pairs = [computed(row, place) for place, row in zip(*placed, strict=True)]
    names = dict.fromkeys(name for values, _ in pairs for name in values)
    rows = []
    for row, (values, reasons) in zip(placed.rows, pairs, strict=True):
        kept = {key: value for key, value in row.items() if key != UNREAD}
        told = {UNREAD: reasons} if reasons else {}
        rows.append({**kept, "signals": {name: values.get(name) for name in names}, **told})
    return AnswerRows(placed.places, rows)


def signal_values(answers: AnswerRows, names: Sequence[str] | None = None) -> dict[str, FloatArray]:
    """Return the signals of rows by name, ``(n,)``, NaN where they are null.

    ``names`` are by default all that some row has. A name that no row has is refused.
    """
    rows = [_stored(row, place) for place, row in zip(*answers, strict=True)]
    known = list(dict.fromkeys(name for row in rows for name in row))
    wanted = known if names is None else list(names)
    absent = [name for name in wanted if name not in known]
    if absent or not wanted:
        got = comma_separated(map(printable, known))
        what = f"the signals {comma_separated(map(printable, absent))}" if absent else "signals"
        raise ValueError(
            f"the answers must have {what}, got {got}: write null where an answer lacks one"
        )
    # null becomes NaN
    return {name: np.array([row.get(name) for row in rows], np.float64) for name in wanted}


def _stored(row: Row, place: str) -> _Found:
    """Return the signals that a row has already."""
    values = row.get("signals")
    try:
        values = {} if values is None else _unpacked_cell(values)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"signals of {place} are not JSON ({error})") from error
    if not isinstance(values, Mapping):
        raise ValueError(f"signals of {place} must be an object, got {values!r:.60}")
    for name, value in values.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 <= value <= 1):
            raise ValueError(
                f"the signal {printable(str(name))} of {place} must be a number in [0, 1] or null, "
                f"got {value!r:.40}"
            )
    return {str(name): None if v is None else float(v) for name, v in values.items()}


def _of_tokens(row: Row, place: str) -> _Computed:
    probs = [_token_probs_of(row, place)]
    return {rule: float(answer_confidence(probs, rule)[0]) for rule in AGGREGATORS}


def _of_statement(row: Row, _: str) -> _Computed:
    found = stated_confidence(row["stated"], scale=float(row.get("stated_scale") or 1))
    return {"stated": found.reason if found.value is None else found.value}


def _of_samples(row: Row, same: Same | None, meaning: str) -> _Computed:
    texts, answer = _unpacked_cell(row["samples"]), row.get("answer")
    if not isinstance(texts, list) or not isinstance(answer, str):
        raise ValueError(f"a list of texts and an answer are needed, got {texts!r:.60}")
    values: _Computed = {"agreement_exact": agreement(answer, texts, str.__eq__)}
    for ending, alike in (("", _same_text), (f":{meaning}", same)):
        if alike is None:
            continue
        grouped = clusters(texts, alike)
        values[f"agreement{ending}"] = agreement(answer, texts, alike)
        found: list[float | str] = ["it takes two samples"] * 2
        if len(texts) > 1:
            found = [max(0.0, 1 - semantic_entropy(grouped, normalised=True))]
            found += [1 - (len(grouped) - 1) / (len(texts) - 1)]
        values[f"semantic_negentropy{ending}"], values[f"semantic_sets{ending}"] = found
    return values


def _of_options(row: Row, place: str) -> _Computed:
    """Probability of the likeliest option, and its distance to the second."""
    logits = _numbers(row["option_logits"], "option_logits", place)
    if logits.size < 2 or np.isnan(logits).any() or not -np.inf < logits.max() < np.inf:
        raise ValueError(f"option logits must be two numbers or more, not NaN, got {logits}")
    second, first = np.sort(softmax(logits))[-2:]
    return {"option_probability": float(first), "option_margin": float(first - second)}


def _of_judges(judges: Any) -> _Computed:
    if not isinstance(judges, Mapping):
        raise ValueError(f"an object with a score or votes by judge is needed, got {judges!r:.60}")
    found: _Computed = {}
    for name, verdict in judges.items():
        match verdict:
            case None | {"score": None}:
                found[f"judge:{name}"] = "the judge gave no score"
            case {"votes": [_, *_] as votes}:
                worth = {str(vote): _VOTES.get(str(vote).strip().lower()) for vote in votes}
                unknown = [vote for vote, value in worth.items() if value is None]
                if unknown:
                    wanted = ", ".join(_VOTES)
                    raise ValueError(f"a vote must be one of {wanted}, got {unknown[0]!r:.40}")
                found[f"judge:{name}"] = sum(worth[str(vote)] or 0 for vote in votes) / len(votes)
            case {"score": int(score) | float(score), "scale": [worst, best]}:
                found[f"judge:{name}"] = _score_share(score, float(worst), float(best))
            case _:
                raise ValueError(
                    'a judge has {"score": 8, "scale": [1, 10]}, the worst of the scale first, or '
                    f'{{"votes": ["yes", "no", "tie"]}}, got {verdict!r:.80}'
                )
    return found


def _score_share(score: float, worst: float, best: float) -> float:
    """Place of a score on its scale, 0 for the worst and 1 for the best."""
    if not all(map(math.isfinite, (worst, best))) or worst == best:
        raise ValueError(f"scale must be two different numbers, the worst first, got {worst, best}")
    if isinstance(score, bool) or not min(worst, best) <= score <= max(worst, best):
        raise ValueError(f"the score must be from {worst:g} to {best:g}, got {score!r}")
    return (score - worst) / (best - worst)
