import numpy as np
import pytest

from calibrant.llm import evaluate_answers, shaded_text
from calibrant.metrics.ranking import risk_coverage
from tests.support.markup import charts, check_inert


def test_a_written_page_is_whole_and_has_the_text(tmp_path):
    shaded_text(["<b>", " x"], [0.25, 1], title="Why <i>?", note="n").write(tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text("utf-8")
    reader = check_inert(page)
    assert page.startswith("<!doctype html>")
    assert reader.text.count("Why <i>?") == 2  # in the head and above the text
    assert [v for k, v in reader.attributes if k == "title"][:2] == ["25.0 %", "100.0 %"]
    assert reader.tables[0][1:] == [["<b>", "25.0 %"], [" x", "100.0 %"]]


@pytest.mark.parametrize(
    ("probs", "message"),
    [
        ([0.5], "one value for each of 2 tokens"),
        ([-0.1, 0.5], r"np\.exp of them"),
        ([0.1, 1.5], "got 1.5"),
    ],
)
def test_wrong_probabilities_are_refused(probs, message):
    with pytest.raises(ValueError, match=message):
        shaded_text(["a", "b"], probs)


def test_answers_show_risk_and_coverage():
    rng = np.random.default_rng(0)
    confidence = rng.random(3000)
    right = rng.random(3000) < confidence
    evaluation = evaluate_answers(confidence, right, level=None)
    assert evaluation.risk_coverage is not None
    assert np.isnan(evaluation.risk_coverage.low).all()
    evaluation = evaluate_answers(confidence, right, level=0.8)
    curve = evaluation.risk_coverage
    whole = risk_coverage(confidence=confidence, outcome=right, level=0.8)
    assert curve is not None
    assert len(curve.risk) == 200
    for place in (0, 57, -1):  # each point is one of the whole curve
        at = np.flatnonzero(whole.threshold == curve.threshold[place])
        assert whole.risk[at] == curve.risk[place]
        assert whole.high[at] == curve.high[place]
    assert curve.coverage[-1] == 1
    assert curve.risk[-1] == pytest.approx(1 - right.mean())
    risk, reliability = charts(evaluation._repr_html_())
    assert "risk against coverage" in risk.attrib["aria-label"]
    assert "80 % interval at each point" in evaluation._repr_html_()
    assert "Reliability" in reliability.attrib["aria-label"]
