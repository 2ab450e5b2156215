"""From the confidence of an answer to its probability of being correct."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from scipy.special import expit

from calibrant._core.atomic_files import replacing
from calibrant._core.checks import (
    BoolArray,
    FloatArray,
    Values,
    as_float64,
    as_pairs,
    check_choice,
    warn,
)
from calibrant.calibrators.confidence_maps import fit_beta
from calibrant.calibrators.isotonic import counted, nothing, pooled, steps, tally
from calibrant.calibrators.platt import fit_platt
from calibrant.decide.thresholds import Threshold, threshold

if TYPE_CHECKING:
    from typing_extensions import Self
from calibrant.llm.answers.confidence import (
    SMALLEST,
    Aggregator,
    Answers,
    _log_confidence,
    _one_array,
)

FORMAT = 1
"""Version of the dict that a calibrator is written to."""
AGAIN = "fit and save it again"
"""Remedy for a file that cannot be used."""
SAME = 1e-6
"""Chances that differ by less do not tell answers apart."""
SUREST = 1e-9
"""Distance from 1 within which confidences are not told apart."""


# ---------------------------------------------------------------------------- the second stage


class Stage(NamedTuple):
    """A map of log-odds: how it is learned, and how it is applied to log-odds ``(n,)``."""

    fit: Callable[[FloatArray, BoolArray], tuple[dict[str, FloatArray], bool]]
    """Learned values by name, and whether an optimum was found."""
    apply: Callable[..., FloatArray]
    """New probabilities, from log-odds and the learned values in the order of ``sizes``."""
    sizes: Mapping[str, int | None]
    """Number of learned values by name, in the order of ``apply``; None: one for each step."""


def _fit_sigmoid(odds: FloatArray, correct: BoolArray) -> tuple[dict[str, FloatArray], bool]:
    found = fit_platt(odds, correct, np.ones_like(odds))
    return {"line": found.x}, found.converged


def _sigmoid(odds: FloatArray, line: FloatArray) -> FloatArray:
    return np.asarray(expit(line[0] * odds + line[1]))


def _fit_beta(odds: FloatArray, correct: BoolArray) -> tuple[dict[str, FloatArray], bool]:
    found = fit_beta(odds, correct, np.ones_like(odds))
    # a few answers of one kind may end before a bound, where nothing is left to be gained
    both = bool(correct.any() and not correct.all())
    return {"line": found.x}, found.converged and both


def _beta(odds: FloatArray, line: FloatArray) -> FloatArray:
    a, b, m = line
    return np.asarray(expit(b * np.logaddexp(0, odds) - a * np.logaddexp(0, -odds) + m))


def _fit_isotonic(odds: FloatArray, correct: BoolArray) -> tuple[dict[str, FloatArray], bool]:
    if correct.all() or not correct.any():
        level = (correct.sum() + 0.5) / (len(correct) + 1)
        return {"odds": np.zeros(1), "prob": np.array([level])}, False
    single = odds.astype(np.float32)
    marks, hits = counted(single[correct], None)
    misses = nothing(marks)
    tally(marks, single[~correct], None, misses)
    curve = pooled(marks, hits, misses)
    # a step without a mistake is no proof that none will be made: half an answer is kept back
    least = 0.5 / len(odds)
    return {"odds": as_float64(curve.odds), "prob": np.clip(curve.prob, least, 1 - least)}, True


def _isotonic(odds: FloatArray, knots: FloatArray, prob: FloatArray) -> FloatArray:
    # in single precision, as they were fitted: otherwise a sample may leave its own step
    x = torch.from_numpy(knots.astype(np.float32))
    found = steps(torch.from_numpy(odds.astype(np.float32)), x, torch.from_numpy(prob))
    return as_float64(found)


Map = Literal["sigmoid", "beta", "isotonic"]
STAGES: dict[str, Stage] = {
    "sigmoid": Stage(_fit_sigmoid, _sigmoid, {"line": 2}),
    "beta": Stage(_fit_beta, _beta, {"line": 3}),
    "isotonic": Stage(_fit_isotonic, _isotonic, {"odds": None, "prob": None}),
}


class AnswerCalibrator:
    r"""The chance that an answer is right, learned from graded answers.

    The tokens' probabilities are reduced to one confidence c (:func:`answer_confidence`), and a
    rising map of its log-odds :math:`s = \log c - \log(1 - c)` makes a probability of it:

    - ``sigmoid``: :math:`\sigma(a s + b)` (Platt 1999), for some hundred graded answers;
    - ``beta``: :math:`\sigma(a \log c - b \log(1 - c) + m)` (Kull et al. 2017);
    - ``isotonic``: rising steps (Zadrozny and Elkan 2002), for a thousand and more.

    The map is one of log-odds below zero and above alike. (The calibrators for classes work on
    the confidence of the likelier of two classes, under which an answer with 30 % and one with
    70 % would be two sides of the same thing.)

    A confidence of exactly 0 or 1, as judges and models that are asked for a number give it, has
    no log-odds. Without ``how``, sigmoid and beta take those, and all others beyond, for values
    halfway between 0 or 1 and the nearest other confidence of :meth:`fit`; of 1/2, if there is
    none. Isotonic steps need no such values: they know only the order.

    Parameters
    ----------
    how : str or None
        Rule of :func:`answer_confidence`. None: the confidences come from elsewhere (P(True),
        choices, a judge), ``(answers,)`` in [0, 1], and are calibrated as they are.
    stage : {"sigmoid", "beta", "isotonic"}

    Attributes
    ----------
    learned_ : dict of arrays
    limits_ : (float, float) or None
        What confidences of 0 and 1 are taken for; None: no values are limited.
    threshold_ : Threshold or None
        Set by :meth:`control`.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> answers = [rng.beta(4, 1, size=rng.integers(1, 9)) for _ in range(2000)]
    >>> sure = answer_confidence(answers)
    >>> right = rng.random(2000) < sure**3  # the model is too sure
    >>> fitted = AnswerCalibrator().fit(answers[:1000], right[:1000])
    >>> bool(abs(fitted.predict(answers).mean() - right.mean()) < 0.03)
    True
    >>> found = fitted.control(answers[1000:], right[1000:], max_error=0.3)
    >>> fitted.abstains([0.1, 0.95])
    array([ True, False])
    """

    def __init__(self, how: Aggregator | None = "geometric", *, stage: Map = "sigmoid") -> None:
        if how is not None:
            check_choice("how", how, get_args(Aggregator))
        check_choice("stage", stage, get_args(Map))
        self.how = how
        self.stage = stage
        self.learned_: dict[str, FloatArray] | None = None
        self.limits_: tuple[float, float] | None = None
        self.threshold_: Threshold | None = None

    def fit(self, answers: Answers, correct: Values, **layout: Any) -> Self:
        """Learn from answers and whether each was right; an earlier fit is forgotten.

        Parameters
        ----------
        answers : as token_probs of answer_confidence; (answers,) confidences without ``how``
        correct : (answers,) 0 or 1
        **layout
            ``mask`` or ``documents`` of :func:`answer_confidence`.
        """
        limits = None
        if self.how is None and self.stage != "isotonic":
            limits = _halfway(_confidences(answers, layout))
        odds = self._odds(answers, layout, limits)
        _, happened, _ = as_pairs(expit(odds), _outcomes(correct, len(odds)))
        learned, converged = STAGES[self.stage].fit(odds, happened == 1)
        self.learned_, self.limits_, self.threshold_ = learned, limits, None
        if not converged:
            warn(
                f"AnswerCalibrator found no optimum for these {len(odds):,} answers and stopped at "
                "its bounds; are all of them right, or all wrong, or nearly? Grade more answers"
            )
        elif np.ptp(happened) and np.ptp(odds) and np.ptp(self._chances(odds)) < SAME:
            warn(
                f"surer answers are not right more often among these {len(odds):,}: every answer "
                f"gets the same chance, {100 * happened.mean():.0f} %; take another rule for the "
                "confidence, or grade more answers"
            )
        return self

    def predict(self, answers: Answers, **layout: Any) -> FloatArray:
        """Chance of each answer to be right, ``(answers,)``."""
        if self.learned_ is None:
            raise RuntimeError("this AnswerCalibrator is not fitted: call fit(answers, correct)")
        return self._chances(self._odds(answers, layout, self.limits_))

    def control(
        self,
        answers: Answers,
        correct: Values,
        *,
        max_error: float,
        level: float = 0.95,
        **layout: Any,
    ) -> Threshold:
        """Find from which confidence on answers are given, so that few of them are wrong.

        The guarantee is that of :func:`calibrant.decide.threshold`: with probability ``level``
        over the draw of these graded answers, at most ``max_error`` of all answers that will be
        given are wrong. The answers must not be those of :meth:`fit`.

        Returns
        -------
        Threshold
            Also kept as ``threshold_``, for :meth:`abstains`.
        """
        confidence = self.predict(answers, **layout)
        happened = _outcomes(correct, len(confidence))
        self.threshold_ = threshold(
            confidence=confidence, outcome=happened, max_error=max_error, level=level
        )
        return self.threshold_

    def abstains(self, confidence: Values) -> BoolArray:
        """Whether to withhold answers of these calibrated confidences, those of :meth:`predict`."""
        if self.threshold_ is None:
            raise RuntimeError(
                "there is no threshold yet: call control(answers, correct, max_error=...) with "
                "graded answers that fit has not seen"
            )
        sure = as_float64(confidence)
        if not ((sure >= 0) & (sure <= 1)).all():
            raise ValueError(
                "confidence must be in [0, 1]: NaN, negative or larger values were found; pass "
                "what predict returned"
            )
        return np.asarray(sure < self.threshold_.threshold)

    def config(self) -> dict[str, Any]:
        """Everything that was chosen and learned, as plain numbers, strings and lists."""
        if self.learned_ is None:
            raise RuntimeError("this AnswerCalibrator is not fitted: call fit(answers, correct)")
        found = None if self.threshold_ is None else self.threshold_._asdict()
        return {
            "format": FORMAT,
            "how": self.how,
            "stage": self.stage,
            "learned": {name: values.tolist() for name, values in self.learned_.items()},
            "limits": self.limits_ and list(self.limits_),
            # JSON has no infinity and no NaN
            "threshold": found and {k: v if math.isfinite(v) else None for k, v in found.items()},
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> AnswerCalibrator:
        """The calibrator that :meth:`config` described."""
        keys = {"format", "how", "stage", "learned", "limits", "threshold"}
        if not isinstance(config, Mapping):
            raise ValueError(
                f"an answer calibrator is an object with the keys {sorted(keys)}, got a "
                f"{type(config).__name__}; {AGAIN}"
            )
        config = {"limits": None, **config}  # there were none in the first files
        if set(config) != keys or config["format"] != FORMAT:
            raise ValueError(
                f"this is no answer calibrator of format {FORMAT}: keys {sorted(keys)} are wanted, "
                f"got {sorted(map(str, config))}, format {config.get('format')!r}; {AGAIN}"
            )
        made = cls(config["how"], stage=config["stage"])
        made.learned_ = _learned(made.stage, config["learned"])
        if config["limits"] is not None:
            made.limits_ = _limits(config["limits"])
        if config["threshold"] is not None:
            made.threshold_ = _threshold(config["threshold"])
        return made

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`config` to a JSON file, which :meth:`load` reads."""
        text = json.dumps(self.config(), indent=2, allow_nan=False)
        with replacing(Path(path)) as temporary:
            temporary.write_text(f"{text}\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AnswerCalibrator:
        """Read what :meth:`save` wrote."""
        file = Path(path)
        try:
            config = json.loads(file.read_text("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is not JSON ({error}); {AGAIN}") from error
        try:
            return cls.from_config(config)
        except ValueError as error:
            raise ValueError(f"{file} cannot be loaded: {error}") from error

    def _chances(self, odds: FloatArray) -> FloatArray:
        assert self.learned_ is not None
        stage = STAGES[self.stage]
        return stage.apply(odds, *(self.learned_[name] for name in stage.sizes))

    def _odds(
        self, answers: Answers, layout: Mapping[str, Any], limits: tuple[float, float] | None
    ) -> FloatArray:
        """Log-odds of the confidences, finite: exact also where a product underflows."""
        if self.how is not None:
            layout = {"mask": None, "documents": None, **layout}
            return log_odds(_log_confidence(answers, self.how, **layout))
        given = _confidences(answers, layout)
        return log_odds(np.log(np.maximum(np.clip(given, *(limits or (0, 1))), SMALLEST)))


def _confidences(answers: Answers, layout: Mapping[str, Any]) -> FloatArray:
    wanted = (
        "without how, answers are confidences (answers,) in [0, 1], got {}: pass how='geometric' "
        "for probabilities of tokens"
    )
    try:
        given = as_float64(_one_array(answers))
    except (TypeError, ValueError) as error:
        raise ValueError(wanted.format(f"what is none ({error})")) from error
    if given.ndim != 1 or layout or not ((given >= 0) & (given <= 1)).all():
        raise ValueError(wanted.format(f"shape {given.shape} or values beyond"))
    return given


def _halfway(given: FloatArray) -> tuple[float, float]:
    """What confidences of 0 and 1 are taken for, so that they do not outweigh all others.

    >>> _halfway(np.array([0.0, 0.2, 0.9, 1.0]))
    (0.1, 0.95)
    """
    between = given[(given > SMALLEST) & (given < 1 - SUREST)]
    low, high = (between.min(), between.max()) if between.size else (0.5, 0.5)
    return float(low / 2), float((1 + high) / 2)


def log_odds(log_confidence: FloatArray) -> FloatArray:
    """Log-odds of confidences given by their logarithms, ``(n,)``; finite for 1 too.

    >>> log_odds(np.log([0.5, 0.9])).round(3)
    array([0.   , 2.197])
    """
    return np.asarray(log_confidence - np.log(np.maximum(-np.expm1(log_confidence), SUREST)))


def _learned(stage: str, given: Any) -> dict[str, FloatArray]:
    wanted = STAGES[stage].sizes
    if not isinstance(given, Mapping) or set(given) != set(wanted):
        got = ", ".join(map(str, given)) if isinstance(given, Mapping) else repr(given)
        raise ValueError(
            f"{stage} has the learned values {', '.join(wanted)}, got {got or 'none'}; {AGAIN}"
        )
    try:
        found = {name: as_float64(given[name]) for name in wanted}
    except (TypeError, ValueError) as error:
        raise ValueError(f"learned values of {stage} are no numbers ({error}); {AGAIN}") from error
    steps = max(1, next(iter(found.values())).size)
    for name, size in wanted.items():
        if found[name].shape != (size or steps,) or not np.isfinite(found[name]).all():
            raise ValueError(
                f"{name} of {stage} must be {size or steps} finite numbers, got "
                f"{given[name]!r:.60}; {AGAIN}"
            )
    return found


def _limits(given: Any) -> tuple[float, float]:
    pair = isinstance(given, (list, tuple)) and len(given) == 2 and all(map(_is_number, given))
    if not pair or not 0 < given[0] < given[1] < 1:
        raise ValueError(
            f"limits must be two rising numbers between 0 and 1, got {given!r:.60}; {AGAIN}"
        )
    return float(given[0]), float(given[1])


def _threshold(given: Any) -> Threshold:
    absent = {"threshold": math.inf, "error": math.nan, "bound": math.nan}
    named = isinstance(given, Mapping) and set(given) == set(Threshold._fields)
    if not named or not all(_is_number(v) or (v is None and k in absent) for k, v in given.items()):
        raise ValueError(
            f"a threshold has the numbers {', '.join(Threshold._fields)}, got {given!r:.200}; "
            f"{AGAIN}"
        )
    numbers: dict[str, Any] = {k: absent[k] if v is None else v for k, v in given.items()}
    return Threshold(**numbers)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _outcomes(correct: Values, answers: int) -> FloatArray:
    happened = as_float64(correct)
    if happened.shape != (answers,):
        raise ValueError(
            f"correct must have one value for each of {answers} answers, got {happened.shape}"
        )
    return happened
