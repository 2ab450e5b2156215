"""Comparison of an exported graph with the calibrator."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from calibrant.deploy.attach import CalibratedModel
from calibrant.deploy.export_graph import _Graph, _random, _Subject

TOLERANCE = 1e-5
"""Largest difference of a probability between the written file and the calibrator."""
TRIED = 1 << 22
"""Numbers in the largest batch that a file is tried with."""
MASKED = "masked classes"
NUDGES, NUDGE = 16, 4 * torch.finfo(torch.float32).eps
"""How often, and by how much of their size, logits are moved to see if a step is near."""


# ------------------------------------------------------------------------------- how it is tried


@torch.no_grad()
def _checked(
    subject: _Subject,
    run: Callable[[tuple[Tensor, ...]], Tensor],
    where: str,
    tolerance: float,
) -> float:
    """Largest difference of a probability over all trials; raise where it is too large."""
    graph, worst = subject.graph, 0.0
    for what, inputs in _trials(subject):
        args, named = subject.given(inputs)
        logits, features = graph.before(*args, **named)
        wanted = graph.after(logits, features)
        if wanted.isnan().any():
            if what == MASKED:
                continue  # the method takes none
            raise ValueError(f"nothing was written: on {what} torch itself gives NaN")
        try:
            found = run(inputs)
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"nothing was written: {where} fails on {what} with {reason!r}"
            ) from error
        if found.shape != wanted.shape:
            raise ValueError(
                f"nothing was written: on {what} {where} gives the shape {tuple(found.shape)} and "
                f"torch {tuple(wanted.shape)}"
            )
        claimed, right = _probs(graph, found), _probs(graph, wanted)
        differ = _outside(claimed, right, right)
        if not differ <= tolerance:
            differ = _outside(claimed, *_around(graph, logits, features))
        if not differ <= tolerance:
            raise ValueError(
                f"nothing was written: on {what} {where} gives probabilities that differ by "
                f"{differ:.2g} from those of torch, {tolerance:g} is allowed"
            )
        other = _decided(graph, found) != _decided(graph, wanted)
        if graph.calibrator.keeps_argmax and other.any():
            raise ValueError(
                f"nothing was written: on {what} {where} predicts other classes than torch"
            )
        worst = max(worst, differ)
    return worst


def _probs(graph: _Graph, found: Tensor) -> Tensor:
    return found.double() if graph.probabilities else graph.probs(found.double())


def _outside(claimed: Tensor, low: Tensor, high: Tensor) -> float:
    """How far the worst probability is from its range; NaN is infinitely far."""
    beyond = torch.maximum(low - claimed, claimed - high)
    return float(torch.where(beyond.isnan(), torch.inf, beyond).max())


def _around(graph: _Graph, logits: Tensor, features: Tensor | None) -> tuple[Tensor, Tensor]:
    """Least and largest probabilities that torch gives for almost the same logits.

    A method with steps may differ where the logits are at one: there rounding decides, and either
    side is right.
    """
    random = torch.Generator().manual_seed(0)
    finite = torch.where(logits.isfinite(), logits, 0).abs()
    one = graph.calibrator.classes == 1
    # small logits as well have classes whose log-odds are several units, with the rounding of these
    step = NUDGE * (finite if one else finite.amax(-1, keepdim=True)).clamp(min=8)
    near = [logits, (logits / step).round() * step]
    for _ in range(NUDGES):
        near.append(logits + step * (2 * torch.rand(logits.shape, generator=random) - 1))
    found = [_probs(graph, graph.after(each.to(logits.dtype), features)) for each in near]
    low, high = found[0], found[0]
    for each in found:
        low, high = torch.minimum(low, each), torch.maximum(high, each)
    return low, high


def _decided(graph: _Graph, found: Tensor) -> Tensor:
    if graph.calibrator.classes == 1:
        return found > (0.5 if graph.probabilities else 0)
    return found.argmax(-1)


def _trials(subject: _Subject) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Inputs to try, and what they are."""
    if isinstance(subject.graph.inner, CalibratedModel):
        have = len(subject.inputs[0])
        for rows in (1, have, 7, 64):
            chosen = torch.arange(rows) % have
            yield f"{rows} rows of the example", tuple(v[chosen] for v in subject.inputs)
        if subject.varying == 2:
            short = tuple(v[:, : (v.shape[1] + 1) // 2] for v in subject.inputs)
            yield "half of the tokens of the example", short
        return
    calibrator, random = subject.graph.calibrator, torch.Generator().manual_seed(1)
    most = max(8, min(1000, TRIED // calibrator.classes))
    for rows in (1, 2, 7, most):
        shape = (rows, 1 + rows % 5)[: subject.varying]
        yield f"a batch of {rows}", _random(calibrator, shape, random)
    for what, logits in _edges(calibrator.classes, random):
        if subject.varying == 2:
            logits = logits[:, None]
        rest = _random(calibrator, logits.shape[: subject.varying], random)[1:]
        yield what, (logits, *rest)


def _edges(classes: int, random: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Logits at the limits of what is legal, ``(rows, classes)`` or ``(rows,)``."""
    rows = torch.randn((16,) if classes == 1 else (16, classes), generator=random)
    if classes > 1:  # let the first class lead in one row, and the last in another
        rows[0], rows[1] = rows[0].sort(descending=True).values, rows[1].sort().values
    yield "large logits", 1e4 * rows
    yield "small logits", 1e-4 * rows
    yield "equal logits", torch.zeros_like(rows)
    if classes == 1:
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
