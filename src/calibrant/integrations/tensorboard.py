"""Calibration in TensorBoard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from calibrant.integrations.logged import PREFIX, _reliability_figure, scalars
from calibrant.metrics.evaluation import Evaluation

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def log_calibration(
    writer: SummaryWriter, evaluation: Evaluation, step: int | None = None, *, prefix: str = PREFIX
) -> None:
    """Write metrics with their intervals, and the reliability diagram, to TensorBoard.

    Parameters
    ----------
    writer : torch.utils.tensorboard.SummaryWriter
        Or a writer with the same methods, such as that of tensorboardX.
    evaluation : Evaluation
        From :func:`calibrant.evaluate`, for instance.
    step : int, optional
        Training step.
    prefix : str
        First part of the names, and title of their section in TensorBoard.

    Examples
    --------
    >>> from calibrant.workflows.evaluate import evaluate
    >>> class Writer:  # stands for SummaryWriter(folder)
    ...     def add_scalar(self, name, value, step):
    ...         print(name, round(value, 3), step)
    ...
    ...     def add_figure(self, name, figure, step):
    ...         print(name)
    >>> result = evaluate([[2.0, 0.0], [1.0, 0.0]], [0, 1], metrics=["ece"], level=None)
    >>> log_calibration(Writer(), result, step=7)
    calibration/n 2.0 7
    calibration/ece 0.425 7
    calibration/reliability
    """
    for name, value in scalars(evaluation, prefix).items():
        writer.add_scalar(name, value, step)
    with _reliability_figure(evaluation) as figure:
        if figure is not None:
            writer.add_figure(f"{prefix}/reliability", figure, step)


def interval_charts(
    evaluation: Evaluation, *, prefix: str = PREFIX
) -> dict[str, dict[str, list[Any]]]:
    """Return a layout of charts that show each metric as a line within its interval.

    Pass it once to ``SummaryWriter.add_custom_scalars``, which replaces any other layout; the
    charts are on the page *Custom scalars*.

    Examples
    --------
    >>> from calibrant.workflows.evaluate import evaluate
    >>> interval_charts(evaluate([[2.0, 0.0], [1.0, 0.0]], [0, 1], metrics=["ece"]))
    {'calibration': {'ece': ['Margin', \
['calibration/ece', 'calibration/ece_low', 'calibration/ece_high']]}}
    """
    names = scalars(evaluation, prefix)
    lines = {
        metric: [f"{prefix}/{metric}{end}" for end in ("", "_low", "_high")]
        for metric in evaluation
    }
    charts: dict[str, list[Any]] = {
        metric: ["Margin", tags] for metric, tags in lines.items() if {*tags} <= {*names}
    }
    return {prefix: charts}
