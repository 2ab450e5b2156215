"""Agreement of several answers that a model drew to the same question.

Texts are put into clusters of one meaning, by a function ``same(a, b)`` that compares two of them:
equal after :func:`_plain_text` by default, or a judgement of a model of your own
(:func:`by_entailment`, :func:`by_embedding`).
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from calibrant._core.checks import FloatArray, Values, as_float64

Same: TypeAlias = Callable[[str, str], bool]
"""True if two texts mean the same."""

_WORD = re.compile(r"(?:(?<![\w.])[-+])?\d[\d,]*(?:\.\d+)?|\w+[+#]*")
_ARTICLES = {"a", "an", "the"}
_REMEMBERED = 4096
"""Texts whose embeddings are kept."""


def _plain_text(text: str) -> str:
    """Normalise an answer: lower case, without punctuation and articles, numbers kept whole."""
    folded = unicodedata.normalize("NFKC", text).casefold().replace("\u2212", "-")
    words = [word.replace(",", "") for word in _WORD.findall(folded)]
    # a text of articles or signs alone stands for itself
    return " ".join(word for word in words if word not in _ARTICLES) or folded.strip()


def _same_text(a: str, b: str) -> bool:
    """Return True if two texts are equal after :func:`_plain_text`."""
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

    @lru_cache(_REMEMBERED)
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


def semantic_entropy(
    grouped: Sequence[Sequence[int]],
    log_likelihoods: Values | None = None,
    *,
    normalised: bool = False,
) -> float:
    r"""Compute the entropy over meanings (Kuhn et al. 2023; Farquhar et al. 2024).

    .. math:: -\sum_c p_c \log p_c , \qquad p_c \propto \sum_{i \in c} p_i

    over the clusters :math:`c` of :func:`clusters`, with equal :math:`p_i` (the discrete form) or
    those of ``log_likelihoods`` ``(texts,)``, divided by the length or not.

    With ``normalised`` the result is divided by the logarithm of the number of texts, its maximum;
    it is then 0 for one meaning and 1 if all differ, and needs two texts.

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
    weights = np.full(len(numbers), 1 / len(numbers))
    if log_likelihoods is not None:
        logs = as_float64(log_likelihoods)
        if logs.shape != weights.shape or not (np.isfinite(logs) & (logs <= 1e-6)).all():
            raise ValueError(
                f"log_likelihoods must be finite, at most 0, and one for each of {len(numbers)} "
                f"texts, got {log_likelihoods!r:.80}"
            )
        weights = np.exp(logs - logs.max())  # the largest is 1, so that long texts do not underflow
        weights = weights / weights.sum()
    probs = np.array([weights[list(cluster)].sum() for cluster in grouped])
    some = probs[probs > 0]
    entropy = abs(float(some @ np.log(some)))  # never -0
    return entropy / math.log(len(numbers)) if normalised else entropy


def _check_texts(texts: Sequence[str]) -> None:
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"samples must be a list of texts, got {texts!r:.80}")
    if not texts:
        raise ValueError("samples must hold one text or more, got none")
