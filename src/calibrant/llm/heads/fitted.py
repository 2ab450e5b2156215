"""A fitted temperature head with the fingerprint of its model, and its predictions for tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from calibrant._core.checks import BoolArray, FloatArray, IntArray, check_choice, warn
from calibrant._core.options import Options, options_of, unknown_option
from calibrant._core.showing import as_html, columns_frame, frame, one_line
from calibrant.calibrators.logpartition import Records
from calibrant.llm.heads.ats import ATSHead
from calibrant.llm.heads.modules import (
    LIMIT,
    SHAPE_FEATURES,
    GlobalHead,
    Head,
    LinearHead,
    MLPHead,
    ShapeHead,
    _shape_features,
    bounded,
)
from calibrant.llm.heads.tables import TokenTable
from calibrant.llm.models.huggingface import ModelFingerprint
from calibrant.metrics.binned import ece
from calibrant.metrics.clustered import Evaluations, Gain, evaluate_tokens, paired_gain
from calibrant.metrics.ranking import auroc

if TYPE_CHECKING:
    import pandas as pd

_CHUNK = 1 << 15
"""Tokens that are read at a time."""
_LARGEST_WEIGHT = 1e6
"""Products of larger ones, which no fit learns, may overflow to infinity and end as NaN."""
Figures = dict[str, dict[str, float]]
Gains: TypeAlias = dict[str, dict[str, Gain]]
"""Gains by what was done and by score."""
HEADS: dict[str, type[Head]] = {
    head.kind: head for head in (GlobalHead, LinearHead, MLPHead, ShapeHead, ATSHead)
}
"""Temperature heads by name."""


def _head_options(kind: str) -> Options:
    """Return the options of a kind of head; its width and start are those of the data."""
    check_choice("head", kind, tuple(HEADS))
    options = options_of(HEADS[kind])
    return {name: options[name] for name in options if name not in ("width", "start")}


def _make_head(kind: str, *, width: int, start: float = 0.0, **options: Any) -> Head:
    known = _head_options(kind)
    for option in options.keys() - known.keys():
        raise unknown_option(f"the {kind} head", option, known)
    build: Any = HEADS[kind]
    if build.wants in ("hidden", "sequence"):
        options["width"] = width
    return cast(Head, build(start=start, **options))


@dataclass(frozen=True, eq=False)
class FittedHead:
    """A temperature head, the model that it belongs to, and its results on held-out documents.

    Attributes
    ----------
    head : Head
        The adaptive head if it was kept, else the global temperature.
    fingerprint : ModelFingerprint
        Of the model.
    objective : str
        Training objective.
    kept : bool
        True if ``head`` is of the requested kind; ``reasons`` says why.
    figures : dict
        ``nll`` of the label; ``brier``, ``ece`` and ``auroc`` of the confidence in the top token;
        on held-out documents. Under ``before``, ``global`` and, for an adaptive head, ``head``.
    settings : dict
        Further choices, such as alpha, the epoch and the seed; the one ``temperature``, the
        ``gain`` over it on held-out documents with its ``standard_error``, and the ``tables`` that
        it was fitted on.
    """

    head: Head
    fingerprint: ModelFingerprint
    objective: str
    kept: bool = True
    reasons: str = ""
    figures: Figures = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.head.requires_grad_(False).eval()

    @classmethod
    def from_temperature(
        cls, temperature: float, fingerprint: ModelFingerprint, reasons: str = ""
    ) -> FittedHead:
        """Make a head of one temperature."""
        if not math.exp(-LIMIT) <= temperature <= math.exp(LIMIT):
            raise ValueError(f"temperature must be between 0.05 and 20, got {temperature}")
        return cls(GlobalHead(start=-math.log(temperature)), fingerprint, "given", reasons=reasons)

    def beside_one_temperature(self) -> dict[str, FittedHead | None]:
        """Return the heads to measure beside it: none, one temperature if it is known, and itself.

        Most of what a head gains, one temperature gains too.
        """
        if self.head.kind == "global":
            return {"before": None, "global": self}
        heads: dict[str, FittedHead | None] = {"before": None}
        if "temperature" in self.settings:
            single = FittedHead.from_temperature(self.settings["temperature"], self.fingerprint)
            heads["global"] = replace(single, settings={"tables": self.settings.get("tables", [])})
        return {**heads, "head": self}

    def __repr__(self) -> str:
        last = next(reversed(self.figures.values()), {})
        nll = f"held-out NLL {last['nll']:.4f}" if "nll" in last else ""
        return one_line(self, self.describe(), nll, "" if self.kept else "requested head not kept")

    _repr_html_ = as_html

    def to_frame(self) -> pd.DataFrame:
        """Return the figures as a frame, with a row for each group. Needs pandas."""
        return frame({"group": group, **values} for group, values in self.figures.items())

    def describe(self) -> str:
        """Describe the head in a sentence."""
        kind, name = self.head.kind, self.fingerprint.name
        return f"{kind} temperature head for {name}, trained on {self.objective}"

    def config(self) -> dict[str, Any]:
        """Return all but the learned values, for JSON: None stands for figures that are NaN."""
        figures = {
            group: {name: None if math.isnan(v) else v for name, v in values.items()}
            for group, values in self.figures.items()
        }
        plain = {name: getattr(self, name) for name in ("objective", "kept", "reasons", "settings")}
        about = {"head": self.head.kind, "options": self.head.config(), "figures": figures}
        return {**about, **plain, "fingerprint": asdict(self.fingerprint)}

    @classmethod
    def from_config(
        cls,
        *,
        head: str,
        options: dict[str, Any],
        fingerprint: dict[str, Any],
        objective: str,
        kept: bool,
        reasons: str,
        figures: dict[str, dict[str, float | None]],
        settings: dict[str, Any],
    ) -> FittedHead:
        """Make a head of what :meth:`config` returned, without learned values."""
        made = _make_head(head, **{"width": 1, **options})
        if made.config() != options:
            wanted = made.config()
            raise ValueError(f"options of the {head} head must be like {wanted}, got {options}")
        numbers = {
            group: {name: math.nan if v is None else float(v) for name, v in values.items()}
            for group, values in figures.items()
        }
        model = ModelFingerprint(**fingerprint)
        return cls(made, model, objective, kept, reasons, numbers, settings)

    def state_dict(self) -> dict[str, Any]:
        """Return the learned values of the head."""
        return self.head.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the learned values of a head of the same kind and size."""
        largest = max((float(v.abs().max()) for v in state.values() if v.numel()), default=0.0)
        if largest > _LARGEST_WEIGHT:
            raise ValueError(f"its weights must be at most {_LARGEST_WEIGHT:g}, got {largest:g}")
        self.head.load_state_dict(state)
        width = getattr(self.head, "width", SHAPE_FEATURES)
        inputs = 3 * torch.randn((2, 8, width), generator=torch.Generator().manual_seed(0))
        if self.head(inputs).isnan().any():
            raise ValueError("its weights make temperatures NaN")


class TokenPredictions(NamedTuple):
    """Predictions for tokens, each ``(n,)``.

    ``nll`` is the negative log-likelihood of the next token, ``confidence`` the probability of the
    likeliest one, and ``correct`` is True if that was the next one.
    """

    nll: FloatArray
    confidence: FloatArray
    correct: BoolArray
    weight: FloatArray

    def __repr__(self) -> str:
        return one_line(self, f"{len(self.nll):,} tokens, NLL {self.figures()['nll']:.4f}")

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with a row for each token. Needs pandas."""
        return columns_frame(self._asdict())

    def scores(self) -> dict[str, FloatArray]:
        """Proper scores of each token ``(n,)``, by the names of their means."""
        return {"nll": self.nll, "brier": (self.confidence - self.correct) ** 2}

    def figures(self) -> dict[str, float]:
        """Metrics over all tokens."""
        share = self.weight / self.weight.sum()
        confidence = np.minimum(self.confidence, 1)
        return {
            **{name: float(share @ scores) for name, scores in self.scores().items()},
            "ece": ece(confidence=confidence, outcome=self.correct, sample_weight=self.weight),
            "auroc": auroc(confidence=confidence, outcome=self.correct, sample_weight=self.weight),
        }


def token_predictions(table: TokenTable, fitted: FittedHead | None = None) -> TokenPredictions:
    """Predict the tokens of a table, with a temperature head of the same model or without."""
    everything = np.arange(len(table))
    if fitted is None:
        return _predict_rows(GlobalHead(), table, everything)
    fitted.fingerprint.check(table.fingerprint, "the table")
    _check_prompts(fitted.head, table)
    if set(table.collections) & set(fitted.settings.get("tables", ())):
        warn(
            "the head was trained on tokens of this table and looks better on them than it is: use "
            "a table of other documents"
        )
    return _predict_rows(fitted.head, table, everything)


def evaluate_table(
    table: TokenTable, fitted: FittedHead | None = None, *, level: float | None = 0.9
) -> tuple[Evaluations, Gains]:
    """Measure the calibration of the tokens of a table, as it is and with a head.

    The evaluations are ``before``: the model as it is; ``global``: with the one temperature that
    the head was compared with when it was fitted, if it is known; ``head``. The gains in ``nll``
    and ``brier`` are those of the others over the one temperature.
    """
    heads = fitted.beside_one_temperature() if fitted else {"before": None}
    tokens = {name: token_predictions(table, head) for name, head in heads.items()}
    evaluations = {
        name: evaluate_tokens(p.confidence, p.correct, table.documents, nll=p.nll, level=level)
        for name, p in tokens.items()
    }
    scores = {name: p.scores() for name, p in tokens.items()}
    weight = tokens["before"].weight
    return evaluations, _gains_over_one_temperature(scores, table.documents, weight)


def _gains_over_one_temperature(
    scores: Mapping[str, Mapping[str, FloatArray]], documents: IntArray, weight: FloatArray
) -> Gains:
    """Return the gains of all others over ``global`` in each score; empty without ``global``."""
    simple = scores.get("global")
    if simple is None:
        return {}
    return {
        name: {x: paired_gain(simple[x], own[x], documents, weight) for x in own}
        for name, own in scores.items()
        if name != "global"
    }


def _check_prompts(head: Head | type[Head], table: TokenTable) -> None:
    """Raise if a head needs the states of prompts and a table has none."""
    if head.wants == "sequence" and not table.whole:
        raise ValueError(
            f"the {head.kind} head needs the states of prompts, which this table lacks: collect "
            "again with prompts=True, on the command line --prompts"
        )


def _predict_rows(head: Head, table: TokenTable, rows: IntArray) -> TokenPredictions:
    """Predict rows of a table; for an ATS head they must be whole documents."""
    if head.wants == "sequence":
        runs = [*table.document_chunks(np.unique(table.documents[rows]), _CHUNK)]
    else:
        runs = np.array_split(rows, -(-len(rows) // _CHUNK))
    chunks = []
    with torch.no_grad():
        for some in runs:
            records = table.records(some)
            u = _log_sharpness(head, table, some, records).cpu().double().numpy()
            value = records.log_partition(np.exp(u)).value
            nll = np.exp(u) * records.own_gap + value
            chunks.append(TokenPredictions(nll, np.exp(-value), records.correct, records.weight))
    return TokenPredictions(*(np.concatenate(column) for column in zip(*chunks, strict=True)))


def _log_sharpness(head: Head, table: TokenTable, rows: IntArray, records: Records) -> Tensor:
    """Log-sharpness ``(m,)`` of rows of a table by a head, within the limits.

    An ATS head needs all rows of each document, in order.
    """
    device = next(head.parameters()).device
    if isinstance(head, ATSHead):
        return bounded(head.of_documents(table, rows))
    match head.wants:
        case "nothing":
            inputs = torch.empty(len(rows), 0)
        case "shape":
            inputs = _shape_features(records)
        case _:
            inputs = torch.from_numpy(table.hidden(rows))
    return bounded(head(inputs.to(device).float()))
