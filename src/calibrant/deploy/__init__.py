"""Calibrated models in production."""
