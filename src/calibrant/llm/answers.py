"""Confidence of a generated answer: from its tokens' probabilities to a chance of being right.

:func:`answer_confidence` makes one number of the probabilities of an answer's tokens, and
:class:`AnswerCalibrator` learns from graded answers what that number is worth, and from which
confidence on answers may be given.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit
from torch import Tensor

from calibrant._checks import (
    BoolArray,
    FloatArray,
    IntArray,
    Values,
    as_float64,
    as_labels,
    as_pairs,
    warn,
)
from calibrant.calibrators.base import check_choice
from calibrant.calibrators.isotonic import counted, nothing, pooled, steps, tally
from calibrant.calibrators.platt import fit_platt
from calibrant.calibrators.smooth_maps import fit_beta
from calibrant.data.formats import replacing
from calibrant.decide import Threshold, threshold

if TYPE_CHECKING:
    from typing_extensions import Self

FORMAT = 1
"""Version of the dict that a calibrator is written to."""
AGAIN = "fit and save it again"
"""Remedy for a file that cannot be used."""
SMALLEST = float(np.finfo(np.float32).tiny)
"""What a stored probability of zero is taken for: it was too small for its digits."""
SAME = 1e-6
"""Chances that differ by less do not tell answers apart."""
SUREST = 1e-9
"""Distance from 1 within which confidences are not told apart."""

Answers: TypeAlias = Sequence[Values] | Values
"""Answers as a list with an array for each, or all in one array; see answer_confidence."""

# ------------------------------------------------------------------------ tokens to an answer


class Tokens(NamedTuple):
    """Tokens of all answers in a row, ``(tokens,)``, and where each begins, ``(answers,)``."""

    probs: FloatArray
    starts: IntArray

    @property
    def logs(self) -> FloatArray:
        """Logarithms of the probabilities, finite."""
        return np.log(np.maximum(self.probs, SMALLEST))

    @property
    def lengths(self) -> IntArray:
        """Number of tokens of each answer."""
        return np.diff(self.starts, append=len(self.probs))


def _geometric(tokens: Tokens) -> FloatArray:
    return np.asarray(_product(tokens) / tokens.lengths)


def _product(tokens: Tokens) -> FloatArray:
    return np.asarray(np.add.reduceat(tokens.logs, tokens.starts))


def _arithmetic(tokens: Tokens) -> FloatArray:
    mean = np.add.reduceat(tokens.probs, tokens.starts) / tokens.lengths
    return np.log(np.clip(mean, SMALLEST, 1.0))


def _first(tokens: Tokens) -> FloatArray:
    return tokens.logs[tokens.starts]


def _minimum(tokens: Tokens) -> FloatArray:
    return np.asarray(np.minimum.reduceat(tokens.logs, tokens.starts))


Aggregator = Literal["geometric", "product", "arithmetic", "first", "minimum"]
AGGREGATORS: dict[str, Callable[[Tokens], FloatArray]] = {
    "geometric": _geometric,
    "product": _product,
    "arithmetic": _arithmetic,
    "first": _first,
    "minimum": _minimum,
}
"""Logarithm of the confidence of each answer, by the name of the rule."""


def answer_confidence(
    token_probs: Answers,
    how: Aggregator = "geometric",
    *,
    mask: Values | None = None,
    documents: Values | None = None,
) -> FloatArray:
    r"""One confidence for each answer, from the probabilities of its tokens.

    With the probabilities :math:`p_1, \ldots, p_m` that the model gave to the tokens of an
    answer when it wrote them,

    - ``geometric``: :math:`(p_1 \cdots p_m)^{1/m}`, which does not depend on the length;
    - ``product``: :math:`p_1 \cdots p_m`, the probability of the whole text;
    - ``arithmetic``: :math:`(p_1 + \ldots + p_m) / m`, as in the ATS paper (Xie et al. 2024);
    - ``first``: :math:`p_1`;
    - ``minimum``: :math:`\min_t p_t`.

    None of them is the chance that the answer is right: :class:`AnswerCalibrator` learns that.

    Parameters
    ----------
    token_probs : list of (m_i,), or (answers, tokens) with mask, or (tokens,) with documents
        Probabilities, not logarithms.
    how : str
    mask : (answers, tokens) of bool, optional
        Which tokens belong to the answer; the others are padding.
    documents : (tokens,) integers, optional
        Number of the answer of each token. Answers come back in the order of their numbers.

    Returns
    -------
    (answers,)

    Examples
    --------
    >>> answer_confidence([[0.9, 0.4], [0.5]])
    array([0.6, 0.5])
    >>> answer_confidence([0.9, 0.4, 0.5], "minimum", documents=[0, 0, 1])
    array([0.4, 0.5])
    """
    return np.exp(_log_confidence(token_probs, how, mask, documents))


def _log_confidence(
    token_probs: Answers, how: str, mask: Values | None, documents: Values | None
) -> FloatArray:
    check_choice("how", how, get_args(Aggregator))
    return np.minimum(AGGREGATORS[how](_as_tokens(token_probs, mask, documents)), 0.0)


def _as_tokens(token_probs: Answers, mask: Values | None, documents: Values | None) -> Tokens:
    if mask is not None and documents is not None:
        raise ValueError("pass mask with a padded array or documents with a flat one, not both")
    if documents is not None:
        found = _from_flat(as_float64(_one_array(token_probs)), as_labels(documents, "documents"))
    elif mask is not None:
        found = _from_padded(as_float64(_one_array(token_probs)), as_labels(mask, "mask") != 0)
    else:
        found = _from_list(token_probs)
    if not ((found.probs >= 0) & (found.probs <= 1 + 1e-6)).all():
        raise ValueError(
            "token_probs must be in [0, 1]: NaN, negative or larger values were found; of "
            "log-probabilities take np.exp first"
        )
    return found


def _one_array(token_probs: Answers) -> Values:
    return token_probs if isinstance(token_probs, Tensor) else np.asarray(token_probs)


def _from_list(token_probs: Answers) -> Tokens:
    if isinstance(token_probs, (Tensor, np.ndarray)) and token_probs.dtype != object:
        raise ValueError(
            f"token_probs is one array of shape {tuple(token_probs.shape)}: say which tokens "
            "belong to which answer by mask (answers, tokens) or documents (tokens,), or pass a "
            "list with an array for each answer"
        )
    try:
        answers = [as_float64(one) for one in token_probs]  # type: ignore[union-attr]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"token_probs must have the probabilities of its tokens for each answer ({error}); of "
            "what ask returned, pass [answer.probs for answer in answers]"
        ) from error
    odd = [i for i, one in enumerate(answers) if one.ndim != 1]
    if odd:
        raise ValueError(
            f"token_probs must have one array (tokens,) for each answer, got shape "
            f"{answers[odd[0]].shape} for answer {odd[0]}"
        )
    return _joined(answers)


def _from_padded(probs: FloatArray, mask: BoolArray) -> Tokens:
    if probs.ndim != 2 or probs.shape != mask.shape:
        raise ValueError(
            f"token_probs and mask must both be (answers, tokens), got {probs.shape} and "
            f"{mask.shape}"
        )
    _check_lengths(mask.sum(1))
    return Tokens(probs[mask], _starts(mask.sum(1)))


def _from_flat(probs: FloatArray, documents: IntArray) -> Tokens:
    if probs.ndim != 1 or probs.shape != documents.shape:
        raise ValueError(
            f"token_probs and documents must both be (tokens,), got {probs.shape} and "
            f"{documents.shape}"
        )
    order = np.argsort(documents, kind="stable")
    _, lengths = np.unique(documents, return_counts=True)
    _check_lengths(lengths)
    return Tokens(probs[order], _starts(lengths))


def _joined(answers: list[FloatArray]) -> Tokens:
    lengths = np.array([len(one) for one in answers], dtype=np.int64)
    _check_lengths(lengths)
    return Tokens(np.concatenate(answers), _starts(lengths))


def _starts(lengths: NDArray[Any]) -> IntArray:
    return np.asarray(np.cumsum(lengths, dtype=np.int64) - lengths)


def _check_lengths(lengths: NDArray[Any]) -> None:
    if not lengths.size:
        raise ValueError("token_probs holds no answer: at least one is wanted")
    if not lengths.all():
        at = np.flatnonzero(lengths == 0)
        raise ValueError(
            f"answer {at[0]} has no tokens ({at.size} of {lengths.size} have none): an empty text "
            "has no confidence; leave such answers out and count them as wrong, or keep the end "
            "token as part of every answer"
        )


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
        self.threshold_ = threshold(confidence, happened, max_error=max_error, level=level)
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
