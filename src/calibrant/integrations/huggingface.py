"""Calibration in the Trainer of Hugging Face: metrics, and a callback that logs figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from calibrant._core.messages import needed
from calibrant.integrations.logged import PREFIX, scalars
from calibrant.metrics.accumulator import Accumulator
from calibrant.metrics.evaluation import Evaluation

with needed("this needs transformers", "'calibrant[llm]'"):
    from transformers import TrainerCallback

if TYPE_CHECKING:
    from transformers import EvalPrediction


class CalibrationMetrics:
    """Metrics for ``Trainer(compute_metrics=CalibrationMetrics())``.

    Models for sequences and for tokens are measured alike: logits are ``(..., classes)``, and
    labels of -100 are ignored. The Trainer puts ``eval_`` before the names, as in
    ``eval_calibration/ece``.

    With ``TrainingArguments(batch_eval_metrics=True)`` batches are added as they come, and the
    Trainer keeps no logits: language models need that. Under several processes the Trainer gathers
    all predictions, without the examples that fill up the last batch.

    Parameters
    ----------
    next_token : bool
        The logits of a token are about the next one, as those of causal language models are: they
        are compared with the labels one place further on.
    accumulator : Accumulator, optional
        Its form is used: ``Accumulator(pairs=True)`` computes all metrics, at 9 bytes per example.
    prefix : str
        First part of the names.

    Attributes
    ----------
    evaluation : Evaluation or None
        The last result.

    Notes
    -----
    If an evaluation in batches is interrupted, make a new object: this one still has its batches.

    Examples
    --------
    ::

        trainer = Trainer(model, arguments, eval_dataset=data, compute_metrics=CalibrationMetrics())
        trainer.evaluate()["eval_calibration/ece"]
    """

    def __init__(
        self,
        *,
        next_token: bool = False,
        accumulator: Accumulator | None = None,
        prefix: str = PREFIX,
    ) -> None:
        self.next_token = next_token
        self.prefix = prefix
        self.evaluation: Evaluation | None = None
        self._stream = (accumulator or Accumulator()).like()

    def __call__(self, prediction: EvalPrediction, compute_result: bool = True) -> dict[str, float]:
        """Add predictions, and return the metrics of all of them with ``compute_result``."""
        self._add(prediction.predictions, prediction.label_ids)
        if not compute_result:
            return {}
        stream, self._stream = self._stream, self._stream.like()
        self.evaluation = stream.compute()
        return scalars(self.evaluation, self.prefix)

    def _add(self, predictions: Any, labels: Any) -> None:
        if isinstance(predictions, list):  # with eval_do_concat_batches=False
            for batch in zip(predictions, labels, strict=True):
                self._add(*batch)
            return
        # models with more outputs than logits have these first
        logits = predictions[0] if isinstance(predictions, tuple) else predictions
        if self.next_token:
            logits, labels = logits[:, :-1], labels[:, 1:]
        self._stream.update(logits, labels)


class CalibrationCallback(TrainerCallback):
    """Log each evaluation of a :class:`CalibrationMetrics` with more than its scalars.

    Parameters
    ----------
    metrics : CalibrationMetrics
        That is also the ``compute_metrics`` of the Trainer.
    log : callable
        Called in the first process with ``(evaluation, step)``, such as
        ``lambda evaluation, step: log_calibration(writer, evaluation, step)``.
    """

    def __init__(
        self, metrics: CalibrationMetrics, log: Callable[[Evaluation, int], object]
    ) -> None:
        self.metrics = metrics
        self.log = log

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the last evaluation."""
        if state.is_world_process_zero and self.metrics.evaluation is not None:
            self.log(self.metrics.evaluation, state.global_step)
