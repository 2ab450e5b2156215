"""Answers: asking for them, their confidence, and the chance that they are right."""
