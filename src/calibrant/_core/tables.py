"""Results as frames of pandas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from calibrant._core.optional import needed

if TYPE_CHECKING:
    import pandas as pd


def frame(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows as a frame, with None for missing values; pandas is needed only here."""
    with needed("to_frame needs pandas", "pandas; to_dict() has the same values without it"):
        import pandas as pd
    return pd.DataFrame(list(rows))


def columns_frame(columns: Mapping[str, Any]) -> pd.DataFrame:
    """Return arrays ``(n,)`` by name as a frame; pandas is needed only here."""
    rows = zip(*columns.values(), strict=True)
    return frame(dict(zip(columns, row, strict=True)) for row in rows)
