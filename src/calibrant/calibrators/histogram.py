"""Histogram binning of the confidence, and of the probability of each class."""

from __future__ import annotations

from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from calibrant._core.binning import check_bins
from calibrant._core.checks import IGNORED, BoolArray, FloatArray, IntArray, check_some
from calibrant._core.chunks import Examples, on_threads, thread_ranges
from calibrant._core.logpartition import gap_chunks
from calibrant._core.solve import check_time
from calibrant.calibrators.base import Calibrator, Context
from calibrant.calibrators.data_checks import missing_classes, warn_together
from calibrant.calibrators.piecewise import BEYOND, at_place, place
from calibrant.calibrators.step_maps import StepMap, histogram
from calibrant.calibrators.top_label import CERTAIN, top_odds

GROUP = 1 << 20
"""Log-odds of one-vs-rest problems that are held at a time."""


class HistogramBinning(StepMap):
    """The accuracy of each bin in place of the confidence (Zadrozny and Elkan 2001).

    Only the confidence of the top class is binned; the other classes keep their proportions. A
    bin without an example gives its centre. A bin whose examples are all right gives a confidence
    of 1, up to log-odds of 30, so a wrong answer there costs much likelihood.

    Parameters
    ----------
    bins : int
        Examples whose log-odds agree to 5 decimals share a bin, so there may be fewer.
    mass : bool
        Equally much weight in each bin, with edges halfway between neighbouring examples;
        otherwise bins of equal width in confidence.
    keep_argmax : bool
        Hold the other classes below the top one.

    Examples
    --------
    >>> logits = np.array([[0.1, 0.0], [0.3, 0.0], [2.0, 0.0], [4.0, 0.0]] * 5)
    >>> logits[:, 0] += np.arange(20) / 1000
    >>> fitted = HistogramBinning(bins=2).fit(logits, [0, 1, 0, 0] * 5)
    >>> fitted.edges_, fitted.predict_proba(logits[:4])[:, 0].round(2)
    (tensor([1.15...]), array([0.5, 0.5, 1. , 1. ]))
    """

    name = "histogram"
    aliases = ("histogram_binning",)
    summary = "the accuracy of bins of the confidence"

    def __init__(self, *, bins: int = 15, mass: bool = True, keep_argmax: bool = True) -> None:
        super().__init__(keep_argmax=keep_argmax)
        check_bins(bins)
        self.bins = bins
        self.mass = mass

    def size(self, classes: int) -> int:
        """One level per bin."""
        return self.bins

    def _fit_map(self, odds: FloatArray, correct: BoolArray, weight: FloatArray) -> None:
        self._keep(*histogram(odds, correct, weight, self.bins, self.mass))


class HistogramOneVsRest(Calibrator):
    """A histogram for the probability of each class, and the rows normalised again.

    One-vs-rest, as Zadrozny and Elkan 2002 extend histogram binning to several classes: every
    class has bins of its own over all examples, and gives the share of its bin that has its
    label. Predictions may change. Where all classes of a row get 0, the row stays as it was;
    other zeros are held at :math:`e^{-30}`. Masked classes stay impossible, and do not count where
    they are masked; a class that is masked in every example nearly keeps its probability.

    Parameters
    ----------
    bins : int
        Of each class.
    mass : bool
        Equally much weight in each bin, otherwise equal width in probability.

    Attributes
    ----------
    edges_ : (classes, m) Tensor
        Log-odds between the bins of each class. Rows of classes with fewer bins are filled up.
    levels_ : (classes, m + 1) Tensor
        Logarithms of the probabilities that the bins give, before the rows are normalised.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> logits = 2 * rng.normal(size=(5000, 3))
    >>> labels = (logits + [2.0, 0.0, 0.0] + rng.gumbel(size=logits.shape)).argmax(-1)
    >>> fitted = HistogramOneVsRest().fit(logits, labels)
    >>> fitted.predict_proba(np.zeros((1, 3)))  # the first class is likelier than it seems
    array([[0.7, 0.1, 0.2]])
    """

    name = "histogram_ovr"
    summary = "a histogram for each class"

    edges_: Tensor
    levels_: Tensor
    learned_shapes = "edges_ classes cuts; levels_ classes cuts+1"

    def __init__(self, *, bins: int = 15, mass: bool = True) -> None:
        super().__init__()
        check_bins(bins)
        self.bins = bins
        self.mass = mass
        self._store(edges_=torch.zeros(1, 0), levels_=torch.zeros(1, 1))

    def size(self, classes: int) -> int:
        """One level per bin of each class."""
        return self.bins * classes

    def _fit(self, examples: Examples, context: Context) -> None:
        kept = examples.labels != IGNORED
        check_some(int(kept.sum()))
        labels, weight = examples.labels[kept], examples.labelled_weight()
        weight = np.ones(len(labels)) if weight is None else weight
        step = max(1, GROUP // len(labels))
        result: list[tuple[FloatArray, FloatArray]] = []
        for first in range(0, examples.classes, step):
            check_time()
            classes = range(first, min(first + step, examples.classes))
            columns = class_columns(examples, classes)
            task = partial(self._histograms, columns, classes, labels, weight)
            parts = np.array_split(np.arange(len(classes)), len(thread_ranges(examples)))
            result += chain.from_iterable(on_threads(task, parts))
        self._store(
            edges_=_filled([edges for edges, _ in result], self.bins - 1, BEYOND),
            levels_=_filled([_log(shares) for _, shares in result], self.bins, -CERTAIN),
        )
        consequence = "they get a probability of 0, but for those always masked"
        warn_together(self, missing_classes(examples, consequence))

    def _histograms(
        self,
        columns: FloatArray,
        classes: range,
        labels: IntArray,
        weight: FloatArray,
        part: IntArray,
    ) -> list[tuple[FloatArray, FloatArray]]:
        """Edges and shares of some of the columns."""
        result = []
        for i in part.tolist():
            possible = np.isfinite(columns[i])
            odds = columns[i][possible].astype(np.float64)
            own, mass = labels[possible] == classes[i], self.mass and odds.size > 0
            result.append(histogram(odds, own, weight[possible], self.bins, mass))
        return result

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        levels = at_place(self.levels_.to(logits.dtype), place(class_odds(logits), self.edges_))
        levels = torch.where(torch.isneginf(logits), -torch.inf, levels)
        return torch.where(levels.amax(-1, keepdim=True) > -CERTAIN, levels, logits)


def _log(share: FloatArray) -> FloatArray:
    with np.errstate(divide="ignore"):
        return np.maximum(np.log(share), -CERTAIN)


def class_odds(logits: Tensor) -> Tensor:
    """Log-odds of every class, ``(..., classes)``, of logits whose largest is 0.

    Those of the top class come from the sum of the others: 1 minus its probability has no
    digits left.
    """
    log_probs = logits.log_softmax(-1)
    odds = log_probs - torch.log1p(-log_probs.exp().clamp(max=0.75))
    return odds.scatter(-1, logits.argmax(-1, keepdim=True), top_odds(logits))


def class_columns(examples: Examples, classes: range) -> FloatArray:
    """Log-odds of some classes ``(classes, n)`` in float32; -inf where they are masked."""
    ranges = thread_ranges(examples)
    ends = np.cumsum([0, *((examples.labels[a:b] != IGNORED).sum() for a, b in ranges)])
    columns = np.empty((len(classes), ends[-1]), np.float32)

    def walk(row_range: tuple[int, int], done: int) -> None:
        for result in gap_chunks(examples, row_range):
            odds = class_odds(-result.gaps)[:, classes.start : classes.stop]
            masked = torch.isneginf(result.chunk.logits[:, classes.start : classes.stop])
            after = done + len(odds)
            columns[:, done:after] = odds.masked_fill(masked, -torch.inf).cpu().numpy().T
            done = after

    on_threads(walk, ranges, ends[:-1].tolist())
    return columns


def _filled(rows: list[FloatArray], width: int, value: float) -> FloatArray:
    """Rows of different lengths as one array, the short ones filled up with a value."""
    width = min(width, max(len(row) for row in rows))
    result = np.full((len(rows), width), value)
    for row, values in zip(result, rows, strict=True):
        row[: len(values)] = values
    return result
