"""Multicalibration: corrections of predictions in the subgroups that metadata tell apart."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calibrant._core.checks import IGNORED, Features, IntArray, Logits, Values
from calibrant._core.chunks import Examples, full_precision, labelled_chunks, rounds as rounding
from calibrant._core.class_names import is_frame
from calibrant._core.messages import comma_separated
from calibrant._core.options import Count, Positive, Seed, at_least, at_most
from calibrant.calibrators.base import Calibrator, Context, feature_rows
from calibrant.calibrators.features.boosting import (
    BINS,
    Correction,
    _best_rounds,
    _Boosting,
    _codes_of,
    _largest_corrections,
    _learned_columns,
    _learned_numbers,
    _number_splits,
    _Tree,
    _TreeLearner,
)
from calibrant.calibrators.features.correctable import (
    MAX_LOG_TEMPERATURE,
    _ClassLogits,
    _ClassOneOdds,
    _Correctable,
    _Temperatures,
)
from calibrant.calibrators.fit_inputs import folds as folds_of
from calibrant.calibrators.logpartition import concatenate, tabulate
from calibrant.calibrators.piecewise import BEYOND
from calibrant.calibrators.top_label import MAX_ODDS, _keeps_by_task, _maps_class_one, _top_odds
from calibrant.data.dataset import ROLES
from calibrant.data.metadata import NO_METADATA, MetadataColumn, as_metadata

_MIN_EXAMPLES_FOR_CORRECTIONS = 100
_DEFAULT_FOLDS, _FEWER_FOLDS_FROM = (5, 3), 2000
"""Number of folds, and with so many examples."""
_MAX_LEARNED, _MAX_JUDGED = 1 << 21, 1 << 18
"""Number of examples that trees are learned from, and that their number is chosen on, at most."""
_MAX_CLASSES, _MAX_CLASS_LOGITS = 100, 1 << 25
"""Numbers of classes and of logits at most, where classes have corrections of their own."""
_MAX_DEPTH = 6


class Multicalibration(Calibrator):
    r"""Calibrate all examples, then correct the subgroups in which confidence is still wrong.

    A ``base`` calibrator is fitted on all examples. Then small trees are boosted over metadata of
    the examples, such as age and site, and over the current prediction, similar to MCGrad (Perini
    et al. 2025). A round adds a tree to the correction :math:`F` of the examples, with the leaves

    .. math:: -\eta \frac{\sum_i w_i g_i}{\sum_i w_i c_i + \lambda}

    where :math:`g` and :math:`c` are slopes and curvatures of the negative log-likelihood by
    :math:`F`. Once no leaf gains anything, confidence is right in each subgroup that such a tree
    can form, intersections included (multicalibration, Hébert-Johnson et al. 2018).

    For two classes :math:`F` has an offset, which is added to the log-odds of class 1, and a slope,
    by which they are multiplied. For more, if predictions are kept, it is added to the logarithm of
    the temperature of the example; if not, it has a number for each class, which is added to its
    logit.

    The number of rounds has the lowest held-out loss. If this is not lower than that of the base by
    two standard errors, the result is the base alone. In the end :math:`F` is multiplied by the
    factor with the lowest held-out loss, since shrinkage may leave it too small.

    Parameters
    ----------
    columns : sequence of str or int, optional
        Names of metadata columns of any type: ``features=`` is then a data frame, a mapping of
        arrays ``(n,)``, or an array whose columns have these numbers. By default it has numbers
        ``(..., width)``, and all of them are used. Values may be missing.
    base : str
        Name of a method that needs no features; ``"none"`` for none.
    keep_argmax : bool, optional
        Keep the predicted class: by default for more than two classes, unless the base changes it.
    depth : int
        Number of conditions of a leaf.
    rounds : int
        Largest number of trees.
    rate, penalty : float
        :math:`\eta` and :math:`\lambda`.
    fewest : float
        Least number of examples in a leaf; weights, which are 1 on average, are summed.
    folds : int, optional
        By default 5, and 3 from 2,000 examples on.
    seed : int
        Of the folds.

    Attributes
    ----------
    base_ : Calibrator
    metadata_ : list of MetadataColumn
        The columns as codes: bins of numbers, places of categories.
    column_, low_, high_, missing_ : (rounds, nodes) Tensor
        Numbers from ``low_`` to below ``high_`` in a column go right at a node, or missing ones.
        The column after the last one has the log-odds of the current prediction.
    leaf_ : (rounds, 2**depth, outputs) Tensor
    scale_ : scalar Tensor
        Factor by which the corrections of all trees are multiplied.
    spread_ : scalar Tensor
        Root of the mean square of the log-odds of two classes, the unit of slopes.
    corrections_ : list of Correction
        The largest mean corrections of subgroups.
    reasons_ : str
        An explanation of the number of rounds, with figures.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> odds, age = rng.normal(size=8000), rng.integers(18, 80, 8000)
    >>> site = rng.choice(["A", "B", "C"], 8000)
    >>> truth = odds - 1.5 * ((age < 30) & (site == "B"))
    >>> labels = (rng.random(8000) < 1 / (1 + np.exp(-truth))).astype(int)
    >>> people = {"age": age, "site": site}
    >>> fitted = Multicalibration(columns=["age", "site"]).fit(odds, labels, features=people)
    >>> fitted.corrections_[0].subgroup
    'age < 29 and site = B'
    >>> new = {"age": [25, 25], "site": ["A", "B"]}
    >>> fitted.predict_proba(np.zeros(2), new).round(1)
    array([0.5, 0.2])
    """

    name = "multicalibration"
    needs_features = True
    summary = "[corrections of subgroups](slices.md#repair-subgroups) by metadata, after a method"
    learned_shapes = (
        "column_ rounds =; low_ rounds =; high_ rounds =; missing_ rounds =; "
        "leaf_ rounds = =|rounds = classes"
    )
    metadata_: list[MetadataColumn]
    column_: Tensor
    low_: Tensor
    high_: Tensor
    missing_: Tensor
    leaf_: Tensor
    scale_: Tensor
    spread_: Tensor

    def __init__(
        self,
        *,
        columns: Sequence[str | int] | None = None,
        base: str = "auto",
        keep_argmax: bool | None = None,
        depth: Annotated[int, at_least(1), at_most(_MAX_DEPTH)] = 3,
        rounds: Count = 100,
        rate: Positive = 0.1,
        penalty: Positive = 10.0,
        fewest: Positive = 20.0,
        folds: Annotated[int, at_least(2)] | None = None,
        seed: Seed = 0,
    ) -> None:
        super().__init__()
        if columns is not None:
            _check_columns(columns)
        self.columns = columns
        self.base = base
        self.keep_argmax = keep_argmax
        self.depth = depth
        self.rounds = rounds
        self.rate = rate
        self.penalty = penalty
        self.fewest = fewest
        self.folds = folds
        self.seed = seed
        from calibrant.calibrators.registry import find_calibrator  # which knows this module

        _, kind = find_calibrator(base)
        if kind.needs_features or kind.needs_head:
            raise ValueError(
                f"base must be a method that needs no features, got {base!r}: pass auto"
            )
        chosen: dict[str, Any] = {}
        if keep_argmax is not None and "keep_argmax" in inspect.signature(kind).parameters:
            chosen["keep_argmax"] = keep_argmax
        self.base_ = kind(**chosen)
        self._store(spread_=torch.tensor(1.0))
        self.metadata_ = []
        self._keep()

    def _keep(
        self,
        trees: Sequence[_Tree] = (),
        columns: Sequence[MetadataColumn] = (),
        scale: float = 1.0,
    ) -> None:
        """Store trees over codes of columns as trees over their numbers."""
        nodes = 2**self.depth - 1
        column, low, high, missing = _number_splits(trees, columns, nodes)
        leaf = np.stack([t.leaf for t in trees]) if trees else np.zeros((0, nodes + 1, 1))
        self._store(column_=column, low_=low, high_=high, missing_=missing, leaf_=leaf)
        self._store(scale_=torch.tensor(scale))
        self.corrections_: list[Correction] = []
        self.reasons_ = ""

    @property
    def keeps_argmax(self) -> bool:  # type: ignore[override]
        """True if the predicted class never changes; before a fit, that of more than two."""
        return _keeps_by_task(self) and self.base_.keeps_argmax

    @property
    def monotone(self) -> bool:  # type: ignore[override]
        """True if the order of the classes never changes."""
        return self.keeps_argmax and self.base_.monotone

    @property
    def accepts_masked(self) -> bool:  # type: ignore[override]
        """True if the base takes logits of -inf."""
        return self.base_.accepts_masked

    def size(self, classes: int) -> int:
        """Parameters of the base, and the leaves of a fit."""
        return self.base_.size(classes) + self.leaf_.numel()

    def _warn_of_few(self, count: int, classes: int, distinct: int | None) -> None:
        """Warn for the base alone: held-out examples decide on corrections."""
        self.base_._warn_of_few(count, classes, distinct)

    # Metadata

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns of a prediction file that it reads beside the logits."""
        return ("features",) if self.columns is None else tuple(map(str, self.columns))

    def input_features(self, columns: Mapping[str, Any], rows: Any = None) -> Any:
        """Return its ``features=`` for arrays by name, of all examples or of some rows."""
        if self.columns is None:
            return super().input_features(columns, rows)
        return feature_rows({name: columns[name] for name in self.input_columns}, rows)

    def encoded(self, features: Features) -> Logits:
        """Return features as numbers ``(n, width)``, which a tensor has already.

        Categories become their places; what is missing is NaN.
        """
        if self.columns is None or isinstance(features, Tensor):
            return super().encoded(features)
        if not self.metadata_:
            raise RuntimeError(
                "this Multicalibration is not fitted: call fit(logits, labels) first"
            )
        arrays = metadata_arrays(features, self.columns)
        return np.stack([c.numbers(arrays[c.name]) for c in self.metadata_], axis=-1)

    def _features_of_fit(
        self, features: Features, labels: Values, sample_weight: Values | None
    ) -> Logits:
        if self.columns is not None:
            arrays = metadata_arrays(features, self.columns)
            self.metadata_ = _learned_columns(arrays, labels, sample_weight)
        return self.encoded(features)

    def _check_feature_values(self, features: Tensor, numbers: IntArray | None = None) -> None:
        """Accept all numbers: NaN is a missing value."""

    # Fit

    def _fit(self, examples: Examples, context: Context) -> None:
        self._keep()
        features = self._labelled_features(examples, context).cpu().numpy()
        if self.columns is None:
            self.metadata_ = _learned_numbers(features.astype(np.float64))
        if self._corrects_classes(examples.classes) and examples.classes > _MAX_CLASSES:
            raise ValueError(
                f"keep_argmax=False corrects each of up to {_MAX_CLASSES} classes, got "
                f"{examples.classes:,}: leave it out, which corrects the temperatures of examples"
            )
        self.base_.fit_examples(examples, Context(groups=context.groups, records=context.records))
        self.solution_ = self.base_.solution_
        groups = None if context.groups is None else context.groups[examples.labels != IGNORED]
        most = _MAX_LEARNED
        if self._corrects_classes(examples.classes):
            most = min(most, _MAX_CLASS_LOGITS // examples.classes)
        some = self._drawn(len(features), most)
        if some is not None:
            examples, features = examples.take(some), features[some]
            groups = None if groups is None else groups[some]
        run = self._started(examples, features)
        rounds, scale, reasons = self._rounds(run, groups)
        for _ in range(rounds):
            run.step()
        self._keep(run.trees, run.learner.columns, scale)
        self.corrections_, self.reasons_ = _largest_corrections(run, scale), reasons

    def _drawn(self, count: int, most: int) -> IntArray | None:
        """Return numbers of examples, drawn by the seed, where there are too many; else None."""
        if count <= most:
            return None
        return np.sort(np.random.default_rng(self.seed).permutation(count)[:most])

    def _corrects_classes(self, classes: int) -> bool:
        """Return True if each class has a correction of its own."""
        return classes > 2 and self.keep_argmax is False

    def _started(self, examples: Examples, features: NDArray[np.float32]) -> _Boosting:
        """Return the predictions of the base with the codes of examples, before any tree."""
        weight = examples.labelled_weight()
        weight = np.ones(len(features)) if weight is None else weight
        predictions = self._predictions(examples)
        odds = predictions.odds(np.zeros((len(features), predictions.outputs)))
        cuts = np.unique(np.quantile(odds, np.arange(1, BINS) / BINS).astype(np.float32))
        current = MetadataColumn("log-odds", "number", cuts=tuple(cuts[cuts > odds.min()].tolist()))
        columns = [*self.metadata_, current]
        numbers = [*features.T, odds.astype(np.float32)]
        codes = np.stack([_codes_of(c, x) for c, x in zip(columns, numbers, strict=True)])
        settings = (self.depth, self.rate, self.penalty, self.fewest)
        learner = _TreeLearner(columns, *settings, predictions.doubt)
        return _Boosting(predictions, learner, codes, weight)

    @torch.no_grad()
    def _predictions(self, examples: Examples) -> _Correctable:
        """Return the predictions of the base, as corrections change them."""
        labels, classes = examples.labels[examples.labels != IGNORED], examples.classes

        def parts() -> Iterator[tuple[Tensor, IntArray]]:
            """Yield log-probabilities ``(rows, classes)`` of the base, and labels."""
            for chunk in labelled_chunks(examples, 0, examples.labels.size):
                logits = chunk.logits[:, 1] if self.base_.classes == 1 else chunk.logits
                yield self.base_.log_probs(logits), chunk.labels.cpu().numpy()

        if _maps_class_one(self, classes):
            odds = torch.cat([p[:, 1] - p[:, 0] for p, _ in parts()]).double().cpu().numpy()
            spread = float(np.sqrt(np.mean(np.clip(odds, -MAX_ODDS, MAX_ODDS) ** 2))) or 1.0
            self._store(spread_=torch.tensor(spread))
            # as it is stored, since predictions divide by that
            return _ClassOneOdds(odds, (labels == 1).astype(np.float64), float(self.spread_))
        if self._corrects_classes(classes):
            start = torch.cat([part for part, _ in parts()]).double().cpu().numpy()
            return _ClassLogits(start, labels)
        tables = [tabulate(Examples(p, y, None, "top_label")) for p, y in parts()]
        return _Temperatures(concatenate(tables).tracked())

    def _rounds(self, run: _Boosting, groups: NDArray[Any] | None) -> tuple[int, float, str]:
        """Return the number of rounds that held-out examples call for, and why."""
        some = self._drawn(len(run.weight), _MAX_JUDGED)
        if some is not None:
            run, groups = run.take(some), None if groups is None else groups[some]
        count = len(run.weight)
        # not by class: folds with the same classes as the rest flatter what learns of these
        strata = np.zeros(count, dtype=np.int64)
        folds = self.folds or _DEFAULT_FOLDS[count >= _FEWER_FOLDS_FROM]
        parts = folds_of(strata, folds, groups=groups, seed=self.seed)
        if count < _MIN_EXAMPLES_FOR_CORRECTIONS or len(parts) < 2:
            least = f"{_MIN_EXAMPLES_FOR_CORRECTIONS} examples of two groups are needed"
            return 0, 1.0, f"no corrections: too little data to judge them by, {least}"
        rounds, scale, before, gain, error = choice = _best_rounds(run, parts, self.rounds, groups)
        figures = f"held-out NLL {before:.4f}, gain {gain:.4f} +- {error:.4f}"
        if not choice.clear:
            return 0, 1.0, f"no corrections: no gain beyond noise ({figures} by {rounds} rounds)"
        return rounds, scale, f"{rounds} rounds of corrections for subgroups: {figures}"

    # Predictions

    def forward(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        """Calibrated logits ``(..., classes)``, the largest of each row 0, in float32 or wider.

        ``features`` are numbers ``(..., width)``, as :meth:`encoded` returns them.
        """
        if rounding():
            with full_precision():
                return self.forward(logits, features)
        self.check_logits(logits)
        self.check_features(features, logits.shape if self._classes == 1 else logits.shape[:-1])
        if not len(self.leaf_):
            alone: Tensor = self.base_(logits)
            return alone
        assert features is not None
        wide, start = self._wide(logits), self.base_.log_probs(logits)
        result = self._corrected(start, features.to(logits.device, self.low_.dtype))
        result = result - result.gather(-1, wide.argmax(-1, keepdim=True))
        return self._narrow(self._finished(wide, wide.amax(-1, keepdim=True), result))

    def _corrected(self, start: Tensor, features: Tensor) -> Tensor:
        """Add all corrections to log-probabilities ``(..., classes)``."""
        numbers = features.clamp(-BEYOND / 2, BEYOND / 2)  # as all cuts are, but not what is NaN
        correction = torch.zeros_like(start[..., :1]).expand(
            *start.shape[:-1], self.leaf_.shape[-1]
        )
        result = start
        for i in range(len(self.leaf_)):
            odds = self._prediction_odds(result)
            inputs = torch.cat([numbers, odds.to(numbers.dtype)], -1)  # (..., width + 1)
            node = torch.zeros_like(inputs[..., 0], dtype=torch.int64)
            for _ in range(self.depth):
                number = inputs.gather(-1, self.column_[i][node][..., None])[..., 0]
                inside = (number >= self.low_[i][node]) & (number < self.high_[i][node])
                lacking = torch.isnan(number) & (self.missing_[i][node] > 0)
                node = 2 * node + 1 + (inside | lacking).to(torch.int64)
            leaf = node - self.column_.shape[1]
            correction = correction + self.leaf_[i][leaf].to(start.dtype)
            result = self._moved(start, correction)
        return self._moved(start, correction * self.scale_.to(start.dtype))

    def _moved(self, start: Tensor, correction: Tensor) -> Tensor:
        classes = start.shape[-1]
        if _maps_class_one(self, classes):
            odds = self._prediction_odds(start) / self.spread_.to(start.dtype)
            moved = start[..., 1:] + correction[..., :1] + correction[..., 1:] * odds
            return torch.cat([start[..., :1], moved], -1)
        if self._corrects_classes(classes):
            return start + correction
        return (start - start.amax(-1, keepdim=True)) * torch.exp(
            -correction.clamp(-MAX_LOG_TEMPERATURE, MAX_LOG_TEMPERATURE)
        )

    def _prediction_odds(self, logits: Tensor) -> Tensor:
        """Log-odds ``(..., 1)`` by which trees know a prediction."""
        if _maps_class_one(self, logits.shape[-1]):
            return (logits[..., 1:] - logits[..., :1]).clamp(-MAX_ODDS, MAX_ODDS)
        return _top_odds(logits - logits.amax(-1, keepdim=True))

    # Descriptions and saved state

    def describe(self) -> str:
        """The base, the number of rounds, and the subgroups with the largest corrections."""
        if not self._classes:
            return super().describe()
        rounds = f"{len(self.leaf_)} rounds" if len(self.leaf_) else "no corrections"
        parts = [f"{super().describe()}; {rounds} after {self.base_.describe()}"]
        return "; ".join([*parts, *map(self._in_words, self.corrections_)])

    def _in_words(self, correction: Correction) -> str:
        subgroup, mean, share = correction
        if _maps_class_one(self, max(self._classes, 2)):
            slope = 1 + mean[1] / float(self.spread_)
            change = f"log-odds x {slope:.2f} {mean[0]:+.2f}"
        elif len(mean) > 1:
            most = int(np.abs(mean).argmax())
            change = f"logit of class {most} {mean[most]:+.2f}"
        else:
            change = f"temperature x {math.exp(mean[0]):.2f}"
        return f"{subgroup}: {change} on {100 * share:.1f} % of examples"

    def learned(self) -> dict[str, Any]:
        """Number of rounds, the largest corrections, and what the base learned."""
        return {
            "rounds": len(self.leaf_),
            "corrections": [correction._asdict() for correction in self.corrections_],
            "base": self.base_.learned(),
        }

    def get_extra_state(self) -> dict[str, Any]:
        """The columns, the largest corrections and the reasons, for ``state_dict``."""
        return {
            "metadata": [column.config() for column in self.metadata_],
            "corrections": [list(correction) for correction in self.corrections_],
            "reasons": self.reasons_,
        }

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)
        if not bool(((self.column_ >= 0) & (self.column_ <= self._width)).all()):
            raise ValueError(f"column_ must have numbers of the {self._width} columns, or the next")

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`get_extra_state` returned."""
        self.metadata_ = [MetadataColumn.from_config(config) for config in state["metadata"]]
        self.corrections_ = [Correction(*correction) for correction in state["corrections"]]
        self.reasons_ = str(state["reasons"])


def _check_columns(columns: Sequence[str | int]) -> None:
    """Raise unless names or numbers of columns are different, and those of metadata."""
    if not columns or "" in columns or len({*map(str, columns)}) < len(columns):
        raise ValueError(
            f"columns must be different names (or numbers) of metadata columns, got {columns!r}: "
            'pass columns=["age", "site"], say'
        )
    if taken := [name for name in columns if name in (*NO_METADATA, *ROLES)]:
        raise ValueError(
            f"columns must be metadata, got {comma_separated(taken)}, which has another meaning in "
            "prediction files: leave it out, or rename the column"
        )


def metadata_arrays(features: object, columns: Sequence[str | int]) -> dict[str, Any]:
    """Return the metadata columns of a frame, a mapping or an array, by name."""
    if isinstance(features, Mapping) or is_frame(features):
        known = as_metadata(features)
    else:
        table = np.asarray(features)
        width = table.shape[1] if table.ndim == 2 else 0
        numbers = [c for c in columns if isinstance(c, int) and -width <= c < width]
        known = {str(c): table[:, c] for c in numbers}
    names = [str(column) for column in columns]
    if lacking := [name for name in names if name not in known]:
        raise ValueError(
            f"Multicalibration reads the metadata columns {comma_separated(names)}, but features= "
            f"has no {comma_separated(lacking)}: pass a data frame or a mapping of arrays with them"
        )
    return {name: known[name] for name in names}
