"""Export to ONNX and with torch.export."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from calibrant._core.atomic_files import replacing
from calibrant._core.optional import needed
from calibrant._core.torch_models import evaluating
from calibrant.calibrators.base import Calibrator
from calibrant.deploy import export_graph
from calibrant.deploy.attach import Layer
from calibrant.deploy.export_graph import TOLERANCE, ExportGraph, check_export, quiet

LARGEST = 1_900_000_000
"""Bytes of weights that fit into one ONNX file, whose limit is 2 GB."""


def export_onnx(
    calibrator: Calibrator,
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    example: Any = None,
    last_layer: Layer | None = None,
    tokens: bool = False,
    probabilities: bool = False,
    opset: int = 20,
    tolerance: float = TOLERANCE,
) -> float:
    """Write a fitted calibrator, or a model with one behind it, to an ONNX file.

    The file is tried with ONNX Runtime before it gets its name: on batches of 1 to 1000, large
    logits, ties, near ties and masked classes, or for a model on rows of its example. Nothing is
    written if a probability differs from torch by more than the tolerance, or if a predicted class
    that the method keeps differs.

    Parameters
    ----------
    calibrator : Calibrator
        Fitted.
    path : path
        With the suffix ``.onnx``.
    model, last_layer : optional
        As for :func:`calibrant.calibrated`.
    example : tensor, tuple of tensors, or dictionary of tensors by name
        Inputs of the model, a batch in the first dimension of each.
    tokens : bool
        Inputs have a second dimension of any size: ``(batch, tokens, ...)``.
    probabilities : bool
        Give probabilities instead of logits.
    opset : int
        Version of the operators, 18 or newer.
    tolerance : float

    Returns
    -------
    float
        The largest difference of a probability.

    Notes
    -----
    Inputs are ``logits`` in float32, ``(batch, classes)``, or ``(batch,)`` for log-odds, and
    ``features`` where the method needs them; those of a model have the names of the dictionary,
    or ``input``, or ``input_0``, ``input_1`` and so on. The output is ``calibrated``, or ``probs``.
    The metadata have the ``kind``, the ``classes`` and the version of ``calibrant``.

    Examples
    --------
    >>> import tempfile
    >>> from calibrant.calibrators import TemperatureScaling
    >>> logits = torch.tensor([[4.0, 0.0], [2.0, 0.0], [0.0, 6.0], [0.0, 2.0], [4.0, 2.0]])
    >>> fitted = TemperatureScaling().fit(logits, [0, 0, 1, 0, 1])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     difference = export_onnx(fitted, f"{folder}/calibrator.onnx")
    >>> difference <= 1e-5
    True
    """
    onnxruntime = _onnx_runtime()
    if opset < 18:  # the first that torch translates to
        raise ValueError(f"opset must be 18 or newer, got {opset}")
    graph = ExportGraph(calibrator, model, example, last_layer, tokens, probabilities)
    size = sum(v.numel() * v.element_size() for v in (*graph.parameters(), *graph.buffers()))
    if size > LARGEST:
        raise ValueError(
            f"the weights have {size / 1e9:.1f} GB and an ONNX file holds 2: export the calibrator "
            "without the model, or write a .pt2 file"
        )
    with replacing(export_graph.export_target(path, ".onnx")) as temporary, evaluating(graph):
        program = graph.program()
        with graph.explained("torch.onnx"), quiet():
            converted = torch.onnx.export(
                precise(program),
                dynamo=True,
                verbose=False,
                opset_version=opset,
                input_names=list(graph.inputs),
                output_names=["probs" if probabilities else "calibrated"],
                dynamic_shapes=graph.dynamic_shapes("batch", "tokens"),
            )
        assert converted is not None
        converted.model.metadata_props.update(export_graph.metadata(calibrator))
        converted.save(temporary, external_data=False)
        session = onnxruntime.InferenceSession(temporary, providers=["CPUExecutionProvider"])

        def run(inputs: tuple[Tensor, ...]) -> Tensor:
            arrays = {n: v.numpy() for n, v in zip(graph.inputs, inputs, strict=True)}
            return torch.from_numpy(session.run(None, arrays)[0])

        return check_export(graph, run, "ONNX Runtime", tolerance)


def export_program(
    calibrator: Calibrator,
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    example: Any = None,
    last_layer: Layer | None = None,
    tokens: bool = False,
    probabilities: bool = False,
    tolerance: float = TOLERANCE,
) -> float:
    """Write a fitted calibrator, or a model with one behind it, as a program of ``torch.export``.

    ``torch.export.load(path).module()`` runs it, without calibrant. Parameters, checks, inputs and
    outputs are as for :func:`export_onnx`, but the suffix of ``path`` is ``.pt2``. The metadata are
    in the file ``calibrant.json`` of the archive.

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
    graph = ExportGraph(calibrator, model, example, last_layer, tokens, probabilities)
    with replacing(export_graph.export_target(path, ".pt2")) as temporary, evaluating(graph):
        program = graph.program()
        extra = {"calibrant.json": json.dumps(export_graph.metadata(calibrator))}
        written = io.BytesIO()  # where torch writes to a file, a full disk ends the process
        with quiet():
            torch.export.save(program, written, extra_files=extra)
        temporary.write_bytes(written.getbuffer())
        with temporary.open("rb") as read, quiet():
            again = torch.export.load(read).module()

        def run(inputs: tuple[Tensor, ...]) -> Tensor:
            args, named = graph.arguments(inputs)
            output: Tensor = again(*args, **named)
            return output

        return check_export(graph, run, "the saved program", tolerance)


def _onnx_runtime() -> Any:
    with needed("ONNX export needs more libraries", "'calibrant[export]'"):
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    return onnxruntime


# ------------------------------------------------------------------------- precise operators

# ONNX has no log1p, expm1 and logaddexp; torch writes log(1 + x), exp(x) - 1 and
# log(exp(x) + exp(y)), which lose all digits near 0 and far from it. In ONNX Runtime the
# log-sum-exp of a row that begins with -inf underflows, that of many classes is rounded in the
# fifth digit, and small values of the sigmoid have few digits.


def _log1p(x: Tensor) -> Tensor:
    """log(1 + x); the quotient corrects the rounding of 1 + x (Kahan)."""
    up = 1 + x
    rounded = up - 1
    exact = (rounded == 0) | (up == torch.inf)
    return torch.where(exact, x, up.log() * (x / torch.where(exact, 1, rounded)))


def _expm1(x: Tensor) -> Tensor:
    """exp(x) - 1."""
    return (x / 2).tanh() * (x.exp() + 1)


def _logaddexp(x: Tensor, y: Tensor) -> Tensor:
    """log(exp(x) + exp(y))."""
    top = torch.maximum(x, y)
    apart = torch.where(top.abs() == torch.inf, 0, (x - y).abs())
    return torch.where(top.abs() == torch.inf, top, top + _log1p((-apart).exp()))


def _log_sum_exp(x: Tensor, dims: list[int], keepdim: bool = False) -> Tensor:
    """log(sum(exp(x))), by the log-softmax, which adds many classes more precisely."""
    for dim in dims:
        top = x.amax(dim, keepdim=True)
        total = top - x.log_softmax(dim).amax(dim, keepdim=True)
        x = torch.where(top.abs() == torch.inf, top, total)
    return x if keepdim else x.squeeze(dims)


def _sigmoid(x: Tensor) -> Tensor:
    small = (-x.abs()).exp()
    return torch.where(x >= 0, 1, small) / (1 + small)


PRECISE: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.log1p.default: _log1p,
    torch.ops.aten.expm1.default: _expm1,
    torch.ops.aten.logaddexp.default: _logaddexp,
    torch.ops.aten.logsumexp.default: _log_sum_exp,
    torch.ops.aten.sigmoid.default: _sigmoid,
}
"""Replacements of operators."""


def precise(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return the program with the replacements of operators."""
    graphs = [part.graph for part in program.graph_module.modules() if hasattr(part, "graph")]
    names = {_operator(node.target) for graph in graphs for node in graph.nodes}
    if names.isdisjoint(map(_operator, PRECISE)):
        return program  # replacing nothing would take a quarter of the time of an export
    replaced: torch.export.ExportedProgram = program.run_decompositions(PRECISE)
    return replaced


def _operator(target: Any) -> str:
    """Return the name of an operator, without the underscore of those in place."""
    return str(getattr(target, "__name__", target)).split(".")[0].rstrip("_")
