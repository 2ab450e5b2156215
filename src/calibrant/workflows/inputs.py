"""Columns that calibrators read beside the logits: features of a last layer, or metadata."""

from __future__ import annotations

from typing import Any

from calibrant._core.checks import Features
from calibrant._core.messages import comma_separated
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.features import Multicalibration
from calibrant.data.columns import full_key
from calibrant.data.dataset import Split


def _check_inputs(calibrator: Calibrator, split: Split) -> None:
    """Raise unless every shard of a split has the columns that a calibrator reads."""
    lacking = [name for name in calibrator.input_columns if name not in split.keys]
    if not lacking:
        return
    keys = comma_separated(full_key(split.name, name) for name in lacking)
    name, has = type(calibrator).__name__, comma_separated(split.keys)
    if lacking == ["features"]:
        columns = "name metadata columns with columns= or --columns, or "
        other = columns if isinstance(calibrator, Multicalibration) else ""
        raise ValueError(
            f"{name} needs features: {split.path} has no {keys} in every shard, only {has}; "
            f"{other}save the inputs of the last layer as {keys}"
        )
    raise ValueError(
        f"{name} reads the metadata columns {comma_separated(calibrator.input_columns)}: "
        f"{split.path} has no {keys} in every shard, only {has}; add what is missing"
    )


def input_names(*calibrators: Calibrator | None) -> list[str]:
    """Return the columns that calibrators read beside the logits, each once."""
    used = [calibrator for calibrator in calibrators if calibrator is not None]
    return list(dict.fromkeys(name for one in used for name in one.input_columns))


def whole_inputs(calibrator: Calibrator, split: Split, rows: Any = None) -> Features | None:
    """Return the ``features=`` of a calibrator for a split, or some of its rows, read whole."""
    arrays = {
        name: split.features if name == "features" else split.read(name)
        for name in calibrator.input_columns
    }
    return calibrator.input_features(arrays, rows)
