import logging
import re
import warnings
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import pytest

import calibrant as cal
from calibrant.integrations.mlflow import (
    _pairs_from_residuals,
    calibration_metric,
    calibration_scorer,
    log_calibration,
)
from calibrant.llm import evaluate_answers
from tests.support.evaluations import FEW, check_scalars, expected_scalars, predictions

pytestmark = [
    # mlflow 3.17 with pandas 3.1
    pytest.mark.filterwarnings("ignore:Starting with pandas version 4.0 all arguments of all"),
    pytest.mark.filterwarnings("ignore:The inplace keyword in DataFrame.drop is deprecated"),
    pytest.mark.filterwarnings("ignore:Hint. Inferred schema contains integer column"),
]


@contextmanager
def plain(enable_tracing):
    yield


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory):
    """MLflow with its runs in a folder, which needs no server and no database."""
    pytest.importorskip("mlflow")
    pytest.importorskip("sklearn")
    pytest.importorskip("pandas")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setenv("MLFLOW_GENAI_EVAL_ENABLE_SCORER_TRACING", "false")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # while it is imported
            import mlflow
            import mlflow.genai
            import mlflow.models.evaluation.evaluators.classifier
        # to trace models of torch, it would import Lightning
        patch.setattr("mlflow.models.evaluation.base.configure_autologging_for_evaluation", plain)
        before = mlflow.get_tracking_uri()
        mlflow.set_tracking_uri((tmp_path_factory.mktemp("mlflow") / "runs").as_uri())
        logging.getLogger("mlflow").setLevel(logging.ERROR)
        yield mlflow
        mlflow.set_tracking_uri(before)


def small_metric(**options):
    return calibration_metric(accumulator=cal.Accumulator(pairs=True, metrics=FEW), **options)


class Page:
    def save(self, path):
        path.write_text("<p>all is well</p>", encoding="utf-8")


def test_a_run_has_metrics_json_figure_and_report(mlflow, rng):
    logits, labels = predictions(rng)
    result = cal.evaluate(logits, labels, metrics=FEW)
    with mlflow.start_run() as run:
        log_calibration(result, step=3, report=cast(Any, Page()))
    client, number = mlflow.MlflowClient(), run.info.run_id
    check_scalars(client.get_run(number).data.metrics, logits, labels, metrics=FEW)
    assert client.get_metric_history(number, "calibration/ece")[0].step == 3
    paths = {file.path for file in client.list_artifacts(number, "calibration")}
    names = ("evaluation.json", "reliability.png", "report.html")
    assert paths == {f"calibration/{name}" for name in names}
    saved = mlflow.artifacts.load_dict(f"runs:/{number}/calibration/evaluation.json")
    assert saved == result.to_dict()
    page = mlflow.artifacts.load_text(f"runs:/{number}/calibration/report.html")
    assert "all is well" in page


def two_classes(rng, n=30):
    import pandas as pd

    probs = rng.random(n)
    labels = (rng.random(n) < probs).astype(int)
    columns = {"x": probs, "chance": probs, "class": (probs > 0.5).astype(int), "label": labels}
    result = cal.evaluate(probs=probs, labels=labels, metrics=FEW)
    return pd.DataFrame(columns), expected_scalars(result, "calibration/")


def check_metrics(result, wanted):
    mine = {name: x for name, x in result.metrics.items() if name.startswith("calibration/")}
    assert mine == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_two_classes_by_a_model_and_by_a_column(mlflow, rng):
    data, wanted = two_classes(rng)
    model = mlflow.models.evaluate(
        lambda inputs: inputs["x"].to_numpy(),
        data[["x", "label"]],
        targets="label",
        extra_metrics=[small_metric()],
    )
    check_metrics(model, wanted)
    column = mlflow.models.evaluate(
        data=data, targets="label", predictions="chance", extra_metrics=[small_metric()]
    )
    check_metrics(column, wanted)


def test_of_a_classifier_the_probabilities_are_a_column(mlflow, rng):
    data, wanted = two_classes(rng)
    options = {"data": data, "targets": "label", "predictions": "class"}
    options |= {"model_type": "classifier", "extra_metrics": [small_metric()]}
    mapping = {"col_mapping": {"probs": "chance"}}
    result = mlflow.models.evaluate(**options, evaluator_config=mapping)
    check_metrics(result, wanted)
    assert result.metrics["accuracy_score"] == wanted["calibration/accuracy"]
    message = "predictions must be probabilities, got int64"
    with pytest.raises(mlflow.MlflowException, match=message):
        mlflow.models.evaluate(**options)


def test_several_classes_by_name_with_weights(mlflow, rng):
    import pandas as pd

    probs, names = rng.dirichlet([1, 1, 1], 30), ["cat", "<b>dog</b>", "eel"]
    numbers, weight = rng.integers(3, size=30), rng.random(30)
    labels = np.array(names)[numbers]
    data = pd.DataFrame({"probs": list(probs), "label": labels, "sample_weight": weight})
    result = mlflow.models.evaluate(
        data=data,
        targets="label",
        predictions="probs",
        extra_metrics=[small_metric(classes=names)],
    )
    columns = {"probs": probs, "labels": numbers, "sample_weight": weight}
    check_metrics(result, expected_scalars(cal.evaluate(**columns, metrics=FEW), "calibration/"))


ANSWERS = [
    ("Lima", 0.3, 1),
    ("lima.", 1.0, 1),
    ("Rome", 0.9, 0),
    ("Rome", 0.0, 0),
    ("Lima", 0.7, 1),
]


def test_stated_confidences_are_scored_by_row_and_together(mlflow):
    data = [
        {
            "inputs": {"question": f"The capital of Peru, {i}?"},
            "outputs": {"answer": answer, "confidence": confidence},
            "expectations": {"expected_response": ["Lima", "City of Kings"]},
        }
        for i, (answer, confidence, _) in enumerate(ANSWERS)
    ]
    result = mlflow.genai.evaluate(data=data, scorers=[calibration_scorer(level=None)])
    confidence, correct = zip(*((c, y) for _, c, y in ANSWERS), strict=True)
    whole = evaluate_answers(confidence, correct, level=None)
    for name, estimate in whole.items():
        assert result.metrics[f"calibration/{name}"] == pytest.approx(estimate.value, rel=1e-9)
    assert result.metrics["calibration/mean"] == pytest.approx(
        np.subtract(correct, confidence).mean()
    )
    table = result.result_df
    rows = zip(
        table["confidence/value"], table["correct/value"], table["calibration/value"], strict=True
    )
    assert sorted(rows) == sorted((c, bool(y), y - c) for _, c, y in ANSWERS)


@pytest.mark.parametrize(
    ("outputs", "expectations", "message"),
    [
        ("Lima", {}, "outputs must be a dictionary with 'confidence', got str"),
        ({"confidence": 85}, {}, "confidence must be in [0, 1], got 85"),
        ({"confidence": float("nan")}, {}, "confidence must be in [0, 1], got nan"),
        ({"confidence": 0.5}, {}, "outputs must be a dictionary with 'answer'"),
        ({"confidence": 0.5, "answer": "a"}, {}, "dictionary with 'expected_response', got dict"),
    ],
)
def test_answers_without_confidence_or_reference_are_refused(
    mlflow, outputs, expectations, message
):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        calibration_scorer()(outputs=outputs, expectations=expectations)


def test_own_functions_find_confidence_and_outcome(mlflow):
    scorer = calibration_scorer(
        confidence=lambda outputs: outputs["percent"] / 100,
        correct=lambda outputs, expectations: outputs["choice"] == expectations["label"],
    )
    feedback = scorer(outputs={"percent": 85, "choice": "A"}, expectations={"label": "B"})
    assert {one.name: one.value for one in feedback} == {
        "confidence": 0.85,
        "correct": False,
        "calibration": -0.85,
    }


def test_confidences_are_recovered_exactly():
    confidence = np.concatenate([np.arange(101) / 100, np.arange(16) / 15]).round(12)
    for right in (True, False):
        claimed, outcome = _pairs_from_residuals([1 - c if right else -c for c in confidence])
        np.testing.assert_array_equal(claimed, confidence)
        assert (outcome == right).all()
