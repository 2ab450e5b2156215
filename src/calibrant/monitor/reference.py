"""Sums of a reference, the calibration of a model when it was deployed, and its gaps."""

from __future__ import annotations

from functools import partial

import numpy as np

from calibrant._core import checks
from calibrant._core.binning import Bins, fill, uniform_edges
from calibrant._core.checks import FloatArray, Values
from calibrant.calibrators.base import Calibrator
from calibrant.data.dataset import TEST_SPLITS
from calibrant.data.files import Data, as_dataset
from calibrant.data.shards import Chunk
from calibrant.metrics.intervals import clopper_pearson
from calibrant.monitor.deliveries import _labelled_pairs
from calibrant.workflows.effect import input_names


def reference_bins(
    data: Data,
    calibrator: Calibrator | None = None,
    *,
    split: str | None = None,
    bins: int = 15,
) -> Bins:
    """Return the sums of a reference per bin of confidence, read in chunks.

    Parameters
    ----------
    data : path, Dataset, mapping or data frame
        A prediction file with logits, or a folder or glob of shards.
    calibrator : Calibrator, optional
        Applied to logits first, as by the monitor.
    split : str, optional
        Split to read; ``test``, else the unnamed split, by default.
    bins : int
        Number of bins, that of the monitor.

    Examples
    --------
    >>> from calibrant.data import sample_path
    >>> from calibrant.monitor import Monitor
    >>> Monitor(reference=reference_bins(sample_path())).tolerated.has_reference
    True
    """
    dataset = as_dataset(data)
    if calibrator is not None:
        dataset = dataset.in_order(calibrator.class_names_)
    chosen = dataset.split(split, TEST_SPLITS)
    if chosen.domain != "logits":
        raise ValueError(f"{chosen.path} has probs; a reference needs logits")
    columns = ("logits", "labels", *input_names(calibrator))
    parts = chosen.map(partial(_filled, calibrator, bins), *columns, rows=chosen.chunk_rows)
    total = sum(parts, start=Bins.empty(uniform_edges(bins)))
    checks.check_some(int(total.count.sum()))
    return total


def _filled(calibrator: Calibrator | None, bins: int, chunk: Chunk) -> Bins:
    features = None if calibrator is None else calibrator.input_features(chunk)
    pairs = _labelled_pairs(calibrator, chunk["logits"], chunk["labels"], features)
    return fill(pairs.confidence, pairs.outcome.astype(float), uniform_edges(bins))


def _reference_gaps(reference: tuple[Values, Values] | Bins, bins: int, level: float) -> FloatArray:
    """Limits of accuracy minus confidence in each bin, ``(2, bins)``, valid for all bins at once.

    Clopper-Pearson limits at ``level`` divided by the two sides of all bins with examples
    (Bonferroni). There is no upper limit (1) where all were right, no lower limit (-1) where none
    was, and neither in a bin without examples: its gap may differ from that of its neighbours.
    """
    if not isinstance(reference, Bins):
        confidence, outcome, _ = checks.as_pairs(*reference)
        reference = fill(confidence, outcome, uniform_edges(bins))
    n, right = reference.count, reference.observed
    if n.size != bins:
        raise ValueError(
            f"the reference must have the bins of the monitor, {bins}, got {n.size}: pass the same "
            "bins to both"
        )
    tail = level / (2 * np.count_nonzero(n))
    low, high = clopper_pearson(right, n.astype(float), tail)
    mean = reference.claimed / np.maximum(n, 1)
    return np.stack([np.where(right > 0, low - mean, -1.0), np.where(right < n, high - mean, 1.0)])
