"""SMART: the margin of an example gives its temperature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from calibrant._core.checks import FloatArray, warn
from calibrant._core.chunks import Examples, labelled_chunks, plain_on_cpu, top_class
from calibrant._core.options import Count, NonNegative, Seed
from calibrant.calibrators import network, objectives
from calibrant.calibrators.base import Context
from calibrant.calibrators.logpartition import Records
from calibrant.calibrators.records import TemperatureCalibrator

SmartObjective = Literal["charbonnier", "soft_ece", "nll", "brier", "mse", "ls", "pointwise"]
SmartIndicator = Literal["margin", "entropy", "confidence", "max_logit", "max_minus_mean", "all"]
_MAX_TOPK = 1000  # numbers up to which topk is the fastest
_PATIENCE = 250  # steps without progress after which the search ends


class SMART(TemperatureCalibrator):
    r"""The margin of an example gives its temperature (Guo et al. 2026).

    With the margin :math:`m = z_{(1)} - z_{(2)}` of the two largest logits, standardised,

    .. math:: T = \mathrm{softplus}(W_2\,\mathrm{ReLU}(W_1 \hat m + b_1) + b_2) + 0.1

    has 49 parameters. They minimise the soft-binned calibration error under a Charbonnier penalty
    (:func:`calibrant.calibrators.objectives.soft_ece`) by Adam on the whole data.

    The defaults were chosen on held-out data and are gentler than the paper's: the search starts
    at the best single temperature, takes 250 steps, and minds the likelihood. The form of the
    authors is :meth:`paper`.

    Parameters
    ----------
    objective : str
        ``charbonnier``, or another of the paper's table 3: ``soft_ece`` (absolute values), ``nll``,
        ``brier``, ``mse``, ``ls`` (label smoothing 0.05), ``pointwise`` (equation 6 to the letter,
        which does not calibrate).
    indicator : str
        ``margin``, or another of the paper's table 4: ``entropy``, ``confidence``, ``max_logit``
        (which depends on a constant added to all logits), ``max_minus_mean``, ``all`` logits.
    hidden : sequence of int
        Widths of the hidden layers. The authors' code has (16, 16): 321 parameters.
    likelihood : float
        Weight of the negative log-likelihood that is added to the binned objectives.
    start : {"ts", "identity", "random"}
        Temperature of all examples at the first step: the best single one, 1, or those of random
        weights.
    steps, seed : int
        Largest number of steps, and the seed of the first weights.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> truth = 2 * rng.normal(size=(2000, 10))
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> fitted = SMART().fit(3 * truth, labels)
    >>> float(fitted.temperature(3 * truth).mean().round())
    3.0
    """

    name = "smart"
    summary = "the margin gives each example its temperature; see {doc}`smart`"

    def __init__(
        self,
        *,
        objective: SmartObjective = "charbonnier",
        indicator: SmartIndicator = "margin",
        hidden: Sequence[Count] = (16,),
        likelihood: NonNegative = 0.3,
        start: Literal["ts", "identity", "random"] = "ts",
        steps: Count = 250,
        seed: Seed = 0,
    ) -> None:
        super().__init__()
        self.objective = objective
        self.indicator = indicator
        self.hidden = hidden
        self.likelihood = likelihood
        self.start = start
        self.steps = steps
        self.seed = seed
        self._store(**network._untrained(1, hidden))
        self.fits_records = indicator != "all"  # only the logits themselves are not in the records
        if indicator == "all":
            each = "mean_ classes; low_ classes; high_ classes; deviation_ classes"
            self.learned_shapes = f"{each}; weight0_ classes ="

    @classmethod
    def paper(cls, *, seed: int = 0) -> PaperSMART:
        """Return SMART with the settings of its authors, the method ``smart_paper``."""
        return PaperSMART(seed=seed)

    def size(self, classes: int) -> int:
        """Weights and biases: 49 by default."""
        return network._parameter_count(classes if self.indicator == "all" else 1, self.hidden)

    def _fit(self, examples: Examples, context: Context) -> None:
        records = context.table(examples)
        if self.indicator != "all":
            self._fit_records(records)
            return
        chunks = labelled_chunks(examples, 0, examples.labels.size)
        logits = torch.cat([chunk.logits.double() for chunk in chunks])
        inputs = (logits - logits.amax(-1, keepdim=True)).cpu().numpy()
        if np.isneginf(inputs).any():
            raise ValueError('indicator "all" needs finite logits, got -inf: use "margin"')
        self._train(records, inputs)

    def _fit_records(self, records: Records) -> None:
        self._train(records, self._indicator(records))

    def _train(self, records: Records, inputs: FloatArray) -> None:
        binned: dict[str, Callable[..., objectives.Measured]] = {
            "charbonnier": partial(objectives.soft_ece, delta=1e-3),
            "soft_ece": objectives.soft_ece,
            "pointwise": objectives.pointwise,
        }
        loss = objectives.PROPER.get(self.objective)
        if loss is None:
            measure = binned[self.objective]
            loss = partial(objectives._with_likelihood, measure, self.likelihood)
        if self.objective == "pointwise":
            warn(
                'objective "pointwise" (equation 6 of the paper) pushes confidence to 1 where most '
                'answers are right: it does not calibrate, use "charbonnier"'
            )
        values, self.solution_ = network.trained(
            records,
            inputs,
            loss,
            hidden=self.hidden,
            start=self.start,
            steps=self.steps,
            patience=_PATIENCE,
            seed=self.seed,
            device=self.device,
        )
        self._store(**values)

    def _temperature(self, logits: Tensor, top: Tensor) -> Tensor:
        if self.indicator == "all":
            return network._temperatures(self, logits)
        return network._temperatures(self, _INDICATORS[self.indicator].of_logits(logits, top))

    def _sharpness(self, records: Records) -> FloatArray:
        inputs = self._tensor(self._indicator(records))
        return np.asarray(1 / network._temperatures(self, inputs)[:, 0].cpu().numpy())

    def _indicator(self, records: Records) -> FloatArray:
        if self.indicator == "all":
            raise ValueError('indicator "all" needs the logits: use fit(logits, labels)')
        return _INDICATORS[self.indicator].of_records(records)[:, None]

    def curve(self) -> tuple[FloatArray, FloatArray]:
        """Return values of the indicator within the range of the fit, and their temperatures.

        Both are empty before a fit and for ``indicator="all"``.
        """
        low, high = self.low_.tolist(), self.high_.tolist()
        if not self.classes or len(low) != 1:
            return np.zeros(0), np.zeros(0)
        values = np.linspace(low[0], high[0], 100)
        inputs = self._tensor(values)[:, None]
        return values, network._temperatures(self, inputs)[:, 0].cpu().numpy()

    def key_values(self) -> dict[str, str]:
        """Return the range of the temperatures."""
        temperature = self.curve()[1]
        if not temperature.size:
            return {}
        return {"temperature": f"{temperature.min():.4g}..{temperature.max():.4g}"}


class PaperSMART(SMART):
    """SMART with the settings of its authors' code, to repeat their figures.

    The network has two hidden layers (321 parameters) and starts at random weights; up to 2000
    steps minimise the binned error alone. :class:`SMART` is the form for use: more likely, and
    little affected by its seed.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> truth = 2 * rng.normal(size=(2000, 10))
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> fitted = SMART.paper(seed=1).fit(3 * truth, labels)
    >>> bool(fitted.temperature(3 * truth).mean() > 2)
    True
    """

    name = "smart_paper"
    summary = "SMART with the settings of its authors"

    def __init__(self, *, seed: Seed = 0) -> None:
        super().__init__(hidden=(16, 16), likelihood=0.0, start="random", steps=2000, seed=seed)


class _Indicator(NamedTuple):
    """A description of an example: ``(n,)`` of records, ``(..., 1)`` of logits less their top."""

    of_records: Callable[[Records], FloatArray]
    of_logits: Callable[[Tensor, Tensor], Tensor]


def _margin(logits: Tensor, top: Tensor) -> Tensor:
    if plain_on_cpu(logits) and logits.numel() <= _MAX_TOPK:
        first, second = logits.topk(2, dim=-1).values.unbind(-1)
        return (first - second)[..., None]
    # topk looks for any number, which takes several times as long for many rows
    others = logits.scatter(-1, top_class(logits), -torch.inf)
    return -others.amax(-1, keepdim=True)  # the largest of logits is 0


def _entropy(logits: Tensor, top: Tensor) -> Tensor:
    log_probs = logits.log_softmax(-1)
    terms = torch.where(torch.isneginf(logits), 0, log_probs.exp() * log_probs)
    return -terms.sum(-1, keepdim=True)


def _mean_gap(logits: Tensor, top: Tensor) -> Tensor:
    possible = ~torch.isneginf(logits)
    total = torch.where(possible, logits, 0).sum(-1, keepdim=True)
    return -total / possible.sum(-1, keepdim=True)


_INDICATORS: dict[str, _Indicator] = {
    "margin": _Indicator(lambda records: records.margin, _margin),
    "entropy": _Indicator(lambda records: np.subtract(*records.log_partition(1.0)), _entropy),
    "confidence": _Indicator(
        lambda records: np.exp(-records.log_partition(1.0).value),
        lambda logits, top: (-logits.logsumexp(-1, keepdim=True)).exp(),
    ),
    "max_logit": _Indicator(lambda records: records.top, lambda logits, top: top),
    "max_minus_mean": _Indicator(lambda records: records.mean_gap, _mean_gap),
}
"""Descriptions of an example, as in SMART's table 4; the option ``all`` takes the logits."""
