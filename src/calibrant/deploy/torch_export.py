"""Export with torch.export."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from torch import Tensor, nn

from calibrant._core.atomic_files import replacing
from calibrant._core.torch_models import evaluating
from calibrant.calibrators.base import Calibrator
from calibrant.deploy.export_check import TOLERANCE, check_export
from calibrant.deploy.export_graph import export_graph, export_target, metadata, quiet
from calibrant.retrain.maccal import MaCCal


def export_program(
    calibrator: Calibrator | MaCCal,
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    example: Any = None,
    last_layer: nn.Module | str | None = None,
    tokens: bool = False,
    probabilities: bool = False,
    tolerance: float = TOLERANCE,
) -> float:
    """Write a fitted calibrator, or a model with one behind it, as a program of ``torch.export``.

    ``torch.export.load(path).module()`` runs it, without calibrant. Checks, inputs and outputs are
    as for :func:`export_onnx`; the metadata are in the file ``calibrant.json`` of the archive.

    Parameters
    ----------
    calibrator, model, example, last_layer, tokens, probabilities, tolerance
        As for :func:`export_onnx`.
    path : path
        With the suffix ``.pt2``.

    Returns
    -------
    float
        The largest difference of a probability.

    Examples
    --------
    >>> import tempfile
    >>> from calibrant.calibrators import TemperatureScaling
    >>> logits = torch.tensor([[4.0, 0.0], [2.0, 0.0], [0.0, 6.0], [0.0, 2.0], [4.0, 2.0]])
    >>> fitted = TemperatureScaling().fit(logits, [0, 0, 1, 0, 1])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     difference = export_program(fitted, f"{folder}/calibrator.pt2")
    ...     again = torch.export.load(f"{folder}/calibrator.pt2").module()
    >>> torch.equal(again(logits), fitted(logits))
    True
    """
    graph = export_graph(calibrator, model, example, last_layer, tokens, probabilities)
    with replacing(export_target(path, ".pt2")) as temporary, evaluating(graph):
        program = graph.program()
        extra = {"calibrant.json": json.dumps(metadata(calibrator))}
        # as open files, since torch looks at the suffix of a path
        with temporary.open("wb") as written, quiet():
            torch.export.save(program, written, extra_files=extra)
        with temporary.open("rb") as read, quiet():
            again = torch.export.load(read).module()

        def run(inputs: tuple[Tensor, ...]) -> Tensor:
            args, named = graph.arguments(inputs)
            output: Tensor = again(*args, **named)
            return output

        return check_export(graph, run, "the saved program", tolerance)
