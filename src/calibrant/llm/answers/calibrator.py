"""Learn the probability that an answer is correct from its confidence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from scipy.special import expit

from calibrant._core import checks
from calibrant._core.checks import BoolArray, FloatArray, IntArray, Values, as_float64, as_pairs
from calibrant._core.messages import printable
from calibrant._core.options import WithOptions
from calibrant._core.showing import as_html, one_line, threshold_text
from calibrant.calibrators import isotonic
from calibrant.calibrators.confidence_maps import fit_beta, fit_platt
from calibrant.decide.threshold_limits import threshold
from calibrant.decide.threshold_results import Threshold
from calibrant.llm.answers.confidence import Aggregator
from calibrant.llm.answers.judged import judged_source, read_judged
from calibrant.llm.answers.rows import AnswerRows, Row, Source
from calibrant.metrics.clustered import Evaluations
from calibrant.workflows.evaluate_answers import SMALLEST, SUREST, evaluate_answers, log_odds

if TYPE_CHECKING:
    from typing_extensions import Self

FOLDS = 5
_MIN_RANGE = 1e-6
"""Smallest range of predictions that counts as different."""

Learned = dict[str, FloatArray]
Map = Literal["sigmoid", "beta", "isotonic"]
STAGES: tuple[Map, ...] = get_args(Map)


def _fit_stage(stage: Map, odds: FloatArray, correct: BoolArray) -> tuple[Learned, bool]:
    """Fit a map of log-odds ``(n,)``; returns learned values, and True if there is an optimum."""
    if stage != "isotonic":
        fit = fit_platt if stage == "sigmoid" else fit_beta
        solution = fit(odds, correct, np.ones_like(odds))
        # with a few answers of one kind the solver of beta may stop before a bound
        differ = stage == "sigmoid" or 0 < correct.mean() < 1
        return {"line": solution.x}, solution.converged and differ
    if correct.all() or not correct.any():
        return {"odds": np.zeros(1), "prob": np.array([correct.mean()])}, False
    single = odds.astype(np.float32)
    knots, hits = isotonic.counted(single[correct], None)
    misses = isotonic.nothing(knots)
    isotonic.tally(knots, single[~correct], None, misses)
    curve = isotonic.pooled(knots, hits, misses)
    return {"odds": as_float64(curve.odds), "prob": as_float64(curve.prob)}, True


def _apply_stage(stage: Map, odds: FloatArray, learned: Learned) -> FloatArray:
    """Return the probabilities of log-odds ``(n,)``."""
    if stage == "isotonic":
        # in single precision, as in the fit: otherwise an answer may leave its own step
        x, at = (torch.from_numpy(v.astype(np.float32)) for v in (odds, learned["odds"]))
        return as_float64(isotonic.steps(x, at, torch.from_numpy(learned["prob"])))
    if stage == "sigmoid":
        slope, offset = learned["line"]
        return np.asarray(expit(slope * odds + offset))
    a, b, m = learned["line"]
    return np.asarray(expit(b * np.logaddexp(0, odds) - a * np.logaddexp(0, -odds) + m))


class AnswerMap(WithOptions):
    """A map of answers to the chance that they are right, and a threshold of these chances.

    Attributes
    ----------
    source_ : Source
        Origin of the confidences or signals, as far as it was stated.
    threshold_ : Threshold or None
        Set by :meth:`control`.
    least_ : float
        Smallest chance, 1 / (n + 2) after n graded answers; the largest is as far from 1.
    """

    source_: Source
    least_: float
    threshold_: Threshold | None

    predict: Callable[..., FloatArray]
    predict_rows: Callable[[AnswerRows], FloatArray]
    describe: Callable[[], str]

    def apply(self, answers: AnswerRows) -> list[Row]:
        """Add the chance of each answer to be right to its row, as ``calibrated``.

        With a threshold there is also ``abstains``. Raises if the answers are of another source.
        """
        chances = self.predict_rows(answers)
        rows: list[Row] = []
        for row, chance in zip(answers.rows, chances.tolist(), strict=True):
            rows.append({**row, "calibrated": chance})
            if self.threshold_ is not None:
                rows[-1]["abstains"] = chance < self.threshold_.threshold
        return rows

    def control(
        self, answers: Any, correct: Values, *, max_error: float, certainty: float = 0.95
    ) -> Threshold:
        """Find the confidence threshold that limits the error of the answers above it.

        With probability ``certainty`` over the draw of these graded answers, at most
        ``max_error`` of the answers above it are wrong (:func:`calibrant.decide.threshold`). The
        answers must not be those of :meth:`fit`. The result is also stored as ``threshold_``.
        """
        confidence = self.predict(answers)
        outcome = _outcomes(correct, len(confidence))
        self.threshold_ = threshold(
            confidence=confidence, outcome=outcome, max_error=max_error, certainty=certainty
        )
        return self.threshold_

    def _limit_text(self) -> str:
        limit = self.threshold_
        return "" if limit is None else f"threshold={threshold_text(limit.threshold)}"

    def abstains(self, confidence: Values) -> BoolArray:
        """Return True for confidences of :meth:`predict` that are below the threshold."""
        if self.threshold_ is None:
            raise RuntimeError("there is no threshold yet: call control(answers, correct, ...)")
        values = as_float64(confidence)
        if not ((values >= 0) & (values <= 1)).all():
            raise ValueError("confidence must be in [0, 1] and not NaN: pass the result of predict")
        return np.asarray(values < self.threshold_.threshold)

    _repr_html_ = as_html

    def _supported(self, probs: FloatArray) -> FloatArray:
        """Return chances that the graded answers can show, in the order of probabilities."""
        return self.least_ + (1 - 2 * self.least_) * probs

    def _shared_state(self) -> dict[str, Any]:
        limit = self.threshold_ and self.threshold_.state()
        return {"least": self.least_, "threshold": limit, "source": self.source_._asdict()}

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Take smallest chance, threshold and source from a saved state."""
        (self.least_,) = _finite_numbers([state["least"]], 1, "least").tolist()
        if not 0 <= self.least_ < 0.5:
            raise ValueError(f"least must be in [0, 0.5), got {self.least_:g}")
        limit, self.source_ = state["threshold"], Source(**state["source"])
        if not all(isinstance(text, str) for text in self.source_):
            raise ValueError(f"source must have texts, got {state['source']!r:.80}")
        self.threshold_ = None if limit is None else Threshold.from_state(limit)


class AnswerCalibrator(AnswerMap):
    r"""Predict the chance that an answer is right, from graded answers and their confidences.

    An increasing map of the log-odds :math:`s = \log c - \log(1 - c)` of a confidence c turns it
    into a probability:

    - ``beta``: :math:`\sigma(a \log c - b \log(1 - c) + m)` (Kull et al. 2017), the default;
    - ``sigmoid``: :math:`\sigma(a s + b)` (Platt 1999), for fewer than a hundred graded answers;
    - ``isotonic``: increasing steps (Zadrozny and Elkan 2002), for a thousand and more.

    However sure an answer is, n graded ones do not show that all like it are right. The chance is
    therefore :math:`(n p + 1) / (n + 2)`, with the probability p of the map: Laplace's rule of
    succession, which keeps the order of the answers.

    Confidences of 0 or 1 have no log-odds. Sigmoid and beta replace them by values halfway to the
    nearest other confidence of :meth:`fit`, or to 1/2; those that the source says are aggregates of
    token probabilities, where 1 is a rounded number, by the log-odds of :math:`1 - 10^{-9}`.

    Parameters
    ----------
    stage : {"beta", "sigmoid", "isotonic"}

    Attributes
    ----------
    learned_ : dict of arrays
    limits_ : (float, float) or None
        Replacements of confidences of 0 and 1.
    source_, threshold_, least_
        As for :class:`AnswerMap`.

    Examples
    --------
    >>> from calibrant.llm import answer_confidence
    >>> rng = np.random.default_rng(0)
    >>> confidence = answer_confidence([rng.beta(4, 1, rng.integers(1, 9)) for _ in range(2000)])
    >>> right = rng.random(2000) < confidence**3  # the model is too sure
    >>> fitted = AnswerCalibrator().fit(confidence[:1000], right[:1000])
    >>> bool(abs(fitted.predict(confidence).mean() - right.mean()) < 0.03)
    True
    """

    def __init__(self, *, stage: Map = "beta") -> None:
        self.stage = stage
        self.learned_: Learned | None = None
        self.limits_: tuple[float, float] | None = None
        self.least_ = 0.0
        self.threshold_: Threshold | None = None
        self.source_ = Source()

    def fit(self, confidence: Values, correct: Values, *, source: Source | None = None) -> Self:
        """Fit to graded answers.

        ``confidence`` ``(answers,)`` is in [0, 1], ``correct`` ``(answers,)`` 0 or 1. ``source`` is
        where the confidences come from; others are refused later.
        """
        origin, limits = source or Source(), None
        if origin.aggregate is None and self.stage != "isotonic":
            limits = _halfway(_confidences(confidence))
        odds = self._odds(confidence, limits)
        _, outcome, _ = as_pairs(expit(odds), _outcomes(correct, len(odds)))
        learned, converged = _fit_stage(self.stage, odds, outcome == 1)
        self.learned_, self.limits_, self.threshold_ = learned, limits, None
        self.source_, self.least_ = origin, 1 / (len(odds) + 2)
        if not converged:
            checks.warn(
                f"AnswerCalibrator found no optimum for {len(odds):,} answers: all of them, or "
                "nearly all, are right or wrong; grade more answers"
            )
        elif np.ptp(outcome) and np.ptp(odds) and np.ptp(self._probs(odds)) < _MIN_RANGE:
            checks.warn(
                f"confident answers are not right more often among these {len(odds):,}: every "
                f"answer gets the same chance, {100 * outcome.mean():.0f} %; grade more, or use "
                "another confidence"
            )
        return self

    def predict(self, confidence: Values, *, source: Source | None = None) -> FloatArray:
        """Return the chance of each answer to be right, ``(answers,)``.

        Raises if ``source`` is not that of the fit.
        """
        if source is not None:
            self.source_.check(source)
        return self._probs(self._odds(confidence, self.limits_))

    def predict_rows(self, answers: AnswerRows) -> FloatArray:
        """Return the chance of each answer to be right; raise if they are of another source."""
        stated = any("confidence" in row for row in answers.rows)
        if self.source_.scale is not None and not stated:
            judged = read_judged(answers, scale=self.source_.scale)
            return self.predict(judged.shares, source=judged_source(answers, judged.scale))
        confidence, source = answers.confidences(None if stated else self.source_.aggregate)
        known = self.source_.confidence
        if known and not source.confidence:
            checks.warn(
                f"the answers do not say where their confidence comes from, and the answer "
                f"calibrator is for {printable(known)}: state it as source"
            )
        return self.predict(confidence, source=source)

    def __repr__(self) -> str:
        if self.learned_ is None:
            return one_line(self, f"stage={self.stage!r}, not fitted")
        few = {name: values for name, values in self.learned_.items() if values.size <= 3}
        learned = [f"{n}=[{', '.join(f'{v:.4g}' for v in values)}]" for n, values in few.items()]
        return one_line(self, self.stage, *learned, self._limit_text())

    def describe(self) -> str:
        """Describe the map in a sentence."""
        rule = self.source_.aggregate
        of = "confidences" if rule is None else f"the {rule} of token probabilities"
        return f"{self.stage} map from {of} to the probability of a correct answer"

    def state(self) -> dict[str, Any]:
        """Return everything that was chosen and learned, for JSON."""
        return {
            "stage": self.stage,
            "learned": {name: values.tolist() for name, values in self._fitted().items()},
            "limits": self.limits_ and list(self.limits_),
            **self._shared_state(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> AnswerCalibrator:
        """Make a calibrator of what :meth:`state` returned."""
        _check_state(state, ("stage", "learned", "limits", "least", "threshold", "source"), cls)
        made, learned = cls(stage=state["stage"]), state["learned"]
        # by the learned values of each kind of map, or their number
        sizes = {"sigmoid": {"line": 2}, "beta": {"line": 3}}.get(made.stage)
        if sizes is None:
            sizes = dict.fromkeys(("odds", "prob"), max(1, np.size(learned["odds"])))
        _check_state(learned, tuple(sizes), cls)
        made.learned_ = {name: _finite_numbers(learned[name], n, name) for name, n in sizes.items()}
        if state["limits"] is not None:
            low, high = _finite_numbers(state["limits"], 2, "limits").tolist()
            if not 0 < low < high < 1:
                raise ValueError(f"limits must rise between 0 and 1, got {low:g} and {high:g}")
            made.limits_ = low, high
        made._restore(state)
        return made

    def _fitted(self) -> Learned:
        if self.learned_ is None:
            raise RuntimeError("this AnswerCalibrator is not fitted: call fit(confidence, correct)")
        return self.learned_

    def _probs(self, odds: FloatArray) -> FloatArray:
        return self._supported(_apply_stage(self.stage, odds, self._fitted()))

    def _odds(self, confidence: Values, limits: tuple[float, float] | None) -> FloatArray:
        """Return the log-odds of confidences, all of them finite."""
        inside = np.clip(_confidences(confidence), *(limits or (0, 1)))
        return log_odds(np.log(np.maximum(inside, np.finfo(np.float64).tiny)))


def fit_answers(
    answers: AnswerRows, *, aggregate: Aggregator | None = None, stage: Map = "beta"
) -> AnswerCalibrator:
    """Fit a map from the confidences of graded answers to the chance that they are right.

    ``aggregate`` is as for :meth:`AnswerRows.confidences`. The map keeps the source of the
    confidences, and refuses those of another.
    """
    confidence, source = answers.confidences(aggregate)
    return AnswerCalibrator(stage=stage).fit(confidence, answers.grades(), source=source)


def cross_validated_answers(
    answers: AnswerRows, *, aggregate: Aggregator | None = None, stage: Map = "beta"
) -> Evaluations:
    """Measure confidences ``before`` and, each by a map that was fitted on other folds, ``after``.

    Answers to one question, such as the sentences of a long answer, stay in one fold, and the
    intervals are then those of independent questions. Without ``after`` if there are fewer than
    ten questions.
    """
    confidence, source = answers.confidences(aggregate)
    correct, groups = answers.grades(), answers.groups
    evaluations = {"before": evaluate_answers(confidence, correct, groups=groups)}
    if int(groups.max()) + 1 < 2 * FOLDS:
        return evaluations
    after = np.empty_like(confidence)
    with checks.silenced():  # the fit to all answers repeats what is worth saying
        for train, test in _folds(groups):
            fitted = AnswerCalibrator(stage=stage)
            fitted.fit(confidence[train], correct[train], source=source)
            after[test] = fitted.predict(confidence[test])
    return evaluations | {"after": evaluate_answers(after, correct, groups=groups)}


def _folds(groups: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield the numbers of the answers of all folds but one, and of that one.

    Answers with the same number in ``groups`` ``(n,)`` stay together.
    """
    names, member = np.unique(groups, return_inverse=True)
    fold = (np.random.default_rng(0).permutation(len(names)) % FOLDS)[member]
    for number in range(min(FOLDS, len(names))):
        yield np.flatnonzero(fold != number), np.flatnonzero(fold == number)


def _confidences(values: Values) -> FloatArray:
    wanted = (
        "confidence must be (answers,) in [0, 1], got {}: of token probabilities pass "
        "answer_confidence(token_probs)"
    )
    try:
        confidence = as_float64(values)
    except (TypeError, ValueError) as error:
        raise ValueError(wanted.format(f"no numbers ({error})")) from error
    if confidence.ndim != 1 or not ((confidence >= 0) & (confidence <= 1)).all():
        raise ValueError(wanted.format(f"shape {confidence.shape} or values outside"))
    return confidence


def _outcomes(correct: Values, answers: int) -> FloatArray:
    """Return whether each answer is right, as 0 and 1, or raise."""
    outcome = as_float64(correct)
    if outcome.shape != (answers,):
        raise ValueError(
            f"correct must have one value for each of {answers} answers, got {outcome.shape}"
        )
    wrong = outcome[(outcome != 0) & (outcome != 1)]
    if wrong.size:
        raise ValueError(f"correct must be 0 or 1 (is the answer right?), got {wrong[0]:g}")
    return outcome


def _halfway(confidence: FloatArray) -> tuple[float, float]:
    """Replacements of confidences of 0 and 1, so that they do not outweigh all others."""
    between = confidence[(confidence > SMALLEST) & (confidence < 1 - SUREST)]
    low, high = (between.min(), between.max()) if between.size else (0.5, 0.5)
    return float(low / 2), float((1 + high) / 2)


def _check_state(state: Any, keys: Sequence[str], kind: type) -> None:
    """Raise unless a state that was saved has the values of its kind of object."""
    if not isinstance(state, Mapping) or {*state} != {*keys}:
        raise ValueError(f"a saved {kind.__name__} has {sorted(keys)}, got {state!r:.200}")


def _finite_numbers(values: Any, size: int, name: str) -> FloatArray:
    """Return the numbers of a saved list of a length, or raise."""
    numbers = as_float64(values)
    if numbers.shape != (size,) or not np.isfinite(numbers).all():
        raise ValueError(f"{name} must be {size} finite numbers, got {values!r:.80}")
    return numbers
