"""Estimated performance: metrics with intervals, and the promise behind them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from calibrant._core.messages import printable
from calibrant._core.tables import aligned, frame, latex_table
from calibrant.display.html import html_table, joined, notebook
from calibrant.display.results import Kind, heading, one_line, remarks, verdict
from calibrant.estimate.watch import Shift
from calibrant.metrics.reliability import Estimate

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

Status = Literal["holds", "unchecked", "widened", "withdrawn", "labels"]
TITLES = {
    "accuracy": "accuracy",
    "coverage": "coverage",
    "accepted_error": "error of accepted",
    "brier": "Brier score",
    "nll": "log loss",
    "precision": "precision",
    "recall": "recall",
    "f1": "F1",
    "auroc": "AUROC",
    "true_positives": "true positives",
    "false_positives": "false positives",
    "false_negatives": "false negatives",
    "true_negatives": "true negatives",
}
PLAIN = ("brier", "nll", "auroc", "f1")
"""Metrics that are shown as numbers, not in percent; counts are whole numbers."""
COUNTS = tuple(name for name in TITLES if name.endswith("tives"))
ASSUMPTION = (
    "Assumed: among the examples of this batch with one confidence, that share of answers is right"
)
KINDS: dict[Status, Kind] = {
    "holds": "good",
    "labels": "good",
    "unchecked": "warn",
    "widened": "warn",
    "withdrawn": "bad",
}


@dataclass(frozen=True, eq=False)
class PerformanceEstimate:
    """Performance of a batch, estimated from its predictions; printing it gives a table.

    Attributes
    ----------
    metrics : dict of str to Estimate
        Values with the ends of their intervals, which are NaN if the promise is withdrawn. The
        counts of two classes are expected numbers of examples (sums of weights, if there are any).
    status : str
        ``"holds"``: no shift from the reference was seen. ``"unchecked"``: there is no reference.
        ``"widened"``: a shift was seen, and the intervals allow for one as large that is not.
        ``"withdrawn"``: nothing is promised. ``"labels"``: nothing is promised about predictions;
        the intervals are from labels of this batch.
    reasons : list of str
    shifts : list of Shift
        Differences from the reference by view: size, and p-value of no difference.
    widening : float
        Change of the accuracy by a shift that was not seen, for which intervals allow.
    new_prior : list of float, optional
        Estimated class frequencies, if they explain the shift.
    """

    n: int
    classes: int
    metrics: dict[str, Estimate]
    level: float
    status: Status
    reasons: list[str]
    shifts: list[Shift]
    widening: float
    reference: int  # labelled examples of the reference
    labels: int  # labelled examples of the batch
    threshold: float | None = None
    new_prior: list[float] | None = None

    def __getitem__(self, name: str) -> Estimate:
        return self.metrics[name]

    def describe(self) -> str:
        """Describe the examples behind the estimate."""
        labels = f", {self.labels:,} of them labelled" if self.labels else ""
        beside = f"a reference of {self.reference:,}" if self.reference else "no reference"
        threshold = "" if self.threshold is None else f"; accepted from {self.threshold:g} on"
        return f"{self.n:,} examples{labels}, {self.classes} classes; {beside}{threshold}"

    def assumption(self) -> str:
        """Return what the intervals rest on, in words."""
        size = f"{100 * self.level:g} % intervals"
        if self.status == "labels":
            return f"The {size} rest on the {self.labels:,} labels, and on how they were selected."
        if self.status == "withdrawn":
            return f"{ASSUMPTION}. This is in doubt, and no interval is promised."
        shown = " as the reference shows it" if self.reference else ""
        hidden = ", or differs by a shift no larger than the one seen" * (self.status == "widened")
        every = "" if self.classes == 2 else "; Brier score and log loss need it of every class"
        return f"{ASSUMPTION}{shown}{hidden}{every}. The {size} hold if this does."

    def verdict(self) -> str:
        """Return the state of the promise in a sentence."""
        said = {
            "holds": "No shift from the reference was seen",
            "unchecked": "Nothing was checked, for lack of a reference",
            "widened": f"Intervals were widened by {100 * self.widening:.1f} points of accuracy",
            "withdrawn": "The promise is withdrawn",
            "labels": "The promise is withdrawn; estimated from labels alone",
        }[self.status]
        return f"{said}{': ' if self.reasons else ''}{'; '.join(self.reasons)}."

    def table(self) -> list[tuple[str, ...]]:
        """Return headings and a row for each metric, as text."""
        interval = f"{100 * self.level:g} % interval"
        rows: list[tuple[str, ...]] = [("metric", "estimate", interval)]
        for name, estimate in self.metrics.items():
            value, low, high = (_shown(name, x) for x in estimate)
            ends = "-" if math.isnan(estimate.low) else f"{low} to {high}"
            rows.append((TITLES[name], value, ends))
        return rows

    def remarks(self) -> list[str]:
        """Return the shifts in every view."""
        return [
            f"shift of {s.view}: size {s.size:.3f}, p "
            + ("< 0.001" if s.p_value < 1e-3 else f"= {s.p_value:.3f}")
            for s in self.shifts
        ]

    def __str__(self) -> str:
        table = aligned(self.table())
        lines = [self.describe(), *table, *self.remarks(), self.assumption(), self.verdict()]
        return printable("\n".join(lines))

    def __repr__(self) -> str:
        value, low, high = self.metrics["accuracy"]
        ends = "no interval" if math.isnan(low) else f"{100 * low:.1f} to {100 * high:.1f} %"
        return one_line(
            self, f"accuracy {100 * value:.1f} %", ends, self.verdict().rstrip("."), ASSUMPTION
        )

    def _repr_html_(self) -> str:
        headings, *rows = self.table()
        parts = [
            heading("Estimated performance", self.describe()),
            verdict(self.verdict(), KINDS[self.status]),
            html_table(headings, rows),
            remarks([*self.remarks(), self.assumption()]),
        ]
        return notebook(joined(parts))

    def to_dict(self) -> dict[str, Any]:
        """Return the values for JSON: shares as fractions, undefined values as None."""
        metrics = {
            name: {key: None if math.isnan(x) else x for key, x in estimate._asdict().items()}
            for name, estimate in self.metrics.items()
        }
        return {
            "n": self.n,
            "classes": self.classes,
            "reference": self.reference,
            "labels": self.labels,
            "level": self.level,
            "threshold": self.threshold,
            "status": self.status,
            "reasons": self.reasons,
            "assumption": self.assumption(),
            "widening": self.widening,
            "metrics": metrics,
            "shifts": [shift._asdict() for shift in self.shifts],
            "new_prior": self.new_prior,
        }

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with a row for each metric. Needs pandas."""
        return frame({"metric": name, **e._asdict()} for name, e in self.metrics.items())

    def to_latex(self) -> str:
        """Return the metrics as a table for LaTeX with the package booktabs."""
        headings, *rows = self.table()
        return latex_table(headings, rows)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the shares with their intervals. Needs matplotlib."""
        from calibrant.plots import forest_plot

        shares = [name for name in self.metrics if name not in (*COUNTS, "brier", "nll")]
        rows = {TITLES[name]: self.metrics[name] for name in shares}
        return forest_plot(rows, ax, title="estimate", reference=None, level=self.level)


def _shown(name: str, value: float) -> str:
    if math.isnan(value):
        return "-"
    if name in COUNTS:
        return f"{value:,.0f}"
    return f"{value:.4f}" if name in PLAIN else f"{100 * value:.2f} %"
