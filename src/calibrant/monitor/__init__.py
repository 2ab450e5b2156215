"""Detect calibration drift of a deployed model and estimate when it began."""

from __future__ import annotations

from calibrant.monitor.e_process import TILTS
from calibrant.monitor.monitor_report import MonitorReport
from calibrant.monitor.stream import Monitor
from calibrant.monitor.stream_windows import WindowEstimate

__all__ = ["TILTS", "Monitor", "MonitorReport", "WindowEstimate"]
