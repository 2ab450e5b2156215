"""Export to ONNX."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from calibrant._core.atomic_files import replacing
from calibrant._core.torch_models import evaluating
from calibrant.calibrators.base import Calibrator
from calibrant.deploy.export_check import TOLERANCE, check_export
from calibrant.deploy.export_graph import export_graph, export_target, metadata, quiet
from calibrant.retrain.maccal import MaCCal

OPSET = 20
OLDEST = 18
"""The first opset that torch translates to."""
LARGEST = 1_900_000_000
"""Bytes of weights that fit into one ONNX file, whose limit is 2 GB."""


def export_onnx(
    calibrator: Calibrator | MaCCal,
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    example: Any = None,
    last_layer: nn.Module | str | None = None,
    tokens: bool = False,
    probabilities: bool = False,
    opset: int = OPSET,
    tolerance: float = TOLERANCE,
) -> float:
    """Write a fitted calibrator, or a model with one behind it, to an ONNX file.

    The file is tried with ONNX Runtime before it gets its name: on batches of 1 to 1000, large
    logits, ties, near ties and masked classes, or for a model on rows of its example. If a
    probability differs from torch by more than the tolerance, or a predicted class that the
    method keeps differs, nothing is written.

    Parameters
    ----------
    calibrator : Calibrator
        Fitted.
    path : path
        With the suffix ``.onnx``.
    model : nn.Module, optional
        Put before the calibrator, as :func:`calibrant.calibrated` does.
    example : tensor, tuple of tensors, or dictionary of tensors by name
        Inputs of the model, a batch in the first dimension of each.
    last_layer : nn.Module or str, optional
        As for :func:`calibrant.calibrated`.
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
    if opset < OLDEST:
        raise ValueError(f"opset must be {OLDEST} or newer, got {opset}")
    graph = export_graph(calibrator, model, example, last_layer, tokens, probabilities)
    _check_size(graph)
    with replacing(export_target(path, ".onnx")) as temporary, evaluating(graph):
        program = graph.program()
        with graph.explained("torch.onnx"), quiet():
            converted = torch.onnx.export(
                program.run_decompositions(PRECISE),
                dynamo=True,
                verbose=False,
                opset_version=opset,
                input_names=list(graph.inputs),
                output_names=["probs" if probabilities else "calibrated"],
                dynamic_shapes=graph.dynamic_shapes("batch", "tokens"),
            )
        assert converted is not None
        converted.model.metadata_props.update(metadata(calibrator))
        converted.save(temporary, external_data=False)
        session = onnxruntime.InferenceSession(temporary, providers=["CPUExecutionProvider"])

        def run(inputs: tuple[Tensor, ...]) -> Tensor:
            arrays = {n: v.numpy() for n, v in zip(graph.inputs, inputs, strict=True)}
            return torch.from_numpy(session.run(None, arrays)[0])

        return check_export(graph, run, "ONNX Runtime", tolerance)


def _check_size(graph: nn.Module) -> None:
    size = sum(v.numel() * v.element_size() for v in (*graph.parameters(), *graph.buffers()))
    if size > LARGEST:
        raise ValueError(
            f"the weights have {size / 1e9:.1f} GB and an ONNX file holds 2: export the calibrator "
            "without the model, or write a .pt2 file"
        )


def _onnx_runtime() -> Any:
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"ONNX export needs more libraries ({error}): pip install 'calibrant[export]'"
        ) from error
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
