"""Evaluate, fit, apply and compare: the steps behind the commands of the same names."""
