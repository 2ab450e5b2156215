"""Findings: checks of a subject, each with its code, its meaning and its remedy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from calibrant._core.messages import about
from calibrant.data.files import TABLES
from calibrant.metrics.evaluation import Evaluation
from calibrant.show.pages import SEVERITIES, Severity
from calibrant.show.report.model import (
    MIN_EXAMPLES_OF_CLASS,
    ClassFigures,
    Part,
    Subject,
    holm,
)
from calibrant.show.style import percent, points

SIGNIFICANT = 0.05
"""Level of the tests; where several are made, p-values are adjusted for their number (Holm)."""
SMALL, LARGE = 0.01, 0.05
"""Gaps below which a finding is for information, and from which on it is serious."""
MARGIN_FOR_YES = 2.0
"""Examples that a yes needs, in units of those whose interval usually is just narrow enough."""
ENOUGH_OF_CLASS = 200
"""Examples of each class from which on parameters for each class can be advised."""
MAX_NAMED = 5
"""Classes and subgroups that the evidence names."""


CALIBRATE = "Calibrate the model, as below."


@dataclass(frozen=True)
class Finding:
    """Something that a check found.

    Attributes
    ----------
    code, title : str
        Such as CAL003 and "Over-confident above 0.9".
    severity : {"good", "info", "warn", "bad"}
    evidence : str
        A sentence with the numbers.
    meaning, fix : str
        What it tells, and what to do about it; there is no fix where nothing is wrong.
    subject : str
        Name of the set of predictions.
    """

    code: str
    title: str
    severity: Severity
    evidence: str
    meaning: str = ""
    fix: str = ""
    subject: str = ""

    def to_dict(self) -> dict[str, str]:
        """Return the values for JSON."""
        return dict(vars(self))


class Result(NamedTuple):
    """What a check returns: severity and evidence, and a title or fix of its own if need be."""

    severity: Severity
    evidence: str
    fix: str | None = None
    title: str | None = None


class _Check(NamedTuple):
    """An entry of ``CHECKS``: the texts of a finding, and the function that looks for it."""

    code: str
    title: str
    meaning: str
    fix: str
    run: Callable[[Subject], Result | None]


MISCALIBRATED = {"CAL001", "CAL002", "CAL003", "CAL004", "CAL005", "CAL006", "CAL018"}
"""Findings that contradict a yes, if they are more than notes."""
DATA_LOOK_WRONG = "CAL010"
OF_GOOD_DATA = {"CAL013", "CAL014", "CAL015", "CAL018", "CAL019"}
"""Findings on yes, subgroups and methods, which say nothing while the data look wrong."""
FOR_A_CALIBRATOR = {"CAL001", "CAL002", "CAL003", "CAL004", "CAL016"}
"""Findings whose fix is a calibrator, if one helps."""
BAD = ("warn", "bad")
CHECKS: dict[str, _Check] = {}
"""Checks by their code, filled by :func:`check` below."""


def check(
    code: str, title: str, *, meaning: str, fix: str
) -> Callable[[Callable[[Subject], Result | None]], Callable[[Subject], Result | None]]:
    """Register a function of a subject as the check for a finding; it returns None if all is well.

    ``meaning`` and ``fix`` are what the page and the documentation say about it.
    """

    def register(run: Callable[[Subject], Result | None]) -> Callable[[Subject], Result | None]:
        CHECKS[code] = _Check(code, title, meaning, fix, run)
        return run

    return register


def _findings_of(subject: Subject) -> list[Finding]:
    """Run every check; the most serious findings come first, then those with the lower code."""
    found = []
    for code, each in CHECKS.items():
        result = each.run(subject)
        if result is not None:
            fix = each.fix if result.fix is None else result.fix
            words = (result.title or each.title, result.severity, result.evidence, each.meaning)
            found.append(Finding(code, *words, fix, subject.name))
    if _miscalibrated(found):  # nothing else may say the opposite
        found = [
            replace(one, severity="info", fix=CHECKS["CAL007"].fix) if one.code == "CAL007" else one
            for one in found
            if one.code != "CAL015"
        ]
    if _data_look_wrong(found):
        found = [
            one if one.code == DATA_LOOK_WRONG else replace(one, fix="")  # first things first
            for one in found
            if one.code not in OF_GOOD_DATA
        ]
    if any(finding.code == "CAL015" for finding in found):
        found = [finding for finding in found if finding.code != "CAL019"]
    if any(finding.code == "CAL019" for finding in found):
        later = f"{_more_examples(subject)}, then look again: no method clearly helps yet."
        found = [replace(one, fix=later) if one.code in FOR_A_CALIBRATOR else one for one in found]
    return sorted(found, key=lambda finding: (-SEVERITIES.index(finding.severity), finding.code))


def _miscalibrated(found: Sequence[Finding]) -> list[Finding]:
    """Return the warnings that confidence is wrong, on average or somewhere."""
    return [each for each in found if each.code in MISCALIBRATED and each.severity in BAD]


def _data_look_wrong(found: Sequence[Finding]) -> bool:
    """Return True if the data are to be checked before anything else is relied on."""
    return any(finding.code == DATA_LOOK_WRONG for finding in found)


def _severity(gap: float) -> Severity:
    return "bad" if gap >= LARGE else "warn" if gap >= SMALL else "info"


def _means(part: Part) -> str:
    return (
        f"mean confidence is {percent(part.confidence)}, but {percent(part.accuracy)} "
        f"[{100 * part.low:.1f}, {100 * part.high:.1f}] of {part.n:,} answers are right"
    )


def _over(part: Part) -> Severity | None:
    """Return how serious it is that a part is over-confident; None where it is within noise."""
    least = part.gap_ends[0]
    if not (part.n and part.p_value < SIGNIFICANT and part.gap > 0):
        return None
    errors, claimed = 1 - part.high, 1 - part.confidence
    doubled = errors >= 2 * claimed and least >= 2 * SMALL
    return "bad" if doubled else _severity(least)


@check(
    "CAL001",
    "Over-confident",
    meaning="On average, the model is more confident than accurate. Whoever reads its "
    "confidence as a probability expects fewer mistakes than there are.",
    fix=CALIBRATE,
)
def _over_confident(subject: Subject) -> Result | None:
    part = subject.answers
    severity = _over(part)
    if severity is None:
        return None
    times = (1 - part.accuracy) / max(1 - part.confidence, 1e-12)
    ratio = f", {times:.1f} times as many as expected" if times < 1000 else ""
    wrong = percent(1 - part.accuracy)
    return Result(severity, f"The {_means(part)}: {wrong} are wrong{ratio}.")


@check(
    "CAL002",
    "Under-confident",
    meaning="On average, the model is right more often than its confidence says. Thresholds "
    "reject answers that could have been accepted.",
    fix=CALIBRATE,
)
def _under_confident(subject: Subject) -> Result | None:
    part = subject.answers
    if part.p_value >= SIGNIFICANT or part.gap >= 0:
        return None
    least = -part.gap_ends[1]
    severity: Severity = "warn" if least >= SMALL else "info"
    return Result(severity, f"The {_means(part)}.")


@check(
    "CAL003",
    "Over-confident above 0.9",
    meaning="Nearly certain answers are wrong more often than their confidence says, and they "
    "are the ones that are acted on without a second look.",
    fix="Calibrate the model, and set thresholds by measured errors, as below.",
)
def _over_confident_when_sure(subject: Subject) -> Result | None:
    part = subject.sure
    severity = _over(part)
    if severity is None:
        return None
    return Result(
        severity,
        f"{percent(part.share)} of the answers have a {part.name}. Their {_means(part)}.",
    )


@check(
    "CAL004",
    "Off in some ranges of confidence",
    meaning="In these ranges, confidence and accuracy differ by more than noise. In the average "
    "over all examples, errors in opposite directions cancel out.",
    fix="Compare methods on examples that they were not fitted on (calibrant compare), and then "
    "see which ranges are still off.",
)
def _off_in_ranges(subject: Subject) -> Result | None:
    off = _beyond_noise(subject.ranges)
    if not off or len(subject.ranges) == 1:  # a single range is the average over all
        return None
    off.sort(key=lambda part: -part.share * abs(part.gap))
    named = _listed(f"{p.name} ({_direction(p)} by {points(abs(p.gap))})" for p in off)
    share = sum(part.share for part in off)
    size = sum(part.share * abs(part.gap) for part in off)
    severity: Severity = "warn" if size >= SMALL or _worst_range(subject) else "info"
    remedy, fix = subject.remedy, None
    if remedy is not None and remedy.helps and remedy.chosen is not None:
        fix = f"Calibrate with {remedy.chosen.method}, as below; then see which are still off."
    return Result(
        severity,
        f"{len(off)} of {len(subject.ranges)} ranges of {subject.probability}, with "
        f"{percent(share)} of the examples, {_are(off)} off beyond noise: {named}.",
        fix,
    )


def _worst_range(subject: Subject) -> Part | None:
    """Return the range of confidence that is furthest off, if one is clearly so."""
    off = [part for part in _beyond_noise(subject.ranges) if _least(part) >= LARGE]
    return max(off, key=_least, default=None)


@check(
    "CAL005",
    "Some classes are off",
    meaning="Answers of these classes are less (or more) reliable than their confidence says. A "
    "calibrator for all classes together leaves differences between them.",
    fix="Try a method with parameters for each class (svs, sms), and set thresholds for each "
    "class.",
)
def _classes_off(subject: Subject) -> Result | None:
    measured = [each.part for each in subject.classes if each.part.n >= MIN_EXAMPLES_OF_CLASS]
    off = _beyond_noise(measured)
    if len(measured) < 3 or not off:
        return None
    word = "tags" if subject.word == "tag" else "classes"
    named = _listed(f"{p.name} ({_direction(p)} by {points(abs(p.gap))})" for p in _worst(off))
    severity: Severity = "warn" if max(_least(part) for part in off) >= LARGE else "info"
    evidence = f"{len(off)} of {len(measured)} {word} {_are(off)} off beyond noise: {named}."
    rarest = round(min(each.labelled for each in subject.classes) * subject.answers.n)
    few = f"Label more examples of each of the {word}: the rarest has about {rarest:,}, and a "
    few += f"method with parameters for each needs some {ENOUGH_OF_CLASS}."
    fix = few if rarest < ENOUGH_OF_CLASS else None
    return Result(severity, evidence, fix, title=f"Some {word} are off")


@check(
    "CAL006",
    "Some subgroups are off",
    meaning="In these subgroups confidence is wrong, even if it is right on average. Decisions "
    "about their members are worse than about others.",
    fix="Collect examples of these subgroups, and calibrate them on their own where there are "
    "enough; report their errors.",
)
def _subgroups_off(subject: Subject) -> Result | None:
    tested = {name: e for name, e in subject.evaluation.by.items() if e.test is not None}
    adjusted = holm([e.test.p_value for e in tested.values() if e.test is not None])
    off = [name for name, p in zip(tested, adjusted, strict=True) if p < SIGNIFICANT]
    if not off:
        return None
    named = _listed(f"{name} (ECE {percent(tested[name]['ece'].value)})" for name in off)
    worst = max(tested[name]["ece"].low for name in off)
    whole = subject.evaluation
    rest = f" Over all examples the ECE is {percent(whole['ece'].value)}."
    counted = f"{len(off)} of {len(tested)} subgroups by {subject.by}"
    evidence = f"{counted} {_are(off)} off beyond noise: {named}."
    if len(off) < len(tested) or whole.test is None or whole.test.p_value >= SIGNIFICANT:
        return Result(_severity(worst), f"{evidence}{rest}")
    fix = "Calibrate the model (calibrant fit), then see which subgroups are still off."
    return Result(
        _severity(worst),
        f"{evidence}{rest}",
        fix=None if subject.remedy is not None and not subject.remedy.helps else fix,
        title="All subgroups are off, as the model is as a whole",
    )


@check(
    "CAL018",
    "Subgroups that are off were found",
    meaning="A search over the columns of the data found subgroups whose confidence is wrong on "
    "average, also in intersections of columns. The intervals account for the search.",
    fix="Compare the method multicalibration, with the --columns of the subgroups, with auto. "
    "Where its fit says that it makes no corrections, it equals its base, and more examples of "
    "the subgroups are needed. Then look at them again: calibrant slices.",
)
def _subgroups_found(subject: Subject) -> Result | None:
    if subject.slices is None or not subject.slices.slices:
        return None
    worst, *others = subject.slices.slices
    named = f" Then: {_listed(f'{one.name} ({one.n:,} examples)' for one in others)}."
    return Result(_severity(worst.least), f"{subject.slices.verdict()}{named if others else ''}")


@check(
    "CAL007",
    "Few examples",
    meaning="The interval is so wide that more examples may give quite different figures.",
    fix="Label more examples: four times as many halve the width of the interval.",
)
def _too_few(subject: Subject) -> Result | None:
    evaluation = subject.evaluation
    value, low, high = evaluation["ece"]
    if math.isnan(high) or high - low <= LARGE:
        return None
    open_ = cannot_tell(evaluation)
    more = _examples_for_yes(evaluation) - evaluation.n
    fix = f"Label about {about(more)} more {subject.counted}: so many would allow a yes."
    return Result(
        "warn" if open_ else "info",
        f"With {evaluation.n:,} {subject.counted} the ECE of {percent(value)} is only known to be "
        f"between {percent(low)} and {percent(high)}.",
        fix if open_ else None,
    )


def _is_off(evaluation: Evaluation) -> bool:
    """Return True if the calibration error is beyond noise: by its interval and by the test.

    The two ask different questions, and near their levels only one may say so. Where the interval
    is far from zero, it suffices.
    """
    low, test = evaluation["ece"].low, evaluation.test
    rejected = test is not None and test.p_value < SIGNIFICANT
    return low >= LARGE or (low >= SMALL and rejected)


def cannot_tell(evaluation: Evaluation) -> bool:
    """Return True if a model may be calibrated, and may be far off."""
    return not _is_off(evaluation) and not evaluation["ece"].high <= LARGE


def _examples_for_yes(evaluation: Evaluation) -> int:
    """Return about how many examples show that a model is calibrated, if it is.

    The interval of the ECE must end below a large error, and narrows with their root.
    """
    return math.ceil(MARGIN_FOR_YES * evaluation.n * (evaluation["ece"].high / LARGE) ** 2)


@check(
    "CAL008",
    "Confidence hardly tells right from wrong",
    meaning="Right and wrong answers have similar confidences. Calibration cannot repair that: "
    "it can make confidences honest, not informative.",
    fix="Improve the model or its features, or use another score of confidence; do not select "
    "answers by this one.",
)
def _poor_ranking(subject: Subject) -> Result | None:
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


@check(
    "CAL009",
    "Prefers some classes",
    meaning="The mean probabilities of these classes differ from their frequencies. Language "
    "models prefer some option letters; classifiers trained on balanced data do not know how "
    "frequent the classes are.",
    fix="Correct the class frequencies (calibrant.decide.shift_prior), or use a method that "
    "corrects them: auto does where that raises the accuracy beyond noise, sms and svs always.",
)
def _class_bias(subject: Subject) -> Result | None:
    known = [each for each in subject.classes if not math.isnan(each.claimed)]
    adjusted = holm([each.bias_p_value for each in known])
    off = [p for p, adj in zip(known, adjusted, strict=True) if adj < SIGNIFICANT and _biased(p)]
    if not off:
        return None
    off.sort(key=lambda each: -abs(each.claimed - each.labelled))
    named = _listed(
        f"{p.part.name} (mean probability {percent(p.claimed)}, frequency {percent(p.labelled)})"
        for p in off
    )
    severity: Severity = "warn" if abs(off[0].claimed - off[0].labelled) >= 2 * SMALL else "info"
    word = "tags" if subject.word == "tag" else "classes"
    return Result(severity, f"{len(off)} of {len(known)} {word}: {named}.")


def _biased(figures: ClassFigures) -> bool:
    return not 0.8 <= figures.claimed / max(figures.labelled, 1e-12) <= 1.25


@check(
    DATA_LOOK_WRONG,
    "The data look wrong",
    meaning="The figures look like a mistake in the data: labels in another order, a training "
    "set, probabilities in place of logits, copies of rows.",
    fix="Check how the file was written before you rely on anything else here.",
)
def _suspicious_data(subject: Subject) -> Result | None:
    hint = subject.evaluation.hint()
    looks = ("look like probabilities", "are copies of other rows")
    alike = [text for text in subject.warnings if any(look in text for look in looks)]
    alike += [] if subject.remedy is None else subject.remedy.doubts
    said = [f"{text[0].upper()}{text[1:]}." for text in (hint, *alike) if text]
    return Result("bad", " ".join(said)) if said else None


@check(
    "CAL011",
    "Probabilities of zero",
    meaning="Some labels have a probability of 0, so that their log loss is infinite. Each "
    "counts as 100 nats at most, and the mean depends on that number.",
    fix="Calibrate, which replaces zeros by estimated probabilities, or save logits.",
)
def _floored(subject: Subject) -> Result | None:
    said = [text for text in subject.warnings if "a probability of 0" in text]
    return Result("warn", f"{' '.join(said)}.") if said else None


@check(
    "CAL012",
    "Confidences of exactly 1",
    meaning="Probabilities were rounded to 1, so that answers which differ cannot be ranked.",
    fix="Save logits instead of probabilities, in single precision or better.",
)
def _at_certainty(subject: Subject) -> Result | None:
    if subject.certain < 0.05:
        return None
    evidence = f"{percent(subject.certain)} of the answers have a confidence of exactly 1."
    if subject.coverage and subject.coverage[0].threshold >= 1:
        evidence += f" Of these, {percent(subject.coverage[0].error)} are wrong."
    return Result("info", evidence)


@check(
    "CAL013",
    "Fitted and measured on one split",
    meaning="There is only one set of examples. It was cut into folds, and every example was "
    "measured with methods that were fitted on the other folds. So all figures are about the "
    "same examples, and no example was measured by a fit that had seen it.",
    fix="Set examples apart for validation, if there are enough: thresholds with a guarantee need "
    "a split of their own.",
)
def _one_split(subject: Subject) -> Result | None:
    remedy = subject.remedy
    if remedy is None or not remedy.comparison.folds:
        return None
    scores = "probs" if subject.probs_stored else "logits"
    how = f"Save a validation split (val_{scores}, val_labels) beside the test split"
    if subject.path.endswith(TABLES):
        how = "Add a column split, with val for validation examples and test for the others"
    return Result(
        "info",
        f"Each of the {remedy.comparison.n_test:,} {subject.counted} was measured with methods "
        f"fitted on the other folds ({remedy.comparison.measured_on.partition('; ')[2]}).",
        f"{how}, if there are enough examples: thresholds with a guarantee need it.",
    )


@check(
    "CAL014",
    "Calibration helps",
    meaning="A calibration method lowers log loss and calibration error on examples that it was "
    "not fitted on, and the log loss by more than noise.",
    fix="Fit it and put it behind the model, as below.",
)
def _helps(subject: Subject) -> Result | None:
    remedy = subject.remedy
    if remedy is None or not remedy.helps or remedy.chosen is None:
        return None
    before, after = remedy.before, remedy.after
    assert before is not None
    assert after is not None
    return Result(
        "good" if after["accuracy"].value >= before["accuracy"].value else "info",
        f"On {remedy.comparison.n_test:,} {subject.counted} that it was not fitted on, "
        f"a calibrator takes the calibration error from {percent(before['ece'].value, 2)} to "
        f"{percent(after['ece'].value, 2)}. {remedy.price(subject.counted)}",
        f"Fit it and put it behind the model, as below. The method chosen, {remedy.chosen.method}, "
        f"lowers the log loss by {remedy.gain}.",
    )


@check(
    "CAL019",
    "No method clearly helps",
    meaning="On examples that it was not fitted on, the best method gains nothing, or no more "
    "than noise.",
    fix="Label more examples before you calibrate.",
)
def _does_not_help(subject: Subject) -> Result | None:
    remedy = subject.remedy
    if remedy is None or remedy.helps or len(remedy.comparison.measured) < 2:
        return None
    n, gain = remedy.comparison.n_test, remedy.gain
    if gain is None or remedy.chosen is None:
        return Result("info", "No calibrator gains more than noise.")
    more, fix = _more_examples(subject), None
    if gain.needed is not None and gain.needed > n:
        fix = f"{more}: they would probably show such a gain."
    if gain.low > 0:
        outcome = "lowers the log loss, but not the calibration error"
    elif gain.value > 0:
        outcome = "makes the confidences slightly better, which may be noise"
    else:
        outcome = f"makes the confidences {'worse' if gain.high < 0 else 'no better'}"
    return Result(
        "info",
        f"On {n:,} {subject.counted} that it was not fitted on, the best calibrator {outcome}. "
        f"{remedy.price(subject.counted)}",
        fix,
    )


def _more_examples(subject: Subject) -> str:
    """Return how many examples to label before a gain can be seen, or what else to try."""
    remedy = subject.remedy
    assert remedy is not None
    n, gain = remedy.comparison.n_test, remedy.gain
    if gain is None or gain.needed is None or gain.needed <= n:
        return f"Label more {subject.counted} or compare other methods (calibrant compare)"
    return f"Label about {about(gain.needed - n)} more {subject.counted}"


@check(
    "CAL015",
    "No evidence of miscalibration",
    meaning="Confidence and accuracy agree within noise, and there were enough examples to find "
    "a large error.",
    fix="Watch the model in use: calibrant monitor.",
)
def _calibrated(subject: Subject) -> Result | None:
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


@check(
    "CAL016",
    "Worse than the first set of predictions",
    meaning="The calibration error is larger than that of the first file or split of this "
    "report, beyond noise: another model, day or condition. A calibrator for the first does not "
    "suit this one.",
    fix="Calibrate on examples like these, and watch the model in use: calibrant monitor.",
)
def _worse_than_first(subject: Subject) -> Result | None:
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


@check(
    "CAL017",
    "Bad shards were left out",
    meaning="Some files could not be read, or had invalid rows, and count in no figure. If the "
    "cause is related to the examples, the rest is a biased sample.",
    fix="Write these shards again, and repeat the report.",
)
def _left_out(subject: Subject) -> Result | None:
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


def _are(several: Sequence[object]) -> str:
    return "is" if len(several) == 1 else "are"


def _direction(part: Part) -> str:
    return "too high" if part.gap > 0 else "too low"


def _listed(texts: Iterable[str]) -> str:
    every = list(texts)
    more = f" and {len(every) - MAX_NAMED} more" if len(every) > MAX_NAMED else ""
    return ", ".join(every[:MAX_NAMED]) + more
