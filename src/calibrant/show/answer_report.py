"""The report on the graded answers of a log: a page, a picture, the map and calibrated rows."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from calibrant._core.atomic_files import replacing
from calibrant._core.showing import threshold_text
from calibrant.artifacts import save
from calibrant.decide.threshold_results import Threshold
from calibrant.llm.answers.logs.study import AnswerStudy, option_logits, save_options
from calibrant.llm.answers.rows import write_rows
from calibrant.llm.answers.signal_calibrator import SignalFit
from calibrant.metrics.evaluation import Evaluation
from calibrant.show.answer_findings import _notes_of, _verdict_of, kinds
from calibrant.show.metrics import diagram, risk_chart
from calibrant.show.pages import SEVERITY_NAMES, Snippet, document
from calibrant.show.report.view import parts_table
from calibrant.show.style import percent
from calibrant.show.tables import Table

_QUESTION = "Are these confidences chances to be right?"
_PAGE, _MAP, _ROWS = "report.html", "map", "calibrated.jsonl"
_OPTIONS, _PICTURE = "options.npz", "reliability.png"
"""Names in the folder of a report."""


def save_answer_report(study: AnswerStudy, folder: str | os.PathLike[str]) -> list[str]:
    """Write the report on a log to a folder, and return the names in it.

    ``report.html`` is the page; ``map`` the answer calibrator with its threshold, for ``llm answers
    apply``; ``calibrated.jsonl`` the answers; ``reliability.png``, with matplotlib, the confidences
    before and after; and ``options.npz`` the log-probabilities of multiple choice, for ``calibrant
    fit``. The folder is made if it is not there.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    save(study.calibrator, target / _MAP)
    write_rows(target / _ROWS, study.rows)
    names = [_PAGE, _MAP, _ROWS]
    if find_spec("matplotlib") is not None:
        from calibrant.show.figures import reliability_diagrams
        from calibrant.show.figures.look import save_figure

        drawn = reliability_diagrams({"before": study.before, "calibrated": study.after})
        save_figure(drawn, target / _PICTURE)
        names.append(_PICTURE)
    if option_logits(study.rows) is not None:
        save_options(study.rows, target / _OPTIONS)
        names.append(_OPTIONS)
    with replacing(target / _PAGE) as temporary:
        # lone surrogates, which UTF-8 does not have, are written as escapes
        temporary.write_bytes(_answer_page(study).encode("utf-8", "backslashreplace"))
    return names


def answer_lines(study: AnswerStudy) -> list[str]:
    """Return the findings in some ten lines, for a terminal."""
    verdict = _verdict_of(study)
    source = study.source or "not stated"
    about = f"{len(study.rows):,} answers ({study.log.format}), confidence: {source}"
    said = [f"{_QUESTION} {verdict.title}. {verdict.evidence}"]
    return [about, *said, *(f"- {note}" for note in _notes_of(study))]


def _answer_page(study: AnswerStudy) -> str:
    """Return the report as a page: one file that fetches nothing."""
    parts, found = kinds(study), study.threshold
    links = {"verdict": "Verdict", "findings": "Findings", "how-far": "How far off"}
    links |= {"threshold": "Threshold"}
    links |= {"signals": "Signals"} if study.signals is not None else {}
    links |= {"kinds": "Kinds"} if parts else {}
    links |= {"options": "Options"} if study.options is not None else {}
    links |= {"now": "What now", "data": "Data"}
    value, low, high = study.before["ece"]
    about = f"calibration error (ECE), {study.before.interval_heading}"
    curve, options = study.after.risk_coverage, study.options
    before, after = (dict(zip(e, e.table(), strict=True)) for e in (study.before, study.after))
    tiles = {
        "ECE with the map": after["ece"],
        "Right answers": before["accuracy"],
        "Tells right from wrong (AUROC)": before["auroc"],
        "Brier score with the map": after["brier"],
    }
    origin, log = study.calibrator.source_, study.log
    data = {
        "log": log.path,
        "format": log.format,
        "answers": f"{len(study.rows):,} used, {log.left_out:,} left out",
        "confidence": study.source or "not stated",
        "model": origin.model or "not stated",
        "prompt": origin.prompt or "not stated",
        "map": study.calibrator.describe(),
        "fitted on": f"{int((~study.held_out).sum()):,} answers, drawn at random",
        "threshold from": f"the other {int(study.held_out.sum()):,}",
    }
    return document(
        "answers.html",
        f"Answers of {Path(study.log.path).name}",
        f"{len(study.rows):,} graded answers",
        links.items(),
        study=study,
        question=_QUESTION,
        verdict=_verdict_of(study),
        ece=percent(value),
        measured=f"{about} [{100 * low:.1f}, {100 * high:.1f}]",
        tiles=[(title, value, interval) for title, (_, value, interval) in tiles.items()],
        notes=[(note, SEVERITY_NAMES[note.severity]) for note in _notes_of(study)],
        before=diagram(study.before),
        after=diagram(study.after),
        metrics=_side_by_side(study.before, study.after, "with the map"),
        promise=found.promise()
        or "No answer is accepted: too little is known for such a guarantee.",
        threshold=_threshold(found),
        risk=None if curve is None else risk_chart(curve),
        signals=None if study.signals is None else _signals(study.signals),
        kinds=parts_table(parts, "kind", 0.9) if parts else None,
        options=options and _side_by_side(options["before"], options["after"], "calibrated"),
        snippets=_SNIPPETS,
        data=data,
    )


def _side_by_side(before: Evaluation, after: Evaluation, how: str) -> Table:
    """Return the metrics as they are, and after calibration."""
    rows = [(*one, *two[1:]) for one, two in zip(before.table(), after.table(), strict=True)]
    interval = before.interval_heading
    return Table(("metric", "as it is", interval, how, interval), rows)


def _threshold(found: Threshold) -> Table:
    """Return what the threshold does; without rows where it accepts nothing."""
    rows = [
        ("accept calibrated chances from", threshold_text(found.threshold)),
        ("accepted", percent(found.coverage)),
        ("wrong among them", percent(found.error)),
        ("answers it was found on", f"{found.n:,}"),
    ]
    return Table(("threshold", "value"), rows if found.coverage else [])


def _signals(fit: SignalFit) -> Table:
    rows = []
    for name, alone in fit.alone.items():
        cells = dict(zip(alone, alone.table(), strict=True))
        raw = percent(fit.raw[name]["ece"].value) if name in fit.raw else "-"
        has = percent(fit.calibrator.coverage_[name], 0)
        figures = (cells["nll"][1], cells["auroc"][1], cells["auroc"][2])
        rows.append((name, has, raw, *figures, f"{fit.calibrator.weights[name]:.2f}"))
    headings = ("signal", "answers", "ECE as it is", "NLL with a map", "AUROC", "interval")
    return Table((*headings, "weight"), rows)


_SNIPPETS = (
    Snippet(
        "Calibrate new answers of the same model and prompt",
        "bash",
        "calibrant llm answers apply map new_answers.jsonl -o calibrated.jsonl",
    ),
    Snippet(
        "The same in Python",
        "python",
        "import calibrant as cal\n\n"
        'calibrator = cal.load("map")\n'
        "chance = calibrator.predict(answers)  # in the form of the fit\n"
        "calibrator.abstains(chance)",
    ),
)
