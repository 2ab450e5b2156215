"""What a report concludes: the answer, what to do now, and what was not checked."""

from __future__ import annotations

import csv
import io
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import NamedTuple

from calibrant._core.messages import about
from calibrant.data.dataset import IN_MEMORY
from calibrant.data.files import TABLES
from calibrant.metrics.intervals import Estimate
from calibrant.show.pages import SEVERITIES, Severity, Snippet
from calibrant.show.report.findings import (
    BAD,
    DATA_LOOK_WRONG,
    LARGE,
    SIGNIFICANT,
    SMALL,
    Finding,
    _data_look_wrong,
    _examples_for_yes,
    _is_off,
    _miscalibrated,
    _more_examples,
    _worst_range,
    cannot_tell,
)
from calibrant.show.report.model import Subject
from calibrant.show.style import percent, points
from calibrant.slices.examples import CLUSTER, CONFIDENCE, PREDICTED, SECOND

OF_PREDICTIONS = (CLUSTER, CONFIDENCE, PREDICTED, SECOND)
"""Columns of a search that are no metadata."""
ANSWERS: dict[Severity, str] = {
    **{"good": "Yes", "info": "Too few examples to tell", "warn": "Not quite", "bad": "No"}
}


@dataclass(frozen=True)
class Verdict:
    """The answer in plain words.

    Attributes
    ----------
    severity : {"good", "info", "warn", "bad"}
    answer : str
        A few words, such as "No".
    sentence : str
        What that means in practice, with numbers.
    figure, interval : str
        The calibration error, as text; the interval is empty without one.
    """

    severity: Severity
    answer: str
    sentence: str
    figure: str
    interval: str

    def __str__(self) -> str:
        return f"{self.answer}. {self.sentence}"


def _verdict_of(subject: Subject, findings: Sequence[Finding]) -> Verdict:
    """Answer the question for one set of predictions."""
    rows = dict(zip(subject.evaluation, subject.evaluation.table(), strict=True))
    figure, interval = rows["ece"][1:]
    codes = {finding.code: finding for finding in findings}
    if _data_look_wrong(findings):
        doubt = codes[DATA_LOOK_WRONG].evidence
        return Verdict("bad", "Check the data first", doubt, figure, interval)
    severity, against = _severity(subject), None
    off_on_average = severity in BAD or {"CAL001", "CAL002"} & {*codes}
    for finding in _miscalibrated(findings):
        if SEVERITIES.index(finding.severity) > SEVERITIES.index(severity):
            severity, against = finding.severity, finding
    conclusion = _conclusion(subject, severity)
    if against is not None and against.code not in ("CAL001", "CAL002"):
        lead = "That alone would be within noise, but not everything is"
        lead = "It is worse in places" if off_on_average else lead
        conclusion = f"{lead}: {against.evidence}"
    return Verdict(
        severity, ANSWERS[severity], f"{_claims(subject)} {conclusion}", figure, interval
    )


def _severity(subject: Subject) -> Severity:
    """Return how far off the calibration error is beyond noise, over all and in its ranges."""
    evaluation = subject.evaluation
    value, low, _ = evaluation["ece"]
    if evaluation.test is None:  # without intervals
        return "bad" if value >= LARGE else "warn" if value >= 2 * SMALL else "good"
    if low >= LARGE and evaluation.test.p_value < SIGNIFICANT:  # a no needs both
        return "bad"
    if _is_off(evaluation) or _worst_range(subject):
        return "warn"
    return "info" if cannot_tell(evaluation) else "good"


def _claims(subject: Subject) -> str:
    part = subject.answers
    if subject.evaluation.estimand == "multilabel":
        return (
            f"Over all decisions about tags it is {percent(part.confidence)} sure on average and "
            f"right in {percent(part.accuracy)}."
        )
    return (
        f"On average it is {percent(part.confidence)} sure of its answers and right in "
        f"{percent(part.accuracy)} of them."
    )


def _conclusion(subject: Subject, severity: Severity) -> str:
    part, ece = subject.answers, subject.evaluation["ece"]
    if severity == "info":
        return (
            f"With {subject.evaluation.n:,} {subject.counted} the error could be anywhere from "
            f"{percent(ece.low)} to {percent(ece.high)}. A yes needs about "
            f"{about(_examples_for_yes(subject.evaluation))}."
        )
    if severity == "good":
        return f"A stated {subject.probability} is off by {percent(ece.value, 2)} on average."
    worst, test = _worst_range(subject), subject.evaluation.test
    if worst is not None and test is not None and not _is_off(subject.evaluation):
        what = "the " * (subject.word == "tag") + subject.probability
        whole = "On average that is close"
        if test.p_value >= SIGNIFICANT:
            whole = f"Over all examples that is within noise (p = {test.p_value:.2g})"
        return (
            f"{whole}, but not everywhere: where {what} is "
            f"{worst.name}, its mean is {percent(worst.confidence)} and the observed share "
            f"{percent(worst.accuracy)}."
        )
    wrong = (1 - part.accuracy) / max(1 - part.confidence, 1e-12)
    if part.gap_ends[0] > 0 and 1.2 <= wrong < 1000:
        return f"It makes {wrong:.1f} times as many mistakes as its confidence implies."
    if part.gap_ends[0] > 0:
        return f"Its confidences are {points(part.gap)} too high."
    if part.gap_ends[1] < 0:
        return f"It is right more often than it says, by {points(-part.gap)}."
    return f"The stated {subject.probability} is too high in some places and too low in others."


def _subgroups_text(subject: Subject, verdict: Verdict) -> str:
    """Return what a search for subgroups says, so that silence is not taken for a pass."""
    found = subject.slices
    if found is None:
        return ""
    if not found.searched:
        return f"None were: no value of a column has {found.min_size:,} examples."
    if found.is_off:
        return found.verdict()
    accuracy = subject.answers.accuracy
    reach = found.critical * math.sqrt(accuracy * (1 - accuracy) / found.min_size)
    unseen = (
        f"In subgroups of {found.min_size:,} examples, gaps of less than about {points(reach)} "
        "cannot be told from noise."
    )
    if verdict.severity == "good":
        return f"{found.verdict()} {unseen}"
    return f"Subgroups cannot be told from the model as a whole. {unseen}"


def _request(subject: Subject, verdict: Verdict, findings: Sequence[Finding]) -> str:
    """Return what a reader who runs no commands asks for."""
    remedy = subject.remedy
    if _data_look_wrong(findings):
        return "Ask your team to check how the file was made, and to repeat this report."
    watch = "and to check it on new labelled examples as they come."
    if remedy is not None and remedy.helps:
        return f"Ask your team to put a calibrator behind the model, as below, {watch}"
    if verdict.severity == "good":
        return f"Ask your team to leave the model as it is, {watch}"
    what, evaluation = "compare calibration methods", subject.evaluation
    if verdict.severity == "info":
        more = _examples_for_yes(evaluation) - evaluation.n
        what = f"label about {about(more)} more {subject.counted}"
    elif any(finding.code == "CAL019" for finding in findings):
        more_examples = _more_examples(subject)
        what = more_examples[0].lower() + more_examples[1:]
    return f"Ask your team to {what}, and to repeat this report."


def _snippets(subject: Subject, findings: Sequence[Finding] = ()) -> list[Snippet]:
    """Commands and code for what to do next."""
    if _data_look_wrong(findings):
        return _to_repeat(subject)
    first = _to_save(subject) if subject.path == IN_MEMORY else []
    repair, remedy = _to_repair(subject), subject.remedy
    if remedy is not None and remedy.helps:
        return [*first, *_to_calibrate(subject), *repair, *_to_watch(subject), _to_stop(subject)]
    fit = [] if remedy is not None else _to_calibrate(subject)
    off = _severity(subject) in BAD or _miscalibrated(findings)
    stop = [] if off else [_to_stop(subject)]  # a limit would allow the present error
    return [*first, *fit, *repair, *_to_watch(subject), *stop]


def _path(subject: Subject) -> str:
    return "predictions.npz" if subject.path == IN_MEMORY else subject.path


def _to_save(subject: Subject) -> list[Snippet]:
    """Return the lines that make a file of arrays, which the commands read."""
    names, remedy = [subject.split], subject.remedy
    columns = ["probs" if subject.probs_stored else "logits", "labels"]
    if remedy is not None and remedy.helps and remedy.chosen and remedy.chosen.calibrator:
        names = [remedy.fit_split, subject.split]
        columns += remedy.chosen.calibrator.input_columns
    keys = [f"{name}_{column}" if name else column for name in names for column in columns]
    arrays = "".join(f'    "{key}": {key},\n' for key in dict.fromkeys(keys))
    code = f'import calibrant as cal\n\ncal.save_predictions("{_path(subject)}", {{\n{arrays}}})'
    return [Snippet("First save the arrays, for the commands below", "python", code)]


def _suffix(subject: Subject) -> str:
    """Return the suffix of the files in the advised commands: of a table if predictions are one."""
    suffix = PurePath(_path(subject)).suffix
    return suffix if suffix in TABLES else ".npz"


def _calibrated(subject: Subject) -> str:
    return f"calibrated{_suffix(subject)}"


def _named(subject: Subject) -> str:
    """Return the options that name the columns, as they were given for this report."""
    return "".join(f" {shlex.quote(word)}" for word in subject.columns.words)


def _opened(subject: Subject) -> str:
    """Return the arguments that open the predictions in Python."""
    words: list[tuple[str, str | list[str]]] = []
    if subject.columns.labels is not None:
        words.append(("labels", subject.columns.labels))
    for domain, names in subject.columns.scores.items():
        words.append((domain, names[0] if len(names) == 1 else [*names]))
    return ", ".join([repr(_path(subject)), *(f"{k}={v!r}" for k, v in words)])


def _to_calibrate(subject: Subject) -> list[Snippet]:
    file, named = shlex.quote(_path(subject)), _named(subject)
    remedy = subject.remedy
    method = remedy.chosen.method if remedy and remedy.chosen else "auto"
    fitted_on = remedy.fit_split if remedy else ""
    flag = _split_flag(fitted_on, "val", "--fit-split")
    option = f", split={fitted_on!r}" if flag else ""
    if subject.word == "tag":
        flag, option = f"{flag} --multilabel", f'{option}, estimand="multilabel"'
    elif remedy and remedy.keep_argmax != "auto":
        flag = f"{flag} --set keep_argmax={remedy.keep_argmax}"
        option = f'{option}, options={{"keep_argmax": {remedy.keep_argmax}}}'
    commands = (
        f"calibrant fit {file}{named} --method {method}{flag} -o calibrator",
        f"calibrant apply calibrator {file}{named} -o {_calibrated(subject)}",
        "calibrant export calibrator -o calibrator.onnx",
    )
    code = (
        "import calibrant as cal\n",
        f"data = cal.open_dataset({_opened(subject)})",
        f'calibrator = cal.fit(data, method="{method}"{option})',
        'cal.save(calibrator, "calibrator")',
        f'cal.apply(calibrator, data, "{_calibrated(subject)}")',
    )
    return [
        Snippet("Fit a calibrator, and apply it", "bash", "\n".join(commands)),
        Snippet("The same in Python", "python", "\n".join(code)),
    ]


def _to_repeat(subject: Subject) -> list[Snippet]:
    """Return the command that makes the report again, once the data are right."""
    if subject.path == IN_MEMORY:
        return []
    flag = _split_flag(subject.split, "test") + " --multilabel" * (subject.word == "tag")
    command = f"calibrant report {shlex.quote(subject.path)}{_named(subject)}{flag}"
    return [Snippet("Repeat the report when the data are right", "bash", command)]


def _to_repair(subject: Subject) -> list[Snippet]:
    """Return the commands that correct the subgroups which are off, by their columns."""
    found = subject.slices
    if found is None or not found.slices or subject.path == IN_MEMORY or subject.word == "tag":
        return []
    conditions = [condition for one in found.slices for condition in one.conditions]
    columns = dict.fromkeys(found.columns[condition.column] for condition in conditions)
    names = [name for name in columns if name not in (*OF_PREDICTIONS, found.probability)]
    if not names:
        return []
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(names)  # names with commas in quotes
    option = f"--columns {shlex.quote(line.getvalue())}"
    file = f"{shlex.quote(subject.path)}{_named(subject)}"
    commands = (
        f"calibrant compare {file} --methods auto,multicalibration {option}",
        f"calibrant fit {file} --method multicalibration {option} -o repaired",
    )
    title = "Correct the subgroups that are off; a fit without corrections equals auto"
    return [Snippet(title, "bash", "\n".join(commands))]


def _to_watch(subject: Subject) -> list[Snippet]:
    """Return the command that watches a model; a monitor takes exclusive classes only."""
    if subject.word == "tag":
        return []
    today, remedy = f"today{_suffix(subject)}", subject.remedy
    option = " --calibrator calibrator" if remedy is None or remedy.helps else ""
    command = f"calibrant monitor {today}{_named(subject)}{option} --state watch.json --fail"
    title = f"Watch it in use: {today} is your file of new labelled examples"
    return [Snippet(title, "bash", command)]


def _to_stop(subject: Subject) -> Snippet:
    """Return the commands that stop a worse model, on examples of no fit."""
    today, named, remedy = f"today{_suffix(subject)}", _named(subject), subject.remedy
    file, limit = f"{today}{named}", _limit(subject.evaluation["ece"])
    commands = []
    if remedy is not None and remedy.helps and remedy.before and remedy.after:
        applied = f"today_{_calibrated(subject)}"
        commands = [f"calibrant apply calibrator {file} -o {applied}"]
        file = applied + named * (_suffix(subject) != ".npz")  # arrays get their usual names
        limit = _limit(remedy.after["ece"], remedy.before["ece"].value)
    flag = " --multilabel" if subject.word == "tag" else ""
    commands.append(f"calibrant evaluate {file}{flag} --max ece={limit:g}")
    title = f"Stop a release that is worse: {today} is your file of new labelled examples"
    return Snippet(title, "bash", "\n".join(commands))


def _split_flag(name: str, usual: str, option: str = "--split") -> str:
    """Return the option that names a split; empty for one that the command takes by itself."""
    return f" {option} {shlex.quote(name)}" if name not in ("", usual) else ""


def _limit(ece: Estimate, without: float = math.inf) -> float:
    """Return a limit that the ECE of new examples will probably keep, if nothing changes.

    It is the upper end of the interval. Where few examples make that so wide that a model without
    its calibrator, whose ECE is ``without``, would pass, the limit is half-way between the two.
    """
    most = ece.value if math.isnan(ece.high) else max(ece.value, ece.high)
    limit = max(0.02, math.ceil(100 * most) / 100)
    return limit if limit < without else round((ece.value + without) / 2, 4)


class Unchecked(NamedTuple):
    """Something that was not checked, and how to check it."""

    what: str
    how: str

    def __str__(self) -> str:
        return f"{self.what} ({self.how})" if self.how else self.what


def _unchecked_of(subject: Subject, others: int = 0) -> list[Unchecked]:
    """Return what was not checked about a subject; ``others`` are in the same report."""
    remedy, several = subject.remedy, subject.evaluation.classes > 2 and subject.word == "class"
    every = [
        (
            not subject.by and subject.slices is None,
            "Subgroups: no column was named",
            "add columns, such as a country, device or customer group, or pass --by auto",
        ),
        (
            remedy is None,
            f"Methods of calibration: {subject.remedy_error}",
            "calibrant compare",
        ),
        (
            subject.evaluation.test is None,
            "Noise: intervals and the test were switched off",
            "pass --level 0.9",
        ),
        (
            all(math.isnan(part.claimed) for part in subject.classes),
            "Frequencies of classes: there are too many classes",
            "",
        ),
        (
            subject.weighted,
            "Guaranteed thresholds: these count examples, and do not know weights",
            "leave the weights out",
        ),
        (
            not subject.weighted and remedy is not None and remedy.comparison.folds > 0,
            "Guaranteed thresholds: they need examples that no method was fitted on",
            "calibrant decide, which sets half of the examples aside",
        ),
        (
            True,
            "Labels: they were taken to be right, and examples to be independent",
            "look at a sample of confident mistakes; drop duplicates",
        ),
        (
            not others,
            "Other days, places and versions of the model",
            "pass several files, or several --split, for a comparison",
        ),
        (True, "Drift after today", "calibrant monitor, with labelled examples as they come"),
        (
            several,
            "Inputs unlike all of these",
            "calibrant.metrics.ood_auroc says how well confidence tells them apart",
        ),
    ]
    return [Unchecked(what, how) for applies, what, how in every if applies]
