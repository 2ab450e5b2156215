"""Calibration in Weights & Biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from calibrant.integrations.logged import PREFIX, _reliability_figure, _report_file, scalars
from calibrant.metrics.evaluation import Evaluation

if TYPE_CHECKING:
    import wandb

    from calibrant.show.report.report import Report

BIN_COLUMNS = ("from", "to", "examples", "confidence", "accuracy", "accuracy_low", "accuracy_high")


def log_calibration(
    run: wandb.Run,
    evaluation: Evaluation,
    step: int | None = None,
    *,
    prefix: str = PREFIX,
    report: Report | None = None,
) -> None:
    """Log metrics with their intervals, the bins as a table, and the reliability diagram.

    All of it is one call of ``run.log``, so that it belongs to one step.

    Parameters
    ----------
    run : wandb.Run
        From ``wandb.init``.
    evaluation : Evaluation
        From :func:`calibrant.evaluate`, for instance.
    step : int, optional
        Training step; that of the run by default.
    prefix : str
        First part of the names, and title of their section in the workspace.
    report : Report, optional
        From :func:`calibrant.report`, which is logged as a page of HTML.

    Examples
    --------
    ::

        with wandb.init(project="digits") as run:
            log_calibration(run, cal.evaluate(logits, labels), step=100)
    """
    import wandb

    logged: dict[str, Any] = {**scalars(evaluation, prefix)}
    logged[f"{prefix}/bins"] = wandb.Table(columns=[*BIN_COLUMNS], data=_bin_rows(evaluation))
    if report is not None:
        with _report_file(report) as file:
            logged[f"{prefix}/report"] = wandb.Html(file.read_text("utf-8"))
    with _reliability_figure(evaluation) as figure:
        if figure is not None:
            logged[f"{prefix}/reliability"] = wandb.Image(figure)
        run.log(logged, step=step)


def _bin_rows(evaluation: Evaluation) -> list[list[float]]:
    """Return the rows of the reliability diagram under ``BIN_COLUMNS``; empty bins are left out."""
    curve = evaluation.reliability()
    columns = (curve.edges[:-1], curve.edges[1:], evaluation.bins.count, *curve[1:5])
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [list(row) for row in rows if row[2]]
