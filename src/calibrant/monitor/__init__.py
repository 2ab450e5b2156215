"""Watch a deployed model: whether its confidence is still what happens, or since when not."""

from __future__ import annotations

from calibrant.monitor.evidence import TILTS
from calibrant.monitor.report import MonitorReport
from calibrant.monitor.stream import Monitor

__all__ = ["TILTS", "Monitor", "MonitorReport"]
