r"""What a gate guarantees about answers, turns or conversations, and what it says of an answer.

Answers that belong together, such as the turns of a conversation, are not independent: a model that
misunderstands the first turn is wrong in the next ones, too. What is independent is the *unit*:

- ``answer``: each answer by itself. The loss of an accepted one is 1 if it is wrong.
- ``turn``: the loss of a conversation is the share of wrong ones among its accepted turns.
- ``conversation``: the loss of a conversation is 1 if any of its accepted turns is wrong.

The guarantee of a threshold is about the mean loss of the units of which it accepts something.
Losses of 0 or 1 are counted and tested exactly, by the binomial distribution. Others, with m units
and a mean loss of r, have the p-value of Hoeffding and Bentkus (Bates et al. 2021,
"Distribution-free, risk-controlling prediction sets"): the smaller one of
:math:`e^{-m \, \mathrm{kl}(r, \alpha)}` and
:math:`e \, P(\mathrm{Bin}(m, \alpha) \le \lceil m r \rceil)`, which is valid for any losses in
[0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from calibrant._core import checks
from calibrant._core.checks import BoolArray, FloatArray, IntArray
from calibrant._core.messages import comma_separated, printable_name
from calibrant._core.showing import threshold_text
from calibrant.decide.probabilities import check_share
from calibrant.decide.threshold_limits import threshold
from calibrant.decide.threshold_results import Threshold
from calibrant.decide.threshold_search import (
    Counts,
    best_passing,
    hoeffding_bentkus,
    level_shares,
    threshold_grid,
)
from calibrant.llm.answers.calibrator import check_state

Unit = Literal["answer", "turn", "conversation"]


class Scored(NamedTuple):
    """Graded answers with calibrated confidences; each ``(answers,)``.

    Attributes
    ----------
    confidence : in [0, 1]
    correct : bool
    unit : number of the unit that the answer belongs to
    kind : kind of the question; empty where it has none
    """

    confidence: FloatArray
    correct: BoolArray
    unit: IntArray
    kind: NDArray[np.str_]

    def where(self, chosen: BoolArray) -> Scored:
        """Return the chosen answers."""
        return Scored._make(values[chosen] for values in self)

    @property
    def units(self) -> int:
        """Number of different units."""
        return np.unique(self.unit).size


def find_threshold(answers: Scored, *, unit: Unit, max_error: float, certainty: float) -> Threshold:
    """Return the lowest threshold that keeps its guarantee about the unit.

    ``max_error`` limits the mean loss of the units of which something is accepted, with the
    probability ``certainty``. ``coverage`` and ``error`` of the result are shares of units.
    """
    if unit == "answer":
        pairs: dict[str, Any] = {"confidence": answers.confidence, "outcome": answers.correct}
        return threshold(**pairs, max_error=max_error, certainty=certainty)
    losses = _losses_of_turns if unit == "turn" else _losses_of_conversations
    grid = threshold_grid(max_error)
    counts = Counts(answers.units, 0, *losses(answers, grid))
    tests = counts.trials("error", max_error)
    if unit == "turn":
        tests = tests._replace(test=hoeffding_bentkus)
    return best_passing(grid, level_shares(max_error), [tests], counts, certainty=certainty)


def _losses_of_conversations(answers: Scored, grid: FloatArray) -> tuple[IntArray, IntArray]:
    """Conversations with an accepted turn, and with a wrong one among them, at each threshold."""

    def reaching(chosen: Scored) -> IntArray:
        """Number of conversations whose highest confidence reaches each threshold."""
        numbers, unit = np.unique(chosen.unit, return_inverse=True)
        highest = np.zeros(len(numbers))
        np.maximum.at(highest, unit, chosen.confidence)
        below = np.searchsorted(np.sort(highest), grid, side="left")
        return np.asarray(len(highest) - below, np.int64)

    return reaching(answers), reaching(answers.where(~answers.correct))


def _losses_of_turns(answers: Scored, grid: FloatArray) -> tuple[IntArray, FloatArray]:
    """Conversations with an accepted turn, and the sum of their shares of wrong ones."""
    numbers, unit = np.unique(answers.unit, return_inverse=True)
    counts, sums = [], []
    for limit in grid:
        chosen = answers.confidence >= limit
        turns = np.bincount(unit[chosen], minlength=len(numbers))
        wrong = np.bincount(unit[chosen & ~answers.correct], minlength=len(numbers))
        counts.append(np.count_nonzero(turns))
        sums.append(float((wrong / np.maximum(turns, 1)).sum()))
    return np.array(counts, np.int64), np.array(sums)


Decision = Literal["accept", "verify", "person"]
CAREFUL: tuple[Decision, ...] = ("accept", "verify", "person")
"""Decisions, the most careful one last."""
_PROMISES = {
    "answer": "at most {} of the accepted answers are wrong",
    "turn": "at most {} of the accepted turns are wrong, averaged over conversations",
    "conversation": "at most {} of the conversations with accepted turns have a wrong one "
    "among these",
}


class Terms(NamedTuple):
    """What a gate guarantees.

    Attributes
    ----------
    max_error : float
        Largest share of wrong answers, turns or conversations.
    certainty : float
        Probability that all guarantees hold.
    unit : {"answer", "turn", "conversation"}
        What the guarantee counts, and what is independent.
    verifier_misses : float or None
        Largest share of the wrong answers in the band to verify that a verifier lets through; None
        if there is no verifier.
    """

    max_error: float
    certainty: float = 0.95
    unit: Unit = "answer"
    verifier_misses: float | None = None

    def check(self) -> Terms:
        """Return the terms; raise if nothing can be guaranteed by them."""
        check_share(self.max_error, "max_error", "0.05 allows 5 % of wrong answers")
        check_share(self.certainty, "certainty", "0.95 means 95 %")
        checks.check_choice("unit", self.unit, get_args(Unit))
        if self.verifier_misses is not None:
            example = "0.2 is a verifier that misses one wrong answer in five"
            check_share(self.verifier_misses, "verifier_misses", example)
            if self.unit == "conversation":
                raise ValueError(
                    "verifier_misses must be left out with unit='conversation': a verifier that "
                    "misses some of several wrong turns spoils more conversations than that share"
                )
        return self

    @property
    def max_to_verify(self) -> float:
        """Largest share of wrong answers in the band to verify."""
        return min(1.0, self.max_error / (self.verifier_misses or 1.0))

    def promises(self) -> dict[Decision, str]:
        """Return what is guaranteed about each decision, in words."""
        error, certain = _percent(self.max_error), _percent(self.certainty)
        texts: dict[Decision, str] = dict.fromkeys(CAREFUL, "")
        texts["accept"] = f"With {certain} certainty, {_PROMISES[self.unit].format(error)}."
        if self.verifier_misses is not None:
            wrong = _PROMISES[self.unit].replace("accepted ", "").replace(" are", " to verify are")
            texts["verify"] = (
                f"With {certain} certainty, {wrong.format(_percent(self.max_to_verify))}: "
                f"a verifier that misses at most {_percent(self.verifier_misses)} of the wrong "
                f"ones leaves at most {error} wrong."
            )
        return texts


class Band(NamedTuple):
    """Thresholds for some kinds of questions.

    Attributes
    ----------
    accept : Threshold
    verify : Threshold or None
        Of the answers that are not accepted; None without a verifier.
    kinds : tuple of str or None
        Kinds of questions for which the guarantees hold together; None for any.
    """

    accept: Threshold
    verify: Threshold | None = None
    kinds: tuple[str, ...] | None = None

    def decide(self, confidence: float) -> tuple[Decision, float, str]:
        """Return the decision about a confidence, the threshold that decided, and the reason."""
        said = f"the confidence {threshold_text(confidence)}"
        if confidence >= self.accept.threshold:
            return "accept", self.accept.threshold, f"{said} is at least {self._text('accept')}"
        if self.verify is not None and confidence >= self.verify.threshold:
            why = f"{said} is below {self._text('accept')} and at least {self._text('verify')}"
            return "verify", self.verify.threshold, why
        lowest = "accept" if self.verify is None else "verify"
        return "person", getattr(self, lowest).threshold, f"{said} is below {self._text(lowest)}"

    def _text(self, name: str) -> str:
        limit: float = getattr(self, name).threshold
        return "every threshold" if math.isinf(limit) else threshold_text(limit)

    def name(self) -> str:
        """Return the kinds in words."""
        return (
            "all" if self.kinds is None else comma_separated(kind or "none" for kind in self.kinds)
        )

    def state(self) -> dict[str, Any]:
        """Return the thresholds for JSON."""
        return {
            "accept": self.accept.state(),
            "verify": self.verify and self.verify.state(),
            "kinds": None if self.kinds is None else list(self.kinds),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Band:
        """Make a band of what :meth:`state` returned."""
        check_state(state, cls._fields, cls)
        kinds = state["kinds"]
        if kinds is not None and not all(isinstance(kind, str) for kind in kinds):
            raise ValueError(f"kinds must be texts, got {kinds!r:.80}")
        verify = state["verify"]
        return cls(
            Threshold.from_state(state["accept"]),
            None if verify is None else Threshold.from_state(verify),
            None if kinds is None else tuple(kinds),
        )


class Verdict(NamedTuple):
    """What to do with an answer.

    Attributes
    ----------
    verdict : {"accept", "verify", "person"}
    confidence : float or None
        Calibrated probability that the answer is right; None if it is unknown.
    threshold : float or None
        The threshold that decided.
    promise : str
        What is guaranteed about all answers with this verdict; empty if nothing is.
    reason : str
    """

    verdict: Decision
    confidence: float | None
    threshold: float | None
    promise: str
    reason: str

    @classmethod
    def unknown(cls, reason: str) -> Verdict:
        """Return the verdict on an answer whose confidence is unknown."""
        return cls("person", None, None, "", printable_name(reason))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON: an infinite threshold is None."""
        values = self._asdict()
        if self.threshold is not None and math.isinf(self.threshold):
            values["threshold"] = None
        return values


def most_careful(verdicts: list[Verdict]) -> Verdict:
    """Return the verdict that is furthest from accepting; of several answers, the first such one.

    >>> one, other = (Verdict(decision, 0.5, 0.7, "", "") for decision in ("accept", "person"))
    >>> most_careful([one, other]).verdict
    'person'
    """
    return max(verdicts, key=lambda one: CAREFUL.index(one.verdict))


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"
