"""The default method: an average of candidates, weighted by cross-validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from calibrant._core import checks
from calibrant._core.checks import IGNORED, BoolArray, FloatArray, IntArray, warn
from calibrant._core.chunks import (
    Examples,
    as_tensor,
    full_precision,
    joined,
    labelled_chunks,
    picked,
)
from calibrant._core.messages import comma_separated
from calibrant._core.options import Seed, at_least
from calibrant.calibrators.average import Average, _averaged
from calibrant.calibrators.base import Calibrator, Context
from calibrant.calibrators.fit_inputs import MIN_PER_PARAMETER, folds
from calibrant.calibrators.logpartition import Records
from calibrant.calibrators.objectives import _memberships
from calibrant.calibrators.parts import structured
from calibrant.calibrators.records import RecordPredictions, RecordsCalibrator
from calibrant.calibrators.top_label import kept_by_task

if TYPE_CHECKING:
    from typing_extensions import Self

KeepArgmax = bool | Literal["auto"]
WITH_FEATURES = ("gc", "procal")
MATRIX = "sms_blend"
KEEPING = ("none", "ts", "beta", "blend", "top_and_rest", *WITH_FEATURES)
CHANGING = ("none", "ts", "beta", *WITH_FEATURES, MATRIX)
FREE = (*KEEPING, MATRIX)
TWO_CLASSES = (
    *("none", "ts", "sigmoid", "robust_sigmoid", "quadratic", "venn_abers"),
    *WITH_FEATURES,
)
"""Candidates where the predicted class is kept, where others are clearly better, and where all is
allowed; and maps of P(y = 1), for two classes unless the predicted one is kept. Each leaves the top
class calibrated: ``sms`` alone does not."""
MIN_EXAMPLES = 50  # number of examples below which a choice would be a guess
SHRUNK, SHRUNK_BELOW = "shrunk_ts", 500
"""The safe choice, and the number of examples below which it replaces ``ts`` and doing nothing."""
FOLDS, FEWER_FOLDS_FROM = (5, 3), 2000  # number of folds, and with so many examples
MAX_EXAMPLES, MAX_LOGITS = 10_000, 1 << 21
"""Number of examples and of logits that a choice is made on at most; members are fitted on all."""
DOUBT = 2.0
"""Cross-validated likelihoods are divided by this: they are estimates themselves."""
PER_PARAMETER, MAX_PARAMETERS_COUNTED = 0.2, 10
"""By how much each parameter lowers the logarithm of a weight, and how many do at most."""
PENALTIES, WEAK = (1.0, 0.1, 0.01, 0.001, 0.0001), 0.01
"""Factors of the penalties of the matrix that are tried, until the held-out likelihood no longer
gains; weaker ones than the second number must gain beyond doubt."""
PENALISED = (MATRIX, "sms", "svs")
MIN_WEIGHT = 0.05  # members of less weight are left out
MIN_GAIN_IN_ERRORS = 0.5  # standard errors by which the average must beat doing nothing
CLEAR_GAIN_IN_ERRORS = 2.0  # from which on a gain by other predictions is beyond doubt


class Candidate(NamedTuple):
    """Cross-validated figures of a method.

    ``gain`` is by how much its negative log-likelihood is lower than without calibration, ``error``
    the standard error of that, and ``weight`` its weight in the average.
    """

    name: str
    nll: float
    ece: float
    gain: float
    error: float
    weight: float


class Auto(RecordsCalibrator):
    r"""Weigh several methods by cross-validation, and average what they predict.

    Each candidate :math:`m` with :math:`k_m` parameters (ten at most) is fitted on four fifths of
    the :math:`n` examples (two thirds from 2,000 on) and judged on the rest, in turn. Its weight in
    the average of probabilities falls with the held-out negative log-likelihood:

    .. math:: w_m \propto \exp\left(-\tfrac12 \sum_i \mathrm{NLL}_{m,i} - \tfrac15 k_m\right) .

    Many examples leave one method, few leave an average, which is safer than any of its members.
    Weights below 0.05 are dropped. Where the average gains less than half a standard error over
    doing nothing, nothing is done. Below 500 examples ``shrunk_ts`` (:class:`ShrunkTemperature`)
    takes the place of ``ts`` and of doing nothing, and below 50 it is all that is fitted. A method
    with less than five examples per parameter is no candidate. Methods that need features take part
    if the fit gets features; if one is in the average, predictions need them too.

    Parameters
    ----------
    candidates : sequence of str, optional
        Names of any methods. By default ``none``, ``ts``, ``beta``, with features ``gc`` and
        ``procal``, and parts that were made for it: ``blend`` (:class:`Blend`) and
        ``top_and_rest`` (:class:`TopAndRest`). For two classes, unless ``keep_argmax`` is True,
        they are maps of P(y = 1): ``none``, ``ts``, ``sigmoid``, ``venn_abers``, and the parts
        ``robust_sigmoid`` (:class:`RobustSigmoid`) and ``quadratic`` (:class:`QuadraticScaling`).
    keep_argmax : "auto" or bool
        Whether the predicted class is kept: always (True), or not necessarily (False), with
        ``sms_blend`` as one more candidate. By default predictions of more than two classes change
        only where that is clearly better: where ``sms`` raises the cross-validated accuracy by two
        standard errors of the difference. Then ``sms_blend`` takes the place of ``blend`` and
        ``top_and_rest``, and ``reasons_`` say so. Its penalties are weakened as long as the
        held-out likelihood gains by it. Of two classes P(y = 1) is calibrated, and the threshold
        of 0.5 moves unless this is True.
    folds : int, optional
        By default 5, and 3 from 2,000 examples on.
    seed : int
        Of the folds.

    Attributes
    ----------
    chosen_ : Calibrator
        A method, or an :class:`~calibrant.calibrators.average.Average` of several.
    reasons_ : str
        An explanation of the choice, with figures.
    candidates_ : list of Candidate
        The figures; not part of the saved state.

    Examples
    --------
    >>> rng = np.random.default_rng(1)
    >>> truth = 2 * rng.normal(size=(1000, 10))
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> Auto().fit(3 * truth, labels).chosen_.name
    'ts'
    """

    name = "auto"
    summary = "[averages](#how-auto-chooses) the best of several"
    uses_features = True
    uses_logits = True  # some candidates need them
    chosen_: Calibrator | None

    def __init__(
        self,
        *,
        candidates: Sequence[str] | None = None,
        keep_argmax: KeepArgmax = "auto",
        folds: Annotated[int, at_least(2)] | None = None,
        seed: Seed = 0,
    ) -> None:
        super().__init__()
        self.candidates = None if candidates is None else _known(candidates)
        self.keep_argmax = keep_argmax
        self.folds = folds
        self.seed = seed
        self.chosen_ = None
        self.reasons_ = ""
        self.candidates_: list[Candidate] = []

    @property
    def keeps_argmax(self) -> bool:  # type: ignore[override]
        """Whether the predicted class never changes."""
        return self.keep_argmax is True if self.chosen_ is None else self.chosen_.keeps_argmax

    @property
    def monotone(self) -> bool:  # type: ignore[override]
        """Whether the order of the classes never changes."""
        return self.chosen_ is not None and self.chosen_.monotone

    def size(self, classes: int) -> int:
        """Parameters of the chosen method; none before a fit."""
        return 0 if self.chosen_ is None else self.chosen_.size(classes)

    def _warn_of_few(self, count: int, classes: int, distinct: int | None) -> None:
        """Methods for which there are too few examples are no candidates."""

    def _fit(self, examples: Examples, context: Context) -> None:
        """Weigh the candidates and fit those that matter."""
        groups = None if context.groups is None else context.groups[examples.labels != IGNORED]
        records = context.table(examples)
        data = _Data(records, groups, examples, context._replace(records=records, fitted=[]))
        self._decide(data, examples.logits.ndim == 1)

    def fit_records(
        self, records: Records, *, groups: NDArray[Any] | None = None, one_logit: bool = False
    ) -> Self:
        """Weigh the candidates that need only records, and fit those that matter."""
        with checks.warnings_at_caller(), full_precision():
            self.set_floor(0)
            return self._decide(_Data(records.scale_free(), groups), one_logit)

    def _decide(self, data: _Data, one_logit: bool) -> Self:
        weights, penalty, reasons = self._weigh(data)
        how = _Options(self.keep_argmax is True, penalty, one_logit)
        with checks.silenced():  # cross-validation has judged them
            members = [data.fitted(name, how) for name in weights]
        chosen = members[0] if len(members) == 1 else Average(members, list(weights.values()))
        self._adopt(chosen.to(self.device), reasons)
        self._set_classes(chosen.classes)
        return self

    def _adopt(self, chosen: Calibrator | None, reasons: str) -> None:
        self.chosen_, self.reasons_ = chosen, reasons
        self.needs_features = chosen is not None and chosen.needs_features
        self.accepts_masked = chosen is None or chosen.accepts_masked
        self.solution_ = None if chosen is None else chosen.solution_

    def _weigh(self, data: _Data) -> tuple[dict[str, float], float, str]:
        """Weights of the members by name, the factor of the penalties, and the reasons."""
        self.candidates_, right = [], data.records.correct
        if problem := _no_choice(right):
            warn(f"{problem}: a temperature near 1 is all that is fitted")
            return {SHRUNK: 1.0}, 1.0, f"chose {SHRUNK}: {problem}"
        some = data.sample(self.seed)
        # Not by class: folds with the same classes as the rest flatter methods that learn these.
        strata = np.zeros(len(some.records), dtype=np.int64)
        count = self.folds or FOLDS[len(strata) >= FEWER_FOLDS_FROM]
        parts = folds(strata, count, groups=some.groups, seed=self.seed)
        if len(parts) < 2:
            raise ValueError("groups must have two values or more to be judged by, got one")
        judge = _Judge(some, parts, self.keep_argmax is True)
        other = structured(some.records.classes, len(some.records)).name
        undecided = self.keep_argmax == "auto" and some.records.classes > 2 and data.offers(other)
        clear = False
        if undecided and self.candidates is None:
            more, error = judge.accuracy_gain(other)
            clear = more > CLEAR_GAIN_IN_ERRORS * error
        names = self._usable(data, clear)
        if MATRIX in names:
            judge.choose_penalty(other)
        weights = judge.weights(names)
        self.candidates_ = [judge.candidate(name, weights.get(name, 0.0)) for name in names]
        lines = [_explain(weights, self.candidates_)]
        if undecided:
            lines += judge.other_predictions(other, weights, clear)
        return weights, judge.how.penalty, "\n".join(lines)

    def forward(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        """Calibrated logits of the chosen method."""
        self.check_logits(logits)
        result: Tensor = self._fitted_choice()(logits, features)
        return result

    def predict_records(self, records: Records) -> RecordPredictions:
        """Confidence and negative log-likelihood of each example after calibration."""
        chosen = self._fitted_choice()
        parts = chosen.parts if isinstance(chosen, Average) else [chosen]
        others = [part.name for part in parts if not isinstance(part, RecordsCalibrator)]
        if others:
            raise TypeError(f"{comma_separated(others)} need logits, not records: predict_proba")
        assert isinstance(chosen, RecordsCalibrator | Average)
        return chosen.predict_records(records)

    @property
    def temperature(self) -> Any:
        """The method ``temperature(logits)`` of the chosen calibrator, if it has one."""
        return self._fitted_choice().temperature  # AttributeError where there is none

    def describe(self) -> str:
        """The description of the chosen method."""
        return super().describe() if self.chosen_ is None else f"chosen: {self.chosen_.describe()}"

    @property
    def findings(self) -> list[str]:
        """The reasons without the figures of the candidates.

        First what was chosen, then, if anything, what other predictions gain, or would gain.
        """
        return [line for line in self.reasons_.splitlines() if not line.startswith(" ")]

    def left_out(self) -> list[str]:
        """What other predictions would gain, which are kept."""
        return self.findings[1:] if self.keeps_argmax else []

    def learned(self) -> dict[str, Any]:
        """The learned values of the chosen method."""
        return {} if self.chosen_ is None else self.chosen_.learned()

    def _fitted_choice(self) -> Calibrator:
        if self.chosen_ is None:
            raise AttributeError("Auto has not chosen yet: call fit(logits, labels) first")
        return self.chosen_

    def _usable(self, data: _Data, clear: bool) -> list[str]:
        """Names of the candidates that the data suffice for; ``clear`` if others predict better."""
        usual: Sequence[str] = CHANGING if clear else KEEPING
        if data.records.classes == 2 and self.keep_argmax is not True:
            usual = TWO_CLASSES
        elif self.keep_argmax is False:
            usual = FREE
        if len(data.records) < SHRUNK_BELOW:
            usual = [SHRUNK if name == "ts" else name for name in usual]
        usable = [name for name in self.candidates or usual if data.offers(name)]
        if not usable:
            raise ValueError(
                f"none of the candidates {', '.join(self.candidates or usual)} can be fitted on "
                f"{len(data.records):,} examples of {data.records.classes:,} classes without "
                "features: add none or ts"
            )
        return usable

    def get_extra_state(self) -> dict[str, Any]:
        """The choice, for ``state_dict``: names and configs of the members, and the reasons."""
        chosen = self.chosen_
        if chosen is None:
            return {"chosen": None, "config": {}, "reasons": ""}
        if isinstance(chosen, Average):
            members = [{"name": part.name, "config": part.config()} for part in chosen.parts]
            return {"chosen": "average", "config": {"members": members}, "reasons": self.reasons_}
        return {"chosen": chosen.name, "config": chosen.config(), "reasons": self.reasons_}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Build the members, whose learned values are loaded next."""
        name, config = state["chosen"], state["config"]
        chosen: Calibrator | None = None
        if name == "average":
            chosen = Average([_made(m["name"], m["config"]) for m in config["members"]])
        elif name is not None:
            chosen = _made(name, config)
        self._adopt(chosen and chosen.to(self.device), str(state["reasons"]))


def _made(name: str, config: dict[str, Any] | None = None) -> Calibrator:
    from calibrant.calibrators.registry import find_calibrator  # which knows this module

    return find_calibrator(name)[1](**config or {})


def _known(candidates: Sequence[str]) -> tuple[str, ...]:
    """Check names of candidates; aliases become names."""
    from calibrant.calibrators.registry import find_calibrator

    names = tuple(find_calibrator(name)[0] for name in candidates)
    if not names or Auto.name in names:
        raise ValueError(f"candidates must be methods other than auto, got {tuple(candidates)}")
    return names


class _Options(NamedTuple):
    """Options of the candidates that have them: predictions are kept, a factor of penalties."""

    keep_argmax: bool
    penalty: float = 1.0
    one_logit: bool = False


class _Data(NamedTuple):
    """Records of the labelled examples, their groups, and the examples themselves, if known."""

    records: Records
    groups: NDArray[Any] | None = None
    examples: Examples | None = None
    context: Context = Context()

    def sample(self, seed: int) -> _Data:
        """Return as many examples as a choice is made on, drawn by a seed."""
        most = min(MAX_EXAMPLES, max(MAX_LOGITS // self.records.classes, MIN_EXAMPLES))
        if len(self.records) <= most:
            return self
        drawn = np.random.default_rng(seed).permutation(len(self.records))[:most]
        return self.take(np.sort(drawn))

    def take(self, which: IntArray) -> _Data:
        """Return the labelled examples of an index, with weights that are 1 on average."""
        groups = None if self.groups is None else self.groups[which]
        records, features = self.records.take(which).scale_free(), self.context.features
        if self.examples is None:
            return _Data(records, groups)
        rows = np.flatnonzero(self.examples.labels != IGNORED)[which]
        features = None if features is None else picked(features, rows)
        context = Context(features, self.context.head, groups, records, fitted=[])
        return _Data(records, groups, self.examples.take(which).scale_free(), context)

    def offers(self, name: str) -> bool:
        """Return True if a method gets all that it needs, and enough examples."""
        calibrator, classes = _made(name), self.records.classes
        lacking = (
            (calibrator.needs_features and self.context.features is None)
            or (calibrator.needs_head and self.context.head is None)
            or (not calibrator.fits_records and self.examples is None)
        )
        enough = MIN_PER_PARAMETER * calibrator.effective_size(classes)
        return not lacking and len(self.records) >= enough

    def fitted(self, name: str, how: _Options) -> Calibrator:
        """Fit a candidate on the records or, where they do not suffice, on the examples."""
        calibrator = _made(name, {"penalty": how.penalty} if name in PENALISED else None)
        kept: Any = type(calibrator).keeps_argmax
        if kept is kept_by_task:  # the option keep_argmax may be None
            calibrator.keep_argmax = True if how.keep_argmax else None  # type: ignore[assignment]
        if self.examples is not None:
            return self.context.part(calibrator, self.examples)
        assert isinstance(calibrator, RecordsCalibrator)
        return calibrator.fit_records(self.records, one_logit=how.one_logit)

    def predictions(self, calibrator: Calibrator) -> _Predictions:
        """Predictions for each labelled example."""
        if isinstance(calibrator, RecordsCalibrator):
            confidence, nll = calibrator.predict_records(self.records)
            # the other class of two wins where the one that was on top has lost its lead
            correct = self.records.correct ^ ((self.records.classes == 2) & (confidence < 0.5))
            return _Predictions(confidence, nll, correct)
        features = self.context.features
        assert self.examples is not None
        width = 0 if features is None else features.shape[-1]
        inputs = None if features is None else features.reshape(-1, width)
        result, two = [], self.records.classes == 2
        for chunk in labelled_chunks(self.examples, 0, self.examples.labels.size):
            beside = None if inputs is None else as_tensor(inputs[chunk.number]).float()
            logits = chunk.logits[:, 1] if calibrator.classes == 1 else chunk.logits
            log_probs = calibrator.log_probs(logits, beside)
            own = log_probs.gather(-1, chunk.labels[:, None])[:, 0]
            before = chunk.logits.argmax(-1, keepdim=True)
            top = log_probs.gather(-1, before)[:, 0] if two else log_probs.amax(-1)
            right = log_probs.argmax(-1) == chunk.labels
            result.append(tuple(x.cpu().numpy() for x in (top.exp(), -own, right)))
        return _Predictions(*joined(result))


class _Predictions(NamedTuple):
    """Confidence, negative log-likelihood, and whether the predicted class is right, each ``(n,)``.

    The confidence is that of the predicted class; of two classes, of the one that was on top.
    """

    confidence: FloatArray
    nll: FloatArray
    correct: BoolArray


class _Judge:
    """Cross-validated predictions of the candidates, and what follows from them."""

    def __init__(self, data: _Data, parts: Sequence[IntArray], keep_argmax: bool) -> None:
        self.data = data
        self.parts = parts
        every = np.arange(len(data.records))
        self._folds = [(data.take(np.setdiff1d(every, part)), data.take(part)) for part in parts]
        self.how = _Options(keep_argmax)
        self.share = data.records.share
        self._known: dict[str, _Predictions] = {}

    def held_out(self, name: str) -> _Predictions:
        """Predictions for each example by a fit that did not see it."""
        if name not in self._known:
            self._known[name] = self._predicted(name)
        return self._known[name]

    def _predicted(self, name: str) -> _Predictions:
        count = len(self.share)
        result = _Predictions(np.empty(count), np.empty(count), np.empty(count, dtype=bool))
        with checks.silenced():  # small folds
            for part, (seen, unseen) in zip(self.parts, self._folds, strict=True):
                found = unseen.predictions(seen.fitted(name, self.how))
                for column, values in zip(result, found, strict=True):
                    column[part] = values
        return result

    def choose_penalty(self, name: str) -> None:
        """Weaken the penalties of a method as long as the held-out likelihood gains by it."""
        best, chosen = self.held_out(name), self.how
        for penalty in PENALTIES[1:]:
            self.how = self.how._replace(penalty=penalty)
            found = self._predicted(name)
            gain, error = self.mean_and_error(best.nll - found.nll)
            if gain <= CLEAR_GAIN_IN_ERRORS * error * (penalty < WEAK):
                break
            best, chosen = found, self.how
        self._known[name], self.how = best, chosen

    def mean_and_error(self, values: FloatArray) -> tuple[float, float]:
        """Weighted mean of values ``(n,)``, and its standard error."""
        mean = float(self.share @ values)
        return mean, float(np.sqrt(self.share**2 @ (values - mean) ** 2))

    def average(self, weights: Mapping[str, float]) -> RecordPredictions:
        """Held-out predictions of an average of methods."""
        found = [RecordPredictions(*self.held_out(name)[:2]) for name in weights]
        return _averaged(found, list(weights.values()))

    def weights(self, names: Sequence[str]) -> dict[str, float]:
        """Weights of the methods that are worth having, in the order of their names."""
        count = 1 / float(self.share @ self.share)  # as many equal examples as these are worth
        scores = np.empty(len(names))
        for i, name in enumerate(names):
            size = min(
                _made(name).effective_size(self.data.records.classes), MAX_PARAMETERS_COUNTED
            )
            loss = float(self.share @ self.held_out(name).nll)
            scores[i] = count * loss / DOUBT + size * PER_PARAMETER
        share = np.exp(scores.min() - scores)
        share /= share.sum()
        share[share < MIN_WEIGHT] = 0
        share /= share.sum()
        weights = {n: w for n, w in zip(names, share.tolist(), strict=True) if w}
        gain, error = self.gain(self.average(weights).nll)
        safe = "none" if SHRUNK not in names else SHRUNK
        return {safe: 1.0} if safe in names and gain <= MIN_GAIN_IN_ERRORS * error else weights

    def gain(self, nll: FloatArray) -> tuple[float, float]:
        """How much lower a negative log-likelihood is than without calibration, and the error."""
        return self.mean_and_error(self.held_out("none").nll - nll)

    def candidate(self, name: str, weight: float) -> Candidate:
        """Figures of a method."""
        found = self.held_out(name)
        return Candidate(
            name, float(self.share @ found.nll), self.ece(found), *self.gain(found.nll), weight
        )

    def ece(self, found: _Predictions) -> float:
        """Soft-binned calibration error: of class 1 for two classes, else of the top class.

        It is averaged over folds: pooled, the errors of their fits would cancel.
        """
        records, claimed, outcome = self.data.records, found.confidence, found.correct
        if records.classes == 2:
            claimed = np.where(records.one_on_top, claimed, 1 - claimed)
            outcome = records.labels == 1
        gap, part = (claimed - outcome) * self.share, _memberships(claimed, sigma=0.05)
        return float(sum(np.abs(part[:, i] @ gap[i]).sum() for i in self.parts))

    def accuracy_gain(self, name: str) -> tuple[float, float]:
        """How much a method raises the accuracy, and the standard error of the difference."""
        right = self.data.records.correct
        return self.mean_and_error(self.held_out(name).correct.astype(float) - right)

    def other_predictions(self, name: str, weights: Mapping[str, float], clear: bool) -> list[str]:
        """Say what other predictions gain or, where they had to be kept, would clearly gain."""
        more, error = (100 * each for each in self.accuracy_gain(name))
        before = 100 * float(self.share @ self.data.records.correct)
        accuracy = f"accuracy {before:.2f} -> {before + more:.2f} % (+- {error:.2f})"
        if not all(_made(member).keeps_argmax for member in weights):
            return [f"predictions change, as by {name}: {accuracy}; keep_argmax=True forbids it"]
        if clear:
            return []  # they were a candidate, and had the worse likelihood
        kept = self.average(weights).nll
        lower, its_error = self.mean_and_error(kept - self.held_out(name).nll)
        clear = more > CLEAR_GAIN_IN_ERRORS * error and lower >= 0
        if not clear and lower <= CLEAR_GAIN_IN_ERRORS * its_error:
            return []  # both are 0 for equal ones
        nll = float(self.share @ kept)
        return [
            f"{name}, which may change the predicted class, would gain: {accuracy}, "
            f"NLL {nll:.4f} -> {nll - lower:.4f} (+- {its_error:.4f}); keep_argmax=False allows it"
        ]


def _no_choice(right: BoolArray) -> str:
    """Return why examples that are ``right`` or not do not tell methods apart; empty if they do."""
    count = len(right)
    if count < MIN_EXAMPLES:
        return f"{count:,} examples are too few to choose a method, which takes {MIN_EXAMPLES}"
    if right.all() or not right.any():
        return f"all {count:,} predictions are {'right' if right[0] else 'wrong'}"
    return ""


def _explain(weights: Mapping[str, float], candidates: Sequence[Candidate]) -> str:
    (first, most), *others = sorted(weights.items(), key=lambda item: -item[1])
    if others:
        what = ", ".join(f"{100 * w:.0f} % {n}" for n, w in [(first, most), *others])
        title = f"{what}, weighted by held-out likelihood"
    elif first == "none" and len(candidates) > 1:
        title = "left as it is: no gain beyond noise"
    else:
        title = f"chose {first}: by the held-out likelihood"
    lines, wide = [title], max(6, *(len(c.name) for c in candidates))
    for c in candidates:
        gain = f", gain {c.gain:.4f} +- {c.error:.4f}" if c.name != "none" else ""
        lines.append(f"  {c.name:<{wide}} NLL {c.nll:.4f}, ECE {100 * c.ece:.2f} %{gain}")
    return "\n".join(lines)
