"""The model card of a saved calibrated model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from calibrant._core.atomic_files import replacing
from calibrant.artifacts import read

if TYPE_CHECKING:
    from calibrant.workflows.effect import Effect

CALIBRATOR = "calibrator"
"""Folder of the calibrator within that of a model."""
CARD = "README.md"
OURS = "<!-- Written by calibrant, and again by the next save: delete this line to keep yours. -->"


def write_card(path: Path, text: str) -> None:
    """Write the card of a model, unless there is one that calibrant did not write."""
    if path.exists() and OURS not in path.read_text("utf-8"):
        warnings.warn(f"{path} was written by someone else and stays as it is", stacklevel=3)
        return
    with replacing(path) as temporary:
        temporary.write_text(text, "utf-8")


class Described(Protocol):
    """The parts of a calibrated model that its card tells about."""

    model: nn.Module
    calibrator: Any
    last_layer: str | None


def model_card(model: Described, folder: Path, figures: Effect | None) -> str:
    """Text of the card of a model that is saved in a folder."""
    about = read(folder / CALIBRATOR)
    inside = type(model.model).__name__
    arguments = [f'"{folder.name}"']
    if not hasattr(model.model, "save_pretrained"):
        arguments.append("model=network")
    if model.calibrator.needs_features:
        arguments.append(f'last_layer="{model.last_layer}"')
    return f"""---
library_name: calibrant
tags:
- calibration
---
{OURS}

# {inside}, calibrated

The logits of a `{inside}` go through the calibrator in the folder `{CALIBRATOR}`, so that their
softmax is a calibrated probability.

{about.description} (method `{about.kind}`, calibrant {about.calibrant}).

```python
from calibrant.deploy import CalibratedModel

model = CalibratedModel.from_pretrained({", ".join(arguments)})
```
{"" if figures is None else _figures(figures)}"""


def _figures(effect: Effect) -> str:
    level = effect.after.level
    interval = "" if level is None else f"{100 * level:g} % interval"
    rows = [("", "before", interval, "after", interval), ("---", *["---:"] * 4)]
    for before, after in zip(effect.before.table(), effect.after.table(), strict=True):
        rows.append((*before, *after[1:]))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"\nMeasured on {effect.after.describe()}:\n\n{table}\n"
