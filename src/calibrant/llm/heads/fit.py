"""Train a temperature head from a token table; keep it only if it beats one temperature.

Documents are split into three parts: a head is trained on the first, the second decides when to
stop (and which alpha is best, if it is searched), and the third compares the head with the best
temperature for all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from calibrant._core.checks import IntArray, check_whole
from calibrant._core.engines import Progress
from calibrant._core.logpartition import Records
from calibrant._core.options import Options, check_options, unknown_option
from calibrant._core.solve import check_time, minimise_scalar
from calibrant._core.torch_models import own_device
from calibrant.calibrators.objectives import Measured, Objective
from calibrant.calibrators.scaling import best_sharpness
from calibrant.llm.heads import fitted, modules
from calibrant.llm.heads.evaluate import Gain, paired_gain
from calibrant.llm.heads.fitted import FittedHead, predict_rows
from calibrant.llm.heads.modules import LIMIT, GlobalHead, Head
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
STOP, TEST = 0.1, 0.2
"""Fractions of the documents for early stopping and for the final comparison."""
MIN_DOCUMENTS = 5
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
    progress: Progress | None = None,
) -> FittedHead:
    """Train a temperature head on a table, and keep it only if it beats one temperature.

    The head starts at the best temperature for all tokens. Afterwards both are compared on
    held-out documents, by the likelihood for ``objective="nll"``, else by the Brier score of the
    confidence. The head is kept if its mean gain is larger than two standard errors; otherwise the
    result is the one temperature, and ``reasons`` says so.

    Parameters
    ----------
    table : TokenTable
        At least 5 documents; some hundred for a meaningful comparison.
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
    >>> fit_head(table).kept
    True
    """
    objective = objective or default_objective(head)
    of_head, of_objective = _divided(head, objective, dict(options or {}))
    alphas = _alphas(head, objective, alpha)
    check_whole("epochs", epochs)
    check_whole("batch", batch)
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
    new_head = partial(modules.make_head, head, width=width, start=start, **of_head)
    rate = RATES.get(head, LINEAR_RATE / width) if rate is None else rate
    trainer = _Trainer(table, split, score, epochs, batch, rate, keep_always, seed)
    measure = partial(OBJECTIVES[objective], **of_objective)
    best = trainer.best_of(new_head, measure, alphas, own_device(device), progress)
    results["head"] = predict_rows(best.head, table, split.test)
    best.head.cpu()
    gain = paired_gain(
        results["global"].scores()[score],
        results["head"].scores()[score],
        table.documents[split.test],
        results["head"].weight,
    )
    kept = keep_always or (best.epoch > 0 and gain.mean > STANDARD_ERRORS * gain.error)
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


def default_objective(head: str) -> str:
    """Return the objective of a head by default: the paper's for its own head."""
    return "selective" if head == "ats" else DEFAULT_OBJECTIVE


def options_for(head: str, objective: str | None = None) -> Options:
    """Return the options of a head and of its objective."""
    known = modules.head_options(head)
    if head == "global":
        return known
    return {**known, **objective_options(objective or default_objective(head))}


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
        return (None,)
    if alpha == "search":
        return ALPHAS
    alpha = PAPER_ALPHA if alpha is None else alpha
    if isinstance(alpha, str) or not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be a number from 0 to 1 or 'search', got {alpha!r}")
    return (alpha,)


def _reasons(head: str, score: str, kept: bool, always: bool, epoch: int, gain: Gain) -> str:
    if not epoch:
        return f"one temperature is kept: no epoch of the {head} head improved on it"
    which = f"the {head} head" if kept else "one temperature"
    why = " (keep_always)" if always else ""
    way = "lower" if gain.mean > 0 else "higher"
    return (
        f"{which} is kept{why}: on {gain.documents} held-out documents the {score} of the {head} "
        f"head is {abs(gain.mean):.2g} {way} than with one temperature, with a standard error of "
        f"{gain.error:.2g} (a head must gain more than {STANDARD_ERRORS} standard errors)"
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

    def best_of(
        self,
        new_head: Callable[[], Head],
        measure: Callable[..., Measured],
        alphas: tuple[float | None, ...],
        device: torch.device,
        progress: Progress | None,
    ) -> _TrainedHead:
        """Train once for each alpha, and return the head with the best score."""
        total, runs = len(alphas) * self.epochs, []
        for number, alpha in enumerate(alphas):
            objective = measure if alpha is None else partial(measure, alpha=alpha)

            def report(epoch: int, before: int = number * self.epochs) -> None:
                if progress is not None:
                    progress(before + epoch, total)

            runs.append(self.train(new_head, objective, device, report)._replace(alpha=alpha))
        return min(runs, key=lambda run: run.score)

    def train(
        self,
        new_head: Callable[[], Head],
        objective: Objective,
        device: torch.device,
        report: Callable[[int], None],
    ) -> _TrainedHead:
        """Train a head until held-out documents stop improving; return the best epoch, 0 too."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)  # leaves the generators of GPUs alone
            head = new_head().to(device)
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
            report(epoch)
            score = self._held_out_score(head)
            if score < best or self.keep_always:
                best, best_epoch, state = score, epoch, deepcopy(head.state_dict())
            elif epoch - best_epoch >= PATIENCE:
                break
        head.load_state_dict(state)
        return _TrainedHead(head, best_epoch, best)

    def _held_out_score(self, head: Head) -> float:
        predictions = predict_rows(head, self.table, self.split.stop)
        scores = predictions.scores()[self.score]
        return float(np.average(scores, weights=predictions.weight))

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
