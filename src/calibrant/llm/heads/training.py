"""Training of a temperature head on a token table, with early stopping."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from calibrant._core.checks import FloatArray, IntArray
from calibrant._core.chunks import Progress
from calibrant._core.logpartition import Records
from calibrant._core.solve import check_time, minimise_scalar
from calibrant.calibrators.objectives import Objective
from calibrant.calibrators.scaling import best_sharpness
from calibrant.llm.heads.modules import LIMIT, Head, ShapeHead, shape_features
from calibrant.llm.heads.objectives import OBJECTIVES, brier_correct, loss
from calibrant.llm.heads.predict import (
    TokenPredictions,
    document_chunks,
    document_lengths,
    log_sharpness,
    predict_rows,
)
from calibrant.llm.tokens.tables import TokenTable

ALPHAS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
"""Values of alpha that are tried."""
PATIENCE = 4
"""Epochs without improvement after which training stops."""
CHUNK = 1 << 15
"""Tokens that are read together and shuffled among each other."""
ENOUGH = 1 << 18
"""Tokens that determine one temperature to three digits; of more, this many are used."""
STOP, TEST = 0.1, 0.2
"""Fractions of the documents for early stopping and for the final comparison."""
MIN_DOCUMENTS = 5


class TokenSplit(NamedTuple):
    """Rows of the documents to train on, to stop early by, and to test on."""

    train: IntArray
    stop: IntArray
    test: IntArray


def split_documents(documents: IntArray, *, seed: int = 0) -> TokenSplit:
    """Split tokens ``(n,)`` by document: 70 % for training, 10 % for stopping, 20 % for testing.

    >>> [len(rows) for rows in split_documents(np.repeat(np.arange(10), 3))]
    [21, 3, 6]
    """
    names, member = np.unique(documents, return_inverse=True)
    if len(names) < MIN_DOCUMENTS:
        raise ValueError(f"at least {MIN_DOCUMENTS} documents are needed, got {len(names)}")
    order = np.random.default_rng(seed).permutation(len(names))[member]
    test = max(2, round(TEST * len(names)))
    stop = test + max(1, round(STOP * len(names)))
    masks = (order >= stop, (order >= test) & (order < stop), order < test)
    return TokenSplit(*(np.flatnonzero(mask) for mask in masks))


class Score(NamedTuple):
    """The proper score by which heads are compared: ``nll`` or ``brier``."""

    name: str

    @classmethod
    def of(cls, objective: str) -> Score:
        """Return the score for a head with an objective."""
        return cls("nll" if objective == "nll" else "brier")

    def best(self, records: Records) -> float:
        """Return the one log-sharpness with the best score."""
        if self.name == "nll":
            solution = best_sharpness(records)
        else:
            solution = minimise_scalar(lambda u: brier_correct(records, u).value, -LIMIT, LIMIT)
        return float(np.clip(solution.x[0], -LIMIT, LIMIT))

    def each(self, predictions: TokenPredictions) -> FloatArray:
        """Return the score of each token ``(n,)``."""
        if self.name == "nll":
            return predictions.nll
        return np.asarray((predictions.confidence - predictions.correct) ** 2)


class TrainedHead(NamedTuple):
    """A head at its best epoch, with its score there."""

    head: Head
    epoch: int
    score: float
    alpha: float | None = None


class Trainer(NamedTuple):
    """Data and settings that the training runs for several alphas share."""

    table: TokenTable
    split: TokenSplit
    score: Score
    epochs: int
    batch: int
    rate: float
    keep_always: bool
    seed: int
    device: torch.device

    def best_of(
        self,
        new_head: Callable[[], Head],
        objective: str,
        alpha: float | None,
        options: dict[str, Any],
        progress: Progress | None,
    ) -> TrainedHead:
        """Train once, or once for each alpha to be tried."""
        alphas: tuple[float | None, ...] = (None,)
        if objective == "selective":
            alphas = ALPHAS if alpha is None else (alpha,)
        runs = []
        for number, value in enumerate(alphas):
            chosen = options if value is None else {**options, "alpha": value}
            measure = partial(OBJECTIVES[objective], **chosen)
            before, total = number * self.epochs, len(alphas) * self.epochs
            report = partial(_report, progress, before, total)
            runs.append(self.train(new_head, measure, report)._replace(alpha=value))
        return min(runs, key=lambda run: run.score)

    def train(
        self,
        new_head: Callable[[], Head],
        objective: Objective,
        report: Callable[[int], object],
    ) -> TrainedHead:
        """Train a head until held-out documents stop improving; return the best epoch, 0 too."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)  # leaves the generators of GPUs alone
            head = new_head().to(self.device)
        if isinstance(head, ShapeHead):
            head.standardise(shape_features(self.table.records(enough(self.split.train))))
        optimiser = torch.optim.AdamW(head.parameters(), lr=self.rate)
        rng = np.random.default_rng(self.seed)
        best, best_epoch, state = self._held_out_score(head), 0, _copied(head)
        for epoch in range(1, self.epochs + 1):
            for rows, records in self._steps(head, rng):
                check_time()
                optimiser.zero_grad()
                loss(objective, records, log_sharpness(head, self.table, rows, records)).backward()
                optimiser.step()
            report(epoch)
            score = self._held_out_score(head)
            if score < best or self.keep_always:
                best, best_epoch, state = score, epoch, _copied(head)
            elif epoch - best_epoch >= PATIENCE:
                break
        head.load_state_dict(state)
        return TrainedHead(head, best_epoch, best)

    def _held_out_score(self, head: Head) -> float:
        predictions = predict_rows(head, self.table, self.split.stop)
        return float(np.average(self.score.each(predictions), weights=predictions.weight))

    def _steps(self, head: Head, rng: np.random.Generator) -> Iterator[tuple[IntArray, Records]]:
        """Yield the rows and records of each step of an epoch, in a new order."""
        table, rows = self.table, self.split.train
        if head.wants == "sequence":
            names = rng.permutation(np.unique(table.documents[rows]))
            by_length = names[np.argsort(document_lengths(table, names), kind="stable")]
            batches = list(document_chunks(table, by_length, self.batch))
            for number in rng.permutation(len(batches)):
                yield batches[number], table.records(batches[number])
            return
        chunks = np.array_split(rows, -(-len(rows) // CHUNK))
        for chunk in rng.permutation(len(chunks)):
            mixed = rng.permutation(chunks[chunk])
            for first in range(0, len(mixed), self.batch):
                some = mixed[first : first + self.batch]
                yield some, table.records(some)


def enough(rows: IntArray) -> IntArray:
    """Return at most ``ENOUGH`` of the rows, evenly spaced."""
    return np.sort(rows)[:: -(-len(rows) // ENOUGH)]


def _report(progress: Progress | None, before: int, total: int, epoch: int) -> None:
    if progress is not None:
        progress(before + epoch, total)


def _copied(head: Head) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in head.state_dict().items()}
