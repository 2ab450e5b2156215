"""Train a temperature head from a token table; keep it only if it beats one temperature.

Documents are split into three parts: a head is trained on the first, the second decides when to
stop (and which alpha is best), and the third compares it with the global temperature. A head is
not kept unless it wins there by more than the standard error of the difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from calibrant._core.checks import FloatArray, IntArray, check_choice
from calibrant._core.chunks import Progress
from calibrant._core.torch_models import own_device
from calibrant.llm.heads.fitted import FittedHead
from calibrant.llm.heads.modules import HEADS, GlobalHead, make_head
from calibrant.llm.heads.objectives import OBJECTIVES
from calibrant.llm.heads.predict import check_prompts, predict_rows
from calibrant.llm.heads.training import Score, Trainer, enough, split_documents
from calibrant.llm.tokens.evaluate import jackknife_influence
from calibrant.llm.tokens.tables import TokenTable

RATES = {"mlp": 3e-4, "shape": 1e-2, "decoder": 1e-4}
"""Learning rates."""
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

    The global temperature, at which the head starts, minimises the score by which both are
    compared: the likelihood for ``objective="nll"``, else the Brier score of the confidence.

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

    Returns
    -------
    FittedHead

    Examples
    --------
    >>> from calibrant._core.logpartition import tabulate
    >>> from calibrant._core.chunks import examples
    >>> from calibrant.llm.fingerprint import ModelFingerprint
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
    _check_arguments(head, objective, alpha, options, objective_options, epochs, batch)
    check_prompts(HEADS[head], table)
    split = split_documents(table.documents, seed=seed)
    score = Score.of(objective)
    start = score.best(table.records(enough(np.concatenate([split.train, split.stop]))))
    simple = GlobalHead(start=start)
    results = {"before": predict_rows(GlobalHead(), table, split.test)}
    results["global"] = predict_rows(simple, table, split.test)
    settings: dict[str, Any] = {"seed": seed, "temperature": math.exp(-start)}
    settings["tables"] = list(table.collections)
    if head == "global":
        figures = {name: result.figures() for name, result in results.items()}
        why = "one temperature for all tokens is kept, as asked for"
        return FittedHead(simple, table.fingerprint, score.name, True, why, figures, settings)
    width = table.fingerprint.hidden_size
    new_head = partial(make_head, head, width=width, start=start, **dict(options or {}))
    rate = RATES.get(head, LINEAR_RATE / width) if rate is None else rate
    trainer = Trainer(
        table, split, score, epochs, batch, rate, keep_always, seed, own_device(device)
    )
    best = trainer.best_of(new_head, objective, alpha, dict(objective_options or {}), progress)
    results["head"] = predict_rows(best.head, table, split.test)
    best.head.cpu()
    gain = paired_gain(
        score.each(results["global"]),
        score.each(results["head"]),
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
        _reasons(head, score.name, kept, keep_always, best.epoch, gain),
        {name: result.figures() for name, result in results.items()},
        settings,
    )


def _check_arguments(
    head: str,
    objective: str,
    alpha: float | None,
    options: Mapping[str, Any] | None,
    objective_options: Mapping[str, Any] | None,
    epochs: int,
    batch: int,
) -> None:
    check_choice("head", head, tuple(HEADS))
    check_choice("objective", objective, tuple(OBJECTIVES))
    if min(epochs, batch) < 1:
        raise ValueError(f"epochs and batch must be at least 1, got {epochs} and {batch}")
    if alpha is not None and (objective != "selective" or head == "global"):
        raise ValueError(
            "alpha belongs to the selective objective of an adaptive head, got "
            f"objective={objective!r} and head={head!r}"
        )
    if "alpha" in (objective_options or {}):
        raise ValueError("alpha is an argument of its own: fit_head(..., alpha=0.1)")
    if head == "global" and (options or objective_options):
        raise ValueError("the global temperature has no options: remove them, or choose a head")


def _reasons(head: str, score: str, kept: bool, always: bool, epoch: int, gain: Gain) -> str:
    if not epoch:
        return (
            f"the global temperature is kept: no epoch of the {head} head was better on held-out "
            "documents"
        )
    which = f"the {head} head" if kept else "the global temperature"
    why = " (keep_always)" if always else ""
    way = "lower" if gain.mean > 0 else "higher"
    return (
        f"{which} is kept{why}: on {gain.documents} held-out documents the {score} of the {head} "
        f"head is {abs(gain.mean):.2g} {way} than with one temperature, with a standard error of "
        f"{gain.error:.2g}"
    )


class Gain(NamedTuple):
    """Mean improvement of one head over another, with its standard error."""

    mean: float
    error: float
    documents: int


def paired_gain(
    before: FloatArray, after: FloatArray, documents: IntArray, weight: FloatArray
) -> Gain:
    """Mean difference of the scores of tokens, with documents as the sampling unit.

    Tokens of one text are correlated, so the error comes from the totals of documents: it is that
    of a ratio, total difference over total weight, by the jackknife. (A document pulls the mean
    towards itself, a long one more, which hides its own deviation; leaving it out does not.) If
    one document holds all the weight, the error is infinite.

    >>> paired_gain(np.array([2.0, 2.0, 3.0]), np.ones(3), np.array([0, 0, 1]), np.ones(3)).mean
    1.333...
    """
    _, member = np.unique(documents, return_inverse=True)
    total = np.bincount(member, weight * (before - after))
    mass = np.bincount(member, weight)
    mean, count = float(total.sum() / mass.sum()), len(total)
    if not (mass < mass.sum()).all():
        return Gain(mean, math.inf, count)
    error = np.linalg.norm(jackknife_influence(np.column_stack([mass, total])))
    return Gain(mean, float(error), count)
