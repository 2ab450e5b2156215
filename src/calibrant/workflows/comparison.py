"""Results of a comparison of methods."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from calibrant._core.chunks import Estimand
from calibrant._core.messages import about
from calibrant._core.showing import as_drawing, as_html, as_latex, as_text, frame, one_line
from calibrant.calibrators.base import Calibrator
from calibrant.metrics.evaluation import Evaluation
from calibrant.metrics.intervals import Estimate
from calibrant.metrics.reductions import probability_of
from calibrant.metrics.registry import METRICS
from calibrant.workflows.choice import MethodChoice
from calibrant.workflows.effect import LossReduction

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROUNDING = 1e-6
"""Differences of a mean loss that may be due to logits in float32."""


@dataclass(frozen=True, eq=False)
class Row:
    """One method of a comparison.

    Attributes
    ----------
    method : str
    evaluation : Evaluation or None
        Metrics on the test examples; None where the method failed.
    fit_seconds : float
        Time of the fit, with that of the log-partition table, which methods share.
    argmax_changed : int or None
        Number of test examples whose predicted class changed, or of labels of tags.
    error : str or None
        The message, if the method failed or ran out of time.
    notes : list of str
        Warnings of the fit.
    calibrator : Calibrator or None
        Fitted; None where the method failed.
    by_fold : list of Calibrator
        Of a single split, those that measured it: one for each fold, fitted on the others.
    """

    method: str
    evaluation: Evaluation | None
    fit_seconds: float
    argmax_changed: int | None
    error: str | None
    notes: list[str] = field(default_factory=list)
    calibrator: Calibrator | None = field(default=None, repr=False)
    by_fold: list[Calibrator] = field(default_factory=list, repr=False)

    def __repr__(self) -> str:
        figures = f"failed: {self.error}" if self.evaluation is None else self.evaluation.headline()
        return one_line(self, f"{self.method}: {figures}", f"fitted in {self.fit_seconds:.2f} s")

    _repr_html_ = as_html

    def to_frame(self) -> pd.DataFrame:
        """Return the metrics as :meth:`calibrant.metrics.evaluation.Evaluation.to_frame` does."""
        return frame([]) if self.evaluation is None else self.evaluation.to_frame()

    def to_dict(self, names: Sequence[str] = ()) -> dict[str, Any]:
        """Return the JSON form; values that are undefined are None, all ``names`` of a failure."""
        undefined = {name: dict.fromkeys(("value", "low", "high")) for name in names}
        metrics = self.evaluation.to_dict()["metrics"] if self.evaluation else undefined
        others = ("fit_seconds", "argmax_changed", "error", "notes")
        about = {name: getattr(self, name) for name in others}
        return {"method": self.method, "metrics": metrics, **about}


@dataclass(frozen=True, eq=False)
class Comparison:
    """Methods side by side, as a table when printed.

    Attributes
    ----------
    rows : list of Row
    n_fit, n_test, classes : int
        Labelled examples that the methods were fitted on and measured on, and their classes.
    fitted_on, measured_on : str
        Description of these examples.
    level : float or None
        Coverage of the intervals.
    estimand : str
        Which probability the calibration errors are about.
    chosen : MethodChoice
        The method that is advised, and the reasons.
    folds : int
        Folds in which a single split was fitted and measured; 0 where these are two splits.
    gain : LossReduction or None
        What the chosen method gains on the test examples; None where it changes nothing, or could
        not be measured.
    behind : mapping of str to mapping of str to Estimate
        By metric (nll, brier and accuracy) and method, how much worse it is than the best method,
        with the interval of the differences between the same examples. Empty without intervals,
        and where there are too many examples to keep a loss of each.
    """

    rows: list[Row]
    n_fit: int
    n_test: int
    classes: int
    fitted_on: str
    measured_on: str
    level: float | None
    estimand: Estimand
    chosen: MethodChoice
    folds: int = 0
    gain: LossReduction | None = None
    behind: Mapping[str, Mapping[str, Estimate]] = field(default_factory=dict, repr=False)

    def __getitem__(self, method: str) -> Row:
        return {row.method: row for row in self.rows}[method]

    @property
    def measured(self) -> dict[str, Evaluation]:
        """Evaluations of the methods that did not fail."""
        return {row.method: row.evaluation for row in self.rows if row.evaluation is not None}

    def best(self, metric: str = "ece") -> list[str]:
        """Return the methods not significantly worse than the best one, from good to bad.

        By NLL, Brier score and accuracy, the interval in ``behind`` has to exclude zero for a
        method to be worse. Differences of a calibration error have no such interval: methods are
        returned that are in the interval of the best or half its width away, since noise lifts an
        ECE above its interval. So are those of any metric where ``behind`` is empty.
        """
        sign = -1 if METRICS[metric].higher_is_better else 1
        known = {m: e[metric] for m, e in self.measured.items() if not math.isnan(e[metric].value)}
        order = sorted(known, key=lambda method: sign * known[method].value)
        if not order:
            return []
        if behind := self.behind.get(METRICS[metric].name):
            return [method for method in order if not behind[method].low > ROUNDING]
        value, low, high = known[order[0]]
        ends = [sign * value, sign * value + (high - low) / 2, sign * (high if sign > 0 else low)]
        limit = max(end for end in ends if not math.isnan(end))
        return [method for method in order if sign * known[method].value <= limit]

    def legend(self) -> str:
        """Return in words which ECE and NLL are marked, as :meth:`best` returns them."""
        if self.level is None:
            return "the best"
        near = "in the interval of the best, or within half its width"
        if not self.behind:
            return near
        paired = f"paired differences, {100 * self.level:g} % interval"
        return f"NLL not significantly worse than the best ({paired}); ECE {near}"

    def choice(self) -> str | None:
        """Return the method that is advised; None where no choice could be made.

        It is chosen by cross-validation on the examples of the fit, as in
        :func:`calibrant.workflows.choice.choose`; the test examples only measure.
        """
        return self.chosen.method

    def advice(self) -> str:
        """Return a recommendation: a method, or that none clearly helps on the test examples."""
        gain = self.gain
        if gain is None or gain.low > 0:
            return self.chosen.advice
        what = ": leave the logits as they are"
        if gain.needed is not None and gain.needed > self.n_test:
            what = f"; label about {about(gain.needed - self.n_test)} more {self.counted}"
        does = "lowers" if gain.value > 0 else "raises"
        noise = ", which is within noise" if gain.high >= 0 else " on examples it was not fitted on"
        return f"No method clearly helps{what}. {self.choice()} {does} the NLL by {gain}{noise}."

    @property
    def counted(self) -> str:
        """What the numbers of examples count."""
        return "labels" if self.estimand == "multilabel" else "examples"

    def describe(self) -> str:
        """Return a line about the examples."""
        probability = probability_of(self.estimand)
        measured = f", ECE of {probability}" if probability else ""
        columns = "tags" if self.estimand == "multilabel" else "classes"
        return (
            f"{self.classes} {columns}{measured}; "
            f"fitted on {self.n_fit:,} {self.counted} ({self.fitted_on}), "
            f"measured on {self.n_test:,} ({self.measured_on})"
        )

    def remarks(self) -> list[str]:
        """Return errors, warnings of the fits, and what other predictions would gain."""
        failed = [f"{row.method} failed: {row.error}" for row in self.rows if row.error]
        methods: dict[str, list[str]] = {}
        for row in self.rows:
            for note in row.notes:
                methods.setdefault(note, []).append(row.method)
        notes = [f"{', '.join(names)}: {note}" for note, names in methods.items()]
        return [*failed, *notes, *self.chosen.remarks]

    __str__ = as_text
    _repr_html_ = as_html

    def __repr__(self) -> str:
        counted = f"{len(self.rows)} methods on {self.n_test:,} examples"
        chosen = self.choice()
        if chosen is None or chosen not in self.measured:
            return one_line(self, counted, "no choice")
        return one_line(self, f"{counted}: {chosen} chosen", self.measured[chosen].headline())

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: errors as fractions, undefined values as None."""
        names = ["n_fit", "n_test", "classes", "fitted_on", "measured_on", "folds", "level"]
        names += ["estimand"]
        measured = list(next(iter(self.measured.values()), METRICS))
        rows = [row.to_dict(measured) for row in self.rows]
        return {
            **{name: getattr(self, name) for name in names},
            "choice": self.choice(),
            "advice": self.advice(),
            "gain": None if self.gain is None else vars(self.gain),
            "remarks": list(self.chosen.remarks),
            "rows": rows,
        }

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with a row for each method.

        Columns are ``method``, ``NAME``, ``NAME_low`` and ``NAME_high`` of each metric,
        ``fit_seconds``, ``argmax_changed`` and ``error``. Errors are fractions, undefined values
        NaN. Needs pandas.
        """
        rows = []
        for row in self.to_dict()["rows"]:
            figures = {
                name + end: estimate[key]
                for name, estimate in row["metrics"].items()
                for end, key in (("", "value"), ("_low", "low"), ("_high", "high"))
            }
            others = {key: row[key] for key in ("fit_seconds", "argmax_changed", "error")}
            rows.append({"method": row["method"], **figures, **others})
        return frame(rows)

    def plot(
        self, ax: Axes | None = None, *, metrics: Sequence[str] = ("ece", "nll")
    ) -> Axes | Figure:
        """Draw forest plots of metrics side by side, methods from good to bad by the first one.

        Filled points are those that :meth:`best` returns, and the method that is advised is in
        bold type. With ``ax`` only the first metric is drawn. Needs matplotlib.
        """
        drawn: Axes | Figure = as_drawing(self, ax, metrics=metrics)
        return drawn

    def to_latex(self) -> str:
        """Return the table for LaTeX with the package booktabs; what :meth:`best` has is bold."""
        return as_latex(self)
