"""Answers from logs of other tools: lm-evaluation-harness, Inspect, and services like OpenAI's."""
