"""Train a temperature head from a token table; keep it only if it beats one temperature.

Of the documents outside a fold, some decide when to stop, and which alpha is best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from calibrant._core.checks import IntArray, check_choice, check_whole
from calibrant._core.engines import steps
from calibrant._core.options import Options, check_options, options_of, unknown_option
from calibrant._core.solve import check_time, minimise_scalar
from calibrant._core.torch_models import own_device
from calibrant.calibrators.objectives import (
    Measured,
    Objective,
    confidence_brier,
    confidence_nll,
    nll,
    soft_ece,
)
from calibrant.calibrators.scaling import best_sharpness
from calibrant.llm.heads.ats import _document_batches, _selective
from calibrant.llm.heads.fitted import (
    HEADS,
    FittedHead,
    TokenPredictions,
    _check_prompts,
    _head_options,
    _log_sharpness,
    _make_head,
    _predict_rows,
)
from calibrant.llm.heads.modules import LIMIT, GlobalHead, Head, ShapeHead, _shape_features
from calibrant.llm.heads.tables import TokenTable
from calibrant.metrics.clustered import Gain, paired_gain

Alpha: TypeAlias = float | Literal["search"]

DEFAULT_HEAD, DEFAULT_OBJECTIVE = "linear", "nll"
_ALPHAS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
"""Weights of wrong tokens among which ``alpha="search"`` chooses; the first is the paper's."""
STANDARD_ERRORS = 2
"""A head is kept if its gain over one temperature is larger than this many standard errors."""
_PATIENCE = 4
"""Epochs without improvement after which training stops."""
_CHUNK = 1 << 15
"""Tokens that are read together and shuffled among each other."""
_ENOUGH = 1 << 18
"""Tokens that determine one temperature to three digits; no more are used."""
_FOLDS = 5
_STOP = 0.1
"""Fraction of the documents that decides when to stop."""
_MIN_DOCUMENTS = 5
_MAX_CROSS_FITTED = 1000
"""Largest number of documents with which every fold is held out in turn."""
_RATES = {"mlp": 3e-4, "shape": 1e-2, "ats": 1e-4}
_LINEAR_RATE = 0.2
"""Learning rate of the linear head times its width, since AdamW moves every weight."""


OBJECTIVES: dict[str, Callable[..., Measured]] = {
    "nll": nll,
    "selective": _selective,
    "bce": confidence_nll,
    "brier": confidence_brier,
    "smart": partial(soft_ece, delta=1e-3),  # with SMART's Charbonnier penalty, over a batch
}
"""Objectives by name; the Brier score is that of the confidence."""


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
    It is kept if its mean gain is larger than two standard errors. Up to 1,000 documents are held
    out in turn, in five folds, and a head that is kept is trained once more on all of them. Of more
    documents, and for the ATS head, whose training takes long, one fold is held out. The callback
    of :func:`calibrant.use` is called with the epochs done and their largest number.

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
    """
    objective = objective or _default_objective(head)
    of_head, objectives = _checked(head, objective, alpha, dict(options or {}))
    check_whole("epochs", epochs)
    check_whole("batch", batch)
    _check_prompts(HEADS[head], table)
    width = table.fingerprint.hidden_size
    trainer = _Trainer(
        table,
        score="nll" if objective == "nll" else "brier",
        new_head=partial(_make_head, head, width=width, **of_head),
        objectives=objectives,
        epochs=epochs,
        batch=batch,
        rate=_RATES.get(head, _LINEAR_RATE / width) if rate is None else rate,
        keep_always=keep_always,
        seed=seed,
        device=own_device(device),
    )
    few = len(np.unique(table.documents)) <= _MAX_CROSS_FITTED
    folds = _FOLDS if few and not keep_always and HEADS[head].wants != "sequence" else 1
    with steps(epochs * len(objectives) * (folds + (folds > 1))) as report:
        runs = [trainer.run(fold, report) for fold in range(folds)]
        results, gain = trainer.compared(runs)
        kept = keep_always or gain.mean > STANDARD_ERRORS * gain.error
        last = runs[0]
        if folds > 1:
            last = (trainer if kept else trainer._replace(objectives={})).run(None, report)
    improved = last.epoch > 0 if kept else any(run.epoch for run in runs)
    kept = kept and improved
    figures = {name: result.figures() for name, result in results.items()}
    simple = GlobalHead(start=last.start)
    settings: dict[str, Any] = {"seed": seed, "temperature": math.exp(-last.start)}
    settings["tables"] = list(table.collections)
    if head == "global":
        del figures["head"]
        why = "one temperature for all tokens is kept, as asked for"
        return FittedHead(simple, table.fingerprint, trainer.score, True, why, figures, settings)
    settings |= {"gain": gain.mean, "standard_error": gain.error}
    if kept or folds == 1:
        settings |= {"epoch": last.epoch, **({} if last.alpha is None else {"alpha": last.alpha})}
    why = f"one temperature is kept: no epoch of the {head} head improved on it"
    if improved:
        which = f"the {head} head" if kept else "one temperature"
        way = "lower" if gain.mean > 0 else "higher"
        why = (
            f"{which} is kept{' (keep_always)' if keep_always else ''}: on {gain.documents} "
            f"held-out documents the {trainer.score} of the {head} head is {abs(gain.mean):.2g} "
            f"{way} than with one temperature, with a standard error of {gain.error:.2g} (a head "
            f"must gain more than {STANDARD_ERRORS} standard errors)"
        )
    best = last.head.cpu() if kept else simple
    return FittedHead(best, table.fingerprint, objective, kept, why, figures, settings)


def options_for(head: str, objective: str | None = None) -> Options:
    """Return the options of a head and of its objective."""
    known = _head_options(head)
    if head == "global":
        return known
    return {**known, **_objective_options(objective or _default_objective(head))}


def _objective_options(name: str) -> Options:
    """Return the options of an objective; ``alpha`` is one of :func:`fit_head` itself."""
    check_choice("objective", name, tuple(OBJECTIVES))
    inner = ("records", "u", "curve", "alpha")
    return {key: one for key, one in options_of(OBJECTIVES[name]).items() if key not in inner}


def _default_objective(head: str) -> str:
    """Return the default objective of a head: that of the paper for the ATS head."""
    return "selective" if head == "ats" else DEFAULT_OBJECTIVE


def _checked(
    head: str, objective: str, alpha: Alpha | None, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[float | None, Objective]]:
    """Return the options of the head, and the objectives to train with by their alpha."""
    if "alpha" in options:
        raise ValueError("alpha is an argument of its own: fit_head(..., alpha=0.1)")
    of_objective, known = _objective_options(objective), options_for(head, objective)
    for name in options.keys() - known.keys():
        raise unknown_option(f"the {head} head", name, known)
    checked = check_options(known, options)
    of_head = {name: checked.pop(name) for name in options if name not in of_objective}
    measure = partial(OBJECTIVES[objective], **checked)
    if objective != "selective" or head == "global":
        if alpha is not None:
            raise ValueError(
                "alpha belongs to the selective objective of an adaptive head, got "
                f"objective={objective!r} and head={head!r}"
            )
        return of_head, {} if head == "global" else {None: measure}
    alpha = _ALPHAS[0] if alpha is None else alpha
    if alpha != "search" and (isinstance(alpha, str) or not 0 <= alpha <= 1):
        raise ValueError(f"alpha must be a number from 0 to 1 or 'search', got {alpha!r}")
    alphas = _ALPHAS if alpha == "search" else (alpha,)
    return of_head, {each: partial(measure, alpha=each) for each in alphas}


def _split_documents(
    documents: IntArray, seed: int, fold: int | None
) -> tuple[IntArray, IntArray, IntArray]:
    """Split tokens ``(n,)`` by document, into rows for training, for stopping and for testing.

    One of five folds is for testing, or nothing if ``fold`` is None. A tenth of all documents is
    for stopping.
    """
    names, member = np.unique(documents, return_inverse=True)
    count = len(names)
    if count < _MIN_DOCUMENTS:
        raise ValueError(f"at least {_MIN_DOCUMENTS} documents are needed, got {count}")
    first, end = (0, 0) if fold is None else (round(n * count / _FOLDS) for n in (fold, fold + 1))
    order = (np.random.default_rng(seed).permutation(count) - first)[member] % count
    test = end - first
    stop = test + max(1, round(_STOP * count))
    train, stopping = order >= stop, (order >= test) & (order < stop)
    return np.flatnonzero(train), np.flatnonzero(stopping), np.flatnonzero(order < test)


def _enough(rows: IntArray) -> IntArray:
    """Return at most ``_ENOUGH`` of the rows, evenly spaced."""
    return np.sort(rows)[:: -(-len(rows) // _ENOUGH)]


class _Run(NamedTuple):
    """A head at its best epoch, after which documents for stopping have the lowest score."""

    test: IntArray
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

    def run(self, fold: int | None, report: Callable[[], None]) -> _Run:
        """Train a head without a fold, for each alpha, and return the best one.

        It starts at the one temperature with the best score on all documents but the test's;
        without objectives that is the result.
        """
        train, stop, test = _split_documents(self.table.documents, self.seed, fold)
        records = self.table.records(_enough(np.concatenate([train, stop])))
        if self.score == "nll":
            solution = best_sharpness(records)
        else:
            solution = minimise_scalar(lambda u: confidence_brier(records, u).value, -LIMIT, LIMIT)
        start = float(np.clip(solution.x[0], -LIMIT, LIMIT))
        runs = [
            _Run(test, start, *self._trained(train, stop, start, objective, report), alpha)
            for alpha, objective in self.objectives.items()
        ]
        simple = _Run(test, start, GlobalHead(start=start))
        return min(runs, key=lambda run: run.score, default=simple)

    def _trained(
        self,
        train: IntArray,
        stop: IntArray,
        start: float,
        objective: Objective,
        report: Callable[[], None],
    ) -> tuple[Head, int, float]:
        """Train a head until documents for stopping do not improve.

        Returns it at its best epoch, which may be 0, with the epoch and the score there.
        """
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)  # leaves the generators of GPUs alone
            head = self.new_head(start=start).to(self.device)
        if isinstance(head, ShapeHead):
            head.standardise(_shape_features(self.table.records(_enough(train))))
        optimiser = torch.optim.AdamW(head.parameters(), lr=self.rate)
        rng = np.random.default_rng(self.seed)
        best, best_epoch, state = self._stop_score(head, stop), 0, deepcopy(head.state_dict())
        for epoch in range(1, self.epochs + 1):
            for rows in self._batches(head, train, rng):
                check_time()
                optimiser.zero_grad()
                records = self.table.records(rows)
                u = _log_sharpness(head, self.table, rows, records)
                gradient = objective(records, u.detach().cpu().double().numpy()).gradient
                u.backward(torch.from_numpy(gradient).to(u))
                optimiser.step()
            report()
            score = self._stop_score(head, stop)
            if score < best or self.keep_always:
                best, best_epoch, state = score, epoch, deepcopy(head.state_dict())
            elif epoch - best_epoch >= _PATIENCE:
                break
        head.load_state_dict(state)
        return head, best_epoch, best

    def _stop_score(self, head: Head, stop: IntArray) -> float:
        predictions = _predict_rows(head, self.table, stop)
        scores = predictions.scores()[self.score]
        return float(np.average(scores, weights=predictions.weight))

    def _batches(self, head: Head, rows: IntArray, rng: np.random.Generator) -> Iterator[IntArray]:
        """Yield the rows of each step of an epoch, in a new order."""
        if head.wants == "sequence":
            yield from _document_batches(self.table, rows, self.batch, rng)
            return
        chunks = np.array_split(rows, -(-len(rows) // _CHUNK))
        for chunk in rng.permutation(len(chunks)):
            mixed = rng.permutation(chunks[chunk])
            for first in range(0, len(mixed), self.batch):
                yield mixed[first : first + self.batch]

    def compared(self, runs: list[_Run]) -> tuple[dict[str, TokenPredictions], Gain]:
        """Predict the documents that no run has seen; what heads gain there over one temperature.

        The predictions are those without a head, with one temperature, and with the heads.
        """
        results = {}
        for name in ("before", "global", "head"):
            parts = []
            for run in runs:
                simple = GlobalHead(start=run.start if name == "global" else 0.0)
                own = run.head if name == "head" else simple
                parts.append(_predict_rows(own, self.table, run.test))
            results[name] = TokenPredictions(*map(np.concatenate, zip(*parts, strict=True)))
        before, after = (results[name].scores()[self.score] for name in ("global", "head"))
        documents = self.table.documents[np.concatenate([run.test for run in runs])]
        return results, paired_gain(before, after, documents, results["head"].weight)
