"""Subgroups where confidence is wrong: found, with intervals that account for the search."""

from __future__ import annotations

from calibrant.slices.find import find_slices
from calibrant.slices.groups import Group, Groups, measure_groups
from calibrant.slices.result import Off, Slice, Slices

__all__ = ["Group", "Groups", "Off", "Slice", "Slices", "find_slices", "measure_groups"]
