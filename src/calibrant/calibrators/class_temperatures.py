"""A temperature for each class, searched greedily for the lowest calibration error."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import logsumexp
from torch import Tensor

from calibrant._core.binning import bin_index, uniform_edges
from calibrant._core.checks import BoolArray, FloatArray, IntArray
from calibrant._core.chunks import Examples
from calibrant._core.options import Count
from calibrant._core.solve import Solution, check_time
from calibrant.calibrators.affine_fit import _centred, _FitData, _gather
from calibrant.calibrators.base import BOUNDS, Calibrator, Context
from calibrant.calibrators.fit_inputs import _missing_classes, _warn_together

_FACTORS = 2.0 ** (np.arange(-24, 25) / 16)
"""Temperatures that are tried for a class, relative to the one that is best for all."""
_EDGES = uniform_edges(15)
_MIN_IMPROVEMENT = 1e-12  # how much the error must fall, so that rounding decides nothing


class ClassTemperatures(Calibrator):
    r"""A temperature for each class: :math:`\mathrm{softmax}(z_k / T_k)`.

    Class-based temperature scaling of Frenkel and Goldberger 2021. All temperatures start at the
    one with the lowest negative log-likelihood. Then each class in turn tries 49 temperatures from
    about a third of that to three times as much, and takes the one with the lowest ECE (15
    equal-width bins), if the ECE falls and the accuracy does not. There are at most ``passes`` over
    the classes. Logits are centred first, since :math:`z` and :math:`z + c` mean the same.

    With many classes and few examples the ECE of new examples falls much less than that of the fit.

    Attributes
    ----------
    temperatures_ : (classes,) Tensor
    solution_ : Solution
        ``value`` is the ECE of the fitted examples, ``steps`` the number of passes; converged if
        the last of them changed nothing.

    Examples
    --------
    >>> rng = np.random.default_rng(1)
    >>> logits = 3 * rng.normal(size=(3000, 3))
    >>> logits -= logits.mean(-1, keepdims=True)
    >>> labels = (logits / [1.0, 2.0, 3.0] + rng.gumbel(size=logits.shape)).argmax(-1)
    >>> ClassTemperatures().fit(logits, labels).temperatures_
    tensor([1.3, 2.6, 1.8])
    """

    name = "cts"
    aliases = ("class_temperatures",)
    summary = "a temperature for each class, searched for the lowest ECE"
    accepts_masked = False
    learned_shapes = "temperatures_ classes"
    temperatures_: Tensor

    def __init__(self, *, passes: Count = 3) -> None:
        super().__init__()
        self.passes = passes
        self._store(temperatures_=torch.ones(1))

    def size(self, classes: int) -> int:
        """A temperature for each class."""
        return classes

    def _fit(self, examples: Examples, context: Context) -> None:
        data = _gather(examples, _centred)
        temperature = 1 / data.sharpness
        self.solution_ = _search(data, self.passes)
        self._store(temperatures_=torch.from_numpy(self.solution_.x))
        notes = _missing_classes(examples, "they keep the temperature that all classes start with")
        if any(math.isclose(temperature, bound) for bound in BOUNDS):
            text = f"the temperature that all classes start with is at its bound {temperature:g}"
            notes.append(f"{text}; are all examples right, or worse than chance?")
        _warn_together(self, notes)

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        return _centred(logits) / self.temperatures_.to(logits.dtype)


class _Quality(NamedTuple):
    """Figures by which temperatures are compared."""

    ece: float
    accuracy: float


def _search(data: _FitData, passes: int) -> Solution:
    """Sweep over the classes, for a number of passes at most."""
    rows = _Scaled(data)
    grid = np.unique(np.clip(_FACTORS / data.sharpness, *BOUNDS))
    before, now, done = None, rows.quality(), 0
    while now != before and done < passes:
        before, done = now, done + 1
        rows.refresh(np.arange(len(rows.labels)))  # rounding errors of updates do not add up
        for k in np.unique(rows.labels).tolist():
            check_time()
            others = rows.without(k)
            tried = [rows.quality_with(k, t, others) for t in grid.tolist()]
            least = now.accuracy - _MIN_IMPROVEMENT
            errors = [q.ece if q.accuracy >= least else math.inf for q in tried]
            best = int(np.argmin(errors))
            if errors[best] < now.ece - _MIN_IMPROVEMENT:
                rows.change(k, float(grid[best]), others)
                now = tried[best]
    return Solution(rows.temperatures, now.ece, done, now == before)


class _Others(NamedTuple):
    """All classes but one, each ``(n,)``."""

    log_sum: FloatArray  # log-sum-exp over all other classes
    best: FloatArray  # largest scaled logit of them
    leader: IntArray  # and its class, the first of equals


class _Scaled:
    """Logits divided by the temperatures of their classes.

    The sum of exponentials and the two leading classes of each row are enough to try a
    temperature in time O(n). Only rows in which its class leads are looked at whole.
    """

    def __init__(self, data: _FitData) -> None:
        self.logits = data.inputs.cpu().numpy()  # (n, classes), centred
        self.labels = data.labels.cpu().numpy()
        self.share = (data.weight / data.weight.sum()).cpu().numpy()
        self.temperatures = np.full(data.classes, 1 / data.sharpness)
        n = len(self.labels)
        self.log_sum = np.empty(n)
        self.best, self.leader = np.empty((n, 2)), np.empty((n, 2), dtype=np.int64)
        self.refresh(np.arange(n))

    def refresh(self, rows: IntArray) -> None:
        """Compute sums and leaders of some rows anew, a few rows at a time."""
        for part in np.array_split(rows, 1 + rows.size * len(self.temperatures) // (1 << 18)):
            scaled = self.logits[part] / self.temperatures
            self.log_sum[part] = logsumexp(scaled, axis=-1)
            for place in range(2):
                leader = scaled.argmax(-1)[:, None]
                self.leader[part, place] = leader[:, 0]
                self.best[part, place] = np.take_along_axis(scaled, leader, -1)[:, 0]
                np.put_along_axis(scaled, leader, -np.inf, -1)

    def column(self, k: int, temperature: float) -> FloatArray:
        """Scaled logits of a class, ``(n,)``."""
        return self.logits[:, k].astype(np.float64) / temperature

    def without(self, k: int) -> _Others:
        """Sums and leaders of all classes but one."""
        prob = np.exp(self.column(k, float(self.temperatures[k])) - self.log_sum)
        log_sum = self.log_sum + np.log1p(-np.minimum(prob, 0.5))
        # where the class holds most of the sum, taking it away would leave rounding errors
        rows = np.flatnonzero(prob > 0.5)
        scaled = self.logits[rows] / self.temperatures
        scaled[:, k] = -np.inf
        log_sum[rows] = logsumexp(scaled, axis=-1)
        leads = self.leader[:, 0] == k
        best = np.where(leads, self.best[:, 1], self.best[:, 0])
        return _Others(log_sum, best, np.where(leads, self.leader[:, 1], self.leader[:, 0]))

    def quality(self) -> _Quality:
        """ECE and accuracy as it stands."""
        return self._judge(np.exp(self.best[:, 0] - self.log_sum), self.leader[:, 0] == self.labels)

    def quality_with(self, k: int, temperature: float, others: _Others) -> _Quality:
        """ECE and accuracy if a class had another temperature."""
        scaled = self.column(k, temperature)
        top = np.maximum(scaled, others.best)
        confidence = 1 / (np.exp(others.log_sum - top) + np.exp(scaled - top))
        leader = np.where(_ahead(scaled, k, others.best, others.leader), k, others.leader)
        return self._judge(confidence, leader == self.labels)

    def _judge(self, confidence: FloatArray, right: BoolArray) -> _Quality:
        gaps = np.bincount(bin_index(confidence, _EDGES), self.share * (confidence - right))
        return _Quality(float(np.abs(gaps).sum()), float(self.share @ right))

    def change(self, k: int, temperature: float, others: _Others) -> None:
        """Give a class another temperature."""
        led = np.flatnonzero((self.leader == k).any(-1))
        scaled = self.column(k, temperature)
        self.temperatures[k] = temperature
        self.log_sum = np.logaddexp(others.log_sum, scaled)
        first = _ahead(scaled, k, self.best[:, 0], self.leader[:, 0])
        second = ~first & _ahead(scaled, k, self.best[:, 1], self.leader[:, 1])
        for kept, new in ((self.best, scaled), (self.leader, np.full(len(scaled), k))):
            kept[first, 1] = kept[first, 0]
            kept[first, 0] = new[first]
            kept[second, 1] = new[second]
        self.refresh(led)  # a third class may have come up


def _ahead(scaled: FloatArray, k: int, best: FloatArray, leader: IntArray) -> BoolArray:
    """True where class ``k`` ranks before another; of equals, the first does."""
    return np.asarray((scaled > best) | ((scaled == best) & (k < leader)))
