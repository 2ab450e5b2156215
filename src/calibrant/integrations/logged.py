"""What trackers log of an evaluation: scalars, a figure and a report."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrant.metrics.evaluation import Evaluation
from calibrant.show import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from calibrant.show.report.report import Report

PREFIX = "calibration"
"""First part of the names of all that is logged."""


def scalars(evaluation: Evaluation, prefix: str = PREFIX) -> dict[str, float]:
    """Return metrics with the ends of their intervals, the number of examples, and the p-value.

    Undefined values are left out, and so are the metrics of subgroups. Without a prefix the names
    begin with those of the metrics.

    Examples
    --------
    >>> from calibrant.workflows.evaluate import evaluate
    >>> result = evaluate([[2.0, 0.0], [1.0, 0.0]], [0, 1], metrics=["ece", "mce"])
    >>> values = scalars(result)
    >>> [*values]
    ['calibration/n', 'calibration/ece', 'calibration/ece_low', 'calibration/ece_high', \
'calibration/p_value']
    >>> values["calibration/ece"] == result["ece"].value
    True
    """
    values: dict[str, float] = {"n": evaluation.n}
    for name, (value, low, high) in evaluation.metrics.items():
        values |= {name: value, f"{name}_low": low, f"{name}_high": high}
    if evaluation.test is not None:
        values["p_value"] = evaluation.test.p_value
    start = f"{prefix}/" if prefix else ""
    return {start + name: float(x) for name, x in values.items() if math.isfinite(x)}


@contextmanager
def _reliability_figure(evaluation: Evaluation) -> Iterator[Figure | None]:
    """Draw the reliability diagram, and close it afterwards; None without matplotlib."""
    if find_spec("matplotlib") is None:
        yield None
        return
    import matplotlib.pyplot as plt

    figure: Any = figures.reliability_diagram(evaluation).figure
    try:
        yield figure
    finally:
        plt.close(figure)


@contextmanager
def _report_file(report: Report) -> Iterator[Path]:
    """Write a report to a temporary folder, from which a tracker copies it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.html"
        report.save(file)
        yield file
