"""The report on the graded answers of a log: a page, a picture, the map and calibrated rows."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from calibrant._core.atomic_files import replacing
from calibrant.artifacts import save
from calibrant.display.html import Html, joined, tag
from calibrant.display.palette import LIGHT
from calibrant.display.results import threshold_text
from calibrant.llm.answers.calibrating import SignalFit
from calibrant.llm.answers.graded import write_rows
from calibrant.llm.answers.logs.study import AnswerStudy, option_logits, save_options
from calibrant.reports.answer_findings import Note, kinds, notes_of, verdict_of
from calibrant.reports.checks import percent
from calibrant.reports.content import WORDS, Snippet, Table, parts_table
from calibrant.reports.sections import tile
from calibrant.reports.shell import chart, document, scrollable, section, snippet, unbroken

QUESTION = "Are these confidences chances to be right?"
PAGE, MAP, ROWS, OPTIONS, PICTURE = (
    "report.html",
    "map",
    "calibrated.jsonl",
    "options.npz",
    "reliability",
)
"""Names in the folder of a report."""


def save_answer_report(study: AnswerStudy, folder: str | os.PathLike[str]) -> list[str]:
    """Write the report on a log to a folder, and return the names in it.

    ``report.html`` is the page; ``reliability.png`` (``.svg`` without matplotlib) the confidences
    before and after; ``map`` the answer calibrator with its threshold, for ``llm answers apply``;
    ``calibrated.jsonl`` the answers; and ``options.npz`` the log-probabilities of multiple choice,
    for ``calibrant fit --choices``.

    Parameters
    ----------
    study : AnswerStudy
        From :func:`calibrant.llm.study_answers`.
    folder : path
        Made if it is not there.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    save(study.calibrator, target / MAP)
    write_rows(target / ROWS, study.rows)
    names = [PAGE, _save_picture(study, target), MAP, ROWS]
    if option_logits(study.rows) is not None:
        save_options(study.rows, target / OPTIONS)
        names.append(OPTIONS)
    with replacing(target / PAGE) as temporary:
        # halves of characters, which UTF-8 does not have, are written as escapes
        temporary.write_bytes(answer_page(study).encode("utf-8", "backslashreplace"))
    return names


def _save_picture(study: AnswerStudy, folder: Path) -> str:
    """Draw reliability diagrams before and after; return the name of the file."""
    if find_spec("matplotlib") is None:
        name = f"{PICTURE}.svg"
        style = f"><style>:root{{{LIGHT.css_variables()}}}</style>"
        with replacing(folder / name) as temporary:
            temporary.write_text(study.before.chart("before").replace(">", style, 1), "utf-8")
        return name
    from calibrant.plots import reliability_diagrams
    from calibrant.plots.files import save_figure

    name = f"{PICTURE}.png"
    drawn = reliability_diagrams({"before": study.before, "calibrated": study.after})
    save_figure(drawn, folder / name)
    return name


def answer_lines(study: AnswerStudy) -> list[str]:
    """Return the findings in some ten lines, for a terminal."""
    verdict = verdict_of(study)
    about = f"{len(study.rows):,} answers ({study.log.format}), confidence: {study.source}"
    said = [f"{QUESTION} {verdict.title}. {verdict.evidence}"]
    return [about, *said, *(f"- {note}" for note in notes_of(study))]


def answer_page(study: AnswerStudy) -> str:
    """Return the report as a page: one file that fetches nothing."""
    parts = kinds(study)
    links = {"verdict": "Verdict", "findings": "Findings", "how-far": "How far off"}
    links |= {"threshold": "Threshold"}
    links |= {"signals": "Signals"} if study.signals is not None else {}
    links |= {"kinds": "Kinds"} if parts else {}
    links |= {"options": "Options"} if study.options is not None else {}
    links |= {"now": "What now", "data": "Data"}
    name = Path(study.log.path).name
    return document(
        f"Answers of {name}",
        f"{len(study.rows):,} graded answers",
        list(links.items()),
        _hero(study),
        _tiles(study),
        _findings(study),
        _how_far(study),
        _threshold(study),
        *([_signals(study.signals)] if study.signals is not None else []),
        *([_kinds(study)] if parts else []),
        *([_options(study)] if study.options is not None else []),
        section("now", tag("h2", "What to do now"), *map(snippet, _snippets())),
        _data(study),
    )


def _hero(study: AnswerStudy) -> Html:
    verdict = verdict_of(study)
    words = tag(
        "div",
        tag("h2", QUESTION, class_="question"),
        tag("p", verdict.title, class_="answer"),
        tag("p", unbroken(verdict.evidence), class_="lead"),
    )
    value, low, high = study.before["ece"]
    about = f"calibration error (ECE), {study.before.interval_heading}"
    interval = f" [{100 * low:.1f}, {100 * high:.1f}]"
    figure = tag(
        "div",
        tag("p", percent(value), class_="number"),
        tag("p", unbroken(about + interval), class_="muted small"),
        class_="figure",
    )
    return tag("section", words, figure, class_=f"hero {verdict.severity}", id="verdict")


def _tiles(study: AnswerStudy) -> Html:
    before, after = (dict(zip(e, e.table(), strict=True)) for e in (study.before, study.after))
    shown = {
        "ECE with the map": after["ece"],
        "Right answers": before["accuracy"],
        "Tells right from wrong (AUROC)": before["auroc"],
        "Brier score with the map": after["brier"],
    }
    return tag("dl", *(tile(title, *row[1:]) for title, row in shown.items()), class_="tiles")


def _findings(study: AnswerStudy) -> Html:
    items = [tag("li", _finding(note)) for note in notes_of(study)]
    return section("findings", tag("h2", "Findings"), tag("ul", *items, class_="findings"))


def _finding(note: Note) -> Html:
    badge = tag("span", WORDS[note.severity], class_="badge")
    inside = (
        tag("h3", note.title, badge),
        tag("span", unbroken(note.evidence), class_="evidence"),
    )
    more = tag("div", tag("p", tag("b", "What to do: "), note.advice), class_="more")
    return tag("details", tag("summary", *inside), more, class_=f"finding {note.severity}")


def _how_far(study: AnswerStudy) -> Html:
    words = (
        "Bars show how many answers were right where the confidence below was claimed. On the "
        "dashed line both agree; orange is the difference."
    )
    charts = (
        chart(study.before.chart(), "As it is"),
        chart(study.after.chart(), "With the map, each answer by a map of others"),
    )
    interval = study.before.interval_heading
    rows = [
        (*one, *two[1:]) for one, two in zip(study.before.table(), study.after.table(), strict=True)
    ]
    table = Table(("metric", "as it is", interval, "with the map", interval), rows)
    return section(
        "how-far",
        tag("h2", "How far off, and in which direction"),
        tag("p", words, class_="muted"),
        tag("div", *charts, class_="columns"),
        scrollable(table, study.before.describe()),
    )


def _threshold(study: AnswerStudy) -> Html:
    found = study.threshold
    promise = found.promise() or "No answer is accepted: too little is known for such a promise."
    rows = [
        ("accept calibrated chances from", threshold_text(found.threshold)),
        ("accepted", percent(found.coverage)),
        ("wrong among them", percent(found.error)),
        ("answers it was found on", f"{found.n:,}"),
    ]
    facts = scrollable(Table(("threshold", "value"), rows), promise) if found.coverage else ""
    curves = [chart(svg, "Errors among the most confident answers") for svg in study.after.charts()]
    return section(
        "threshold",
        tag("h2", "Which answers to accept"),
        tag("p", promise),
        tag("div", joined([facts]), *curves, class_="columns"),
    )


def _signals(fit: SignalFit) -> Html:
    weights = {name: weight for name, _, weight in fit.calibrator.table()[1:]}
    rows = []
    for name, alone in fit.alone.items():
        cells = dict(zip(alone, alone.table(), strict=True))
        raw = percent(fit.raw[name]["ece"].value) if name in fit.raw else "-"
        has = percent(fit.calibrator.coverage_[name], 0)
        figures = (cells["nll"][1], cells["auroc"][1], cells["auroc"][2])
        rows.append((name, has, raw, *figures, weights[name]))
    headings = ("signal", "answers", "ECE as it is", "NLL with a map", "AUROC", "interval")
    table = Table((*headings, "weight"), rows)
    return section(
        "signals",
        tag("h2", "What each signal is worth"),
        scrollable(table, "Of held-out answers, by a map of each signal alone", kind="sortable"),
    )


def _kinds(study: AnswerStudy) -> Html:
    caption = "Calibrated chances of answers that the map was not fitted on; gap in points"
    table = parts_table(kinds(study), "kind", 0.9)
    return section(
        "kinds", tag("h2", "By kind of question"), scrollable(table, caption, kind="sortable tall")
    )


def _options(study: AnswerStudy) -> Html:
    assert study.options is not None
    before, after = study.options.before.table(), study.options.after.table()
    rows = [(*one, *two[1:]) for one, two in zip(before, after, strict=True)]
    interval = study.options.before.interval_heading
    table = Table(("metric", "as it is", interval, "calibrated", interval), rows)
    words = (
        "Log-probabilities of the options, calibrated with a correction of the preference for some "
        "options, each question by a fit on others: the likeliest option may change."
    )
    return section(
        "options",
        tag("h2", "Multiple choice, calibrated and scored again"),
        tag("p", words, class_="muted"),
        scrollable(table, study.options.before.describe()),
    )


def _snippets() -> list[Snippet]:
    command = "calibrant llm answers apply map new_answers.jsonl -o calibrated.jsonl"
    code = (
        "import calibrant as cal\n\n"
        'calibrator = cal.load("map")\n'
        "chance = calibrator.predict(answers)  # in the form of the fit\n"
        "calibrator.abstains(chance)"
    )
    return [
        Snippet("Calibrate new answers of the same model and prompt", "bash", command),
        Snippet("The same in Python", "python", code),
    ]


def _data(study: AnswerStudy) -> Html:
    source, log = study.calibrator.source_, study.log
    facts = {
        "log": log.path,
        "format": log.format,
        "answers": f"{len(study.rows):,} used, {log.left_out:,} left out",
        "confidence": study.source or "not stated",
        "model": source.model or "not stated",
        "prompt": source.prompt or "not stated",
        "map": study.calibrator.describe(),
        "fitted on": f"{int((~study.held_out).sum()):,} answers, drawn at random",
        "threshold from": f"the other {int(study.held_out.sum()):,}",
    }
    lines = [joined([tag("dt", name), tag("dd", value)]) for name, value in facts.items()]
    return section("data", tag("h2", "Data"), tag("dl", *lines, class_="facts small"))
