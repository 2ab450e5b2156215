"""Training a head from a token table: no model, no vocabulary, and no faith without evidence.

Documents are split into three parts. On the first a head is trained, the second says when to stop
(and which alpha is best), and the third judges it against the global temperature. A head that does
not win there by more than the standard error of the difference is not kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from calibrant._core.checks import BoolArray, FloatArray, IntArray, check_choice, warn
from calibrant._core.logpartition import Records
from calibrant._core.solve import check_time, minimise_scalar
from calibrant._core.torch_models import own_device
from calibrant.calibrators.objectives import Objective
from calibrant.calibrators.scaling import best_sharpness
from calibrant.llm.fingerprint import ModelMark
from calibrant.llm.heads.modules import (
    HEADS,
    LIMIT,
    DecoderHead,
    GlobalHead,
    Head,
    ShapeHead,
    bounded,
    make_head,
    shape_features,
)
from calibrant.llm.heads.objectives import OBJECTIVES, brier_correct, loss
from calibrant.llm.tokens.documents import groups
from calibrant.llm.tokens.evaluate import left_out
from calibrant.llm.tokens.tables import Hidden, TokenTable
from calibrant.metrics.binned import ece
from calibrant.metrics.ranking import auroc

ALPHAS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
"""Where alpha is searched."""
RATES = {"mlp": 3e-4, "shape": 1e-2, "decoder": 1e-4}
"""Learning rates; that of the linear head goes with its width, since AdamW moves every weight."""
LINEAR_RATE = 0.2
"""Rate of the linear head times its width."""
PATIENCE = 4
"""Epochs without a gain after which training stops."""
CHUNK = 1 << 15
"""Tokens that are read at once, from one place of the table, and shuffled among each other."""
ENOUGH = 1 << 18
"""Tokens that tell one temperature to three digits; of more, so many are looked at."""
STOP, JUDGE = 0.1, 0.2
"""Parts of the documents that say when to stop, and that judge."""
FEWEST = 5
"""Documents below which no part would be left to judge."""

Figures = dict[str, dict[str, float]]


@dataclass(frozen=True, eq=False)
class FittedHead:
    """A head, the model that it belongs to, and how it did.

    Attributes
    ----------
    head : Head
        The adaptive one if it was kept, else the global temperature.
    mark : ModelMark
        Of the model.
    objective : str
        What it was trained on.
    kept : bool
        Whether ``head`` is of the kind that was asked for.
    reasons : str
        Why it was kept or not.
    figures : dict
        ``nll`` of the label; ``brier``, ``ece`` and ``auroc`` of the confidence in the top token;
        on the documents that judge. Under ``before``, ``global`` and, for an adaptive head,
        ``head``.
    settings : dict
        What else was chosen: alpha, the epoch, the seed; and the ``tables`` it was trained on.
    """

    head: Head
    mark: ModelMark
    objective: str
    kept: bool = True
    reasons: str = ""
    figures: Figures = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.head.requires_grad_(False).eval()

    @classmethod
    def of_temperature(cls, temperature: float, mark: ModelMark, reasons: str = "") -> FittedHead:
        """One temperature that was found elsewhere, for instance by :func:`daca`.

        >>> mark = ModelMark("tiny", 2, 3, "0" * 16, None)
        >>> fitted = FittedHead.of_temperature(2.0, mark)
        >>> float(fitted.head.bias)
        -0.69...
        """
        if not math.exp(-LIMIT) <= temperature <= math.exp(LIMIT):
            raise ValueError(f"temperature must lie between 0.05 and 20, got {temperature}")
        return cls(GlobalHead(start=-math.log(temperature)), mark, "given", reasons=reasons)


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
    always: bool = False,
    seed: int = 0,
    device: str | torch.device = "cpu",
    progress: Callable[[int, int], object] | None = None,
) -> FittedHead:
    """Train a head on a table, and keep it only if it beats the global temperature.

    The global temperature, from which the head starts, minimises the score by which both are
    judged: the likelihood for ``objective="nll"``, else the Brier score of the confidence.

    Parameters
    ----------
    table : TokenTable
        At least 5 documents; some hundred for a verdict that means something.
    head : {"linear", "mlp", "shape", "decoder", "global"}
    objective : {"bce", "brier", "nll", "selective", "smart"}
    alpha : float, optional
        Of the selective objective. By default the best of 0.5 to 0.01 on held-out documents.
    options, objective_options : dict, optional
        Arguments of the head and of the objective, such as ``{"units": 128}``, ``{"over": 5}``.
    epochs : int
        At most; training stops when held-out documents gain no more, unless ``always``.
    batch : int
        Tokens per step. The decoder head takes whole documents, so many tokens with padding.
    rate : float, optional
        Learning rate of AdamW; by default one that suits the head.
    always : bool
        Train for all epochs and keep the head whatever held-out documents say, as the paper does.
    seed : int
        Of the split, the order and the first weights.
    device : str
        Where the head is trained. It comes back on the CPU.
    progress : function, optional
        Called with the epochs done and their largest number.

    Returns
    -------
    FittedHead

    Examples
    --------
    >>> from calibrant._core.logpartition import tabulate
    >>> from calibrant._core.chunks import examples
    >>> rng = np.random.default_rng(0)
    >>> hidden = rng.normal(size=(4000, 4))
    >>> logits = 2 * rng.normal(size=(4000, 10))
    >>> true = np.exp(hidden[:, :1]) * logits  # the first number says how sharp it should be
    >>> labels = (true + rng.gumbel(size=true.shape)).argmax(-1)
    >>> table = TokenTable.of(
    ...     hidden, tabulate(examples(logits, labels)), np.arange(4000) // 20,
    ...     ModelMark("tiny", 4, 10, "0" * 16, None),
    ... )
    >>> fitted = fit_head(table, "linear", "nll")
    >>> fitted.kept
    True
    """
    check_choice("head", head, tuple(HEADS))
    check_choice("objective", objective, tuple(OBJECTIVES))
    if min(epochs, batch) < 1:
        raise ValueError(f"epochs and batch must be at least 1, got {epochs} and {batch}")
    _check_whole(HEADS[head], table)
    if alpha is not None and (objective != "selective" or head == "global"):
        raise ValueError(
            "alpha belongs to the selective objective of an adaptive head, got "
            f"objective={objective!r} and head={head!r}"
        )
    if "alpha" in (objective_options or {}):
        raise ValueError("alpha is an argument of its own: fit_head(..., alpha=0.1)")
    if head == "global" and (options or objective_options):
        raise ValueError("the global temperature has no options: leave them out, or choose a head")
    parts = split_documents(table.documents, seed=seed)
    score = Score.of(objective)
    start = score.best(table.records(_some(np.concatenate([parts.train, parts.stop]))))
    simple = GlobalHead(start=start)
    told = {"before": _claims(GlobalHead(), table, parts.judge)}
    told["global"] = _claims(simple, table, parts.judge)
    settings: dict[str, Any] = {"seed": seed, "temperature": math.exp(-start)}
    settings["tables"] = list(table.sources)
    if head == "global":
        figures = {name: claims.figures() for name, claims in told.items()}
        why = "one temperature for all tokens is kept, as asked for"
        return FittedHead(simple, table.mark, score.name, True, why, figures, settings)
    new = partial(make_head, head, width=table.mark.hidden_size, start=start, **dict(options or {}))
    if rate is None:
        rate = RATES.get(head, LINEAR_RATE / table.mark.hidden_size)
    plan = _Plan(table, parts, score, epochs, batch, rate, always, seed, own_device(device))
    best = _best_of(plan, new, objective, alpha, dict(objective_options or {}), progress)
    told["head"] = _claims(best.head, table, parts.judge)
    best.head.cpu()
    gain = paired_gain(
        score.of_claims(told["global"]),
        score.of_claims(told["head"]),
        table.documents[parts.judge],
        told["head"].weight,
    )
    kept = always or (best.epoch > 0 and gain.mean > gain.error)
    return FittedHead(
        best.head if kept else simple,
        table.mark,
        objective,
        kept,
        _reasons(head, score.name, kept, always, best.epoch, gain),
        {name: claims.figures() for name, claims in told.items()},
        {**settings, "epoch": best.epoch, **({} if best.alpha is None else {"alpha": best.alpha})},
    )


def _check_whole(head: Head | type[Head], table: TokenTable) -> None:
    if head.wants == "sequence" and not table.whole:
        raise ValueError(
            f"the {head.kind} head looks at all tokens before its own, and this table has those of "
            "answers only: collect again with prompts=True, on the command line --prompts"
        )


def _reasons(head: str, score: str, kept: bool, always: bool, epoch: int, gain: Gain) -> str:
    if not epoch:
        return (
            f"the global temperature is kept: no epoch of the {head} head was better than it on "
            "held-out documents"
        )
    which = f"the {head} head" if kept else "the global temperature"
    why = ", as asked for whatever comes out" if always else ""
    way = "lower" if gain.mean > 0 else "higher"
    return (
        f"{which} is kept{why}: on {gain.documents} held-out documents the {score} of the {head} "
        f"head is {abs(gain.mean):.2g} {way} than with one temperature, with a standard error of "
        f"{gain.error:.2g}"
    )


# ------------------------------------------------------------------------------ split and verdict


class Parts(NamedTuple):
    """Rows of the documents to train on, to stop by, and to judge by."""

    train: IntArray
    stop: IntArray
    judge: IntArray


def split_documents(documents: IntArray, *, seed: int = 0) -> Parts:
    """Split tokens ``(n,)`` by document: 70 % to train, 10 % to stop, 20 % to judge.

    >>> [len(part) for part in split_documents(np.repeat(np.arange(10), 3))]
    [21, 3, 6]
    """
    names, member = np.unique(documents, return_inverse=True)
    if len(names) < FEWEST:
        raise ValueError(
            f"at least {FEWEST} documents are wanted, to train on some and to judge by others, got "
            f"{len(names)}: collect more of them"
        )
    order = np.random.default_rng(seed).permutation(len(names))[member]
    judge = max(2, round(JUDGE * len(names)))
    stop = judge + max(1, round(STOP * len(names)))
    rows = (order >= stop, (order >= judge) & (order < stop), order < judge)
    return Parts(*(np.flatnonzero(chosen) for chosen in rows))


class Claims(NamedTuple):
    """What a head says about tokens, each ``(n,)``."""

    nll: FloatArray
    confidence: FloatArray
    correct: BoolArray
    weight: FloatArray

    def figures(self) -> dict[str, float]:
        """Scores of all tokens together."""
        share = self.weight / self.weight.sum()
        pairs = np.minimum(self.confidence, 1), self.correct
        return {
            "nll": float(share @ self.nll),
            "brier": float(share @ (self.confidence - self.correct) ** 2),
            "ece": ece(confidence=pairs[0], outcome=pairs[1], sample_weight=self.weight),
            "auroc": auroc(confidence=pairs[0], outcome=pairs[1], sample_weight=self.weight),
        }


class Score(NamedTuple):
    """The proper score by which heads are compared."""

    name: str

    @classmethod
    def of(cls, objective: str) -> Score:
        """The score for a head with an objective."""
        return cls("nll" if objective == "nll" else "brier")

    def best(self, records: Records) -> float:
        """The log-sharpness with the best score for all."""
        if self.name == "nll":
            found = best_sharpness(records)
        else:
            found = minimise_scalar(lambda u: brier_correct(records, u).value, -LIMIT, LIMIT)
        return float(np.clip(found.x[0], -LIMIT, LIMIT))

    def of_claims(self, claims: Claims) -> FloatArray:
        """The score of each token ``(n,)``."""
        if self.name == "nll":
            return claims.nll
        return np.asarray((claims.confidence - claims.correct) ** 2)


class Gain(NamedTuple):
    """By how much one head is better than another, with the standard error."""

    mean: float
    error: float
    documents: int


def paired_gain(
    before: FloatArray, after: FloatArray, documents: IntArray, weight: FloatArray
) -> Gain:
    """Mean difference of the scores of tokens, with documents as what was drawn.

    Tokens of one text resemble each other, so the error comes from the totals of documents: it is
    that of a ratio, total difference over total weight, by the jackknife. (A document pulls the
    mean to itself, a long one more, and hides its own deviation thereby; what is seen without it
    is not hidden.) Where one document holds everything, nothing is known of others, and the error
    is infinite.

    >>> paired_gain(np.array([2.0, 2.0, 3.0]), np.ones(3), np.array([0, 0, 1]), np.ones(3)).mean
    1.333...
    """
    _, member = np.unique(documents, return_inverse=True)
    total = np.bincount(member, weight * (before - after))
    mass = np.bincount(member, weight)
    mean = total.sum() / mass.sum()
    count = len(total)
    if not (mass < mass.sum()).all():
        return Gain(float(mean), math.inf, count)
    error = np.linalg.norm(left_out(np.column_stack([mass, total])))
    return Gain(float(mean), float(error), count)


def _claims(head: Head, table: TokenTable, rows: IntArray) -> Claims:
    """What a head says about rows of a table; of a decoder head they must be whole documents."""
    found = []
    with torch.no_grad():
        for some in _whole(head, table, rows, CHUNK):
            records = table.records(some)
            u = predicted(head, table, some, records).cpu().double().numpy()
            value = records.log_partition(np.exp(u)).value
            nll = np.exp(u) * records.own_gap + value
            found.append(Claims(nll, np.exp(-value), records.correct, records.weight))
    return Claims(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _some(rows: IntArray) -> IntArray:
    return np.sort(rows)[:: -(-len(rows) // ENOUGH)]


# --------------------------------------------------------------------------------------- training


class _Plan(NamedTuple):
    """What the trainings for several alphas share."""

    table: TokenTable
    parts: Parts
    score: Score
    epochs: int
    batch: int
    rate: float
    always: bool
    seed: int
    device: torch.device

    def held_out(self, head: Head) -> float:
        """Score on the documents that say when to stop."""
        claims = _claims(head, self.table, self.parts.stop)
        return float(np.average(self.score.of_claims(claims), weights=claims.weight))


class _Trained(NamedTuple):
    head: Head
    epoch: int
    score: float
    alpha: float | None = None


def _best_of(
    plan: _Plan,
    new: Callable[[], Head],
    objective: str,
    alpha: float | None,
    options: dict[str, Any],
    progress: Callable[[int, int], object] | None,
) -> _Trained:
    """Train once, or once for each alpha where it is searched."""
    alphas: tuple[float | None, ...] = (None,)
    if objective == "selective":
        alphas = ALPHAS if alpha is None else (alpha,)
    runs = []
    for number, value in enumerate(alphas):
        told = _told(progress, number * plan.epochs, len(alphas) * plan.epochs)
        chosen = options if value is None else {**options, "alpha": value}
        measure = partial(OBJECTIVES[objective], **chosen)
        runs.append(_trained(plan, new, measure, told)._replace(alpha=value))
    return min(runs, key=lambda run: run.score)


def _told(
    progress: Callable[[int, int], object] | None, before: int, total: int
) -> Callable[[int], object]:
    return lambda epoch: progress(before + epoch, total) if progress else None


def _trained(
    plan: _Plan, new: Callable[[], Head], objective: Objective, told: Callable[[int], object]
) -> _Trained:
    """Train a head until held-out documents gain no more; the best epoch counts, 0 included."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(plan.seed)  # not the GPUs', which nobody puts back
        head = new().to(plan.device)
    if isinstance(head, ShapeHead):
        head.standardise(shape_features(plan.table.records(_some(plan.parts.train))))
    optimiser = torch.optim.AdamW(head.parameters(), lr=plan.rate)
    rng = np.random.default_rng(plan.seed)
    best, at, state = plan.held_out(head), 0, _copied(head)
    for epoch in range(1, plan.epochs + 1):
        for rows, records in _steps(plan, head, rng):
            check_time()
            optimiser.zero_grad()
            loss(objective, records, predicted(head, plan.table, rows, records)).backward()
            optimiser.step()
        told(epoch)
        found = plan.held_out(head)
        if found < best or plan.always:
            best, at, state = found, epoch, _copied(head)
        elif epoch - at >= PATIENCE:
            break
    head.load_state_dict(state)
    return _Trained(head, at, best)


def _copied(head: Head) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in head.state_dict().items()}


def _steps(plan: _Plan, head: Head, rng: np.random.Generator) -> Iterator[tuple[IntArray, Records]]:
    """Yield rows and their records for each step of an epoch, in a new order."""
    table, rows = plan.table, plan.parts.train
    if head.wants == "sequence":
        names = rng.permutation(np.unique(table.documents[rows]))
        like = names[np.argsort(_lengths(table, names), kind="stable")]  # less padding
        batches = list(_documents(table, like, plan.batch))
        for number in rng.permutation(len(batches)):
            yield batches[number], table.records(batches[number])
        return
    chunks = np.array_split(rows, -(-len(rows) // CHUNK))
    for chunk in rng.permutation(len(chunks)):
        mixed = rng.permutation(chunks[chunk])
        for first in range(0, len(mixed), plan.batch):
            some = mixed[first : first + plan.batch]
            yield some, table.records(some)


def _whole(head: Head, table: TokenTable, rows: IntArray, size: int) -> Iterator[IntArray]:
    """Cut rows into runs of a size, between documents where the head looks at those."""
    if head.wants == "sequence":
        yield from _documents(table, np.unique(table.documents[rows]), size)
    else:
        yield from np.array_split(rows, -(-len(rows) // size))


def _lengths(table: TokenTable, names: IntArray) -> IntArray:
    """States of each document ``(names,)``, those of its prompts among them."""
    last = np.searchsorted(table.documents, names, side="right") - 1
    return np.asarray(table.places[last] + 1)


def _documents(table: TokenTable, names: IntArray, size: int) -> Iterator[IntArray]:
    """Rows of documents, as many together as have ``size`` states with padding; at least one."""
    first = np.searchsorted(table.documents, names, side="left")
    last = np.searchsorted(table.documents, names, side="right")
    rows = [np.arange(a, b) for a, b in zip(first, last, strict=True)]
    for run in groups(_lengths(table, names).tolist(), size):
        yield np.concatenate(rows[run])


def predicted(head: Head, table: TokenTable, rows: IntArray, records: Records) -> Tensor:
    """Log-sharpness ``(m,)`` that a head gives to rows of a table, within the limits.

    A decoder head needs all rows of each document, in order.
    """
    device = next(head.parameters()).device
    if head.wants == "nothing":
        return bounded(head(torch.empty(len(rows), 0, device=device)))
    if head.wants == "shape":
        return bounded(head(shape_features(records).to(device)))
    if not isinstance(head, DecoderHead):
        return bounded(head(_states(table.hidden(rows), device)))
    texts = table.texts(rows)
    longest = max(len(text.states) for text in texts)
    # padding comes after the tokens of a document, where causal attention does not look
    padded = np.zeros((len(texts), longest, head.width), np.float16)
    for line, text in zip(padded, texts, strict=True):
        line[: len(text.states)] = text.states
    counting = [n * longest + text.places for n, text in enumerate(texts)]
    found = head(_states(padded, device)).reshape(-1)
    return bounded(found[torch.from_numpy(np.concatenate(counting)).to(device)])


def _states(hidden: Hidden, device: torch.device) -> Tensor:
    return torch.from_numpy(hidden).to(device).float()


def token_claims(table: TokenTable, fitted: FittedHead | None = None) -> Claims:
    """What a model says about the tokens of a table, with a head or without.

    Parameters
    ----------
    table : TokenTable
    fitted : FittedHead, optional
        For the model of the table; another one is refused.

    Returns
    -------
    Claims
        Negative log-likelihood, confidence, whether it is right, and weight of each token.
    """
    if fitted is None:
        return _claims(GlobalHead(), table, np.arange(len(table)))
    fitted.mark.check(table.mark, "the table")
    _check_whole(fitted.head, table)
    if set(table.sources) & set(fitted.settings.get("tables", ())):
        warn(
            "the head was trained on tokens of this table, so that it looks better here than it "
            "is: measure it on a table of other documents"
        )
    return _claims(fitted.head, table, np.arange(len(table)))
