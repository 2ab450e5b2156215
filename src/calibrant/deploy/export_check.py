"""Comparison of an exported graph with the calibrator, before the file gets its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from calibrant.deploy.attach import CalibratedModel
from calibrant.deploy.export_graph import ExportGraph, random_inputs

TOLERANCE = 1e-5
"""Largest difference of a probability between the written file and the calibrator."""
LARGEST_BATCH = 1 << 22
"""Numbers in the largest batch of a trial."""
MASKED = "masked classes"
NUDGES, ROUNDING = 16, 4 * torch.finfo(torch.float32).eps
"""Number of times, and share of their size, by which logits are moved to look for a step."""

Run = Callable[[tuple[Tensor, ...]], Tensor]


@torch.no_grad()
def check_export(graph: ExportGraph, run: Run, runtime: str, tolerance: float) -> float:
    """Return the largest difference of a probability in all trials; raise where it is too large.

    ``run`` gives the output of the written file for some inputs.
    """
    worst = 0.0
    for trial, inputs in _trials(graph):
        try:
            worst = max(worst, _difference(graph, run, inputs, tolerance, trial == MASKED))
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"nothing was written: {runtime} fails on {trial}: {reason}"
            ) from error
    return worst


def _difference(
    graph: ExportGraph, run: Run, inputs: tuple[Tensor, ...], tolerance: float, may_refuse: bool
) -> float:
    """Largest difference of a probability; raise for whatever makes the export wrong."""
    args, named = graph.arguments(inputs)
    before = graph.model_output(*args, **named)
    expected = graph.calibrate(*before)
    if expected.isnan().any():
        if may_refuse:
            return 0.0
        raise ValueError("torch itself gives NaN")
    output = run(inputs)
    if output.shape != expected.shape:
        raise ValueError(
            f"the shape is {tuple(output.shape)}, and {tuple(expected.shape)} with torch"
        )
    probs, wanted = _probs(graph, output), _probs(graph, expected)
    difference = _distance(probs, wanted, wanted)
    if difference > tolerance:
        difference = _distance(probs, *_rounding_range(graph, *before))
    if difference > tolerance:
        raise ValueError(
            f"probabilities differ from torch by {difference:.2g}, {tolerance:g} is allowed"
        )
    if graph.calibrator.keeps_argmax and (_top(graph, output) != _top(graph, expected)).any():
        raise ValueError("predicted classes differ from torch")
    return difference


def _probs(graph: ExportGraph, output: Tensor) -> Tensor:
    return output.double() if graph.probabilities else graph.softmax(output.double())


def _top(graph: ExportGraph, output: Tensor) -> Tensor:
    if graph.calibrator.classes == 1:
        return output > (0.5 if graph.probabilities else 0)
    return output.argmax(-1)


def _distance(probs: Tensor, low: Tensor, high: Tensor) -> float:
    """Largest distance of a probability from its range; NaN is infinitely far."""
    beyond = torch.maximum(low - probs, probs - high)
    return float(torch.where(beyond.isnan(), torch.inf, beyond).max())


def _rounding_range(
    graph: ExportGraph, logits: Tensor, features: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Smallest and largest probabilities that torch gives for logits with rounding errors.

    At a step of a method rounding decides which side is taken, and either side is right.
    """
    size = torch.where(logits.isfinite(), logits, 0).abs()
    if graph.calibrator.classes > 1:
        size = size.amax(-1, keepdim=True)
    step = ROUNDING * size.clamp(min=8)  # log-odds of small logits are several units too
    random = torch.Generator().manual_seed(0)
    noise = (2 * torch.rand(logits.shape, generator=random) - 1 for _ in range(NUDGES))
    low = high = _probs(graph, graph.calibrate(logits, features))
    # near ties become ties, then logits move at random
    for moved in ((logits / step).round() * step, *(logits + step * each for each in noise)):
        probs = _probs(graph, graph.calibrate(moved.to(logits.dtype), features))
        low, high = torch.minimum(low, probs), torch.maximum(high, probs)
    return low, high


# --------------------------------------------------------------------------------------- trials


def _trials(graph: ExportGraph) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Inputs to try, and their description."""
    if isinstance(graph.inner, CalibratedModel):
        example = tuple(graph.inputs.values())
        have = len(example[0])
        for rows in (1, have, 7, 64):
            yield (
                f"{rows} rows of the example",
                tuple(v[torch.arange(rows) % have] for v in example),
            )
        if graph.varying == 2:
            short = tuple(v[:, : (v.shape[1] + 1) // 2] for v in example)
            yield "half of the tokens of the example", short
        return
    calibrator, random = graph.calibrator, torch.Generator().manual_seed(1)
    most = max(8, min(1000, LARGEST_BATCH // calibrator.classes))
    for rows in (1, 2, 7, most):
        shape = (rows, 1 + rows % 5)[: graph.varying]
        yield f"a batch of {rows}", random_inputs(calibrator, shape, random)
    for trial, logits in _edge_cases(calibrator.classes, random):
        if graph.varying == 2:
            logits = logits[:, None]
        features = random_inputs(calibrator, logits.shape[: graph.varying], random)[1:]
        yield trial, (logits, *features)


def _edge_cases(classes: int, random: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Logits at the limits of what is legal, ``(rows, classes)`` or ``(rows,)``."""
    rows = torch.randn((16,) if classes == 1 else (16, classes), generator=random)
    if classes > 1:  # the first class leads in one row, the last in another
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
