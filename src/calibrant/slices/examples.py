"""Examples of a split as the search sees them: claims and outcomes, weights, and codes of columns.

Besides the metadata, the predictions themselves are columns: P(y = 1) of two classes; confidence,
predicted and second class of more. Features are reduced to the number of their cluster.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from calibrant._core.checks import (
    IGNORED,
    BoolArray,
    FloatArray,
    IntArray,
    as_labels,
    as_weight,
    check_finite_rows,
    check_labels,
    check_some,
)
from calibrant._core.chunks import joined
from calibrant.calibrators.base import Calibrator, check_calibrator
from calibrant.data.dataset import Split
from calibrant.data.formats import Array
from calibrant.data.metadata import MetadataColumn, are_identifiers, learn_column
from calibrant.data.shards import Chunk, uniform
from calibrant.decide.probabilities import probabilities

SAMPLE = 20_000
"""Examples from which cuts, frequent values and clusters are learned, and noise is simulated."""
NUMBERS = 4_000_000
"""Numbers that the features of these examples may have."""
P_CUTS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99)
CONFIDENCE_CUTS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999)
"""Ends of the ranges of P(y = 1) and of confidences: the same for all models."""
CLUSTERS, LOOKED_AT = 16, 1000
"""Clusters at most, and examples in which different features are counted."""
CERTAIN = 1e-9
"""Distance of claims from 0 and 1, at least."""
ROW = " row"
"""Column with the numbers of the rows, under a name that no file has."""
CLUSTER, CONFIDENCE = "feature cluster", "confidence"
PREDICTED, SECOND = "predicted class", "second class"


class _Outcomes(NamedTuple):
    """Claims and outcomes of the labelled examples ``(n,)``.

    ``claimed`` is the probability of an event and ``happened`` whether it did: y = 1 for two
    classes, that the predicted class is right for more. ``sign`` is -1 where the predicted class
    is right if the event did not happen: class 0 of two.
    """

    claimed: FloatArray
    happened: FloatArray
    weight: FloatArray
    sign: FloatArray

    @property
    def variance(self) -> FloatArray:
        """Variance of each outcome if its claim is right."""
        return self.claimed * (1 - self.claimed)

    def take(self, chosen: BoolArray | IntArray) -> _Outcomes:
        """Return some of the examples."""
        return _Outcomes(*(values[chosen] for values in self))

    def pairs(self, estimand: str) -> tuple[FloatArray, FloatArray]:
        """Return claims and outcomes of one of the ``estimands``: of y = 1 or of right answers."""
        if estimand == "binary":
            return self.claimed, self.happened
        flipped = self.sign < 0
        return (
            np.where(flipped, 1 - self.claimed, self.claimed),
            np.where(flipped, 1 - self.happened, self.happened),
        )


@dataclass(frozen=True, eq=False)
class Reading:
    """The way in which chunks become examples; it travels to other processes.

    ``metadata`` has the keys of columns by the names that are shown; ``inputs`` has those that the
    calibrator reads, by their names there.
    """

    metadata: Mapping[str, str]
    classes: int
    class_names: Sequence[str] | None = None
    calibrator: Calibrator | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)
    predictions: bool = True  # subgroups are formed of predictions as well
    named: bool = False  # the columns were asked for, identifiers too
    centres: FloatArray | None = None  # (clusters, width)
    columns: tuple[MetadataColumn, ...] = ()

    @property
    def estimands(self) -> tuple[str, ...]:
        """Events that claims are compared with."""
        return ("binary", "top_label") if self.classes == 2 else ("top_label",)

    def class_name(self, number: int) -> str:
        """Return the name of a class, or else its number."""
        return self.class_names[number] if self.class_names else str(number)

    @property
    def probability(self) -> str:
        """Name of the probability of class 1 of two."""
        return f"P({self.class_name(1)})"

    def check_names(self) -> None:
        """Raise if a column of metadata has the name of a prediction."""
        taken = {CLUSTER}
        if self.predictions:
            taken |= {self.probability} if self.classes == 2 else {CONFIDENCE, PREDICTED, SECOND}
        if clash := taken.intersection(self.metadata):
            raise ValueError(f"rename the column {min(clash)!r}: predictions have this name")

    def needed(self) -> list[str]:
        """Return the columns of a split that are read."""
        columns = ["logits", "labels", "sample_weight", *self.metadata.values()]
        columns += [*self.inputs.values(), *([] if self.centres is None else ["features"])]
        return list(dict.fromkeys(columns))

    def calibrated_by(self, calibrator: Calibrator | None, keys: Mapping[str, str]) -> Reading:
        """Return a reading that applies a calibrator first; ``keys`` of all metadata by name."""
        if calibrator is None:
            return self
        check_calibrator(calibrator)
        inputs = {name: keys.get(name, name) for name in calibrator.input_columns}
        return replace(self, calibrator=calibrator, inputs=inputs)

    def labelled(self, chunk: Chunk) -> tuple[_Outcomes, FloatArray, BoolArray]:
        """Return the outcomes, the probabilities ``(n, classes)``, and which rows have a label."""
        labels = as_labels(chunk["labels"]).reshape(-1)
        weight = chunk.get("sample_weight")
        weights = np.ones(labels.size) if weight is None else as_weight(weight, labels.shape)
        kept = (labels != IGNORED) & (weights > 0)
        labels, scores, probs = labels[kept], chunk["logits"][kept], np.zeros((0, self.classes))
        check_labels(labels, self.classes)
        if len(scores):
            if self.calibrator is not None:
                arrays = {name: chunk[key] for name, key in self.inputs.items()}
                features = self.calibrator.input_features(arrays, kept)
                scores = self.calibrator.transform(scores, features)
            probs = probabilities(scores, None)[0]
        predicted = probs.argmax(1)
        if self.classes == 2:
            sign = np.where(predicted == 1, 1.0, -1.0)
            claimed, happened = probs[:, 1], labels == 1
        else:
            sign = np.ones(labels.size)
            claimed, happened = probs[np.arange(labels.size), predicted], labels == predicted
        # a claim of exactly 1 would leave no room for noise
        possible = np.clip(claimed, CERTAIN, 1 - CERTAIN)
        outcomes = _Outcomes(possible, happened.astype(np.float64), weights[kept], sign)
        return outcomes, probs, kept

    def values(self, chunk: Chunk, probs: FloatArray, kept: BoolArray) -> dict[str, Array]:
        """Return the columns of the labelled rows by name, before they are encoded."""
        values = {name: chunk[key][kept] for name, key in self.metadata.items()}
        if self.centres is not None:
            values[CLUSTER] = _nearest(chunk["features"][kept], self.centres)
        return {**values, **self._predictions(probs)} if self.predictions else values

    def _predictions(self, probs: FloatArray) -> dict[str, Array]:
        if self.classes == 2:
            return {self.probability: probs[:, 1]}
        names = np.array([self.class_name(i) for i in range(self.classes)])
        every = np.arange(len(probs))
        first = probs.argmax(1)
        others = probs.copy()
        others[every, first] = -1
        return {
            CONFIDENCE: probs[every, first],
            PREDICTED: names[first],
            SECOND: names[others.argmax(1)],
        }

    def encoded(self, chunk: Chunk) -> tuple[_Outcomes, IntArray, BoolArray]:
        """Return the outcomes, codes ``(n, columns)``, and which rows have a label."""
        outcomes, probs, kept = self.labelled(chunk)
        codes = encode(self.columns, self.values(chunk, probs, kept), len(probs))
        return outcomes, codes, kept


def encode(columns: Sequence[MetadataColumn], values: Mapping[str, Array], rows: int) -> IntArray:
    """Return codes ``(rows, columns)``."""
    codes = [column.codes(column.numbers(values[column.name])) for column in columns]
    return np.stack(codes, 1) if codes else np.zeros((rows, 0), np.int64)


def _nearest(features: Array, centres: FloatArray) -> IntArray:
    """Return the number of the nearest centre of each row of features ``(n, width)``."""
    rows = np.asarray(features, np.float64).reshape(len(features), -1)
    distances = (centres**2).sum(1) - 2 * rows @ centres.T
    return np.asarray(distances.argmin(1))


class _SampledExamples(NamedTuple):
    """A sample of the labelled examples, and the number of all of them."""

    n: int
    outcomes: _Outcomes
    values: dict[str, Array]
    features: FloatArray | None
    row: IntArray  # their numbers in the split


def _draw_sample(reading: Reading, split: Split, *, clusters: bool, seed: int) -> _SampledExamples:
    """Read some of the labelled examples; with ``clusters``, their features too."""
    width = split.shards[0].column("features").width if clusters else 1
    share = min(1.0, min(SAMPLE, NUMBERS // width) / max(1, split.rows))
    columns = [*reading.needed(), *(["features"] if clusters else []), ROW]
    numbered = split.with_column(ROW, np.arange(split.rows))
    task = partial(_chunk_sample, reading, share, seed, clusters)
    parts = list(numbered.map(task, *dict.fromkeys(columns), rows=split.chunk_rows))
    n = sum(part.n for part in parts)
    check_some(n)
    features = [part.features for part in parts if part.features is not None]
    return _SampledExamples(
        n,
        _Outcomes(*joined([part.outcomes for part in parts])),
        {name: np.concatenate([part.values[name] for part in parts]) for name in parts[0].values},
        np.concatenate(features) if features else None,
        np.concatenate([part.row for part in parts]),
    )


def _chunk_sample(
    reading: Reading, share: float, seed: int, clusters: bool, chunk: Chunk
) -> _SampledExamples:
    outcomes, probs, kept = reading.labelled(chunk)
    number = chunk[ROW]
    # another seed than that of samples of the split, of which the examples may be one
    chosen = (uniform(seed + 1, int(number[0]), number.size) < share)[kept]
    values = reading.values(chunk, probs, kept)
    features = None
    if clusters:
        features = np.asarray(chunk["features"][kept][chosen], np.float64)
        features = features.reshape(len(features), -1)
    return _SampledExamples(
        len(probs),
        outcomes.take(chosen),
        {name: column[chosen] for name, column in values.items()},
        features,
        number[kept][chosen],
    )


def _with_columns(
    reading: Reading, sample: _SampledExamples, min_size: int, bins: int, most: int
) -> tuple[Reading, list[str]]:
    """Learn the codes of the columns; return also the names of those that form no subgroups."""
    fewest = min_size * sample.outcomes.claimed.size / sample.n
    stated = CONFIDENCE if reading.classes > 2 else reading.probability
    cuts = CONFIDENCE_CUTS if reading.classes > 2 else P_CUTS

    def learn(name: str, values: Array) -> MetadataColumn | None:
        if name == stated and reading.predictions:
            return MetadataColumn(name, "number", cuts)
        if name in reading.metadata and not reading.named and are_identifiers(values):
            return None
        return learn_column(name, values, bins=bins, most=most, fewest=max(1, fewest))

    learned = {name: learn(name, values) for name, values in sample.values.items()}
    columns = tuple(column for column in learned.values() if column is not None)
    left_out = [name for name, column in learned.items() if column is None]
    return replace(reading, columns=columns), left_out


def _with_clusters(
    reading: Reading, sample: _SampledExamples, seed: int
) -> tuple[Reading, _SampledExamples, list[str]]:
    """Cluster the features of a sample by k-means, and name typical rows of each cluster."""
    from scipy.cluster.vq import kmeans2

    features = sample.features
    if features is None:
        return reading, sample, []
    check_finite_rows(torch.from_numpy(features))
    different = len(np.unique(features[:LOOKED_AT], axis=0))
    count = min(different, int(np.clip(len(features) // 50, 2, CLUSTERS)))
    rng: Any = np.random.default_rng(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of clusters that became empty
        centres = np.asarray(kmeans2(features, count, minit="++", rng=rng)[0])
    typical = []
    for i, centre in enumerate(centres):
        distances = ((features - centre) ** 2).sum(1)
        nearby = sample.row[np.argsort(distances, kind="stable")[:3]].tolist()
        typical.append(f"{i}: {', '.join(map(str, nearby))}")
    note = f"Typical rows of each {CLUSTER}, counted from 0: {'; '.join(typical)}."
    values = {**sample.values, CLUSTER: _nearest(features, centres)}
    return replace(reading, centres=centres), sample._replace(values=values), [note]
