"""Estimated performance: metrics with intervals, and the guarantee behind them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from calibrant._core.showing import as_axes, as_html, as_latex, as_text, frame, one_line, plain
from calibrant.estimate.shifts import Shift
from calibrant.metrics.intervals import Estimate

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

Status = Literal["holds", "unchecked", "widened", "withdrawn", "labels", "contradicted"]
FEWEST_LABELS = 30
"""Labels of a batch from which the estimate rests on these alone."""
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
ASSUMPTION = (
    "Assumed: among the examples of this batch with one confidence, that share of answers is right"
)
REMEDIES: dict[Status, str] = {
    "unchecked": "Pass labelled predictions of the same model as reference (--reference), or "
    f"labels of {FEWEST_LABELS} examples of this batch (--labelled).",
    "withdrawn": f"Label {FEWEST_LABELS} examples of this batch or more: choose_labels "
    "(--label-budget) names those that tell most.",
    "contradicted": "Fit a calibrator on recent labels, and take a recent reference.",
}


@dataclass(frozen=True, eq=False)
class PerformanceEstimate(Mapping[str, Estimate]):
    """Performance of a batch, estimated from its predictions: a mapping from metric to estimate.

    Printing it gives a table.

    Attributes
    ----------
    metrics : dict of str to Estimate
        Values with the ends of their intervals, which are NaN if nothing supports them. The
        counts of two classes are expected numbers of examples (sums of weights, if there are any).
    status : str
        Without labels of the batch, or with fewer than 30: ``"holds"`` if no shift from the
        reference was seen; ``"widened"`` if one was seen, and the intervals allow for another as
        large that is not; ``"withdrawn"`` if it was too large for any interval, or labels or the
        monitor contradict the calibration; ``"unchecked"`` if there is no reference, and thus no
        interval. With more labels values and intervals rest on these alone, and the status is
        ``"labels"``, or ``"contradicted"`` if the calibration does not hold for them.
    reasons : list of str
    shifts : list of Shift
        Differences from the reference by view: size, and p-value of no difference.
    widening : float
        Change of the accuracy by a shift that was not seen, for which intervals allow.
    unseen : float
        If the guarantee holds: change of the accuracy by a hidden shift as large as this comparison
        would see in four of five cases, else NaN.
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
    unseen: float
    reference: int  # labelled examples of the reference
    labels: int  # labelled examples of the batch
    threshold: float | None = None
    new_prior: list[float] | None = None

    def __getitem__(self, name: str) -> Estimate:
        return self.metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.metrics)

    def __len__(self) -> int:
        return len(self.metrics)

    def describe(self) -> str:
        """Describe the examples behind the estimate."""
        labels = f", {self.labels:,} of them labelled" if self.labels else ""
        beside = f"a reference of {self.reference:,}" if self.reference else "no reference"
        threshold = "" if self.threshold is None else f"; accepted from {self.threshold:g} on"
        return f"{self.n:,} examples{labels}, {self.classes} classes; {beside}{threshold}"

    def assumption(self) -> str:
        """Return what the values and their intervals rest on, in words."""
        size = f"{100 * self.level:g} % intervals"
        if self.status in ("labels", "contradicted"):
            return f"The {size} rest on the {self.labels:,} labels, and on how they were selected."
        if self.status == "withdrawn":
            return f"{ASSUMPTION}. This is in doubt, and no interval is guaranteed."
        shown = " as the reference shows it" if self.reference else ""
        hidden = ", or differs by a shift no larger than the one seen" * (self.status == "widened")
        every = "" if self.classes == 2 else "; Brier score and log loss need it of every class"
        follows = f"The {size} hold if this does" if self.reference else "Nothing here checks it"
        return f"{ASSUMPTION}{shown}{hidden}{every}. {follows}."

    def verdict(self) -> str:
        """Return the state of the guarantee, the reasons and the remedy."""
        against = "the reference" if self.reference else "the confidences"
        said = {
            "holds": "No shift from the reference was seen",
            "unchecked": "No interval is given, since the values are right only if the confidences "
            "are",
            "widened": f"Intervals were widened by {100 * self.widening:.1f} points of accuracy",
            "withdrawn": "The guarantee is withdrawn",
            "labels": f"Estimated from the {self.labels:,} labels alone, which do not contradict "
            f"{against}",
            "contradicted": f"Calibration does not hold, and the estimate rests on the "
            f"{self.labels:,} labels alone",
        }[self.status]
        reasons = f"{said}{': ' if self.reasons else ''}{'; '.join(self.reasons)}."
        return " ".join(filter(None, (reasons, REMEDIES.get(self.status))))

    def remarks(self) -> list[str]:
        """Return the shifts in every view, what could be missed, and if labels are too few."""
        remarks = [
            f"shift of {s.view}: size {s.size:.3f}, p "
            + ("< 0.001" if s.p_value < 1e-3 else f"= {s.p_value:.3f}")
            for s in self.shifts
        ]
        if not math.isnan(self.unseen):
            remarks.append(
                f"with {self.n:,} examples beside {self.reference:,}, a shift that changes "
                f"accuracy by {100 * self.unseen:.1f} points may go unseen"
            )
        if 0 < self.labels < FEWEST_LABELS:
            remarks.append(
                f"{self.labels} labels are too few to estimate from: {FEWEST_LABELS} are needed"
            )
        return remarks

    __str__ = as_text
    _repr_html_ = as_html
    to_latex = as_latex

    def __repr__(self) -> str:
        value, low, high = self.metrics["accuracy"]
        ends = "no interval" if math.isnan(low) else f"{100 * low:.1f} to {100 * high:.1f} %"
        return one_line(
            self, f"accuracy {100 * value:.1f} %", ends, self.verdict().rstrip("."), ASSUMPTION
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the values for JSON: shares as fractions, undefined values as None."""
        values = {
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
            "unseen": self.unseen,
            "metrics": {name: estimate._asdict() for name, estimate in self.metrics.items()},
            "shifts": [shift._asdict() for shift in self.shifts],
            "new_prior": self.new_prior,
        }
        return dict(plain(values))

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with a row for each metric. Needs pandas."""
        return frame({"metric": name, **e._asdict()} for name, e in self.metrics.items())

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the shares with their intervals. Needs matplotlib."""
        return as_axes(self, ax)
