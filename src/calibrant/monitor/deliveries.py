"""Deliveries: predictions and labels as they come, with keys by which they are recognised later.

Predictions may come first, and wait for their labels under an id.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from calibrant._core.checks import (
    IGNORED,
    BoolArray,
    Features,
    FloatArray,
    IntArray,
    Logits,
    Values,
    as_keys,
    as_labels,
    check_whole,
)
from calibrant._core.chunks import as_tensor, examples, top_class
from calibrant._core.class_names import (
    as_array,
    class_names_of,
    in_order,
    is_missing,
    numbered,
    numbers_in_order,
)
from calibrant._core.probs import logits_from_probs
from calibrant.calibrators.base import Calibrator, feature_rows
from calibrant.data import Chunk
from calibrant.metrics.reductions import Pairs, reduce_examples

Id: TypeAlias = int | str
Keys: TypeAlias = NDArray[np.uint64]

HASH_BITS = np.uint64(32)
IS_HALF = np.uint64(1)
"""The last bit of a key: scores that half precision holds exactly."""
HALF_COLUMNS = 16
"""Columns, at most about twice as many, that are hashed in half precision."""
SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""An odd number, so that multiplication by it is one-to-one: 2**64 over the golden ratio."""


def _stream_order(
    calibrator: Calibrator | None, names: Sequence[str] | None
) -> Sequence[str] | None:
    """Return the order of classes in which examples are recognised, whatever that of a file."""
    known = None if calibrator is None else calibrator.class_names_
    return known or (None if names is None else sorted(names))


def _in_stream_order(
    calibrator: Calibrator | None, logits: Values | None, probs: Values | None, labels: Any = None
) -> tuple[Any, Any, Any]:
    """Return data frames as arrays in this order, and labels as numbers of its classes."""
    given: Any = logits if probs is None else probs
    if (names := class_names_of(given)) is None:
        return logits, probs, labels
    values, places = in_order(given, _stream_order(calibrator, names))
    if labels is not None:
        labels = numbered(labels, given)
        labels = labels if places is None else numbers_in_order(places, as_array(labels))
    return (values, None, labels) if probs is None else (None, values, labels)


def _labelled_pairs(
    calibrator: Calibrator | None, logits: Logits, labels: Values, features: Features | None
) -> Pairs:
    """Return pairs of the labelled examples; the others may hold anything.

    Of two classes they are P(y = 1) and y, as in an evaluation.
    """
    checked = examples(logits, labels, estimand="auto")
    if calibrator is not None:
        labelled = (checked.labels != IGNORED).reshape(as_labels(labels).shape)
        after = calibrator.transform(logits[labelled], feature_rows(features, labelled))
        checked = examples(after, checked.labels[labelled.reshape(-1)], estimand="auto")
    reduced = reduce_examples(checked)
    return Pairs(reduced.confidence, reduced.outcome)


def _watched_classes(
    calibrator: Calibrator | None, logits: Logits, features: Features | None
) -> tuple[list[float], list[int]]:
    """Return a class of each row and its probability: the predicted one, or class 1 of two."""
    scores = logits if calibrator is None else calibrator.transform(logits, features)
    values = as_tensor(scores)
    if _class_count(values) > 2:
        watched = top_class(values)[..., 0].cpu().numpy()
    else:
        watched = np.ones(len(values), np.int64)
    claimed = reduce_examples(examples(scores, watched, estimand="auto")).confidence
    return claimed.tolist(), watched.tolist()


def _class_count(logits: Logits) -> int:
    """Return the number of classes, or 0 if there are no examples to tell."""
    classes = 2 if logits.ndim == 1 else int(logits.shape[-1])
    return 0 if 0 in logits.shape else classes


def _is_empty(values: Values) -> bool:
    """Return True for no values at all."""
    shape = getattr(values, "shape", None)
    return isinstance(values, (list, tuple)) and not values if shape is None else 0 in shape


def _integer_labels(labels: Values) -> IntArray:
    """Return labels as integers, also those of an empty list, which NumPy takes for floats."""
    return np.zeros(0, np.int64) if _is_empty(labels) else as_labels(labels)


class PendingPredictions:
    """Confidence and predicted class of at most ``limit`` ids, the oldest first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.waiting: dict[Id, tuple[float, int]] = {}
        self.counts = dict.fromkeys(("dropped", "repeated", "unknown", "ignored"), 0)

    def add(self, ids: Iterable[Id], confidences: Iterable[float], classes: Iterable[int]) -> None:
        """Add predictions; an id that is waiting already is replaced."""
        for key, confidence, predicted in zip(ids, confidences, classes, strict=True):
            self.counts["repeated"] += self.waiting.pop(key, None) is not None
            self.waiting[key] = (confidence, predicted)
        self._drop()

    def match(self, ids: Iterable[Id], labels: IntArray) -> tuple[list[Id], Pairs]:
        """Remove the predictions whose labels have come, and return their ids and pairs."""
        names, pairs = [], []
        for key, label in zip(ids, labels.tolist(), strict=True):
            prediction = self.waiting.pop(key, None)
            if prediction is None:
                self.counts["unknown"] += 1
            elif label == IGNORED:
                self.counts["ignored"] += 1
            else:
                names.append(key)
                pairs.append((prediction[0], prediction[1] == label))
        confidence, outcome = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
        return names, Pairs(confidence, outcome > 0)

    def merge(self, other: PendingPredictions) -> None:
        """Add the predictions and counts of another worker."""
        for key, count in other.counts.items():
            self.counts[key] += count
        self.counts["repeated"] += len(self.waiting.keys() & other.waiting.keys())
        self.waiting |= other.waiting
        self._drop()

    def restore(self, counts: dict[str, int], waiting: Iterable[tuple[Id, float, int]]) -> None:
        """Take over the counts and the waiting predictions of a saved state."""
        for name in self.counts:
            check_whole(name, counts[name], least=0)
            self.counts[name] = counts[name]
        for key, confidence, predicted in waiting:
            check_whole("predicted class", predicted, least=0)
            if not 0 <= confidence <= 1:
                raise ValueError(f"confidence must be in [0, 1], got {confidence!r:.60}")
            self.waiting[as_ids([key])[0]] = (float(confidence), predicted)

    def _drop(self) -> None:
        while len(self.waiting) > self.limit:
            del self.waiting[next(iter(self.waiting))]
            self.counts["dropped"] += 1


def as_ids(ids: Iterable[Id]) -> list[Id]:
    """Return ids as a list of plain numbers or strings, which JSON can hold."""
    if isinstance(ids, (str, bytes)):
        raise TypeError(f"ids must be a list, one for each example, got {ids!r}")
    values = ids.tolist() if isinstance(ids, (np.ndarray, Tensor)) else list(ids)
    plain = [value.item() if isinstance(value, np.generic) else value for value in values]
    for row, value in enumerate(plain):
        if is_missing(str(value)):
            raise ValueError(f"ids must be of every row, but that of row {row} is missing")
        if isinstance(value, float) and value.is_integer():
            plain[row] = int(value)
        elif isinstance(value, bool) or not isinstance(value, (int, str)):
            raise TypeError(f"ids must be whole numbers or text, got {value!r}: use str(id)")
    return plain


class _View:
    """Some examples as they are compared with others.

    Attributes
    ----------
    places : (n,)
        Places of the examples.
    keys : (n,)
    values, counts : (m,)
        Different keys, in order, and how often each of them occurs.
    rare, twice : int
        Number of examples with a key that occurs once or twice, and of keys that occur twice.
    """

    def __init__(self, keys: Keys, chosen: BoolArray) -> None:
        self.places = np.flatnonzero(chosen)
        self.keys = keys[self.places]
        self.values, self.counts = np.unique(self.keys, return_counts=True)
        self.twice = int(np.count_nonzero(self.counts == 2))
        self.rare = int(np.count_nonzero(self.counts == 1)) + 2 * self.twice

    def __len__(self) -> int:
        return len(self.places)


class _KeyedExamples:
    """Examples of a delivery or of a window, as they are recognised.

    Attributes
    ----------
    by : str
        What their keys are hashes of: ``"ids"``, ``"logits"`` or ``"probs"``; empty for pairs of
        confidence and outcome, which are not recognised.
    keys : (n,)
    labels : (n,)
        Labels, -100 for those that are still to come.
    """

    def __init__(self, by: str, keys: Keys, labels: IntArray) -> None:
        self.by, self.keys, self.labels = by, keys, labels.reshape(-1).astype(np.int64)

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def joined(cls, parts: Sequence[_KeyedExamples]) -> _KeyedExamples:
        """Return the examples of several parts."""
        keys, labels = ([getattr(part, name) for part in parts] for name in ("keys", "labels"))
        return cls(parts[0].by, np.concatenate(keys), np.concatenate(labels))

    def take(self, chosen: Any) -> _KeyedExamples:
        """Return some of the examples."""
        return _KeyedExamples(self.by, self.keys[chosen], self.labels[chosen])

    @property
    def labelled(self) -> BoolArray:
        """True for examples with a label."""
        return np.asarray(self.labels != IGNORED)

    @cached_property
    def exact(self) -> _View:
        """All examples, with scores in the precision in which they are stored, at most single."""
        keys = self.keys if self.by == "ids" else self.keys >> HASH_BITS
        return _View(keys, np.ones(len(self), np.bool_))

    @cached_property
    def half(self) -> _View:
        """The examples whose scores are stored in half precision."""
        return _View(_lower(self.keys), self.keys & IS_HALF == 1)

    @cached_property
    def single(self) -> _View:
        """The other examples, with scores in half precision."""
        return _View(_lower(self.keys) | IS_HALF, self.keys & IS_HALF == 0)


class _Delivery(NamedTuple):
    """Examples that came together, which are different ones.

    Attributes
    ----------
    examples : _KeyedExamples
    confidence, outcome : (n,)
        Of the labelled examples; NaN and False for the others.
    """

    examples: _KeyedExamples
    confidence: FloatArray
    outcome: BoolArray

    @classmethod
    def of(cls, examples: _KeyedExamples, pairs: Pairs) -> _Delivery:
        """Make a delivery of examples and the pairs of those with a label."""
        confidence = np.full(len(examples), np.nan)
        outcome = np.zeros(len(examples), np.bool_)
        confidence[examples.labelled], outcome[examples.labelled] = pairs
        return cls(examples, confidence, outcome)

    @classmethod
    def of_pairs(cls, pairs: Pairs, ids: Iterable[Id] | None) -> _Delivery:
        """Make a delivery of pairs, whose labels are their outcomes."""
        labels = pairs.outcome.astype(np.int64)
        keys = np.zeros(labels.size, np.uint64) if ids is None else _id_keys(ids, labels.shape)
        return cls(_KeyedExamples("" if ids is None else "ids", keys, labels), *pairs)

    @classmethod
    def joined(cls, parts: Sequence[_Delivery]) -> _Delivery:
        """Return the examples of several parts."""
        examples, *pairs = zip(*parts, strict=True)
        return cls(_KeyedExamples.joined(examples), *map(np.concatenate, pairs))

    def take(self, chosen: Any) -> _Delivery:
        """Return some of the examples."""
        return _Delivery(self.examples.take(chosen), self.confidence[chosen], self.outcome[chosen])

    def filling(self, filled: int, size: int) -> Iterator[tuple[int, _Delivery]]:
        """Yield examples by the number of the window that they fill, from 0, partly filled already.

        A window has ``size`` labelled examples. Those without a label fill nothing: they are in the
        window of the one before.
        """
        labelled = filled + np.cumsum(self.examples.labelled)
        numbers = np.maximum(labelled - 1, 0) // size
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        for start, end in pairwise([*starts.tolist(), len(numbers)]):
            yield int(numbers[start]), self.take(slice(start, end))

    @property
    def pairs(self) -> Pairs:
        """Confidences and outcomes of the labelled examples."""
        labelled = self.examples.labelled
        return Pairs(self.confidence[labelled], self.outcome[labelled])


def _chunk_delivery(calibrator: Calibrator | None, ids: str | None, chunk: Chunk) -> _Delivery:
    """Return the examples of a chunk; without labels they are still to come."""
    probs, labels = chunk.get("probs"), chunk.get("labels")
    scores = chunk["logits"] if probs is None else probs
    logits = scores if probs is None else logits_from_probs(probs)
    if labels is None:
        labels = np.full(scores.shape[:-1] if scores.ndim > 1 else scores.shape, IGNORED)
    features = None if calibrator is None else calibrator.input_features(chunk)
    pairs = _labelled_pairs(calibrator, logits, labels, features)
    named = None if ids is None else as_keys(chunk[ids]).tolist()
    return _Delivery.of(_recognised(scores, labels, named, probs is not None), pairs)


def _recognised(
    scores: Logits, labels: IntArray, ids: Iterable[Id] | None, are_probs: bool
) -> _KeyedExamples:
    """Return examples by their ids if there are any, else by their scores."""
    if ids is not None:
        return _KeyedExamples("ids", _id_keys(ids, labels.shape), labels)
    return _KeyedExamples("probs" if are_probs else "logits", _score_keys(scores), labels)


def _id_keys(ids: Iterable[Id], shape: tuple[int, ...]) -> Keys:
    """Return keys of the ids of rows, one for each label of the shape ``(n, ...)``."""
    texts = [_whole(str(name)).encode("utf-8", "replace") for name in as_ids(ids)]
    if len(texts) != shape[0]:
        raise ValueError(f"one id per row is wanted, got {len(texts)} for labels of shape {shape}")
    hashes = b"".join(blake2b(text, digest_size=8).digest() for text in texts)
    rows: Keys = np.frombuffer(hashes, "<u8").astype(np.uint64)
    places: Keys = np.arange(np.prod(shape[1:], dtype=int)).astype(np.uint64)
    return np.asarray(rows[:, None] + places * SPREAD).reshape(-1)


def _whole(text: str) -> str:
    """Return 7 for 7.0, as tables have it that lack a value in another row."""
    number = text.removesuffix(".0")
    return number if number.lstrip("-").isdecimal() else text


def _score_keys(scores: Logits) -> Keys:
    """Return a key for each row of scores ``(..., classes)``, or for each number of ``(n,)``.

    The upper 32 bits are a hash of the row in single precision, the next 31 one of some columns in
    half precision, in which fewer numbers may have been rounded twice. The last bit says that the
    row was stored in half precision.
    """
    if isinstance(scores, Tensor):
        scores = scores.detach().float().cpu().numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        single = np.asarray(scores, np.float32)
        single = single.reshape(-1, single.shape[-1] if single.ndim > 1 else 1)
        half = single.astype(np.float16).astype(np.float32)
    is_half = (single == half).all(-1).astype(np.uint64)
    some = half[:, :: max(1, half.shape[1] // HALF_COLUMNS)]
    return np.asarray(_hashes(single) << HASH_BITS | _hashes(some) & ~IS_HALF | is_half)


def _lower(keys: Keys) -> Keys:
    """Return the hashes in half precision."""
    return np.asarray(keys << HASH_BITS >> HASH_BITS)


def _hashes(rows: NDArray[np.float32]) -> Keys:
    """Hash rows to 32 bits, by a universal family (Dietzfelbinger, 1996)."""
    bits = (rows + np.float32(0)).view(np.uint32)  # the sum has no negative zeros
    factors = _factors(rows.shape[1])
    # a product of matrices would need all bits as 64-bit numbers, and is slow for integers
    sums = np.einsum("ij,j->i", bits, factors, dtype=np.uint64, casting="unsafe")
    return np.asarray(sums >> HASH_BITS)


@lru_cache(maxsize=8)
def _factors(columns: int) -> Keys:
    return np.asarray(np.random.PCG64(0).random_raw(columns))  # alike in all versions of NumPy
