"""Commands and code that a report advises."""

from __future__ import annotations

import math
import shlex
from typing import NamedTuple

from calibrant.data.dataset import IN_MEMORY
from calibrant.metrics.intervals import Estimate
from calibrant.show.report.model import Subject

CALIBRATED = "calibrated.npz"
"""File that the advised commands write."""


class Snippet(NamedTuple):
    """Commands or code to copy."""

    title: str
    language: str
    code: str


def snippets(subject: Subject) -> list[Snippet]:
    """Commands and code for what to do next."""
    if subject.remedy is not None and subject.remedy.changes_nothing:
        return _to_keep(subject)
    return [*_to_calibrate(subject), *_to_keep(subject)]


def _path(subject: Subject) -> str:
    return "predictions.npz" if subject.path == IN_MEMORY else subject.path


def _to_calibrate(subject: Subject) -> list[Snippet]:
    path, file = _path(subject), shlex.quote(_path(subject))
    remedy = subject.remedy
    method = remedy.chosen.method if remedy and remedy.chosen else "auto"
    fitted_on = remedy.fit_split if remedy else ""
    flag = _split_flag(fitted_on, "val")
    option = f", split={fitted_on!r}" if flag else ""
    if subject.word == "tag":
        flag, option = f"{flag} --multilabel", f'{option}, estimand="multilabel"'
    elif remedy and remedy.may_change_predictions:
        flag, option = f"{flag} --choices", f'{option}, options={{"keep_argmax": False}}'
    commands = (
        f"calibrant fit {file} --method {method}{flag} -o calibrator",
        f"calibrant apply calibrator {file} -o {CALIBRATED}",
        "calibrant export calibrator -o calibrator.onnx",
    )
    code = (
        "import calibrant as cal\n",
        f'calibrator = cal.fit({path!r}, method="{method}"{option})',
        'cal.save(calibrator, "calibrator")',
        "probs = calibrator.predict_proba(logits)",
    )
    return [
        Snippet("Fit a calibrator, and apply it", "bash", "\n".join(commands)),
        Snippet("The same in Python", "python", "\n".join(code)),
    ]


def _to_keep(subject: Subject) -> list[Snippet]:
    flag = _split_flag(subject.split, "test")
    flag += " --multilabel" if subject.word == "tag" else ""
    remedy = subject.remedy
    file, evaluation = shlex.quote(_path(subject)), subject.evaluation
    if remedy is not None and remedy.after is not None and not remedy.changes_nothing:
        file, evaluation = CALIBRATED, remedy.after
    gate = f"calibrant evaluate {file}{flag} --max-ece {_limit(evaluation['ece']):g}"
    stop = Snippet("Stop a release that is worse", "bash", gate)
    if subject.word == "tag":  # a monitor takes exclusive classes only
        return [stop]
    watch = "calibrant monitor today.npz --calibrator calibrator --state watch.json --fail"
    return [
        Snippet("Watch it in use: a window of labelled examples at a time", "bash", watch),
        stop,
    ]


def _split_flag(name: str, usual: str) -> str:
    """Return the option that names a split; empty for one that the command takes by itself."""
    return f" --split {shlex.quote(name)}" if name not in ("", usual) else ""


def _limit(ece: Estimate) -> float:
    """Return a limit that the ECE of other examples will keep too, if nothing changes."""
    most = ece.value if math.isnan(ece.high) else max(ece.value, ece.high)
    return max(0.02, math.ceil(100 * most) / 100)
