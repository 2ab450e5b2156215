"""Answers, maps, gates, heads and the option bias of language models as boxes."""

from __future__ import annotations

import math

import numpy as np

from calibrant._core.showing import threshold_text
from calibrant.decide.threshold_results import Threshold
from calibrant.llm.answers.asking import Answer
from calibrant.llm.answers.calibrator import AnswerCalibrator, AnswerMap
from calibrant.llm.answers.choices import OptionBias
from calibrant.llm.answers.signal_calibrator import SignalCalibrator
from calibrant.llm.gate.gate import Gate
from calibrant.llm.heads.fitted import FittedHead
from calibrant.show.box import Box, Callout, Part, box, box_of
from calibrant.show.charts import Line, line_chart
from calibrant.show.tables import Table
from calibrant.show.tokens import ShadedText, shaded_text


def shaded_answer(answer: Answer, title: str = "Answer") -> ShadedText:
    """Return an answer with its tokens shaded by their probability, or that there is none."""
    if answer.abstains:
        return shaded_text([], [], title=title, note=f"no answer: {answer.figures()}")
    note = f"confidence {100 * answer.confidence:.1f} %{'; truncated' * answer.truncated}"
    return shaded_text(answer.token_texts, answer.probs, title=title, note=note)


@box_of.register(Answer)
def answer_box(answer: Answer) -> Box:
    """Return the text of an answer with its tokens shaded."""
    return shaded_answer(answer).box()


@box_of.register(AnswerCalibrator)
def answer_calibrator_box(fitted: AnswerCalibrator) -> Box:
    """Return the chance to be right by the confidence, and the threshold."""
    if fitted.learned_ is None:
        return Box("Answer calibrator", ["not fitted"])
    confidence = np.linspace(0.005, 0.995, 199)
    lines = [
        Line("chance", confidence, fitted.predict(confidence)),
        Line("unchanged", [0, 1], [0, 1], colour="ink", dashed=True),
    ]
    x, y = "confidence", "chance to be right"
    return _map_box(
        "Answer calibrator", fitted, line_chart(lines, x_label=x, y_label=y, y_range=(0, 1))
    )


@box_of.register(SignalCalibrator)
def signal_calibrator_box(fitted: SignalCalibrator) -> Box:
    """Return the share of the answers that have each signal, its weight, and the threshold."""
    if fitted.regression_ is None:
        return Box("Signal calibrator", ["not fitted"])
    rows = [
        (name, f"{100 * fitted.coverage_[name]:.0f} %", f"{weight:.2f}")
        for name, weight in fitted.weights.items()
    ]
    return _map_box("Signal calibrator", fitted, Table(("signal", "answers", "weight"), rows))


def _map_box(title: str, fitted: AnswerMap, learned: Part) -> Box:
    limit = [] if fitted.threshold_ is None else [box(fitted.threshold_)]
    return Box(title, [fitted.describe()], parts=[learned, *limit])


@box_of.register(Gate)
def gate_box(gate: Gate) -> Box:
    """Return what a gate guarantees, its thresholds, and what is beyond them."""

    def limit(found: Threshold | None) -> tuple[str, str]:
        if found is None:
            return "-", "-"
        lowest = threshold_text(found.threshold) if found.coverage else "none"
        return lowest, f"{100 * found.coverage:.1f} %"

    rows = []
    for band in gate.bands:
        accept = band.accept
        wrong = f"{100 * accept.error:.2f} %" if accept.coverage else "-"
        rows.append((band.name(), f"{accept.n:,}", *limit(accept), wrong, *limit(band.verify)))
    headings = ("kind", "graded", "accept from", "accepted", "wrong", "verify from", "to verify")
    promises = [Callout(gate.promise(decision)) for decision in ("accept", "verify")]
    about = "This holds for answers from the same source and population as the graded ones."
    if not any(promise.text for promise in promises):
        about = "No answer is accepted: the graded answers do not show so small an error."
    return Box("Gate", [gate.describe()], promises, [Table(headings, rows)], [about])


@box_of.register(FittedHead)
def head_box(fitted: FittedHead) -> Box:
    """Return why a head was kept or not, and the figures on held-out documents."""

    def shown(value: float, form: str) -> str:
        return "-" if math.isnan(value) else f"{value:{form}}".replace("%", " %")

    forms = {"nll": ".4f", "brier": ".4f", "ece": ".2%", "auroc": ".2%"}
    rows = [
        (group, *(shown(values.get(name, math.nan), form) for name, form in forms.items()))
        for group, values in fitted.figures.items()
    ]
    headings = ("held-out documents", "NLL", "Brier", "ECE", "AUROC")
    used = [len(rows) - 1 if fitted.kept else min(1, len(rows) - 1)]
    tables = [Table(headings, rows, highlighted=used)] if rows else []
    said = Callout(fitted.reasons, "good" if fitted.kept else "warn")
    return Box("Temperature head", [fitted.describe()], [said], tables)


@box_of.register(OptionBias)
def bias_box(bias: OptionBias) -> Box:
    """Return how often each letter is chosen, and how often it is right."""
    cells = zip(bias.letters, bias.chosen, bias.right, bias.prob, strict=True)
    rows = [(name, *(f"{100 * x:.1f} %" for x in values)) for name, *values in cells]
    table = Table(("option", "chosen", "right", "mean probability"), rows)
    return Box("Option bias", [bias.describe()], parts=[table])
