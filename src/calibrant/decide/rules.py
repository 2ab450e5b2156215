"""Decision rules: a threshold or conformal sets, with the calibrator that belongs to them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from calibrant._core import checks
from calibrant._core.checks import BoolArray, Features, IntArray
from calibrant._core.class_names import as_array, in_order
from calibrant._core.probs import logits_from_probs
from calibrant._core.showing import as_html, one_line, threshold_text
from calibrant.calibrators.base import Calibrator, check_calibrator
from calibrant.decide.conformal_sets import ConformalSets
from calibrant.decide.probabilities import _in_form_of, probabilities
from calibrant.decide.threshold_results import Threshold
from calibrant.decide.threshold_search import Counts, Trials
from calibrant.metrics.reductions import Input, check_one_input

if TYPE_CHECKING:
    import pandas as pd

UNLIKELY = 0.05
"""Probability below which a check contradicts a guarantee."""


class Tally(NamedTuple):
    """Counts of decisions; those of several chunks add up."""

    n: int = 0
    """Examples."""
    size: int = 0
    """Examples that are accepted, or classes in all sets together."""
    judged: int = 0
    """Labelled examples that are accepted or flagged, or that have a set."""
    wrong: int = 0
    """Those whose predicted class is wrong, that are negative, or whose set misses the label."""
    labelled: int = 0
    """Labelled examples; counted for thresholds."""
    missed: int = 0
    """Those that are positive and not flagged, or right and not accepted."""

    @classmethod
    def total(cls, tallies: Iterable[Tally]) -> Tally:
        """Add up counts."""
        return cls(*map(sum, zip(cls(), *tallies, strict=True)))


def renumbered(
    decisions: Mapping[str, NDArray[Any]], places: IntArray | None
) -> dict[str, NDArray[Any]]:
    """Return decisions about classes that have other places; ``places`` are those of each."""
    if places is None:
        return dict(decisions)
    renamed = {"predicted": places[decisions["predicted"]]}
    if "set" in decisions:
        renamed["set"] = decisions["set"][..., np.argsort(places)]
    return {**decisions, **renamed}


class DecisionRule(nn.Module):
    """A threshold or conformal sets, and the calibrator whose probabilities they are about.

    Saved together, they cannot be mixed up: a threshold guarantees nothing about other
    probabilities than those it was found with.

    Parameters
    ----------
    guarantee : Threshold or ConformalSets
    classes : int
        Number of classes of the predictions.
    calibrator : Calibrator, optional
        Fitted; applied to logits first.
    class_names : sequence of str, optional
    positive : int, optional
        Class that a threshold finds, if it is not about answers; by default the one whose name it
        knows, else 1 of two.

    Examples
    --------
    >>> from calibrant.decide import threshold
    >>> rng = np.random.default_rng(0)
    >>> logits = 3 * rng.normal(size=(2000, 3))
    >>> labels = (logits + rng.gumbel(size=logits.shape)).argmax(-1)
    >>> rule = DecisionRule(threshold(logits, labels, max_error=0.05), classes=3)
    >>> rule.decide([[9.0, 0.0, 0.0], [1.0, 0.5, 0.0]])["accepted"]
    array([ True, False])
    >>> print(rule.promise())
    With 95 % certainty, at most 5 % of the accepted answers are wrong.
    """

    def __init__(
        self,
        guarantee: Threshold | ConformalSets,
        classes: int,
        calibrator: Calibrator | None = None,
        class_names: Sequence[str] | None = None,
        positive: int | None = None,
    ) -> None:
        super().__init__()
        checks.check_whole("classes", classes, 2)
        if isinstance(guarantee, Threshold) and not guarantee.about_answers:
            names, known = [] if class_names is None else [*class_names], guarantee.positive
            if positive is None and known is not None and known in names:
                positive = names.index(known)
            positive = 1 if positive is None and classes == 2 else positive
            checks.check_whole("positive", positive, 0)
            if positive >= classes:  # type: ignore[operator]  # it is a number
                raise ValueError(f"positive must be a class in [0, {classes}), got {positive}")
        elif positive is not None:
            raise TypeError(
                "positive= is for thresholds that find a class, not for answers or sets"
            )
        if isinstance(guarantee, ConformalSets):
            if guarantee.classes != classes:
                raise ValueError(f"the sets are of {guarantee.classes} classes, got {classes=}")
            if guarantee.by == "group" or guarantee.weighted is not None:
                raise TypeError(
                    "a rule has no groups or weights of the rows it decides about: save the sets "
                    "themselves, and call their sets(..., group=) or sets(..., weight=)"
                )
        if class_names is not None and len(class_names) != classes:
            raise ValueError(f"{classes} class_names are wanted, got {len(class_names)}")
        if calibrator is not None:
            check_calibrator(calibrator)
            calibrator.refuse_tags("DecisionRule")
        if isinstance(guarantee, Threshold) and positive is not None and class_names is not None:
            name = str(class_names[positive])
            if guarantee.positive not in (None, name):
                raise ValueError(f"the threshold is of class {guarantee.positive}, got {name}")
            guarantee = guarantee._replace(positive=name)
        self.guarantee, self.classes, self.calibrator = guarantee, int(classes), calibrator
        self.class_names = None if class_names is None else [str(name) for name in class_names]
        self.positive = positive

    def config(self) -> dict[str, Any]:
        """Return the arguments of :meth:`from_config`."""
        names = ("classes", "calibrator", "class_names", "positive")
        return {"guarantee": self.guarantee.state(), **{k: getattr(self, k) for k in names}}

    @classmethod
    def from_config(
        cls,
        guarantee: Mapping[str, Any],
        classes: int,
        calibrator: Calibrator | None,
        class_names: Sequence[str] | None,
        positive: int | None,
    ) -> DecisionRule:
        """Make a rule of what :meth:`config` returned."""
        kind = ConformalSets if "score" in guarantee else Threshold
        return cls(kind.from_state(guarantee), classes, calibrator, class_names, positive)

    @property
    def kind(self) -> str:
        """Kind of the guarantee, "threshold" or "sets"."""
        return "sets" if isinstance(self.guarantee, ConformalSets) else "threshold"

    @property
    def decision(self) -> str:
        """Name of the decisions in :meth:`decide`: "accepted", "flagged" or "set"."""
        if isinstance(self.guarantee, ConformalSets):
            return "set"
        return "accepted" if self.positive is None else "flagged"

    @checks.warnings_at_caller()
    def decide(
        self, logits: Input = None, *, probs: Input = None, features: Features | None = None
    ) -> dict[str, Any]:
        """Return the decisions about logits ``(..., classes)`` or ``(n,)``, or probs alike.

        ``predicted`` ``(...)`` is the most probable class and ``confidence`` its probability; for a
        threshold ``accepted`` ``(...)`` tells whether to accept it, or ``flagged`` ``(...)``
        whether the example counts as positive; for sets ``set`` ``(..., classes)`` tells which
        classes to keep: arrays, or tensors on the device of a tensor.
        """
        check_one_input(logits, probs)
        values, places = in_order(logits if probs is None else probs, self.class_names)
        data: dict[str, Any] = {"logits": values} if probs is None else {"probs": values}
        if self.calibrator is not None:
            scores = values if probs is None else logits_from_probs(values)
            data = {"logits": self.calibrator.transform(scores, features)}
        rows = probabilities(data.get("logits"), data.get("probs"))[0]
        if rows.shape[-1] != self.classes:
            raise ValueError(f"the rule is for {self.classes} classes, got {rows.shape[-1]}")
        confidence = rows.max(-1)
        decisions = {"predicted": rows.argmax(-1), "confidence": confidence}
        if isinstance(self.guarantee, ConformalSets):
            decisions["set"] = as_array(self.guarantee.sets(**data))
        else:
            decided = confidence if self.positive is None else rows[..., self.positive]
            decisions[self.decision] = decided >= self.guarantee.threshold
        form = checks.as_scores(values)
        made = renumbered(decisions, places)
        return {name: _in_form_of(form, decided) for name, decided in made.items()}

    def tally(self, decisions: Mapping[str, Any], labels: IntArray | None) -> Tally:
        """Count decisions; with ``labels`` ``(...)``, of which -100 is unknown, also mistakes."""
        made = {name: as_array(values) for name, values in decisions.items()}
        predicted, members = made["predicted"], made.get("set")
        chosen = made[self.decision]
        if labels is None:
            return Tally(predicted.size, int(chosen.sum()))
        if labels.shape != predicted.shape:
            raise ValueError(
                f"{predicted.shape} predictions need as many labels, got {labels.shape}"
            )
        checks.check_labels(labels, self.classes)
        judged: BoolArray = labels != checks.IGNORED
        known = np.where(judged, labels, 0)
        size = predicted.size, int(chosen.sum())
        if members is not None:
            held = np.take_along_axis(members, known[..., None], -1)[..., 0]
            return Tally(*size, int(judged.sum()), int((judged & ~held).sum()))
        right = known == (predicted if self.positive is None else self.positive)
        counts = (judged & chosen, judged & chosen & ~right, judged, judged & ~chosen & right)
        return Tally(*size, *(int(each.sum()) for each in counts))

    @property
    def decides_nothing(self) -> bool:
        """True if the guarantee was not shown: nothing is accepted, or all is, or all classes."""
        if isinstance(self.guarantee, ConformalSets):
            return self.guarantee.limit == math.inf
        return self.guarantee.more_labels > 0 or self.guarantee.threshold == math.inf

    def promise(self) -> str:
        """Return what is guaranteed, in words; empty if no answer is accepted."""
        return self.guarantee.promise()

    def instruction(self) -> str:
        """Return what to do with a prediction, in words."""
        if isinstance(self.guarantee, ConformalSets):
            if self.guarantee.limit == math.inf:
                more = self.guarantee.fewest - self.guarantee.n
                return f"Every set holds all classes: {more:,} more labels are needed for others."
            return f"Sets of classes by the score {self.guarantee.score}."
        needs = self.guarantee.needs()
        least = threshold_text(self.guarantee.threshold)
        if self.positive is None:
            if self.guarantee.threshold == math.inf:
                most = f"{100 * self.guarantee.max_error:g} %"
                said = f"No answer is accepted: an error of at most {most} is not shown"
                return f"{said}; {needs}." if needs else f"{said}."
            return f"Accept an answer if its confidence is at least {least}."
        name = self.name(self.positive)
        if needs and self.guarantee.threshold in (0, math.inf):
            what = "Every" if self.guarantee.coverage else "No"
            return f"{what} example is flagged as {name}: the limits are not shown; {needs}."
        flag = f"Flag an example as {name} if the probability of this class is at least {least}"
        if needs:
            flag += f": this is the cheapest in the fit, but the limits are not shown; {needs}"
        return f"{flag}."

    def __repr__(self) -> str:
        return one_line(self, self.instruction().rstrip("."), self.describe())

    _repr_html_ = as_html

    def to_frame(self) -> pd.DataFrame:
        """Return a frame of one row with the numbers of the guarantee. Needs pandas."""
        return self.guarantee.to_frame()

    def describe(self) -> str:
        """Describe the rule in a line."""
        fitted = f"fitted on {self.guarantee.n:,} examples of {self.classes} classes"
        if self.calibrator is None:
            return fitted
        return f"{fitted}, calibrated by: {self.calibrator.describe()}"

    def trials(self, tally: Tally) -> list[Trials]:
        """Return the tests of the limits of a threshold by counts, ``(1,)`` each."""
        assert isinstance(self.guarantee, Threshold)
        counts = Counts(
            tally.labelled,
            tally.judged - tally.wrong + tally.missed,
            np.array([tally.judged]),
            np.array([tally.wrong]),
        )
        costs = None if self.guarantee.cost is None else np.array(self.guarantee.cost)
        return [counts.trials(one.name, one.limit, costs) for one in self.guarantee.limits]

    def p_value(self, tally: Tally) -> float:
        """Return the probability of as many mistakes as counted, or more, if the guarantee holds.

        At the limit of the guarantee: binomial for a threshold, beta-binomial for sets, whose
        coverage varies with the examples they were fitted on; that of sets by class or group varies
        about as much. Of several limits it is the least, times their number; of costs it is a
        bound (Hoeffding and Bentkus).
        """
        from scipy.stats import betabinom

        if isinstance(self.guarantee, ConformalSets):
            n = self.guarantee.n
            if self.guarantee.limit == math.inf or not tally.judged:
                return 1.0
            rank = math.ceil((n + 1) * self.guarantee.coverage - 1e-9)
            return float(betabinom.sf(tally.wrong - 1, tally.judged, n + 1 - rank, rank))
        if not self.promise():
            return 1.0  # nothing is guaranteed
        # as many failures or more: as few successes or fewer, of which a share is allowed
        p_values = [
            float(one.test(one.trials, one.trials - one.failures, 1 - one.share)[0])
            for one in self.trials(tally)
        ]
        return min(1.0, len(p_values) * min(p_values))

    def verdict(self, tally: Tally) -> str:
        """Return whether labelled decisions agree with the guarantee; empty without labels."""
        count = tally.judged if self.positive is None else tally.labelled
        if not (count and self.promise()):
            return ""
        p = self.p_value(tally)
        if p >= UNLIKELY:
            return f"The labels of {count:,} examples agree with the guarantee."
        return (
            f"The labels of {count:,} examples contradict the guarantee (p = {p:.2g}): they "
            "differ from those of the fit, or the model or its calibrator has seen the latter."
        )

    def figures(self, tally: Tally) -> dict[str, float | None]:
        """Return counts and shares by name; None where nothing was counted."""
        mean = tally.size / tally.n if tally.n else None
        if isinstance(self.guarantee, ConformalSets):
            covered = 1 - tally.wrong / tally.judged if tally.judged else None
            found = {"mean_size": mean, "labelled": tally.judged, "coverage": covered}
        else:
            found = {self.decision: tally.size, "share": mean, "labelled": tally.labelled}
            if self.positive is None:
                found |= {"labelled": tally.judged, "wrong": tally.wrong}
            for one in self.trials(tally):
                m = int(one.trials[0])
                found[one.name] = one.value(float(one.failures[0]) / m) if m else None
        return {"n": tally.n, **found}

    @property
    def headings(self) -> tuple[str, ...]:
        """Headings of :meth:`cells`."""
        if isinstance(self.guarantee, ConformalSets):
            return "examples", "classes per set", "true class in set"
        if self.positive is None:
            return "examples", "accepted", "wrong among accepted"
        return "examples", "flagged", *(one.name for one in self.guarantee.limits)

    def cells(self, tally: Tally) -> tuple[str, ...]:
        """Return the figures as text."""
        figures = self.figures(tally)
        if isinstance(self.guarantee, ConformalSets):
            names, size = ["coverage"], figures["mean_size"]
            shown = "" if size is None else f"{size:.2f}"
        else:
            names = [one.name for one in self.guarantee.limits]
            share = figures["share"]
            shown = "" if share is None else f"{tally.size:,} ({100 * share:.1f} %)"
        values = [(name, figures[name]) for name in names]
        texts = [
            "-" if x is None else f"{x:.4g}" if name == "cost" else f"{100 * x:.2f} %"
            for name, x in values
        ]
        return f"{tally.n:,}", shown or "-", *texts

    def names(self, members: BoolArray) -> str:
        """Return the names of the classes in a set ``(classes,)``; numbers if unknown.

        >>> sets = ConformalSets(-0.1, "lac", 0.9, 100, 3, 0, 1.2)
        >>> rule = DecisionRule(sets, 3, class_names=["cat", "dog", "owl"])
        >>> [rule.names(one) for one in rule.decide(probs=[[0.8, 0.15, 0.05]])["set"]]
        ['cat, dog']
        """
        return ", ".join(self.name(int(k)) for k in np.flatnonzero(members))

    def name(self, k: int) -> str:
        """Return the name of a class, or its number."""
        return str(k) if self.class_names is None else self.class_names[k]
