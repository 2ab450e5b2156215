"""Thresholds for each group of a prediction file, checked on other examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from calibrant._core.checks import IGNORED, Values, as_keys, known_rows, warn, warnings_at_caller
from calibrant._core.messages import comma_separated
from calibrant._core.showing import frame
from calibrant.calibrators.base import Calibrator
from calibrant.data.dataset import Split
from calibrant.data.files import Data
from calibrant.data.shards import located
from calibrant.decide.rules import UNLIKELY, DecisionRule, Tally
from calibrant.decide.threshold_limits import class_number, thresholds
from calibrant.workflows.decide import FittedRule, _calibrated_examples, _opened

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class GroupRules:
    """A decision rule for each group; all promises hold at once with ``certainty``.

    ``by`` is the name of the column of the groups.
    """

    by: str
    rules: dict[str, FittedRule]
    certainty: float

    def promise(self) -> str:
        """Return what is guaranteed, in words; empty if nothing is."""
        kept = [one.rule.promise() for one in self.rules.values() if not one.rule.decides_nothing]
        if not any(kept):
            return ""
        _, _, promise = kept[0].partition(", ")  # each is kept with a larger certainty
        every = "every group" if len(kept) == len(self.rules) else f"{len(kept)} groups"
        what = f"With {100 * self.certainty:g} % certainty, {promise.rstrip('.')}"
        return f"{what}, in {every} at once."

    def verdict(self) -> str:
        """Return whether the checks agree with the guarantees; empty if nothing was checked."""
        if not any(one.verdict() for one in self.rules.values()):
            return ""
        p_values = {name: one.rule.p_value(one.checked) for name, one in self.rules.items()}
        wrong = [name for name, p in p_values.items() if p < UNLIKELY / len(p_values)]
        if not wrong:
            return "The labels of all groups agree with the guarantee."
        return "\n".join(f"{name}: {self.rules[name].verdict()}" for name in wrong)

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with a row for each group, of its threshold and check. Needs pandas."""
        return frame(
            {self.by: name, **one.rule.guarantee.state(), **one.rule.figures(one.checked)}
            for name, one in self.rules.items()
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: shares as fractions, undefined values as None."""
        groups = {name: one.to_dict() for name, one in self.rules.items()}
        return {"by": self.by, "certainty": self.certainty, "groups": groups}


@warnings_at_caller()
def decide_by_group(
    data: Data | Values,
    labels: Values | None = None,
    *,
    by: Values | str,
    positive: int | str | None = None,
    certainty: float = 0.95,
    calibrator: Calibrator | None = None,
    fit_split: str | None = None,
    test_split: str | None = None,
    seed: int = 0,
    **limits: Any,
) -> GroupRules:
    """Fit a threshold for each group on some examples of a file, and check it on others.

    Parameters
    ----------
    by : str or (n,) array
        Name of the column with the group of each example or, beside arrays, the values.
    certainty : float in (0, 1)
        Probability that the limits of all groups hold.
    data, labels, positive, calibrator, fit_split, test_split, seed, **limits
        As in :func:`calibrant.workflows.decide.decide`.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> logits, site = 2 * rng.normal(size=4000), np.arange(4000) % 2
    >>> labels = (logits + rng.logistic(size=4000) > 0).astype(int)
    >>> found = decide_by_group(logits, labels, by=site, recall=0.9)
    >>> [*found.rules], found.verdict()
    (['0', '1'], 'The labels of all groups agree with the guarantee.')
    """
    dataset, splits, names = _opened(data, labels, calibrator, fit_split, test_split, seed, by=by)
    place = class_number(positive, splits[0].classes, dataset.class_names)
    (examples, group), new = (_with_groups(split, calibrator) for split in splits)
    with located(dataset.path), known_rows():
        found = thresholds(**examples, by=group, positive=place, certainty=certainty, **limits)
    if unseen := sorted({*new[1].tolist()} - {*found}):
        warn(f"no threshold for {comma_separated(unseen)}: no examples to fit it on ({names[0]})")

    def rule_of(name: str) -> FittedRule:
        about = found[name], splits[0].classes
        rule = DecisionRule(*about, calibrator, dataset.class_names, place)
        plain = DecisionRule(*about, None, dataset.class_names, place)  # of what is calibrated
        tallies = (_tally(plain, *some, name) for some in ((examples, group), new))
        return FittedRule(rule, *names, *tallies)

    return GroupRules(str(dataset.by), {name: rule_of(name) for name in found}, certainty)


def _with_groups(split: Split, calibrator: Calibrator | None) -> tuple[dict[str, Any], Any]:
    """Return the labelled examples of a split, calibrated, and their groups as text."""
    group = as_keys(split.read(str(split.dataset.by)))
    if group.shape != split.labels.shape:
        raise ValueError(f"by must have the shape {split.labels.shape}, got {group.shape}")
    return _calibrated_examples(split, calibrator), group[split.labels != IGNORED].astype(str)


def _tally(rule: DecisionRule, examples: dict[str, Any], group: Any, name: str) -> Tally:
    rows = group == name
    if not rows.any():
        return Tally()
    some = {key: values[rows] for key, values in examples.items()}
    targets = some.pop("labels")
    return rule.tally(rule.decide(**some), targets)
