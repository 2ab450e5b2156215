"""Checked examples, and their chunks: runs of rows that fit the cache, on one thread per core.

Nothing of the size of the logits is allocated, so memory-mapped and half-precision arrays are read
like any others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calibrant._core import checks
from calibrant._core.checks import IGNORED, FloatArray, IntArray, Logits, Values
from calibrant._core.class_names import without_frames

T = TypeVar("T")

# torch 2.4 has none for mps, and refuses to be asked
AUTOCAST_DEVICES = [
    kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind)
]

# Probability that is compared with an event: the largest, and whether its class is the label; that
# of class 1 of two; or of every cell of (..., tags) logits, each a binary problem of its own.
Estimand = Literal["top_label", "binary", "multilabel"]
# "auto" is "binary" for two classes and "top_label" for more
EstimandChoice = Literal["top_label", "binary", "multilabel", "auto"]
# elements of logits in a chunk: four megabytes of float64 stay in a core's share of the last cache,
# and calls for smaller ones take as long as the work; a GPU waits for calls unless they do much
CHUNK_SIZE = {"cpu": 1 << 19, "cuda": 1 << 25}
# elements of logits that stay in the cache of one core through many operations
_BLOCK_SIZE = 1 << 16
_RUN_LENGTH = 4096  # examples in a run, where each has some tens of numbers
MASKED_GAP = 1e8
"""A class so far below the largest logit of its row is masked, as one at -inf is: -1e9, -1e30 and
the lowest number of a dtype are written for that, and no temperature makes it possible."""


class Examples(NamedTuple):
    """Checked input: ``logits`` of any shape over flat ``labels`` and ``weight`` ``(n,)``."""

    logits: Logits
    labels: IntArray
    weight: FloatArray | None
    estimand: Estimand
    probs: Logits | None = None  # as stated, where the logits are their logarithms

    @property
    def one_logit(self) -> bool:
        """True if each number is a problem of its own: the log-odds z stand for (0, z)."""
        return self.logits.ndim == 1 or self.estimand == "multilabel"

    @property
    def device(self) -> torch.device:
        """Device of the logits; arrays are on the CPU."""
        return self.logits.device if isinstance(self.logits, Tensor) else torch.device("cpu")

    @property
    def classes(self) -> int:
        """Number of classes; two where there is one logit."""
        return 2 if self.one_logit else int(self.logits.shape[-1])

    @property
    def columns(self) -> int:
        """Number of one-vs-rest problems: the tags where there are several, else the classes."""
        return int(self.logits.shape[-1]) if self.estimand == "multilabel" else self.classes

    @property
    def event(self) -> int | None:
        """Class whose probability is compared with the labels; None for the predicted one."""
        return None if self.estimand == "top_label" else 1

    def stated(self, number: IntArray) -> FloatArray | None:
        """Return probabilities ``(rows, classes)`` as they came in, exactly; None for logits."""
        if self.probs is None:
            return None
        width = 1 if self.one_logit else self.classes
        exact = np.minimum(checks.as_float64(self.probs.reshape(-1, width)[number]), 1)
        return np.concatenate([1 - exact, exact], -1) if self.one_logit else exact

    def labelled_weight(self) -> FloatArray | None:
        """Return the weights of the labelled examples."""
        return None if self.weight is None else self.weight[self.labels != IGNORED]

    def scale_free(self) -> Examples:
        """Return these with weights that are 1 on average, so that only their ratios matter."""
        weight = self.labelled_weight()
        if self.weight is None or weight is None or not weight.size:
            return self
        return self._replace(weight=self.weight / weight.mean())

    def take(self, which: IntArray) -> Examples:
        """Return the labelled examples of an index, as a flat copy of these alone."""
        rows = np.flatnonzero(self.labels != IGNORED)[which]
        weight = None if self.weight is None else self.weight[rows]
        logits = picked(self.logits, rows, flat=self.one_logit)
        return Examples(logits, self.labels[rows], weight, self.estimand)


def picked(values: Logits, rows: IntArray, *, flat: bool = False) -> Logits:
    """Return rows of values ``(..., width)``, or of ``flat`` ones, without copying the others."""
    shape = values.shape if flat else values.shape[:-1]
    index = np.unravel_index(rows, tuple(shape))
    if isinstance(values, Tensor):
        return values[tuple(torch.from_numpy(i).to(values.device) for i in index)]
    return values[index]


def resolve_estimand(choice: EstimandChoice, classes: int) -> Estimand:
    """Return the estimand that a choice means for this number of classes.

    >>> resolve_estimand("auto", 2), resolve_estimand("auto", 3), resolve_estimand("top_label", 2)
    ('binary', 'top_label', 'top_label')
    """
    if choice != "auto":
        return choice
    return "binary" if classes == 2 else "top_label"


def examples(
    logits: Values,
    labels: Values,
    weight: Values | None = None,
    estimand: EstimandChoice = "top_label",
    *,
    name: str = "logits",
) -> Examples:
    """Check logits ``(..., classes)``, labels ``(...)`` and weights against each other.

    Errors call the logits by a ``name``, which is ``"probs"`` for logarithms of these.
    """
    checks.check_order(logits, labels)
    labels, logits = without_frames(labels, logits)
    scores, targets = checks.as_scores(logits), checks.as_labels(labels)
    checks.check_choice("estimand", estimand, get_args(EstimandChoice))
    classes = int(scores.shape[-1]) if scores.ndim > 1 else 2
    checked = Examples(scores, targets, None, resolve_estimand(estimand, classes))
    if not checked.one_logit:
        checks.check_shapes(scores, targets, name)
    elif tuple(scores.shape) != targets.shape:
        if estimand == "multilabel":
            remedy = "each tag of a row has a label of its own, 0 or 1"
        elif scores.shape[:1] != targets.shape[:1]:
            remedy = "the lengths differ; pass the labels of the same examples"
        else:
            of_one = "P(y = 1)" if name == "probs" else "log-odds"
            remedy = f"(n,) {name} are {of_one}, and have one label each"
        raise ValueError(
            f"{name} and labels must have the same shape, got {tuple(scores.shape)} and "
            f"{targets.shape}: {remedy}"
        )
    wanted = ""
    if estimand == "multilabel" and scores.ndim < 2:
        wanted = "multilabel logits must be (..., tags)"
        remedy = 'one logit per example is estimand="binary"'
    elif estimand == "binary" and checked.classes > 2:
        wanted = "the binary estimand needs (n,) or (n, 2) logits"
        remedy = "use calibrant.metrics.one_vs_rest(logits, labels, k=...) for one class of several"
    elif checked.classes < 2:
        wanted = "logits must have at least two classes"
        remedy = "one column of log-odds goes in as logits.squeeze(-1)"
    if wanted:
        raise ValueError(f"{wanted}, got {tuple(scores.shape)}: {remedy}")
    checks.check_labels(targets, checked.classes)
    if weight is None:
        return checked._replace(labels=targets.reshape(-1))
    weights = checks.as_weight(weight, targets.shape)
    flat = np.where(weights > 0, targets.reshape(-1), IGNORED)  # weight zero: as if not there
    return checked._replace(labels=flat, weight=weights)


def thread_ranges(examples: Examples) -> list[tuple[int, int]]:
    """Return (start, stop) of one run of rows per core; one run for a GPU, or for little work."""
    on_cpu = not isinstance(examples.logits, Tensor) or examples.logits.device.type == "cpu"
    worth_it = math.prod(examples.logits.shape) >= 4 * CHUNK_SIZE["cpu"]
    if not (on_cpu and worth_it):
        return [(0, examples.labels.size)]
    cuts = np.linspace(0, examples.labels.size, torch.get_num_threads() + 1).astype(int)
    return [(int(a), int(b)) for a, b in pairwise(cuts)]


def on_threads(task: Callable[..., T], *arguments: Sequence[Any], always: bool = False) -> list[T]:
    """Call ``task`` on a thread for each set of arguments; one set needs none unless ``always``."""
    if len(arguments[0]) == 1 and not always:
        return [task(*(column[0] for column in arguments))]
    before = torch.get_num_threads()
    # Small operations on several OpenMP threads collapse when the cores are shared, so each
    # worker runs on one. torch keeps the last number set for threads to come: put it back.
    try:
        with ThreadPoolExecutor(len(arguments[0]), "", torch.set_num_threads, (1,)) as pool:
            return list(pool.map(task, *arguments))
    finally:
        torch.set_num_threads(before)


def in_blocks(
    call: Callable[[Tensor, Tensor | None], Tensor],
    logits: Tensor,
    features: Tensor | None,
    *,
    one_logit: bool = False,
) -> Tensor:
    """Return what ``call`` makes of rows of logits ``(..., classes)``, or log-odds, in their shape.

    ``call`` gets rows ``(n, classes)``, or ``(n,)``, and features ``(n, width)``. On the CPU,
    blocks of rows stay in the cache through all operations, on a thread for each core; elsewhere
    they bound the memory. Nothing has a gradient.
    """
    shape, on_cpu = logits.shape, logits.device.type == "cpu"
    logits = logits.reshape(-1) if one_logit else logits.reshape(-1, shape[-1])
    features = None if features is None else features.reshape(-1, features.shape[-1])
    step = max(1, (_BLOCK_SIZE if on_cpu else CHUNK_SIZE["cuda"]) // math.prod(logits.shape[1:]))
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if len(logits) <= step:
        with torch.no_grad():
            return call(logits, features).to(dtype).reshape(shape)
    result = torch.empty_like(logits, dtype=dtype)
    inference = torch.is_inference_mode_enabled()  # of this thread alone

    def task(start: int, stop: int) -> None:
        with torch.inference_mode() if inference else torch.no_grad():
            for first in range(start, stop, step):
                rows = slice(first, min(first + step, stop))
                result[rows] = call(logits[rows], None if features is None else features[rows])

    workers = torch.get_num_threads() if on_cpu and len(logits) >= 4 * step else 1
    cuts = np.linspace(0, len(logits), workers + 1).astype(int).tolist()
    on_threads(task, cuts[:-1], cuts[1:])
    return result.reshape(shape)


def worth_blocks(
    logits: Tensor, features: Tensor | None = None, parameters: Iterable[Tensor] = ()
) -> bool:
    """Return True for large logits on the CPU where nothing needs a gradient or is in a graph."""
    if not plain_on_cpu(logits) or logits.numel() < 4 * _BLOCK_SIZE or not logits.is_contiguous():
        return False
    some = [logits, *parameters, *([] if features is None else [features])]
    return not (torch.is_grad_enabled() and any(values.requires_grad for values in some))


class LabelledRows(NamedTuple):
    """Labelled rows that fit the cache."""

    logits: Tensor  # (rows, classes)
    labels: Tensor  # (rows,)
    weight: Tensor | None  # (rows,)
    column: Tensor | None  # (rows,) the tag of each cell of multi-label logits
    number: IntArray  # (rows,) numbers of the rows in the input
    bounded: bool  # no logit is masked, infinite or NaN


def labelled_chunks(examples: Examples, start: int, stop: int) -> Iterator[LabelledRows]:
    """Yield the labelled rows between ``start`` and ``stop``."""
    width = 1 if examples.one_logit else examples.classes
    for first, values in raw_chunks(examples.logits, width, start, stop):
        number = np.arange(first, first + len(values))
        own = examples.labels[first : first + len(values)].copy()  # may be read-only
        kept = own != IGNORED
        if not kept.all():  # before anything is copied
            number, own = number[kept], own[kept]
            values = values[torch.from_numpy(kept) if isinstance(values, Tensor) else kept]
        chunk = _logits_of_classes(examples, values)
        reach, gap = range_of(chunk), mask_gap(values)
        if reach >= gap:  # rarely, and then row by row
            chunk = with_masks(chunk, gap)
        labels = torch.from_numpy(own).to(chunk.device)
        weight = column = None
        if examples.weight is not None:
            weight = torch.from_numpy(examples.weight[number]).to(chunk.device)
        if examples.estimand == "multilabel":
            column = torch.from_numpy(number % examples.columns).to(chunk.device)
        yield LabelledRows(chunk, labels, weight, column, number, reach < gap)


def _logits_of_classes(examples: Examples, values: Logits) -> Tensor:
    """Return raw rows as logits ``(rows, classes)``: log-odds z as (0, z)."""
    chunk = as_tensor(values)
    return torch.cat([torch.zeros_like(chunk), chunk], -1) if examples.one_logit else chunk


def chunk_slices(values: NDArray[Any] | Tensor) -> list[slice]:
    """Return slices of examples whose few numbers each stay in a core's cache; one for a GPU."""
    on_cpu = not isinstance(values, Tensor) or values.device.type == "cpu"
    step = _RUN_LENGTH if on_cpu else max(len(values), 1)
    return [slice(i, i + step) for i in range(0, len(values), step)]


def namespace(values: Any) -> Any:
    """Return the module whose functions take an array: NumPy, or torch for a tensor."""
    return torch if isinstance(values, Tensor) else np


def raw_chunks(
    logits: Logits, width: int, start: int, stop: int, first: int = 0
) -> Iterator[tuple[int, Logits]]:
    """Yield runs ``(rows, width)`` between ``start`` and ``stop``, each with its first number."""
    # Leading dimensions are descended into rather than flattened: flattening a view whose classes
    # were moved to the end would copy all of it.
    inner = math.prod(logits.shape[1:]) // width  # rows per index of the first dimension
    if inner == 0:
        return
    device = logits.device.type if isinstance(logits, Tensor) else "cpu"
    step = CHUNK_SIZE.get(device, CHUNK_SIZE["cpu"]) // (inner * width)
    low = max(0, (start - first) // inner)
    high = min(len(logits), -((first - stop) // inner))
    if step == 0 and inner > 1:
        for i in range(low, high):
            yield from raw_chunks(logits[i], width, start, stop, first + i * inner)
        return
    for i in range(low, high, max(step, 1)):
        at = first + i * inner
        rows = logits[i : min(i + max(step, 1), high)].reshape(-1, width)
        yield max(at, start), rows[max(0, start - at) : stop - at]


def as_tensor(values: Logits) -> Tensor:
    """Return a chunk as a tensor of single precision at least, to be read only.

    It shares the memory of the values where that is possible: copies cost as much as other passes.
    It is on their device or, since what is computed of it needs float64, on the CPU.
    """
    if not isinstance(values, Tensor):
        exact = np.float32 if values.dtype == np.float16 else np.float64
        wanted = values.dtype if values.dtype == np.float32 else exact
        native = np.dtype(wanted).newbyteorder("=")
        # torch does not take read-only or foreign-endian memory, nor every order of it
        shared = values.flags.carray and values.dtype == native
        return torch.from_numpy(values if shared else np.array(values, dtype=native))
    chunk = values.detach()
    chunk = chunk if has_float64(chunk.device) else chunk.cpu()
    return chunk.float() if chunk.dtype.itemsize < 4 else chunk


@cache
def has_float64(device: torch.device) -> bool:
    """Return False for devices that compute in single precision only, as Apple's and many NPUs."""
    if device.type in ("cpu", "cuda"):
        return True
    try:
        torch.ones(1, dtype=torch.float64, device=device).exp()
    except (RuntimeError, TypeError):
        return False
    return True


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on a device, in single precision if that has no float64."""
    wide = tensor.dtype != torch.float64 or has_float64(device)
    return (tensor if wide else tensor.float()).to(device)


def mask_gap(logits: Logits) -> float:
    """Return the gap from which a class is masked: 1e8, or half of all that a float16 can hold."""
    return min(MASKED_GAP, float(checks.float_info(logits).max) / 2)


def with_masks(logits: Tensor, gap: float) -> Tensor:
    """Return logits ``(..., classes)`` with -inf where they are ``gap`` below their row's largest.

    >>> with_masks(torch.tensor([[2.0, -1e9, 0.0]]), MASKED_GAP)
    tensor([[2., -inf, 0.]])
    """
    if has_numbers(logits) and range_of(logits) < gap:  # in less time than the masks take
        return logits
    return torch.where(logits.amax(-1, keepdim=True) - logits >= gap, -torch.inf, logits)


def range_of(logits: Tensor) -> float:
    """Return the largest difference of all logits; infinite or NaN where one of them is."""
    if logits.numel() == 0:
        return 0.0
    low, high = logits.detach().aminmax()
    return float(high - low)


def exponential(values: Tensor) -> Tensor:
    """Overwrite values of float64 by their exponentials, and return them."""
    if values.device.type != "cpu":
        return values.exp_()
    with np.errstate(all="ignore"):
        np.exp(values.numpy(), out=values.numpy())  # takes less than half of the time of torch
    return values


def explained(examples: Examples, at: int) -> ValueError:
    """Return the error for the labelled row at a number."""
    width = 1 if examples.one_logit else examples.classes
    _, values = next(raw_chunks(examples.logits, width, at, at + 1))
    row = _logits_of_classes(examples, values)[0]
    return checks.bad_row(row, int(examples.labels[at]), at)


def joined(parts: Sequence[tuple[NDArray[Any], ...]]) -> list[NDArray[Any]]:
    """Concatenate the arrays of several parts, column by column."""
    if len(parts) == 1:
        return list(parts[0])
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def rounds() -> bool:
    """Return True if torch would compute in half precision unless told otherwise."""
    return (
        any(map(torch.is_autocast_enabled, AUTOCAST_DEVICES))
        or torch.get_default_dtype().itemsize < 4
    )


@contextmanager
def full_precision() -> Iterator[None]:
    """Switch off settings of the caller that change numbers, or make them errors.

    That is ``torch.autocast``, since what it rounds is lost for probabilities, another default
    dtype than float32, which is one for the whole process, and errors of NumPy for underflow.
    """
    default = torch.get_default_dtype()
    with ExitStack() as stack:
        for kind in filter(torch.is_autocast_enabled, AUTOCAST_DEVICES):
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(np.errstate(under="ignore"))
        if default != torch.float32:
            stack.callback(torch.set_default_dtype, default)
            torch.set_default_dtype(torch.float32)
        yield


def top_class(logits: Tensor) -> Tensor:
    """Return the class ``(..., 1)`` of the largest logit of each row, the first of equals."""
    if not plain_on_cpu(logits):
        return logits.argmax(-1, keepdim=True)
    values = logits.detach().numpy()  # NumPy is several times faster, but slow on short rows
    if values.shape[-1] == 2:
        first, second = values[..., 0], values[..., 1]
        top = ((second > first) | np.isnan(second)).astype(np.int64)
    else:
        top = values.argmax(-1)
    return torch.from_numpy(np.asarray(top))[..., None]


def leading(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest logits ``(..., count)`` of each row in descending order, and classes."""
    # torch keeps a heap while the rows are this much longer, and sorts pairs otherwise
    if not plain_on_cpu(logits) or logits.shape[-1] >= 64 * count:
        return logits.topk(count, dim=-1)
    order = torch.from_numpy(logits.detach().numpy().argsort(-1)[..., -count:].copy()).flip(-1)
    return logits.gather(-1, order), order


def plain_on_cpu(logits: Tensor) -> bool:
    """Return True for tensors that NumPy can read, but not while a graph is recorded."""
    return logits.device.type == "cpu" and has_numbers(logits)


def has_numbers(logits: Tensor) -> bool:
    """Return True for tensors on which the next step may depend: none that a graph stands for."""
    kind = logits.device.type
    if type(logits) is not Tensor or kind == "meta":
        return False
    if kind == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    if torch.compiler.is_compiling() or tracing:  # or exporting
        return False
    # within torch.vmap a tensor stands for many and has no numbers
    return not torch._C._are_functorch_transforms_active()
