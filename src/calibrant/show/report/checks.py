"""Checks of a report: functions of a subject that return what they found, or None."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from calibrant.metrics.evaluation import Evaluation
from calibrant.show.report.model import ClassFigures, Part, Severity, Subject, holm

SIGNIFICANT = 0.05
"""Level of the tests; where several are made, p-values are adjusted for their number (Holm)."""
SMALL, LARGE = 0.01, 0.05
"""Gaps below which a finding is for information, and from which on it is serious."""
SHOWN = 5
"""Classes and subgroups that the evidence names."""


class Result(NamedTuple):
    """What a check returns: severity and evidence, and a title or fix of its own if need be."""

    severity: Severity
    evidence: str
    fix: str | None = None
    title: str | None = None


def percent(value: float, digits: int = 1) -> str:
    """Return a fraction as percent; a dash where it is undefined.

    >>> percent(0.0424), percent(float("nan"))
    ('4.2 %', '-')
    """
    return "-" if math.isnan(value) else f"{100 * value:.{digits}f} %"


def points(value: float) -> str:
    """Return a difference of fractions in points."""
    return f"{100 * value:.1f} points"


def _severity(gap: float) -> Severity:
    return "bad" if gap >= LARGE else "warn" if gap >= SMALL else "info"


def _claims(part: Part) -> str:
    return (
        f"{percent(part.confidence)} claimed on average, {percent(part.accuracy)} "
        f"[{100 * part.low:.1f}, {100 * part.high:.1f}] right"
    )


def _over(part: Part) -> Severity | None:
    """Return how serious it is that a part is over-confident; None where it is within noise."""
    least = part.gap_ends[0]
    if not (part.n and part.p_value < SIGNIFICANT and part.gap > 0):
        return None
    errors, claimed = 1 - part.high, 1 - part.confidence
    doubled = errors >= 2 * claimed and least >= 2 * SMALL
    return "bad" if doubled else _severity(least)


def over_confident(subject: Subject) -> Result | None:
    """CAL001."""
    part = subject.answers
    severity = _over(part)
    if severity is None:
        return None
    times = (1 - part.accuracy) / max(1 - part.confidence, 1e-12)
    ratio = f", {times:.1f} times as many as the confidences imply" if times < 1000 else ""
    return Result(
        severity,
        f"{_claims(part)} of {part.n:,} answers: {percent(1 - part.accuracy)} are wrong{ratio}.",
    )


def under_confident(subject: Subject) -> Result | None:
    """CAL002."""
    part = subject.answers
    if part.p_value >= SIGNIFICANT or part.gap >= 0:
        return None
    least = -part.gap_ends[1]
    severity: Severity = "warn" if least >= SMALL else "info"
    return Result(severity, f"{_claims(part)} of {part.n:,} answers.")


def over_confident_when_sure(subject: Subject) -> Result | None:
    """CAL003."""
    part = subject.sure
    severity = _over(part)
    if severity is None:
        return None
    return Result(
        severity,
        f"{percent(part.share)} of the answers have a {part.name}: {_claims(part)}.",
    )


def off_in_ranges(subject: Subject) -> Result | None:
    """CAL004."""
    off = _beyond_noise(subject.ranges)
    if not off:
        return None
    off.sort(key=lambda part: -part.share * abs(part.gap))
    named = _listed(f"{p.name} ({_direction(p)} by {points(abs(p.gap))})" for p in off)
    share = sum(part.share for part in off)
    size = sum(part.share * abs(part.gap) for part in off)
    severity: Severity = "warn" if size >= SMALL or worst_range(subject) else "info"
    return Result(
        severity,
        f"{len(off)} of {len(subject.ranges)} ranges of {subject.probability}, with "
        f"{percent(share)} of the examples, are off beyond noise: {named}.",
    )


def worst_range(subject: Subject) -> Part | None:
    """Return the range of confidence that is furthest off, if one is clearly so."""
    off = [part for part in _beyond_noise(subject.ranges) if _least(part) >= LARGE]
    return max(off, key=_least, default=None)


def classes_off(subject: Subject) -> Result | None:
    """CAL005."""
    measured = [figures.part for figures in subject.classes if figures.part.n]
    off = _beyond_noise(measured)
    if len(measured) < 3 or not off:
        return None
    word = "tags" if subject.word == "tag" else "classes"
    named = _listed(f"{p.name} ({_direction(p)} by {points(abs(p.gap))})" for p in _worst(off))
    severity: Severity = "warn" if max(_least(part) for part in off) >= LARGE else "info"
    evidence = f"{len(off)} of {len(measured)} {word} are off beyond noise: {named}."
    return Result(severity, evidence, title=f"Some {word} are off")


def subgroups_off(subject: Subject) -> Result | None:
    """CAL006."""
    tested = {name: e for name, e in subject.evaluation.by.items() if e.test is not None}
    adjusted = holm([e.test.p_value for e in tested.values() if e.test is not None])
    off = [name for name, p in zip(tested, adjusted, strict=True) if p < SIGNIFICANT]
    if not off:
        return None
    named = _listed(f"{name} (ECE {percent(tested[name]['ece'].value)})" for name in off)
    worst = max(tested[name]["ece"].low for name in off)
    whole = subject.evaluation
    rest = f" Over all examples the ECE is {percent(whole['ece'].value)}."
    evidence = (
        f"{len(off)} of {len(tested)} subgroups by {subject.by} are off beyond noise: {named}."
    )
    if len(off) < len(tested) or whole.test is None or whole.test.p_value >= SIGNIFICANT:
        return Result(_severity(worst), f"{evidence}{rest}")
    return Result(
        _severity(worst),
        f"{evidence}{rest}",
        fix="Calibrate the model (calibrant fit), then see which subgroups are still off.",
        title="All subgroups are off, as the model is as a whole",
    )


def subgroups_found(subject: Subject) -> Result | None:
    """CAL018."""
    if subject.slices is None or not subject.slices.slices:
        return None
    found = subject.slices.slices
    named = _listed(f"{one.name} ({one.n:,} examples, {one.finding()})" for one in found)
    return Result(
        _severity(max(one.least for one in found)),
        f"{len(found)} of {subject.slices.searched:,} subgroups are off by more than such a search "
        f"finds by chance: {named}.",
    )


def too_few(subject: Subject) -> Result | None:
    """CAL007."""
    evaluation = subject.evaluation
    value, low, high = evaluation["ece"]
    if math.isnan(high) or high - low <= LARGE:
        return None
    return Result(
        "warn" if cannot_tell(evaluation) else "info",
        f"With {evaluation.n:,} examples the ECE of {percent(value)} is only known to be between "
        f"{percent(low)} and {percent(high)}.",
    )


def cannot_tell(evaluation: Evaluation) -> bool:
    """Return True if a model may be calibrated, and may be far off."""
    tested = evaluation.test is not None and evaluation.test.p_value >= SIGNIFICANT
    return tested and not evaluation["ece"].high <= LARGE


def poor_ranking(subject: Subject) -> Result | None:
    """CAL008."""
    estimate, errors = subject.evaluation["auroc"], 1 - subject.answers.accuracy
    if math.isnan(estimate.value) or errors * subject.answers.n < 20:
        return None
    high = estimate.value if math.isnan(estimate.high) else estimate.high
    if high >= 0.7:
        return None
    return Result(
        "warn" if high < 0.6 else "info",
        f"The AUROC of confidence is {percent(estimate.value)}; 50 % would be guessing. "
        "A low ECE says nothing about this.",
    )


def class_bias(subject: Subject) -> Result | None:
    """CAL009."""
    known = [each for each in subject.classes if not math.isnan(each.claimed)]
    adjusted = holm([each.bias_p_value for each in known])
    off = [p for p, adj in zip(known, adjusted, strict=True) if adj < SIGNIFICANT and _biased(p)]
    if not off:
        return None
    off.sort(key=lambda each: -abs(each.claimed - each.labelled))
    named = _listed(
        f"{p.part.name} (claimed {percent(p.claimed)}, occurs {percent(p.labelled)})" for p in off
    )
    severity: Severity = "warn" if abs(off[0].claimed - off[0].labelled) >= 2 * SMALL else "info"
    word = "tags" if subject.word == "tag" else "classes"
    return Result(severity, f"{len(off)} of {len(known)} {word}: {named}.")


def _biased(figures: ClassFigures) -> bool:
    return not 0.8 <= figures.claimed / max(figures.labelled, 1e-12) <= 1.25


def suspicious_data(subject: Subject) -> Result | None:
    """CAL010."""
    hint = subject.evaluation.hint()
    looks = ("look like probabilities", "are copies of other rows")
    alike = [text for text in subject.warnings if any(look in text for look in looks)]
    alike += [] if subject.remedy is None else subject.remedy.doubts
    said = [f"{text[0].upper()}{text[1:]}." for text in (hint, *alike) if text]
    return Result("bad", " ".join(said)) if said else None


def floored(subject: Subject) -> Result | None:
    """CAL011."""
    said = [text for text in subject.warnings if "a probability of 0" in text]
    return Result("warn", f"{' '.join(said)}.") if said else None


def at_certainty(subject: Subject) -> Result | None:
    """CAL012."""
    if subject.certain < 0.05:
        return None
    evidence = f"{percent(subject.certain)} of the answers have a confidence of exactly 1."
    if subject.coverage and subject.coverage[0].threshold >= 1:
        evidence += f" Of these, {percent(subject.coverage[0].error)} are wrong."
    return Result("info", evidence)


def same_split(subject: Subject) -> Result | None:
    """CAL013."""
    remedy = subject.remedy
    if remedy is None or "random half" not in remedy.comparison.fitted_on:
        return None
    return Result(
        "info",
        f"Methods were fitted on {remedy.comparison.fitted_on}, and measured on the other half: "
        f"{remedy.comparison.n_fit:,} and {remedy.comparison.n_test:,} {subject.counted}.",
    )


def fixable(subject: Subject) -> Result | None:
    """CAL014."""
    remedy = subject.remedy
    if remedy is None or remedy.changes_nothing or remedy.before is None or remedy.after is None:
        return None
    before, after = remedy.before["ece"], remedy.after["ece"]
    assert remedy.chosen is not None
    if not after.value < before.value:
        return None
    changed = remedy.chosen.argmax_changed
    price = "No prediction changes" if not changed else f"{changed:,} predictions change"
    return Result(
        "good" if after.value <= before.value / 2 else "info",
        f"{remedy.chosen.method} takes the ECE from {percent(before.value, 2)} to "
        f"{percent(after.value, 2)} on {remedy.comparison.n_test:,} {subject.counted} that it was "
        f"not fitted on. {price}; the fit took {remedy.chosen.fit_seconds:.1f} s.",
    )


def calibrated(subject: Subject) -> Result | None:
    """CAL015."""
    evaluation = subject.evaluation
    value, low, high = evaluation["ece"]
    if evaluation.test is None or evaluation.test.p_value < SIGNIFICANT or cannot_tell(evaluation):
        return None
    if low >= SMALL:  # near its level, the test may see nothing where the interval does
        return None
    return Result(
        "good",
        f"ECE {percent(value)} [{100 * low:.1f}, {100 * high:.1f}]: within the noise of "
        f"{evaluation.n:,} {subject.counted} (p = {evaluation.test.p_value:.2g}).",
        fix="",
    )


def worse_than_first(subject: Subject) -> Result | None:
    """CAL016."""
    if subject.first is None:
        return None
    name, before = subject.first
    value, low, high = subject.evaluation["ece"]
    if math.isnan(low) or low <= before.high:
        return None
    return Result(
        "warn" if low - before.high >= SMALL else "info",
        f"ECE {percent(value)} [{100 * low:.1f}, {100 * high:.1f}], against "
        f"{percent(before.value)} [{100 * before.low:.1f}, {100 * before.high:.1f}] of {name}.",
    )


def left_out(subject: Subject) -> Result | None:
    """CAL017."""
    if not subject.skipped:
        return None
    count, *messages = subject.skipped
    return Result("warn", f"{count[0].upper()}{count[1:]} {_listed(messages)}.")


def _beyond_noise(parts: Sequence[Part]) -> list[Part]:
    adjusted = holm([part.p_value for part in parts])
    return [part for part, p in zip(parts, adjusted, strict=True) if p < SIGNIFICANT]


def _least(part: Part) -> float:
    """Return the smallest gap that its interval allows, without sign."""
    low, high = part.gap_ends
    return max(low, -high, 0.0)


def _worst(parts: Iterable[Part]) -> list[Part]:
    return sorted(parts, key=lambda part: -_least(part))


def _direction(part: Part) -> str:
    return "over" if part.gap > 0 else "under"


def _listed(texts: Iterable[str]) -> str:
    every = list(texts)
    more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return ", ".join(every[:SHOWN]) + more
