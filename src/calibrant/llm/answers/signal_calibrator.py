"""Learn the probability that an answer is correct from several signals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrant._core import checks
from calibrant._core.checks import BoolArray, FloatArray, IntArray, Values, as_float64
from calibrant._core.messages import comma_separated, printable
from calibrant._core.options import WithOptions
from calibrant._core.tables import frame
from calibrant.decide.thresholds import Threshold
from calibrant.display.html import html_table, notebook
from calibrant.display.results import heading, one_line, threshold_text, verdict
from calibrant.llm.answers import combining
from calibrant.llm.answers.calibrator import (
    AnswerCalibrator,
    Map,
    below,
    controlled,
    outcomes,
    source_from,
)
from calibrant.llm.answers.combining import Combination, Combined, HeldOut, Single
from calibrant.llm.answers.sources import Source
from calibrant.metrics.intervals import Estimate, mean_interval

if TYPE_CHECKING:
    import pandas as pd
    from typing_extensions import Self

LEVEL = 0.9
"""Coverage of the interval of the gain."""
Signals = Mapping[str, Values]
"""Signals ``(n,)`` in [0, 1] by name, NaN where an answer lacks one."""


class SignalCalibrator(WithOptions):
    r"""Predict the chance that an answer is right, from several signals.

    Every signal gets a map of its own, as that of :class:`~calibrant.llm.AnswerCalibrator`, and the
    log-odds of these chances are combined with weights that are not negative
    (``calibrant.llm.answers.combining`` has the equation). The combination is compared with the
    best single signal on held-out answers: both are fitted, and the best signal and the shrinkage
    are chosen, anew for each of five folds. It is used if its log loss is lower, and lower than
    that of every single signal; otherwise the best signal is used alone.

    An answer that lacks a signal still gets a chance: from the others, or, if the one signal in use
    is missing, that of such answers.

    Parameters
    ----------
    stage : {"beta", "sigmoid", "isotonic"}
        Kind of the map of each signal.

    Attributes
    ----------
    names_ : list of str
        Signals of the fit.
    best_ : str
        The best single signal.
    kept_ : bool
        True if the combination is in use.
    gain_ : Estimate
        Log loss of the best signal minus that of the combination on held-out answers, with a 90 %
        interval; NaN if they were not compared.
    fitted_ : Combined
        All maps.
    held_out_ : HeldOut or None
        Chances of the answers of the fit, by maps of others; it is not saved.
    coverage_ : dict
        Share of the answers of the fit that have each signal.
    source_ : Source
        Model, prompt and head of the answers, as far as they were stated.
    threshold_ : Threshold or None
        Set by :meth:`control`.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> odds = rng.normal(size=(2, 2000))
    >>> right = rng.random(2000) < 1 / (1 + np.exp(-odds.sum(0)))
    >>> stated, judged = 1 / (1 + np.exp(-odds))
    >>> fitted = SignalCalibrator().fit({"stated": stated, "judge": judged}, right)
    >>> fitted.kept_, bool(fitted.gain_.low > 0.02)
    (True, True)
    >>> fitted.predict({"stated": [0.9, np.nan], "judge": [0.9, 0.9]}).round(1)
    array([1. , 0.9])
    """

    def __init__(self, *, stage: Map = "beta") -> None:
        self.stage = stage
        self.names_: list[str] = []
        self.fitted_: Combined | None = None
        self.kept_ = False
        self.gain_ = Estimate(math.nan)
        self.held_out_: HeldOut | None = None
        self.coverage_: dict[str, float] = {}
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
        right = outcomes(correct, len(values)) == 1
        member = _as_groups(groups, len(values))
        checks.check_some(len(values))
        self.names_ = [str(name) for name in signals]
        self.coverage_ = dict(zip(self.names_, (~np.isnan(values)).mean(0).tolist(), strict=True))
        self.fitted_ = combining.fit_combined(values, right, member, self.stage)
        self.source_, self.threshold_ = (source or Source())._replace(confidence=""), None
        self.kept_, self.gain_, self.held_out_ = False, Estimate(math.nan), None
        if _comparable(right, member):
            self._compare(values, right, member)
        else:
            checks.warn(
                f"{len(right):,} answers, {int(right.sum()):,} of them right, are too few to "
                f"compare signals: {self.best_} is used alone; grade more answers"
            )
        return self

    def _compare(self, values: FloatArray, right: BoolArray, member: IntArray) -> None:
        held = combining.held_out(values, right, member, self.stage)
        alone, together = (combining.log_loss(p, right) for p in (held.best, held.together))
        each = combining.log_loss(held.each, right[:, None]).mean(0)
        gain = combining.paired_gain(alone, together, member)
        self.held_out_ = held
        if len(self.names_) > 1:
            self.gain_ = mean_interval(*gain, LEVEL)
            # where several signals are about as good, the choice of the best one is itself unstable
            # and costs log loss: the combination must beat each of them as well
            self.kept_ = bool(together.mean() < min(alone.mean(), each.min()))

    @property
    def best_(self) -> str:
        """The best single signal."""
        return self.names_[self._fitted().best]

    @property
    def needed_(self) -> list[str]:
        """Signals that :meth:`predict` uses."""
        if not self.kept_:
            return [self.best_]
        combination = self._fitted().combination
        used = (combination.weights > 0) | (combination.absent != 0)
        return [name for name, one in zip(self.names_, used, strict=True) if one]

    def predict(self, signals: Signals, *, source: Source | None = None) -> FloatArray:
        """Return the chance of each answer to be right, ``(n,)``.

        ``signals`` must have those of :attr:`needed_`, with NaN where an answer lacks one; others
        are ignored. Raises if ``source`` is not that of the fit.
        """
        if source is not None:
            self.source_.check(source._replace(confidence=""))
        lacking = [name for name in self.needed_ if name not in signals]
        if lacking:
            raise ValueError(
                f"the map needs the signals {comma_separated(map(printable, self.needed_))}, and "
                f"{comma_separated(map(printable, lacking))} is not there, got "
                f"{comma_separated(map(printable, signals))}: pass NaN where an answer lacks one"
            )
        known = _as_table({name: signals[name] for name in self.needed_})
        values = np.full((len(known), len(self.names_)), np.nan)
        values[:, [self.names_.index(name) for name in self.needed_]] = known
        fitted = self._fitted()
        return fitted.together(values) if self.kept_ else fitted.alone(values)

    def control(
        self, signals: Signals, correct: Values, *, max_error: float, level: float = 0.95
    ) -> Threshold:
        """Find the confidence threshold that limits the error of the answers above it.

        As :meth:`calibrant.llm.AnswerCalibrator.control`; the answers must not be those of
        :meth:`fit`.
        """
        confidence = self.predict(signals)
        self.threshold_ = controlled(confidence, correct, max_error=max_error, level=level)
        return self.threshold_

    def abstains(self, confidence: Values) -> BoolArray:
        """Return True for confidences of :meth:`predict` that are below the threshold."""
        return below(self.threshold_, confidence)

    def describe(self) -> str:
        """Describe the map in a sentence."""
        names = comma_separated(self.needed_)
        kind = "combination of the signals" if self.kept_ else f"{self.stage} map of the signal"
        return f"{kind} {names} to the probability of a correct answer"

    def verdict(self) -> str:
        """Say in a sentence whether the combination is in use, and why."""
        if len(self.names_) == 1:
            return f"{self.best_} is the only signal."
        if math.isnan(self.gain_.value):
            return f"{self.best_} is used alone: there are too few answers to compare."
        change, low, high = (-self.gain_.value, -self.gain_.high, -self.gain_.low)
        gain = (
            f"against the best signal the log loss of held-out answers changes by {change:+.4f} "
            f"({100 * LEVEL:.0f} %: {low:+.4f} to {high:+.4f})"
        )
        if self.kept_:
            return f"The combination is used: {gain}."
        return f"{self.best_} is used alone, since the combination does not beat it: {gain}."

    def __repr__(self) -> str:
        if self.fitted_ is None:
            return one_line(self, f"stage={self.stage!r}, not fitted")
        limit = self.threshold_
        end = "" if limit is None else f"threshold={threshold_text(limit.threshold)}"
        return one_line(self, self.describe(), end)

    def _repr_html_(self) -> str:
        if self.fitted_ is None:
            return notebook(heading("Signal calibrator", "not fitted"))
        headings, *rows = self.table()
        about = heading("Signal calibrator", self.describe())
        limit = "" if self.threshold_ is None else self.threshold_.fragment()
        told = verdict(self.verdict(), "good" if self.kept_ else "")
        return notebook(about, told, html_table(headings, rows), limit)

    def table(self) -> list[tuple[str, ...]]:
        """Return headings, then the share of answers that have each signal and its weight."""
        weights = self._weights()
        rows = [
            (name, f"{100 * self.coverage_[name]:.0f} %", f"{weight:.2f}")
            for name, weight in zip(self.names_, weights, strict=True)
        ]
        return [("signal", "answers", "weight"), *rows]

    def to_frame(self) -> pd.DataFrame:
        """Return a frame of the signals: ``signal``, ``coverage``, ``weight``. Needs pandas."""
        pairs = zip(self.names_, self._weights().tolist(), strict=True)
        return frame(
            {"signal": name, "coverage": self.coverage_[name], "weight": weight}
            for name, weight in pairs
        )

    def _weights(self) -> FloatArray:
        fitted = self._fitted()
        if self.kept_:
            return fitted.combination.weights
        return np.asarray(np.eye(len(self.names_))[fitted.best])

    def _fitted(self) -> Combined:
        if self.fitted_ is None:
            raise RuntimeError("this SignalCalibrator is not fitted: call fit(signals, correct)")
        return self.fitted_

    def state(self) -> dict[str, Any]:
        """Return everything that was chosen and learned, for JSON."""
        fitted = self._fitted()
        return {
            "stage": self.stage,
            "names": self.names_,
            "coverage": [self.coverage_[name] for name in self.names_],
            "singles": [_single_state(single) for single in fitted.singles],
            "best": fitted.best,
            "ridge": fitted.ridge,
            "combination": {
                k: np.asarray(v).tolist() for k, v in fitted.combination._asdict().items()
            },
            "kept": self.kept_,
            "gain": None if math.isnan(self.gain_.value) else list(self.gain_),
            "threshold": self.threshold_ and self.threshold_.state(),
            "source": self.source_._asdict(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> SignalCalibrator:
        """Make a calibrator of what :meth:`state` returned."""
        if not isinstance(state, Mapping) or {*state} != STATE:
            raise ValueError(f"a signal calibrator has {sorted(STATE)}, got {state!r:.200}")
        made = cls(stage=state["stage"])
        made.names_ = _names(state["names"])
        count, best, kept = len(made.names_), state["best"], state["kept"]
        singles = _singles(state["singles"], made.stage, count)
        if type(best) is not int or not 0 <= best < count:
            raise ValueError(f"best must be the number of one of {count} signals, got {best!r}")
        if not isinstance(kept, bool):
            raise ValueError(f"kept must be true or false, got {kept!r:.40}")
        combination = _combination(state["combination"], count)
        made.fitted_ = Combined(singles, best, _finite(state["ridge"], "ridge"), combination)
        shares = _array(state["coverage"], (count,), "coverage").tolist()
        made.coverage_ = dict(zip(made.names_, shares, strict=True))
        made.kept_, made.source_ = kept, source_from(state["source"])
        if state["gain"] is not None:
            made.gain_ = Estimate(*_array(state["gain"], (3,), "gain").tolist())
        if state["threshold"] is not None:
            made.threshold_ = Threshold.from_state(state["threshold"])
        return made


STATE = {
    *("stage", "names", "coverage", "singles", "best", "ridge", "combination", "kept", "gain"),
    *("threshold", "source"),
}


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


def _as_groups(groups: Values | None, count: int) -> IntArray:
    if groups is None:
        return np.arange(count)
    member = checks.as_labels(groups, "groups")
    if member.shape != (count,):
        raise ValueError(
            f"groups must have one value for each of {count} answers, got {member.shape}"
        )
    return member


def _comparable(right: BoolArray, member: IntArray) -> bool:
    """Return True if every fold of a fold can have right and wrong answers."""
    enough = combining.FOLDS * combining.FEWEST // 2
    return min(right.sum(), (~right).sum()) >= enough and len(np.unique(member)) >= 2 * enough


def _single_state(single: Single) -> dict[str, Any]:
    inner = None if single.calibrator is None else single.calibrator.state()
    return {**single._asdict(), "calibrator": inner}


def _singles(states: Any, stage: str, count: int) -> list[Single]:
    if not isinstance(states, list) or len(states) != count:
        raise ValueError(f"singles must be a map for each of {count} signals, got {states!r:.80}")
    return [_single(state, stage) for state in states]


def _single(state: Any, stage: str) -> Single:
    if not isinstance(state, Mapping) or {*state} != {*Single._fields}:
        raise ValueError(f"a single map has {', '.join(Single._fields)}, got {state!r:.80}")
    inner, inverted = state["calibrator"], state["inverted"]
    calibrator = None if inner is None else AnswerCalibrator.from_state(inner)
    if not isinstance(inverted, bool):
        raise ValueError(f"inverted must be true or false, got {inverted!r:.40}")
    if calibrator is not None and (calibrator.stage, calibrator.aggregate) != (stage, None):
        raise ValueError(f"every map must be a {stage} of confidences, got {calibrator!r:.80}")
    absent, least = (_finite(state[name], name) for name in ("absent", "least"))
    if not (0 <= absent <= 1 and 0 < least < 0.5):
        raise ValueError(f"absent and least must be chances, got {absent} and {least}")
    return Single(calibrator, inverted, absent, least)


def _combination(state: Any, count: int) -> Combination:
    if not isinstance(state, Mapping) or {*state} != {*Combination._fields}:
        raise ValueError(f"a combination has {', '.join(Combination._fields)}, got {state!r:.80}")
    arrays = {name: _array(state[name], (count,), name) for name in ("weights", "absent", "mean")}
    if (arrays["weights"] < 0).any():
        raise ValueError("weights must not be negative")
    covariance = _array(state["covariance"], (count, count), "covariance")
    return Combination(**arrays, offset=_finite(state["offset"], "offset"), covariance=covariance)


def _array(values: Any, shape: tuple[int, ...], name: str) -> FloatArray:
    try:
        array = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be numbers ({error})") from error
    if array.shape != shape or not np.isfinite(array).all():
        raise ValueError(f"{name} must be {shape} finite numbers, got {values!r:.80}")
    return array


def _finite(value: Any, name: str) -> float:
    return float(_array(value, (), name))


def _names(values: Any) -> list[str]:
    texts = isinstance(values, list) and all(isinstance(name, str) for name in values)
    if not texts or not values or len({*values}) != len(values):
        raise ValueError(f"names must be different texts, got {values!r:.80}")
    return list(values)
