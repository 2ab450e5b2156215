"""Log files of a training run."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from calibrant._core.atomic_files import replacing


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
    with replacing(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"TensorBoard is not installed ({error}): pip install tensorboard"
        ) from error
    return SummaryWriter(str(folder))
