"""The gate: accept answers, verify them, or hand them to a person, at a guaranteed error."""
