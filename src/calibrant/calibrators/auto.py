"""The method for those who name none: chosen by cross-validation, with its reasons."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from calibrant._core.checks import IGNORED, FloatArray, IntArray, Logits, warn
from calibrant._core.chunks import Examples, as_tensor, blocks
from calibrant._core.logpartition import Records, tabulate
from calibrant.calibrators.base import Calibrator, Claims, Context, RecordsCalibrator
from calibrant.calibrators.confidence_maps import BetaCalibration, SplineCalibration
from calibrant.calibrators.features import GroupCalibration, ProCal
from calibrant.calibrators.folds import folds
from calibrant.calibrators.objectives import memberships
from calibrant.calibrators.scaling import Identity, TemperatureScaling
from calibrant.calibrators.top_label import Blend

CANDIDATES: dict[str, type[Calibrator]] = {
    "none": Identity,
    "ts": TemperatureScaling,
    "blend": Blend,
    "spline": SplineCalibration,
    "beta": BetaCalibration,
    "gc": GroupCalibration,
    "procal": ProCal,
}
"""What may be chosen, in order of preference: the simplest first, then by what real models gained.
All of them keep the predicted class."""
FEWEST = 50
"""Samples below which a choice would be a guess."""
MOST = 20_000
"""Samples that a choice is made on; the chosen method is fitted on all."""
REPLICATES = 200
TOGETHER = 20
"""Replicates that are held in memory at a time."""


class Candidate(NamedTuple):
    """Cross-validated figures of a method.

    ``score`` is the sum of ``nll`` and ``ece``; ``excess`` is how much more it is than the least
    score, and ``error`` the standard error of that difference.
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


class Auto(RecordsCalibrator):
    r"""Choose a method by cross-validation and fit it.

    Each candidate is fitted on four fifths of the samples and judged on the rest, in turn, by

    .. math:: \text{score} = \text{NLL} + \text{ECE},

    with soft bins. Likelihood alone lets confidence drift where bins would show it, calibration
    alone can be had by saying the accuracy for every sample: the sum asks for both. Samples are
    drawn anew to find the standard error of each difference, and the first method that is within
    half of one of the best is taken. Doing nothing is among the candidates. Methods that
    need features are among them where a fit is given some; one that is chosen will want them
    for every prediction.

    Parameters
    ----------
    candidates : sequence of str
        Names in order of preference: from simple to complex.
    folds : int
    seed : int
        Of the folds and the draws.

    Attributes
    ----------
    chosen : Calibrator
        The fitted method.
    reasons : str
        Why it was chosen, in words and numbers.
    candidates_ : list of Candidate
        The numbers.

    Examples
    --------
    >>> rng = np.random.default_rng(1)
    >>> truth = 2 * rng.normal(size=(1000, 10))
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> type(Auto().fit(truth, labels).chosen).__name__  # calibrated as it is
    'Identity'
    >>> type(Auto().fit(3 * truth, labels).chosen).__name__
    'TemperatureScaling'
    """

    uses_features = True

    chosen: Calibrator | None

    def __init__(
        self,
        *,
        candidates: Sequence[str] = tuple(CANDIDATES),
        folds: int = 5,
        seed: int = 0,
    ) -> None:
        super().__init__()
        unknown = [name for name in candidates if name not in CANDIDATES]
        if unknown or not candidates:
            raise ValueError(f"candidates must be among {', '.join(CANDIDATES)}, got {candidates}")
        if folds < 2:
            raise ValueError(f"folds must be at least 2, got {folds}")
        self.candidates = tuple(candidates)
        self.folds = folds
        self.seed = seed
        self.chosen = None
        self.needs_features = False
        self.reasons = ""
        self.candidates_: list[Candidate] = []

    def get_extra_state(self) -> dict[str, Any]:
        """Return what was chosen, for the ``state_dict``."""
        names = [name for name, kind in CANDIDATES.items() if type(self.chosen) is kind]
        config = self.chosen.config() if self.chosen is not None else {}
        return {"chosen": names[0] if names else None, "config": config, "reasons": self.reasons}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Make the chosen method, whose learned values follow in the ``state_dict``."""
        name, self.reasons = state["chosen"], str(state["reasons"])
        self.chosen = None if name is None else CANDIDATES[name](**state["config"])
        self.needs_features = self.chosen is not None and self.chosen.needs_features

    def size(self, classes: int) -> int:
        """Parameters of the chosen method; none before a fit."""
        return 0 if self.chosen is None else self.chosen.size(classes)

    def _warn_of_size(self, samples: int, classes: int, different: int | None) -> None:
        """Leave the warning to what is chosen."""

    def _check_features(
        self, features: Logits | None, rows: tuple[int, ...], width: int = 0
    ) -> None:
        """Let features be there or not: the chosen method has its own say."""
        if features is not None:
            self._check_rows(features, rows)

    def _fitted(self, classes: int) -> None:
        super()._fitted(classes)
        if self.chosen is not None:
            self.chosen._fitted(classes)

    def _fit(self, given: Examples, context: Context) -> None:
        groups = None if context.groups is None else context.groups[given.labels != IGNORED]
        rows = None if context.features is None else _Rows(given, context)
        self._decide(tabulate(given), groups, rows)

    def _fit_grouped(self, records: Records, groups: NDArray[Any] | None) -> None:
        self._decide(records, groups, None)

    def _decide(self, records: Records, groups: NDArray[Any] | None, rows: _Rows | None) -> None:
        name = self._choose(records, groups, rows)
        self.chosen = _fitted(name, records, rows)
        self.needs_features = self.chosen.needs_features
        self.reasons = _explained(name, self.candidates_)
        self.solution_ = self.chosen.solution_

    def _choose(self, records: Records, groups: NDArray[Any] | None, rows: _Rows | None) -> str:
        self.candidates_ = []
        if len(records) < FEWEST or records.correct.all() or not records.correct.any():
            warn(
                f"too little to calibrate on: {len(records):,} samples, "
                f"{int(records.correct.sum()):,} of them right; at least {FEWEST} with both right "
                "and wrong answers are wanted. The predictions are left as they are"
            )
            return "none"
        rng = np.random.default_rng(self.seed)
        if len(records) > MOST:
            some = np.sort(rng.permutation(len(records))[:MOST])
            records, groups = records.take(some), None if groups is None else groups[some]
            rows = None if rows is None else rows.take(some)
        parts = folds(records.labels, self.folds, groups=groups, seed=self.seed)
        if len(parts) < 2:
            raise ValueError("groups must have two values or more to be judged by, got one")
        usable = [name for name in self.candidates if rows or not CANDIDATES[name].needs_features]
        claims = {name: _out_of_fold(name, records, rows, parts) for name in usable}
        self.candidates_ = _judged(claims, records, parts, rng)
        return next(c.name for c in self.candidates_ if c.excess <= c.allowed)

    def forward(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        """What the chosen method gives."""
        self._check_input(logits)
        found: Tensor = self.chosen(logits, features)  # type: ignore[misc]  # fitted, so there
        return found

    def claims(self, records: Records) -> Claims:
        """Confidence and negative log-likelihood of each sample after calibration."""
        assert isinstance(self.chosen, RecordsCalibrator)
        return self.chosen.claims(records)


class _Rows(NamedTuple):
    """The rows behind the records, for methods that need more of them than a table."""

    given: Examples
    context: Context

    def take(self, which: IntArray) -> _Rows:
        """Leave out all but some of the labelled rows."""
        rows = np.flatnonzero(self.given.labels != IGNORED)[which]
        labels = np.full_like(self.given.labels, IGNORED)
        labels[rows] = self.given.labels[rows]
        return _Rows(self.given._replace(labels=labels), self.context)

    def claims(self, calibrator: Calibrator) -> Claims:
        """Confidence and negative log-likelihood of each labelled row."""
        features = self.context.features
        assert features is not None
        flat = features.reshape(-1, features.shape[-1])
        confidence, nll = [], []
        for block in blocks(self.given, 0, self.given.labels.size):
            found = calibrator(block.logits, _some(flat, block.number, block.logits))
            log_probs = found.double().log_softmax(-1)
            confidence.append(log_probs.amax(-1).exp().cpu().numpy())
            nll.append(-log_probs.gather(-1, block.labels[:, None])[:, 0].cpu().numpy())
        return Claims(np.concatenate(confidence), np.concatenate(nll))


def _some(values: Logits, rows: IntArray, like: Tensor) -> Tensor:
    return as_tensor(values[rows]).to(like.device).float()


def _fitted(name: str, records: Records, rows: _Rows | None) -> Calibrator:
    """A candidate, fitted on records or, where they do not suffice, on the rows behind them."""
    calibrator = CANDIDATES[name]()
    if isinstance(calibrator, RecordsCalibrator):
        return calibrator.fit_records(records)
    assert rows is not None
    calibrator._warn_of_size(len(records), records.classes, None)
    calibrator._fit(rows.given, rows.context)
    calibrator._fitted(records.classes)
    return calibrator


def _explained(name: str, candidates: Sequence[Candidate]) -> str:
    if not candidates:
        return "left as it is: too little data to choose a method"
    lines = [f"chose {name}: the first within noise of the best score, NLL + ECE"]
    for c in candidates:
        behind = f"{c.excess:.4f} +- {c.error:.4f} above the best" if c.excess else "the best"
        lines.append(f"  {c.name:<6} {c.nll:.4f} + {c.ece:.4f} = {c.score:.4f}, {behind}")
    return "\n".join(lines)


def _out_of_fold(
    name: str, records: Records, rows: _Rows | None, parts: Sequence[IntArray]
) -> Claims:
    """Claims about each sample by a fit that did not see it."""
    confidence, nll = np.empty(len(records)), np.empty(len(records))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of small folds; the final fit has its own say
        for held in parts:
            seen = np.setdiff1d(np.arange(len(records)), held)
            fitted = _fitted(name, records.take(seen), rows and rows.take(seen))
            if isinstance(fitted, RecordsCalibrator):
                found = fitted.claims(records.take(held))
            else:
                assert rows is not None
                found = rows.take(held).claims(fitted)
            confidence[held], nll[held] = found
    return Claims(confidence, nll)


def _judged(
    claims: dict[str, Claims],
    records: Records,
    parts: Sequence[IntArray],
    rng: np.random.Generator,
) -> list[Candidate]:
    """Score of each candidate, and of each again under samples drawn anew."""
    scores: dict[str, list[FloatArray]] = {name: [] for name in claims}
    for weight in _weights(records.weight[:, None], rng):
        shares = weight / weight.sum(0)
        for name, found in claims.items():
            scores[name].append(_scores(found, records, parts, shares))
    figures = {name: np.concatenate(found, 1) for name, found in scores.items()}
    totals = {name: nll + ece for name, (nll, ece) in figures.items()}
    best = min(totals, key=lambda name: totals[name][0])
    judged = []
    for name, (nll, ece) in figures.items():
        excess = totals[name] - totals[best]
        error = float(np.std(excess[1:]))
        judged.append(
            Candidate(
                name, float(nll[0]), float(ece[0]), float(totals[name][0]), float(excess[0]), error
            )
        )
    return judged


def _weights(weight: FloatArray, rng: np.random.Generator) -> Iterator[FloatArray]:
    """Yield the weights ``(n, 1)``, then those of a Bayesian bootstrap, some draws at a time."""
    yield weight
    for _ in range(REPLICATES // TOGETHER):
        yield weight * rng.exponential(size=(len(weight), TOGETHER))


def _scores(
    claims: Claims, records: Records, parts: Sequence[IntArray], shares: FloatArray
) -> FloatArray:
    """NLL and soft-binned ECE under each column of shares, ``(n, draws) -> (2, draws)``.

    The error is that of each fold, averaged: pooled over folds, the errors of their fits would
    cancel, the more the more a method follows its data.
    """
    gap = (claims.confidence - records.correct)[:, None] * shares
    part = memberships(claims.confidence, sigma=0.05)
    errors = [np.abs(part[:, held] @ gap[held]).sum(0) for held in parts]
    return np.stack([claims.nll @ shares, np.sum(errors, axis=0)])
