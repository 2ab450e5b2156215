"""Reports: a verdict on the confidences of a model, findings with codes, and what to do."""

from __future__ import annotations

from calibrant.reports.build import report
from calibrant.reports.findings import CHECKS, Finding
from calibrant.reports.monitoring import save_monitor_report
from calibrant.reports.report import Report
from calibrant.reports.verdict import Verdict

__all__ = ["CHECKS", "Finding", "Report", "Verdict", "report", "save_monitor_report"]
