r"""Learn the probability that an answer is correct from several signals.

The log-odds :math:`x_j` of the signals, standardised, are the inputs of a logistic regression,

.. math:: s = b + \sum_j w_j x_j + \sum_j v_j d_j ,

where :math:`d_j` is 1 if an answer lacks the signal, and :math:`x_j` is then 0, its mean. The
weights minimise the log loss of all answers plus :math:`\frac{1}{2} (|w|^2 + |v|^2)`, the ridge
penalty that is scikit-learn's default. Such a score is too sure of itself; so each answer is also
scored by a regression on the other folds, and a map from these scores to the chance that the answer
is right is fitted, which then calibrates the scores of the regression on all answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.special import expit, logit

from calibrant._core import checks
from calibrant._core.checks import BoolArray, FloatArray, IntArray, Values, as_float64
from calibrant._core.messages import comma_separated, printable
from calibrant._core.showing import one_line
from calibrant.decide.threshold_results import Threshold
from calibrant.llm.answers.calibrator import (
    AnswerCalibrator,
    AnswerMap,
    Map,
    _check_state,
    _finite_numbers,
    _folds,
    _halfway,
    _outcomes,
)
from calibrant.llm.answers.rows import AnswerRows, Source
from calibrant.llm.answers.signals import UNREAD, signal_values, signals_of
from calibrant.llm.answers.stated import OFF_SCALE
from calibrant.metrics.clustered import ConfidenceEvaluation, Evaluations
from calibrant.workflows.evaluate_answers import SUREST, evaluate_answers

if TYPE_CHECKING:
    from typing_extensions import Self

_RIDGE = 1.0
_MIN_FOR_FOLDS = 10
"""Right and wrong answers each, and questions, that calibration on held-out folds needs."""
_ENOUGH_TO_HAVE_A_SIGNAL = 10
"""Answers of which some should have a signal that those of the fit had."""
Signals = Mapping[str, Values]
"""Signals ``(n,)`` in [0, 1] by name, NaN where an answer lacks one."""


class Regression(NamedTuple):
    """A logistic regression on the log-odds of signals.

    Attributes
    ----------
    low, high : (k,)
        Ends of each signal: a share of 0 or 1 counts as halfway to the nearest other value.
    mean, scale : (k,)
        Of the log-odds of the answers that have each signal.
    weights, absent : (k,)
        Of the standardised log-odds, and of the indicators that a signal is missing.
    offset : (1,)
    """

    low: FloatArray
    high: FloatArray
    mean: FloatArray
    scale: FloatArray
    weights: FloatArray
    absent: FloatArray
    offset: FloatArray

    @classmethod
    def fit(cls, values: FloatArray, right: BoolArray) -> Regression:
        """Fit to the signals ``(n, k)`` of graded answers, NaN where an answer lacks one."""
        missing = np.isnan(values)
        ends = [_halfway(column[~gap]) for column, gap in zip(values.T, missing.T, strict=True)]
        low, high = np.clip(np.transpose(ends), SUREST, 1 - SUREST)
        odds = logit(np.clip(values, low, high))
        count = np.maximum((~missing).sum(0), 1)
        mean = np.where(missing, 0.0, odds).sum(0) / count
        spread = np.sqrt((np.where(missing, 0.0, odds - mean) ** 2).sum(0) / count)
        scale = np.where(spread > 0, spread, 1.0)
        told = missing.any(0) & ~missing.all(0)  # others have no answers to compare
        inputs = np.hstack([np.where(missing, 0.0, (odds - mean) / scale), missing * told])
        line = _ridge_logistic(inputs, right)
        weights, absent = np.split(line[:-1], 2)
        return cls(low, high, mean, scale, weights, absent, line[-1:])

    def score(self, values: FloatArray) -> FloatArray:
        """Return a number in [0, 1] for each answer, of signals ``(n, k)``."""
        missing = np.isnan(values)
        odds = logit(np.clip(values, self.low, self.high))
        inputs = np.where(missing, 0.0, (odds - self.mean) / self.scale)
        return np.asarray(expit(inputs @ self.weights + missing @ self.absent + self.offset))

    @classmethod
    def from_state(cls, state: Any, signals: int) -> Regression:
        """Make the regression of so many signals from its saved numbers."""
        _check_state(state, cls._fields, cls)
        sizes = {name: signals for name in cls._fields} | {"offset": 1}
        made = cls(**{name: _finite_numbers(state[name], n, name) for name, n in sizes.items()})
        if not ((made.scale > 0) & (made.low > 0) & (made.low < made.high) & (made.high < 1)).all():
            raise ValueError("scale must be above 0, and low and high rise between 0 and 1")
        return made


def _ridge_logistic(inputs: FloatArray, right: BoolArray) -> FloatArray:
    """Return the weights of a logistic regression with a ridge penalty, and then its offset.

    By Newton's method, whose steps are halved until they descend. If all answers are right, or all
    are wrong, the offset is that of half an answer of the other kind.
    """
    y = right.astype(np.float64)
    base = (y.sum() + 0.5) / (len(y) + 1)
    line = np.append(np.zeros(inputs.shape[1]), np.log(base / (1 - base)))
    if y.min() == y.max():
        return line
    x = np.hstack([inputs, np.ones((len(y), 1))])
    penalty = np.append(np.full(inputs.shape[1], _RIDGE), 1e-9)

    def loss(line: FloatArray) -> float:
        odds = x @ line
        return float((np.logaddexp(0, odds) - y * odds).sum() + penalty @ line**2 / 2)

    for _ in range(100):
        p = expit(x @ line)
        slope = x.T @ (p - y) + penalty * line
        step = np.linalg.solve((x.T * (p * (1 - p))) @ x + np.diag(penalty), slope)
        while loss(line - step) > loss(line) and np.abs(step).max() > 1e-12:
            step /= 2
        line = line - step
        if np.abs(step).max() < 1e-9:
            break
    return line


class SignalCalibrator(AnswerMap):
    r"""Predict the chance that an answer is right, from several signals.

    ``calibrant.llm.answers.signal_calibrator`` has the equation. An answer that lacks signals
    still gets a chance.

    Parameters
    ----------
    stage : {"beta", "sigmoid", "isotonic"}
        Kind of the map, as for :class:`~calibrant.llm.AnswerCalibrator`.

    Attributes
    ----------
    names_ : list of str
        Signals of the fit.
    regression_ : Regression
    map_ : AnswerCalibrator or None
        Of scores to chances; None if there were too few answers to fit one.
    coverage_ : dict
        Share of the answers of the fit that have each signal.
    source_, threshold_, least_
        As for :class:`~calibrant.llm.answers.calibrator.AnswerMap`.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> odds = rng.normal(size=(2, 2000))
    >>> right = rng.random(2000) < 1 / (1 + np.exp(-odds.sum(0)))
    >>> stated, judged = 1 / (1 + np.exp(-odds))
    >>> fitted = SignalCalibrator().fit({"stated": stated, "judge": judged}, right)
    >>> fitted.predict({"stated": [0.9, np.nan], "judge": [0.9, 0.9]}).round(1)
    array([1. , 0.9])
    """

    def __init__(self, *, stage: Map = "beta") -> None:
        self.stage = stage
        self.names_: list[str] = []
        self.regression_: Regression | None = None
        self.map_: AnswerCalibrator | None = None
        self.coverage_: dict[str, float] = {}
        self.least_ = 0.0
        self.threshold_: Threshold | None = None
        self.source_ = Source()

    def fit(
        self,
        signals: Signals,
        correct: Values,
        *,
        groups: Values | None = None,
        source: Source | None = None,
    ) -> Self:
        """Fit to the signals of graded answers.

        ``signals`` are ``(n,)`` arrays in [0, 1] by name, NaN where an answer lacks one;
        ``correct`` ``(n,)`` is 0 or 1. Answers with equal ``groups`` ``(n,)``, such as those to one
        question, stay in one fold. ``source`` is where the answers come from; others are refused
        later.
        """
        values = _as_table(signals)
        right = _outcomes(correct, len(values)) == 1
        member = np.arange(len(values)) if groups is None else checks.as_labels(groups, "groups")
        if member.shape != (len(values),):
            raise ValueError(
                f"groups must have one value for each of {len(values)} answers, got {member.shape}"
            )
        checks.check_some(len(values))
        self.names_ = [str(name) for name in signals]
        self.coverage_ = dict(zip(self.names_, (~np.isnan(values)).mean(0).tolist(), strict=True))
        self.source_, self.threshold_ = (source or Source())._replace(confidence=""), None
        self.regression_, self.map_ = Regression.fit(values, right), None
        self.least_ = 1 / (len(right) + 2)
        if not _enough_for_folds(right, member):
            checks.warn(
                f"{len(right):,} answers, {int(right.sum()):,} of them right, are too few to "
                "calibrate the combined signals on held-out ones: grade more answers"
            )
            return self
        scores = np.empty(len(right))
        for train, test in _folds(member):
            scores[test] = Regression.fit(values[train], right[train]).score(values[test])
        with checks.silenced():  # the figures of the fit show signals that tell nothing
            self.map_ = AnswerCalibrator(stage=self.stage).fit(scores, right)
        return self

    def predict(self, signals: Signals, *, source: Source | None = None) -> FloatArray:
        """Return the chance of each answer to be right, ``(n,)``.

        ``signals`` must have those of the fit, with NaN where an answer lacks one; others are
        ignored. Raises if ``source`` is not that of the fit.
        """
        if source is not None:
            self.source_.check(source._replace(confidence=""))
        fitted = self._fitted()
        lacking = [name for name in self.names_ if name not in signals]
        if lacking:
            raise ValueError(
                f"the map needs the signals {comma_separated(map(printable, self.names_))}, and "
                f"{comma_separated(map(printable, lacking))} is not there, got "
                f"{comma_separated(map(printable, signals))}: pass NaN where an answer lacks one"
            )
        scores = fitted.score(_as_table({name: signals[name] for name in self.names_}))
        # a map of the scores has the same limits
        return self._supported(scores) if self.map_ is None else self.map_.predict(scores)

    def predict_rows(self, answers: AnswerRows) -> FloatArray:
        """Return the chance of each answer to be right; raise if they are of another source."""
        values = signal_values(_with_signals(answers), self.names_)
        for name, column in values.items():
            lacking = len(column) >= _ENOUGH_TO_HAVE_A_SIGNAL and np.isnan(column).all()
            if lacking and self.coverage_[name]:
                checks.warn(
                    f"none of the {len(column):,} answers has the signal {printable(name)}, which "
                    f"{100 * self.coverage_[name]:.0f} % of those of the fit had: compute it in "
                    "the same way"
                )
        return self.predict(values, source=answers.source())

    def describe(self) -> str:
        """Describe the map in a sentence."""
        names = comma_separated(self.names_)
        kind = "combination of the signals" if len(self.names_) > 1 else "map of the signal"
        return f"{kind} {names} to the probability of a correct answer"

    def __repr__(self) -> str:
        if self.regression_ is None:
            return one_line(self, f"stage={self.stage!r}, not fitted")
        return one_line(self, self.describe(), self._limit_text())

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each standardised signal in the regression."""
        return dict(zip(self.names_, self._fitted().weights.tolist(), strict=True))

    def _fitted(self) -> Regression:
        if self.regression_ is None:
            raise RuntimeError("this SignalCalibrator is not fitted: call fit(signals, correct)")
        return self.regression_

    def state(self) -> dict[str, Any]:
        """Return everything that was chosen and learned, for JSON."""
        learned = self._fitted()._asdict()
        return {
            "stage": self.stage,
            "names": self.names_,
            "coverage": [self.coverage_[name] for name in self.names_],
            "regression": {name: values.tolist() for name, values in learned.items()},
            "map": self.map_ and self.map_.state(),
            **self._shared_state(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> SignalCalibrator:
        """Make a calibrator of what :meth:`state` returned."""
        keys = ("stage", "names", "coverage", "regression", "map", "least", "threshold", "source")
        _check_state(state, keys, cls)
        made, names = cls(stage=state["stage"]), state["names"]
        texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not texts or not names or len({*names}) != len(names):
            raise ValueError(f"names must be different texts, got {names!r:.80}")
        made.names_ = list(names)
        shares = _finite_numbers(state["coverage"], len(names), "coverage").tolist()
        made.coverage_ = dict(zip(names, shares, strict=True))
        made.regression_ = Regression.from_state(state["regression"], len(names))
        if state["map"] is not None:
            made.map_ = AnswerCalibrator.from_state(state["map"])
            if made.map_.stage != made.stage:
                raise ValueError(f"the map must be a {made.stage} of scores, got {made.map_!r:.80}")
        made._restore(state)
        return made


def _signal_calibrator(
    answers: AnswerRows, names: Sequence[str] | None = None, *, stage: Map = "beta"
) -> SignalCalibrator:
    """Fit a map to the signals that graded answers have, ``names`` of them or all."""
    values = signal_values(answers, names)
    about: Any = {"groups": answers.groups, "source": answers.source()}
    return SignalCalibrator(stage=stage).fit(values, answers.grades(), **about)


def _with_signals(answers: AnswerRows) -> AnswerRows:
    """Compute the signals of rows; warn of stated numbers that have another scale."""
    found = signals_of(answers)
    reasons = [row.get(UNREAD, {}).get("stated", "") for row in found.rows]
    off = sum(reason.startswith(OFF_SCALE) for reason in reasons)
    if off:
        checks.warn(
            f"{off:,} of {len(reasons):,} stated confidences are numbers above 1 without a percent "
            'sign, and not read: write their scale beside them, as "stated_scale": 100'
        )
    return found


def _enough_for_folds(right: BoolArray, groups: IntArray) -> bool:
    """Return True if every fold can leave right and wrong answers to the others."""
    return bool(min(right.sum(), (~right).sum(), len(np.unique(groups))) >= _MIN_FOR_FOLDS)


def _as_table(signals: Signals) -> FloatArray:
    """Return signals as columns, ``(n, k)``."""
    if not isinstance(signals, Mapping) or not signals:
        raise TypeError(f"signals must be arrays by name, got {signals!r:.80}")
    columns = {name: as_float64(values) for name, values in signals.items()}
    shape = next(iter(columns.values())).shape
    for name, column in columns.items():
        told = printable(str(name))
        if column.ndim != 1 or column.shape != shape:
            raise ValueError(
                f"signal {told} must be ({shape[0] if shape else 'n'},), got {column.shape}"
            )
        wrong = column[~(np.isnan(column) | ((column >= 0) & (column <= 1)))]
        if wrong.size:
            raise ValueError(f"signal {told} must be in [0, 1] or NaN, got {wrong[0]:g}")
    return np.stack(list(columns.values()), axis=1)


class SignalFit(NamedTuple):
    """A map of signals, and its figures on held-out answers.

    Attributes
    ----------
    calibrator : SignalCalibrator
    alone : dict of ConfidenceEvaluation
        Of maps of each signal alone; all answers count, also those without the signal.
    raw : dict of ConfidenceEvaluation
        Of each signal as it is, of the answers that have it.
    unread : dict
        Numbers of answers by the name of a signal and the reason why their material lacks it.
    together : ConfidenceEvaluation or None
        Of the map of all signals; None if there are too few answers.
    """

    calibrator: SignalCalibrator
    alone: Evaluations
    raw: Evaluations
    unread: Mapping[tuple[str, str], int]
    together: ConfidenceEvaluation | None = None

    @property
    def best(self) -> str:
        """The signal with the lowest log loss, of held-out answers if there are enough."""
        figures = self.alone or self.raw
        return min(figures, key=lambda name: figures[name]["nll"].value)


def fit_signals(
    answers: AnswerRows,
    names: Sequence[str] | None = None,
    *,
    stage: Map = "beta",
    level: float | None = 0.9,
) -> SignalFit:
    """Fit a map from the signals of graded answers to the chance that they are right.

    ``names`` are the signals to use, by default all that the rows have or that their material
    allows (:func:`~calibrant.llm.signals_of`). The map keeps their names and the source of the
    answers, and refuses others. Answers to one question, such as the fields of one document, stay
    in one fold, and the intervals are those of independent questions.
    """
    answers = _with_signals(answers)
    values, right, groups = signal_values(answers, names), answers.grades(), answers.groups
    fitted = _signal_calibrator(answers, names, stage=stage)
    known = {name: ~np.isnan(column) for name, column in values.items()}
    raw = {
        name: evaluate_answers(values[name][has], right[has], groups=groups[has], level=level)
        for name, has in known.items()
        if has.any()
    }
    unread = Counter(pair for row in answers.rows for pair in row.get(UNREAD, {}).items())
    if not _enough_for_folds(right, groups):
        return SignalFit(fitted, {}, raw, unread)

    def held_out(chosen: Mapping[str, FloatArray]) -> ConfidenceEvaluation:
        chances = np.empty(len(right))
        for train, test in _folds(groups):
            one = SignalCalibrator(stage=stage)
            some = {name: column[train] for name, column in chosen.items()}
            one.fit(some, right[train], groups=groups[train])
            chances[test] = one.predict({name: x[test] for name, x in chosen.items()})
        return evaluate_answers(chances, right, groups=groups, level=level)

    with checks.silenced():  # the fit to all answers has said what is worth saying
        alone = {name: held_out({name: column}) for name, column in values.items()}
        together = held_out(values) if len(values) > 1 else alone[fitted.names_[0]]
    return SignalFit(fitted, alone, raw, unread, together)
