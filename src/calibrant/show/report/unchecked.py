"""The list of what a report did not check, so that nobody takes silence for a pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from calibrant.show.report.model import Subject


class Unchecked(NamedTuple):
    """Something that was not checked, and how to check it."""

    what: str
    how: str

    def __str__(self) -> str:
        return f"{self.what} ({self.how})" if self.how else self.what


def unchecked_of(subject: Subject, others: int = 0) -> list[Unchecked]:
    """Return what was not checked about a subject; ``others`` are in the same report."""
    return [*_in_this_data(subject), *_beyond_it(subject, others)]


def _in_this_data(subject: Subject) -> Iterator[Unchecked]:
    if not subject.by and subject.slices is None:
        yield Unchecked(
            "Subgroups: no column was named",
            "add columns, such as a country, device or customer group, or pass --by auto",
        )
    if subject.remedy is None:
        yield Unchecked(f"Methods of calibration: {subject.remedy_error}", "calibrant compare")
    if subject.evaluation.test is None:
        yield Unchecked("Noise: intervals and the test were switched off", "pass --level 0.9")
    if all(math.isnan(part.claimed) for part in subject.classes):
        yield Unchecked("Frequencies of classes: there are too many classes", "")
    if subject.weighted:
        yield Unchecked(
            "Guaranteed thresholds: these count examples, and do not know weights",
            "leave the weights out",
        )
    yield Unchecked(
        "Labels: they were taken to be right, and examples to be independent",
        "look at a sample of confident mistakes; drop duplicates",
    )


def _beyond_it(subject: Subject, others: int) -> Iterator[Unchecked]:
    if not others:
        yield Unchecked(
            "Other days, places and versions of the model",
            "pass several files, or several --split, for a comparison",
        )
    yield Unchecked("Drift after today", "calibrant monitor, with labelled examples as they come")
    if subject.evaluation.classes > 2 and subject.word == "class":
        yield Unchecked("Inputs unlike all of these", "calibrant.metrics.ood_auroc")
