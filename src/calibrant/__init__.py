"""Make classifiers and language models say how sure they are, and mean it."""
