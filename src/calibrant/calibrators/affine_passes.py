"""Penalised fit of affine maps from sums over passes, where the logits are too many to hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from torch import Tensor

from calibrant._core import chunks
from calibrant._core.checks import IGNORED, FloatArray
from calibrant._core.chunks import Examples
from calibrant._core.solve import Solution
from calibrant.calibrators import affine_fit as fit
from calibrant.calibrators.base import BOUNDS
from calibrant.calibrators.passes import Passes, Sums

Inputs = Callable[[Tensor], Tensor]
STEPS, TOLERANCE = 50, 1e-10  # of Newton's method for the sharpness


def refined(passes: Passes, inputs: Inputs, penalty: FloatArray, start: FloatArray) -> Solution:
    """Minimise the penalised loss of all examples, from parameters of a fit on some of them."""
    weight = passes.sums(_weight)[0]
    sharpness = best_sharpness(passes, weight)
    task = partial(_curvature, inputs, sharpness, penalty.size)
    curvature = passes.sums(task)[0] / weight

    def loss(x: FloatArray) -> tuple[float, FloatArray]:
        value, gradient = passes.sums(partial(_loss, inputs, x))
        return float(value / weight), np.asarray(gradient / weight)

    centre = fit.tempered(passes.classes, sharpness, penalty.size)
    return fit.minimise_penalised(loss, centre, penalty, curvature, start)


def best_sharpness(passes: Passes, weight: FloatArray) -> float:
    """Return 1 / T of temperature scaling, by Newton's method on the convex loss."""
    low, high = 1 / BOUNDS[1], 1 / BOUNDS[0]
    sharpness = 1.0
    for _ in range(STEPS):
        slope, bend = (float(total / weight) for total in passes.sums(partial(_slope, sharpness)))
        # in the logarithm, where a step cannot leave the positive numbers
        step = slope * sharpness / max(bend * sharpness**2 + abs(slope * sharpness), 1e-300)
        after = float(np.clip(sharpness * np.exp(-np.clip(step, -1, 1)), low, high))
        if abs(after - sharpness) <= TOLERANCE * sharpness:
            return after
        sharpness = after
    return sharpness


def class_counts(examples: Examples) -> Sums:
    """Return the number of labels of each class."""
    labels = examples.labels[examples.labels != IGNORED]
    return [np.bincount(labels, minlength=examples.classes)]


def _weight(examples: Examples) -> Sums:
    weight = examples.labelled_weight()
    return [np.float64((examples.labels != IGNORED).sum() if weight is None else weight.sum())]


def _slope(sharpness: float, examples: Examples) -> Sums:
    """Return first and second derivative of the summed loss by the sharpness."""
    slope = bend = 0.0
    for inputs, labels, weight in _rows(fit.centred, examples):
        probs = (sharpness * inputs).softmax(-1)
        mean = (probs * inputs).sum(-1)
        slope += float(weight @ (mean - inputs.gather(-1, labels)[:, 0]))
        bend += float(weight @ ((probs * inputs**2).sum(-1) - mean**2))
    return [np.float64(slope), np.float64(bend)]


def _curvature(inputs: Inputs, sharpness: float, size: int, examples: Examples) -> Sums:
    rows = _rows(inputs, examples)
    return [fit.curvature_sums(rows, sharpness, examples.classes, size).numpy()]


def _loss(inputs: Inputs, x: FloatArray, examples: Examples) -> Sums:
    value, gradient = fit.nll_sums(x, examples.classes, _rows(inputs, examples))
    return [np.float64(value), gradient.numpy()]


def _rows(inputs: Inputs, examples: Examples) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield inputs ``(rows, classes)`` in float64, labels ``(rows, 1)`` and weights ``(rows,)``."""
    for chunk in chunks.labelled_chunks(examples, 0, examples.labels.size):
        values = fit.finite_inputs(inputs, examples, chunk)
        weight = chunk.weight
        if weight is None:
            weight = values.new_ones(len(chunk.labels))
        yield values, chunk.labels[:, None], weight
