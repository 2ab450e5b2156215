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
from calibrant.deploy.export_check import TOLERANCE, _checked
from calibrant.deploy.export_graph import _about, _quiet, _subject, _target


def export_program(
    calibrator: Calibrator,
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

    ``torch.export.load(path).module()`` runs it, without calibrant. All else is as for
    :func:`export_onnx`; the metadata are in the file ``calibrant.json`` of the archive.

    Parameters
    ----------
    calibrator, model, example, last_layer, tokens, probabilities, tolerance
        As for :func:`export_onnx`.
    path : path
        Its suffix is ``.pt2``.

    Returns
    -------
    float
        The largest difference of a probability that was found.

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
    subject = _subject(calibrator, model, example, last_layer, tokens, probabilities)
    target = _target(path, ".pt2")
    with replacing(target) as temporary, evaluating(subject.graph):
        program = subject.program()
        about = {"calibrant.json": json.dumps(_about(calibrator))}
        # as open files, since torch looks at the suffix of a path
        with temporary.open("wb") as written, _quiet():
            torch.export.save(program, written, extra_files=about)
        with temporary.open("rb") as read, _quiet():
            again = torch.export.load(read).module()

        def run(inputs: tuple[Tensor, ...]) -> Tensor:
            args, named = subject.given(inputs)
            found: Tensor = again(*args, **named)
            return found

        return _checked(subject, run, "the saved program", tolerance)
