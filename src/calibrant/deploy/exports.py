"""Export to ONNX and torch.export; a file is compared with its calibrator before it is kept."""

from __future__ import annotations

import copy
import inspect
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from calibrant._core.atomic_files import replacing
from calibrant._core.messages import needed
from calibrant._core.torch_models import evaluating, logits_of
from calibrant.artifacts import kind_of
from calibrant.artifacts.objects import MASKED, edge_cases, random_inputs
from calibrant.calibrators.base import Calibrator
from calibrant.deploy.calibrated_model import CalibratedModel, Layer, _fitted_calibrator

SUFFIXES = (".onnx", ".pt2")
"""Suffixes of the files that :func:`export` writes."""
_MAX_ONNX_BYTES = 1_900_000_000
"""Weights that fit into one ONNX file, whose limit is 2 GB."""
_MAX_BATCH_NUMBERS = 1 << 22
"""Numbers in the largest batch of a trial."""
_NUDGES, _ROUNDING = 17, 4 * torch.finfo(torch.float32).eps
"""Trials of logits with rounding errors at the steps of a method, and the errors' relative size."""

_Run = Callable[[tuple[Tensor, ...]], Tensor]


def export(
    calibrator: Calibrator | CalibratedModel,
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    example: Any = None,
    last_layer: Layer | None = None,
    tokens: bool = False,
    probabilities: bool = False,
    opset: int | None = None,
    tolerance: float = 1e-5,
) -> float:
    """Write a fitted calibrator, or a model with one behind it, as a file that needs no calibrant.

    The file is tried, ``.onnx`` with ONNX Runtime, before it gets its name: on batches of 1 to
    1000, large logits, ties, near ties and masked classes, or for a model on rows of its example.
    Nothing is written if a probability differs from the calibrator's by more than the tolerance,
    or if a predicted class that the method keeps differs.

    Parameters
    ----------
    calibrator : Calibrator or CalibratedModel
        Fitted; what :func:`calibrant.calibrated` returns holds the model as well.
    path : path
        With the suffix ``.onnx``, or ``.pt2`` for a program of ``torch.export``, which
        ``torch.export.load(path).module()`` runs.
    model, last_layer : optional
        As for :func:`calibrant.calibrated`.
    example : tensor, tuple of tensors, or dictionary of tensors by name
        Inputs of the model, a batch in the first dimension of each.
    tokens : bool
        Inputs have a second dimension of any size: ``(batch, tokens, ...)``.
    probabilities : bool
        Give probabilities instead of logits.
    opset : int, optional
        Version of the ONNX operators, 18 or newer; by default 20.
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
    The metadata have the ``kind``, the ``classes`` and the version of ``calibrant``; in a ``.pt2``
    file they are in its file ``calibrant.json``.

    Examples
    --------
    >>> import tempfile
    >>> from calibrant.calibrators import TemperatureScaling
    >>> logits = torch.tensor([[4.0, 0.0], [2.0, 0.0], [0.0, 6.0], [0.0, 2.0], [4.0, 2.0]])
    >>> fitted = TemperatureScaling().fit(logits, [0, 0, 1, 0, 1])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     difference = export(fitted, f"{folder}/calibrator.onnx")
    ...     same = export(fitted, f"{folder}/calibrator.pt2")
    ...     again = torch.export.load(f"{folder}/calibrator.pt2").module()
    >>> difference <= 1e-5, torch.equal(again(logits), fitted(logits))
    (True, True)
    """
    if isinstance(calibrator, CalibratedModel):
        model, last_layer = calibrator.model, calibrator.last_layer
        calibrator = calibrator.calibrator
    target = Path(path)
    if target.suffix not in SUFFIXES:
        raise ValueError(f"cannot write {target}: the suffix must be {' or '.join(SUFFIXES)}")
    if target.is_dir():
        raise ValueError(f"{target} is a folder: name a file")
    to_onnx = target.suffix == ".onnx"
    if to_onnx:
        with needed("ONNX export needs more libraries", "'calibrant[export]'"):
            import onnx  # noqa: F401
            import onnxruntime  # noqa: F401
            import onnxscript  # noqa: F401
    elif opset is not None:
        raise ValueError(f"opset is for .onnx files, got {target}")
    if opset is not None and opset < 18:  # the first that torch translates to
        raise ValueError(f"opset must be 18 or newer, got {opset}")
    graph = _Graph(calibrator, model, example, last_layer, tokens, probabilities)
    with replacing(target) as temporary, evaluating(graph):
        if to_onnx:
            run, runtime = _write_onnx(graph, temporary, opset or 20), "ONNX Runtime"
        else:
            run, runtime = _write_program(graph, temporary), "the saved program"
        return _check_export(graph, run, runtime, tolerance)


def _write_onnx(graph: _Graph, file: Path, opset: int) -> _Run:
    """Write an ONNX file, and return the function that runs it."""
    import onnxruntime

    size = sum(v.numel() * v.element_size() for v in (*graph.parameters(), *graph.buffers()))
    if size > _MAX_ONNX_BYTES:
        raise ValueError(
            f"the weights have {size / 1e9:.1f} GB and an ONNX file holds 2: export the calibrator "
            "without the model, or write a .pt2 file"
        )
    program = graph.program()
    with graph.explained("torch.onnx"), _quiet():
        converted = torch.onnx.export(
            _precise(program),
            dynamo=True,
            verbose=False,
            opset_version=opset,
            input_names=list(graph.inputs),
            output_names=["probs" if graph.probabilities else "calibrated"],
            dynamic_shapes=graph.dynamic_shapes("batch", "tokens"),
        )
    assert converted is not None
    converted.model.metadata_props.update(_metadata(graph.calibrator))
    converted.save(file, external_data=False)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])

    def run(inputs: tuple[Tensor, ...]) -> Tensor:
        arrays = {n: v.numpy() for n, v in zip(graph.inputs, inputs, strict=True)}
        return torch.from_numpy(session.run(None, arrays)[0])

    return run


def _write_program(graph: _Graph, file: Path) -> _Run:
    """Write a program of ``torch.export``, and return the function that runs it."""
    extra = {"calibrant.json": json.dumps(_metadata(graph.calibrator))}
    written = io.BytesIO()  # where torch writes to a file, a full disk ends the process
    with _quiet():
        torch.export.save(graph.program(), written, extra_files=extra)
    file.write_bytes(written.getbuffer())
    with file.open("rb") as read, _quiet():
        again = torch.export.load(read).module()

    def run(inputs: tuple[Tensor, ...]) -> Tensor:
        args, named = graph.arguments(inputs)
        output: Tensor = again(*args, **named)
        return output

    return run


# ------------------------------------------------------------------------------------- the graph


class _Graph(nn.Module):
    """A calibrator, with or without a model before it, as a graph with one output.

    ``inputs`` are examples, to be passed ``by_name`` or by position; the first ``varying``
    dimensions of each may have any size.
    """

    def __init__(
        self,
        calibrator: Calibrator,
        model: nn.Module | None,
        example: Any,
        last_layer: Layer | None,
        tokens: bool,
        probabilities: bool,
    ) -> None:
        super().__init__()
        calibrator = _fitted_calibrator(calibrator)
        if (model is None) != (example is None):
            raise ValueError("model and example belong together: pass both or neither")
        self.by_name, self.varying = isinstance(example, Mapping), 2 if tokens else 1
        self.probabilities = probabilities
        inner: Calibrator | CalibratedModel = calibrator
        if model is None:
            shape, random = (2, 3)[: self.varying], torch.Generator().manual_seed(0)
            values = random_inputs(calibrator, shape, random)
            self.inputs = dict(zip(("logits", "features"), values, strict=False))
        else:
            inner = CalibratedModel(model, calibrator, last_layer=last_layer)
            self.inputs = _example_inputs(example)
        on_cpu = all(v.device.type == "cpu" for v in (*inner.parameters(), *inner.buffers()))
        self.inner = inner if on_cpu else copy.deepcopy(inner).cpu()

        def forward(*values: Tensor, **named: Tensor) -> Tensor:
            return self.calibrate(*self.model_output(*values, **named))

        # for tracing torch needs a named argument for each input
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in self.inputs]
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward

    @property
    def calibrator(self) -> Calibrator:
        """Return the calibrator, also that behind a model."""
        return self.inner.calibrator if isinstance(self.inner, CalibratedModel) else self.inner

    def model_output(self, *values: Tensor, **named: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return logits and features before calibration."""
        if isinstance(self.inner, CalibratedModel):
            output, features = self.inner.model_output(*values, **named)
            return logits_of(output), features
        return values[0], values[1] if len(values) > 1 else None

    def calibrate(self, logits: Tensor, features: Tensor | None) -> Tensor:
        """Return calibrated logits or probabilities."""
        apply = self.inner.calibrate if isinstance(self.inner, CalibratedModel) else self.inner
        output: Tensor = apply(logits, features)
        return self.softmax(output) if self.probabilities else output

    def softmax(self, logits: Tensor) -> Tensor:
        """Return probabilities of logits."""
        each = self.calibrator.one_logit or self.calibrator.multilabel
        return logits.sigmoid() if each else logits.softmax(-1)

    def arguments(self, values: Iterable[Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Return values of all inputs as positional and named arguments of a call."""
        values = tuple(values)
        return ((), dict(zip(self.inputs, values, strict=True))) if self.by_name else (values, {})

    def dynamic_shapes(self, *dims: Any) -> dict[str, Any]:
        """Return the dimensions of any size of each input."""
        return {
            name: dict(enumerate(dims[: min(self.varying, value.ndim)]))
            for name, value in self.inputs.items()
        }

    def program(self) -> torch.export.ExportedProgram:
        """Return the traced graph."""
        if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7):
            raise ImportError(
                f"exports need PyTorch 2.7 or later, and this is {torch.__version__}: "
                "pip install 'calibrant[export]'"
            )
        args, named = self.arguments(self.inputs.values())
        shapes = self.dynamic_shapes(*[torch.export.Dim.DYNAMIC] * 2)
        with self.explained("torch.export"), _quiet(), torch.no_grad():
            return torch.export.export(self, args, named, dynamic_shapes=shapes, strict=False)

    @contextmanager
    def explained(self, exporter: str) -> Iterator[None]:
        """Name the model and the exporter in errors of torch."""
        try:
            yield
        except Exception as error:
            name = type(getattr(self.inner, "model", self.calibrator)).__name__
            cause = error.__cause__ or error  # the outer error is about torch
            lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
            message = f"{name} cannot be exported: {exporter} says {' '.join(lines[:2])!r}"
            raise ValueError(message) from error


def _example_inputs(example: Any) -> dict[str, Tensor]:
    inputs = {"input": example}
    if isinstance(example, Mapping):
        inputs = dict(example)
    elif isinstance(example, (tuple, list)):
        inputs = {f"input_{i}": value for i, value in enumerate(example)}
    values = inputs.values()
    if not values or not all(isinstance(v, Tensor) and v.ndim and len(v) for v in values):
        raise TypeError(
            "example must be a tensor, or a tuple or dictionary of tensors, with one row or more, "
            f"got {type(example).__name__}"
        )
    rows = {len(value) for value in values}
    if len(rows) > 1:
        raise ValueError(f"inputs in example must have the same number of rows, got {sorted(rows)}")
    copies = 2 if rows == {1} else 1  # torch would take a single row for a constant
    return {name: torch.cat([value.detach().cpu()] * copies) for name, value in inputs.items()}


def _metadata(calibrator: Calibrator) -> dict[str, str]:
    """Return method, classes and version, to be stored in the file."""
    from calibrant import __version__

    try:
        kind = kind_of(calibrator)
    except TypeError:  # a class of the user
        kind = type(calibrator).__name__
    names = calibrator.class_names_
    return {
        "kind": kind,
        "classes": str(calibrator.classes),
        **({} if names is None else {"class_names": json.dumps(names)}),
        "calibrant": __version__,
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings and log messages of torch."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


# ------------------------------------------------------------------------------------- trials


@torch.no_grad()
def _check_export(graph: _Graph, run: _Run, runtime: str, tolerance: float) -> float:
    """Return the largest difference of a probability in all trials that ``run`` the file."""
    worst = 0.0
    for trial, inputs in _trials(graph):
        try:
            worst = max(worst, _difference(graph, run, inputs, tolerance, trial == MASKED))
        except Exception as error:
            message = f"{runtime} fails on {trial}: {str(error).strip().splitlines()[0]}"
            raise ValueError(f"nothing was written: {message}") from error
    return worst


def _difference(
    graph: _Graph, run: _Run, inputs: tuple[Tensor, ...], tolerance: float, may_refuse: bool
) -> float:
    """Return the largest difference of a probability; raise if the export is wrong."""
    args, named = graph.arguments(inputs)
    before = graph.model_output(*args, **named)
    expected = graph.calibrate(*before)
    if expected.isnan().any():
        if may_refuse:
            return 0.0
        raise ValueError("torch itself gives NaN")
    output = run(inputs)
    got, shape = tuple(output.shape), tuple(expected.shape)
    if got != shape:
        raise ValueError(f"the shape is {got}, and {shape} with torch")
    probs, wanted = _probs(graph, output), _probs(graph, expected)
    difference = _distance(probs, wanted, wanted)
    if difference > tolerance:
        difference = _distance(probs, *_rounding_range(graph, *before))
    if difference > tolerance:
        limit = f"{tolerance:g} is allowed"
        raise ValueError(f"probabilities differ from torch by {difference:.2g}, {limit}")
    if graph.calibrator.keeps_argmax and (_top(graph, output) != _top(graph, expected)).any():
        raise ValueError("predicted classes differ from torch")
    return difference


def _probs(graph: _Graph, output: Tensor) -> Tensor:
    return output.double() if graph.probabilities else graph.softmax(output.double())


def _top(graph: _Graph, output: Tensor) -> Tensor:
    if graph.calibrator.one_logit:
        return output > (0.5 if graph.probabilities else 0)
    return output.argmax(-1)


def _distance(probs: Tensor, low: Tensor, high: Tensor) -> float:
    """Return the largest distance of a probability from its range; NaN is infinitely far."""
    beyond = torch.maximum(low - probs, probs - high)
    return float(torch.where(beyond.isnan(), torch.inf, beyond).max())


def _rounding_range(
    graph: _Graph, logits: Tensor, features: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest probabilities of torch for logits with rounding errors.

    At a step of a method rounding decides which side is taken, and either side is right.
    """
    size = torch.where(logits.isfinite(), logits, 0).abs()
    if graph.calibrator.classes > 1:
        size = size.amax(-1, keepdim=True)
    step = _ROUNDING * size.clamp(min=8)  # log-odds of small logits are several units too
    random = torch.Generator().manual_seed(0)
    low = high = _probs(graph, graph.calibrate(logits, features))
    moved = (logits / step).round() * step  # near ties become ties, then logits move at random
    for _ in range(_NUDGES):
        probs = _probs(graph, graph.calibrate(moved.to(logits.dtype), features))
        low, high = torch.minimum(low, probs), torch.maximum(high, probs)
        moved = logits + step * (2 * torch.rand(logits.shape, generator=random) - 1)
    return low, high


def _trials(graph: _Graph) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Yield descriptions of inputs to try, and the inputs."""
    if isinstance(graph.inner, CalibratedModel):
        example = tuple(graph.inputs.values())
        have = len(example[0])
        for rows in (1, have, 7, 64):
            index = torch.arange(rows) % have
            yield f"{rows} rows of the example", tuple(v[index] for v in example)
        if graph.varying == 2:
            short = tuple(v[:, : (v.shape[1] + 1) // 2] for v in example)
            yield "half of the tokens of the example", short
        return
    calibrator, random = graph.calibrator, torch.Generator().manual_seed(1)
    most = max(8, min(1000, _MAX_BATCH_NUMBERS // calibrator.classes))
    for rows in (1, 2, 7, most):
        shape = (rows, 1 + rows % 5)[: graph.varying]
        yield f"a batch of {rows}", random_inputs(calibrator, shape, random)
    for trial, logits in edge_cases(calibrator, random):
        if graph.varying == 2:
            logits = logits[:, None]
        features = random_inputs(calibrator, logits.shape[: graph.varying], random)[1:]
        yield trial, (logits, *features)


# ------------------------------------------------------------------------- precise operators

# ONNX has no log1p, expm1 and logaddexp; torch writes log(1 + x), exp(x) - 1 and
# log(exp(x) + exp(y)), which lose all digits near 0 and far from it. In ONNX Runtime the
# log-sum-exp of a row that begins with -inf underflows, that of many classes is rounded in the
# fifth digit, and small values of the sigmoid have few digits.


def _log1p(x: Tensor) -> Tensor:
    """Return log(1 + x); the quotient corrects the rounding of 1 + x (Kahan)."""
    up = 1 + x
    rounded = up - 1
    exact = (rounded == 0) | (up == torch.inf)
    return torch.where(exact, x, up.log() * (x / torch.where(exact, 1, rounded)))


def _expm1(x: Tensor) -> Tensor:
    """Return exp(x) - 1."""
    return (x / 2).tanh() * (x.exp() + 1)


def _logaddexp(x: Tensor, y: Tensor) -> Tensor:
    """Return log(exp(x) + exp(y))."""
    top = torch.maximum(x, y)
    apart = torch.where(top.abs() == torch.inf, 0, (x - y).abs())
    return torch.where(top.abs() == torch.inf, top, top + _log1p((-apart).exp()))


def _log_sum_exp(x: Tensor, dims: list[int], keepdim: bool = False) -> Tensor:
    """Return log(sum(exp(x))), by the log-softmax, which adds many classes more precisely."""
    for dim in dims:
        top = x.amax(dim, keepdim=True)
        total = top - x.log_softmax(dim).amax(dim, keepdim=True)
        x = torch.where(top.abs() == torch.inf, top, total)
    return x if keepdim else x.squeeze(dims)


def _sigmoid(x: Tensor) -> Tensor:
    small = (-x.abs()).exp()
    return torch.where(x >= 0, 1, small) / (1 + small)


_PRECISE: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.log1p.default: _log1p,
    torch.ops.aten.expm1.default: _expm1,
    torch.ops.aten.logaddexp.default: _logaddexp,
    torch.ops.aten.logsumexp.default: _log_sum_exp,
    torch.ops.aten.sigmoid.default: _sigmoid,
}
"""Replacements of operators."""


def _precise(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return the program with the replacements of operators."""
    graphs = [part.graph for part in program.graph_module.modules() if hasattr(part, "graph")]
    names = {_operator(node.target) for graph in graphs for node in graph.nodes}
    if names.isdisjoint(map(_operator, _PRECISE)):
        return program  # replacing nothing would take a quarter of the time of an export
    replaced: torch.export.ExportedProgram = program.run_decompositions(_PRECISE)
    return replaced


def _operator(target: Any) -> str:
    """Return the name of an operator, without the underscore of those in place."""
    return str(getattr(target, "__name__", target)).split(".")[0].rstrip("_")
