"""Answers and their confidence."""
