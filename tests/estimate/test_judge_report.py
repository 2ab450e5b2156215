"""The report of judged answers."""

import numpy as np
import pytest

from calibrant.estimate.judge_report import JudgedAnswers, judge_report
from calibrant.estimate.judges import agreement, length_bias, position_bias
from calibrant.estimate.success_rate import rate_difference, success_rate
from calibrant.show import box


@pytest.fixture(scope="module")
def judged():
    """Two systems that answer the same 200 questions, and a judge on a scale from 1 to 5."""
    rng = np.random.default_rng(2)
    right = rng.random((2, 200)) < [[0.5], [0.8]]
    scores = np.clip(np.round(3 + 2 * (right - 0.5) + rng.normal(size=right.shape)), 1, 5)
    human = np.where(np.arange(200) < 60, right, np.nan)
    names = np.repeat(["old", "<new>"], 200)
    return JudgedAnswers(
        scores.reshape(-1),
        human.reshape(-1),
        (1, 5),
        questions=np.tile(np.arange(200), 2).astype(str),
        systems=names,
        lengths=rng.integers(1, 90, size=400).astype(float),
    )


def test_everything_is_that_of_its_function(judged):
    position = position_bias(["a", "b"], ["b", "b"])
    report = judge_report(judged, position=position, level=0.8)
    parts = [judged.part(judged.systems == name) for name in ("old", "<new>")]
    rates = [success_rate(p.judge, p.human, level=0.8) for p in parts]
    assert [*report.rates] == ["old", "<new>"]
    for found, wanted in zip(report.rates.values(), rates, strict=True):
        np.testing.assert_allclose(found.rate, wanted.rate)
    same = (parts[0].questions, parts[1].questions)
    assert report.differences == {"<new>": pytest.approx(rate_difference(*rates, questions=same))}
    known = judged.known
    scores, labels = judged.judge[known], judged.human[known]
    assert report.agreement == agreement(scores, labels, cut=3, level=0.8)
    length = length_bias((scores - 1) / 4, labels, judged.lengths[known], level=0.8)
    assert report.length == length
    assert report.position is position
    assert judge_report(judged, cut=4).agreement == agreement(scores, labels, cut=4)


def test_its_forms_have_the_same_figures(judged):
    report = judge_report(judged)
    (table,) = box(report).tables()
    rows = {name: (value, interval) for name, value, interval in table.rows}
    rate = report.rates["old"].rate
    shown = f"{100 * rate.value:.1f} %", f"[{100 * rate.low:.1f}, {100 * rate.high:.1f}]"
    assert rows["old: success rate"] == shown
    assert "<new> minus old" in rows
    html = report._repr_html_()
    assert "&lt;new&gt; minus old" in html
    assert shown[1] in html
    narrow = judge_report(judged, width=0.05)
    content = narrow.to_dict()
    assert content["rates"]["old"]["rate"]["value"] == rate.value
    needed = report.rates["old"].labels_needed(0.05)
    assert content["rates"]["old"]["labels_needed"] == needed
    assert content["position_bias"] is None
    said = "\n".join(box(narrow).remarks)
    assert "old: 60 of 200 answers have a human label; with the judge they are worth" in said
    assert f"about {needed - 60} more labels" in said if needed else "more answers" in said
    assert "needs no more labels" in "\n".join(box(judge_report(judged, width=0.4)).remarks)
    assert "needs more answers: about" in "\n".join(box(judge_report(judged, width=0.01)).remarks)


def test_weights_of_labels_reach_the_agreement(judged):
    chance = np.where(judged.judge >= 3, 0.2, 0.8)
    known = judged.known
    found = judge_report(judged._replace(probability=chance)).agreement
    wanted = agreement(
        judged.judge[known], judged.human[known], cut=3, sample_weight=1 / chance[known]
    )
    assert found == wanted
    one = judged.part(judged.systems == "old")._replace(systems=None)
    strata = np.where(np.arange(200) < 100, "many", "few")
    strata[190:], human = "many", one.human.copy()
    human[100:110] = 1
    found = judge_report(one._replace(strata=strata, human=human)).agreement
    # 60 of 110 in the one part, 10 of 90 in the other have labels
    weight = np.repeat([110 / 60, 90 / 10], [60, 10])
    assert found is not None
    assert found.raw.value == pytest.approx(
        np.average((one.judge >= 3)[~np.isnan(human)] == human[~np.isnan(human)], weights=weight)
    )


def test_a_system_without_labels_is_named(judged):
    none = np.where(judged.systems == "old", judged.human, np.nan)
    with pytest.raises(ValueError, match="system <new>: two answers or more must have a human"):
        judge_report(judged._replace(human=none))
    with pytest.raises(ValueError, match="none of 400 answers has a human label: label some"):
        judge_report(judged._replace(human=np.full(400, np.nan)))
