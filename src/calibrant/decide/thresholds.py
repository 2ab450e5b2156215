"""Confidence thresholds with a guaranteed error rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from scipy.special import expit, logit
from torch import Tensor

from calibrant._core.checks import (
    BoolArray,
    FloatArray,
    IntArray,
    as_float64,
    as_scores,
    warn,
)
from calibrant._core.showing import as_figure, as_html, frame, one_line, threshold_text
from calibrant.decide.probabilities import check_share
from calibrant.metrics.intervals import clopper_pearson
from calibrant.metrics.reductions import Data, Input, answers_from, keywords

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from typing_extensions import Unpack


STEPS = 10
"""Thresholds that are tried per unit of log-odds."""
REACH = 7
"""Log-odds up to which they lie above ``1 - max_error``, and down to which below zero."""
FALL = 3.0
"""Factor by which the error probability of a search falls per unit of distance of its start."""


class Threshold(NamedTuple):
    """Confidence from which on to accept, and the error among the examples accepted."""

    threshold: float
    """Accept an example when its confidence is at least this; inf accepts none."""
    coverage: float
    """Share of the examples that it accepts."""
    error: float
    """Share of wrong answers among those; NaN if there are none."""
    bound: float
    """Clopper-Pearson upper bound of the error at the level of the test that this threshold passed.
    It shows how close the call was; ``max_error`` is what is guaranteed."""
    n: int
    """Number of examples."""
    max_error: float
    """What is guaranteed about the error."""
    certainty: float
    """Probability with which it holds."""

    def __repr__(self) -> str:
        if self.threshold == math.inf:
            return one_line(self, "accepts none", f"{self.n:,} examples")
        return one_line(
            self,
            f"{threshold_text(self.threshold)}: accepts {100 * self.coverage:.1f} %",
            f"{100 * self.error:.2f} % of them wrong",
            f"max_error={self.max_error:g}, certainty={self.certainty:g}",
        )

    def promise(self) -> str:
        """Return what is guaranteed, in words; empty if nothing is accepted."""
        if self.threshold == math.inf:
            return ""
        certain, most = (f"{100 * v:g} %" for v in (self.certainty, self.max_error))
        return f"With {certain} certainty, at most {most} of the accepted answers are wrong."

    def _repr_html_(self) -> str:
        return as_html(self)

    def to_frame(self) -> pd.DataFrame:
        """Return a frame of one row with all numbers. Needs pandas."""
        return frame([self._asdict()])

    def plot(self, logits: Input = None, labels: Input = None, **data: Unpack[Data]) -> Figure:
        """Draw the share of the answers and their error at every threshold, with this one marked.

        Of examples in the form that :func:`threshold` takes: those of the fit, or others to check
        it. Needs matplotlib.
        """
        return as_figure(self, logits, labels, **data)

    def state(self) -> dict[str, float | None]:
        """Return the numbers for JSON: None stands for infinity and NaN."""
        return {k: v if math.isfinite(v) else None for k, v in self._asdict().items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Threshold:
        """Make a threshold of what :meth:`state` returned."""
        absent = {"threshold": math.inf, "error": math.nan, "bound": math.nan}

        def is_legal(name: str, value: Any) -> bool:
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            return math.isfinite(value) if number else value is None and name in absent

        named = isinstance(state, Mapping) and set(state) == set(cls._fields)
        if not named or not all(is_legal(k, v) for k, v in state.items()):
            names = ", ".join(cls._fields)
            raise ValueError(f"a threshold has the numbers {names}, got {state!r:.200}")
        numbers: dict[str, Any] = {k: absent[k] if v is None else v for k, v in state.items()}
        return cls(**numbers)


@keywords(Data)
def threshold(
    logits: Input = None,
    labels: Input = None,
    *,
    max_error: float,
    certainty: float = 0.95,
    **data: Unpack[Data],
) -> Threshold:
    r"""Lowest confidence from which on the error is shown to be at most ``max_error``.

    With :math:`R(t) = P(\text{wrong} \mid \text{confidence} \ge t)`, the error among accepted
    examples of the population, and the threshold :math:`\hat t` that comes back,

    .. math:: P\left(R(\hat t) \le \mathtt{max\_error}\right) \ge \mathtt{certainty}

    over the draw of the examples, for any number of them, calibrated or not. They must be
    independent, from the population to which the threshold will be applied, and not those on
    which the model or its calibrator was fitted. The guarantee is about all accepted examples
    together, not about a class or a subgroup among them.

    Thresholds are tried on a fixed grid, from high to low. Of m accepted examples k are wrong, and
    :math:`P(\mathrm{Bin}(m, \mathtt{max\_error}) \le k)` is a p-value. Each test has the error
    probability of the one before, if that one passed (the fallback procedure of Wiens and
    Dmitrienko 2005, in the way of Learn then Test, Angelopoulos et al. 2021), and half of
    :math:`1 - \mathtt{certainty}` enters next to ``1 - max_error``, where calibrated confidences
    are safe.

    Parameters
    ----------
    logits : (..., classes), calibrated
    labels : (...) integers, -100 ignored
    max_error, certainty : float in (0, 1)
    probs, or confidence and outcome
        In place of logits, as for :func:`calibrant.ece`. Weights are not supported.

    Returns
    -------
    Threshold
        With a threshold of inf, and a warning, where the examples do not suffice for any.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> confidence = rng.uniform(0.5, 1, 4000)
    >>> right = rng.random(4000) < confidence
    >>> limit = threshold(confidence=confidence, outcome=right, max_error=0.1)
    >>> round(limit.threshold, 2), round(limit.coverage, 2), round(limit.error, 2)
    (0.84, 0.32, 0.08)
    """
    if data.get("sample_weight") is not None:
        raise TypeError("threshold takes no sample_weight: its guarantee counts examples")
    claimed, happened, _ = answers_from(logits, labels, **data)
    check_share(max_error, "max_error", "0.05 allows 5 % of wrong answers")
    check_share(certainty, "certainty", "0.95 means 95 %")
    grid = _as_held(threshold_grid(max_error), data.get("confidence"))
    order = np.argsort(-claimed)
    accepted = np.searchsorted(-claimed[order], -grid, side="right")
    wrong = np.append(0, np.cumsum(happened[order] == 0))[accepted]
    trials = Trials(grid, accepted, wrong, binomial_p_values(accepted, wrong, max_error))
    return lowest_passing(trials, claimed.size, max_error=max_error, certainty=certainty)


class Trials(NamedTuple):
    """Tests of the thresholds of :func:`threshold_grid`, from high to low; each ``(thresholds,)``.

    Attributes
    ----------
    grid : confidences from which on to accept
    accepted : number of independent units that each accepts
    wrong : number of those that are wrong, or the sum of their losses in [0, 1]
    p_values : of the hypotheses that the error is above ``max_error``
    """

    grid: FloatArray
    accepted: IntArray
    wrong: FloatArray | IntArray
    p_values: FloatArray


def binomial_p_values(
    accepted: IntArray, wrong: FloatArray | IntArray, max_error: float
) -> FloatArray:
    """P-values of errors above ``max_error``, from counts; 1 where nothing is accepted."""
    from scipy.stats import binom

    return np.where(accepted > 0, binom.cdf(wrong, accepted, max_error), 1.0)


def lowest_passing(trials: Trials, n: int, *, max_error: float, certainty: float) -> Threshold:
    """Return the lowest threshold that passes in the procedure of :func:`threshold`, of n units."""
    shares = _shares(max_error)
    levels, passed = _fallback(trials.p_values, (1 - certainty) * shares)
    if not passed.any():
        _warn_of_none(n, max_error, certainty, float(shares.max()))
        return Threshold(math.inf, 0.0, math.nan, math.nan, n, max_error, certainty)
    at = int(passed.nonzero()[0][-1])
    m, k = int(trials.accepted[at]), float(trials.wrong[at])
    bound = float(clopper_pearson(trials.wrong[at], trials.accepted[at], levels[at])[1])
    return Threshold(float(trials.grid[at]), m / n, k / m, bound, n, max_error, certainty)


def threshold_grid(max_error: float) -> FloatArray:
    """Thresholds that are tried, from high to low; the last one accepts everything."""
    middle, step = _steps(max_error)
    return np.append(expit(middle + step / STEPS), 0.0)


def _shares(max_error: float) -> FloatArray:
    """Share of the error probability that enters at each threshold."""
    _, step = _steps(max_error)
    shares = np.where(step % STEPS == 0, FALL ** -np.abs(step / STEPS), 0.0)
    return np.append(shares / shares.sum(), 0.0)


def _steps(max_error: float) -> tuple[float, IntArray]:
    """Log-odds of the threshold in the middle, and the steps from it to all but the last one."""
    # Half a step lower, so that 1 - max_error and other round numbers, at which confidences tie,
    # lie between two thresholds: which side such a tie is on must not hang on its last digit.
    middle = float(logit(1 - max_error)) - 0.5 / STEPS
    below = max(0, math.ceil(middle + REACH))
    return middle, np.arange(REACH * STEPS, -below * STEPS - 1, -1)


def _as_held(grid: FloatArray, values: Input) -> FloatArray:
    """Thresholds in the dtype of the confidences, to which ``confidence >= t`` rounds them."""
    if values is None:
        return grid
    confidence = as_scores(values, "confidence")
    if isinstance(confidence, Tensor):
        return as_float64(torch.from_numpy(grid).to(confidence.dtype))
    return as_float64(grid.astype(confidence.dtype))


def _fallback(p_values: FloatArray, shares: FloatArray) -> tuple[FloatArray, BoolArray]:
    """Level of each test and its result; a test that passes hands its level to the next one."""
    levels, passed = np.empty_like(p_values), np.zeros(len(p_values), dtype=bool)
    carried = 0.0
    for i, (p, share) in enumerate(zip(p_values, shares, strict=True)):
        levels[i] = carried + share
        passed[i] = 0 < levels[i] >= p
        carried = levels[i] if passed[i] else 0.0
    return levels, passed


def _warn_of_none(n: int, max_error: float, certainty: float, share: float) -> None:
    # what a test next to 1 - max_error needs when nothing is wrong
    needed = math.ceil(math.log((1 - certainty) * share) / math.log1p(-max_error))
    warn(
        f"no threshold keeps the error at {max_error:g} with {certainty:.0%} certainty on these "
        f"{n:,} examples, so none is accepted; about {needed:,} confident ones without a mistake "
        "are needed: label more, calibrate first, or allow more errors",
        stacklevel=5,
    )
