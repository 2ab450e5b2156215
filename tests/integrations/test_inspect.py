"""The scorer in Inspect, which runs where it is installed."""

import math
import sys

import numpy as np
import pytest

import calibrant as cal
from calibrant.llm import AnswerCalibrator, read_log
from calibrant.llm.answers.rows import Source
from tests.support.definitions import slow_ece
from tests.support.recorded_logs import write_inspect


def test_without_inspect_there_is_a_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "inspect_ai.scorer", None)
    monkeypatch.delitem(sys.modules, "calibrant.integrations.inspect", raising=False)
    with pytest.raises(ImportError, match=r"this needs Inspect .*: pip install inspect-ai"):
        import calibrant.integrations.inspect  # noqa: F401


@pytest.fixture
def calibrator():
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.2, 1, 800)
    right = rng.random(800) < confidence**2
    fitted = AnswerCalibrator().fit(confidence, right, source=Source("geometric"))
    fitted.control(confidence, right, max_error=0.3)
    return fitted


@pytest.mark.filterwarnings("ignore")  # of Inspect and what it uses
def test_scores_get_the_chance_to_be_right(tmp_path, calibrator):
    pytest.importorskip("inspect_ai")
    from inspect_ai.log import read_eval_log
    from inspect_ai.scorer import match

    from calibrant.integrations.inspect import with_confidence

    cal.save(calibrator, tmp_path / "map")
    log = read_eval_log(write_inspect(tmp_path, scorer=with_confidence(match(), tmp_path / "map")))
    assert log.status == "success", log.error
    logprobs = [-0.1, -0.9, -0.3, -1.2, -0.05, -0.7]
    confidence = np.exp(logprobs)
    chances = calibrator.predict(list(confidence[:, None]))
    scores = [sample.scores["with_confidence"] for sample in log.samples]
    assert [score.value for score in scores] == ["C", "I", "C", "I", "C", "I"]
    about = [score.metadata for score in scores]
    np.testing.assert_allclose([one["confidence"] for one in about], confidence)
    np.testing.assert_allclose([one["calibrated"] for one in about], chances)
    assert [one["abstains"] for one in about] == calibrator.abstains(chances).tolist()
    found = {name: one.value for name, one in log.results.scores[0].metrics.items()}
    assert found["ece"] == pytest.approx(slow_ece(chances, [1, 0, 1, 0, 1, 0]))
    assert found["accuracy"] == 0.5


@pytest.mark.filterwarnings("ignore")
def test_what_inspect_writes_is_read(tmp_path):
    pytest.importorskip("inspect_ai")
    pytest.importorskip("zstandard")
    for suffix in ("eval", "json"):
        log = read_log(write_inspect(tmp_path / suffix, suffix))
        assert log.answers.confidences()[0][0] == pytest.approx(math.exp(-0.1))
        assert log.answers.grades().tolist() == [True, False] * 3
