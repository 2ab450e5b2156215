"""Tokens: documents, token tables, and the calibration of tokens."""
