"""Examples in every form that metrics take, reduced to pairs and scores in one pass.

The softmax of chunks of rows that fit the cache is computed in float64, on one thread per core;
probabilities are taken exactly as they are stated.
Nothing of the size of the logits is allocated, so memory-mapped and half-precision arrays are
measured as exactly as any other, and the result does not depend on the cut into chunks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from inspect import Parameter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypedDict, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calibrant._core import checks, chunks
from calibrant._core.binning import Bins, equal_mass_edges, fill, uniform_edges
from calibrant._core.checks import BoolArray, FloatArray, Values
from calibrant._core.chunks import Estimand, EstimandChoice, Examples, LabelledRows, top_class
from calibrant._core.class_names import without_frames
from calibrant._core.probs import logits_from_probs
from calibrant.metrics.classwise import ClassBins
from calibrant.metrics.reliability import Reliability, reliability_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

FORMS = "(logits, labels), (probs=..., labels=...) or (confidence=..., outcome=...)"
ESTIMANDS: dict[Estimand, str] = {
    "top_label": "the predicted class",
    "binary": "P(y = 1)",
    "multilabel": "every tag",
}
"""Estimands in words."""
F = TypeVar("F", bound=Callable[..., Any])
Input: TypeAlias = Values | None
"""Logits, probabilities or labels in a call that may have them in another form."""


class Layout(TypedDict, total=False):
    """Keyword arguments that say how logits or probs and their labels are laid out."""

    class_dim: int | None  # dimension of the classes, where it is not the last
    ignore_index: int | None  # a label of ignored examples beside -100, such as 255


class ScoreData(Layout, total=False):
    """Keyword arguments with the examples, of metrics of all classes."""

    probs: Input  # (..., classes), or (n,) for P(y = 1), with labels (...)
    sample_weight: Input  # (...), or one weight per row


class Data(ScoreData, total=False):
    """The same of metrics that are functions of pairs."""

    confidence: Input  # (...) in [0, 1]
    outcome: Input  # (...) 0 or 1


class EventData(Data, total=False):
    """The same for calibration errors, which can be measured of several probabilities."""

    estimand: EstimandChoice


def keywords(kind: type) -> Callable[[F], F]:
    """Show the keywords of ``**data``, which are those of a TypedDict, in the signature.

    So ``help`` and completion have them, as type checkers do. Numbers that underflow to 0 are 0,
    also where the caller made NumPy raise errors for them; warnings name the caller's line.
    """
    shown = [
        Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default="auto" if name == "estimand" else None,
            annotation=annotation.__forward_arg__,
        )
        for name, annotation in kind.__annotations__.items()
    ]

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        named = [p for p in signature.parameters.values() if p.kind != Parameter.VAR_KEYWORD]
        quiet: F = checks.warnings_at_caller()(np.errstate(under="ignore")(function))
        quiet.__signature__ = signature.replace(parameters=[*named, *shown])  # type: ignore[attr-defined]
        return quiet

    return decorate


class Pairs(NamedTuple):
    """A claimed probability and whether the event happened, one of each per example."""

    confidence: FloatArray
    outcome: BoolArray

    def reliability(self, *, bins: int = 15, level: float = 0.9) -> Reliability:
        """Accuracy per bin of confidence, as of :func:`calibrant.metrics.reliability`."""
        pairs = WeightedPairs(*checks.as_pairs(self.confidence, self.outcome, None))
        return reliability_of(pairs.filled(uniform_edges(bins)), level=level)


class WeightedPairs(NamedTuple):
    """Checked pairs as flat float64 arrays, with weights where there are any."""

    confidence: FloatArray
    outcome: FloatArray
    weight: FloatArray | None

    def filled(self, edges: FloatArray) -> Bins:
        """Sums of the pairs per bin."""
        return fill(self.confidence, self.outcome, edges, self.weight)

    def equal_mass_edges(self, bins: int) -> FloatArray:
        """Edges of bins that hold about equally much weight each."""
        return equal_mass_edges(self.confidence, bins, self.weight)


def pairs_from(
    logits: Input = None,
    labels: Input = None,
    *,
    probs: Input = None,
    confidence: Input = None,
    outcome: Input = None,
    sample_weight: Input = None,
    estimand: EstimandChoice = "auto",
    **layout: Unpack[Layout],
) -> WeightedPairs:
    """Reduce examples in any of the three forms to pairs: the first step of most metrics.

    Two classes are reduced as by :func:`positive_class`, more as by :func:`top_label`, unless
    ``estimand`` says otherwise; pairs are checked only.

    >>> pairs_from(confidence=[0.9, 0.6], outcome=[True, False])
    WeightedPairs(confidence=array([0.9, 0.6]), outcome=array([1., 0.]), weight=None)
    """
    if confidence is None and outcome is None:
        examples, _ = _examples_of_caller(logits, labels, probs, sample_weight, estimand, **layout)
        claimed, happened = _pairs(examples, examples.event)
        return WeightedPairs(claimed, happened.astype(np.float64), examples.labelled_weight())
    if confidence is None or outcome is None:
        raise TypeError(f"confidence= and outcome= go together: pass {FORMS}")
    if not (logits is labels is probs is None and set(layout.values()) <= {None}):
        raise TypeError(f"confidence= and outcome= stand alone: pass {FORMS}")
    return WeightedPairs(*checks.as_pairs(confidence, outcome, sample_weight))


def probability_of(estimand: Estimand) -> str:
    """Return P(y = 1) where an estimand is the probability of one class, else an empty string."""
    return ESTIMANDS["binary"] if estimand == "binary" else ""


def event_probability(estimand: Estimand) -> str:
    """Return the name of the probability in diagrams: that of an event, or empty if of answers.

    >>> event_probability("binary"), event_probability("multilabel"), event_probability("top_label")
    ('P(y = 1)', 'P(tag)', '')
    """
    return "P(tag)" if estimand == "multilabel" else probability_of(estimand)


def answers_from(logits: Input = None, labels: Input = None, **data: Unpack[Data]) -> WeightedPairs:
    """Reduce examples to confidences in the predicted classes, for metrics of answers."""
    return pairs_from(logits, labels, estimand="top_label", **data)


def labelled_examples(
    logits: Input,
    labels: Input,
    probs: Input = None,
    sample_weight: Input = None,
    estimand: EstimandChoice = "top_label",
    *,
    class_dim: int | None = None,
    ignore_index: int | None = None,
) -> tuple[Examples, int]:
    """Check logits or probs with their labels; also count the labels with a probability of 0."""
    if labels is None:
        raise TypeError("labels are missing: pass (logits, labels) or (probs=..., labels=...)")
    check_one_input(logits, probs)
    labels = checks.with_ignored(labels, ignore_index)
    if logits is not None:
        logits = checks.classes_last(logits, class_dim)
        return chunks.examples(logits, labels, sample_weight, estimand), 0
    assert probs is not None  # as was checked
    labels, probs = without_frames(labels, checks.classes_last(probs, class_dim))
    logs = logits_from_probs(probs, tags=estimand == "multilabel")
    examples = chunks.examples(logs, labels, sample_weight, estimand, name="probs")
    examples = examples._replace(probs=checks.as_scores(probs))
    labelled = np.flatnonzero(examples.labels != checks.IGNORED)
    stated = examples.stated(labelled)
    assert stated is not None
    # zeros of other classes change no score
    return examples, int((stated[np.arange(len(stated)), examples.labels[labelled]] <= 0).sum())


def _examples_of_caller(
    logits: Input,
    labels: Input,
    probs: Input = None,
    sample_weight: Input = None,
    estimand: EstimandChoice = "top_label",
    **layout: Unpack[Layout],
) -> tuple[Examples, int]:
    """Return :func:`labelled_examples`, with a warning of logits that look like probabilities."""
    examples, floored = labelled_examples(logits, labels, probs, sample_weight, estimand, **layout)
    if probs is None and estimand != "multilabel":  # tags may add up to anything
        remedy = "if they are, pass them as probs=, or as confidence= with outcome="
        checks.warn_of_probs(examples.logits, remedy)
    return examples, floored


def check_one_input(logits: Input, probs: Input) -> None:
    """Raise unless exactly one of logits and probs was passed."""
    if (logits is None) == (probs is None):
        got = "neither" if logits is None else "both"
        raise TypeError(f"pass either logits or probs=, got {got}")


def _warn_of_floor(floored: int) -> None:
    """Warn of labels with a probability of zero."""
    if floored:
        checks.warn(
            f"{floored:,} labels have a probability of 0, and so an infinite NLL: each counts as "
            "100 nats at most; pass logits to avoid it"
        )


@keywords(Layout)
def top_label(
    logits: Input = None, labels: Input = None, *, probs: Input = None, **layout: Unpack[Layout]
) -> Pairs:
    """Confidence in the predicted class, and whether that class is the label.

    Logits or probs are ``(..., classes)``, or ``(n,)`` log-odds or P(y = 1) of two classes; labels
    ``(...)`` integers, -100 ignored; ``class_dim`` and ``ignore_index`` as for
    :func:`calibrant.ece`.

    >>> top_label([[0.0, 0.0, 0.0], [9.0, 0.0, 0.0]], [0, 1])
    Pairs(confidence=array([0.33333333, 0.99975324]), outcome=array([ True, False]))
    """
    return _pairs(_examples_of_caller(logits, labels, probs, **layout)[0])


@keywords(Layout)
def positive_class(
    logits: Input = None, labels: Input = None, *, probs: Input = None, **layout: Unpack[Layout]
) -> Pairs:
    """Probability of class 1 of two, and whether the label is 1.

    One logit ``z`` means the pair ``(0, z)``, so its probability is ``sigmoid(z)``. Input as for
    :func:`top_label`.

    >>> positive_class([0.0, 2.0], [1, 0])
    Pairs(confidence=array([0.5       , 0.88079708]), outcome=array([ True, False]))
    """
    return _pairs(_examples_of_caller(logits, labels, probs, estimand="binary", **layout)[0], 1)


def multilabel(logits: Input = None, labels: Input = None, *, probs: Input = None) -> Pairs:
    """Probability ``sigmoid(z)`` of every tag of every example, and whether it applies.

    Logits or probs are ``(..., tags)``, and so are labels: 0, 1, or -100 for unknown.

    >>> multilabel([[0.0, 2.0]], [[1, -100]])
    Pairs(confidence=array([0.5]), outcome=array([ True]))
    """
    return _pairs(labelled_examples(logits, labels, probs, estimand="multilabel")[0], 1)


@keywords(Layout)
def one_vs_rest(
    logits: Input = None,
    labels: Input = None,
    *,
    k: int,
    probs: Input = None,
    **layout: Unpack[Layout],
) -> Pairs:
    """Probability of class ``k``, and whether the label is ``k``.

    Input as for :func:`top_label`.

    >>> one_vs_rest([[0.0, 0.0], [0.0, 2.0]], [0, 1], k=1).outcome
    array([False,  True])
    """
    examples, _ = _examples_of_caller(logits, labels, probs, **layout)
    if not 0 <= k < examples.classes:
        raise ValueError(f"k must be a class in [0, {examples.classes}), got {k}")
    return _pairs(examples, k)


def margins(logits: Values) -> FloatArray:
    """Difference of the two largest logits of each row, ``(..., classes) -> (...)``.

    One logit z is the pair (0, z), so its margin is ``abs(z)``. It is inf where only one class
    is possible.

    >>> margins([[3.0, 1.0, 0.0], [2.0, 2.0, 0.0]])
    array([2., 0.])
    """
    scores = checks.as_scores(logits)
    one_logit = scores.ndim == 1
    shape, width = (scores.shape, 1) if one_logit else (scores.shape[:-1], scores.shape[-1])
    if width == 1 and not one_logit:
        return np.full(shape, np.inf)
    largest = [torch.zeros(0, 2, device="cpu")]
    for _, rows in chunks.raw_chunks(scores, width, 0, math.prod(shape)):
        chunk = chunks.as_tensor(rows)
        pairs = torch.nn.functional.pad(chunk, (1, 0)) if one_logit else chunk
        largest.append(pairs.topk(2, dim=-1).values.double().cpu())
    first, second = torch.cat(largest).unbind(-1)
    # +inf has no softmax: NaN here, so that it is refused below
    gaps = torch.where(first == math.inf, math.nan, first - second).numpy()
    if np.isnan(gaps).any():
        at = int(np.flatnonzero(np.isnan(gaps))[0])
        raise ValueError(
            f"logits must be finite, or -inf if masked, got NaN or +inf at row {at}: find the "
            "example that overflowed"
        )
    return gaps.reshape(shape)


class Reduced(NamedTuple):
    """Numbers kept of each labelled example, each ``(n,)``."""

    confidence: FloatArray
    outcome: BoolArray
    top: FloatArray  # probability of the predicted class
    correct: BoolArray
    nll: FloatArray
    brier: FloatArray


def reduce_examples(examples: Examples, classwise: ClassBins | None = None) -> Reduced:
    """Reduce every labelled row; add its one-vs-rest pairs to ``classwise`` on the way."""
    ranges = chunks.thread_ranges(examples)
    owned = [classwise and classwise.like(examples.device) for _ in ranges]

    def task(row_range: tuple[int, int], sums: ClassBins | None) -> Reduced:
        parts = []
        for soft in _softmaxes(examples, row_range):
            chunk, probs = soft.chunk, soft.powers.div_(soft.total)
            own = probs.gather(-1, torch.cat([soft.top, chunk.labels[:, None]], -1))
            claimed = own[:, 0] if examples.event is None else probs[:, examples.event]
            norm = torch.linalg.vector_norm(probs, dim=-1)
            table = torch.column_stack([soft.loss(), own, norm, claimed])
            parts.append((soft.happened(examples.event), soft.happened(None), table))
            if sums is not None:
                sums.update(probs, chunk.labels, chunk.weight, chunk.column)
        if sums is not None:
            sums.settle()
        # what is left to do for single rows is done once, since calls for small chunks add up
        outcome, correct, figures = _at_once(parts) if parts else _NO_FIGURES
        loss, confidence, true, norms, stated = figures.T
        nll = loss - np.log(confidence)  # finite also where the probability underflows
        return Reduced(stated, outcome, confidence, correct, nll, 1 - 2 * true + norms**2)

    reduced = Reduced(*chunks.joined(chunks.on_threads(task, ranges, owned)))
    for sums in owned:
        if classwise is not None and sums is not None:
            classwise.add(sums)
    return reduced


def _pairs(examples: Examples, k: int | None = None) -> Pairs:
    """Reduce every labelled row to its pair, which takes half of the work of all figures."""

    def task(row_range: tuple[int, int]) -> Pairs:
        parts = [(soft.claimed(k), soft.happened(k)) for soft in _softmaxes(examples, row_range)]
        return Pairs(*_at_once(parts)) if parts else _NO_PAIRS

    pairs = Pairs(*chunks.joined(chunks.on_threads(task, chunks.thread_ranges(examples))))
    checks.check_some(pairs.outcome.size)
    return pairs


def _at_once(parts: Sequence[tuple[Tensor, ...]]) -> list[NDArray[Any]]:
    """Join the columns of several chunks, and copy each to the CPU at once."""
    columns = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    return [column.cpu().numpy() for column in columns]


_NO_PAIRS = Pairs(np.zeros(0), np.zeros(0, np.bool_))
_NO_FIGURES = (_NO_PAIRS.outcome, _NO_PAIRS.outcome, np.zeros((0, 5)))


class _Softmax(NamedTuple):
    """The softmax of a chunk is ``powers / total``; the next chunk overwrites it."""

    chunk: LabelledRows
    top: Tensor  # (rows, 1) class of the largest logit, the first of equals
    best: Tensor  # (rows, 1) that logit
    powers: Tensor  # (rows, classes)
    total: Tensor  # (rows, 1)

    def claimed(self, k: int | None) -> Tensor:
        """Return the probability of class k or, without k, of the prediction, ``(rows,)``."""
        power = self.powers.gather(-1, self.top)[:, 0] if k is None else self.powers[:, k]
        return power / self.total[:, 0]

    def happened(self, k: int | None) -> Tensor:
        """Return whether the label is class k or, without k, the prediction, ``(rows,)``."""
        return self.chunk.labels == (self.top[:, 0] if k is None else k)

    def loss(self) -> Tensor:
        """Return by how much the logit of the label is below the largest, ``(rows,)``."""
        return (self.best - self.chunk.logits.gather(-1, self.chunk.labels[:, None]))[:, 0]


EXACT = 1024
"""Classes up to which the order of equal logits does not change the last digit of a softmax; the
multiples of a unit would be too coarse for more."""


def _softmaxes(examples: Examples, row_range: tuple[int, int]) -> Iterator[_Softmax]:
    """Yield the softmax of every chunk; raise for a row without a finite loss."""
    # one buffer for all chunks: fresh memory of this size costs more than the softmax
    buffer = None
    for chunk in chunks.labelled_chunks(examples, *row_range):
        size, device = chunk.logits.numel(), chunk.logits.device
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=torch.float64, device=device)
        out = buffer[:size].view_as(chunk.logits)
        stated = examples.stated(chunk.number)
        if stated is not None:  # the way through logarithms would part ties, and cross edges
            out.copy_(torch.from_numpy(stated))
        top = top_class(chunk.logits if stated is None else out)
        best = chunk.logits.gather(-1, top).double()
        if stated is not None:
            total = torch.ones_like(best)
        elif (classes := chunk.logits.shape[-1]) > EXACT:
            torch.softmax(out.copy_(chunk.logits), -1, out=out)
            total = torch.ones_like(best)
        else:
            # Rows with the same logits in another order are ties. A sum of floating-point numbers
            # depends on the order of its terms, in the last digit; here they are rounded to whole
            # multiples of a small unit, whose sum as integers does not.
            unit = 62 - math.ceil(math.log2(classes))  # as a power of 2
            if device.type == "cpu":
                chunks.exponential(out.copy_(chunk.logits).sub_(best)).mul_(2.0**unit)
            else:  # each kernel goes through the memory once
                torch.sub(chunk.logits, best - unit * math.log(2), out=out).exp_()
            total = out.to(torch.int64).sum(-1, keepdim=True)
        soft = _Softmax(chunk, top, best, out, total)
        if not (chunk.bounded or (finite := soft.loss().isfinite()).all()):
            raise chunks.explained(examples, int(chunk.number[~finite.cpu().numpy()][0]))
        yield soft
