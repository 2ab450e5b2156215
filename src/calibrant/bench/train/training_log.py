"""Figures of each epoch: log files of a training run, and statistics of the gate of FeDLaS."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calibrant._core.atomic_files import replacing
from calibrant.losses.base import summed_over_ranks
from calibrant.losses.fedlas import FeDLaS


class LogWriter:
    """Writes the figures of each epoch to ``log.csv``, and to TensorBoard if wanted."""

    def __init__(self, folder: Path, tensorboard: bool) -> None:
        self.path = folder / "log.csv"
        self.summary = _summary_writer(folder) if tensorboard else None

    def write(self, log: Sequence[Mapping[str, float]]) -> None:
        """Write all epochs to the file, and the last one to TensorBoard."""
        rows = ({name: f"{value:.6g}" for name, value in epoch.items()} for epoch in log)
        write_csv(self.path, list(log[-1]), rows)
        if self.summary is not None:
            for name, value in log[-1].items():
                self.summary.add_scalar(name, value, len(log))
            self.summary.flush()


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> None:
    """Replace a file by rows under a header."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        message = f"TensorBoard is not installed ({error}): pip install tensorboard"
        raise ImportError(message) from error
    return SummaryWriter(str(folder))


class GateStatistics:
    """Signs of the gate for each training example ``(n,)``, and its smoothing, in one epoch."""

    def __init__(self, loss: FeDLaS, examples: int) -> None:
        device = loss.mean_.device
        self.loss = loss
        self.signs = torch.zeros(examples, dtype=torch.int8, device=device)
        self.lowered, self.ratio = (torch.zeros((), device=device) for _ in range(2))

    def update(self, index: Tensor) -> None:
        """Add the last batch, which had the training examples at an index."""
        signs, weights = self.loss.last
        self.signs[index] = signs.to(torch.int8)
        self.lowered += (weights < self.loss.alpha).sum()
        self.ratio += weights.sum() / self.loss.alpha

    def compute(self, before: Tensor | None) -> dict[str, float]:
        """Return fractions of the examples; ``before`` has the signs of the last epoch."""
        for values in (self.signs, self.lowered, self.ratio):
            summed_over_ranks(values)
        count = len(self.signs)
        flips = math.nan if before is None else float((self.signs != before).float().mean())
        return {
            "gate_positive": float((self.signs > 0).float().mean()),
            "gate_flips": flips,
            "smoothing_lowered": float(self.lowered) / count,
            "smoothing_ratio": float(self.ratio) / count,
        }
