"""Train a temperature head from a token table; keep it only if it beats one temperature.

Documents are split into three parts: a head is trained on the first, the second decides when to
stop (and which alpha is best), and the third compares it with the global temperature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from calibrant._core.checks import FloatArray, IntArray, check_choice, check_whole
from calibrant._core.chunks import Progress
from calibrant._core.logpartition import Records
from calibrant._core.solve import check_time, minimise_scalar
from calibrant._core.torch_models import own_device
from calibrant.calibrators.objectives import Objective
from calibrant.calibrators.scaling import best_sharpness
from calibrant.llm.heads import fitted, modules
from calibrant.llm.heads.evaluate import jackknife_influence
from calibrant.llm.heads.fitted import FittedHead, TokenPredictions, predict_rows
from calibrant.llm.heads.modules import LIMIT, GlobalHead, Head
from calibrant.llm.heads.objectives import OBJECTIVES, brier_correct, loss
from calibrant.llm.heads.tables import TokenTable

ALPHAS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
PATIENCE = 4
"""Epochs without improvement after which training stops."""
CHUNK = 1 << 15
"""Tokens that are read together and shuffled among each other."""
ENOUGH = 1 << 18
"""Tokens that determine one temperature to three digits; of more, this many are used."""
STOP, TEST = 0.1, 0.2
"""Fractions of the documents for early stopping and for the final comparison."""
MIN_DOCUMENTS = 5
RATES = {"mlp": 3e-4, "shape": 1e-2, "decoder": 1e-4}
LINEAR_RATE = 0.2
"""Learning rate of the linear head times its width, since AdamW moves every weight."""


def fit_head(
    table: TokenTable,
    head: str = "linear",
    objective: str = "bce",
    *,
    alpha: float | None = None,
    options: Mapping[str, Any] | None = None,
    objective_options: Mapping[str, Any] | None = None,
    epochs: int = 40,
    batch: int = 1024,
    rate: float | None = None,
    keep_always: bool = False,
    seed: int = 0,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> FittedHead:
    """Train a temperature head on a table, and keep it only if it beats the global temperature.

    Both are compared by the likelihood for ``objective="nll"``, else by the Brier score of the
    confidence. The global temperature, at which the head starts, minimises this score.

    Parameters
    ----------
    table : TokenTable
        At least 5 documents; some hundred for a meaningful comparison.
    head : {"linear", "mlp", "shape", "decoder", "global"}
    objective : {"bce", "brier", "nll", "selective", "smart"}
    alpha : float, optional
        Of the selective objective. By default the best of 0.5 to 0.01 on held-out documents.
    options, objective_options : dict, optional
        Arguments of the head and of the objective, such as ``{"units": 128}``, ``{"over": 5}``.
    epochs : int
        Largest number; training stops when held-out documents no longer improve.
    batch : int
        Tokens per step. The decoder head takes whole documents, this many tokens with padding.
    rate : float, optional
        Learning rate of AdamW; the default depends on the head.
    keep_always : bool
        Train for all epochs and keep the head regardless of held-out documents, as in the paper.
    seed : int
        Of the split, the order and the initial weights.
    device : str
        Where the head is trained. The result is on the CPU.
    progress : callable, optional
        Called with the epochs done and their largest number.

    Examples
    --------
    >>> from calibrant._core.logpartition import tabulate
    >>> from calibrant._core.chunks import examples
    >>> from calibrant.llm.models.fingerprint import ModelFingerprint
    >>> rng = np.random.default_rng(0)
    >>> hidden = rng.normal(size=(4000, 4))
    >>> logits = 2 * rng.normal(size=(4000, 10))
    >>> true = np.exp(hidden[:, :1]) * logits  # the first number says how sharp it should be
    >>> labels = (true + rng.gumbel(size=true.shape)).argmax(-1)
    >>> table = TokenTable.from_arrays(
    ...     hidden, tabulate(examples(logits, labels)), np.arange(4000) // 20,
    ...     ModelFingerprint("tiny", 4, 10, "0" * 16, None),
    ... )
    >>> fit_head(table, "linear", "nll").kept
    True
    """
    _check_arguments(head, objective, alpha, options, objective_options)
    check_whole("epochs", epochs)
    check_whole("batch", batch)
    if "alpha" in (objective_options or {}):
        raise ValueError("alpha is an argument of its own: fit_head(..., alpha=0.1)")
    fitted.check_prompts(modules.HEADS[head], table)
    split = split_documents(table.documents, seed=seed)
    score = "nll" if objective == "nll" else "brier"
    known = np.concatenate([split.train, split.stop])
    start = _best_start(table.records(_enough(known)), score)
    simple = GlobalHead(start=start)
    results = {"before": predict_rows(GlobalHead(), table, split.test)}
    results["global"] = predict_rows(simple, table, split.test)
    settings: dict[str, Any] = {"seed": seed, "temperature": math.exp(-start)}
    settings["tables"] = list(table.collections)
    if head == "global":
        figures = {name: result.figures() for name, result in results.items()}
        why = "one temperature for all tokens is kept, as asked for"
        return FittedHead(simple, table.fingerprint, score, True, why, figures, settings)
    width = table.fingerprint.hidden_size
    new_head = partial(modules.make_head, head, width=width, start=start, **(options or {}))
    rate = RATES.get(head, LINEAR_RATE / width) if rate is None else rate
    report = progress or (lambda done, total: None)
    place = own_device(device)
    trainer = _Trainer(table, split, score, epochs, batch, rate, keep_always, seed, place, report)
    best = trainer.best_of(new_head, objective, alpha, objective_options or {})
    results["head"] = predict_rows(best.head, table, split.test)
    best.head.cpu()
    gain = paired_gain(
        _scores(results["global"], score),
        _scores(results["head"], score),
        table.documents[split.test],
        results["head"].weight,
    )
    kept = keep_always or (best.epoch > 0 and gain.mean > gain.error)
    settings |= {"epoch": best.epoch, **({} if best.alpha is None else {"alpha": best.alpha})}
    return FittedHead(
        best.head if kept else simple,
        table.fingerprint,
        objective,
        kept,
        _reasons(head, score, kept, keep_always, best.epoch, gain),
        {name: result.figures() for name, result in results.items()},
        settings,
    )


def _check_arguments(head: str, objective: str, alpha: float | None, *options: object) -> None:
    check_choice("head", head, tuple(modules.HEADS))
    check_choice("objective", objective, tuple(OBJECTIVES))
    if alpha is not None and (objective != "selective" or head == "global"):
        raise ValueError(
            "alpha belongs to the selective objective of an adaptive head, got "
            f"objective={objective!r} and head={head!r}"
        )
    if head == "global" and any(options):
        raise ValueError("the global temperature has no options: remove them, or choose a head")


def _reasons(head: str, score: str, kept: bool, always: bool, epoch: int, gain: Gain) -> str:
    if not epoch:
        return f"the global temperature is kept: no epoch of the {head} head improved on it"
    which = f"the {head} head" if kept else "the global temperature"
    why = " (keep_always)" if always else ""
    way = "lower" if gain.mean > 0 else "higher"
    return (
        f"{which} is kept{why}: on {gain.documents} held-out documents the {score} of the {head} "
        f"head is {abs(gain.mean):.2g} {way} than with one temperature, with a standard error of "
        f"{gain.error:.2g}"
    )


class TokenSplit(NamedTuple):
    """Rows of the documents to train on, to stop early by, and to test on."""

    train: IntArray
    stop: IntArray
    test: IntArray


def split_documents(documents: IntArray, *, seed: int = 0) -> TokenSplit:
    """Split tokens ``(n,)`` by document: 70 % for training, 10 % for stopping, 20 % for testing."""
    names, member = np.unique(documents, return_inverse=True)
    if len(names) < MIN_DOCUMENTS:
        raise ValueError(f"at least {MIN_DOCUMENTS} documents are needed, got {len(names)}")
    order = np.random.default_rng(seed).permutation(len(names))[member]
    test = max(2, round(TEST * len(names)))
    stop = test + max(1, round(STOP * len(names)))
    masks = (order >= stop, (order >= test) & (order < stop), order < test)
    return TokenSplit(*(np.flatnonzero(mask) for mask in masks))


def _enough(rows: IntArray) -> IntArray:
    """Return at most ``ENOUGH`` of the rows, evenly spaced."""
    return np.sort(rows)[:: -(-len(rows) // ENOUGH)]


def _best_start(records: Records, score: str) -> float:
    """Return the one log-sharpness with the best score."""
    if score == "nll":
        solution = best_sharpness(records)
    else:
        solution = minimise_scalar(lambda u: brier_correct(records, u).value, -LIMIT, LIMIT)
    return float(np.clip(solution.x[0], -LIMIT, LIMIT))


def _scores(predictions: TokenPredictions, score: str) -> FloatArray:
    """Return the score of each token ``(n,)``."""
    if score == "nll":
        return predictions.nll
    return np.asarray((predictions.confidence - predictions.correct) ** 2)


class _TrainedHead(NamedTuple):
    """A head at its best epoch, with its score there."""

    head: Head
    epoch: int
    score: float
    alpha: float | None = None


class _Trainer(NamedTuple):
    """Data and settings that the training runs for several alphas share."""

    table: TokenTable
    split: TokenSplit
    score: str
    epochs: int
    batch: int
    rate: float
    keep_always: bool
    seed: int
    device: torch.device
    progress: Progress

    def best_of(
        self,
        new_head: Callable[[], Head],
        objective: str,
        alpha: float | None,
        options: Mapping[str, Any],
    ) -> _TrainedHead:
        """Train once, or once for each alpha to be tried."""
        if objective != "selective":
            return self.train(new_head, partial(OBJECTIVES[objective], **options), 0, self.epochs)
        alphas = ALPHAS if alpha is None else (alpha,)
        runs = []
        for number, value in enumerate(alphas):
            measure = partial(OBJECTIVES[objective], **options, alpha=value)
            before, total = number * self.epochs, len(alphas) * self.epochs
            runs.append(self.train(new_head, measure, before, total)._replace(alpha=value))
        return min(runs, key=lambda run: run.score)

    def train(
        self, new_head: Callable[[], Head], objective: Objective, before: int, total: int
    ) -> _TrainedHead:
        """Train a head until held-out documents stop improving; return the best epoch, 0 too."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)  # leaves the generators of GPUs alone
            head = new_head().to(self.device)
        if isinstance(head, modules.ShapeHead):
            head.standardise(modules.shape_features(self.table.records(_enough(self.split.train))))
        optimiser = torch.optim.AdamW(head.parameters(), lr=self.rate)
        rng = np.random.default_rng(self.seed)
        best, best_epoch, state = self._held_out_score(head), 0, deepcopy(head.state_dict())
        for epoch in range(1, self.epochs + 1):
            for rows, records in self._steps(head, rng):
                check_time()
                optimiser.zero_grad()
                loss(
                    objective, records, fitted.log_sharpness(head, self.table, rows, records)
                ).backward()
                optimiser.step()
            self.progress(before + epoch, total)
            score = self._held_out_score(head)
            if score < best or self.keep_always:
                best, best_epoch, state = score, epoch, deepcopy(head.state_dict())
            elif epoch - best_epoch >= PATIENCE:
                break
        head.load_state_dict(state)
        return _TrainedHead(head, best_epoch, best)

    def _held_out_score(self, head: Head) -> float:
        predictions = predict_rows(head, self.table, self.split.stop)
        return float(np.average(_scores(predictions, self.score), weights=predictions.weight))

    def _steps(self, head: Head, rng: np.random.Generator) -> Iterator[tuple[IntArray, Records]]:
        """Yield the rows and records of each step of an epoch, in a new order."""
        table, rows = self.table, self.split.train
        if head.wants == "sequence":
            names = rng.permutation(np.unique(table.documents[rows]))
            by_length = names[np.argsort(table.document_lengths(names), kind="stable")]
            batches = list(table.document_chunks(by_length, self.batch))
            for number in rng.permutation(len(batches)):
                yield batches[number], table.records(batches[number])
            return
        chunks = np.array_split(rows, -(-len(rows) // CHUNK))
        for chunk in rng.permutation(len(chunks)):
            mixed = rng.permutation(chunks[chunk])
            for first in range(0, len(mixed), self.batch):
                some = mixed[first : first + self.batch]
                yield some, table.records(some)


class Gain(NamedTuple):
    """Mean improvement of one head over another, with its standard error."""

    mean: float
    error: float
    documents: int


def paired_gain(
    before: FloatArray, after: FloatArray, documents: IntArray, weight: FloatArray
) -> Gain:
    """Mean difference of the scores of tokens, with documents as the sampling unit.

    Tokens of one text are correlated, so the error is the jackknife's over documents; it is
    infinite if one document holds all the weight.
    """
    _, member = np.unique(documents, return_inverse=True)
    total = np.bincount(member, weight * (before - after))
    mass = np.bincount(member, weight)
    mean, count = float(total.sum() / mass.sum()), len(total)
    if not (mass < mass.sum()).all():
        return Gain(mean, math.inf, count)
    error = np.linalg.norm(jackknife_influence(np.column_stack([mass, total])))
    return Gain(mean, float(error), count)
