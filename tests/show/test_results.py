"""What holds for every result: a short line, safe HTML, and a frame."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import calibrant as cal
from calibrant._core.showing import one_line
from calibrant.calibrators.average import Average
from calibrant.decide.priors import PriorCorrection
from calibrant.llm import AnswerCalibrator, FittedHead, SignalCalibrator, evaluate_answers
from calibrant.llm.answers.asking import Answer
from calibrant.llm.models.huggingface import ModelFingerprint
from calibrant.metrics.curves import (
    confidence_histogram,
    reliability,
    reliability_by_class,
    reliability_by_margin,
    smooth_reliability,
)
from calibrant.metrics.evaluation import Evaluation
from calibrant.metrics.ranking import risk_coverage
from calibrant.show import shaded_text
from calibrant.show.tables import Table
from calibrant.workflows.choice import MethodChoice
from calibrant.workflows.comparison import Comparison, Row
from calibrant.workflows.decide import decide
from tests.support.markup import charts, check_inert, titles

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    honest = 2 * rng.normal(size=(400, 4))
    labels = (honest + rng.gumbel(size=honest.shape)).argmax(-1)
    groups = np.where(rng.random(400) < 0.5, HOSTILE, "b")
    return SimpleNamespace(logits=2 * honest, labels=labels, groups=groups)


@pytest.fixture(scope="module")
def results(data):
    logits, labels = data.logits, data.labels
    file = {"logits": logits, "labels": labels}
    ts = cal.TemperatureScaling().fit(logits, labels)
    plain = cal.calibrators.Identity().fit(logits, labels)
    evaluation = cal.evaluate(logits, labels, by=data.groups, level=None)
    row = Row(HOSTILE, evaluation, 0.1, 0, None, [HOSTILE], ts)
    failed = Row("failed", None, 0.1, None, HOSTILE)
    chosen = MethodChoice(HOSTILE, f"Use {HOSTILE}", [HOSTILE])
    about: Any = (400, 400, 4, HOSTILE, "test", None, "top_label", chosen)
    monitor = cal.Monitor(ts, window=100)
    monitor.update(3 * logits, labels)
    confidence, right = np.linspace(0.05, 0.95, 400), np.arange(400) % 7 < np.arange(400) / 50
    answer = Answer(HOSTILE, ["a ", HOSTILE], np.array([0.9, 0.2]), 0.5, True)
    fingerprint = ModelFingerprint(HOSTILE, 8, 100, "0" * 8, None)
    with pytest.warns(UserWarning, match="no threshold"):
        nothing = cal.threshold(logits, labels, max_error=0.001)
    return [
        *(evaluation, row, failed, Comparison([row, failed], *about), ts, plain, monitor.report()),
        *(cal.effect(ts, file, level=None), cal.cross_fit(file, method="ts", folds=2, level=None)),
        *(
            cal.Auto(candidates=["ts", "none"], folds=2).fit(logits, labels),
            Average([ts, plain], [0.7, 0.3]),
            cal.SMART(steps=2),
        ),
        *(cal.SMART(steps=2).fit(logits, labels), PriorCorrection(ts).fit(logits, labels)),
        *(cal.threshold(logits, labels, max_error=0.3), nothing, cal.conformal(logits, labels)),
        *(decide(file, max_error=0.4), decide(file, max_error=0.4).rule, cal.MaCCal()),
        *(reliability(logits, labels), smooth_reliability(logits, labels)),
        *(reliability_by_class(logits, labels)[0], reliability_by_margin(logits, labels)[0]),
        *(confidence_histogram(logits, labels), risk_coverage(logits, labels)),
        *(answer, answer._replace(required=0.9)),
        *(shaded_text(["x", HOSTILE], [0.1, np.nan]), evaluate_answers(confidence, right)),
        *(AnswerCalibrator(), AnswerCalibrator().fit(confidence, right)),
        *(SignalCalibrator(), SignalCalibrator().fit({HOSTILE: confidence}, right)),
        FittedHead.from_temperature(1.5, fingerprint, HOSTILE),
    ]


def test_every_result_has_a_short_line(results):
    for result in results:
        line = repr(result)
        assert line.startswith(f"{type(result).__name__}("), line
        assert "\n" not in line
        assert r"\n" not in line
        assert len(line) < 400, line


def test_every_result_has_safe_html_of_bounded_size(results):
    for result in results:
        html = result._repr_html_()
        check_inert(html)
        assert len(html) < 40_000
        assert HOSTILE not in html


MAPS = AnswerCalibrator, SignalCalibrator
"""What they learn are attributes of a few numbers."""


def test_every_result_has_a_frame(results):
    pandas = pytest.importorskip("pandas")
    for result in results:
        if "not fitted" not in repr(result) and not isinstance(result, MAPS):
            assert isinstance(result.to_frame(), pandas.DataFrame)


def test_frames_of_classes_say_which(data):
    pytest.importorskip("pandas")
    for curve in reliability_by_class(data.logits, data.labels):
        frame = curve.to_frame()
        assert set(frame["class"]) == {curve.number}
        np.testing.assert_array_equal(frame["accuracy"], curve.reliability.accuracy)


def test_numbers_of_an_evaluation_are_those_of_its_json(data):
    evaluation = cal.evaluate(data.logits, data.labels, metrics=["accuracy", "ece", "nll"])
    (table,) = check_inert(evaluation._repr_html_()).tables
    assert len(table) == 1 + len(evaluation)
    for (_, value, interval), number in zip(
        table[1:], evaluation.to_dict()["metrics"].values(), strict=True
    ):
        factor = 100 if value.endswith("%") else 1
        digits = len(re.sub(r".*\.| %", "", value))
        assert value.removesuffix(" %") == f"{factor * number['value']:.{digits}f}"
        low, high = (f"{factor * number[end]:.{digits}f}" for end in ("low", "high"))
        assert interval == f"[{low}, {high}]"


def test_the_diagram_of_an_evaluation_has_its_bins(data):
    evaluation = cal.evaluate(data.logits, data.labels, level=None)
    (chart,) = charts(evaluation._repr_html_())
    said = [text for text in titles(chart) if "mean" in text]
    used = evaluation.bins.count > 0
    assert len(said) == used.sum()
    for text, accuracy in zip(said, evaluation.bins.accuracy[used], strict=True):
        assert f"accuracy {100 * accuracy:.1f}".removesuffix(".0") in text


def test_a_comparison_marks_the_chosen_row(results):
    (comparison,) = [r for r in results if isinstance(r, Comparison)]
    html = comparison._repr_html_()
    assert html.count('class="cal-chosen"') == 1
    assert re.search(r'cal-chosen"><th scope="row">&lt;script', html)
    ece, nll = charts(html)
    assert any("ECE" in text for text in titles(ece))
    assert any("NLL" in text for text in titles(nll))


def test_effects_show_before_and_after(data):
    file = {"logits": data.logits, "labels": data.labels}
    ts = cal.TemperatureScaling().fit(data.logits, data.labels)
    effect = cal.effect(ts, file, metrics=["ece", "nll"])
    (table,) = check_inert(effect._repr_html_()).tables
    ends = [f"[{e['nll'].low:.4f}, {e['nll'].high:.4f}]" for e in effect[:2]]
    before, after = effect.before["nll"].value, effect.after["nll"].value
    assert table[2] == ["NLL", f"{before:.4f}", ends[0], f"{after:.4f}", ends[1]]
    assert f"NLL {before:.4f} → {after:.4f}" in repr(effect)
    plain = cal.effect(ts, file, metrics=["ece", "nll"], level=None)
    assert str(plain).splitlines()[1].split() == ["metric", "before", "after"]
    assert str(plain).splitlines()[3].split() == ["NLL", f"{before:.4f}", f"{after:.4f}"]
    frame = effect.to_frame().set_index("metric")
    assert frame.loc["nll", "before"] == before
    assert frame.loc["nll", "after"] == after


def test_a_calibrator_shows_what_it_learned(data):
    ts = cal.TemperatureScaling().fit(data.logits, data.labels)
    temperature = float(ts.temperature_)
    assert repr(ts) == f"TemperatureScaling(temperature={temperature:.4g}, classes=4)"
    auto = cal.Auto(candidates=["ts"]).fit(data.logits, data.labels)
    assert repr(auto) == f"Auto(chosen_=TemperatureScaling(temperature={temperature:.4g}), " + (
        "candidates=('ts',), classes=4)"
    )
    assert ts.to_frame().to_dict("records") == [
        {"name": "temperature", "index": 0, "value": pytest.approx(temperature)}
    ]
    said = " ".join(check_inert(ts._repr_html_()).text)
    assert "keeps the predicted class" in said
    assert f"{temperature:.4g}" in said


def test_the_chart_of_smart_is_its_temperature(data):
    smart = cal.SMART(steps=5).fit(data.logits, data.labels)
    margin, temperature = smart.curve()
    logits = np.zeros((100, 4))
    logits[:, 1:] = -margin[:, None]
    np.testing.assert_allclose(smart.temperature(logits), temperature, rtol=1e-5)


def test_two_classes_name_their_probability():
    rng = np.random.default_rng(0)
    odds = rng.normal(size=300)
    evaluation = cal.evaluate(odds, (rng.random(300) < 0.5).astype(int), level=None)
    said = " ".join(check_inert(evaluation._repr_html_()).text)
    assert "P(y = 1)" in said
    assert "frequency of y = 1" in said


@pytest.mark.filterwarnings("ignore:accuracy .* is no better")
def test_html_stays_small_with_many_classes_and_groups():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(600, 1000)), rng.integers(1000, size=600)
    groups = np.arange(600) % 300
    evaluation = cal.evaluate(logits, labels, by=groups, metrics=["ece", "accuracy"], level=None)
    html = evaluation._repr_html_()
    assert len(html) < 40_000
    assert "and 280 more" in html
    shares = np.full(1000, 1e-3)
    plain = cal.calibrators.Identity().fit(logits, np.arange(600))
    corrected = PriorCorrection(plain).set_priors(shares, np.roll(shares, 1))
    assert len(repr(corrected)) < 200
    assert len(corrected._repr_html_()) < 15_000


def test_a_nested_module_prints_in_one_line(data):
    ts = cal.TemperatureScaling().fit(data.logits, data.labels)
    assert len(repr(torch.nn.Sequential(torch.nn.Linear(2, 4), ts)).splitlines()) == 4


def test_words_of_a_line_hold_no_control_characters():
    assert one_line(1, "\x1b[31mred\n\nend") == r"int(\x1b[31mred end)"


def test_long_tables_say_how_much_is_left():
    assert "and 5 more" in Table(("n",), [(str(k),) for k in range(25)], longest=20).__html__()
    assert "more" not in Table(("n",), [(str(k),) for k in range(20)], longest=20).__html__()


def test_an_evaluation_without_the_usual_metrics_has_a_line(data):
    evaluation = cal.evaluate(data.logits, data.labels, metrics=["ks"], level=None)
    assert isinstance(evaluation, Evaluation)
    assert "KS error" in repr(evaluation)
    check_inert(evaluation._repr_html_())
