"""Measuring calibration: pairs, bins, scores, intervals, streams."""
