"""Calibration in lm-evaluation-harness: metrics of the probabilities of options."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from scipy.special import log_softmax

from calibrant._core.checks import FloatArray
from calibrant.calibrators.base import Calibrator
from calibrant.workflows.evaluate import evaluate

METRICS = ("ece", "nll", "brier")
"""Metrics that tasks get; a lower one is better."""

Item = tuple[int, FloatArray]
"""Number of the right option, and log-likelihoods of all options."""


def with_calibration(
    task: Any, calibrator: Calibrator | None = None, *, metrics: Sequence[str] = METRICS
) -> Any:
    """Add calibration metrics to a task of multiple choice, and return the task.

    Log-likelihoods of the options are turned into probabilities by a softmax, as the harness does
    for its Brier score, and measured over all questions: a calibration error is no mean over
    questions, so it is computed where the harness aggregates.

    Parameters
    ----------
    task : lm_eval.api.task.ConfigurableTask
        Of the output type ``multiple_choice``, from ``lm_eval.tasks.get_task_dict``.
    calibrator : Calibrator, optional
        Fitted on log-probabilities of options, as ``calibrant llm answers read SAMPLES -o
        options.npz`` writes them. The metrics are then those of the calibrated options, named
        ``calibrated_ece`` and so on, with their accuracy, ``calibrated_accuracy``.
    metrics : sequence of str
        Names of metrics, as in :func:`calibrant.evaluate`.

    Examples
    --------
    ::

        from lm_eval import simple_evaluate
        from lm_eval.tasks import get_task_dict

        tasks = [with_calibration(task) for task in get_task_dict(["arc_easy"]).values()]
        simple_evaluate("hf", model_args="pretrained=gpt2", tasks=tasks)["results"]
    """
    if getattr(task, "OUTPUT_TYPE", None) != "multiple_choice":
        raise ValueError(f"task must be of the type multiple_choice, got {task!r:.80}")
    prefix, names = "", list(metrics)
    if calibrator is not None:
        prefix, names = "calibrated_", ["accuracy", *metrics]
    process = task.process_results

    def process_results(doc: Any, results: Sequence[tuple[float, bool]]) -> dict[str, Any]:
        scores = process(doc, results)
        right = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
        if isinstance(right, str):
            right = task.doc_to_choice(doc).index(right)
        if not isinstance(right, int):
            raise ValueError(f"each question must have one right option, got {right!r:.40}")
        item = right, np.array([likelihood for likelihood, _ in results])
        return {**scores, **{f"{prefix}{name}": item for name in names}}

    task.process_results = process_results
    for name in names:
        task.aggregation()[f"{prefix}{name}"] = partial(
            _metric_of, name=name, calibrator=calibrator
        )
        task.higher_is_better()[f"{prefix}{name}"] = name == "accuracy"
    return task


def _metric_of(items: Sequence[Item], *, name: str, calibrator: Calibrator | None = None) -> float:
    """Return a metric of questions: the number of the right option, and log-likelihoods, of each.

    >>> items = [(0, [-0.1, -3.0]), (1, [-2.0, -0.3])]
    >>> round(_metric_of(items, name="brier"), 4)
    0.0266
    """
    labels = np.array([label for label, _ in items])
    width = max(len(scores) for _, scores in items)
    logits = np.full((len(items), width), -np.inf)
    for row, (_, scores) in zip(logits, items, strict=True):
        row[: len(scores)] = log_softmax(scores)
    if calibrator is not None:
        logits = np.asarray(calibrator.transform(logits))
    found = evaluate(logits, labels, estimand="top_label", metrics=(name,), level=None)
    return float(found[name].value)
