"""Thresholds of answers, made by hand."""

from calibrant.decide import ShownLimit, Threshold


def error_threshold(threshold, coverage, error, bound, n, max_error, certainty):
    limit = ShownLimit("error", max_error, error, bound, round(coverage * n))
    return Threshold(threshold, coverage, n, certainty, (limit,))
