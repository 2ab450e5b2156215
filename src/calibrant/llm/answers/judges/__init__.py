"""Judges: models that grade the answers of others, and what their grades are worth."""
