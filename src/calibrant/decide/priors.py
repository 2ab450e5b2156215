"""Correction for class frequencies that differ between fitting and use."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from calibrant._core import checks
from calibrant._core.checks import Features, FloatArray, IntArray, Logits, Values
from calibrant._core.chunks import Examples
from calibrant.calibrators.base import Calibrator, Context
from calibrant.decide.probabilities import _in_form_of, probabilities
from calibrant.metrics.reductions import Input

PRECISION = 0.01
"""Nats, of all examples together, by which an estimated prior may be below the best."""
ROUNDS = 5_000
"""Steps after which the search for a prior gives up."""


@overload
def shift_prior(logits: Tensor, *, old_prior: Values, new_prior: Values) -> Tensor: ...
@overload
def shift_prior(logits: ArrayLike, *, old_prior: Values, new_prior: Values) -> FloatArray: ...
@overload
def shift_prior(*, probs: Tensor, old_prior: Values, new_prior: Values) -> Tensor: ...
@overload
def shift_prior(*, probs: ArrayLike, old_prior: Values, new_prior: Values) -> FloatArray: ...
def shift_prior(
    logits: Input = None, *, probs: Input = None, old_prior: Values, new_prior: Values
) -> Tensor | FloatArray:
    r"""Correct probabilities for other class frequencies.

    .. math:: p'_k = \frac{p_k\, \pi'_k / \pi_k}{\sum_j p_j\, \pi'_j / \pi_j}

    This is Bayes' rule if only the frequencies of the classes differ.

    Parameters
    ----------
    logits : (..., classes), or (n,) log-odds, calibrated
    probs : (..., classes), or (n,) for P(y = 1), in place of logits
    old_prior : (classes,)
        Frequencies of the classes where the model is calibrated: above zero, sum 1.
    new_prior : (classes,)
        Frequencies where it will be used: zero or more, sum 1.

    Returns
    -------
    Probabilities, in the shape of the input

    Examples
    --------
    >>> shift_prior(probs=[[0.5, 0.5], [0.9, 0.1]], old_prior=[0.5, 0.5], new_prior=[0.2, 0.8])
    array([[0.2       , 0.8       ],
           [0.69230769, 0.30769231]])
    """
    rows, scores = probabilities(logits, probs)
    old, new = _as_priors(old_prior, new_prior, rows.shape[-1])
    shifted = rows * (new / old)
    total = shifted.sum(-1, keepdims=True)
    if not total.all():
        at = int((total == 0).reshape(-1).nonzero()[0][0])
        raise ValueError(
            f"row {at} has probability only in classes whose new prior is 0: give those classes a "
            "small share"
        )
    shifted /= total
    return _in_form_of(scores, shifted if scores.ndim > 1 else shifted[..., 1])


@overload
def estimate_prior(logits: Tensor, *, old_prior: Values) -> Tensor: ...
@overload
def estimate_prior(logits: ArrayLike, *, old_prior: Values) -> FloatArray: ...
@overload
def estimate_prior(*, probs: Tensor, old_prior: Values) -> Tensor: ...
@overload
def estimate_prior(*, probs: ArrayLike, old_prior: Values) -> FloatArray: ...
def estimate_prior(
    logits: Input = None, *, probs: Input = None, old_prior: Values
) -> Tensor | FloatArray:
    r"""Frequencies of the classes in unlabelled data, from calibrated probabilities.

    The prior :math:`q` at the maximum of

    .. math:: \sum_i \log \sum_k \frac{p_{ik}\, q_k}{\pi_k} + K \sum_k \pi_k \log q_k ,

    which is concave. The first sum is the likelihood of the data (Saerens et al. 2002), which EM
    maximises. The second counts K examples more, as many as there are classes, at the old
    frequencies :math:`\pi`: the maximum a posteriori of a Dirichlet prior. Without them a class
    that no example happens to show gets a prior of zero, and the correction then rules it out.

    Only the frequencies of the classes may differ from where the probabilities were calibrated,
    and they must be calibrated class by class, not in the largest probability only: methods with
    a bias for each class (``vector``) do that.

    Parameters
    ----------
    logits : (..., classes), or (n,) log-odds
    probs : (..., classes), or (n,) for P(y = 1), in place of logits
    old_prior : (classes,)
        Frequencies of the classes in the data on which the calibrator was fitted.

    Returns
    -------
    (classes,)

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> y = rng.random(5000) < 0.2
    >>> log_odds = 2 * rng.normal(2.0 * y - 1)  # where both classes are as frequent
    >>> estimate_prior(log_odds, old_prior=[0.5, 0.5]).round(2)
    array([0.8, 0.2])
    """
    rows, scores = probabilities(logits, probs)
    old = _as_prior(old_prior, rows.shape[-1], "old_prior", least=1e-12)
    prior = _likeliest(rows.reshape(-1, rows.shape[-1]) / old, old)
    return _in_form_of(scores, prior)


def _likeliest(ratios: FloatArray, old: FloatArray) -> FloatArray:
    """Solve for the maximum of :func:`estimate_prior`, ``(classes,)``."""
    checks.check_some(len(ratios))
    added = len(old) * old  # examples of each class that are counted besides the data
    total = len(ratios) + added.sum()
    weights: FloatArray = old
    for _ in range(ROUNDS):
        gradient: FloatArray = ((1 / (ratios @ weights)) @ ratios + added / weights) / total
        # the function is concave: nowhere on the simplex is it higher by more than this
        if gradient.max() - 1 <= PRECISION / total:
            break
        weights = weights * gradient
    else:
        warnings.warn(
            f"the estimate of the prior did not converge in {ROUNDS:,} steps: classes that the "
            "probabilities hardly separate keep part of their old share",
            stacklevel=3,
        )
    return np.asarray(weights / weights.sum())


class PriorCorrection(Calibrator):
    r"""A calibrator, corrected for other class frequencies: :math:`f(z) + \log(\pi' / \pi)`.

    :func:`label_shift` makes one from unlabelled data; :meth:`set_priors` corrects between priors
    ``(classes,)`` that are known. ``fit`` fits the calibrator inside, takes the frequencies of the
    labels for both priors, and so corrects nothing.

    Parameters
    ----------
    calibrator : Calibrator

    Attributes
    ----------
    old_prior_, new_prior_ : (classes,) Tensor
        Frequencies of the classes where the calibrator was fitted, and where it is used.

    Examples
    --------
    >>> from calibrant.calibrators import Identity
    >>> plain = Identity().fit([[0.0, 0.0], [0.0, 1.0]], [0, 1])
    >>> PriorCorrection(plain).set_priors([0.5, 0.5], [0.2, 0.8]).predict_proba([[0.0, 0.0]])
    array([[0.2, 0.8]])
    """

    old_prior_: Tensor
    new_prior_: Tensor
    learned_shapes = "old_prior_ classes; new_prior_ classes"

    def __init__(self, calibrator: Calibrator) -> None:
        super().__init__()
        calibrator.refuse_tags("PriorCorrection")
        self.calibrator = calibrator
        self.needs_features = calibrator.needs_features
        self.needs_head = calibrator.needs_head
        self._store(old_prior_=torch.zeros(0), new_prior_=torch.zeros(0))
        self.to(calibrator.device)

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns of a prediction file that the calibrator reads beside the logits."""
        return self.calibrator.input_columns

    def input_features(self, columns: Mapping[str, Any], rows: Any = None) -> Features | None:
        """Return the calibrator's ``features=`` for arrays by name."""
        return self.calibrator.input_features(columns, rows)

    def encoded(self, features: Features) -> Logits:
        """Return features as the numbers that the calibrator takes."""
        return self.calibrator.encoded(features)

    def _check_feature_values(self, features: Tensor, numbers: IntArray | None = None) -> None:
        self.calibrator._check_feature_values(features, numbers)

    def size(self, classes: int) -> int:
        """Parameters of the calibrator, and a free share for all classes but one."""
        return self.calibrator.size(classes) + classes - 1

    def set_priors(self, old_prior: Values, new_prior: Values) -> PriorCorrection:
        """Correct from one prior ``(classes,)``, above zero, to another, and return self."""
        inside = self.calibrator
        if not inside.classes:
            name = type(inside).__name__
            raise RuntimeError(f"this {name} is not fitted: call fit(logits, labels) first")
        old, new = _as_priors(old_prior, new_prior, max(inside.classes, 2))
        self._store(old_prior_=old, new_prior_=new)
        self._set_classes(inside.classes)
        self.class_names_ = inside.class_names_
        return self

    def _fit(self, examples: Examples, context: Context) -> None:
        self.calibrator.fit_examples(examples, context)
        labels, weight = examples.labels, examples.labelled_weight()
        mass = np.bincount(labels[labels != checks.IGNORED], weight, minlength=examples.classes)
        self._store(old_prior_=mass / mass.sum(), new_prior_=mass / mass.sum())

    def forward(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        """Corrected logits, as those of every calibrator."""
        self.check_logits(logits)
        calibrated: Tensor = self.calibrator(logits, features)
        # log(tiny) in place of -inf: a row in which only classes of prior zero are possible keeps
        # its probabilities
        tiny = torch.finfo(torch.float32).tiny
        new, old = (p.clamp(min=tiny).log() for p in (self.new_prior_, self.old_prior_))
        shift = (new - old).to(calibrated.dtype)
        if self.one_logit:
            return calibrated + (shift[1] - shift[0])
        shifted = calibrated + shift
        return shifted - shifted.amax(-1, keepdim=True)


@checks.warnings_at_caller()
def label_shift(
    calibrator: Calibrator,
    logits: Values,
    *,
    old_prior: Values,
    features: Features | None = None,
) -> PriorCorrection:
    r"""Adapt a fitted calibrator to data with other class frequencies, without labels.

    :func:`estimate_prior` estimates the frequencies. The result is a calibrator as any other: it
    can be applied, saved and exported.

    Parameters
    ----------
    calibrator : Calibrator
        Fitted.
    logits : (..., classes), or (n,) log-odds
        Unlabelled, from where the calibrator will be used.
    old_prior : (classes,)
        Frequencies of the classes in the labels on which it was fitted.
    features : (..., width), optional
        For calibrators that need them.

    Examples
    --------
    >>> from calibrant.calibrators import TemperatureScaling
    >>> rng = np.random.default_rng(0)
    >>> y = np.arange(2000) % 2  # as many of each class
    >>> fitted = TemperatureScaling().fit(6 * rng.normal(2 * y - 1), y)
    >>> rare = rng.random(5000) < 0.1
    >>> adapted = label_shift(fitted, 6 * rng.normal(2 * rare - 1), old_prior=[0.5, 0.5])
    >>> round(float(adapted.new_prior_[1]), 1)
    0.1
    """
    probs = calibrator.predict_proba(logits, features)
    new_prior = estimate_prior(probs=probs, old_prior=old_prior)
    return PriorCorrection(calibrator).set_priors(old_prior, new_prior)


def _as_priors(old_prior: Values, new_prior: Values, classes: int) -> tuple[FloatArray, FloatArray]:
    # a share of nothing cannot be scaled to something
    old = _as_prior(old_prior, classes, "old_prior", least=1e-12)
    return old, _as_prior(new_prior, classes, "new_prior", least=0.0)


def _as_prior(prior: Values, classes: int, name: str, *, least: float) -> FloatArray:
    """Frequencies of the classes, ``(classes,)``, that sum to one exactly."""
    shares = checks.as_float64(checks.as_scores(prior, name))
    if shares.shape != (classes,):
        raise ValueError(f"{name} must be ({classes},), one share per class, got {shares.shape}")
    if not (shares >= least).all():  # NaN is not
        worst = float(shares[~(shares >= least)][0])
        raise ValueError(
            f"{name} must be {least:g} or more in every class, got {worst:g}: a class that never "
            "occurred has no probability to correct"
        )
    total = shares.sum()
    if abs(total - 1) > 1e-4:
        raise ValueError(f"{name} must sum to one, got {total:g}: divide counts by their sum")
    return np.asarray(shares / total)
