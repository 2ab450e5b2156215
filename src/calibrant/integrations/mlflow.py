"""Calibration in MLflow: in runs, in ``mlflow.models.evaluate`` and in ``mlflow.genai.evaluate``.

The two systems of evaluation do not mix: the first takes metrics (:func:`calibration_metric`), the
second scorers (:func:`calibration_scorer`). Needs MLflow 3: ``pip install 'calibrant[mlflow]'``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrant._core.class_names import ClassNumbers, as_array
from calibrant._core.messages import needed
from calibrant.integrations.logged import PREFIX, _reliability_figure, _report_file, scalars
from calibrant.llm.answers.questions import exact_match
from calibrant.metrics.accumulator import Accumulator
from calibrant.metrics.evaluation import Evaluation
from calibrant.workflows.evaluate_answers import ANSWER_METRICS, evaluate_answers

if TYPE_CHECKING:
    from mlflow.genai.scorers import Scorer
    from mlflow.models import EvaluationMetric

    from calibrant.show.report.report import Report

_DIGITS = 12
"""Confidences are recovered up to this many decimals."""


def log_calibration(
    evaluation: Evaluation,
    step: int | None = None,
    *,
    prefix: str = PREFIX,
    report: Report | None = None,
) -> None:
    """Log an evaluation to the active run of MLflow, or to a new one.

    Metrics with their intervals go to the metrics of the run, the evaluation as JSON and the
    reliability diagram to its artifacts, where those of the last call are kept.

    Parameters
    ----------
    evaluation : Evaluation
        From :func:`calibrant.evaluate`, for instance.
    step : int, optional
        Training step.
    prefix : str
        First part of the names of the metrics, and folder of the artifacts.
    report : Report, optional
        From :func:`calibrant.report`, which becomes the artifact ``report.html``.

    Examples
    --------
    ::

        with mlflow.start_run():
            log_calibration(cal.evaluate(logits, labels))
    """
    mlflow = _mlflow()
    mlflow.log_metrics(scalars(evaluation, prefix), step=step)
    mlflow.log_dict(evaluation.to_dict(), f"{prefix}/evaluation.json")
    with _reliability_figure(evaluation) as figure:
        if figure is not None:
            mlflow.log_figure(figure, f"{prefix}/reliability.png")
    if report is not None:
        with _report_file(report) as file:
            mlflow.log_artifact(str(file), prefix)


def calibration_metric(
    *,
    classes: Sequence[str] | None = None,
    accumulator: Accumulator | None = None,
    prefix: str = PREFIX,
) -> EvaluationMetric:
    """Return a metric for ``mlflow.models.evaluate(extra_metrics=[calibration_metric()])``.

    One metric computes all values, from ``calibration/ece`` to ``calibration/p_value``.

    The predictions must be probabilities: of class 1, or a list with one for each class. MLflow
    hands predicted classes to the metrics of ``model_type="classifier"``; then the probabilities
    are taken from the column ``probs`` of the data, or from the one that
    ``evaluator_config={"col_mapping": {"probs": NAME}}`` names. A column ``sample_weight`` is used
    if there is one.

    Parameters
    ----------
    classes : sequence of str, optional
        Names of the classes in the order of the probabilities, if targets are names.
    accumulator : Accumulator, optional
        Its form is used; all metrics by default.
    prefix : str
        Name of the metric, and first part of the names of its values.

    Examples
    --------
    ::

        result = mlflow.models.evaluate(
            lambda inputs: classifier.predict_proba(inputs)[:, 1],
            data,
            targets="label",
            extra_metrics=[calibration_metric()],
        )
        result.metrics["calibration/ece"]
    """
    form = accumulator or Accumulator(pairs=True)

    def calibration(
        predictions: Any, targets: Any, probs: Any = None, sample_weight: Any = None
    ) -> Any:
        from mlflow.metrics import MetricValue

        claimed = as_array(predictions if probs is None else probs)
        if claimed.dtype.kind != "f":
            raise ValueError(
                f"predictions must be probabilities, got {claimed.dtype.name}, as of predicted "
                "classes: let the model return probabilities and leave out model_type, or name a "
                'column of them by evaluator_config={"col_mapping": {"probs": NAME}}'
            )
        labels = as_array(targets)
        if classes is not None:
            labels = ClassNumbers([str(name) for name in classes])(labels)
        weight = None if sample_weight is None else np.asarray(sample_weight)
        stream = form.like().update(labels=labels, probs=claimed, sample_weight=weight)
        return MetricValue(aggregate_results=scalars(stream.compute(), prefix=""))

    _mlflow()
    from mlflow.metrics import make_metric

    return make_metric(eval_fn=calibration, greater_is_better=False, name=prefix)


def calibration_scorer(
    *,
    confidence: Callable[[Any], float] | None = None,
    correct: Callable[[Any, Any], bool] | None = None,
    level: float | None = 0.9,
    prefix: str = PREFIX,
) -> Scorer:
    """Return a scorer of stated confidences for ``mlflow.genai.evaluate(scorers=[...])``.

    Each answer gets three assessments: ``confidence``, ``correct``, and ``calibration``, which is
    1 - confidence if the answer is right and -confidence if it is wrong: below 0 on average for a
    model that is over-confident. The run gets the metrics of
    :func:`calibrant.llm.evaluate_answers` with their intervals, such as ``calibration/ece``.

    Parameters
    ----------
    confidence : callable, optional
        Confidence in [0, 1] from the outputs; ``outputs["confidence"]`` by default.
    correct : callable, optional
        True if an answer is right, from outputs and expectations. By default ``outputs["answer"]``
        is compared with ``expectations["expected_response"]``, a text or a list of texts, without
        regard to case, punctuation and articles.
    level : float, optional
        Coverage of the intervals; None for none.
    prefix : str
        Name of the scorer, and first part of the names of its metrics.

    Examples
    --------
    ::

        data = [
            {
                "inputs": {"question": "What is the capital of Peru?"},
                "outputs": {"answer": "Lima", "confidence": 0.9},
                "expectations": {"expected_response": "Lima"},
            }
        ]
        result = mlflow.genai.evaluate(data=data, scorers=[calibration_scorer()])
        result.metrics["calibration/ece"]
    """
    _mlflow()
    from mlflow.entities import Feedback
    from mlflow.genai.scorers import scorer

    confidence_of, is_correct = confidence or _stated_confidence, correct or _matches

    def calibration(outputs: Any, expectations: Any) -> Any:
        claimed = float(confidence_of(outputs))
        if not 0 <= claimed <= 1:
            raise ValueError(
                f"the confidence must be in [0, 1], got {claimed:g}: pass confidence= to "
                "calibration_scorer, a function that scales it"
            )
        right = bool(is_correct(outputs, expectations))
        residual = 1 - claimed if right else -claimed  # -0.0 where nothing was claimed
        values = {"confidence": claimed, "correct": right, prefix: residual}
        return [Feedback(name=name, value=value) for name, value in values.items()]

    return scorer(calibration, name=prefix, aggregations=["mean", *_aggregations(level)])


def _aggregations(level: float | None) -> list[Callable[[list[float]], float]]:
    """Return a function for each metric and each end of its interval, as MLflow wants them.

    MLflow hands them one number for each answer, its residual, from which both the confidence
    and the outcome follow.
    """

    @lru_cache(maxsize=1)  # all functions are called with the same numbers, one after the other
    def computed(residuals: tuple[float, ...]) -> dict[str, float]:
        return scalars(evaluate_answers(*_pairs_from_residuals(residuals), level=level), prefix="")

    def named(name: str) -> Callable[[list[float]], float]:
        def aggregation(residuals: list[float]) -> float:
            return computed(tuple(residuals)).get(name, np.nan)

        aggregation.__name__ = name
        return aggregation

    ends = ("", "_low", "_high") if level else ("",)
    return [named(metric + end) for metric in ANSWER_METRICS for end in ends]


def _pairs_from_residuals(residuals: Sequence[float]) -> tuple[Any, Any]:
    """Return confidences and outcomes from ``outcome - confidence``.

    A residual of 0 is taken for a certain answer that was right, and -0.0 for one of confidence 0
    that was wrong.

    >>> _pairs_from_residuals([0.25, -0.75, 0.0, -0.0])
    (array([0.75, 0.75, 1.  , 0.  ]), array([ True, False,  True, False]))
    """
    values = np.asarray(residuals, dtype=np.float64)
    outcome = ~np.signbit(values)
    return np.round(np.where(outcome, 1 - values, -values), _DIGITS), outcome


def _mlflow() -> Any:
    with needed("this needs MLflow", "'calibrant[mlflow]'"):
        import mlflow
    return mlflow


def _stated_confidence(outputs: Any) -> float:
    if not isinstance(outputs, Mapping) or "confidence" not in outputs:
        raise _missing("outputs", "confidence", outputs, "confidence")
    value: float = outputs["confidence"]
    return value


def _matches(outputs: Any, expectations: Any) -> bool:
    if not isinstance(outputs, Mapping) or "answer" not in outputs:
        raise _missing("outputs", "answer", outputs, "correct")
    if not isinstance(expectations, Mapping) or "expected_response" not in expectations:
        raise _missing("expectations", "expected_response", expectations, "correct")
    expected = expectations["expected_response"]
    return exact_match(outputs["answer"], [expected] if isinstance(expected, str) else expected)


def _missing(name: str, key: str, got: Any, parameter: str) -> TypeError:
    return TypeError(
        f"{name} must be a dictionary with {key!r}, got {type(got).__name__}: pass {parameter}= to "
        "calibration_scorer, a function that finds it"
    )
