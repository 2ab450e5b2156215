"""Choice of a calibrator by cross-validation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calibrant._core import checks
from calibrant._core.checks import IGNORED, FloatArray, IntArray, warn
from calibrant._core.chunks import Examples, as_tensor, joined, labelled_chunks
from calibrant._core.logpartition import Records, tabulate
from calibrant.calibrators.base import Calibrator, Context, RecordPredictions, RecordsCalibrator
from calibrant.calibrators.binary import RobustSigmoid, VennAbers
from calibrant.calibrators.confidence_maps import (
    BetaCalibration,
    SigmoidScaling,
    SplineCalibration,
)
from calibrant.calibrators.data_checks import warn_of_few_examples
from calibrant.calibrators.features.groups import GroupCalibration
from calibrant.calibrators.features.proximity import ProCal
from calibrant.calibrators.folds import folds
from calibrant.calibrators.objectives import memberships
from calibrant.calibrators.scaling import Identity, TemperatureScaling
from calibrant.calibrators.top_label import ArgmaxByTask, Blend

if TYPE_CHECKING:
    from typing_extensions import Self

_KINDS: tuple[type[Calibrator], ...] = (
    *(Identity, TemperatureScaling, Blend, SplineCalibration, BetaCalibration),
    *(SigmoidScaling, RobustSigmoid, VennAbers, GroupCalibration, ProCal),
)
CANDIDATES = {kind.name: kind for kind in _KINDS}
MANY_CLASSES = ("none", "ts", "blend", "spline", "beta", "gc", "procal")
TWO_CLASSES = ("none", "ts", "sigmoid", "robust_sigmoid", "venn_abers", "gc", "procal")
"""Candidates in order of preference: the simplest first, then by what real models gained. Those of
many classes keep the predicted class; those of two may change it, as an intercept does."""
FEWEST = 50  # number of examples below which a choice would be a guess
MOST = 20_000
"""Largest number of examples that a choice is made on; the chosen method is fitted on all."""
REPLICATES = 200
TOGETHER = 20  # replicates that are held in memory at a time


class Candidate(NamedTuple):
    """Cross-validated figures of a method.

    ``score`` is the sum of ``nll`` and ``ece``, ``excess`` its difference from the lowest score,
    and ``error`` the standard error of that difference.
    """

    name: str
    nll: float
    ece: float
    score: float
    excess: float
    error: float

    @property
    def allowed(self) -> float:
        """Excess within which a simpler method is preferred: half a standard error."""
        return self.error / 2


class Auto(ArgmaxByTask, RecordsCalibrator):  # type: ignore[override]
    r"""Choose a method by cross-validation and fit it.

    Each candidate is fitted on four fifths of the examples and judged on the rest, in turn, by

    .. math:: \text{score} = \text{NLL} + \text{ECE},

    with soft bins; for two classes the ECE is that of P(y = 1). Likelihood alone lets confidence
    drift where bins would show it; calibration alone can be had by predicting the accuracy for
    every example. A bootstrap gives the standard error of each difference from the best score, and
    the first candidate within half of it is chosen. Doing nothing is among the candidates. Methods
    that need features take part if the fit gets features; if one is chosen, predictions need them
    too.

    Parameters
    ----------
    candidates : sequence of str, optional
        Names in order of preference: from simple to complex. By default ``none``, ``ts``,
        ``blend``, ``spline``, ``beta``, and with features ``gc`` and ``procal``; for two classes
        ``none``, ``ts``, ``sigmoid``, ``robust_sigmoid``, ``venn_abers`` and those with features.
    keep_argmax : bool, optional
        Keep the predicted class: by default for more than two classes. True keeps it for two
        classes, too, whose candidates are then those of many; more than two always keep it.
    folds, seed : int
        The seed is that of the folds and the bootstrap.

    Attributes
    ----------
    chosen_ : Calibrator
    reasons_ : str
        An explanation of the choice, with figures.
    candidates_ : list of Candidate
        The figures; not part of the saved state.

    Examples
    --------
    >>> rng = np.random.default_rng(1)
    >>> truth = 2 * rng.normal(size=(1000, 10))
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> Auto().fit(3 * truth, labels).chosen_.name
    'ts'
    """

    name = "auto"
    summary = "[chooses](#how-auto-chooses)"
    uses_features = True
    added_options: ClassVar = {"keep_argmax": True}
    chosen_: Calibrator | None

    def __init__(
        self,
        *,
        candidates: Sequence[str] | None = None,
        keep_argmax: bool | None = None,
        folds: int = 5,
        seed: int = 0,
    ) -> None:
        super().__init__()
        unknown = [name for name in candidates or () if name not in CANDIDATES]
        if unknown or (candidates is not None and not candidates):
            raise ValueError(f"candidates must be among {', '.join(CANDIDATES)}, got {candidates}")
        checks.check_whole("folds", folds, 2)
        self.candidates = None if candidates is None else tuple(candidates)
        self.keep_argmax = keep_argmax
        self.folds = folds
        self.seed = seed
        self.chosen_ = None
        self.reasons_ = ""
        self.candidates_: list[Candidate] = []

    def size(self, classes: int) -> int:
        """Parameters of the chosen method; none before a fit."""
        return 0 if self.chosen_ is None else self.chosen_.size(classes)

    def _warn_of_few(self, count: int, classes: int, distinct: int | None) -> None:
        """Leave this warning to the chosen method."""

    def fit_examples(self, examples: Examples, context: Context | None = None) -> Self:
        """Choose a method and fit it."""
        context = context or Context()
        groups = None if context.groups is None else context.groups[examples.labels != IGNORED]
        whole = None if context.features is None else examples
        data = _Data(tabulate(examples), groups, whole, context)
        return self._decide(data, examples.logits.ndim == 1)

    def fit_records(
        self, records: Records, *, groups: NDArray[Any] | None = None, one_logit: bool = False
    ) -> Self:
        """Choose a method that needs only records, and fit it."""
        with checks.warnings_at_caller():
            return self._decide(_Data(records, groups), one_logit)

    def _decide(self, data: _Data, one_logit: bool) -> Self:
        name = self._choose(data)
        chosen = data.fitted(name, self._keeps(data), one_logit=one_logit)
        self._adopt(chosen.to(self.classes_.device), _explain(name, self.candidates_))
        self._set_classes(chosen.classes)
        return self

    def _adopt(self, chosen: Calibrator | None, reasons: str) -> None:
        self.chosen_, self.reasons_ = chosen, reasons
        self.needs_features = chosen is not None and chosen.needs_features
        self.solution_ = None if chosen is None else chosen.solution_

    def _choose(self, data: _Data) -> str:
        self.candidates_, right = [], data.records.correct
        if len(right) < FEWEST or right.all() or not right.any():
            warn(
                f"too little to calibrate on: {len(right):,} examples, {int(right.sum()):,} of "
                f"them right; at least {FEWEST} are needed, right and wrong. Nothing is changed"
            )
            return "none"
        rng = np.random.default_rng(self.seed)
        if len(right) > MOST:
            data = data.take(np.sort(rng.permutation(len(right))[:MOST]))
        parts = folds(data.records.labels, self.folds, groups=data.groups, seed=self.seed)
        if len(parts) < 2:
            raise ValueError("groups must have two values or more to be judged by, got one")
        predictions = {
            n: _out_of_fold(n, data, parts, self._keeps(data)) for n in self._usable(data)
        }
        self.candidates_ = _judge(predictions, data.records, parts, rng)
        return next(c.name for c in self.candidates_ if c.excess <= c.allowed)

    def forward(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        """Calibrated logits of the chosen method."""
        self.check_logits(logits)
        result: Tensor = self._fitted_choice()(logits, features)
        return result

    def predict_records(self, records: Records) -> RecordPredictions:
        """Confidence and negative log-likelihood of each example after calibration."""
        chosen = self._fitted_choice()
        assert isinstance(chosen, RecordsCalibrator)
        return chosen.predict_records(records)

    @property
    def temperature(self) -> Any:
        """The method ``temperature(logits)`` of the chosen calibrator, if it has one."""
        return self._fitted_choice().temperature  # AttributeError where there is none

    def describe(self) -> str:
        """The description of the chosen method."""
        return super().describe() if self.chosen_ is None else f"chosen: {self.chosen_.describe()}"

    def learned(self) -> dict[str, Any]:
        """The learned values of the chosen method."""
        return {} if self.chosen_ is None else self.chosen_.learned()

    def _fitted_choice(self) -> Calibrator:
        if self.chosen_ is None:
            raise AttributeError("Auto has not chosen yet: call fit(logits, labels) first")
        return self.chosen_

    def _keeps(self, data: _Data) -> bool:
        return not self._maps_class_one(data.records.classes)

    def _usable(self, data: _Data) -> list[str]:
        usual = MANY_CLASSES if self._keeps(data) else TWO_CLASSES
        names = usual if self.candidates is None else self.candidates
        return [name for name in names if data.examples or not CANDIDATES[name].needs_features]

    def get_extra_state(self) -> dict[str, Any]:
        """The choice, for ``state_dict``: the name and config of the method, and the reasons."""
        chosen = self.chosen_
        if chosen is None:
            return {"chosen": None, "config": {}, "reasons": ""}
        return {"chosen": chosen.name, "config": chosen.config(), "reasons": self.reasons_}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Build the chosen method, whose learned values are loaded next."""
        name = state["chosen"]
        chosen = None if name is None else CANDIDATES[name](**state["config"])
        self._adopt(chosen and chosen.to(self.classes_.device), str(state["reasons"]))


class _Data(NamedTuple):
    """Records, and the examples behind them where there are features."""

    records: Records
    groups: NDArray[Any] | None = None
    examples: Examples | None = None
    context: Context = Context()

    def take(self, which: IntArray) -> _Data:
        groups, examples = self.groups, self.examples
        if examples is not None:  # ignore the others
            rows = np.flatnonzero(examples.labels != IGNORED)[which]
            labels = np.full_like(examples.labels, IGNORED)
            labels[rows] = examples.labels[rows]
            examples = examples._replace(labels=labels)
        groups = None if groups is None else groups[which]
        return _Data(self.records.take(which), groups, examples, self.context)

    def fitted(self, name: str, keep_argmax: bool, *, one_logit: bool = False) -> Calibrator:
        """Fit a candidate on the records or, where they do not suffice, on the examples."""
        calibrator = CANDIDATES[name]()
        if isinstance(calibrator, ArgmaxByTask):
            calibrator.keep_argmax = True if keep_argmax else None
        if isinstance(calibrator, RecordsCalibrator):
            return calibrator.fit_records(self.records, one_logit=one_logit)
        assert self.examples is not None
        size, count = calibrator.size(self.records.classes), len(self.records)
        warn_of_few_examples(type(calibrator).__name__, size, count, None)
        return calibrator.fit_examples(self.examples, self.context)

    def predictions(self, calibrator: Calibrator) -> RecordPredictions:
        """Confidence and negative log-likelihood of each labelled example."""
        if isinstance(calibrator, RecordsCalibrator):
            return calibrator.predict_records(self.records)
        features = self.context.features
        assert self.examples is not None
        assert features is not None
        features = features.reshape(-1, features.shape[-1])
        result = []
        for chunk in labelled_chunks(self.examples, 0, self.examples.labels.size):
            inputs = as_tensor(features[chunk.number]).to(chunk.logits.device).float()
            if calibrator.classes == 1:
                odds = calibrator(chunk.logits[:, 1], inputs).double()
                log_probs = torch.stack([torch.zeros_like(odds), odds], -1).log_softmax(-1)
            else:
                log_probs = calibrator(chunk.logits, inputs).double().log_softmax(-1)
            nll = -log_probs.gather(-1, chunk.labels[:, None])[:, 0]
            result.append((log_probs.amax(-1).exp().cpu().numpy(), nll.cpu().numpy()))
        return RecordPredictions(*joined(result))


def _explain(name: str, candidates: Sequence[Candidate]) -> str:
    if not candidates:
        return "left as it is: too little data to choose a method"
    lines = [f"chose {name}: the first within noise of the best score, NLL + ECE"]
    wide = max(6, *(len(c.name) for c in candidates))
    for c in candidates:
        behind = f"{c.excess:.4f} +- {c.error:.4f} above the best" if c.excess else "the best"
        lines.append(f"  {c.name:<{wide}} {c.nll:.4f} + {c.ece:.4f} = {c.score:.4f}, {behind}")
    return "\n".join(lines)


def _out_of_fold(
    name: str, data: _Data, parts: Sequence[IntArray], keep_argmax: bool
) -> RecordPredictions:
    """Predictions for each example by a fit that did not see it."""
    records = data.records
    confidence, nll = np.empty(len(records)), np.empty(len(records))
    with checks.silenced():  # small folds; the final fit warns for itself
        for held_out in parts:
            seen = np.setdiff1d(np.arange(len(records)), held_out)
            calibrator = data.take(seen).fitted(name, keep_argmax)
            confidence[held_out], nll[held_out] = data.take(held_out).predictions(calibrator)
    return RecordPredictions(confidence, nll)


def _judge(
    predictions: dict[str, RecordPredictions],
    records: Records,
    parts: Sequence[IntArray],
    rng: np.random.Generator,
) -> list[Candidate]:
    """Score of each candidate, with the bootstrap error of its distance from the best."""
    weight = records.weight[:, None]
    scores: dict[str, list[FloatArray]] = {name: [] for name in predictions}
    for draw in range(REPLICATES // TOGETHER + 1):  # the weights, then Bayesian bootstraps
        drawn = weight * rng.exponential(size=(len(weight), TOGETHER)) if draw else weight
        shares = drawn / drawn.sum(0)
        for name, predicted in predictions.items():
            scores[name].append(_scores(predicted, records, parts, shares))
    figures = {name: np.concatenate(draws, 1) for name, draws in scores.items()}
    totals = {name: nll + ece for name, (nll, ece) in figures.items()}
    best = min(totals, key=lambda name: totals[name][0])
    judged = []
    for name, (nll, ece) in figures.items():
        excess = totals[name] - totals[best]
        numbers = (nll[0], ece[0], totals[name][0], excess[0], np.std(excess[1:]))
        judged.append(Candidate(name, *map(float, numbers)))
    return judged


def _scores(
    predictions: RecordPredictions, records: Records, parts: Sequence[IntArray], shares: FloatArray
) -> FloatArray:
    """NLL and soft-binned ECE under each column of shares, ``(n, draws) -> (2, draws)``.

    The ECE is averaged over folds: pooled, the errors of their fits would cancel.
    """
    claimed, outcome = predictions.confidence, records.correct
    if records.classes == 2:  # of class 1 instead of the class that was on top
        claimed = np.where(records.one_on_top, claimed, 1 - claimed)
        outcome = records.labels == 1
    gap = (claimed - outcome)[:, None] * shares
    part = memberships(claimed, sigma=0.05)
    errors = [np.abs(part[:, held_out] @ gap[held_out]).sum(0) for held_out in parts]
    return np.stack([predictions.nll @ shares, np.sum(errors, axis=0)])
