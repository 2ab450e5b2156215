"""Preference of a model for some letters of multiple choice, and orders of the options without it.

A model that is asked every question with its options in several orders shows the preference, and
averages of its log-probabilities over the orders do not have it: they are the reference for what
calibration corrects from one order alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from scipy.special import chdtrc, log_softmax

from calibrant._core.checks import FloatArray, IntArray, Values, as_float64, as_labels, check_choice
from calibrant._core.showing import columns_frame, one_line
from calibrant.llm.answers.questions import LETTERS
from calibrant.show.box import Box
from calibrant.show.tables import Table

if TYPE_CHECKING:
    import pandas as pd

Permutations: TypeAlias = Literal["cyclic", "all"]
"""Rotations of the options, one for each; or all orders, 24 of four options."""
Order: TypeAlias = tuple[int, ...]
"""Numbers of the options in the order in which they are shown."""


def _option_orders(permutations: Permutations | None, choices: int) -> list[Order]:
    """Return the orders in which a question with so many options is asked, its own first.

    None is for its own order alone.
    """
    numbers = tuple(range(choices))
    if permutations is None:
        return [numbers]
    check_choice("permutations", permutations, ("cyclic", "all"))
    if permutations == "all":
        return list(itertools.permutations(numbers))
    return [numbers[i:] + numbers[:i] for i in numbers]


class OptionBias(NamedTuple):
    """How often each letter is chosen, and how often it is right. Arrays are ``(letters,)``.

    Attributes
    ----------
    chosen, right : shares of the questions
    prob : mean probability of the letter
    p_value : float
        Of the hypothesis that letters are chosen as often as they are right (Stuart and Maxwell's
        test). Small if there is a preference.
    n : int
        Questions.
    """

    chosen: FloatArray
    right: FloatArray
    prob: FloatArray
    p_value: float
    n: int

    @property
    def letters(self) -> tuple[str, ...]:
        """Names of the options."""
        return LETTERS[: len(self.chosen)]

    @property
    def excess(self) -> float:
        """Share of the answers that would have to move to another letter."""
        return float(np.abs(self.chosen - self.right).sum() / 2)

    def describe(self) -> str:
        """Describe the preference in a sentence."""
        shares = zip(self.letters, self.chosen, self.right, strict=True)
        parts = [f"{name} {100 * c:.0f} % ({100 * r:.0f} %)" for name, c, r in shares]
        return (
            f"chosen letters of {self.n:,} questions, and how often they are right: "
            f"{', '.join(parts)}; p = {self.p_value:.2g} for no preference"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        columns = {name: getattr(self, name).tolist() for name in ("chosen", "right", "prob")}
        about = {"excess": self.excess, "p_value": self.p_value, "n": self.n}
        return {"letters": list(self.letters), **columns, **about}

    def __repr__(self) -> str:
        return one_line(self, f"{100 * self.excess:.1f} % of answers", f"p = {self.p_value:.2g}")

    def _repr_html_(self) -> str:
        columns = (self.chosen, self.right, self.prob)
        cells = zip(self.letters, *columns, strict=True)
        rows = [(name, *(f"{100 * x:.1f} %" for x in values)) for name, *values in cells]
        table = Table(("option", "chosen", "right", "mean probability"), rows)
        return Box("Option bias", [self.describe()], parts=[table]).notebook()

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with a row for each letter. Needs pandas."""
        columns = {"chosen": self.chosen, "right": self.right, "prob": self.prob}
        return columns_frame({"option": list(self.letters), **columns})


def option_bias(logits: Values, labels: Values) -> OptionBias:
    """Measure the preference for some letters.

    ``logits`` ``(n, letters)`` are those of the letters, ``labels`` ``(n,)`` the numbers of the
    right ones.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> labels = rng.integers(4, size=300)
    >>> preferring_a = rng.gumbel(size=(300, 4)) + [1.0, 0, 0, 0]
    >>> option_bias(preferring_a, labels).p_value < 0.001
    True
    """
    scores, right = as_float64(logits), as_labels(labels)
    if scores.ndim != 2 or right.shape != scores.shape[:1] or scores.shape[1] < 2:
        raise ValueError(
            f"logits must be (n, letters) and labels (n,), got {np.shape(logits)} and "
            f"{np.shape(labels)}"
        )
    n, letters = scores.shape
    chosen, true = (np.eye(letters)[numbers] for numbers in (scores.argmax(-1), right))
    prob = np.exp(log_softmax(scores, axis=-1)).mean(0)
    # Wald's test that differences (n, letters), which sum to 0, have the mean 0
    off = chosen - true
    inverse = np.linalg.pinv(off.T @ off / n, hermitian=True)
    p_value = float(chdtrc(letters - 1, n * off.mean(0) @ inverse @ off.mean(0)))
    return OptionBias(chosen.mean(0), true.mean(0), prob, p_value, n)


class PermutedChoices(NamedTuple):
    """Logits of questions that were asked with their options in several orders.

    Attributes
    ----------
    logits : (n, orders, letters)
        Of the letters, in the order in which the options were shown.
    labels : (n,)
        Right options, by their numbers in the questions.
    orders : list of tuple
        Numbers of the options in the order in which they were shown; the first is their own.
    """

    logits: FloatArray
    labels: IntArray
    orders: Sequence[Order]

    def averaged(self) -> FloatArray:
        """Return the log-probabilities ``(n, options)`` of the options, averaged over orders."""
        if len(self.orders) == 1:
            return self.logits[:, 0]
        total = np.zeros_like(self.logits[:, 0])
        for shown, order in zip(self.logits.swapaxes(0, 1), self.orders, strict=True):
            total[:, list(order)] += log_softmax(shown, axis=-1)
        return np.asarray(log_softmax(total / len(self.orders), axis=-1))
