"""Fitted calibrators, alone or behind a model, as files that need no calibrant: ONNX and .pt2.

Needs onnx, onnxscript and onnxruntime for ONNX: ``pip install 'calibrant[export]'``.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from calibrant._models import evaluating, logits_of
from calibrant.calibrators.base import Calibrator
from calibrant.data.formats import replacing
from calibrant.deploy import CalibratedModel, check_fitted
from calibrant.io import kinds

TOLERANCE = 1e-5
"""Largest difference of a probability between the written file and the calibrator."""
OPSET = 20
OLDEST = 18
"""The first opset that torch translates to."""
LARGEST = 1_900_000_000
"""Bytes of weights that fit into one ONNX file, whose limit is 2 GB."""
TRIED = 1 << 22
"""Numbers in the largest batch that a file is tried with."""
MASKED = "masked classes"
NUDGES, NUDGE = 16, 4 * torch.finfo(torch.float32).eps
"""How often, and by how much of their size, logits are moved to see if a step is near."""


def export_onnx(
    calibrator: Calibrator,
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

    The file is tried with ONNX Runtime before it gets its name: batches of 1 to 1000, large
    logits, ties, near ties and masked classes, for a model the rows of its example. Where a
    probability differs from that of torch by more than the tolerance, or a predicted class that
    the method keeps is another, it is refused, and nothing is written.

    Parameters
    ----------
    calibrator : Calibrator
        Fitted.
    path : path
        Its suffix is ``.onnx``.
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
        The largest difference of a probability that was found.

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
    runtime = _onnx_runtime()
    if opset < OLDEST:
        raise ValueError(f"opset must be {OLDEST} or newer, got {opset}")
    subject = _subject(calibrator, model, example, last_layer, tokens, probabilities)
    size = sum(v.numel() * v.element_size() for v in subject.graph.state_dict().values())
    if size > LARGEST:
        raise ValueError(
            f"the weights have {size / 1e9:.1f} GB and an ONNX file holds 2: export the calibrator "
            "without the model, or write a .pt2 file"
        )
    target = _target(path, ".onnx")
    with replacing(target) as temporary, evaluating(subject.graph):
        program = subject.program()
        with subject.explained("torch.onnx"), _quiet():
            program = program.run_decompositions(PRECISE)
            converted = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                opset_version=opset,
                input_names=subject.names,
                output_names=["probs" if probabilities else "calibrated"],
                dynamic_shapes=subject.shapes("batch", "tokens"),
            )
        assert converted is not None
        converted.model.metadata_props.update(_about(calibrator))
        converted.save(temporary, external_data=False)
        session = runtime.InferenceSession(temporary, providers=["CPUExecutionProvider"])

        def run(inputs: tuple[Tensor, ...]) -> Tensor:
            given = {n: v.numpy() for n, v in zip(subject.names, inputs, strict=True)}
            return torch.from_numpy(session.run(None, given)[0])

        return _checked(subject, run, "ONNX Runtime", tolerance)


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


EXPORTS: dict[str, Callable[..., float]] = {".onnx": export_onnx, ".pt2": export_program}
"""How each suffix is written."""


# ----------------------------------------------------------------------------- what is exported


class _Graph(nn.Module):
    """A calibrator, with or without a model before it, that returns one tensor."""

    def __init__(self, inner: Calibrator | CalibratedModel, probabilities: bool) -> None:
        super().__init__()
        self.inner = inner
        self.probabilities = probabilities

    @property
    def calibrator(self) -> Calibrator:
        inner = self.inner
        return inner.calibrator if isinstance(inner, CalibratedModel) else inner

    def before(self, *inputs: Tensor, **named: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits and features that the calibrator is given."""
        if isinstance(self.inner, CalibratedModel):
            output, features = self.inner.outcome(*inputs, **named)
            return logits_of(output), features
        return inputs[0], inputs[1] if len(inputs) > 1 else None

    def after(self, logits: Tensor, features: Tensor | None) -> Tensor:
        """What the calibrator makes of them."""
        inner = self.inner
        apply = inner.calibrate if isinstance(inner, CalibratedModel) else inner
        found: Tensor = apply(logits, features)
        return self.probs(found) if self.probabilities else found

    def probs(self, logits: Tensor) -> Tensor:
        return logits.sigmoid() if self.calibrator._classes == 1 else logits.softmax(-1)


def _graph(inner: Calibrator | CalibratedModel, probabilities: bool, names: list[str]) -> _Graph:
    """A graph on the CPU whose inputs have names: torch cannot trace what takes any name."""

    def forward(self: _Graph, *inputs: Tensor, **named: Tensor) -> Tensor:
        return self.after(*self.before(*inputs, **named))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in ("self", *names)])
    forward.__signature__ = signature  # type: ignore[attr-defined]
    graph: _Graph = type("Graph", (_Graph,), {"forward": forward})(inner, probabilities)
    places = {value.device.type for value in graph.state_dict().values()}
    return graph if places <= {"cpu"} else copy.deepcopy(graph).cpu()


class _Subject(NamedTuple):
    """A graph, and example inputs by their names."""

    graph: _Graph
    inputs: tuple[Tensor, ...]
    names: list[str]
    by_name: bool  # whether the graph is called with names
    varying: int  # dimensions of any size, from the first on

    def given(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Values as arguments of a call, by position and by name."""
        return ((), dict(zip(self.names, values, strict=True))) if self.by_name else (values, {})

    def shapes(self, *dims: Any) -> dict[str, Any]:
        """What stands for the dimensions of any size, for each input."""
        return {
            name: dict(enumerate(dims[: min(self.varying, value.ndim)]))
            for name, value in zip(self.names, self.inputs, strict=True)
        }

    def program(self) -> torch.export.ExportedProgram:
        """The graph as torch traces it."""
        args, named = self.given(self.inputs)
        dynamic = torch.export.Dim.DYNAMIC
        with self.explained("torch.export"), _quiet(), torch.no_grad():
            return torch.export.export(
                self.graph,
                args,
                named,
                dynamic_shapes=self.shapes(dynamic, dynamic),
                strict=False,
            )

    @contextmanager
    def explained(self, by: str) -> Iterator[None]:
        """Turn what torch says of a model that it cannot export into an error that names both."""
        try:
            yield
        except Exception as error:
            what = type(getattr(self.graph.inner, "model", self.graph.calibrator)).__name__
            cause = error.__cause__ or error  # the one around it is about torch
            lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
            raise ValueError(
                f"{what} cannot be exported: {by} says {' '.join(lines[:2])!r}"
            ) from error


def _subject(
    calibrator: Calibrator,
    model: nn.Module | None,
    example: Any,
    last_layer: nn.Module | str | None,
    tokens: bool,
    probabilities: bool,
) -> _Subject:
    check_fitted(calibrator)
    if (model is None) != (example is None):
        raise ValueError("model and example belong together: give both or none of them")
    varying = 2 if tokens else 1
    if model is None:
        inputs = _random(calibrator, (2, 3)[:varying], torch.Generator().manual_seed(0))
        names = ["logits", "features"][: len(inputs)]
        return _Subject(_graph(calibrator, probabilities, names), inputs, names, False, varying)
    names, inputs, by_name = _example(example)
    whole = CalibratedModel(model, calibrator, last_layer=last_layer)
    return _Subject(_graph(whole, probabilities, names), inputs, names, by_name, varying)


def _example(example: Any) -> tuple[list[str], tuple[Tensor, ...], bool]:
    """Names of the inputs, the inputs, and whether the caller named them."""
    by_name = isinstance(example, Mapping)
    if isinstance(example, Tensor):
        names, values = ["input"], [example]
    elif by_name:
        names, values = list(example), list(example.values())
    elif isinstance(example, (tuple, list)):
        names, values = [f"input_{i}" for i in range(len(example))], list(example)
    else:
        names, values = [], []
    if not values or not all(isinstance(v, Tensor) and v.ndim and len(v) for v in values):
        raise TypeError(
            "example must be a tensor, or a tuple or dictionary of tensors, with one row or more, "
            f"got {type(example).__name__}"
        )
    if len({len(v) for v in values}) > 1:
        sizes = ", ".join(str(len(v)) for v in values)
        raise ValueError(f"inputs in example must have the same number of rows, got {sizes}")
    inputs = tuple(v.detach().cpu() for v in values)
    if len(inputs[0]) == 1:  # which torch would take for a constant
        inputs = tuple(torch.cat([v, v]) for v in inputs)
    return names, inputs, by_name


def _target(path: str | os.PathLike[str], suffix: str) -> Path:
    target = Path(path)
    if target.suffix != suffix:
        raise ValueError(f"cannot write {target}: the suffix must be {suffix}")
    if target.is_dir():
        raise ValueError(f"{target} is a folder: name a file")
    return target


def _about(calibrator: Calibrator) -> dict[str, str]:
    from calibrant import __version__

    known = {kind: name for name, kind in kinds().items()}
    kind = known.get(type(calibrator), type(calibrator).__name__)
    return {"kind": kind, "classes": str(int(calibrator.classes_)), "calibrant": __version__}


def _onnx_runtime() -> Any:
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"ONNX files need onnx, onnxscript and onnxruntime ({error}): pip install "
            "'calibrant[export]'"
        ) from error
    return onnxruntime


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep to itself what torch has to say about its own future and about other libraries."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


# --------------------------------------------------------------------------- what ONNX gets wrong

# It has no log1p, expm1 and logaddexp, and torch writes log(1 + x), exp(x) - 1 and
# log(exp(x) + exp(y)) for them, which have no digits left near 0 and none at all far from it. In
# ONNX Runtime the log-sum-exp of a row that begins with -inf underflows, that of many classes is
# rounded in the fifth digit, and small values of the sigmoid have few digits at all.


def _log1p(x: Tensor) -> Tensor:
    """log(1 + x); the quotient makes up for what 1 + x was rounded by (Kahan)."""
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
    """By the log-softmax, which adds up many classes with more care than a sum does."""
    for dim in dims:
        top = x.amax(dim, keepdim=True)
        found = top - x.log_softmax(dim).amax(dim, keepdim=True)
        x = torch.where(top.abs() == torch.inf, top, found)
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
"""Operators, and what is written for them."""


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
    one = graph.calibrator._classes == 1
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
    if graph.calibrator._classes == 1:
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
    most = max(8, min(1000, TRIED // calibrator._classes))
    for rows in (1, 2, 7, most):
        shape = (rows, 1 + rows % 5)[: subject.varying]
        yield f"a batch of {rows}", _random(calibrator, shape, random)
    for what, logits in _edges(calibrator._classes, random):
        if subject.varying == 2:
            logits = logits[:, None]
        rest = _random(calibrator, logits.shape[: subject.varying], random)[1:]
        yield what, (logits, *rest)


def _random(
    calibrator: Calibrator, shape: tuple[int, ...], random: torch.Generator
) -> tuple[Tensor, ...]:
    """Logits, and features where they are needed, of rows of a shape."""
    classes = calibrator._classes
    found = [3 * torch.randn(shape if classes == 1 else (*shape, classes), generator=random)]
    if calibrator.needs_features:
        found.append(torch.randn((*shape, _width(calibrator)), generator=random))
    return tuple(found)


def _width(calibrator: Calibrator) -> int:
    """Width of the features, which a calibrator within this one may know."""
    parts = (part for part in calibrator.modules() if isinstance(part, Calibrator))
    return max(part._width for part in parts)


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
