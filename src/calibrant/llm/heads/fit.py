"""Train a temperature head from a token table; keep it only if it beats one temperature.

Documents are divided into five folds. A head is trained without those of one fold and compared
there with the best temperature for all tokens. Some of the other documents decide when to stop,
and which alpha is best if it is searched. Cross-fitting does so for each fold in turn, and all
documents take part in the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from calibrant._core.checks import IntArray, check_whole
from calibrant._core.engines import steps
from calibrant._core.logpartition import Records
from calibrant._core.options import Options, check_options, unknown_option
from calibrant._core.solve import check_time, minimise_scalar
from calibrant._core.torch_models import own_device
from calibrant.calibrators.objectives import Objective
from calibrant.calibrators.scaling import best_sharpness
from calibrant.llm.heads import fitted, modules
from calibrant.llm.heads.evaluate import Gain, paired_gain
from calibrant.llm.heads.fitted import FittedHead, TokenPredictions, predict_rows
from calibrant.llm.heads.modules import HEADS, LIMIT, GlobalHead, Head
from calibrant.llm.heads.objectives import OBJECTIVES, brier_correct, loss, objective_options
from calibrant.llm.heads.tables import TokenTable

Alpha: TypeAlias = float | Literal["search"]

DEFAULT_HEAD, DEFAULT_OBJECTIVE = "linear", "nll"
PAPER_ALPHA = 0.5
ALPHAS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
"""Weights of wrong tokens in selective smoothing, among which ``alpha="search"`` chooses."""
STANDARD_ERRORS = 2
"""A head is kept if its gain over one temperature is larger than this many standard errors."""
PATIENCE = 4
"""Epochs without improvement after which training stops."""
CHUNK = 1 << 15
"""Tokens that are read together and shuffled among each other."""
ENOUGH = 1 << 18
"""Tokens that determine one temperature to three digits; of more, this many are used."""
FOLDS = 5
STOP = 0.1
"""Fraction of the documents that decides when to stop."""
MIN_DOCUMENTS = 5
MAX_CROSS_FITTED = 1000
"""Largest number of documents of which every fold is held out in turn."""
RATES = {"mlp": 3e-4, "shape": 1e-2, "ats": 1e-4}
LINEAR_RATE = 0.2
"""Learning rate of the linear head times its width, since AdamW moves every weight."""


def fit_head(
    table: TokenTable,
    head: str = DEFAULT_HEAD,
    objective: str | None = None,
    *,
    alpha: Alpha | None = None,
    options: Mapping[str, Any] | None = None,
    epochs: int = 40,
    batch: int = 1024,
    rate: float | None = None,
    keep_always: bool = False,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> FittedHead:
    """Train a temperature head on a table, and keep it only if it beats one temperature.

    The head starts at the best temperature for all tokens, and is compared with it on held-out
    documents, by the likelihood for ``objective="nll"``, else by the Brier score of the confidence.
    It is kept if its mean gain is larger than two standard errors; otherwise the result is the one
    temperature, and ``reasons`` says so.

    Up to 1,000 documents are held out in turn, in five folds, and a head that is kept is trained
    once more on all of them. Of more documents, and for the ATS head, whose training takes long,
    one fold is held out. The callback of :func:`calibrant.use` is called with the epochs done and
    their largest number.

    Parameters
    ----------
    table : TokenTable
        At least 5 documents; a hundred or more for a meaningful comparison.
    head : {"linear", "mlp", "shape", "ats", "global"}
        ``ats`` is the transformer head of adaptive temperature scaling (Xie et al. 2024).
    objective : {"nll", "bce", "brier", "selective", "smart"}, optional
        By default ``selective``, the paper's, for ``ats``, and ``nll`` for the others.
    alpha : float or "search", optional
        Weight of wrong tokens in the selective objective, by default the paper's 0.5. ``"search"``
        takes the best of 0.5 to 0.01 on held-out documents.
    options : dict, optional
        Options of the head and of the objective, such as ``{"units": 128}`` or ``{"over": 5}``.
    epochs : int
        Largest number; training stops when held-out documents no longer improve.
    batch : int
        Tokens per step. The ATS head takes whole documents, this many tokens with padding.
    rate : float, optional
        Learning rate of AdamW; the default depends on the head.
    keep_always : bool
        Train for all epochs and keep the head regardless of held-out documents, as in the paper.
    seed : int
        Of the split, the order and the initial weights.
    device : str
        Where the head is trained. The result is on the CPU.

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
    >>> fit_head(table).kept
    True
    """
    objective = objective or _default_objective(head)
    of_head, of_objective = _divided(head, objective, dict(options or {}))
    alphas = _alphas(head, objective, alpha)
    check_whole("epochs", epochs)
    check_whole("batch", batch)
    fitted.check_prompts(HEADS[head], table)
    width = table.fingerprint.hidden_size
    measure = partial(OBJECTIVES[objective], **of_objective)
    trainer = _Trainer(
        table,
        score="nll" if objective == "nll" else "brier",
        new_head=partial(modules.make_head, head, width=width, **of_head),
        objectives={a: measure if a is None else partial(measure, alpha=a) for a in alphas},
        epochs=epochs,
        batch=batch,
        rate=RATES.get(head, LINEAR_RATE / width) if rate is None else rate,
        keep_always=keep_always,
        seed=seed,
        device=own_device(device),
    )
    split = partial(split_documents, table.documents, seed)
    few = len(np.unique(table.documents)) <= MAX_CROSS_FITTED
    folds = FOLDS if few and not keep_always and HEADS[head].wants != "sequence" else 1
    with steps(epochs * len(alphas) * (folds + (folds > 1))) as report:
        runs = [trainer.run(split(fold), report) for fold in range(folds)]
        results, gain = _compared(table, runs, trainer.score)
        kept = keep_always or gain.mean > STANDARD_ERRORS * gain.error
        last = runs[0]
        if folds > 1:
            last = (trainer if kept else trainer._replace(objectives={})).run(split(None), report)
    improved = last.epoch > 0 if kept else any(run.epoch for run in runs)
    kept = kept and improved
    figures = {name: result.figures() for name, result in results.items()}
    settings: dict[str, Any] = {"seed": seed, "temperature": math.exp(-last.start)}
    settings["tables"] = list(table.collections)
    simple = GlobalHead(start=last.start)
    if head == "global":
        del figures["head"]
        why = "one temperature for all tokens is kept, as asked for"
        return FittedHead(simple, table.fingerprint, trainer.score, True, why, figures, settings)
    settings |= {"gain": gain.mean, "standard_error": gain.error}
    if kept or folds == 1:
        settings |= {"epoch": last.epoch, **({} if last.alpha is None else {"alpha": last.alpha})}
    why = _reasons(head, trainer.score, kept, keep_always, improved, gain)
    best = last.head.cpu() if kept else simple
    return FittedHead(best, table.fingerprint, objective, kept, why, figures, settings)


def _default_objective(head: str) -> str:
    """Return the objective of a head by default: the paper's for its own head."""
    return "selective" if head == "ats" else DEFAULT_OBJECTIVE


def options_for(head: str, objective: str | None = None) -> Options:
    """Return the options of a head and of its objective."""
    known = modules.head_options(head)
    if head == "global":
        return known
    return {**known, **objective_options(objective or _default_objective(head))}


def _divided(
    head: str, objective: str, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Check options, and divide them into those of the head and those of the objective."""
    if "alpha" in options:
        raise ValueError("alpha is an argument of its own: fit_head(..., alpha=0.1)")
    of_objective = objective_options(objective)
    known = options_for(head, objective)
    for name in options.keys() - known.keys():
        raise unknown_option(f"the {head} head", name, known)
    checked = check_options(known, options)
    return (
        {name: value for name, value in checked.items() if name not in of_objective},
        {name: value for name, value in checked.items() if name in of_objective},
    )


def _alphas(head: str, objective: str, alpha: Alpha | None) -> tuple[float | None, ...]:
    """Return the values of alpha to train with; None for objectives without it."""
    if objective != "selective" or head == "global":
        if alpha is not None:
            raise ValueError(
                "alpha belongs to the selective objective of an adaptive head, got "
                f"objective={objective!r} and head={head!r}"
            )
        return () if head == "global" else (None,)
    if alpha == "search":
        return ALPHAS
    alpha = PAPER_ALPHA if alpha is None else alpha
    if isinstance(alpha, str) or not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be a number from 0 to 1 or 'search', got {alpha!r}")
    return (alpha,)


def _reasons(head: str, score: str, kept: bool, always: bool, improved: bool, gain: Gain) -> str:
    if not improved:
        return f"one temperature is kept: no epoch of the {head} head improved on it"
    which = f"the {head} head" if kept else "one temperature"
    why = " (keep_always)" if always else ""
    way = "lower" if gain.mean > 0 else "higher"
    return (
        f"{which} is kept{why}: on {gain.documents} held-out documents the {score} of the {head} "
        f"head is {abs(gain.mean):.2g} {way} than with one temperature, with a standard error of "
        f"{gain.error:.2g} (a head must gain more than {STANDARD_ERRORS} standard errors)"
    )


class _Split(NamedTuple):
    """Rows of the documents to train on, to stop early by, and to test on."""

    train: IntArray
    stop: IntArray
    test: IntArray


def split_documents(documents: IntArray, seed: int, fold: int | None) -> _Split:
    """Split tokens ``(n,)`` by document, one of five folds for testing; none if ``fold`` is None.

    A tenth of all documents is for stopping, the rest for training.
    """
    names, member = np.unique(documents, return_inverse=True)
    count = len(names)
    if count < MIN_DOCUMENTS:
        raise ValueError(f"at least {MIN_DOCUMENTS} documents are needed, got {count}")
    first, end = (0, 0) if fold is None else (round(n * count / FOLDS) for n in (fold, fold + 1))
    order = (np.random.default_rng(seed).permutation(count) - first)[member] % count
    test = end - first
    stop = test + max(1, round(STOP * count))
    masks = (order >= stop, (order >= test) & (order < stop), order < test)
    return _Split(*(np.flatnonzero(mask) for mask in masks))


def _enough(rows: IntArray) -> IntArray:
    """Return at most ``ENOUGH`` of the rows, evenly spaced."""
    return np.sort(rows)[:: -(-len(rows) // ENOUGH)]


class _Run(NamedTuple):
    """A head at its best epoch, after which documents for stopping have the lowest score."""

    split: _Split
    start: float  # the best log-sharpness for all tokens
    head: Head
    epoch: int = 0
    score: float = math.inf
    alpha: float | None = None


class _Trainer(NamedTuple):
    """Data and settings that all training runs share."""

    table: TokenTable
    score: str
    new_head: Callable[..., Head]
    objectives: Mapping[float | None, Objective]
    epochs: int
    batch: int
    rate: float
    keep_always: bool
    seed: int
    device: torch.device

    def run(self, split: _Split, report: Callable[[], None]) -> _Run:
        """Train a head from the best temperature on, for each alpha, and return the best one.

        Without objectives that is the temperature itself.
        """
        start = self._start(split)
        runs = [
            self._trained(split, start, objective, report)._replace(alpha=alpha)
            for alpha, objective in self.objectives.items()
        ]
        simple = _Run(split, start, GlobalHead(start=start))
        return min(runs, key=lambda run: run.score, default=simple)

    def _start(self, split: _Split) -> float:
        """Return the one log-sharpness with the best score on all documents but the test's."""
        records = self.table.records(_enough(np.concatenate([split.train, split.stop])))
        if self.score == "nll":
            solution = best_sharpness(records)
        else:
            solution = minimise_scalar(lambda u: brier_correct(records, u).value, -LIMIT, LIMIT)
        return float(np.clip(solution.x[0], -LIMIT, LIMIT))

    def _trained(
        self, split: _Split, start: float, objective: Objective, report: Callable[[], None]
    ) -> _Run:
        """Train a head until documents for stopping do not improve; the best epoch may be 0."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)  # leaves the generators of GPUs alone
            head = self.new_head(start=start).to(self.device)
        if isinstance(head, modules.ShapeHead):
            head.standardise(modules.shape_features(self.table.records(_enough(split.train))))
        optimiser = torch.optim.AdamW(head.parameters(), lr=self.rate)
        rng = np.random.default_rng(self.seed)
        best, best_epoch, state = self._score(head, split), 0, deepcopy(head.state_dict())
        for epoch in range(1, self.epochs + 1):
            for rows, records in self._steps(head, split.train, rng):
                check_time()
                optimiser.zero_grad()
                u = fitted.log_sharpness(head, self.table, rows, records)
                loss(objective, records, u).backward()
                optimiser.step()
            report()
            score = self._score(head, split)
            if score < best or self.keep_always:
                best, best_epoch, state = score, epoch, deepcopy(head.state_dict())
            elif epoch - best_epoch >= PATIENCE:
                break
        head.load_state_dict(state)
        return _Run(split, start, head, best_epoch, best)

    def _score(self, head: Head, split: _Split) -> float:
        predictions = predict_rows(head, self.table, split.stop)
        scores = predictions.scores()[self.score]
        return float(np.average(scores, weights=predictions.weight))

    def _steps(
        self, head: Head, rows: IntArray, rng: np.random.Generator
    ) -> Iterator[tuple[IntArray, Records]]:
        """Yield the rows and records of each step of an epoch, in a new order."""
        table = self.table
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


def _compared(
    table: TokenTable, runs: Sequence[_Run], score: str
) -> tuple[dict[str, TokenPredictions], Gain]:
    """Predict the documents that no run has seen; what heads gain there over one temperature."""
    heads: dict[str, list[Head]] = {
        "before": [GlobalHead() for _ in runs],
        "global": [GlobalHead(start=run.start) for run in runs],
        "head": [run.head for run in runs],
    }
    results = {}
    for name, own in heads.items():
        parts = [predict_rows(h, table, run.split.test) for h, run in zip(own, runs, strict=True)]
        results[name] = TokenPredictions(*map(np.concatenate, zip(*parts, strict=True)))
    before, after = (results[name].scores()[score] for name in ("global", "head"))
    documents = table.documents[np.concatenate([run.split.test for run in runs])]
    return results, paired_gain(before, after, documents, results["head"].weight)
