r"""Find the thresholds of a gate, for answers, turns or conversations.

The guarantee of a threshold is about the mean loss of the units of which it accepts something: of
an answer 1 if it is wrong; of a conversation the share of wrong ones among its accepted turns
(``turn``), or 1 if any of these is wrong (``conversation``).
Losses of 0 or 1 are counted and tested exactly, by the binomial distribution. Others, with m units
and a mean loss of r, have the p-value of Hoeffding and Bentkus (Bates et al. 2021,
"Distribution-free, risk-controlling prediction sets"): the smaller one of
:math:`e^{-m \, \mathrm{kl}(r, \alpha)}` and
:math:`e \, P(\mathrm{Bin}(m, \alpha) \le \lceil m r \rceil)`, which is valid for any losses in
[0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibrant._core.checks import BoolArray, FloatArray, IntArray, warn, warnings_at_caller
from calibrant._core.messages import comma_separated, printable_name
from calibrant.decide.threshold_limits import threshold
from calibrant.decide.threshold_results import ShownLimit, Threshold
from calibrant.decide.threshold_search import (
    Counts,
    best_passing,
    hoeffding_bentkus,
    threshold_grid,
)
from calibrant.llm.answers.calibrator import fit_answers
from calibrant.llm.answers.confidence import Aggregator
from calibrant.llm.answers.rows import AnswerRows
from calibrant.llm.gate.gate import Band, DriftReference, Gate, Terms, Unit, _unscored

_MIN_UNITS = 30
"""Independent answers or conversations below which nothing can be guaranteed."""
_MIN_WRONG_OF_KIND = 10
"""Wrong answers among those of a kind, at the largest error, with which it gets own thresholds."""


class _Scored(NamedTuple):
    """Graded answers with calibrated confidences; each ``(answers,)``.

    ``unit`` is the number of the unit that the answer belongs to, ``kind`` that of its question,
    empty where it has none.
    """

    confidence: FloatArray
    correct: BoolArray
    unit: IntArray
    kind: NDArray[np.str_]

    def where(self, chosen: BoolArray) -> _Scored:
        """Return the chosen answers."""
        return _Scored._make(values[chosen] for values in self)


def _find_threshold(
    answers: _Scored, *, unit: Unit, max_error: float, certainty: float
) -> Threshold:
    """Return the lowest threshold that keeps its guarantee about the unit.

    ``max_error`` limits the mean loss of the units of which something is accepted, with the
    probability ``certainty``. ``coverage`` and ``error`` of the result are shares of units.
    """
    if unit == "answer":
        pairs: dict[str, Any] = {"confidence": answers.confidence, "outcome": answers.correct}
        return threshold(**pairs, max_error=max_error, certainty=certainty)
    (grid, shares), counts, sums = threshold_grid(max_error), [], []
    numbers, member = np.unique(answers.unit, return_inverse=True)
    for limit in grid:
        accepted = answers.confidence >= limit
        turns = np.bincount(member[accepted], minlength=len(numbers))
        wrong = np.bincount(member[accepted & ~answers.correct], minlength=len(numbers))
        counts.append(np.count_nonzero(turns))
        losses = wrong / np.maximum(turns, 1) if unit == "turn" else wrong > 0
        sums.append(losses.sum())
    found = Counts(len(numbers), 0, np.array(counts), np.array(sums))
    tests = found.trials("error", max_error)
    if unit == "turn":
        tests = tests._replace(test=hoeffding_bentkus)
    return best_passing(grid, shares, [tests], found, certainty=certainty)


def fit_gate(
    answers: AnswerRows | Sequence[Mapping[str, Any]],
    *,
    max_error: float,
    certainty: float = 0.95,
    unit: Unit = "answer",
    by_kind: bool = False,
    verifier_misses: float | None = None,
    calibrator: Any = None,
    aggregate: Aggregator | None = None,
    false_alarms: float = 0.05,
    seed: int = 0,
) -> Gate:
    r"""Find from graded answers which ones to accept, to verify, and to hand to a person.

    The gate accepts from the lowest confidence on such that

    .. math:: P(\text{error among accepted answers} \le \mathtt{max\_error}) \ge \mathtt{certainty}

    over the draw of the graded answers (:func:`calibrant.threshold`). The guarantee needs
    independent answers from the population that the gate will judge, and nothing else: it holds for
    any number of answers, whatever their confidences are worth.

    All graded answers serve the threshold, and also the map from confidences to probabilities,
    which keeps their order: the test of each threshold stays that of the same answers above it.

    Parameters
    ----------
    answers : AnswerRows or list of dictionaries
        Graded answers of one source, such as those of
        :func:`~calibrant.llm.answers.rows.read_answers`.
    max_error, certainty : float in (0, 1)
    unit : {"answer", "turn", "conversation"}
        What the guarantee counts: answers, which must be independent; wrong turns among the
        accepted ones of a ``conversation``, on average; or conversations in which an accepted turn
        is wrong.
    by_kind : bool
        Find thresholds for each ``kind`` of question of which there are enough answers: ten wrong
        ones, if ``max_error`` of them are wrong. All other kinds share a threshold. All guarantees
        hold at the same time (Bonferroni).
    verifier_misses : float in (0, 1), optional
        Share of wrong answers that a verifier lets through. A random half of the answers then
        decides about accepting, and the other one which of the rest are worth verifying: those
        among which at most ``max_error / verifier_misses`` are wrong.
    calibrator : AnswerCalibrator or SignalCalibrator, optional
        Fitted on other answers. By default a beta map is fitted here, on confidences of the answers
        or on their ``aggregate`` of token probabilities.
    false_alarms : float in (0, 1)
        Probability that the drift watch (:class:`GateWatch`) ever withdraws the guarantee although
        nothing has changed.
    seed : int
        Of the split.

    Returns
    -------
    Gate
        Which remembers model, prompt, head and sampling of the graded answers, where these state
        them, and hands answers from others to a person. With a warning if there are too few answers
        to guarantee anything.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> confidence = rng.beta(4, 1, 3000)
    >>> right = rng.random(3000) < confidence**2  # the model is too sure
    >>> rows = [{"confidence": c, "correct": r} for c, r in zip(confidence, right)]
    >>> gate = fit_gate(AnswerRows.of(rows), max_error=0.1)
    >>> print(gate.promise())
    With 95 % certainty, at most 10 % of the accepted answers are wrong.
    >>> sure, unsure = gate.check(AnswerRows.of([{"confidence": 0.99}, {"confidence": 0.8}]))
    >>> sure.verdict, unsure.verdict
    ('accept', 'person')
    """
    terms = Terms(max_error, certainty, unit, verifier_misses).check()
    if calibrator is not None and aggregate is not None:
        raise ValueError("the calibrator has a confidence of its own: leave aggregate out")
    with warnings_at_caller():
        rng = np.random.default_rng(seed)
        answers = _scored_wholly(AnswerRows.of(answers))
        numbers = _unit_numbers(answers, unit)
        kinds = np.array([str(row.get("kind") or "") for row in answers.rows])
        if by_kind:
            _check_kinds(answers, numbers, unit)
        # a tenth tells how frequent the kinds are: thresholds that are found with the answers that
        # decided on the kinds would not keep their guarantee
        first = 0.1 if by_kind else 0.0
        parts = _parts(numbers, first, verifier_misses is not None, rng)
        if calibrator is None:
            calibrator = fit_answers(answers, aggregate=aggregate)
        chances = calibrator.predict_rows(answers)
        scored = _Scored(chances, answers.grades(), numbers, kinds)
        sets: Sequence[tuple[str, ...] | None] = [None]
        if by_kind:
            sets = _sets_of_kinds(kinds, parts, terms)
        # each test gets an equal part of the error probability
        tests = len(sets) * (1 if verifier_misses is None else 2)
        each = 1 - (1 - certainty) / tests
        bands = [_band(scored, parts, names, terms, each) for names in sets]
        watched = scored.where(parts == 1)
        order = rng.permutation(len(watched.unit))
        # one answer of each unit, in random order
        one = rng.permutation(order[np.unique(watched.unit[order], return_index=True)[1]])
        correct = watched.correct[one].astype(np.float64)
        drift = DriftReference.of(watched.confidence[one], correct, false_alarms)
        return Gate(calibrator, bands, terms, drift)


def _scored_wholly(answers: AnswerRows) -> AnswerRows:
    """Return the answers that a gate can accept, about which the guarantee is."""
    whole = np.array([not _unscored(row) for row in answers.rows], dtype=bool)
    if not whole.all():
        warn(
            f"{(~whole).sum():,} of {len(whole):,} graded answers are cut off, empty, or without "
            "log-probabilities for a part of their text, and left out: the gate hands such answers "
            "to a person"
        )
    return answers.where(whole)


def _unit_numbers(answers: AnswerRows, unit: Unit) -> IntArray:
    """Return the number of the independent unit that each answer belongs to."""
    named = [row.get("conversation") for row in answers.rows]
    if unit != "answer":
        for place, name in zip(answers.places, named, strict=True):
            if name is None or name == "":
                raise ValueError(f"{place} has no conversation, which unit={unit!r} needs")
        return np.asarray(np.unique([str(n) for n in named], return_inverse=True)[1], np.int64)
    first: dict[Any, str] = {}
    for place, name in zip(answers.places, named, strict=True):
        if name not in (None, "") and str(name) in first:
            raise ValueError(
                f"{first[str(name)]} and {place} are turns of one conversation, so that they are "
                "not independent: choose unit='turn' or unit='conversation'"
            )
        first[str(name)] = place
    repeated = len(named) - np.unique(answers.groups).size
    if repeated:
        warn(
            f"{repeated:,} answers are to questions that others answer as well, so that they are "
            "not independent, and the guarantee may be too strong: keep one answer to a question"
        )
    return np.arange(len(named))


def _check_kinds(answers: AnswerRows, numbers: IntArray, unit: Unit) -> None:
    """Raise unless every answer, or every conversation, has one kind."""
    known: dict[int, str] = {}
    for place, row, number in zip(*answers, numbers.tolist(), strict=True):
        kind = str(row.get("kind") or "")
        if not kind:
            raise ValueError(f"{place} has no kind, which by_kind needs")
        if unit == "conversation" and known.setdefault(number, kind) != kind:
            said = f"{printable_name(known[number])} and {printable_name(kind)}"
            raise ValueError(
                f"the conversation of {place} has turns of kinds {said}: with "
                "unit='conversation', by_kind needs one kind for each conversation"
            )


def _parts(numbers: IntArray, first: float, verified: bool, rng: np.random.Generator) -> IntArray:
    """Return the part of each answer: a first one, for accepting (1), and for verifying (2).

    Answers of a unit are in one part.
    """
    units = np.unique(numbers).size
    if units < _MIN_UNITS:
        raise ValueError(
            f"a gate needs {_MIN_UNITS} independent graded answers or conversations, got {units}: "
            "even hundreds guarantee little"
        )
    rest = 1 - first
    shares = (first, rest / 2, rest / 2) if verified else (first, rest)
    ends = np.round(np.cumsum(shares) * units)
    place = rng.permutation(units)
    return np.asarray(np.searchsorted(ends, place, side="right"), np.int64)[numbers]


def _sets_of_kinds(kinds: Any, parts: IntArray, terms: Terms) -> list[tuple[str, ...]]:
    """Return each frequent kind by itself, and all others together.

    Decided by the first part alone: in the others, the kinds are then a matter of chance.
    """
    enough = math.ceil(_MIN_WRONG_OF_KIND / terms.max_error)
    known, counts = np.unique(kinds[parts == 0], return_counts=True)
    expected = counts * (parts == 1).sum() / (parts == 0).sum()
    own: list[tuple[str, ...]] = [(str(kind),) for kind in known[expected >= enough]]
    rare = tuple(str(kind) for kind in known[expected < enough])
    if rare:
        warn(
            f"there are fewer than about {enough:,} graded answers to find a threshold with of "
            f"kinds {comma_separated(rare)}: they share one threshold and guarantee"
        )
    return [*own, rare] if rare else own


def _band(
    scored: _Scored, parts: IntArray, kinds: tuple[str, ...] | None, terms: Terms, certainty: float
) -> Band:
    member = np.ones(len(parts), bool) if kinds is None else np.isin(scored.kind, kinds)
    options: Any = {"unit": terms.unit, "certainty": certainty}
    chosen = scored.where(member & (parts == 1))
    if not chosen.unit.size:
        raise ValueError(
            f"no graded answer of kinds {comma_separated(kinds or ())} is left for a threshold: "
            "grade more of them, or leave them out"
        )
    accept = _find_threshold(chosen, max_error=terms.max_error, **options)
    if kinds is not None and not accept.coverage:
        warn(f"no answer of kinds {comma_separated(kinds)} is accepted")
    if terms.verifier_misses is None:
        return Band(accept, None, kinds)
    # other answers than those that the threshold for accepting was found with, and only those
    # below it: about these the guarantee is
    below = scored.where(member & (parts == 2) & (scored.confidence < accept.threshold))
    limit = terms.max_to_verify
    units = np.unique(below.unit).size
    if limit < 1 and units:
        return Band(accept, _find_threshold(below, max_error=limit, **options), kinds)
    lowest, coverage, error = math.inf, 0.0, math.nan
    if units:
        lowest, coverage, error = 0.0, 1.0, float((~below.correct).mean())
    free = ShownLimit("error", limit, error, math.nan, units)
    verify = Threshold(lowest, coverage, units, certainty, (free,))
    return Band(accept, verify, kinds)
