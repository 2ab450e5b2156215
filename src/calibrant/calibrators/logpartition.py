r"""Log-partition records: all that a scalar temperature can change about an example, in one pass.

With the gaps :math:`d_k = \max_j z_j - z_k` and the sharpness :math:`b = 1/T`, everything that
a temperature does to a row of logits is in

.. math:: A(b) = \log \sum_k e^{-b d_k}

and a few numbers that do not depend on :math:`b`: the confidence is :math:`e^{-A}`, the negative
log-likelihood :math:`b d_y + A`, the entropy :math:`A - dA/d\log b`, and the Brier score
:math:`1 - 2 e^{-b d_y - A(b)} + e^{A(2b) - 2A(b)}`. Records hold, at geometric nodes of :math:`b`,
the same sum without the top class, :math:`R(b) = \log(e^{A(b)} - 1)`: its negative are the
log-odds of the top class, exact also where the confidence rounds to 1. After :func:`tabulate` has
read the logits once, a fit costs the same whatever the number of classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from calibrant._core import chunks
from calibrant._core.checks import IGNORED, BoolArray, FloatArray, IntArray, check_some
from calibrant._core.chunks import Examples, LabelledRows, has_float64, top_class

LOWEST = 0.05  # sharpness of the first node: a temperature of 20
OCTAVES = 9  # doublings of the sharpness that the nodes span: temperatures down to 0.04
TOP = 10  # number of the smallest gaps of an example that are kept
_WINDOW = 4  # nodes of an interpolation; with a value and a slope at each the degree is 7
_CENTRE = (_WINDOW - 1) / 2
LARGEST_GAP = 1e30  # gaps are cut here, so that squares and means of them stay finite in float32
DEVICE_FROM = 1 << 14
"""Examples from which on a search on a GPU takes less time than on the CPU: calls of its kernels
take as long for few."""
LEAST_REST = 1e-37  # sums without the top class are cut here: a confidence of 1 - 1e-37


def _nodes_per_octave(classes: int) -> int:
    """Return the density of nodes for an error of the confidence well below 1e-4."""
    # The hardest case is a row with one class close to the top and all others at one larger gap:
    # the more classes, the more sharply R turns.
    return 4 if classes <= 100 else 5 if classes <= 1500 else 8


class Curve(NamedTuple):
    """A function of the sharpness and its derivative by ``log b``, each ``(n,)``."""

    value: FloatArray
    slope: FloatArray


def _softplus(x: FloatArray) -> Curve:
    """Return ``log(1 + exp(x))`` and its derivative, the logistic function, each ``(n,)``."""
    if isinstance(x, Tensor):
        return Curve(torch.nn.functional.softplus(x, threshold=40), x.sigmoid())
    # np.logaddexp and expit take many times longer than np.exp
    small = np.abs(x)
    np.exp(np.negative(small, out=small), out=small)
    value, slope = np.log1p(small), np.where(x < 0, small, 1.0)
    value += np.maximum(x, 0)
    small += 1
    slope /= small
    return Curve(value, slope)


@dataclass(frozen=True, eq=False)
class Records:
    """Log-partition values of ``n`` examples at the nodes, and what does not depend on b."""

    # (n, nodes, 2): R and its slope by the node number, at LOWEST * 2 ** (i / density)
    table: NDArray[np.float32]
    own_gap: FloatArray  # (n,) largest logit minus the one of the label
    mean_gap: FloatArray  # (n,) mean of the gaps over the classes that are possible
    gaps: NDArray[np.float32]  # (n, 10) smallest gaps in order, from 0; inf if classes are fewer
    top: FloatArray  # (n,) largest logit
    correct: BoolArray  # (n,) True if the label is the first class with the largest logit
    possible: IntArray  # (n,) number of classes whose logit is not -inf
    labels: IntArray  # (n,)
    weight: FloatArray  # (n,) all 1 without weights
    classes: int

    def __len__(self) -> int:
        return len(self.own_gap)

    @property
    def density(self) -> int:
        """Nodes per octave."""
        return self._last // OCTAVES

    @property
    def margin(self) -> FloatArray:
        """Largest logit minus the second, inf where only one class is possible."""
        return self.gaps[:, 1].astype(np.float64)

    @cached_property
    def share(self) -> FloatArray:
        """Weights as shares of their sum, ``(n,)``."""
        share: FloatArray = self.weight / self.weight.sum()
        return share

    def scale_free(self) -> Records:
        """Return these with weights that are 1 on average, so that only their ratios matter."""
        mean = float(self.weight.mean())
        # parts of a calibrator get weights that were divided before: rounding must not move them
        return self if abs(mean - 1) < 1e-12 else replace(self, weight=self.weight / mean)

    @property
    def one_on_top(self) -> BoolArray:
        """True where class 1 of two has the largest logit."""
        return np.asarray(self.correct == (self.labels == 1))

    def take(self, which: IntArray | BoolArray | slice) -> Records:
        """Return the examples of an index, a mask or a slice."""
        columns: Any = {name: getattr(self, name)[which] for name in COLUMNS}
        return replace(self, **columns)

    def log_partition(self, sharpness: float | FloatArray) -> Curve:
        """Return A and dA/dlog b of every example at one sharpness, or at one for each ``(n,)``."""
        rest, slope = self.log_rest(sharpness)
        value, share = _softplus(rest)
        slope *= share
        return Curve(value, slope)

    def log_rest(self, sharpness: float | FloatArray) -> Curve:
        """Return R and dR/dlog b: the negative log-odds of the top class.

        Between the nodes a polynomial of degree 7 goes through four of them with their slopes.
        Below them a cubic goes to the limit at 0, whose value and slope are known too. Above
        them only the ten leading classes count.
        """
        b = np.asarray(sharpness, dtype=np.float64)
        if b.ndim == 0 and len(self) and 0 <= (one := self._position(b[()])) <= self._last:
            # one window and one set of weights serve all examples
            start = _first_node(one, self.table.shape[1])
            window = self.table[:, start : start + _WINDOW].reshape(len(self), 2 * _WINDOW)
            x = float(one) - start - _CENTRE
            powers = np.array([[x**p, p * x ** max(p - 1, 0)] for p in range(2 * _WINDOW)])
            value, slope = (window @ (_HERMITE @ powers).astype(np.float32)).astype(np.float64).T
            return Curve(value, slope * self.density / math.log(2))
        if b.shape != (len(self),):
            b = np.broadcast_to(b, (len(self),))
        position = self._position(b)
        # np.clip takes several times longer for few examples
        value, slope = self._pieces.at(np.minimum(np.maximum(position, 0), self._last))
        slope *= self.density / math.log(2)
        for beyond, rule in ((position < 0, _blunt), (position > self._last, _sharp)):
            if beyond.any():
                value[beyond], slope[beyond] = rule(self.take(beyond), b[beyond])
        return Curve(value, slope)

    @property
    def _last(self) -> int:
        return int(self.table.shape[1] - 1)

    def _position(self, b: Any) -> Any:
        """Convert sharpness to the numbers of the nodes."""
        with np.errstate(divide="ignore"):
            return np.log2(b / LOWEST) * self.density

    @property
    def _pieces(self) -> _Pieces:
        return _Pieces(self.table)

    def tracked(self) -> Records:
        """Return the same records, quick where the sharpness moves little from call to call."""
        return _Tracked(**{field.name: getattr(self, field.name) for field in fields(Records)})

    def on(self, device: torch.device) -> Records:
        """Return records for searches: tensors on a device if that is worth it, or tracked."""
        if not worth_moving(len(self), device):
            return self.tracked()
        columns: Any = {field.name: getattr(self, field.name) for field in fields(Records)}
        for name in ("table", "own_gap", "mean_gap", "correct", "weight"):
            columns[name] = chunks.as_tensor(columns[name]).to(device)
        return _OnDevice(**columns, source=self)


def worth_moving(count: int, device: torch.device) -> bool:
    """Return whether a search over so many examples takes less time on a device."""
    return count >= DEVICE_FROM and device.type != "cpu" and has_float64(device)


COLUMNS = [field.name for field in fields(Records)][:-1]


class _Tracked(Records):
    """Records that keep the polynomials of their last sharpness."""

    @cached_property
    def _pieces(self) -> _Pieces:
        return _Pieces(self.table)


@dataclass(frozen=True, eq=False)
class _OnDevice(Records):
    """Records whose columns for objectives are tensors on a device, and so are their curves."""

    source: Records

    @cached_property
    def _windows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Powers 0 to 7, the places of windows ``(n, 8)`` in the table, and their weights."""
        table: Any = self.table
        power = torch.arange(2 * _WINDOW, device=table.device)
        rows = torch.arange(0, table.numel(), 2 * (self._last + 1), device=table.device)
        # from powers to the weights of a window in R, and in its slope by log b
        rise = np.diag(np.arange(1.0, 2 * _WINDOW), 1) * self.density / math.log(2)
        weights = np.concatenate([_HERMITE.T, rise @ _HERMITE.T], axis=1)
        # a window begins at the node before that below a position
        return power, rows[:, None] + power - 2, torch.from_numpy(weights).to(table.device)

    def log_rest(self, sharpness: Any) -> Any:
        """Return R and dR/dlog b as tensors, for one sharpness or a tensor ``(n,)``."""
        table: Any = self.table
        b, device = sharpness, table.device
        if not isinstance(b, Tensor):
            b = torch.full((len(self),), float(b), dtype=torch.float64, device=device)
        position = (b.log2() - math.log2(LOWEST)) * self.density
        low, high = torch.stack(torch.aminmax(position)).tolist() if len(self) else (0, 0)
        inside = low >= 0 and high <= self._last
        at = position if inside else position.clamp(0, self._last)
        below = at.long().clamp_(1, self._last + 2 - _WINDOW)
        power, places, weights = self._windows
        windows = table.take(torch.add(places, below[:, None], alpha=2))[:, None]
        powers = (at - below - (_CENTRE - 1))[:, None] ** power
        of_window = (powers @ weights).view(-1, 2, 2 * _WINDOW)
        value, slope = (windows * of_window).sum(-1).T
        if not inside:
            beyond = ((position < 0) | (position > self._last)).cpu().numpy()
            exact = self.source.take(beyond).log_rest(b.cpu().numpy()[beyond])
            which = torch.from_numpy(beyond).to(device)
            value[which], slope[which] = (torch.from_numpy(x).to(device) for x in exact)
        return Curve(value, slope)


class _Pieces:
    """Polynomials through the nodes around the last position of each example."""

    def __init__(self, table: NDArray[np.float32]) -> None:
        flat = table.reshape(len(table), 2 * table.shape[1])
        self.windows = sliding_window_view(flat, 2 * _WINDOW, axis=1)
        self.nodes = table.shape[1]
        self.first = np.full(len(table), -1)  # node of the window
        self.coefficients = np.empty((2 * _WINDOW, len(table)))  # of the powers

    def at(self, position: FloatArray) -> Curve:
        """Return R and its slope by the node number at positions ``(n,)`` among the nodes."""
        first = _first_node(position, self.nodes)
        stale = np.flatnonzero(first != self.first)
        for run in chunks.chunk_slices(stale):
            rows = stale[run]
            self.coefficients[:, rows] = (self.windows[rows, 2 * first[rows]] @ _HERMITE).T
        self.first = first
        x = position - first - _CENTRE
        result = Curve(np.empty(len(x)), np.empty(len(x)))
        for run in chunks.chunk_slices(x):
            # Horner's scheme, and its derivative
            highest, *others = self.coefficients[::-1, run]
            value, slope, at = result.value[run], result.slope[run], x[run]
            slope[:] = highest
            np.multiply(highest, at, out=value)
            value += others[0]
            for c in others[1:]:
                slope *= at
                slope += value
                value *= at
                value += c
        return result


def _first_node(position: Any, nodes: int) -> Any:
    """Return the first node of the window around a position."""
    first = np.floor(position).astype(np.int64) - 1
    return np.minimum(np.maximum(first, 0), nodes - _WINDOW)  # np.clip takes longer for few


def _hermite() -> FloatArray:
    """Return the matrix from (value, slope) at 0, 1, 2, 3 to powers of ``x - _CENTRE``."""
    at, power = np.arange(_WINDOW) - _CENTRE, np.arange(2 * _WINDOW)
    values = at[:, None] ** power
    slopes = power * at[:, None] ** np.maximum(power - 1, 0)
    conditions = np.stack([values, slopes], axis=1).reshape(2 * _WINDOW, 2 * _WINDOW)
    return np.asarray(np.linalg.inv(conditions).T)


_HERMITE = _hermite()


def _blunt(records: Records, b: FloatArray) -> Curve:
    """Interpolate below the nodes, by a cubic in b between 0 and the first node."""
    # R is convex in b, so the cubic is held above its tangents at both ends and below the chord:
    # where a few gaps are huge, it would swing far out.
    others = np.maximum(records.possible - 1, LEAST_REST)
    start, fall = np.log(others), -LOWEST * records.mean_gap * records.possible / others
    fall = np.where(records.possible > 1, fall, 0)
    end, rise = records.log_rest(LOWEST)
    x, climb = b / LOWEST, end - start
    square, cube = 3 * climb - 2 * fall - rise, fall + rise - 2 * climb
    bounds = np.stack([start + x * fall, end + (x - 1) * rise, start + x * climb])
    slopes = np.stack([fall, rise, climb])
    lower, above = np.argmax(bounds[:2], axis=0), np.full(len(b), 2)
    value = start + x * (fall + x * (square + x * cube))
    slope = fall + x * (2 * square + x * 3 * cube)
    row = np.arange(len(b))
    for bound, beyond in ((lower, np.less), (above, np.greater)):
        limit = bounds[bound, row]
        slope = np.where(beyond(value, limit), slopes[bound, row], slope)
        value = np.where(beyond(value, limit), limit, value)
    return Curve(value, x * slope)


def _sharp(records: Records, b: FloatArray) -> Curve:
    """Extrapolate above the nodes: classes beyond the leading ones fall like the last of these."""
    highest = LOWEST * 2.0**OCTAVES
    gaps = np.minimum(records.gaps[:, 1:].astype(np.float64), LARGEST_GAP)
    further = np.exp(records.log_rest(highest).value) - np.exp(-highest * gaps).sum(-1)
    terms = np.exp(-b[:, None] * gaps)
    terms[:, -1] += np.maximum(further, 0) * np.exp(-(b - highest) * gaps[:, -1])
    total = np.maximum(terms.sum(-1), LEAST_REST)
    return Curve(np.log(total), -b * (terms * gaps).sum(-1) / total)


def concatenate(parts: Sequence[Records]) -> Records:
    """Join the records of several runs of rows, such as those of several processes."""
    classes = {part.classes for part in parts}
    if len(classes) != 1:
        raise ValueError(f"parts must have the same number of classes, got {sorted(classes)}")
    columns: Any = {n: np.concatenate([getattr(part, n) for part in parts]) for n in COLUMNS}
    return replace(parts[0], **columns)


def tabulate(examples: Examples) -> Records:
    """Return the records of the labelled rows, reading the logits once."""
    ranges = chunks.thread_ranges(examples)
    labels = examples.labels[examples.labels != IGNORED]
    check_some(len(labels))
    density = _nodes_per_octave(examples.classes)
    rows, nodes = len(labels), OCTAVES * density + 1
    columns: tuple[Any, ...] = (  # in the order of Records
        np.empty((rows, nodes, 2), np.float32),  # table
        np.empty(rows),  # own_gap
        np.empty(rows),  # mean_gap
        np.empty((rows, TOP), np.float32),  # gaps
        np.empty(rows),  # top
        np.empty(rows, bool),  # correct
        np.empty(rows, np.int64),  # possible
    )

    def fill(row_range: tuple[int, int], place: tuple[NDArray[Any], ...]) -> None:
        # Squaring small numbers again and again passes through denormal ones, at a hundred times
        # the cost of a product; they are as good as zero here.
        torch.set_flush_denormal(True)
        done = 0
        for result in _gap_chunks(examples, row_range):
            for column, values in zip(place, _record(result, density), strict=True):
                column[done : done + len(values)] = values.cpu().numpy()
            done += len(result.own_gap)

    ends = np.cumsum([0, *((examples.labels[a:b] != IGNORED).sum() for a, b in ranges)])
    places = [tuple(column[a:b] for column in columns) for a, b in pairwise(ends)]
    # Always on threads of their own: they flush denormal numbers, which nobody else must notice.
    chunks.on_threads(fill, ranges, places, always=True)
    weight = examples.labelled_weight()
    weight = np.ones(rows) if weight is None else weight
    return Records(*(*columns, labels, weight, examples.classes))


class _Gaps(NamedTuple):
    """The gaps of a chunk; the buffers are overwritten by the next one."""

    chunk: LabelledRows
    top: Tensor  # (rows,) class of the largest logit
    best: Tensor  # (rows, 1) that logit
    own_gap: Tensor  # (rows,) of the label, float64
    gaps: Tensor  # (rows, classes) float32
    scratch: Tensor  # (rows, classes) float32, to compute in


def _gap_chunks(examples: Examples, row_range: tuple[int, int]) -> Iterator[_Gaps]:
    """Yield the gaps of every chunk of a run of rows; a row that has no softmax is refused."""
    # one pair of buffers for all chunks: fresh memory of this size costs more than the sums
    buffers = torch.empty(2, 0, dtype=torch.float32)
    for chunk in chunks.labelled_chunks(examples, *row_range):
        size, device = chunk.logits.numel(), chunk.logits.device
        if buffers.shape[1] < size or buffers.device != device:
            buffers = torch.empty(2, size, dtype=torch.float32, device=device)
        gaps, scratch = (buffer[:size].view_as(chunk.logits) for buffer in buffers)
        top = top_class(chunk.logits)
        best = chunk.logits.gather(-1, top)
        own_gap = (best - chunk.logits.gather(-1, chunk.labels[:, None]))[:, 0].double()
        if not (chunk.bounded or torch.isfinite(own_gap).all()):
            bad = ~torch.isfinite(own_gap).cpu().numpy()
            raise chunks.explained(examples, int(chunk.number[bad][0]))
        torch.sub(best, chunk.logits, out=gaps)
        if not chunk.bounded:  # masked classes too, whose powers are then 0
            gaps.clamp_(max=LARGEST_GAP)
        yield _Gaps(chunk, top[:, 0], best, own_gap, gaps, scratch)


def _record(result: _Gaps, density: int) -> tuple[Tensor, ...]:
    """Return columns of one chunk, in the order of :class:`Records`; buffers are overwritten."""
    chunk, top, best, own_gap, gaps, powers = result
    total = gaps.sum(-1)
    possible = torch.full(total.shape, gaps.shape[-1], device=gaps.device)
    # masked, or as good as that: only -inf is impossible
    if not chunk.bounded and (total >= LARGEST_GAP).any():
        masked = torch.isneginf(chunk.logits)
        possible -= masked.sum(-1)
        total = gaps.masked_fill(masked, 0).sum(-1)
    mean_gap = total.double() / possible
    leading = _smallest(gaps, TOP)
    gaps.scatter_(-1, top[:, None], LARGEST_GAP)  # the top class is not among the rest
    return (
        _nodes(gaps, powers, density),
        own_gap,
        mean_gap,
        torch.where(leading < LARGEST_GAP, leading, torch.inf),
        best[:, 0].double(),
        top == chunk.labels,
        possible,
    )


def _nodes(gaps: Tensor, powers: Tensor, density: int) -> Tensor:
    """Return R and its slope by the node number at every node, ``(rows, nodes, 2)``."""
    # Squaring exp(-b d) gives exp(-2 b d), so only the first octave needs exponentials. Rounding
    # errors double with each square, to a relative 2e-5 of the terms at the last node.
    nodes = OCTAVES * density + 1
    sums = torch.empty(2, nodes, len(gaps), dtype=torch.float32, device=gaps.device)
    for first in range(density):
        torch.mul(gaps, -LOWEST * 2 ** (first / density), out=powers).exp_()
        for node in range(first, nodes, density):
            torch.sum(powers, -1, out=sums[0, node])
            torch.linalg.vecdot(powers, gaps, out=sums[1, node])
            powers.mul_(powers)
    total, drop = sums[0].clamp_(min=LEAST_REST), sums[1]
    per_node = math.log(2) / density
    sharpness = LOWEST * torch.exp(
        per_node * torch.arange(nodes, dtype=torch.float32, device=gaps.device)
    )
    slope = -per_node * sharpness[:, None] * drop / total
    return torch.stack([total.log(), slope], -1).transpose(0, 1).contiguous()


def _smallest(values: Tensor, count: int) -> Tensor:
    """Return the smallest values of each row in order, ``(rows, count)``, filled up with inf."""
    # first by groups of columns: only those with the smallest minima can hold them
    rows, width = values.shape
    groups = width // 16
    if groups > count:
        grouped = values[:, : 16 * groups].view(rows, 16, groups)
        chosen = grouped.amin(1).topk(count, largest=False, sorted=False).indices
        candidates = grouped.gather(2, chosen[:, None].expand(-1, 16, -1)).reshape(rows, -1)
        values = torch.cat([candidates, values[:, 16 * groups :]], -1)
    least = min(count, values.shape[-1])
    if values.device.type == "cpu":  # where numpy is several times faster
        parted = np.partition(values.numpy(), least - 1)[:, :least]
        result = torch.from_numpy(np.sort(parted))
    else:
        result = values.topk(least, largest=False, sorted=True).values
    return torch.nn.functional.pad(result, (0, count - result.shape[-1]), value=torch.inf)
