"""Thresholds with what they guarantee."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from calibrant._core.showing import as_figure, as_html, frame, one_line, threshold_text
from calibrant.metrics.reductions import Data, Input

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from typing_extensions import Unpack

LimitName = Literal["error", "precision", "recall", "fpr", "fnr", "cost"]
_PROMISES: dict[str, str] = {
    "error": "at most {} of the accepted answers are wrong",
    "precision": "at least {} of those above the threshold are positive",
    "recall": "at least {} of the positive ones are found",
    "fpr": "at most {} of the negative ones are flagged",
    "fnr": "at most {} of the positive ones are missed",
    "cost": "the mean cost is at most {}",
}
_PROMISES_OF_CLASS = _PROMISES | {
    "precision": "at least {} of those above the threshold are of class {of}",
    "recall": "at least {} of the examples of class {of} are found",
    "fpr": "at most {} of the examples of other classes are flagged as {of}",
    "fnr": "at most {} of the examples of class {of} are missed",
}


class ShownLimit(NamedTuple):
    """A limit that a threshold keeps."""

    name: LimitName
    """``error`` is of the accepted answers; the others are of the positive class."""
    limit: float
    """What is guaranteed; inf for a cost without a limit."""
    found: float
    """The same figure in the examples of the fit; NaN where it is undefined."""
    bound: float
    """End of its one-sided interval at the level of the test that this threshold passed. It shows
    how close the call was; ``limit`` is what is guaranteed. NaN where no test was passed."""
    n: int
    """Examples that ``found`` is a share or a mean of."""

    def amount(self, value: float) -> str:
        """Return a value of this figure as text, in percent unless it is a cost."""
        return f"{value:g}" if self.name == "cost" else f"{100 * value:.4g} %"


class Threshold(NamedTuple):
    """Probability from which on to accept an answer, or to flag an example as positive."""

    threshold: float
    """Accept or flag an example when its probability is at least this; inf accepts none."""
    coverage: float
    """Share of the examples that it accepts or flags."""
    n: int
    """Number of examples."""
    certainty: float
    """Probability with which all limits hold."""
    limits: tuple[ShownLimit, ...]
    """What is guaranteed."""
    more_labels: float = 0.0
    """About how many more examples would show the limits, where these do not; inf if no number
    would, as their rates are beyond the limits at every threshold."""
    cost: tuple[tuple[float, float], tuple[float, float]] | None = None
    """Costs of true negatives and false positives, then of false negatives and true positives."""
    positive: str | None = None
    """Name of the class that it finds, where it is known."""

    def __repr__(self) -> str:
        verb = "accepts" if self.about_answers else "flags"
        as_class = "" if self.positive is None else f" as {self.positive}"
        if self.threshold == math.inf:
            return one_line(self, f"{verb} none{as_class}", f"{self.n:,} examples")
        figures = [f"{one.name} {one.amount(one.found)}" for one in self.limits]
        asked = [
            f"{'' if one.name in ('precision', 'recall') else 'max_'}{one.name}={one.limit:g}"
            for one in self.limits
            if one.limit < math.inf
        ]
        return one_line(
            self,
            f"{threshold_text(self.threshold)}: {verb} {100 * self.coverage:.1f} %{as_class}",
            *figures,
            *asked,
            *([f"certainty={self.certainty:g}"] if asked else []),
        )

    @property
    def about_answers(self) -> bool:
        """True if answers are accepted, False if examples are flagged as positive."""
        return self.limits[0].name == "error"

    @property
    def error(self) -> float:
        """Share of wrong answers among the accepted examples of the fit."""
        return self._error.found

    @property
    def bound(self) -> float:
        """Clopper-Pearson upper bound of the error."""
        return self._error.bound

    @property
    def max_error(self) -> float:
        """What is guaranteed about the error."""
        return self._error.limit

    @property
    def _error(self) -> ShownLimit:
        if not self.about_answers:
            raise AttributeError("this threshold is not about answers: see its limits")
        return self.limits[0]

    def promise(self) -> str:
        """Return what is guaranteed, in words; empty if nothing is."""
        costs = [one.limit for one in self.limits if one.name == "cost"]
        unproven = math.inf in costs or (costs and self.more_labels)
        if self.threshold == math.inf or unproven:
            return ""
        words = _PROMISES if self.positive is None else _PROMISES_OF_CLASS
        kept = [
            words[one.name].format(one.amount(one.limit), of=self.positive) for one in self.limits
        ]
        return f"With {100 * self.certainty:g} % certainty, {in_words(kept)}."

    def needs(self) -> str:
        """Return how many more labels would show the limits, in words; empty if these do."""
        if not self.more_labels:
            return ""
        if self.more_labels == math.inf:
            return "more labels like these will not help"
        about = f"about {self.more_labels:,.0f} more labels are needed"
        return f"{about} (a rough figure, which may rise severalfold with more labels)"

    def _repr_html_(self) -> str:
        return as_html(self)

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with a row for each limit. Needs pandas."""
        of_all = {k: v for k, v in self._asdict().items() if k not in ("limits", "cost")}
        return frame([{**of_all, **one._asdict(), "n": self.n, "of": one.n} for one in self.limits])

    def plot(self, logits: Input = None, labels: Input = None, **data: Unpack[Data]) -> Figure:
        """Draw the share of the answers and their error at every threshold, with this one marked.

        Of examples in the form that :func:`threshold` takes: those of the fit, or others to check
        it. For thresholds of answers. Needs matplotlib.
        """
        return as_figure(self, logits, labels, **data)

    def state(self) -> dict[str, Any]:
        """Return the numbers for JSON: None stands for infinity and NaN."""

        def known(numbers: Mapping[str, Any]) -> dict[str, Any]:
            return {
                k: None if isinstance(v, float) and not math.isfinite(v) else v
                for k, v in numbers.items()
            }

        return known(self._asdict()) | {"limits": [known(one._asdict()) for one in self.limits]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Threshold:
        """Make a threshold of what :meth:`state` returned."""
        own = {"threshold": math.inf, "more_labels": math.inf}
        numbers = _checked_state(cls, state, own, ("limits", "cost", "positive"))
        limits = state["limits"]
        if not isinstance(limits, Sequence) or not limits:
            raise ValueError(f"a threshold has limits, got {limits!r:.200}")
        absent = {"limit": math.inf, "found": math.nan, "bound": math.nan}
        made = [ShownLimit(**_checked_state(ShownLimit, one, absent, ("name",))) for one in limits]
        if unknown := [one.name for one in made if one.name not in get_args(LimitName)]:
            names = ", ".join(get_args(LimitName))
            raise ValueError(f"limits are of {names}, got {unknown[0]!r:.60}")
        if any(one.limit == math.inf and one.name != "cost" for one in made):
            raise ValueError("only a cost may have no limit")
        if (cost := state["cost"]) is not None:
            cost = tuple(tuple(map(float, row)) for row in cost)
        return cls(**{**numbers, "limits": tuple(made), "cost": cost})


def _checked_state(
    kind: Any, state: Any, absent: Mapping[str, float], others: Sequence[str]
) -> dict[str, Any]:
    """Return the numbers of a state, with those that were not finite."""

    def is_legal(name: str, value: Any) -> bool:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return name in others or (math.isfinite(value) if number else value is None)

    named = isinstance(state, Mapping) and set(state) == set(kind._fields)
    legal = named and all(
        is_legal(k, v) and (v is not None or k in (*absent, *others)) for k, v in state.items()
    )
    if not legal:
        names = ", ".join(kind._fields)
        raise ValueError(f"a threshold has the numbers {names}, got {state!r:.200}")
    return {k: absent.get(k) if v is None else v for k, v in state.items()}


def in_words(parts: Sequence[str]) -> str:
    """Return parts of a sentence as a list with "and"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
