"""Findings: what a check found, with a code, a severity, evidence and a remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from calibrant.show.report import checks
from calibrant.show.report.checks import Result
from calibrant.show.report.model import SEVERITIES, Severity, Subject

DOCS = "docs/findings.md"


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
    fix : str
        What to do about it; empty where nothing is wrong.
    subject : str
        Name of the set of predictions.
    """

    code: str
    title: str
    severity: Severity
    evidence: str
    fix: str = ""
    subject: str = ""

    @property
    def link(self) -> str:
        """Place in the documentation."""
        return f"{DOCS}#{self.code.lower()}"

    def to_dict(self) -> dict[str, str]:
        """Return the values for JSON."""
        return {**vars(self), "link": self.link}


class Check(NamedTuple):
    """An entry of ``CHECKS``."""

    code: str
    title: str
    meaning: str
    """What it tells, for the documentation and the page."""
    fix: str
    run: Callable[[Subject], Result | None]

    def finding(self, subject: Subject) -> Finding | None:
        """Return the finding about a subject; None where there is none."""
        result = self.run(subject)
        if result is None:
            return None
        fix = self.fix if result.fix is None else result.fix
        title = result.title or self.title
        return Finding(self.code, title, result.severity, result.evidence, fix, subject.name)


def findings_of(subject: Subject) -> list[Finding]:
    """Run every check; the most serious findings come first."""
    found = [check.finding(subject) for check in CHECKS.values()]
    there = [finding for finding in found if finding is not None]
    return sorted(there, key=lambda finding: -SEVERITIES.index(finding.severity))


CALIBRATE = "Calibrate the model, as below; the predicted classes can stay as they are."
CHECKS: dict[str, Check] = {
    check.code: check
    for check in (
        Check(
            "CAL001",
            "Over-confident",
            "On average the model claims more confidence in its answers than it deserves. Whoever "
            "reads a confidence as a probability expects fewer mistakes than there are.",
            CALIBRATE,
            checks.over_confident,
        ),
        Check(
            "CAL002",
            "Under-confident",
            "On average the model is right more often than it claims. Thresholds reject answers "
            "that could have been accepted.",
            CALIBRATE,
            checks.under_confident,
        ),
        Check(
            "CAL003",
            "Over-confident above 0.9",
            "Answers that the model calls nearly certain are wrong more often than it says. These "
            "are the ones that are acted on without a second look.",
            "Calibrate the model, and set thresholds by measured errors, as below.",
            checks.over_confident_when_sure,
        ),
        Check(
            "CAL004",
            "Off in some ranges of confidence",
            "In these ranges confidence and accuracy differ by more than noise, whatever the "
            "average over all examples is: too high here and too low there cancel out in it.",
            "Calibrate with a method that bends, such as auto or smart; a temperature may not do.",
            checks.off_in_ranges,
        ),
        Check(
            "CAL005",
            "Some classes are off",
            "Answers of these classes are less (or more) reliable than their confidence says. A "
            "calibrator for all classes together leaves differences between them.",
            "Try a method with parameters for each class (svs, sms), given some hundred examples "
            "of each, and set thresholds for each class.",
            checks.classes_off,
        ),
        Check(
            "CAL006",
            "Some subgroups are off",
            "In these subgroups confidence is not a probability, even if it is on average over "
            "all. Decisions about their members are worse than about others.",
            "Collect examples of these subgroups, and calibrate them on their own where there are "
            "enough; report their errors.",
            checks.subgroups_off,
        ),
        Check(
            "CAL007",
            "Few examples",
            "The interval is so wide that the figures may be far from those of more examples.",
            "Label more examples: four times as many halve the width of the interval.",
            checks.too_few,
        ),
        Check(
            "CAL008",
            "Confidence hardly tells right from wrong",
            "Right and wrong answers have similar confidences. Calibration cannot repair that: it "
            "can make confidences honest, not informative.",
            "Improve the model or its features, or use another score of confidence; do not select "
            "answers by this one.",
            checks.poor_ranking,
        ),
        Check(
            "CAL009",
            "Prefers some classes",
            "The probabilities of these classes are, on average, not their frequencies. Language "
            "models prefer letters of options; classifiers trained on balanced data do not know "
            "the frequencies of use.",
            "Correct the class frequencies (calibrant.decide.shift_prior), or use a method that "
            "may change predictions: calibrant fit --choices, or sms, svs.",
            checks.class_bias,
        ),
        Check(
            "CAL010",
            "The data look wrong",
            "The figures look like those of a mistake in the data, not like those of a model: "
            "labels in another order, a training set, probabilities in place of logits, copies of "
            "rows.",
            "Check how the file was written before anything else here is believed.",
            checks.suspicious_data,
        ),
        Check(
            "CAL011",
            "Probabilities of zero",
            "Labels have a probability of 0, so that their NLL is infinite. Each counts as 100 "
            "nats at most, and the mean depends on that.",
            "Calibrate, which gives zeros the probability that they have; or save logits.",
            checks.floored,
        ),
        Check(
            "CAL012",
            "Confidences of exactly 1",
            "Probabilities were rounded to 1, so that answers which differ cannot be ranked.",
            "Save logits instead of probabilities, in single precision or better.",
            checks.at_certainty,
        ),
        Check(
            "CAL013",
            "Fitted and measured on halves of one split",
            "There is only one set of examples, so that the methods of calibration had half of it "
            "each to be fitted and measured on. No example is used for both.",
            "Save a validation split (val_logits, val_labels) beside the test split.",
            checks.same_split,
        ),
        Check(
            "CAL014",
            "Calibration helps",
            "A method of calibration brings the error down on examples that it was not fitted on.",
            "Fit it and put it behind the model, as below.",
            checks.fixable,
        ),
        Check(
            "CAL015",
            "No evidence of miscalibration",
            "Confidence and accuracy agree within noise, and enough examples were measured to see "
            "a large error.",
            "Watch that it stays so: calibrant monitor.",
            checks.calibrated,
        ),
        Check(
            "CAL016",
            "Worse than the first set of predictions",
            "The calibration error is larger than that of the first file or split of this report, "
            "beyond noise: another model, day or condition. Calibration on the one does not hold "
            "for the other.",
            "Calibrate on examples like these, and watch the model in use: calibrant monitor.",
            checks.worse_than_first,
        ),
        Check(
            "CAL017",
            "Bad shards were left out",
            "Some files could not be read, or had rows that are no predictions, and count in no "
            "figure. If what went wrong has to do with the examples, the rest is a biased sample.",
            "Write these shards again, and repeat the report.",
            checks.left_out,
        ),
        Check(
            "CAL018",
            "Subgroups that are off were found",
            "A search over the columns of the data found subgroups whose confidence is wrong on "
            "average, intersections of columns among them. The intervals account for the search.",
            "Calibrate by subgroup (calibrant fit --method multicalibration), collect examples "
            "of them, and look at them again: calibrant slices.",
            checks.subgroups_found,
        ),
    )
}
"""Checks by their code."""
