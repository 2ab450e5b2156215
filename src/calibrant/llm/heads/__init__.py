"""Heads that set the temperature of each token."""
