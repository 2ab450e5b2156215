"""Reports: a verdict on the confidences of a model, findings with codes, and what to do."""

from __future__ import annotations

from calibrant.show.monitor import save_monitor_report
from calibrant.show.report.build import report
from calibrant.show.report.findings import CHECKS, Finding
from calibrant.show.report.report import Report
from calibrant.show.report.verdict import Verdict

__all__ = ["CHECKS", "Finding", "Report", "Verdict", "report", "save_monitor_report"]
