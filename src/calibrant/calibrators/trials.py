"""Inputs at the limits of what is legal, on which calibrators from files are tried."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from calibrant.calibrators.base import Calibrator

MASKED = "masked classes"
_TRIAL_ROWS, _MAX_NUMBERS = 16, 1 << 21
"""Rows of a trial, fewer where they would have more numbers than this."""


def random_inputs(
    calibrator: Calibrator, shape: tuple[int, ...], random: torch.Generator
) -> tuple[Tensor, ...]:
    """Return logits, and features where the calibrator needs them, for rows of a shape."""
    logits = 3 * torch.randn((*shape, *_row_shape(calibrator)), generator=random)
    if not calibrator.needs_features:
        return (logits,)
    return logits, torch.randn((*shape, calibrator.width), generator=random)


def edge_cases(calibrator: Calibrator, random: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Yield logits at the limits of what is legal, and what they are."""
    shape = _row_shape(calibrator)
    several = math.prod(shape) > 1
    count = max(2, min(_TRIAL_ROWS, _MAX_NUMBERS // math.prod(shape)))
    rows = torch.randn((count, *shape), generator=random)
    if several:  # the first class leads in one row, the last in another
        rows[0], rows[1] = rows[0].sort(descending=True).values, rows[1].sort().values
    yield "large logits", 1e4 * rows
    yield "small logits", 1e-4 * rows
    yield "equal logits", torch.zeros_like(rows)
    if not several:
        return
    at, (first, second) = torch.arange(len(rows)), rows.topk(2, dim=-1).indices.unbind(-1)
    tied = rows.clone()
    tied[at, second] = rows[at, first]
    yield "ties", tied
    near = rows.clone()
    near[at, second] = rows[at, first].nextafter(torch.tensor(torch.inf))
    yield "near ties", near
    masked = torch.cat([rows, 1e3 * rows])
    masked[:, ::2] = -torch.inf
    masked[0] = -torch.inf
    masked[0, 0] = 0
    yield MASKED, masked


def _row_shape(calibrator: Calibrator) -> tuple[int, ...]:
    """Shape of one row of logits: ``(classes,)``, or ``()`` for log-odds."""
    return () if calibrator.one_logit else (calibrator.classes,)


@torch.no_grad()
def check_learned(calibrator: Calibrator) -> None:
    """Raise ValueError for learned values that no fit gives, and that make probabilities NaN."""
    for name, value in calibrator.named_buffers(recurse=False):
        if name in calibrator.positive and not (value > 0).all():
            raise ValueError(f"{name} must be positive, got {float(value.min()):g}")
    if max(calibrator.classes, calibrator.width) > _MAX_NUMBERS:
        return  # a number that no tensor has to agree with
    random = torch.Generator().manual_seed(0)
    for trial, logits in edge_cases(calibrator, random):
        features = (1e4 * x for x in random_inputs(calibrator, logits.shape[:1], random)[1:])
        if trial != MASKED and calibrator(logits, *features).isnan().any():
            raise ValueError(f"its learned values make probabilities NaN, of {trial} for instance")
